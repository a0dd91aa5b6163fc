"""``Van``: the interface of transports between named nodes.

A van knows no ranks, keys, rounds or retries and never looks into a frame. What it promises is
little on purpose: the layer above numbers its messages, acknowledges them and sends them again.
All methods but :meth:`Van.wake` are called from one thread, the van's owner. Read next:
``testing/inproc.py`` (the same contract without sockets), then ``van/zmq/van.py``.

What every van promises
    * **Connections.** ``connect(peer, address)`` opens a connection to the listener at the
      address and keeps trying, also after a loss, until ``disconnect(peer)``. The connecting
      end chooses the peer's name; the accepting end knows the connection by the ``uid`` of the
      van that opened it. A connection carries messages both ways. The names that a van gives to
      ``connect`` and the uids of those who connect to it share one name space, so two nodes
      open one connection between them, never one from each side.
    * **Events.** Both ends see ``Connected(peer)``, then messages in the order of sending, then
      ``Disconnected(peer)``; nothing of a connection comes outside this bracket. Messages that
      take a pipe (``offer_pipe``) keep their order among themselves only, and large ones keep none
      where they are ``spread``. Messages that had
      arrived when a connection ended come before its ``Disconnected``. An owner that calls
      ``disconnect`` or ``close`` hears nothing more of that connection; the other end does.
    * **One connection a uid.** When a uid connects again while its old connection still seems
      alive (a node was restarted, its old machine froze), the accepting end sees
      ``Disconnected`` and then ``Connected``; the old connection is never heard again.
    * **Loss.** A message may be lost with its connection, and the sender is not told which.
      What was sent on a connection that is reported as lost will never be sent later: its
      buffers are released. Messages sent to a peer of ``connect`` before the connection is
      there wait for it; those to an unknown name, or to an accepted peer that is gone, are
      dropped.
    * **Strangers.** A van with a key demands it from everybody who connects, and says nothing to
      a listener that has not proved that it has the key and is the van whose uid ``connect`` was
      given as the peer's name; a van without one stays on this machine (over TCP: loopback
      addresses only). ``Denied`` and ``TurnedAway`` tell the two ends of a connection that did
      not come about.
    * **Memory.** A van may read a frame's buffer long after ``send`` returned (a large frame is
      sent without a copy), so the caller leaves it alone until the receiver has acknowledged
      the message or the connection is reported as lost. Received frames belong to the
      receiver and live as long as it refers to them; some can only be read.
    * **Pressure.** ``send`` never blocks and a van never refuses to receive: how much may be
      under way is bounded by the credits of the layer above.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from pslite.errors import UsageError

Buffer: TypeAlias = bytes | bytearray | memoryview
"""One frame to send: C-contiguous memory. NumPy arrays are passed as ``array.data``."""

MAX_UID_BYTES = 200
MAX_FRAMES = 65_536
"""The most frames of one message."""
TOTAL_PER_FRAME = 16
"""All frames of a message together may have this many times the largest one's bytes."""


@dataclass(frozen=True, slots=True)
class Received:
    """One message. ``frames`` are views of bytes (format ``B``) or ``bytes``."""

    peer: str
    frames: list[memoryview | bytes]


@dataclass(frozen=True, slots=True)
class Connected:
    """A connection with ``peer`` exists; messages can be sent to it."""

    peer: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection with ``peer`` is gone; ``reason`` is for the reader of a log."""

    peer: str
    reason: str
    moved_bytes: int = field(default=0, compare=False)
    """What it brought in both directions, as far as that is known: at least so much."""


@dataclass(frozen=True, slots=True)
class Denied:
    """The listener at the address of ``peer`` rejects this van.

    Comes once a ``connect``, before any ``Connected``, and only when waiting longer would be no
    use: another key, another mechanism, or an address that may not be connected to. ``reason``
    is a sentence for the user. The van does not try again.
    """

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class TurnedAway:
    """Connections of strangers were rejected, ``count`` since the last event.

    No more than one such event for each address and reason in a while.
    """

    address: str
    """Where they came from; empty where that is not known."""
    reason: str
    count: int


VanEvent: TypeAlias = Received | Connected | Disconnected | Denied | TurnedAway


class PipeTicket(NamedTuple):
    """The data that a peer needs to open a pipe; the process id is in the roster."""

    fd: int
    inode: int
    """The kernel's number of the pipe: no two are alike while both exist."""


