"""Seats as members see them: a process is lost, another one takes its place, old news come late."""

from __future__ import annotations

import pytest

from pslite.errors import NodeLostError
from pslite.ids import SCHEDULER_ID, NodeInfo, Role, node_id
from pslite.protocol.membership import Membership, Rendezvous, with_seated

VERSION = "1.0"
SEAT, OTHER = node_id(Role.WORKER, 0), node_id(Role.WORKER, 1)


def node(role: str, number: int, rank: int) -> NodeInfo:
    return NodeInfo(role, rank, f"{role}{number}", 100 + number, "", "alpha", "k", 4000 + number)


SCHEDULER, LOST, STAYS, SERVER = ROSTER = (
    node("scheduler", 0, 0),
    node("worker", 1, 0),
    node("worker", 2, 1),
    node("server", 3, 0),
)
NEXT, THIRD = node("worker", 7, 0), node("worker", 8, 0)


def members(role: Role = Role.SERVER) -> Membership:
    membership = Membership(role)
    membership.begin(ROSTER)
    return membership


# -- vacant seats -------------------------------------------------------------------------


def test_a_process_is_lost_once() -> None:
    membership = members()
    assert membership.vacate(SEAT, 0, "killed") == LOST
    assert membership.vacate(SEAT, 0, "its connection is lost") is None
    assert membership.vacant == {SEAT: "killed"}
    assert membership.vacate(node_id(Role.WORKER, 5), 0, "killed") is None


def test_nobody_talks_to_the_process_of_a_vacant_seat_or_waits_for_its_answers() -> None:
    membership = members()
    assert LOST in membership.neighbours()
    assert LOST in membership.listeners()
    membership.vacate(SEAT, 0, "killed")
    assert membership.neighbours() == membership.listeners() == [SCHEDULER, STAYS]


def test_a_worker_with_a_vacant_seat_is_still_one_of_the_job() -> None:
    membership = members()
    membership.vacate(SEAT, 0, "killed")
    assert membership.live(Role.WORKER) == (0, 1)
    assert (membership.gone, membership.epoch) == ({}, 1)
    assert not membership.has_gone(LOST.uid)


def test_a_vacant_seat_is_named_without_its_process() -> None:
    membership = members()
    membership.vacate(SEAT, 0, "killed")
    title = "worker 0 (lost; waiting for another process)"
    assert membership.title(SEAT) == membership.peer_title(LOST.uid) == title


def test_a_request_to_a_vacant_seat_fails_with_the_loss() -> None:
    membership = members()
    assert membership.why_unreachable([SEAT, OTHER], SERVER) is None
    membership.vacate(SEAT, 0, "killed")
    error = membership.why_unreachable([OTHER, SEAT], SERVER)
    assert isinstance(error, NodeLostError)
    assert str(error) == "worker 0 (pid 4001 on alpha) is lost: killed"
    assert (error.role, error.rank) == ("worker", 0)
    assert membership.why_unreachable([OTHER], SERVER) is None


def test_a_vacant_seat_that_no_process_takes_ends_as_a_departure() -> None:
    membership = members()
    membership.vacate(SEAT, 0, "killed")
    gone = membership.depart(SEAT, left=False, reason="killed; no process came")
    assert gone is not None
    assert gone.sentence == "worker 0 (pid 4001 on alpha) is lost: killed; no process came"
    assert (membership.vacant, membership.live(Role.WORKER)) == ({}, (1,))
    error = membership.why_unreachable([SEAT], SERVER)
    assert str(error) == gone.sentence


# -- another process ----------------------------------------------------------------------


def test_the_replaced_processes_of_a_role_are_counted() -> None:
    membership = Membership(Role.WORKER)
    membership.begin(ROSTER, attempts=(3, 2, 0, 1))  # as a process hears that joins late
    membership.seat(NEXT, 3)
    counts = {role: membership.num_replaced(role) for role in Role}
    assert counts == {Role.SCHEDULER: 3, Role.WORKER: 3, Role.SERVER: 1}


def test_another_process_has_the_entry_and_the_names_of_the_seat() -> None:
    membership = members()
    membership.vacate(SEAT, 0, "killed")
    assert membership.seat(NEXT, 1) == LOST
    assert membership.roster == (SCHEDULER, NEXT, STAYS, SERVER)
    assert membership.uids[SEAT] == NEXT.uid
    assert membership.node_ids == {
        each.uid: each.node_id for each in (SCHEDULER, NEXT, STAYS, SERVER)
    }
    assert membership.node(SEAT) == NEXT
    assert (membership.title(SEAT), membership.peer_title(LOST.uid)) == (NEXT.title, LOST.uid)


def test_another_process_is_a_neighbour_again() -> None:
    membership = members()
    membership.vacate(SEAT, 0, "killed")
    membership.seat(NEXT, 1)
    assert membership.vacant == {}
    assert membership.neighbours() == membership.listeners() == [SCHEDULER, NEXT, STAYS]
    assert membership.why_unreachable([SEAT], SERVER) is None


