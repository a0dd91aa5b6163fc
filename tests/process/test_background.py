"""The launcher in the background, where its caller has no time for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvstore.launch.run.background import _START, BackgroundLauncher
from kvstore.launch.run.parcels import LauncherOutput
from pslite.version import __version__

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher is tied on Linux only"),
]


def test_a_launcher_that_is_closed_on_its_own_thread_ends_without_a_wait(tmp_path: Path) -> None:
    """As by the collection of garbage, which may happen on any thread."""
    sleep = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(50)"]
    options = ["-n", "1", "-s", "1", "--no-status", "--log-dir", str(tmp_path / "logs")]
    launcher = BackgroundLauncher([*options, *sleep], {}, tmp_path)
    took_s: list[float] = []

    class Collected(LauncherOutput):
        def show(self, line: str, *, is_error: bool) -> str | None:
            if "up" in line and not took_s:
                began_s = time.monotonic()
                launcher.close()
                took_s.append(time.monotonic() - began_s)
            return super().show(line, is_error=is_error)

    launcher.output = Collected()
    try:
        assert launcher.wait_for_end(40)
    finally:
        launcher.close()
    assert launcher.status == 128 + 15
    assert len(took_s) == 1
    assert took_s[0] < 5
    assert not any(thread.name.startswith("kvstore-run-") for thread in threading.enumerate())


@pytest.mark.parametrize("safe_path", ["", "1"])
def test_the_launcher_keeps_the_path_of_modules_but_for_the_current_directory(
    tmp_path: Path, safe_path: str
) -> None:
    """As where the package lies in a directory that only PYTHONPATH names."""
    (tmp_path / "kvstore.py").write_text("raise ImportError('the current directory counts')")
    shown = subprocess.run(
        [sys.executable, "-c", _START, "", "--version"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": safe_path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert __version__ in shown.stdout, shown.stderr
