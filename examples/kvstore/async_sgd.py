"""Asynchronous SGD: no worker waits for another, and gradients come from older weights.

    python tools/launch.py -n 2 -s 1 --launcher local python examples/kvstore/async_sgd.py

Fits a line (least squares) to noisy points; each worker has its own. The server applies every push
at once as one update. The version of a pulled value counts these updates, so a worker can tell how
many updates of others came between its pull and its push: the staleness of its gradient.
"""

from __future__ import annotations

import collections
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import kvstore as mx

TRUE_WEIGHTS = np.array([2.0, -3.4, 0.7])
STEPS, BATCH, LEARNING_RATE = 300, 16, 0.02


def points(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, with a constant 1 as the last one, and the line's values plus noise."""
    x = np.column_stack([rng.normal(size=(count, len(TRUE_WEIGHTS) - 1)), np.ones(count)])
    return x, x @ TRUE_WEIGHTS + rng.normal(scale=0.05, size=count)


def train(kv: mx.KVStore) -> collections.Counter[int]:
    """Returns the number of gradients of each staleness."""
    rng = np.random.default_rng(kv.rank)
    staleness: collections.Counter[int] = collections.Counter()
    for _ in range(STEPS):
        weights, read_at = kv.pull("w", with_version=True)
        x, y = points(rng, BATCH)
        error = x @ weights - y
        time.sleep(0.0005 * (kv.rank + 1))  # some workers are slower
        kv.push("w", x.T @ error / BATCH)
        _, applied_at = kv.pull("w", with_version=True)
        staleness[applied_at - read_at - 1] += 1  # one of these updates was by this worker
    return staleness


if __name__ == "__main__":
    with mx.kvstore.create("dist_async") as kv:
        kv.init("w", np.zeros_like(TRUE_WEIGHTS))
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=LEARNING_RATE))
        staleness = train(kv)
        kv.barrier()  # all updates are applied
        weights, version = kv.pull("w", with_version=True)
    shown = ", ".join(f"{count} by {updates}" for updates, count in sorted(staleness.items()))
    print(f"worker {kv.rank}: {STEPS} gradients, stale {shown}")
    print(f"worker {kv.rank}: after {int(version)} updates {np.round(weights, 2).tolist()}")
