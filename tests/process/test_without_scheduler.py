"""A launched job whose scheduler is killed: what goes on, what does not, and how it ends.

What the nodes themselves do then, without a launcher, is in ``test_losses.py``.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from doors import settings_of
from job import Job, MakeJob, Process, needs_proc

pytestmark = [pytest.mark.process, needs_proc]

SYNC = """
kv = mx.kvstore.create("dist_sync")
kv.init("w", vector(0, 0))
"""
ASYNC = """
kv = mx.kvstore.create("dist_async")
kv.init("w", vector(0, 0))
kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
"""
TOGETHER = """
kv.barrier()
print("together", kv.rank, flush=True)
wait_for_file("go")
"""
SYNC_ROUNDS = """
for n in range(1, 11):
    kv.push("w", vector(n, kv.rank))
    value = kv.pull("w")
    assert value.tolist() == [2 * n, 1], value
print("rounds are right", flush=True)
"""
ASYNC_ROUNDS = """
for n in range(1, 11):
    kv.push("w", vector(-1, -kv.rank))
    value = kv.pull("w").tolist()
    assert n <= value[0] <= n + 10 and value[1] >= n * kv.rank, value
open(f"done{kv.rank}", "w")
wait_for_file(f"done{1 - kv.rank}")
assert kv.pull("w").tolist() == [20, 10]
print("rounds are right", flush=True)
"""
FAILING_CALLS = """
for call in kv.barrier, lambda: kv.init("v", vector(0)):
    began = time.monotonic()
    try:
        call()
    except PSError as error:
        print(f"{type(error).__name__}: {error}; in time: {time.monotonic() - began < 5}")
"""


def lose_the_scheduler(job: Job, launcher: Process) -> int:
    """Kill it once all workers are together; returns its process id."""
    for rank in range(job.num_workers):
        launcher.wait_for(rf"together {rank}")
    victim = job.launched("scheduler")
    os.kill(victim, signal.SIGKILL)
    return victim


def block_of(launcher: Process) -> list[str]:
    return launcher.text.partition("======== the job failed")[2].splitlines()


@pytest.mark.parametrize(
    "kind",
    [
        "dist_sync",
        pytest.param("dist_async", marks=pytest.mark.slow(reason="dist_sync runs always")),
    ],
)
def test_push_and_pull_go_on_barriers_fail_at_once_and_the_job_ends_as_failed(
    make_job: MakeJob, kind: str
) -> None:
    begin, rounds = (SYNC, SYNC_ROUNDS) if kind == "dist_sync" else (ASYNC, ASYNC_ROUNDS)
    job = make_job(2, 2)
    launcher = job.launch(begin + TOGETHER + rounds + FAILING_CALLS + 'kv.pull("w")\n')
    victim = lose_the_scheduler(job, launcher)
    killed_at = time.monotonic()
    line = (
        f"[launcher] the scheduler was killed by SIGKILL (pid {victim}): push and pull go on; "
        "barriers, init and joins no longer work; at its end the job counts as failed "
        "(exit code 137)"
    )
    launcher.wait_for(re.escape(line))
    assert time.monotonic() - killed_at < 5
    # As long as the launcher once waited for others after a failure.
    with pytest.raises(AssertionError, match="still runs"):
        launcher.wait(5.5)
    job.allow("go")
    assert launcher.wait() == 137, launcher.text
    assert launcher.lines.count("[worker 0] rounds are right") == 1
    assert launcher.lines.count("[worker 1] rounds are right") == 1
    pattern = rf"NodeLostError: scheduler \(pid {victim} on \S+\) is lost: .*; in time: True$"
    assert len(re.findall(pattern, launcher.text, re.MULTILINE)) == 4, launcher.text
    block = block_of(launcher)
    assert block[1] == f"process:  scheduler (pid {victim})"
    assert block[2].startswith("ended:    signal SIGKILL, ")
    assert block[-2] == "all others ended with exit code 0"
    assert "Traceback" not in launcher.text
    assert "did not end" not in launcher.text


@pytest.mark.slow(reason="test_losses.py has a barrier without its scheduler always")
def test_a_worker_in_a_barrier_raises_and_the_scheduler_is_named_as_the_cause(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1)
    waits = "if kv.rank == 0: kv.barrier()\nwhile True: time.sleep(0.01); kv.pull('w')\n"
    launcher = job.launch(ASYNC + TOGETHER.replace('wait_for_file("go")', waits))
    victim = lose_the_scheduler(job, launcher)
    assert launcher.wait() == 137, launcher.text
    pattern = rf"\[worker 0\] pslite.errors.NodeLostError: scheduler \(pid {victim} on "
    assert re.search(pattern, launcher.text), launcher.text
    block = block_of(launcher)
    assert block[1] == f"process:  scheduler (pid {victim})"
    others = next(line for line in block if line.startswith("other failures: "))
    assert "worker 0 (exit code 1)" in others


@pytest.mark.parametrize(
    "role",
    ["worker", pytest.param("server", marks=pytest.mark.slow(reason="a lost worker runs always"))],
)
def test_without_the_scheduler_a_lost_node_is_still_named_by_all_the_others(
    make_job: MakeJob, role: str
) -> None:
    job = make_job(3, 2)
    forever = "while True: kv.push('w', vector(1, 1)); kv.pull('w')\n"
    launcher = job.launch(SYNC + TOGETHER + forever)
    lose_the_scheduler(job, launcher)
    launcher.wait_for("push and pull go on")
    victim = job.launched(role, 1)
    job.allow("go")
    os.kill(victim, signal.SIGKILL)
    assert launcher.wait() == 137, launcher.text
    survivors = {
        f"{kind} {rank}" for kind, n in (("worker", 3), ("server", 2)) for rank in range(n)
    }
    for name in survivors - {f"{role} 1"}:
        pattern = rf"\[{name}\] .*NodeLostError: {role} 1 \(pid {victim} on \S+\) is lost: "
        assert re.search(pattern, launcher.text), (name, launcher.text)
    assert block_of(launcher)[1].startswith("process:  scheduler ")


@pytest.mark.slow(reason="a worker that is lost runs always")
def test_without_the_scheduler_a_worker_that_leaves_early_is_named_where_it_is_missed(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1)
    launcher = job.launch(
        SYNC
        + TOGETHER
        + """
