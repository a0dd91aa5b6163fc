"""Processes started by hand: in any order, with or without ranks, the old way, on any address."""

from __future__ import annotations

import itertools
import random
import re
import time

import pytest
from job import (
    HOST,
    SHORT,
    WORKER,
    MakeJob,
    Process,
    assert_no_traceback,
    free_port,
    listening_addresses,
    listening_sockets,
    needs_proc,
)

pytestmark = [pytest.mark.process, needs_proc]

JOIN = 'kv = mx.kvstore.create("dist_sync")\nprint("rank", kv.rank, flush=True)\n'
ADD = (
    JOIN
    + """
kv.init("w", vector(0))
kv.push("w", vector(10 ** kv.rank))
print("sum", kv.pull("w")[0])
"""
)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow(reason="the simulator starts nodes in any order always")
def test_the_order_in_which_processes_start_does_not_matter(make_job: MakeJob, seed: int) -> None:
    """All twelve orders of a scheduler, a server and two workers, four of them a time."""
    pauses = random.Random(seed)
    started = []
    for order in sorted(set(itertools.permutations(["scheduler", "server", "worker", "worker"])))[
        4 * seed : 4 * seed + 4
    ]:
        job = make_job(2, 1)
        job.forks = job.forks and bool(started)  # those of the first are new interpreters
        ranks = iter(pauses.sample([0, 1], 2))
        workers: dict[int, Process] = {}
        for role in order:
            if role == "scheduler":
                job.scheduler()
            elif role == "server":
                job.server()
            else:
                rank = next(ranks)
                workers[rank] = job.worker(rank, ADD)
            time.sleep(pauses.choice([0, 0, 0.15]))
        started.append((job, workers))
    for job, workers in started:
        assert job.wait_all() == [0, 0, 0, 0], job.output()
        for rank, worker in workers.items():
            assert worker.lines == [f"rank {rank}", "sum 11.0"]


@pytest.mark.parametrize(
    "last",
    [
        "scheduler",
        pytest.param("server", marks=pytest.mark.slow(reason="a late scheduler runs always")),
    ],
)
def test_the_scheduler_or_the_servers_may_come_much_later_than_all_others(
    make_job: MakeJob, last: str
) -> None:
    job = make_job(2, 2, PS_ROSTER_INTERVAL="0.2")
    if last == "scheduler":
        servers = [job.server(rank) for rank in range(2)]
        waiting = [*servers, *job.workers(ADD)]
        expected = "waiting for the scheduler at "
    else:
        waiting = [job.scheduler(), *job.workers(ADD)]
        expected = "waiting for 2 of 2 servers for "
    for process in waiting:
        process.wait_for(expected)
    if last == "scheduler":
        job.scheduler()
    else:
        for rank in range(2):
            job.server(rank)
    assert job.wait_all() == [0] * 5
    assert [line for line in job.output().splitlines() if line.startswith("sum")] == [
        "sum 11.0"
    ] * 2


def test_without_task_ids_ranks_follow_the_order_of_registration(make_job: MakeJob) -> None:
    job = make_job(3, 1, PS_ROSTER_INTERVAL="0.1")
    scheduler = job.scheduler()
    workers = []
    for _ in range(3):
        workers.append(job.worker(None, ADD))
        scheduler.wait_for(rf"connected: .*\(pid {workers[-1].pid}\)")
    job.server(None)
    assert set(job.wait_all()) == {0}
    assert [f"rank {rank}" in workers[rank].lines for rank in range(3)] == [True] * 3


def test_a_worker_without_a_task_id_takes_the_rank_that_nobody_has_named(
    make_job: MakeJob,
) -> None:
    job = make_job(3, 1, PS_ROSTER_INTERVAL="0.1")
    scheduler = job.scheduler()
    without = job.worker(None, ADD)
    scheduler.wait_for(rf"connected: .*\(pid {without.pid}\)")
    job.worker(0, ADD)
    job.worker(2, ADD)
    job.server()
    assert set(job.wait_all()) == {0}
    assert "rank 1" in without.lines


