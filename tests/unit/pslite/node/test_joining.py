"""A member that waits for the cluster: its deadline, and reports that come too late."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from pslite.config import Config
from pslite.errors import DeadlineError
from pslite.ids import NodeInfo, Role, node_id
from pslite.node.control import SCHEDULER
from pslite.node.io_queue import Timers
from pslite.node.member import MemberControl
from pslite.wire.base import Message
from pslite.wire.messages import Register, Roster, Waiting
from pslite.wire.recovery import StandsBy

NODES = tuple(
    NodeInfo(role, 0, uid, number, "", "alpha", "k", number)
    for number, (role, uid) in enumerate(
        [("scheduler", SCHEDULER), ("worker", "W1"), ("server", "S1")], 1
    )
)
REPORT = Waiting(("worker on alpha (pid 2)",), ("1 of 1 server",), 1.0)


class Member:
    """A member's control, with an office that remembers what it is told."""

    def __init__(self, role: Role = Role.WORKER, *, stands_by: bool = False) -> None:
        self.now = 0.0
        self.timers = Timers()
        self.sent: list[tuple[str, Message]] = []
        self.log: list[str] = []
        self.watched: list[str] = []
        self.errors: list[BaseException] = []
        self.primaries: list[NodeInfo] = []
        self.turns: list[Any] = []
        standby = SimpleNamespace(
            primary=None, begin=self.primaries.append, take_over=self.turns.append
        )
        self.office: Any = SimpleNamespace(
            config=Config(
                role=role.value,
                num_workers=1,
                num_servers=1,
                rendezvous_timeout_s=10.0,
                roster_interval_s=2.0,
                heartbeat_interval_s=0.0,
                stands_by=stands_by,
            ),
            role=role,
            info=None,
            error=None,
            clock=lambda: self.now,
            io_queue=SimpleNamespace(timers=self.timers),
            van=SimpleNamespace(connect=lambda uid, address: None, trouble=lambda uid: ""),
            links=SimpleNamespace(
                send=lambda peer, message, *_: self.sent.append((peer, message)),
                know=lambda peer: None,
            ),
            log=SimpleNamespace(
                name="", info=lambda _, text: self.log.append(text), learn=lambda nodes: None
            ),
            watch=SimpleNamespace(add=lambda peer, *_: self.watched.append(peer)),
            membership=SimpleNamespace(
                meet_relays=lambda *_: None, connects_to=lambda *_: False, fellows=()
            ),
            nearby=SimpleNamespace(pair=lambda *_: None),
            traffic=SimpleNamespace(primary=None, standby=standby if stands_by else None),
            join=self._join,
            fail=self.errors.append,
        )
        mine = NODES[1 if role is Role.WORKER else 2]
        self.control = MemberControl(self.office, mine, "1.0")
        self.control.begin(0.0)

    def _join(self, info: NodeInfo, roster: Any, now: float, **_: Any) -> None:
        self.office.info = info

    def hear(self, message: Message) -> None:
        """The scheduler says this."""
        delivery: Any = SimpleNamespace(peer=SCHEDULER, message=message, epoch=1, frames=())
        self.control.handle(delivery, self.now)

    def until(self, now: float) -> None:
        """Let time pass."""
        while self.timers.due <= now:
            self.now = self.timers.due
            self.timers.run(self.now)
        self.now = now


def roster(role: Role = Role.WORKER) -> Roster:
    return Roster(node_id(role, 0), NODES, (0, 0, 0))


def test_a_report_of_who_is_missing_sets_the_deadline_and_is_logged() -> None:
    member = Member()
    member.hear(REPORT)
    member.until(2.0)
    member.hear(Waiting(REPORT.present, REPORT.missing, 3.0))
    member.hear(Waiting((), ("the end of worker 0",), 4.0))  # when the cluster is complete
    member.until(4.0)
    member.hear(Waiting((), ("the end of worker 0",), 5.0))
    member.hear(Waiting(REPORT.present, REPORT.missing, 5.0))
    assert member.log == [
        "waiting for 1 of 1 server for 2 s; connected: worker on alpha (pid 2)",
        "waiting for the end of worker 0 (4 s so far)",
    ]
    assert member.watched == [SCHEDULER]
    member.until(100.0)
    (error,) = member.errors[:1]
    assert isinstance(error, DeadlineError)
    assert "missing 1 of 1 server" in str(error)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_report_that_comes_after_the_roster_is_ignored(is_first: bool) -> None:
    # It is not numbered, so the roster may overtake it.
    member = Member()
    if not is_first:
        member.hear(REPORT)
    member.hear(roster())
    assert member.office.info == NODES[1]
    assert member.timers.due == math.inf
    logged, watched = list(member.log), list(member.watched)
    member.hear(REPORT)
    assert (member.log, member.watched) == (logged, watched)
    assert member.timers.due == math.inf
    member.until(1000.0)
    assert member.errors == []


# -- a standby ----------------------------------------------------------------------------


def test_a_standby_says_for_whom_it_registers() -> None:
    for stands_by in (False, True):
        member = Member(Role.SERVER, stands_by=stands_by)
        ((peer, message),) = member.sent
        assert isinstance(message, Register)
        assert (peer, message.stands_by) == (SCHEDULER, stands_by)


def test_a_standby_that_knows_its_server_waits_without_a_deadline() -> None:
    member = Member(Role.SERVER, stands_by=True)
    member.hear(REPORT)
    member.hear(StandsBy((NODES[2],), False, 0))
    assert member.primaries == [NODES[2]]
    member.hear(REPORT)  # it is late
    member.until(1000.0)
    assert (member.errors, member.office.info) == ([], None)


def test_a_standby_joins_once_it_has_done_what_its_server_did() -> None:
    member = Member(Role.SERVER, stands_by=True)
    member.hear(StandsBy((NODES[2],), False, 0))
    member.hear(roster(Role.SERVER))
    assert member.office.info is None
    (join,) = member.turns
    join()
    assert member.office.info == NODES[2]
