"""``Van``: the interface of transports between named nodes.

A van does not know ranks, keys, rounds or retries, and never looks into a frame. It promises little
on purpose: the layer above numbers its messages, acknowledges them and resends them. All methods
except :meth:`Van.wake` are called from one thread, the van's owner. Read next:
``testing/inproc.py`` (the same contract without sockets), then ``van/zmq/van.py``.

What every van promises

    * **Connections.** ``connect(peer, address)`` opens a connection to the listener at the
      address and keeps trying, even after a loss, until ``disconnect(peer)``. The connecting
      end chooses the peer's name; the accepting end knows the connection by the ``uid`` of the
      van that opened it. A connection carries messages both ways. The names that a van gives to
      ``connect`` and the uids of the vans that connect to it share one name space. So two nodes
      share one connection that one of them opens, never one opened from each side.
    * **Events.** Both ends see ``Connected(peer)``, then messages in the order of sending, then
      ``Disconnected(peer)``; no event of a connection comes before or after these. Messages
      through a pipe (``offer_pipe``) keep their order only among themselves, and large messages
      on several connections (``spread``) keep no order. Messages that had arrived when a
      connection ended come before its ``Disconnected``. An owner that calls ``disconnect`` or
      ``close`` gets no more events of that connection; the other end does.
    * **One connection per uid.** If a uid connects again while its old connection still seems
      alive (a node was restarted, its old machine froze), the accepting end sees
      ``Disconnected`` and then ``Connected``. It never hears from the old connection again.
    * **Loss.** A message may be lost with its connection, and the sender does not learn which.
      Once a connection is reported as lost, nothing that was sent on it will be sent later: its
      buffers are released. Messages to a peer of ``connect`` wait for the connection if it does
      not exist yet. Messages to an unknown name, or to an accepted peer that is gone, are
      dropped.
    * **Strangers.** A van with a key demands it from every peer that connects. It sends nothing
      to a listener before the listener proves two things: that it has the key, and that it is
      the van whose uid was given to ``connect`` as the peer's name. A van without a key stays on
      this machine (over TCP: loopback addresses only). If a connection is rejected, ``Denied``
      tells the connecting end and ``TurnedAway`` the accepting end.
    * **Memory.** A van may read a frame's buffer long after ``send`` returned (a large frame is
      sent without a copy). So the caller must not change it until the receiver has acknowledged
      the message or the connection is reported as lost. Received frames belong to the
      receiver and live as long as it refers to them; some are read-only.
    * **Pressure.** ``send`` never blocks, and a van never refuses to receive. The credits of the
      layer above limit how much is in flight.
"""

from __future__ import annotations

import abc
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


class Received(NamedTuple):
    """One message. ``frames`` are views of bytes (format ``B``) or ``bytes``."""

    peer: str
    frames: list[memoryview | bytes]


class Connected(NamedTuple):
    """A connection with ``peer`` exists; messages can be sent to it."""

    peer: str


@dataclass(slots=True)
class Disconnected:
    """The connection with ``peer`` is gone; ``reason`` is for the reader of a log."""

    peer: str
    reason: str
    moved_bytes: int = field(default=0, compare=False)
    """The bytes that it carried in both directions, or fewer if the van does not know all."""


class Denied(NamedTuple):
    """The listener at the address of ``peer`` rejects this van.

    Comes at most once per ``connect``, before any ``Connected``, and only if waiting longer cannot
    help: the key or the mechanism differs, or connecting to the address is not allowed. ``reason``
    is a sentence for the user. The van does not try again.
    """

    peer: str
    reason: str


@dataclass(slots=True)
class TurnedAway:
    """Strangers' connections were rejected, ``count`` of them since the last event.

    The interval between such events for one address and reason is limited.
    """

    address: str
    """Where they came from; empty if that is not known."""
    reason: str
    count: int


VanEvent: TypeAlias = Received | Connected | Disconnected | Denied | TurnedAway


class PipeTicket(NamedTuple):
    """The data that a peer needs to open a pipe; the process id is in the roster."""

    fd: int
    inode: int
    """The kernel's number of the pipe; no two existing pipes share one."""


class InTransit(NamedTuple):
    """Sent bytes that have not arrived."""

    nbytes: int = 0
    queued: int | None = 0
    """Those of them that have not left this machine; 0 if one of several connections has none.
    None while there is no connection."""


