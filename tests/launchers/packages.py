"""The packages of the launchers' tests that are not in every developer's environment."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def needed(name: str) -> Any:
    """The module ``name``; missing, it is a failure where the launchers' tests are to run."""
    if os.environ.get("KVSTORE_LAUNCHER_TESTS") == "1":
        return importlib.import_module(name)
    return pytest.importorskip(name)
