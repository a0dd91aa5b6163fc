"""What the guardian does when the process that it guards is gone, and when that has ended well."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GUARDED = """
import os, sys
from pathlib import Path
from kvstore.launch.guardian_process import GuardianProcess
directory = Path(sys.argv[1])
guardian = GuardianProcess("a-job", os.environ)
guardian.remove_at_the_end(directory / "secret")
(directory / "secret").mkdir()
script = 'test -d "$1/secret" && touch "$1/it is gone"'
guardian.cancel_at_the_end(["sh", "-c", script, "sh", sys.argv[1]])
if sys.argv[2] == "dismiss":
    guardian.dismiss()
else:
    os.kill(os.getpid(), 9)
"""

pytestmark = pytest.mark.process


def guarded(directory: Path, end: str) -> int:
    words = [sys.executable, "-c", GUARDED, str(directory), end]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(words, env=environment, timeout=30, check=False).returncode


def test_a_launcher_that_is_killed_has_its_job_cancelled_before_its_files_go(
    tmp_path: Path,
) -> None:
    assert guarded(tmp_path, "die") == -9
    until_s = time.monotonic() + 20
    while (tmp_path / "secret").exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["it is gone"]


def test_a_launcher_that_ended_by_itself_has_nothing_cancelled(tmp_path: Path) -> None:
    assert guarded(tmp_path, "dismiss") == 0  # the guardian has ended by then
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
