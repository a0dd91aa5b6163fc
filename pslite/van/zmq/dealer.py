"""``Dealer``: one DEALER socket and its monitor, for one connection.

A dealer never reconnects: a new one replaces a lost one (``van.py`` says why). Runs on the
owner's thread. Read next: ``link.py``, which decides when.

A link may have further connections, for networks that do not give one TCP flow their full
bandwidth. They are opened one after the other while the first connection exists, and large messages
take turns on all of them, in both directions. If any of them ends, the whole link ends and
connects again, and lost messages are resent. If further connections keep ending, the link stops
using them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import zmq

from pslite.errors import ConfigError, ProtocolError
from pslite.security import Proofs
from pslite.van.base import Received, VanEvent, size_of
from pslite.van.cutting import Reassembly, cut, is_piece
from pslite.van.zmq.accepted import MAX_FURTHER, further_routing_id
from pslite.van.zmq.addresses import Endpoint, HostAddresses
from pslite.van.zmq.authentication import SocketSecurity
from pslite.van.zmq.flows import Silence, flow_state
from pslite.van.zmq.sockets import (
    BROKEN_OFF,
    REFUSED_KEY,
    WRONG_PROTOCOL,
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

NEVER_MS = 2**30

_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | REFUSED_KEY
    | WRONG_PROTOCOL
    | BROKEN_OFF
)

Reader = Callable[["list[VanEvent]", int], object]
DealerReader = Callable[["Dealer", "list[VanEvent]", int], object]


class LinkNeeds(NamedTuple):
    """The services of a van for its links."""

    sockets: SocketMaker
    doors: SocketSecurity
    new_routing_id: Callable[[], bytes]
    max_message_bytes: int
    max_total_bytes: int
    handshake_timeout_s: float
    silence_s: float
    watch: Callable[[Socket, Reader], None]
    unwatch: Callable[[Socket], None]
    tell: Callable[[VanEvent], None]
    wake: Callable[[], None]
    hosts: Mapping[str, HostAddresses]
    warn: Callable[[str], None]


class Dealer:
    """A connection to ``peer`` at ``endpoint``; the attempt begins at once.

    The attempt fails after ``timeout_s``.

    The owner's ``read`` is called when messages may have arrived, ``read_monitor`` when the state
    of the connection has changed. Both get the dealer as their first argument.
    """

    def __init__(
        self,
        needs: LinkNeeds,
        peer: str,
        endpoint: Endpoint,
        routing_id: bytes,
        timeout_s: float,
        read: DealerReader,
        read_monitor: DealerReader,
    ) -> None:
        self.connected = self.has_ended = False
        self.began_at = 0.0
        #: The descriptor of the connection while it exists; else None.
        self.descriptor: int | None = None
        self.sent_bytes = 0
        self._silence = Silence()
        #: The bytes that had moved in both directions at the last check.
        self.moved_bytes = 0
        self._needs = needs
        self._peer = peer
        self._routing_id = routing_id
        self._parts = Reassembly(needs.max_message_bytes, needs.max_total_bytes)
        self._socket, self._monitor = needs.sockets.new_watched(
            zmq.DEALER, _EVENTS, needs.doors.connecting(peer)
        )
        socket = self._socket
        socket.set(zmq.ROUTING_ID, routing_id)
        socket.set(zmq.PROBE_ROUTER, 1)
        socket.set(zmq.RECONNECT_IVL, NEVER_MS)
        socket.set(zmq.CONNECT_TIMEOUT, round(timeout_s * 1000))
        socket.set(zmq.IPV6, int(endpoint.is_ipv6))
        if endpoint.is_local:
            keep_buffers_small(socket)
        needs.watch(socket, partial(read, self))
        needs.watch(self._monitor, partial(read_monitor, self))
        socket.connect(endpoint.text)

    def begin(self) -> None:
        """Note that the handshake, and the proofs if needed, have succeeded."""
        self.connected, self.began_at = True, time.monotonic()

    def prove(self, proofs: Proofs) -> bool | None:
        """Take the other end's challenge, and answer it if it proves that it is the peer.

        Returns None if no challenge has arrived yet.
        """
        try:
            first = self._socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        frames = read_rest(self._socket, first, self._needs.max_total_bytes)
        if frames is None or [len(frame) for frame in frames] != [proofs.CHALLENGE_BYTES]:
            return False
        answer = proofs.answer(self._peer, self._routing_id, bytes(frames[0]))
        if answer is not None:
            self.send([answer])
        return answer is not None

    def send(self, buffers: list[bytes | memoryview]) -> None:
        self.sent_bytes += sum(map(size_of, buffers))
        for message in cut(buffers):
            send(self._socket, message)

    def news(self) -> Iterator[tuple[int, int]]:
        """Return the events of the monitor as ``(event, value)``."""
        for event, value in monitor_events(self._monitor):
            if event == zmq.EVENT_CONNECTED:
                self.descriptor = value
                continue
            if event in (zmq.EVENT_DISCONNECTED, zmq.EVENT_CONNECT_RETRIED):
                self.descriptor = None
            yield event, value

    @property
    def is_silent(self) -> bool:
        """Whether no bytes, not even a heartbeat, have moved for too long."""
        state = None if self.descriptor is None else flow_state(self.descriptor)
        if state is None:
            return False
        self.moved_bytes = state.moved_bytes
        return self._silence.lasts(state, time.monotonic()) > self._needs.silence_s

    @property
    def is_answered(self) -> bool:
        """Whether any bytes from the other end have arrived."""
        state = None if self.descriptor is None else flow_state(self.descriptor)
        return state is not None and state.received_bytes > 0

    def read(self, events: list[VanEvent], limit: int) -> bool | None:
        """Read up to ``limit`` messages; return whether none is left.

        Returns None after a message over the limits, which is dropped.
        """
        socket = self._socket
        for _ in range(limit):
            try:
                first = socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            frames = read_rest(socket, first, self._needs.max_total_bytes)
            if frames is not None and is_piece(frames):
                try:
                    frames = self._parts.take(frames)
                except ProtocolError:
                    return None
            elif frames is None:
                return None
            if frames is not None and not is_ours(frames):
                events.append(Received(self._peer, frames))
            if not has_more(socket):
                return True
        return False

    def close(self, linger_ms: int) -> None:
        """End the attempt or the connection; sent messages have ``linger_ms`` to leave."""
        for socket in (self._socket, self._monitor):
            self._needs.unwatch(socket)
        close_watched(self._socket, self._monitor, linger_ms)


CONNECT_TIMEOUT_S = 5.0
RETRY_S = 1.0
"""The pause after a failed attempt: the other end may be busy."""
SHORT_S = 5.0
MAX_SHORT = 3
"""If this many in a row end within ``SHORT_S`` while the first connection stays, something in the
network does not allow further connections."""


class Further:
    """The additional connections to a peer (PS_CONNECTIONS).

    Args:
        peer: the uid of the other end.
        read: reads messages of a dealer.
        lost: called when an established connection ends.
    """

    def __init__(
        self, needs: LinkNeeds, peer: str, read: DealerReader, lost: Callable[[], None]
    ) -> None:
        #: When to call :meth:`open_next`.
        self.due_at = math.inf
        self.dealers: list[Dealer] = []
        self._needs = needs
        self._peer = peer
        self._read = read
        self._lost = lost
        self._wanted = 0
        self._first: tuple[Dealer, Endpoint, bytes] | None = None
        self._turn = 0
        self._num_short = 0

    def want(self, number: int) -> None:
        """Set how many connections to open; the number never decreases."""
        self._wanted = max(self._wanted, min(number, MAX_FURTHER))
        self.open_next()

    def begin(self, first: Dealer, endpoint: Endpoint, routing_id: bytes) -> None:
        """Note that the first connection is open."""
        self._first = first, endpoint, routing_id
        self.open_next()

    def open_next(self) -> None:
        """Open one more connection if it is wanted and the others are connected."""
        self.due_at = math.inf
        if self._first is None or len(self.dealers) >= self._wanted:
            return
        if not all(dealer.connected for dealer in self.dealers):
            return
        _, endpoint, routing_id = self._first
        name = further_routing_id(routing_id, len(self.dealers) + 1)
        try:
            dealer = Dealer(
                self._needs,
                self._peer,
                endpoint,
                name,
                CONNECT_TIMEOUT_S,
                self._read,
                self._read_monitor,
            )
        except ConfigError:  # no more open files
            self.due_at = time.monotonic() + RETRY_S
        else:
            self.dealers.append(dealer)

    def begun(self, dealer: Dealer) -> None:
        """Note that a further connection is open."""
        dealer.begin()
        self.open_next()

    def next(self) -> Dealer | None:
        """Return the connection whose turn it is; the first one takes turns too."""
        if self._first is None:
            return None
        there = [self._first[0], *(dealer for dealer in self.dealers if dealer.connected)]
        self._turn = (self._turn + 1) % len(there)
        return there[self._turn]

    def close(self, linger_ms: int) -> None:
        """Close the further connections, because the first one has ended."""
        self._count()
        for dealer in self.dealers:
            dealer.close(linger_ms)
        self.dealers.clear()
        self.due_at, self._first = math.inf, None

    def _read_monitor(self, dealer: Dealer, _events: list[VanEvent], _limit: int) -> None:
        news = [event for event, _ in dealer.news()]
        if zmq.EVENT_HANDSHAKE_SUCCEEDED in news and self._needs.doors.proofs is None:
            self.begun(dealer)
        if zmq.EVENT_DISCONNECTED not in news and zmq.EVENT_CONNECT_RETRIED not in news:
            return
        dealer.has_ended = True
        if dealer.connected:
            self._lost()
        else:
            self.dealers.remove(dealer)
            dealer.close(linger_ms=0)
            self.due_at = time.monotonic() + RETRY_S

    def _count(self) -> None:
        """Notice when further connections end while the first one stays."""
        ended = [each for each in self.dealers if each.connected and each.has_ended]
        if not ended or self._first is None or self._first[0].has_ended:
            return
        is_short = all(time.monotonic() - each.began_at < SHORT_S for each in ended)
        self._num_short = self._num_short + 1 if is_short else 0
        if self._num_short >= MAX_SHORT and self._wanted:
            self._wanted = 0
            self._needs.warn(
                f"additional connections to {self._peer!r} (PS_CONNECTIONS) close at once; this "
                "node goes on with one"
            )
