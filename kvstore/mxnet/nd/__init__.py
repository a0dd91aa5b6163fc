"""``mx.nd``: the NDArrays that scripts for MXNet's KVStore are written in.

::

    import kvstore as mx

    a = mx.nd.ones((2, 3), mx.cpu()) * 4      # float32, as everything here by default
    a[:] = 8
    a += 1
    kv.push("w", a)
    kv.pull("w", out=a)                       # returns at once ...
    print(a.asnumpy())                        # ... and this waits for the values
    mx.nd.waitall()

To port such a script, change its import. This is the part of MXNet's array library that a script
around a KVStore uses, not a library for building networks. Values on a CPU are NumPy arrays, on a
GPU CuPy arrays, and NumPy's ufuncs work on both. The functions here make arrays or call the method
of the same name; any thread may call them. See also the docstring of ``NDArray``. Read next:
``ndarray.py``.

Differences from MXNet: comparisons return bool; ``a[1:3]``, ``a[::2]`` and ``reshape`` share the
array's memory, everything else is a copy; dtypes mix by NumPy's rules, so a number of Python or
NumPy never changes the dtype of a float array. Nothing here saves files.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvstore.arrays.context import Context
from kvstore.arrays.dtypes import checked_shape
from kvstore.arrays.pending import waitall
from kvstore.errors import ArgumentTypeError
from kvstore.errors.hints import missing
from kvstore.mxnet import random
from kvstore.mxnet.nd.methods import Axis, DType, Shape, checked_context, native_dtype, working_on
from kvstore.mxnet.nd.ndarray import NDArray, checked_array, new_array
from kvstore.sparse.array import RowSparseArray

if TYPE_CHECKING:  # imported on first use, by __getattr__ below
    from kvstore.mxnet.nd import sparse  # noqa: F401

__all__ = [
    "NDArray",
    "abs",
    "add",
    "add_n",
    "arange",
    "argmax",
    "array",
    "broadcast_add",
    "broadcast_div",
    "broadcast_mul",
    "broadcast_sub",
    "broadcast_to",
    "clip",
    "concat",
    "concatenate",
    "divide",
    "dot",
    "empty",
    "exp",
    "expand_dims",
    "flatten",
    "full",
    "log",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "multiply",
    "norm",
    "ones",
    "ones_like",
    "random",
    "random_normal",
    "random_uniform",
    "reshape",
    "sign",
    "split",
    "sqrt",
    "square",
    "stack",
    "subtract",
    "sum",
    "transpose",
    "waitall",
    "zeros",
    "zeros_like",
]

# -- arrays from nothing ---------------------------------------------------------------------


def array(source_array: Any, ctx: Context | None = None, dtype: DType = None) -> NDArray:
    """Return a new array of these values on ``ctx``, by default the current context.

    ``source_array`` is an array of any library that stores take, or numbers in nested lists. The
    default ``dtype`` is that of an NDArray, otherwise float32, even for arrays of float64 or
    integers. A row-sparse array gives a row-sparse array (``sparse.array``). Raises
    ``ArgumentTypeError`` for anything else.
    """
    if isinstance(source_array, RowSparseArray):
        made: NDArray = _sparse().array(source_array, ctx, dtype)
        return made
    if isinstance(source_array, NDArray) and dtype is None:
        dtype = source_array.dtype
    return new_array(source_array, ctx, "float32" if dtype is None else dtype)


def empty(
    shape: Shape, ctx: Context | None = None, dtype: DType = "float32", stype: str | None = None
) -> NDArray:
    """Return a new, uninitialized array; a row-sparse one (``stype``) has no rows."""
    if stype not in (None, "default"):
        return zeros(shape, ctx, dtype, stype)
    return _made("empty", shape, ctx, dtype)


def zeros(
    shape: Shape, ctx: Context | None = None, dtype: DType = "float32", stype: str | None = None
) -> NDArray:
    """Return a new array of zeros; ``stype="row_sparse"`` makes a row-sparse one."""
    if stype not in (None, "default"):
        made: NDArray = _sparse().zeros(stype, shape, ctx, dtype)
        return made
    return _made("zeros", shape, ctx, dtype)


def ones(
    shape: Shape,
    ctx: Context | None = None,
    dtype: DType = "float32",
    *,
    stype: str | None = None,
) -> NDArray:
    """Return a new array of ones.

    With ``stype="row_sparse"``, it is a ``RowSparseNDArray`` with all its rows.
    """
    made = _made("ones", shape, ctx, dtype)
    if stype not in (None, "default"):
        made = made.tostype(stype)
    return made


def full(shape: Shape, val: float, ctx: Context | None = None, dtype: DType = "float32") -> NDArray:
    """Return a new array of this number."""
    made = _made("empty", shape, ctx, dtype)
    made[:] = val
    return made


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1.0,
    repeat: int = 1,
    *,
    ctx: Context | None = None,
    dtype: DType = "float32",
) -> NDArray:
    """Return the numbers from ``start`` to ``stop``, each ``repeat`` times.

    ``start`` is 0 by default.
    """
    first, end = (0, start) if stop is None else (start, stop)
    return new_array(np.arange(first, end, step).repeat(repeat), ctx, dtype)


def zeros_like(data: Any) -> NDArray:
    """Return zeros of the shape, dtype, device and storage type of ``data``."""
    if isinstance(data, RowSparseArray):
        return zeros(data.shape, None, data.dtype, data.stype)
    return zeros(checked_array(data).shape, data.context, data.dtype)


def ones_like(data: Any) -> NDArray:
    """Return ones of the shape, dtype and device of ``data``."""
    dense = _dense(data)
    return ones(dense.shape, dense.context, dense.dtype)


def random_uniform(
    low: float = 0.0,
    high: float = 1.0,
    shape: Shape | None = None,
    ctx: Context | None = None,
    dtype: DType = None,
    out: NDArray | None = None,
) -> NDArray:
    """Return ``random.uniform`` with MXNet's order of arguments."""
    return random.uniform(low, high, shape, dtype, ctx, out)


