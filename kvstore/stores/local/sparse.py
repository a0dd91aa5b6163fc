"""Row-sparse values in one process: push, pull and row_sparse_pull.

``values.py`` uses this module for rows; the arithmetic is in ``kvstore/sparse/``. Row-sparse keys
are always stored on the host; row-sparse gradients of a dense key are copied to the key's device.
The store's lock guards everything here, and arguments have been checked. Read next:
``sparse/table.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.arrays import Array, adapter_for, adapter_on
from kvstore.arrays.cpu.sums import Workspace
from kvstore.arrays.keys import Key, KeySpec, UpdateFunction, width_of
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import create_state, has_master
from kvstore.sparse.array import RowSparseArray
from kvstore.sparse.ids import Ids
from kvstore.sparse.sums import RowValues, Sum
from kvstore.sparse.table import RowTable
from kvstore.sparse.update import assign, update_all, update_lazily
from kvstore.stores.arguments import spec_of
from kvstore.stores.arguments_sparse import (
    Wanted,
    contribution_of,
    flat_rows,
    plain_rows,
    row_sparse_of,
)
from kvstore.stores.local.memory import HOST, StoredKey


def new_entry(key: Key, value: RowSparseArray, generation: int) -> StoredKey:
    """Return a row-sparse key that holds a copy of this value."""
    spec = KeySpec(value.shape, value.dtype)
    contribution = contribution_of(value)
    table = RowTable(spec, is_whole=len(contribution.ids) == spec.shape[0])
    table.replace([contribution], Workspace())
    entry = StoredKey(key, spec, None, generation)
    entry.table = table
    return entry


# -- pushes -------------------------------------------------------------------------------


def apply(
    entry: StoredKey, arrays: Sequence[Array], optimizer: Optimizer | None, workspace: Workspace
) -> None:
    """Add up the arrays, row-sparse or dense, and merge the sum into the key."""
    contributions = [contribution_of(array) for array in arrays]
    chosen = None if optimizer is None else optimizer.for_key(entry.key, entry.spec.width)
    if entry.table is None:
        count = entry.count + (chosen is not None)
        _apply_to_dense(entry, Sum(contributions), chosen, count, workspace)
        entry.count = count
    elif chosen is None:
        entry.table.replace(contributions, workspace)
    else:
        entry.table.set_optimizer(optimizer)
        entry.table.update(contributions, chosen, workspace)
    entry.version += 1


def _apply_to_dense(
    entry: StoredKey, total: Sum, optimizer: Optimizer | None, count: int, workspace: Workspace
) -> None:
    if optimizer is not None and entry.state is None:
        with adapter_on(entry.home).on(entry.home):
            entry.keep_state(create_state(optimizer, entry.flat), entry.count)
    if entry.home is not HOST:
        _apply_on_device(entry, total, optimizer, count)
        return
    weight = _by_rows(entry.weight, entry.spec)
    if optimizer is None:
        weight.fill(0)
        assign(weight, total.ids, total, workspace)
        return
    states = [_by_rows(state, entry.spec) for state in entry.state or ()]
    update = update_lazily if optimizer.is_lazy("default") else update_all
    update(weight, states, total.ids, total, optimizer, count, workspace)


def _apply_on_device(entry: StoredKey, total: Sum, optimizer: Optimizer | None, count: int) -> None:
    """Apply a sum to a key on a GPU, by operations of its library on whole arrays."""
    adapter = adapter_on(entry.home)
    rows = adapter.to_context(total.whole(), entry.home)
    places = adapter.to_context(np.ascontiguousarray(total.ids), entry.home)
    with adapter.on(entry.home):
        weight = _by_rows(entry.weight, entry.spec)
        states = [_by_rows(state, entry.spec) for state in entry.state or ()]
        if optimizer is None:
            weight[...] = 0
            weight[places] = rows
            return
        if not optimizer.is_lazy("default"):
            gradient = np.zeros_like(weight, dtype=total.dtype)
            gradient[places] = rows
            rows, places = gradient, slice(None)
        mine = [state[places].copy() for state in states]
        wide = mine[-1] if has_master(weight.dtype) else weight[places].copy()
        own = [state.reshape(-1) for state in mine if state is not wide]
        scratch = np.empty_like(rows).reshape(-1)
        optimizer.update(wide.reshape(-1), rows.reshape(-1), own, count, scratch)
        weight[places] = wide
        for state, updated in zip(states, mine, strict=True):
            state[places] = updated


def apply_updater(updater: UpdateFunction, entry: StoredKey, arrays: Sequence[Array]) -> None:
    """Apply the caller's function to a copy, so that an error changes nothing.

    It gets the sum as a ``RowSparseArray``, and the stored value: for a row-sparse key the same
    rows as another ``RowSparseArray``, for a dense key the whole array.
    """
    total = Sum([contribution_of(array) for array in arrays])
    received = row_sparse_of(total.ids, total.whole(), entry.spec)
    if entry.table is None:
        adapter = adapter_on(entry.home)
        local = adapter.copy(entry.weight)
        with adapter.on(entry.home):
            updater(entry.key, received, local)
        entry.set_weight(local)
    else:
        rows = row_sparse_of(total.ids, entry.table.read(total.ids), entry.spec)
        updater(entry.key, received, rows)
        entry.table.merge(*contribution_of(rows), None)
    entry.version += 1


# -- pulls --------------------------------------------------------------------------------


def fill(entry: StoredKey, outs: Sequence[Array]) -> None:
    """Write the value to arrays: all rows to dense ones, the stored rows to others."""
    for out in outs:
        if isinstance(out, RowSparseArray):
            rows = value_of(entry)
            out.assign(rows.ids, rows.values)
        elif entry.table is None:
            adapter_for(out).assign(entry.weight, out)
        else:
            dense = entry.table.dense().reshape(entry.spec.shape)
            adapter_for(out).assign(dense, out)


def value_of(entry: StoredKey) -> RowSparseArray:
    """Return a copy of the stored rows; for a dense key, of all rows."""
    ids = np.arange(entry.spec.shape[0]) if entry.table is None else entry.table.ids()
    return row_sparse_of(ids.copy(), _read(entry, ids, None), entry.spec)


def pull_rows(entry: StoredKey, wanted: Wanted) -> RowSparseArray | None:
    """Copy the requested rows to the array; without one, return a new array."""
    _, spec, out, shape, ids, unique = wanted
    if out is None:
        result = RowSparseArray.zeros(spec.shape, spec.dtype)
        _read(entry, unique, flat_rows(result.room_for(unique)))
        return result
    if not isinstance(out, RowSparseArray):
        into = plain_rows(out, spec)
        rows = _read(entry, ids, into)
        if into is None:
            adapter_for(out).assign(rows.reshape(*shape, *spec.shape[1:]), out)
    elif out.dtype == spec.dtype:
        _read(entry, unique, flat_rows(out.room_for(unique)))
    else:
        rows = _read(entry, unique, None)
        out.assign(unique, rows.reshape(len(unique), *spec.shape[1:]))
    return None


def size_of(array: Array) -> int:
    """Return the size of a pushed array in bytes."""
    return array.nbytes if isinstance(array, RowSparseArray) else spec_of(array).nbytes


# -- inside -------------------------------------------------------------------------------


def _by_rows(array: Array, spec: KeySpec) -> Array:
    """Return an array of the key's elements as 2-D rows, sharing its memory."""
    return array.reshape(spec.shape[0], width_of(spec.shape))


def _read(entry: StoredKey, ids: Ids, out: RowValues | None) -> RowValues:
    """Copy rows to the host, into ``out`` or a new array, and return that.

    ``out`` is contiguous and has the key's dtype.
    """
    if entry.table is not None:
        return entry.table.read(ids, out)
    weight = _by_rows(entry.weight, entry.spec)
    if entry.home is HOST:
        # With "raise", NumPy would take the rows into a buffer of its own first.
        rows: RowValues = np.take(weight, ids, axis=0, out=out, mode="clip")
        return rows
    adapter = adapter_on(entry.home)
    places = adapter.to_context(np.ascontiguousarray(ids), entry.home)
    with adapter.on(entry.home):
        chosen = weight[places]
    host = adapter.to_host(chosen)
    if out is None:
        return host
    out[...] = host
    return out
