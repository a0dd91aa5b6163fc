"""The first steps of torch.distributed, over this project's servers: messages and sums.

    torchrun --nproc-per-node 3 examples/pytorch/ptdist.py
    python tools/launch.py -n 3 -s 1 --launcher local python examples/pytorch/ptdist.py

Nothing but the name of the backend speaks of ``kvstore``; with ``gloo`` as its argument the script
does the same over Gloo (by torchrun).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if importlib.util.find_spec("torch") is None:
    sys.exit("PyTorch is missing; install it: pip install torch")

import torch
import torch.distributed as dist


def pass_around() -> float:
    """Each rank adds its number to a token that goes round a ring; returns it on rank 0."""
    rank, size = dist.get_rank(), dist.get_world_size()
    token = torch.zeros(1)
    if rank > 0:
        dist.recv(token, src=rank - 1)
    token += rank
    dist.send(token, dst=(rank + 1) % size)
    if rank == 0:
        dist.recv(token, src=size - 1)
    return float(token)


def main() -> None:
    """Send, add up, and gather."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "kvstore"
    if backend == "kvstore":
        import kvstore.torch  # noqa: F401  (an installed kvstore needs no import)
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()

    token = pass_around()
    total = torch.ones(2) * (rank + 1)
    dist.all_reduce(total)
    largest = torch.tensor([float(rank)])
    dist.reduce(largest, dst=0, op=dist.ReduceOp.MAX)
    squares = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(squares, torch.tensor([float(rank**2)]))
    if rank == 0:
        print(f"the token came back with {token:g}, the sum of all ranks")
        print(f"all_reduce: {total.tolist()}, reduce(MAX): {largest.item():g}")
        print(f"all_gather: {[each.item() for each in squares]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
