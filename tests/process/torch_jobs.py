"""Scripts that processes of a PyTorch job run, and how tests start them: one by one, by hand.

Each rank is ``python -c``, as torchrun starts it, without torchrun's own import of PyTorch.
"""

from __future__ import annotations

from job import HOST, ONE_THREAD, Job, Process, free_port

RANK = """
import os, signal, sys, time
import torch, torch.distributed as dist
import kvstore.torch
torch.set_num_threads(1)
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def summed(*numbers, **options):
    tensor = torch.tensor(numbers)
    dist.all_reduce(tensor, **options)
    return tensor.tolist()
"""
"""What a rank's script begins with."""

DDP = """
import hashlib
def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.ReLU(), torch.nn.Linear(40, 2))
def batch(step, rows):
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(8 * size, width, generator=generator) for width in (6, 2))
    return x[rows], y[rows]
def train(net, rows, steps=5):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        x, y = batch(step, rows)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return [each.detach().clone() for each in net.parameters()]
def bits(tensors):
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in tensors)).hexdigest()
"""
"""A small training whose batch of all ranks is known to each of them."""


def start_ranks(job: Job, code: str, **settings: str) -> list[Process]:
    """All ranks of a job, with the environment that torchrun would give them.

    ``settings`` may name MASTER_PORT; a name of ``{rank}`` in a text is the rank.
    """
    port = settings.pop("MASTER_PORT", str(free_port()))
    found = []
    for rank in range(job.num_workers):
        environment: dict[str, str | None] = {
            **dict.fromkeys(
                (
                    *("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER"),
                    *("DMLC_NUM_SERVER", "PS_JOB_ID", "DMLC_TASK_ID"),
                )
            ),
            "RANK": str(rank),
            "WORLD_SIZE": str(job.num_workers),
            "MASTER_ADDR": HOST,
            "MASTER_PORT": port,
            **ONE_THREAD,
            "PS_ROSTER_INTERVAL": "60",  # the machine may be busy
            **{name: text.format(rank=rank) for name, text in settings.items()},
        }
        found.append(job.start("worker", rank, ("-c", RANK + code), environment))
    return found
