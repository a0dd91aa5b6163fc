"""``Postoffice``: a node: the pure protocol and a van on one I/O thread.

``step`` is the whole life of a node: take what the van has, carry out what other threads
asked for (``io_queue.py``), look at the clock, send what may be sent. A node is driven by its own
I/O thread (``start_thread``) or, in the simulator, by somebody who calls ``step`` and owns the
clock. What depends on the role stands in ``member.py`` (members) and ``scheduler.py``; who is who
in ``protocol/membership.py``; how data moves in ``plane/``; nodes of one machine in
``same_machine.py``; apps use ``customer.py``. Nothing on the I/O thread waits, and other threads
may use only what says so, and futures.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pslite.config import Config
from pslite.errors import ClosedError, DeadlockError, PSError, UsageError, as_failure
from pslite.future import Future
from pslite.ids import SCHEDULER_ID, NodeInfo, Role, group_title
from pslite.memory.heap import Bytes, Heap
from pslite.memory.sharing import Sharing
from pslite.node.customer import Customers, Handler, Reply
from pslite.node.data import TICK_INTERVAL_S, Traffic
from pslite.node.failure_detector import FailureDetector
from pslite.node.io_queue import Errands
from pslite.node.links import TELL_BYTES, Delivery, Links
from pslite.node.log import Log
from pslite.node.message_filter import FROM_MEMBERS, Admission
from pslite.node.office import Control
from pslite.node.pool import InlinePool, Pool
from pslite.node.report import Reporter
from pslite.node.same_machine import MESSAGES as NEARBY
from pslite.node.same_machine import Nearby
from pslite.node.shutdown import Shutdown, Unheard, wait_until
from pslite.plane import Transfer
from pslite.protocol.membership import Membership
from pslite.van.base import Received, Van
from pslite.wire.messages import Accepted, Beat, LongWait, Message, Request, Response

#: Acceptance does not depend on rounds: it takes as long as the bytes take to travel.
_ACCEPTANCE_S = 5.0
#: Once all is done, a node's threads end at once, but for work of a server that cannot be ended.
_STOP_S = 10.0
#: How often requests are looked at that wait for an app which never comes.
_EARLY_S = 1.0


class Postoffice:
    """One node of a cluster. Make it with ``pslite.start``, not by hand."""

    control: Control
    """Set by ``start.make_node``, before the node is driven."""

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
        self.log = log
        self.clock = clock
        self.pool: Pool = pool if pool is not None else InlinePool()
        self.van = van
        self.errands = Errands(van.wake, clock)
        self.gate = Admission(takes_registrations=config.role == Role.SCHEDULER.value)
        self.heap = Heap(
            shared=config.shm,
            limit_bytes=config.shm_bytes,
            announce=lambda: self.errands.call(self.nearby.offer_segments),
            warn=log.warn,
        )
        self.sharing = Sharing(self.heap)
        self.links = Links(
            van,
            self.sharing,
            job=config.job_id,
            incarnation=incarnation,
            resend_timeout_s=config.resend_timeout_s,
            # A sender never waits for its credits only because it was not told.
            tell_bytes=min(TELL_BYTES, config.credit_bytes // 8),
            trace=log.trace if config.verbose >= 2 else None,
            objection=self.gate.objection,
        )
        self.membership = Membership(Role(config.role))
        self.customers = Customers(self._send_to_app, self.errands.call)
        self.traffic = Traffic(self)
        self.nearby: Nearby = Nearby(self)
        self.watch = FailureDetector(self, self.traffic)
        self.reporter = Reporter(self, self.traffic)
        #: Completes with this node's entry once the cluster is complete.
        self.ready: Future[NodeInfo] = Future("the cluster to be complete")
        #: Completes once this node is not needed any more (servers, scheduler).
        self.finished: Future[None] = Future("the end of the job")
        #: Called on the scheduler's I/O thread when all workers wait for each other.
        self.on_deadlock: list[Callable[[DeadlockError], None]] = []
        self.error: BaseException | None = None
        #: Failures of calls that had returned; ``close`` raises the first one.
        self.unheard = Unheard()
        self.shutdown: Shutdown | None = None
        self.info: NodeInfo | None = None
        self._closing = False

    # -- who is who --------------------------------------------------------------------

    @property
    def role(self) -> Role:
        """The role of this node in the cluster."""
        return self.membership.role

    @property
    def rank(self) -> int:
        """This node's rank within its role.

        Raises:
            UsageError: the cluster is not complete yet.
        """
        if self.info is None:
            raise UsageError(
                "the rank is not known before the cluster is complete; wait for node.ready first"
            )
        return self.info.rank

    def join(self, info: NodeInfo, roster: tuple[NodeInfo, ...], now: float) -> None:
        """Take in the roster: the cluster is complete. Called by ``control``."""
        self.membership.begin(roster)
        self.info = info
        for node in roster:
            self.links.know(node.uid)
        self.nearby.begin(info, roster)
        for node in self.membership.neighbours():
            self.watch.add(node.uid, now, node)
        for delivery in self.gate.complete({node.uid: node.role for node in roster}):
            self._dispatch(delivery, now)
        self.nearby.offer_segments()
        self.nearby.offer_pipes()
        self.nearby.spread(self.config.connections)
        self.ready.set_result(info)

    # -- what other threads may call ---------------------------------------------------

    def spread(self, connections: int) -> None:
        """Use this many TCP connections to each server elsewhere. From any thread.

        They are opened by a worker, come into use as they are there, and never become fewer;
        16 are the most.
        """
        self.errands.call(lambda: self.nearby.spread(connections))

    def buffer(self, nbytes: int, *, lasting: bool = False) -> Bytes:
        """Return memory to send from: flat, uninitialized, free when unreferenced.

        ``lasting`` buffers that are asked for one after the other lie so, as far as possible.

        Peers on this machine read it where it lies, so it must not change until they are
        done with it: see ``pslite/memory``. From any thread.
        """
        self.errands.check_process()  # a child's memory would be its parent's
        return self.heap.buffer(nbytes, lasting=lasting)

    def shared_rows(self, pieces: Sequence[Bytes]) -> list[Bytes] | None:
        """Return these pieces of this node's buffers, neighbours as one; else None.

        Nothing is copied; what is returned keeps the pieces alive. From any thread.
        """
        return self.heap.rows(pieces)

    @staticmethod
    def whole_of(buffer: Bytes) -> tuple[int, int, object] | None:
        """Return the segment that holds a buffer: (address, bytes, owner).

        The buffer may be a part of one. Stretches begin and end with a page; the owner keeps its
        own mapped, and goes with the last buffer in it, not before the node ends. None for memory
        that is not a node's. From any thread.
        """
        return Heap.whole_of(buffer)

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
        """Ask an app on each of ``nodes``; completes with {node id: reply}. Any thread.

        ``frames`` (node id -> payload) must stay unchanged until the future is done.
        """
        future: Future[dict[int, Reply]] = Future(
            lambda: "an answer of " + ", ".join(map(self.membership.title, nodes))
        )
        payload = dict(frames or {})

        def ask() -> None:
            error = self.error or self.membership.why_unreachable(nodes, self.info)
            if error is not None:
                future.set_error(error)
                return
            self.customers.ask(nodes, app, customer, head, body, payload, future)

        self.traffic.send_joined()  # what was pushed before comes before
        self.errands.call(ask)
        return future

    def barrier(self, group: int, timeout_s: float | None = None) -> Future[None]:
        """Enter a barrier; completes once all of ``group`` have. From any thread.

        With ``timeout_s``, the scheduler gives the barrier up after that time, for all who
        wait, with an error that names who is missing.
        """
        future: Future[None] = Future(f"the barrier of {group_title(group)}")

        def enter() -> None:
            if self.error is not None:
                future.set_error(self.error)
                return
            # 0 says that this node waits without end.
            limit_s = timeout_s if timeout_s is not None and 0 < timeout_s < math.inf else 0.0
            self.control.enter_barrier(group, limit_s, future)

        self.traffic.send_joined()
        self.errands.call(enter)
        return future

    def report_long_wait(self) -> None:
        """Have the scheduler look for a deadlock of the workers. From any thread."""

        def report() -> None:
            if self.error is None:
                self.send(SCHEDULER_ID, LongWait())

        self.errands.call(report)

    def add_app(self, app: int, handler: Handler) -> Future[None]:
        """Register an app (``customer.py``). From any thread."""
        return self.errands.perform(lambda: self.customers.add(app, handler))

    def remove_app(self, app: int) -> None:
        """Take an app away. From any thread."""
        self.errands.call(lambda: self.customers.remove(app))

    # -- the loop ----------------------------------------------------------------------

    def start_thread(self) -> None:
        """Drive the node by a thread of its own."""
        name = f"pslite-io-{self.config.role}-{self.links.incarnation & 0xFFFF:x}"
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
            self.log.error(f"the I/O thread failed: {type(error).__name__}: {error}")
            self.fail(as_failure(error))
        finally:
            self.links.flush(self.membership.epoch, self.clock(), at_once=True)
            self.van.close()
            self._drain()

    def begin(self) -> None:
        """Start the clocks and join; the first thing to call on the I/O thread."""
        now, config = self.clock(), self.config
        self.watch.begin(now)
        self.control.begin(now)
        self.errands.timers.every(
            min(TICK_INTERVAL_S, config.report_after_s / 2), self.traffic.tick
        )
        limit_s = config.rendezvous_timeout_s
        self.errands.timers.every(_EARLY_S, lambda now: self.customers.expire(now - limit_s))

    def step(self, timeout_s: float | None) -> bool:
        """Do what there is to do, waiting for it at most ``timeout_s``. Whether there was."""
        due = self.next_due()
        wait_s = 0.0 if self.errands.commands else max(0.0, due - self.clock())
        events = self.van.poll(wait_s if timeout_s is None else min(timeout_s, wait_s))
        now = self.clock()
        worked = bool(events)
        for event in events:
            if type(event) is Received:
                delivery = self.links.receive(event)
                self.watch.heard(event.peer, now)
                if delivery is not None:
                    self._dispatch(delivery, now)
            else:
                self.watch.told(event, now)
        worked |= self.errands.run()
        if now >= due:  # what became due meanwhile has its turn in the next step
            self.links.resend(now)
            self.errands.timers.run(now)
            self.errands.run()
        if self.traffic.worker.outbox:
            self.traffic.send_queued(now)
        self.links.flush(self.membership.epoch, now)
        if self.errands.looks:
            self.errands.look()
        return worked

    def next_due(self) -> float:
        """Return when ``step`` has something to do though nothing arrives."""
        return min(
            self.errands.timers.next_due(),
            self.links.next_due(),
            self.van.next_due(),
        )

    # -- messages ----------------------------------------------------------------------

    def send(self, node: int, message: Message, frames: Sequence[Any] = ()) -> None:
        """Send to a node of the roster; nothing happens when it is gone. I/O thread only."""
        peer = self.membership.uids.get(node)
        if peer is not None:
            self.links.send(peer, message, frames, self.membership.epoch, self.clock())

    def _send_to_app(self, node: int, message: Request | Response, frames: Sequence[Any]) -> None:
        if self.info is not None and node == self.info.node_id:
            delivery = Delivery(self.info.uid, self.info.incarnation, 0, message, frames)
            self.errands.call(lambda: self._dispatch(delivery, self.clock()))
            return
        self.send(node, message, frames)

    def _dispatch(self, delivery: Delivery, now: float) -> None:
        message, peer, frames = delivery.message, delivery.peer, delivery.frames
        kind, node = type(message), self.membership.node_ids.get(peer)
        try:
            if kind is Accepted or kind is Beat:
                return
            if kind not in FROM_MEMBERS:
                self.control.handle(delivery, now)
            elif node is None:
                self.gate.keep(delivery)
            elif isinstance(message, Request):
                self.customers.request_arrived(node, message, frames, now)
            elif isinstance(message, Response):
                self.customers.response_arrived(node, message, frames)
            elif isinstance(message, NEARBY):
                self.nearby.arrived(peer, node, message)
            else:
                self.traffic.arrived(delivery, node)
        except PSError as error:
            text = f"invalid message from {self.membership.peer_title(peer)}: {error}"
            self.log.warn_seldom(f"invalid message from {peer}", text)

    # -- the end -----------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End every wait of this node with ``error``, now and later. I/O thread only."""
        if self.error is not None:
            return
        self.error = error
        self.traffic.worker.fail(error)
        self.customers.fail(error)
        self.control.fail(error)
        self.ready.set_error(error)
        self.finished.set_error(error)

    def __enter__(self) -> Postoffice:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(goodbye=exception[0] is None)

    def leave(self) -> Future[None]:
        """End what is under way and say goodbye. From any thread; returns at once.

        Completes when the node may stop; then ``unheard`` has what failed.
        """
        if self.shutdown is None:
            self.shutdown = Shutdown(self, self.traffic, self.unheard)
            self.errands.call(self.shutdown.begin)
        return self.shutdown.done

    def close(self, *, goodbye: bool = True) -> None:
        """Leave the cluster and stop. Idempotent; from any thread but the I/O thread.

        With ``goodbye``, waits until the peers have accepted all that was pushed and servers have
        answered it, as long as anything moves (PS_CLOSE_TIMEOUT), and says that this node is done.

        Raises:
            PSError: with ``goodbye``: the node is closed, but a push was not applied, of which
                no caller has been told; a ``DeadlineError`` where peers did not accept it.
        """
        thread = self.errands.thread
        if thread is None or self._closing or self.errands.is_forked:
            return
        try:
            if goodbye and self.info is not None and thread.is_alive():
                self.leave().result()
        finally:
            self.errands.call(self._stop)
            thread.join(_STOP_S)
            if not self.pool.close(_STOP_S):
                self.log.warn("the node was closed while its thread pool still applied pushes")
        error = self.unheard.take() if goodbye else None
        if error is not None:
            raise error

    def wait_until_accepted(self) -> None:
        """Return once the peers have accepted all that was sent, or after a short while.

        Not on the I/O thread. Afterwards no peer reads the memory that was sent from.
        """
        wait_until(self.errands, self.links.everything_accepted, time.monotonic() + _ACCEPTANCE_S)

    def _stop(self) -> None:
        """Take no further step."""
        self._closing = True

    def _drain(self) -> None:
        """Complete every wait after the last step, so that none lasts for ever."""
        dropped = self.links.dropped
        if dropped:
            counts = ", ".join(f"{count} {why}" for why, count in dropped.items())
            self.log.info(1, f"dropped {sum(dropped.values())} messages: {counts}")
        self.fail(ClosedError("the node was closed"))
        if self.shutdown is not None:
            self.shutdown.done.set_result(None)
        self.errands.end()
        self.customers.close()
        self.traffic.close()
        self.sharing.close()
