"""Arrays of no library that is known by name: whatever offers its memory in a standard way.

In this order: ``__cuda_array_interface__`` (CuPy reads it and minds its stream), NumPy's
``__array_interface__``, DLPack, and Python's buffer protocol (``array.array``, ``memoryview``,
``ctypes`` arrays). The memory is looked at in place, and filled if the owner lets it be. Any
thread may call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.arrays import Array, NativeArray
from kvstore.arrays.cupy import load as load_cupy
from kvstore.arrays.view import ViewAdapter
from kvstore.errors import ArgumentTypeError, MissingDependencyError

_HOST_KINDS = (1, 3)
_CUDA_KINDS = (2, 13)
"""Device types in ``__dlpack_device__`` (dlpack.h): plain and pinned, plain and managed."""


class BufferAdapter(ViewAdapter):
    """Implements :class:`kvstore.arrays.Adapter`; see there for each promise."""

    def view(self, array: Array) -> NativeArray:
        try:
            return _view(array)
        except MissingDependencyError:
            raise
        # Foreign code runs in there: it raises what it likes.
        except Exception as error:
            raise ArgumentTypeError(
                f"the memory that {type(array).__qualname__} offers cannot be read as an array "
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
    raise ArgumentTypeError(f"DLPack's device type {int(device)} is neither a CPU nor a CUDA GPU")
