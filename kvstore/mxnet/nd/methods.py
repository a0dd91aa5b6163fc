"""The methods of ``NDArray`` that compute and reshape.

A mixin in its own file, because ``ndarray.py`` would be too long. The methods wait for pending
values if they need them (``_memory``), and return a new array unless they say that it is a view.
Any thread may call. Read next: ``ndarray.py``.

Names and arguments: ``python/mxnet/ndarray/ndarray.py`` of the original, 1.9.1.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from kvstore.arrays import Array, adapter_on
from kvstore.arrays.context import Context, current_context
from kvstore.arrays.dtypes import checked_dtype, checked_shape
from kvstore.arrays.pending import Uses
from kvstore.errors import ArgumentTypeError, ValueMismatchError

if TYPE_CHECKING:
    from kvstore.mxnet.nd.ndarray import NDArray

DType: TypeAlias = Any
"""Anything that NumPy accepts as a dtype, or the text ``"bfloat16"``."""
Axis: TypeAlias = int | Sequence[int] | None
Shape: TypeAlias = int | Sequence[int]

HOST = Context("cpu", 0)


class ArrayMethods(NDArrayOperatorsMixin):
    """The base class of ``NDArray`` with its methods."""

    __slots__ = ("__weakref__", "_array", "_context", "_uses")

    _array: Array
    _context: Context
    _uses: Uses

    if TYPE_CHECKING:

        @classmethod
        def _of(cls, memory: Array, context: Context, uses: Uses | None = None) -> NDArray: ...
        def _memory(self) -> Array: ...
        def _other(self, other: object) -> Array: ...
        def __array_ufunc__(
            self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
        ) -> Any: ...
        def __getitem__(self, key: Any) -> NDArray: ...

    # -- properties (never wait) -----------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's length along each axis."""
        return tuple(self._array.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """NumPy's dtype; equal to ``numpy.float32`` and to ``"float32"``."""
        dtype: np.dtype[Any] = self._array.dtype
        return dtype

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(self._array.size)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return int(self._array.ndim)

    @property
    def context(self) -> Context:
        """The device of the array."""
        return self._context

    ctx = context

    @property
    def stype(self) -> str:
        """``"default"``: the values are stored densely."""
        return "default"

    def __len__(self) -> int:
        return self.shape[0]

    # -- sums and products -----------------------------------------------------------------

    def sum(
        self, axis: Axis = None, keepdims: bool = False, *, dtype: DType = None, out: Any = None
    ) -> NDArray:
        """Return the sum of all elements or along ``axis``; integers use 64 bits."""
        return self._reduced("sum", axis, keepdims, dtype, out)

    def mean(
        self, axis: Axis = None, keepdims: bool = False, *, dtype: DType = None, out: Any = None
    ) -> NDArray:
        """Return the mean of all elements or along ``axis``; float64 for integers."""
        return self._reduced("mean", axis, keepdims, dtype, out)

    def max(self, axis: Axis = None, keepdims: bool = False, *, out: Any = None) -> NDArray:
        """Return the largest element, of all or along some axes."""
        return self._reduced("max", axis, keepdims, None, out)

    def min(self, axis: Axis = None, keepdims: bool = False, *, out: Any = None) -> NDArray:
        """Return the smallest element, of all or along some axes."""
        return self._reduced("min", axis, keepdims, None, out)

    def norm(self, ord: int = 2, axis: Axis = None, *, keepdims: bool = False) -> NDArray:
        """Return the Euclidean norm (``ord=2``) or the sum of magnitudes (``ord=1``)."""
        if ord not in (1, 2):
            raise ArgumentTypeError(f"the order of norm must be 1 or 2, got {ord!r}")
        if ord == 1:
            return self.abs().sum(axis, keepdims)
        return self.abs().square().sum(axis, keepdims).sqrt()

    def dot(self, other: NDArray, transpose_a: bool = False, transpose_b: bool = False) -> NDArray:
        """Return the dot product over the last axis and the first of ``other``.

        For matrices this is their product; either may be transposed first, without a copy.
        """
        left, right = self._memory(), self._other(other)
        for array, transposed in ((left, transpose_a), (right, transpose_b)):
            if transposed and array.ndim > 2:
                raise ValueMismatchError(
                    f"dot can transpose only matrices, got shape {array.shape}"
                )
        left, right = (left.T if transpose_a else left), (right.T if transpose_b else right)
        with working_on(self._context):
            if max(left.ndim, right.ndim) <= 2:
                return self._of(self._context.module.dot(left, right), self._context)
            return self._of(self._context.module.tensordot(left, right, axes=1), self._context)

    def abs(self) -> NDArray:
        """Return the magnitudes."""
        return self._elementwise(np.abs)

    def sqrt(self) -> NDArray:
        """Return the square roots; NaN for negative elements."""
        return self._elementwise(np.sqrt)

    def square(self) -> NDArray:
        """Return the squares."""
        return self._elementwise(np.square)

    def clip(self, a_min: float, a_max: float) -> NDArray:
        """Return the elements, limited to this range."""
        with working_on(self._context):
            return self._of(self._memory().clip(a_min, a_max), self._context)

    def argmax(self, axis: int | None = None, keepdims: bool = False) -> NDArray:
        """Return positions of the largest elements; int64 (floats in MXNet)."""
        with working_on(self._context):
            found = self._memory().argmax(axis=axis, keepdims=keepdims)
            return self._of(found, self._context)

    # -- other dtypes and shapes -----------------------------------------------------------

    def reshape(self, *shape: Any, **options: Any) -> NDArray:
        """Return the same elements in another shape; shares memory if contiguous.

        ``reshape(2, 3)``, ``reshape((2, 3))`` or ``reshape(shape=(2, 3))``. 0 keeps the length
        of an axis, -1 takes the remaining elements, -2 keeps all remaining axes, -3 joins two axes,
        and -4 splits an axis into the two lengths that follow, one of which may be -1. Floats may
        be used if they are whole numbers, such as ``n / 2``. With ``reverse=True``, axes are
        matched from the last one. Raises ``ValueMismatchError`` if they do not fit. Source of the
        codes: ``src/operator/tensor/matrix_op-inl.h`` of MXNet 1.9.1.
        """
        reverse = bool(options.pop("reverse", False))
        if set(options) - {"shape"} or bool(options) == bool(shape):
            raise ArgumentTypeError("reshape needs a shape, such as reshape((2, -1))")
        wanted = options.get("shape", shape[0] if len(shape) == 1 else shape)
        codes = checked_shape(_whole(wanted))
        is_view = bool(self._array.flags.c_contiguous)
        memory = self._array if is_view else self._memory()
        try:
            # An array without elements has axes of length 0, so 0 keeps nothing there.
            made = memory.reshape(_lengths(self.shape, codes, reverse) if self.size else codes)
        except (ValueError, IndexError, StopIteration, ZeroDivisionError) as error:
            raise ValueMismatchError(
                f"cannot reshape an array of shape {self.shape} to {wanted}"
            ) from error
        return self._of(made, self._context, self._uses if is_view else None)

    def tostype(self, stype: str) -> Any:
        """Return a copy with another storage type, ``default`` or ``row_sparse``.

        A ``row_sparse`` copy has the rows that are not all zero. Raises ``NotSupportedError`` for
        ``"csr"``.
        """
        from kvstore.mxnet.nd import sparse

        if sparse.is_row_sparse_type(stype):
            return sparse.row_sparse_array(self, None, self._context)
        return self._copied(self._memory())

    def flatten(self) -> NDArray:
        """Return a copy with two axes: the first, and all others joined."""
        return self.reshape((len(self), self.size // max(len(self), 1))).copy()

    def transpose(self, *axes: Any, **options: Any) -> NDArray:
        """Return a copy with its axes in this order, or reversed."""
        if set(options) - {"axes"} or (options and axes):
            raise ArgumentTypeError("transpose needs axes as ints, such as transpose((1, 0))")
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        return self._copied(self._memory().transpose(options.get("axes", order) or None))

    @property
    def T(self) -> NDArray:  # noqa: N802
        """A copy with its axes in reverse order."""
        return self.transpose()

    def expand_dims(self, axis: int) -> NDArray:
        """Return a copy with one more axis, of length 1."""
        return self._copied(self._context.module.expand_dims(self._memory(), axis))

    def split(
        self, num_outputs: int, axis: int = 1, squeeze_axis: bool = False
    ) -> NDArray | list[NDArray]:
        """Return copies of ``num_outputs`` equal parts along an axis.

        A single part is returned without a list. If the parts have length 1, ``squeeze_axis``
        removes the axis. Raises ``ValueMismatchError`` if the parts cannot be equal.
        """
        memory = self._memory()
        length = self.shape[axis]
        if num_outputs < 1 or length % num_outputs or (squeeze_axis and length != num_outputs):
            raise ValueMismatchError(
                f"cannot split axis {axis} of shape {self.shape} into {num_outputs} equal "
                f"parts{' of length 1' if squeeze_axis else ''}"
            )
        parts = self._context.module.split(memory, num_outputs, axis=axis)
        made = [self._copied(part.squeeze(axis) if squeeze_axis else part) for part in parts]
        return made if num_outputs > 1 else made[0]

    def broadcast_to(self, shape: Sequence[int]) -> NDArray:
        """Return a copy of this shape, with axes of length 1 repeated."""
        return self._copied(self._context.module.broadcast_to(self._memory(), tuple(shape)))

    def slice(
        self,
        begin: Sequence[int | None],
        end: Sequence[int | None],
        step: Sequence[int | None] | None = None,
    ) -> NDArray:
        """Return a copy of the elements ``begin`` to ``end`` of the first axes."""
        ranges = zip(begin, end, step or [None] * len(begin), strict=True)
        return self[tuple(builtins.slice(*each) for each in ranges)].copy()

    def slice_axis(self, axis: int, begin: int, end: int | None) -> NDArray:
        """Return a copy of the elements from ``begin`` to ``end`` of one axis."""
        key = [builtins.slice(None)] * self.ndim
        key[axis] = builtins.slice(begin, end)
        return self[tuple(key)].copy()

    # -- inside ----------------------------------------------------------------------------

    def _elementwise(self, ufunc: np.ufunc) -> NDArray:
        made: NDArray = self.__array_ufunc__(ufunc, "__call__", self)
        return made

    def _copied(self, view: Array) -> NDArray:
        return self._of(adapter_on(self._context).copy(view), self._context)

    def _reduced(self, name: str, axis: Axis, keepdims: bool, dtype: DType, out: Any) -> NDArray:
        options: dict[str, Any] = {} if dtype is None else {"dtype": native_dtype(dtype)}
        axis = tuple(axis) if isinstance(axis, Sequence) else axis
        memory = self._memory()
        with working_on(self._context):
            result = getattr(memory, name)(axis=axis, keepdims=keepdims, **options)
        made = self._of(result, self._context)
        return made if out is None else made.copyto(out)


def _whole(shape: Any) -> Any:
    """Return a shape with whole floats as ints; anything else is unchanged."""
    if not isinstance(shape, list | tuple):
        return shape
    return [int(one) if isinstance(one, float) and one.is_integer() else one for one in shape]


def _lengths(old: tuple[int, ...], codes: tuple[int, ...], reverse: bool) -> list[int]:
    """Return the lengths for the codes of ``reshape``; -1 is kept.

    Raises ``ValueError``, ``IndexError`` or ``StopIteration`` if they do not fit.
    """
    if reverse:
        return _lengths(old[::-1], codes[::-1], False)[::-1]
    left = list(old)
    found: list[int] = []
    rest = iter(codes)
    for code in rest:
        if code == 0:
            found.append(left.pop(0))
        elif code == -2:
            found += left
            left = []
        elif code == -3:
            found.append(left.pop(0) * left.pop(0))
        elif code == -4:
            found += _halves(left.pop(0), next(rest), next(rest))
        elif code < -4:
            raise ValueError(code)
        else:
            found.append(code)
            del left[:1]
    return found


def _halves(length: int, one: int, other: int) -> tuple[int, int]:
    """Return the two lengths into which one is split; one of them may be -1."""
    if -1 in (one, other):
        one, other = (length // other, other) if one == -1 else (one, length // one)
    if one < 0 or one * other != length:
        raise ValueError(length)
    return one, other


def working_on(context: Context) -> AbstractContextManager[Any]:
    """Make the library work on this device in the block, without float warnings."""
    if context.device_type == "cpu":
        return np.errstate(all="ignore")
    return adapter_on(context).on(context)


def checked_context(context: object) -> Context:
    """Return ``context``, or the current one. Raises ``ArgumentTypeError``."""
    if context is None:
        return current_context()
    if not isinstance(context, Context):
        raise ArgumentTypeError(f"ctx must be a Context such as mx.cpu(), got {context!r}")
    return context


def native_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the dtype in native byte order.

    Raises ``ArgumentTypeError`` if a store cannot hold the dtype.
    """
    native: np.dtype[Any] = checked_dtype(dtype).newbyteorder("=")
    return native
