"""What both ends of the van over TCP do with ZeroMQ sockets: options, monitors, frames.

The behaviour of options is that of the manual page ``zmq_setsockopt`` (libzmq 4.3.5). Runs on
the owner's thread. Read next: ``listener.py``.

libzmq asks (ZAP, RFC 27) before a connection that claims to know the job's key carries its first
message. The van's own poll loop reads the questions (``ZapDoor``), on the owner's thread; a node
too busy to answer lets its visitors wait, and they try again. Nothing that a question holds is
trusted: whatever is not exactly as it must be is refused, and nothing raises.

pyzmq's thread that frees what is sent without a copy (``zmq.utils.garbage``) ends in an exit
handler, and exit handlers run in the reverse order of their registration. pyzmq registers it when
that module is imported, by default with the first large frame; it is imported here, so that nodes
that are closed by handlers of later registration still send without a copy.
"""

from __future__ import annotations

import errno
import hmac
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence

import zmq
import zmq.utils.garbage
from zmq.utils import z85

from pslite.errors import ConfigError
from pslite.scarcity import cannot_open
from pslite.security import Mechanism, Proofs
from pslite.van.base import MAX_FRAMES

Socket = zmq.Socket[bytes]

MAX_SOCKETS = 16384
CURVE_OVERHEAD_BYTES = 64
"""A frame under CURVE is longer than its content by 33 bytes, and MAXMSGSIZE counts them."""
LOOPBACK_BUFFER_BYTES = 256 << 10
"""The kernel's buffers of a connection within this machine. Left alone they grow to megabytes, and
what passes through them has left the processor's cache when it is read: twice the time per byte."""
USER = b"pslite"

REFUSED_KEY = zmq.EVENT_HANDSHAKE_FAILED_AUTH
WRONG_PROTOCOL = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
BROKEN_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
ANOTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
ANOTHER_CURVE_KEY = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)

ENDPOINT = "inproc://zeromq.zap.01"
"""Where libzmq asks who may connect (ZAP, RFC 27)."""
DOMAIN = b"pslite"
VERSION = b"1.0"
ACCEPT = (b"200", b"OK")
DENY = (b"400", b"the key differs")
CANNOT = (b"500", b"this is not a request of RFC 27")
_HEAD_FRAMES = 6  # version, request id, domain, address, identity, mechanism; then credentials
_MAX_ID_BYTES = 255

_EVENT = struct.Struct("=HI")
_Options = Sequence[tuple[int, int | bytes]]


class Credentials:
    """What a connection of one mechanism must present, to the last bit."""

    __slots__ = ("_expected", "_mechanism")

    def __init__(self, mechanism: bytes, expected: Sequence[bytes]) -> None:
        self._mechanism = mechanism
        self._expected = tuple(expected)

    def match(self, mechanism: bytes, presented: Sequence[bytes]) -> bool:
        """Return whether these are the expected ones, in constant time."""
        if mechanism != self._mechanism or len(presented) != len(self._expected):
            return False
        matches = [
            hmac.compare_digest(given, wanted)
            for given, wanted in zip(presented, self._expected, strict=True)
        ]
        return all(matches)


def answer(
    question: Sequence[bytes], credentials: Credentials
) -> tuple[list[bytes] | None, str | None]:
    """Return the reply to a question, and the address of who was turned away.

    Frames as RFC 27 numbers them, without the routing frames of ROUTER. There is no reply to a
    question without a request id: there is no telling what it belongs to.
    """
    if len(question) < 2 or not 0 < len(question[1]) <= _MAX_ID_BYTES:
        return None, None
    denied: str | None = None
    if len(question) < _HEAD_FRAMES or question[0] != VERSION or question[2] != DOMAIN:
        code, text = CANNOT
    elif credentials.match(question[5], question[6:]):
        code, text = ACCEPT
    else:
        code, text = DENY
        denied = question[3].decode("ascii", "replace")[:64]
    user_id, metadata = (b"node", b"") if code == ACCEPT[0] else (b"", b"")
    return [VERSION, question[1], code, text, user_id, metadata], denied


