"""Which rounds of neighbouring parts are worked on as one array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvstore.protocol.requests import PartEntry
from kvstore.server.apply import PartRun, Stretch, add_run
from kvstore.server.memory import Arena, Part, StoreState
from pslite.plane import Piece

FLOAT = np.dtype(np.float32)
PART_BYTES = 8


@pytest.fixture
def arena() -> Arena:
    entries = [PartEntry(number, f"key {number}", True, 2, FLOAT) for number in (1, 2, 3)]
    return Arena(
        StoreState((0, 1)), 0, entries, [np.zeros(PART_BYTES, np.uint8)] * 3, np.empty(24, np.uint8)
    )


def alone(part: Part) -> Stretch:
    return Stretch(part.arena, None, (part,), 0, 0)


def from_each_rank(frames: Sequence[memoryview], index: int) -> list[Piece]:
    """What two workers push of a part: the piece that has this place in a frame of each."""
    return [Piece(frame, PART_BYTES * index, PART_BYTES * (index + 1)) for frame in frames]


def span(run: PartRun) -> tuple[int, int]:
    return run.stretch.parts[0].start, run.stop


def two_frames() -> list[memoryview]:
    return [(np.arange(6, dtype=FLOAT) * times).view(np.uint8).data for times in (1, 10)]


def test_jobs_of_neighbours_whose_contributions_are_neighbours_are_one_run(arena: Arena) -> None:
    frames = two_frames()
    runs: list[PartRun] = []
    for index, part in enumerate(arena.parts):
        add_run(runs, index, alone(part), from_each_rank(frames, index), None)
    (run,) = runs
    run.apply()
    assert span(run) == (0, 6)
    assert run.members == [(index, range(1)) for index in range(3)]
    assert arena.weight.tolist() == [0, 11, 22, 33, 44, 55]
    assert [part.count for part in arena.parts] == [1, 1, 1]


def test_a_contribution_that_lies_elsewhere_ends_a_run(arena: Arena) -> None:
    frames, others = two_frames(), two_frames()
    runs: list[PartRun] = []
    for index, (part, own) in enumerate(zip(arena.parts, (frames, frames, others), strict=True)):
        add_run(runs, index, alone(part), from_each_rank(own, index), None)
    assert list(map(span, runs)) == [(0, 4), (4, 6)]


def test_a_part_that_is_left_out_ends_a_run(arena: Arena) -> None:
    frames = two_frames()
    runs: list[PartRun] = []
    for index in (0, 2):
        add_run(runs, index, alone(arena.parts[index]), from_each_rank(frames, index), None)
    assert list(map(span, runs)) == [(0, 2), (4, 6)]


def test_parts_of_different_counts_are_updated_one_by_one(arena: Arena) -> None:
    whole = Stretch(arena, None, tuple(arena.parts), 0, 0)
    assert list(whole.of_one_count()) == [whole]
    arena.parts[1].count = 1
    assert [(each.parts, each.first, each.offset) for each in whole.of_one_count()] == [
        ((part,), index, PART_BYTES * index) for index, part in enumerate(arena.parts)
    ]


def test_a_part_continues_a_stretch_where_it_is_next_in_the_arena_and_in_the_list(
    arena: Arena,
) -> None:
    first, second, third = arena.parts
    assert alone(first).is_followed_by(second, None, 1)
    assert not alone(first).is_followed_by(third, None, 1)
    assert not alone(first).is_followed_by(second, None, 2)
