"""The van over TCP: a ROUTER for peers, a DEALER for each own connection.

It keeps the contract of ``base.py`` and does not know what the frames mean. Everything except
``wake`` runs on the owner's thread. libzmq adds one I/O thread per van, which also answers
heartbeats, so a node with a busy interpreter does not count as lost.
Read ``base.py``, ``accepted.py`` and the files beside it first; nothing comes after this file.

What differs from everyday ZeroMQ, and why (options are those of the manual page
``zmq_setsockopt``; the behaviour was read in the source of libzmq 4.3.5 and is tested)

* **A socket lives for one connection.** libzmq would reconnect by itself and then send what was
  queued for the dead connection, from buffers that may hold other data by then. So the van puts
  off its reconnecting for ever, and replaces a lost DEALER by a fresh one with a fresh routing
  id. A routing id then means one connection, which ``accepted.py`` needs, and ROUTER_HANDOVER
  is unnecessary: a restarted node never collides with its old self.
* **No receive limit.** A socket at its high-water mark stops reading, and then heartbeats go
  unanswered: the peers of a node that is merely slow would declare it lost (a test shows this).
  Credits limit what is in flight.
* **Connections are drained before their end is reported.** libzmq announces the end of a
  connection before it delivers the connection's last messages; see ``accepted.py``.
* **A message of one empty frame belongs to the van.** PROBE_ROUTER makes libzmq open each
  connection with one, which tells the accepting end who has connected. The van also sends one to
  learn whether a connection still exists. The receiving van drops both.
"""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import zmq

from pslite.errors import ClosedError, UsageError
from pslite.security import Mechanism
from pslite.van.base import (
    MAX_FRAMES,
    TOTAL_PER_FRAME,
    Buffer,
    InTransit,
    PipeTicket,
    Van,
    VanEvent,
    as_buffers,
    check_uid,
    size_of,
)
from pslite.van.cutting import PIECE_BYTES
from pslite.van.zmq.accepted import make_routing_id
from pslite.van.zmq.addresses import HostAddresses, check_bind_address, parse_address
from pslite.van.zmq.authentication import SocketSecurity, ZapHandler
from pslite.van.zmq.dealer import LinkNeeds, Reader
from pslite.van.zmq.flows import counts_bytes
from pslite.van.zmq.link import MESSAGES_PER_POLL, Link
from pslite.van.zmq.listener import OTHER_KEY, ROUTER_EVENTS, Listener, listen
from pslite.van.zmq.pipes import Pipes
from pslite.van.zmq.sockets import Socket, SocketMaker, close_watched

SPREAD_BYTES = 64 << 10
"""If a peer has several connections, messages of at least this many bytes take turns on them."""


class Wakeup:
    """Lets any thread end the owner's wait. Many calls before a poll cost one byte."""

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)
        self._writing.setblocking(False)
        # wake() and close() must not use the descriptor together. Reentrant, because a finalizer
        # may call wake() on a thread that is in it.
        self._lock = threading.RLock()
        self._pending = False
        self._taken = False

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._reading.fileno()

    def wake(self) -> None:
        """Make :meth:`fileno` readable. From any thread, even after :meth:`close`."""
        # Read without the lock on purpose: while it is set, a poll is certain to return, and the
        # owner then looks at its queues.
        if self._pending:
            return
        with self._lock:
            if not self._pending:
                self._pending = True
                self._writing.send(b"\0")

    def read(self) -> None:
        """Empty the channel; called when :meth:`fileno` is readable."""
        self._reading.recv(16)
        self._pending = False
        self._taken = True

    def take(self) -> bool:
        """Return whether there was a wake-up since the last call."""
        taken, self._taken = self._taken, False
        return taken

    def close(self) -> None:
        """Free both ends; later calls of :meth:`wake` do nothing."""
        with self._lock:
            self._pending = True
            self._reading.close()
            self._writing.close()


