"""Shared memory of real processes: nothing of it outlives them, and without it all is the same.

A segment has no name, so it can only be found where a process holds it: as an open descriptor
or in its memory map. Each is known by the number of its inode.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from job import Job, MakeJob, Process, assert_no_traceback, needs_proc

import kvstore

pytestmark = [
    pytest.mark.process,
    needs_proc,
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd here"),
]

TRAIN = """
kv = mx.kvstore.create("dist_sync")
kv.init(["w", "stop"], [np.zeros(50_000, np.float32), np.zeros(1, np.float32)])
gradient, stop = kv.empty(50_000), kv.zeros(1)
step = 0
while stop[0] == 0:
    step += 1
    gradient.fill(step)
    kv.pushpull("w", gradient)
    assert (gradient == 2 * step).all()
    kv.push("w", np.ones(50_000, np.float32))
    assert (kv.pull("w") == 2).all()
    stop.fill(os.path.exists("stop"))
    kv.pushpull("stop", stop)
    if step == 20:
        print("busy", kv.rank, flush=True)
    if kv.rank == 1 and os.path.exists("raise"):
        raise RuntimeError("as the test wants it")
print("rounds are right", flush=True)
"""
"""Two workers that train, each step checked, until there is a file named ``stop``."""


def segments_of(pid: int | str) -> set[int]:
    """The inodes of the segments that a process holds."""
    found: set[int] = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:pslite" in line:
                found.add(int(line.split()[4]))
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(descriptor).startswith("/memfd:pslite"):
                found.add(descriptor.stat().st_ino)
    except OSError:  # it has ended meanwhile, or is another user's
        pass
    return found


def held_by_anybody(segments: set[int]) -> dict[str, set[int]]:
    """Which of these segments are still held, by process id."""
    pids = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    held = {pid: segments_of(pid) & segments for pid in pids}
    return {pid: inodes for pid, inodes in held.items() if inodes}


def named_segments() -> set[str]:
    """What our libraries might have left in /dev/shm; others use it too."""
    folder = Path("/dev/shm")
    names = os.listdir(folder) if folder.is_dir() else []
    return {name for name in names if name.startswith(("psl", "kvstore", "psm_"))}


def end_normally(job: Job, processes: list[Process]) -> None:
    job.allow("stop")


def raise_in_worker_1(job: Job, processes: list[Process]) -> None:
    job.allow("raise")


def send(number: signal.Signals, index: int) -> Callable[[Job, list[Process]], None]:
    def do(job: Job, processes: list[Process]) -> None:
        processes[index].send(number)

    return do


ENDS = {
    "normally": end_normally,
    "an exception in a worker": raise_in_worker_1,
    "SIGTERM to a worker": send(signal.SIGTERM, 3),
    "kill -9 of a worker": send(signal.SIGKILL, 3),
    "kill -9 of the server": send(signal.SIGKILL, 1),
    "kill -9 of the scheduler": send(signal.SIGKILL, 0),
}


ALWAYS = ("kill -9 of a worker", "kill -9 of the server")
slow = pytest.mark.slow(reason="kill -9 of a worker and of the server run always")


@pytest.mark.parametrize(
    "end", [pytest.param(end, marks=[] if end in ALWAYS else [slow]) for end in ENDS]
)
def test_however_a_job_ends_nothing_of_its_memory_stays(make_job: MakeJob, end: str) -> None:
    named_before = named_segments()
    job = make_job(2, 1)
    scheduler, (server,) = job.service()
    workers = job.workers(TRAIN)
    processes = [scheduler, server, *workers]
    for worker in workers:
        worker.wait_for("busy")

    segments = {process.name: segments_of(process.pid) for process in processes}
    for process in [server, *workers]:
        assert segments[process.name]
    # The server has mapped the workers' memory, and each worker the server's.
    shared = [segments[server.name] & segments[worker.name] for worker in workers]
    assert all(len(both) >= 2 for both in shared)
    ENDS[end](job, processes)
    codes = job.wait_all()

    assert held_by_anybody(set().union(*segments.values())) == {}
    assert named_segments() <= named_before
    if end == "normally":
        assert set(codes) == {0}, job.output()
        assert all("rounds are right" in worker.text for worker in workers)
    else:
        assert any(codes)
    assert_no_traceback(scheduler, server)


# -- without it ---------------------------------------------------------------------------

SHORT_TRAIN = """
import ctypes, hashlib
if os.environ.get("HIDE"):
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)    # PR_SET_DUMPABLE: nobody looks into this process
kv = mx.kvstore.create("dist_sync")
shapes = {"dense": (120, 33), "bias": (33,), "large": (70_000,)}
draw = np.random.default_rng(100)
values = [np.asarray(draw.standard_normal(s), np.float32) for s in shapes.values()]
kv.init(list(shapes), values)
kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.01, momentum=0.9, wd=1e-3))
own = [kv.empty(s) for s in shapes.values()]
for step in range(12):
    draw = np.random.default_rng([kv.rank, step])
    for array in own:
        # Nine orders of magnitude: another order of additions would give other bits.
        array[...] = draw.standard_normal(array.shape) * 10.0 ** draw.uniform(-6, 3, array.shape)
    kv.pushpull(list(shapes), own)
