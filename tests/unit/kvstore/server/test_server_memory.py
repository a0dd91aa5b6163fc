"""Rounds applied to the parts of an arena."""

from __future__ import annotations

import numpy as np

from kvstore.protocol.requests import PartEntry
from kvstore.server.memory import Arena, StoreState
from kvstore.server.part_table import PartTable
from pslite.errors import UsageError
from pslite.plane import Job, Piece
from pslite.protocol.rounds import Batch

FLOAT = np.dtype(np.float32)


def test_a_part_that_was_deleted_meanwhile_takes_no_other_with_it() -> None:
    """Its round was complete, and waited for the pool, when a worker deleted the key."""
    entries = [PartEntry(number, f"key {number}", True, 2, FLOAT) for number in (1, 2, 3)]
    arena = Arena(StoreState((0,)), 0, entries, [np.zeros(8, np.uint8)] * 3, np.empty(24, np.uint8))
    table = PartTable()
    for part in arena.parts:
        table.add(part)
    table.remove(2)
    frame = np.arange(6, dtype=FLOAT).view(np.uint8).data
    jobs = [
        Job((number,), (8,), (8,), Batch(((0, 1),), (Piece(frame, 8 * (number - 1), 8 * number),)))
        for number in (1, 2, 3)
    ]
    first, second, third = table.apply(jobs, [None] * len(jobs))
    assert (first, third) == (None, None)
    assert second is not None and [type(error) for error in second] == [UsageError]
    assert arena.weight.tolist() == [0, 1, 0, 0, 4, 5]
    assert [part.count for part in arena.parts] == [1, 0, 1]
