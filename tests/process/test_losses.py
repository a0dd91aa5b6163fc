"""What the others see when a process dies, freezes, raises or leaves early."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from job import Job, MakeJob, Process, assert_no_traceback, needs_proc, wait_until

pytestmark = [pytest.mark.process, needs_proc]

SYNC = """
kv = mx.kvstore.create("dist_sync")
kv.init("w", vector(0, 0))
print("rank", kv.rank, flush=True)
"""
ASYNC = """
kv = mx.kvstore.create("dist_async")
kv.init("w", vector(0, 0))
kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
kv.barrier()
print("rank", kv.rank, flush=True)
"""
ROUND = """
kv.push("w", vector(1, 2)); kv.pull("w")
"""
PULL_FOREVER = """
print("pulling", flush=True)
kv.push("w", vector(1, 2)); kv.pull("w")
"""
SLEEP = "time.sleep(60)\n"


def start(job: Job, first: str, second: str) -> tuple[Process, list[Process], list[Process]]:
    """Scheduler, servers and two workers with different code, all at work."""
    scheduler, servers = job.service()
    workers = [job.worker(0, first), job.worker(1, second)]
    for worker in workers:
        worker.wait_for("rank")
    return scheduler, servers, workers


def end_within_15_s(*survivors: Process) -> None:
    give_up_at = time.monotonic() + 15
    for process in survivors:
        assert process.wait(give_up_at - time.monotonic()) == 1, process.text


def names(process: Process, title: str, victim: Process) -> bool:
    """Whether a process ends with an error about the loss of ``victim``.

    A call on a key that had failed over it by then says so, too. The I/O thread may log the loss
    after the script's error.
    """
    loss = rf"NodeLostError: {title} \(pid {victim.pid} on \S+\) is lost: its process is gone"
    pattern = loss + "(; this call no longer accesses key 'w')?$"
    return any(re.search(pattern, line) for line in process.lines[-2:])


def test_when_a_worker_is_killed_every_survivor_ends_with_an_error_that_names_it(
    make_job: MakeJob,
) -> None:
    scheduler, servers, (pulling, victim) = start(make_job(2, 2), SYNC + PULL_FOREVER, SYNC + SLEEP)
    pulling.wait_for("pulling")
    victim.send(signal.SIGKILL)
    survivors = [pulling, scheduler, *servers]
    end_within_15_s(*survivors)
    for process in survivors:
        assert names(process, "worker 1", victim), process.text
        # The cause, not its consequences.
        assert process.text.count(" is lost: ") <= 2, process.text
    assert_no_traceback(scheduler, *servers)


def test_when_a_server_is_killed_also_workers_that_do_not_wait_for_it_get_its_name(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 2)
    scheduler, (other, victim), (pulling, computing) = start(
        job, SYNC + PULL_FOREVER, SYNC + 'wait_for_file("go")\n' + ROUND
    )
    pulling.wait_for("pulling")
    victim.send(signal.SIGKILL)
    end_within_15_s(scheduler, other, pulling)
    job.allow("go")
    end_within_15_s(computing)
    for process in scheduler, other, pulling, computing:
        assert names(process, "server 1", victim), process.text
    assert_no_traceback(scheduler, other)


def test_when_the_scheduler_is_killed_every_survivor_ends_with_an_error_that_names_it(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1)
    waiting, computing = SYNC + "kv.barrier()\n", SYNC + 'wait_for_file("go")\n' + ROUND
    scheduler, (server,), workers = start(job, waiting, computing)
    scheduler.send(signal.SIGKILL)
    end_within_15_s(server, workers[0])
    workers[1].wait_for(r"scheduler \(pid \d+ on \S+\) is lost")
    job.allow("go")
    end_within_15_s(workers[1])
    for process in server, *workers:
        assert names(process, "scheduler", scheduler), process.text
    assert_no_traceback(server)


def test_calls_after_a_loss_fail_at_once_also_when_nothing_was_waiting(make_job: MakeJob) -> None:
    code = (
        SYNC
        + """
wait_for_file("go")
try:
    kv.push("w", vector(1, 1)); kv.push("w", vector(1, 1))
