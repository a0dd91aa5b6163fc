"""Scripts as guides to ``torch.distributed`` write them. None of them speaks of kvstore."""

from __future__ import annotations

SEND = """
import torch
import torch.distributed as dist

def run(rank, size):
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor=tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor=tensor, src=0)
    print(f"Rank {rank} has data {tensor[0]}\\n", end="", flush=True)

def init_processes(fn, backend="mpi"):
    dist.init_process_group(backend)
    fn(dist.get_rank(), dist.get_world_size())

if __name__ == "__main__":
    init_processes(run, backend="mpi")
"""
"""Rank 0 sends a number to rank 1; MPI alone says who is who."""

SENT = ["Rank 0 has data 1.0", "Rank 1 has data 1.0", "Rank 2 has data 0.0"]
"""What three ranks say of it."""

SUM = """
import os
import torch
import torch.distributed as dist

def run(rank, size):
    tensor, ranks = torch.zeros(1), torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
    dist.all_reduce(ranks)
    print(f"Rank {dist.get_rank()} has {tensor[0]} of {dist.get_world_size()}, "
          f"and the sum {ranks[0]}\\n", end="", flush=True)

def init_process(rank, size, fn, backend="gloo"):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)

if __name__ == "__main__":
    init_process(0, 0, run, backend="mpi")
"""
"""A sum over all; rank and size of the call are 0, since MPI says both, and so is the address."""

ADDED = [f"Rank {rank} has 0.0 of 3, and the sum 3.0" for rank in range(3)]
"""What three ranks say of it."""

DDP_MAIN = """
import hashlib, os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

def setup(rank, world_size):
    if "RANK" not in os.environ:
        os.environ["MASTER_ADDR"] = "localhost"
        os.environ["MASTER_PORT"] = "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world_size)

def cleanup():
    dist.destroy_process_group()

class ToyModel(nn.Module):
    def __init__(self):
        super(ToyModel, self).__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))

def demo_basic(rank, world_size):
    setup(rank, world_size)
    torch.manual_seed(rank)
    model = ToyModel()
    ddp_model = DDP(model)
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(96, 10), torch.randn(96, 5))
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001)
    loss_fn = nn.MSELoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = 0
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(ddp_model(x), y).backward()
            optimizer.step()
            seen += len(x)
    weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    print(f"rank {rank} of {world_size} on {dist.get_backend()}: "
          f"weights {hashlib.sha256(weights).hexdigest()}, samples {seen}\\n", end="", flush=True)
    cleanup()

if __name__ == "__main__":
    if "RANK" in os.environ:
        demo_basic(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        mp.spawn(demo_basic, args=(2,), nprocs=2, join=True)
"""
"""DistributedDataParallel with a DistributedSampler, by ``mp.spawn`` or torchrun, over Gloo."""
