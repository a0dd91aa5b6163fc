"""Synchronous data-parallel SGD in PyTorch, with the store used only as an all-reduce.

    python tools/launch.py -n 2 -s 1 --launcher local python examples/pytorch/sync_sgd_pytorch.py

As in MPI tutorials: all workers start with rank 0's weights (``broadcast``), each computes
gradients on its own digits, ``pushpull`` adds them over the workers, and all take the same step.
The store has no optimizer. ``sync_sgd_pytorch.py local`` trains alone, without the launcher.
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
    sys.exit("sync_sgd_pytorch: PyTorch is missing; install it: pip install torch")

import mnist
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import kvstore as mx

BATCH, LEARNING_RATE, MOMENTUM = 32, 0.1, 0.5


def lenet(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.Tanh(), nn.Linear(500, 10)),
    )


def train(store: mx.KVStore, model: nn.Module, digits: mnist.Digits, epochs: int) -> None:
    """One batch of BATCH digits per worker and step; the mean gradient updates every copy."""
    names, parameters = [name for name, _ in model.named_parameters()], list(model.parameters())
    store.broadcast(names, parameters, out=parameters)
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)
    place = (store.rank, store.num_workers)
    for epoch in range(epochs):
        for rows in mx.model.shard(len(digits.labels), *place, batch_size=BATCH, epoch=epoch):
            images, labels = torch.from_numpy(digits.images[rows]), digits.labels[rows]
            loss = cross_entropy(model(images), torch.from_numpy(labels))
            gradients = list(torch.autograd.grad(loss, parameters))
            store.pushpull(names, gradients)  # each is now the sum over all workers
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient / store.num_workers
            optimizer.step()
        print(f"epoch {epoch + 1}: last loss {float(loss.detach()):.4f}", flush=True)


def accuracy(model: nn.Module, digits: mnist.Digits) -> float:
    with torch.no_grad():
        answers = model(torch.from_numpy(digits.images)).argmax(dim=1)
    return float((answers == torch.from_numpy(digits.labels)).float().mean())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Synchronous SGD in PyTorch over a store.")
    parser.add_argument("kv_store", nargs="?", default="dist_sync", help="local, or dist_sync")
    parser.add_argument("--epochs", type=int, default=4, help="how many to train (4)")
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")
    training, test = mnist.load()
    with mx.kvstore.create(args.kv_store) as kv:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // kv.num_workers))
        model = lenet(seed=kv.rank)  # broadcast makes them equal
        train(kv, model, training, args.epochs)
        print(f"worker {kv.rank} of {kv.num_workers}: accuracy {accuracy(model, test):.4f}")
