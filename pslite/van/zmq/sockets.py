"""ZeroMQ sockets of both ends of the van over TCP: options, monitors, frames.

The behaviour of options is that of the manual page ``zmq_setsockopt`` (libzmq 4.3.5). Runs on
the owner's thread. Read next: ``listener.py``.

pyzmq's thread that frees what is sent without a copy (``zmq.utils.garbage``) ends in an exit
handler, and exit handlers run in the reverse order of their registration. pyzmq registers it when
that module is imported, by default with the first large frame; it is imported here, so that nodes
that are closed by handlers of later registration still send without a copy.
"""

from __future__ import annotations

import errno
import itertools
import struct
from collections.abc import Iterator, Sequence

import zmq
import zmq.utils.garbage

from pslite.errors import ConfigError
from pslite.resource_limits import cannot_open
from pslite.van.base import MAX_FRAMES

Socket = zmq.Socket[bytes]

MAX_SOCKETS = 16384
LOOPBACK_BUFFER_BYTES = 256 << 10
"""The kernel's buffers of a connection within this machine. Left alone they grow to megabytes, and
what passes through them has left the processor's cache when it is read: twice the time per byte."""

REFUSED_KEY = zmq.EVENT_HANDSHAKE_FAILED_AUTH
WRONG_PROTOCOL = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
BROKEN_OFF = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
ANOTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
ANOTHER_CURVE_KEY = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)

_EVENT = struct.Struct("=HI")
_Options = Sequence[tuple[int, int | bytes]]


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
