"""``SumHandle`` by itself: sums equal a dictionary's, and lists are searched for once."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pslite import KVMeta, KVPairs, SumHandle
from pslite.apps.kv_lists import MIN_KEYS
from pslite.apps.kv_pairs import Keys

PUSH = KVMeta(0, True, False, 9, 0, 0, 1)
PULL = KVMeta(0, False, True, 9, 0, 0, 2)
BOTH = KVMeta(0, True, True, 9, 0, 0, 3)


def listed(keys: Keys) -> Keys:
    """As a ``KVServer`` hands over a list that it remembers."""
    kept = keys.copy()
    kept.flags.writeable = False
    return kept


def read(handle: SumHandle, keys: Keys) -> NDArray[Any]:
    answer = handle(PULL, KVPairs(keys, np.empty(0, np.float32)))
    assert answer is not None and answer.fresh
    return answer.values


def spread(count: int, seed: int = 0) -> Keys:
    keys = np.unique(np.random.default_rng(seed).integers(0, 2**64, count, np.uint64))
    assert len(keys) == count
    return keys


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all lists that were searched for."""
    seen: list[int] = []
    search = np.searchsorted

    def counting(keys: Any, wanted: Any) -> Any:
        if len(keys):
            seen.append(len(wanted))
        return search(keys, wanted)

    monkeypatch.setattr(np, "searchsorted", counting)
    return seen


@pytest.mark.parametrize("width", [None, 1, 3])
@pytest.mark.parametrize("keep", [True, False])
def test_sums_of_long_and_short_lists_equal_a_dictionarys_to_the_last_bit(
    width: int | None, keep: bool
) -> None:
    rng = np.random.default_rng(5)
    universe = spread(4 * MIN_KEYS)
    columns = width or 1
    sums = np.zeros((len(universe), columns), np.float32)
    handle = SumHandle(width)
    picks = [np.arange(k * MIN_KEYS, (k + 1) * MIN_KEYS) for k in (2, 0)]
    picks += [
        np.sort(rng.choice(len(universe), size, replace=False))
        for size in (10, MIN_KEYS, 2 * MIN_KEYS, 3 * MIN_KEYS, len(universe))
    ]
    lists = [listed(universe[pick]) if keep else universe[pick] for pick in picks]
    for turn in rng.integers(0, len(picks), 30).tolist():
        values = rng.standard_normal((len(picks[turn]), columns), np.float32)
        sums[picks[turn]] += values
        pairs = KVPairs(lists[turn], values if width else values.reshape(-1))
        meta = [PUSH, BOTH][turn % 2]
        answer = handle(meta, pairs)
        expected = sums[picks[turn]] if width else sums[picks[turn]].reshape(-1)
        if answer is not None:
            assert np.array_equal(answer.values, expected)
        assert np.array_equal(read(handle, lists[turn]), expected)
    assert np.array_equal(read(handle, universe).reshape(sums.shape), sums)


def test_a_list_is_searched_for_once_and_again_only_when_it_comes_as_another_array(
    searches: list[int],
) -> None:
    universe = spread(3 * MIN_KEYS)
    handle = SumHandle()
    handle(PUSH, KVPairs(universe, np.ones(len(universe), np.float32)))
    some = listed(universe[::2])
    ones = np.ones(len(some), np.float32)
    for _ in range(3):
        handle(PUSH, KVPairs(some, ones))
        read(handle, some)
    assert searches == [len(some)]
    read(handle, listed(some))
    assert searches == [len(some)] * 2


def test_all_keys_together_need_no_search(searches: list[int]) -> None:
    universe = spread(MIN_KEYS)
    handle = SumHandle()
    values = np.ones(len(universe), np.float32)
    for _ in range(3):
        handle(PUSH, KVPairs(universe.copy(), values))
    assert read(handle, universe.copy()).tolist() == [3.0] * len(universe)
    assert searches == []


