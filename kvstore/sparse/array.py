"""``RowSparseArray``: some rows of a large array; all others are zero.

Stores accept and fill such arrays. This module knows nothing of stores; its arithmetic is NumPy's
(``arithmetic.py``). Only one thread at a time may use an array. Source of the idea and of some
names: ``RowSparseNDArray`` of MXNet (python/mxnet/ndarray/sparse.py); here ids may be unsorted and
repeated. Read next: ``convert.py``, which converts other libraries' sparse matrices and tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from kvstore.arrays import Array, adapter_for
from kvstore.arrays.dtypes import check_dtype
from kvstore.arrays.keys import width_of
from kvstore.errors import ArgumentTypeError, ArgumentValueError, ValueMismatchError
from kvstore.sparse import arithmetic
from kvstore.sparse.ids import Ids, check_num_rows, checked_ids, is_increasing
from kvstore.sparse.sums import sum_repeated

Self = TypeVar("Self", bound="RowSparseArray")

_MOST_ROOM = 2
"""Memory is reused if it is at most this many times as large as needed."""


class RowSparseArray(NDArrayOperatorsMixin):
    """An array of shape ``shape`` with rows ``values`` at ``indices``.

    All other rows are zero.

    ::

        RowSparseArray([3, 0], numpy.ones((2, 64), "float32"), (1_000_000, 64))

    ``indices`` are the ids of the rows: an array of any integer dtype, or a list of ints; stored
    as flat int64. ``values`` is an array of any library with shape ``(number of ids,
    *shape[1:])``. If an id is repeated, its row is the sum of the rows given for it. NumPy
    arrays are kept without a copy and remain the caller's; arrays on a device are copied to the
    host.

    NumPy's ufuncs and operators accept it. The sum, difference or product of two such arrays is
    row-sparse, and so is the product or quotient with a number; most other results are dense, as
    in MXNet. ``dense += rows`` changes only these rows; ``rows += other`` changes ``rows`` itself.

    Raises ``ArgumentTypeError`` if ids are not integers or values are not an array,
    ``ArgumentValueError`` if ids are out of range, ``ValueMismatchError`` if values have another
    shape.
    """

    __slots__ = ("_indices", "_room", "_shape", "_values")

    # Dicts and sets distinguish these arrays by identity, though == compares elements.
    __hash__ = object.__hash__

    stype: ClassVar[str] = "row_sparse"
    """MXNet's name for the storage type."""

    def __init__(self, indices: Array | Iterable[int], values: Array, shape: Iterable[int]) -> None:
        self._shape = _checked_shape(shape)
        adapter = adapter_for(values)
        check_dtype(adapter.dtype(values))
        self._indices, self._values = self._checked(indices, adapter.to_host(values))
        self._room: np.ndarray[Any, Any] | None = None
        """Memory that the array itself allocated; ``values`` may be a slice of it."""

    @classmethod
    def zeros(cls, shape: Iterable[int], dtype: Any = np.float32) -> RowSparseArray:
        """Return an array without stored rows: all rows are zero."""
        shape = _checked_shape(shape)
        return cls([], np.empty((0, *shape[1:]), dtype), shape)

    @classmethod
    def from_dense(cls, array: Array) -> RowSparseArray:
        """Return copies of those rows of an array that are not all zero (NaN is not zero)."""
        host = adapter_for(array).to_host(array)
        if host.ndim == 0:
            raise ValueMismatchError(
                "a scalar does not have rows; pass an array of at least one dimension"
            )
        kept = np.flatnonzero((host != 0).reshape(len(host), -1).any(axis=1))
        return cls(kept, host[kept], host.shape)

    # -- what it is ----------------------------------------------------------------------

    @property
    def ids(self) -> Ids:
        """The ids as a NumPy array: int64, shape (n,)."""
        return self._indices

    @property
    def indices(self) -> Any:
        """The same as ``ids``."""
        return self._indices

    @property
    def values(self) -> np.ndarray[Any, Any]:
        """The rows, shape (n, \\*shape[1:]), without a copy."""
        return self._values

    @property
    def data(self) -> Any:
        """The same as ``values``; MXNet's name."""
        return self._values

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        dtype: np.dtype[Any] = self._values.dtype
        return dtype

    @property
    def nbytes(self) -> int:
        """The size of ids and values in bytes."""
        return self._indices.nbytes + self._values.nbytes

    @property
    def is_unique(self) -> bool:
        """Whether the ids are sorted and distinct."""
        return is_increasing(self._indices)

    def __repr__(self) -> str:
        return f"<RowSparseArray {self._shape} of {self.dtype}, {len(self._indices)} rows>"

    # -- other forms ---------------------------------------------------------------------

    def unique(self: Self) -> Self:
        """Return an array with sorted, distinct ids; add the rows of each id in order.

        If ``is_unique``, return the array itself. 16-bit floats are summed in float32.
        """
        if self.is_unique:
            return self
        flat = self._values.reshape(len(self._indices), width_of(self._shape))
        ids, values = sum_repeated(self._indices, flat)
        return self.like(ids, values.reshape(len(ids), *self._shape[1:]))

    def copy(self: Self) -> Self:
        """Return a copy that shares no memory with this array."""
        return self.like(self._indices.copy(), self._values.copy())

    def like(self: Self, ids: Ids, values: np.ndarray[Any, Any]) -> Self:
        """Return an array of this shape and class with other rows, without a copy."""
        return type(self)(ids, values, self._shape)

    def to_dense(self) -> np.ndarray[Any, Any]:
        """Return all rows, as a new NumPy array of the whole shape."""
        unique = self.unique()
        dense = np.zeros(self._shape, self.dtype)
        dense[unique._indices] = unique._values
        return dense

    def asnumpy(self) -> np.ndarray[Any, Any]:
        """Return ``to_dense()``; this is its name in MXNet."""
        return self.to_dense()

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        raise ArgumentTypeError(
            "NumPy cannot use a RowSparseArray as a dense array; call its to_dense()"
        )

    def dense_operand(self) -> Any:
        """Return ``to_dense()`` in the class that dense results have."""
        return self.to_dense()

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Apply NumPy's ufuncs to row-sparse arrays; see NEP 13 for the arguments."""
        return arithmetic.computed(RowSparseArray, ufunc, method, inputs, options)

    # -- for the stores ------------------------------------------------------------------

    def assign(self, indices: Array | Iterable[int], values: Array) -> None:
        """Replace all stored rows by these, cast to the array's dtype.

        Both arguments are copied, into the memory of earlier ``values`` if it has room. Raises
        the errors of the constructor, and then changes nothing.
        """
        ids, rows = self._checked(indices, adapter_for(values).to_host(values))
        with np.errstate(all="ignore"):
            np.copyto(self.room_for(ids), rows, casting="unsafe")

    def room_for(self, ids: Ids) -> np.ndarray[Any, Any]:
        """Copy these ids, and return memory that the caller fills with their rows.

        The ids must be in range. The memory is C-contiguous. Memory of current or earlier values
        is reused if it fits, since fresh memory costs more time than writing the rows.
        """
        shape = (len(ids), *self._shape[1:])
        if self._values.shape != shape or not self._values.flags.carray:
            if self._room is None or not len(ids) <= len(self._room) <= _MOST_ROOM * len(ids):
                self._room = np.empty((len(ids) + len(ids) // 16, *shape[1:]), self.dtype)
            self._values = self._room[: len(ids)]
        self._indices = np.array(ids)
        return self._values

    def _checked(
        self, indices: object, values: np.ndarray[Any, Any]
    ) -> tuple[Ids, np.ndarray[Any, Any]]:
        ids = checked_ids(indices, self._shape[0], f"an array of shape {self._shape}")
        wanted = (len(ids), *self._shape[1:])
        if values.shape != wanted:
            raise ValueMismatchError(
                f"the values of {len(ids)} rows of an array of shape {self._shape} must have "
                f"shape {wanted}, got {values.shape}"
            )
        return ids, values


def _checked_shape(shape: Iterable[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError as error:
        raise ArgumentTypeError(f"a shape must be a list of ints, got {shape!r}") from error
    if not sizes or any(size < 0 for size in sizes):
        raise ArgumentValueError(
            "the shape of a row-sparse array must have at least one dimension and no negative "
            f"size, got {sizes}"
        )
    check_num_rows(sizes[0])
    return sizes