def random_normal(
    loc: float = 0.0,
    scale: float = 1.0,
    shape: Shape | None = None,
    ctx: Context | None = None,
    dtype: DType = None,
    out: NDArray | None = None,
) -> NDArray:
    """Return ``random.normal`` with MXNet's order of arguments."""
    return random.normal(loc, scale, shape, dtype, ctx, out)


# -- arrays from arrays ----------------------------------------------------------------------


def add_n(*args: Any) -> Any:
    """Return the sum of arrays, from left to right; row-sparse if all are."""
    if not args:
        raise ArgumentTypeError("add_n needs at least one array")
    for each in args:
        if not isinstance(each, RowSparseArray):
            checked_array(each)
    return functools.reduce(operator.add, args) if len(args) > 1 else args[0].copy()


def concatenate(arrays: Sequence[NDArray], axis: int = 0) -> NDArray:
    """Join arrays along an existing axis, as a new array."""
    return _joined("concatenate", arrays, axis)


def concat(*data: NDArray, dim: int = 1) -> NDArray:
    """Join the arrays along an axis, by default the second."""
    return _joined("concatenate", data, dim)


def stack(*data: NDArray, axis: int = 0) -> NDArray:
    """Join arrays of one shape along a new axis, as a new array."""
    return _joined("stack", data, axis)


# -- the methods of NDArray as functions; of row-sparse arrays, on their dense forms ----------


def sum(data: NDArray, axis: Axis = None, keepdims: bool = False) -> NDArray:
    """Call ``NDArray.sum``."""
    return _dense(data).sum(axis, keepdims)


def mean(data: NDArray, axis: Axis = None, keepdims: bool = False) -> NDArray:
    """Call ``NDArray.mean``."""
    return _dense(data).mean(axis, keepdims)


def max(data: NDArray, axis: Axis = None, keepdims: bool = False) -> NDArray:
    """Call ``NDArray.max``."""
    return _dense(data).max(axis, keepdims)


def min(data: NDArray, axis: Axis = None, keepdims: bool = False) -> NDArray:
    """Call ``NDArray.min``."""
    return _dense(data).min(axis, keepdims)


def norm(data: NDArray, ord: int = 2, axis: Axis = None, *, keepdims: bool = False) -> NDArray:
    """Call ``NDArray.norm``."""
    return _dense(data).norm(ord, axis, keepdims=keepdims)


def argmax(data: NDArray, axis: int | None = None, keepdims: bool = False) -> NDArray:
    """Call ``NDArray.argmax``."""
    return _dense(data).argmax(axis, keepdims)


def dot(
    lhs: NDArray, rhs: NDArray, transpose_a: bool = False, transpose_b: bool = False
) -> NDArray:
    """Call ``NDArray.dot``."""
    return _dense(lhs).dot(_dense(rhs), transpose_a, transpose_b)


def clip(data: NDArray, a_min: float, a_max: float) -> NDArray:
    """Call ``NDArray.clip``."""
    return _dense(data).clip(a_min, a_max)


def reshape(data: NDArray, shape: Shape, reverse: bool = False) -> NDArray:
    """Return ``data`` in another shape; shares memory if contiguous.

    See ``NDArray.reshape``.
    """
    return _dense(data).reshape(shape, reverse=reverse)


