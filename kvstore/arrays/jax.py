"""The adapter for JAX arrays.

JAX arrays never change, so they can be pushed but not filled. NumPy views an array on the CPU
without a copy, and CuPy views one on a single CUDA device (through DLPack, which orders the work of
both). JAX copies any other array to the host, and bfloat16 on a GPU too. Reading waits until the
value has been computed. Any thread may call. Tests of arrays on GPUs are in ``tests/gpu``. Trees
of arrays: ``kvstore/frameworks/jax.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.arrays import Array, NativeArray, adapter_on
from kvstore.arrays.buffer import ViewAdapter
from kvstore.arrays.context import Context, gpu
from kvstore.arrays.cupy import load as load_cupy
from kvstore.arrays.dtypes import is_bfloat16
from kvstore.errors import ArgumentTypeError

_HOST = Context("cpu", 0)
_CUDA = 2
"""The device type in ``__dlpack_device__`` (dlpack.h, kDLCUDA)."""


class JaxAdapter(ViewAdapter):
    """The adapter of JAX arrays; see :class:`kvstore.arrays.Adapter`."""

    def shape(self, array: Array) -> tuple[int, ...]:
        return tuple(array.shape)

    def dtype(self, array: Array) -> np.dtype[Any]:
        _check(array)
        dtype: np.dtype[Any] = array.dtype
        return dtype

    def view(self, array: Array) -> NativeArray:
        if _gpu_of(array) is not None:
            return load_cupy().from_dlpack(array)
        return np.asarray(array)

    def context(self, array: Array) -> Context:
        device_id = _gpu_of(array)
        return _HOST if device_id is None else gpu(device_id)

    def memory(self, array: Array) -> np.ndarray[Any, Any] | None:
        return None

    def device_memory(self, array: Array) -> NativeArray | None:
        return None

    def why_read_only(self, array: Array) -> str | None:
        return "a JAX array is immutable; pull without out, or pass a NumPy array as out"

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        return adapter_on(_HOST).to_host(np.asarray(array))


def _check(array: Any) -> None:
    """Check that this object of JAX is an array whose values can be read.

    Raises ``ArgumentTypeError``.
    """
    import jax

    if isinstance(array, jax.core.Tracer):
        raise ArgumentTypeError(
            "a store cannot read a traced JAX value (inside jax.jit, jax.grad or jax.vmap); "
            "call the store outside the traced function, or through jax.experimental.io_callback"
        )
    if not isinstance(array, jax.Array):
        raise ArgumentTypeError(
            f"a value must be an array, got {type(array).__qualname__} of JAX; pass a jax.Array"
        )
    if not isinstance(array.dtype, np.dtype):
        raise ArgumentTypeError(
            f"a store cannot hold a JAX array of dtype {array.dtype}; for random keys, pass "
            "jax.random.key_data(keys)"
        )
    if array.is_deleted():
        raise ArgumentTypeError(
            "this JAX array was deleted or donated (donate_argnums) and cannot be read; pass a "
            "live array"
        )
    if not array.is_fully_addressable:
        raise ArgumentTypeError(
            "this JAX array is sharded over several processes; pass one of this process's "
            "shards, array.addressable_shards[i].data"
        )


def _gpu_of(array: Any) -> int | None:
    """Return the number of the CUDA device where CuPy can view the array, or None."""
    if len(array.devices()) != 1 or is_bfloat16(array.dtype):
        return None
    if next(iter(array.devices())).platform == "cpu":
        return None
    kind, number = array.__dlpack_device__()
    return int(number) if kind == _CUDA else None
