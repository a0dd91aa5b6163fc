"""PyTorch jobs of real processes that use the backend ``kvstore``.

PyTorch takes seconds to be imported, so each job here tries several things.
"""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from pathlib import Path

import pytest
from job import MARK, ONE_THREAD, ROOT, MakeJob, clean_environment, needs_proc
from torch_jobs import DDP, KILL, RANK, assert_told, start_ranks, start_torchrun

pytestmark = [
    pytest.mark.process,
    needs_proc,
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
]

LIMIT_S = 120.0
"""Several processes import PyTorch, on a machine that may be busy."""


def test_ranks_that_others_start_train_as_one_process_does(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """And once more after the group was destroyed, to the same bits; no rank leaves anything.

    The second group meets in a file: rank 1 would find rank 0's first TCPStore while that ends.
    """
    job = make_job(2)
    ranks = start_ranks(
        job,
        DDP
        + """
results = []
for method in ("env://", "file://STORE"):
    dist.init_process_group("kvstore", init_method=method, rank=rank, world_size=size)
    ddp = torch.nn.parallel.DistributedDataParallel(model())
    results.append(train(ddp, slice(8 * rank, 8 * rank + 8)))
    everything = [None] * size
    dist.all_gather_object(everything, (rank, bits(results[-1])))
    assert [number for number, _ in everything] == list(range(size))
    assert len({text for _, text in everything}) == 1
    dist.destroy_process_group()
assert bits(results[0]) == bits(results[1])
alone = train(model(), slice(0, 8 * size))
for one, other in zip(results[0], alone):
    torch.testing.assert_close(one, other)
print("trained", flush=True)
""".replace("STORE", str(tmp_path / "store")),
    )
    assert job.wait_all(LIMIT_S) == [0, 0], job.output()
    for rank in ranks:
        assert rank.lines == ["trained"], job.output()


def test_scripts_that_never_destroy_their_group_end_well(make_job: MakeJob) -> None:
    """Rank 0, which runs the servers, is done first; subgroups are part of the same cluster."""
    job = make_job(3)
    ranks = start_ranks(
        job,
        """
dist.init_process_group("kvstore")
part = dist.new_group([0, 2])
print(dist.get_backend(), summed(1.0, rank))
if rank != 1:
    print(summed(5, group=part))
rest = dist.new_group([1, 2])
if rank == 0:
    open("left", "w").close()
else:
    while not os.path.exists("left"):
        time.sleep(0.01)
    time.sleep(1)
    print(summed(7, group=rest))
""",
    )
    assert job.wait_all(LIMIT_S) == [0, 0, 0], job.output()
    first = "kvstore [3.0, 3.0]"
    assert [rank.lines for rank in ranks] == [
        [first, "[10]"],
        [first, "[14]"],
        [first, "[10]", "[14]"],
    ]


def test_a_group_is_made_again_and_again_in_a_store_that_stays(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """As torchrun's does. In the end ranks 1 and 2 make groups in another order than rank 0.

    Before, rank 0 makes one of its own, which gets the name of the one that the others make.
    """
    job = make_job(3)
    ranks = start_ranks(
        job,
        f"""
store = dist.FileStore({str(tmp_path / "store")!r}, size)
for turn in range(2):
    dist.init_process_group("kvstore", store=store, rank=rank, world_size=size)
    parts = dist.new_group([1, 2] if turn else [0, 1]), dist.new_group([0, 2])
    print([summed(1, group=part) for part in parts if isinstance(part, dist.ProcessGroup)])
    if rank != turn:
        dist.destroy_process_group(parts[turn])
    dist.destroy_process_group()
dist.init_process_group("kvstore", store=store, rank=rank, world_size=size)
print(summed(1, group=dist.new_group([1, 2] if rank else [0])))
members = [[0, 1], [0, 2]]
if rank == 0:
    made = [*map(dist.new_group, members)]
dist.barrier()
if rank:
    made = [*map(dist.new_group, reversed(members))]
""",
    )
    assert job.wait_all(LIMIT_S) == [0, 1, 1], job.output()
    assert [rank.lines[:3] for rank in ranks] == [
        ["[[2], [2]]", "[[2]]", "[1]"],
        ["[[2]]", "[[2]]", "[2]"],
        ["[[2]]", "[[2], [2]]", "[2]"],
    ]
    for rank, here in ((1, [0, 1]), (2, [0, 2])):
        there = [0, 3 - rank]
        assert (
            "MismatchError: all ranks must call new_group for the same ranks in the same order: "
            f"the group named '{4 - rank}' is {there} on rank 0 and {here} on rank {rank}"
        ) in ranks[rank].text


@pytest.mark.slow(reason="PS_LOST_AFTER passes, and who loses it is not asked sooner")
def test_rank_0_is_named_where_nobody_can_look_at_its_process(make_job: MakeJob) -> None:
    """By PS_MACHINE each rank has a machine of its own; rank 0's scheduler and server outlive it.

    test_torch_kills.py has servers on threads of ranks, whose loss is noticed sooner.
    """
    job = make_job(2)
    first, second = start_ranks(
        job,
        """
dist.init_process_group("kvstore")
summed(1)
killed = time.time()
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    summed(1)
except RuntimeError as error:
    print("told after", time.time() - killed, error)
""",
        PS_MACHINE="machine {rank}",
        PS_LOST_AFTER="6",
        KVSTORE_TORCH_SERVERS="2",
    )
    assert first.wait(LIMIT_S) == -signal.SIGKILL
    assert second.wait(LIMIT_S) == 0, second.text
    told = re.search(rf"told after (\S+) worker 0 \(pid {first.pid} on \S+\) is lost", second.text)
    assert told is not None, second.text
    assert 6 <= float(told[1]) < 9


@pytest.mark.slow(reason="ranks that others start run always, as forks that have PyTorch")
def test_workers_of_our_own_launcher_are_ranks_of_torch(make_job: MakeJob) -> None:
    """The store and the group of PyTorch use one node; torch's address is set by the launcher.

    In the end one is killed in DDP's backward pass.
    """
    job = make_job(2, 2)
    launcher = job.launch(
        RANK
        + KILL
        + """
dist.init_process_group("kvstore")
kv = mx.create("dist_sync")
assert (kv.rank, kv.num_workers) == (rank, size) == (dist.get_rank(), dist.get_world_size())
print(os.environ["LOCAL_RANK"], summed(float(rank + 1)), dist.group.WORLD.cluster.node is kv._node)
dist.barrier()
dist.destroy_process_group()
kv.barrier()  # otherwise rank 1 may still find the first TCPStore of rank 0, which is about to end
dist.init_process_group("kvstore")
print("again", summed(float(rank + 1)))
try:
    net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    if rank == 1:
        kill_in_backward(net.module.weight)
    net(torch.ones(2)).sum().backward()
except RuntimeError as error:
    tell(error)
""",
    )
    assert launcher.wait(LIMIT_S) == 128 + signal.SIGKILL, launcher.text
    text = launcher.text
    for rank in range(2):
        assert f"{rank} [3.0] True" in text, text
    assert text.count("] again [3.0]") == 2, text
    assert_told(job, text, "worker 1", [0])


def test_several_machines_each_get_a_server_and_the_key_of_a_file(make_job: MakeJob) -> None:
    """Two machines by name only: PS_MACHINE says so. Their servers are threads of the ranks.

    Rank 0 is done first, and its server stays.
    """
    job = make_job(2)
    key = job.directory / "job.key"
    key.write_text("0123456789abcdef" * 4)
    key.chmod(0o600)
    ranks = start_ranks(
        job,
        f"""
store = dist.FileStore({str(job.directory / "store")!r}, size)
for times in range(2):
    dist.init_process_group("kvstore", store=store, rank=rank, world_size=size)
    node = dist.group.WORLD.cluster.node
    told = [node.config.num_servers, node.config.security or "curve", [*node.nearby.beside]]
    print(*told, summed(1), summed(*[1.0] * 200_000)[-1])
    if times == 0:
        dist.destroy_process_group()
time.sleep(rank)
""",
        PS_MACHINE="machine {rank}",
        PS_JOB_KEY_FILE=str(key),
    )
    assert job.wait_all(LIMIT_S) == [0, 0], job.output()
    assert ranks[0].lines == ["2 curve [8] [2] 2.0"] * 2
    assert ranks[1].lines == ["2 curve [10] [2] 2.0"] * 2


def test_a_group_larger_than_its_job_says_what_to_do(make_job: MakeJob) -> None:
    job = make_job(1)
    rank = job.start(
        "worker",
        0,
        (
            "-c",
            RANK
            + """
store = dist.HashStore()
try:
    dist.init_process_group("kvstore", store=store, rank=0, world_size=2)
except ValueError as error:
    print(error)
""",
        ),
        {"RANK": "0", "WORLD_SIZE": "2", **ONE_THREAD},
    )
    assert rank.wait(LIMIT_S) == 0, rank.text
    assert "this process group has 2 ranks and the job 1 workers (DMLC_NUM_WORKER)" in rank.text


@pytest.mark.slow(reason="torchrun imports PyTorch once more, in a process of its own")
def test_torchrun_and_spawn_start_ranks(make_job: MakeJob) -> None:
    job = make_job(2)
    script = job.directory / "script.py"
    script.write_text(
        RANK.replace('int(os.environ["RANK"])', 'int(os.environ.get("RANK", -1))').replace(
            'int(os.environ["WORLD_SIZE"])', 'int(os.environ.get("WORLD_SIZE", -1))'
        )
        + """
import torch.multiprocessing as mp
def run(number, file):
    where = {} if file is None else {
        "init_method": f"file://{file}", "rank": number, "world_size": 2}
    dist.init_process_group("kvstore", **where)
    print(f"rank {dist.get_rank()} {summed(1)}\\n", end="", flush=True)  # in one write
if __name__ == "__main__" and rank >= 0:
    run(rank, None)
elif __name__ == "__main__":
    mp.spawn(run, (os.path.abspath("file"),), 2)
"""
    )
    torchrun = start_torchrun(job, str(script))
    assert torchrun.wait(LIMIT_S) == 0, torchrun.text
    spawn = job._start(
        "spawn",
        [sys.executable, str(script)],
        {**clean_environment(), MARK: job.mark},
    )
    assert spawn.wait(LIMIT_S) == 0, spawn.text
    for process in (torchrun, spawn):
        assert "rank 0 [2]" in process.text
        assert "rank 1 [2]" in process.text


@pytest.mark.slow(reason="PyTorch's own tests of a backend: 99, in three and in four processes")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("size", "counts"),
    [
        (3, "96 passed, 0 failed, 3 were skipped"),  # they are for four ranks
        (4, "99 passed, 0 failed, 0 were skipped"),
    ],
    ids=["three ranks", "four ranks"],
)
def test_pytorchs_own_tests_of_a_backend_pass(make_job: MakeJob, size: int, counts: str) -> None:
    pytest.importorskip("expecttest", reason="PyTorch's own tests need it")
    job = make_job(size)
    script = str(ROOT / "tests" / "frameworks" / "pytorch_tests.py")
    ranks = job._start(
        "tests",
        [sys.executable, script, "--ranks", str(size)],
        {**clean_environment(), MARK: job.mark, "PS_ROSTER_INTERVAL": "60"},
    )
    assert ranks.wait(590) == 0, ranks.text
    assert counts in ranks.text
