"""A scheduler that is killed is replaced: by the launcher, by ``kvstore.run``, or by hand."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from job import Job, MakeJob, Process, assert_no_traceback, free_port, needs_proc

import kvstore as mx

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
    return job.launch(code_of(job, pauses), *options)


def code_of(job: Job, pauses: tuple[int, ...] = ()) -> str:
    name = str(job.directory / f"saved{len(job.processes)}")
    return TRAIN.replace("PAUSES", repr(pauses)).replace("NAME", name)


def whole(job: Job) -> str:
    """What the workers of a job print of which no process is killed."""
    return job.whole(code_of(job))


def sums(text: str) -> list[str]:
    return re.findall(r"\[worker \d\] sum (\d+)", text)


def said(launcher: Process) -> list[str]:
    """Return the launcher's own lines, without process ids, ports and paths."""
    lines = [line for line in launcher.lines if line.startswith("[launcher] ")]
    texts = [line.removeprefix("[launcher] ").partition("; logs of all ")[0] for line in lines]
    return [re.sub(r"\d{2,}", "N", text) for text in texts]


def folders(job: Job) -> list[Path]:
    """Return the folders of journals; TMPDIR of a launcher is the job's directory."""
    return list(job.directory.glob("kvstore-scheduler-*"))


LOST = "scheduler (pid N) ended with signal SIGKILL: starting it again ({})"
ONE = r"scheduler \(pid \d+ on .*\)"
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
    ended = train(job, (step,), "--restarts", "2")
    expected = sums(whole(make_job(2, 2)))
    kill_scheduler(job, ended, step)
    assert ended.wait() == 0, f"step {step}: {ended.text}"
    assert len(expected) == 2
    assert set(sums(ended.text)) == set(expected)
    assert said(ended)[1:] == [
        LOST.format("1 of 2 restarts"),
        FOUND,
        "the job succeeded; the scheduler was replaced 1 time",
    ]
    assert_no_traceback(ended)
    assert folders(job) == []


def test_a_scheduler_may_be_killed_before_all_have_joined(make_job: MakeJob) -> None:
    job = make_job(2, 1)
    comes_late = """
if os.environ["DMLC_TASK_ID"] == "1":
    print("comes late", flush=True)
    wait_for_file("go")
kv = mx.kvstore.create("dist_sync")
kv.barrier()
"""
    ended = job.launch(comes_late, "--restarts", "1")
    ended.wait_for("comes late")
    os.kill(job.launched("scheduler"), signal.SIGKILL)
    ended.wait_for(re.escape(FOUND))
    job.allow("go")
    assert ended.wait() == 0, ended.text
    assert said(ended)[:2] == [LOST.format("1 of 1 restart"), FOUND]
    assert said(ended)[-1] == "the job succeeded; the scheduler was replaced 1 time"
    assert_no_traceback(ended)


