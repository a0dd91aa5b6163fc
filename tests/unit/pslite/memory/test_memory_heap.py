"""Buffers that are free again when nothing refers to them, whoever let go of them last."""

from __future__ import annotations

import gc
import os
import random
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from pslite.memory.heap import _LARGEST_BYTES as LARGEST_BYTES
from pslite.memory.heap import Heap
from pslite.memory.segment import HEADER_BYTES, PAGE_BYTES, addresses

needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd here")
# Python 3.12 warns of forks where any thread runs, such as those that tests before left asleep.
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
KINDS = [pytest.param(True, marks=needs_memfd), False]
MIB = 1 << 20

# Other tests of this process may have loaded libraries that warn of forking.
FORKS = pytest.mark.filterwarnings("ignore:.*fork:Warning")


def address_of(array: Any) -> int:
    address: int = np.asarray(array).__array_interface__["data"][0]
    return address


@pytest.mark.parametrize("shared", KINDS)
def test_a_buffer_is_flat_bytes_aligned_to_a_cache_line_and_writable(shared: bool) -> None:
    heap = Heap(shared=shared)
    for nbytes in (0, 1, 63, 64, 65, 4096, MIB):
        buffer = heap.buffer(nbytes)
        assert buffer.dtype == np.uint8
        assert buffer.shape == (nbytes,)
        assert address_of(buffer) % 64 == 0
        buffer[:] = 7
        assert (buffer == 7).all()


@pytest.mark.parametrize("shared", KINDS)
def test_living_buffers_never_share_a_byte_and_all_memory_comes_back(shared: bool) -> None:
    """A thousand buffers at random, of which half a hundred live at a time."""
    heap = Heap(shared=shared)
    chance = random.Random(5)
    alive: list[tuple[int, Any]] = []
    levels = []
    for round_ in range(10):
        for number in range(100 * round_ + 1, 100 * round_ + 101):
            buffer = heap.buffer(chance.choice([1, 100, 5000, 40_000]))
            buffer[:] = number % 251
            alive.append((number % 251, buffer))
            if len(alive) > 50:
                mark, oldest = alive.pop(chance.randrange(len(alive)))
                assert (oldest == mark).all()
                del oldest
        assert all((buffer == mark).all() for mark, buffer in alive)
        alive.clear()
        del buffer
        assert heap.used_bytes == 0
        levels.append(heap.nbytes)
    assert levels[1:] == levels[:-1]


def test_memory_is_used_again_rather_than_more_of_it() -> None:
    heap = Heap(shared=False)
    first = address_of(heap.buffer(10_000))
    assert [address_of(heap.buffer(10_000)) for _ in range(100)] == [first] * 100
    assert heap.nbytes == MIB


def test_a_view_of_any_kind_keeps_a_buffer() -> None:
    heap = Heap(shared=False)
    views = [
        lambda buffer: buffer[10:20],
        lambda buffer: buffer[:80].view(np.float64).reshape(2, 5),
        lambda buffer: buffer.data,
        lambda buffer: memoryview(buffer)[5:9].cast("b"),
        lambda buffer: np.frombuffer(buffer.data, np.uint8),
        lambda buffer: np.asarray(memoryview(buffer[1:])),
        lambda buffer: [buffer],
    ]
    for view in views:
        kept = view(heap.buffer(100))
        assert heap.used_bytes == 128
        del kept
        assert heap.used_bytes == 0