print("sha256", hashlib.sha256(b"".join(array.tobytes() for array in own)).hexdigest(), flush=True)
kv.barrier()
maps = open("/proc/self/maps").read() if not os.environ.get("HIDE") else ""
print("maps", maps.count("/memfd:pslite"), "pipes", len(kv._node.van._pipes._outgoing))
"""


@pytest.fixture(scope="module")
def local_bits() -> str:
    """What ``SHORT_TRAIN`` must print: the same by one process with two devices."""
    shapes = {"dense": (120, 33), "bias": (33,), "large": (70_000,)}
    draw = np.random.default_rng(100)
    with kvstore.create("local") as kv:
        names = list(shapes)
        kv.init(names, [np.asarray(draw.standard_normal(s), np.float32) for s in shapes.values()])
        settings = {"learning_rate": 0.01, "momentum": 0.9, "wd": 1e-3}
        kv.set_optimizer(kvstore.optimizer.create("sgd", **settings))
        for step in range(12):
            of_ranks = []
            for rank in range(2):
                draw = np.random.default_rng([rank, step])
                of_ranks.append(
                    [
                        np.asarray(
                            draw.standard_normal(s) * 10.0 ** draw.uniform(-6, 3, s), np.float32
                        )
                        for s in shapes.values()
                    ]
                )
            kv.push(names, [list(of_key) for of_key in zip(*of_ranks, strict=True)])
        values = b"".join(value.tobytes() for value in kv.pull(names))
    return f"sha256 {hashlib.sha256(values).hexdigest()}"


def bits(job: Job) -> list[str]:
    """What each of its workers came to."""
    assert set(job.wait_all(30)) == {0}, job.output()
    return [line for line in job.output().splitlines() if line.startswith("sha256")]


@pytest.mark.parametrize(
    ("shm", "threads"),
    [
        ("1", "4"),
        pytest.param("0", "1", marks=pytest.mark.slow(reason="shared memory runs always")),
    ],
)
def test_the_bits_are_the_same_with_and_without_it_and_on_any_number_of_threads(
    make_job: MakeJob, local_bits: str, shm: str, threads: str
) -> None:
    job = make_job(2, 2, PS_SHM=shm, PS_POOL_THREADS=threads, PS_CHUNK_BYTES="65536")
    job.service()
    job.workers(SHORT_TRAIN)
    assert bits(job) == [local_bits] * 2
    maps = [int(number) for number in re.findall(r"maps (\d+)", job.output())]
    assert len(maps) == 2
    assert all(maps) if shm == "1" else not any(maps)
    # Small messages go by pipes to two servers and the scheduler.
    assert re.findall(r"pipes (\d+)", job.output()) == ["3" if shm == "1" else "0"] * 2
    assert "memory" not in job.output()


WITHOUT_PTRACE = """
import ctypes, runpy, sys
libc = ctypes.CDLL(None)
header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, rights) == 0
for index in range(3):
    rights[index] &= ~(1 << 19)    # CAP_SYS_PTRACE, with which root looks into any process
