"""LeNet on digits with Horovod's interface, over this project's servers.

    kvstore-launch -n 2 -s 1 --launcher local python examples/horovod/mnist.py
    torchrun --nproc-per-node 2 examples/horovod/mnist.py
    python examples/horovod/mnist.py                        (one process)

Only its import differs from a script for Horovod. The digits are those of
``examples/image_classification``.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "image_classification"))
if importlib.util.find_spec("torch") is None:
    sys.exit("PyTorch is missing; install it: pip install torch")

import kvstore.horovod.torch as hvd  # import horovod.torch as hvd
import mnist
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def lenet() -> nn.Sequential:
    """LeNet; each rank starts with its own weights and then gets those of rank 0."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.Tanh(), nn.Linear(500, 10)),
    )


def train(model: nn.Module, digits: mnist.Digits, flags: argparse.Namespace) -> None:
    """Train on this rank's share of the digits; gradients are averaged over all ranks."""
    data = TensorDataset(torch.from_numpy(digits.images), torch.from_numpy(digits.labels))
    sampler: DistributedSampler[object] = DistributedSampler(data, hvd.size(), hvd.rank())
    loader = DataLoader(data, flags.batch_size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    compression = hvd.Compression.fp16 if flags.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), compression=compression
    )
    for epoch in range(flags.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: last loss {loss.item():.4f}", flush=True)


def accuracy(model: nn.Module, digits: mnist.Digits) -> float:
    """The share of right answers; each rank tests every size-th digit."""
    mine = slice(hvd.rank(), None, hvd.size())
    with torch.no_grad():
        answers = model(torch.from_numpy(digits.images[mine])).argmax(1)
    right = (answers == torch.from_numpy(digits.labels[mine])).sum()
    total = hvd.allreduce(right, op=hvd.Sum, name="right answers")
    return float(total) / len(digits.labels)


def main() -> None:
    """Train, test, and print the accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=32, help="of each rank")
    parser.add_argument("--fp16-allreduce", action="store_true")
    flags = parser.parse_args()
    hvd.init()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // hvd.local_size()))
    training, test = mnist.load()
    model = lenet()
    train(model, training, flags)
    share = accuracy(model, test)
    if hvd.rank() == 0:
        print(f"test accuracy {share:.4f} on {hvd.size()} ranks", flush=True)


if __name__ == "__main__":
    main()
