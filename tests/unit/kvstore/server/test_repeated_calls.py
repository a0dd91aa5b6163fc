"""Calls that another process repeats in place of a lost worker: which are over, which go on."""

from __future__ import annotations

from typing import Any

import pytest
from store_requests import Asked

from kvstore.errors import OptimizerMismatch
from kvstore.protocol.requests import unpack
from kvstore.server.joint_calls import JointCallCoordinator
from kvstore.server.optimizer_calls import OptimizerCalls
from pslite.errors import UsageError

SGD: list[Any] = ["sgd", {"learning_rate": 0.1}]
ADAM: list[Any] = ["adam", {}]
NO = UsageError("no")


# -- joint calls --------------------------------------------------------------------------


def arrive(
    calls: JointCallCoordinator, rank: int, call: int = 1, error: UsageError | None = None
) -> Asked:
    asked = Asked(rank)
    calls.arrive(call, "init(['w'])", asked.incoming, [0, 1, 2], error)
    return asked


def said(asked: Asked) -> object:
    """None while it waits, or (whether the rank carries the call out, the news)."""
    return None if asked.answer is None else tuple(unpack(asked.body, bool, bytes))


@pytest.mark.parametrize("error", [None, NO])
def test_a_call_is_over_when_the_deciding_rank_has_reported(error: UsageError | None) -> None:
    calls = JointCallCoordinator()
    over = [calls.is_over(1)]
    for rank in range(3):
        arrive(calls, rank)
        over.append(calls.is_over(1))
    calls.done(1, b"", error)
    assert (over, calls.is_over(1), calls.is_over(2)) == ([False] * 4, True, False)


def test_a_call_that_one_rank_cannot_take_part_in_is_over_when_all_have_made_it() -> None:
    calls = JointCallCoordinator()
    arrive(calls, 0, error=NO)
    arrive(calls, 1)
    over = calls.is_over(1)
    arrive(calls, 2)
    assert (over, calls.is_over(1)) == (False, True)


def test_an_earlier_call_that_is_open_is_not_over_although_a_later_one_is() -> None:
    calls = JointCallCoordinator()
    arrive(calls, 0, call=1)  # of ``close``: no other rank has made it yet
    for rank in range(3):
        arrive(calls, rank, call=3)
    calls.done(3, b"", None)
    assert [calls.is_over(call) for call in (1, 2, 3, 4)] == [False, True, True, False]
    calls.done(2, b"", None)  # late news do not turn the count back
    assert calls.is_over(3)


def test_a_call_waits_until_the_next_process_of_a_lost_rank_makes_it_again() -> None:
    calls = JointCallCoordinator()
    first, lost = arrive(calls, 0), arrive(calls, 1)
    calls.returned(1)
    arrive(calls, 2)
    assert said(first) is None
    again = arrive(calls, 1)
    assert said(first) == (True, b"")
    calls.done(1, b"news", None)
    assert (said(again), lost.answer) == ((False, b"news"), None)


def test_the_next_process_of_the_deciding_rank_carries_the_call_out() -> None:
    calls = JointCallCoordinator()
    before, *others = [arrive(calls, rank) for rank in range(3)]
    assert said(before) == (True, b"")
    calls.returned(0)
    assert not calls.is_over(1)
    after = arrive(calls, 0)
    assert said(after) == (True, b"")
    calls.done(1, b"news", None)
    assert [said(each) for each in others] == [(False, b"news")] * 2


def test_a_rank_that_was_lost_while_another_carries_the_call_out_need_not_be_back() -> None:
    calls = JointCallCoordinator()
    _, lost, other = [arrive(calls, rank) for rank in range(3)]
    calls.returned(1)
    calls.fail(NO, [0, 1, 2])  # only calls that no rank carries out yet
    assert other.answer is None
    calls.done(1, b"news", None)
    assert (said(other), lost.answer, calls.is_over(1)) == ((False, b"news"), None, True)


def test_the_error_of_a_lost_process_is_that_of_the_call() -> None:
    calls = JointCallCoordinator()
    arrive(calls, 1, error=NO)
    calls.returned(1)
    others = [arrive(calls, rank) for rank in (0, 2)]
    assert [str(each.error) for each in others] == ["no", "no"]
    assert not calls.is_over(1)
    assert str(arrive(calls, 1).error) == "no"
    assert calls.is_over(1)


# -- optimizers ---------------------------------------------------------------------------


def made(calls: OptimizerCalls, rank: int, call: int, optimizer: list[Any] = SGD) -> Asked:
    asked = Asked(rank)
    calls.made(asked.incoming, rank, call, optimizer, decider=0)
    return asked


def test_the_calls_of_a_rank_that_has_decided_are_counted_even_if_they_failed() -> None:
    calls = OptimizerCalls()
    counts = [calls.num_of(0)]
    for call, error in ((1, None), (2, NO), (3, None)):
        calls.decided(SGD, error, 0, call)
        counts.append(calls.num_of(0))
    assert counts == [0, 1, 2, 3]


def test_calls_of_other_ranks_are_not_counted_until_they_decide() -> None:
    calls = OptimizerCalls()
    calls.decided(SGD, None, 0, 1)
    assert made(calls, 1, 1).answer is not None
    assert calls.num_of(1) == 0
    calls.decided(ADAM, None, 1, 2)  # rank 0 has left
    assert (calls.num_of(0), calls.num_of(1), calls.num) == (1, 2, 2)


def test_a_waiting_call_of_a_lost_process_is_forgotten_and_those_of_others_go_on() -> None:
    calls = OptimizerCalls()
    lost, other = made(calls, 1, 1), made(calls, 2, 1)
    calls.returned(1)
    again = made(calls, 1, 1)
    calls.decided(SGD, None, 0, 1)
    assert lost.answer is None
    assert again.body == other.body == b""


def test_a_call_that_was_forgotten_is_not_refused_with_the_others() -> None:
    calls = OptimizerCalls()
    lost, other = made(calls, 1, 1), made(calls, 2, 1)
    calls.returned(1)
    calls.fail_waiting(NO)
    assert (lost.answer, str(other.error)) == (None, "no")


def test_a_repeated_call_is_compared_with_the_same_one_as_before() -> None:
    calls = OptimizerCalls()
    calls.decided(SGD, None, 0, 1)
    calls.decided(ADAM, None, 0, 2)
    for _ in range(2):
        assert [made(calls, 1, 1, SGD).body, made(calls, 1, 2, ADAM).body] == [b"", b""]
        calls.returned(1)
    assert isinstance(made(calls, 1, 2, SGD).error, OptimizerMismatch)
