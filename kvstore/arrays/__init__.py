"""Adapters for array libraries: the few operations that a store needs of a value.

One file per library implements :class:`Adapter`; ``adapter_for`` chooses it by the name of the
value's class, so a library is imported only when a caller passes one of its arrays. Adapters keep
no arrays, and change only those that they are told to write. Any thread may call; an adapter has
no state. Read next: ``buffer.py`` for NumPy's arrays, then ``cupy.py`` (the same on GPUs); the
adapters of all other libraries view arrays as NumPy's or CuPy's.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from kvstore.arrays.context import Context
from kvstore.arrays.dtypes import check_dtype as check_dtype
from kvstore.errors import ArgumentTypeError

Array = Any
"""An array of any library that ``adapter_for`` knows; they have no common base class."""

NativeArray = Any
"""A ``numpy.ndarray`` or a ``cupy.ndarray``."""

_LIBRARIES = {
    ("numpy", "ndarray"): "numpy",
    ("cupy", "ndarray"): "cupy",
    ("torch", "Tensor"): "torch",
}
_MODULES = {"numpy": "buffer"}
"""The modules of adapters whose names differ from their library's."""
_JAX_PACKAGES = ("jax", "jaxlib")
_PACKAGES = frozenset({*(package for package, _ in _LIBRARIES), *_JAX_PACKAGES})
_OFFERS = ("__array_interface__", "__cuda_array_interface__", "__dlpack__")
_NO_DTYPE = (bool, int, float, complex, str, bytes, bytearray, list, tuple, np.generic)
"""Types that are not arrays or lack a dtype, although some expose their memory as an array."""


_adapters: dict[type, Adapter] = {}
"""Adapters by class, for the libraries' own classes; a cache, since they are used often."""

_registered: dict[type, Adapter] = {}
"""Adapters by class, as given to ``register``."""


class Adapter(Protocol):
    """The operations that a store needs from an array library.

    Stores access a caller's array only through its adapter: ``array.dtype`` of a tensor is
    not a dtype of NumPy. Call ``dtype`` first for a caller's array. It raises an error for arrays
    whose values cannot be read; the other methods do not check that again.

    ``host`` arrays are NumPy's. The caller owns results that are called "new". Any other result may
    share the argument's memory; do not write to it, and read it before the argument changes.
    """

    def shape(self, array: Array) -> tuple[int, ...]:
        """Return the array's shape."""

    def dtype(self, array: Array) -> np.dtype[Any]:
        """Return the array's dtype as NumPy's, in any byte order.

        Stores may not be able to hold it.

        Raises ``ArgumentTypeError`` for an array of the library whose values cannot be read.
        """

    def memory(self, array: Array) -> np.ndarray[Any, Any] | None:
        """Return the array's own memory as flat, writable bytes, in element order.

        Returns None if values in native byte order cannot be written there directly. Call
        ``written`` after writing.
        """

    def device_memory(self, array: Array) -> NativeArray | None:
        """Return the array's memory on a GPU as a writable C-contiguous CuPy array.

        Returns None if the memory does not hold the elements unchanged. Call ``written`` after
        writing.
        """

    def written(self, array: Array) -> None:
        """Tell the library that an array was written to, if it counts writes."""

    def context(self, array: Array) -> Context:
        """Return the device on which the array lives."""

    def on(self, context: Context) -> AbstractContextManager[None]:
        """Use ``context`` as the library's device in a block; at its end, wait for work."""

    def why_read_only(self, array: Array) -> str | None:
        """Return why the array cannot be written to and what to do; None if it can."""

    def view(self, array: Array) -> NativeArray:
        """Return the values as NumPy's or CuPy's array, without a copy where possible."""

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """Return a C-contiguous array in native byte order; without a copy if possible."""

    def from_host(self, host: np.ndarray[Any, Any], out: Array) -> None:
        """Set ``out`` to ``host`` (same shape), cast to its dtype; any strides."""

    def assign(self, value: Array, out: Array) -> None:
        """Assign a value of any library on any device, as ``from_host`` does."""

    def to_context(self, array: Array, context: Context) -> NativeArray:
        """Return the values on ``context``, without a copy if they already are there.

        ``array`` may belong to another library.
        """

    def copy(self, array: Array) -> NativeArray:
        """Return a new C-contiguous array of the same dtype on the same device."""

    def sum_in_order(
        self, arrays: Sequence[Array], context: Context, dtype: np.dtype[Any]
    ) -> NativeArray:
        """Return a new array on ``context``: ((a0 + a1) + a2) + ..., cast to ``dtype``.

        The arrays share shape and dtype and may be of several libraries on several devices.
        float16 and bfloat16 are added in float32, everything else in its own dtype; the order
        never changes, so neither do the bits.
        """


