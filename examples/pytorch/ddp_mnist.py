"""LeNet on MNIST with DistributedDataParallel, over this project's servers.

    torchrun --nproc-per-node 2 examples/pytorch/ddp_mnist.py
    python tools/launch.py -n 2 -s 1 --launcher local python examples/pytorch/ddp_mnist.py
    python examples/pytorch/ddp_mnist.py --ranks 2      (starts the ranks itself, by mp.spawn)

It is written as for any other backend: ``gloo`` as its argument uses Gloo (by torchrun or with
``--ranks``). The digits are those of ``examples/image_classification``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "image_classification"))
if importlib.util.find_spec("torch") is None:
    sys.exit("PyTorch is missing; install it: pip install torch")

import mnist
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup(rank: int, world_size: int, backend: str) -> None:
    """Create the group of the ranks that this script started on this machine."""
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ.setdefault("MASTER_PORT", "12355")
    dist.init_process_group(backend, rank=rank, world_size=world_size)


def lenet() -> nn.Sequential:
    """LeNet; each rank starts with its own weights, and DDP copies those of rank 0."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.Tanh(), nn.Linear(500, 10)),
    )


def dataset(digits: mnist.Digits) -> TensorDataset:
    """The digits as PyTorch tensors."""
    return TensorDataset(torch.from_numpy(digits.images), torch.from_numpy(digits.labels))


def train(model: nn.Module, data: TensorDataset, epochs: int, batch_size: int) -> None:
    """Train on this rank's share of the digits; DDP averages the gradients of all ranks."""
    sampler: DistributedSampler[object] = DistributedSampler(data)
    loader = DataLoader(data, batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: last loss {loss.item():.4f}", flush=True)


def accuracy(model: nn.Module, digits: mnist.Digits) -> float:
    """The share of right answers; each rank tests every size-th digit."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with torch.no_grad():
        answers = model(torch.from_numpy(digits.images[rank::size])).argmax(1)
    right = (answers == torch.from_numpy(digits.labels[rank::size])).sum()
    dist.all_reduce(right)
    return float(right) / len(digits.labels)


def run(flags: argparse.Namespace) -> None:
    """Train with DistributedDataParallel, test, and print the accuracy."""
    training, test = mnist.load()
    model = DistributedDataParallel(lenet())
    train(model, dataset(training), flags.epochs, flags.batch_size)
    share = accuracy(model, test)
    if dist.get_rank() == 0:
        print(f"test accuracy {share:.4f} on {dist.get_world_size()} ranks", flush=True)


def run_rank(
    rank: int, run: Callable[[argparse.Namespace], None], flags: argparse.Namespace
) -> None:
    """Run one rank; with ``--ranks 0``, another program started it."""
    if flags.backend == "kvstore":
        import kvstore.torch  # noqa: F401  (an installed kvstore needs no import)
    if flags.ranks:
        setup(rank, flags.ranks, flags.backend)
    else:
        dist.init_process_group(flags.backend)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))
    torch.manual_seed(dist.get_rank())  # weights of its own, and the same run each time
    run(flags)
    dist.destroy_process_group()


def main(run: Callable[[argparse.Namespace], None]) -> None:
    """Read the arguments, and run this process's rank or all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", nargs="?", default="kvstore", help="kvstore, gloo or mpi")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--ranks", type=int, default=0, help="start as many here, by mp.spawn")
    flags = parser.parse_args()
    if flags.ranks:
        torch.multiprocessing.spawn(run_rank, (run, flags), nprocs=flags.ranks)
    else:
        run_rank(0, run, flags)


if __name__ == "__main__":
    main(run)
