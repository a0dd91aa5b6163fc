"""Pipes between processes of one machine, for small messages.

libzmq hands each message from thread to thread twice at either end. If both ends are on one
machine, this takes longer than the message itself. So a process that listens makes a pipe for each
such peer and tells it the descriptor. The peer opens it through ``/proc/<pid>/fd/<fd>``, as it
maps memory (``memory/segment.py``). The kernel allows this to processes of the same user that
see the same process ids. A message goes through the pipe as a whole or not at all. The sender does
not wait for room: if there is none, the message takes the connection.

A pipe begins after its connection and ends with it. A failure of a pipe ends the pipe and never the
connection, which can carry everything. Runs on the owner's thread. Read next: ``van.py``.
"""

from __future__ import annotations

import fcntl
import os
import select
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import zmq

from pslite.errors import ProtocolError
from pslite.van.base import Disconnected, PipeTicket, Received, VanEvent

MAX_PIPES = 64
"""A van makes and uses at most this many pipes: each takes an open file or two."""
MAX_MESSAGE_BYTES = 32_768
"""Half of a pipe's capacity on Linux; larger messages gain nothing from a pipe."""
MAX_MESSAGE_FRAMES = 256
PIPE_BYTES = 65_536
"""The most bytes that a pipe holds, so that one read can get them all."""
_COUNT = struct.Struct("=I")

Reader = Callable[["list[VanEvent]", int], object]


class PipeIn:
    """The reading end of a pipe. Messages arrive in the order of sending.

    Raises:
        OSError: the system cannot make a pipe.
    """

    def __init__(self) -> None:
        if not hasattr(os, "pipe2"):
            raise OSError("this system has no pipe2")
        # The writing end stays open, because the peer opens it, and because a pipe without a
        # writer would look as if it had ended. The connection detects whether the peer is gone.
        self._reading, self._writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.fcntl(self._writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # more where pages are large
        self.ticket = PipeTicket(self._writing, os.fstat(self._writing).st_ino)
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._reading

    def read(self) -> list[list[memoryview | bytes]]:
        """Return the messages that have arrived: the frames of each.

        Raises:
            ProtocolError: the bytes are not a message.
        """
        try:
            data = os.read(self._reading, PIPE_BYTES)
        except BlockingIOError:
            return []
        return list(self._messages(self._rest + data))

    def _messages(self, data: bytes) -> Iterator[list[memoryview | bytes]]:
        self._rest = b""
        view, start = memoryview(data), 0
        while start < len(data):
            frames = _frames_at(view, start)
            if frames is None:
                self._rest = data[start:]
                return
            start += _head_bytes(len(frames)) + sum(map(len, frames))
            yield frames

    def close(self) -> None:
        """Stop reading; writers get an error."""
        os.close(self._reading)
        os.close(self._writing)


def _head_bytes(count: int) -> int:
    return _COUNT.size * (1 + count)


def _frames_at(view: memoryview, start: int) -> list[memoryview | bytes] | None:
    """Return the frames of the message at ``start``; None if it is not complete."""
    left = len(view) - start
    if left < _COUNT.size:
        return None
    (count,) = _COUNT.unpack_from(view, start)
    if count > MAX_MESSAGE_FRAMES:
        raise ProtocolError(
            f"a message through a pipe must have at most {MAX_MESSAGE_FRAMES} frames, got {count}"
        )
    at = start + _head_bytes(count)
    if at > len(view):
        return None
    lengths = struct.unpack_from(f"={count}I", view, start + _COUNT.size)
    if at - start + sum(lengths) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message through a pipe must have at most {MAX_MESSAGE_BYTES} bytes, got "
            f"{at - start + sum(lengths)}"
        )
    if at + sum(lengths) > len(view):
        return None
    frames: list[memoryview | bytes] = []
    for length in lengths:
        frames.append(view[at : at + length])
        at += length
    return frames


class PipeOut:
    """The writing end of a pipe that process ``pid`` has offered.

    Raises:
        OSError: it cannot be opened, or is not the offered pipe.
    """

    def __init__(self, pid: int, ticket: PipeTicket) -> None:
        path = f"/proc/{pid}/fd/{ticket.fd}"
        if not _is(os.stat(path), ticket):  # check first: opening another file may have effects
            raise OSError(f"{path} is not the offered pipe")
        self._fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not _is(os.fstat(self._fd), ticket):
            os.close(self._fd)
            raise OSError(f"{path} is not the offered pipe")
        self._rest = b""

    def fileno(self) -> int:
        """Return the descriptor that becomes writable."""
        return self._fd

    @property
    def is_stuck(self) -> bool:
        """Whether the rest of a message waits for room; then no other message is taken."""
        return bool(self._rest)

    def send(self, buffers: Sequence[bytes | memoryview]) -> bool:
        """Send a message if the pipe has room; return whether it was sent.

        The buffers then belong to the caller again. Raises ``BrokenPipeError`` if the reader is
        gone.
        """
        if self._rest or len(buffers) > MAX_MESSAGE_FRAMES:
            return False
        lengths = [len(each) if type(each) is bytes else each.nbytes for each in buffers]  # type: ignore[union-attr]
        if _head_bytes(len(lengths)) + sum(lengths) > MAX_MESSAGE_BYTES:
            return False
        head = struct.pack(f"={1 + len(lengths)}I", len(lengths), *lengths)
        message = b"".join([head, *buffers])
        try:
            written = os.write(self._fd, message)
        except BlockingIOError:
            return False
        self._rest = message[written:]
        return True

    def flush(self) -> None:
        """Write the waiting bytes, as far as there is room. Raises as ``send`` does."""
        try:
            self._rest = self._rest[os.write(self._fd, self._rest) :]
        except BlockingIOError:
            pass

    def close(self, linger_s: float = 0.0) -> None:
        """Close the pipe; waiting bytes have ``linger_s`` to leave.

        The reader can still read what is in the pipe.
        """
        end_at = time.monotonic() + linger_s
        try:
            while self._rest and (left_s := end_at - time.monotonic()) > 0:
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll(1000 * left_s)
                self.flush()
        except BrokenPipeError:
            pass
        os.close(self._fd)


