"""How long a ``local`` store takes for one exchange of a whole model with several devices.

``python benchmarks/local.py``: each device pushes the gradients of a model and pulls the
weights into arrays of its own; SGD with momentum runs in the store. Printed is the median time
of an exchange with its spread, and the processor time, for ``pushpull``, for ``push`` followed
by ``pull``, and for a loop over the keys. Afterwards the weights are compared with a NumPy
computation of all rounds, bit for bit: a fast wrong answer ends with an error.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import kvstore as mx  # noqa: E402
from benchmarks.models import MODELS, chosen  # noqa: E402
from kvstore.arrays.cpu.threads import shared  # noqa: E402

Arrays = list[np.ndarray[Any, Any]]

RATE, MOMENTUM = 1e-3, 0.9
WARM_UP = 3


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=chosen, default="resnet50,resnet110")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kv-store", default="local")
    parser.add_argument("--hows", default="pushpull,push-pull,key-by-key")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    for model in options.models:
        measure(model, options)
    return 0


def measure(name: str, options: argparse.Namespace) -> None:
    shapes = MODELS[name]()
    rng = np.random.default_rng(7)
    weights = [rng.standard_normal(shape, np.float32) for shape in shapes]
    gradients = [
        [rng.standard_normal(shape, np.float32) for _ in range(options.devices)] for shape in shapes
    ]
    outs = [[np.zeros(shape, np.float32) for _ in range(options.devices)] for shape in shapes]
    keys = [f"{index:03d}" for index in range(len(shapes))]
    store = mx.kvstore.create(options.kv_store)
    store.set_optimizer(mx.optimizer.create("sgd", learning_rate=RATE, momentum=MOMENTUM))
    store.init(keys, weights)

    def push_pull() -> None:
        store.push(keys, gradients)
        store.pull(keys, out=outs)

    def key_by_key() -> None:
        for index, key in enumerate(keys):
            store.push(key, gradients[index], priority=-index)
            store.pull(key, out=outs[index], priority=-index)

    known: dict[str, Callable[[], None]] = {
        "pushpull": lambda: store.pushpull(keys, gradients, out=outs),
        "push-pull": push_pull,
        "key-by-key": key_by_key,
    }
    hows = options.hows.split(",")
    for how in hows:
        report(f"{name:9s} {how:10s}", options, *timed(known[how], options.rounds))
    store.close()
    check(weights, gradients, outs, len(hows) * (options.rounds + WARM_UP))


def timed(exchange: Callable[[], None], rounds: int) -> tuple[list[float], list[float]]:
    """Milliseconds by the clock and of the processor, after a few rounds that warm up."""
    walls, processor = [], []
    for _ in range(rounds + WARM_UP):
        began, began_processor = time.perf_counter(), time.process_time()
        exchange()
        walls.append(1e3 * (time.perf_counter() - began))
        processor.append(1e3 * (time.process_time() - began_processor))
    return walls[WARM_UP:], processor[WARM_UP:]


def report(
    what: str, options: argparse.Namespace, walls: list[float], processor: list[float]
) -> None:
    print(
        f"{what} {options.kv_store}, {options.devices} devices, {shared().num_threads} threads  "
        f"median {statistics.median(walls):.2f} ms  (min {min(walls):.2f}, max {max(walls):.2f}, "
        f"{len(walls)} rounds)  processor {statistics.median(processor):.2f} ms",
        flush=True,
    )


def check(weights: Arrays, gradients: list[Arrays], outs: list[Arrays], rounds: int) -> None:
    """The same rounds in NumPy must give the same bits, in every array that was filled."""
    for weight, row, filled in zip(weights, gradients, outs, strict=True):
        total = row[0]
        for gradient in row[1:]:
            total = total + gradient
        velocity = np.zeros_like(weight)
        for _ in range(rounds):
            velocity = velocity * np.float32(MOMENTUM) - total * np.float32(RATE)
            weight = weight + velocity
        if any(out.tobytes() != weight.tobytes() for out in filled):
            raise SystemExit("the store's weights differ from NumPy's")
    print("the weights are NumPy's, bit for bit")


if __name__ == "__main__":
    sys.exit(main())
