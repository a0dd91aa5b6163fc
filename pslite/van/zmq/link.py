"""``Link``: the connecting end over TCP, with a new DEALER for each connection.

A link keeps trying until it is closed, unless waiting cannot help: the other end reports that the
key differs, or it uses another mechanism. Under CURVE, a listener with another key only closes each
connection during the handshake. If this continues for a while, it counts as a rejection too.

If a link has further connections (``dealer.py``), the end of any of them, or of the first one,
ends them all. Runs on the owner's thread. Read next: ``van.py``.
"""

from __future__ import annotations

import math
import time

import zmq

from pslite.errors import ConfigError
from pslite.security import WHAT_TO_COMPARE, Proofs
from pslite.van.base import Connected, Denied, Disconnected, InTransit, VanEvent, size_of
from pslite.van.zmq.addresses import Endpoint, HostResolver, connect_problem, refuses, without_key
from pslite.van.zmq.dealer import Dealer, Further, LinkNeeds
from pslite.van.zmq.flows import in_transit
from pslite.van.zmq.listener import OVERDUE_S, SETTLE_S
from pslite.van.zmq.sockets import ANOTHER_MECHANISM, REFUSED_KEY, WRONG_PROTOCOL

MESSAGES_PER_POLL = 256
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
AT_ONCE_S = 0.5
"""An attempt that fails within this time got an answer, or this machine could not even try."""
FIRST_TIMEOUT_S = 1.25
LAST_TIMEOUT_S = 5.0
DENIED_AFTER_S = 5.0
"""A listener that ends each handshake at once counts as a rejection after this time. A proxy that
waits for its own server to start does the same for a moment."""
REFUSALS = 2
"""How many refused attempts in a row mean that a peer that was connected does not listen now."""
LARGE_FRAME_BYTES = zmq.COPY_THRESHOLD


class Attempts:
    """The timing of attempts to connect: limits and pauses. Pure.

    The kernel resends a lost SYN after 1, 3 and 7 s (before Linux 6.5, or without
    ``net.ipv4.tcp_syn_linear_timeouts``). So a single attempt may be silent for 4 s although the
    network is back, and PS_LOST_AFTER is 5 s. A new attempt sends a SYN at once. The first attempts
    are short, and later ones longer, for networks on which an answer takes more than a second.
    """

    def __init__(self) -> None:
        self.timeout_s = FIRST_TIMEOUT_S
        self._retry_s = FIRST_RETRY_S
        #: How many in a row a peer has refused that was connected before.
        self.refusals = 0

    def failed(self, lasted_s: float) -> float:
        """Note a failed attempt; return the seconds to wait before the next one."""
        if lasted_s >= FIRST_TIMEOUT_S:  # no answer came
            self.timeout_s = min(2 * self.timeout_s, LAST_TIMEOUT_S)
        retry_s = self._retry_s
        self._retry_s = min(2 * retry_s, LAST_RETRY_S)
        return retry_s

    def succeeded(self) -> None:
        """Note that the connection exists; after a later loss, the timing starts anew."""
        self.timeout_s, self._retry_s, self.refusals = FIRST_TIMEOUT_S, FIRST_RETRY_S, 0