for n in range(1 + kv.rank):
    kv.push("w", vector(1, 1)); kv.pull("w")
"""
    )
    lose_the_scheduler(job, launcher)
    job.allow("go")
    assert launcher.wait() == 137, launcher.text
    pattern = r"\[worker 1\] pslite.errors.NodeLostError: worker 0 \(pid \d+ on \S+\) has left "
    assert re.search(pattern, launcher.text), launcher.text
    assert block_of(launcher)[1].startswith("process:  scheduler ")


@pytest.mark.slow(reason="it waits for seconds; a scheduler that is killed later runs always")
def test_a_scheduler_that_is_killed_before_all_have_joined_ends_the_job(make_job: MakeJob) -> None:
    job = make_job(2, 1, PS_ROSTER_INTERVAL="0.2", PS_LOST_AFTER="0.5")
    late = 'if os.environ["DMLC_TASK_ID"] == "1": time.sleep(60)\n'
    launcher = job.launch(late + SYNC)
    launcher.wait_for(r"\[worker 0\] .* waiting for 1 of 2 workers for ")
    victim = job.launched("scheduler")
    os.kill(victim, signal.SIGKILL)
    assert launcher.wait() == 137, launcher.text
    assert "push and pull go on" not in launcher.text
    assert block_of(launcher)[1] == f"process:  scheduler (pid {victim})"
    pattern = r"NodeLostError: the scheduler at \S+ was lost before the cluster was complete: "
    assert len(re.findall(pattern, launcher.text)) >= 2, launcher.text
    assert "\nended by the launcher: worker 1\n" in launcher.text


@pytest.mark.slow(reason="test_interrupts.py has Ctrl-C always")
def test_ctrl_c_ends_a_job_without_its_scheduler(make_job: MakeJob) -> None:
    job = make_job(2, 1)
    launcher = job.launch(SYNC + TOGETHER)
    lose_the_scheduler(job, launcher)
    launcher.wait_for("push and pull go on")
    launcher.send(signal.SIGINT)
    assert launcher.wait() == 130, launcher.text
    assert block_of(launcher)[1].startswith("process:  scheduler ")


LISTEN_AT = """
import os, socket, sys
if os.geteuid() == 0:
    os.setgid(65534), os.setuid(65534)
for host in "127.0.0.1", "0.0.0.0":
    for option in socket.SO_REUSEADDR, socket.SO_REUSEPORT:
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                thief.bind((host, int(sys.argv[1])))
                thief.listen()
                print("listens at", host)
            except OSError as error:
                print(error.errno)
"""


@pytest.mark.slow(reason="a job whose scheduler is killed runs always")
def test_nobody_can_listen_where_the_scheduler_was_while_the_job_goes_on(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    launcher = job.launch(ASYNC + TOGETHER + 'kv.pull("w")\n')
    lose_the_scheduler(job, launcher)
    port = settings_of(job.launched("server"))["DMLC_PS_ROOT_PORT"]
    launcher.wait_for("push and pull go on")
    thief = subprocess.run(
        [sys.executable, "-c", LISTEN_AT, port], capture_output=True, text=True, check=True
    )
    job.allow("go")
    assert launcher.wait() == 137, launcher.text
    assert thief.stdout.split() == [str(errno.EADDRINUSE)] * 4
