"""Convert SciPy's sparse matrices and PyTorch's sparse tensors to row-sparse.

This module recognises them by their classes and reads them through their own methods, so it imports
neither library. Pure; any thread may call. Read next: ``sums.py``.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kvstore.arrays import adapter_for
from kvstore.errors import ArgumentTypeError
from kvstore.sparse.array import RowSparseArray
from kvstore.sparse.ids import starts_of
from kvstore.sparse.sums import sum_repeated

_TORCH_LAYOUTS = ("torch.sparse_coo", "torch.sparse_csr")

_libraries: WeakKeyDictionary[type, str | None] = WeakKeyDictionary()
"""The library of each class seen so far; a cache, since each value of each call needs it."""


def is_row_sparse(value: object) -> bool:
    """Return whether ``row_sparse`` accepts this value.

    It accepts a ``RowSparseArray`` and other libraries' sparse arrays.
    """
    library = _library_of(type(value))
    if library != "torch":
        return library is not None
    return str(getattr(value, "layout", None)) in _TORCH_LAYOUTS


def row_sparse(value: Any) -> RowSparseArray:
    """Return a sparse value as a ``RowSparseArray``, without a copy if it is one.

    If ``value`` stores single elements (a SciPy matrix, or a tensor with several sparse
    dimensions), the result has the whole row of each. A tensor may be on a GPU, and may repeat
    ids, as gradients of ``torch.nn.Embedding(sparse=True)`` do. The result may share memory with
    ``value``. Raises ``ArgumentTypeError`` for a SciPy array without two dimensions.
    """
    if isinstance(value, RowSparseArray):
        return value
    is_of_scipy = _library_of(type(value)) == "scipy"
    return _from_scipy(value) if is_of_scipy else _from_torch(value)


def _library_of(kind: type) -> str | None:
    """Return the library of a class if its values can be row-sparse, else None."""
    if kind not in _libraries:
        _libraries[kind] = _library_by_name(kind)
    return _libraries[kind]


def _library_by_name(kind: type) -> str | None:
    for base in kind.__mro__:
        if base is RowSparseArray:
            return "kvstore"
        if base.__module__.startswith("scipy.sparse"):
            return "scipy"
        if base.__name__ == "Tensor" and base.__module__.partition(".")[0] == "torch":
            return "torch"
    return None


def _from_scipy(matrix: Any) -> RowSparseArray:
    if len(matrix.shape) != 2:
        raise ArgumentTypeError(
            f"a SciPy sparse array must have two dimensions, got shape {matrix.shape}"
        )
    by_row = matrix.tocsr()
    ids = np.flatnonzero(np.diff(by_row.indptr))
    return RowSparseArray(ids, by_row[ids].toarray(), matrix.shape)


def _from_torch(tensor: Any) -> RowSparseArray:
    plain = tensor.detach()
    if str(plain.layout) == "torch.sparse_csr":
        plain = plain.to_sparse_coo()
    shape = tuple(plain.shape)
    if plain.sparse_dim() == 1:
        # PyTorch's indices() and values() refuse tensors whose ids may repeat.
        return RowSparseArray(plain._indices()[0], plain._values(), shape)
    indices, elements = _summed(plain)
    if not len(elements):
        return RowSparseArray.zeros(shape, elements.dtype)
    starts = starts_of(indices[0])
    rows = np.zeros((len(starts), *shape[1:]), elements.dtype)
    place = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(elements))))
    rows[tuple([place, *indices[1:]])] = elements  # noqa: C409
    return RowSparseArray(indices[0][starts], rows, shape)


def _summed(tensor: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Sum elements of equal indices; return sorted indices, in columns, and sums.

    Elements with the same index are added in their order, as rows with the same id are. PyTorch's
    ``coalesce`` would add 16-bit floats in 16 bits.
    """
    places, values = tensor._indices(), tensor._values()
    indices = adapter_for(places).to_host(places)
    elements = adapter_for(values).to_host(values)
    if tensor.is_coalesced() or not len(elements):
        return indices, elements
    sizes = tuple(tensor.shape)[: len(indices)]
    numbers = np.ravel_multi_index(tuple(indices), sizes).astype(np.int64, copy=False)
    found, sums = sum_repeated(numbers, elements.reshape(len(elements), -1))
    summed = sums.reshape(len(found), *elements.shape[1:])
    return np.array(np.unravel_index(found, sizes)), summed
