"""LeNet by synchronous SGD, with only ``broadcast`` and ``all_reduce``.

    python tools/launch.py -n 2 -s 1 --launcher local python examples/pytorch/train_dist.py
    KVSTORE_TORCH_REPLACES=mpi mpiexec -n 2 python examples/pytorch/train_dist.py mpi
    python examples/pytorch/train_dist.py --ranks 2      (starts the ranks itself)

All ranks start with rank 0's weights, each computes gradients on its own part of the digits, and
all take the same step with the mean. DistributedDataParallel does this during the backward pass:
``ddp_mnist.py``.
"""

from __future__ import annotations

import argparse
import random

import ddp_mnist
import mnist
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Subset, TensorDataset


def partition_dataset(data: TensorDataset, batch_size: int) -> DataLoader[object]:
    """This rank's part of the data: all shuffle equally; each takes every size-th sample."""
    rows = list(range(len(data)))
    random.Random(1234).shuffle(rows)
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = rows[rank : len(rows) // size * size : size]  # the same number on each rank
    return DataLoader(Subset(data, mine), batch_size, shuffle=True)


def broadcast_parameters(model: nn.Module) -> None:
    """Give all ranks the weights of rank 0."""
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over all ranks."""
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.data, op=dist.ReduceOp.SUM)
        parameter.grad.data /= size


def run(flags: argparse.Namespace) -> None:
    """Train, test, and print the accuracy."""
    training, test = mnist.load()
    train_set = partition_dataset(ddp_mnist.dataset(training), flags.batch_size)
    model = ddp_mnist.lenet()
    broadcast_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for epoch in range(flags.epochs):
        epoch_loss = 0.0
        for images, labels in train_set:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            epoch_loss += loss.item()
            loss.backward()
            average_gradients(model)
            optimizer.step()
        print(f"rank {dist.get_rank()}, epoch {epoch}: {epoch_loss / len(train_set):.4f}\n", end="")
    share = ddp_mnist.accuracy(model, test)
    if dist.get_rank() == 0:
        print(f"test accuracy {share:.4f} on {dist.get_world_size()} ranks", flush=True)


if __name__ == "__main__":
    ddp_mnist.main(run)
