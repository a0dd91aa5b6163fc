"""What tests on real GPUs share."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

# For clusters in one process, and what is pushed in them.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "inproc"))


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
