"""A node: where the pure protocol meets a van. One I/O thread owns everything in here.

``step`` is the whole life of a node: take what the van has, carry out what other threads
asked for (``call``), look at the clock, send what may be sent. A node is driven by its own
I/O thread (``start_thread``) or, in the simulator, by somebody who calls ``step`` and owns the
clock. What depends on the role stands in ``control.py`` (members) and ``scheduler.py``; how
data moves in ``plane/``; apps use ``customer.py``. Nothing here waits, and nothing but
``call``, ``submit``, ``request``, ``barrier`` and futures may be used from other threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pslite.address import machine_id, process_alive
from pslite.config import Config
from pslite.customer import Customers, Handler, Reply
from pslite.errors import ClosedError, NodeLostError, PSError, UsageError
from pslite.future import Future
from pslite.ids import NodeInfo, Role, node_id, rank_of, role_of
from pslite.links import Delivery, Links
from pslite.log import Log
from pslite.plane import Effect, Run, Send, ServerPlane, Transfer, WorkerPlane
from pslite.pool import InlinePool, Pool
from pslite.protocol.liveness import Liveness, Lost
from pslite.protocol.membership import Gone, Membership
from pslite.van.base import Connected, Disconnected, Received, Van
from pslite.wire.codec import MAX_HEADER_BYTES
from pslite.wire.messages import (
    Accepted,
    Answer,
    Beat,
    Exchange,
    Message,
    PartsFailed,
    Request,
    Response,
    RoundWaits,
    StaleEpoch,
)

#: How often the process of a peer without a connection is looked at.
_SUSPECT_INTERVAL_S = 0.1
#: How often time alone is looked at (stalls, requests for apps that never came).
_TICK_INTERVAL_S = 1.0
#: How long a node that has failed stays to tell the others why.
_LAST_WORDS_S = 2.0
#: The rest of a header frame is small (``wire/codec.py``).
_MAX_BODY_BYTES = MAX_HEADER_BYTES - 65_536
#: Messages from nodes that the roster will explain may wait for it.
_MAX_EARLY = 65_536


class Control(Protocol):
    """What a node does in the cluster besides moving data."""

    def begin(self, now: float) -> None:
        """Join (or, on the scheduler, gather) the cluster."""

    def handle(self, delivery: Delivery, now: float) -> None:
        """A message of the control plane arrived."""

    def lost(self, peer: str, reason: str, now: float) -> None:
        """A watched peer is gone without a goodbye."""

    def enter_barrier(self, group: int, timeout_s: float, future: Future[None]) -> None:
        """This node has reached a barrier."""

    def say_goodbye(self, now: float) -> None:
        """This node has got all it wants."""

    def fail(self, error: BaseException) -> None:
        """Nothing can be done any more: end every wait with ``error``."""

    def tick(self, now: float) -> None:
        """Time has passed."""

    def next_due(self) -> float | None:
        """When ``tick`` has something to do."""


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
        self.links = Links(
            van,
            job=config.job_id,
            incarnation=incarnation,
            resend_timeout_s=config.resend_timeout_s,
            trace=trace,
        )
        self.liveness = Liveness(
            config.lost_after_s, config.stall_report_s, config.heartbeat_timeout_s
        )
        self.membership = Membership()
        self.customers = Customers(self._send_to_app, self.call)
        self.worker_plane = WorkerPlane(config.round_window) if self.role is Role.WORKER else None
        self.server_plane: ServerPlane | None = None
        self.control: Control | None = None
        #: Completes with this node's entry once the cluster is complete.
        self.ready: Future[NodeInfo] = Future("the cluster to be complete")
        #: Completes once this node is not needed any more (servers, scheduler).
        self.finished: Future[None] = Future("the end of the job")
        #: Called on the I/O thread after a node is gone.
        self.on_departure: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self.info: NodeInfo | None = None
        self._uids: dict[int, str] = {}
        self._node_ids: dict[str, int] = {}
        self._commands: deque[Callable[[], None]] = deque()
        self._early: list[Delivery] = []
        self._beat_at = 0.0
        self._tick_at = 0.0
        self._suspect_at: float | None = None
        self._closing = False
        self._ended = False
        self._looks: list[Callable[[], None]] = []
        self._thread: threading.Thread | None = None
        self._handlers: dict[type[Message], Callable[[Delivery, int], None]] = {
            Exchange: self._on_exchange,
            Answer: self._on_worker_plane,
            PartsFailed: self._on_worker_plane,
            StaleEpoch: self._on_worker_plane,
            RoundWaits: self._on_round_waits,
            Request: self._on_request,
            Response: self._on_response,
        }

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

    def uid_of(self, node: int) -> str | None:
        """The van's name of a node."""
        return self._uids.get(node)

    def node_of(self, peer: str) -> int | None:
        """The node id behind a van's name."""
        return self._node_ids.get(peer)

    def title(self, node: int) -> str:
        """A node's name for people."""
        info = self.membership.node(node)
        return info.title if info is not None else f"{role_of(node).value} (node {node})"

    def join(self, info: NodeInfo, roster: tuple[NodeInfo, ...], now: float) -> None:
        """The cluster is complete; called by ``control``."""
        self.membership.begin(roster)
        self.info = info
        for node in roster:
            self._uids[node.node_id] = node.uid
            self._node_ids[node.uid] = node.node_id
        for node in roster:
            if node.uid != info.uid and self._talks_to(node):
                self.liveness.watch(node.uid, now)
        early, self._early = self._early, []
        for delivery in early:
            self._dispatch(delivery, now)
        self.ready.set_result(info)

    def _talks_to(self, node: NodeInfo) -> bool:
        """Workers do not talk to workers, nor servers to servers."""
        return Role(node.role) is not self.role

    # -- what other threads may call ---------------------------------------------------

    def call(self, command: Callable[[], None]) -> None:
        """Have ``command`` run on the I/O thread. From any thread; returns at once."""
        self._commands.append(command)
        if self._ended:
            # Nobody else will: the node's error is set, which is what commands look at.
            self._run_commands()
        elif threading.current_thread() is not self._thread:
            self.van.wake()

    def submit(self, transfers: Sequence[Transfer]) -> None:
        """Start pushes, pulls or both. From any thread."""
        plane = self.worker_plane
        if plane is None:
            raise UsageError("only workers push and pull")

        def start() -> None:
            for transfer in transfers:
                plane.submit(transfer)

        self.call(start)

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

        self.call(ask)
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
            self.control.enter_barrier(group, timeout_s or 0.0, future)

        self.call(enter)
        return future

    def add_app(self, app: int, handler: Handler) -> Future[None]:
        """Register an app (``customer.py``). From any thread."""
        return self._on_io(lambda: self.customers.add(app, handler))

    def remove_app(self, app: int) -> None:
        """Take an app away. From any thread."""
        self.call(lambda: self.customers.remove(app))

    def _on_io(self, action: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future("the I/O thread")

        def run() -> None:
            try:
                action()
            except Exception as error:
                future.set_error(error)
            else:
                future.set_result(None)

        self.call(run)
        return future

    def _names(self, nodes: Sequence[int]) -> str:
        return "an answer of " + ", ".join(self.title(node) for node in nodes)

    # -- the loop ----------------------------------------------------------------------

    def start_thread(self) -> None:
        """Drive the node by a thread of its own."""
        name = f"pslite-io-{self.config.role}-{self.incarnation & 0xFFFF:x}"
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        try:
            self.begin()
            while not self._closing:
                self.step(None)
        except BaseException as error:
            self.log.error(f"the I/O thread ends: {type(error).__name__}: {error}")
            self.fail(error)
        finally:
            self.van.close()
            self._drain()

    def begin(self) -> None:
        """The first thing to call on the I/O thread."""
        now = self.clock()
        self._beat_at = now + self.config.heartbeat_interval_s
        self._tick_at = now + _TICK_INTERVAL_S
        if self.control is None:
            raise UsageError("a node needs a control")
        self.control.begin(now)

    def step(self, timeout_s: float | None) -> bool:
        """Do what there is to do, waiting for it at most ``timeout_s``. Whether there was."""
        if self._commands:
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
                self.liveness.heard(event.peer, now)
                if delivery is not None:
                    self._dispatch(delivery, now)
            elif type(event) is Disconnected:
                self.log.info(1, f"connection to {self._peer_title(event.peer)} is gone")
                self.liveness.disconnected(event.peer, now)
                self._suspect_at = now
            elif type(event) is Connected:
                self.liveness.connected(event.peer)
                self.links.reconnected(event.peer, now)
        worked |= self._run_commands()
        self._run_timers(now)
        self._run_commands()
        self._send_mail(now)
        self.links.flush(self.membership.epoch, now)
        looks, self._looks = self._looks, []
        for look in looks:
            look()
        return worked

    def _run_commands(self) -> bool:
        commands = self._commands
        worked = bool(commands)
        while commands:
            try:
                command = commands.popleft()
            except IndexError:  # another thread was faster, after the end
                break
            command()
        return worked

    def next_due(self) -> float:
        """When ``step`` has something to do though nothing arrives."""
        times = [self._beat_at, self._tick_at]
        for due in (
            self._suspect_at,
            self.links.next_due(),
            self.van.next_due(),
            self.control.next_due() if self.control is not None else None,
        ):
            if due is not None:
                times.append(due)
        return min(times)

    def _run_timers(self, now: float) -> None:
        self.links.resend(now)
        if self._suspect_at is not None and now >= self._suspect_at:
            self._look_at_suspects(now)
        if now >= self._beat_at:
            self._beat_at = now + self.config.heartbeat_interval_s
            for peer in self._node_ids:
                if self.info is not None and peer != self.info.uid:
                    self._beat(peer, now)
        if now >= self._tick_at:
            self._tick_at = now + _TICK_INTERVAL_S
            self._judge(now)
            self.customers.expire(now - self.config.rendezvous_timeout_s)
            if self.server_plane is not None:
                self.run_effects(self.server_plane.tick(now))
        if self.control is not None:
            self.control.tick(now)

    def _beat(self, peer: str, now: float) -> None:
        node = self._node_ids[peer]
        info = self.membership.node(node)
        if info is not None and node not in self.membership.gone and self._talks_to(info):
            self.links.send(peer, Beat(), (), self.membership.epoch, now)

    def _send_mail(self, now: float) -> None:
        """Hand the plane's messages to the van, as far as credits go."""
        plane = self.worker_plane
        if plane is None:
            return
        credit_bytes = self.config.credit_bytes
        for server in plane.servers_with_mail():
            peer = self._uids.get(server)
            if peer is None:
                continue
            while self.links.unaccepted_bytes(peer) < credit_bytes:
                send = plane.take(server)
                if send is None:
                    break
                self.links.send(peer, send.message, send.frames, self.membership.epoch, now)

    # -- liveness ----------------------------------------------------------------------

    def _look_at_suspects(self, now: float) -> None:
        suspects = self.liveness.suspects()
        self._suspect_at = now + _SUSPECT_INTERVAL_S if suspects else None
        for peer in suspects:
            info = self._info_of(peer)
            if info is not None and info.machine == machine_id() and not process_alive(info.pid):
                for lost in self.liveness.died(peer, "its process is gone"):
                    self._lost(lost, now)
        if suspects:
            self._judge(now)

    def _judge(self, now: float) -> None:
        for verdict in self.liveness.tick(now):
            if isinstance(verdict, Lost):
                self._lost(verdict, now)
            else:
                self.log.warn(
                    f"{self._peer_title(verdict.peer)} is connected but has been silent "
                    f"for {verdict.silent_s:.0f} s"
                )

    def _lost(self, lost: Lost, now: float) -> None:
        if self.control is not None:
            self.control.lost(lost.peer, lost.reason, now)

    def _info_of(self, peer: str) -> NodeInfo | None:
        node = self._node_ids.get(peer)
        return None if node is None else self.membership.node(node)

    def _peer_title(self, peer: str) -> str:
        info = self._info_of(peer)
        return peer if info is None else info.title

    # -- messages ----------------------------------------------------------------------

    def send(self, node: int, message: Message, frames: Sequence[Any] = ()) -> None:
        """Send to a node of the roster; nothing happens when it is gone. I/O thread only."""
        peer = self._uids.get(node)
        if peer is not None:
            self.links.send(peer, message, frames, self.membership.epoch, self.clock())

    def _send_to_app(self, node: int, message: Request | Response, frames: Sequence[Any]) -> None:
        if self.info is not None and node == self.info.node_id:
            delivery = Delivery(self.info.uid, self.incarnation, 0, message, frames)
            self.call(lambda: self._dispatch(delivery, self.clock()))
            return
        self.send(node, message, frames)

    def _dispatch(self, delivery: Delivery, now: float) -> None:
        kind = type(delivery.message)
        handler = self._handlers.get(kind)
        node = self._node_ids.get(delivery.peer)
        try:
            if handler is None:
                if self.control is not None and kind is not Accepted and kind is not Beat:
                    self.control.handle(delivery, now)
            elif node is not None:
                handler(delivery, node)
            elif self.info is None and len(self._early) < _MAX_EARLY:
                # The sender has got its roster earlier than this node.
                self._early.append(delivery)
        except PSError as error:
            self.log.warn(f"a message of {self._peer_title(delivery.peer)} is wrong: {error}")

    def _on_exchange(self, delivery: Delivery, node: int) -> None:
        message = delivery.message
        plane = self.server_plane
        if plane is None or not isinstance(message, Exchange) or role_of(node) is not Role.WORKER:
            raise UsageError("only workers exchange data, and only with servers that have a store")
        self.run_effects(plane.exchange(rank_of(node), delivery.epoch, message, delivery.frames))

    def _on_worker_plane(self, delivery: Delivery, node: int) -> None:
        plane, message = self.worker_plane, delivery.message
        if plane is None:
            return
        if isinstance(message, Answer):
            plane.answered(message, delivery.frames)
        elif isinstance(message, PartsFailed):
            plane.refused(message)
        elif isinstance(message, StaleEpoch):
            plane.stale(message)

    def _on_round_waits(self, delivery: Delivery, node: int) -> None:
        message = delivery.message
        if isinstance(message, RoundWaits):
            missing = ", ".join(self.title(node_id(Role.WORKER, rank)) for rank in message.missing)
            self.log.warn(
                f"round {message.round} of part {message.part} has waited "
                f"{message.waited_s:.0f} s for {missing}"
            )

    def _on_request(self, delivery: Delivery, node: int) -> None:
        if isinstance(delivery.message, Request):
            self.customers.request_arrived(node, delivery.message, delivery.frames, self.clock())

    def _on_response(self, delivery: Delivery, node: int) -> None:
        if isinstance(delivery.message, Response):
            self.customers.response_arrived(node, delivery.message, delivery.frames)

    def run_effects(self, effects: Sequence[Effect]) -> None:
        """Carry out what the server's half of the plane wants. I/O thread only."""
        for effect in effects:
            if isinstance(effect, Send):
                self.send(node_id(Role.WORKER, effect.peer), effect.message, effect.frames)
            else:
                self._run_jobs(effect)

    def _run_jobs(self, run: Run) -> None:
        plane = self.server_plane
        if plane is None:
            return
        server_plane = plane

        def work() -> None:
            errors = server_plane.app.apply(run.jobs)
            self.call(lambda: self.run_effects(server_plane.finished(run.jobs, errors)))

        self.pool.submit(run.lane, work)

    # -- the end -----------------------------------------------------------------------

    def departed(self, gone: Gone) -> None:
        """A node is gone (``membership`` knows); called by ``control``."""
        error = NodeLostError(gone.sentence, role=gone.node.role, rank=gone.node.rank)
        node = gone.node.node_id
        self.liveness.forget(gone.node.uid)
        self.customers.pending.depart(node, error)
        if self.worker_plane is not None:
            self.worker_plane.depart(node, error)
        if self.server_plane is not None and gone.node.role == Role.WORKER.value:
            self.run_effects(self.server_plane.depart(gone.node.rank, error))
        if gone.left:
            self.links.release(gone.node.uid)
        else:
            self.links.shut(gone.node.uid)
        for listener in self.on_departure:
            listener()

    def begin_epoch(self, epoch: int) -> None:
        """The scheduler has announced a later epoch; called by ``control``."""
        self.membership.epoch = epoch
        if self.worker_plane is not None:
            self.worker_plane.begin_epoch(epoch)
        if self.server_plane is not None:
            self.run_effects(self.server_plane.begin_epoch(epoch))

    def fail(self, error: BaseException) -> None:
        """End every wait of this node with ``error``, now and from now on. I/O thread only."""
        if self.error is not None:
            return
        self.error = error
        if self.worker_plane is not None:
            self.worker_plane.fail(error)
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
            if info is None or (not self._talks_to(info) and node != self.info.node_id):
                return UsageError(f"{self.info.title} has no connection to {self.title(node)}")
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
        thread = self._thread
        if thread is None or self._closing:
            return
        if goodbye and self.info is not None and thread.is_alive():
            if self.error is None:
                self._leave()
            else:
                # The others should hear of the cause before they notice that we are gone.
                limit = time.monotonic() + _LAST_WORDS_S
                self._wait_on_io(self.links.everything_accepted, limit)
        self.call(self._stop)
        thread.join(self.config.close_timeout_s)
        self.pool.close()

    def _leave(self) -> None:
        limit = time.monotonic() + self.config.close_timeout_s
        self._wait_on_io(self._nothing_under_way, limit)
        if self.control is not None:
            control = self.control
            self.call(lambda: control.say_goodbye(self.clock()))
        if not self._wait_on_io(self._nothing_under_way, limit):
            owed = ", ".join(self._peer_title(peer) for peer in self.links.owed_by())
            self.log.warn(f"closed though not everything was accepted by {owed}")

    def _nothing_under_way(self) -> bool:
        plane = self.worker_plane
        return (plane is None or plane.everything_sent) and self.links.everything_accepted()

    def _wait_on_io(self, condition: Callable[[], bool], limit: float) -> bool:
        """Wait until ``condition`` holds on the I/O thread, which looks once per step."""
        met = threading.Event()

        failed_before = self.error is not None

        def look() -> None:
            if condition() or (self.error is not None and not failed_before):
                met.set()
            elif time.monotonic() < limit:
                self._looks.append(look)

        self.call(look)
        return met.wait(max(0.0, limit - time.monotonic()))

    def _stop(self) -> None:
        self._closing = True

    def _drain(self) -> None:
        """After the last step: nobody may wait for this node for ever."""
        self.fail(ClosedError("the node was closed"))
        self._ended = True
        self._run_commands()