class ZmqVan(Van):
    """A :class:`Van` whose messages are sent over TCP. All settings are keywords.

    Args:
        uid: the name under which accepting ends know this node.
        hosts: the addresses of names that have been looked up already.
        heartbeat_interval_s: how often libzmq asks a peer for a sign of life.
        heartbeat_timeout_s: silence after which a connection is lost. Each byte that arrives is
            a sign of life; on systems that do not count bytes (``flows.py``), each complete frame.
        handshake_timeout_s: how long the handshake of a new TCP connection may take.
        linger_s: how long ``close`` may wait until sent messages have left this machine.
        max_message_bytes: the most bytes of a frame, the same on all nodes. ``send`` refuses a
            larger frame, and a peer that sends one is disconnected before memory is allocated.
        stranger_bytes: the most memory for all connections that have not sent a message yet.
        mechanism: the secret that both ends of a connection must know, the same on all nodes.
            Without it the van listens at, and connects to, loopback addresses only.
        warn: takes lines about connections that fail, for people.
    """

    def __init__(
        self,
        uid: str,
        *,
        mechanism: Mechanism | None = None,
        hosts: Mapping[str, HostAddresses] | None = None,
        heartbeat_interval_s: float = 1.0,
        heartbeat_timeout_s: float = 5.0,
        handshake_timeout_s: float = 5.0,
        linger_s: float = 1.0,
        max_message_bytes: int = 1 << 30,
        stranger_bytes: int = 64 << 20,
        warn: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.uid = check_uid(uid)
        self._max_message_bytes = max_message_bytes
        self._max_total_bytes = TOTAL_PER_FRAME * max_message_bytes
        self._stranger_bytes = stranger_bytes
        self._linger_ms = round(linger_s * 1000)
        self._doors = SocketSecurity(mechanism, self.uid)
        # Either libzmq looks for signs of life, or this van does.
        has_counters = counts_bytes()
        self._look_every_s = heartbeat_interval_s if has_counters else math.inf
        self._look_at = time.monotonic() + self._look_every_s
        self._silence_s = heartbeat_timeout_s
        libzmq_timeout_s = 0.0 if has_counters else heartbeat_timeout_s
        self._sockets = SocketMaker(
            (
                (zmq.SNDHWM, 0),
                (zmq.RCVHWM, 0),
                # This limits a frame on a connection; ``cutting.py`` limits whole messages.
                (
                    zmq.MAXMSGSIZE,
                    min(max_message_bytes, PIECE_BYTES) + self._doors.overhead_bytes,
                ),
                (zmq.HEARTBEAT_IVL, round(heartbeat_interval_s * 1000)),
                (zmq.HEARTBEAT_TIMEOUT, round(libzmq_timeout_s * 1000)),
                (zmq.HANDSHAKE_IVL, round(handshake_timeout_s * 1000)),
                (zmq.TCP_KEEPALIVE, 1),
                (zmq.TCP_KEEPALIVE_IDLE, 30),
                (zmq.TCP_KEEPALIVE_INTVL, 10),
                (zmq.TCP_KEEPALIVE_CNT, 3),
            )
        )
        self._born_ns = time.time_ns()
        self._numbers = itertools.count(1)
        self._listener: Listener | None = None
        self._zap: ZapHandler | None = None
        self._links: dict[str, Link] = {}
        #: All names that were ever given to ``connect``; no other peer may use them.
        self._called: set[str] = set()
        #: Events that happened outside of a poll.
        self._news: list[VanEvent] = []
        self._wakeup = Wakeup()
        self._poller = zmq.Poller()
        self._readers: dict[object, Reader] = {}
        self._pipes = Pipes(self._watch, self._unwatch)
        self._watch(self._wakeup.fileno(), lambda _events, _limit: self._wakeup.read())
        self._for_links = LinkNeeds(
            self._sockets,
            self._doors,
            self._new_routing_id,
            max_message_bytes,
            self._max_total_bytes,
            handshake_timeout_s,
            heartbeat_timeout_s,
            self._watch,
            self._unwatch,
            self._news.append,
            self.wake,
            hosts or {},
            warn,
        )
        self._closed = False

    # ------------------------------------------------------------------ connections

    def bind(self, host: str, port: int, *, listen_fd: int | None = None) -> int:
        self._check_open("bind")
        check_bind_address(host, port)
        if self._listener is not None:
            raise UsageError(
                f"this van is already listening, so it cannot bind {host}:{port}; "
                "use a separate van for each address"
            )
        router, monitor = self._sockets.new_watched(
            zmq.ROUTER, ROUTER_EVENTS, self._doors.listening
        )
        try:
            self._open_zap()  # first: it must exist when a peer connects
            bound_port = listen(router, host, port, listen_fd, guarded=self._zap is not None)
        except BaseException:
            close_watched(router, monitor, linger_ms=0)
            raise
        listener = self._listener = Listener(
            router,
            monitor,
            self._doors,
            self._max_message_bytes,
            self._max_total_bytes,
            self._stranger_bytes,
            self._is_taken,
            self._news.extend,
        )
        self._watch(router, listener.read)
        self._watch(monitor, listener.read_monitor)
        return bound_port

    def _open_zap(self) -> None:
        credentials = self._doors.credentials
        if credentials is not None and self._zap is None:
            self._zap = ZapHandler(self._sockets.new(zmq.ROUTER), credentials, self._denied_by_zap)
            self._watch(self._zap.socket, self._zap.read)

    def _denied_by_zap(self, address: str) -> None:
        if self._listener is not None:
            self._listener.turned_away(address, OTHER_KEY)

    def _is_taken(self, uid: str) -> bool:
        """Return whether a name is this van's own, or that of a peer of ``connect``."""
        return uid == self.uid or uid in self._called

    def connect(self, peer: str, address: str) -> None:
        self._check_open("connect")
        link = Link(check_uid(peer), parse_address(address), self._for_links)
        self.disconnect(peer)
        self._links[peer] = link
        self._called.add(peer)
        link.open()

    def disconnect(self, peer: str) -> None:
        self._pipes.close(peer)
        link = self._links.pop(peer, None)
        if link is not None:
            link.close(self._linger_ms if link.connected else 0)
        elif self._listener is not None:
            self._listener.connections.forget(peer)

    def trouble(self, peer: str) -> str:
        link = self._links.get(peer)
        return "" if link is None else link.trouble

    def in_transit(self, peer: str) -> InTransit:
        link = self._links.get(peer)
        if link is not None:
            return link.in_transit
        return InTransit() if self._listener is None else self._listener.in_transit(peer)

    def is_refused(self, peer: str) -> bool:
        link = self._links.get(peer)
        return link is not None and link.is_refused

    def is_answered(self, peer: str) -> bool:
        link = self._links.get(peer)
        if link is not None:
            return link.is_answered
        return self._listener is not None and self._listener.is_answered(self._silence_s)

    def spread(self, peer: str, connections: int) -> None:
        link = self._links.get(peer)
        if link is not None:
            link.spread(connections)

    def offer_pipe(self, peer: str) -> PipeTicket | None:
        return self._pipes.offer(peer)

    def take_pipe(self, peer: str, pid: int, ticket: PipeTicket) -> bool:
        return self._pipes.take(peer, pid, ticket)

    def _new_routing_id(self) -> bytes:
        return make_routing_id(self.uid, self._born_ns, next(self._numbers))

    # ------------------------------------------------------------------ messages

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        buffers = as_buffers(frames)
        is_large = self._check_limits(buffers) >= SPREAD_BYTES
        if self._pipes.send(peer, buffers):
            return
        link = self._links.get(peer)
        if link is not None:
            link.send(buffers, is_large=is_large)
        elif self._listener is not None:
            self._listener.send(peer, buffers, is_large=is_large)

    def _check_limits(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Check a message's sizes; return its bytes."""
        limit, total = self._max_message_bytes, 0
        for buffer in buffers:
            size = size_of(buffer)
            total += size
            if size > limit:
                raise UsageError(
                    f"a frame must have at most {limit} bytes, got {size}; send it in parts"
                )
        if len(buffers) > MAX_FRAMES or total > self._max_total_bytes:
            raise UsageError(
                f"a message must have at most {MAX_FRAMES} frames and {self._max_total_bytes} "
                f"bytes, got {len(buffers)} and {total}; send it in parts"
            )
        return total

    def poll(self, timeout_s: float | None) -> list[VanEvent]:
        events: list[VanEvent] = []
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._closed:
            ready = self._poller.poll(self._wait_ms(deadline))
            limit = max(16, MESSAGES_PER_POLL // (len(ready) or 1))
            for source, _ in ready:
                reader = self._readers.get(source)
                if reader is not None:  # otherwise an earlier reader has closed the source
                    reader(events, limit)
            self._run_timers(events)
            if self._news:
                events += self._news
                self._news.clear()
            self._pipes.end(events)
            woken = self._wakeup.take()
            if events or woken or time.monotonic() >= deadline:
                break
        return events

    def wake(self) -> None:
        self._wakeup.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._pipes.close_all(self._linger_ms / 1000)
        for peer in list(self._links):
            self.disconnect(peer)
        if self._listener is not None:
            self._listener.close(self._linger_ms)
            self._listener = None
        if self._zap is not None:
            self._zap.close()
        self._wakeup.close()
        self._sockets.close()

    def _wait_ms(self, deadline: float) -> int | None:
        if self._news:
            return 0
        soonest = min([self._look_at, deadline, *(link.due_at for link in self._links.values())])
        if self._listener is not None:
            soonest = min(soonest, self._listener.next_due())
        if soonest == math.inf:
            return None
        return max(0, math.ceil((soonest - time.monotonic()) * 1000))

    def _run_timers(self, events: list[VanEvent]) -> None:
        now = time.monotonic()
        for link in self._links.values():
            if link.due_at <= now:
                link.run(events)
        if self._listener is not None:
            self._listener.run(events)
        if now >= self._look_at:
            self._look_at = now + self._look_every_s
            for link in self._links.values():
                link.look()
            if self._listener is not None:
                self._listener.end_silent(self._silence_s)

    def _watch(self, source: Socket | int, reader: Reader, wanted: int = zmq.POLLIN) -> None:
        self._readers[source] = reader
        self._poller.register(source, wanted)

    def _unwatch(self, source: Socket | int) -> None:
        del self._readers[source]
        self._poller.unregister(source)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"cannot {what}: this van was closed")
