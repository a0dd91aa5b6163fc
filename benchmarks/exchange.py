"""How long one exchange of a whole model takes (``make bench``).

Starts a scheduler, servers and workers on this machine by the launcher, lets all workers push
the gradients of a model and pull the weights (SGD with momentum runs on the servers), and
prints the median time of an exchange with its spread. Afterwards the weights are compared
with a NumPy computation of all rounds. Between exchanges workers meet in a barrier, so the
times of the slowest worker are what is printed. ``views`` is a pushpull of gradients in memory of
``kv.empty`` into views of the weights (``kv.view``; not in ``dist_async``).
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import time

HOWS = ("pushpull", "views", "push, pull", "key by key")

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.models import MODELS, chosen  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=chosen, default="resnet50,resnet110,lenet,one")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--kv-store", default="dist_sync")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if "DMLC_ROLE" in os.environ:
        for model in options.models:
            measure(model, options)
        return 0
    launcher = [sys.executable, str(ROOT / "tools" / "launch.py"), "--launcher", "local"]
    cluster = ["-n", str(options.workers), "-s", str(options.servers)]
    worker = [sys.executable, str(pathlib.Path(__file__).resolve()), *sys.argv[1:]]
    return subprocess.run([*launcher, *cluster, *worker], check=False).returncode


def measure(name: str, options: argparse.Namespace) -> None:
    import numpy as np

    import kvstore as mx

    store = mx.kvstore.create(options.kv_store)
    shapes = MODELS[name]()
    rng = np.random.default_rng(7)
    weights = [rng.standard_normal(shape, np.float32) for shape in shapes]
    rng = np.random.default_rng(store.rank)
    gradients = [rng.standard_normal(shape, np.float32) for shape in shapes]
    outs = [np.zeros(shape, np.float32) for shape in shapes]
    keys = [f"{index:03d}" for index in range(len(shapes))]
    if store.rank == 0:
        store.set_optimizer(mx.optimizer.create("sgd", learning_rate=1e-3, momentum=0.9))
    store.init(keys, weights)
    store.barrier()
    lazy_outs = [mx.nd.zeros(shape) for shape in shapes]
    hows = [how for how in HOWS if how != "views" or "async" not in options.kv_store]
    for how in hows:
        if how == "views":
            own = [store.empty(shape) for shape in shapes]
            for array, gradient in zip(own, gradients, strict=True):
                array[...] = gradient
            views = store.view(keys)
        times = []
        for _ in range(options.rounds + 3):
            store.barrier()
            begin = time.perf_counter()
            if how == "pushpull":
                store.pushpull(keys, gradients, out=outs)
            elif how == "views":
                store.pushpull(keys, own, out=views)
            elif how == "push, pull":
                store.push(keys, gradients)
                store.pull(keys, out=outs)
            else:  # key by key, as scripts for the original do, into arrays that are read later
                for index, key in enumerate(keys):
                    store.push(key, gradients[index], priority=-index)
                    store.pull(key, out=lazy_outs[index], priority=-index)
                mx.nd.waitall()
            times.append(1e3 * (time.perf_counter() - begin))
        if store.rank == 0:
            report(name, how, options, sum(w.nbytes for w in weights), len(keys), times[3:])
    if "async" not in options.kv_store:
        outs = [out.asnumpy() for out in lazy_outs]
        check(weights, outs, options.workers, len(hows) * (options.rounds + 3))
    store.barrier()
    store.close()


def report(
    name: str, how: str, options: argparse.Namespace, nbytes: int, count: int, times: list[float]
) -> None:
    median = statistics.median(times)
    print(
        f"{name:9s} {count:3d} tensors {nbytes / 1e6:6.1f} MB  {options.kv_store} "
        f"{options.workers}w {options.servers}s  {how:10s}  median {median:7.2f} ms  "
        f"(min {min(times):.2f}, max {max(times):.2f}, {len(times)} rounds)  "
        f"{2 * nbytes * options.workers / median / 1e6:.2f} GB/s",
        flush=True,
    )


def check(weights: list, outs: list, workers: int, rounds: int) -> None:  # type: ignore[type-arg]
    """The same rounds in NumPy must give the same bits."""
    import numpy as np

    total = []
    for rank in range(workers):
        rng = np.random.default_rng(rank)
        gradients = [rng.standard_normal(weight.shape, np.float32) for weight in weights]
        total = gradients if rank == 0 else [a + b for a, b in zip(total, gradients, strict=True)]
    for weight, gradient, out in zip(weights, total, outs, strict=True):
        velocity = np.zeros_like(weight)
        for _ in range(rounds):
            velocity = velocity * np.float32(0.9) - gradient * np.float32(1e-3)
            weight = weight + velocity
        if not np.array_equal(weight, out):
            raise SystemExit("the servers' weights differ from NumPy's")


if __name__ == "__main__":
    sys.exit(main())
