"""Which neighbouring parts a round updates as one array, and which jobs are one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvstore.optimizer import SGD
from kvstore.protocol.requests import PartEntry
from kvstore.server.memory import Arena, StoreState
from kvstore.server.part_table import PartTable, joined, neighbours
from pslite.errors import UsageError
from pslite.plane import Batch, Job, Piece

FLOAT = np.dtype(np.float32)
PART_BYTES = 8
RANKS = (0, 1)


@pytest.fixture
def arena() -> Arena:
    return arena_of(StoreState(RANKS))


def arena_of(store: StoreState) -> Arena:
    entries = [PartEntry(number, f"key {number}", True, 2, FLOAT) for number in (1, 2, 3)]
    values = [np.zeros(PART_BYTES, np.uint8)] * 3
    return Arena(store, 0, entries, values, np.empty(24, np.uint8))


def table_of(arena: Arena) -> PartTable:
    table = PartTable(lambda nbytes: np.empty(nbytes, np.uint8))
    for part in arena.parts:
        table.add(part)
    return table


def two_frames() -> list[memoryview]:
    """What two workers push: the second ten times as much."""
    return [(np.arange(6, dtype=FLOAT) * times).view(np.uint8).data for times in (1, 10)]


def job_of(frames: Sequence[memoryview], *parts: int, round_: int = 1, wanted: bool = False) -> Job:
    """A round of parts that lie one behind the other in a frame of each worker."""
    start, sizes = PART_BYTES * (parts[0] - 1), (PART_BYTES,) * len(parts)
    pieces = tuple(Piece(frame, start, start + sum(sizes)) for frame in frames)
    return Job(parts, sizes, sizes, Batch(tuple((rank, round_) for rank in RANKS), pieces), wanted)


def updates_of(table: PartTable, job: Job, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many values each update of a round has."""
    lengths: list[int] = []
    update = SGD.update

    def counted(
        self: SGD, weight: np.ndarray[tuple[int], np.dtype[np.float32]], *rest: object
    ) -> None:
        lengths.append(len(weight))
        update(self, weight, *rest)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.arrays.cpu.kernels.native", lambda: None)
        patch.setattr(SGD, "update", counted)
        assert table.apply(job) is None
    return lengths


# -- the parts of one job -----------------------------------------------------------------


def test_neighbours_are_one_array_whatever_was_pushed_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = arena_of(StoreState(RANKS, optimizer=SGD(learning_rate=-1.0)))
    table, frames = table_of(arena), two_frames()
    for _ in range(3):
        assert updates_of(table, job_of(frames, 1, 2, 3), monkeypatch) == [6]
    assert arena.weight.tolist() == [0, 33, 66, 99, 132, 165]
    assert [part.count for part in arena.parts] == [3, 3, 3]


def test_a_part_between_them_ends_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(arena_of(StoreState(RANKS, optimizer=SGD())))
    assert updates_of(table, job_of(two_frames(), 1, 3), monkeypatch) == [2, 2]
    assert updates_of(table, job_of(two_frames(), 2, 1), monkeypatch) == [2, 2]


def test_parts_that_were_updated_more_often_are_another_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = arena_of(StoreState(RANKS, optimizer=SGD()))
    table, frames = table_of(arena), two_frames()
    assert updates_of(table, job_of(frames, 1, 2, 3), monkeypatch) == [6]
    assert updates_of(table, job_of(frames, 3), monkeypatch) == [2]
    assert updates_of(table, job_of(frames, 1, 2, 3), monkeypatch) == [4, 2]
    assert [part.count for part in arena.parts] == [2, 2, 3]


def test_parts_are_one_array_again_once_another_optimizer_counts_from_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = StoreState(RANKS)
    arena = arena_of(store)
    table, frames = table_of(arena), two_frames()
    assert table.apply(job_of(frames, 3)) is None
    store.optimizer = SGD()
    assert updates_of(table, job_of(frames, 1, 2, 3), monkeypatch) == [4, 2]
    assert updates_of(table, job_of(frames, 1, 2, 3), monkeypatch) == [6]
    assert [part.count for part in arena.parts] == [2, 2, 2]


def test_keys_with_a_rate_of_their_own_are_another_array(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = SGD(learning_rate=-1.0, lr_mult={"key 2": 2.0})
    arena = arena_of(StoreState(RANKS, optimizer=optimizer))
    assert updates_of(table_of(arena), job_of(two_frames(), 1, 2, 3), monkeypatch) == [2, 2, 2]
    assert arena.weight.tolist() == [0, 11, 44, 66, 44, 55]


def test_a_part_that_was_deleted_meanwhile_takes_no_other_with_it(arena: Arena) -> None:
    """Its round was complete, and waited for the pool, when a worker deleted the key."""
    table = table_of(arena)
    table.remove(2)
    first, second, third = table.apply(job_of(two_frames(), 1, 2, 3)) or ()
    assert (first, type(second), third) == (None, UsageError, None)
    assert arena.weight.tolist() == [0, 11, 0, 0, 44, 55]
    assert [part.count for part in arena.parts] == [1, 0, 1]


def test_a_store_whose_optimizer_cannot_take_a_dtype_says_so_in_each_round() -> None:
    entries = [PartEntry(1, "key 1", True, 2, np.dtype(np.int32))]
    store = StoreState(RANKS, optimizer=SGD())
    arena = Arena(store, 0, entries, [np.zeros(8, np.uint8)], np.empty(8, np.uint8))
    table = table_of(arena)
    for round_ in (1, 2):
        (error,) = table.apply(job_of(two_frames(), 1, round_=round_)) or ()
        assert "needs float weights" in str(error)


# -- several jobs -------------------------------------------------------------------------


def test_jobs_whose_contributions_are_neighbours_are_one(arena: Arena) -> None:
    frames = two_frames()
    (group,) = neighbours([job_of(frames, 1), job_of(frames, 2, 3)])
    assert joined(group) == job_of(frames, 1, 2, 3)
    assert table_of(arena).apply(joined(group)) is None
    assert arena.weight.tolist() == [0, 11, 22, 33, 44, 55]


def test_a_contribution_that_lies_elsewhere_or_has_another_round_begins_a_group() -> None:
    frames = two_frames()
    first, second = job_of(frames, 1), job_of(frames, 2)
    others = [
        job_of(two_frames(), 2),
        job_of(frames, 3),
        job_of(frames, 2, round_=2),
        job_of(frames, 2, wanted=True),
        second._replace(is_formed=True),
    ]
    for other in others:
        assert list(neighbours([first, other])) == [[first], [other]]
    assert list(neighbours([first, second, first])) == [[first, second], [first]]
    assert joined([first]) is first
