"""What workers and servers do in the cluster besides moving data. Runs on the I/O thread.

Joining (with a deadline and a line every few seconds that says who is missing), barriers,
goodbyes, and what follows when another node is gone. ``scheduler.py`` is the other side.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from pslite.address import tcp_address
from pslite.errors import ConfigError, DeadlineError, NodeLostError, UsageError, rebuild
from pslite.future import Future
from pslite.ids import SCHEDULER_ID, NodeInfo, Role
from pslite.links import Delivery
from pslite.log import label
from pslite.protocol.membership import Gone
from pslite.reporting import answer_to
from pslite.watch import beat_at
from pslite.wire.messages import (
    BarrierEnter,
    BarrierLeave,
    BarrierWaits,
    Beat,
    Leave,
    Members,
    Refused,
    Register,
    Roster,
    StatusQuestion,
    Waiting,
)

if TYPE_CHECKING:
    from pslite.postoffice import Postoffice

#: How much longer than the scheduler a node waits for the cluster to be complete.
_GRACE_S = 1.0

#: A node that still runs this long after the scheduler was lost goes on without it. Longer than
#: the launcher waits between an interrupt, which ends the scheduler first, and SIGTERM.
_WARN_AFTER_S = 3.5

SCHEDULER = "scheduler"
"""The name under which every node connects to the scheduler."""


class Control(Protocol):
    """What a node does in the cluster besides moving data."""

    def begin(self, now: float) -> None:
        """Join (or, on the scheduler, gather) the cluster."""

    def handle(self, delivery: Delivery, now: float) -> None:
        """A message of the control plane arrived."""

    def lost(self, peer: str, reason: str, now: float) -> None:
        """A watched peer is gone without a goodbye."""

    def disconnected(self, peer: str) -> None:
        """The connection with a peer has ended."""

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


class MemberControl:
    """The control of a worker or a server."""

    def __init__(self, office: Postoffice, node: NodeInfo, package: str) -> None:
        self._office = office
        self._node = node
        self._package = package
        self._began_at = 0.0
        self._deadline: float | None = None
        self._roster_at: float | None = None
        self._beat_at: float | None = None
        self._waiting: Waiting | None = None
        self._barriers: dict[tuple[int, int], Future[None]] = {}
        self._barrier_rounds: Counter[int] = Counter()
        self._scheduler_error: NodeLostError | None = None
        self._warn_at: float | None = None
        self._leaving = False
        #: Workers that have left, as the scheduler says, and whose own goodbye is on its way.
        self._goodbyes: set[str] = set()

    # -- joining -----------------------------------------------------------------------

    def begin(self, now: float) -> None:
        config = self._office.config
        self._began_at = now
        self._deadline = now + config.rendezvous_timeout_s
        self._roster_at = now + config.roster_interval_s
        self._beat_at = beat_at(config, now)
        self._office.van.connect(SCHEDULER, tcp_address(config.root_uri, config.root_port))
        register = Register((self._node,), config.num_workers, config.num_servers, self._package)
        self._office.links.send(SCHEDULER, register, (), 0, now)

    def handle(self, delivery: Delivery, now: float) -> None:
        message = delivery.message
        if isinstance(message, Leave):
            self._member_left(delivery.peer)
        elif isinstance(message, Members):
            self._members_changed(delivery.peer, message)
        elif delivery.peer != SCHEDULER:
            return
        elif isinstance(message, Roster):
            self._complete(message, now)
        elif isinstance(message, Waiting):
            self._still_waiting(message, now)
        elif isinstance(message, Refused):
            is_ours = message.kind == ConfigError.__name__
            verdict = "refuses this node" if is_ours else "gave up"
            text = f"the scheduler {verdict}: {message.error}"
            self._office.fail(rebuild(message.kind, text, role=message.role, rank=message.rank))
        elif isinstance(message, BarrierLeave):
            self._barrier_over(message)
        elif isinstance(message, BarrierWaits):
            self._say_who_has_not_come(message)
        elif isinstance(message, StatusQuestion) and self._office.info is not None:
            self._office.send(SCHEDULER_ID, answer_to(self._office, message.question, now))

    def _complete(self, message: Roster, now: float) -> None:
        office = self._office
        mine = [node for node in message.members if node.node_id == message.node_id]
        if office.info is not None or not mine:
            return
        office.log.name = label(mine[0])
        office.log.learn(message.members)
        if office.role is Role.WORKER:
            for node in message.members:
                if node.role == Role.SERVER.value:
                    office.van.connect(node.uid, node.address)
        self._stop_waiting()
        office.log.info(1, f"{office.log.name} is connected to others")
        office.join(mine[0], message.members, now)

    def _stop_waiting(self) -> None:
        self._deadline = self._roster_at = self._beat_at = None

    def _still_waiting(self, message: Waiting, now: float) -> None:
        is_answer = self._waiting is None
        self._waiting = message
        # The scheduler speaks, so its clock decides: a node that gave up a moment before it
        # would look like a lost one to all the others.
        left_s = self._office.config.rendezvous_timeout_s - message.waited_s
        self._deadline = now + max(left_s, 0.0) + _GRACE_S
        if is_answer:
            # To the registration: from here on the scheduler's loss is ours, and it speaks.
            self._office.watch.add(SCHEDULER, now)
            self._roster_at = now + 2 * self._office.config.roster_interval_s
        else:
            self._say_who_is_missing(now)

    def _say_who_is_missing(self, now: float) -> None:
        config, office = self._office.config, self._office
        # Once the scheduler speaks, at the same interval, only its silence makes us repeat it.
        intervals = 1 if self._waiting is None else 2
        self._roster_at = now + intervals * config.roster_interval_s
        waited_s = now - self._began_at
        if self._waiting is None:
            office.log.info(
                0,
                f"waiting for the scheduler at {config.root_uri}:{config.root_port}, "
                f"no answer for {waited_s:.0f} s",
            )
            return
        there = ", ".join(self._waiting.present) or "nobody"
        missing = ", ".join(self._waiting.missing)
        office.log.info(0, f"waiting for {missing} since {waited_s:.0f} s; there: {there}")

    def _too_late(self) -> DeadlineError:
        config = self._office.config
        limit = f"{config.rendezvous_timeout_s:g} s (PS_RENDEZVOUS_TIMEOUT)"
        if self._waiting is None:
            return DeadlineError(
                f"no scheduler answered at {config.root_uri}:{config.root_port} within {limit}: "
                "is it running, and is DMLC_PS_ROOT_URI / DMLC_PS_ROOT_PORT the same everywhere?"
            )
        missing = ", ".join(self._waiting.missing)
        return DeadlineError(f"the cluster was not complete within {limit}: {missing} missing")

    # -- barriers ----------------------------------------------------------------------

    def enter_barrier(self, group: int, timeout_s: float, future: Future[None]) -> None:
        office = self._office
        if self._scheduler_error is not None:
            future.set_error(self._scheduler_error)
            return
        if office.info is None:
            future.set_error(UsageError("a barrier needs a complete cluster: wait for `ready`"))
            return
        self._barrier_rounds[group] += 1
        round_ = self._barrier_rounds[group]
        self._barriers[group, round_] = future
        office.send(SCHEDULER_ID, BarrierEnter(group, round_, timeout_s))

    def _barrier_over(self, message: BarrierLeave) -> None:
        future = self._barriers.pop((message.group, message.round), None)
        if future is None:
            return
        if message.kind:
            future.set_error(rebuild(message.kind, message.error))
        else:
            future.set_result(None)

    def _say_who_has_not_come(self, message: BarrierWaits) -> None:
        missing = ", ".join(self._office.membership.title(node) for node in message.missing)
        self._office.log.warn(
            f"a barrier of group {message.group} has waited {message.waited_s:.0f} s for {missing}"
        )

    # -- who is gone -------------------------------------------------------------------

    def lost(self, peer: str, reason: str, now: float) -> None:
        office = self._office
        if self._leaving:
            # It may end as soon as it has heard our goodbye; nothing more is expected of it.
            office.links.shut(peer)
            return
        if office.info is None and peer == SCHEDULER:
            where = f"{office.config.root_uri}:{office.config.root_port}"
            sentence = f"the scheduler at {where} is lost before the cluster was complete: {reason}"
            office.fail(NodeLostError(sentence, role=Role.SCHEDULER.value, rank=0))
            return
        node = office.membership.node_ids.get(peer)
        gone = None if node is None else office.membership.depart(node, left=False, reason=reason)
        if gone is not None:
            self._gone(gone)

    def _members_changed(self, peer: str, message: Members) -> None:
        """News of who is gone, from a member; only the scheduler announces epochs."""
        office = self._office
        if office.membership.node_ids.get(peer) is None:
            return
        entries = zip(message.gone, message.left, message.reasons, strict=True)
        for node, left, reason in entries:
            gone = office.membership.depart(node, left=bool(left), reason=reason)
            if gone is not None:
                if gone.left and office.watch.is_connected(gone.node.uid):
                    self._goodbyes.add(gone.node.uid)
                self._gone(gone)
        is_new = peer == SCHEDULER and message.epoch > office.membership.epoch
        if office.error is None and is_new:
            office.begin_epoch(message.epoch)

    def _member_left(self, peer: str) -> None:
        self._expect_no_goodbye(peer)
        node = self._office.membership.node_ids.get(peer)
        if node is not None:
            gone = self._office.membership.depart(node, left=True, reason="")
            if gone is not None:
                self._gone(gone)

    def _gone(self, gone: Gone) -> None:
        """Policy ``fail``: a lost worker or server ends the job on every survivor."""
        office = self._office
        # After this node's own end, those of others are consequences.
        is_news = not gone.left and office.error is None
        office.log.info(0 if is_news else 1, gone.sentence)
        error = NodeLostError(gone.sentence, role=gone.node.role, rank=gone.node.rank)
        if gone.node.role == Role.SCHEDULER.value:
            self._scheduler_gone(error, is_news=is_news)
        elif not gone.left:
            self._pass_on(gone)
            office.fail(error)
            # What is under way to it will never be accepted: nothing to wait for at the end.
            office.links.shut(gone.node.uid)
            return
        office.departed(gone)
        self._finish_if_done()

    def disconnected(self, peer: str) -> None:
        self._expect_no_goodbye(peer)

    def _expect_no_goodbye(self, peer: str) -> None:
        """A peer has said goodbye to this node, or cannot any more."""
        if peer in self._goodbyes:
            self._goodbyes.discard(peer)
            self._finish_if_done()

    def _finish_if_done(self) -> None:
        """A server ends after the last worker, once it has taken that worker's own goodbye.

        The scheduler's news of it may come first. A worker whose goodbye nobody takes would
        wait for this node until it counts as lost.
        """
        office = self._office
        is_last = office.role is Role.SERVER and not office.membership.live(Role.WORKER)
        if is_last and not self._goodbyes:
            office.finished.set_result(None)

    def _pass_on(self, gone: Gone) -> None:
        """Tell this node's peers the cause, before they notice that this node ends too."""
        office = self._office
        news = Members(office.membership.epoch, (gone.node.node_id,), (0,), (gone.reason,))
        for node in office.membership.neighbours():
            office.send(node.node_id, news)

    def _scheduler_gone(self, error: NodeLostError, *, is_news: bool) -> None:
        self._scheduler_error = error
        if is_news:
            # Whoever ends a whole job ends the scheduler, too: this node may be the next.
            self._warn_at = self._office.clock() + _WARN_AFTER_S
        self._end_barriers(error)

    # -- the end -----------------------------------------------------------------------

    def say_goodbye(self, now: float) -> None:
        office = self._office
        self._leaving = True
        self._warn_at = None
        for node in office.membership.neighbours():
            office.send(node.node_id, Leave())

    def fail(self, error: BaseException) -> None:
        self._stop_waiting()
        self._warn_at = None
        self._end_barriers(error)

    def _end_barriers(self, error: BaseException) -> None:
        barriers, self._barriers = self._barriers, {}
        for future in barriers.values():
            future.set_error(error)

    def tick(self, now: float) -> None:
        if self._deadline is not None and now >= self._deadline:
            self._office.fail(self._too_late())
        elif self._roster_at is not None and now >= self._roster_at:
            self._say_who_is_missing(now)
        if self._beat_at is not None and now >= self._beat_at:
            # The roster, by which nodes know whom to send signs of life, is not there yet.
            self._beat_at = beat_at(self._office.config, now)
            self._office.links.send(SCHEDULER, Beat(), (), 0, now)
        if self._warn_at is not None and now >= self._warn_at:
            self._warn_at = None
            self._office.log.warn(
                "push and pull go on; barriers, init and joins no longer work without the scheduler"
            )

    def next_due(self) -> float | None:
        times = (self._deadline, self._roster_at, self._beat_at, self._warn_at)
        return min((time for time in times if time is not None), default=None)
