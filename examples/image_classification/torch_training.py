"""Data-parallel training of PyTorch networks through a key-value store: the parts of the loop.

Each device has a replica of the network and takes its share of every batch. One ``pushpull`` of
all parameters, with the gradients of all devices in lists, adds them over devices and workers,
updates, and writes the new weights to every replica. The statistics of batch norms are not
parameters: each replica keeps those of the images it has seen, and those of rank 0's first
replica are evaluated and saved. Devices compute on a small pool of threads; the store is called
only on the caller's thread. Read next: ``train_cifar10.py``.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import kvstore as mx
from kvstore.mxnet.fit.files import load_checkpoint, params_path, save_checkpoint
from pslite.errors import UsageError

Labels = NDArray[np.int64]
HostImages = NDArray[np.float32]

EVALUATION_BATCH = 500


class Replica:
    """One device: a copy of the network, and its share of every batch."""

    def __init__(self, network: nn.Module, device: torch.device, part: slice) -> None:
        self.network = copy.deepcopy(network).to(device)
        self.device = device
        self.parameters = dict(self.network.named_parameters())
        self.gradients: list[Tensor] = []
        """The gradients of the last batch, in the order of the parameters."""
        self._part = part

    def compute(self, images: HostImages, labels: Labels) -> tuple[float, int]:
        """The loss sum and the number of right answers of this device's share of the batch.

        The gradients of that sum are then in ``gradients``.
        """
        x = torch.from_numpy(images[self._part]).to(self.device)
        y = torch.from_numpy(labels[self._part]).to(self.device)
        self.network.train()
        scores = self.network(x)
        loss = functional.cross_entropy(scores, y, reduction="sum")
        self.gradients = list(torch.autograd.grad(loss, list(self.parameters.values())))
        return float(loss.detach()), int((scores.detach().argmax(dim=1) == y).sum())

    def accuracy(self, batches: Iterable[tuple[HostImages, Labels]]) -> float:
        """The share of right answers, with the statistics of this replica's batch norms."""
        self.network.eval()
        seen, right = 0, 0
        with torch.no_grad():
            for images, labels in batches:
                answers = self.network(torch.from_numpy(images).to(self.device)).argmax(dim=1)
                right += int((answers.cpu() == torch.from_numpy(labels)).sum())
                seen += len(labels)
        return right / seen


class Trainer:
    """The replicas of this worker, the store, and the parameters' names in the store."""

    def __init__(self, store: mx.KVStore, replicas: Sequence[Replica]) -> None:
        self._store = store
        self._replicas = replicas
        self.first = replicas[0]
        """The replica with the statistics that are evaluated and saved."""
        self.names = list(replicas[0].parameters)
        self._weights = [[replica.parameters[name] for replica in replicas] for name in self.names]
        self._pool = ThreadPoolExecutor(len(replicas))

    def start(self, optimizer: mx.optimizer.Optimizer) -> None:
        """Give the store the optimizer and rank 0's initial values; all replicas get these."""
        self._store.set_optimizer(optimizer)
        first = [several[0] for several in self._weights]
        self._store.broadcast(self.names, first, out=self._weights)

    def step(self, images: HostImages, labels: Labels) -> tuple[float, int]:
        """Train on one batch; returns its loss sum and right answers, before the update."""
        if len(self._replicas) == 1:
            results = [self._replicas[0].compute(images, labels)]
        else:
            computed = [self._pool.submit(r.compute, images, labels) for r in self._replicas]
            results = [future.result() for future in computed]
        gradients = zip(*(replica.gradients for replica in self._replicas), strict=True)
        self._store.pushpull(self.names, [list(own) for own in gradients], out=self._weights)
        return sum(loss for loss, _ in results), sum(right for _, right in results)

    def catch_up(self, *, wait: bool) -> None:
        """Pull the newest weights; with ``wait``, after the last updates of all workers."""
        if wait:
            self._store.barrier()
        self._store.pull(self.names, out=self._weights)

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def devices(gpus: str, num_cpus: int) -> list[torch.device]:
    """The GPUs in a list such as ``0,2``; if it is empty, the CPU num_cpus times.

    Raises ``UsageError`` for a GPU that does not exist.
    """
    if num_cpus < 1:
        raise UsageError(f"--cpus must be at least 1, got {num_cpus}")
    if not gpus:
        return [torch.device("cpu")] * num_cpus
    if not all(number.isdecimal() for number in gpus.split(",")):
        raise UsageError(f"--gpus takes numbers such as 0,2; got {gpus!r}")
    numbers = [int(number) for number in gpus.split(",")]
    if max(numbers) >= torch.cuda.device_count():
        raise UsageError(
            f"PyTorch {torch.__version__} sees {torch.cuda.device_count()} GPUs, and --gpus "
            f"names number {max(numbers)}; leave it out to compute on the CPU"
        )
    return [torch.device("cuda", number) for number in numbers]


