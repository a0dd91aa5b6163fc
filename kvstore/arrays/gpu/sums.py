"""Sum, update and copy many keys at a time on GPUs, and bring sums to the host.

This module uses CuPy only through ``cupy.py``, and loads it at the first call.
``stores/local/device.py`` and ``pipeline.py`` decide what to do, so that part is tested without a
GPU; this module queues the work. Several threads may call at once. Read next: ``kernels.py`` for
the kernel, ``pipeline.py`` for the stages.

**Order.** Arithmetic is queued on the calling thread's current stream, after the work that the
caller queued there. Copies that overlap it have their own streams, one for each device and purpose,
and wait for events. Before it returns or raises, every function waits for all the work that it has
queued: then the caller may use its arrays again, and scratch memory may be freed. Arrays on another
GPU are written after the work that the caller queued on its current stream there.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays import NativeArray
from kvstore.arrays.cpu.threads import shared
from kvstore.arrays.cupy import (
    Rows,
    addresses_of,
    current_stream,
    devices_of,
    load,
    on_device,
    own_stream,
    wait_for,
)
from kvstore.arrays.gpu.kernels import (
    NAME,
    OPTIONS,
    THREADS,
    Kernel,
    KernelParameters,
    Lengths,
    Pointers,
    packed,
    rows_of,
    source_of,
    tables,
)
from kvstore.arrays.gpu.pipeline import BufferPool, cut, steps

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

BLOCK_BYTES = 8 << 20
"""The size of a block: large compared with the microseconds that a step costs."""
SLOTS = 3
"""One slot each for the block that is computed, the one that is copied, and the one in transit."""


def update(home: int, kernel: Kernel, numbers: KernelParameters, copies: Rows, own: Rows) -> None:
    """Add the copies of each key and set or update its weight, on GPU ``home``.

    ``own`` has for each key the store's arrays on ``home``, in the order of
    ``Kernel.num_columns`` after the copies. ``copies`` are only read and may be on any GPUs. Those
    on another GPU pass through scratch memory of ``home`` while earlier blocks are added.
    """
    with on_device(home):
        adding = _Adding(home, kernel, numbers, copies, addresses_of(own))
        stages = [Stage(current_stream(home), adding.add)]
        if adding.is_scattered:
            stages.insert(0, Stage(adding.fetching_stream(), adding.fetch))
        _run(len(adding.blocks), stages)


def sum_to_host(
    home: int, kernel: Kernel, copies: Rows, out: Bytes, is_pinned: Callable[[Bytes], bool]
) -> None:
    """Add the copies of each key up on GPU ``home`` and bring the sums to ``out``.

    ``kernel`` has the formula ``"sum"``. ``out`` is the caller's flat host memory, as long as all
    sums, which it receives one after the other. Sums leave the GPU while later ones are added:
    directly to ``out`` if ``is_pinned`` says that it is page-locked (``is_pinned`` may lock it,
    for this GPU), else through page-locked blocks, from which all cores copy.
    """
    pinned: list[Bytes] = []
    with on_device(home):
        adding = _Adding(home, kernel, KernelParameters(), copies, None)
        leaving = _Leaving(adding, out, pinned)
        stages = [
            Stage(current_stream(home), adding.add),
            Stage(own_stream(home, "out"), leaving.go),
        ]
        if adding.is_scattered:
            stages.insert(0, Stage(adding.fetching_stream(), adding.fetch))
        if not is_pinned(out):
            pinned += [_pinned.take() for _ in range(SLOTS)]
            stages.append(Stage(None, leaving.arrive))
        _run(len(adding.blocks), stages)
    for buffer in pinned:
        _pinned.give(buffer)


def lock_pages(address: int, nbytes: int, owner: object) -> bool:
    """Make memory of this process page-locked, so that GPUs copy to it at full speed.

    The lock ends with ``owner``, which keeps the memory mapped. Returns False if the system does
    not allow it, or if other code has locked the memory.
    """
    cuda = load().cuda
    try:
        cuda.runtime.hostRegister(address, nbytes, _PORTABLE)
    except cuda.runtime.CUDARuntimeError:
        return False
    ending = weakref.finalize(owner, cuda.runtime.hostUnregister, address)
    ending.atexit = False  # the driver unlocks it at exit, and may be unloaded before this runs
    return True


_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all GPUs."""

