"""Open and close the pipes of one van, and remember whose they are.

A pipe begins after its connection and ends with it. A failure of a pipe ends the pipe and never the
connection, which can carry everything. Runs on the owner's thread. Read next: ``van.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import zmq

from pslite.errors import ProtocolError
from pslite.van.base import Disconnected, Received, VanEvent
from pslite.van.pipes import PipeIn, PipeOut, PipeTicket

MAX_PIPES = 64
"""A van makes and uses at most this many pipes: each takes an open file or two."""

Reader = Callable[["list[VanEvent]", int], object]


class Pipes:
    """The ends that a van reads, and those that it writes, by peer.

    Args:
        watch: have the poll call a reader when a descriptor is ready: (it, reader, zmq.POLLIN or
            zmq.POLLOUT).
        unwatch: no longer.
    """

    def __init__(
        self, watch: Callable[[int, Reader, int], None], unwatch: Callable[[int], None]
    ) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._incoming: dict[str, PipeIn] = {}
        self._outgoing: dict[str, PipeOut] = {}

    @property
    def num_outgoing(self) -> int:
        """How many peers are sent to by a pipe."""
        return len(self._outgoing)

    def offer(self, peer: str) -> PipeTicket | None:
        """A pipe by which ``peer`` may send; None where there is one already, or none to give."""
        if len(self._incoming) >= MAX_PIPES or peer in self._incoming:
            return None
        try:
            pipe = self._incoming[peer] = PipeIn()
        except OSError:  # no more open files
            return None
        self._watch(pipe.fileno(), partial(self._read, peer), zmq.POLLIN)
        return pipe.ticket

    def take(self, peer: str, pid: int, ticket: PipeTicket) -> bool:
        """Send to ``peer`` by the pipe that its process offers; whether it can be opened."""
        if len(self._outgoing) >= MAX_PIPES or peer in self._outgoing:
            return False
        try:
            self._outgoing[peer] = PipeOut(pid, ticket)
        except OSError:  # another space of process ids, or another user
            return False
        return True

    def send(self, peer: str, buffers: list[bytes | memoryview]) -> bool:
        """Return whether a pipe has taken this message; else it goes by the connection."""
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
        """Close those whose connections have ended; what came by them goes before that news."""
        for event in [event for event in events if type(event) is Disconnected]:
            if event.peer in self._incoming:
                self._read(event.peer, events, 0)  # all that a pipe can hold
            self.close(event.peer)

    def close(self, peer: str) -> None:
        """Nothing goes by pipes to or from this peer any more."""
        if peer in self._incoming:
            self._close_incoming(peer)
        if peer in self._outgoing:
            self._close_outgoing(peer)

    def close_all(self, linger_s: float) -> None:
        """The end of the van. What waits for room gets so much time."""
        end_at = time.monotonic() + linger_s
        for peer in list(self._outgoing):
            self._close_outgoing(peer, end_at - time.monotonic())
        for peer in list(self._incoming):
            self._close_incoming(peer)

    def _read(self, peer: str, events: list[VanEvent], _limit: int) -> None:
        """Add what waits there to ``events``, before the news of the connection's end."""
        try:
            messages = self._incoming[peer].read()
        except ProtocolError:  # the writer is not a van
            self._close_incoming(peer)
            return
        ends = (at for at, each in enumerate(events) if _is_end_of(peer, each))
        index = next(ends, len(events))
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


def _is_end_of(peer: str, event: VanEvent) -> bool:
    return type(event) is Disconnected and event.peer == peer