def test_what_another_thread_lets_go_of_last_is_free() -> None:
    heap = Heap(shared=False)
    buffers = [heap.buffer(1000) for _ in range(100)]

    def drop_some() -> None:
        for _ in range(25):
            buffers.pop()

    threads = [threading.Thread(target=drop_some) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heap.used_bytes == 0


def test_threads_that_take_and_drop_at_once_get_memory_of_their_own() -> None:
    heap = Heap(shared=False)
    torn: list[int] = []

    def work(mark: int) -> None:
        chance = random.Random(mark)
        for _ in range(300):
            buffer = heap.buffer(chance.choice([10, 3000, 70_000]))
            buffer[:] = mark
            if not (buffer == mark).all():
                torn.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torn == []
    assert heap.used_bytes == 0


class _Holder:
    """Refers to itself, so that only the garbage collection frees what it holds."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self.me = self


def test_a_collection_in_the_middle_of_a_call_frees_buffers_and_nothing_hangs() -> None:
    """Collections come whenever something is made: also where the heap makes a buffer."""
    heap = Heap(shared=False)
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(200):
            _Holder(heap.buffer(1000))
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert heap.used_bytes == 0
    assert heap.nbytes == MIB


def test_the_heap_doubles_and_what_is_larger_than_that_gets_a_segment_of_its_own() -> None:
    heap = Heap(shared=False)
    alive = [heap.buffer(MIB - HEADER_BYTES)]
    sizes = [heap.nbytes]
    for _ in range(3):
        alive.append(heap.buffer(sizes[-1] - HEADER_BYTES))
        sizes.append(heap.nbytes)
    assert sizes == [MIB, 2 * MIB, 4 * MIB, 8 * MIB]

    alive.append(heap.buffer(50 * MIB + 1))
    assert heap.nbytes == 58 * MIB + 64 // 64 * PAGE_BYTES + HEADER_BYTES


def test_segments_stop_doubling_at_a_size() -> None:
    heap = Heap(shared=False)
    large = heap.buffer(2 * LARGEST_BYTES)  # taken, and never touched
    before = heap.nbytes
    assert heap.buffer(1).nbytes == 1
    assert heap.nbytes <= before + LARGEST_BYTES
    assert large.nbytes == 2 * LARGEST_BYTES


# -- what can be shared -------------------------------------------------------------------


@needs_memfd
def test_a_buffer_is_found_by_its_address_whatever_part_of_it_is_asked_for() -> None:
    heap = Heap(shared=True)
    small, large = heap.buffer(5000), heap.buffer(3 * MIB)
    small_place, large_place = (heap.find(address_of(b), b.nbytes) for b in (small, large))
    assert small_place == (1, HEADER_BYTES)
    assert large_place == (2, HEADER_BYTES)
    assert heap.find(address_of(large) + 100, 8) == (2, HEADER_BYTES + 100)

    (_, first), (_, second) = heap.segments()
    beyond = second.address + second.nbytes
    assert heap.find(beyond - 8, 8) == (2, second.nbytes - 8)
    assert heap.find(beyond - 8, 9) is None
    assert heap.find(min(first.address, second.address) - 1, 1) is None
    own = np.empty(100, np.uint8)
    assert heap.find(address_of(own), 100) is None


@pytest.mark.parametrize("shared", KINDS)
def test_the_stretch_of_a_buffer_is_whole_pages_whatever_part_is_asked_for(shared: bool) -> None:
    heap = Heap(shared=shared)
    small, large = heap.buffer(5000), heap.buffer(3 * MIB)
    wholes = [Heap.whole_of(buffer) for buffer in (small, large)]
    for buffer, whole in zip((small, large), wholes, strict=True):
        assert whole is not None
        address, nbytes, segment = whole
        assert (address % PAGE_BYTES, nbytes % PAGE_BYTES) == (0, 0)
        assert address + HEADER_BYTES == address_of(buffer)
        assert address_of(buffer) + len(buffer) <= address + nbytes
        for part in (buffer[7:], buffer[10:10], buffer[:80].view(np.float64).reshape(2, 5)):
            assert Heap.whole_of(part) == whole
        assert segment.address == address
    assert wholes[0] != wholes[1]
    assert Heap.whole_of(heap.buffer(0)) == wholes[0]


def test_memory_of_no_heap_lies_in_no_stretch() -> None:
    own = np.empty(100, np.uint8)
    for other in (own, own[10:20], np.frombuffer(b"bytes", np.uint8)):
        assert Heap.whole_of(other) is None


def test_the_owner_of_a_stretch_goes_with_the_last_buffer_once_the_heap_is_closed() -> None:
    heap = Heap(shared=False)
    buffer = heap.buffer(100)
    whole = Heap.whole_of(buffer)
    assert whole is not None
    owner = weakref.ref(whole[2])
    del whole
    heap.close()
    part = buffer[5:]
    del buffer
    assert owner() is not None
    assert Heap.whole_of(part) is not None
    del part
    assert owner() is None


@needs_memfd
def test_peers_are_told_of_each_new_segment_and_only_then() -> None:
    told = []
    heap = Heap(shared=True, announce=lambda: told.append(len(heap.segments())))
    alive = [heap.buffer(1000) for _ in range(10)]
    assert told == [1]
    alive.append(heap.buffer(2 * MIB))
    assert told == [1, 2]
    assert [number for number, _ in heap.segments()] == [1, 2]


def test_private_memory_is_offered_to_nobody() -> None:
    told: list[None] = []
    heap = Heap(shared=False, announce=lambda: told.append(None))
    buffer = heap.buffer(5000)
    assert heap.segments() == []
    assert heap.find(address_of(buffer), 5000) is None
    assert told == []


@needs_memfd
def test_what_is_beyond_the_limit_is_private() -> None:
    heap = Heap(shared=True, limit_bytes=4 * MIB)
    alive = [heap.buffer(MIB // 2) for _ in range(12)]
    shared = sum(segment.nbytes for _, segment in heap.segments())
    assert 3 * MIB <= shared <= 4 * MIB
    places = [heap.find(address_of(buffer), buffer.nbytes) for buffer in alive]
    assert None not in places[:4]
    assert places[-1] is None
    # Shared memory that is free again is taken first.
    del alive[0]
    again = heap.buffer(MIB // 2)
    assert heap.find(address_of(again), again.nbytes) == places[0]


@needs_memfd
def test_a_buffer_larger_than_the_limit_is_private_and_smaller_ones_are_still_shared() -> None:
    heap = Heap(shared=True, limit_bytes=MIB)
    large, small = heap.buffer(MIB), heap.buffer(5000)
    assert heap.find(address_of(large), large.nbytes) is None
    assert heap.find(address_of(small), small.nbytes) is not None


def test_without_memfd_it_warns_once_and_memory_is_private(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def refuse(name: str, flags: int) -> int:
        asked.append(name)
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse, raising=False)
    lines: list[str] = []
    heap = Heap(shared=True, warn=lines.append)
    alive = [heap.buffer(MIB) for _ in range(3)]

    assert lines == [
        "cannot create shared memory ([Errno 24] Too many open files), so values travel by TCP, "
        "which is slower"
    ]
    assert len(asked) == 1
    assert heap.segments() == []
    assert len({address_of(buffer) for buffer in alive}) == 3


def test_a_system_without_memfd_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    lines: list[str] = []
    Heap(shared=True, warn=lines.append).buffer(10)
    assert lines == [
        "cannot create shared memory (this system has no memfd_create), so values travel by TCP, "
        "which is slower"
    ]


@needs_memfd
def test_after_the_end_nothing_is_found_and_the_last_buffer_closes_its_segment() -> None:
    heap = Heap(shared=True)
    buffer = heap.buffer(5000)
    ((_, segment),) = heap.segments()
    assert segment.ticket is not None
    fd = segment.ticket.fd
    del segment
    heap.close()

    assert heap.segments() == []
    assert heap.find(address_of(buffer), 5000) is None
    assert heap.nbytes == heap.used_bytes == 0
    buffer[:] = 1  # is still there
    os.fstat(fd)
    del buffer
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert heap.buffer(10).nbytes == 10  # private, for who comes late
    assert heap.segments() == []


@needs_memfd
@forks
@FORKS
def test_a_forked_child_neither_frees_nor_reuses_what_its_parent_uses() -> None:
    heap = Heap(shared=True)
    buffer = heap.buffer(5000)
    buffer[:] = 3
    child = os.fork()
    if child == 0:
        del buffer
        mine = heap.buffer(5000)  # of the child's own record, which nobody else sees
        os._exit(0 if mine.nbytes == 5000 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (buffer == 3).all()
    assert heap.find(address_of(buffer), 5000) is not None
    assert heap.used_bytes == 5056


@forks
@FORKS
def test_a_forked_child_has_a_copy_of_private_memory() -> None:
    heap = Heap(shared=False)
    buffer = heap.buffer(8)
    buffer[:] = 3
    child = os.fork()
    if child == 0:
        buffer[:] = 4
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (buffer == 3).all()


@needs_memfd
def test_buffers_that_lie_one_behind_the_other_are_one_row_that_keeps_them() -> None:
    heap = Heap(shared=True)
    first, second, third = (heap.buffer(size, lasting=True) for size in (128, 64, 100))
    for number, buffer in enumerate((first, second, third)):
        buffer[:] = number
    (row,) = heap.rows([first, second, third]) or ()
    assert row.tolist() == [0] * 128 + [1] * 64 + [2] * 100
    assert [each.tolist() for each in heap.rows([third, first]) or ()] == [[2] * 100, [0] * 128]
    used = heap.used_bytes
    del first, second, third
    gc.collect()
    assert heap.used_bytes == used
    assert heap.buffer(128) is not None
    assert row.tolist() == [0] * 128 + [1] * 64 + [2] * 100
    del row
    assert heap.used_bytes < used


@needs_memfd
def test_memory_that_peers_cannot_map_makes_no_row() -> None:
    heap = Heap(shared=True)
    mine, other = heap.buffer(64), np.zeros(64, np.uint8)
    assert heap.rows([other]) is None
    assert heap.rows([mine, other]) is None
    assert heap.rows([]) is None
    assert Heap(shared=False).rows([mine]) is None


def test_of_many_arrays_in_ordinary_memory_only_the_first_is_looked_at() -> None:
    unused: Any = object()
    assert Heap(shared=True).rows([np.zeros(64, np.uint8), unused]) is None


def test_addresses_of_read_only_and_empty_arrays_too() -> None:
    array = np.zeros(64, np.uint8)
    start = addresses([array])[0]
    assert addresses([array[8:], array[32:]]) == [start + 8, start + 32]
    read_only = array.view()
    read_only.flags.writeable = False
    assert addresses([array, read_only[4:]]) == [start, start + 4]
    assert addresses([array[:0], array[8:]])[1] == start + 8
    assert addresses([]) == []


def test_lasting_buffers_lie_behind_each_other_though_there_are_holes_before() -> None:
    heap = Heap(shared=False)
    hole = heap.buffer(4096)
    before = heap.buffer(64)
    big = heap.buffer(4 * MIB)
    del hole
    first, second = heap.buffer(640, lasting=True), heap.buffer(64, lasting=True)
    assert address_of(second) == address_of(first) + 640
    assert address_of(heap.buffer(64)) < address_of(before)
    assert big.nbytes == 4 * MIB
