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

Such a script moves over by changing its import. This is the part of MXNet's array library that
a script around a KVStore touches, not a library for building networks: values on a CPU are
NumPy's, on a GPU CuPy's, and NumPy's ufuncs work on both. The functions here make arrays or
call the method of the same name; any thread may. ``NDArray``'s docstring says what else holds.
Read next: ``ndarray.py``.

Where it differs from MXNet: comparisons give bool; ``a[1:3]``, ``a[::2]`` and ``reshape`` share
the array's memory, everything else is a copy; dtypes mix by NumPy's rules, in which a number,
Python's or NumPy's, never changes the dtype of a float array. Nothing is saved to files here.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore import random
from kvstore.absent import missing
from kvstore.context import Context
from kvstore.errors import ArgumentTypeError
from kvstore.lazy import waitall
from kvstore.ndarray import NDArray, checked_array, new_array
from kvstore.ndmethods import (
    Axis,
    DType,
    Shape,
    checked_context,
    checked_dtype,
    checked_shape,
    working_on,
)
from kvstore.random import normal as random_normal
from kvstore.random import uniform as random_uniform

__all__ = [
    "NDArray",
    "abs",
    "add_n",
    "arange",
    "array",
    "clip",
    "concat",
    "concatenate",
    "dot",
    "empty",
    "exp",
    "full",
    "log",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "norm",
    "ones",
    "ones_like",
    "random",
    "random_normal",
    "random_uniform",
    "sign",
    "sqrt",
    "square",
    "stack",
    "sum",
    "waitall",
    "zeros",
    "zeros_like",
]

# -- arrays from nothing ---------------------------------------------------------------------


def array(source_array: Any, ctx: Context | None = None, dtype: DType = None) -> NDArray:
    """A new array of these values on ``ctx`` (``cpu(0)`` by default).

    ``source_array`` is an array of any library that stores take, or numbers in nested lists.
    ``dtype`` is that of an NDArray, else float32, also for arrays of float64 and integers.
    Raises ``ArgumentTypeError`` for anything else.
    """
    if isinstance(source_array, NDArray) and dtype is None:
        dtype = source_array.dtype
    return new_array(source_array, ctx, "float32" if dtype is None else dtype)


def empty(shape: Shape, ctx: Context | None = None, dtype: DType = "float32") -> NDArray:
    """A new array of whatever the memory held."""
    return _made("empty", shape, ctx, dtype)


def zeros(shape: Shape, ctx: Context | None = None, dtype: DType = "float32") -> NDArray:
    """A new array of zeros."""
    return _made("zeros", shape, ctx, dtype)


def ones(shape: Shape, ctx: Context | None = None, dtype: DType = "float32") -> NDArray:
    """A new array of ones."""
    return _made("ones", shape, ctx, dtype)


def full(shape: Shape, val: float, ctx: Context | None = None, dtype: DType = "float32") -> NDArray:
    """A new array of this number."""
    made = _made("empty", shape, ctx, dtype)
    made[:] = val
    return made


def arange(
    start: float,
    stop: float | None = None,
    step: float = 1.0,
    repeat: int = 1,
    ctx: Context | None = None,
    dtype: DType = "float32",
) -> NDArray:
    """A new array of the numbers from ``start`` (or 0) up to ``stop``, each ``repeat`` times."""
    first, end = (0, start) if stop is None else (start, stop)
    return new_array(np.arange(first, end, step).repeat(repeat), ctx, dtype)


def zeros_like(data: NDArray) -> NDArray:
    """Zeros of the shape, dtype and device of ``data``."""
    return zeros(checked_array(data).shape, data.context, data.dtype)


def ones_like(data: NDArray) -> NDArray:
    """Ones of the shape, dtype and device of ``data``."""
    return ones(checked_array(data).shape, data.context, data.dtype)


# -- arrays from arrays ----------------------------------------------------------------------


def add_n(*args: NDArray) -> NDArray:
    """The sum of arrays, added left to right."""
    if not args:
        raise ArgumentTypeError("add_n needs at least one array")
    if len(args) == 1:
        return checked_array(args[0]).copy()
    return functools.reduce(operator.add, map(checked_array, args))


