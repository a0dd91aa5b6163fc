"""The van over TCP: one ROUTER for whoever connects here, one DEALER for each ``connect``.

The only file that imports ``zmq``. It keeps the contract of ``base.py`` and may not know what
the frames mean. Everything runs on the owner's thread but ``wake``; libzmq adds one I/O thread
a van, which also answers heartbeats, so a node with a busy interpreter is not taken for lost.
Read ``base.py`` and ``accepted.py`` first; nothing comes after this file.

What differs from everyday ZeroMQ, and why (options are those of the manual page
``zmq_setsockopt``; the behaviour was read in the source of libzmq 4.3.5 and is tested)

* **A socket lives for one connection.** libzmq would reconnect by itself and then send what was
  queued for the dead connection, out of buffers that may hold something else by then. So its
  reconnecting is put off for ever, and a lost DEALER is replaced by a fresh one with a fresh
  routing id. That also makes a routing id mean one connection, which ``accepted.py`` needs,
  and ROUTER_HANDOVER unnecessary: a restarted node never collides with its old self.
* **No receive limit.** A socket at its high-water mark stops reading, and then heartbeats go
  unanswered: the peers of a node that is merely slow would call it lost (a test shows it).
  Credits bound what can be under way.
* **Ends are drained before they are told.** libzmq announces the end of a connection before it
  hands over the last messages of it; see ``accepted.py``.
* **A message of one empty frame is ours.** PROBE_ROUTER makes libzmq open each connection with
  one, which tells the accepting end who is there; and one is sent to learn whether a connection
  still exists. Both are swallowed by the van that receives them.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import math
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from pslite.errors import ClosedError, ConfigError, UsageError
from pslite.van.accepted import AcceptedConnections, make_routing_id
from pslite.van.addresses import (
    bind_problem,
    check_bind_address,
    listening_endpoint,
    parse_address,
    resolve,
)
from pslite.van.base import (
    Buffer,
    Connected,
    Disconnected,
    Received,
    Van,
    VanEvent,
    as_buffers,
    check_uid,
    size_of,
)
from pslite.van.wakeup import Wakeup

MESSAGES_PER_POLL = 256
FIRST_RETRY_S = 0.05
LAST_RETRY_S = 1.0
CONNECT_TIMEOUT_S = 5.0
SETTLE_S = 0.02
"""From the news that a connection is over until its last messages can be read for sure. libzmq's
I/O thread needs microseconds; the rest is for a machine whose cores are all busy."""
OVERDUE_S = 1.0
"""An end is told at the latest so long after SETTLE_S, however many messages still come."""
LARGE_FRAME_BYTES = zmq.COPY_THRESHOLD
NEVER_MS = 2**30
MAX_SOCKETS = 16384
LISTEN_BACKLOG = 1024

_EVENT = struct.Struct("=Hi")
_logger = logging.getLogger(__name__)
_Socket = zmq.Socket[bytes]
_Reader = Callable[["list[VanEvent]", int], object]


@dataclass(eq=False, slots=True)
class _Link:
    """One peer of ``connect``: its present socket, or what waits for the next one."""

    peer: str
    address: tuple[str, int]
    socket: _Socket | None = None
    monitor: _Socket | None = None
    connected: bool = False
    backlog: list[list[bytes | memoryview]] = field(default_factory=list)
    attempt: int = 0
    retry_s: float = FIRST_RETRY_S


class ZmqVan(Van):
    """A :class:`Van` whose messages travel over TCP. All settings are keywords.

    Args:
        uid: the name under which accepting ends know this node.
        heartbeat_interval_s: how often libzmq asks a peer for a sign of life.
        heartbeat_timeout_s: silence after which a connection is lost. A frame counts as a sign
            of life when it is complete, so frames must be small enough to arrive in this time.
        handshake_timeout_s: how long a new TCP connection may take to present itself.
        linger_s: how long ``close`` may wait for what was sent to leave this machine.
        max_message_bytes: the largest frame. ``send`` refuses a larger one, and a peer that
            sends one is disconnected before memory is allocated. The same on all nodes.

    Options that secure the connections belong here as further keywords, applied to every
    socket in ``_new_pair``.
    """

    def __init__(
        self,
        uid: str,
        *,
        heartbeat_interval_s: float = 1.0,
        heartbeat_timeout_s: float = 5.0,
        handshake_timeout_s: float = 2.0,
        linger_s: float = 1.0,
        max_message_bytes: int = 1 << 30,
    ) -> None:
        self.uid = check_uid(uid)
        self._max_message_bytes = max_message_bytes
        self._linger_ms = round(linger_s * 1000)
        self._options = (
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, max_message_bytes),
            (zmq.HEARTBEAT_IVL, round(heartbeat_interval_s * 1000)),
            (zmq.HEARTBEAT_TIMEOUT, round(heartbeat_timeout_s * 1000)),
            (zmq.HANDSHAKE_IVL, round(handshake_timeout_s * 1000)),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 30),
            (zmq.TCP_KEEPALIVE_INTVL, 10),
            (zmq.TCP_KEEPALIVE_CNT, 3),
        )
        # One I/O thread, and never more: accepted.py relies on its order of events.
        self._context: zmq.Context[_Socket] = zmq.Context(io_threads=1)
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._born_ns = time.time_ns()
        self._numbers = itertools.count(1)
        self._listener: _Listener | None = None
        self._links: dict[str, _Link] = {}
        self._timers: dict[_Link, float] = {}
        self._wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._readers: dict[object, _Reader] = {}
        self._watch(self._wakeup.fileno(), lambda _events, _limit: self._wakeup.read())
        self._closed = False

    # ------------------------------------------------------------------ connections

    def bind(self, host: str, port: int, *, listen_fd: int | None = None) -> int:
        self._check_open("bind")
        check_bind_address(host, port)
        if self._listener is not None:
            raise UsageError("this van listens already: one van has one address")
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        router, monitor = self._new_pair(zmq.ROUTER, events)
        try:
            bound_port = _listen(router, host, port, listen_fd)
        except BaseException:
            _close_pair(router, monitor, linger_ms=0)
            raise
        listener = self._listener = _Listener(router, monitor)
        self._watch(router, listener.read)
        self._watch(monitor, listener.read_monitor)
        return bound_port

    def connect(self, peer: str, address: str) -> None:
        self._check_open("connect")
        link = _Link(check_uid(peer), parse_address(address))
        self.disconnect(peer)
        self._links[peer] = link
        self._open_link(link)

    def disconnect(self, peer: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._timers.pop(link, None)
            self._close_link(link, self._linger_ms if link.connected else 0)
        elif self._listener is not None:
            self._listener.connections.forget(peer)

    def _open_link(self, link: _Link) -> None:
        try:
            endpoint, needs_ipv6 = resolve(*link.address, link.attempt)
        except OSError as error:
            _logger.info("no address yet for %s of %r: %s", link.address[0], link.peer, error)
            self._retry(link)
            return
        link.attempt += 1
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        dealer, link.monitor = self._new_pair(zmq.DEALER, events)
        link.socket = dealer
        dealer.set(zmq.ROUTING_ID, make_routing_id(self.uid, self._born_ns, next(self._numbers)))
        dealer.set(zmq.PROBE_ROUTER, 1)
        dealer.set(zmq.RECONNECT_IVL, NEVER_MS)
        dealer.set(zmq.CONNECT_TIMEOUT, round(CONNECT_TIMEOUT_S * 1000))
        dealer.set(zmq.IPV6, int(needs_ipv6))
        self._watch(dealer, functools.partial(self._read_link, link))
        self._watch(link.monitor, functools.partial(self._read_link_monitor, link))
        dealer.connect(endpoint)

    def _retry(self, link: _Link) -> None:
        self._timers[link] = time.monotonic() + link.retry_s
        link.retry_s = min(2 * link.retry_s, LAST_RETRY_S)

    def _close_link(self, link: _Link, linger_ms: int) -> None:
        if link.socket is not None and link.monitor is not None:
            self._unwatch(link.socket)
            self._unwatch(link.monitor)
            _close_pair(link.socket, link.monitor, linger_ms)
        link.socket = link.monitor = None

    # ------------------------------------------------------------------ messages

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        buffers = as_buffers(frames)
        limit = self._max_message_bytes
        for buffer in buffers:
            if size_of(buffer) > limit:
                raise UsageError(
                    f"a frame of {size_of(buffer)} bytes is over this van's limit of {limit}: "
                    "send it in parts"
                )
        link = self._links.get(peer)
        if link is None:
            if self._listener is not None:
                self._listener.send(peer, buffers)
        elif link.connected and link.socket is not None:
            _send(link.socket, buffers)
        else:
            # As libzmq would: small frames are copied, large ones are read later.
            link.backlog.append(
                [bytes(part) if size_of(part) < LARGE_FRAME_BYTES else part for part in buffers]
            )

    def poll(self, timeout_s: float | None) -> list[VanEvent]:
        events: list[VanEvent] = []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed:
            ready = self._poller.poll(self._wait_ms(deadline))
            limit = max(16, MESSAGES_PER_POLL // (len(ready) or 1))
            for source, _ in ready:
                self._readers[source](events, limit)
            self._run_timers(events)
            woken = self._wakeup.take()
            if events or woken or (deadline is not None and time.monotonic() >= deadline):
                break
        return events

    def wake(self) -> None:
        self._wakeup.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer in list(self._links):
            self.disconnect(peer)
        if self._listener is not None:
            self._listener.close(self._linger_ms)
        self._wakeup.close()
        self._context.term()

    def _wait_ms(self, deadline: float | None) -> int | None:
        dues = [] if deadline is None else [deadline]
        dues.extend(self._timers.values())
        ended = None if self._listener is None else self._listener.connections.next_due()
        if ended is not None:
            dues.append(ended)
        if not dues:
            return None
        return max(0, math.ceil((min(dues) - time.monotonic()) * 1000))

    def _read_link(self, link: _Link, events: list[VanEvent], limit: int) -> bool:
        """Read up to ``limit`` messages; whether nothing is left."""
        dealer = link.socket
        if dealer is None:
            return True
        if not link.connected:
            # The monitor told of the connection before the first message could come.
            self._read_link_monitor(link, events, limit)
        for _ in range(limit):
            try:
                first = dealer.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            frames = _rest(dealer, first)
            if not _is_ours(frames):
                events.append(Received(link.peer, frames))
        return False

    def _read_link_monitor(self, link: _Link, events: list[VanEvent], _limit: int) -> None:
        if link.monitor is None or link.socket is None:
            return
        for event, _ in _monitor_events(link.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                link.connected = True
                link.retry_s = FIRST_RETRY_S
                events.append(Connected(link.peer))
                for buffers in link.backlog:
                    _send(link.socket, buffers)
                link.backlog.clear()
            elif event == zmq.EVENT_CONNECT_RETRIED:
                # libzmq is done with the connection: nothing more will come out of it.
                self._timers[link] = 0.0
            elif event == zmq.EVENT_DISCONNECTED:
                self._timers.setdefault(link, time.monotonic() + SETTLE_S)

    def _run_timers(self, events: list[VanEvent]) -> None:
        if self._timers:
            now = time.monotonic()
            for link in [link for link, due in self._timers.items() if due <= now]:
                del self._timers[link]
                if link.socket is None:
                    self._open_link(link)
                else:
                    self._replace_lost(link, events)
        if self._listener is not None:
            self._listener.report_ended(events)

    def _replace_lost(self, link: _Link, events: list[VanEvent]) -> None:
        while not self._read_link(link, events, MESSAGES_PER_POLL):
            pass
        self._close_link(link, linger_ms=0)
        if link.connected:
            link.connected = False
            host, port = link.address
            events.append(Disconnected(link.peer, f"the connection to {host}:{port} is gone"))
        self._retry(link)

    # ------------------------------------------------------------------ sockets

    def _new_pair(self, kind: int, events: int) -> tuple[_Socket, _Socket]:
        """A socket and the monitor that tells of ``events`` of it."""
        name = f"inproc://monitor-{next(self._numbers)}"
        made: list[_Socket] = []
        try:
            for each in (kind, zmq.PAIR):  # no limits: a full monitor would stop libzmq
                made.append(self._context.socket(each))
                for option, value in self._options:
                    made[-1].set(option, value)
            made[0].monitor(name, events)
            made[1].connect(name)
        except zmq.ZMQError as error:
            for each_made in made:
                each_made.close(linger=0)
            raise ConfigError(
                f"cannot open another socket ({error.strerror}): a node needs about five open "
                "files for each of its peers; raise their limit (ulimit -n)"
            ) from error
        return made[0], made[1]

    def _watch(self, source: _Socket | int, reader: _Reader) -> None:
        self._readers[source] = reader
        self._poller.register(source, zmq.POLLIN)

    def _unwatch(self, source: _Socket) -> None:
        del self._readers[source]
        self._poller.unregister(source)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"cannot {what}: this van was closed")


class _Listener:
    """The accepting end: the ROUTER, its monitor and the record that joins their news."""

    def __init__(self, router: _Socket, monitor: _Socket) -> None:
        self.connections = AcceptedConnections(SETTLE_S)
        self._router = router
        self._monitor = monitor

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
            frames = _rest(router, first)
            if uid is not None and not _is_ours(frames):
                events.append(Received(uid, frames))
        return False

    def _heard_new(self, routing_id: bytes, first: zmq.Frame, events: list[VanEvent]) -> str | None:
        self.read_monitor(events, 0)
        try:
            descriptor = int(first.get(zmq.SRCFD))
        except zmq.ZMQError:  # libzmq could not look at the connection: it is gone already
            descriptor = -1
        return self.connections.heard(routing_id, descriptor, time.monotonic(), events)

    def read_monitor(self, _events: list[VanEvent], _limit: int) -> None:
        now = time.monotonic()
        for event, descriptor in _monitor_events(self._monitor):
            if event == zmq.EVENT_ACCEPTED:
                self.connections.descriptor_opened(descriptor)
            elif event == zmq.EVENT_DISCONNECTED:
                self.connections.descriptor_closed(descriptor, now)

    def send(self, uid: str, buffers: list[bytes | memoryview]) -> None:
        routing_id = self.connections.routing_id_of(uid)
        if routing_id is not None:
            _send(self._router, [routing_id, *buffers])

    def report_ended(self, events: list[VanEvent]) -> None:
        due = self.connections.next_due()
        if due is None:
            return
        now = time.monotonic()
        if due > now:
            return
        if not self.read(events, MESSAGES_PER_POLL):
            now -= OVERDUE_S
        for routing_id in self.connections.doubtful(now):
            if not _send(self._router, [routing_id, b""]):
                self.connections.found_dead(routing_id, now)
        self.connections.report_ended(now, events)

    def close(self, linger_ms: int) -> None:
        _close_pair(self._router, self._monitor, linger_ms)


def _send(to: _Socket, buffers: list[bytes | memoryview]) -> bool:
    """Send one message, or drop it where nobody is connected any more; whether it was sent."""
    last = len(buffers) - 1
    try:
        for index, buffer in enumerate(buffers):
            flags = zmq.NOBLOCK if index == last else zmq.NOBLOCK | zmq.SNDMORE
            to.send(buffer, flags, copy=False)
    except zmq.ZMQError as error:
        # Both come at the first frame or never, so no message is left half sent.
        if error.errno in (errno.EHOSTUNREACH, errno.EAGAIN):
            return False
        raise
    return True


def _rest(source: _Socket, frame: zmq.Frame) -> list[memoryview | bytes]:
    """The views of all frames of the message that begins with ``frame``."""
    frames: list[memoryview | bytes] = [frame.buffer]
    while frame.more:
        frame = source.recv(copy=False)
        frames.append(frame.buffer)
    return frames


def _is_ours(frames: list[memoryview | bytes]) -> bool:
    return len(frames) == 1 and not len(frames[0])


def _monitor_events(monitor: _Socket) -> list[tuple[int, int]]:
    """The ``(event, value)`` pairs that wait at a monitor; the value is a descriptor mostly."""
    found: list[tuple[int, int]] = []
    while True:
        try:
            head = monitor.recv(zmq.NOBLOCK)
        except zmq.Again:
            return found
        event, value = _EVENT.unpack(head)
        found.append((event, value))
        monitor.recv()


def _close_pair(watched: _Socket, monitor: _Socket, linger_ms: int) -> None:
    watched.monitor(None, 0)
    monitor.close(linger=0)
    watched.close(linger=linger_ms)


def _listen(router: _Socket, host: str, port: int, listen_fd: int | None) -> int:
    """Bind the ROUTER, or give it the socket ``listen_fd``; returns the port."""
    if listen_fd is not None:
        endpoint, needs_ipv6 = listening_endpoint(listen_fd, host, port)
        os.set_blocking(listen_fd, False)
        router.set(zmq.USE_FD, listen_fd)
    else:
        try:
            endpoint, needs_ipv6 = resolve(host, port, 0)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: the name {host!r} has no address ({error})"
            ) from error
    router.set(zmq.ROUTER_MANDATORY, 1)
    router.set(zmq.BACKLOG, LISTEN_BACKLOG)
    router.set(zmq.IPV6, int(needs_ipv6))
    try:
        router.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {bind_problem(error.errno or 0)}"
        ) from error
    return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
