"""Adapters for NumPy arrays and for arrays that NumPy or CuPy can view in place.

``NumpyAdapter`` is the reference for ``cupy.py``: same operations, same bits; the arithmetic itself
is in ``kvstore/arrays/cpu/sums.py``. ``ViewAdapter`` builds all methods on one, ``view``, which
``torch.py`` and ``jax.py`` define for their arrays. For arrays of any other library,
``BufferAdapter`` tries, in this order: ``__cuda_array_interface__`` (read by CuPy), NumPy's
``__array_interface__``, DLPack, and Python's buffer protocol (``array.array``, ``memoryview``,
``ctypes`` arrays). They are filled in place if their owner allows writing. Any thread may call;
an adapter has no state.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from kvstore.arrays import Array, NativeAdapter, NativeArray, adapter_for, adapter_on
from kvstore.arrays.context import Context
from kvstore.arrays.cpu import sums
from kvstore.arrays.cupy import load as load_cupy
from kvstore.errors import ArgumentTypeError, MissingDependencyError

_HOST = Context("cpu", 0)


class NumpyAdapter(NativeAdapter):
    """The adapter of NumPy's arrays; they all live on ``cpu(0)``."""

    def memory(self, array: Array) -> np.ndarray[Any, Any] | None:
        # Subclasses such as numpy.matrix reshape in their own way; numpy.memmap does not.
        plain = type(array) in (np.ndarray, np.memmap) and array.dtype.isnative
        if not plain or not (array.flags.c_contiguous and array.flags.writeable):
            return None
        return np.asarray(array).reshape(-1).view(np.uint8)

    def device_memory(self, array: Array) -> NativeArray | None:
        return None

    def context(self, array: Array) -> Context:
        return _HOST

    def on(self, context: Context) -> AbstractContextManager[None]:
        return nullcontext()

    def why_read_only(self, array: Array) -> str | None:
        if array.flags.writeable:
            return None
        return (
            "NumPy cannot write to its memory; pass a copy, numpy.array(value), or, for a view "
            "from kv.view, make it the only out of its key, and call kv.view again after a push"
        )

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


class ViewAdapter(abc.ABC):
    """A base of :class:`kvstore.arrays.Adapter` classes that need only ``view``."""

    @abc.abstractmethod
    def view(self, array: Array) -> NativeArray:
        """Return the array as a NumPy or CuPy array."""

    def shape(self, array: Array) -> tuple[int, ...]:
        view = self.view(array)
        return adapter_for(view).shape(view)

    def dtype(self, array: Array) -> np.dtype[Any]:
        view = self.view(array)
        return adapter_for(view).dtype(view)

    def memory(self, array: Array) -> np.ndarray[Any, Any] | None:
        view = self.view(array)
        return adapter_for(view).memory(view)

    def device_memory(self, array: Array) -> NativeArray | None:
        view = self.view(array)
        return adapter_for(view).device_memory(view)

    def written(self, array: Array) -> None:  # noqa: B027  (most libraries keep no count)
        pass

    def context(self, array: Array) -> Context:
        view = self.view(array)
        return adapter_for(view).context(view)

    def on(self, context: Context) -> AbstractContextManager[None]:
        return adapter_on(context).on(context)

    def why_read_only(self, array: Array) -> str | None:
        view = self.view(array)
        return adapter_for(view).why_read_only(view)

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        view = self.view(array)
        return adapter_for(view).to_host(view)

    def from_host(self, host: np.ndarray[Any, Any], out: Array) -> None:
        view = self.view(out)
        adapter_for(view).from_host(host, view)
        self.written(out)

    def assign(self, value: Array, out: Array) -> None:
        view = self.view(out)
        adapter_for(view).assign(value, view)
        self.written(out)

    def to_context(self, array: Array, context: Context) -> NativeArray:
        return adapter_on(context).to_context(array, context)

    def copy(self, array: Array) -> NativeArray:
        view = self.view(array)
        return adapter_for(view).copy(view)

    def sum_in_order(
        self, arrays: Sequence[Array], context: Context, dtype: np.dtype[Any]
    ) -> NativeArray:
        return adapter_on(context).sum_in_order(arrays, context, dtype)


_HOST_KINDS = (1, 3)
_CUDA_KINDS = (2, 13)
"""Device types in ``__dlpack_device__`` (dlpack.h): plain and pinned, plain and managed."""


class BufferAdapter(ViewAdapter):
    """An :class:`kvstore.arrays.Adapter` of objects that offer their memory."""

    def view(self, array: Array) -> NativeArray:
        try:
            return _view(array)
        except MissingDependencyError:
            raise
        # This runs the other library's code, which may raise anything.
        except Exception as error:
            raise ArgumentTypeError(
                f"cannot read the memory of a {type(array).__qualname__} as an array "
                f"({type(error).__name__}: {error}); pass a NumPy array of its values"
            ) from error


def _view(array: Any) -> NativeArray:
    kind = type(array)
    if hasattr(kind, "__cuda_array_interface__"):
        return load_cupy().asarray(array)
    if hasattr(kind, "__array_interface__"):
        return np.asarray(array)
    if not hasattr(kind, "__dlpack__"):
        return np.asarray(memoryview(array))
    device, _ = array.__dlpack_device__()
    if device in _HOST_KINDS:
        return np.from_dlpack(array)
    if device in _CUDA_KINDS:
        return load_cupy().from_dlpack(array)
    raise ArgumentTypeError(
        f"an array must be on a CPU or a CUDA GPU, got DLPack device type {int(device)}; copy it "
        "to the CPU first"
    )
