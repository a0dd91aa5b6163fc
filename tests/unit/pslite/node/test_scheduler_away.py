"""A member without a scheduler: it asks again, waits for a while, and tells all once more."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from pslite.config import Config
from pslite.errors import NodeLostError
from pslite.future import Future
from pslite.ids import SCHEDULER_ID, NodeInfo, Role
from pslite.node.control import SCHEDULER
from pslite.node.io_queue import Timers
from pslite.node.member_barriers import MemberBarriers
from pslite.node.scheduler_away import SchedulerAway
from pslite.protocol.membership import Membership
from pslite.wire.base import Message
from pslite.wire.messages import BarrierEnter, BarrierLeave, Register
from pslite.wire.recovery import BarriersReached

FIRST, SECOND = (
    NodeInfo("scheduler", 0, uid, number, "", "alpha", "k", number)
    for number, uid in enumerate((SCHEDULER, "next"), 1)
)
WORKER = NodeInfo("worker", 0, "W1", 7, "", "alpha", "k", 7)
REGISTER = Register((WORKER,), 1, 1, "1.0", False, 0)
WAIT_S = 20.0


class Member:
    """What ``SchedulerAway`` and ``MemberBarriers`` see of a node."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.now = 100.0
        self.events: list[Any] = []
        self.log: list[str] = []
        self.warnings: list[str] = []
        self.errors: list[BaseException] = []
        membership = Membership(Role.WORKER)
        membership.begin((FIRST, WORKER))
        self.office: Any = SimpleNamespace(
            config=Config(root_uri="host", root_port=9091, rejoin_timeout_s=wait_s),
            role=Role.WORKER,
            error=None,
            clock=lambda: self.now,
            membership=membership,
            io_queue=SimpleNamespace(timers=Timers()),
            links=SimpleNamespace(
                on_replaced=None,
                reopen=lambda peer: self.events.append(("reopen", peer)),
                send=lambda peer, message, *_: self.events.append((peer, message)),
            ),
            log=SimpleNamespace(
                info=lambda _, text: self.log.append(text),
                warn=self.warnings.append,
                learn=lambda nodes: None,
            ),
            watch=SimpleNamespace(
                add=lambda peer, *_: self.events.append(("watch", peer)),
                forget=lambda peer: self.events.append(("forget", peer)),
            ),
            fail=self.errors.append,
            send=lambda node, message: self.events.append((node, message)),
        )
        self.away = SchedulerAway(self.office, lambda: REGISTER)

    def until(self, now: float) -> None:
        """Let time pass."""
        timers = self.office.io_queue.timers
        while timers.due <= now:
            self.now = timers.due
            timers.run(self.now)
        self.now = now

    def said(self) -> list[Message]:
        """What was sent since the last call."""
        events, self.events = self.events, []
        return [event for _, event in events if isinstance(event, Message)]


# -- without a scheduler -------------------------------------------------------------------


def test_a_member_begins_a_new_channel_and_registers_at_once() -> None:
    member = Member()
    member.away.lost("its connection is lost", member.now)
    assert member.events == [
        ("forget", SCHEDULER),
        ("reopen", SCHEDULER),
        (SCHEDULER, REGISTER),
        ("watch", SCHEDULER),
    ]
    assert member.away.is_awaited
    assert member.log == [
        "the scheduler is lost: its connection is lost; waiting for another process in its place"
    ]


def test_it_says_every_ten_seconds_for_how_long_there_is_none() -> None:
    member = Member(wait_s=100.0)
    member.away.lost("no answer", member.now)
    member.until(125.0)
    member.away.found()
    member.until(200.0)
    assert member.warnings == [
        f"no scheduler at host:9091 for {seconds} s; push and pull go on (if its process is only "
        "stopped, continue it with kill -CONT)"
        for seconds in (10, 20)
    ]


def test_it_asks_again_as_often_as_it_is_lost_but_waits_once() -> None:
    member = Member()
    for number in range(3):
        member.until(100.0 + 6.0 * number)
        member.away.lost("no answer", member.now)
    assert (member.said(), len(member.log)) == ([REGISTER] * 3, 1)
    member.until(100.0 + WAIT_S - 0.1)
    assert member.errors == []
    member.until(100.0 + WAIT_S)
    assert len(member.errors) == 1


def test_it_ends_with_an_error_that_names_the_scheduler_and_the_setting() -> None:
    member = Member()
    member.away.lost("its process is gone", member.now)
    member.until(1000.0)
    (error,) = member.errors
    assert isinstance(error, NodeLostError)
    assert (error.role, error.rank) == ("scheduler", 0)
    assert str(error).startswith(
        "the scheduler at host:9091 was lost, and no process took its place within 20 s "
        "(PS_REJOIN_TIMEOUT)"
    )


