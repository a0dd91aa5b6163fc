"""Jobs of real processes that use kvstore.horovod: who starts the servers, the end, a loss."""

from __future__ import annotations

import importlib.util
import signal

import pytest
from job import MakeJob, needs_proc
from torch_jobs import KILL, assert_told, start_ranks

pytestmark = [
    pytest.mark.process,
    needs_proc,
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
]

LIMIT_S = 120.0


def test_ranks_that_others_start_join_twice_and_leave_nothing(make_job: MakeJob) -> None:
    """The script never calls shutdown the second time; rank 0, which runs the servers, is first."""
    job = make_job(2)
    ranks = start_ranks(
        job,
        """
import kvstore.horovod.torch as hvd
for times in (1, 2):
    part = hvd.ProcessSet([1])
    hvd.init(process_sets=[part])
    hvd.init(process_sets=[part])  # does nothing
    assert (part.included(), part.size()) == (rank == 1, 1)
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank, size)
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    names = ["a", "b"] if rank else ["b", "a"]
    own = torch.tensor([rank])
    handles = {name: hvd.allreduce_async(own, name=name, op=hvd.Sum) for name in names}
    assert [handles[name]().item() for name in "ab"] == [1, 1]
    if times == 1:
        hvd.shutdown()
        assert not hvd.is_initialized()
if rank == 1:
    time.sleep(1)
print("last", hvd.allgather(torch.tensor([rank])).tolist(), flush=True)
""",
    )
    assert job.wait_all(LIMIT_S) == [0, 0], job.output()
    for rank in ranks:
        assert rank.lines == ["last [0, 1]"], job.output()


@pytest.mark.parametrize("length", [3, 100_000])
def test_a_rank_that_is_killed_in_backward_is_named_on_the_other(
    make_job: MakeJob, length: int
) -> None:
    job = make_job(2)
    ranks = start_ranks(
        job,
        KILL
        + f"LENGTH = {length}"
        + """
import kvstore.horovod.torch as hvd
hvd.init()
weight = torch.nn.Parameter(torch.zeros(LENGTH))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
for step in range(3):
    optimizer.zero_grad()
    if step == 2 and rank == 1:
        kill_in_backward(weight)
    try:
        weight.sum().backward()
        optimizer.step()
    except hvd.HorovodInternalError as error:
        print(type(error.__cause__).__name__, flush=True)
        tell(error)
        raise SystemExit(3)
""",
    )
    assert ranks[1].wait(LIMIT_S) == -signal.SIGKILL
    assert ranks[0].wait(LIMIT_S) == 3, job.output()
    assert "NodeLostError" in ranks[0].lines, job.output()
    assert assert_told(job, ranks[0].text, "worker 1", [0]) == ranks[1].pid
