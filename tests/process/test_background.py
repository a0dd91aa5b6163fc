"""The launcher in the background, where its caller has no time for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvstore.errors import JobFailed
from kvstore.launch.run.background import _START, JobOptions, LauncherOutput
from kvstore.launch.run.call_files import dump
from kvstore.launch.run.job import RunningJob
from pslite.version import __version__

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="the launcher is tied on Linux only"),
]


def test_a_job_that_is_ended_on_its_own_thread_ends_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the collection of garbage, which may happen on any thread."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    took_s: list[float] = []

    def show(self: LauncherOutput, line: str, *, is_error: bool) -> None:
        if "up" in line and not took_s:
            began_s = time.monotonic()
            job.end()
            took_s.append(time.monotonic() - began_s)

    monkeypatch.setattr(LauncherOutput, "show", show)
    stay = "import time; print('up', flush=True); time.sleep(50)"
    job = RunningJob(JobOptions(1, 1), "once", dump((exec, (stay,), {}), "exec"))
    with pytest.raises(JobFailed):
        job.result(job.first, 40.0)
    assert job.ending is not None
    assert job.ending.status == 128 + 15
    assert len(took_s) == 1
    assert took_s[0] < 5
    assert not any(thread.name.startswith("kvstore-run-") for thread in threading.enumerate())
    assert list(tmp_path.iterdir()) == []


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
