"""Check the arguments of row-sparse calls, and convert values to rows.

Every store checks ``row_sparse_pull`` here, and converts pushed values of any kind to rows with
ids. Nothing is sent, and no store is changed; arrays belong to the caller. Read next:
``stores/local/sparse.py`` and ``stores/dist/sparse.py``, which use it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.arrays.keys import Key, KeySpec, width_of
from kvstore.errors import (
    ArgumentValueError,
    NotSupportedError,
    ValueMismatchError,
)
from kvstore.sparse.array import RowSparseArray
from kvstore.sparse.convert import is_row_sparse
from kvstore.sparse.ids import Ids, checked_ids, unique_ids
from kvstore.sparse.sums import Contribution, RowValues
from kvstore.stores.arguments import check_outs, normalise_keys

_LISTS = (list, tuple)

IGNORED = (
    "pull left the RowSparseArray of key {key!r} unchanged: use row_sparse_pull with row_ids, or "
    "pull(..., ignore_sparse=False) for all rows"
)


class Wanted(NamedTuple):
    """The rows of one key that a call requests for one array."""

    key: Key
    spec: KeySpec
    out: Array | None
    """The array to fill, of any library; None to return a new ``RowSparseArray``."""
    shape: tuple[int, ...]
    """The shape of the ids as the caller gave them."""
    ids: Ids
    """The ids in the caller's order, flat."""
    unique: Ids

    @property
    def nbytes(self) -> int:
        """The size of the rows."""
        return len(self.unique) * width_of(self.spec.shape) * self.spec.dtype.itemsize


def plain_rows(out: Array, spec: KeySpec) -> RowValues | None:
    """Return ``out`` as 2-D rows if NumPy can copy rows directly into it, or None."""
    is_plain = type(out) is np.ndarray and out.dtype == spec.dtype and out.flags.carray
    return out.reshape(-1, width_of(spec.shape)) if is_plain and out.size else None


def flat_rows(values: RowValues) -> RowValues:
    """Return rows as a 2-D array, sharing memory."""
    return values.reshape(len(values), width_of(values.shape))


def contribution_of(value: Array) -> Contribution:
    """Return a caller's array as rows on the host; a dense array gives all its rows."""
    if isinstance(value, RowSparseArray):
        unique = value.unique()
        rows = unique.values.reshape(len(unique.ids), width_of(value.shape))
        return Contribution(unique.ids, rows)
    host = adapter_for(value).to_host(value)
    return Contribution(np.arange(len(host)), host.reshape(len(host), width_of(host.shape)))


def row_sparse_of(ids: Ids, rows: RowValues, spec: KeySpec) -> RowSparseArray:
    """Return rows of a key as a ``RowSparseArray`` in the key's dtype."""
    with np.errstate(all="ignore"):
        values = rows.astype(spec.dtype, copy=False)
    return RowSparseArray(ids, values.reshape(len(ids), *spec.shape[1:]), spec.shape)


class SparseOuts:
    """Skips the ``RowSparseArray`` objects among the arrays that a ``pull`` fills."""

    def __init__(self) -> None:
        self._warned: set[Key] = set()

    def ignored(self, groups: Mapping[Key, Sequence[Array]], level: int) -> dict[Key, list[Array]]:
        """Return the arrays that are not ``RowSparseArray``; warn once for each key.

        ``level`` is the ``stacklevel`` of the warning.
        """
        kept: dict[Key, list[Array]] = {}
        for key, arrays in groups.items():
            dense = [array for array in arrays if not isinstance(array, RowSparseArray)]
            if dense:
                kept[key] = dense
            if len(dense) < len(arrays) and key not in self._warned:
                self._warned.add(key)
                warnings.warn(IGNORED.format(key=key), stacklevel=level)
        return kept


