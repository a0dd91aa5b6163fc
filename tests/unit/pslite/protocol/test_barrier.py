"""Barriers by sets of nodes and numbered rounds: who is released when, and with what error."""

from __future__ import annotations

import math

from pslite.errors import DeadlockError
from pslite.protocol.barrier import MAX_GIVEN_UP, MAX_OPEN, Barriers, Release
from pslite.protocol.charter import FailedBarrier
from pslite.wire.messages import BarrierLeave, BarrierWaits

GROUP = 4
A, B, C = 9, 11, 13
ALL = (A, B, C)


def missing(barriers: Barriers, group: int, round_: int) -> list[int]:
    """The members that have not reached a barrier; none where it is not open."""
    wait = barriers._open.get((group, round_))
    return wait.missing() if wait else []


def make() -> Barriers:
    return Barriers({A: "worker 0", B: "worker 1", C: "worker 2"})


def over(node: int, group: int, round_: int, kind: str = "", error: str = "") -> Release:
    return node, BarrierLeave(group, round_, kind, error)


def enter(barriers: Barriers, *entries: tuple[int, int], until: float = math.inf) -> list[Release]:
    """(node, round) in this order."""
    return [
        release
        for node, round_ in entries
        for release in barriers.enter(node, GROUP, round_, ALL, until)
    ]


def released(round_: int, kind: str = "", error: str = "") -> list[Release]:
    return [over(node, GROUP, round_, kind, error) for node in ALL]


def test_a_barrier_releases_all_when_the_last_has_come() -> None:
    barriers = make()
    early = enter(barriers, (C, 1), (A, 1))
    assert (early, enter(barriers, (B, 1))) == ([], released(1))


def test_a_barrier_ignores_a_resent_request() -> None:
    # Defect d of ps-lite: it counted messages, so a duplicate opened the barrier early.
    barriers = make()
    assert enter(barriers, (A, 1), (A, 1), (A, 1), (B, 1), (B, 1)) == []
    assert missing(barriers, GROUP, 1) == [C]


def test_a_request_that_comes_again_after_the_release_leaks_into_no_other_barrier() -> None:
    """It is answered: another process in the node's seat repeats what the first one did."""
    barriers = make()
    enter(barriers, (A, 1), (B, 1), (C, 1))
    late = enter(barriers, (A, 1), (B, 2), (C, 2))
    assert late == [over(A, GROUP, 1)]
    assert (missing(barriers, GROUP, 1), missing(barriers, GROUP, 2)) == ([], [A])
    assert enter(barriers, (A, 2)) == released(2)


def test_a_fast_node_may_be_a_round_ahead_in_arrival() -> None:
    barriers = make()
    early = enter(barriers, (A, 2), (A, 1), (B, 1))
    assert early == []
    assert enter(barriers, (C, 1)) == released(1)
    assert enter(barriers, (B, 2), (C, 2)) == released(2)


def test_barriers_of_several_groups_are_apart() -> None:
    barriers = make()
    barriers.enter(A, 4, 1, (A, B), math.inf)
    barriers.enter(A, 7, 1, (A, B), math.inf)
    assert barriers.enter(B, 7, 1, (A, B), math.inf) == [over(A, 7, 1), over(B, 7, 1)]
    assert missing(barriers, 4, 1) == [B]


def test_a_node_that_is_no_member_is_told_so() -> None:
    barriers = make()
    error = "worker 2 is not a member of barrier group 4"
    assert barriers.enter(C, GROUP, 1, (A, B), math.inf) == [over(C, GROUP, 1, "UsageError", error)]


def test_a_departure_ends_the_barriers_that_lack_the_node() -> None:
    # Defect d again: ps-lite's barriers waited for dead nodes for ever.
    barriers = make()
    enter(barriers, (A, 1), (B, 1))
    reason = "worker 2 is lost"
    assert barriers.depart(C, reason) == [
        over(A, GROUP, 1, "NodeLostError", reason),
        over(B, GROUP, 1, "NodeLostError", reason),
    ]


def test_a_barrier_that_the_departed_node_had_reached_is_still_reached() -> None:
    barriers = make()
    enter(barriers, (C, 1), (A, 1))
    departed = barriers.depart(C, "worker 2 has left")
    assert (departed, enter(barriers, (B, 1))) == ([], released(1))


def test_barriers_after_a_departure_end_at_once() -> None:
    barriers = make()
    barriers.depart(C, "worker 2 is lost")
    lost = ("NodeLostError", "worker 2 is lost")
    assert enter(barriers, (A, 1), (B, 1), (B, 2)) == [
        over(A, GROUP, 1, *lost),
        over(B, GROUP, 1, *lost),
        over(B, GROUP, 2, *lost),
    ]


