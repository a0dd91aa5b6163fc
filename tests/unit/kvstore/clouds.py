"""A small network, its data, and a stand-in for a job of several workers on threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.mxnet.model import FeedForward
from kvstore.stores.base import KVStore
from kvstore.stores.local.store import LocalKVStore


class LinearSoftmax:
    """Softmax regression on flat samples: the smallest network that can learn something."""

    def init_params(
        self, input_shape: tuple[int, ...], rng: np.random.Generator
    ) -> dict[str, np.ndarray]:
        return {"weight": rng.normal(0, 0.1, (3, input_shape[0])), "bias": np.zeros(3)}

    def predict(self, params: Any, x: np.ndarray) -> np.ndarray:
        scores = x @ params["weight"].T + params["bias"]
        exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)

    def loss_and_gradients(
        self, params: Any, x: np.ndarray, y: np.ndarray
    ) -> tuple[float, int, dict[str, np.ndarray]]:
        probabilities = self.predict(params, x)
        rows = np.arange(len(y))
        loss = -np.log(probabilities[rows, y]).sum()
        correct = (probabilities.argmax(axis=1) == y).sum()
        probabilities[rows, y] -= 1
        return loss, correct, {"weight": probabilities.T @ x, "bias": probabilities.sum(axis=0)}


def three_clouds(samples: int = 120, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 3, samples)
    return rng.normal(0, 0.5, (samples, 4)) + 2 * np.eye(4)[labels], labels


def linear(**arguments: Any) -> FeedForward:
    settings: dict[str, Any] = {
        "num_epoch": 2,
        "numpy_batch_size": 16,
        "learning_rate": 0.5,
        "momentum": 0.5,
    }
    return FeedForward(LinearSoftmax(), **{**settings, **arguments})


def equal(left: FeedForward, right: FeedForward) -> bool:
    assert left.arg_params is not None
    assert right.arg_params is not None
    return all(
        np.array_equal(left.arg_params[name], right.arg_params[name]) for name in ("weight", "bias")
    )


class Cluster:
    """Workers on threads that share one local store, as a synchronous job shares its servers.

    Each round waits for all workers, and gives up after a second: workers with different
    numbers of batches fail instead of waiting for ever.
    """

    def __init__(self, num_workers: int, store_type: str) -> None:
        self.num_workers = num_workers
        self.store_type = store_type
        self.store = LocalKVStore()
        self.gate = threading.Barrier(num_workers, timeout=1)
        self.offered: list[Any] = [None] * num_workers
        self.optimizers: list[Any] = [None] * num_workers
        self.savers: list[tuple[int, str]] = []

    def run(self, work: Callable[[KVStore], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.num_workers) as pool:
            stores = [ClusterStore(self, rank) for rank in range(self.num_workers)]
            return list(pool.map(work, stores))


class ClusterStore(LocalKVStore):
    def __init__(self, cluster: Cluster, rank: int) -> None:
        super().__init__(cluster.store_type)
        self._cluster = cluster
        self._own_rank = rank

    @property
    def rank(self) -> int:
        return self._own_rank

    @property
    def num_workers(self) -> int:
        return self._cluster.num_workers

    def _once(self, act: Callable[[], None]) -> None:
        """Rank 0 does it after all have come, and before any goes on."""
        self._cluster.gate.wait()
        if self.rank == 0:
            act()
        self._cluster.gate.wait()

    def init(self, key: Any, value: Any) -> None:
        self._once(lambda: self._cluster.store.init(key, value))

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        self.init(key, value)
        self.pull(key, out=out)

    def delete(self, key: Any) -> None:
        self._once(lambda: self._cluster.store.delete(key))

    def set_optimizer(self, optimizer: Any) -> None:
        self._cluster.optimizers[self.rank] = optimizer
        self._once(lambda: self._cluster.store.set_optimizer(optimizer))

    def load_optimizer_states(self, fname: Any) -> None:
        self._once(lambda: self._cluster.store.load_optimizer_states(fname))

    def save_optimizer_states(self, fname: Any, dump_optimizer: bool = False) -> None:
        self._cluster.savers.append((self.rank, Path(fname).name))
        self._cluster.store.save_optimizer_states(fname, dump_optimizer)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        many = isinstance(key, list)
        self._cluster.offered[self.rank] = value if many else [value]
        keys = key if many else [key]

        def push_all() -> None:
            by_key = zip(*self._cluster.offered, strict=True)
            self._cluster.store.push(keys, [list(chain(*parts)) for parts in by_key])

        self._once(push_all)
        self._cluster.store.pull(key, out=out)

    def pull(self, key: Any, out: Any = None, *_: Any, **__: Any) -> Any:
        return self._cluster.store.pull(key, out=out)

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        raise NotImplementedError

    def barrier(self) -> None:
        self._cluster.gate.wait()
