"""``mx.nd.sparse``: row-sparse arrays as MXNet scripts make and use them.

``RowSparseNDArray`` is a ``kvstore.RowSparseArray`` whose ids, rows and dense forms are NDArrays.
Its rows lie on the host, whatever its context. Source of the names:
``python/mxnet/ndarray/sparse.py`` of MXNet. Any thread may call. Read next: ``sparse/array.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from kvstore.arrays import adapter_for
from kvstore.arrays.context import Context
from kvstore.arrays.dtypes import checked_shape
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NotSupportedError,
    ValueMismatchError,
)
from kvstore.mxnet import nd
from kvstore.mxnet.nd.methods import HOST, DType, Shape, checked_context, native_dtype
from kvstore.mxnet.nd.ndarray import NDArray
from kvstore.sparse.array import RowSparseArray
from kvstore.sparse.convert import is_row_sparse, row_sparse
from kvstore.sparse.ids import Ids, checked_ids, unique_ids

__all__ = ["RowSparseNDArray", "add_n", "array", "dot", "retain", "row_sparse_array", "zeros"]

Self = TypeVar("Self", bound="RowSparseNDArray")


class RowSparseNDArray(RowSparseArray):
    """A ``RowSparseArray`` with MXNet's names: ids sorted, each there once.

    ``indices`` (int64) and ``data`` are NDArrays that share the array's memory, dense results of
    arithmetic are NDArrays, and ``array[:] = value`` takes dense and row-sparse values. Stores take
    and fill it as any ``RowSparseArray``. Made by ``row_sparse_array``, ``zeros`` and
    ``NDArray.tostype("row_sparse")``.
    """

    __slots__ = ("_context",)

    _context: Context

    @property
    def indices(self) -> NDArray:
        """The ids of the rows: int64, shape (n,)."""
        return NDArray(self.ids)

    @property
    def data(self) -> NDArray:
        """The rows, of shape ``(n, *shape[1:])``."""
        return NDArray(self.values)

    @property
    def ndim(self) -> int:
        """The number of axes of the whole array."""
        return len(self.shape)

    @property
    def context(self) -> Context:
        """The device that the caller named; the rows are stored on the host."""
        return getattr(self, "_context", HOST)

    ctx = context

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        lengths = "x".join(map(str, self.shape))
        return f"\n<RowSparseNDArray {lengths} @{self.context}>"

    # -- other forms -----------------------------------------------------------------------

    def like(self: Self, ids: Ids, values: np.ndarray[Any, Any]) -> Self:
        return super().like(ids, values)._on(self.context)

    def dense_operand(self) -> NDArray:
        return NDArray(self.to_dense())

    def tostype(self, stype: str) -> Any:
        """Return a copy with another storage type, ``default`` or ``row_sparse``."""
        return self.copy() if is_row_sparse_type(stype) else self.dense_operand()

    def astype(self: Self, dtype: DType, copy: bool = True) -> Self:
        """Return a new array of another dtype; ``copy=False`` may return itself."""
        wanted = native_dtype(dtype)
        if not copy and wanted == self.dtype:
            return self
        with np.errstate(all="ignore"):
            return self.like(self.ids.copy(), self.values.astype(wanted))

    def copyto(self, other: Any) -> Any:
        """Copy the values into ``other``, row-sparse or an NDArray, or to a context.

        Returns ``other``, or the new array. Raises ``ValueMismatchError`` for another shape.
        """
        if isinstance(other, Context):
            return self.copy()._on(other)
        if isinstance(other, RowSparseArray):
            fill(other, self)
            return other
        return self.dense_operand().copyto(other)

    def as_in_context(self: Self, context: Context) -> Self:
        """Return the array itself if it is on ``context``, or a copy that is."""
        checked_context(context)
        return self if context == self.context else self.copy()._on(context)

    def retain(self: Self, indices: Any) -> Self:
        """Return a new array of the rows ``indices``, an array or list of ids."""
        chosen = unique_ids(checked_ids(indices, self.shape[0], f"an array of shape {self.shape}"))
        unique = self.unique()
        is_kept = np.isin(unique.ids, chosen, assume_unique=True)
        return self.like(unique.ids[is_kept], unique.values[is_kept])

    def wait_to_read(self) -> None:
        """Return at once: pulls into row-sparse arrays return when the rows are there."""

    wait_to_write = wait_to_read

    def __getitem__(self: Self, key: Any) -> Self:
        _check_all(key)
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        _check_all(key)
        if isinstance(value, int | float | np.generic):
            value = np.full(self.shape, value, self.dtype)
        fill(self, row_sparse(value) if is_row_sparse(value) else RowSparseArray.from_dense(value))

    def _on(self: Self, context: Context) -> Self:
        self._context = context
        return self


def fill(target: RowSparseArray, source: RowSparseArray) -> None:
    """Give an array the rows of another. Raises ``ValueMismatchError``.

    The shapes must be equal.
    """
    if target.shape != source.shape:
        raise ValueMismatchError(f"cannot copy shape {source.shape} into shape {target.shape}")
    if target is not source:
        unique = source.unique()
        target.assign(unique.ids, unique.values)


def is_row_sparse_type(stype: str) -> bool:
    """Return whether ``stype`` is ``"row_sparse"`` and not ``"default"``.

    Raises ``NotSupportedError`` for ``"csr"``, ``ArgumentValueError`` for any other.
    """
    if stype == "csr":
        raise NotSupportedError(
            "nd does not support CSR arrays; pass SciPy's or PyTorch's CSR arrays to the store"
        )
    if stype not in ("row_sparse", "default"):
        raise ArgumentValueError(f"a storage type must be 'row_sparse' or 'default', got {stype!r}")
    return stype == "row_sparse"


def row_sparse_array(
    arg1: Any,
    shape: Sequence[int] | None = None,
    ctx: Context | None = None,
    dtype: DType = None,
) -> RowSparseNDArray:
    """Return a row-sparse array with memory of its own.

    ``arg1`` is a pair (data, indices), of arrays or lists; or a shape, for one without rows; or
    an array, dense or sparse. Without ``shape`` a pair has as many rows as its largest id needs.
    Rows of one id are added. The dtype is that of the data, float32 for lists. ``ctx`` may be any:
    rows lie on the host. Raises what ``RowSparseArray`` does.
    """
    context = checked_context(ctx)
    if isinstance(arg1, (tuple, list)):
        if all(isinstance(size, (int, np.integer)) for size in arg1):
            made = RowSparseArray.zeros(arg1, native_dtype("float32" if dtype is None else dtype))
        elif len(arg1) == 2:
            made = _of_pair(arg1[0], arg1[1], shape)
        else:
            raise ArgumentTypeError("row_sparse_array needs (data, indices), a shape or an array")
    elif is_row_sparse(arg1):
        made = row_sparse(arg1)
    else:
        made = RowSparseArray.from_dense(arg1)
    if shape is not None and tuple(shape) != made.shape:
        raise ArgumentValueError(f"the array must have shape {tuple(shape)}, got {made.shape}")
    kind = made.dtype if dtype is None else native_dtype(dtype)
    made = made.unique()
    with np.errstate(all="ignore"):
        values = np.array(made.values, kind)
    return RowSparseNDArray(made.ids.copy(), values, made.shape)._on(context)


def array(source_array: Any, ctx: Context | None = None, dtype: DType = None) -> RowSparseNDArray:
    """Return a new row-sparse array of the values of one, of any library."""
    if not is_row_sparse(source_array):
        raise ArgumentTypeError(
            f"nd.sparse.array needs a sparse array, got {type(source_array).__name__}; use nd.array"
        )
    return row_sparse_array(source_array, None, ctx, dtype)


def zeros(stype: str, shape: Shape, ctx: Context | None = None, dtype: DType = None) -> Any:
    """Return an array of zeros: row-sparse or an NDArray, by ``stype``.

    float32 unless ``dtype`` says otherwise. Raises ``NotSupportedError`` for ``"csr"``.
    """
    if not is_row_sparse_type(stype):
        return nd.zeros(shape, ctx, dtype)
    return row_sparse_array(checked_shape(shape), None, ctx, dtype)


def retain(data: RowSparseNDArray, indices: Any) -> RowSparseNDArray:
    """Return ``RowSparseNDArray.retain`` of the array."""
    if not isinstance(data, RowSparseNDArray):
        raise ArgumentTypeError(f"retain needs a RowSparseNDArray, got {type(data).__name__}")
    return data.retain(indices)


def add_n(*args: Any) -> Any:
    """Return the sum of arrays, added left to right: row-sparse if all of them are."""
    return nd.add_n(*args)


def dot(lhs: Any, rhs: Any, transpose_a: bool = False, transpose_b: bool = False) -> NDArray:
    """Return ``NDArray.dot`` of the dense forms of the arrays."""
    return nd.dot(lhs, rhs, transpose_a, transpose_b)


# -- inside ----------------------------------------------------------------------------------


def _check_all(key: Any) -> None:
    if not (isinstance(key, slice) and key == slice(None)):
        raise NotSupportedError(
            "the only index of a row-sparse array is [:]; use retain(indices), "
            "tostype('default') or data"
        )


def _of_pair(data: Any, indices: Any, shape: Sequence[int] | None) -> RowSparseArray:
    values = np.array(data, np.float32) if isinstance(data, list) else data
    if isinstance(values, NDArray):
        values = values.asnumpy()
    if shape is None:
        ids = np.asarray(
            indices if isinstance(indices, list) else adapter_for(indices).to_host(indices)
        )
        shape = (int(ids.max()) + 1 if ids.size else 0, *adapter_for(values).shape(values)[1:])
    return RowSparseArray(indices, values, shape)