class Link:
    """The connection to one peer: its socket, or the messages that wait for it."""

    def __init__(self, peer: str, address: tuple[str, int], needs: LinkNeeds) -> None:
        self.connected = False
        #: The local problem that prevents the connection.
        self.trouble = ""
        self._peer = peer
        self._address = address
        self._needs = needs
        self._place = HostResolver(address[0], needs.wake, needs.hosts.get(address[0]))
        #: Whether the next attempt begins when the name has been looked up.
        self._awaits_name = False
        self._due_at = math.inf
        self._dealer: Dealer | None = None
        self._further = Further(needs, peer, self._read, self._lost)
        self._endpoint: Endpoint | None = None
        self._routing_id = b""
        #: Whether the other end knows this connection, and so which one the further ones belong to.
        self._is_heard = False
        self._backlog: list[list[bytes | memoryview]] = []
        self._attempt = 0
        self._attempts = Attempts()
        self._opened_at = 0.0
        #: When the first of the connections ended.
        self._ended_at: float | None = None
        self._was_connected = False
        self._denied = False
        #: The times of the first and the last handshake in a row that the other end broke off.
        self._broken_off: tuple[float, float] | None = None

    @property
    def due_at(self) -> float:
        """When to call :meth:`run`."""
        if self._awaits_name and not self._place.is_looking:
            return 0.0
        return min(self._due_at, self._further.due_at)

    @property
    def _where(self) -> str:
        return f"{self._address[0]}:{self._address[1]}"

    def open(self) -> None:
        """Begin an attempt, or first a lookup of the host's name. Returns at once."""
        needs, now = self._needs, time.monotonic()
        if not self._was_connected:  # a peer that was connected before has not moved
            self._place.look(now)
        if self._place.known is None:
            self._awaits_name = self._place.is_looking
            if not self._awaits_name:
                self._retry()
            return
        endpoint = self._place.known.endpoint(self._address[1], self._attempt)
        if needs.doors.credentials is None and not endpoint.is_local:
            self._deny(f"cannot connect to {self._where}: {without_key(endpoint.text)}")
            return
        self._attempt += 1
        self._endpoint, self._routing_id = endpoint, needs.new_routing_id()
        self._is_heard, self._opened_at, self._ended_at = False, now, None
        self._dealer = Dealer(
            needs,
            self._peer,
            endpoint,
            self._routing_id,
            self._attempts.timeout_s,
            self._read,
            self._read_monitor,
        )

    def spread(self, connections: int) -> None:
        """Open up to this many connections, this one included; never fewer than before."""
        self._further.want(connections - 1)

    def close(self, linger_ms: int) -> None:
        """End the current attempt or connection."""
        self._due_at, self._awaits_name = math.inf, False
        self._further.close(linger_ms)
        if self._dealer is not None:
            self._dealer.close(linger_ms)
        self._dealer = None

    def send(self, buffers: list[bytes | memoryview], *, is_large: bool) -> None:
        """Send a message, or keep it until there is a connection."""
        if self.connected and self._dealer is not None:
            chosen = self._further.next() if is_large and self._is_heard else None
            (chosen or self._dealer).send(buffers)
        elif not self._denied:
            # As libzmq does: copy small frames now, read large ones later.
            self._backlog.append(
                [bytes(part) if size_of(part) < LARGE_FRAME_BYTES else part for part in buffers]
            )

    def run(self, events: list[VanEvent]) -> None:
        """Do what is due at :attr:`due_at`: make an attempt, or end the connection."""
        now = time.monotonic()
        if self._further.due_at <= now:
            self._further.open_next()
        has_news = self._awaits_name and not self._place.is_looking
        if not has_news and self._due_at > now:
            return
        self._due_at, self._awaits_name = math.inf, False
        if self._dealer is None:
            self._open_again()
        elif self._has_last_words(now):
            self._end_soon()
        else:
            self._end(events)

    def _open_again(self) -> None:
        try:
            self.open()
        except ConfigError as error:  # no more open files at this moment
            self._needs.warn(f"cannot connect to {self._where} of {self._peer!r}: {error}")
            self._retry()

    def _has_last_words(self, now: float) -> bool:
        """Return whether some connections ended and others may still deliver messages."""
        if self._ended_at is None or now >= self._ended_at + OVERDUE_S:
            return False
        further = [dealer for dealer in self._further.dealers if dealer.connected]
        return not all(dealer.has_ended for dealer in [self._dealer, *further] if dealer)

    def _end(self, events: list[VanEvent]) -> None:
        moved_bytes = 0
        for dealer in [self._dealer, *self._further.dealers]:
            if dealer is None:
                continue
            moved_bytes += dealer.moved_bytes
            # Only ended connections are read to the end: others could deliver messages for ever.
            while not self._read(dealer, events, MESSAGES_PER_POLL) and dealer.has_ended:
                pass
        self.close(linger_ms=0)
        lasted_s, refused = time.monotonic() - self._opened_at, False
        if self.connected:
            self.connected, lasted_s = False, 0.0
            reason = f"the connection to {self._where} is gone"
            events.append(Disconnected(self._peer, reason, moved_bytes))
        elif lasted_s < AT_ONCE_S and self._endpoint is not None:
            # libzmq does not tell why; usually the peer does not listen yet, or no more.
            self.trouble = connect_problem(self._endpoint.text)
            refused = self._was_connected and refuses(self._endpoint.text)
        self._attempts.refusals = self._attempts.refusals + 1 if refused else 0
        if not self._denied:
            self._retry(lasted_s)

    def _retry(self, lasted_s: float = 0.0) -> None:
        self._due_at = time.monotonic() + self._attempts.failed(lasted_s)

    @property
    def in_transit(self) -> InTransit:
        """The sent bytes that have not arrived, or that wait for the connection."""
        if not self.connected or self._dealer is None:
            waiting = sum(size_of(part) for buffers in self._backlog for part in buffers)
            return InTransit(waiting, None)
        found = in_transit([self._dealer, *self._further.dealers])
        return found if self._ended_at is None else found._replace(queued=None)

    @property
    def is_answered(self) -> bool:
        """Whether a connection is still being made, and bytes arrive on it."""
        return not self.connected and self._dealer is not None and self._dealer.is_answered

    @property
    def is_refused(self) -> bool:
        """Whether the peer's host has refused several connections in a row."""
        return self._attempts.refusals >= REFUSALS

    def look(self) -> None:
        """Notice connections that are dead although neither end has closed them."""
        if not self.connected or self._ended_at is not None:
            return
        for dealer in [self._dealer, *self._further.dealers]:
            if dealer is not None and dealer.connected and dealer.is_silent:
                dealer.has_ended = True
                self._lost()

    # -- what arrives ------------------------------------------------------------------

    def _read(self, dealer: Dealer, events: list[VanEvent], limit: int) -> bool:
        """Read up to ``limit`` messages; return whether none is left."""
        if not self.connected and self._dealer is not None:
            # The monitor reported the connection before the first message could arrive.
            self._read_monitor(self._dealer, events, limit)
        proofs = self._needs.doors.proofs
        if proofs is not None and not dealer.connected and not self._prove(dealer, proofs, events):
            return True
        before = len(events)
        is_empty = dealer.read(events, limit)
        self._is_heard = self._is_heard or len(events) > before
        if is_empty is None:
            self._needs.warn(f"{self._peer!r} sent a message over the size limits")
            self._due_at = 0.0
        return is_empty is True

    def _read_monitor(self, dealer: Dealer, events: list[VanEvent], _limit: int) -> None:
        for event, value in dealer.news():
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if self._needs.doors.proofs is None:
                    self._begin(dealer, events)
                else:  # the time limit of the proof
                    self._due_at = time.monotonic() + self._needs.handshake_timeout_s
            elif event == zmq.EVENT_CONNECT_RETRIED:
                # libzmq is done with the connection and will not deliver more from it.
                dealer.has_ended = True
                self._lost()
                self._due_at = 0.0
            elif event == zmq.EVENT_DISCONNECTED:
                dealer.has_ended = True
                self._lost()
            elif not self._was_connected:
                # A peer that was connected knew the key; the owner judges who is there now.
                self._handshake_failed(event, value)

    def _lost(self) -> None:
        """Note that one of the connections has ended, so that the others will end too."""
        if self._ended_at is None:
            self._ended_at = time.monotonic()
        self._end_soon()

    def _end_soon(self) -> None:
        self._due_at = min(self._due_at, time.monotonic() + SETTLE_S)

    def _prove(self, dealer: Dealer, proofs: Proofs, events: list[VanEvent]) -> bool:
        """Return whether the other end proves that it is the peer."""
        is_peer = dealer.prove(proofs)
        if is_peer is False:
            self._needs.warn(
                f"the listener at {self._where} did not prove that it is {self._peer!r}; this "
                "node sends it nothing"
            )
            self._due_at = 0.0
        elif is_peer and dealer is self._dealer:
            self._begin(dealer, events)
        elif is_peer:
            self._further.begun(dealer)
        return bool(is_peer)

    def _begin(self, dealer: Dealer, events: list[VanEvent]) -> None:
        self.connected = self._was_connected = True
        if self._ended_at is None:
            self._due_at = math.inf
        dealer.begin()
        self._attempts.succeeded()
        self.trouble = ""
        events.append(Connected(self._peer))
        for buffers in self._backlog:
            dealer.send(buffers)
        self._backlog.clear()
        if self._endpoint is not None:
            self._further.begin(dealer, self._endpoint, self._routing_id)

    # -- rejections --------------------------------------------------------------------

    def _handshake_failed(self, event: int, value: int) -> None:
        """Decide whether waiting longer can help."""
        if event == REFUSED_KEY:
            self._deny(f"the node at {self._where} rejected this node's job key; {WHAT_TO_COMPARE}")
        elif event == WRONG_PROTOCOL and value == ANOTHER_MECHANISM:
            ours = self._needs.doors.description
            self._deny(
                f"the node at {self._where} uses another PS_SECURITY than this node, which has "
                f"{ours}; {WHAT_TO_COMPARE}"
            )
        else:
            self._handshake_broken_off()

    def _handshake_broken_off(self) -> None:
        """Give up if this continues: CURVE rejects a wrong key this way, and says no more."""
        now, slow_s = time.monotonic(), self._needs.handshake_timeout_s / 2
        if now - self._opened_at > slow_s:
            self._broken_off = None  # it may be faster next time
            return
        first, last = self._broken_off or (now, now)
        if now - last > LAST_RETRY_S + slow_s:  # the peer did not listen in between
            first = now
        self._broken_off = first, now
        if now - first >= DENIED_AFTER_S:
            self._deny(
                f"the listener at {self._where} closes each connection during the handshake; "
                f"{WHAT_TO_COMPARE}"
            )

    def _deny(self, reason: str) -> None:
        """Give up. The link stays in the van, so that no other peer can take its name."""
        if not self._denied:
            self._denied = True
            self._backlog.clear()
            self._needs.tell(Denied(self._peer, reason))
