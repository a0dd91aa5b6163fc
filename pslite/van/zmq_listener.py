"""The accepting end of the van over TCP: a ROUTER, who is connected to it, who was turned away.

The messages of a connection come out under the uid of the van that opened it
(``accepted.py``). Where the job has a key, libzmq asks ``zmq_zap.py`` before it lets anybody
in, so nothing that is read here comes from a stranger then. Runs on the owner's thread. Read
next: ``zmq_van.py``, which polls it.
"""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from collections.abc import Callable

import zmq

from pslite.errors import ConfigError
from pslite.van.accepted import AcceptedConnections, split_routing_id
from pslite.van.addresses import (
    bind_problem,
    listening_endpoint,
    resolve,
    without_key,
)
from pslite.van.base import Disconnected, Received, TurnedAway, VanEvent
from pslite.van.zmq_sockets import (
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
"""From the news that a connection is over until its last messages can be read for sure. libzmq's
I/O thread needs microseconds; the rest is for a machine whose cores are all busy."""
OVERDUE_S = 1.0
"""An end is told at the latest so long after SETTLE_S, however many messages still come."""
ROUTER_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | WRONG_PROTOCOL | BROKEN_OFF

OTHER_KEY = "it does not know the job key (PS_JOB_KEY_FILE)"
OTHER_MECHANISM = "it uses another PS_SECURITY than this node, or has no job key, or this one none"
OTHER_PROTOCOL = "it is no node"
GAVE_UP = "it ended, or was too slow, during the handshake"
TAKEN_NAME = "it claims the name of another node"

SAY_AGAIN_S = 60.0
MAX_ADDRESSES = 256


class Strangers:
    """Who was turned away: counted always, told seldom. Pure; bounded whoever knocks."""

    #: What a scan of ports would cause as well is counted only.
    QUIET = frozenset({OTHER_PROTOCOL, GAVE_UP})

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self._said: dict[tuple[str, str], float] = {}
        self._untold: Counter[tuple[str, str]] = Counter()

    def note(self, address: str, reason: str, now: float) -> list[VanEvent]:
        """One was turned away; returns what the owner should be told."""
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
        taken: whether a uid is one that nobody who connects here may have.
        tell: takes what is to be told about strangers.
    """

    def __init__(
        self,
        router: Socket,
        monitor: Socket,
        max_bytes: int,
        taken: Callable[[str], bool],
        tell: Callable[[list[VanEvent]], None],
    ) -> None:
        self.connections = AcceptedConnections(SETTLE_S, OVERDUE_S)
        self.strangers = Strangers()
        self._router = router
        self._monitor = monitor
        self._max_bytes = max_bytes
        self._taken = taken
        self._tell = tell

    def read(self, events: list[VanEvent], limit: int) -> bool:
        """Read up to ``limit`` messages; whether nothing is left."""
        router = self._router
        speakers = self.connections.speakers
        for _ in range(limit):
            try:
                routing_id = router.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            first = router.recv(copy=False)
            uid = speakers.get(routing_id) or self._heard_new(routing_id, first, events)
            frames = read_rest(router, first, self._max_bytes)
            if uid is None:
                continue
            if frames is None:
                # libzmq has no way to close one connection of a ROUTER; it is not heard any more.
                self.connections.forget(uid)
                events.append(Disconnected(uid, "it sent a message over the limits"))
            elif not is_ours(frames):
                events.append(Received(uid, frames))
            if not has_more(router):
                return True
        return False

    def _heard_new(self, routing_id: bytes, first: zmq.Frame, events: list[VanEvent]) -> str | None:
        self.read_monitor(events, 0)
        name = split_routing_id(routing_id)
        if name is not None and self._taken(name.uid):
            self.turned_away("", TAKEN_NAME)
            return None
        try:
            descriptor = int(first.get(zmq.SRCFD))
        except zmq.ZMQError:  # libzmq could not look at the connection: it is gone already
            descriptor = -1
        return self.connections.heard(routing_id, descriptor, time.monotonic(), events)

    def read_monitor(self, _events: list[VanEvent], _limit: int) -> None:
        now = time.monotonic()
        for event, value in monitor_events(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                self.connections.descriptor_opened(value)
            elif event == zmq.EVENT_DISCONNECTED:
                self.connections.descriptor_closed(value, now)
            elif event == WRONG_PROTOCOL:
                self.turned_away("", _REASONS.get(value, OTHER_PROTOCOL))
            elif event == BROKEN_OFF:
                self.turned_away("", GAVE_UP)

    def turned_away(self, address: str, reason: str) -> None:
        """Somebody from ``address`` was not let in."""
        self._tell(self.strangers.note(address, reason, time.monotonic()))

    def send(self, uid: str, buffers: list[bytes | memoryview], *, is_large: bool) -> None:
        """Send to whoever is connected under ``uid``; large messages by its connections in turn."""
        first = self.connections.routing_id_of(uid)
        if first is None:
            return
        if is_large:
            chosen = self.connections.next_routing_id_of(uid)
            if chosen is not None and send(self._router, [chosen, *buffers]):
                return  # else that one has just ended
        send(self._router, [first, *buffers])

    def report_ended(self, events: list[VanEvent]) -> None:
        due = self.connections.next_due()
        if due is None:
            return
        now = time.monotonic()
        if due > now:
            return
        if not self.read(events, 256):
            now -= OVERDUE_S
        for routing_id in self.connections.doubtful(now):
            if not send(self._router, [routing_id, b""]):
                self.connections.found_dead(routing_id, now)
        self.connections.report_ended(now, events)

    def close(self, linger_ms: int) -> None:
        close_watched(self._router, self._monitor, linger_ms)


def _keep_buffers_small(listen_fd: int) -> None:
    """libzmq sets no options of a socket that it did not make; accepted ones inherit these."""
    with socket.socket(fileno=os.dup(listen_fd)) as listening:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            listening.setsockopt(socket.SOL_SOCKET, option, LOOPBACK_BUFFER_BYTES)


_REASONS = {ANOTHER_MECHANISM: OTHER_MECHANISM, ANOTHER_CURVE_KEY: OTHER_KEY}


def listen(router: Socket, host: str, port: int, listen_fd: int | None, *, guarded: bool) -> int:
    """Bind the ROUTER, or give it the socket ``listen_fd``; returns the port.

    Unless it is ``guarded`` by a key, the address must be one of this machine's loopback.
    """
    if listen_fd is not None:
        endpoint = listening_endpoint(listen_fd, host, port)
    else:
        try:
            endpoint = resolve(host, port, 0)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: the name {host!r} has no address ({error})"
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
