"""Row-sparse values in the stores of one process: pushes, pulls and row_sparse_pull.

``local.py`` sends here what has to do with rows; the arithmetic is that of ``kvstore/sparse/``.
Row-sparse keys live on the host, whatever the store; row-sparse gradients of a dense key are
brought to where it lives. The store's lock guards everything here, and arguments have been
checked. Read next: ``sparse/table.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.aggregate import Workspace
from kvstore.arrays import Array, adapter_for, adapter_on
from kvstore.errors import ArgumentValueError, ValueMismatchError
from kvstore.keys import (
    Key,
    KeySpec,
    KeyTable,
    UpdateFunction,
    check_outs,
    normalise_keys,
    spec_of,
)
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import create_state, has_master
from kvstore.shelf import HOST, Entry
from kvstore.sparse.array import RowSparseArray, width_of
from kvstore.sparse.convert import is_row_sparse
from kvstore.sparse.ids import Ids, checked_ids, unique_ids
from kvstore.sparse.sums import Contribution, RowValues, Sum
from kvstore.sparse.table import RowTable
from kvstore.sparse.update import assign, is_lazy, update_all, update_lazily

_LISTS = (list, tuple)


def new_entry(key: Key, value: RowSparseArray, generation: int) -> Entry:
    """A row-sparse key that holds a copy of this value."""
    spec = KeySpec(value.shape, value.dtype)
    contribution = _contribution(value)
    table = RowTable(spec, is_whole=len(contribution.ids) == spec.shape[0])
    table.replace([contribution], Workspace())
    entry = Entry(key, spec, None, generation)
    entry.table = table
    return entry


# -- pushes -------------------------------------------------------------------------------


def apply(
    entry: Entry, arrays: Sequence[Array], optimizer: Optimizer | None, workspace: Workspace
) -> None:
    """Add the arrays up, row-sparse and dense ones, and merge the sum into the key."""
    contributions = [_contribution(array) for array in arrays]
    chosen = None if optimizer is None else optimizer.for_key(entry.key)
    count = entry.count + (chosen is not None)
    if entry.table is None:
        _apply_to_dense(entry, Sum(contributions), chosen, count, workspace)
    elif chosen is None:
        entry.table.replace(contributions, workspace)
    else:
        entry.table.update(contributions, chosen, count, workspace)
    entry.count = count
    entry.version += 1


def _apply_to_dense(
    entry: Entry, total: Sum, optimizer: Optimizer | None, count: int, workspace: Workspace
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
    update = update_lazily if is_lazy(optimizer) else update_all
    update(weight, states, total.ids, total, optimizer, count, workspace)


def _apply_on_device(entry: Entry, total: Sum, optimizer: Optimizer | None, count: int) -> None:
    """The same for a key on a GPU, with whole arrays of its library."""
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
        if not is_lazy(optimizer):
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


def apply_updater(updater: UpdateFunction, entry: Entry, arrays: Sequence[Array]) -> None:
    """Let the caller's function change a copy, so that one that raises changes nothing.

    It gets the sum as a ``RowSparseArray``; of a row-sparse key the same rows of the stored value
    as another one, of a dense key the whole array.
    """
    total = Sum([_contribution(array) for array in arrays])
    received = _row_sparse(total.ids, total.whole(), entry.spec)
    if entry.table is None:
        adapter = adapter_on(entry.home)
        local = adapter.copy(entry.weight)
        with adapter.on(entry.home):
            updater(entry.key, received, local)
        entry.set_weight(local)
    else:
        rows = _row_sparse(total.ids, entry.table.read(total.ids), entry.spec)
        updater(entry.key, received, rows)
        entry.table.set_rows(*_contribution(rows))
    entry.version += 1


# -- pulls --------------------------------------------------------------------------------


def fill(entry: Entry, outs: Sequence[Array]) -> None:
    """Write the value into arrays: all of it into dense ones, the rows there are into others."""
    for out in outs:
        if isinstance(out, RowSparseArray):
            rows = value_of(entry)
            out.assign(rows.indices, rows.values)
        elif entry.table is None:
            adapter_for(out).assign(entry.weight, out)
        else:
            dense = entry.table.dense().reshape(entry.spec.shape)
            adapter_for(out).assign(dense, out)


def value_of(entry: Entry) -> RowSparseArray:
    """A copy of the rows that are there; of a dense key all."""
    ids = np.arange(entry.spec.shape[0]) if entry.table is None else entry.table.ids()
    return _row_sparse(ids.copy(), _read(entry, ids, None), entry.spec)


class Wanted(NamedTuple):
    """Rows that a call asks for."""

    entry: Entry
    out: Array | None
    """A ``RowSparseArray``, or an array of any library; None for a new ``RowSparseArray``."""
    shape: tuple[int, ...]
    """The shape of the ids as the caller gave them."""
    ids: Ids
    """As the caller gave them, flat."""
    unique: Ids


def pull_rows(wanted: Sequence[Wanted]) -> list[RowSparseArray | None]:
    """Fill the arrays; new arrays where there are none."""
    return [_pull_rows(*each) for each in wanted]


def _pull_rows(
    entry: Entry, out: Array | None, shape: tuple[int, ...], ids: Ids, unique: Ids
) -> RowSparseArray | None:
    spec = entry.spec
    if out is None:
        result = RowSparseArray.zeros(spec.shape, spec.dtype)
        _read(entry, unique, _flat_rows(result.room_for(unique)))
        return result
    if not isinstance(out, RowSparseArray):
        into = _plain_rows(out, spec)
        rows = _read(entry, ids, into)
        if into is None:
            adapter_for(out).assign(rows.reshape(*shape, *spec.shape[1:]), out)
    elif out.dtype == spec.dtype:
        _read(entry, unique, _flat_rows(out.room_for(unique)))
    else:
        rows = _read(entry, unique, None)
        out.assign(unique, rows.reshape(len(unique), *spec.shape[1:]))
    return None


def _plain_rows(out: Array, spec: KeySpec) -> RowValues | None:
    """NumPy's array by rows, if rows can be taken right into it."""
    is_plain = type(out) is np.ndarray and out.dtype == spec.dtype and out.flags.carray
    return out.reshape(-1, width_of(spec.shape)) if is_plain and out.size else None


