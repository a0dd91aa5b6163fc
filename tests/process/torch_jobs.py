"""Scripts that processes of a PyTorch job run, and how tests start them.

By hand each rank is ``python -c``, as torchrun starts it, without torchrun's own import of PyTorch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from job import HOST, MARK, ONE_THREAD, Job, Process, clean_environment, free_port

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

KILL = """
def kill_in_backward(weight, pid=None):
    def kill(gradient):
        handle.remove()
        with open("killed", "w") as file:
            print(pid or os.getpid(), time.monotonic(), file=file)
        os.kill(pid or os.getpid(), signal.SIGKILL)
    handle = weight.register_hook(kill)
def tell(error):
    seconds = time.monotonic() - float(open("killed").read().split()[1])
    first_line = str(error).partition("\\n")[0]
    print(f"rank {rank} is told after {seconds:.3f} s: {first_line}\\n", end="", flush=True)
"""
"""``kill -9`` of this process or another in a backward pass, and what the others say of it."""


def assert_told(job: Job, text: str, victim: str, ranks: Iterable[int]) -> int:
    """Check that within a second these ranks, and no others, had an error that names the victim.

    Returns its process id.
    """
    pid = (job.directory / "killed").read_text().split()[0]
    lost = rf"{victim} \(pid {pid} on \S+\) is lost: its process is gone"
    found = re.findall(rf"rank (\d) is told after (\S+) s: .*{lost}", text)
    assert sorted(rank for rank, _ in found) == [str(rank) for rank in ranks], text
    assert max(float(seconds) for _, seconds in found) < 1.0, text
    return int(pid)


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


def start_torchrun(job: Job, *words: str, **settings: str) -> Process:
    """Run ``torchrun WORDS``, with a rank for each worker of the job.

    Its usual port would be that of other tests, too.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--master-port={free_port()}"]
    environment = {**clean_environment(), MARK: job.mark, **ONE_THREAD, **settings}
    environment.setdefault("PS_ROSTER_INTERVAL", "60")  # the machine may be busy
    options = [f"--nproc-per-node={job.num_workers}", *words]
    return job._start("torchrun", [*torchrun, *options], environment)
