"""``Listener``: the accepting end of the van over TCP, a ROUTER socket.

It delivers the messages of a connection under the uid of the van that opened it (``accepted.py``).
If the job has a key, libzmq asks ``ZapHandler`` before it accepts a connection, so nothing that is
read here comes from a stranger. Runs on the owner's thread. Read next: ``van.py``, which polls it.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable

import zmq

from pslite.errors import ConfigError, ProtocolError
from pslite.van.base import Disconnected, InTransit, Received, TurnedAway, VanEvent, size_of
from pslite.van.cutting import PIECE_BYTES, Reassembly, cut, is_piece
from pslite.van.zmq.accepted import AcceptedConnections, over_their_share, split_routing_id
from pslite.van.zmq.addresses import bind_problem, listening_endpoint, resolve, without_key
from pslite.van.zmq.authentication import SocketSecurity
from pslite.van.zmq.flows import Silence, end_flow, flow_cookie, flow_state, in_transit
from pslite.van.zmq.sockets import (
    ANOTHER_CURVE_KEY,
    ANOTHER_MECHANISM,
    BROKEN_OFF,
    LOOPBACK_BUFFER_BYTES,
    WRONG_PROTOCOL,
    Socket,
    close_watched,
    has_more,
    is_ours,
    keep_buffers_small,
    monitor_events,
    read_rest,
    send,
)

LISTEN_BACKLOG = 1024
SETTLE_S = 0.02
"""The time from the report that a connection has ended until its last messages can surely be read.
libzmq's I/O thread needs microseconds; the rest is for a machine whose cores are all busy."""
OVERDUE_S = 1.0
"""An end is reported at most this long after SETTLE_S, however many messages still arrive."""
ROUTER_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | WRONG_PROTOCOL | BROKEN_OFF

OTHER_KEY = "it does not know the job key (PS_JOB_KEY_FILE)"
OTHER_MECHANISM = "its PS_SECURITY differs from this node's, or only one of the two has a job key"
OTHER_PROTOCOL = "it is not a node"
GAVE_UP = "it closed the connection, or was too slow, during the handshake"
TAKEN_NAME = "it claims the name of another node"

LOOK_S = 0.05
LOOK_EACH_S = 20e-6
"""A crowd of strangers is checked at intervals of LOOK_S, plus this for each stranger. Checking one
takes a fifth of this."""

SAY_AGAIN_S = 60.0
MAX_ADDRESSES = 256


class RejectedConnections:
    """Counts of rejected connections, reported at intervals. Pure and bounded."""

    #: A port scan causes these too, so they are only counted.
    QUIET = frozenset({OTHER_PROTOCOL, GAVE_UP})

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self._said: dict[tuple[str, str], float] = {}
        self._untold: Counter[tuple[str, str]] = Counter()

    def note(self, address: str, reason: str, now: float) -> list[VanEvent]:
        """Count one rejected connection; return the events for the owner."""
        self.count[reason] += 1
        if reason in self.QUIET:
            return []
        key = (address, reason)
        if key not in self._said and len(self._said) >= MAX_ADDRESSES:
            key = ("", reason)
        self._untold[key] += 1
        said_at = self._said.get(key)
        if said_at is not None and now - said_at < SAY_AGAIN_S:
            return []
        self._said[key] = now
        return [TurnedAway(key[0], reason, self._untold.pop(key))]


