"""The adapter for CuPy arrays; the only import of CuPy in the project.

CuPy is loaded at the first ``gpu(i)`` or the first CuPy array, never before. Arithmetic is
written as NumPy ufuncs, which CuPy arrays execute on their device (NEP 13), so each formula is
written only once. Any thread may call: CuPy keeps the current device for each thread, and this
module restores it. The tests are in ``tests/gpu``.

Order of work on a GPU: kernels and copies are queued on the calling thread's current stream.
A copy between two devices first waits for the source device's current stream. A sum, or a copy to
the host, waits for its own stream. So when a call returns, the caller may overwrite its arrays
from any stream.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np

from kvstore.arrays import Array, NativeAdapter, NativeArray, adapter_for, adapter_on
from kvstore.arrays.context import Context
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.errors import MissingDependencyError


def load() -> ModuleType:
    """Import ``cupy`` and return it. Raises ``MissingDependencyError``."""
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
    """Return a C-ordered CuPy array on the same device, a copy if necessary."""
    if array.flags.c_contiguous:
        return array
    cupy = load()
    with cupy.cuda.Device(array.device.id):
        made = cupy.ascontiguousarray(array)
        cupy.cuda.get_current_stream().synchronize()
    return made


class CupyAdapter(NativeAdapter):
    """The adapter of CuPy arrays; see :class:`kvstore.arrays.Adapter`."""

    def memory(self, array: Array) -> np.ndarray[Any, Any] | None:
        return None

    def device_memory(self, array: Array) -> NativeArray | None:
        return array if array.flags.c_contiguous else None

    def context(self, array: Array) -> Context:
        return _gpu(int(array.device.id))

    @contextmanager
    def on(self, context: Context) -> Iterator[None]:
        cupy = load()
        with cupy.cuda.Device(context.device_id):
            yield
            cupy.cuda.get_current_stream().synchronize()

    def why_read_only(self, array: Array) -> str | None:
        return None

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
        with self.on(source):  # waits for queued work, which may still write to the array
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


@functools.cache
def _gpu(device: int) -> Context:
    return Context("gpu", device)


# -- devices, streams and addresses --------------------------------------------------------

Rows = Sequence[Sequence[NativeArray]]
"""For each key a row of its arrays: C-contiguous CuPy arrays of the same size and dtype."""


@contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make this GPU the thread's current device within the block."""
    with load().cuda.Device(device):
        yield


def current_stream(device: int) -> Any:
    """Return the calling thread's current stream of this GPU."""
    return load().cuda.get_current_stream(device)


@functools.cache
def own_stream(device: int, purpose: str) -> Any:
    """Return the stream of this GPU that stores use for this purpose."""
    with on_device(device):
        return load().cuda.Stream(non_blocking=True)


def wait_for(stream: Any, home: int, other: int) -> None:
    """Make ``stream`` of GPU ``home`` wait for the current stream of another GPU."""
    _may_reach(home, other)
    with on_device(other):
        event = current_stream(other).record()
    stream.wait_event(event)


@functools.cache
def _may_reach(device: int, peer: int) -> None:
    """Enable direct copies between two GPUs if they support it."""
    runtime = load().cuda.runtime
    if not runtime.deviceCanAccessPeer(device, peer):
        return
    with on_device(device):
        try:
            runtime.deviceEnablePeerAccess(peer)
        except runtime.CUDARuntimeError:  # another library has done it already
            return


def addresses_of(rows: Sequence[Sequence[NativeArray]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return the addresses of these CuPy arrays; all rows have the same length."""
    addresses = np.array([*map(_address, chain.from_iterable(rows))], np.uint64)
    return addresses.reshape(len(rows), -1)


def devices_of(rows: Sequence[Sequence[NativeArray]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the numbers of these CuPy arrays' GPUs; all rows have the same length."""
    devices = np.array([*map(_device, chain.from_iterable(rows))], np.int64)
    return devices.reshape(len(rows), -1)


def near(rows: Sequence[Sequence[Array]], home: Context) -> Rows:
    """Return C-contiguous CuPy arrays; those on the host are copied to ``home``.

    They share the caller's memory where possible.
    """
    arrays = [*chain.from_iterable(rows)]
    if {*map(type, arrays)} == {load().ndarray} and all(map(_is_contiguous, arrays)):
        return rows
    return [[_near(array, home) for array in row] for row in rows]


# A store calls these for hundreds of arrays in each call; they are faster than loops.
_address = attrgetter("data.ptr")
_device = attrgetter("data.device_id")
_is_contiguous = attrgetter("flags.c_contiguous")


def _near(array: Array, home: Context) -> NativeArray:
    adapter = adapter_for(array)
    if isinstance(adapter, CupyAdapter):
        return contiguous(array)
    device = adapter.context(array)
    where = device if device.device_type == "gpu" else home
    return contiguous(adapter_on(home).to_context(array, where))
