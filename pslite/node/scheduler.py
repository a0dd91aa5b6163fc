"""``SchedulerControl``: handles joins, barriers, and news of lost nodes.

It runs on the scheduler node's I/O thread. Data never passes through it. Pure code decides
(``protocol/membership.py``, ``protocol/barrier.py``); this file carries the decisions out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

from pslite.errors import (
    ConfigError,
    DeadlineError,
    DeadlockError,
    NodeLostError,
    rebuild,
    told,
)
from pslite.future import Future
from pslite.ids import SCHEDULER_ID, NodeInfo, Role, group_members, node_id, role_of
from pslite.node.control import VERDICT_S, ControlOffice, NodeControl, ends_itself, loss_in
from pslite.node.links import Delivery
from pslite.node.peer_watch import beat_at
from pslite.node.scheduler_records import SchedulerRecords
from pslite.node.seating import Seating
from pslite.node.surveyor import Surveyor
from pslite.protocol.barrier import Barriers, Release
from pslite.protocol.charter import Charter
from pslite.protocol.membership import Gone, Rendezvous
from pslite.protocol.relays import relays_of
from pslite.security import WHAT_TO_COMPARE
from pslite.wire.messages import (
    BarrierEnter,
    Beat,
    Deadlock,
    Leave,
    LongWait,
    Members,
    Refused,
    Register,
    Roster,
    StatusQuestion,
    StatusReport,
    Waiting,
)
from pslite.wire.recovery import BarriersReached, MayReturn, StandsBy, StepRepeated, Vacant

#: How often to check for barriers that have been open for a long time.
_LOOK_INTERVAL_S = 0.5
#: How often to tell members that have not asked this scheduler that it is in place of a lost one.
_GREET_INTERVAL_S = 0.1


class SchedulerControl(NodeControl):
    """The control of the scheduler."""

    def __init__(
        self,
        office: ControlOffice,
        node: NodeInfo,
        package: str,
        on_deadlock: list[Callable[[DeadlockError], None]],
    ) -> None:
        super().__init__(office)
        self._node = node
        self._on_deadlock = on_deadlock
        config = office.config
        self._rendezvous = Rendezvous(
            config.num_workers, config.num_servers, package, config.standbys
        )
        self._titles: dict[int, str] = {}
        self._barriers = Barriers(self._titles)
        self._own_barriers: dict[tuple[int, int], Future[None]] = {}
        self._seating = Seating(
            office, self._end_seat, self._vacated, self._seated, self._filled, self._save
        )
        seats = self._seating.seats
        self._surveyor = Surveyor(
            office, node, package, self._rendezvous, self._barriers, seats, self._deadlocked
        )
        self._records = SchedulerRecords(office, node.title, self._barriers, seats)
        #: Van names of the nodes that wait for the roster.
        self._waiting = dict[str, NodeInfo]()
        #: The timer for the earliest time limit of a barrier.
        self._impatience = office.io_queue.timers.new(self._give_up_barriers)

    # -- gathering ---------------------------------------------------------------------

    def begin(self, now: float) -> None:
        super().begin(now)
        self._rendezvous.begin(now)
        self._office.io_queue.timers.every(_LOOK_INTERVAL_S, self._report_barriers)
        charter = self._records.replay(self._become, self._tell_of_deadlock, now)
        self._goes_on(self._records.num_terms - 1)
        if charter is not None:
            self._resume(charter, now)

    def handle(self, delivery: Delivery, now: float) -> None:
        message = delivery.message
        if isinstance(message, Register) and len(message.node) == 1:
            self._register(delivery, message, now)
            return
        if isinstance(message, StatusQuestion):
            self._surveyor.asked(delivery.peer, message, now)
            return
        node = self._office.membership.node_ids.get(delivery.peer)
        if node is None:
            return
        if isinstance(message, Members):
            self._hear(node, message, now)
        elif isinstance(message, Vacant):
            self._hear_of_loss(node, message, now)
        elif isinstance(message, StandsBy):
            self._seating.told_of_standby(node, message)
        elif isinstance(message, StatusReport):
            self._surveyor.reported(node, message, now)
        elif isinstance(message, LongWait):
            self._surveyor.long_wait(node, now)
        elif isinstance(message, BarrierEnter):
            self._enter(node, message.group, message.round, message.timeout_s, now)
        elif isinstance(message, MayReturn):
            self._seating.may_return(node, yes=message.yes)
        elif isinstance(message, StepRepeated):
            self._seating.repeats(node, message.title, now)
        elif isinstance(message, BarriersReached):
            for group, round_ in zip(message.groups, message.rounds, strict=True):
                self._release(self._barriers.reached(node, group, round_))
        elif isinstance(message, Leave):
            self._said_goodbye(node)

    def _register(self, delivery: Delivery, message: Register, now: float) -> None:
        office = self._office
        node = message.node[0]
        if node.uid != delivery.peer or node.incarnation > delivery.incarnation:
            return
        self._seating.registers(node)
        if message.attempt >= 0 and not office.membership.roster:
            self._refuse_unknown(node)
            return
        if office.membership.node_ids.get(node.uid) == node.node_id:
            self._seating.is_back(node, now)
            return
        if message.stands_by and self._seating.standby_is_back(node, message.attempt, now):
            return
        if message.attempt >= 0:  # a short journal does not name those that were replaced
            self._seating.turn_out(node, "it had lost the scheduler")
            return
        known = node, message.num_workers, message.num_servers, message.package
        is_late = bool(self._rendezvous.roster) or office.error is not None
        if is_late:
            refusal = self._rendezvous.disagreement(*known)
        else:
            refusal = self._rendezvous.register(*known, stands_by=message.stands_by)
        if is_late and refusal is None and message.stands_by:
            self._seating.offered(delivery, node, now)
            return
        if is_late and (refusal is None or not office.config.rejoin_timeout_s):
            self._seating.asked(delivery, node, now)
            return
        if refusal is not None:
            office.links.send_unnumbered(delivery.peer, Refused(*told(ConfigError(refusal.reason))))
            if refusal.fatal and not is_late:
                self._give_up(ConfigError(refusal.reason), now)
            return
        self._waiting[delivery.peer] = node
        office.links.know(delivery.peer)
        office.watch.add(delivery.peer, now, node)
        if self._rendezvous.roster:
            self._complete(now)
        else:
            office.links.send(delivery.peer, self._waiting_message(now), (), 0, now)

    def _refuse_unknown(self, node: NodeInfo) -> None:
        """End a process that is a member of a job which this scheduler does not know."""
        journal = self._office.config.scheduler_journal
        where = f"PS_SCHEDULER_JOURNAL={journal} has no record" if journal else "it has no journal"
        text = (
            f"the scheduler was lost, and {self._node.title} in its place does not know this job: "
            f"{where} of the job; start the scheduler with the file of the lost one"
        )
        self._office.log.warn_seldom("unknown job", f"{node.title} is told to end: {text}")
        error = NodeLostError(text, role=Role.SCHEDULER.value, rank=0)
        self._office.links.send_unnumbered(node.uid, Refused(*told(error)))

    def _complete(self, now: float) -> None:
        office = self._office
        self._stop_waiting()
        roster = (self._node, *self._rendezvous.roster)
        self._titles.update((node.node_id, node.title) for node in roster)
        office.log.learn(roster)
        standbys = self._rendezvous.standbys
        relays = bool(relays_of(roster, office.config))
        office.join(self._node, roster, now, standbys=standbys)
        self._seating.begin(roster, standbys, now)
        for node in self._rendezvous.roster:
            office.log.info(
                1, f"assign rank={node.node_id} to node role={node.role}, ip={node.host}"
            )
            attempts = (0,) * len(roster)
            message = Roster(node.node_id, roster, attempts, standbys, relays)
            office.send(node.node_id, message)
        config = office.config
        office.log.info(
            1,
            f"the scheduler is connected to {config.num_workers} workers "
            f"and {config.num_servers} servers",
        )
        if standbys:
            self._beats.set(beat_at(config, now))

    @property
    def _listeners(self) -> Iterable[str]:
        """The peers to which heartbeats go besides the roster's: they wait, or stand by."""
        if self._rendezvous.roster:
            return [node.uid for node in self._seating.seats.standbys()]
        return self._waiting

    def _waiting_message(self, now: float) -> Waiting:
        rendezvous = self._rendezvous
        return Waiting(rendezvous.present(), rendezvous.missing(), rendezvous.waited_s(now))

    def _say_who_is_missing(self, now: float) -> None:
        office = self._office
        self._roster_line.set(now + office.config.roster_interval_s)
        waiting = self._waiting_message(now)
        for peer in self._waiting:
            office.links.send(peer, waiting, (), 0, now)
        there, missing = ", ".join(waiting.present) or "none", ", ".join(waiting.missing)
        office.log.info(
            0, f"waiting for {missing} for {waiting.waited_s:.0f} s; connected: {there}"
        )

    def _give_up(self, error: Exception, now: float) -> None:
        """Tell all waiting nodes why the cluster cannot become complete, and end."""
        office = self._office
        for peer in self._waiting:
            office.links.send(peer, Refused(*told(error)), (), 0, now)
        office.fail(error)

    # -- in place of a lost scheduler --------------------------------------------------

    def _save(self) -> None:
        """Write what the next scheduler must know, before others see it."""
        self._records.save()

    def _goes_on(self, num_before: int) -> None:
        """Say that this process is the scheduler now, after ``num_before`` others."""
        config = self._office.config
        if num_before > 0:
            self._office.reporter.happened(
                f"{self._node.title} takes the place of {self._records.lost}, which was lost"
            )
            self._office.membership.attempts[SCHEDULER_ID] = num_before
        elif config.job_restarts:
            restart = f"restart {config.job_restarts} of the job"
            self._office.reporter.happened(f"{restart}: {config.restart_cause}")
        # A scheduler that was lost before it could write to the journal is not known here.
        for listener in self.on_seated if config.scheduler_journal else ():
            listener(self._node)

    def _resume(self, charter: Charter, now: float) -> None:
        """Go on in the place of a lost scheduler."""
        office, seating = self._office, self._seating
        office.io_queue.timers.every(_GREET_INTERVAL_S, self._greet)
        self._stop_waiting()
        self._barriers.resume(charter.failed_barriers)
        office.traffic.begin_epoch(charter.epoch)
        seating.resume(charter.seats, self._records.num_terms, now)
        self._beats.set(beat_at(office.config, now))
        for row in charter.seats:  # the lost scheduler may not have told it
            server = office.membership.node(row.node_id)
            if row.standby is not None and server is not None:
                self._filled(server)
        live = office.membership.live
        if not live(Role.WORKER):
            seating.release_standbys()
        if not live(Role.WORKER) and not live(Role.SERVER):
            office.finished.set_result(None)

    def _become(self, charter: Charter, before: Charter | None, now: float) -> None:
        """Go from one charter to the next; the first one has the roster of the beginning."""
        office, membership = self._office, self._office.membership
        if before is None:
            roster = (self._node, *charter.roster)
            self._titles.update((node.node_id, node.title) for node in roster)
            office.log.learn(roster)
            office.join(self._node, roster, now, attempts=(0, *charter.attempts))
        for node, attempt in zip(charter.roster, charter.attempts, strict=True):
            lost = office.seat(node, attempt, now)
            if lost is not None:
                self._titles[node.node_id] = node.title
                self._seating.turn_out(lost, "another process has its place")
        self._rendezvous.resume(charter.roster)
        for each in charter.gone:
            gone = membership.depart(each.node_id, left=each.left, reason=each.reason)
            if gone is not None:
                membership.ended.add(each.node_id)
                office.watch.departed(gone)
                self._barriers.depart(each.node_id, gone.sentence)
                for group, round_ in each.barriers:
                    self._barriers.reached(each.node_id, group, round_)
                if not gone.left:
                    office.fail(gone.error)

    # -- barriers ----------------------------------------------------------------------

    def _greet(self, now: float) -> None:
        """Let the members know that another process is the scheduler now."""
        for peer in self._seating.not_back():
            self._office.links.send(peer, Beat(), (), 0, now)

    def disconnected(self, peer: str) -> None:
        pass

    def enter_barrier(self, group: int, timeout_s: float, future: Future[None]) -> None:
        self._barrier_rounds[group] += 1
        round_ = self._barrier_rounds[group]
        self._own_barriers[group, round_] = future
        self._enter(SCHEDULER_ID, group, round_, timeout_s, self._office.clock())

    def _enter(self, node: int, group: int, round_: int, timeout_s: float, now: float) -> None:
        config = self._office.config
        members = group_members(group, config.num_workers, config.num_servers)
        until = now + timeout_s if timeout_s > 0 else math.inf
        self._office.log.info(1, f"Barrier round {round_} of group {group}: node {node}")
        self._release(self._barriers.enter(node, group, round_, members, until))
        if until < self._impatience.due:
            self._impatience.set(until)

    def _give_up_barriers(self, now: float) -> None:
        releases = self._barriers.tick(now)
        self._save()
        self._release(releases)
        self._impatience.set(self._barriers.next_due())

    def _report_barriers(self, now: float) -> None:
        """Tell nodes that wait in a barrier for a long time who is missing."""
        for nodes, waits in self._barriers.overdue(now, self._office.config.report_after_s):
            for node in nodes:
                self._office.send(node, waits)

    def _release(self, releases: list[Release]) -> None:
        for node, over in releases:
            if node != SCHEDULER_ID:
                self._office.send(node, over)
                continue
            future = self._own_barriers.pop((over.group, over.round), None)
            if future is not None and over.kind:
                future.set_error(rebuild(over.kind, over.error))
            elif future is not None:
                future.set_result(None)

    # -- deadlocks ---------------------------------------------------------------------

    def _deadlocked(self, text: str) -> None:
        """End the barriers and tell the workers about their deadlock."""
        office = self._office
        office.log.warn(text)
        releases = self._barriers.give_up(DeadlockError, text)
        self._save()
        self._records.deadlock(text)
        self._release(releases)
        self._tell_of_deadlock(text)
        for rank in office.membership.live(Role.WORKER):
            office.send(node_id(Role.WORKER, rank), Deadlock(text))

    def _tell_of_deadlock(self, text: str) -> None:
        for listener in self._on_deadlock:
            listener(DeadlockError(text))

    # -- who is gone -------------------------------------------------------------------

    def lost(self, peer: str, reason: str, now: float) -> None:
        office = self._office
        node = office.membership.node_ids.get(peer)
        if node is None:
            self._lost_while_gathering(peer, reason, now)
            return
        # A failed node knows the cause, and must not wait for a dead node to accept messages.
        if office.error is not None or not self._loss_reports.puts_off(node, reason, now):
            self._lose(node, reason, now)

    def _lose(self, node: int, reason: str, now: float) -> None:
        """Handle the loss of a node: another process may take its place, or the job ends."""
        if self._office.error is None:
            if self._seating.lost(node, reason, now):
                return
            reason = self._seating.seats.verdict(node, reason)
        self._depart(node, left=False, reason=reason)

    def _end_seat(self, node: int, reason: str) -> None:
        self._depart(node, left=False, reason=reason)

    def _vacated(self, node: int) -> None:
        self._barriers.vacated(node)
        self._surveyor.departed(node, self._office.clock())

    def _seated(self, node: NodeInfo) -> None:
        self._rendezvous.seat(node)
        self._titles[node.node_id] = node.title

    def _filled(self, server: NodeInfo) -> None:
        for listener in self.on_filled:
            listener(server)

    def _hear(self, speaker: int, message: Members, now: float) -> None:
        """Note that a member reports losses, and perhaps its own end."""
        membership, lost = self._office.membership, loss_in(message, speaker)
        if lost is not None:
            # If the lost node is still connected here, it is probably alive: wait less.
            is_there = self._office.watch.is_connected(membership.uids.get(lost[0], ""))
            wait_s = VERDICT_S if is_there else VERDICT_S + self._office.config.lost_after_s
            self._heard_of(speaker, lost, now + wait_s)
        if not ends_itself(message, speaker):
            return
        membership.ending.add(speaker)
        if not self._loss_reports.puts_off(speaker, "", now):
            self._depart(speaker, left=False, reason="it has ended")

    def _hear_of_loss(self, speaker: int, message: Vacant, now: float) -> None:
        """Note that a member has lost a node; look later whether it is lost here too."""
        if role_of(message.node) is Role.SCHEDULER:
            return
        membership = self._office.membership
        is_there = self._office.watch.is_connected(membership.uids.get(message.node, ""))
        wait_s = VERDICT_S if is_there else VERDICT_S + self._office.config.lost_after_s
        reporter = membership.node(speaker)
        if reporter is not None:
            believe = partial(self._believe, reporter, message)
            self._office.io_queue.timers.add(now + wait_s, believe)

    def _believe(self, reporter: NodeInfo, message: Vacant) -> None:
        """Give up a node that a member has lost, although it is still connected here.

        If the member was lost itself meanwhile, the fault may have been its own.
        """
        membership, node = self._office.membership, message.node
        is_over = node in membership.vacant or node in membership.gone
        is_current = message.attempt == membership.attempts.get(node, 0)
        if is_current and not is_over and reporter in membership.listeners():
            said = f"{reporter.title} has lost it: {message.reason}"
            self._lose(node, said, self._office.clock())

    def _lost_while_gathering(self, peer: str, reason: str, now: float) -> None:
        node = self._waiting.pop(peer, None)
        if self._seating.seats.withdraw(peer) or self._seating.standby_lost(peer, reason):
            return
        if node is not None:
            sentence = f"a {node.role} on {node.host} (pid {node.pid}) is lost: {reason}"
            self._give_up(NodeLostError(sentence, role=node.role, rank=node.rank), now)

    def _gone(self, gone: Gone, *, is_news: bool) -> None:
        office = self._office
        self._seating.seats.left(gone.node.node_id)
        if not gone.left:
            self._seating.turn_out(gone.node, gone.reason)
        office.watch.departed(gone)
        office.traffic.begin_epoch(office.membership.epoch + 1)
        self._save()
        news = Members(
            office.membership.epoch, (gone.node.node_id,), (int(gone.left),), (gone.reason,)
        )
        # Nodes that wait for their last answers must know of losses, but not of goodbyes.
        members = office.membership
        for node in members.neighbours() if gone.left else members.listeners():
            office.send(node.node_id, news)
        self._release(self._barriers.depart(gone.node.node_id, gone.sentence))
        self._surveyor.departed(gone.node.node_id, office.clock())
        if not gone.left:
            for standby in self._seating.seats.standbys():
                office.links.send_unnumbered(standby.uid, Refused(*told(gone.error)))
            office.fail(gone.error)
        live = office.membership.live
        if not live(Role.WORKER):
            self._seating.release_standbys()
        if not live(Role.WORKER) and not live(Role.SERVER):
            office.finished.set_result(None)

    # -- the end -----------------------------------------------------------------------

    def end(self) -> None:
        self._records.end()

    def fail(self, error: BaseException) -> None:
        self._stop_waiting()
        own, self._own_barriers = self._own_barriers, {}
        for future in own.values():
            future.set_error(error)

    def _too_late(self) -> DeadlineError:
        office = self._office
        missing = ", ".join(self._rendezvous.missing())
        limit = f"{office.config.rendezvous_timeout_s:g} s (PS_RENDEZVOUS_TIMEOUT)"
        text = f"the cluster was not complete within {limit}: missing {missing}"
        if office.watch.turned_away:
            text += f"; {office.watch.turned_away} connections were refused: {WHAT_TO_COMPARE}"
        return DeadlineError(text)
