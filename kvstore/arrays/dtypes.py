"""The dtypes that a store can hold, their names in messages, and their sum dtypes.

Stores hold bool, integers, floats and complex numbers of every size that NumPy has, and bfloat16,
which the package ``ml_dtypes`` adds to NumPy. This module also checks the dtypes and shapes that
callers pass. It is the only file that imports ``ml_dtypes``, and only for a bfloat16 value. Pure;
any thread may call. Read next: ``arrays/cpu/sums.py``, which adds values.
"""

from __future__ import annotations

import re
from operator import index
from typing import Any, cast

import numpy as np

from kvstore.errors import ArgumentTypeError, MissingDependencyError
from pslite.errors import ProtocolError

_KINDS = "biufc"
_TEXT = re.compile(r"[<>|=][biufc][0-9]{1,2}")
_BFLOAT16 = "bfloat16"
_FLOAT32 = np.dtype(np.float32)


def bfloat16() -> np.dtype[Any]:
    """Return the NumPy dtype of bfloat16: the upper half of a float32.

    Raises ``MissingDependencyError`` when ``ml_dtypes`` is not installed.
    """
    try:
        import ml_dtypes
    except ImportError as error:
        raise MissingDependencyError(
            "bfloat16 values need the package ml_dtypes on every worker and server: pip install "
            f"ml_dtypes; importing it failed with: {error}"
        ) from error
    dtype: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return dtype


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Return whether ``dtype`` is native ``ml_dtypes.bfloat16``.

    It does not import ``ml_dtypes``.
    """
    kind = dtype.type
    return (
        dtype.kind == "V"
        and (kind.__module__, kind.__name__) == ("ml_dtypes", _BFLOAT16)
        and dtype.isnative
    )


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether values of ``dtype`` are real floats, which optimizers can update.

    True for bfloat16 too, whose NumPy kind is not ``"f"``.
    """
    return (dtype.kind == "f" and _is_of_numpy(dtype)) or is_bfloat16(dtype)


def keeps_kind(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    """Return whether NumPy's rule ``same_kind`` allows a copy to ``target``.

    Floats may lose digits but not become integers or bool; bfloat16 is treated like float16.
    """
    if source == target:
        return True
    half = np.dtype(np.float16)
    source, target = (half if is_bfloat16(dtype) else dtype for dtype in (source, target))
    return np.can_cast(source, target, "same_kind")


def check_dtype(dtype: np.dtype[Any]) -> None:
    """Raise ``ArgumentTypeError`` unless a store can hold values of ``dtype``."""
    if (dtype.kind in _KINDS and _is_of_numpy(dtype)) or is_bfloat16(dtype):
        return
    if dtype.type.__module__ == "ml_dtypes" and dtype.type.__name__ != _BFLOAT16:
        raise ArgumentTypeError(
            f"a store cannot hold arrays of dtype {dtype}: bfloat16 is the only dtype of "
            "ml_dtypes that it supports; convert the values to bfloat16, float16 or an integer "
            "dtype"
        )
    raise ArgumentTypeError(
        f"a store cannot hold arrays of dtype {dtype}; use bool, bfloat16 or a NumPy integer, "
        "float or complex dtype"
    )


def checked_dtype(dtype: object) -> np.dtype[Any]:
    """Return a caller's dtype as NumPy's.

    Raises ``ArgumentTypeError`` if a store cannot hold it.
    """
    try:
        found = bfloat16() if dtype == _BFLOAT16 else np.dtype(cast(Any, dtype))
    except TypeError:
        raise ArgumentTypeError(f"{dtype!r} is not a dtype; use a name such as 'float32'") from None
    check_dtype(found)
    return found


def checked_shape(shape: object) -> tuple[int, ...]:
    """Return a caller's shape (an int or several) as a tuple.

    Raises ``ArgumentTypeError``.
    """
    try:
        lengths = (shape,) if isinstance(shape, str) else tuple(cast(Any, shape))
    except TypeError:
        lengths = (shape,)
    try:
        return tuple(map(index, lengths))
    except TypeError:
        raise ArgumentTypeError(
            f"a shape must be an int or a tuple of ints, got {shape!r}"
        ) from None


def accumulation_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which values of ``dtype`` are added and updated.

    float32 for float16 and bfloat16; every other dtype stays the same.
    """
    return _FLOAT32 if dtype == np.float16 or is_bfloat16(dtype) else dtype


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return a dtype as text: byte order, kind and size.

    The format is that of NumPy's array interface, which lacks bfloat16; its text is
    ``"bfloat16"``.
    """
    return _BFLOAT16 if is_bfloat16(dtype) else str(dtype.str)


def dtype_of(text: object) -> np.dtype[Any]:
    """Parse the output of ``dtype_text``.

    Raises:
        ProtocolError: a store cannot hold it.
        MissingDependencyError: it is bfloat16, and ``ml_dtypes`` is not installed here.
    """
    if type(text) is str:
        if text == _BFLOAT16:
            return bfloat16()
        if _TEXT.fullmatch(text):
            try:
                return np.dtype(text)
            except TypeError:
                pass  # no such size
    raise ProtocolError(f"a store cannot hold the dtype {text!r}")


def _is_of_numpy(dtype: np.dtype[Any]) -> bool:
    # ml_dtypes gives float8_e5m2 the kind "f", though it is not a dtype of NumPy.
    return dtype.isbuiltin != 2
