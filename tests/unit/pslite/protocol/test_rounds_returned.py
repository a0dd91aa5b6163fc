"""Rounds and barriers of a seat that another process has taken; and rounds of a standby."""

from __future__ import annotations

import math

import pytest

from pslite.protocol.barrier import Barriers
from pslite.protocol.rounds import AsyncRounds, Batch, Rounds, SyncRounds, Verdict
from pslite.wire.messages import BarrierLeave

GROUP = 4
A, B, C = ALL = (9, 11, 13)


def contribute(rounds: Rounds, *entries: tuple[int, int]) -> list[Verdict]:
    """Contributions of (rank, round); the payload says which it is."""
    return [rounds.contribute(rank, round_, f"{rank}/{round_}") for rank, round_ in entries]


def renewed(payload: str) -> str:
    return f"copy of {payload}"


def payloads(rounds: Rounds) -> list[str]:
    return [rounds.payload(rank, round_) for rank, round_ in rounds.waiting()]


# -- rounds that a standby repeats --------------------------------------------------------


def test_repeated_rounds_are_applied_ones() -> None:
    rounds = SyncRounds([0, 1], window=2)
    for round_ in (1, 2):
        rounds.repeated([(0, round_), (1, round_)])
    assert (rounds.version, rounds.applied(0), rounds.applied(1)) == (2, 2, 2)
    assert [rounds.readable(0, after) for after in (2, 3)] == [True, False]
    assert (rounds.running, rounds.waiting(), rounds.missing()) == (False, [], None)
    assert [rounds.knows(1, round_) for round_ in (2, 3)] == [True, False]


def test_contributions_to_repeated_rounds_are_known_and_later_ones_are_taken() -> None:
    rounds = SyncRounds([0, 1], window=2)
    rounds.repeated([(0, 1), (1, 1)])
    verdicts = contribute(rounds, (0, 1), (0, 2), (0, 4), (0, 5))
    assert verdicts == [Verdict.APPLIED, Verdict.TAKEN, Verdict.TAKEN, Verdict.TOO_FAR]
    contribute(rounds, (1, 2))
    assert rounds.start() == Batch(((0, 2), (1, 2)), ("0/2", "1/2"))
    rounds.finish()
    assert rounds.version == 2


def test_a_repeated_round_leaves_the_same_state_as_one_that_was_applied_here() -> None:
    here, there = SyncRounds([0, 1], window=2), SyncRounds([0, 1], window=2)
    contribute(here, (0, 1), (1, 1))
    batch = here.start()
    assert batch is not None
    here.finish()
    there.repeated(batch.rounds)
    assert there.signature() == here.signature()


def test_a_batch_of_nothing_changes_nothing() -> None:
    rounds = SyncRounds([0, 1], window=2)
    rounds.repeated([(0, 1), (1, 1)])
    rounds.repeated([])
    assert rounds.version == 1


def test_repeated_asynchronous_contributions_count_for_their_ranks() -> None:
    rounds = AsyncRounds(window=2)
    for pair in ((0, 1), (1, 1), (0, 2)):
        rounds.repeated([pair])
    assert [rounds.applied(rank) for rank in (0, 1, 2)] == [2, 1, 0]
    assert (rounds.version, rounds.running) == (3, False)
    verdicts = contribute(rounds, (0, 2), (1, 2), (0, 3))
    assert verdicts == [Verdict.APPLIED, Verdict.TAKEN, Verdict.TAKEN]
    assert rounds.start() == Batch(((1, 2),), ("1/2",))


def test_repeated_asynchronous_contributions_leave_the_same_state_as_those_applied_here() -> None:
    here, there = AsyncRounds(window=2), AsyncRounds(window=2)
    contribute(here, (1, 1), (0, 1), (1, 2))
    for _ in range(3):
        batch = here.start()
        assert batch is not None
        here.finish()
        there.repeated(batch.rounds)
    assert there.signature() == here.signature()


# -- synchronous rounds -------------------------------------------------------------------


def test_the_contributions_of_a_lost_process_are_renewed_and_no_others() -> None:
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (0, 1), (0, 2), (1, 2))
    rounds.returned(0, renewed)
    assert payloads(rounds) == ["copy of 0/1", "copy of 0/2", "1/2"]


def test_a_renewed_contribution_is_applied_once_and_its_repetition_is_known() -> None:
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (0, 1))
    rounds.returned(0, renewed)
    assert contribute(rounds, (0, 1), (1, 1)) == [Verdict.REPEATED, Verdict.TAKEN]
    assert rounds.start() == Batch(((0, 1), (1, 1)), ("copy of 0/1", "1/1"))
    rounds.finish()
    assert contribute(rounds, (0, 1)) == [Verdict.APPLIED]
    assert rounds.start() is None


def test_a_contribution_that_is_being_applied_is_not_renewed() -> None:
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (0, 1), (1, 1), (0, 2))
    batch = rounds.start()
    rounds.returned(0, renewed)
    assert payloads(rounds) == ["0/1", "1/1", "copy of 0/2"]
    assert batch is not None
    rounds.finish()
    assert payloads(rounds) == ["copy of 0/2"]


