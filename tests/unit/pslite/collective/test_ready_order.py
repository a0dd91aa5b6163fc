"""The order in which a rank begins the calls for which all ranks are ready."""

from __future__ import annotations

from typing import Any

import pytest

from pslite.collective.ready_order import ReadyOrder, is_worth_asking
from pslite.errors import MismatchError
from pslite.future import Future, completed
from pslite.protocol.collective import ANY, CallKey, CollectiveCall, GroupKey

GROUP = GroupKey("", (0, 1), 0)
SUM = CollectiveCall("all_reduce", "sum", "float32", ((1 << 20,),))


class Rank:
    """A rank that asks for calls; tests answer, and complete what it has begun."""

    def __init__(self) -> None:
        self.answers: dict[str, Future[int]] = {}
        self.begun: list[str] = []
        self.by_servers: list[str] = []
        self.results: dict[str, Future[str]] = {}
        self.ended: list[str] = []
        self.order = ReadyOrder(self, lambda key: self.ended.append(key.name))  # type: ignore[arg-type]

    def ready(self, key: CallKey, call: CollectiveCall) -> Future[int]:
        return self.answers.setdefault(key.name, Future(f"all ranks, of {key.name}"))

    def make(self, name: str, number: int | None = None) -> Future[str]:
        """Make a call; ``number`` is an answer that is there at once."""
        if number is not None:
            self.answers[name] = completed(number)
        done: Future[str] = self.results.setdefault(name, Future(f"the rings, of {name}"))
        done.flush = lambda: None

        def begin(way: list[str]) -> Future[str]:
            way.append(name)
            return done

        return self.order.make(
            CallKey(GROUP, name, 1),
            SUM,
            lambda: begin(self.begun),
            lambda: begin(self.by_servers),
        )


def test_calls_begin_by_their_numbers_and_not_as_answers_arrive() -> None:
    rank = Rank()
    for name in "abcd":
        rank.make(name)
    rank.answers["d"].set_result(1)
    rank.answers["a"].set_result(3)
    rank.answers["b"].set_result(4)
    assert rank.begun == ["d"]
    rank.answers["c"].set_result(2)
    assert rank.begun == ["d", "c", "a", "b"]
    assert rank.by_servers == []


def test_a_call_without_a_number_goes_by_the_servers_and_has_no_turn() -> None:
    rank = Rank()
    rank.make("joined")
    rank.make("b")
    rank.answers["joined"].set_result(0)
    rank.answers["b"].set_result(1)
    assert (rank.by_servers, rank.begun) == (["joined"], ["b"])


def test_a_call_says_what_it_waits_for_and_takes_no_steps_in_a_callers_thread() -> None:
    rank = Rank()
    future = rank.make("a")
    assert future.what == "all ranks, of a"
    rank.answers["a"].set_result(1)
    assert (future.what, future.flush) == ("the rings, of a", None)
    assert rank.ended == []
    future.on_done(lambda _: rank.ended.append("told"))
    rank.results["a"].set_result("sum")
    assert (future.result(0), rank.ended) == ("sum", ["a", "told"])


def test_calls_that_fail_have_ended_and_delay_no_others() -> None:
    rank = Rank()
    refused = rank.make("refused")
    rank.answers["refused"].set_error(MismatchError("ranks differ"))
    assert isinstance(refused.error(), MismatchError)

    def raising() -> Future[Any]:
        raise ValueError("no")

    broken = rank.order.make(CallKey(GROUP, "broken", 1), SUM, raising, raising)
    rank.answers["broken"].set_result(1)
    assert isinstance(broken.error(), ValueError)
    assert rank.ended == ["refused", "broken"]
    rank.make("next", 2)
    assert rank.begun == ["next"]


@pytest.mark.parametrize(
    ("call", "is_worth"),
    [
        (SUM, True),
        (SUM._replace(shapes=((1 << 15,),)), True),
        (SUM._replace(shapes=(((1 << 15) - 1,),)), False),
        (SUM._replace(shapes=((),)), False),
        (CollectiveCall("reduce_scatter", "sum", "int8", ((1 << 16,), (1 << 16,))), True),
        (CollectiveCall("barrier"), False),
        (CollectiveCall("all_gather", dtype="int8", shapes=((ANY, 1 << 20),)), False),
        (CollectiveCall("all_to_all", dtype="int8"), False),
        (CollectiveCall("scatter", root=0), False),
    ],
)
def test_large_calls_whose_size_all_ranks_know_are_worth_a_question(
    call: CollectiveCall, *, is_worth: bool
) -> None:
    assert is_worth_asking(call) == is_worth