_LEAST_SHARED_BYTES = 1 << 20
"""One thread copies fewer bytes than this before another thread would wake up."""


def _new_pinned_block() -> Bytes:
    memory = load().cuda.alloc_pinned_memory(BLOCK_BYTES)
    return np.frombuffer(memory, np.uint8, BLOCK_BYTES)


_pinned: BufferPool[Bytes] = BufferPool(_new_pinned_block, most_kept=4 * SLOTS)


# -- stages --------------------------------------------------------------------------------


class Stage(NamedTuple):
    """One operation on each block: queued on a stream, or run by the calling thread."""

    stream: Any | None
    work: Callable[[int], None]


def _run(num_blocks: int, stages: Sequence[Stage]) -> None:
    """Run all stages for all blocks on this device, and wait for the end."""
    events: dict[tuple[int, int], Any] = {}
    streams = [stage.stream for stage in stages]
    try:
        for number, block, after in steps(num_blocks, [SLOTS] * (len(stages) - 1)):
            stream = streams[number]
            # Work of this thread itself has no event.
            for event in [events[step] for step in after if step in events]:
                if stream is None:
                    event.synchronize()
                else:
                    stream.wait_event(event)
            stages[number].work(block)
            if stream is not None and len(stages) > 1:
                events[number, block] = stream.record(_new_event())
    finally:
        # Wait for all of them, even if an interrupt ends one of these waits: the memory that
        # they write may have another owner afterwards.
        with contextlib.ExitStack() as waits:
            for stream in streams:
                if stream is not None:
                    waits.callback(stream.synchronize)


def _new_event() -> Any:
    return load().cuda.Event(disable_timing=True)


class _Adding:
    """The sums and updates of some keys on one GPU, block by block.

    ``own`` has the addresses of the arrays to set, one row for each key. If it is None, the sums of
    a block go to a slot of scratch memory, one after the other.
    """

    def __init__(
        self,
        home: int,
        kernel: Kernel,
        numbers: KernelParameters,
        copies: Rows,
        own: Pointers | None,
    ) -> None:
        self.home, self._kernel = home, kernel
        self.itemsize = np.dtype(kernel.dtype).itemsize
        self._numbers = numbers
        self._copies = addresses_of(copies)
        self._devices = devices_of(copies)
        self._is_elsewhere = _are_elsewhere(self._devices, home)
        self.is_scattered = bool(self._is_elsewhere.any())
        self._has_scratch = own is None
        self._own = np.zeros((len(copies), 1), np.uint64) if own is None else own
        is_cut = self.is_scattered or self._has_scratch
        most_elements = BLOCK_BYTES // self.itemsize if is_cut else sys.maxsize
        self.blocks = cut([row[0].size for row in copies], most_elements, kernel.num_rows)
        self._scratch: list[NativeArray] = []  # keeps the memory of the next two
        num_fetched = SLOTS * kernel.num_copies if self.is_scattered else 0
        self._fetched = self._new_scratch(num_fetched)
        self._sums = self._new_scratch(SLOTS if self._has_scratch else 0)

    def _new_scratch(self, num_blocks: int) -> int:
        """Return the address of this many slots, one after the other."""
        if not num_blocks:
            return 0
        self._scratch.append(load().empty(num_blocks * BLOCK_BYTES, np.uint8))
        address: int = self._scratch[-1].data.ptr
        return address

    def fetching_stream(self) -> Any:
        """Return a stream for copies from other GPUs once their sources are ready."""
        stream = own_stream(self.home, "in")
        stream.wait_event(current_stream(self.home).record())  # scratch memory was just made
        for device in np.unique(self._devices[self._is_elsewhere]).tolist():
            wait_for(stream, self.home, device)
        return stream

    def fetch(self, block: int) -> None:
        """Copy the values of this block that are on other GPUs to their slots."""
        spans, stream = self.blocks[block], own_stream(self.home, "in").ptr
        copy = load().cuda.runtime.memcpyPeerAsync
        sources, _ = rows_of(self._kernel, spans, self._copies, self._own)
        for column in range(self._kernel.num_copies):
            targets = packed(self._kernel, spans, self._slot(block, column))
            for index, (row, start, stop) in enumerate(spans):
                if self._is_elsewhere[row, column]:
                    source, device = int(sources[index, column]), int(self._devices[row, column])
                    nbytes = (stop - start) * self.itemsize
                    copy(int(targets[index]), self.home, source, device, nbytes, stream)

    def add(self, block: int) -> None:
        """Launch the sums and updates of this block, on the current stream."""
        spans, num_copies = self.blocks[block], self._kernel.num_copies
        pointers, lengths = rows_of(self._kernel, spans, self._copies, self._own)
        if self.is_scattered:
            is_elsewhere = self._is_elsewhere[[row for row, _, _ in spans]]
            for column in range(num_copies):
                fetched = packed(self._kernel, spans, self._slot(block, column))
                np.copyto(pointers[:, column], fetched, where=is_elsewhere[:, column])
        if self._has_scratch:
            pointers[:, num_copies] = packed(self._kernel, spans, self.sums(block))
        launch(self._kernel, pointers, lengths, self._numbers)

    def sums(self, block: int) -> int:
        """Return the address of the sums of this block, until the slot's next block."""
        return self._sums + block % SLOTS * BLOCK_BYTES

    def _slot(self, block: int, column: int) -> int:
        index = block % SLOTS * self._kernel.num_copies + column
        return self._fetched + index * BLOCK_BYTES