except PSError:
    pass
for call in lambda: kv.pull("w"), kv.barrier, lambda: kv.init("v", vector(0)):
    try:
        call()
    except PSError as error:
        print(f"{type(error).__name__}: {error}")
"""
    )
    job = make_job(2, 1)
    scheduler, servers, (survivor, victim) = start(job, code, SYNC + SLEEP)
    victim.send(signal.SIGKILL)
    end_within_15_s(scheduler, *servers)
    survivor.wait_for(r"worker 1 \(pid \d+ on \S+\) is lost")
    job.allow("go")
    assert survivor.wait() == 0
    errors = [line for line in survivor.lines if line.startswith("NodeLostError")]
    assert len(errors) == 3
    assert all(line.startswith("NodeLostError: worker 1 (pid ") for line in errors)


@pytest.mark.slow(reason="a synchronous job runs always")
def test_a_killed_worker_ends_an_asynchronous_job_as_well(make_job: MakeJob) -> None:
    busy = ASYNC + "while True:" + ROUND.replace("\n", " ")
    scheduler, (server,), (survivor, victim) = start(make_job(2, 1), busy, busy)
    victim.send(signal.SIGKILL)
    end_within_15_s(scheduler, server, survivor)
    # That nobody stays for the acceptance of a process that is gone, the simulated losses show.
    for process in scheduler, server, survivor:
        assert names(process, "worker 1", victim), process.text


# -- through the launcher -----------------------------------------------------------------


@pytest.mark.parametrize(
    "role",
    [
        "server",
        pytest.param("worker", marks=pytest.mark.slow(reason="a killed server runs always")),
        pytest.param("scheduler", marks=pytest.mark.slow(reason="a killed server runs always")),
    ],
)
def test_the_launcher_passes_a_killed_process_on_as_137_and_names_it_last(
    make_job: MakeJob, role: str
) -> None:
    # With another worker the launcher waits for what the survivors say, and not for a moment only.
    job = make_job(2, 1)
    launcher = job.launch(SYNC + "kv.barrier()\n" + 'wait_for_file("go"); kv.barrier()\n')
    launcher.wait_for("(?s)rank.*rank")
    victim = job.launched(role)
    os.kill(victim, signal.SIGKILL)
    launcher.wait_for(rf"{role} (0 )?\(pid {victim} on \S+\) is lost")
    job.allow("go")
    assert launcher.wait() == 137
    block = launcher.text.partition("======== the job failed")[2].splitlines()
    name = role if role == "scheduler" else f"{role} 0"
    assert block[1] == f"process:  {name} (pid {victim})"
    assert block[2].startswith("ended:    signal SIGKILL")


def test_an_exception_in_one_worker_is_the_cause_that_the_launcher_reports(
    make_job: MakeJob,
) -> None:
    job = make_job(3, 1)
    mistake = 'if kv.rank == 1: raise ValueError("my own mistake")\n'
    launcher = job.launch(SYNC + ROUND + mistake + ROUND)
    assert launcher.wait() == 1
    for rank in 0, 2:
        pattern = rf"\[worker {rank}\] pslite.errors.NodeLostError: worker 1 \(pid \d+ on "
        assert re.search(pattern, launcher.text)
        mine = [line for line in launcher.lines if line.startswith(f"[worker {rank}] ")]
        # One line about the loss, and the script's own traceback without frames of ours.
        assert len([line for line in mine if "is lost" in line]) == 2
        assert not [line for line in mine if "/kvstore/" in line or "/pslite/" in line]
    block = launcher.text.partition("======== the job failed")[2]
    assert "process:  worker 1 " in block
    assert "ValueError: my own mistake" in block


# -- frozen, failing, leaving -------------------------------------------------------------


def test_a_worker_that_is_frozen_for_three_seconds_changes_nothing(make_job: MakeJob) -> None:
    code = (
        SYNC
        + """
for n in range(1, 101):
    kv.push("w", vector(n, kv.rank))
    value = kv.pull("w")
    assert value.tolist() == [2 * n, 1], value
    if n == 20:
        print("started", flush=True)
    time.sleep(0.005)
