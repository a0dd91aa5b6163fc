"""The sums of ``dist_device_sync``: computed on a GPU, then copied to the host.

A few kernel launches add the values of all keys of a call. Finished blocks are copied from the GPU
while later blocks are added, directly to the memory that is sent if that can be page-locked. This
module sends nothing; it only remembers which memory is page-locked. Any thread may call it.
``store.py`` imports it for stores that add on devices. Read next: ``arrays/gpu/sums.py``, then
``transfer.py``, which sends the sums.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.arrays.context import Context
from kvstore.arrays.cupy import near
from kvstore.arrays.gpu.kernels import Kernel, kernel_of
from kvstore.arrays.gpu.sums import lock_pages, sum_to_host
from kvstore.arrays.keys import KeySpec
from kvstore.stores.dist.arguments import AddUp, Sums, sum_on
from kvstore.stores.dist.plan import Bytes
from pslite import Postoffice


def sums_for(node: Postoffice) -> AddUp:
    """Return ``sums_of`` with a node's buffers, page-locked where possible."""
    return partial(sums_of, buffer=node.buffer, is_pinned=_pinned.holds)


def sums_of(
    rows: Sequence[Sequence[Array]],
    specs: Sequence[KeySpec],
    buffer: Callable[[int], Bytes],
    is_pinned: Callable[[Bytes], bool],
) -> Sums:
    """Add up each key's values, on the device of its first value.

    ``rows`` has the arrays of each key, of any libraries on any devices, in the shape and dtype
    of its spec; the call only reads them, before it returns. Keys with the same GPU, dtype and
    number of values are fused: their sums follow each other in memory from ``buffer``, and
    ``is_pinned`` returns whether that memory is page-locked. A single value on the host is not
    copied.
    """
    homes = [adapter_for(row[0]).context(row[0]) for row in rows]
    found: dict[int, Bytes] = {}
    for (home, kernel), indices in _fused(homes, rows, specs).items():
        sizes = [specs[index].nbytes for index in indices]
        out = buffer(sum(sizes))
        copies = near([rows[index] for index in indices], home)
        sum_to_host(home.device_id, kernel, copies, out, is_pinned)
        found.update(zip(indices, split(out, sizes), strict=True))
    for index, (home, row, spec) in enumerate(zip(homes, rows, specs, strict=True)):
        if index not in found:
            found[index] = sum_on(home, row, spec)
    pairs = zip(homes, rows, strict=True)
    are_ours = all(len(row) > 1 or home.device_type == "gpu" for home, row in pairs)
    return Sums([found[index] for index in range(len(rows))], are_ours)


class PinnedMemory:
    """Page-locks the memory of buffers, each segment once.

    ``whole_of`` returns the segment of a buffer as (address, bytes, owner), where the owner keeps
    it mapped, or None if the segment is unknown. ``lock`` locks a segment until its owner is
    deleted; it returns False if it cannot. Any thread may call.
    """

    def __init__(
        self,
        whole_of: Callable[[Bytes], tuple[int, int, object] | None],
        lock: Callable[[int, int, object], bool] = lock_pages,
    ) -> None:
        self._whole_of = whole_of
        self._lock = lock
        # Guards the next field, so that no segment is locked twice.
        self._guard = threading.Lock()
        self._is_locked: weakref.WeakKeyDictionary[object, bool] = weakref.WeakKeyDictionary()

    def holds(self, buffer: Bytes) -> bool:
        """Page-lock a buffer's segment if possible; return whether it is locked."""
        whole = self._whole_of(buffer)
        if whole is None:
            return False
        owner = whole[2]
        with self._guard:
            if owner not in self._is_locked:
                self._is_locked[owner] = self._lock(*whole)
            return self._is_locked[owner]


#: One for the process: the stores of a node share its memory, which can be locked only once.
_pinned = PinnedMemory(Postoffice.whole_of)


def _fused(
    homes: Sequence[Context], rows: Sequence[Sequence[Array]], specs: Sequence[KeySpec]
) -> dict[tuple[Context, Kernel], list[int]]:
    """Return the positions of the keys that each GPU kernel can add together."""
    alike: dict[tuple[int, np.dtype[Any], int], list[int]] = {}
    for index, (home, row, spec) in enumerate(zip(homes, rows, specs, strict=True)):
        if home.device_type == "gpu":
            alike.setdefault((home.device_id, spec.dtype, len(row)), []).append(index)
    groups: dict[tuple[Context, Kernel], list[int]] = {}
    for (_, dtype, num_copies), indices in alike.items():
        kernel = kernel_of(dtype, num_copies, "sum")
        if kernel is not None:  # signed and unsigned integers share one
            groups.setdefault((homes[indices[0]], kernel), []).extend(indices)
    return groups


def split(memory: Bytes, sizes: Sequence[int]) -> list[Bytes]:
    """Return adjacent slices of ``memory`` that have these sizes."""
    stops = np.cumsum(sizes)
    return [memory[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