def test_a_barrier_that_somebody_gives_up_ends_for_all_and_names_who_is_missing() -> None:
    barriers = make()
    enter(barriers, (A, 1), until=10.0)
    enter(barriers, (B, 1), until=math.inf)
    too_early = barriers.tick(9.9)
    text = "the barrier of the workers timed out: worker 2 did not reach it"
    assert (too_early, barriers.next_due()) == ([], 10.0)
    assert barriers.tick(10.0) == [
        over(A, GROUP, 1, "DeadlineError", text),
        over(B, GROUP, 1, "DeadlineError", text),
    ]


def test_who_comes_to_a_barrier_that_was_given_up_is_told_why() -> None:
    barriers = make()
    enter(barriers, (A, 1), until=10.0)
    (given_up,) = barriers.tick(10.0)
    (late,) = enter(barriers, (B, 1))
    assert (late[0], late[1].kind, late[1].error) == (B, "DeadlineError", given_up[1].error)
    assert barriers.next_due() == math.inf


def test_patience_of_a_resent_request_is_that_of_the_first() -> None:
    barriers = make()
    enter(barriers, (A, 1), until=10.0)
    enter(barriers, (A, 1), until=99.0)
    assert barriers.next_due() == 10.0


def test_after_a_barrier_that_failed_the_next_one_works() -> None:
    barriers = make()
    enter(barriers, (A, 1), until=10.0)
    barriers.tick(10.0)
    enter(barriers, (B, 1), (C, 1))
    assert enter(barriers, (A, 2), (B, 2), (C, 2)) == released(2)


def test_nothing_open_has_nothing_missing_and_nothing_due() -> None:
    barriers = make()
    assert (missing(barriers, GROUP, 1), barriers.tick(1e9)) == ([], [])
    assert barriers.next_due() == math.inf


def test_a_node_without_a_title_is_named_by_its_number() -> None:
    barriers = Barriers({})
    barriers.enter(A, GROUP, 1, (A, B), 1.0)
    (release,) = barriers.tick(1.0)
    assert release[1].error.endswith("timed out: node 11 did not reach it")


def test_a_barrier_that_stays_open_names_who_is_missing_again_and_again() -> None:
    barriers = Barriers({})
    barriers.enter(9, 4, 1, [9, 11, 13], math.inf)
    barriers.enter(13, 4, 1, [9, 11, 13], math.inf)
    reports = [barriers.overdue(now, 60.0) for now in (1.0, 60.0, 61.0, 100.0, 121.0)]
    first, second = (
        ((9, 13), BarrierWaits(4, 1, (11,), 60.0)),
        ((9, 13), BarrierWaits(4, 1, (11,), 120.0)),
    )
    assert reports == [[], [], [first], [], [second]]


# -- memory -------------------------------------------------------------------------------


def test_a_failed_barrier_is_forgotten_once_all_who_may_ask_know() -> None:
    barriers = make()
    for round_ in range(1, 5001):
        enter(barriers, (A, round_), until=1.0)
        barriers.tick(2.0)
        late = enter(barriers, (B, round_), (C, round_))
        assert [over.kind for _, over in late] == ["DeadlineError"] * 2
    assert barriers._given_up == {}
    # It was told. Only another process in its seat asks again, and is let through.
    assert enter(barriers, (C, 5000)) == [over(C, GROUP, 5000)]
    assert (barriers._open, barriers._given_up) == ({}, {})


def test_a_failed_barrier_does_not_wait_for_those_who_are_gone() -> None:
    barriers = make()
    enter(barriers, (A, 1), (B, 1), until=1.0)
    barriers.tick(2.0)
    barriers.depart(C, "worker 2 is lost")
    assert barriers._given_up == {}


def test_failed_barriers_that_a_node_never_reaches_are_remembered_up_to_a_limit() -> None:
    barriers = make()
    for round_ in range(1, MAX_GIVEN_UP + 101):
        enter(barriers, (A, round_), (B, round_), until=1.0)
        barriers.tick(2.0)
    assert len(barriers._given_up) == MAX_GIVEN_UP
    (release,) = enter(barriers, (C, MAX_GIVEN_UP))
    assert release[1].kind == "DeadlineError"


def test_the_barriers_that_wait_are_listed_with_who_is_missing() -> None:
    barriers = make()
    enter(barriers, (A, 1), (C, 1))
    assert barriers.waits(5.0) == []  # nobody has looked at the clock since
    barriers.overdue(5.0, 60.0)
    assert barriers.waits(9.0) == [((A, C), BarrierWaits(GROUP, 1, (B,), 4.0))]
    enter(barriers, (B, 1))
    assert barriers.waits(10.0) == []


