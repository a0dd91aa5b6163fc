"""LeNet on MNIST with the optimizer on the servers: workers keep no optimizer states.

    torchrun --nproc-per-node 2 examples/pytorch/server_optimizer.py
    python tools/launch.py -n 2 -s 1 --launcher local python examples/pytorch/server_optimizer.py

With the argument ``dist_async``, workers do not wait for each other. The digits are those of
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
if __name__ == "__main__" and importlib.util.find_spec("torch") is None:
    sys.exit("server_optimizer: PyTorch is missing; install it: pip install torch")

import kvstore.torch as kvt
import mnist
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import kvstore as mx

BATCH = 32


def lenet() -> nn.Sequential:
    """LeNet; each worker starts with its own weights and then gets those of worker 0."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.Tanh(), nn.Linear(500, 10)),
    )


def train(kv: mx.KVStore, model: nn.Module, digits: mnist.Digits, epochs: int) -> None:
    """Train on this worker's share of the digits; the servers update the weights."""
    optimizer = kvt.ServerOptimizer(model, kv, "adam", lr=2e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    place = (kv.rank, kv.num_workers)
    for epoch in range(epochs):
        for rows in mx.model.shard(len(digits.labels), *place, batch_size=BATCH, epoch=epoch):
            images, labels = torch.from_numpy(digits.images[rows]), digits.labels[rows]
            optimizer.zero_grad()
            loss = cross_entropy(model(images), torch.from_numpy(labels))
            loss.backward()  # sends gradients and gets new weights
            optimizer.step()  # waits for the remaining weights
        schedule.step()
        print(f"epoch {epoch + 1}: last loss {loss.item():.4f}", flush=True)


def accuracy(model: nn.Module, digits: mnist.Digits) -> float:
    """The share of right answers."""
    with torch.no_grad():
        answers = model(torch.from_numpy(digits.images)).argmax(dim=1)
    return float((answers == torch.from_numpy(digits.labels)).float().mean())


def main() -> None:
    """Train, test, and print the accuracy."""
    parser = argparse.ArgumentParser(description="LeNet with its optimizer on the servers.")
    parser.add_argument("kv_store", nargs="?", default="dist_sync", help="or dist_async")
    parser.add_argument("--epochs", type=int, default=3, help="how many to train (3)")
    flags = parser.parse_args()
    training, test = mnist.load()
    kv = kvt.init(flags.kv_store)
    torch.manual_seed(7)  # so that two runs are the same; rank 0's weights are used
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // kv.num_workers))
    model = lenet()
    train(kv, model, training, flags.epochs)
    print(f"worker {kv.rank} of {kv.num_workers}: accuracy {accuracy(model, test):.4f}")


if __name__ == "__main__":
    main()
