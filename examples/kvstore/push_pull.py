"""What a key-value store does: init, push, pull, lists of devices and of keys, an updater.

    python examples/kvstore/push_pull.py
    python tools/launch.py -n 2 -s 1 --launcher local \\
        python examples/kvstore/push_pull.py dist_sync

Each step prints the values of the keys. With several workers, the pushes of all are added.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import kvstore as mx

SHAPE = (2, 3)


def show(step: str, kv: mx.KVStore, *values: np.ndarray) -> None:
    """All workers see the same values, so only one prints them."""
    if kv.rank == 0:
        print(f"{step}: {' '.join(str(value.tolist()) for value in values)}", flush=True)


def main(kv: mx.KVStore) -> None:
    ones = np.ones(SHAPE, np.float32)

    kv.init("a", 2 * ones)  # with several workers, the values of rank 0
    show("init", kv, kv.pull("a"))

    # A push replaces the value by the sum over all devices (here two) and all workers.
    kv.push("a", [ones, 2 * ones])
    out = [np.zeros_like(ones), np.zeros_like(ones)]
    kv.pull("a", out=out)  # into an array on each device
    show("push and pull", kv, *out)

    # Lists of keys: one call can transfer a whole model.
    kv.init(["b", "c"], [ones, 3 * ones])
    kv.push(["b", "c"], [[ones, ones], [4 * ones, 4 * ones]])
    show("a list of keys", kv, *kv.pull(["b", "c"]))

    # Push and pull in one call is an all-reduce.
    gradient = (kv.rank + 1) * ones
    kv.pushpull("b", gradient)
    show("pushpull", kv, gradient)

    if "dist" in kv.type:
        # The values live on servers, which run no functions of the script: there, optimizers
        # update. See custom_optimizer.py for one of your own.
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=2.0))
    else:

        def update(key: str, pushed: np.ndarray, stored: np.ndarray) -> None:
            stored -= 2 * pushed

        kv.set_updater(update)
    kv.push("c", [ones, ones])
    show("updated", kv, kv.pull("c"))


if __name__ == "__main__":
    with mx.kvstore.create(sys.argv[1] if sys.argv[1:] else "local") as store:
        main(store)
