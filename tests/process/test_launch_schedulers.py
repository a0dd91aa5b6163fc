"""A scheduler that is killed is replaced: by the launcher, by ``kvstore.run``, or by hand."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from job import Job, MakeJob, Process, assert_no_traceback, needs_proc

pytestmark = [pytest.mark.process, needs_proc]

TRAIN = """
import zlib
kv = mx.kvstore.create("dist_sync")
kv.init(["a", "b"], [np.ones(1000, "f4"), np.ones(30, "f4")])
kv.set_optimizer(mx.optimizer.create("adam", learning_rate=0.1))
weights = kv.pull(["a", "b"])
for step in range(12):
    print("at step", step, flush=True)
    if step in PAUSES:
        wait_for_file(f"go{step}")
    gradients = [np.sin(each * 77 + step + kv.rank) for each in weights]
    kv.pushpull(["a", "b"], gradients, out=weights)
    kv.barrier()
kv.init("c", np.full(10, 2, "f4"))
kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5, momentum=0.9))
kv.save_checkpoint("NAME")
c = kv.pull("c")
kv.pushpull("c", np.sin(c + kv.rank), out=c)
kv.pushpull(["a", "b"], [np.sin(each + kv.rank) for each in weights], out=weights)
kv.barrier()
print("sum", zlib.crc32(b"".join(each.tobytes() for each in [*weights, c])), flush=True)
"""


def train(job: Job, pauses: tuple[int, ...] = (), *options: str) -> Process:
    """Workers that train, and wait for a file in some steps."""
    name = str(job.directory / f"saved{len(job.processes)}")
    return job.launch(TRAIN.replace("PAUSES", repr(pauses)).replace("NAME", name), *options)


def sums(text: str) -> list[str]:
    return re.findall(r"\[worker \d\] sum (\d+)", text)


def said(launcher: Process) -> list[str]:
    """Return the launcher's own lines, without process ids, ports and paths."""
    lines = [line for line in launcher.lines if line.startswith("[launcher] ")]
    return [re.sub(r"\d{2,}", "N", line.removeprefix("[launcher] ")) for line in lines]


def folders(job: Job) -> list[Path]:
    """Return the folders of journals; TMPDIR of a launcher is the job's directory."""
    return list(job.directory.glob("kvstore-scheduler-*"))


LOST = "scheduler (pid N) ended with signal SIGKILL: starting it again"
FOUND = "another scheduler goes on in place of the lost one"


def kill_scheduler(job: Job, launcher: Process, step: int) -> None:
    """Kill the scheduler while all workers wait in this step; let them go on at once."""
    for rank in range(job.num_workers):
        launcher.wait_for(rf"\[worker {rank}\] at step {step}\n")
    os.kill(job.launched("scheduler"), signal.SIGKILL)
    job.allow(f"go{step}")


def test_a_job_whose_scheduler_is_killed_ends_with_the_same_bits(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    step = random.randrange(12)
    whole = train(make_job(2, 2))
    ended = train(job, (step,), "--restarts", "2")
    kill_scheduler(job, ended, step)
    assert [whole.wait(), ended.wait()] == [0, 0], f"step {step}: {ended.text}"
    assert len(sums(whole.text)) == 2
    assert set(sums(ended.text)) == set(sums(whole.text))
    assert said(ended)[1:] == [
        LOST,
        FOUND,
        "the job succeeded; the scheduler was replaced 1 time",
    ]
    assert_no_traceback(ended)
    assert folders(job) == []


def test_a_scheduler_may_be_killed_twice(make_job: MakeJob) -> None:
    job = make_job(2, 1)
    whole = train(make_job(2, 1))
    ended = train(job, (2, 7), "--restarts", "2")
    kill_scheduler(job, ended, 2)
    ended.wait_for(re.escape(FOUND))
    kill_scheduler(job, ended, 7)
    assert [whole.wait(), ended.wait()] == [0, 0], ended.text
    assert set(sums(ended.text)) == set(sums(whole.text))
    assert said(ended)[1:] == [
        *(LOST, FOUND) * 2,
        "the job succeeded; the scheduler was replaced 2 times",
    ]
    assert_no_traceback(ended)


def test_without_a_restart_for_the_scheduler_the_job_ends_soon_with_a_report(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1)
    ended = train(job, (2, 7), "--restarts", "1")
    kill_scheduler(job, ended, 2)
    ended.wait_for(re.escape(FOUND))
    kill_scheduler(job, ended, 7)
    killed_at = time.monotonic()
    assert ended.wait() == 137, ended.text
    assert time.monotonic() - killed_at < 8
    assert "the scheduler is lost, and no restart is left of 1" in said(ended)
    report = ended.text.partition("======== the job failed")[2].splitlines()
    assert report[1].startswith("process:  scheduler (pid ")
    assert report[2].startswith("ended:    signal SIGKILL, ")
    assert "logs of all processes: " in report[-1]
    assert folders(job) == []
