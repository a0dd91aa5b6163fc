"""Collective calls between real processes: large arrays, and what a killed rank does to others."""

from __future__ import annotations

import re
import signal
import time

import pytest
from job import Job, MakeJob, Process, needs_proc

pytestmark = [pytest.mark.process, needs_proc]

BEGIN = """
from pslite import Communicator
kv = mx.kvstore.create("dist_sync")
kv.barrier()
print("rank", kv.rank, flush=True)
"""
CALLS = """
group = Communicator(kv.node, rings=False)
for length in (1, 1000, 3_000_000):
    value = np.arange(length, dtype=np.float32) + kv.rank
    total = 3 * np.arange(length, dtype=np.float32) + 3
    assert np.array_equal(kv.all_reduce(value), total)
    for turn in range(4):
        assert np.array_equal(group.all_reduce(value).result(), total)
    assert np.array_equal(group.reduce_scatter([value] * 3).result(), total)
    rows = group.all_gather(value[: kv.rank * length // 2]).result()
    assert [len(each) for each in rows] == [0, length // 2, length]
    kv.send(value, (kv.rank + 1) % 3)
    got = kv.recv()
    assert got.source == (kv.rank + 2) % 3 and got.array[0] == got.source
shared = kv.empty((3_000_000,))
shared[:] = 1
assert group.all_reduce(shared, out=shared).result()[-1] == 3
assert kv.broadcast_object({"weights": value} if kv.rank == 1 else None, 1)["weights"][0] == 1
print("shared", kv.node.sharing.shared_bytes, flush=True)
"""
FOREVER = """
value = np.ones(1_000_000, np.float32)
call()
print("calling", flush=True)
try:
    while True:
        call()
except PSError as error:
    print("ended", time.time(), type(error).__name__, error, flush=True)
    raise
"""
STOP = """
value = np.ones(1_000_000, np.float32)
call()
time.sleep(60)
"""
BY_SERVERS = """
group = Communicator(kv.node, rings=False)
call = lambda: group.all_reduce(value).result()
"""
BY_THE_STORE = """
call = lambda: kv.all_reduce(value)
"""


def start(job: Job, *codes: str) -> tuple[list[Process], list[Process]]:
    scheduler, servers = job.service()
    workers = [job.worker(rank, BEGIN + code) for rank, code in enumerate(codes)]
    for worker in workers:
        worker.wait_for("rank")
    return [scheduler, *servers], workers


def test_large_values_go_by_shared_memory_and_come_back_right(make_job: MakeJob) -> None:
    service, workers = start(make_job(3, 2), CALLS, CALLS, CALLS)
    for worker in workers:
        assert worker.wait(60) == 0, worker.text
        shared = re.search(r"shared (\d+)", worker.text)
        assert shared is not None
        assert int(shared[1]) > 100_000_000
    for process in service:
        assert process.wait(20) == 0, process.text


@pytest.mark.parametrize("way", [BY_SERVERS, BY_THE_STORE], ids=["servers", "store"])
def test_a_rank_that_is_killed_in_an_all_reduce_is_named_on_the_others_within_a_second(
    make_job: MakeJob, way: str
) -> None:
    _, (*others, victim) = start(make_job(3, 2), way + FOREVER, way + FOREVER, way + STOP)
    for other in others:
        other.wait_for("calling")
    time.sleep(0.3)  # the others wait in a call that lacks the victim
    killed_at = time.time()
    victim.send(signal.SIGKILL)
    for other in others:
        assert other.wait(15) == 1, other.text
        ended = re.search(r"ended (\S+) NodeLostError (.*)", other.text)
        assert ended is not None, other.text
        assert re.match(rf"worker 2 \(pid {victim.pid} on \S+\) is lost", ended[2])
        assert float(ended[1]) - killed_at < 1.0


MACHINES = """
group = Communicator(kv.node)
call = lambda: group.all_reduce(value).result()
"""


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_rank_that_is_killed_is_named_on_the_other_machines_too(
    make_job: MakeJob, victim: int
) -> None:
    """Its machine's leader, the other one there, and one that is alone on its machine."""
    job = make_job(4, 1)
    job.service()
    workers = []
    for rank, machine in enumerate("aabc"):
        code = BEGIN + MACHINES + (STOP if rank == victim else FOREVER)
        workers.append(job.worker(rank, code, {"PS_MACHINE": machine, "PS_LOST_AFTER": "1"}))
    killed = workers.pop(victim)
    for worker in workers:
        worker.wait_for("calling", 30)
    time.sleep(0.3)
    killed.send(signal.SIGKILL)
    for worker in workers:
        assert worker.wait(20) == 1, worker.text
        ended = re.search(r"ended \S+ NodeLostError (.*)", worker.text)
        assert ended is not None, worker.text
        assert re.match(rf"worker {victim} \(pid {killed.pid} on \S+\) is lost", ended[1])