def compare_workers(store: mx.KVStore, host: str, agreed: Mapping[str, int]) -> int:
    """Return the number of workers on this host; ``agreed`` must be equal on all workers.

    If a synchronous worker had fewer batches than another, the other would wait for it, so all
    workers compare their numbers first. Every worker must call it. If the numbers differ, every
    worker raises the same ``UsageError``.
    """
    if store.num_workers == 1:
        return 1
    row = np.array([zlib.crc32(host.encode()), *agreed.values()], np.int64)
    table = np.zeros((store.num_workers, len(row)), np.int64)
    table[store.rank] = row
    with mx.kvstore.create("dist_sync") as agreement:  # an all-reduce, for any type of store
        agreement.init("workers", np.zeros_like(table))
        agreement.pushpull("workers", table)
    for name, numbers in zip(agreed, table[:, 1:].T.tolist(), strict=True):
        if len(set(numbers)) > 1:
            raise UsageError(
                f"the workers differ in the number of {name}: by rank, {numbers}. Start all with "
                f"the same flags and the same files"
            )
    return int((table[:, 0] == row[0]).sum())


def use_threads(num_threads: int, num_computing_here: int) -> int:
    """Let PyTorch use ``num_threads``, or with 0 this computation's share of the cores.

    If every process uses all cores, they slow each other down.
    """
    number = num_threads or max(1, len(os.sched_getaffinity(0)) // num_computing_here)
    torch.set_num_threads(number)
    return number


def save_network(network: nn.Module, prefix: str, epoch: int) -> Path:
    """Write parameters and statistics to ``PREFIX-<epoch>.params``; returns its path."""
    on_host = {name: value.detach().cpu().numpy() for name, value in network.state_dict().items()}
    parameters = {name: on_host.pop(name) for name, _ in network.named_parameters()}
    save_checkpoint(prefix, epoch, None, parameters, on_host, has_states=True)
    return params_path(prefix, epoch)


def load_network(network: nn.Module, prefix: str, epoch: int) -> None:
    """Load into ``network`` what ``save_network`` wrote. Raises ``PSError``."""
    _, parameters, statistics = load_checkpoint(prefix, epoch)
    arrays = {**parameters, **statistics}
    wanted = {name: tuple(value.shape) for name, value in network.state_dict().items()}
    odd = set(wanted.items()) ^ {(name, value.shape) for name, value in arrays.items()}
    if odd:
        name, shape = min(odd)
        raise UsageError(
            f"{params_path(prefix, epoch)} is of another network (see {name}, {shape}); give the "
            f"--network and --num-layers with which it was made"
        )
    network.load_state_dict({name: torch.from_numpy(value) for name, value in arrays.items()})


def in_batches(
    prepare: Callable[[slice], tuple[HostImages, Labels]], count: int
) -> Iterable[tuple[HostImages, Labels]]:
    """All of ``count`` images, a few hundred at a time."""
    for start in range(0, count, EVALUATION_BATCH):
        yield prepare(slice(start, min(start + EVALUATION_BATCH, count)))
