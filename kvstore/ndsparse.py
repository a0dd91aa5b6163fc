"""``mx.nd.sparse``: row-sparse arrays made the way scripts for MXNet make them.

They are ``kvstore.RowSparseArray`` and lie on the host. Source of the names:
``python/mxnet/ndarray/sparse.py`` of MXNet. Any thread may call. Read next: ``sparse/array.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore import nd
from kvstore.arrays import adapter_for
from kvstore.context import Context
from kvstore.errors import ArgumentTypeError, ArgumentValueError, NotSupportedError
from kvstore.ndarray import NDArray
from kvstore.ndmethods import DType, checked_context, checked_dtype
from kvstore.sparse.array import RowSparseArray
from kvstore.sparse.convert import is_row_sparse, row_sparse

__all__ = ["row_sparse_array", "zeros"]


def row_sparse_array(
    arg1: Any,
    shape: Sequence[int] | None = None,
    ctx: Context | None = None,
    dtype: DType = None,
) -> RowSparseArray:
    """A row-sparse array with memory of its own.

    ``arg1`` is a pair (data, indices), of arrays or lists; or a shape, for one without rows; or
    an array, dense or sparse. Without ``shape`` a pair has as many rows as its largest id needs.
    The dtype is that of the data, float32 for lists. ``ctx`` may be any: rows lie on the host.
    Raises what ``RowSparseArray`` does.
    """
    checked_context(ctx)
    if isinstance(arg1, (tuple, list)):
        if all(isinstance(size, (int, np.integer)) for size in arg1):
            return zeros("row_sparse", arg1, ctx, dtype)
        if len(arg1) != 2:
            raise ArgumentTypeError("row_sparse_array takes (data, indices), a shape or an array")
        made = _of_pair(arg1[0], arg1[1], shape)
    elif is_row_sparse(arg1):
        made = row_sparse(arg1)
    else:
        made = RowSparseArray.from_dense(arg1)
    if shape is not None and tuple(shape) != made.shape:
        raise ArgumentValueError(f"the array has shape {made.shape}, not {tuple(shape)}")
    kind = made.dtype if dtype is None else checked_dtype(dtype)
    with np.errstate(all="ignore"):
        values = np.array(made.values, kind)
    return RowSparseArray(made.indices.copy(), values, made.shape)


def zeros(
    stype: str, shape: Sequence[int], ctx: Context | None = None, dtype: DType = None
) -> RowSparseArray | Any:
    """An array of zeros: a ``RowSparseArray`` for ``"row_sparse"``, an NDArray for ``"default"``.

    float32 unless ``dtype`` says otherwise. Raises ``NotSupportedError`` for ``"csr"``.
    """
    if stype == "default":
        return nd.zeros(shape, ctx, dtype)
    if stype == "csr":
        raise NotSupportedError("there are no CSR arrays here; stores take SciPy's and PyTorch's")
    if stype != "row_sparse":
        raise ArgumentValueError(f"a storage type is 'row_sparse' or 'default', got {stype!r}")
    checked_context(ctx)
    return RowSparseArray.zeros(shape, checked_dtype("float32" if dtype is None else dtype))


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