class Listener:
    """Reads the ROUTER and its monitor.

    Args:
        stranger_bytes: the most memory for all connections that have not sent a message yet.
        taken: returns whether no connecting peer may have this uid.
        tell: receives the events about strangers.
    """

    def __init__(
        self,
        router: Socket,
        monitor: Socket,
        doors: SocketSecurity,
        max_frame_bytes: int,
        max_bytes: int,
        stranger_bytes: int,
        taken: Callable[[str], bool],
        tell: Callable[[list[VanEvent]], None],
    ) -> None:
        self.connections = AcceptedConnections(SETTLE_S, OVERDUE_S)
        self.strangers = RejectedConnections()
        self._router = router
        self._monitor = monitor
        self._doors = doors
        self._max_frame_bytes = max_frame_bytes
        self._max_bytes = max_bytes
        self._stranger_bytes = stranger_bytes
        #: Up to this many connections without a message cannot fill more than that.
        self._crowd = stranger_bytes // PIECE_BYTES
        self._look_at = 0.0
        self._suspects: frozenset[int] = frozenset()
        #: Routing id -> the unfinished message in pieces of that connection.
        self._parts: dict[bytes, Reassembly] = {}
        self._taken = taken
        self._tell = tell
        #: Open descriptor -> a cookie, which differs for the next connection with its number.
        self._cookies: dict[int, bytes] = {}
        self._silences: defaultdict[int, Silence] = defaultdict(Silence)

    def read(self, events: list[VanEvent], limit: int) -> bool:
        """Read up to ``limit`` messages; return whether none is left."""
        router = self._router
        speakers = self.connections.speakers
        for _ in range(limit):
            try:
                routing_id = router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            first = router.recv(copy=False)
            uid, is_proof = speakers.get(routing_id), False
            if uid is None:
                is_proof = self._must_prove(routing_id)
                uid = self._heard_new(routing_id, first, events)
            frames = read_rest(router, first, self._max_bytes)
            if uid is None or is_proof:
                continue
            if frames is None:
                self._hear_no_more(uid, events)
            elif is_piece(frames):
                self._take_piece(routing_id, uid, frames, events)
            elif not is_ours(frames):
                events.append(Received(uid, frames))
            if not has_more(router):
                return True
        return False

    def _take_piece(
        self, routing_id: bytes, uid: str, frames: list[memoryview | bytes], events: list[VanEvent]
    ) -> None:
        parts = self._parts.get(routing_id)
        if parts is None:
            self._drop_parts()
            parts = self._parts[routing_id] = Reassembly(self._max_frame_bytes, self._max_bytes)
        try:
            whole = parts.take(frames)
        except ProtocolError:
            self._hear_no_more(uid, events)
            return
        if whole is not None:
            del self._parts[routing_id]
            events.append(Received(uid, whole))

    def _drop_parts(self) -> None:
        """Drop unfinished messages of ended connections: the rest will not arrive."""
        for routing_id in [each for each in self._parts if each not in self.connections.speakers]:
            del self._parts[routing_id]

    def _hear_no_more(self, uid: str, events: list[VanEvent]) -> None:
        # libzmq cannot close a single connection of a ROUTER, so its messages are ignored.
        self.connections.forget(uid)
        self._drop_parts()
        events.append(Disconnected(uid, "it sent a message over the size limits"))

    def _heard_new(self, routing_id: bytes, first: zmq.Frame, events: list[VanEvent]) -> str | None:
        self.read_monitor(events, 0)
        name = split_routing_id(routing_id)
        if name is not None and self._taken(name.uid):
            self.turned_away("", TAKEN_NAME)
            return None
        if self._must_prove(routing_id) and not self._proves(routing_id, first):
            return None
        try:
            descriptor = int(first.get(zmq.SRCFD))
        except zmq.ZMQError:  # the connection is already gone
            descriptor = -1
        return self.connections.heard(routing_id, descriptor, time.monotonic(), events)

    def _must_prove(self, routing_id: bytes) -> bool:
        return self._doors.proofs is not None and not self.connections.knows(routing_id)

    def _proves(self, routing_id: bytes, first: zmq.Frame) -> bool:
        """Return whether the peer knows the key; answer its first message by a challenge."""
        uid, proofs = self._doors.uid, self._doors.proofs
        if proofs is None or first.more:
            return False
        if not len(first):
            send(self._router, [routing_id, proofs.challenge(uid, routing_id)])
            return False
        if len(first) == proofs.PROOF_BYTES and proofs.accepts(uid, routing_id, first.bytes):
            return True
        self.turned_away("", OTHER_KEY)
        return False

    def read_monitor(self, _events: list[VanEvent], _limit: int) -> None:
        now = time.monotonic()
        for event, value in monitor_events(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._cookies[value] = flow_cookie(value)
                self.connections.descriptor_opened(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self._cookies.pop(value, None)
                self._silences.pop(value, None)
                self.connections.descriptor_closed(value, now)
            elif event == WRONG_PROTOCOL:
                self.turned_away("", _REASONS.get(value, OTHER_PROTOCOL))
            elif event == BROKEN_OFF:
                self.turned_away("", GAVE_UP)

    def end_silent(self, silence_s: float) -> None:
        """End connections on which not even a heartbeat has moved for ``silence_s``."""
        self._drop_parts()
        now = time.monotonic()
        for descriptor in self.connections.heard_descriptors():
            state = flow_state(descriptor)
            if state is None:
                continue
            self.connections.moved(descriptor, state.moved_bytes)
            if self._silences[descriptor].lasts(state, now) > silence_s:
                end_flow(descriptor, self._cookies.get(descriptor, b""))

    def is_answered(self, silence_s: float) -> bool:
        """Return whether an unknown connection has sent bytes within ``silence_s``."""
        states = map(flow_state, self.connections.unheard_descriptors())
        return any(each and each.received_bytes and each.silent_s < silence_s for each in states)

    def _end_greedy_strangers(self, now: float) -> None:
        """Keep strangers from filling this node's memory during their handshakes.

        All messages have been read, so a connection without a message has not finished its
        handshake. It is ended if it has sent too much at two checks in a row: at the first one,
        libzmq may be behind.
        """
        if self.connections.num_unheard <= self._crowd:
            self._suspects = frozenset()
            return
        self._look_at = now + LOOK_S + LOOK_EACH_S * self.connections.num_unheard
        states = {each: flow_state(each) for each in self.connections.unheard_descriptors()}
        received = {each: state.received_bytes for each, state in states.items() if state}
        greedy = frozenset(over_their_share(received, self._stranger_bytes))
        for descriptor in greedy & self._suspects:
            end_flow(descriptor, self._cookies.get(descriptor, b""))
        self._suspects = greedy - self._suspects

    def turned_away(self, address: str, reason: str) -> None:
        """Note that a connection from ``address`` was rejected."""
        self._tell(self.strangers.note(address, reason, time.monotonic()))

    def send(self, uid: str, buffers: list[bytes | memoryview], *, is_large: bool) -> None:
        """Send to the node ``uid``; its connections take turns with large messages."""
        first = self.connections.routing_id_of(uid)
        if first is None:
            return
        if is_large:
            chosen = self.connections.next_routing_id_of(uid)
            if chosen is not None and self._send_by(chosen, buffers):
                return  # otherwise that connection has just ended
        self._send_by(first, buffers)

    def _send_by(self, routing_id: bytes, buffers: list[bytes | memoryview]) -> bool:
        """Send a message on one connection; return whether the connection exists."""
        self.connections.count_sent(routing_id, sum(map(size_of, buffers)))
        return all(send(self._router, [routing_id, *message]) for message in cut(buffers))

    def in_transit(self, uid: str) -> InTransit:
        """Return the bytes sent to ``uid`` that have not arrived there yet."""
        return in_transit(self.connections.connections_of(uid))

    def next_due(self) -> float:
        """Return when to call :meth:`run`."""
        look_at = self._look_at if self.connections.num_unheard > self._crowd else math.inf
        return min(self.connections.next_due(), look_at)

    def run(self, events: list[VanEvent]) -> None:
        """Do what is due: check strangers, and report connections that have ended."""
        now = time.monotonic()
        if self.connections.num_unheard > self._crowd and self._look_at <= now:
            if self.read(events, 256):
                self._end_greedy_strangers(now)
            else:
                self._look_at = now + LOOK_S
        if self.connections.next_due() <= now:
            self._report_ended(now, events)

    def _report_ended(self, now: float, events: list[VanEvent]) -> None:
        if not self.read(events, 256):
            now -= OVERDUE_S
        for routing_id in self.connections.doubtful(now):
            if not send(self._router, [routing_id, b""]):
                self.connections.found_dead(routing_id, now)
        self.connections.report_ended(now, events)

    def close(self, linger_ms: int) -> None:
        close_watched(self._router, self._monitor, linger_ms)


def _keep_buffers_small(listen_fd: int) -> None:
    """Limit accepted sockets' buffers; libzmq does not do that for a given socket."""
    with socket.socket(fileno=os.dup(listen_fd)) as listening:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            listening.setsockopt(socket.SOL_SOCKET, option, LOOPBACK_BUFFER_BYTES)


_REASONS = {ANOTHER_MECHANISM: OTHER_MECHANISM, ANOTHER_CURVE_KEY: OTHER_KEY}


def listen(router: Socket, host: str, port: int, listen_fd: int | None, *, guarded: bool) -> int:
    """Bind the ROUTER, or give it the socket ``listen_fd``; return the port.

    Unless a key guards it (``guarded``), the address must be a loopback address.
    """
    if listen_fd is not None:
        endpoint = listening_endpoint(listen_fd, host, port)
    else:
        try:
            endpoint = resolve(host, port)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: cannot resolve {host!r} ({error})"
            ) from error
    if not (guarded or endpoint.is_local):
        raise ConfigError(f"cannot listen on {host}:{port}: {without_key(endpoint.text)}")
    if listen_fd is not None:
        os.set_blocking(listen_fd, False)
        router.set(zmq.USE_FD, listen_fd)
        if endpoint.is_local:
            _keep_buffers_small(listen_fd)
    elif endpoint.is_local:
        keep_buffers_small(router)
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.set(zmq.BACKLOG, LISTEN_BACKLOG)
    router.set(zmq.IPV6, int(endpoint.is_ipv6))
    try:
        router.bind(endpoint.text)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {bind_problem(error.errno or 0)}"
        ) from error
    return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
