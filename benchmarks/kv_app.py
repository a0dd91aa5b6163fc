"""How long a push and a pull of many keys take: ``KVWorker`` with one worker and one server.

Starts a scheduler, a server with a ``SumHandle`` and a worker on this machine. Two cases: the
same sorted 64-bit keys each time, and a tenth of them drawn anew each time. It prints the
median times of a push, of a pull and of both. Each pull is compared with the same sums in NumPy,
to the last bit. ``PS_SHM=0`` measures TCP.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

WARM_UP_ROUNDS = 3
TIMEOUT_S = 120.0


def main() -> int:
    options = arguments()
    role = os.environ.get("DMLC_ROLE")
    if role is None:
        return start_all()
    if role == "worker":
        measure(options)
    else:
        serve()
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-copy", action="store_true", help="push with copy=False")
    parser.add_argument("--no-cache", action="store_true", help="send the keys with every call")
    return parser.parse_args()


def start_all() -> int:
    """One process of each role; the worker's exit code."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    cluster = {"NUM_WORKER": 1, "NUM_SERVER": 1, "PS_ROOT_URI": "127.0.0.1", "PS_ROOT_PORT": port}
    shared = {**os.environ, **{f"DMLC_{name}": str(value) for name, value in cluster.items()}}
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), *sys.argv[1:]]
    processes = [
        subprocess.Popen(command, env={**shared, "DMLC_ROLE": role})
        for role in ("scheduler", "server", "worker")
    ]
    code = processes[-1].wait()
    for process in processes[:-1]:
        if code:
            process.terminate()
        process.wait()
    return code


def serve() -> None:
    import pslite

    def prepare(node: pslite.Postoffice) -> None:
        if node.role is pslite.Role.SERVER:
            pslite.KVServer(node, 0, pslite.SumHandle())

    node = pslite.start(prepare=prepare)
    node.finished.result()
    node.close()


def measure(options: argparse.Namespace) -> None:
    import pslite

    node = pslite.start()
    worker = pslite.KVWorker(node, 0, cache_keys=not options.no_cache)
    rng = np.random.default_rng(7)
    keys = np.unique(rng.integers(0, 2**64, options.keys, np.uint64))
    sums = np.zeros(len(keys), np.float32)

    def all_keys() -> slice:
        return slice(None)

    def some_keys() -> Any:
        return np.sort(rng.choice(len(keys), len(keys) // 10, replace=False))

    for name, draw in (("the same", all_keys), ("drawn anew", some_keys)):
        times = rounds(worker, keys, sums, draw, rng, options)
        report(name, len(keys[draw()]), times)
    node.close()


def rounds(
    worker: Any,
    keys: Any,
    sums: Any,
    draw: Callable[[], Any],
    rng: np.random.Generator,
    options: argparse.Namespace,
) -> list[tuple[float, float]]:
    """(seconds of the push, seconds of the pull) of each round after the first few."""
    times = []
    out = np.empty(len(keys[draw()]), np.float32)
    for _ in range(WARM_UP_ROUNDS + options.rounds):
        pick = draw()
        some = keys[pick]
        values = rng.standard_normal(len(some), np.float32)
        begin = time.perf_counter()
        worker.wait(worker.push(some, values, copy=not options.no_copy), TIMEOUT_S)
        pushed = time.perf_counter()
        worker.wait(worker.pull(some, out), TIMEOUT_S)
        times.append((pushed - begin, time.perf_counter() - pushed))
        sums[pick] += values
        if not np.array_equal(out, sums[pick]):
            raise SystemExit("the server's sums differ from NumPy's")
    return times[WARM_UP_ROUNDS:]


def report(name: str, num_keys: int, times: list[tuple[float, float]]) -> None:
    def median_ms(numbers: list[float]) -> float:
        return 1e3 * statistics.median(numbers)

    both = [push + pull for push, pull in times]
    print(
        f"{num_keys:9d} keys, {name:10s}  push {median_ms([push for push, _ in times]):7.2f}  "
        f"pull {median_ms([pull for _, pull in times]):7.2f}  both {median_ms(both):7.2f} ms  "
        f"(min {1e3 * min(both):.2f}, max {1e3 * max(both):.2f}, {len(times)} rounds)",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
