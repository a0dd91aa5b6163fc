"""Calls under way, by key: a call waits for earlier ones of its own keys and for no others."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.stores.dist.in_flight import InFlight, Operation
from kvstore.stores.dist.plan import Bucket
from pslite import Future


class Reference:
    """The same, by looking at every call for every key."""

    def __init__(self) -> None:
        self.calls: list[tuple[set[str], Future[None]]] = []

    def unfinished(self, key: str) -> list[Future[None]]:
        return [future for keys, future in self.calls if key in keys and not future.done()]

    def beyond(self, keys: tuple[str, ...], window: int) -> set[Future[None]]:
        found: set[Future[None]] = set()
        for key in keys:
            calls = self.unfinished(key)
            found.update(calls[: max(len(calls) - window, 0)])
        return found

    def forget(self, gone: set[str]) -> None:
        self.calls = [(keys - gone, future) for keys, future in self.calls]


def begin(under_way: InFlight, *keys: str) -> Future[None]:
    future: Future[None] = Future()
    under_way.add(keys, future)
    return future


def test_calls_beyond_the_window_are_waited_for_oldest_first() -> None:
    calls = InFlight()
    first, second = begin(calls, "a", "b"), begin(calls, "a", "b")
    assert calls.beyond(("a", "b"), 2) == []
    third, fourth = begin(calls, "a", "b"), begin(calls, "a", "b")
    assert calls.beyond(("a", "b"), 2) == [first, second]
    first.set_result(None)
    assert calls.beyond(("a", "b"), 2) == [second]
    third.set_error(ValueError())
    assert calls.beyond(("a", "b"), 2) == []
    assert calls.of() == [second, fourth]


def test_a_call_does_not_wait_for_other_keys_of_a_crossing_list() -> None:
    calls = InFlight()
    lists = [begin(calls, "a", "b") for _ in range(2)]
    alone = [begin(calls, "b") for _ in range(2)]
    assert calls.beyond(("a",), 2) == []
    assert calls.beyond(("c",), 0) == []
    assert calls.beyond(("b",), 2) == lists
    assert calls.beyond(("b", "a"), 3) == lists[:1]
    assert calls.of(["a"]) == lists
    assert calls.of(["b"]) == lists + alone


def test_calls_of_crossing_lists_count_in_the_order_in_which_they_began() -> None:
    calls = InFlight()
    first, second, third = begin(calls, "a", "b"), begin(calls, "a"), begin(calls, "a", "b")
    assert calls.beyond(("a",), 1) == calls.beyond(("a", "b"), 1) == [first, second]
    assert calls.of(["a"]) == [first, second, third]


def test_a_list_waits_for_calls_of_lists_that_came_up_later() -> None:
    calls = InFlight()
    assert calls.beyond(("a", "b"), 0) == []
    later = [begin(calls, "b", "c") for _ in range(2)]
    assert calls.beyond(("a", "b"), 1) == later[:1]


def test_a_key_that_is_gone_leaves_the_others_of_its_calls() -> None:
    calls = InFlight()
    first = begin(calls, "a", "b")
    second = begin(calls, "b")
    calls.forget(["a"])
    assert calls.of(["a"]) == []
    assert calls.of(["b"]) == calls.beyond(("b",), 0) == [first, second]
    calls.forget(["b"])
    assert calls.of() == []


def test_a_script_that_shuffles_its_keys_leaves_nothing_behind() -> None:
    calls = InFlight()
    keys = [str(number) for number in range(8)]
    slow = begin(calls, "0")
    for turn in range(50):
        mixed = (*keys[turn % 8 :], *keys[: turn % 8], f"only once: {turn}")
        assert calls.beyond(mixed, 1) == []
        begin(calls, *mixed).set_result(None)
    assert len(calls._lines) < 10
    assert len(calls._by_key) < 8 + 10
    assert all(len(line.crossing) < 10 for line in calls._lines.values())
    assert calls.of() == [slow]


KEYS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), KEYS),
        st.tuples(st.sampled_from([0, 1, 2]), KEYS),
        st.tuples(st.just("of"), KEYS),
        st.tuples(st.just("forget"), KEYS),
        st.tuples(st.just("finish"), st.integers(0, 30)),
    ),
    max_size=40,
)


@given(EVENTS)
def test_it_knows_what_a_list_of_all_calls_knows(events: list[Any]) -> None:
    calls, reference = InFlight(), Reference()
    futures: list[Future[None]] = []
    for what, which in events:
        if what == "finish":
            if which < len(futures):
                futures[which].set_result(None)
            continue
        keys = tuple(which)
        if what == "add":
            futures.append(begin(calls, *keys))
            reference.calls.append((set(keys), futures[-1]))
        elif what == "forget":
            calls.forget(keys)
            reference.forget(set(keys))
        elif what == "of":
            wanted = [f for f in futures if any(f in reference.unfinished(key) for key in keys)]
            assert calls.of(keys) == wanted
        else:
            found = calls.beyond(keys, what)
            assert len(found) == len(set(found))
            assert set(found) == reference.beyond(keys, what)
    wanted = [f for keys, f in reference.calls if keys and not f.done()]
    assert calls.of() == wanted


# -- the future of one call ----------------------------------------------------------------


def operation(num_messages: int) -> Operation:
    made = Operation(Bucket(("a",)))
    made.left = num_messages
    return made


def test_a_call_is_over_when_all_its_messages_are() -> None:
    call = operation(2)
    call.part_done(None)
    assert not call.done()
    call.part_done(None)
    assert call.result(0) is None


@pytest.mark.parametrize("is_first", [True, False])
def test_a_call_of_which_one_message_failed_has_its_error(is_first: bool) -> None:
    call, error = operation(2), ValueError("refused")
    for each in (error, None) if is_first else (None, error):
        call.part_done(each)
    assert call.error() is error


def test_of_several_errors_a_call_has_the_first() -> None:
    call, error = operation(2), ValueError("refused")
    call.part_done(error)
    call.part_done(ValueError("a consequence"))
    assert call.error() is error


def test_a_call_says_what_it_waits_for() -> None:
    assert repr(operation(1)) == "<Future of the servers' answer for 'a': pending>"
