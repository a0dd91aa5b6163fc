"""A node: where the pure protocol meets a van. One I/O thread owns everything in here.

``step`` is the whole life of a node: take what the van has, carry out what other threads
asked for (``errands.py``), look at the clock, send what may be sent. A node is driven by its own
I/O thread (``start_thread``) or, in the simulator, by somebody who calls ``step`` and owns the
clock. What depends on the role stands in ``control.py`` (members) and ``scheduler.py``; who is who
in ``protocol/membership.py``; how data moves in ``plane/``; nodes of one machine in ``nearby.py``;
apps use ``customer.py``. Nothing on the I/O thread waits, and other threads may use only what says
so, and futures.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pslite.config import Config
from pslite.customer import Customers, Handler, Reply
from pslite.errands import Errands
from pslite.errors import ClosedError, ConfigError, NodeLostError, PSError, UsageError
from pslite.farewell import take_leave, wait_until
from pslite.future import Future
from pslite.gate import FROM_MEMBERS, Gate
from pslite.ids import NodeInfo, Role
from pslite.links import TELL_BYTES, Delivery, Links
from pslite.log import Log
from pslite.memory import Bytes, Heap, Sharing
from pslite.nearby import MESSAGES as NEARBY
from pslite.nearby import Nearby
from pslite.plane import Transfer
from pslite.pool import InlinePool, Pool
from pslite.protocol.membership import Gone, Membership
from pslite.survey import ProgressSource
from pslite.traffic import Traffic
from pslite.van.base import Connected, Denied, Disconnected, Received, TurnedAway, Van
from pslite.watch import Watch
from pslite.wire.codec import MAX_HEADER_BYTES
from pslite.wire.messages import (
    Accepted,
    Beat,
    Message,
    Request,
    Response,
)

if TYPE_CHECKING:
    from pslite.control import Control

#: How often requests are looked at that wait for an app which never comes.
_EXPIRE_INTERVAL_S = 1.0
#: Acceptance does not depend on rounds: it takes as long as the bytes take to travel.
_ACCEPTANCE_S = 5.0
#: The rest of a header frame is small (``wire/codec.py``).
_MAX_BODY_BYTES = MAX_HEADER_BYTES - 65_536


class Postoffice:
    """One node of a cluster. Make it with ``pslite.start``, not by hand."""

    def __init__(
        self,
        config: Config,
        van: Van,
        *,
        incarnation: int,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
        pool: Pool | None = None,
    ) -> None:
        self.config = config
        self.role = Role(config.role)
        self.incarnation = incarnation
        self.log = log
        self.clock = clock
        self.pool: Pool = pool if pool is not None else InlinePool()
        self.van = van
        trace = log.trace if config.verbose >= 2 else None
        self.errands = Errands(van.wake, clock)
        self.gate = Gate(takes_registrations=self.role is Role.SCHEDULER)
        self.heap = self._new_heap()
        self.sharing = Sharing(self.heap)
        self.links = Links(
            van,
            job=config.job_id,
            incarnation=incarnation,
            resend_timeout_s=config.resend_timeout_s,
            # A sender never waits for its credits only because nobody tells it.
            tell_bytes=min(TELL_BYTES, config.credit_bytes // 8),
            trace=trace,
            objection=self.gate.objection,
            sharing=self.sharing,
        )
        self.membership = Membership(self.role)
        self.customers = Customers(self._send_to_app, self.errands.call)
        self.traffic = Traffic(self)
        self.nearby = Nearby(self)
        self.watch = Watch(self)
        self.control: Control | None = None
        #: Completes with this node's entry once the cluster is complete.
        self.ready: Future[NodeInfo] = Future("the cluster to be complete")
        #: Completes once this node is not needed any more (servers, scheduler).
        self.finished: Future[None] = Future("the end of the job")
        #: Called on the I/O thread after a node is gone.
        self.on_departure: list[Callable[[], None]] = []
        #: Who knows how far a worker's training has come, for reports (``reporting.py``).
        self.progress: ProgressSource | None = None
        self.began_at = clock()
        self.error: BaseException | None = None
        self.info: NodeInfo | None = None
        #: How many strangers the van has turned away, as far as it told.
        self.turned_away = 0
        self._expire_at = 0.0
        self._closing = False

    # -- who is who --------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This node's rank within its role.

        Raises:
            UsageError: the cluster is not complete yet.
        """
        if self.info is None:
            raise UsageError("the rank is known once the cluster is complete: wait for `ready`")
        return self.info.rank

    def join(self, info: NodeInfo, roster: tuple[NodeInfo, ...], now: float) -> None:
        """The cluster is complete; called by ``control``."""
        self.membership.begin(roster)
        self.info = info
        for node in roster:
            self.links.know(node.uid)
        self.nearby.begin(info, roster)
        for node in self.membership.neighbours():
            self.watch.add(node.uid, now, node)
        for delivery in self.gate.complete(frozenset(self.membership.node_ids)):
            self._dispatch(delivery, now)
        self.nearby.offer_segments()
        self.nearby.offer_pipes()
        self._spread(self.config.connections)
        self.ready.set_result(info)

    def spread(self, connections: int) -> None:
        """Use so many TCP connections to each server of another machine. From any thread.

        They are opened by a worker, come into use as they are there, and never become fewer;
        16 are the most.
        """
        self.errands.call(lambda: self._spread(connections))

    def _spread(self, connections: int) -> None:
        for node in self.membership.neighbours():
            if node.role == Role.SERVER.value and node.node_id not in self.nearby.near:
                self.van.spread(node.uid, connections)

    # -- memory ------------------------------------------------------------------------

    def _new_heap(self) -> Heap:
        return Heap(
            shared=self.config.shm,
            limit_bytes=self.config.shm_bytes,
            announce=lambda: self.errands.call(self.nearby.offer_segments),
            warn=self.log.warn,
        )

    def buffer(self, nbytes: int, *, lasting: bool = False) -> Bytes:
        """Memory to send from: flat, uninitialised, free again when nothing refers to it.

        ``lasting`` buffers that are asked for one after the other lie so, as far as possible.

        Peers on this machine read it where it lies, so it must stay as it is until they are
        done with it: see ``pslite/memory``. From any thread.
        """
        self.errands.check_process()  # a child's memory would be its parent's
        return self.heap.buffer(nbytes, lasting=lasting)

    def shared_rows(self, pieces: Sequence[Bytes]) -> list[Bytes] | None:
        """These pieces of this node's buffers, neighbours as one; None where any is no such piece.

        Nothing is copied; what is returned keeps the pieces alive. From any thread.
        """
        return self.heap.rows(pieces)

    @staticmethod
    def whole_of(buffer: Bytes) -> tuple[int, int, object] | None:
        """The stretch of memory that a node's buffer lies in: (address, bytes, owner).

        The buffer may be a part of one. Stretches begin and end with a page; the owner keeps its
        own mapped, and goes with the last buffer in it, not before the node ends. None for memory
        that is no node's. From any thread.
        """
        return Heap.whole_of(buffer)

    # -- what other threads may call ---------------------------------------------------

    def call(self, command: Callable[[], None]) -> None:
        """Have ``command`` run on the I/O thread. From any thread; returns at once.

        For apps; the project's own code calls ``errands`` itself.

        Raises:
            UsageError: this is a forked child, which has no I/O thread: nothing would happen.
        """
        self.errands.call(command)

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Start pushes, pulls or both. From any thread of a worker."""
        self.errands.call(lambda: self.traffic.submit(transfers))

    def request(
        self,
        nodes: Sequence[int],
        app: int,
        head: int,
        body: bytes = b"",
        frames: Mapping[int, Sequence[Any]] | None = None,
        customer: int = 0,
    ) -> Future[dict[int, Reply]]:
        """Ask an app on each of ``nodes``; completes with {node id: reply}. From any thread.

        ``frames`` (node id -> payload) must stay unchanged until the future is done.
        """
        future: Future[dict[int, Reply]] = Future(lambda: self._names(nodes))
        payload = dict(frames or {})

        def ask() -> None:
            error = self.error or self._unreachable(nodes, body)
            if error is not None:
                future.set_error(error)
                return
            self.customers.ask(nodes, app, customer, head, body, payload, future)

        self.traffic.send_joined()  # what was pushed before comes before
        self.errands.call(ask)
        return future

    def barrier(self, group: int, timeout_s: float | None = None) -> Future[None]:
        """Completes once every node of ``group`` has reached its barrier. From any thread.

        With ``timeout_s``, the scheduler gives the barrier up after that time, for all who
        wait, with an error that names who is missing.
        """
        future: Future[None] = Future(f"a barrier of group {group}")

        def enter() -> None:
            if self.error is not None or self.control is None:
                future.set_error(self.error or ClosedError("the node is closed"))
                return
            # Whoever is willing to wait without end says so by 0.
            limit_s = timeout_s if timeout_s is not None and 0 < timeout_s < math.inf else 0.0
            self.control.enter_barrier(group, limit_s, future)

        self.traffic.send_joined()
        self.errands.call(enter)
        return future

    def add_app(self, app: int, handler: Handler) -> Future[None]:
        """Register an app (``customer.py``). From any thread."""
        return self.errands.perform(lambda: self.customers.add(app, handler))

    def remove_app(self, app: int) -> None:
        """Take an app away. From any thread."""
        self.errands.call(lambda: self.customers.remove(app))

    def _names(self, nodes: Sequence[int]) -> str:
        return "an answer of " + ", ".join(self.membership.title(node) for node in nodes)

    # -- the loop ----------------------------------------------------------------------

    def start_thread(self) -> None:
        """Drive the node by a thread of its own."""
        name = f"pslite-io-{self.config.role}-{self.incarnation & 0xFFFF:x}"
        self.errands.thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self.errands.thread.start()

    def _loop(self) -> None:
        # A script may have asked to be ended by it; here it only means that a peer reads no more.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})
        try:
            self.begin()
            while not self._closing:
                self.step(None)
        except BaseException as error:
            self.log.error(f"the I/O thread ends: {type(error).__name__}: {error}")
            self.fail(error)
        finally:
            self.links.flush(self.membership.epoch, self.clock(), at_once=True)
            self.van.close()
            self._drain()

    def begin(self) -> None:
        """The first thing to call on the I/O thread."""
        now = self.clock()
        self.watch.begin(now)
        self._expire_at = now + _EXPIRE_INTERVAL_S
        if self.control is None:
            raise UsageError("a node needs a control")
        self.control.begin(now)

    def step(self, timeout_s: float | None) -> bool:
        """Do what there is to do, waiting for it at most ``timeout_s``. Whether there was."""
        due = -math.inf
        if self.errands.commands:
            timeout_s = 0.0
        else:
            due = self.next_due()
            wait_s = max(0.0, due - self.clock())
            timeout_s = wait_s if timeout_s is None else min(timeout_s, wait_s)
        events = self.van.poll(timeout_s)
        now = self.clock()
        worked = bool(events)
        for event in events:
            if type(event) is Received:
                delivery = self.links.receive(event)
                self.watch.heard(event.peer, now)
                if delivery is not None:
                    self._dispatch(delivery, now)
            elif type(event) is Disconnected:
                if event.peer in self.membership.node_ids:
                    who = self.membership.peer_title(event.peer)
                    self.log.info(1, f"connection to {who} is gone")
                self.watch.disconnected(event.peer, now)
            elif type(event) is Connected:
                self.watch.connected(event.peer)
                self.links.reconnected(event.peer, now)
            elif type(event) is Denied:
                self.fail(ConfigError(event.reason))
            elif type(event) is TurnedAway:
                self._turned_away(event)
        worked |= self.errands.run()
        if now >= due:  # what became due meanwhile has its turn in the next step
            self._run_timers(now)
            self.errands.run()
        self.traffic.send_mail(now)
        self.links.flush(self.membership.epoch, now)
        if self.errands.looks:
            self.errands.look()
        return worked

    def next_due(self) -> float:
        """When ``step`` has something to do though nothing arrives."""
        soonest = min(self._expire_at, self.watch.next_due())
        for due in (
            self.links.next_due(),
            self.errands.timers.next_due(),
            self.van.next_due(),
            self.sharing.next_due(self.clock()),
            self.control.next_due() if self.control is not None else None,
        ):
            if due is not None and due < soonest:
                soonest = due
        return soonest

    def _run_timers(self, now: float) -> None:
        self.links.resend(now)
        self.watch.run(now)
        self.traffic.run(now)
        self.errands.timers.run(now)
        if now >= self._expire_at:
            self._expire_at = now + _EXPIRE_INTERVAL_S
            self.customers.expire(now - self.config.rendezvous_timeout_s)
        if self.control is not None:
            self.control.tick(now)

    # -- messages ----------------------------------------------------------------------

    def send(self, node: int, message: Message, frames: Sequence[Any] = ()) -> None:
        """Send to a node of the roster; nothing happens when it is gone. I/O thread only."""
        peer = self.membership.uids.get(node)
        if peer is not None:
            self.links.send(peer, message, frames, self.membership.epoch, self.clock())

    def _send_to_app(self, node: int, message: Request | Response, frames: Sequence[Any]) -> None:
        if self.info is not None and node == self.info.node_id:
            delivery = Delivery(self.info.uid, self.incarnation, 0, message, frames)
            self.errands.call(lambda: self._dispatch(delivery, self.clock()))
            return
        self.send(node, message, frames)

    def _dispatch(self, delivery: Delivery, now: float) -> None:
        kind = type(delivery.message)
        node = self.membership.node_ids.get(delivery.peer)
        try:
            if kind is Accepted or kind is Beat:
                return
            if kind not in FROM_MEMBERS:
                if self.control is not None:
                    self.control.handle(delivery, now)
            elif node is not None:
                self._from_member(delivery, node, now)
            else:
                self.gate.keep(delivery)
        except PSError as error:
            text = f"a message of {self.membership.peer_title(delivery.peer)} is wrong: {error}"
            self.log.warn_seldom(f"wrong message of {delivery.peer}", text)

    def _turned_away(self, event: TurnedAway) -> None:
        self.turned_away += event.count
        whom = f"{event.count} connections" if event.count > 1 else "a connection"
        origin = f" from {event.address}" if event.address else ""
        self.log.warn(f"refused {whom}{origin}: {event.reason}")

    def _from_member(self, delivery: Delivery, node: int, now: float) -> None:
        message = delivery.message
        if isinstance(message, Request):
            self.customers.request_arrived(node, message, delivery.frames, now)
        elif isinstance(message, Response):
            self.customers.response_arrived(node, message, delivery.frames)
        elif isinstance(message, NEARBY):
            self.nearby.arrived(delivery.peer, node, message)
        else:
            self.traffic.arrived(delivery, node)

    # -- the end -----------------------------------------------------------------------

    def departed(self, gone: Gone) -> None:
        """A node is gone (``membership`` knows); called by ``control``."""
        error = NodeLostError(gone.error_text, role=gone.node.role, rank=gone.node.rank)
        node = gone.node.node_id
        self.watch.forget(gone.node.uid)
        self.customers.pending.depart(node, error)
        self.traffic.departed(node, error)
        if gone.left:
            self.links.release(gone.node.uid)
        else:
            self.links.shut(gone.node.uid)
        for listener in self.on_departure:
            listener()

    def begin_epoch(self, epoch: int) -> None:
        """The scheduler has announced a later epoch; called by ``control``."""
        self.membership.epoch = epoch
        self.traffic.begin_epoch(epoch)

    def fail(self, error: BaseException) -> None:
        """End every wait of this node with ``error``, now and from now on. I/O thread only."""
        if self.error is not None:
            return
        self.error = error
        self.traffic.fail(error)
        self.customers.pending.fail(error)
        if self.control is not None:
            self.control.fail(error)
        self.ready.set_error(error)
        self.finished.set_error(error)

    def _unreachable(self, nodes: Sequence[int], body: bytes) -> BaseException | None:
        """Why a request cannot be sent."""
        if self.info is None:
            return UsageError("requests can be made once the cluster is complete: wait for `ready`")
        if len(body) > _MAX_BODY_BYTES:
            return UsageError(f"a request's body may have {_MAX_BODY_BYTES} bytes; use frames")
        for node in nodes:
            gone = self.membership.gone.get(node)
            if gone is not None:
                return NodeLostError(gone.sentence, role=gone.node.role, rank=gone.node.rank)
            info = self.membership.node(node)
            reachable = info is not None and info.role != self.role.value
            if not reachable and node != self.info.node_id:
                whom = self.membership.title(node)
                return UsageError(f"{self.info.title} has no connection to {whom}")
        return None

    def __enter__(self) -> Postoffice:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(goodbye=exception[0] is None)

    def close(self, *, goodbye: bool = True) -> None:
        """Leave the cluster and stop. Idempotent; from any thread but the I/O thread.

        With ``goodbye``, waits (PS_CLOSE_TIMEOUT at most) until the peers have accepted all
        that was pushed, and tells them that this node is done.
        """
        thread = self.errands.thread
        if thread is None or self._closing or self.errands.is_forked:
            return
        if goodbye and self.info is not None and thread.is_alive():
            take_leave(self)
        self.errands.call(self._stop)
        thread.join(self.config.close_timeout_s)
        if not self.pool.close(self.config.close_timeout_s):
            self.log.warn("closed though the pool still works on what was pushed")

    def wait_until_accepted(self) -> None:
        """Return once the peers have accepted all that was sent, or after a short while.

        Not on the I/O thread. Afterwards nobody reads the memory that was sent from.
        """
        wait_until(self, self.links.everything_accepted, time.monotonic() + _ACCEPTANCE_S)

    def _stop(self) -> None:
        self._closing = True

    def _drain(self) -> None:
        """After the last step: nobody may wait for this node for ever."""
        if self.links.dropped:
            counts = ", ".join(f"{count} {why}" for why, count in self.links.dropped.items())
            self.log.info(1, f"dropped {sum(self.links.dropped.values())} messages: {counts}")
        self.fail(ClosedError("the node was closed"))
        self.errands.end()
        self.customers.close()
        self.traffic.close()
        self.sharing.close()
