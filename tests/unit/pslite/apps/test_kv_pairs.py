"""Order, equality and conversion of long lists of keys, which are looked at in blocks."""

from __future__ import annotations

import numpy as np
import pytest

from pslite.apps.kv_pairs import as_keys, as_values, fault_in, is_rising, owned, same_keys
from pslite.errors import UsageError

BLOCK = 65_536
EDGES = [0, 1, BLOCK - 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 2]


def rising(count: int = 3 * BLOCK) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.arange(count, dtype=np.uint64) * np.uint64(3)


@pytest.mark.parametrize("at", EDGES)
def test_a_fault_is_found_wherever_it_is_and_named_by_its_position(at: int) -> None:
    keys = rising()
    assert fault_in(keys) is None and is_rising(keys)
    keys[at + 1] = keys[at]
    assert fault_in(keys) == (f"key {keys[at]} appears twice (at positions {at} and {at + 1})")
    assert not is_rising(keys)


def test_the_first_of_several_faults_is_named() -> None:
    keys = rising()
    keys[BLOCK + 9] = 0
    keys[2 * BLOCK] = 0
    assert str(fault_in(keys)).startswith(f"keys must be sorted: 0 at position {BLOCK + 9} ")


@pytest.mark.parametrize("at", [*EDGES, 3 * BLOCK - 1])
def test_lists_that_differ_in_one_key_are_not_the_same(at: int) -> None:
    keys, other = rising(), rising()
    assert same_keys(keys, other)
    other[at] += np.uint64(1)
    assert not same_keys(keys, other)
    assert not same_keys(keys, keys[:-1])


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_shortest_lists_are_in_order_and_equal_to_themselves(count: int) -> None:
    keys = rising(count)
    assert fault_in(keys) is None
    assert same_keys(keys, keys.copy())


def test_signed_keys_are_taken_as_they_lie_and_negative_ones_refused() -> None:
    keys = np.array([1, 2, 2**63 - 1], np.int64)
    assert np.shares_memory(as_keys(keys), keys)
    assert as_keys(keys).tolist() == keys.tolist() and as_keys(keys).dtype == np.uint64
    assert as_keys(keys.astype(">i8")).tolist() == keys.tolist()
    assert as_keys(np.array([1, 2], np.int8)).dtype == np.uint64
    with pytest.raises(UsageError, match="must not be negative, got -2"):
        as_keys(np.array([1, -2]))


def test_copies_lie_in_the_memory_that_is_given_for_them() -> None:
    values = np.arange(6, dtype=">f4")[::2]
    memory = np.empty(3, np.float32)
    copy = as_values(values, lambda shape, dtype: memory)
    assert copy is memory and memory.tolist() == [0, 2, 4]
    assert owned(memory, memory.dtype, None) is memory
