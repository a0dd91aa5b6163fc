"""Which array library a value comes from, and the few operations that a store needs of it.

One file per library implements :class:`Adapter`; ``adapter_for`` picks by the name of the
value's class, so a library is imported only when somebody passes one of its arrays. Nothing
here keeps an array or changes one that it was not told to write. Any thread may call; an
adapter has no state. Read next: ``numpy.py``, then ``cupy.py`` (the same on GPUs).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from kvstore.context import Context
from kvstore.errors import ArgumentTypeError

Array = Any
"""A ``numpy.ndarray`` or a ``cupy.ndarray``; the two share no base class."""

_DTYPE_KINDS = "biufc"


class Adapter(Protocol):
    """What a store needs of an array library. Shapes are any; dtypes are those of the array.

    ``host`` arrays are NumPy's. A result that is called new is owned by the caller; any other
    may share the argument's memory and is only to be read, before the caller's next change.
    """

    def context(self, array: Array) -> Context:
        """The device on which the array lives."""

    def on(self, context: Context) -> AbstractContextManager[None]:
        """Inside the block the library works on ``context``; at the end that work is done."""

    def is_writeable(self, array: Array) -> bool:
        """Whether elements of the array may be set."""

    def to_host(self, array: Array) -> np.ndarray[Any, Any]:
        """The values as a C-contiguous array in native byte order; no copy if it is one."""

    def from_host(self, host: np.ndarray[Any, Any], out: Array) -> None:
        """Set all of ``out`` to ``host`` (same shape), cast to ``out``'s dtype; any strides."""

    def to_context(self, array: Array, context: Context) -> Array:
        """The values as this library's array on ``context``; no copy if it is there.

        ``array`` may belong to another library.
        """

    def copy(self, array: Array) -> Array:
        """A new C-contiguous array of the same dtype on the same device."""

    def sum_in_order(
        self, arrays: Sequence[Array], context: Context, dtype: np.dtype[Any]
    ) -> Array:
        """A new array on ``context``: ((a0 + a1) + a2) + ..., cast to ``dtype`` at the end.

        The arrays share shape and dtype and may live on different devices. float16 is added
        in float32, everything else in its own dtype; the order never changes, so neither do
        the bits.
        """


def adapter_for(value: object) -> Adapter:
    """The adapter of the library that ``value`` belongs to.

    Raises ``ArgumentTypeError`` for anything that is no supported array, among them Python
    scalars and lists: these have no dtype of their own, so the caller must choose one.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentTypeError(
            "a masked array would lose its mask; pass value.filled(...) instead"
        )
    for base in type(value).__mro__:
        if base.__name__ == "ndarray":
            library = base.__module__.partition(".")[0]
            if library in ("numpy", "cupy"):
                return _adapter_of(library)
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise ArgumentTypeError(
        f"a value must be a NumPy or CuPy array, got {kind}; "
        "pass a NumPy array, such as numpy.asarray(value, dtype='float32')"
    )


def adapter_on(context: Context) -> Adapter:
    """The adapter of the library whose arrays live on ``context``."""
    return _adapter_of("numpy" if context.device_type == "cpu" else "cupy")


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raise ``ArgumentTypeError`` unless ``dtype`` is bool or an integer, float or complex."""
    if dtype.kind not in _DTYPE_KINDS:
        raise ArgumentTypeError(
            f"arrays of dtype {dtype} cannot be stored; "
            "use bool or an integer, float or complex dtype"
        )


@functools.cache
def _adapter_of(library: str) -> Adapter:
    if library == "numpy":
        from kvstore.arrays.numpy import NumpyAdapter

        return NumpyAdapter()
    from kvstore.arrays.cupy import CupyAdapter

    return CupyAdapter()
