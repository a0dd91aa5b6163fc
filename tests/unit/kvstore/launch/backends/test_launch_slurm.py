"""How a job of Slurm's is known and taken out; its commands are in ``launch_texts.py``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from stand_ins import program

from kvstore.launch.backends.slurm import Allocation, SlurmJob, SlurmStep
from kvstore.launch.environment import share_gpus, visible_gpus
from kvstore.launch.options import LaunchError, parse_arguments

OPTIONS = parse_arguments(["-n", "4", "-s", "2", "--launcher", "slurm", "train"])


def test_nothing_of_the_job_stays_when_the_launcher_is_lost(tmp_path: Path) -> None:
    program(tmp_path, "squeue", f"test -e {tmp_path}/over || echo '5 /other\n7 /shared/4f'")
    program(tmp_path, "scancel", f'echo "$@" >>{tmp_path}/over; env >>{tmp_path}/environment')
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SCANCEL_INTERACTIVE": "1"}
    job = SlurmJob(OPTIONS, environ)
    job.submit(Path("/shared/4f"))
    assert subprocess.run(job.cancel(""), env=environ, timeout=20).returncode == 0
    assert (tmp_path / "over").read_text() == "--quiet 7\n"
    assert "SCANCEL_" not in (tmp_path / "environment").read_text()
    assert job.if_lost == ("scancel", "--quiet", "$SLURM_JOB_ID")
    assert job.connect_s is None, "a job can wait for days"


def test_a_controller_that_does_not_answer_is_asked_again_later(tmp_path: Path) -> None:
    program(tmp_path, "squeue", "exit 1")
    program(tmp_path, "sleep", "")
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = SlurmJob(OPTIONS, environ)
    job.submit(Path("/shared/4f"))
    assert job.poll() == "squeue does not answer"
    assert subprocess.run(job.cancel(""), env=environ, timeout=20).returncode == 1


def test_an_allocation_is_the_users_and_stays() -> None:
    step = SlurmStep(OPTIONS, {}, Allocation("7", (1,)))
    assert step.cancel("") is None and step.if_lost == ()
    assert step.connect_s is not None


def test_an_agent_that_cannot_start_is_told_with_what_was_said() -> None:
    job = SlurmJob(OPTIONS, {})
    assert job.fatal("slurmstepd: error: execve(): /py: No such file or directory") is None
    assert job.fatal("srun: error: node2: task 1: Exited with exit code 2") == (
        "node2: the agent could not start (Exited with exit code 2); it said:\n"
        "  slurmstepd: error: execve(): /py: No such file or directory"
    )
    assert job.fatal("srun: error: node[1-2]: tasks 0,3-4: Killed") is not None


def test_an_agent_that_says_itself_why_it_cannot_serve_is_not_told_of_twice() -> None:
    job = SlurmJob(OPTIONS, {})
    assert job.fatal("srun: error: node2: tasks 0-3: Exited with exit code 3") is None


# -- GPUs that all processes of a host see -------------------------------------------------


def test_each_worker_gets_gpus_of_its_host_and_a_server_none() -> None:
    members = [("server", 0), ("worker", 0), ("worker", 1), ("worker", 2)]
    one, two = {"host": "a", "gpu_names": ["0", "GPU-x"]}, {"host": "b", "gpu_names": ["3"]}
    found = share_gpus(members, [one, one, two, one], 1)
    assert {member: list(given.values()) for member, given in found.items()} == {
        ("server", 0): [""],
        ("worker", 0): ["0"],
        ("worker", 1): ["3"],
        ("worker", 2): ["GPU-x"],
    }


def test_too_few_gpus_are_an_error_that_names_the_host() -> None:
    members = [("worker", 0), ("worker", 1)]
    with pytest.raises(
        LaunchError, match=r"each worker on a needs 2 GPUs .*, but the job has 3 there"
    ):
        share_gpus(members, 2 * [{"host": "a", "gpu_names": ["0", "1", "2"]}], 2)


@pytest.mark.parametrize(
    ("value", "names"),
    [("0, 2", ["0", "2"]), ("", []), ("-1", []), ("NoDevFiles", []), ("GPU-7", ["GPU-7"])],
)
def test_the_gpus_of_a_process_are_those_it_may_see(value: str, names: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": value}) == names
