"""Run work in blocks through stages, so that copies overlap with sums.

This module only computes numbers: how to cut keys into blocks, where each block lies when packed,
in which order the steps of all stages begin, and what each step waits for. It knows nothing of
GPUs, runs no step and does not wait; ``sums.py`` runs the steps on streams. ``BufferPool`` keeps
memory between calls. Any thread may call.

A stage puts each block into one of a few *slots*, from which the next stage takes it: sums to be
copied, copies to be sent. So a stage may run ahead of the next one by as many blocks as there are
slots. It must not overwrite a slot before the next stage is done with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class RowSpan(NamedTuple):
    """The elements from ``start`` to ``stop`` of a row: a key's values, flat."""

    row: int
    start: int
    stop: int


def cut(lengths: Sequence[int], most_elements: int, most_spans: int) -> list[list[RowSpan]]:
    """Cut into blocks of at most this many elements and spans, in order.

    ``lengths`` has the number of elements of each row; empty rows are skipped. A row that does
    not fit in the rest of a block is cut.
    """
    blocks: list[list[RowSpan]] = []
    room = 0
    for row, length in enumerate(lengths):
        start = 0
        while start < length:
            if not room or len(blocks[-1]) == most_spans:
                blocks.append([])
                room = most_elements
            stop = min(length, start + room)
            blocks[-1].append(RowSpan(row, start, stop))
            room -= stop - start
            start = stop
    return blocks


class Step(NamedTuple):
    """One stage's work on one block, and the (stage, block) pairs that must end first."""

    stage: int
    block: int
    after: tuple[tuple[int, int], ...]


def steps(num_blocks: int, slots: Sequence[int]) -> list[Step]:
    """Return all steps, in an order in which one thread may begin them.

    There is one more stage than ``slots``; ``slots[i]`` is the number of slots between stages i
    and i + 1. It is at least 2: with one slot, the two stages would only take turns. Each step
    stands in the list after the steps that it waits for. While a step blocks the thread (as the
    last stage may do), the earlier stages still have work. The steps of a stage begin in the order
    of the blocks, and must be executed in this order, as on a stream.
    """
    num_stages = len(slots) + 1
    result = []
    for time in range(num_blocks + num_stages - 1):
        for stage in range(num_stages):
            block = time - stage
            if not 0 <= block < num_blocks:
                continue
            after = []
            if stage > 0:
                after.append((stage - 1, block))
            if stage < num_stages - 1 and block >= slots[stage]:
                after.append((stage + 1, block - slots[stage]))
            result.append(Step(stage, block, tuple(after)))
    return result


class BufferPool(Generic[T]):
    """A pool of buffers that are expensive to allocate, such as pinned memory.

    ``allocate`` creates a buffer. The caller owns what ``take`` returns until it calls ``give``.
    The pool keeps at most ``most_kept`` free buffers. Any thread may call.
    """

    def __init__(self, allocate: Callable[[], T], most_kept: int) -> None:
        self._allocate = allocate
        self._most_kept = most_kept
        # Guards the list.
        self._lock = threading.Lock()
        self._free: list[T] = []

    def take(self) -> T:
        """Return a buffer with any contents. Raises the errors of ``allocate``."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._allocate()

    def give(self, buffer: T) -> None:
        """Take back a buffer that the caller has finished with; no work uses it."""
        with self._lock:
            if len(self._free) < self._most_kept:
                self._free.append(buffer)
