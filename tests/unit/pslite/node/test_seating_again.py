"""Seats in the hands of the next scheduler: who is let in, let go, and told what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pslite.config import Config
from pslite.ids import NodeInfo, Role, node_id
from pslite.node.io_queue import Timers
from pslite.node.seating import Seating
from pslite.protocol.charter import SeatRow
from pslite.protocol.membership import Membership
from pslite.wire.base import Message
from pslite.wire.messages import Refused, Roster
from pslite.wire.recovery import StandsBy


def process(role: str, number: int, rank: int) -> NodeInfo:
    return NodeInfo(role, rank, f"{role}{number}", 100 + number, "", "alpha", "k", 4000 + number)


SCHEDULER, FIRST, SECOND, SERVER = ROSTER = (
    process("scheduler", 0, 0),
    process("worker", 1, 0),
    process("worker", 2, 1),
    process("server", 3, 0),
)
STANDBY = process("server", 9, 0)


def row(node: NodeInfo, standing: str = "TAKEN", **more: Any) -> SeatRow:
    return SeatRow(node.node_id, node, 0, standing, True, 0, "", None, None, False)._replace(**more)


class Scheduler:
    """The seats of a scheduler that goes on from these rows."""

    def __init__(self, *rows: SeatRow) -> None:
        self.sent: list[tuple[Any, Message]] = []
        self.looks: list[Any] = []
        self.expected: list[str] = []
        self.repeated: list[str] = []
        self.events: list[str] = []
        membership = Membership(Role.SCHEDULER)
        membership.begin(ROSTER)
        nothing = SimpleNamespace(
            know=lambda peer: None, add=lambda *_: None, forget=lambda peer: None
        )
        office: Any = SimpleNamespace(
            config=Config(num_workers=2, num_servers=1, standbys=1, rejoin_timeout_s=60.0),
            membership=membership,
            error=None,
            clock=lambda: 0.0,
            admission=nothing,
            io_queue=SimpleNamespace(timers=Timers(), look_after_each_step=self.looks.append),
            links=SimpleNamespace(
                know=lambda peer: None,
                send_again=lambda peer, now: self.repeated.append(peer),
                everything_accepted=lambda peers: True,
                send=lambda peer, message, *_: self.sent.append((peer, message)),
                send_unnumbered=lambda peer, message: self.sent.append((peer, message)),
                turn_out=lambda peer, refusal: None,
            ),
            watch=SimpleNamespace(
                add=lambda *_: None,
                forget=lambda peer: None,
                vacated=lambda *_: None,
                expect=lambda peer, now: self.expected.append(peer),
            ),
            reporter=SimpleNamespace(happened=self.events.append),
            log=SimpleNamespace(info=lambda *_: None, learn=lambda nodes: None),
            send=lambda node, message: self.sent.append((node, message)),
        )

        def ignore(*_: Any) -> None:
            pass

        self.seating = Seating(office, ignore, ignore, ignore, ignore, ignore)
        self.seating.resume(rows, 2, 0.0)


def test_a_process_is_welcome_when_all_members_are_back_and_know_it() -> None:
    scheduler = Scheduler(row(FIRST), row(SECOND, "WELCOMING", attempt=1))
    (look,) = scheduler.looks
    for node in (SERVER, FIRST):
        assert (look(), scheduler.sent) == (False, [])
        scheduler.seating.registers(node)
    assert look()
    ((to, message),) = scheduler.sent
    assert isinstance(message, Roster)
    assert (to, message.node_id) == (SECOND.node_id, SECOND.node_id)
    assert scheduler.events == [f"{SECOND.title} takes the place of a lost process after 0.00 s"]


def test_only_a_process_that_has_taken_a_place_repeats_a_step() -> None:
    scheduler = Scheduler(row(FIRST), row(SECOND, attempt=1))
    for node in (FIRST, SECOND, SERVER):
        scheduler.seating.repeats(node.node_id, "step 3 of loop 2", 1.5)
    said = f"{SECOND.title} repeats step 3 of loop 2, 1.50 s after the loss"
    assert scheduler.events == [said]


def test_the_members_and_standbys_that_are_not_back_are_looked_for() -> None:
    scheduler = Scheduler(row(FIRST), row(SECOND), row(SERVER, standby=STANDBY))
    uids = [FIRST.uid, SECOND.uid, SERVER.uid, STANDBY.uid]
    assert sorted(scheduler.expected) == sorted(uids)
    scheduler.seating.registers(STANDBY)
    scheduler.seating.registers(FIRST)
    assert sorted(scheduler.seating.not_back()) == sorted([SECOND.uid, SERVER.uid])


def test_a_member_that_registers_again_gets_what_it_has_dropped() -> None:
    scheduler = Scheduler(row(FIRST), row(SERVER))
    scheduler.seating.is_back(FIRST, 1.0)
    assert scheduler.repeated == [FIRST.uid]


def test_a_standby_that_is_still_one_is_told_its_server() -> None:
    scheduler = Scheduler(row(FIRST), row(SERVER, standby=STANDBY))
    assert scheduler.seating.standby_is_back(STANDBY, 0, 1.0)
    assert scheduler.sent == [(STANDBY.uid, StandsBy((SERVER,), False, 0))]


@pytest.mark.parametrize("rows", [[row(SERVER, takes_none=True)], []])
def test_a_standby_that_was_let_go_for_good_is_let_go_again(rows: list[SeatRow]) -> None:
    scheduler = Scheduler(row(FIRST), *rows)
    assert scheduler.seating.standby_is_back(STANDBY, 0, 1.0)
    assert scheduler.sent == [(STANDBY.uid, StandsBy((), False, 0))]


def test_a_standby_that_was_lost_ends_with_an_error_and_a_new_one_is_not_known() -> None:
    scheduler = Scheduler(row(FIRST), row(SERVER))
    assert scheduler.seating.standby_is_back(STANDBY, 0, 1.0)
    ((to, message),) = scheduler.sent
    assert isinstance(message, Refused)
    assert (to, message.kind) == (STANDBY.uid, "NodeLostError")
    scheduler.sent.clear()
    assert not scheduler.seating.standby_is_back(process("server", 10, 0), -1, 1.0)
    assert scheduler.sent == []


def test_what_servers_are_told_of_standbys_counts_on_from_the_scheduler_before() -> None:
    numbers = []
    for term in (2, 3):
        scheduler = Scheduler(row(FIRST), row(SERVER, standby=STANDBY))
        scheduler.seating.resume((row(FIRST), row(SERVER, standby=STANDBY)), term, 0.0)
        scheduler.seating.is_back(SERVER, 1.0)
        numbers += [
            message.number
            for to, message in scheduler.sent
            if isinstance(message, StandsBy) and to == node_id(Role.SERVER, 0)
        ]
    first, second = numbers
    assert 0 < first < second


def test_a_late_word_about_the_standby_before_does_not_make_the_next_one_ready() -> None:
    """A server says it to the next scheduler, and its message is lost at first."""
    scheduler = Scheduler(row(FIRST), row(SERVER, standby=STANDBY))
    seating, seats, other = scheduler.seating, scheduler.seating.seats, process("server", 10, 0)
    assert seats.offer(other) is None
    assert seating.standby_lost(STANDBY.uid, "killed")
    assert seats.standby_of(SERVER.node_id) == other
    ready = []
    for standby in (STANDBY, other):
        seating.told_of_standby(SERVER.node_id, StandsBy((standby,), True, 0))
        ready.append(seats.has_ready_standby(SERVER.node_id))
    assert ready == [False, True]
    assert scheduler.events[1:] == [f"{SERVER.title} has a standby again (pid {other.pid})"]


def test_a_late_word_that_a_server_cannot_reach_its_standby_does_not_dismiss_the_next_one() -> None:
    scheduler = Scheduler(row(FIRST), row(SERVER, standby=STANDBY))
    seating, seats, other = scheduler.seating, scheduler.seating.seats, process("server", 10, 0)
    seats.offer(other)
    seating.standby_lost(STANDBY.uid, "killed")
    told = [m.number for _, m in scheduler.sent if isinstance(m, StandsBy) and m.for_receiver]
    known = []
    for number in (0, *told):
        seating.told_of_standby(SERVER.node_id, StandsBy((), True, number))
        known.append(seats.standby_of(SERVER.node_id))
    assert known == [other, other, None]
