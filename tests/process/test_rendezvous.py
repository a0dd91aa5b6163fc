"""How jobs of real processes come together, and what their users read when they cannot."""

from __future__ import annotations

import re
import signal
import socket
import time
from textwrap import indent

import pytest
from job import HOST, MakeJob, Process, assert_no_traceback, needs_proc

from pslite.version import __version__

pytestmark = [pytest.mark.process, needs_proc]

JOIN = 'kv = mx.kvstore.create("dist_sync")\nprint("rank", kv.rank, flush=True)\n'
STAY = JOIN + 'wait_for_file("go")\n'
TIMED = f"""
import time
begun_at = time.monotonic()
try:
{indent(JOIN, "    ")}finally:
    print(f"ended after {{time.monotonic() - begun_at:.2f}} s", flush=True)
"""
AT_ALL_S = 30.0
"""Half of what PS_RENDEZVOUS_TIMEOUT is by default; a busy machine needs seconds to begin."""
OFTEN = "0.1"
"""A roster interval for tests that wait until the scheduler has taken a registration."""


def wait_until_registered(scheduler: Process, *processes: Process) -> None:
    """Needs a short roster interval, and that the job is not complete with them."""
    for process in processes:
        scheduler.wait_for(rf"connected: .*\(pid {process.pid}\)")


def test_without_a_scheduler_all_end_by_the_deadline_and_say_what_to_check(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 1, PS_RENDEZVOUS_TIMEOUT="3", PS_ROSTER_INTERVAL="0.3")
    server, worker = job.server(), job.worker(0, TIMED)
    assert job.wait_all() == [1, 1]
    (ended_after_s,) = re.findall(r"ended after (\S+) s", worker.text)
    assert 3 <= float(ended_after_s) < AT_ALL_S
    address = f"{HOST}:{job.port}"
    for process in server, worker:
        assert f"waiting for the scheduler at {address}; no answer for " in process.text
        assert process.lines[-1].endswith(
            f"DeadlineError: no scheduler answered at {address} within 3 s "
            "(PS_RENDEZVOUS_TIMEOUT); check that it is running and that DMLC_PS_ROOT_URI and "
            "DMLC_PS_ROOT_PORT are the same in all processes"
        )
    assert_no_traceback(server)


def test_who_is_missing_is_said_on_every_waiting_node_and_all_end_by_the_deadline(
    make_job: MakeJob,
) -> None:
    job = make_job(3, 2, PS_RENDEZVOUS_TIMEOUT="6", PS_ROSTER_INTERVAL="1")
    # The scheduler's time begins with itself: when it starts, the others are there.
    patient = {"PS_RENDEZVOUS_TIMEOUT": "30"}
    server, worker = job.server(1, patient), job.worker(0, JOIN, patient)
    for process in server, worker:
        process.wait_for("waiting for the scheduler at ")
    begun_at = time.monotonic()
    scheduler = job.scheduler()
    assert job.wait_all() == [1, 1, 1]
    assert 5.5 < time.monotonic() - begun_at < AT_ALL_S
    for process in scheduler, server, worker:
        said = re.findall(
            r"waiting for 2 of 3 workers, 1 of 2 servers for \d s; connected: (.*)", process.text
        )
        # Every second for six seconds, or less often on a busy machine; never more often.
        assert 1 <= len(said) <= 6, process.text
        assert all(f"(pid {other.pid})" in said[-1] for other in (server, worker))
        assert process.lines[-1].endswith(
            "the cluster was not complete within 6 s (PS_RENDEZVOUS_TIMEOUT): "
            "missing 2 of 3 workers, 1 of 2 servers"
        )
        assert "DeadlineError: " in process.lines[-1]  # on those who were told, too
    assert_no_traceback(scheduler, server)


def test_different_numbers_of_workers_are_an_error_on_all_sides_that_names_both(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1, PS_ROSTER_INTERVAL=OFTEN)
    scheduler, (server,) = job.service()
    wait_until_registered(scheduler, server)
    worker = job.worker(0, JOIN, {"DMLC_NUM_WORKER": "3"})
    assert job.wait_all() == [1, 1, 1]
    for process in scheduler, server, worker:
        assert re.search(
            rf"the worker on \S+ \(pid {worker.pid}\) has DMLC_NUM_WORKER=3, the scheduler has 2; "
            "start all processes with the same numbers$",
            process.lines[-1],
        ), process.text
    assert_no_traceback(scheduler, server)


