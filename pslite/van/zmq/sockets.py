"""ZeroMQ sockets of both ends of the van over TCP: options, monitors, frames.

The manual page ``zmq_setsockopt`` (libzmq 4.3.5) describes the options; ``van.py`` has those that
all sockets share, such as marks and heartbeats. Runs on the owner's thread. Read next:
``listener.py``.

A thread of pyzmq (``zmq.utils.garbage``) frees the frames that were sent without a copy. It ends in
an exit handler, and exit handlers run in the reverse order of their registration. pyzmq registers
this one when that module is imported, by default with the first large frame. It is imported here,
so that nodes that are closed by handlers registered later can still send without a copy.
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
"""The size of the kernel's buffers of a connection within this machine. By default they grow to
megabytes. Then data has left the processor's cache when it is read: twice the time per byte."""

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
        # Exactly one I/O thread: accepted.py relies on its order of events.
        self._context: zmq.Context[Socket] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._options = options
        self._numbers = itertools.count(1)

    def new(self, kind: int, options: _Options = ()) -> Socket:
        """Make a socket; raise :class:`ConfigError` if no more files may be opened."""
        try:
            socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise cannot_open("another socket", error.errno) from error
        try:
            self._prepare(socket, options)
        except BaseException:  # `close` would wait for an open socket for ever
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
        """Make a socket, and a monitor that reports its ``events``."""
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
        """Wait until the closed sockets have sent what they may still send."""
        self._context.term()


def keep_buffers_small(socket: Socket) -> None:
    """Limit the buffers of an unbound socket that stays within this machine."""
    socket.set(zmq.SNDBUF, LOOPBACK_BUFFER_BYTES)
    socket.set(zmq.RCVBUF, LOOPBACK_BUFFER_BYTES)


def _close_all(sockets: Sequence[Socket]) -> None:
    for socket in sockets:
        socket.close(linger=0)


def send(to: Socket, buffers: Sequence[bytes | memoryview]) -> bool:
    """Send one message, or drop it if the peer is gone; return whether it was sent."""
    last = len(buffers) - 1
    try:
        for index, buffer in enumerate(buffers):
            flags = zmq.NOBLOCK if index == last else zmq.NOBLOCK | zmq.SNDMORE
            _send_frame(to, buffer, flags)
    except zmq.ZMQError as error:
        # Both errors occur at the first frame or never, so no message is left half sent.
        if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
            return False
        raise
    return True


def _send_frame(to: Socket, buffer: bytes | memoryview, flags: int) -> None:
    try:
        to.send(buffer, flags, copy=False)
    except RuntimeError:
        # The interpreter is ending, and pyzmq can no longer send without a copy: its thread for
        # that has ended, or cannot be started (since Python 3.12). No part of the frame was sent.
        to.send(buffer, flags)


def read_rest(source: Socket, frame: zmq.Frame, max_bytes: int) -> list[memoryview | bytes] | None:
    """Return views of all frames of the message that begins with ``frame``.

    Returns ``None`` if the message has too many frames or bytes; it is still removed from the
    queue. libzmq delivers a message only when all of it has arrived, so an earlier check is not
    possible.
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
    """Return whether a message waits; this is cheaper than an exception from ``recv``."""
    return bool(int(source.get(zmq.EVENTS)) & zmq.POLLIN)


def is_ours(frames: Sequence[memoryview | bytes]) -> bool:
    """Return whether vans use this message among themselves: a single empty frame."""
    return len(frames) == 1 and not len(frames[0])


def monitor_events(monitor: Socket) -> Iterator[tuple[int, int]]:
    """Return a monitor's ``(event, value)`` pairs; most values are descriptors."""
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
