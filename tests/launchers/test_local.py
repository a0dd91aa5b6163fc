"""The launcher ``local``, where LeNet has to learn as much as by all others.

Everything else about it is in tests/process/test_launch_local.py, which needs no services.
"""

from __future__ import annotations

import pytest
from common import EveryLauncher, Launcher


@pytest.fixture
def launcher() -> Launcher:
    return Launcher(own=["--launcher", "local"], hosts=[], processes=list)


class TestLocal:
    test_lenet_learns = EveryLauncher.test_lenet_learns
