"""Ranges of memory that are handed out and come back."""

from __future__ import annotations

import itertools
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pslite.memory import heap as module
from pslite.memory.heap import FreeList

SIZE = 200


def ranges_of(free: FreeList) -> list[tuple[int, int]]:
    """(start, size) of each free range, found out by taking them all."""
    found: list[tuple[int, int]] = []
    for size in range(SIZE, 0, -1):
        while (start := free.take(size)) is not None:
            found.append((start, size))
    for start, size in found:
        free.give_back(start, size)
    return sorted(found)


@given(st.lists(st.one_of(st.integers(1, 60), st.integers(-10, -1)), max_size=60))
def test_ranges_never_overlap_and_all_that_comes_back_is_one_range_again(steps: list[int]) -> None:
    """A positive step takes so much, a negative one gives back one of those that are out."""
    free = FreeList(SIZE)
    out: list[tuple[int, int]] = []
    for step in steps:
        if step > 0:
            start = free.take(step)
            if start is not None:
                assert start >= 0
                assert start + step <= SIZE
                assert all(start + step <= at or at + size <= start for at, size in out)
                out.append((start, step))
        elif out:
            free.give_back(*out.pop(step % len(out)))
        assert free.free_bytes == SIZE - sum(size for _, size in out)
    for start, size in out:
        free.give_back(start, size)
    assert ranges_of(free) == [(0, SIZE)]


@given(st.permutations(range(8)))
def test_neighbours_are_joined_in_whatever_order_they_come_back(order: list[int]) -> None:
    free = FreeList(80)
    starts = [free.take(10) for _ in range(8)]
    assert starts == list(range(0, 80, 10))
    for index in order:
        free.give_back(10 * index, 10)
    assert free.take(80) == 0


def test_the_lowest_room_that_is_large_enough_is_taken() -> None:
    free = FreeList(100)
    for _ in range(5):
        free.take(20)
    free.give_back(0, 20)
    free.give_back(40, 40)

    assert free.take(30) == 40
    assert free.take(20) == 0
    assert free.take(11) is None
    assert free.take(10) == 70


def test_nothing_is_handed_out_of_nothing() -> None:
    assert FreeList(0).take(1) is None


def stops_at(line: int) -> Any:
    """A trace function that interrupts before the ``line``-th line that runs in the module."""
    left = [line]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    return trace


@pytest.mark.parametrize("line", range(1, 40))
def test_an_interrupt_at_any_line_may_lose_a_range_and_never_gives_one_out_twice(
    line: int,
) -> None:
    free = FreeList(SIZE)
    held = {(free.take(10), 10) for _ in range(10)}
    before = sys.gettrace()
    sys.settrace(stops_at(line))
    try:
        for start in (20, 40, 30, 0):
            held.discard((start, 10))
            free.give_back(start, 10)
        held.add((free.take(30), 30))
        held.add((free.take(5), 5))
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)

    ranges = sorted([*ranges_of(free), *held])  # type: ignore[type-var]
    for (start, size), (following, _) in itertools.pairwise(ranges):
        assert start + size <= following  # type: ignore[operator]
    assert sum(ranges[-1]) <= SIZE  # type: ignore[arg-type]