class Van(abc.ABC):
    """A transport of frames between this node and its peers.

    The module's docstring has the contract.
    """

    uid: str
    """The name under which accepting ends know this node; unique in a job."""

    @abc.abstractmethod
    def bind(self, host: str, port: int, *, listen_fd: int | None = None) -> int:
        """Listen at ``host`` (a name or an address) and return the port.

        Port 0 takes a free one. Only ``"0.0.0.0"`` or ``"::"`` opens every interface, never
        ``"*"``. ``listen_fd`` is a TCP socket that already listens (inherited from the
        launcher); the van owns it from then on. If the port is in use, or the host does not belong
        to this machine or cannot be resolved, raises a :class:`ConfigError` that names both.
        """

    @abc.abstractmethod
    def connect(self, peer: str, address: str) -> None:
        """Open a connection to ``address`` (``tcp://host:port``), called ``peer``.

        Returns at once; the peer need not listen yet. If the peer is already connected, it is
        disconnected first. Raises :class:`ConfigError` if the address has another form.
        """

    @abc.abstractmethod
    def disconnect(self, peer: str) -> None:
        """Forget ``peer``; no event follows. Unknown names are ignored.

        A connection made by ``connect`` is closed, but messages sent after its ``Connected`` still
        leave. A connection that was accepted is no longer read or written, until its other end
        opens a new one.
        """

    @abc.abstractmethod
    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        """Send one message. Never blocks, and never raises an error if the peer is gone.

        The buffers may be read later: see *Memory* above. Raises :class:`UsageError` for a message
        that can never be sent: no frame, a single empty frame (vans use it among themselves),
        memory with gaps, a frame over the van's limit.
        """

    @abc.abstractmethod
    def poll(self, timeout_s: float | None) -> list[VanEvent]:
        """Wait until something arrives, :meth:`wake` is called or time is up.

        0 never waits and ``None`` waits for ever. The list may be empty. If many messages have
        arrived, it holds a limited number of them.
        """

    def trouble(self, peer: str) -> str:
        """Return the local problem that prevents a connection to ``peer``, if any."""
        return ""

    def in_transit(self, peer: str) -> InTransit:
        """Return how many of the bytes sent to ``peer`` have not arrived yet.

        This is an estimate; the bytes are always the last that were sent. A van that does not know
        says 0.
        """
        return InTransit()

    def is_refused(self, peer: str) -> bool:
        """Return whether ``peer`` was connected and its host now refuses connections.

        Its process has ended then. A firewall may say the same. False if a van does not know.
        """
        return False

    def is_answered(self, peer: str) -> bool:
        """Return whether a lost connection to ``peer`` may return soon.

        This is so if bytes arrive on a connection that is being made, because a dead machine and a
        dead or stopped process do not send any. An accepting van does not know yet whose connection
        that is. False if a van does not know.
        """
        return False

    def spread(self, peer: str, connections: int) -> None:  # noqa: B027 - vans may ignore it
        """Spread large messages to and from ``peer`` over this many ``connections``.

        This is for networks that do not give one TCP flow their full bandwidth. The number never
        decreases. It may be lower than requested, or stay 1, if the van cannot open more. Such
        messages may overtake each other and other messages, and messages on one connection may
        still arrive after another connection is lost.
        """

    def offer_pipe(self, peer: str) -> PipeTicket | None:
        """Make a pipe through which ``peer``, a connected process here, may send.

        It is a shortcut for small messages and ends with the connection. ``None`` if the van has
        no pipes.
        """
        return None

    def take_pipe(self, peer: str, pid: int, ticket: PipeTicket) -> bool:
        """Use the pipe that ``peer`` offers for small messages; return whether it works."""
        return False

    @abc.abstractmethod
    def wake(self) -> None:
        """Make the current or the next :meth:`poll` return. From any thread, at any time."""

    @abc.abstractmethod
    def close(self) -> None:
        """Close all connections and free everything; the peers see ``Disconnected``.

        Messages sent over living connections still leave, within a short limited time. Idempotent;
        afterwards ``send`` drops messages and ``poll`` returns no events.
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
    if len(buffers) < 2 and not (buffers and memoryview(buffers[0]).nbytes):
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
