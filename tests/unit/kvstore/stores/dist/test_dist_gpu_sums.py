"""What a worker sends of arrays on the host, and which memory is page-locked for those on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.stores.arguments import spec_of
from kvstore.stores.dist.gpu_sums import PinnedMemory, split, sums_of
from pslite import Postoffice
from pslite.memory.heap import Heap


def no_buffer(nbytes: int) -> Any:
    pytest.fail("nothing here is on a GPU")


def never(memory: Any) -> bool:
    pytest.fail("nothing here is on a GPU")


def test_values_on_the_host_are_added_there_and_a_single_one_is_not_copied() -> None:
    rng = np.random.default_rng(0)
    rows = [[rng.normal(size=(2, 3)) for _ in range(3)], [rng.normal(size=4)]]
    sums = sums_of(rows, [spec_of(row[0]) for row in rows], no_buffer, never)
    total = (rows[0][0] + rows[0][1]) + rows[0][2]
    assert sums.memories[0].tobytes() == total.tobytes()
    assert np.shares_memory(sums.memories[1], rows[1][0])
    assert [memory.dtype for memory in sums.memories] == [np.uint8, np.uint8]
    assert not sums.are_ours


def test_sums_alone_are_memory_of_ours() -> None:
    rows = [[np.ones(2), np.ones(2)]]
    assert sums_of(rows, [spec_of(rows[0][0])], no_buffer, never).are_ours


def test_a_memory_is_split_into_neighbouring_parts() -> None:
    memory = np.arange(10, dtype=np.uint8)
    parts = split(memory, [3, 0, 7])
    assert [part.tolist() for part in parts] == [[0, 1, 2], [], [3, 4, 5, 6, 7, 8, 9]]
    assert np.shares_memory(parts[2], memory)


class Stretch:
    """Owner of some memory."""


def test_each_stretch_of_memory_is_locked_once_and_forgotten_with_its_owner() -> None:
    stretches = {1: Stretch(), 2: Stretch()}
    locked: list[tuple[int, int]] = []

    def lock(address: int, nbytes: int, owner: object) -> bool:
        locked.append((address, nbytes))
        return owner is stretches[1]

    def whole_of(buffer: np.ndarray[Any, Any]) -> tuple[int, int, object] | None:
        number = int(buffer[0])
        return (number * 1000, 64, stretches[number]) if number in stretches else None

    pinned = PinnedMemory(whole_of, lock)
    first, second, other = (np.full(4, number, np.uint8) for number in (1, 2, 3))
    assert [pinned.holds(first), pinned.holds(first)] == [True, True]
    assert [pinned.holds(second), pinned.holds(second)] == [False, False]
    assert not pinned.holds(other)
    assert locked == [(1000, 64), (2000, 64)]
    stretches[1] = Stretch()  # the segment is gone, and another lies at its address
    assert pinned.holds(first)
    assert locked[2:] == [(1000, 64)]


@pytest.mark.parametrize("shared", [True, False])
def test_buffers_of_a_node_share_the_stretches_that_are_locked(shared: bool) -> None:
    locked: list[tuple[int, int]] = []

    def lock(address: int, nbytes: int, owner: object) -> bool:
        locked.append((address, nbytes))
        return True

    pinned = PinnedMemory(Postoffice.whole_of, lock)
    heap = Heap(shared=shared)
    buffers = [heap.buffer(5000) for _ in range(10)]
    assert all(pinned.holds(buffer) for buffer in buffers)
    assert len(locked) == 1
    large = heap.buffer(3 << 20)
    assert all(pinned.holds(part) for part in split(large, [1 << 20, 0, 2 << 20]))
    assert len(locked) == 2
    for buffer, (address, nbytes) in zip((buffers[-1], large), locked, strict=True):
        start = buffer.__array_interface__["data"][0]
        assert address <= start
        assert start + len(buffer) <= address + nbytes
    assert not pinned.holds(np.zeros(10, np.uint8))


def test_a_stretch_that_could_not_be_locked_is_not_tried_again() -> None:
    tried: list[int] = []

    def refuse(address: int, nbytes: int, owner: object) -> bool:
        tried.append(address)
        return False

    pinned = PinnedMemory(Postoffice.whole_of, refuse)
    heap = Heap(shared=False)
    assert not any(pinned.holds(heap.buffer(100)) for _ in range(5))
    assert len(tried) == 1
