"""``Postoffice``: a node, with the pure protocol and a van on one I/O thread.

A node repeats ``step``: receive events from the van, run the commands of other threads
(``io_queue.py``), run timers that are due, send messages that may be sent. Its own I/O thread
repeats it (``start_thread``), or the simulator, which calls ``step`` and sets the clock.
``member.py`` and ``scheduler.py`` have the code for the roles, ``protocol/membership.py`` knows the
nodes, ``plane/`` moves data, ``same_machine.py`` connects nodes of one machine, and apps use
``customer.py``. Code on the I/O thread never waits. Other threads may use only futures and the
methods that say so.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pslite.config import Config
from pslite.errors import ClosedError, DeadlockError, PSError, UsageError, as_failure
from pslite.future import Future
from pslite.ids import SCHEDULER_ID, NodeInfo, Role, group_title
from pslite.memory.heap import Bytes, Heap
from pslite.memory.sharing import Sharing
from pslite.node.customer import Customers, Handler, Reply
from pslite.node.data import TICK_INTERVAL_S, Traffic
from pslite.node.io_queue import IOQueue
from pslite.node.links import Delivery, Links
from pslite.node.log import Log
from pslite.node.message_filter import FROM_MEMBERS, Admission
from pslite.node.office import Control
from pslite.node.peer_watch import PeerWatch
from pslite.node.pool import InlinePool, Pool
from pslite.node.report import Reporter
from pslite.node.same_machine import MESSAGES as NEARBY
from pslite.node.same_machine import LocalPeers
from pslite.node.shutdown import Shutdown, Unheard, wait_until
from pslite.plane import Transfer
from pslite.protocol.membership import Membership
from pslite.van.base import Received, Van
from pslite.wire.base import Message
from pslite.wire.messages import LongWait, Request, Response

#: How long ``wait_until_accepted`` waits. Acceptance does not depend on rounds, only on transfers.
_ACCEPTANCE_S = 5.0
#: How long to wait for a closed node's threads. They end at once, unless a server's work runs.
_STOP_S = 10.0
#: How often to check for requests that have waited too long for an app.
_EARLY_S = 1.0


class Postoffice:
    """One node of a cluster. Make it with ``pslite.start``, not by hand."""

    control: Control
    """Set by ``start.make_node``, before the node runs."""

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
        self.io_queue = IOQueue(van.wake, clock)
        self.admission = Admission(takes_registrations=config.role == Role.SCHEDULER.value)
        self.heap = Heap(
            shared=config.shm,
            limit_bytes=config.shm_bytes,
            announce=lambda: self.io_queue.call(self.nearby.offer_segments),
            warn=log.warn,
        )
        self.sharing = Sharing(self.heap)
        self.links = Links(
            van,
            self.sharing,
            job=config.job_id,
            incarnation=incarnation,
            resend_timeout_s=config.resend_timeout_s,
            credit_bytes=config.credit_bytes,
            trace=log.trace if config.verbose >= 2 else None,
            objection=self.admission.objection,
        )
        self.membership = Membership(Role(config.role))
        self.customers = Customers(self._send_to_app, self.io_queue.call, self._hand_over)
        self.traffic = Traffic(self)
        self.nearby: LocalPeers = LocalPeers(self)
        self.watch = PeerWatch(self, self.traffic)
        self.reporter = Reporter(self, self.traffic)
        #: Completes with this node's entry once the cluster is complete.
        self.ready: Future[NodeInfo] = Future("the cluster to be complete")
        #: Completes once this node is no longer needed (servers, scheduler).
        self.finished: Future[None] = Future("the end of the job")
        #: The scheduler's I/O thread calls these when all workers wait for each other.
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

    @property
    def attempt(self) -> int:
        """How many processes had this node's seat before; 0 if none was lost."""
        return self.membership.attempts.get(self.info.node_id, 0) if self.info else 0

    def join(
        self,
        info: NodeInfo,
        roster: tuple[NodeInfo, ...],
        now: float,
        *,
        epoch: int = 1,
        attempts: Sequence[int] = (),
        standbys: Sequence[NodeInfo] = (),
    ) -> None:
        """Handle the roster: the cluster is complete. Called by ``control``."""
        self.info = info
        self.membership.begin(roster, epoch, attempts)
        self.traffic.begin_epoch(epoch)
        known = [s for s in standbys if self.role is Role.SCHEDULER or s.node_id == info.node_id]
        for node in (*roster, *known):
            self.links.know(node.uid)
        self.nearby.begin(info, roster)
        for node in (*self.membership.neighbours(), *known):
            self.watch.add(node.uid, now, node)
        for standby in known if self.role is Role.SERVER else ():
            self.traffic.begin_with(standby)
            self.nearby.pair(info, standby)
        for delivery in self.admission.complete({n.uid: n.role for n in (*roster, *known)}):
            self._dispatch(delivery, now)
        self.nearby.offer_segments()
        self.nearby.offer_pipes()
        self.nearby.spread(self.config.connections)
        self.ready.set_result(info)

    def seat(self, node: NodeInfo, attempt: int, now: float) -> NodeInfo | None:
        """Go on with another process in the seat of a lost worker or server.

        Returns the lost one's entry; None if this is not news. Called by ``control``.
        """
        before = self.membership.seat(node, attempt)
        if before is None or self.info is None:
            return None
        self.watch.vacated(before, "another process has its place")
        self.links.know(node.uid)
        self.admission.replace(before.uid, node.uid, node.role)
        self.customers.replaced(node.node_id)
        self.traffic.returned(node.node_id)
        self.nearby.begin(self.info, self.membership.roster)
        if node in self.membership.neighbours():
            if self.role is Role.WORKER:
                self.van.connect(node.uid, node.address)
            self.watch.add(node.uid, now, node)
            self.nearby.offer_segments()
            self.nearby.offer_pipes(node)
            self.customers.ask_again(node.node_id)
        for listener in self.control.on_seated:
            listener(node)
        return before

    # -- what other threads may call ---------------------------------------------------

    def sit_beside(self, other: Postoffice) -> None:
        """Let two nodes of this process read each other's frames in place.

        This holds for requests that need not be ordered, and their answers. Waits for both rosters.
        """
        for node, peer in ((self, other), (other, self)):
            node.nearby.beside[int(peer.ready.result().node_id)] = peer._take

    def spread(self, connections: int) -> None:
        """Use at most 16 TCP connections to servers on other machines. From any thread.

        The number never decreases.
        """
        self.io_queue.call(lambda: self.nearby.spread(connections))

    def buffer(self, nbytes: int, *, lasting: bool = False) -> Bytes:
        """Return memory to send from: flat and uninitialized. From any thread.

        It is freed when nothing refers to it. ``lasting`` buffers requested one after the other are
        neighbours in memory, as far as possible. Peers on this machine read the memory directly, so
        it must not change until they are done with it: see ``pslite/memory``.
        """
        if self.io_queue.is_forked:  # it would use the memory of its parent
            self.io_queue.check_process()
        return self.heap.buffer(nbytes, lasting=lasting)

    def shared_rows(self, pieces: Sequence[Bytes]) -> list[Bytes] | None:
        """Join neighbouring buffers uncopied; None if peers cannot map all. Any thread."""
        return self.heap.rows(pieces)

    #: Returns the segment that holds a buffer. From any thread.
    whole_of = staticmethod(Heap.whole_of)

    def call(self, command: Callable[[], None]) -> None:
        """Schedule ``command`` for the I/O thread. For apps, from any thread.

        Raises ``UsageError`` in a forked child, which does not have an I/O thread.
        """
        self.io_queue.call(command)

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Start pushes, pulls or both. From any thread of a worker."""
        self.io_queue.call(partial(self.traffic.submit, transfers))

    def request(
        self,
        nodes: Sequence[int],
        app: int,
        head: int,
        body: bytes = b"",
        frames: Mapping[int, Sequence[Any]] | None = None,
        customer: int = 0,
        *,
        ordered: bool = True,
    ) -> Future[dict[int, Reply]]:
        """Ask an app on each node; the future gets {node id: reply}. From any thread.

        ``frames`` (node id -> payload) must stay unchanged until the future is done. With
        ``ordered=False``, the request may arrive before earlier messages of this node. Then a
        server in this process (``sit_beside``) reads the frames where they are.
        """
        future: Future[dict[int, Reply]] = Future(
            lambda: "an answer of " + ", ".join(map(self.membership.title, nodes))
        )
        payload = dict(frames or {})

        def ask() -> None:
            may_wait = app in self.customers.repeated_apps
            why = self.membership.why_unreachable(nodes, self.info, may_wait=may_wait)
            error = self.error or why
            if error is not None:
                future.set_error(error)
                return
            self.customers.ask(nodes, app, customer, head, body, payload, future, ordered=ordered)

        self.traffic.send_joined()  # earlier pushes are sent before this request
        self.io_queue.call(ask)
        return future

    def barrier(self, group: int, timeout_s: float | None = None) -> Future[None]:
        """Enter a barrier; the future is done once all of ``group`` have. Any thread.

        With ``timeout_s``, the scheduler ends the barrier after that time, for all nodes that wait,
        with an error that names the missing nodes.
        """
        future: Future[None] = Future(f"the barrier of {group_title(group)}")

        def enter() -> None:
            if self.error is not None:
                future.set_error(self.error)
                return
            # 0 means that this node has no limit.
            limit_s = timeout_s if timeout_s is not None and 0 < timeout_s < math.inf else 0.0
            self.control.enter_barrier(group, limit_s, future)

        self.traffic.send_joined()
        self.io_queue.call(enter)
        return future

    def report_long_wait(self) -> None:
        """Ask the scheduler to check for a deadlock of the workers. From any thread."""
        self.io_queue.call(lambda: None if self.error else self.send(SCHEDULER_ID, LongWait()))

    def add_app(self, app: int, handler: Handler) -> Future[None]:
        """Register an app (``customer.py``). From any thread."""
        return self.io_queue.perform(lambda: self.customers.add(app, handler))

    def remove_app(self, app: int) -> None:
        """Remove an app. From any thread."""
        self.io_queue.call(lambda: self.customers.remove(app))

    # -- the loop ----------------------------------------------------------------------

    def start_thread(self) -> None:
        """Start the I/O thread, which runs the node."""
        name = f"pslite-io-{self.config.role}-{self.links.incarnation & 0xFFFF:x}"
        self.io_queue.thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self.io_queue.thread.start()

    def _loop(self) -> None:
        # The script may want SIGPIPE to end it, but here it only means that a peer has stopped.
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
        """Start the timers and join; call it first, on the I/O thread."""
        now, config = self.clock(), self.config
        self.watch.begin(now)
        self.control.begin(now)
        self.io_queue.timers.every(
            min(TICK_INTERVAL_S, config.report_after_s / 2), self.traffic.tick
        )
        limit_s = config.rendezvous_timeout_s
        self.io_queue.timers.every(_EARLY_S, lambda now: self.customers.expire(now - limit_s))

    def step(self, timeout_s: float | None) -> bool:
        """Wait for work, at most ``timeout_s``, and do it; return whether there was any."""
        queue, timers_due = self.io_queue, self.io_queue.timers.due
        wait_s = 0.0 if queue.commands else max(0.0, queue.due - self.clock())
        events = self.van.poll(wait_s if timeout_s is None else min(timeout_s, wait_s))
        now = self.clock()
        worked = bool(events)
        for event in events:
            if type(event) is Received:
                delivery = self.links.receive(event, now)
                self.watch.heard(event.peer, now)
                if delivery is not None:
                    self._dispatch(delivery, now)
            else:
                self.watch.told(event, now)
        if queue.commands:
            queue.run()
            worked = True
        if now >= timers_due:  # a timer that this step sets to ``now`` runs in the next one
            queue.timers.run(now)
            queue.run()
        send_at = math.inf
        if self.traffic.worker.outbox or self.traffic.unsent:
            send_at = self.traffic.send_queued(now)
        if queue.looks:
            queue.look()
        queue.due = min(queue.timers.due, self.links.flush(self.membership.epoch, now), send_at)
        return worked

    # -- messages ----------------------------------------------------------------------

    def send(self, node: int, message: Message, frames: Sequence[Any] = ()) -> None:
        """Send to a node of the roster, unless it is gone. I/O thread only."""
        peer = self.membership.uids.get(node)
        if peer is not None:
            self.links.send(peer, message, frames, self.membership.epoch, self.clock())

    def _send_to_app(self, node: int, message: Request | Response, frames: Sequence[Any]) -> None:
        if self.info is not None and node == self.info.node_id:
            self._take(Delivery(self.info.uid, self.info.incarnation, 0, message, frames))
            return
        self.send(node, message, frames)

    def _hand_over(self, node: int, message: Request | Response, frames: Sequence[Any]) -> None:
        """Send to an app; a node in this process gets the sender's own frames as they are."""
        take = self.nearby.beside.get(node)
        if take is None or self.info is None:
            self._send_to_app(node, message, frames)
            return
        lent = [memoryview(frame) for frame in frames]
        take(Delivery(self.info.uid, self.info.incarnation, 0, message, lent, is_lent=True))

    def _take(self, delivery: Delivery) -> None:
        self.io_queue.call(lambda: self._dispatch(delivery, self.clock()))

    def _dispatch(self, delivery: Delivery, now: float) -> None:
        message, peer, frames = delivery.message, delivery.peer, delivery.frames
        kind, node = type(message), self.membership.node_ids.get(peer)
        try:
            if kind not in FROM_MEMBERS:
                self.control.handle(delivery, now)
            elif isinstance(message, NEARBY) and (node or self.nearby.is_paired(peer)):
                self.nearby.arrived(peer, node, message)
            elif node is None:
                self.admission.keep(delivery)
            elif self.error is not None and self.role is Role.SERVER and self.config.standbys:
                return  # workers ask the next process again, or hear from others why the job ends
            elif isinstance(message, Request):
                self.customers.request_arrived(node, message, frames, now, is_lent=delivery.is_lent)
            elif isinstance(message, Response):
                self.customers.response_arrived(node, message, frames)
            else:
                self.traffic.arrived(delivery, node)
        except PSError as error:
            text = f"invalid message from {self.membership.peer_title(peer)}: {error}"
            self.log.warn_seldom(f"invalid message from {peer}", text)

    # -- the end -----------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """End every wait with ``error``, including later ones. I/O thread only."""
        if self.error is not None:
            return
        self.error = error
        self.traffic.fail(error)
        self.customers.fail(error)
        self.control.fail(error)
        self.ready.set_error(error)
        self.finished.set_error(error)

    def __enter__(self) -> Postoffice:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close(goodbye=exception[0] is None)

    def leave(self) -> Future[None]:
        """Begin to end this node with a goodbye; return at once. From any thread.

        The future completes when the node may stop. Then ``unheard`` has the failures.
        """
        if self.shutdown is None:
            self.shutdown = Shutdown(self, self.traffic, self.unheard)
            self.io_queue.call(self.shutdown.begin)
        return self.shutdown.done

    def close(self, *, goodbye: bool = True) -> None:
        """Leave the cluster and stop. Idempotent; not on the I/O thread.

        With ``goodbye``, it waits until the peers have accepted all pushes and the servers have
        answered them, as long as there is progress (PS_CLOSE_TIMEOUT), and says that this node is
        done.

        Raises:
            PSError: with ``goodbye``: the node is closed, but a push was not applied, and no caller
                has received the error. It is a ``DeadlineError`` if peers did not accept the push.
        """
        thread = self.io_queue.thread
        if thread is None or self._closing or self.io_queue.is_forked:
            return
        try:
            if goodbye and self.info is not None and thread.is_alive():
                self.leave().result()
        finally:
            self.io_queue.call(self._stop)
            thread.join(_STOP_S)
            if not self.pool.close(_STOP_S):
                self.log.warn("the node was closed while its thread pool still applied pushes")
        error = self.unheard.take() if goodbye else None
        if error is not None:
            raise error

    def wait_until_accepted(self) -> None:
        """Wait until the peers have accepted all messages, at most a few seconds.

        Not on the I/O thread. Once they have, no peer reads the memory of pushes any more.
        """
        wait_until(self.io_queue, self.links.everything_accepted, time.monotonic() + _ACCEPTANCE_S)

    def _stop(self) -> None:
        """Stop the loop after this step."""
        self._closing = True

    def _drain(self) -> None:
        """Complete every wait after the last step, so that no wait lasts for ever."""
        dropped = self.links.dropped
        if dropped:
            counts = ", ".join(f"{count} {why}" for why, count in dropped.items())
            self.log.info(1, f"dropped {sum(dropped.values())} messages: {counts}")
        self.fail(ClosedError("the node was closed"))
        if self.shutdown is not None:
            self.control.end()
            self.shutdown.done.set_result(None)
        self.io_queue.end()
        self.customers.close()
        self.traffic.close()
        self.sharing.close()
