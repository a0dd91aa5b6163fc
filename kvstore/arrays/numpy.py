"""The adapter for NumPy arrays: everything lives on ``cpu(0)``.

The reference for ``cupy.py``: same operations, same bits. Uses no other array library; the
arithmetic itself is in ``kvstore/arrays/cpu/sums.py``. Any thread may call.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from kvstore.arrays import Array, NativeArray, adapter_for
from kvstore.arrays.context import Context
from kvstore.arrays.cpu import sums

_HOST = Context("cpu", 0)


class NumpyAdapter:
    """Implements :class:`kvstore.arrays.Adapter`; see there for each promise."""

    def shape(self, array: Array) -> tuple[int, ...]:
        return tuple(array.shape)

    def dtype(self, array: Array) -> np.dtype[Any]:
        dtype: np.dtype[Any] = array.dtype
        return dtype

    def memory(self, array: Array) -> np.ndarray[Any, Any] | None:
        # A subclass may have a shape of its own mind (numpy.matrix); a memmap has none.
        plain = type(array) in (np.ndarray, np.memmap) and array.dtype.isnative
        if not plain or not (array.flags.c_contiguous and array.flags.writeable):
            return None
        return np.asarray(array).reshape(-1).view(np.uint8)

    def device_memory(self, array: Array) -> NativeArray | None:
        return None

    def written(self, array: Array) -> None:
        pass

    def context(self, array: Array) -> Context:
        return _HOST

    def on(self, context: Context) -> AbstractContextManager[None]:
        return nullcontext()

    def why_read_only(self, array: Array) -> str | None:
        if array.flags.writeable:
            return None
        return "NumPy may not write to its memory; pass a copy, numpy.array(value)"

    def view(self, array: Array) -> NativeArray:
        return array

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        # A subclass such as numpy.matrix reshapes in its own way, so it becomes a plain view.
        # ascontiguousarray alone would turn a 0-d array into a 1-d one.
        plain = np.asarray(array, dtype=array.dtype.newbyteorder("="))
        return plain if plain.flags.c_contiguous else np.ascontiguousarray(plain)

    def from_host(self, host: np.ndarray[Any, Any], out: Array) -> None:
        # Values that do not fit (1e9 as float16, NaN as int) follow IEEE and C, as in MXNet.
        with np.errstate(all="ignore"):
            np.copyto(out, host, casting="unsafe")

    def assign(self, value: Array, out: Array) -> None:
        self.from_host(adapter_for(value).to_host(value), out)

    def to_context(self, array: Array, context: Context) -> NativeArray:
        return adapter_for(array).to_host(array)

    def copy(self, array: Array) -> NativeArray:
        return np.array(self.to_host(array), order="C", copy=True)

    def sum_in_order(
        self, arrays: Sequence[Array], context: Context, dtype: np.dtype[Any]
    ) -> NativeArray:
        total = np.empty(adapter_for(arrays[0]).shape(arrays[0]), dtype)
        contributions = [self.to_context(array, context).reshape(-1) for array in arrays]
        sums.sum_in_order(contributions, total.reshape(-1))
        return total