def _is(found: os.stat_result, ticket: PipeTicket) -> bool:
    return stat.S_ISFIFO(found.st_mode) and found.st_ino == ticket.inode


class Pipes:
    """The pipes of a van, by peer: reading and writing ends.

    Args:
        watch: takes (descriptor, reader, zmq.POLLIN or zmq.POLLOUT); from then on the poll calls
            the reader when the descriptor is ready.
        unwatch: undoes ``watch`` for a descriptor.
    """

    def __init__(
        self, watch: Callable[[int, Reader, int], None], unwatch: Callable[[int], None]
    ) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._incoming: dict[str, PipeIn] = {}
        self._outgoing: dict[str, PipeOut] = {}

    def offer(self, peer: str) -> PipeTicket | None:
        """Make a pipe for messages of ``peer``; None if it has one, or at a limit."""
        if len(self._incoming) >= MAX_PIPES or peer in self._incoming:
            return None
        try:
            pipe = self._incoming[peer] = PipeIn()
        except OSError:  # no more open files
            return None
        self._watch(pipe.fileno(), partial(self._read, peer), zmq.POLLIN)
        return pipe.ticket

    def take(self, peer: str, pid: int, ticket: PipeTicket) -> bool:
        """Open the pipe that ``peer`` offers, to send to it; return whether that worked."""
        if len(self._outgoing) >= MAX_PIPES or peer in self._outgoing:
            return False
        try:
            self._outgoing[peer] = PipeOut(pid, ticket)
        except OSError:  # another process-id namespace, or another user
            return False
        return True

    def send(self, peer: str, buffers: list[bytes | memoryview]) -> bool:
        """Send by a pipe if possible; return False if the message needs the connection."""
        pipe = self._outgoing.get(peer)
        if pipe is None:
            return False
        try:
            is_sent = pipe.send(buffers)
        except BrokenPipeError:
            self._close_outgoing(peer)
            return False
        if is_sent and pipe.is_stuck:
            self._watch(pipe.fileno(), partial(self._flush, peer), zmq.POLLOUT)
        return is_sent

    def end(self, events: list[VanEvent]) -> None:
        """Close pipes of ended connections; put their messages before ``Disconnected``."""
        for event in [event for event in events if type(event) is Disconnected]:
            if event.peer in self._incoming:
                self._read(event.peer, events, 0)  # reads all that a pipe can hold
            self.close(event.peer)

    def close(self, peer: str) -> None:
        """Close the pipes to and from this peer."""
        if peer in self._incoming:
            self._close_incoming(peer)
        if peer in self._outgoing:
            self._close_outgoing(peer)

    def close_all(self, linger_s: float) -> None:
        """Close all pipes when the van ends; waiting bytes have ``linger_s`` to leave."""
        end_at = time.monotonic() + linger_s
        for peer in list(self._outgoing):
            self._close_outgoing(peer, end_at - time.monotonic())
        for peer in list(self._incoming):
            self._close_incoming(peer)

    def _read(self, peer: str, events: list[VanEvent], _limit: int) -> None:
        """Add the pipe's messages to ``events``, before the peer's ``Disconnected``."""
        try:
            messages = self._incoming[peer].read()
        except ProtocolError:  # the writer is not a van
            self._close_incoming(peer)
            return
        ends = (type(each) is Disconnected and each.peer == peer for each in events)
        index = next((at for at, is_end in enumerate(ends) if is_end), len(events))
        events[index:index] = [Received(peer, frames) for frames in messages]

    def _flush(self, peer: str, _events: list[VanEvent], _limit: int) -> None:
        pipe = self._outgoing[peer]
        try:
            pipe.flush()
        except BrokenPipeError:
            self._close_outgoing(peer)
            return
        if not pipe.is_stuck:
            self._unwatch(pipe.fileno())

    def _close_incoming(self, peer: str) -> None:
        pipe = self._incoming.pop(peer)
        self._unwatch(pipe.fileno())
        pipe.close()

    def _close_outgoing(self, peer: str, linger_s: float = 0.0) -> None:
        pipe = self._outgoing.pop(peer)
        if pipe.is_stuck:
            self._unwatch(pipe.fileno())
        pipe.close(linger_s)
