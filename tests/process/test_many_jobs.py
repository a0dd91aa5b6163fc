"""Jobs side by side on one machine: each has a port and an id of its own, and keeps to itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from doors import settings_of
from job import (
    HOST,
    TRAIN,
    Job,
    MakeJob,
    assert_no_traceback,
    listening_addresses,
    needs_proc,
    wait_until,
)

pytestmark = [pytest.mark.process, needs_proc]

LIMIT_S = 100.0
"""For all of them: some sixty interpreters start on what may be two processors."""

# Stays until all jobs are there at once. Nobody else pushes this number.
ROUND = """
kv = mx.create("dist_sync")
kv.init("w", vector(0))
open(f"../here-{NUMBER}", "w")
wait_for_file("../go")
kv.push("w", vector(NUMBER))
print("pulled", kv.pull("w").tolist())
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "number_of_jobs", [2, pytest.param(20, marks=pytest.mark.slow(reason="two jobs run always"))]
)
def test_jobs_that_are_started_at_once_all_work(
    make_job: MakeJob, tmp_path: Path, number_of_jobs: int
) -> None:
    jobs = [make_job(1, 1) for _ in range(number_of_jobs)]
    launchers = [
        job.launch(f"NUMBER = {number}\n{ROUND}", "--no-status") for number, job in enumerate(jobs)
    ]
    wait_until(lambda: len(list(tmp_path.glob("here-*"))) == number_of_jobs, "all jobs", LIMIT_S)
    schedulers = [_scheduler(job) for job in jobs]
    assert len({settings["PS_JOB_ID"] for _, settings in schedulers}) == number_of_jobs
    assert len({settings["DMLC_PS_ROOT_PORT"] for _, settings in schedulers}) == number_of_jobs
    for pid, settings in schedulers:
        # The launcher's own socket, handed down: the port that was published was never free.
        assert "PS_LISTEN_FD" in settings
        assert (HOST, int(settings["DMLC_PS_ROOT_PORT"])) in listening_addresses(pid)
    (tmp_path / "go").touch()
    for number, launcher in enumerate(launchers):
        assert launcher.wait(LIMIT_S) == 0, launcher.text
        assert launcher.lines == [f"[worker 0] pulled [{float(number)}]"]


def _scheduler(job: Job) -> tuple[int, dict[str, str]]:
    """Its process id and the environment that it was started with."""
    processes = {pid: settings_of(pid) for pid in job.left()}
    ((pid, settings),) = [
        (pid, settings)
        for pid, settings in processes.items()
        if settings.get("DMLC_ROLE") == "scheduler" and "PS_LISTEN_FD" in settings
    ]
    return pid, settings


@pytest.mark.parametrize(
    ("has_the_key", "sentence"),
    [
        (
            True,
            "this node does not belong to the job 'job-of-its-own' of the message: two jobs use "
            "the same address; give each job its own port",
        ),
        pytest.param(
            False,
            "compare the job key (PS_JOB_KEY_FILE) and PS_SECURITY: both must be the same on all "
            "nodes",
            marks=pytest.mark.slow(reason="test_doors.py tries another key always"),
        ),
    ],
    ids=["the same key", "another key"],
)
@pytest.mark.slow(reason="test_rendezvous.py has a worker of another job always")
def test_a_worker_of_another_job_that_comes_to_a_running_one_is_refused_and_told_why(
    make_job: MakeJob, tmp_path: Path, has_the_key: bool, sentence: str
) -> None:
    """By its id; without the key not even the id is said, since it may be anybody."""
    job = make_job(2, 1)
    launcher = job.launch(TRAIN)
    for rank in range(2):
        launcher.wait_for(rf"\[worker {rank}\] rank {rank}")
    _, settings = _scheduler(job)
    other_key = tmp_path / "other.key"
    other_key.write_text("a key that some other job has")
    other_key.chmod(0o600)
    stranger = make_job(2, 1).worker(
        0,
        TRAIN,
        {
            "DMLC_PS_ROOT_PORT": settings["DMLC_PS_ROOT_PORT"],
            "PS_SECURITY": settings["PS_SECURITY"],
            "PS_JOB_KEY_FILE": settings["PS_JOB_KEY_FILE"] if has_the_key else str(other_key),
            "PS_JOB_ID": "job-of-its-own",
        },
    )
    assert stranger.wait() == 1
    assert stranger.lines[-1].endswith(sentence)
    job.allow("stop")
    assert launcher.wait() == 0, launcher.text
    assert launcher.text.count("rounds are right") == 2
    assert_no_traceback(launcher)
