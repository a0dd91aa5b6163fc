"""Check the arrays of a distributed call, and view them as bytes to send or fill.

Training loops pass plain NumPy arrays, or NDArrays that wrap them, with exactly their keys' shapes
and dtypes. A few passes over the whole list recognize such arrays, and the store uses their memory
directly. Every other call goes key by key through the checks of ``stores/arguments.py`` and the
adapters of ``arrays/``, with the same result; several values for a key are summed. Each call checks
its arrays again; this module does not keep them. Runs on the caller's thread and may wait for lazy
arrays. Read next: ``store.py``, which uses this module, ``in_flight.py``, and ``gpu_sums.py`` for
values on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays import Array, adapter_for, adapter_on
from kvstore.arrays.context import Context
from kvstore.arrays.keys import Key, KeySpec
from kvstore.sparse.array import RowSparseArray
from kvstore.stores.dist.in_flight import Destination
from kvstore.stores.dist.plan import Bucket, Buckets, Bytes, flat_bytes, flat_bytes_of
from kvstore.stores.lazy import (
    lazy_arrays,
    unwrapped,
    wait_to_read,
    wait_to_write,
    wrapped,
)


class Sums(NamedTuple):
    """The summed value of each key of a call, flat, on the host."""

    memories: list[Bytes]
    are_ours: bool
    """Whether the store owns all of this memory; then it is sent without a copy."""


AddUp = Callable[[Sequence[Sequence[Array]], Sequence[KeySpec]], Sums]
"""Adds up the arrays of each key of a call; a single array on the host is not copied."""

_HOST = Context("cpu", 0)
_LISTS = (list, tuple)
_NO_GROUPS: Mapping[Key, Sequence[Array]] = {}


class Checked(NamedTuple):
    """The checked arrays of one call: ``plain`` arrays, or ``groups`` of any arrays."""

    keys: Bucket
    groups: Mapping[Key, Sequence[Array]]
    """The arrays of each key, in the order of ``keys``; empty for plain ones."""
    plain: Sequence[np.ndarray[Any, Any]] | None
    """One C-contiguous array of the key's shape and dtype for each key."""
    lazy: Sequence[Array] | None
    """All arrays, if each is an NDArray; then ``plain`` has the arrays inside them."""
    sparse: Mapping[Key, Sequence[Array]] = _NO_GROUPS
    """The other keys with their arrays: the key or one of its arrays is row-sparse."""

    def memory_to_send(self, add_up: AddUp) -> tuple[list[Bytes], bool]:
        """Return each key's summed value, and whether the store owns all the memory.

        Waits until lazy arrays have their values.
        """
        if self.plain is None:
            return add_up(list(self.groups.values()), self.keys.specs)
        if self.lazy is not None:
            wait_to_read(self.lazy)
        return flat_bytes_of(self.plain), False

    def landing(self) -> Destination:
        """Return the destination that receives values for these arrays.

        Waits for earlier calls that still use the lazy arrays.
        """
        if self.plain is None:
            arrays = [unwrapped(outs) for outs in self.groups.values()]
            return Destination.of(arrays, self.keys.specs)
        if self.lazy is not None:
            wait_to_write(self.lazy)
        return Destination(flat_bytes_of(self.plain))


def sums_on_host(rows: Sequence[Sequence[Array]], specs: Sequence[KeySpec]) -> Sums:
    """Add up each key's values, from any devices, on the host."""
    pairs = zip(rows, specs, strict=True)
    sums = [sum_on(_HOST, row, spec) for row, spec in pairs]
    return Sums(sums, all(len(row) > 1 for row in rows))


def sum_on(device: Context, row: Sequence[Array], spec: KeySpec) -> Bytes:
    """Add up one key's values on a device; return the sum as flat memory on the host.

    The memory is new, except for a single value on the host.
    """
    if len(row) == 1:
        return flat_bytes(adapter_for(row[0]).to_host(row[0]))
    adapter = adapter_on(device)
    return flat_bytes(adapter.to_host(adapter.sum_in_order(row, device, spec.dtype)))


def checked_values(
    buckets: Buckets, key: object, values: Any, *, are_written: bool = False
) -> Checked:
    """Check and return the values of a push, or (``are_written``) the arrays to fill.

    Raises the errors of ``KeyTable.check_push`` or ``check_out``.
    """
    keys = buckets.usual(key)
    if keys is not None:
        is_list = type(key) in _LISTS
        arrays = values if is_list else (values,)
        if type(arrays) in _LISTS:
            if keys.fit(arrays, are_written=are_written):
                return Checked(keys, _NO_GROUPS, arrays, None)
            inside = wrapped(arrays)
            if inside is not None and keys.fit(inside, are_written=are_written):
                return Checked(keys, _NO_GROUPS, inside, arrays)
    table = buckets.table
    check = table.check_out if are_written else table.check_push
    return _grouped(buckets, check(key, values))


def _grouped(buckets: Buckets, groups: Mapping[Key, Sequence[Array]]) -> Checked:
    table = buckets.table
    sparse = {
        key: arrays
        for key, arrays in groups.items()
        if table.is_row_sparse(key) or any(isinstance(array, RowSparseArray) for array in arrays)
    }
    if sparse:
        groups = {key: arrays for key, arrays in groups.items() if key not in sparse}
    return Checked(buckets.of(tuple(groups)), groups, None, lazy_arrays(groups), sparse)