def test_a_busy_port_ends_the_scheduler_at_once_with_its_name(make_job: MakeJob) -> None:
    with socket.create_server((HOST, 0)) as other:
        job = make_job(1, 1)
        port = other.getsockname()[1]
        scheduler = job.scheduler({"DMLC_PS_ROOT_PORT": str(port)})
        assert scheduler.wait() == 1
    assert scheduler.lines == [
        f"ConfigError: the scheduler cannot listen at DMLC_PS_ROOT_URI={HOST}, "
        f"DMLC_PS_ROOT_PORT={port}: cannot listen on {HOST}:{port}: the port is in use; choose "
        "another, or stop the process that uses it"
    ]


def test_a_wrong_store_type_is_an_error_that_lists_the_known_ones(make_job: MakeJob) -> None:
    worker = make_job(1, 1).worker(0, 'mx.kvstore.create("dist_sink")')
    assert worker.wait() == 1
    assert worker.lines[-1].startswith(
        "kvstore.errors.UnknownTypeError: unknown store type 'dist_sink'; known types: local, "
    )
    for name in "device", "dist_sync", "dist_device_sync", "dist_async":
        assert f" {name}," in worker.lines[-1]


@pytest.mark.slow(reason="tests/unit/kvstore/launch has the launcher's remarks")
def test_launched_workers_without_a_store_are_told_that_each_ran_by_itself(
    make_job: MakeJob,
) -> None:
    launcher = make_job(2, 2).launch('mx.kvstore.create("local")\n')
    assert launcher.wait() == 1, launcher.text
    assert launcher.lines == [
        "[launcher] the workers ended without joining the job, so each ran alone; check that the "
        "script creates a dist_... store"
    ]