def concatenate(arrays: Sequence[NDArray], axis: int = 0) -> NDArray:
    """A new array of these, one after the other along an axis that exists."""
    return _joined("concatenate", arrays, axis)


def concat(*data: NDArray, dim: int = 1) -> NDArray:
    """``concatenate`` with the arrays as arguments, along the second axis by default."""
    return _joined("concatenate", data, dim)


def stack(*data: NDArray, axis: int = 0) -> NDArray:
    """A new array of these, one after the other along a new axis."""
    return _joined("stack", data, axis)


# -- the methods of NDArray as functions -----------------------------------------------------


def sum(data: NDArray, axis: Axis = None, keepdims: bool = False) -> NDArray:
    """``NDArray.sum``."""
    return checked_array(data).sum(axis, keepdims)


def mean(data: NDArray, axis: Axis = None, keepdims: bool = False) -> NDArray:
    """``NDArray.mean``."""
    return checked_array(data).mean(axis, keepdims)


def max(data: NDArray, axis: Axis = None, keepdims: bool = False) -> NDArray:
    """``NDArray.max``."""
    return checked_array(data).max(axis, keepdims)


def min(data: NDArray, axis: Axis = None, keepdims: bool = False) -> NDArray:
    """``NDArray.min``."""
    return checked_array(data).min(axis, keepdims)


def norm(data: NDArray, ord: int = 2, axis: Axis = None, keepdims: bool = False) -> NDArray:
    """``NDArray.norm``."""
    return checked_array(data).norm(ord, axis, keepdims)


def dot(
    lhs: NDArray, rhs: NDArray, transpose_a: bool = False, transpose_b: bool = False
) -> NDArray:
    """``NDArray.dot``."""
    return checked_array(lhs).dot(rhs, transpose_a, transpose_b)


def clip(data: NDArray, a_min: float, a_max: float) -> NDArray:
    """``NDArray.clip``."""
    return checked_array(data).clip(a_min, a_max)


# -- NumPy's ufuncs under MXNet's names ------------------------------------------------------


def abs(data: NDArray) -> NDArray:
    """Magnitudes."""
    return checked_array(data).abs()


def exp(data: NDArray) -> NDArray:
    """Powers of e."""
    return checked_array(data)._elementwise(np.exp)


def log(data: NDArray) -> NDArray:
    """Natural logarithms; -inf for 0, NaN for negative elements."""
    return checked_array(data)._elementwise(np.log)


def sqrt(data: NDArray) -> NDArray:
    """Square roots; NaN for negative elements."""
    return checked_array(data).sqrt()


def square(data: NDArray) -> NDArray:
    """Squares."""
    return checked_array(data).square()


def sign(data: NDArray) -> NDArray:
    """-1, 0 or 1."""
    return checked_array(data)._elementwise(np.sign)


def maximum(lhs: Any, rhs: Any) -> NDArray:
    """The greater of each two elements; one side may be a number. NaN wins."""
    return _of_two(np.maximum, lhs, rhs)


def minimum(lhs: Any, rhs: Any) -> NDArray:
    """The smaller of each two elements; one side may be a number. NaN wins."""
    return _of_two(np.minimum, lhs, rhs)


# -- inside ----------------------------------------------------------------------------------


def _made(name: str, shape: Shape, ctx: Context | None, dtype: DType) -> NDArray:
    context = checked_context(ctx)
    wanted = checked_dtype("float32" if dtype is None else dtype)
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


def _of_two(ufunc: np.ufunc, lhs: Any, rhs: Any) -> NDArray:
    if not builtins.any(isinstance(side, NDArray) for side in (lhs, rhs)):
        checked_array(lhs)
    made: NDArray = ufunc(lhs, rhs)
    return made


def __getattr__(name: str) -> Any:
    if name == "sparse":
        return importlib.import_module("kvstore.ndsparse")
    raise missing("kvstore.nd", name, __all__)