def check_dense_outs(groups: Mapping[Key, Sequence[Array]]) -> None:
    """Raise ``NotSupportedError`` if an array to fill is a ``RowSparseArray``."""
    for key, arrays in groups.items():
        if any(isinstance(array, RowSparseArray) for array in arrays):
            raise NotSupportedError(
                f"key {key!r}: pushpull and broadcast cannot fill a RowSparseArray; pass a dense "
                "array as out, or call push (or init) and then row_sparse_pull"
            )


def check_wanted(
    spec_of: Callable[[Key], KeySpec], key: object, out: Any, row_ids: Any
) -> tuple[list[Wanted], bool]:
    """Check ``row_sparse_pull``; return its requests, and whether it is a single one.

    ``spec_of`` raises for unknown keys. Raises the errors of ``KVStore.row_sparse_pull``; nothing
    is read or changed.
    """
    keys, is_single = normalise_keys(key)
    if row_ids is None:
        raise ArgumentValueError(
            "row_sparse_pull needs row_ids, got None; pass the ids of the rows to pull"
        )
    outs = [out] if is_single else _parallel(keys, [None] * len(keys) if out is None else out)
    id_sets = [row_ids] if is_single else _parallel(keys, row_ids)
    wanted: list[Wanted] = []
    for item, one_out, one_ids in zip(keys, outs, id_sets, strict=True):
        wanted += _wanted_of(item, spec_of(item), one_out, one_ids)
    return wanted, is_single and not (isinstance(row_ids, _LISTS) and not _is_of_ints(row_ids))


def _wanted_of(key: Key, spec: KeySpec, out: Any, row_ids: Any) -> list[Wanted]:
    """Check the arrays and ids for one key; return a request for each array."""
    if not spec.shape:
        raise ValueMismatchError(f"key {key!r} is a scalar and has no rows; use pull")
    has_sets = isinstance(row_ids, _LISTS) and not _is_of_ints(row_ids)
    id_sets = list(row_ids) if has_sets else [row_ids]
    outs = list(out) if isinstance(out, _LISTS) else [out] * (len(id_sets) if out is None else 1)
    checked = []
    for ids in id_sets:
        flat = checked_ids(ids, spec.shape[0], f"key {key!r}")
        checked.append((np.shape(ids) if _is_of_ints(ids) else _shape(ids), flat, unique_ids(flat)))
    if not has_sets:
        checked *= len(outs)
    if len(checked) != len(outs) or not outs:
        raise ValueMismatchError(
            f"key {key!r}: got {len(id_sets)} lists of row_ids for {len(outs)} arrays; give one "
            "list for all arrays, or one for each"
        )
    wanted = [Wanted(key, spec, into, *ids) for into, ids in zip(outs, checked, strict=True)]
    for one in wanted:
        if one.out is not None:
            _check_out(one)
    return wanted


def _check_out(wanted: Wanted) -> None:
    key, spec, out = wanted.key, wanted.spec, wanted.out
    if not is_row_sparse(out):
        spec = KeySpec((*wanted.shape, *spec.shape[1:]), spec.dtype)
        if adapter_for(out).shape(out) != spec.shape:
            raise ValueMismatchError(
                f"key {key!r}: the array to fill has shape {adapter_for(out).shape(out)}, but "
                f"row_ids of shape {wanted.shape} need {spec.shape}; pass an array of that "
                "shape, or a kvstore.RowSparseArray with the key's shape"
            )
    check_outs(key, spec, [out])


def _parallel(keys: Sequence[Key], values: Any) -> list[Any]:
    if not isinstance(values, _LISTS) or len(values) != len(keys):
        raise ValueMismatchError(
            f"a call with a list of {len(keys)} keys needs {len(keys)} arrays and {len(keys)} "
            "lists of row_ids"
        )
    return list(values)


def _is_of_ints(ids: object) -> bool:
    if isinstance(ids, _LISTS):
        return all(isinstance(id_, (int, np.integer)) for id_ in ids)
    return isinstance(ids, (int, np.integer, range))


def _shape(ids: Any) -> tuple[int, ...]:
    return adapter_for(ids).shape(ids)
