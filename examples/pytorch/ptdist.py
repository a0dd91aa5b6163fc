"""The first steps of torch.distributed, over this project's servers: a message and sums.

    torchrun --nproc-per-node 3 examples/pytorch/ptdist.py
    python tools/launch.py -n 3 -s 1 --launcher local python examples/pytorch/ptdist.py

Only the name of the backend is specific to ``kvstore``; with the argument ``gloo`` the script does
the same over Gloo (with torchrun). It needs two ranks or more.
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


def send_one(rank: int) -> None:
    """Rank 0 sends a tensor of 1 to rank 1; all others keep their 0."""
    tensor = torch.zeros(1)
    if rank == 0:
        tensor += 1
        dist.send(tensor, dst=1)
    elif rank == 1:
        dist.recv(tensor, src=0)
    say(f"rank {rank} has data {tensor.item():g}")


def add_up(rank: int) -> None:
    """The sum of zeros is 0 on every rank; the sum of rank numbers is 3 with three ranks."""
    zeros, numbers = torch.zeros(1), torch.tensor([float(rank)])
    dist.all_reduce(zeros, op=dist.ReduceOp.SUM)
    dist.all_reduce(numbers)
    say(f"rank {rank} has the sums {zeros.item():g} of zeros and {numbers.item():g} of ranks")


def say(line: str) -> None:
    """Print a line at once and in one piece: torchrun's ranks share a terminal."""
    print(f"{line}\n", end="", flush=True)


def main() -> None:
    """Create the group, send a message, and add."""
    backend = sys.argv[1] if len(sys.argv) > 1 else "kvstore"
    if backend == "kvstore":
        import kvstore.torch  # noqa: F401  (an installed kvstore needs no import)
    dist.init_process_group(backend)
    send_one(dist.get_rank())
    add_up(dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
