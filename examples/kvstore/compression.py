"""Gradient compression: the same training with several codecs; shows loss and bytes sent.

    python examples/kvstore/compression.py
    python tools/launch.py -n 2 -s 1 --launcher local \\
        python examples/kvstore/compression.py --kv-store dist_sync

Trains a logistic regression on made-up data once with each codec. The part of a gradient that a
codec leaves out is sent with the next one, so nearly all codecs reach the loss of float32.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import kvstore as mx

FEATURES = 2000
CODECS = [
    None,
    {"type": "fp16"},
    {"type": "int8"},
    {"type": "2bit", "threshold": 0.01},
    {"type": "topk", "ratio": 0.05},
    {"type": "topk+fp16", "ratio": 0.05, "pull": {"type": "fp16"}},
]


def data(rank: int, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples of this worker, and their classes, which a hidden vector separates."""
    hidden = np.random.default_rng(0).standard_normal(FEATURES)
    samples = np.random.default_rng(1 + rank).standard_normal((number, FEATURES), np.float32)
    return samples, (samples @ hidden > 0).astype(np.float32)


def train(kv: mx.KVStore, key: str, steps: int) -> float:
    """The loss of this worker's samples after ``steps`` steps."""
    samples, classes = data(kv.rank, 500)
    weight = np.zeros(FEATURES, np.float32)
    kv.init(key, weight)
    gradient = np.zeros_like(weight)
    for step in range(steps + 1):
        probability = 1 / (1 + np.exp(-samples @ weight))
        if step < steps:
            gradient[:] = samples.T @ (probability - classes) / len(samples) / kv.num_workers
            kv.pushpull(key, gradient, weight)
    hit = np.where(classes == 1, probability, 1 - probability)
    return float(-np.log(np.maximum(hit, 1e-7)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kv-store", default="local")
    given = parser.parse_args()
    with mx.create(given.kv_store) as kv:
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5))
        for number, codec in enumerate(CODECS):
            kv.set_gradient_compression(codec)  # every worker, with the same parameters
            loss = train(kv, f"weight {number}", given.steps)
            name = codec["type"] if codec else "none"
            found = kv.stats()["store"].get("compression", {})
            ratio = found[name]["ratio"] if codec else 1.0
            if kv.rank == 0:
                print(f"{name}: loss {loss:.4f}, {ratio:.1f} times fewer bytes pushed", flush=True)


if __name__ == "__main__":
    main()
