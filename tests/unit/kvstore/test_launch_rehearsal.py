"""What ``--dry-run`` and ``--check`` say of a job on this machine."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest

from kvstore.launch.cli import main
from kvstore.launch.rehearsal import Row, table


def test_a_dry_run_prints_every_process_and_starts_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mark = str(tmp_path / "started")
    code = main(["-n", "2", "-s", "1", "--dry-run", "--env-worker", "A:b c", "touch", mark])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    names = [line[2:] for line in lines if line.startswith("# ")]
    assert names == ["scheduler", "server 0", "worker 0", "worker 1"]
    worker = shlex.split(lines[-1])
    assert worker[-2:] == ["touch", mark]
    assert {"A=b c", "DMLC_ROLE=worker", "DMLC_TASK_ID=1", "DMLC_NUM_SERVER=1"} <= set(worker)
    assert not list(tmp_path.iterdir())


def test_a_check_names_a_program_that_is_missing_and_ends_with_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["-n", "1", "--check", sys.executable, "-V"]) == 0
    assert "NO" not in capsys.readouterr().out
    assert main(["-n", "1", "--check", "no-such-program"]) == 1
    assert "NO  worker's program     there is no program 'no-such-program'" in (
        capsys.readouterr().out
    )


def test_a_check_tries_the_port_that_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("DMLC_PS_ROOT_PORT", str(taken.getsockname()[1]))
        assert main(["-n", "1", "--check", "true"]) == 1
    assert "is in use" in capsys.readouterr().err


def test_a_table_has_its_findings_in_one_column() -> None:
    text = table([Row("a", "x", True), Row("long", "y", False)])
    assert text == "ok  a     x\nNO  long  y\n"
