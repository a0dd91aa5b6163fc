"""``mx.nd.NDArray`` as the stores see it: the array that it wraps, once that may be accessed.

What reads values waits for the calls that still write them, what writes waits for all; shape,
dtype and device are known without. A store that lets values arrive later takes the wrapped
array first and works on that alone (``kvstore/arrays/pending.py``): asked from a callback of the
I/O thread, this adapter would wait for the very thread that it runs on. Any thread else may call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.arrays import NativeArray, adapter_on
from kvstore.arrays.buffer import ViewAdapter
from kvstore.arrays.context import Context

if TYPE_CHECKING:
    from kvstore.mxnet.nd.ndarray import NDArray


class NDArrayAdapter(ViewAdapter):
    """Implements :class:`kvstore.arrays.Adapter`; see there for each promise."""

    def view(self, array: NDArray) -> NativeArray:
        return array._memory()

    def shape(self, array: NDArray) -> tuple[int, ...]:
        return array.shape

    def dtype(self, array: NDArray) -> np.dtype[Any]:
        return array.dtype

    def context(self, array: NDArray) -> Context:
        # Of the memory: CPUs of all numbers share one.
        return adapter_on(array.context).context(array._array)

    def why_read_only(self, array: NDArray) -> str | None:
        return adapter_on(array.context).why_read_only(array._array)

    def memory(self, array: NDArray) -> np.ndarray[Any, Any] | None:
        return adapter_on(array.context).memory(array._memory_to_write())

    def device_memory(self, array: NDArray) -> NativeArray | None:
        return adapter_on(array.context).device_memory(array._memory_to_write())

    def from_host(self, host: np.ndarray[Any, Any], out: NDArray) -> None:
        adapter_on(out.context).from_host(host, out._memory_to_write())

    def assign(self, value: Any, out: NDArray) -> None:
        adapter_on(out.context).assign(value, out._memory_to_write())
