"""Updates on servers with your own optimizer, defined in ``my_optimizer.py``.

    python tools/launch.py -n 2 -s 1 --launcher local \\
        --server-import examples.kvstore.my_optimizer python examples/kvstore/custom_optimizer.py

The servers must know the optimizer's class: ``--server-import`` names the module that they
import from the folder where the job starts. ``custom_optimizer.py local`` runs alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import my_optimizer  # noqa: F401 (importing it registers the optimizer)
import numpy as np

import kvstore as mx

STEPS, RATE = 100, 0.02
TARGET = np.array([1.0, -0.5, 0.25, 0.0], np.float32)


def main(kv: mx.KVStore) -> None:
    """Moves the weights to TARGET: Lion's steps have the length RATE, whatever the gradient."""
    kv.set_optimizer(mx.optimizer.create("lion", learning_rate=RATE, beta1=0.5, beta2=0.5))
    weights = np.zeros_like(TARGET)
    kv.init("w", weights)
    for step in range(STEPS):
        kv.pushpull("w", 1000 * (weights - TARGET), out=weights)
        if kv.rank == 0 and step in (0, STEPS - 1):
            print(f"step {step + 1}: {weights.astype(float).round(2).tolist()}")
    distance = float(np.abs(weights - TARGET).max())
    print(f"worker {kv.rank} of {kv.num_workers}: {distance:.3f} from the target")


if __name__ == "__main__":
    with mx.kvstore.create(sys.argv[1] if sys.argv[1:] else "dist_sync") as store:
        main(store)