class ZapDoor:
    """The socket that answers. ``denied`` is called with the address of each that was refused."""

    def __init__(
        self, socket: zmq.Socket[bytes], credentials: Credentials, denied: Callable[[str], None]
    ) -> None:
        """Bind ``socket``, a ROUTER without limits, and own it."""
        self.socket = socket
        self._credentials = credentials
        self._denied = denied
        socket.bind(ENDPOINT)

    def read(self, _events: object, limit: int) -> None:
        """Answer up to ``limit`` questions."""
        for _ in range(limit):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # Before the question: who asks (a frame of ROUTER), and an empty delimiter.
            if len(frames) < 2 or frames[1]:
                continue
            reply, refused = answer(frames[2:], self._credentials)
            if reply is not None:
                # Dropped by ROUTER where the asking connection is over.
                self.socket.send_multipart([frames[0], b"", *reply], zmq.NOBLOCK)
            if refused is not None:
                self._denied(refused)

    def close(self) -> None:
        self.socket.close(linger=0)


class Doors:
    """The options by which the two ends of a connection prove that they know the job's key."""

    def __init__(self, mechanism: Mechanism | None, uid: str) -> None:
        self.uid = uid
        self.credentials: Credentials | None = None
        self.overhead_bytes = 0
        self.listening: _Options = ()
        self.proofs: Proofs | None = None
        """What both ends show before they are heard, where the mechanism alone is not enough."""
        self._connecting: _Options = ()
        self.description = "no job key"
        if mechanism is None:
            return
        self.description = f"PS_SECURITY={mechanism.name}"
        if mechanism.name == "plain":
            self.proofs = Proofs(mechanism.secret)
            self.credentials = Credentials(b"PLAIN", (USER, self.proofs.password(uid)))
            self.listening = (*_ZAP_OPTIONS, (zmq.PLAIN_SERVER, 1))
        else:
            self._use_curve(mechanism.secret)

    def connecting(self, peer: str) -> _Options:
        """Return the options of a socket that connects to the node with this uid."""
        if self.proofs is None:
            return self._connecting
        password = self.proofs.password(peer)
        return ((zmq.PLAIN_USERNAME, USER), (zmq.PLAIN_PASSWORD, password))

    def _use_curve(self, secret: bytes) -> None:
        """Use one pair of keys for the whole job: who has it may listen and connect."""
        if not zmq.has("curve"):
            raise ConfigError(
                "PS_SECURITY=curve needs a libzmq that was built with CURVE, and the one of this "
                "pyzmq was not: install pyzmq from its wheel (pip install pyzmq), or, on one host "
                "or a trusted network, set PS_SECURITY=plain on all nodes"
            )
        private = z85.encode(secret)
        public = zmq.curve_public(private)
        self.credentials = Credentials(b"CURVE", (z85.decode(public),))
        self.overhead_bytes = CURVE_OVERHEAD_BYTES
        self.listening = (*_ZAP_OPTIONS, (zmq.CURVE_SERVER, 1), (zmq.CURVE_SECRETKEY, private))
        self._connecting = (
            (zmq.CURVE_SERVERKEY, public),
            (zmq.CURVE_PUBLICKEY, public),
            (zmq.CURVE_SECRETKEY, private),
        )


_ZAP_OPTIONS: _Options = ((zmq.ZAP_DOMAIN, DOMAIN), (zmq.ZAP_ENFORCE_DOMAIN, 1))


