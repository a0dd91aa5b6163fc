"""PyTorch's optimizers over real servers: equal to one process, and clear errors.

PyTorch takes seconds to be imported, so each job here tries several things.
"""

from __future__ import annotations

import importlib.util
import signal

import pytest
from job import MakeJob, needs_proc
from torch_jobs import DDP, KILL, assert_told, start_ranks

pytestmark = [
    pytest.mark.process,
    needs_proc,
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
]

LIMIT_S = 120.0
"""Several processes import PyTorch, on a machine that may be busy."""

OPTIMIZERS = """
import kvstore.torch as kvt
def steps(net, optimizer, rows, count=50):
    for step in range(count):
        x, y = batch(step, rows)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return [each.detach().clone() for each in net.parameters()]
mine = slice(8 * rank, 8 * rank + 8)
"""


def test_ranks_train_as_one_process_does_and_only_servers_have_states(make_job: MakeJob) -> None:
    """Without a process group: ranks find each other by what torchrun sets."""
    job = make_job(2)
    ranks = start_ranks(
        job,
        DDP
        + OPTIMIZERS
        + """
pairs = {
    "adam": (dict(lr=0.01), torch.optim.Adam),
    "sgd": (dict(lr=0.05, momentum=0.9), torch.optim.SGD),
}
for name, (numbers, kind) in pairs.items():
    net = model()
    alone = steps(net, kind(net.parameters(), **numbers), slice(0, 8 * size))
    found = []
    for _ in range(2):
        net = model()
        found.append(steps(net, kvt.ServerOptimizer(net, kvt.init(), name, **numbers), mine))
        net = model()
        shared = kvt.DistributedOptimizer(kind(net.parameters(), **numbers))
        found.append(steps(net, shared, mine))
    for each in found:
        for one, other in zip(each, alone):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert bits(found[0]) == bits(found[2]) and bits(found[1]) == bits(found[3])

def private_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])

MODEL = 64 << 20
def growth(make):
    weight = torch.nn.Parameter(torch.ones(MODEL // 4))
    optimizer = make([("weight", weight)])
    before = private_bytes()
    for _ in range(3):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    return (private_bytes() - before) / MODEL, len(optimizer.state)

kept = growth(lambda pairs: torch.optim.Adam([each for _, each in pairs], lr=1e-3))
assert kept[0] > 1.9 and kept[1] == 1, kept
kept = growth(lambda pairs: kvt.ServerOptimizer(pairs, kvt.init(), "adam", lr=1e-3))
assert kept[0] < 0.2 and kept[1] == 0, kept
print("trained", flush=True)
""",
    )
    assert job.wait_all(LIMIT_S) == [0, 0], job.output()
    for rank in ranks:
        assert rank.lines == ["trained"], job.output()


@pytest.mark.parametrize(
    ("kind", "victim"),
    [
        ("ServerOptimizer", "worker 1"),
        ("ServerOptimizer", "server 0"),
        ("DistributedOptimizer", "worker 1"),
    ],
)
def test_who_is_killed_in_backward_is_named_on_the_others(
    make_job: MakeJob, kind: str, victim: str
) -> None:
    made = {
        "ServerOptimizer": 'kvt.ServerOptimizer(net, None, "adam", lr=0.01)',
        "DistributedOptimizer": "kvt.DistributedOptimizer(torch.optim.Adam(net.parameters()))",
    }[kind]
    job = make_job(2)
    ranks = start_ranks(
        job,
        DDP
        + KILL
        + OPTIMIZERS
        + f"""
from pslite.ids import Role, node_id
net = model()
optimizer = {made}
server = kvt.init().node.membership.node(node_id(Role.SERVER, 0))
try:
    steps(net, optimizer, mine, 2)  # others may still be in it when the victim is killed
    if rank == 1:
        kill_in_backward(net[2].weight, server.pid if {victim!r} == "server 0" else None)
    steps(net, optimizer, mine, 100)
except Exception as error:
    tell(error)
    os._exit(3)
""",
    )
    codes = [rank.wait(LIMIT_S) for rank in ranks]
    left = [0, 1] if victim == "server 0" else [0]
    assert codes == [3, 3 if 1 in left else -signal.SIGKILL], job.output()
    assert_told(job, job.output(), victim, left)


def test_ranks_that_make_other_calls_are_told_so_by_backward(make_job: MakeJob) -> None:
    """Within a process group of another backend, whose store the ranks meet in."""
    job = make_job(2)
    ranks = start_ranks(
        job,
        OPTIMIZERS
        + """
dist.init_process_group("gloo")
weight = torch.nn.Parameter(torch.ones(4))
optimizer = kvt.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1))
(weight.sum() * (rank + 1)).backward()
optimizer.step()
torch.testing.assert_close(weight.detach(), torch.full((4,), 0.85))
if rank == 1:
    optimizer.exchange.buckets._calls.barrier()
try:
    weight.sum().backward()
except Exception as error:
    print("told:", error, flush=True)
""",
    )
    assert job.wait_all(LIMIT_S) == [0, 0], job.output()
    wanted = "rank 0 calls all_reduce(average, float32, shape (5,)); rank 1 calls barrier()"
    assert wanted in ranks[0].text, job.output()
    assert "told: " in ranks[1].text, job.output()