class NativeAdapter:
    """The methods that the adapters of NumPy and CuPy arrays share."""

    def shape(self, array: Array) -> tuple[int, ...]:
        return tuple(array.shape)

    def dtype(self, array: Array) -> np.dtype[Any]:
        dtype: np.dtype[Any] = array.dtype
        return dtype

    def written(self, array: Array) -> None:
        pass

    def view(self, array: Array) -> NativeArray:
        return array


def adapter_for(value: object) -> Adapter:
    """Return the adapter of the library that ``value`` belongs to.

    Arrays of NumPy, CuPy, PyTorch and JAX are recognised by their classes; any other object must
    offer the buffer protocol, ``__array_interface__``, ``__cuda_array_interface__`` or DLPack.
    Raises ``ArgumentTypeError`` for all other objects, including Python scalars and lists, which
    have no dtype.
    """
    known = _adapters.get(type(value))
    if known is not None:
        return known
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentTypeError(
            "a store cannot keep the mask of a NumPy masked array; pass value.filled(...) instead"
        )
    for base in type(value).__mro__:
        if base in _registered:
            return _registered[base]
    library = _library_of(type(value))
    if library is not None:
        adapter = _adapter_of(library)
        if _package_of(type(value)) in _PACKAGES:
            _adapters[type(value)] = adapter
        return adapter
    if _offers_memory(value):
        return _adapter_of("buffer")
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if hasattr(value, "named_parameters"):
        raise ArgumentTypeError(
            f"a value must be an array, got the module {kind}; pass its parameters, with one key "
            "for each: kv.init(*zip(*module.named_parameters()))"
        )
    raise ArgumentTypeError(
        f"a value must be an array of NumPy, CuPy, PyTorch or JAX, got {kind}; "
        "pass a NumPy array, such as numpy.asarray(value, dtype='float32')"
    )


def are_native(arrays: Sequence[object]) -> bool:
    """Return whether all are NumPy's or CuPy's own arrays, which need no adapter.

    False is not an error: a class is known only after it was seen once.
    """
    return all(isinstance(_adapters.get(kind), NativeAdapter) for kind in set(map(type, arrays)))


def register(kind: type, adapter: Adapter) -> None:
    """Accept arrays of this class and its subclasses as values of stores."""
    _registered[kind] = _adapters[kind] = adapter


def adapter_on(context: Context) -> Adapter:
    """Return the adapter that stores use on ``context``: NumPy's, or CuPy's on a GPU."""
    return _adapter_of("numpy" if context.device_type == "cpu" else "cupy")


def _library_of(kind: type) -> str | None:
    """Return the library of arrays of this class, found by the names of its bases."""
    for base in kind.__mro__:
        package = _package_of(base)
        library = _LIBRARIES.get((package, base.__name__))
        if library is not None:
            return library
        if package in _JAX_PACKAGES:
            return "jax"
    return None


def _package_of(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _offers_memory(value: object) -> bool:
    if isinstance(value, _NO_DTYPE):
        return False
    if any(hasattr(type(value), name) for name in _OFFERS):
        return True
    try:
        memoryview(value).release()  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


@functools.cache
def _adapter_of(library: str) -> Adapter:
    module = importlib.import_module(f"kvstore.arrays.{_MODULES.get(library, library)}")
    adapter: Adapter = getattr(module, f"{library.capitalize()}Adapter")()
    return adapter