print("done", value)
"""
    )
    job = make_job(2, 1)
    scheduler, servers, workers = start(job, code, code)
    workers[1].wait_for("started")
    workers[1].send(signal.SIGSTOP)
    time.sleep(3)
    assert all(process.popen.poll() is None for process in job.processes)
    workers[1].send(signal.SIGCONT)
    assert job.wait_all() == [0, 0, 0, 0], job.output()
    assert [worker.lines[-1] for worker in workers] == ["done [200.   1.]"] * 2
    assert_no_traceback(scheduler, *servers)


@pytest.mark.slow(reason="the same under the launcher runs always")
def test_an_exception_in_user_code_ends_the_others_with_an_error_that_names_the_worker(
    make_job: MakeJob,
) -> None:
    job = make_job(3, 1)
    scheduler, (server,) = job.service()
    mistake = 'if kv.rank == 1: raise ValueError("my own mistake")\n'
    workers = job.workers(SYNC + ROUND + mistake + ROUND)
    end_within_15_s(*workers)
    for rank in 0, 2:
        assert re.search(
            rf"NodeLostError: worker 1 \(pid {workers[1].pid} on ", workers[rank].lines[-1]
        ), workers[rank].text
    assert workers[1].lines[-1] == "ValueError: my own mistake"
    scheduler.wait()
    server.wait()
    assert_no_traceback(scheduler, server)


def test_a_worker_that_leaves_early_is_an_error_on_those_who_still_push_in_rounds(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1)
    _, _, (stays, leaves) = start(job, SYNC + ROUND + ROUND, SYNC + ROUND)
    assert leaves.wait() == 0
    assert stays.wait() == 1
    assert re.search(
        rf"NodeLostError: worker 1 \(pid {leaves.pid} on \S+\) has left the job; others wait for "
        r"its next push or collective call, and all workers must make equally many ",
        stays.lines[-1],
    ), stays.text
    job.wait_all()


def test_a_worker_that_leaves_early_does_not_disturb_an_asynchronous_job(
    make_job: MakeJob,
) -> None:
    many = "for _ in range(50):" + ROUND.replace("\n", " ") + "\n"
    job = make_job(2, 1)
    _, _, (stays, leaves) = start(
        job,
        ASYNC + many + 'wait_for_file("go")\n' + many + 'print(kv.pull("w"))',
        ASYNC + 'for _ in range(30): kv.push("w", vector(1, 2))\n',
    )
    assert leaves.wait() == 0
    job.allow("go")
    # All that was pushed counts, also the last push before the end of the process.
    assert job.wait_all() == [0, 0, 0, 0], job.output()
    assert stays.lines[-1] == "[-130. -260.]"


def test_a_worker_that_ends_after_its_part_of_the_last_round_waits_for_the_others(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1)
    _, (server,), (stays, ends) = start(
        job,
        SYNC + 'wait_for_file("go")\nkv.push("w", vector(1, 2)); print(kv.pull("w"))\n',
        SYNC + 'kv.push("w", vector(10, 20)); print("the last line", flush=True)\n',
    )
    ends.wait_for("the last line")
    time.sleep(0.5)
    assert ends.popen.poll() is None
    job.allow("go")
    assert job.wait_all() == [0, 0, 0, 0], job.output()
    assert stays.lines[-1] == "[11. 22.]"
    assert server.text == ""


def test_children_of_a_worker_end_without_disturbing_it(make_job: MakeJob) -> None:
    """Loaders of data fork; their end runs what the worker has registered for its own."""
    fork = """
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    job = make_job(2, 1)
    job.service()
    workers = job.workers(SYNC + ROUND + fork + ROUND + 'kv.barrier(); print("done")\n')
    assert job.wait_all() == [0, 0, 0, 0], job.output()
    assert [worker.lines[-1] for worker in workers] == ["done"] * 2
    wait_until(lambda: job.left() == [], "all children to end")


