"""``Seating``: gives the seat of a lost node to another process (I/O thread).

On the scheduler. ``protocol/succession.py`` decides. This file tells the members, and lets the new
process join once all of them know it: from then on, nothing that the lost process may still send
has any effect. So a process that was only stopped can wake up and do no harm. It is told that its
seat is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from pslite.errors import ConfigError, NodeLostError, told
from pslite.ids import NodeInfo, Role, role_of
from pslite.node.control import ControlOffice
from pslite.node.links import Delivery
from pslite.protocol.charter import SeatRow
from pslite.protocol.liveness import PROCESS_GONE
from pslite.protocol.succession import Seats, Standing, Succession
from pslite.wire.messages import Members, Refused, Roster, Waiting
from pslite.wire.recovery import Seated, StandsBy, Vacant

#: How often to look at vacant seats and at processes that ask for one.
_LOOK_INTERVAL_S = 1.0


class Seating:
    """The seats of one job.

    ``end`` declares a node lost for good, with a reason. ``vacated`` and ``seated`` are called
    after a seat has become vacant or has another process, ``filled`` with a server whose new
    standby could take its place, and ``save`` before others hear of a change.
    """

    def __init__(
        self,
        office: ControlOffice,
        end: Callable[[int, str], None],
        vacated: Callable[[int], None],
        seated: Callable[[NodeInfo], None],
        filled: Callable[[NodeInfo], None],
        save: Callable[[], None],
    ) -> None:
        self._office = office
        self._end = end
        self._vacated = vacated
        self._seated = seated
        self._filled = filled
        self._save = save
        self.seats = Seats(office.config.rejoin_timeout_s)
        self._timer = office.io_queue.timers.new(self._look)
        #: The processes that have registered at a scheduler that goes on in place of a lost one;
        #: None if this one is the first.
        self._back: set[str] | None = None
        #: The standbys that are not needed any more and may not have ended, by uid.
        self._released: dict[str, NodeInfo] = {}
        #: The number of messages to servers about their standbys; and the last one of each.
        self._num_told = 0
        self._told: dict[int, int] = {}

    def begin(
        self, roster: tuple[NodeInfo, ...], standbys: tuple[NodeInfo, ...], now: float
    ) -> None:
        """Begin with a complete cluster."""
        self.seats.begin(roster, standbys)
        self._save()
        for standby in standbys:
            primary = self._office.membership.node(standby.node_id)
            if primary is not None:
                self._office.links.send(standby.uid, StandsBy((primary,), False, 0), (), 1, now)
        if self.seats.wait_s or standbys:
            self._timer.set(now + _LOOK_INTERVAL_S)

    def asked(self, delivery: Delivery, node: NodeInfo, now: float) -> None:
        """Handle a process that registers after the cluster was complete."""
        office = self._office
        reason = "this job has failed" if office.error else self.seats.ask(node, now)
        if reason is not None:
            self._refuse(delivery.peer, reason)
            return
        office.links.know(delivery.peer)
        office.watch.add(delivery.peer, now, node)
        self._say_whom_it_awaits(now)
        self._fill(now)

    def offered(self, delivery: Delivery, standby: NodeInfo, now: float) -> None:
        """Handle a standby that registers after the cluster was complete."""
        office = self._office
        reason = "this job has failed" if office.error else self.seats.offer(standby)
        if reason is not None:
            self._refuse(delivery.peer, reason)
            return
        office.links.know(delivery.peer)
        office.admission.add(delivery.peer, standby.role)
        office.watch.add(delivery.peer, now, standby)
        self._pair_up()
        self._say_whom_it_awaits(now)

    def _tell_server(self, node_id: int, standby: tuple[NodeInfo, ...]) -> None:
        """Tell a server who stands by for it; the last message counts."""
        self._save()
        self._num_told += 1
        self._told[node_id] = self._num_told
        self._office.send(node_id, StandsBy(standby, True, self._num_told))

    def told_of_standby(self, node_id: int, message: StandsBy) -> None:
        """Handle a server's report: a standby has its state, or it has lost its standby.

        The report may be late, and then about an earlier standby.
        """
        if message.node:
            self._standby_is_ready(node_id, message.node[0].uid)
        elif message.number == self._told.get(node_id, 0):
            self.dismiss(node_id, "cannot reach its standby")

    def _pair_up(self) -> None:
        """Let standbys be filled by the servers that have none."""
        office = self._office
        for server, standby in self.seats.pairs():
            office.log.info(1, f"{standby.title} will stand by for {server.title}")
            office.links.send(standby.uid, StandsBy((server,), False, 0), (), 1, office.clock())
            self._tell_server(server.node_id, (standby,))

    def may_return(self, node_id: int, *, yes: bool) -> None:
        """Note whether a worker could be replaced, or that a server never could."""
        if role_of(node_id) is Role.WORKER:
            self.seats.may_return(node_id, yes=yes)
            self._save()
        elif not yes:
            self.dismiss(node_id, "does something that no standby repeats", for_good=True)

    def _standby_is_ready(self, node_id: int, uid: str) -> None:
        standby, server = self.seats.filled(node_id, uid), self._office.membership.node(node_id)
        if standby is not None and server is not None:
            self._save()
            self._filled(server)
            self._office.reporter.happened(
                f"{server.title} has a standby again (pid {standby.pid})"
            )

    def dismiss(self, node_id: int, why: str, *, for_good: bool = False) -> None:
        """Let a server go on without its standby, if it has one.

        ``why`` is what the server does. The process ends well if that is ``for_good``, and else
        with an error: another one may be needed.
        """
        standby = self.seats.dismiss(node_id, for_good=for_good)
        if standby is not None:
            office = self._office
            sentence = f"{office.membership.title(node_id)} {why}, and goes on without one"
            office.reporter.happened(sentence)
            self._tell_server(node_id, ())
            if for_good:
                self._release(standby)
            else:
                self._end_standby(standby, sentence)
            self._pair_up()

    def release_standbys(self) -> None:
        """Let all standbys end: the job is over."""
        for standby in self.seats.standbys():
            self.seats.withdraw_offer(standby.uid)
            self.seats.dismiss(standby.node_id, for_good=True)
            self._release(standby)

    def _release(self, standby: NodeInfo) -> None:
        """Tell a standby that it is not needed, and watch it until it has ended."""
        office, now = self._office, self._office.clock()
        self._released[standby.uid] = standby
        office.watch.add(standby.uid, now, standby)
        office.links.send(standby.uid, StandsBy((), False, 0), (), 1, now)

    def _end_standby(self, standby: NodeInfo, sentence: str) -> None:
        """Let a standby end with an error that has this sentence."""
        self._office.watch.forget(standby.uid)
        self._turn_away(standby, f"{sentence}; this process, which stood by, must end")

    def standby_lost(self, peer: str, reason: str) -> bool:
        """Handle the loss of a process that has not joined; return whether it stood by."""
        if self.seats.withdraw_offer(peer):
            return True
        for standby in self.seats.standbys():
            if standby.uid == peer:
                self.dismiss(standby.node_id, f"has lost its standby ({reason})")
                return True
        lost = self._released.pop(peer, None)
        if lost is not None:
            self._office.watch.forget(peer)
            self.turn_out(lost, reason)  # otherwise a message to it would wait for ever
        return lost is not None

    def lost(self, node_id: int, reason: str, now: float) -> bool:
        """Handle the loss of a node; return whether its seat waits for another process."""
        office = self._office
        node = office.membership.node(node_id)
        if node is None or not self.seats.lost(node_id, reason, now):
            return False
        attempt = self.seats.attempt(node_id)
        if office.membership.vacate(node_id, attempt, reason) is None:
            return True
        text = f"{node.title} is lost: {reason}; another process may take its place"
        if node.role == Role.WORKER.value and not reason.endswith(PROCESS_GONE):
            text = f"{text} (if this one only hangs, end it: kill -9 {node.pid})"
        office.reporter.happened(text)
        self._save()
        office.watch.vacated(node, reason)
        self.turn_out(node, reason)
        for member in self._others(node_id):
            office.send(member.node_id, Vacant(node_id, attempt, reason))
        self._vacated(node_id)
        self._fill(now)
        return True

    def turn_out(self, node: NodeInfo, reason: str) -> None:
        """Tell a process that it was declared lost, now or when it wakes up."""
        text = (
            f"this process was stopped or cut off for too long: {node.title} was declared lost "
            f"({reason}), and another process may have its place; it must not go on"
        )
        self._turn_away(node, text)

    def _turn_away(self, node: NodeInfo, text: str) -> None:
        refusal = Refused(*told(NodeLostError(text, role=node.role, rank=node.rank)))
        self._office.links.send_unnumbered(node.uid, refusal)
        self._office.links.turn_out(node.uid, refusal)

    def _others(self, node_id: int) -> list[NodeInfo]:
        """Return the present members besides one."""
        members = self._office.membership.neighbours()
        return [node for node in members if node.node_id != node_id]

    def _fill(self, now: float) -> None:
        for succession in self.seats.take():
            self._seat(succession, now)

    def _seat(self, succession: Succession, now: float) -> None:
        office, node = self._office, succession.node
        office.log.learn((node,))
        office.seat(node, succession.attempt, now)
        self._save()
        for member in self._others(node.node_id):
            office.send(member.node_id, Seated((node,), succession.attempt))
        self._seated(node)
        office.io_queue.look_after_each_step(partial(self._welcome, succession))

    def _welcome(self, succession: Succession) -> bool:
        """Let a process join once all members know it; return whether that is over."""
        office, node, before = self._office, succession.node, succession.before
        attempt = succession.attempt
        if office.error is not None or not self.seats.is_welcoming(node.node_id, attempt):
            return True
        others = [member.uid for member in self._others(node.node_id)]
        is_known = self._back is None or self._back.issuperset(others)
        if not (is_known and office.links.everything_accepted(others)):
            return False
        self.seats.welcomed(node.node_id, attempt)
        who = node.title if node.role == Role.WORKER.value else f"{node.title}, the standby,"
        place = "a lost process" if before is None else before.title
        after_s = self.seats.since_loss_s(node.node_id, office.clock())
        office.reporter.happened(f"{who} takes the place of {place} after {after_s:.2f} s")
        self._pair_up()
        self._save()
        self._tell_all(node.node_id)
        return True

    def repeats(self, node_id: int, what: str, now: float) -> None:
        """Note that a process that took a place has come to the step that it repeats."""
        office = self._office
        if self.seats.attempt(node_id):
            title = office.membership.title(node_id)
            after_s = self.seats.since_loss_s(node_id, now)
            office.reporter.happened(f"{title} repeats {what}, {after_s:.2f} s after the loss")

    def _tell_all(self, node_id: int) -> None:
        """Tell a process that has a seat who has the others, and who is lost or gone."""
        office, membership = self._office, self._office.membership
        attempts = tuple(membership.attempts.get(each.node_id, 0) for each in membership.roster)
        office.send(node_id, Roster(node_id, membership.roster, attempts))
        for vacant, reason in membership.vacant.items():
            office.send(node_id, Vacant(vacant, membership.attempts.get(vacant, 0), reason))
        gone = membership.gone.values()
        if gone:
            ids = tuple(each.node.node_id for each in gone)
            left = tuple(int(each.left) for each in gone)
            reasons = tuple(each.reason for each in gone)
            office.send(node_id, Members(membership.epoch, ids, left, reasons))

    # -- in place of a lost scheduler --------------------------------------------------

    def resume(self, rows: Sequence[SeatRow], term: int, now: float) -> None:
        """Go on with the seats of a lost scheduler, as the ``term``-th one."""
        office, seats = self._office, self.seats
        self._back, self._num_told = set(), term << 32
        seats.resume(rows, office.config.num_workers, now)
        for standby in seats.standbys():
            office.links.know(standby.uid)
            office.admission.add(standby.uid, standby.role)
            office.watch.add(standby.uid, now, standby)
        for row in rows:
            if row.standing == Standing.VACANT.name:
                office.membership.vacate(row.node_id, row.attempt, row.reason)
                office.watch.vacated(row.node, row.reason)
                self.turn_out(row.node, row.reason)
        for peer in self.not_back():
            office.watch.expect(peer, now)
        for each in seats.welcoming():
            office.io_queue.look_after_each_step(partial(self._welcome, each))
        self._timer.set(now + _LOOK_INTERVAL_S)

    def not_back(self) -> list[str]:
        """Return the processes that may not know that this is the scheduler now."""
        nodes = [*self._office.membership.neighbours(), *self.seats.standbys()]
        return [node.uid for node in nodes if node.uid not in (self._back or ())]

    def registers(self, node: NodeInfo) -> None:
        """Note that a process has registered, so it knows that this is the scheduler now."""
        if self._back is not None:
            self._back.add(node.uid)

    def is_back(self, node: NodeInfo, now: float) -> None:
        """Handle a member that has lost the scheduler and registers again."""
        office, node_id = self._office, node.node_id
        office.links.know(node.uid)
        office.links.send_again(node.uid, now)
        if self.seats.is_welcoming(node_id, self.seats.attempt(node_id)):
            return  # it is told once all members know it
        self._tell_all(node_id)
        if node.role == Role.SERVER.value and office.config.standbys:
            standby = self.seats.standby_of(node_id)
            self._tell_server(node_id, () if standby is None else (standby,))
        self._fill(now)

    def standby_is_back(self, standby: NodeInfo, attempt: int, now: float) -> bool:
        """Handle a standby that has lost the scheduler; return False if it is a new one."""
        office = self._office
        if all(each.uid != standby.uid for each in self.seats.standbys()):
            if attempt < 0:
                return False
            office.links.know(standby.uid)
            if self.seats.takes_standby(standby.node_id):
                self._end_standby(standby, "a server has let its standby go")
            else:
                self._release(standby)
            return True
        office.links.know(standby.uid)
        server = office.membership.node(standby.node_id)
        is_paired = all(each.uid != standby.uid for each in self.seats.spares())
        if server is not None and is_paired:
            office.links.send(standby.uid, StandsBy((server,), False, 0), (), 1, now)
        return True

    def _look(self, now: float) -> None:
        self._timer.set(now + _LOOK_INTERVAL_S if self._office.error is None else math.inf)
        for node_id, reason in self.seats.overdue(now):
            self._end(node_id, reason)
        for uid, reason in self.seats.in_vain(now):
            self._refuse(uid, reason)
        self._say_whom_it_awaits(now)

    def _say_whom_it_awaits(self, now: float) -> None:
        """Tell the processes that ask for a seat for whom they wait; also a sign of life."""
        for node, since, awaited in self.seats.asking():
            waiting = Waiting((), (awaited,), now - since)
            self._office.links.send(node.uid, waiting, (), 0, now)
        for spare in self.seats.spares():
            awaited = f"the end of the standby of server {spare.rank}, to take its place"
            waiting = Waiting((), (awaited,), 0.0)
            self._office.links.send(spare.uid, waiting, (), 0, now)

    def _refuse(self, peer: str, reason: str) -> None:
        self._office.watch.forget(peer)
        self._office.links.send_unnumbered(peer, Refused(*told(ConfigError(reason))))
