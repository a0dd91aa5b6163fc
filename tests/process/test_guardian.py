"""What the guardian does when the process that it guards is gone, and when that has ended well."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.launch.job.guardian import remove_tree

ROOT = Path(__file__).resolve().parents[2]
GUARDED = """
import os, sys
from pathlib import Path
from kvstore.launch.job.guardian import GuardianProcess
directory = Path(sys.argv[1])
guardian = GuardianProcess("a-job", os.environ)
guardian.remove_at_the_end(directory / "secret")
(directory / "secret").mkdir()
guardian.cancel_at_the_end(["sh", "-c", sys.argv[3], "sh", sys.argv[1]])
if sys.argv[2] == "dismiss":
    guardian.dismiss()
else:
    os.kill(os.getpid(), 9)
"""

pytestmark = pytest.mark.process


TOUCH = 'test -d "$1/secret" && touch "$1/it is gone"'
TOUCH_LATER = 'test -d "$1/secret" && exit 1; touch "$1/it is gone"'


def guarded(directory: Path, end: str, script: str = TOUCH) -> int:
    words = [sys.executable, "-c", GUARDED, str(directory), end, script]
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


def test_a_cluster_that_does_not_answer_is_asked_again_when_the_files_are_gone(
    tmp_path: Path,
) -> None:
    assert guarded(tmp_path, "die", TOUCH_LATER) == -9
    until_s = time.monotonic() + 20
    while not (tmp_path / "it is gone").exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["it is gone"]


def test_what_a_task_still_puts_into_its_directory_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "job"
    directory.mkdir()
    late = iter(["job.o1", "job.o2"])
    remove_directory = os.rmdir

    def rmdir(path: str, **where: int) -> None:
        for name in itertools.islice(late, 1):  # it comes when the directory has just been emptied
            (directory / name).touch()
        remove_directory(path, **where)

    monkeypatch.setattr(os, "rmdir", rmdir)
    remove_tree(directory)
    assert next(late, None) is None
    assert not directory.exists()


def test_a_launcher_that_ended_by_itself_has_nothing_cancelled(tmp_path: Path) -> None:
    assert guarded(tmp_path, "dismiss") == 0  # the guardian has ended by then
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
