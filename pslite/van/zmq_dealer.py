"""One DEALER and its monitor: an attempt to connect, and then the connection.

Never reconnects: a lost one is replaced by a fresh one (``zmq_van.py`` says why). Runs on the
owner's thread. Read next: ``zmq_further.py`` and ``zmq_link.py``, which decide when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import zmq

from pslite.van.addresses import Endpoint
from pslite.van.base import Received, VanEvent
from pslite.van.zmq_sockets import (
    BROKEN_OFF,
    REFUSED_KEY,
    WRONG_PROTOCOL,
    Doors,
    Socket,
    SocketMaker,
    close_watched,
    has_more,
    is_ours,
    keep_buffers_small,
    monitor_events,
    read_rest,
    send,
)

CONNECT_TIMEOUT_S = 5.0
NEVER_MS = 2**30

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | REFUSED_KEY
    | WRONG_PROTOCOL
    | BROKEN_OFF
)

Reader = Callable[["list[VanEvent]", int], object]
DealerReader = Callable[["Dealer", "list[VanEvent]", int], object]


class LinkNeeds(NamedTuple):
    """What all links of a van get from it."""

    sockets: SocketMaker
    doors: Doors
    new_routing_id: Callable[[], bytes]
    max_total_bytes: int
    handshake_timeout_s: float
    watch: Callable[[Socket, Reader], None]
    unwatch: Callable[[Socket], None]
    tell: Callable[[VanEvent], None]


class Dealer:
    """A connection to ``endpoint``, which begins at once.

    Its owner's ``read`` is called when messages may be there, ``read_monitor`` when there is news
    of the connection itself; both with the dealer first.
    """

    def __init__(
        self,
        needs: LinkNeeds,
        endpoint: Endpoint,
        routing_id: bytes,
        read: DealerReader,
        read_monitor: DealerReader,
    ) -> None:
        self.connected = self.has_ended = False
        self.began_at = 0.0
        self._needs = needs
        self._socket, self._monitor = needs.sockets.new_watched(
            zmq.DEALER, _EVENTS, needs.doors.connecting
        )
        socket = self._socket
        socket.set(zmq.ROUTING_ID, routing_id)
        socket.set(zmq.PROBE_ROUTER, 1)
        socket.set(zmq.RECONNECT_IVL, NEVER_MS)
        socket.set(zmq.CONNECT_TIMEOUT, round(CONNECT_TIMEOUT_S * 1000))
        socket.set(zmq.IPV6, int(endpoint.is_ipv6))
        if endpoint.is_local:
            keep_buffers_small(socket)
        needs.watch(socket, partial(read, self))
        needs.watch(self._monitor, partial(read_monitor, self))
        socket.connect(endpoint.text)

    def begin(self) -> None:
        """The handshake has succeeded."""
        self.connected, self.began_at = True, time.monotonic()

    def send(self, buffers: list[bytes | memoryview]) -> None:
        send(self._socket, buffers)

    def news(self) -> Iterator[tuple[int, int]]:
        """What the monitor has to tell: ``(event, value)``."""
        return monitor_events(self._monitor)

    def read(self, peer: str, events: list[VanEvent], limit: int) -> bool | None:
        """Read up to ``limit`` messages of ``peer``; whether nothing is left.

        None after a message over the limits, which is dropped.
        """
        socket = self._socket
        for _ in range(limit):
            try:
                first = socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            frames = read_rest(socket, first, self._needs.max_total_bytes)
            if frames is None:
                return None
            if not is_ours(frames):
                events.append(Received(peer, frames))
            if not has_more(socket):
                return True
        return False

    def close(self, linger_ms: int) -> None:
        """End the attempt or the connection; what was sent has so long to leave."""
        for socket in (self._socket, self._monitor):
            self._needs.unwatch(socket)
        close_watched(self._socket, self._monitor, linger_ms)
