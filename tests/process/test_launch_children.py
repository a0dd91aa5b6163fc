"""What the launcher starts: as many as are wanted, and what they start dies with a killed one."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from job import PATIENCE_S, ROOT, Job, MakeJob, Process, clean_environment, needs_proc, wait_until

pytestmark = [pytest.mark.process, needs_proc]

ALL_END_S = 10.0

FAMILY = """
import multiprocessing, subprocess, threading
kv = mx.kvstore.create("dist_sync")
if kv.rank == 1:
    with open("ending", "w") as file:
        file.write(str(os.getpid()))
    sys.exit()
program = subprocess.Popen(["sleep", "300"])
print("child", program.pid, flush=True)
processes, ends = [], []
def answer(end):
    while True:
        end.send(end.recv())
def load():
    context = multiprocessing.get_context("fork")
    end, other = context.Pipe()
    process = context.Process(target=answer, args=(other,))
    process.start()
    print("child", process.pid, flush=True)
    processes.append(process)
    ends.append(end)
load()
thread = threading.Thread(target=load)
thread.start()
thread.join()
def check_life():
    for end in ends:
        end.send("hello")
        assert end.recv() == "hello"
    assert program.poll() is None
    print("all live", flush=True)
"""
"""Worker 1 ends. Worker 0 has a program and two loaders of data, one of a thread that has ended."""


def children(launcher: Process) -> list[int]:
    return [int(line.split()[-1]) for line in launcher.lines if "] child " in line]


def guardian_of(job: Job) -> int:
    (guardian,) = [
        pid for pid in job.left() if b"guardian.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return guardian


def test_a_launcher_killed_together_with_its_guardian_takes_what_workers_have_started(
    make_job: MakeJob,
) -> None:
    job = make_job(num_workers=1)
    launcher = job.launch(FAMILY + "check_life()\ntime.sleep(300)")
    launcher.wait_for("all live")
    started = children(launcher)
    assert len(started) == 3
    assert set(started) <= set(job.left())
    for pid in (guardian_of(job), launcher.pid):
        os.kill(pid, signal.SIGKILL)
    launcher.wait()
    wait_until(lambda: job.left() == [], "all of the job to end", ALL_END_S)


@pytest.mark.slow(reason="what a killed launcher leaves runs always")
def test_what_a_worker_has_started_outlives_its_thread_and_another_worker(
    make_job: MakeJob,
) -> None:
    job = make_job(num_workers=2)
    code = """
wait_for_file("go on")
check_life()
for process in processes:
    process.terminate()
    process.join()
program.terminate()
program.wait()
"""
    launcher = job.launch(FAMILY + code)
    wait_until(lambda: len(children(launcher)) == 3, "worker 0 to start its children")
    wait_until(lambda: (job.directory / "ending").exists(), "worker 1 to end")
    ending = (job.directory / "ending").read_text
    wait_until(lambda: ending() != "" and int(ending()) not in job.left(), "worker 1 to end")
    job.allow("go on")
    assert launcher.wait() == 0, launcher.text
    assert "all live" in launcher.text
    assert "had left running" not in launcher.text


def test_a_job_starts_that_needs_more_files_than_the_launcher_may_open_at_first() -> None:
    def allow_few() -> None:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )

    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "launch.py", "-n", "20", "-s", "1", "true"],
        env=clean_environment(),
        preexec_fn=allow_few,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert "cannot start" not in done.stderr
    assert "the workers ended without joining the job" in done.stderr
