"""The key that the launcher makes for a job, and who removes it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.launch.job import guardian
from kvstore.launch.job.registry import new_key_file, write_key
from kvstore.launch.options import LaunchError


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))


def test_a_key_is_fresh_and_for_its_owner_only() -> None:
    keys = []
    for path in (new_key_file(), new_key_file()):
        assert not path.parent.exists()
        write_key(path)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        keys.append(path.read_text().strip())
    assert keys[0] != keys[1]
    assert all(len(key) >= 43 for key in keys)  # 32 bytes of the kernel, in base64


def test_a_directory_that_was_there_is_not_used() -> None:
    path = new_key_file()
    path.parent.mkdir()
    with pytest.raises(LaunchError, match=r"cannot create the job's key .*: File exists"):
        write_key(path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize(("last", "remains"), [(b'["done"]\n', True), (b"", False)])
def test_the_guardian_removes_the_key_when_the_launcher_was_killed(
    tmp_path: Path, last: bytes, remains: bool
) -> None:
    path = tmp_path / "a name with spaces, \u00e4 and\nlines" / "job.key"
    write_key(path)
    told = json.dumps(["remove", str(path.parent)]).encode() + b"\n" + last
    script = str(Path(guardian.__file__))
    subprocess.run(
        [sys.executable, "-I", "-S", script, "no-such-job"], input=told, check=True, timeout=20
    )
    assert path.exists() == remains
    assert path.parent.exists() == remains
