"""The adapter for CuPy arrays, and the only import of CuPy in the project.

CuPy is loaded by the first ``gpu(i)`` or the first CuPy array, never before. Arithmetic is
written as NumPy ufuncs, which CuPy arrays carry out on their device (NEP 13), so that the
formulas exist once. Any thread may call: the current device is CuPy's per-thread setting and
is put back. ``tests/gpu`` holds the tests.

Order of work on a GPU: kernels and copies are queued on the calling thread's current stream.
A copy between two devices first waits for the source device's current stream, and a sum or a
copy out waits for its own, so when a call returns the caller may overwrite its arrays from
any stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from kvstore.arrays import Array, NativeArray, adapter_for
from kvstore.arrays.context import Context
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.errors import MissingDependencyError


def load() -> ModuleType:
    """The module ``cupy``. Raises ``MissingDependencyError`` when it cannot be imported."""
    try:
        import cupy
    except ImportError as error:
        raise MissingDependencyError(
            "arrays on a GPU need CuPy: pip install cupy-cuda12x (for CUDA 12) "
            f"or cupy-cuda13x (for CUDA 13); importing it failed with: {error}"
        ) from error
    module: ModuleType = cupy
    return module


def contiguous(array: NativeArray) -> NativeArray:
    """A CuPy array in C order, on its device: itself, or a new one that is there."""
    if array.flags.c_contiguous:
        return array
    cupy = load()
    with cupy.cuda.Device(array.device.id):
        made = cupy.ascontiguousarray(array)
        cupy.cuda.get_current_stream().synchronize()
    return made


class CupyAdapter:
    """Implements :class:`kvstore.arrays.Adapter`; see there for each promise."""

    def shape(self, array: Array) -> tuple[int, ...]:
        return tuple(array.shape)

    def dtype(self, array: Array) -> np.dtype[Any]:
        dtype: np.dtype[Any] = array.dtype  # CuPy's dtypes are NumPy's
        return dtype

    def memory(self, array: Array) -> np.ndarray[Any, Any] | None:
        return None

    def device_memory(self, array: Array) -> NativeArray | None:
        return array if array.flags.c_contiguous else None

    def written(self, array: Array) -> None:
        pass

    def context(self, array: Array) -> Context:
        return Context("gpu", int(array.device.id))

    @contextmanager
    def on(self, context: Context) -> Iterator[None]:
        cupy = load()
        with cupy.cuda.Device(context.device_id):
            yield
            cupy.cuda.get_current_stream().synchronize()

    def why_read_only(self, array: Array) -> str | None:
        return None

    def view(self, array: Array) -> NativeArray:
        return array

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        cupy = load()
        with cupy.cuda.Device(array.device.id):
            host: np.ndarray[Any, Any] = cupy.asnumpy(array, order="C")
            return host

    def from_host(self, host: np.ndarray[Any, Any], out: Array) -> None:
        with self.on(self.context(out)):
            out[...] = load().asarray(host)

    def assign(self, value: Array, out: Array) -> None:
        device = self.context(out)
        here = self.to_context(value, device)
        with self.on(device):
            out[...] = here

    def to_context(self, array: Array, context: Context) -> NativeArray:
        cupy = load()
        array = adapter_for(array).view(array)
        if not isinstance(array, cupy.ndarray):
            host = adapter_for(array).to_host(array)
            with self.on(context):
                return cupy.asarray(host)
        source = self.context(array)
        if source == context:
            return array
        with self.on(source):  # waits for what is queued there, which may still write to it
            made = contiguous(array)
        # CuPy copies only contiguous arrays between devices.
        with self.on(context):
            return cupy.asarray(made)

    def copy(self, array: Array) -> NativeArray:
        with self.on(self.context(array)):
            return array.copy(order="C")

    def sum_in_order(
        self, arrays: Sequence[Array], context: Context, dtype: np.dtype[Any]
    ) -> NativeArray:
        working = accumulation_dtype(adapter_for(arrays[0]).dtype(arrays[0]))
        here = [self.to_context(array, context) for array in arrays]
        with self.on(context):
            if len(here) == 1:
                return here[0].astype(dtype, order="C", copy=True)
            total = np.add(here[0], here[1], dtype=working)
            for array in here[2:]:
                np.add(total, array, out=total)
            return total.astype(dtype, order="C", copy=False)