def test_where_a_list_lies_is_right_also_after_new_keys_came_between() -> None:
    universe = spread(4 * MIN_KEYS)
    handle = SumHandle(dtype=np.int64)
    even, odd = listed(universe[::2]), listed(universe[1::2])
    handle(PUSH, KVPairs(even, np.arange(len(even))))
    assert read(handle, even).tolist() == list(range(len(even)))
    handle(PUSH, KVPairs(odd, -np.arange(len(odd))))
    handle(PUSH, KVPairs(even, np.ones(len(even), np.int64)))
    assert read(handle, even).tolist() == list(range(1, len(even) + 1))
    assert read(handle, odd).tolist() == list(range(0, -len(odd), -1))


def test_an_array_that_may_change_is_searched_for_each_time() -> None:
    universe = spread(2 * MIN_KEYS)
    handle = SumHandle()
    handle(PUSH, KVPairs(universe, np.arange(len(universe), dtype=np.float32)))
    keys = universe[:MIN_KEYS].copy()
    assert read(handle, keys).tolist() == list(range(MIN_KEYS))
    keys[:] = universe[MIN_KEYS:]
    assert read(handle, keys).tolist() == list(range(MIN_KEYS, 2 * MIN_KEYS))
    assert len(handle._seen) == 0


def test_a_read_only_view_of_memory_that_changes_is_searched_for_each_time() -> None:
    universe = spread(2 * MIN_KEYS)
    handle = SumHandle()
    handle(PUSH, KVPairs(universe, np.arange(len(universe), dtype=np.float32)))
    memory = universe[:MIN_KEYS].copy()
    view = memory[:]
    view.flags.writeable = False
    assert read(handle, view).tolist() == list(range(MIN_KEYS))
    memory[:] = universe[MIN_KEYS:]
    assert read(handle, view).tolist() == list(range(MIN_KEYS, 2 * MIN_KEYS))


def test_a_view_of_somebody_elses_memory_is_not_referred_to_after_the_request() -> None:
    memory = bytearray(spread(MIN_KEYS).tobytes())
    handle = SumHandle()
    keys = np.frombuffer(memoryview(memory).toreadonly(), np.uint64)
    handle(PUSH, KVPairs(keys, np.ones(MIN_KEYS, np.float32)))
    wanted = keys.copy()
    del keys
    memory += b"!"  # fails while a view of it is left
    memory[:] = bytes(len(memory))
    assert read(handle, wanted).tolist() == [1.0] * MIN_KEYS


def test_what_is_known_of_a_list_goes_with_it() -> None:
    universe = spread(2 * MIN_KEYS)
    handle = SumHandle()
    handle(PUSH, KVPairs(universe, np.ones(len(universe), np.float32)))
    gc.disable()
    try:
        some = listed(universe[::2])
        read(handle, some)
        assert len(handle._seen) == 1
        del some
        assert len(handle._seen) == 0
    finally:
        gc.enable()


def test_answers_lie_in_the_memory_that_the_server_gives() -> None:
    made: list[NDArray[Any]] = []

    def empty(shape: Any, dtype: Any) -> NDArray[Any]:
        made.append(np.full(shape, 7, dtype))
        return made[-1]

    handle = SumHandle()
    keys = np.array([1, 5, 9], np.uint64)
    handle(PUSH, KVPairs(keys, np.ones(3, np.float32)))
    for wanted, sums in ([1, 5, 9], [1, 1, 1]), ([0, 5, 10], [0, 1, 0]):
        answer = handle(
            PULL._replace(empty=empty), KVPairs(np.array(wanted, np.uint64), np.empty(0))
        )
        assert answer is not None and answer.values.tolist() == sums
        assert np.shares_memory(answer.values, made[-1])


def test_an_answer_stays_as_it_is_when_the_sums_go_on() -> None:
    keys = listed(spread(MIN_KEYS))
    handle = SumHandle()
    ones = np.ones(len(keys), np.float32)
    handle(PUSH, KVPairs(keys, ones))
    before = read(handle, keys)
    handle(PUSH, KVPairs(keys, ones))
    assert before.tolist() == ones.tolist()