assert libc.capset(header, rights) == 0
sys.argv = ["kvstore.server"]
runpy.run_module("kvstore.server", run_name="__main__")
"""


def test_a_server_that_cannot_map_its_workers_says_so_in_one_line_and_uses_tcp(
    make_job: MakeJob, local_bits: str
) -> None:
    """Their processes are closed to it, as they are where it is another user's."""
    job = make_job(2, 1, HIDE="1", PS_CHUNK_BYTES="65536")
    job.scheduler()
    server = job.start("server", 0, ("-c", WITHOUT_PTRACE))
    workers = job.workers(SHORT_TRAIN)
    assert bits(job) == [local_bits] * 2
    for worker in workers:
        told = [line for line in worker.lines if "memory" in line]
        assert len(told) == 1, worker.text
        assert re.search(
            rf"warning: cannot share memory with server 0 \(pid {server.pid} on .*\), so values "
            r"travel by TCP, which is slower \(PermissionError: .*/proc/\d+/fd/\d+'\)$",
            told[0],
        )
    assert_no_traceback(*job.processes)


def test_what_is_beyond_the_limit_of_shared_memory_changes_no_bit(
    make_job: MakeJob, local_bits: str
) -> None:
    job = make_job(2, 1, PS_SHM_BYTES="65536", PS_CHUNK_BYTES="16384")
    job.service()
    job.workers(SHORT_TRAIN)
    assert bits(job) == [local_bits] * 2


def test_a_forked_child_may_neither_use_the_node_nor_make_arrays_of_its_own(
    make_job: MakeJob,
) -> None:
    """It has the descriptors and the memory of its parent, and ends without a trace of it."""
    code = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)    # that forks and threads do not go together
kv = mx.kvstore.create("dist_sync")
kv.init("w", np.zeros(50_000, np.float32))
array = kv.zeros(50_000)
child = os.fork()
if child == 0:
    for call in (lambda: kv.empty(3), lambda: kv.push("w", array), lambda: kv.pull("w")):
        try:
            call()
        except PSError as error:
            print(type(error).__name__, "forked child" in str(error), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
kv.pushpull("w", array)
array += 1
kv.pushpull("w", array)
print("sum", array.min(), array.max())
"""
    job = make_job(1, 1)
    job.service()
    worker = job.worker(0, code)
    assert set(job.wait_all()) == {0}, job.output()
    assert worker.lines == ["UsageError True"] * 3 + ["sum 1.0 1.0"]


def test_a_view_outlives_the_server_whose_memory_it_shows(make_job: MakeJob) -> None:
    code = """
from pslite.errors import NodeLostError
kv = mx.kvstore.create("dist_sync")
kv.init("w", np.zeros(100_000, np.float32))
view = kv.view("w")
kv.pushpull("w", np.ones(100_000, np.float32), out=view)
print("shown", (view == 2).all(), flush=True)
try:
    kv.barrier()
    while True:
        kv.pull("w", out=view)
except NodeLostError as error:
    print(error.role, (view == 2).all(), flush=True)
    os._exit(0)  # others that end too are not the subject
"""
    job = make_job(2, 1)
    _, (server,) = job.service()
    workers = job.workers(code)
    for worker in workers:
        worker.wait_for("shown")
    server.send(signal.SIGKILL)
    job.wait_all()
    for worker in workers:
        assert "server True" in worker.lines, job.output()