def test_children_of_a_killed_worker_do_not_hide_its_loss(make_job: MakeJob) -> None:
    """They keep its connections; what nobody sends heartbeats on ends after five seconds."""
    fork = """
if os.fork() == 0:
    wait_for_file("seen")
    os._exit(0)
print("forked", flush=True)
"""
    job = make_job(2, 1)
    job.settings = {"PS_VERBOSE": "1"}
    scheduler, servers, (first, second) = start(job, SYNC + PULL_FOREVER, SYNC + fork + SLEEP)
    second.wait_for("forked")
    first.wait_for("pulling")
    second.send(signal.SIGKILL)
    end_within_15_s(first, scheduler, *servers)
    job.allow("seen")
    second.wait()
    lost = rf"worker 1 \(pid {second.pid} on \S+\) is lost: its process is gone"
    for process in (first, scheduler, *servers):
        assert re.search(lost, process.text), process.text
        assert "connection to worker 1" not in process.text.partition("is lost")[0]


def test_a_worker_that_dawdles_is_named_to_those_who_wait_for_it(make_job: MakeJob) -> None:
    job = make_job(2, 1, PS_STALL_REPORT="2", PS_HEARTBEAT_INTERVAL="0.1")
    job.service()
    code = (
        SYNC
        + """
if kv.rank == 1: wait_for_file("round")
kv.push("w", vector(1, 1)); kv.pull("w")
if kv.rank == 1: wait_for_file("barrier")
kv.barrier()
"""
    )
    waits, dawdles = job.workers(code)
    who = rf"worker 1 \(pid {dawdles.pid} on \S+\)"
    waits.wait_for(rf"warning: round 1 of key 'w' has waited \d s for {who}")
    assert re.search(r"warning: still waiting after \d s: the servers' answer for 'w'", waits.text)
    job.allow("round")
    waits.wait_for(rf"warning: the barrier of the workers has waited \d s for {who}")
    job.allow("barrier")
    assert job.wait_all() == [0, 0, 0, 0], job.output()
    # Busy is not silent: its I/O thread gives signs of life.
    assert "has been silent" not in job.output()


def test_a_store_in_a_forked_child_refuses_to_be_used(make_job: MakeJob) -> None:
    """The child has no I/O thread: waiting for an answer would never end."""
    use = """
child = os.fork()
if child == 0:
    try:
        kv.pull("w")
    except PSError as error:
        os._exit(7)
for _ in range(2000):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        break
    time.sleep(0.01)
else:
    os.kill(child, 9)
    pid, status = os.waitpid(child, 0)
print("status", status >> 8)
"""
    job = make_job(1, 1)
    job.service()
    worker = job.worker(0, SYNC + ROUND + use)
    assert job.wait_all() == [0, 0, 0], job.output()
    assert worker.lines[-1] == "status 7"


HOLD_INTERPRETER = """
import ctypes
print("held", flush=True)
ctypes.PyDLL(None).sleep(600)  # unlike CDLL it keeps the lock, so no other thread of Python runs
"""


def test_a_worker_whose_interpreter_is_held_is_named_and_lost_only_where_that_is_asked_for(
    make_job: MakeJob,
) -> None:
    """libzmq's own threads answer for it, so its connections are fine."""
    beats = {"PS_HEARTBEAT_INTERVAL": "0.2", "PS_STALL_REPORT": "1", "PS_LOST_AFTER": "1"}
    patient, strict = make_job(2, 1, **beats), make_job(2, 1, **beats, PS_HEARTBEAT_TIMEOUT="6")
    started = [
        start(job, SYNC + PULL_FOREVER, SYNC + HOLD_INTERPRETER) for job in (patient, strict)
    ]
    for scheduler, (server,), (pulling, held) in started:
        held.wait_for("held")
        pulling.wait_for("pulling")
        for process in scheduler, server:
            process.wait_for(rf"worker 1 \(pid {held.pid} on \S+\) .*silent")
    (_, _, (waiting, _)), (scheduler, servers, (pulling, held)) = started
    end_within_15_s(scheduler, *servers, pulling)
    for process in scheduler, *servers, pulling:
        assert f"worker 1 (pid {held.pid} on " in process.lines[-1], process.text
    assert waiting.popen.poll() is None
    for process in [*patient.processes, held]:
        if process.popen.poll() is None:
            process.send(signal.SIGKILL)
