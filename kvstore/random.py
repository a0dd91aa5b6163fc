"""``mx.random``: random NDArrays, the same in every run with the same seed.

Numbers are drawn on the host by NumPy's PCG64 and copied to the device, so that they are the
same on every device; they are not those that MXNet draws from this seed. The generator is the
one state of a process that these functions share: any thread may draw, and the order of draws
of several threads is theirs. As in MXNet it starts from seed 0, on every worker alike; call
``seed(kv.rank)`` where workers must differ. Read next: ``nd.py``.

Source of the names: ``python/mxnet/random.py`` and ``ndarray/random.py`` of 1.9.1.
"""

from __future__ import annotations

import numpy as np

from kvstore.context import Context
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.ndarray import NDArray, new_array
from kvstore.ndmethods import DType, Shape, checked_shape

__all__ = ["normal", "seed", "uniform"]

_generator = np.random.Generator(np.random.PCG64(0))


def seed(seed_state: int) -> None:
    """Start the generator again from this number, 0 or greater."""
    global _generator
    try:
        _generator = np.random.Generator(np.random.PCG64(seed_state))
    except (TypeError, ValueError) as error:
        kind = ArgumentValueError if isinstance(error, ValueError) else ArgumentTypeError
        raise kind(f"seed_state must be an int of at least 0, got {seed_state!r}") from None


def uniform(
    low: float = 0.0,
    high: float = 1.0,
    shape: Shape = (1,),
    dtype: DType = "float32",
    ctx: Context | None = None,
) -> NDArray:
    """A new array of numbers from ``low`` to ``high``, all equally likely."""
    return new_array(_generator.uniform(low, high, checked_shape(shape)), ctx, dtype)


def normal(
    loc: float = 0.0,
    scale: float = 1.0,
    shape: Shape = (1,),
    dtype: DType = "float32",
    ctx: Context | None = None,
) -> NDArray:
    """A new array of normally distributed numbers: mean ``loc``, deviation ``scale``."""
    return new_array(_generator.normal(loc, scale, checked_shape(shape)), ctx, dtype)