def test_rounds_that_failed_without_a_rank_go_on_when_it_is_back() -> None:
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (1, 1))
    assert rounds.abandon(0) == [(1, 1)]
    rounds.returned(1, renewed)  # another rank
    assert (rounds.blocked_by, contribute(rounds, (1, 1))) == (0, [Verdict.HOPELESS])
    rounds.returned(0, renewed)
    assert rounds.blocked_by is None
    assert contribute(rounds, (1, 1), (0, 1)) == [Verdict.TAKEN] * 2
    assert rounds.start() == Batch(((0, 1), (1, 1)), ("0/1", "1/1"))


def test_a_rank_that_has_not_contributed_changes_nothing() -> None:
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (1, 1))
    before = rounds.signature()
    rounds.returned(0, renewed)
    assert (rounds.signature(), payloads(rounds)) == (before, ["1/1"])


# -- asynchronous rounds ------------------------------------------------------------------


def test_early_contributions_of_a_lost_process_are_renewed_in_asynchronous_rounds_too() -> None:
    rounds = AsyncRounds(window=2)
    contribute(rounds, (0, 2), (1, 2))
    rounds.returned(0, renewed)
    assert payloads(rounds) == ["copy of 0/2", "1/2"]
    assert contribute(rounds, (0, 2), (0, 1)) == [Verdict.REPEATED, Verdict.TAKEN]
    applied = []
    while (batch := rounds.start()) is not None:
        applied += batch.payloads
        rounds.finish()
    assert applied == ["0/1", "copy of 0/2"]


def test_an_asynchronous_contribution_that_is_being_applied_is_not_renewed() -> None:
    rounds = AsyncRounds(window=2)
    contribute(rounds, (0, 1), (0, 2), (1, 1))
    assert rounds.start() == Batch(((0, 1),), ("0/1",))
    rounds.returned(0, renewed)
    rounds.returned(1, renewed)  # this one has arrived and waits, but does not run
    assert payloads(rounds) == ["0/1", "copy of 0/2", "copy of 1/1"]


def test_an_asynchronous_rank_that_was_gone_goes_on_where_it_was() -> None:
    rounds = AsyncRounds(window=2)
    contribute(rounds, (0, 1), (0, 3))
    assert rounds.abandon(0) == []
    rounds.returned(0, renewed)
    assert (rounds.blocked_by, payloads(rounds)) == (None, ["copy of 0/1"])
    assert contribute(rounds, (0, 2), (0, 3)) == [Verdict.TAKEN] * 2


def test_a_rank_that_asynchronous_rounds_do_not_know_leaves_no_trace() -> None:
    rounds = AsyncRounds(window=2)
    before = rounds.signature()
    rounds.returned(7, renewed)
    assert rounds.signature() == before


# -- barriers -----------------------------------------------------------------------------


def enter(barriers: Barriers, *entries: tuple[int, int], until: float = math.inf) -> list[int]:
    """Enter barriers (node, round) in this order; the nodes that are let go without an error."""
    released = [
        release
        for node, round_ in entries
        for release in barriers.enter(node, GROUP, round_, ALL, until)
    ]
    assert all(not leave.kind and not leave.error for _, leave in released)
    return [node for node, _ in released]


def test_a_barrier_that_is_entered_again_after_its_end_is_over_at_once() -> None:
    barriers = Barriers({})
    assert enter(barriers, *((node, round_) for round_ in (1, 2) for node in ALL)) == [*ALL, *ALL]
    repeated = [barriers.enter(B, GROUP, round_, ALL, 5.0) for round_ in (1, 2)]
    assert repeated == [[(B, BarrierLeave(GROUP, round_, "", ""))] for round_ in (1, 2)]
    assert barriers.next_due() == math.inf
    assert enter(barriers, (B, 3)) == []


def test_a_barrier_that_is_entered_again_while_it_is_open_counts_once() -> None:
    barriers = Barriers({})
    assert enter(barriers, (A, 1), (B, 1)) == []
    barriers.vacated(B)
    assert enter(barriers, (B, 1), (A, 1)) == []
    assert enter(barriers, (C, 1)) == list(ALL)


def test_the_time_limit_of_a_lost_process_ends_no_barrier() -> None:
    barriers = Barriers({})
    enter(barriers, (A, 1), (A, 2), until=10.0)
    enter(barriers, (B, 1), until=20.0)
    barriers.vacated(A)
    assert (barriers.tick(15.0), barriers.next_due()) == ([], 20.0)
    assert [(node, leave.round) for node, leave in barriers.tick(20.0)] == [(A, 1), (B, 1)]


def test_a_lost_process_may_have_been_the_last_to_be_missed() -> None:
    barriers = Barriers({})
    enter(barriers, (A, 1), until=10.0)
    barriers.vacated(A)
    assert enter(barriers, (B, 1), (C, 1)) == list(ALL)


@pytest.mark.parametrize(("again", "due"), [(30.0, 30.0), (math.inf, math.inf)])
def test_the_time_limit_of_the_next_process_counts(again: float, due: float) -> None:
    barriers = Barriers({})
    enter(barriers, (A, 1), until=10.0)
    barriers.vacated(A)
    enter(barriers, (A, 1), until=again)
    assert barriers.next_due() == due


def test_a_process_that_has_reached_no_barrier_is_missed_like_before() -> None:
    barriers = Barriers({})
    enter(barriers, (A, 1), until=10.0)
    barriers.vacated(B)
    assert barriers.next_due() == 10.0
    assert enter(barriers, (C, 1)) == []
    assert enter(barriers, (B, 1)) == list(ALL)
