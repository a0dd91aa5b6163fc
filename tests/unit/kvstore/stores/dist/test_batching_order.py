"""Calls that are joined: order is kept, whatever they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.arrays.keys import KeySpec
from kvstore.stores.dist.batching import CallBatch, Shape, mixes_of, shape_of
from kvstore.stores.dist.in_flight import Operation
from kvstore.stores.dist.plan import Bucket, Bytes


def shape(*keys: str, push: bool = False, pull: bool = False, priority: int = 0) -> Shape:
    return keys, push, pull, priority


def call(*keys: str, push: bool = False, pull: bool = False, nbytes: int = 1) -> Operation:
    memories = [np.zeros(1, np.uint8) for _ in keys]
    return Operation(bucket(*keys, nbytes=nbytes), memories * push, memories * pull)


def bucket(*keys: str, nbytes: int = 1) -> Bucket:
    return Bucket(keys, [KeySpec((nbytes,), np.dtype(np.uint8)) for _ in keys])


def test_a_push_and_the_pull_behind_it_become_one_exchange() -> None:
    (mix,) = mixes_of([shape("w", push=True), shape("w", pull=True)])
    assert mix.keys == ("w",)
    assert mix.calls == ((0, 1),)
    assert (mix.sources, mix.targets) == (((0, 0),), ((1, 0),))


def test_a_push_behind_a_pull_of_the_same_key_goes_later() -> None:
    push, pull = shape("w", push=True), shape("w", pull=True)
    assert len(mixes_of([pull, push])) == 2
    assert len(mixes_of([push, push])) == 2
    assert len(mixes_of([pull, pull])) == 2
    assert len(mixes_of([pull, shape("v", pull=True)])) == 1


def test_keys_of_a_kind_go_out_by_priority_and_equal_ones_in_their_order() -> None:
    mixes = mixes_of(
        [
            shape("a", push=True, priority=-1),
            shape("b", push=True, priority=0),
            shape("c", push=True, priority=-1),
            shape("d", pull=True, priority=7),
        ]
    )
    assert [mix.keys for mix in mixes] == [("d",), ("b", "a", "c")]
    assert [mix.priorities for mix in mixes] == [(7,), (0, -1, -1)]


def test_pushes_and_pulls_fill_a_batch_each_by_themselves() -> None:
    batch = CallBatch(100, flush=lambda: None)
    for _ in range(4):
        assert batch.has_room(25, pushes=True)
        batch.add(call("w", push=True, nbytes=25))
        assert batch.has_room(25, pushes=False)
        batch.add(call("w", pull=True, nbytes=25))
    assert not batch.has_room(1, pushes=True)
    assert not batch.has_room(1, pushes=False)


@pytest.mark.parametrize("sizes", [[100], [40, 70], [0] * 256])
def test_a_full_batch_has_room_only_for_the_pull_of_its_last_push(sizes: list[int]) -> None:
    batch = CallBatch(100, flush=lambda: None)
    for size in sizes:
        batch.add(call("w", push=True, nbytes=size))
    assert not batch.has_room(1, pushes=True)
    assert batch.has_room(1, pushes=False)
    batch.add(call("w", pull=True, nbytes=100))
    assert not batch.has_room(1, pushes=False)


def test_an_interrupted_pull_behind_a_push_leaves_the_push_as_it_was() -> None:
    class Interrupted(Operation):
        def __setattr__(self, name: str, value: object) -> None:
            if is_armed and name == "targets":
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    is_armed = False
    keys, memories = bucket("w"), [np.zeros(1, np.uint8)]
    last = Interrupted(keys, memories)
    batch = CallBatch(100, flush=lambda: None)
    batch.add(last)
    is_armed = True
    with pytest.raises(KeyboardInterrupt):
        batch.pull_last(keys, memories, 0)
    assert shape_of(last) == shape("w", push=True)
    is_armed = False
    assert batch.pull_last(keys, memories, 0) is last
    assert (shape_of(last), last.targets) == (shape("w", push=True, pull=True), memories)


def _no_more(nbytes: int) -> Bytes:
    raise AssertionError(f"{nbytes} bytes fit in the batch's own memory")


def test_values_without_room_in_staging_get_memory_of_their_own_together() -> None:
    batch = CallBatch(100, flush=lambda: None, staging=np.zeros(25, np.uint8))
    values = [np.full(size, number, np.uint8) for number, size in enumerate((20, 5, 5, 10))]
    batch.add(Operation(bucket("a", nbytes=20), batch.stage(values[:1], 20, _no_more)))
    more = np.zeros(10, np.uint8)
    copies = batch.stage(values[1:3], 10, lambda nbytes: more[:nbytes])
    batch.add(Operation(bucket("b", "c", nbytes=5), copies))
    assert more.tolist() == [1] * 5 + [2] * 5
    last = batch.stage(values[3:], 10, lambda nbytes: np.zeros(nbytes, np.uint8))
    batch.add(Operation(bucket("d", nbytes=10), last))
    assert batch.staging is None
    sources = [source.tolist() for call in batch.calls for source in call.sources]
    assert sources == [value.tolist() for value in values]


def test_staging_with_a_gap_is_not_used_and_the_calls_keep_their_values() -> None:
    batch = CallBatch(100, flush=lambda: None, staging=np.zeros(100, np.uint8))
    values = [np.full(10, number, np.uint8) for number in range(3)]
    first = batch.stage(values[:1], 10, _no_more)
    batch.add(Operation(bucket("a", nbytes=10), first))
    assert batch.staging is not None
    batch.stage(values[1:2], 10, _no_more)  # interrupted here: the call is not added
    third = batch.stage(values[2:], 10, _no_more)
    batch.add(Operation(bucket("c", nbytes=10), third))
    assert batch.staging is None
    assert [call.sources[0].tolist() for call in batch.calls] == [[0] * 10, [2] * 10]


CALLS = st.lists(
    st.tuples(
        st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True).map(tuple),
        st.sampled_from([(True, False), (False, True), (True, True)]),
        st.integers(-3, 3),
    ),
    max_size=12,
)


@given(CALLS)
def test_no_call_overtakes_another_of_the_same_key(drawn: list[Any]) -> None:
    shapes = [(keys, push, pull, priority) for keys, (push, pull), priority in drawn]
    happened: dict[str, list[tuple[int, str]]] = {}
    for mix in mixes_of(shapes):
        for position, key in enumerate(mix.keys):
            for kind, places in (("push", mix.sources), ("pull", mix.targets)):
                if places:
                    number, index = places[position]
                    assert shapes[number][0][index] == key
                    assert number in mix.calls[position]
                    happened.setdefault(key, []).append((number, kind))
    for key in "abc":
        wanted = []
        for number, (keys, push, pull, _) in enumerate(shapes):
            if key in keys:
                wanted += [(number, "push")] if push else []
                wanted += [(number, "pull")] if pull else []
        assert happened.get(key, []) == wanted
