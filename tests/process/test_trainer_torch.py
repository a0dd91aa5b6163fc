"""A PyTorch network that real workers train over a real store equals one that trains alone."""

from __future__ import annotations

import importlib.util

import pytest
from job import ONE_THREAD, MakeJob, needs_proc

pytestmark = [
    pytest.mark.process,
    needs_proc,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
]

TRAIN = """
import torch
from torch import nn
torch.set_num_threads(1)
STEPS, BATCH = 20, 16
draw = torch.Generator().manual_seed(1)
x = torch.randn(STEPS, BATCH, 1, 12, 12, generator=draw)
y = torch.randint(10, (STEPS, BATCH), generator=draw)

def lenet(seed):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(6, 12, 2), nn.Tanh(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10))

net = lenet(int(os.environ["DMLC_TASK_ID"]))
rate = {"learning_rate": 0.1}
trainer = mx.gluon.Trainer(net.named_parameters(), "sgd", rate, "dist_sync", reduction="sum")
kv = trainer.kvstore
trainer.broadcast_parameters()
for step in range(STEPS):
    mine = slice(kv.rank, BATCH, kv.num_workers)
    net.zero_grad()
    nn.functional.cross_entropy(net(x[step, mine]), y[step, mine], reduction="sum").backward()
    if step == 10:
        trainer.set_learning_rate(0.02)
    trainer.step(BATCH)

alone = lenet(0)
descent = torch.optim.SGD(alone.parameters(), lr=0.1)
for step in range(STEPS):
    descent.zero_grad()
    nn.functional.cross_entropy(alone(x[step]), y[step]).backward()
    descent.param_groups[0]["lr"] = 0.1 if step < 10 else 0.02
    descent.step()
pairs = list(zip(net.parameters(), alone.parameters(), lenet(0).parameters()))
with torch.no_grad():
    worst = max(float((ours - theirs).abs().max()) for ours, theirs, _ in pairs)
    moved = max(float((theirs - first).abs().max()) for _, theirs, first in pairs)
sys.stdout.write(f"worst {worst:.1e} equal {worst <= 1e-5} moved {moved > 0.01}\\n")
"""


def test_two_workers_equal_pytorchs_own_optimizer_on_the_joined_batch(make_job: MakeJob) -> None:
    job = make_job(2, 2)
    job.service()
    workers = [job.worker(rank, TRAIN, ONE_THREAD) for rank in range(2)]
    assert set(job.wait_all(60)) == {0}, job.output()
    for worker in workers:
        assert "equal True moved True" in worker.text, worker.text
