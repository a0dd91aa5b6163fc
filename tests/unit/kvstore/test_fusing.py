"""Calls that are joined: order is kept, whatever they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.fusing import Call, kinds_of, steps_of


def call(*keys: str, push: bool = False, pull: bool = False, priority: int = 0) -> Call:
    memories = [np.zeros(1, np.uint8) for _ in keys]
    return Call(
        keys, memories if push else None, memories if pull else None, priority, lambda: "a call"
    )


def test_a_push_and_the_pull_behind_it_become_one_exchange() -> None:
    push, pull = call("w", push=True), call("w", pull=True)
    (step,) = steps_of([push, pull])
    entry = step["w"]
    assert (entry.calls, entry.source is not None, entry.target is not None) == (
        [push, pull],
        True,
        True,
    )
    assert kinds_of(step) == [["w"]]


def test_a_push_behind_a_pull_of_the_same_key_waits_for_the_next_step() -> None:
    assert len(steps_of([call("w", pull=True), call("w", push=True)])) == 2
    assert len(steps_of([call("w", push=True), call("w", push=True)])) == 2
    assert len(steps_of([call("w", pull=True), call("w", pull=True)])) == 2
    assert len(steps_of([call("w", pull=True), call("v", push=True)])) == 1


def test_keys_of_a_kind_go_out_by_priority_and_equal_ones_in_their_order() -> None:
    (step,) = steps_of(
        [
            call("a", push=True, priority=-1),
            call("b", push=True, priority=0),
            call("c", push=True, priority=-1),
            call("d", pull=True, priority=7),
        ]
    )
    assert kinds_of(step) == [["d"], ["b", "a", "c"]]


def test_a_call_is_done_when_all_its_messages_are() -> None:
    one = call("a", "b", push=True)
    one.expect()
    one.expect()
    assert not one.arrived(None)
    assert not one.future.done()
    assert one.arrived(ValueError("lost"))
    assert isinstance(one.future.error(), ValueError)


CALLS = st.lists(
    st.tuples(
        st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True),
        st.sampled_from([(True, False), (False, True), (True, True)]),
        st.integers(-3, 3),
    ),
    max_size=12,
)


@given(CALLS)
def test_no_call_overtakes_another_of_the_same_key(drawn: list[Any]) -> None:
    calls = [
        call(*keys, push=push, pull=pull, priority=priority)
        for keys, (push, pull), priority in drawn
    ]
    happened: dict[str, list[tuple[int, str]]] = {}
    for step in steps_of(calls):
        for key, entry in step.items():
            for each in entry.calls:
                number = calls.index(each)
                if each.sources is not None:
                    happened.setdefault(key, []).append((number, "push"))
            for each in entry.calls:
                if each.targets is not None:
                    happened.setdefault(key, []).append((calls.index(each), "pull"))
    for key, events in happened.items():
        wanted = []
        for number, each in enumerate(calls):
            if key in each.keys:
                wanted += [(number, "push")] if each.sources is not None else []
                wanted += [(number, "pull")] if each.targets is not None else []
        assert events == wanted
