"""Rounds of one part: sets of ranks, numbered contributions, windows, and who waits for whom."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pslite.protocol.rounds import AsyncRounds, Batch, Rounds, SyncRounds, Verdict

TAKEN, REPEATED, APPLIED = Verdict.TAKEN, Verdict.REPEATED, Verdict.APPLIED
TOO_FAR, HOPELESS, UNEXPECTED = Verdict.TOO_FAR, Verdict.HOPELESS, Verdict.UNEXPECTED


def contribute(rounds: Rounds, *entries: tuple[int, int]) -> list[Verdict]:
    """Contributions of (rank, round); the payload says which it is."""
    return [rounds.contribute(rank, round_, f"{rank}/{round_}") for rank, round_ in entries]


def drain(rounds: Rounds) -> list[tuple[tuple[int, int], ...]]:
    """Apply everything that can be applied."""
    done = []
    while (batch := rounds.start()) is not None:
        done.append(batch.rounds)
        rounds.finish()
    return done


# -- synchronous --------------------------------------------------------------------------


def test_a_round_is_complete_when_every_rank_has_contributed() -> None:
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (0, 1))
    before = rounds.start()
    contribute(rounds, (1, 1))
    assert before is None
    assert rounds.start() == Batch(((0, 1), (1, 1)), ("0/1", "1/1"))


def test_a_repeated_contribution_never_completes_a_round() -> None:
    # Defect c: counting requests, a duplicate closed the round with a wrong sum.
    rounds = SyncRounds([0, 1], window=2)
    assert contribute(rounds, (0, 1), (0, 1)) == [TAKEN, REPEATED]
    assert rounds.start() is None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_contributions_are_handed_on_in_rank_order(order: tuple[int, ...]) -> None:
    rounds = SyncRounds([0, 1, 2], window=0)
    contribute(rounds, *((rank, 1) for rank in order))
    assert rounds.start() == Batch(((0, 1), (1, 1), (2, 1)), ("0/1", "1/1", "2/1"))


def test_a_rank_that_is_not_expected_has_no_part_in_a_round() -> None:
    rounds = SyncRounds([-2, 0], window=2)
    assert contribute(rounds, (1, 1), (-1, 1), (-2, 1), (0, 1)) == [
        UNEXPECTED,
        UNEXPECTED,
        TAKEN,
        TAKEN,
    ]
    assert drain(rounds) == [((-2, 1), (0, 1))]
    assert contribute(rounds, (1, 1)) == [UNEXPECTED]  # also once the round was applied


def test_a_round_that_ends_takes_all_later_ones_with_it() -> None:
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (0, 1), (1, 1), (0, 2))
    assert rounds.start() is not None
    assert rounds.end() == [(0, 1), (1, 1), (0, 2)]
    assert (rounds.version, rounds.running, rounds.last) == (0, False, 0)
    assert contribute(rounds, (0, 1), (1, 2)) == [HOPELESS] * 2
    assert rounds.start() is None


def test_contributions_of_a_rank_that_is_gone_may_be_on_their_way() -> None:
    rounds = SyncRounds([-1, 0], window=3)
    contribute(rounds, (0, 1), (0, 2), (0, 3), (-1, 1))
    assert rounds.abandon(-1, after=2) == [(0, 3)]
    assert rounds.last == 2
    assert contribute(rounds, (-1, 2), (0, 3)) == [TAKEN, HOPELESS]
    assert drain(rounds) == [((-1, 1), (0, 1)), ((-1, 2), (0, 2))]
    assert rounds.abandon(-1, after=1) == []  # an older report changes nothing any more
    assert rounds.last == 2


def test_a_round_that_is_running_is_not_started_again() -> None:
    rounds = SyncRounds([0], window=2)
    contribute(rounds, (0, 1), (0, 2))
    first, second = rounds.start(), rounds.start()
    assert (first is not None, second, rounds.running) == (True, None, True)


def test_a_contribution_that_is_applied_already_is_known() -> None:
    rounds = SyncRounds([0], window=2)
    contribute(rounds, (0, 1))
    drain(rounds)
    assert contribute(rounds, (0, 1)) == [APPLIED]
    assert (rounds.version, rounds.applied(0)) == (1, 1)


def test_a_repeated_contribution_to_the_running_round_is_known() -> None:
    rounds = SyncRounds([0], window=2)
    contribute(rounds, (0, 1))
    rounds.start()
    assert contribute(rounds, (0, 1)) == [REPEATED]


@pytest.mark.parametrize("window", [0, 1, 2])
def test_the_window_bounds_how_far_a_worker_runs_ahead(window: int) -> None:
    rounds = SyncRounds([0, 1], window)
    verdicts = contribute(rounds, *((0, round_) for round_ in range(1, window + 3)))
    assert verdicts == [TAKEN] * (window + 1) + [TOO_FAR]


def test_a_contribution_of_a_future_round_waits_for_its_turn() -> None:
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (0, 2), (1, 2), (0, 1))
    before = rounds.start()
    contribute(rounds, (1, 1))
    assert (before, drain(rounds)) == (None, [((0, 1), (1, 1)), ((0, 2), (1, 2))])


def test_a_pull_is_due_when_its_pushes_are_applied_and_nothing_runs() -> None:
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (0, 1))
    states = [(rounds.readable(0, 1), rounds.readable(1, 0))]
    contribute(rounds, (1, 1))
    rounds.start()
    states.append((rounds.readable(0, 1), rounds.readable(1, 0)))
    rounds.finish()
    states.append((rounds.readable(0, 1), rounds.readable(1, 2)))
    assert states == [(False, True), (False, False), (True, False)]


def test_missing_names_the_ranks_that_the_open_round_waits_for() -> None:
    rounds = SyncRounds([0, 1, 2], window=2)
    found = [rounds.missing()]
    contribute(rounds, (1, 1))
    found.append(rounds.missing())
    contribute(rounds, (0, 1), (2, 1))
    rounds.start()
    found.append(rounds.missing())
    assert found == [None, (1, (0, 2)), None]


def test_waiting_lists_what_is_here_and_not_applied() -> None:
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (1, 2), (1, 1), (0, 1))
    assert rounds.waiting() == [(0, 1), (1, 1), (1, 2)]
    drain(rounds)
    assert rounds.waiting() == [(1, 2)]


# -- departures ---------------------------------------------------------------------------


def test_rounds_that_need_a_departed_rank_are_given_up() -> None:
    rounds = SyncRounds([0, 1, 2], window=2)
    contribute(rounds, (0, 1), (2, 1), (0, 2))
    assert rounds.abandon(1) == [(0, 1), (2, 1), (0, 2)]
    assert contribute(rounds, (0, 1)) == [HOPELESS]
    assert (rounds.waiting(), rounds.version) == ([], 0)


def test_a_round_that_the_departed_rank_contributed_to_goes_on() -> None:
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (1, 1))
    refused = rounds.abandon(1)
    verdicts = contribute(rounds, (0, 1))
    assert (refused, verdicts, drain(rounds)) == ([], [TAKEN], [((0, 1), (1, 1))])
    assert contribute(rounds, (0, 2)) == [HOPELESS]


def test_the_running_round_survives_a_departure() -> None:
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (0, 1), (1, 1))
    rounds.start()
    refused = rounds.abandon(1)
    rounds.finish()
    assert (refused, rounds.version) == ([], 1)


def test_a_round_behind_one_that_was_given_up_is_given_up_too() -> None:
    # Its turn never comes, so whoever contributed to it would wait for ever.
    rounds = SyncRounds([0, 1], window=2)
    contribute(rounds, (0, 1), (0, 2), (1, 2))
    refused = rounds.abandon(1)
    assert refused == [(0, 1), (0, 2), (1, 2)]
    assert contribute(rounds, (0, 2)) == [HOPELESS]


def test_two_departures_leave_only_rounds_that_both_had_contributed_to() -> None:
    rounds = SyncRounds([0, 1, 2], window=2)
    contribute(rounds, (1, 1), (2, 1), (1, 2))
    refused = rounds.abandon(1) + rounds.abandon(2)
    assert refused == [(1, 2)]
    assert contribute(rounds, (0, 1), (0, 2)) == [TAKEN, HOPELESS]
    assert drain(rounds) == [((0, 1), (1, 1), (2, 1))]


# -- asynchronous -------------------------------------------------------------------------


def test_asynchronous_contributions_are_applied_one_by_one_as_they_come() -> None:
    rounds = AsyncRounds(window=2)
    contribute(rounds, (1, 1), (0, 1), (1, 2))
    assert drain(rounds) == [((1, 1),), ((0, 1),), ((1, 2),)]
    assert (rounds.version, rounds.applied(0), rounds.applied(1)) == (3, 1, 2)


def test_those_of_one_worker_are_applied_in_the_order_of_their_numbers() -> None:
    rounds = AsyncRounds(window=2)
    contribute(rounds, (0, 3), (0, 2))
    before = rounds.start()
    contribute(rounds, (0, 1))
    assert (before, drain(rounds)) == (None, [((0, 1),), ((0, 2),), ((0, 3),)])


def test_an_asynchronous_contribution_is_taken_once() -> None:
    rounds = AsyncRounds(window=2)
    verdicts = contribute(rounds, (0, 1), (0, 1))
    rounds.start()
    verdicts += contribute(rounds, (0, 1))
    rounds.finish()
    verdicts += contribute(rounds, (0, 1))
    assert verdicts == [TAKEN, REPEATED, REPEATED, APPLIED]


def test_the_window_of_an_asynchronous_worker_is_its_own() -> None:
    rounds = AsyncRounds(window=1)
    assert contribute(rounds, (0, 1), (0, 2), (0, 3), (1, 1)) == [TAKEN, TAKEN, TOO_FAR, TAKEN]


def test_one_contribution_runs_at_a_time() -> None:
    rounds = AsyncRounds(window=1)
    contribute(rounds, (0, 1), (1, 1))
    first, second = rounds.start(), rounds.start()
    assert (first, second, rounds.running) == (Batch(((0, 1),), ("0/1",)), None, True)


def test_an_asynchronous_pull_waits_for_its_own_pushes_only() -> None:
    rounds = AsyncRounds(window=2)
    contribute(rounds, (0, 1))
    states = [(rounds.readable(0, 1), rounds.readable(1, 0))]
    rounds.start()
    states.append((rounds.readable(0, 1), rounds.readable(1, 0)))
    rounds.finish()
    states.append((rounds.readable(0, 1), rounds.readable(1, 0)))
    assert states == [(False, True), (False, False), (True, True)]


def test_a_departure_gives_up_nothing_that_is_asynchronous() -> None:
    rounds = AsyncRounds(window=2)
    contribute(rounds, (0, 1), (1, 1))
    assert (rounds.abandon(1), rounds.missing()) == ([], None)
    assert drain(rounds) == [((0, 1),), ((1, 1),)]


def test_what_a_departed_worker_sent_ahead_of_what_never_came_is_forgotten() -> None:
    rounds = AsyncRounds(window=3)
    contribute(rounds, (0, 1), (0, 2), (0, 4), (1, 2))
    rounds.start()
    assert rounds.abandon(0) == rounds.abandon(1) == []
    assert rounds.waiting() == [(0, 1), (0, 2)]
    rounds.finish()
    assert drain(rounds) == [((0, 2),)]
    assert contribute(rounds, (0, 3)) == [TAKEN]


def test_waiting_includes_the_one_that_runs() -> None:
    rounds = AsyncRounds(window=2)
    contribute(rounds, (1, 1), (0, 1), (0, 2))
    rounds.start()
    assert rounds.waiting() == [(0, 1), (0, 2), (1, 1)]


def test_finishing_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing is running"):
        AsyncRounds(window=2).finish()


# -- any order ----------------------------------------------------------------------------


@given(st.randoms(use_true_random=False), st.booleans(), st.integers(0, 3))
def test_in_any_order_and_however_often_each_contribution_is_applied_once(
    generator: random.Random, synchronous: bool, window: int
) -> None:
    rounds: Rounds = SyncRounds([0, 1, 2], window) if synchronous else AsyncRounds(window)
    every = list(itertools.product(range(3), range(1, 6)))
    todo = every * 2
    applied: list[tuple[int, int]] = []
    while todo:
        rank, round_ = entry = generator.choice(todo)
        if contribute(rounds, entry) != [TOO_FAR]:
            todo.remove(entry)
        elif round_ <= rounds.applied(rank) + 1 + window:
            raise AssertionError("refused within the window")
        for batch in drain(rounds):
            applied += batch
    assert sorted(applied) == every
    assert all([r for w, r in applied if w == rank] == [1, 2, 3, 4, 5] for rank in range(3))