@pytest.mark.slow(reason="a scheduler that is killed once, or once too often, runs always")
def test_a_scheduler_may_be_killed_twice(make_job: MakeJob) -> None:
    job = make_job(2, 1)
    ended = train(job, (2, 7), "--restarts", "2")
    expected = sums(whole(make_job(2, 1)))
    kill_scheduler(job, ended, 2)
    ended.wait_for(re.escape(FOUND))
    kill_scheduler(job, ended, 7)
    assert ended.wait() == 0, ended.text
    assert set(sums(ended.text)) == set(expected)
    assert said(ended)[1:] == [
        LOST.format("1 of 2 restarts"),
        FOUND,
        LOST.format("2 of 2 restarts"),
        FOUND,
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
    used_up = "all restarts are used (1 of 1)"
    assert f"scheduler cannot be started again: {used_up}" in said(ended)
    report = ended.text.partition("======== the job failed")[2].splitlines()
    assert report[1].startswith("process:  scheduler (pid ")
    assert report[2].startswith("ended:    signal SIGKILL, ")
    assert report[-2] == used_up
    assert "logs of all processes: " in report[-1]
    assert folders(job) == []


def test_a_job_that_begins_again_has_a_journal_of_its_own(make_job: MakeJob) -> None:
    job = make_job(2, 1)
    ended = train(job, (2, 7), "--restarts", "3")
    kill_scheduler(job, ended, 2)
    for rank in range(2):
        ended.wait_for(rf"\[worker {rank}\] at step 7\n")
    (first,) = folders(job)
    os.kill(job.launched("server"), signal.SIGKILL)
    job.allow("go7")
    ended.wait_for("starting all processes again")
    assert not first.exists()
    assert ended.wait() == 0, ended.text
    again = "starting all processes again in 1 s (2 of 3 restarts are used)"
    assert f"restart 1 of the job: {again}" in said(ended)
    both = "the job succeeded after 1 restart; the scheduler was replaced 1 time"
    assert said(ended)[-1] == both
    assert len(set(sums(ended.text))) == 1
    assert folders(job) == []


# -- kvstore.run -----------------------------------------------------------------------------


def test_a_function_goes_on_when_the_scheduler_of_its_job_was_killed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train() -> list[float]:
        kv = mx.create("dist_sync")
        kv.init("w", np.ones(2))
        weights = kv.pull("w")
        if kv.rank == 0:
            (pid,) = [one.pid for one in kv.node.membership.roster if one.role == "scheduler"]
            os.kill(pid, signal.SIGKILL)
        for _ in range(3):
            kv.pushpull("w", weights * 0.5 / kv.num_workers, out=weights)
        kv.barrier()
        kv.init("v", np.full(2, 3.0))
        return [*weights.tolist(), *kv.pull("v").tolist()]

    assert mx.run(train, workers=2, servers=1, restarts=2) == [[0.125, 0.125, 3.0, 3.0]] * 2
    assert "starting it again" in capsys.readouterr().err


# -- by hand ---------------------------------------------------------------------------------

BY_HAND = """
kv = mx.kvstore.create("dist_async")
kv.init("w", vector(0, 0))
kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=-1.0))
kv.barrier()
step = 0
while not os.path.exists("back"):
    kv.push("w", vector(1, step))
    kv.pull("w")
    step += 1
    print("step", step, flush=True)
    time.sleep(0.01)
began = time.monotonic()
kv.barrier()
print("barrier after", time.monotonic() - began, flush=True)
kv.init("v", vector(kv.rank))
open(f"steps{kv.rank}", "w").write(str(step))
kv.barrier()
both = sum(int(open(f"steps{rank}").read()) for rank in range(2))
print("counted", kv.pull("w")[0] == both, flush=True)
"""


def by_hand(make_job: MakeJob, **settings: str) -> tuple[Job, list[Process]]:
    """The scheduler, the server and two workers of a job that no launcher has started."""
    job = make_job(2, 1, PS_REJOIN_TIMEOUT="20", **settings)
    journal = {"PS_SCHEDULER_JOURNAL": str(job.directory / "journal")}
    started = [job.scheduler(journal), job.server(), *job.workers(BY_HAND)]
    for worker in started[2:]:
        worker.wait_for("step 1\n")
    return job, started


def last_step(worker: Process) -> int:
    return int(re.findall(r"step (\d+)\n", worker.text)[-1])


def end_by_hand(job: Job, processes: list[Process]) -> None:
    """Let the workers come to their barrier; all processes end as without any mishap."""
    job.allow("back")
    assert [process.wait() for process in processes] == [0] * 4, job.output()
    for worker in processes[2:]:
        waited_s = float(worker.wait_for(r"barrier after (.*)").group(1))
        assert waited_s < 5
        assert "counted True" in worker.lines
    assert_no_traceback(*processes)


def test_steps_go_on_without_a_scheduler_and_another_one_is_started_by_hand(
    make_job: MakeJob,
) -> None:
    job, (scheduler, *others) = by_hand(make_job)
    workers = others[1:]
    scheduler.send(signal.SIGKILL)
    scheduler.wait()
    for worker in workers:
        worker.wait_for("the scheduler is lost: ")
    before = [last_step(worker) for worker in workers]
    time.sleep(3.0)
    after = [last_step(worker) for worker in workers]
    assert all(now - then > 30 for then, now in zip(before, after, strict=True)), (before, after)
    again = job.scheduler({"PS_SCHEDULER_JOURNAL": str(job.directory / "journal")})
    end_by_hand(job, [again, *others])
    assert re.search(rf"{ONE} takes the place of {ONE}, which was lost", again.text)


def test_a_second_scheduler_ends_while_the_first_one_is_stopped(make_job: MakeJob) -> None:
    job, processes = by_hand(make_job)
    processes[0].send(signal.SIGSTOP)
    journal = {"PS_SCHEDULER_JOURNAL": str(job.directory / "journal")}
    at_its_port = job.scheduler(journal)
    at_another = job.scheduler({**journal, "DMLC_PS_ROOT_PORT": str(free_port())})
    assert [at_its_port.wait(), at_another.wait()] == [1, 1]
    assert "the port is in use; choose another, or stop the process" in at_its_port.text
    assert re.search(
        r"another scheduler has PS_SCHEDULER_JOURNAL=\S+; end it first \(it may be stopped\)",
        at_another.text,
    )
    assert_no_traceback(at_its_port, at_another)
    processes[0].send(signal.SIGCONT)
    end_by_hand(job, processes)