class Van(abc.ABC):
    """A transport of frames between this node and its peers.

    The module's text has the contract.
    """

    uid: str
    """The name under which accepting ends know this node; unique in a job."""

    @abc.abstractmethod
    def bind(self, host: str, port: int, *, listen_fd: int | None = None) -> int:
        """Listen at ``host`` (a name or an address) and return the port.

        Port 0 takes a free one. Every interface is opened by ``"0.0.0.0"`` or ``"::"`` only,
        never by ``"*"``. ``listen_fd`` is a TCP socket that listens already (inherited from the
        launcher); the van owns it from then on. Raises :class:`ConfigError` that names host
        and port when they are busy, not of this machine or not resolvable.
        """

    @abc.abstractmethod
    def connect(self, peer: str, address: str) -> None:
        """Open a connection to ``address`` (``tcp://host:port``), called ``peer``.

        Returns at once; the peer need not listen yet. A peer that is connected already is
        disconnected first. Raises :class:`ConfigError` for an address of another form.
        """

    @abc.abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget ``peer``; no event follows. Unknown names are ignored.

        A connection of ``connect`` is closed; what was sent after its ``Connected`` still
        leaves. One that was accepted is no longer heard or sent to until its other end opens
        a new one.
        """

    @abc.abstractmethod
    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Send one message. Never blocks, never raises for a gone peer.

        The buffers may be read later: see *Memory* above. Raises :class:`UsageError` for what
        can never be sent: no frame, nothing but one empty frame (vans use it among
        themselves), memory with gaps, a frame over the van's limit.
        """

    @abc.abstractmethod
    def poll(self, timeout_s: float | None) -> list[VanEvent]:
        """Wait until something arrives, :meth:`wake` is called or time is up.

        0 never waits and ``None`` waits for ever. The list may be empty, and holds a bounded
        number of messages when many are there.
        """

    def next_due(self) -> float:
        """Return when to call ``poll`` even if no event arrives.

        Only vans that hold messages back under a clock of their caller have such a time.
        """
        return math.inf

    def trouble(self, peer: str) -> str:
        """Return the local problem that prevents a connection to ``peer``, if any."""
        return ""

    def in_transit(self, peer: str) -> int:
        """Return the bytes that were sent to ``peer`` and have not arrived yet.

        An estimate; they are always the last that were sent. 0 where a van does not know.
        """
        return 0

    def is_answered(self, peer: str) -> bool:
        """Return whether a lost connection with ``peer`` may return soon.

        That is so where bytes arrive on one that is being made, which a dead machine, a dead
        process and a stopped one do not send. Who accepts does not know yet who it is then. False
        where a van does not know.
        """
        return False

    def spread(self, peer: str, connections: int) -> None:  # noqa: B027 - vans may ignore it
        """Spread large messages to and from ``peer`` over this many ``connections``.

        For networks that give one flow less than all. Never fewer than before, and fewer than
        asked, or no further one, where they cannot be had. Such messages may overtake each other
        and others, and what was sent by one flow may still arrive when another one is lost.
        """

    def offer_pipe(self, peer: str) -> PipeTicket | None:
        """Make a pipe by which ``peer``, a connected process here, may send.

        A shortcut for small messages; ``None`` where a van has none. It ends with the connection.
        """
        return None

    def take_pipe(self, peer: str, pid: int, ticket: PipeTicket) -> bool:
        """Send small messages by the pipe that ``peer`` offers; return whether it works."""
        return False

    @abc.abstractmethod
    def wake(self) -> None:
        """Make the current or the next :meth:`poll` return. From any thread, at any time."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close all connections and free everything; the peers see ``Disconnected``.

        What was sent over living connections still leaves, within a short bounded time. Twice
        is harmless; afterwards ``send`` drops and ``poll`` returns nothing.
        """


def check_uid(uid: str) -> str:
    """Return ``uid`` if a van can have this name, else raise :class:`UsageError`."""
    size = len(uid.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= MAX_UID_BYTES or "\0" in uid or not uid.isprintable():
        raise UsageError(
            f"a van's uid must be 1 to {MAX_UID_BYTES} bytes of printable text, got {uid!r}"
        )
    return uid


def as_buffers(frames: Sequence[Buffer]) -> list[bytes | memoryview]:
    """Return a message's frames as ``bytes`` or views; check what can be sent."""
    buffers = [frame if type(frame) is bytes else _as_view(frame) for frame in frames]
    if len(buffers) < 2 and not (buffers and size_of(buffers[0])):
        raise UsageError("a message must not be a single empty frame")
    return buffers


def size_of(buffer: bytes | memoryview) -> int:
    """Return the bytes of one frame."""
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)


def _as_view(frame: Buffer) -> memoryview:
    view = memoryview(frame)
    if not view.c_contiguous:
        raise UsageError(
            "a frame must be C-contiguous memory: send numpy.ascontiguousarray(array).data"
        )
    return view
