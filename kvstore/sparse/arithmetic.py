"""Apply NumPy's ufuncs to row-sparse arrays; some results stay row-sparse.

Missing rows are zero. A result is row-sparse if the ufunc of zeros is zero and MXNet keeps the
result row-sparse; everything else is computed on dense arrays. Pure; only
``RowSparseArray.__array_ufunc__`` calls it. The rule follows the recorded results of MXNet 1.9.1
(``tests/reference/record_arrays.py``).
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.sparse.ids import Ids, union_of

if TYPE_CHECKING:
    from kvstore.sparse.array import RowSparseArray

_OF_ONE = (np.negative, np.positive, np.absolute, np.sqrt, np.square, np.sign)
_OF_TWO = (np.add, np.subtract, np.multiply)
_IN_PLACE = (np.add, np.subtract)


def computed(
    kind: type[RowSparseArray],
    ufunc: np.ufunc,
    method: str,
    inputs: Sequence[Any],
    options: dict[str, Any],
) -> Any:
    """Apply ``ufunc`` to inputs, some of them of class ``kind``; see NEP 13."""
    # Convert NumPy's numbers to Python's, which do not change the dtype of a result.
    inputs = [each.item() if isinstance(each, np.generic) else each for each in inputs]
    is_plain = method == "__call__" and not set(options) - {"out"}
    outs: tuple[Any, ...] = options.get("out", ())
    into = outs[0] if len(outs) == 1 else None
    with np.errstate(all="ignore"):
        if is_plain and _changes_rows_only(kind, ufunc, inputs, into):
            _change_rows(ufunc, into, inputs[1].unique())
            return into
        result = _rows_of(kind, ufunc, inputs) if is_plain else None
        if result is None:
            result = _dense_of(kind, ufunc, method, inputs, options)
    if isinstance(into, kind):
        changed = result if isinstance(result, kind) else kind.from_dense(result)
        into.assign(changed.ids, changed.values)
        return into
    if into is not None and isinstance(result, kind):
        into[...] = result.dense_operand()
        return into
    return result


def _changes_rows_only(
    kind: type[RowSparseArray], ufunc: np.ufunc, inputs: Sequence[Any], into: Any
) -> bool:
    """Return whether this is ``dense += rows`` or ``dense -= rows``."""
    return (
        ufunc in _IN_PLACE
        and into is not None
        and into is inputs[0]
        and not isinstance(into, kind)
        and isinstance(inputs[1], kind)
        and tuple(into.shape) == inputs[1].shape
    )


def _change_rows(ufunc: np.ufunc, dense: Any, rows: RowSparseArray) -> None:
    dense[rows.ids] = ufunc(dense[rows.ids], rows.values)


def _rows_of(
    kind: type[RowSparseArray], ufunc: np.ufunc, inputs: Sequence[Any]
) -> RowSparseArray | None:
    """Return the result if it is row-sparse, else None."""
    first, *others = inputs
    if not others:
        is_kept = ufunc in _OF_ONE and isinstance(first, kind)
        return _with_values(first, ufunc) if is_kept else None
    other = others[0]
    if isinstance(first, kind) and isinstance(other, kind):
        is_fit = ufunc in _OF_TWO and first.shape == other.shape
        return _of_both(ufunc, first.unique(), other.unique()) if is_fit else None
    if ufunc is np.multiply and isinstance(other, kind) and _is_number(first):
        return _with_values(other, lambda values: ufunc(first, values))
    if ufunc in (np.multiply, np.true_divide) and isinstance(first, kind) and _is_number(other):
        return _with_values(first, lambda values: ufunc(values, other))
    if ufunc is np.multiply and isinstance(first, kind) and np.shape(other) == first.shape:
        unique = first.unique()
        return unique.like(unique.ids, ufunc(unique.values, np.asarray(other[unique.ids])))
    return None


def _with_values(array: RowSparseArray, compute: Any) -> RowSparseArray:
    unique = array.unique()
    return unique.like(unique.ids.copy(), compute(unique.values))


def _of_both(ufunc: np.ufunc, one: RowSparseArray, other: RowSparseArray) -> RowSparseArray:
    """Combine two arrays row by row; missing rows count as zeros."""
    ids = union_of([one.ids, other.ids])
    # If one class is a subclass of the other, the result has the subclass.
    lead = other if issubclass(type(other), type(one)) else one
    return lead.like(ids, ufunc(_spread(one, ids), _spread(other, ids)))


def _spread(array: RowSparseArray, ids: Ids) -> np.ndarray[Any, Any]:
    if len(ids) == len(array.ids):
        return array.values
    rows = np.zeros((len(ids), *array.shape[1:]), array.dtype)
    rows[np.searchsorted(ids, array.ids)] = array.values
    return rows


def _dense_of(
    kind: type[RowSparseArray],
    ufunc: np.ufunc,
    method: str,
    inputs: Sequence[Any],
    options: dict[str, Any],
) -> Any:
    """Compute the result from dense arrays, in ``out`` if that is dense."""
    dense = [each.dense_operand() if isinstance(each, kind) else each for each in inputs]
    outs = options.get("out", ())
    given = {name: value for name, value in options.items() if name != "out"}
    if outs and not any(isinstance(each, kind) for each in outs):
        given["out"] = outs
    return getattr(ufunc, method)(*dense, **given)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Number) or (isinstance(value, np.ndarray) and not value.ndim)