def _are_elsewhere(devices: np.ndarray[Any, Any], home: int) -> np.ndarray[Any, Any]:
    elsewhere: np.ndarray[Any, Any] = devices != home
    return elsewhere


class _Leaving:
    """A copy of packed sums from a GPU to ``out``, directly or through ``pinned``."""

    def __init__(self, adding: _Adding, out: Bytes, pinned: Sequence[Bytes]) -> None:
        self._adding, self._out, self._pinned = adding, out, pinned
        lengths = [sum(stop - start for _, start, stop in block) for block in adding.blocks]
        self._starts = np.cumsum([0, *lengths]) * adding.itemsize

    def go(self, block: int) -> None:
        """Copy a block from its slot on the GPU, on the stream for such copies."""
        out = self._part(block)
        target = self._pinned[block % SLOTS] if self._pinned else out
        runtime, stream = load().cuda.runtime, own_stream(self._adding.home, "out")
        source, kind = self._adding.sums(block), runtime.memcpyDeviceToHost
        runtime.memcpyAsync(target.ctypes.data, source, len(out), kind, stream.ptr)

    def arrive(self, block: int) -> None:
        """Copy a block from its page-locked slot to ``out`` at once, on all cores."""
        out = self._part(block)
        source, cores = self._pinned[block % SLOTS], shared()
        step = max(-(-len(out) // cores.num_threads), _LEAST_SHARED_BYTES)
        parts = [slice(start, min(start + step, len(out))) for start in range(0, len(out), step)]
        cores.run([partial(np.copyto, out[part], source[part]) for part in parts])

    def _part(self, block: int) -> Bytes:
        return self._out[self._starts[block] : self._starts[block + 1]]


def launch(kernel: Kernel, pointers: Pointers, lengths: Lengths, numbers: KernelParameters) -> None:
    """Queue the kernel for these rows on the current device and stream.

    ``pointers`` and ``lengths`` are as in ``tables`` (``kernels.py``), which checks nothing.
    """
    compiled, arguments = _compiled(kernel), _arguments(kernel, numbers)
    for table, num_blocks in tables(kernel, pointers, lengths):
        compiled((num_blocks,), (THREADS,), (table, *arguments))


@functools.lru_cache(maxsize=256)
def _arguments(kernel: Kernel, numbers: KernelParameters) -> tuple[Any, ...]:
    if kernel.formula == "sum":  # it does not use the numbers, and integers cannot hold them all
        return tuple(kernel.working.type(0) for _ in numbers)
    with np.errstate(all="ignore"):
        return tuple(kernel.working.type(number) for number in numbers)


@functools.cache
def _compiled(kernel: Kernel) -> Any:
    """Return a ``cupy.RawKernel``; each GPU compiles it at its first launch."""
    return load().RawKernel(source_of(kernel), NAME, OPTIONS)