def test_it_waits_no_longer_when_a_scheduler_has_answered() -> None:
    member = Member()
    member.away.lost("its process is gone", member.now)
    member.until(103.5)
    member.away.found(SECOND)
    assert not member.away.is_awaited
    assert member.office.membership.roster == (SECOND, WORKER)
    assert member.log[-1] == "the scheduler is there again after 3.5 s"
    member.until(1000.0)
    assert member.errors == []
    member.away.lost("killed too", member.now)
    member.until(1000.0 + WAIT_S - 0.1)
    assert member.errors == []  # the time begins anew
    member.until(1000.0 + WAIT_S)
    assert len(member.errors) == 1


def test_no_time_is_told_if_the_next_scheduler_tells_of_the_loss() -> None:
    member = Member()
    member.office.links.on_replaced(SCHEDULER)
    member.until(100.01)
    member.away.found()
    assert member.log[-1] == "the scheduler is there again"


def test_only_workers_tell_at_once_that_the_scheduler_was_away() -> None:
    member, levels = Member(), []
    member.office.log.info = lambda level, _: levels.append(level)
    for member.office.role in (Role.WORKER, Role.SERVER):
        member.away.lost("no answer", member.now)
        member.until(member.now + 2.0)
        member.away.found()
    assert levels == [0, 0, 1, 1]


def test_the_time_without_a_scheduler_is_added_up() -> None:
    member = Member()
    for lost_at, again_at, found_at in ((100.0, 102.0, 103.5), (110.0, 111.0, 112.0)):
        for now in (lost_at, again_at):
            member.until(now)
            member.away.lost("no answer", now)
        member.until(found_at)
        member.away.found(SECOND)
    assert member.office.membership.no_scheduler_time.seconds(member.now) == 5.5


def test_an_answer_of_a_scheduler_that_was_not_awaited_is_not_logged() -> None:
    member = Member()
    member.away.found(FIRST)
    assert member.log == []


@pytest.mark.parametrize(
    ("peer", "wait_s", "has_failed"),
    [
        (SCHEDULER, WAIT_S, False),
        ("S1", WAIT_S, False),
        (SCHEDULER, 0.0, False),
        (SCHEDULER, 9, True),
    ],
)
def test_a_message_of_another_process_is_a_loss_only_of_a_scheduler_that_is_awaited(
    peer: str, wait_s: float, has_failed: bool
) -> None:
    member = Member(wait_s)
    member.office.error = NodeLostError("failed", role="server", rank=0) if has_failed else None
    member.office.links.on_replaced(peer)
    is_loss = peer == SCHEDULER and wait_s == WAIT_S and not has_failed
    assert member.said() == ([REGISTER] if is_loss else [])
    assert member.away.is_awaited is is_loss


# -- barriers ------------------------------------------------------------------------------

GROUP, OTHER = 4, 6


def entered(member: Member, *entries: tuple[int, int, float]) -> MemberBarriers:
    barriers = MemberBarriers(member.office)
    for group, round_, timeout_s in entries:
        barriers.enter(group, round_, timeout_s, Future(""))
    member.said()
    return barriers


def test_the_next_scheduler_is_told_what_was_reached_and_where_the_node_waits() -> None:
    member = Member()
    barriers = entered(member, (GROUP, 2, 0.0), (GROUP, 3, 0.0), (OTHER, 1, 0.0))
    barriers.over(BarrierLeave(GROUP, 2, "", ""))
    barriers.enter_again({GROUP: 3, OTHER: 1}, member.now)
    assert member.events == [
        (SCHEDULER_ID, BarriersReached((GROUP, OTHER), (3, 1))),
        (SCHEDULER_ID, BarrierEnter(GROUP, 3, 0.0)),
        (SCHEDULER_ID, BarrierEnter(OTHER, 1, 0.0)),
    ]


def test_a_time_limit_goes_on_while_there_is_no_scheduler() -> None:
    member = Member()
    barriers = entered(member, (GROUP, 1, 10.0), (OTHER, 1, 2.0), (GROUP, 2, 0.0))
    barriers.enter_again({GROUP: 2, OTHER: 1}, member.now + 4.0)
    _, *entries = member.said()
    assert entries == [
        BarrierEnter(GROUP, 1, 6.0),
        BarrierEnter(OTHER, 1, 0.001),  # it has passed; 0 would mean without a limit
        BarrierEnter(GROUP, 2, 0.0),
    ]


def test_a_node_that_has_reached_no_barrier_says_so() -> None:
    member = Member()
    entered(member).enter_again({}, math.pi)
    assert member.said() == [BarriersReached((), ())]
