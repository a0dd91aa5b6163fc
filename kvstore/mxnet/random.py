"""``mx.random``: random NDArrays, the same in every run with the same seed.

Numbers are drawn on the host by NumPy's PCG64 and copied to the device, so that they are the
same on every device. They differ from MXNet's numbers for the same seed. All functions share one
generator for the process. Any thread may draw; with several threads the order of draws is not
fixed. As in MXNet, the generator starts from seed 0 on every worker; call ``seed(kv.rank)`` if
workers must differ. Read next: ``mxnet/nd/__init__.py``.

Source of the names: ``python/mxnet/random.py`` and ``ndarray/random.py`` of 1.9.1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvstore.arrays.context import Context
from kvstore.arrays.dtypes import checked_shape
from kvstore.errors import ArgumentTypeError, ValueMismatchError
from kvstore.mxnet.nd.methods import DType, Shape, native_dtype
from kvstore.mxnet.nd.ndarray import NDArray, checked_array, new_array

__all__ = ["normal", "seed", "uniform"]

_generator = np.random.Generator(np.random.PCG64(0))


def seed(seed_state: int) -> None:
    """Restart the generator from an int, which may be negative."""
    global _generator
    try:
        number = operator.index(seed_state)
    except TypeError:
        raise ArgumentTypeError(f"seed_state must be an int, got {seed_state!r}") from None
    _generator = np.random.Generator(np.random.PCG64(number if number >= 0 else number % 2**64))


def uniform(
    low: float = 0.0,
    high: float = 1.0,
    shape: Shape | None = None,
    dtype: DType = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
) -> NDArray:
    """Return uniform random numbers from ``low`` to ``high``; see ``normal``."""
    return _drawn(lambda lengths: _generator.uniform(low, high, lengths), shape, dtype, ctx, out)


def normal(
    loc: float = 0.0,
    scale: float = 1.0,
    shape: Shape | None = None,
    dtype: DType = None,
    ctx: Context | None = None,
    out: NDArray | None = None,
) -> NDArray:
    """Return normally distributed numbers: mean ``loc``, deviation ``scale``.

    A new array of ``shape``, ``(1,)`` by default, of float32 unless ``dtype`` says otherwise; or
    ``out``, filled. Raises ``ValueMismatchError`` where ``out`` has another shape or dtype than
    the call names.
    """
    return _drawn(lambda lengths: _generator.normal(loc, scale, lengths), shape, dtype, ctx, out)


def _drawn(
    draw: Callable[[Sequence[int]], np.ndarray[Any, Any]],
    shape: Shape | None,
    dtype: DType,
    ctx: Context | None,
    out: NDArray | None,
) -> NDArray:
    if out is None:
        lengths = (1,) if shape is None else checked_shape(shape)
        return new_array(draw(lengths), ctx, "float32" if dtype is None else dtype)
    target = checked_array(out)
    wanted = target.dtype if dtype is None else native_dtype(dtype)
    lengths = target.shape if shape is None else checked_shape(shape)
    if (lengths, wanted) != (target.shape, target.dtype):
        raise ValueMismatchError(
            f"out must have shape {lengths} and dtype {wanted}, got {target.shape} and "
            f"{target.dtype}"
        )
    target[:] = draw(lengths)
    return target