def flatten(data: NDArray) -> NDArray:
    """Call ``NDArray.flatten``."""
    return _dense(data).flatten()


def transpose(data: NDArray, axes: Sequence[int] = ()) -> NDArray:
    """Call ``NDArray.transpose``."""
    return _dense(data).transpose(axes=axes)


def expand_dims(data: NDArray, axis: int) -> NDArray:
    """Call ``NDArray.expand_dims``."""
    return _dense(data).expand_dims(axis)


def split(
    data: NDArray, num_outputs: int, axis: int = 1, squeeze_axis: bool = False
) -> NDArray | list[NDArray]:
    """Split ``data`` into ``num_outputs`` equal pieces along ``axis``.

    See ``NDArray.split``.
    """
    return _dense(data).split(num_outputs, axis, squeeze_axis)


def broadcast_to(data: NDArray, shape: Sequence[int]) -> NDArray:
    """Call ``NDArray.broadcast_to``."""
    return _dense(data).broadcast_to(shape)


# -- NumPy's ufuncs under MXNet's names ------------------------------------------------------


class _OfOne(Protocol):
    def __call__(self, data: NDArray) -> NDArray: ...


class _OfTwo(Protocol):
    def __call__(self, lhs: Any, rhs: Any) -> NDArray: ...


def _of_one(name: str, ufunc: np.ufunc, doc: str) -> _OfOne:
    """Return the ufunc as a function that keeps row-sparse data if possible."""

    def function(data: Any) -> NDArray:
        made: NDArray = ufunc(data if isinstance(data, RowSparseArray) else checked_array(data))
        return made

    function.__name__ = function.__qualname__ = name  # pickled by it
    function.__doc__ = doc
    return function


def _of_two(name: str, ufunc: np.ufunc, doc: str) -> _OfTwo:
    def function(lhs: Any, rhs: Any) -> NDArray:
        if not isinstance(lhs, RowSparseArray) and not isinstance(rhs, NDArray | RowSparseArray):
            checked_array(lhs)
        made: NDArray = ufunc(lhs, rhs)
        return made

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"{doc}; one side may be a number."
    return function


abs = _of_one("abs", np.absolute, "Magnitudes.")
exp = _of_one("exp", np.exp, "Powers of e.")
log = _of_one("log", np.log, "Natural logarithms; -inf for 0, NaN for negative elements.")
sqrt = _of_one("sqrt", np.sqrt, "Square roots; NaN for negative elements.")
square = _of_one("square", np.square, "Squares.")
sign = _of_one("sign", np.sign, "-1, 0 or 1.")
maximum = _of_two("maximum", np.maximum, "The greater of each two elements, or NaN")
minimum = _of_two("minimum", np.minimum, "The smaller of each two elements, or NaN")
add = _of_two("add", np.add, "``lhs + rhs``")
subtract = _of_two("subtract", np.subtract, "``lhs - rhs``")
multiply = _of_two("multiply", np.multiply, "``lhs * rhs``")
divide = _of_two("divide", np.true_divide, "``lhs / rhs``")

#: MXNet's other names of these; all of them broadcast axes of length 1.
broadcast_add, broadcast_sub, broadcast_mul, broadcast_div = add, subtract, multiply, divide


# -- inside ----------------------------------------------------------------------------------


def _made(name: str, shape: Shape, ctx: Context | None, dtype: DType) -> NDArray:
    context = checked_context(ctx)
    wanted = native_dtype("float32" if dtype is None else dtype)
    make = getattr(context.module, name)
    with working_on(context):
        return NDArray._of(make(checked_shape(shape), wanted), context)


def _joined(name: str, arrays: Sequence[NDArray], axis: int) -> NDArray:
    if not arrays:
        raise ArgumentTypeError(f"{name} needs at least one array")
    first = checked_array(arrays[0])
    memories = [first._other(each) for each in arrays]
    with working_on(first.context):
        joined = getattr(first.context.module, name)(memories, axis=axis)
    return NDArray._of(joined, first.context)


def _dense(data: Any) -> NDArray:
    """Return the dense form as an NDArray. Raises ``ArgumentTypeError``."""
    return NDArray(data.to_dense()) if isinstance(data, RowSparseArray) else checked_array(data)


def _sparse() -> Any:
    """Import ``nd.sparse``, which imports this module."""
    return importlib.import_module("kvstore.mxnet.nd.sparse")


if not TYPE_CHECKING:  # with this, a type checker would accept misspelt names

    def __getattr__(name):
        if name == "sparse":
            return _sparse()
        if name == "RowSparseNDArray":
            return _sparse().RowSparseNDArray
        raise missing("kvstore.nd", name, __all__)
