"""Ctrl-C and other signals: all end in time, nothing stays, and servers say it in a sentence."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from job import ROOT, MakeJob, assert_no_traceback, needs_proc, wait_until

pytestmark = [pytest.mark.process, needs_proc]

READY = """
kv = mx.kvstore.create("dist_sync")
kv.init("w", vector(0, 0))
print("ready", flush=True)
"""
WAIT_IN_PULL = READY + 'kv.push("w", vector(1, 2)); kv.pull("w")\n'
WAIT_IN_BARRIER = READY + "kv.barrier()\n"
COMPUTE = READY + "time.sleep(60)\n"


def test_ctrl_c_ends_a_launched_job_whatever_its_workers_wait_for(make_job: MakeJob) -> None:
    waits = (
        'if kv.rank == 0: kv.push("w", vector(1, 2)); kv.pull("w")\n'
        "elif kv.rank == 1: kv.barrier()\n"
        "else: time.sleep(60)\n"
    )
    job = make_job(3, 2)
    launcher = job.launch(READY + waits)
    launcher.wait_for("(?s)ready.*ready.*ready")
    time.sleep(0.1)  # a moment for them to begin to wait; what follows is the same without it
    began_at = time.monotonic()
    os.killpg(launcher.pid, signal.SIGINT)
    assert launcher.wait() == 130
    assert time.monotonic() - began_at < 4
    assert job.left() == []
    assert "[launcher] ended by SIGINT" in launcher.lines
    assert "push and pull go on" not in launcher.text
    assert list(job.directory.glob("kvstore-launch-*")) == []
    for line in launcher.lines:
        if line.startswith(("[scheduler]", "[server")):
            assert "Traceback" not in line, launcher.text
            assert "Error" not in line, launcher.text


slow = pytest.mark.slow(reason="one that waits in a pull runs always")


@pytest.mark.parametrize(
    ("code", "other_code"),
    [
        pytest.param(WAIT_IN_PULL, WAIT_IN_BARRIER, id="pull"),
        pytest.param(WAIT_IN_BARRIER, WAIT_IN_PULL, id="barrier", marks=slow),
        pytest.param(COMPUTE, WAIT_IN_PULL, id="compute", marks=slow),
    ],
)
def test_ctrl_c_in_one_worker_ends_the_whole_job(
    make_job: MakeJob, code: str, other_code: str
) -> None:
    job = make_job(2, 1)
    scheduler, (server,) = job.service()
    interrupted, other = job.worker(0, code), job.worker(1, other_code)
    for worker in interrupted, other:
        worker.wait_for("ready")
    interrupted.send(signal.SIGINT)
    assert interrupted.wait() != 0
    assert interrupted.lines[-1] == "KeyboardInterrupt"
    assert other.wait() == 1
    assert re.search(rf"NodeLostError: worker 0 \(pid {interrupted.pid} on ", other.lines[-1])
    scheduler.wait()
    server.wait()
    assert_no_traceback(scheduler, server)


def test_ctrl_c_in_a_server_is_a_loss_that_all_others_name(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    scheduler, (interrupted, server) = job.service()
    workers = [job.worker(0, WAIT_IN_BARRIER), job.worker(1, WAIT_IN_PULL)]
    for worker in workers:
        worker.wait_for("ready")
    interrupted.send(signal.SIGINT)
    assert interrupted.wait() == 130
    assert interrupted.text == ""
    for process in scheduler, server, *workers:
        assert process.wait() == 1
        pattern = rf"NodeLostError: server 0 \(pid {interrupted.pid} on \S+\) is lost: "
        assert re.search(pattern, process.lines[-1]), process.text


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow(reason="an interrupt runs always")),
    ],
)
def test_a_signal_to_every_process_ends_all_of_them_at_once(
    make_job: MakeJob, number: signal.Signals
) -> None:
    job = make_job(2, 2)
    job.service()
    for worker in job.workers(COMPUTE):
        worker.wait_for("ready")
    for process in job.processes:
        process.send(number)
    codes = job.wait_all()
    assert 0 not in codes
    assert_no_traceback(*job.processes[:3])


def test_ctrl_c_while_the_job_is_not_complete_ends_those_that_wait(make_job: MakeJob) -> None:
    job = make_job(2, 1, PS_ROSTER_INTERVAL="0.1")
    scheduler, (server,) = job.service()
    worker = job.worker(0, READY)
    for process in server, worker:
        process.wait_for("waiting for 1 of 2 workers")
    for process in worker, server, scheduler:
        process.send(signal.SIGINT)
    codes = [process.wait() for process in (scheduler, server)]
    assert worker.wait() != 0
    assert set(codes) <= {1, 130}
    assert_no_traceback(scheduler, server)


def test_a_second_ctrl_c_hurries_the_launcher_on(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    launcher = job.launch(stubborn + COMPUTE)
    launcher.wait_for("ready")
    began_at = time.monotonic()
    for _ in range(2):
        os.killpg(launcher.pid, signal.SIGINT)
        time.sleep(0.2)
    assert launcher.wait() == 130
    assert time.monotonic() - began_at < 2.8  # by itself after 3
    wait_until(lambda: job.left() == [], "nothing of the job to be left")


def test_an_interrupt_while_a_service_is_still_importing_ends_it_without_a_word(
    make_job: MakeJob, tmp_path: Path
) -> None:
    package = tmp_path / "kvstore"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "server.py").write_text(
        "import sys, time\nprint('importing', flush=True)\ntime.sleep(30)\n"
    )
    job = make_job(1, 1)
    service = ROOT / "kvstore" / "launch" / "service.py"
    server = job.start("server", 0, [str(service)], {"PYTHONPATH": str(tmp_path)})
    server.wait_for("importing")
    server.send(signal.SIGINT)
    assert server.wait() == 130
    assert server.lines == ["importing"]


@pytest.mark.slow(reason="test_server_import.py has modules of servers always")
def test_modules_beside_the_user_are_found_by_servers_of_the_launcher(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    (job.directory / "beside.py").write_text("print('beside was imported', flush=True)\n")
    launcher = job.launch(READY, "--server-import", "beside")
    assert launcher.wait() == 0, launcher.text
    assert "[server 0] beside was imported" in launcher.lines
