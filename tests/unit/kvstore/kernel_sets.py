"""For tests of arithmetic: the same with NumPy alone, and with each set of compiled kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvstore.arrays.cpu import kernels

Array = np.ndarray[Any, Any]

NATIVE = ["plain", "avx2"]
SETS = ["numpy", *NATIVE]


@contextmanager
def computing_with(name: str) -> Iterator[None]:
    """Everything is computed so in this block; skips the test where it cannot be."""
    if name == "numpy":
        with mock.patch.object(kernels, "native", return_value=None):
            yield
        return
    try:
        from kvstore.arrays.cpu import _kernels
    except ImportError:
        pytest.skip(
            "kvstore.arrays.cpu._kernels is not built (python setup.py build_ext --inplace)"
        )
    if name not in _kernels.INSTRUCTIONS:
        pytest.skip(f"this processor has no {name}")
    # Also when the environment says KVSTORE_NATIVE=0.
    with mock.patch.object(kernels, "native", return_value=_kernels):
        _kernels.use(name)
        try:
            yield
        finally:
            _kernels.use(_kernels.INSTRUCTIONS[0])


def bits(array: Array) -> bytes:
    """The array's bytes, with one NaN for all of them: which it is depends on the processor."""
    plain = array.copy()
    plain[np.isnan(array)] = np.nan
    return plain.tobytes()