class SocketMaker:
    """A ZeroMQ context, and the options that all sockets of a van share."""

    def __init__(self, options: _Options) -> None:
        # One I/O thread, and never more: accepted.py relies on its order of events.
        self._context: zmq.Context[Socket] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._options = options
        self._numbers = itertools.count(1)

    def new(self, kind: int, options: _Options = ()) -> Socket:
        """Make a socket; raise :class:`ConfigError` where no more files may be opened."""
        try:
            socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise cannot_open("another socket", error.errno) from error
        try:
            self._prepare(socket, options)
        except BaseException:  # an open socket would keep `close` waiting for ever
            socket.close(linger=0)
            raise
        return socket

    def _prepare(self, socket: Socket, options: _Options) -> None:
        # Without a limit here, a ROUTER that is closed while a peer ends may wait for ever to send
        # to that peer: libzmq does not give such a connection the limit of ``close``.
        socket.set(zmq.LINGER, 0)
        for option, value in (*self._options, *options):
            socket.set(option, value)

    def new_watched(self, kind: int, events: int, options: _Options = ()) -> tuple[Socket, Socket]:
        """Make a socket and the monitor that tells of ``events`` of it."""
        name = f"inproc://monitor-{next(self._numbers)}"
        made: list[Socket] = []
        try:
            for each in (kind, zmq.PAIR):  # no limits: a full monitor would stop libzmq
                made.append(self.new(each, options if each == kind else ()))
            made[0].monitor(name, events)
            made[1].connect(name)
        except zmq.ZMQError as error:
            _close_all(made)
            raise cannot_open("another socket", error.errno) from error
        except ConfigError:
            _close_all(made)
            raise
        return made[0], made[1]

    def close(self) -> None:
        """Wait until the sockets, which are closed, have sent what they may still send."""
        self._context.term()


def keep_buffers_small(socket: Socket) -> None:
    """Limit the buffers of an unbound socket that stays within this machine."""
    socket.set(zmq.SNDBUF, LOOPBACK_BUFFER_BYTES)
    socket.set(zmq.RCVBUF, LOOPBACK_BUFFER_BYTES)


def _close_all(sockets: Sequence[Socket]) -> None:
    for socket in sockets:
        socket.close(linger=0)


def send(to: Socket, buffers: Sequence[bytes | memoryview]) -> bool:
    """Send one message, or drop it where the peer is gone; return whether it was sent."""
    last = len(buffers) - 1
    try:
        for index, buffer in enumerate(buffers):
            flags = zmq.NOBLOCK if index == last else zmq.NOBLOCK | zmq.SNDMORE
            _send_frame(to, buffer, flags)
    except zmq.ZMQError as error:
        # Both come at the first frame or never, so no message is left half sent.
        if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
            return False
        raise
    return True


def _send_frame(to: Socket, buffer: bytes | memoryview, flags: int) -> None:
    try:
        to.send(buffer, flags, copy=False)
    except RuntimeError:
        # The interpreter ends, and pyzmq sends nothing without a copy any more: its thread for that
        # has ended, or cannot be started (from Python 3.12 on). Nothing of the frame was sent.
        to.send(buffer, flags)


def read_rest(source: Socket, frame: zmq.Frame, max_bytes: int) -> list[memoryview | bytes] | None:
    """Return views of all frames of the message that begins with ``frame``.

    ``None`` for a message of too many frames or bytes; it is taken out of the queue all the
    same. libzmq hands a message over when all of it is there, so this cannot come earlier.
    """
    frames: list[memoryview | bytes] = [frame.buffer]
    left = max_bytes - len(frame)
    while frame.more:
        frame = source.recv(copy=False)
        left -= len(frame)
        if left >= 0 and len(frames) < MAX_FRAMES:
            frames.append(frame.buffer)
        else:
            left = -1
            frames.clear()
    return None if left < 0 else frames


def has_more(source: Socket) -> bool:
    """Return whether a message waits; cheaper than an exception of ``recv``."""
    return bool(int(source.get(zmq.EVENTS)) & zmq.POLLIN)


def is_ours(frames: Sequence[memoryview | bytes]) -> bool:
    """Return whether a message is one that vans send for themselves: one empty frame."""
    return len(frames) == 1 and not len(frames[0])


def monitor_events(monitor: Socket) -> Iterator[tuple[int, int]]:
    """Return the ``(event, value)`` pairs at a monitor; mostly of descriptors."""
    while True:
        try:
            head = monitor.recv(zmq.NOBLOCK)
        except zmq.Again:
            return
        monitor.recv()
        yield _EVENT.unpack(head)


def close_watched(watched: Socket, monitor: Socket, linger_ms: int) -> None:
    watched.monitor(None, 0)
    monitor.close(linger=0)
    watched.close(linger=linger_ms)
