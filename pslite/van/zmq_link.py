"""The connecting end of the van over TCP: one peer of ``connect``, a fresh DEALER at each attempt.

Goes on trying until it is closed, except where waiting is no use: the other end says that the
key is another one, or uses another mechanism. Under CURVE another key shows only by the other
end closing each connection in the middle of the handshake, so that counts as a "no" as well
when it has gone on for a while.

Where one flow of TCP is not all that the network gives, a link has *further* connections, opened
when the first one is there. Large messages take turns, in both directions. They end with the first
one, and it ends with each of them: what was lost with one is sent again on a new connection, like
all that was under way. Runs on the owner's thread. Read next: ``zmq_van.py``.
"""

from __future__ import annotations

import logging
import time

import zmq

from pslite.errors import ConfigError
from pslite.security import WHAT_TO_COMPARE
from pslite.van.accepted import MAX_FURTHER, further_routing_id
from pslite.van.addresses import Endpoint, resolve, without_key
from pslite.van.base import Connected, Denied, Disconnected, VanEvent, size_of
from pslite.van.zmq_dealer import Dealer, LinkNeeds
from pslite.van.zmq_listener import SETTLE_S
from pslite.van.zmq_sockets import ANOTHER_MECHANISM, REFUSED_KEY, WRONG_PROTOCOL

MESSAGES_PER_POLL = 256
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
DENIED_AFTER_S = 5.0
"""Somebody who listens, and ends each handshake at once, is taken at his word after this time.
A gate that waits for its own server to come up does the same for a moment."""
LARGE_FRAME_BYTES = zmq.COPY_THRESHOLD
MAX_CONNECTIONS = 1 + MAX_FURTHER

_logger = logging.getLogger(__name__)


class Link:
    """One peer: its present socket, or what waits for the next one."""

    def __init__(self, peer: str, address: tuple[str, int], needs: LinkNeeds) -> None:
        self.connected = False
        #: When :meth:`run` is to be called.
        self.due_at: float | None = None
        self._peer = peer
        self._address = address
        self._needs = needs
        self._first: Dealer | None = None
        self._endpoint: Endpoint | None = None
        self._routing_id = b""
        #: How many connections there should be, and how many were opened.
        self._num_connections, self._num_opened = 1, 0
        self._further: list[Dealer] = []
        #: Whether the other end knows the first connection, and so whose the further ones are.
        self._is_heard = False
        self._turn = 0
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
        self._endpoint, self._is_heard = endpoint, False
        self._opened_at = time.monotonic()
        self._routing_id, self._num_opened = needs.new_routing_id(), 1
        self._first = Dealer(needs, endpoint, self._routing_id, self._read, self._read_monitor)

    def spread(self, connections: int) -> None:
        """Have so many connections, the first one included; never fewer than before."""
        self._num_connections = max(self._num_connections, min(connections, MAX_CONNECTIONS))
        if self.connected:
            self._open_further()

    def _open_further(self) -> None:
        if self._endpoint is None:
            return
        try:
            while self._num_opened < self._num_connections:
                routing_id = further_routing_id(self._routing_id, self._num_opened)
                self._num_opened += 1
                read, read_monitor = self._read, self._read_further_monitor
                self._further.append(
                    Dealer(self._needs, self._endpoint, routing_id, read, read_monitor)
                )
        except ConfigError as error:  # no more open files
            _logger.info("no further connection to %s of %r: %s", self._where, self._peer, error)

    def close(self, linger_ms: int) -> None:
        """End the present attempt or connection."""
        self.due_at = None
        for dealer in self._dealers():
            dealer.close(linger_ms)
        self._first = None
        self._further.clear()

    def _dealers(self) -> list[Dealer]:
        return [] if self._first is None else [self._first, *self._further]

    def send(self, buffers: list[bytes | memoryview], *, is_large: bool) -> None:
        """Send, or keep for the connection that is to come."""
        if self.connected and self._first is not None:
            dealer = self._next() if is_large and self._is_heard else self._first
            dealer.send(buffers)
        elif not self._denied:
            # As libzmq would: small frames are copied, large ones are read later.
            self._backlog.append(
                [bytes(part) if size_of(part) < LARGE_FRAME_BYTES else part for part in buffers]
            )

    def _next(self) -> Dealer:
        """The connections that are there, in turn."""
        dealers = [dealer for dealer in self._dealers() if dealer.connected]
        self._turn = (self._turn + 1) % len(dealers)
        return dealers[self._turn]

    def run(self, events: list[VanEvent]) -> None:
        """It is :attr:`due_at`: make the next attempt, or see the end of the connection."""
        self.due_at = None
        if self._first is None:
            self.open()
            return
        for dealer in self._dealers():
            while not self._read(dealer, events, MESSAGES_PER_POLL):
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

    def _read(self, dealer: Dealer, events: list[VanEvent], limit: int) -> bool:
        """Read up to ``limit`` messages; whether nothing is left."""
        if not self.connected and self._first is not None:
            # The monitor told of the connection before the first message could come.
            self._read_monitor(self._first, events, limit)
        before = len(events)
        is_empty = dealer.read(self._peer, events, limit)
        self._is_heard = self._is_heard or len(events) > before
        if is_empty is None:
            _logger.warning("%r sent a message over the limits", self._peer)
            self.due_at = 0.0
        return is_empty is True

    def _read_monitor(self, first: Dealer, events: list[VanEvent], _limit: int) -> None:
        for event, value in first.news():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._begin(first, events)
            elif event == zmq.EVENT_CONNECT_RETRIED:
                # libzmq is done with the connection: nothing more will come out of it.
                self.due_at = 0.0
            elif event == zmq.EVENT_DISCONNECTED:
                self._end_soon()
            elif not self._was_connected:
                # Who was connected knew the key; what is there now is for the owner to judge.
                self._handshake_failed(event, value)

    def _read_further_monitor(self, dealer: Dealer, _events: list[VanEvent], _limit: int) -> None:
        events = [event for event, _ in dealer.news()]
        if zmq.EVENT_HANDSHAKE_SUCCEEDED in events:
            dealer.connected = True
        if dealer.connected:
            if zmq.EVENT_DISCONNECTED in events or zmq.EVENT_CONNECT_RETRIED in events:
                self._end_soon()
        elif zmq.EVENT_CONNECT_RETRIED in events:
            _logger.info("no further connection to %s of %r", self._where, self._peer)
            self._further.remove(dealer)
            dealer.close(linger_ms=0)

    def _end_soon(self) -> None:
        if self.due_at is None:
            self.due_at = time.monotonic() + SETTLE_S

    def _begin(self, first: Dealer, events: list[VanEvent]) -> None:
        self.connected = self._was_connected = first.connected = True
        self._retry_s = FIRST_RETRY_S
        events.append(Connected(self._peer))
        for buffers in self._backlog:
            first.send(buffers)
        self._backlog.clear()
        self._open_further()

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
