"""float16 weights that learn like float32 ones: the store keeps a float32 master of each.

    python examples/kvstore/mixed_precision.py
    kvstore-launch -n 2 -s 1 python examples/kvstore/mixed_precision.py --kv-store dist_sync

Fits a line to made-up data three times: with a float32 key, with a float16 key, and with float16
weights that the script updates itself, to show what happens without a master.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import kvstore as mx

TRUE = np.array([3.0, -2.0, 0.5, 40.0])
"""The weights to find; the last one is the constant."""


def gradient(weight: np.ndarray, random: np.random.Generator, batch_size: int) -> np.ndarray:
    """The gradient of half the mean squared error of a batch, in the weight's dtype."""
    inputs = random.standard_normal((batch_size, len(TRUE)))
    inputs[:, -1] = 1
    error = inputs @ (weight.astype(np.float64) - TRUE)
    return (inputs.T @ error / batch_size).astype(weight.dtype)


def error_of(weight: np.ndarray) -> float:
    """The largest distance to the weights to find."""
    return float(np.abs(weight.astype(np.float64) - TRUE).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.002)
    parser.add_argument("--kv-store", default="local")
    given = parser.parse_args()

    with mx.create(given.kv_store) as kv:
        rate = given.rate / kv.num_workers
        weights = {"float32": np.zeros(4, np.float32), "float16": np.zeros(4, np.float16)}
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=rate, multi_precision=True))
        kv.init(list(weights), list(weights.values()))
        for key, weight in weights.items():
            random = np.random.default_rng(kv.rank)
            for _ in range(given.steps):
                kv.pushpull(key, gradient(weight, random, given.batch_size), out=weight)
        if kv.rank == 0:
            for key, weight in weights.items():
                print(f"{key}: off by {error_of(weight):.3f}")
            alone, random = np.zeros(4, np.float16), np.random.default_rng(0)
            for _ in range(given.steps):
                alone -= np.float16(given.rate) * gradient(alone, random, given.batch_size)
            print(f"float16 without a master: off by {error_of(alone):.3f}")


if __name__ == "__main__":
    main()
