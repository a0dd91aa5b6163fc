"""The connecting end of the van over TCP: one peer of ``connect``, a fresh DEALER at each attempt.

Goes on trying until it is closed, except where waiting is no use: the other end says that the
key is another one, or uses another mechanism. Under CURVE another key shows only by the other
end closing each connection in the middle of the handshake, so that counts as a "no" as well
when it has gone on for a while. Runs on the owner's thread. Read next: ``zmq_van.py``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import zmq

from pslite.security import WHAT_TO_COMPARE
from pslite.van.addresses import resolve, without_key
from pslite.van.base import Connected, Denied, Disconnected, Received, VanEvent, size_of
from pslite.van.zmq_listener import SETTLE_S
from pslite.van.zmq_sockets import (
    ANOTHER_MECHANISM,
    BROKEN_OFF,
    REFUSED_KEY,
    WRONG_PROTOCOL,
    Doors,
    Socket,
    SocketMaker,
    close_watched,
    is_ours,
    keep_buffers_small,
    monitor_events,
    read_rest,
    send,
)

MESSAGES_PER_POLL = 256
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
CONNECT_TIMEOUT_S = 5.0
DENIED_AFTER_S = 5.0
"""Somebody who listens, and ends each handshake at once, is taken at his word after this time.
A gate that waits for its own server to come up does the same for a moment."""
LARGE_FRAME_BYTES = zmq.COPY_THRESHOLD
NEVER_MS = 2**30

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | REFUSED_KEY
    | WRONG_PROTOCOL
    | BROKEN_OFF
)
_logger = logging.getLogger(__name__)

Reader = Callable[["list[VanEvent]", int], object]


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


class Link:
    """One peer: its present socket, or what waits for the next one."""

    def __init__(self, peer: str, address: tuple[str, int], needs: LinkNeeds) -> None:
        self.connected = False
        #: When :meth:`run` is to be called.
        self.due_at: float | None = None
        self._peer = peer
        self._address = address
        self._needs = needs
        self._sockets: tuple[Socket, Socket] | None = None
        self._backlog: list[list[bytes | memoryview]] = []
        self._attempt = 0
        self._retry_s = FIRST_RETRY_S
        self._opened_at = 0.0
        self._was_connected = False
        self._denied = False
        #: The first and the last of the handshakes that were broken off one after the other.
        self._broken_off: tuple[float, float] | None = None

    @property
    def _where(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def open(self) -> None:
        """Begin an attempt. Returns at once, unless a name server is slow."""
        needs, (host, port) = self._needs, self._address
        try:
            endpoint = resolve(host, port, self._attempt)
        except OSError as error:
            _logger.info("no address yet for %s of %r: %s", host, self._peer, error)
            self._retry()
            return
        if needs.doors.credentials is None and not endpoint.is_local:
            self._deny(f"cannot connect to {self._where}: {without_key(endpoint.text)}")
            return
        self._attempt += 1
        dealer, monitor = needs.sockets.new_watched(zmq.DEALER, _EVENTS, needs.doors.connecting)
        self._sockets = dealer, monitor
        dealer.set(zmq.ROUTING_ID, needs.new_routing_id())
        dealer.set(zmq.PROBE_ROUTER, 1)
        dealer.set(zmq.RECONNECT_IVL, NEVER_MS)
        dealer.set(zmq.CONNECT_TIMEOUT, round(CONNECT_TIMEOUT_S * 1000))
        dealer.set(zmq.IPV6, int(endpoint.is_ipv6))
        if endpoint.is_local:
            keep_buffers_small(dealer)
        needs.watch(dealer, self._read)
        needs.watch(monitor, self._read_monitor)
        self._opened_at = time.monotonic()
        dealer.connect(endpoint.text)

    def close(self, linger_ms: int) -> None:
        """End the present attempt or connection."""
        self.due_at = None
        if self._sockets is not None:
            for socket in self._sockets:
                self._needs.unwatch(socket)
            close_watched(*self._sockets, linger_ms)
        self._sockets = None

    def send(self, buffers: list[bytes | memoryview]) -> None:
        """Send, or keep for the connection that is to come."""
        if self.connected and self._sockets is not None:
            send(self._sockets[0], buffers)
        elif not self._denied:
            # As libzmq would: small frames are copied, large ones are read later.
            self._backlog.append(
                [bytes(part) if size_of(part) < LARGE_FRAME_BYTES else part for part in buffers]
            )

    def run(self, events: list[VanEvent]) -> None:
        """It is :attr:`due_at`: make the next attempt, or see the end of the connection."""
        self.due_at = None
        if self._sockets is None:
            self.open()
            return
        while not self._read(events, MESSAGES_PER_POLL):
            pass
        self.close(linger_ms=0)
        if self.connected:
            self.connected = False
            events.append(Disconnected(self._peer, f"the connection to {self._where} is gone"))
        if not self._denied:
            self._retry()

    def _retry(self) -> None:
        self.due_at = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LAST_RETRY_S)

    # -- what arrives ------------------------------------------------------------------

    def _read(self, events: list[VanEvent], limit: int) -> bool:
        """Read up to ``limit`` messages; whether nothing is left."""
        if self._sockets is None:
            return True
        dealer = self._sockets[0]
        if not self.connected:
            # The monitor told of the connection before the first message could come.
            self._read_monitor(events, limit)
        for _ in range(limit):
            try:
                first = dealer.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            frames = read_rest(dealer, first, self._needs.max_total_bytes)
            if frames is None:
                _logger.warning("%r sent a message over the limits", self._peer)
                self.due_at = 0.0
            elif not is_ours(frames):
                events.append(Received(self._peer, frames))
            if (
                not int(dealer.get(zmq.EVENTS)) & zmq.POLLIN
            ):  # cheaper than to be told by an exception
                return True
        return False

    def _read_monitor(self, events: list[VanEvent], _limit: int) -> None:
        if self._sockets is None:
            return
        dealer, monitor = self._sockets
        for event, value in monitor_events(monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._begin(dealer, events)
            elif event == zmq.EVENT_CONNECT_RETRIED:
                # libzmq is done with the connection: nothing more will come out of it.
                self.due_at = 0.0
            elif event == zmq.EVENT_DISCONNECTED:
                if self.due_at is None:
                    self.due_at = time.monotonic() + SETTLE_S
            elif not self._was_connected:
                # Who was connected knew the key; what is there now is for the owner to judge.
                self._handshake_failed(event, value)

    def _begin(self, dealer: Socket, events: list[VanEvent]) -> None:
        self.connected = self._was_connected = True
        self._retry_s = FIRST_RETRY_S
        events.append(Connected(self._peer))
        for buffers in self._backlog:
            send(dealer, buffers)
        self._backlog.clear()

    # -- who does not let us in --------------------------------------------------------

    def _handshake_failed(self, event: int, value: int) -> None:
        """Decide whether waiting longer can be of any use."""
        if event == REFUSED_KEY:
            self._deny(
                f"the node at {self._where} does not accept the job key of this one: "
                f"{WHAT_TO_COMPARE}"
            )
        elif event == WRONG_PROTOCOL and value == ANOTHER_MECHANISM:
            ours = self._needs.doors.description
            self._deny(
                f"the node at {self._where} is secured in another way than this one, which has "
                f"{ours}: {WHAT_TO_COMPARE}"
            )
        else:
            self._handshake_broken_off()

    def _handshake_broken_off(self) -> None:
        """As another key is answered under CURVE; nobody says why."""
        now, slow_s = time.monotonic(), self._needs.handshake_timeout_s / 2
        if now - self._opened_at > slow_s:
            self._broken_off = None  # it may be faster next time
            return
        first, last = self._broken_off or (now, now)
        if now - last > LAST_RETRY_S + slow_s:  # nobody listened in between
            first = now
        self._broken_off = first, now
        if now - first >= DENIED_AFTER_S:
            self._deny(
                f"whoever listens at {self._where} ends each connection during the handshake: "
                f"{WHAT_TO_COMPARE}"
            )

    def _deny(self, reason: str) -> None:
        """Give up. The link stays in the van, so that its name is not free for others."""
        if not self._denied:
            self._denied = True
            self._backlog.clear()
            self._needs.tell(Denied(self._peer, reason))
