"""The cell of the sge launcher's tests does what it is there for, before it uses it."""

from __future__ import annotations

from pathlib import Path

from services.daemon import wait_for
from services.gridengine import GridEngine


def _script(directory: Path, line: str) -> str:
    path = directory / "script.sh"
    path.write_text(f"#!/bin/sh\n{line}\n")
    return str(path)


def test_an_array_job_runs_each_task_and_ends(gridengine: GridEngine, tmp_path: Path) -> None:
    script = _script(tmp_path, "echo task $SGE_TASK_ID on $(hostname)")

    gridengine.run(
        *("qsub", "-sync", "y", "-j", "y", "-o", f"{tmp_path}/out.$TASK_ID", "-t", "1-2", script)
    )

    said = [(tmp_path / f"out.{number}").read_text().split() for number in (1, 2)]
    assert [words[1] for words in said] == ["1", "2"]
    assert {words[3] for words in said} <= set(gridengine.hosts)


def test_a_job_that_is_deleted_ends_on_its_host(gridengine: GridEngine, tmp_path: Path) -> None:
    started = tmp_path / "started"
    script = _script(tmp_path, f"touch {started}; exec sleep 600")
    answer = gridengine.run("qsub", "-terse", "-j", "y", "-o", "/dev/null", script)
    wait_for("job", started.exists)

    gridengine.run("qdel", answer.strip())

    wait_for("end of the job", lambda: gridengine.jobs() == [])
    wait_for("end of its processes", lambda: gridengine.processes() == {})
