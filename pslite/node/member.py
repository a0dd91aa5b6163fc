"""``MemberControl``: joining, barriers and leaving of workers and servers.

It joins the cluster (with a deadline, and a log line every few seconds that says who is missing),
enters barriers, says goodbye, and acts when other nodes are gone. ``scheduler.py`` is the other
side.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pslite.errors import ConfigError, DeadlineError, NodeLostError, UsageError, rebuild
from pslite.future import Future
from pslite.ids import SCHEDULER_ID, NodeInfo, Role
from pslite.node.control import (
    SCHEDULER,
    VERDICT_S,
    ControlOffice,
    NodeControl,
    ends_itself,
    loss_in,
)
from pslite.node.data import RECORDS
from pslite.node.links import Delivery
from pslite.node.log import label
from pslite.node.member_barriers import MemberBarriers
from pslite.node.message_filter import MAX_EARLY, needs_roster
from pslite.node.scheduler_away import SchedulerAway
from pslite.protocol.membership import Gone, with_seated
from pslite.protocol.relays import Relays
from pslite.van.zmq.addresses import format_address
from pslite.wire.messages import (
    BarrierLeave,
    BarrierWaits,
    Deadlock,
    Leave,
    Members,
    Refused,
    Register,
    Roster,
    StatusQuestion,
    Waiting,
)
from pslite.wire.recovery import MayReturn, Seated, StandsBy, Vacant

#: How much longer than the scheduler a member waits for the cluster to be complete.
_GRACE_S = 1.0


class MemberControl(NodeControl):
    """The control of a worker or a server."""

    def __init__(self, office: ControlOffice, node: NodeInfo, package: str) -> None:
        super().__init__(office)
        config = office.config
        self._register = Register(
            (node,), config.num_workers, config.num_servers, package, config.stands_by
        )
        self._began_at = 0.0
        self._waiting: Waiting | None = None
        self._barriers = MemberBarriers(office)
        self._leaving = False
        self._away = SchedulerAway(office, self._registration)
        if config.rejoin_timeout_s:
            office.customers.repeating_nodes.add(SCHEDULER_ID)
        #: Workers that, as the scheduler says, have left, but whose own goodbye is in flight.
        self._goodbyes: set[str] = set()
        self._standby_number = 0
        #: What came before the roster.
        self._early: list[Delivery] = []
        #: Nodes that this one has lost, with reasons, until the scheduler has decided.
        self._reported: dict[int, str] = {}

    def _registration(self) -> Register:
        """Return the message to register with, first or again."""
        office, register = self._office, self._register
        if office.info is None:
            return replace(register, attempt=0) if office.traffic.stands_by else register
        attempt = office.membership.attempts.get(office.info.node_id, 0)
        return replace(register, node=(office.info,), attempt=attempt)

    # -- joining -----------------------------------------------------------------------

    def begin(self, now: float) -> None:
        super().begin(now)
        config = self._office.config
        self._began_at = now
        self._office.van.connect(SCHEDULER, format_address(config.root_uri, config.root_port))
        self._office.links.send(SCHEDULER, self._register, (), 0, now)

    def handle(self, delivery: Delivery, now: float) -> None:
        message = delivery.message
        if self._office.info is None and needs_roster(message) and len(self._early) < MAX_EARLY:
            self._early.append(delivery)
        elif isinstance(message, Leave):
            self._member_left(delivery.peer)
        elif isinstance(message, Members):
            self._members_changed(delivery.peer, message, now)
        elif isinstance(message, RECORDS):
            self._office.traffic.record_arrived(delivery)
        elif delivery.peer != SCHEDULER:
            return
        elif isinstance(message, Roster):
            self._roster_arrived(message, delivery.epoch, now)
        elif isinstance(message, StandsBy):
            self._standby_changed(message, now)
        elif isinstance(message, Waiting):
            self._still_waiting(message, now)
        elif isinstance(message, Vacant):
            self._vacated(message, now)
        elif isinstance(message, Seated) and len(message.node) == 1:
            self._seated(message.node[0], message.attempt, now)
        elif isinstance(message, Refused):
            is_ours = message.kind == ConfigError.__name__
            text = f"the scheduler refuses this node: {message.error}" if is_ours else message.error
            self._office.fail(rebuild(message.kind, text, role=message.role, rank=message.rank))
        elif isinstance(message, BarrierLeave):
            self._barriers.over(message)
        elif isinstance(message, BarrierWaits):
            self._barriers.say_who_has_not_come(message)
        elif isinstance(message, Deadlock):
            if self._office.reporter.progress is not None:
                self._office.reporter.progress.deadlocked(message.error)
        elif isinstance(message, StatusQuestion) and self._office.info is not None:
            self._office.send(SCHEDULER_ID, self._office.reporter.answer(message.question, now))

    def _roster_arrived(self, message: Roster, epoch: int, now: float) -> None:
        office = self._office
        if office.info is not None:
            self._is_back(message, now)
            return

        def complete() -> None:
            try:
                self._complete(message, epoch, office.clock())
            except ConfigError as error:  # a limit of this machine, not a wrong message
                office.fail(error)

        if office.traffic.standby is None:
            complete()
        else:  # this process takes the place of its server, once it has done all that it did
            office.traffic.standby.take_over(complete)

    def _is_back(self, message: Roster, now: float) -> None:
        """Go on with a scheduler that was lost, or with the next one."""
        office, membership = self._office, self._office.membership
        scheduler, *others = message.members
        self._away.found(scheduler)
        membership.attempts[SCHEDULER_ID] = message.attempts[0]
        for node, attempt in zip(others, message.attempts[1:], strict=True):
            if node.node_id != message.node_id:
                self._seated(node, attempt, now)
        if self._last_word is not None:
            office.send(SCHEDULER_ID, MayReturn(self._last_word))
        if office.traffic.primary is not None:
            office.traffic.primary.say_whether_in_sync()
        self._barriers.enter_again(self._barrier_rounds, now)
        for node_id, reason in self._reported.items():
            attempt = membership.attempts.get(node_id, 0)
            office.send(SCHEDULER_ID, Vacant(node_id, attempt, reason))
        office.customers.ask_again(SCHEDULER_ID)
        if self._leaving:
            office.send(SCHEDULER_ID, Leave())

    def _standby_changed(self, message: StandsBy, now: float) -> None:
        office, traffic = self._office, self._office.traffic
        if message.for_receiver:
            if message.number <= self._standby_number:
                return  # a later message has overtaken it
            self._standby_number = message.number
            if traffic.primary is None:
                return
            if message.node and traffic.primary.is_standby(message.node[0].uid):
                return  # the next scheduler says what is known
            if message.node and office.info is not None:
                (standby,) = message.node
                office.log.info(1, f"{standby.title} will stand by for this server")
                office.links.know(standby.uid)
                office.admission.add(standby.uid, standby.role)
                office.watch.add(standby.uid, now, standby)
                office.nearby.pair(office.info, standby)
                traffic.primary.fill(standby)
            else:
                office.log.info(1, f"{office.log.name} has no standby any more")
                traffic.primary.go_on_alone()
        elif traffic.standby is not None and len(message.node) == 1:
            (primary,) = message.node
            self._away.found()
            if traffic.standby.primary is not None:
                office.watch.add(SCHEDULER, now)
                return  # the next scheduler says what is known
            for timer in (self._deadline, self._roster_line):
                timer.set(math.inf)
            office.log.name = f"standby of {primary.name}"
            office.log.info(1, f"this process stands by for {primary.title}")
            traffic.standby.begin(primary)
            office.watch.add(SCHEDULER, now)
            office.watch.add(primary.uid, now, primary)
            office.nearby.pair(self._register.node[0], primary)
        elif traffic.standby is not None:
            self._stop_waiting()
            traffic.standby.let_go()

    def _complete(self, message: Roster, epoch: int, now: float) -> None:
        office = self._office
        early = [delivery.message for delivery in self._early]
        seated = [(news.node[0], news.attempt) for news in early if isinstance(news, Seated)]
        members, attempts = with_seated(message.members, message.attempts, seated)
        mine = [node for node in members if node.node_id == message.node_id]
        if office.info is not None or not mine:
            return
        office.log.name = label(mine[0])
        office.log.learn(members)
        office.membership.meet_relays(mine[0], Relays(members if message.relays else ()))
        for node in members:
            if office.membership.connects_to(mine[0], node):
                office.van.connect(node.uid, node.address)
        self._stop_waiting()
        self._away.found()
        office.log.info(1, f"{office.log.name} is connected to others")
        standbys = message.standbys
        office.join(mine[0], members, now, epoch=epoch, attempts=attempts, standbys=standbys)
        deliveries, self._early = self._early, []
        for delivery in deliveries:
            self.handle(delivery, now)

    def _give_up(self, error: Exception, now: float) -> None:
        self._office.fail(error)

    def _still_waiting(self, message: Waiting, now: float) -> None:
        if self._deadline.due == math.inf:
            return  # this report is late: the node waits no longer
        is_answer = self._waiting is None or self._away.is_awaited
        self._waiting = message
        self._away.found()
        # The scheduler has answered, so its deadline decides: if this node gave up a moment
        # earlier, it would look like a lost node to the others.
        left_s = self._office.config.rendezvous_timeout_s - message.waited_s
        self._deadline.set(now + max(left_s, 0.0) + _GRACE_S)
        if is_answer:
            # This answers the registration: from now on watch the scheduler, which sends reports.
            self._office.watch.add(SCHEDULER, now)
            self._roster_line.set(now + 2 * self._office.config.roster_interval_s)
        elif self._roster_line.due - now < 1.1 * self._office.config.roster_interval_s:
            self._say_who_is_missing(now)  # the last time was an interval ago

    def _say_who_is_missing(self, now: float) -> None:
        config, office = self._office.config, self._office
        # The scheduler reports at the same interval, so log by this timer only if it is silent.
        intervals = 1 if self._waiting is None else 2
        self._roster_line.set(now + intervals * config.roster_interval_s)
        waited_s = now - self._began_at
        if self._waiting is None:
            office.log.info(
                0,
                f"waiting for the scheduler at {config.root_uri}:{config.root_port}; no answer "
                f"for {waited_s:.0f} s",
            )
            return
        missing, there = ", ".join(self._waiting.missing), ", ".join(self._waiting.present)
        if there:
            text = f"waiting for {missing} for {waited_s:.0f} s; connected: {there}"
        else:  # the cluster is complete
            text = f"waiting for {missing} ({waited_s:.0f} s so far)"
        office.log.info(0, text)

    def _too_late(self) -> DeadlineError:
        config = self._office.config
        limit = f"{config.rendezvous_timeout_s:g} s (PS_RENDEZVOUS_TIMEOUT)"
        trouble = self._office.van.trouble(SCHEDULER)
        if self._waiting is None and trouble:
            return DeadlineError(f"cannot reach the scheduler within {limit}: {trouble}")
        if self._waiting is None:
            return DeadlineError(
                f"no scheduler answered at {config.root_uri}:{config.root_port} within {limit}; "
                "check that it is running and that DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT are "
                "the same in all processes"
            )
        missing = ", ".join(self._waiting.missing)
        return DeadlineError(f"the cluster was not complete within {limit}: missing {missing}")

    # -- barriers ----------------------------------------------------------------------

    def enter_barrier(self, group: int, timeout_s: float, future: Future[None]) -> None:
        office = self._office
        if office.info is None:
            future.set_error(
                UsageError("a barrier needs a complete cluster; wait for node.ready first")
            )
            return
        self._barrier_rounds[group] += 1
        self._barriers.enter(group, self._barrier_rounds[group], timeout_s, future)

    # -- who is gone -------------------------------------------------------------------

    def lost(self, peer: str, reason: str, now: float) -> None:
        office = self._office
        if peer == SCHEDULER and office.config.rejoin_timeout_s and office.error is None:
            self._away.lost(reason, now)
            return
        if self._leaving and not office.traffic.awaits(peer):
            # The peer may end after this node's goodbye: fail only the requests to it.
            for info in office.membership.roster:
                if info.uid == peer:
                    sentence = f"{info.title} ended without an answer: {reason}"
                    error = NodeLostError(sentence, role=info.role, rank=info.rank)
                    office.customers.pending.depart(info.node_id, error)
            office.links.shut(peer)
            office.van.disconnect(peer)
            return
        if office.info is None and peer == SCHEDULER:
            where = f"{office.config.root_uri}:{office.config.root_port}"
            when = " before the cluster was complete"
            if office.traffic.standby is not None and office.traffic.standby.primary is not None:
                when = ", so this standby, which cannot take over without it, ends"
            sentence = f"the scheduler at {where} was lost{when}: {reason}"
            office.fail(NodeLostError(sentence, role=Role.SCHEDULER.value, rank=0))
            office.van.disconnect(peer)
            return
        primary = office.traffic.primary
        if primary is not None and primary.is_standby(peer):
            office.send(SCHEDULER_ID, StandsBy((), True, self._standby_number))
            return
        node = office.membership.node_ids.get(peer)
        if node is None:
            return
        if self._may_be_followed(peer) and office.error is None:
            # Another process may take its place. The scheduler decides that.
            attempt = office.membership.attempts.get(node, 0)
            self._reported[node] = reason
            office.send(SCHEDULER_ID, Vacant(node, attempt, reason))
            return
        # A failed node knows the cause, and must not wait for a dead node to accept messages.
        if office.error is not None or not self._loss_reports.puts_off(node, reason, now):
            self._depart(node, left=False, reason=reason)

    def _may_be_followed(self, peer: str) -> bool:
        """Return whether another process may take the place of this peer."""
        config = self._office.config
        if peer == SCHEDULER:
            return False
        is_server = self._office.role is Role.WORKER  # which is connected to servers alone
        return bool(config.standbys if is_server else config.rejoin_timeout_s)

    def _vacated(self, message: Vacant, now: float) -> None:
        """Stop using the process of a lost node; its seat waits for another one."""
        office = self._office
        self._reported.pop(message.node, None)
        node = office.membership.vacate(message.node, message.attempt, message.reason)
        if node is not None:
            text = f"{node.title} is lost: {message.reason}; another process may take its place"
            office.log.info(0 if office.role is Role.WORKER else 1, text)
            office.membership.lost_time.begins(message.node, now)
            office.watch.vacated(node, message.reason)

    def _seated(self, node: NodeInfo, attempt: int, now: float) -> None:
        """Go on with another process in the seat of a lost node."""
        office = self._office
        self._reported.pop(node.node_id, None)
        office.log.learn((node,))
        before = office.seat(node, attempt, now)
        if before is not None:
            office.membership.lost_time.ends(node.node_id, now)
            text = f"{node.title} has taken the place of {before.title}"
            office.log.info(0 if office.role is Role.WORKER else 1, text)
            if node.role == Role.SERVER.value and self._leaving:
                office.send(node.node_id, Leave())

    def _hear(self, speaker: int, message: Members, now: float) -> None:
        """Note that a member reports a loss; the scheduler decides whether it is one."""
        if ends_itself(message, speaker):
            self._office.membership.ending.add(speaker)
        lost = loss_in(message, speaker)
        if lost is not None:
            self._heard_of(speaker, lost, now + self._office.config.lost_after_s + VERDICT_S)

    def _members_changed(self, peer: str, message: Members, now: float) -> None:
        """Handle news of gone nodes: act on the scheduler's, only note the members'."""
        office = self._office
        speaker = office.membership.node_ids.get(peer)
        if speaker is None:
            return
        if peer != SCHEDULER:
            self._hear(speaker, message, now)
            return
        if 0 in message.left:
            office.membership.ending.add(speaker)  # the scheduler has failed because of this loss
        for node, left, reason in zip(message.gone, message.left, message.reasons, strict=True):
            uid = office.membership.uids.get(node, "")
            if left and node not in office.membership.gone and office.watch.is_connected(uid):
                self._goodbyes.add(uid)
            self._depart(node, left=bool(left), reason=reason)
        if office.error is None and message.epoch > office.membership.epoch:
            office.traffic.begin_epoch(message.epoch)

    def _member_left(self, peer: str) -> None:
        self._expect_no_goodbye(peer)
        node = self._office.membership.node_ids.get(peer)
        if node is not None:
            self._said_goodbye(node)

    def _gone(self, gone: Gone, *, is_news: bool) -> None:
        """Act on a gone node: the loss of another node ends this one too."""
        office = self._office
        if not gone.left:
            if is_news:
                self._pass_on(gone)
            office.fail(gone.error)
            # Drop messages in flight to it: they will never be accepted.
            office.links.shut(gone.node.uid)
            office.van.disconnect(gone.node.uid)
            return
        office.watch.departed(gone)
        self._finish_if_done()

    def disconnected(self, peer: str) -> None:
        self._expect_no_goodbye(peer)

    def _expect_no_goodbye(self, peer: str) -> None:
        """Stop waiting for a peer's goodbye: it has arrived, or can no longer arrive."""
        if peer in self._goodbyes:
            self._goodbyes.discard(peer)
            self._finish_if_done()

    def _finish_if_done(self) -> None:
        """End a server after the last worker has left and its own goodbye has arrived.

        The scheduler's news of the goodbye may arrive first. If the server ended then, the worker
        would wait for the acceptance of its goodbye until this node counts as lost.
        """
        office = self._office
        is_last = office.role is Role.SERVER and not office.membership.live(Role.WORKER)
        if is_last and not self._goodbyes:
            office.finished.set_result(None)

    def _pass_on(self, gone: Gone) -> None:
        """Tell this node's peers the cause, and that this node ends too."""
        office = self._office
        if office.info is None:
            return
        ids = (gone.node.node_id, office.info.node_id)
        news = Members(office.membership.epoch, ids, (0, 0), (gone.reason, ""))
        for node in office.membership.listeners():
            office.send(node.node_id, news)

    # -- the end -----------------------------------------------------------------------

    def say_goodbye(self) -> None:
        self._leaving = True
        super().say_goodbye()

    def fail(self, error: BaseException) -> None:
        self._stop_waiting()
        self._away.end()
        self._barriers.end(error)