def test_a_node_waits_in_so_many_barriers_at_most_and_is_told_so() -> None:
    barriers = make()
    assert enter(barriers, *((A, round_) for round_ in range(1, MAX_OPEN + 1))) == []
    (refused,) = enter(barriers, (A, MAX_OPEN + 1))
    text = f"worker 0 already waits in {MAX_OPEN} barriers, the limit; wait for one of them before"
    assert refused[1].kind == "UsageError"
    assert refused[1].error.startswith(text)
    assert missing(barriers, GROUP, MAX_OPEN + 1) == []
    assert enter(barriers, (B, 1), (C, 1)) == released(1)
    assert enter(barriers, (A, MAX_OPEN + 1)) == []


def test_barriers_that_nobody_will_reach_end_for_all_and_for_those_who_come_late() -> None:
    barriers = make()
    enter(barriers, (A, 1), (B, 1), (C, 1), (A, 2), (C, 2))
    given_up = [over(node, GROUP, 2, "DeadlockError", "all wait") for node in ALL]
    assert barriers.give_up(DeadlockError, "all wait") == [given_up[0], given_up[2]]
    assert enter(barriers, (B, 2)) == [given_up[1]]
    assert enter(barriers, (A, 3), (B, 3), (C, 3)) == released(3)


# -- in place of a lost scheduler ----------------------------------------------------------


def test_a_barrier_ends_for_a_node_that_waits_while_others_know_that_it_is_over() -> None:
    """The lost scheduler has released A and B; C asks the next one."""
    barriers = make()
    assert barriers.reached(A, GROUP, 3) == []
    assert enter(barriers, (C, 3)) == []
    assert over(C, GROUP, 3) in barriers.reached(B, GROUP, 3)


def test_what_was_reached_counts_before_and_after_others_enter() -> None:
    for entry_first in (True, False):
        barriers = make()
        releases = enter(barriers, (C, 3)) if entry_first else []
        releases += barriers.reached(A, GROUP, 3)
        releases += barriers.reached(B, GROUP, 4)
        releases += [] if entry_first else enter(barriers, (C, 3))
        assert releases == released(3)


def test_an_earlier_barrier_does_not_count_for_a_later_one_or_for_another_group() -> None:
    barriers = make()
    barriers.reached(A, GROUP, 2)
    barriers.reached(A, 6, 9)
    barriers.reached(B, GROUP, 3)
    assert enter(barriers, (C, 3)) == []
    assert missing(barriers, GROUP, 3) == [A]
    assert enter(barriers, (A, 3)) == released(3)


def test_what_was_reached_is_never_taken_back() -> None:
    barriers = make()
    barriers.reached(A, GROUP, 3)
    barriers.reached(A, GROUP, 1)
    barriers.reached(B, GROUP, 3)
    assert enter(barriers, (C, 3)) == released(3)


def test_what_a_node_has_reached_is_known_also_after_it_has_left() -> None:
    barriers = make()
    enter(barriers, (A, 1), (B, 1), (C, 1), (A, 2))
    barriers.reached(B, 6, 5)
    assert barriers.reached_by(A) == ((GROUP, 1),)
    assert barriers.reached_by(B) == ((GROUP, 1), (6, 5))
    assert barriers.reached_by(99) == ()
    barriers.depart(B, "has left")
    after = make()
    for group, round_ in barriers.reached_by(B):
        after.reached(B, group, round_)
    after.depart(B, "has left")
    assert after.reached_by(B) == ((GROUP, 1), (6, 5))
    assert enter(after, (A, 1), (C, 1)) == released(1)


def test_the_next_scheduler_knows_a_failed_barrier_until_all_have_heard_of_it() -> None:
    barriers = make()
    enter(barriers, (A, 1), until=5.0)
    text = "the barrier of the workers timed out: worker 1, worker 2 did not reach it"
    assert barriers.tick(5.0) == [over(A, GROUP, 1, "DeadlineError", text)]
    assert barriers.failed() == (FailedBarrier(GROUP, 1, "DeadlineError", text, (B, C)),)
    after = make()
    after.resume(barriers.failed())
    assert after.failed() == barriers.failed()
    for node, left in ((B, 1), (C, 0)):
        assert enter(after, (node, 1)) == [over(node, GROUP, 1, "DeadlineError", text)]
        assert len(after.failed()) == left


def test_a_barrier_that_has_succeeded_is_not_among_the_failed_ones() -> None:
    barriers = make()
    enter(barriers, (A, 1), (B, 1), (C, 1))
    assert barriers.failed() == ()