def test_servers_explain_themselves_and_take_no_arguments(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    module = ("-m", "kvstore.server")
    explained = job.start("server", None, (*module, "--help"))
    version = job.start("server", None, (*module, "--version"))
    wrong = job.start("server", None, (*module, "scheduler"))
    assert job.wait_all() == [0, 0, 2]
    assert explained.lines[0] == "usage: python -m kvstore.server [-h] [--version]"
    assert "DMLC_ROLE" in explained.text
    assert version.lines == [__version__]
    assert wrong.lines[-1].endswith("unrecognized arguments: scheduler")


def test_each_missing_variable_is_named_with_the_way_to_set_it(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    names = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
    workers = [job.worker(0, JOIN, {name: None}) for name in names]
    schedulers = [job.scheduler({name: None}) for name in names[:2]]
    nothing = job.worker(0, JOIN, dict.fromkeys(names))
    assert job.wait_all() == [1, 1, 1, 1, 2, 2, 1]
    advice = (
        "; start the job with kvstore-launch (tools/launch.py), which sets them, or export them"
    )
    for process, name in zip([*workers, *schedulers], [*names, *names[:2]], strict=True):
        assert process.lines[-1].endswith(
            f"a distributed store needs the environment variables {name}{advice}"
        )
    assert [len(scheduler.lines) for scheduler in schedulers] == [1, 1]
    assert (
        "needs the environment variables DMLC_NUM_WORKER, DMLC_NUM_SERVER, DMLC_PS_ROOT_URI, "
        in nothing.lines[-1]
    )
    assert_no_traceback(*schedulers)


@pytest.mark.slow(reason="tests/unit/pslite/test_config.py has each setting")
def test_malformed_settings_are_refused_by_name(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    wrong = {
        "DMLC_NUM_WORKER": ("-1", "DMLC_NUM_WORKER is -1; it must be 0 or greater"),
        "DMLC_ROLE": ("serv", "DMLC_ROLE is 'serv'; it must be worker, server or scheduler"),
        "PS_VERBOSE": ("loud", "PS_VERBOSE is 'loud'; expected a whole number (1 prints "),
        "DMLC_TASK_ID": ("first", "DMLC_TASK_ID is 'first'; expected a whole number (requested "),
    }
    servers = [job.server(0, {name: text}) for name, (text, _) in wrong.items()]
    worker_as_server = job.server(0, {"DMLC_ROLE": None})
    assert set(job.wait_all()) == {2}
    for server, (_, sentence) in zip(servers, wrong.values(), strict=True):
        (line,) = server.lines
        assert line.startswith(sentence)
    assert worker_as_server.lines == [
        "kvstore.server needs DMLC_ROLE=server or DMLC_ROLE=scheduler, got 'worker' (the default)"
    ]


def test_two_workers_with_one_task_id_end_the_job_at_once_with_the_reason_on_all_nodes(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1, PS_ROSTER_INTERVAL=OFTEN)
    scheduler, (server,) = job.service()
    first = job.worker(0, JOIN)
    wait_until_registered(scheduler, server, first)
    second = job.worker(0, JOIN)
    assert job.wait_all() == [1, 1, 1, 1]
    for process in job.processes:
        assert re.search(
            rf"two workers have DMLC_TASK_ID=0 \(pid {first.pid} on \S+, pid {second.pid} on "
            r"\S+\); give each its own number$",
            process.lines[-1],
        ), process.text
    assert_no_traceback(scheduler, server)


def test_a_task_id_that_is_too_high_is_refused_and_the_job_goes_on(make_job: MakeJob) -> None:
    job = make_job(2, 1, PS_ROSTER_INTERVAL=OFTEN)
    scheduler, _ = job.service()
    first = job.worker(0, JOIN)
    wait_until_registered(scheduler, first)
    too_high = job.worker(2, JOIN)
    assert too_high.wait() == 1
    assert re.search(
        r"DMLC_TASK_ID=2 of the worker on \S+ is too high: the job has 2 workers, counted from 0$",
        too_high.lines[-1],
    )
    right = job.worker(1, JOIN)
    assert (first.wait(), right.wait(), scheduler.wait()) == (0, 0, 0)
    assert right.lines[-1] == "rank 1"


def test_one_worker_too_many_is_refused_before_and_after_the_job_is_complete(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 1, PS_ROSTER_INTERVAL=OFTEN)
    scheduler, member = job.scheduler(), job.worker(None, STAY)
    wait_until_registered(scheduler, member)
    early = job.worker(None, JOIN)
    assert early.wait() == 1
    assert re.search(
        r"this job already has all its 1 workers; the worker on \S+ "
        rf"\(pid {early.pid}\) is one too many$",
        early.lines[-1],
    )
    job.server()
    member.wait_for("rank 0")
    late = job.worker(None, JOIN)
    assert late.wait() == 1
    assert late.lines[-1].endswith("this job is complete and does not accept further nodes")
    job.allow("go")
    assert member.wait() == 0
    assert scheduler.wait() == 0


def test_a_worker_of_another_job_is_refused_and_the_right_one_still_gets_in(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 1)
    scheduler, _ = job.service()
    stranger = job.worker(0, JOIN, {"PS_JOB_ID": "another"})
    assert stranger.wait() == 1
    assert stranger.lines[-1].endswith(
        "this node does not belong to the job 'another' of the message: two jobs use the same "
        "address; give each job its own port"
    )
    assert job.worker(0, JOIN).wait() == 0
    assert scheduler.wait() == 0


def test_unknown_settings_are_reported_by_every_process_and_ignored(make_job: MakeJob) -> None:
    job = make_job(1, 1, PS_VERBOZE="1", PS_RESEND="1")
    job.service()
    job.worker(0, JOIN)
    assert job.wait_all() == [0, 0, 0]
    for process in job.processes:
        assert re.findall("warning: .*", process.text) == [
            "warning: the setting PS_VERBOZE is unknown and was ignored; did you mean PS_VERBOSE?"
        ]


def test_a_worker_killed_before_the_job_is_complete_ends_it_with_a_sentence_about_it(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1, PS_ROSTER_INTERVAL=OFTEN, PS_LOST_AFTER="0.5")
    scheduler, survivor, victim = job.scheduler(), job.worker(0, JOIN), job.worker(1, JOIN)
    wait_until_registered(scheduler, survivor, victim)
    victim.send(signal.SIGKILL)
    assert job.wait_all() == [1, 1, -signal.SIGKILL]
    for process in scheduler, survivor:
        assert re.search(rf"a worker on \S+ \(pid {victim.pid}\) is lost: ", process.lines[-1])
    assert_no_traceback(scheduler)


def test_when_the_scheduler_is_killed_before_the_job_is_complete_those_that_wait_name_it(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1, PS_ROSTER_INTERVAL=OFTEN, PS_LOST_AFTER="0.5")
    scheduler, (server,) = job.service()
    worker = job.worker(0, JOIN)
    wait_until_registered(scheduler, server, worker)
    scheduler.send(signal.SIGKILL)
    assert job.wait_all() == [-signal.SIGKILL, 1, 1]
    for process in server, worker:
        sentence = f"NodeLostError: the scheduler at {HOST}:{job.port} was lost before the cluster "
        assert sentence in process.lines[-1]
    assert_no_traceback(server)


@pytest.mark.slow(reason="the simulator waits longer than that, too")
def test_nodes_that_wait_longer_than_the_heartbeat_timeout_are_not_lost(make_job: MakeJob) -> None:
    beats = {"PS_HEARTBEAT_TIMEOUT": "3", "PS_HEARTBEAT_INTERVAL": "0.2"}
    job = make_job(2, 1, PS_ROSTER_INTERVAL=OFTEN, **beats)
    scheduler, (server,) = job.service()
    wait_until_registered(scheduler, server, job.worker(0, JOIN))
    time.sleep(4.0)
    job.worker(1, JOIN)
    assert job.wait_all() == [0, 0, 0, 0], job.output()
