"""What tests on real GPUs share."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


@pytest.fixture
def cupy() -> Any:
    """CuPy, on a machine where it finds a GPU; else the test is skipped, and says why."""
    try:
        module = importlib.import_module("cupy")
    except ImportError as error:
        pytest.skip(f"CuPy cannot be imported: {error}")
    try:
        count = module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"CuPy finds no usable GPU: {error}")
    if count == 0:
        pytest.skip("this machine has no GPU")
    return module
