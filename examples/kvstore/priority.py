"""Send gradients while the backward pass still runs, and use weights as they come.

    python tools/launch.py -n 2 -s 1 --launcher local python examples/kvstore/priority.py

The gradient of the last layer is there first, but the next step needs the first layer first. With
``priority=-layer`` its gradient and its new weights overtake those of later layers that still wait
for the network. What a slow network gains: docs/performance.md, "Priorities".
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import kvstore as mx

WIDTHS = [64, 512, 512, 512, 8]
SAMPLES = 256


def main(kv: mx.KVStore, steps: int = 60) -> float:
    """Train on this worker's share of a task with a known answer; return the last loss."""
    random = np.random.default_rng(1)
    weights = [
        (random.normal(size=shape) * np.sqrt(2 / shape[0])).astype(np.float32)
        for shape in pairwise(WIDTHS)
    ]
    layers = range(len(weights))
    kv.init(list(layers), weights)
    kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.02, momentum=0.9))

    inputs = random.normal(size=(SAMPLES, WIDTHS[0])).astype(np.float32)
    wanted = np.tanh(inputs @ random.normal(size=(WIDTHS[0], WIDTHS[-1])) / 8).astype(np.float32)
    mine = kv.shard(SAMPLES)
    inputs, wanted = inputs[mine], wanted[mine]

    arriving = [kv.pull_async(layer, out=weights[layer]) for layer in layers]
    for step in range(steps):
        seen = [inputs]
        for layer in layers:  # forward: wait only for the weights of this layer
            kv.wait(arriving[layer])
            found = seen[-1] @ weights[layer]
            seen.append(np.maximum(found, 0) if layer != layers[-1] else found)
        slope = (seen[-1] - wanted) * (2 / wanted.size)
        loss = float(np.mean((seen[-1] - wanted) ** 2))
        for layer in reversed(layers):  # backward: send each gradient as soon as it is there
            gradient = seen[layer].T @ slope / kv.num_workers
            slope = (slope @ weights[layer].T) * (seen[layer] > 0)
            # Both arrays belong to the store until the future is done.
            arriving[layer] = kv.pushpull_async(
                layer, gradient, out=weights[layer], priority=-layer
            )
        if kv.rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss:.4f}", flush=True)
    kv.wait()
    if kv.rank == 0:
        print(f"the last loss: {loss:.4f}", flush=True)
    return loss


if __name__ == "__main__":
    main(mx.kvstore.create(sys.argv[1] if len(sys.argv) > 1 else "dist_sync"))
