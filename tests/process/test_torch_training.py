"""A convolutional network that DistributedDataParallel trains: the same weights by every way.

All in one job, since PyTorch takes seconds to be imported: each run has a group of its own.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from job import MakeJob, needs_proc
from torch_jobs import start_ranks

pytestmark = [
    pytest.mark.process,
    needs_proc,
    pytest.mark.timeout(180),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
]

LIMIT_S = 150.0

TRAIN = """
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
BATCH, STEPS = 8, 20
def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 12, 3),
                         nn.Tanh(), nn.Flatten(), nn.Linear(12 * 9, 10))
def train(net, rows):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(size * BATCH, 1, 12, 12, generator=generator)[rows]
        labels = torch.randint(10, (size * BATCH,), generator=generator)[rows]
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach()
def in_ranks(backend, run, servers=0):
    # Ranks of one machine share memory and need no server; by other names they have one each.
    os.environ["PS_MACHINE"] = f"machine {rank}" if servers else "one machine"
    os.environ["KVSTORE_TORCH_SERVERS"] = str(servers or 1)
    dist.init_process_group(
        backend, init_method=f"file://PLACE-{backend}-{run}", rank=rank, world_size=size)
    if backend == "kvstore" and servers:
        assert dist.group.WORLD.cluster.node.config.num_servers == servers
    weights = train(DDP(network(), bucket_cap_mb=0.004), slice(BATCH * rank, BATCH * (rank + 1)))
    everywhere = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(everywhere, weights)
    assert all(torch.equal(weights, each) for each in everywhere)
    dist.destroy_process_group()
    return weights
def off(one, other):
    return float((one - other).abs().max())
"""


@pytest.mark.slow(reason="six groups and their servers; test_torch_jobs.py trains by one way")
def test_weights_of_ddp_are_the_same_bits_by_every_way_and_those_of_gloo_and_of_one_process(
    make_job: MakeJob, tmp_path: Path
) -> None:
    """Without servers (by shared memory) twice, and with 1, 2 and 3 of them."""
    job = make_job(3)
    code = (
        TRAIN
        + """
ours = [in_ranks("kvstore", run, servers) for run, servers in enumerate((0, 0, 1, 2, 3))]
begun = nn.utils.parameters_to_vector(network().parameters()).detach()
assert off(ours[0], begun) > 0.01  # it has learnt something
print("the same bits:", [torch.equal(ours[0], each) for each in ours], flush=True)
gloo, alone = in_ranks("gloo", 0), train(network(), slice(None))
assert off(ours[0], gloo) < 1e-6, off(ours[0], gloo)
assert off(ours[0], alone) < 1e-5, off(ours[0], alone)
print("as gloo and one process", flush=True)
"""
    )
    ranks = start_ranks(job, code.replace("PLACE", str(tmp_path / "store")))
    assert job.wait_all(LIMIT_S) == [0, 0, 0], job.output()
    for rank in ranks:
        assert rank.lines == [f"the same bits: {[True] * 5}", "as gloo and one process"], rank.text