def test_a_scheduler_and_a_server_started_with_the_script_serve_and_exit_before_its_next_line(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1)
    script = job.directory / "train.py"
    script.write_text(WORKER + ADD + 'print("the end")\n')
    server, scheduler = (job.start(role, None, [str(script)]) for role in ("server", "scheduler"))
    workers = [job.start("worker", None, [str(script)]) for _ in range(2)]
    assert job.wait_all() == [0, 0, 0, 0]
    assert (server.text, scheduler.text) == ("", "")
    for worker in workers:
        assert worker.lines[1:] == ["sum 11.0", "the end"]


def test_importing_in_a_server_process_starts_nothing(make_job: MakeJob) -> None:
    """The original never came back from ``import`` there (apache/mxnet issue 6063)."""
    server = make_job(1, 1).start("server", 0, ["-c", "import kvstore; print('imported')"])
    assert server.wait() == 0
    assert server.lines == ["imported"]


# -- addresses ----------------------------------------------------------------------------


def test_servers_listen_where_their_settings_say_and_workers_nowhere(
    make_job: MakeJob,
) -> None:
    port = free_port()
    settings = [
        {},
        {"DMLC_INTERFACE": "lo"},
        {"DMLC_INTERFACE": "127.0.0.0/8"},
        {"DMLC_NODE_HOST": "localhost", "PORT": str(port)},
        {"DMLC_NODE_HOST": "127.0.0.1", "DMLC_INTERFACE": "nonsense"},
    ]
    job = make_job(1, len(settings))
    scheduler = job.scheduler()
    servers = [job.server(rank, chosen) for rank, chosen in enumerate(settings)]
    worker = job.worker(0, ADD + 'wait_for_file("go")\n')
    worker.wait_for("sum 1.0")
    assert listening_addresses(scheduler.pid) == [(HOST, job.port)]
    assert listening_addresses(worker.pid) == []
    ports = set()
    for server in servers:
        ((host, of_server),) = listening_addresses(server.pid)
        assert host == HOST
        ports.add(of_server)
    assert len(ports) == len(servers)
    assert port in ports
    # By inodes: another job of this machine may get one of these ports as soon as it is free.
    sockets = {inode for _, of_anybody, inode in listening_sockets() if of_anybody in ports}
    assert len(sockets) >= len(ports)
    job.allow("go")
    assert set(job.wait_all()) == {0}
    assert not sockets & {inode for _, _, inode in listening_sockets()}


@pytest.mark.parametrize("interface", ["nonsense", "203.0.113.0/24"])
def test_an_interface_that_is_not_there_ends_the_process_with_a_list_of_those_that_are(
    make_job: MakeJob, interface: str
) -> None:
    job = make_job(1, 1, DMLC_INTERFACE=interface)
    server, worker = job.server(), job.worker(0, JOIN)
    assert job.wait_all() == [1, 1]
    for process in server, worker:
        line = process.lines[-1]
        assert f"ConfigError: DMLC_INTERFACE={interface}: " in line
        assert re.search(r" choose one of .*lo \(127\.0\.0\.1[,)]", line)
    assert_no_traceback(server)
    # One error, not one after another.
    assert worker.text.count("Traceback") == 1
    assert "/pslite/" not in worker.text  # only the script's own frames


def test_a_scheduler_that_cannot_be_resolved_is_named_by_all(make_job: MakeJob) -> None:
    job = make_job(1, 1, DMLC_PS_ROOT_URI="scheduler.invalid", **SHORT)
    scheduler, (server,) = job.service()
    worker = job.worker(0, JOIN)
    assert job.wait_all() == [1, 1, 1]
    for process in scheduler, server, worker:
        assert "DMLC_PS_ROOT_URI=scheduler.invalid" in process.lines[-1]
    assert_no_traceback(scheduler, server)
