"""Whether values may land while sources are sent from where they lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore.stores.dist.in_flight import overlaps

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
MEMORY = np.zeros(40, np.uint8)


def one_by_one(sources: Sequence[Bytes], targets: Sequence[Bytes], indices: Iterable[int]) -> bool:
    for index in indices:
        source = sources[index]
        for number, target in enumerate(targets):
            is_itself = number == index and target.ctypes.data == source.ctypes.data
            if len(source) and len(target) and not is_itself and np.shares_memory(source, target):
                return True
    return False


def test_a_value_may_land_where_its_own_source_lies_and_nowhere_else() -> None:
    left, right = MEMORY[:8], MEMORY[8:16]
    assert not overlaps([left, right], [left, right], [0, 1])
    assert overlaps([left, right], [right, left], [0, 1])
    assert overlaps([left, right], [right, MEMORY[20:28]], [1])
    assert not overlaps([left, right], [right, MEMORY[20:28]], [0])
    assert overlaps([left], [MEMORY[4:12]], [0])
    assert not overlaps([left, right], [right, left], [])


def test_a_source_may_be_read_only() -> None:
    source = MEMORY[:8].view()
    source.flags.writeable = False
    assert overlaps([source], [MEMORY[4:12]], [0])
    assert not overlaps([source], [MEMORY[:8]], [0])


def test_arrays_that_own_their_memory_overlap_where_they_are_the_same() -> None:
    one, two, three = (np.frombuffer(np.zeros(4, np.float32), np.uint8) for _ in range(3))
    assert not overlaps([one, two], [one, two], [0, 1])
    assert not overlaps([one, two], [three, two], [0, 1])
    assert overlaps([one, two], [two, three], [0, 1])
    assert not overlaps([one, two], [two, three], [0])
    assert overlaps([one, two], [three, three, one], [0])
    assert overlaps([one, two], [one, one], [0])
    assert overlaps([one], [one[8:]], [0])


# A range for each key: where its source begins, where its target begins, and its size.
RANGES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 9)), min_size=1, max_size=6
)


@given(RANGES, st.data())
def test_it_agrees_with_looking_at_every_pair(ranges: list[Any], data: st.DataObject) -> None:
    sources = [MEMORY[start : start + size] for start, _, size in ranges]
    targets = [MEMORY[start : start + size] for _, start, size in ranges]
    indices = data.draw(st.sets(st.integers(0, len(ranges) - 1)))
    found = overlaps(sources, targets, indices)
    wanted = one_by_one(sources, targets, indices)
    # An empty target within a source is none, but a copy does no harm there.
    has_empty = any(size == 0 for *_, size in ranges)
    assert found == wanted or (found and has_empty)