def _flat_rows(values: RowValues) -> RowValues:
    return values.reshape(len(values), width_of(values.shape))


def nbytes_of(wanted: Wanted) -> int:
    """The size of the rows."""
    return len(wanted.unique) * width_of(wanted.entry.spec.shape) * wanted.entry.spec.dtype.itemsize


def size_of(array: Array) -> int:
    """The bytes of a pushed array."""
    return array.nbytes if isinstance(array, RowSparseArray) else spec_of(array).nbytes


def check_wanted(
    entries: dict[Key, Entry], table: KeyTable, key: object, out: Any, row_ids: Any
) -> tuple[list[Wanted], bool]:
    """What a call of ``row_sparse_pull`` asks for, and whether it is a single thing.

    Raises what ``KVStore.row_sparse_pull`` says; nothing is read or changed.
    """
    keys, is_single = normalise_keys(key)
    if row_ids is None:
        raise ArgumentValueError("row_sparse_pull needs row_ids: the ids of the rows to pull")
    outs = [out] if is_single else _parallel(keys, [None] * len(keys) if out is None else out)
    id_sets = [row_ids] if is_single else _parallel(keys, row_ids)
    wanted: list[Wanted] = []
    for item, one_out, one_ids in zip(keys, outs, id_sets, strict=True):
        table.spec(item)
        wanted += _wanted_of(entries[item], one_out, one_ids)
    return wanted, is_single and not (isinstance(row_ids, _LISTS) and not _is_of_ints(row_ids))


def _wanted_of(entry: Entry, out: Any, row_ids: Any) -> list[Wanted]:
    """What is wanted of one key: an array or a list of them, and ids or a list of those."""
    if not entry.spec.shape:
        raise ValueMismatchError(f"key {entry.key!r} is a scalar and has no rows")
    has_sets = isinstance(row_ids, _LISTS) and not _is_of_ints(row_ids)
    id_sets = list(row_ids) if has_sets else [row_ids]
    outs = list(out) if isinstance(out, _LISTS) else [out] * (len(id_sets) if out is None else 1)
    checked = []
    for ids in id_sets:
        flat = checked_ids(ids, entry.spec.shape[0], f"key {entry.key!r}")
        checked.append((np.shape(ids) if _is_of_ints(ids) else _shape(ids), flat, unique_ids(flat)))
    if not has_sets:
        checked *= len(outs)
    if len(checked) != len(outs) or not outs:
        raise ValueMismatchError(
            f"key {entry.key!r}: {len(id_sets)} sets of row_ids do not fit {len(outs)} arrays; "
            "give one set for all, or one for each"
        )
    wanted = [Wanted(entry, into, *ids) for into, ids in zip(outs, checked, strict=True)]
    for one in wanted:
        if one.out is not None:
            _check_out(one)
    return wanted


def _check_out(wanted: Wanted) -> None:
    entry, out = wanted.entry, wanted.out
    spec = entry.spec
    if not is_row_sparse(out):
        spec = KeySpec((*wanted.shape, *spec.shape[1:]), spec.dtype)
        if adapter_for(out).shape(out) != spec.shape:
            raise ValueMismatchError(
                f"key {entry.key!r}: {len(wanted.ids)} rows for ids of shape {wanted.shape} have "
                f"shape {spec.shape}, the array to fill has {adapter_for(out).shape(out)}; to get "
                "them by id, pull into a kvstore.RowSparseArray of the key's shape"
            )
    check_outs(entry.key, spec, [out])


def _parallel(keys: Sequence[Key], values: Any) -> list[Any]:
    if not isinstance(values, _LISTS) or len(values) != len(keys):
        raise ValueMismatchError(
            f"a list of {len(keys)} keys needs lists of as many arrays and row_ids"
        )
    return list(values)


def _is_of_ints(ids: object) -> bool:
    if isinstance(ids, _LISTS):
        return all(isinstance(id_, (int, np.integer)) for id_ in ids)
    return isinstance(ids, (int, range))


def _shape(ids: Any) -> tuple[int, ...]:
    return adapter_for(ids).shape(ids)


# -- inside -------------------------------------------------------------------------------


def _contribution(value: Array) -> Contribution:
    """A caller's array, dense ones with all their rows."""
    if isinstance(value, RowSparseArray):
        unique = value.unique()
        rows = unique.values.reshape(len(unique.indices), width_of(value.shape))
        return Contribution(unique.indices, rows)
    host = adapter_for(value).to_host(value)
    return Contribution(np.arange(len(host)), host.reshape(len(host), width_of(host.shape)))


def _row_sparse(ids: Ids, rows: RowValues, spec: KeySpec) -> RowSparseArray:
    with np.errstate(all="ignore"):
        values = rows.astype(spec.dtype, copy=False)
    return RowSparseArray(ids, values.reshape(len(ids), *spec.shape[1:]), spec.shape)


def _by_rows(array: Array, spec: KeySpec) -> Array:
    """An array of the key's elements with a row in each row, sharing its memory."""
    return array.reshape(spec.shape[0], width_of(spec.shape))


def _read(entry: Entry, ids: Ids, out: RowValues | None) -> RowValues:
    """Copies of rows, on the host: in ``out``, contiguous and of the key's dtype, or new."""
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
