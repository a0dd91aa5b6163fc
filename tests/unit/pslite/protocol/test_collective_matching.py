"""Collective calls as a server matches them: which rounds are computed, which calls fail."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pslite.errors import MismatchError, NodeLostError, ProtocolError, UsageError
from pslite.protocol.collective import (
    ANY,
    MAX_FAILED,
    MAX_LONG_WAITS,
    READY,
    Absence,
    AllJoined,
    AllReady,
    CallEffect,
    CallKey,
    CallMatcher,
    CollectiveCall,
    Compute,
    GroupKey,
    LeadersStep,
    Refuse,
)

ALL = GroupKey("", (0, 1, 2), 0)
SUM = CollectiveCall("all_reduce", "sum", "float32", ((4,),))
BARRIER = CollectiveCall("barrier")
FROM_NOW = Absence(0, {"x": 9}, 100)
"""That of a rank that has made calls named x only."""
LOST = NodeLostError("worker 1 is lost", role="worker", rank=1)


def key(number: int = 1, group: GroupKey = ALL, name: str = "") -> CallKey:
    return CallKey(group, name, number)


def arrive(
    matcher: CallMatcher[str],
    *messages: tuple[int, int],
    call: CollectiveCall = SUM,
    at: CallKey | None = None,
) -> list[CallEffect[str]]:
    """(rank, chunk) in this order; a message is called like that."""
    return [
        effect
        for rank, chunk in messages
        for effect in matcher.arrive(at or key(), rank, call, chunk, f"{rank}.{chunk}")
    ]


def test_a_round_is_computed_when_the_last_rank_has_come_in_the_groups_order() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    assert arrive(matcher, (2, 0), (0, 0)) == []
    assert arrive(matcher, (1, 0)) == [Compute(key(), SUM, ("0.0", "1.0", "2.0"))]
    group = GroupKey("odd", (2, 0), 0)
    effects = arrive(matcher, (0, 0), (2, 0), at=key(1, group))
    assert effects == [Compute(key(1, group), SUM, ("2.0", "0.0"))]
    assert matcher.num_open == 0


def test_chunks_are_rounds_of_their_own() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    assert arrive(matcher, (0, 0), (0, 1), (1, 1), (2, 0)) == []
    assert arrive(matcher, (2, 1)) == [Compute(key(), SUM, ("0.1", "1.1", "2.1"))]
    assert arrive(matcher, (1, 0)) == [Compute(key(), SUM, ("0.0", "1.0", "2.0"))]


def test_calls_differ_by_number_name_and_group() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    keys = [key(1), key(2), key(1, name="x"), key(1, GroupKey("", (0, 1, 2), 1))]
    for each in keys:
        assert arrive(matcher, (0, 0), (1, 0), at=each) == []
    assert matcher.num_open == 4


def test_different_calls_end_for_all_with_both_named() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    arrive(matcher, (2, 0), (2, 1))
    (refusal,) = arrive(matcher, (0, 0), call=BARRIER)
    assert isinstance(refusal, Refuse)
    assert sorted(refusal.messages) == ["0.0", "2.0", "2.1"]
    assert isinstance(refusal.error, MismatchError)
    assert str(refusal.error).endswith(
        "rank 2 calls all_reduce(sum, float32, shape (4,)); rank 0 calls barrier()"
    )
    late = arrive(matcher, (1, 0), (1, 1))
    assert late == [Refuse(("1.0",), refusal.error), Refuse(("1.1",), refusal.error)]
    assert arrive(matcher, (0, 0), (1, 0), (2, 0), at=key(2)) != []


def test_ranks_of_a_subgroup_are_named_with_their_workers() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    at = key(1, GroupKey("", (2, 1), 0))
    arrive(matcher, (2, 0), at=at)
    (refusal,) = arrive(matcher, (1, 0), call=BARRIER, at=at)
    assert isinstance(refusal, Refuse)
    assert "rank 0 (worker 2) calls all_reduce" in str(refusal.error)
    assert "rank 1 calls barrier()" in str(refusal.error)


def test_a_rank_that_is_gone_ends_the_calls_that_lack_it_and_no_others() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    arrive(matcher, (0, 0))
    arrive(matcher, (1, 0), at=key(2))
    pair = key(1, GroupKey("", (0, 2), 0))
    arrive(matcher, (0, 0), at=pair)
    assert matcher.depart(1, LOST) == [Refuse(("0.0",), LOST)]
    assert arrive(matcher, (0, 0), (2, 0), at=key(2)) == [
        Compute(key(2), SUM, ("0.0", "1.0", "2.0"))
    ]
    assert arrive(matcher, (2, 0), at=pair) == [Compute(pair, SUM, ("0.0", "2.0"))]
    assert arrive(matcher, (0, 0), at=key(3)) == [Refuse(("0.0",), LOST)]


def test_a_rank_that_is_gone_ends_a_call_of_which_it_sent_one_chunk_only() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    arrive(matcher, (1, 0), (0, 0), (0, 1))
    assert matcher.depart(1, LOST) == [Refuse(("1.0", "0.0", "0.1"), LOST)]


def test_a_call_that_one_rank_gives_up_ends_for_all_also_before_it_has_begun() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    error = UsageError("no room")
    arrive(matcher, (0, 3), (1, 3))
    assert matcher.give_up(key(), error) == [Refuse(("0.3", "1.3"), error)]
    assert matcher.give_up(key(), UsageError("again")) == []
    assert matcher.give_up(key(2), error) == []
    assert arrive(matcher, (2, 3)) == [Refuse(("2.3",), error)]
    assert arrive(matcher, (2, 0), at=key(2)) == [Refuse(("2.0",), error)]


def test_failed_calls_are_remembered_and_not_without_end() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    error = UsageError("no")
    for number in range(1, MAX_FAILED + 2):
        matcher.give_up(key(number), error)
    assert arrive(matcher, (0, 0), at=key(1)) == []
    assert arrive(matcher, (0, 0), at=key(2)) == [Refuse(("0.0",), error)]


@pytest.mark.parametrize("rank", [3, 0])
def test_strangers_and_second_messages_of_a_chunk_are_refused_alone(rank: int) -> None:
    matcher: CallMatcher[str] = CallMatcher()
    arrive(matcher, (0, 0), (1, 0))
    (refusal,) = matcher.arrive(key(), rank, SUM, 0, "odd")
    assert isinstance(refusal, Refuse)
    assert (refusal.messages, type(refusal.error)) == (("odd",), ProtocolError)
    assert arrive(matcher, (2, 0)) == [Compute(key(), SUM, ("0.0", "1.0", "2.0"))]


def test_a_rank_that_has_joined_is_not_waited_for_in_sums() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    arrive(matcher, (0, 0), (0, 1), (2, 0))
    effects = matcher.join(ALL, 1, FROM_NOW, "j1")
    assert effects == [Compute(key(), SUM, ("0.0", "2.0"))]
    assert arrive(matcher, (2, 1)) == [Compute(key(), SUM, ("0.1", "2.1"))]
    assert matcher.join(ALL, 0, FROM_NOW, "j0") == []
    assert arrive(matcher, (2, 0), at=key(2)) == [Compute(key(2), SUM, ("2.0",))]
    assert matcher.join(ALL, 2, FROM_NOW, "j2") == [AllJoined(("j1", "j0", "j2"), 2)]
    assert arrive(matcher, (2, 0), at=key(101)) == []


def test_a_join_that_overtakes_a_call_does_not_replace_it() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    made = Absence(0, {"": 1}, 100)
    arrive(matcher, (0, 0), (2, 0))
    assert matcher.join(ALL, 1, made, "j1") == []
    assert arrive(matcher, (1, 0)) == [Compute(key(), SUM, ("0.0", "1.0", "2.0"))]
    matcher.join(ALL, 2, made, "j2")
    assert matcher.join(ALL, 0, Absence(0, {"": 2}, 100), "j0") == [
        AllJoined(("j1", "j2", "j0"), 0)
    ]
    assert arrive(matcher, (0, 0), at=key(2)) == [Compute(key(2), SUM, ("0.0",))]
    assert arrive(matcher, (0, 0), at=key(101)) == []


def test_calls_that_zeros_would_change_fail_without_a_rank_that_has_joined() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    arrive(matcher, (0, 0), call=BARRIER)
    (refusal,) = matcher.join(ALL, 1, FROM_NOW, "j1")
    assert isinstance(refusal, Refuse)
    assert "rank 1 has joined" in str(refusal.error)
    assert "barrier() needs all ranks" in str(refusal.error)
    (refusal,) = arrive(matcher, (0, 0), call=SUM._replace(op="min"), at=key(2))
    assert isinstance(refusal, Refuse)
    assert isinstance(refusal.error, UsageError)


def test_a_rank_that_is_gone_and_has_not_joined_ends_the_waits_of_those_who_have() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    matcher.join(ALL, 0, FROM_NOW, "j0")
    assert matcher.depart(1, LOST) == [Refuse(("j0",), LOST)]
    assert matcher.join(ALL, 2, FROM_NOW, "j2") == [Refuse(("j2",), LOST)]
    pair = GroupKey("", (1, 2), 0)
    other: CallMatcher[str] = CallMatcher()
    other.join(pair, 1, FROM_NOW, "j1")
    assert other.depart(1, LOST) == []
    assert other.join(pair, 2, FROM_NOW, "j2") == [AllJoined(("j1", "j2"), 1)]


def test_a_rank_joins_once() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    matcher.join(ALL, 0, FROM_NOW, "j0")
    for rank in (0, 5):
        (refusal,) = matcher.join(ALL, rank, FROM_NOW, "again")
        assert isinstance(refusal, Refuse)
        assert refusal.messages == ("again",)


def ask(
    matcher: CallMatcher[str],
    *ranks: int,
    call: CollectiveCall = SUM,
    at: CallKey | None = None,
) -> list[CallEffect[str]]:
    """These ranks ask whether all make the call; a question is called like its rank."""
    where = at or key()
    step = LeadersStep(where.group.ranks, READY)
    return [
        effect
        for rank in ranks
        for effect in matcher.arrive(where, rank, call, 0, f"{rank}?", step)
    ]


def test_calls_for_which_all_ranks_are_ready_are_numbered_in_each_group() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    assert ask(matcher, 0, 1, at=key(name="x")) == []
    assert ask(matcher, 2, 1, 0, at=key(name="y")) == [AllReady(("0?", "1?", "2?"), 1)]
    assert ask(matcher, 2, at=key(name="x")) == [AllReady(("0?", "1?", "2?"), 2)]
    pair = GroupKey("", (2, 0), 0)
    assert ask(matcher, 0, 2, at=key(1, pair)) == [AllReady(("2?", "0?"), 1)]
    assert matcher.num_open == 0
    assert ask(matcher, 0, 1, 2, at=key(2, name="x")) == [AllReady(("0?", "1?", "2?"), 3)]


def test_a_call_for_which_all_are_ready_may_be_made_by_the_servers_after_that() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    ask(matcher, 0, 1, 2)
    assert arrive(matcher, (1, 0), (0, 0), (2, 0)) == [Compute(key(), SUM, ("0.0", "1.0", "2.0"))]


def test_a_call_that_lacks_a_rank_that_has_joined_has_no_number() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    assert ask(matcher, 0, 1, 2, at=key(9, name="x")) == [AllReady(("0?", "1?", "2?"), 1)]
    assert ask(matcher, 0, 2) == []
    assert matcher.join(ALL, 1, FROM_NOW, "j1") == [AllReady(("0?", "2?"), 0)]
    assert arrive(matcher, (2, 0), (0, 0)) == [Compute(key(), SUM, ("0.0", "2.0"))]
    largest = SUM._replace(op="max")
    (refusal,) = ask(matcher, 0, call=largest, at=key(2))
    assert isinstance(refusal, Refuse)
    assert "rank 1 has joined" in str(refusal.error)
    matcher.join(ALL, 0, FROM_NOW, "j0")
    matcher.join(ALL, 2, FROM_NOW, "j2")
    assert ask(matcher, 0, 1, 2, at=key(101)) == [AllReady(("0?", "1?", "2?"), 2)]


def test_ranks_that_ask_for_different_calls_all_get_an_error_and_no_number() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    ask(matcher, 0)
    (refusal,) = arrive(matcher, (2, 0), call=BARRIER)
    assert isinstance(refusal, Refuse)
    assert isinstance(refusal.error, MismatchError)
    assert sorted(refusal.messages) == ["0?", "2.0"]
    assert ask(matcher, 1) == [Refuse(("1?",), refusal.error)]
    assert ask(matcher, 0, 1, 2, at=key(2)) == [AllReady(("0?", "1?", "2?"), 1)]


def test_a_rank_that_sends_values_where_the_others_ask_ends_the_call() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    ask(matcher, 0)
    (refusal,) = arrive(matcher, (1, 0))
    assert isinstance(refusal, Refuse)
    assert isinstance(refusal.error, ProtocolError)


def test_a_rank_that_is_gone_ends_the_questions_that_lack_it() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    ask(matcher, 0)
    assert matcher.missing(key(), 0, counts_waits=False) == [1, 2]
    assert matcher.depart(1, LOST) == [Refuse(("0?",), LOST)]
    assert ask(matcher, 2) == [Refuse(("2?",), LOST)]


def test_a_call_reads_like_the_script() -> None:
    assert BARRIER.text == "barrier()"
    assert (
        CollectiveCall("broadcast", "", "int8", ((),), 2).text
        == "broadcast(int8, shape (), root 2)"
    )
    assert SUM._replace(op="premul_sum", factor=0.5).text == (
        "all_reduce(premul_sum, float32, shape (4,), factor 0.5)"
    )
    shapes = ((ANY, 2), (1,), (), (3,), (4,))
    assert CollectiveCall("x", shapes=shapes).text == "x(shapes (any, 2) (1,) () (3,) ...)"


EVENTS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["sum", "barrier", "ask", "gone", "give up"])),
    max_size=30,
)


@given(EVENTS)
def test_every_message_is_answered_once_and_alike(events: list[tuple[int, str]]) -> None:
    """Each rank makes its calls in order; in the end all leave, so nothing may be left."""
    matcher: CallMatcher[tuple[int, int]] = CallMatcher()
    counts = [0, 0, 0]
    gone: set[int] = set()
    sent: dict[tuple[int, int], CollectiveCall] = {}
    answers: dict[tuple[int, int], object] = {}
    effects: list[CallEffect[tuple[int, int]]] = []
    for rank, what in [*events, *((rank, "gone") for rank in range(3))]:
        if rank in gone:
            continue
        if what == "gone":
            gone.add(rank)
            effects += matcher.depart(rank, NodeLostError(f"{rank}"))
        elif what == "give up":
            effects += matcher.give_up(key(max(counts[rank], 1)), UsageError("given up"))
        else:
            counts[rank] += 1
            call = BARRIER if what == "barrier" else SUM
            message = rank, counts[rank]
            sent[message] = call
            step = LeadersStep(ALL.ranks, READY) if what == "ask" else None
            effects += matcher.arrive(key(counts[rank]), rank, call, 0, message, step)
    numbers = [effect.number for effect in effects if isinstance(effect, AllReady)]
    assert numbers == list(range(1, len(numbers) + 1))
    for effect in effects:
        messages: Any = effect.messages
        for message in messages:
            assert message not in answers
            answers[message] = effect
        if isinstance(effect, Compute):
            assert {sent[message] for message in messages} == {effect.call}
            assert [rank for rank, _ in messages] == [0, 1, 2]
    assert answers.keys() == sent.keys()
    assert matcher.num_open == 0
    for number in range(1, max(counts) + 1):
        alike = {isinstance(answers[m], Compute) for m in sent if m[1] == number}
        assert len(alike) <= 1


def test_who_waits_is_told_whose_values_a_chunk_lacks() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    assert matcher.missing(key(), 0, counts_waits=False) == []
    arrive(matcher, (0, 0), (0, 1), (1, 1))
    assert matcher.missing(key(), 0, counts_waits=False) == [1, 2]
    arrive(matcher, (1, 0))
    assert matcher.missing(key(), 0, counts_waits=False) == [2]
    matcher.join(ALL, 2, FROM_NOW, "join")
    assert matcher.missing(key(), 0, counts_waits=False) == []


def test_of_calls_without_messages_those_have_come_who_ask() -> None:
    matcher: CallMatcher[str] = CallMatcher()
    assert matcher.missing(key(1), 2, counts_waits=True) == [0, 1]
    assert matcher.missing(key(1), 0, counts_waits=True) == [1]
    assert matcher.missing(key(2), 0, counts_waits=True) == [1, 2]
    for number in range(3, MAX_LONG_WAITS + 2):
        matcher.missing(key(number), 0, counts_waits=True)
    assert matcher.missing(key(1), 1, counts_waits=True) == [0, 2]
