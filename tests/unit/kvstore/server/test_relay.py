"""Values that a relay gets from owners go to their places, neighbours at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.protocol.requests import PartEntry
from kvstore.server.memory import Arena, Part, StoreState
from kvstore.server.relay import write_values
from pslite.plane import Piece

SIZES = [3, 1, 4, 2]


def parts_of(sizes: list[int], store: StoreState) -> list[Part]:
    dtype = np.dtype(np.float32)
    entries = [PartEntry(n, f"k{n}", True, size, dtype, 1) for n, size in enumerate(sizes)]
    memory = np.zeros(4 * sum(sizes), np.uint8)
    arena = Arena(store, -1, entries, [memory[: 4 * size] for size in sizes], memory)
    return arena.parts


def pieces_of(values: np.ndarray[Any, Any], sizes: list[int], frames: list[int]) -> list[Piece]:
    """The values of these parts, in frames with so many parts each."""
    found, rest = [], iter(sizes)
    for count in frames:
        mine = [next(rest) for _ in range(count)]
        frame = values[: sum(mine)].tobytes()
        values, start = values[sum(mine) :], 0
        for size in mine:
            found.append(Piece(memoryview(frame), start, start + 4 * size))
            start += 4 * size
    return found


@pytest.mark.parametrize("frames", [[4], [1, 3], [2, 2], [1, 1, 1, 1], [3, 1]])
@pytest.mark.parametrize("num_arenas", [1, 2])
def test_each_part_gets_its_value(frames: list[int], num_arenas: int) -> None:
    store = StoreState((0, 1))
    if num_arenas == 1:
        parts = parts_of(SIZES, store)
    else:
        parts = [*parts_of(SIZES[:2], store), *parts_of(SIZES[2:], store)]
    values = np.arange(1, 1 + sum(SIZES), dtype=np.float32)
    write_values(parts, pieces_of(values, SIZES, frames))
    np.testing.assert_array_equal(np.concatenate([part.weight for part in parts]), values)
    assert all(part.arena.changes for part in parts)


def test_parts_in_another_order_and_some_parts_alone() -> None:
    parts = parts_of(SIZES, StoreState((0, 1)))
    chosen = [parts[2], parts[0]]
    values = np.arange(1, 8, dtype=np.float32)
    write_values(chosen, pieces_of(values, [4, 3], [2]))
    assert [part.weight.tolist() for part in parts] == [[5, 6, 7], [0], [1, 2, 3, 4], [0, 0]]