def test_what_the_lost_process_has_said_of_its_end_is_not_said_by_the_next_one() -> None:
    membership = members()
    for said in (membership.told, membership.ended, membership.ending):
        said |= {SEAT, OTHER}
    for known in (SEAT, OTHER):
        membership.depart(known, left=True, reason="")
    membership.seat(NEXT, 1)
    assert membership.told == membership.ended == membership.ending == {OTHER}
    assert list(membership.gone) == [OTHER]
    assert membership.live(Role.WORKER) == (0,)
    assert not membership.has_gone(NEXT.uid)


def test_the_seat_may_have_another_process_before_its_loss_is_heard_of() -> None:
    membership = members()
    assert membership.seat(NEXT, 1) == LOST
    assert membership.vacate(SEAT, 0, "killed") is None
    assert (membership.vacant, membership.node(SEAT)) == ({}, NEXT)


def test_news_of_an_earlier_process_are_old() -> None:
    membership = members()
    assert membership.seat(THIRD, 2) == LOST
    assert membership.seat(NEXT, 1) is None
    assert membership.seat(THIRD, 2) is None
    assert [membership.vacate(SEAT, attempt, "killed") for attempt in (0, 1)] == [None, None]
    assert (membership.node(SEAT), membership.vacant) == (THIRD, {})
    assert membership.node_ids.get(NEXT.uid) is None


def test_the_next_process_may_be_lost_too_and_be_followed() -> None:
    membership = members()
    membership.seat(NEXT, 1)
    assert membership.vacate(SEAT, 1, "killed too") == NEXT
    assert membership.seat(THIRD, 2) == NEXT
    assert (membership.attempts, membership.vacant) == ({SEAT: 2}, {})


def test_a_seat_that_the_roster_does_not_have_is_not_taken() -> None:
    membership = members()
    assert membership.seat(node("worker", 7, 5), 1) is None
    assert membership.roster == ROSTER


def test_a_process_that_takes_a_seat_begins_in_the_epoch_of_the_others() -> None:
    membership = Membership(Role.WORKER)
    membership.begin(ROSTER, 4)
    assert membership.epoch == 4
    assert membership.node_ids[SERVER.uid] == SERVER.node_id
    assert membership.uids[SCHEDULER_ID] == SCHEDULER.uid


# -- the scheduler's roster ---------------------------------------------------------------


def complete() -> Rendezvous:
    rendezvous = Rendezvous(2, 1, VERSION)
    for each in (LOST, STAYS, SERVER):
        rendezvous.register(each, 2, 1, VERSION)
    return rendezvous


def test_a_roster_has_the_process_that_has_the_seat() -> None:
    rendezvous = complete()
    assert rendezvous.roster == (LOST, STAYS, SERVER)
    rendezvous.seat(NEXT)
    assert rendezvous.roster == (NEXT, STAYS, SERVER)


@pytest.mark.parametrize(
    ("num_workers", "num_servers", "version", "words"),
    [
        (3, 1, VERSION, "has DMLC_NUM_WORKER=3, the scheduler has 2"),
        (2, 4, VERSION, "has DMLC_NUM_SERVER=4, the scheduler has 1"),
        (2, 1, "0.9", "runs version 0.9, the scheduler 1.0"),
    ],
)
def test_a_process_of_another_job_cannot_take_a_seat(
    num_workers: int, num_servers: int, version: str, words: str
) -> None:
    refusal = complete().disagreement(NEXT, num_workers, num_servers, version)
    assert refusal is not None
    assert refusal.reason.startswith(f"the worker on alpha (pid {NEXT.pid}) {words}")


def test_a_complete_job_does_not_disagree_with_a_further_process_of_the_same_job() -> None:
    rendezvous = complete()
    assert rendezvous.disagreement(NEXT, 2, 1, VERSION) is None
    assert rendezvous.registered == (LOST, STAYS, SERVER)


# -- news that come before the roster ------------------------------------------------------


@pytest.mark.parametrize(
    ("seated", "expected"),
    [
        ([], (LOST, 0)),
        ([(NEXT, 1)], (NEXT, 1)),
        ([(NEXT, 1), (THIRD, 2)], (THIRD, 2)),
        ([(THIRD, 2), (NEXT, 1)], (THIRD, 2)),
        ([(NEXT, 0)], (LOST, 0)),
    ],
    ids=["none", "one", "two", "in the wrong order", "no news"],
)
def test_the_last_process_that_has_taken_a_seat_is_in_the_roster(
    seated: list[tuple[NodeInfo, int]], expected: tuple[NodeInfo, int]
) -> None:
    before = [0, 0, 0, 4]
    members, attempts = with_seated(ROSTER, before, seated)
    assert (members[1], attempts[1]) == expected
    assert (members[0], *members[2:]) == (SCHEDULER, STAYS, SERVER)
    assert (attempts[0], *attempts[2:]) == (0, 0, 4)
    assert before == [0, 0, 0, 4]


def test_a_process_for_a_seat_that_does_not_exist_changes_no_roster() -> None:
    members, attempts = with_seated(ROSTER, [0] * 4, [(node("worker", 9, 5), 1)])
    assert (members, attempts) == (ROSTER, [0] * 4)
