"""``kill -9`` of a rank or a server in DDP's backward pass, and a job that torchrun starts anew.

``make_job`` and tests/conftest.py look for what is left, also in /dev/shm.
"""

from __future__ import annotations

import importlib.util
import signal

import pytest
from job import MakeJob, needs_proc
from torch_jobs import DDP, KILL, RANK, assert_told, start_ranks, start_torchrun

pytestmark = [
    pytest.mark.process,
    needs_proc,
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
]

LIMIT_S = 120.0
"""Several processes import PyTorch, on a machine that may be busy."""

BACKWARD = (
    DDP
    + KILL
    + """
from pslite.ids import Role, node_id
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it as soon as it sees the loss
dist.init_process_group("kvstore")
net = model()
ddp = torch.nn.parallel.DistributedDataParallel(net)
mine = slice(8 * rank, 8 * rank + 8)
server = dist.group.WORLD.cluster.node.membership.node(node_id(Role.SERVER, 0))
try:
    train(ddp, mine, steps=2)  # others may still be in it when the victim is killed
    if "VICTIM" == f"worker {rank}":
        kill_in_backward(net[2].weight)
    elif "VICTIM" == "server 0" and rank == 0:
        kill_in_backward(net[2].weight, server.pid)
    train(ddp, mine, steps=100_000)
except RuntimeError as error:
    tell(error)
    raise SystemExit(3)
"""
)
VICTIMS = [
    "worker 0",
    pytest.param("worker 1", marks=pytest.mark.slow(reason="rank 0 is killed always")),
    "server 0",
]


def those_left(victim: str) -> list[int]:
    return [rank for rank in range(3) if victim != f"worker {rank}"]


@pytest.mark.parametrize("victim", VICTIMS)
def test_who_is_killed_in_backward_is_named_on_all_others(make_job: MakeJob, victim: str) -> None:
    """Within a second; also rank 0, whose servers live long enough to say so, and a server."""
    job = make_job(3)
    ranks = start_ranks(job, BACKWARD.replace("VICTIM", victim))
    codes = [rank.wait(LIMIT_S) for rank in ranks]
    left = those_left(victim)
    assert codes == [3 if rank in left else -signal.SIGKILL for rank in range(3)], job.output()
    pid = assert_told(job, job.output(), victim, left)
    assert [ranks[rank].pid for rank in range(3) if rank not in left] in ([], [pid])


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param("worker 0", marks=pytest.mark.slow(reason="rank 1 is killed always")),
        "worker 1",
    ],
)
def test_a_rank_is_killed_together_with_its_machines_server(make_job: MakeJob, victim: str) -> None:
    """On several machines, servers are threads of ranks; the loss of either names the rank."""
    job = make_job(2)
    ranks = start_ranks(job, BACKWARD.replace("VICTIM", victim), PS_MACHINE="machine {rank}")
    codes = [rank.wait(LIMIT_S) for rank in ranks]
    left = [rank for rank in range(2) if victim != f"worker {rank}"]
    assert codes == [3 if rank in left else -signal.SIGKILL for rank in range(2)], job.output()
    pid = assert_told(job, job.output(), victim, left)
    assert [ranks[rank].pid for rank in range(2) if rank not in left] == [pid]


@pytest.mark.slow(reason="four processes import PyTorch each time; ranks by hand try the same")
@pytest.mark.parametrize("starter", ["torchrun", "kvstore-launch"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_whoever_starts_the_ranks_they_name_who_is_killed(
    make_job: MakeJob, victim: str, starter: str
) -> None:
    job = make_job(3, 1)
    code = RANK + BACKWARD.replace("VICTIM", victim)
    if starter == "torchrun":
        script = job.directory / "script.py"
        script.write_text(code)
        process = start_torchrun(job, str(script))
    else:
        process = job.launch(code)
    assert process.wait(LIMIT_S) != 0, process.text
    assert_told(job, process.text, victim, those_left(victim))


@pytest.mark.slow(reason="torchrun and twice two ranks import PyTorch")
def test_torchrun_starts_ranks_anew_after_one_was_killed(make_job: MakeJob) -> None:
    """The second attempt meets in the same store of torchrun's, with servers of its own."""
    job = make_job(2)
    script = job.directory / "script.py"
    script.write_text(
        RANK
        + """
dist.init_process_group("kvstore")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print(f"attempt {attempt}, rank {rank} {summed(1)}\\n", end="", flush=True)
if attempt == 0 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
print(f"end of attempt {attempt}, rank {rank} {summed(2)}\\n", end="", flush=True)
"""
    )
    torchrun = start_torchrun(job, "--max-restarts=1", str(script))
    assert torchrun.wait(LIMIT_S) == 0, torchrun.text
    told = [line for line in torchrun.lines if line.startswith(("attempt ", "end of attempt "))]
    assert sorted(told) == [
        *(f"attempt {attempt}, rank {rank} [2]" for attempt in (0, 1) for rank in (0, 1)),
        *(f"end of attempt 1, rank {rank} [4]" for rank in (0, 1)),
    ]
