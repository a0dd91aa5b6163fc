"""Growing tables: how long a call takes, and what many ids take of the memory.

``python benchmarks/tables.py``: first times of pulls and pushes of 50,000 ids to a table of a
million rows of 64 float32 with SGD and momentum. Then, in a process of its own, ten million random
64-bit ids go through a table with room for a million rows, and the most memory that the process
ever had is compared with what the table promises. A table that keeps more than it promises, or that
takes more memory than that and ``ALLOWANCE``, ends with an error. Linux only.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import kvstore as mx  # noqa: E402

Ids = np.ndarray[Any, np.dtype[np.uint64]]

ALLOWANCE_MB = 64
"""For a batch and its rows, and for what evicting needs for a moment."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only-memory", action="store_true", help="the second part, right here")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    if options.only_memory:
        return measure_memory(options)
    measure_calls(options)
    sys.stdout.flush()
    return subprocess.run([sys.executable, *sys.argv, "--only-memory"], check=False).returncode


def new_table(options: argparse.Namespace) -> mx.Table:
    sgd = mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9)
    return mx.create("local").create_table(
        "user", options.dim, optimizer=sgd, capacity=options.capacity
    )


def batches(random: np.random.Generator, number: int, size: int) -> Iterable[Ids]:
    """Random ids; it is unlikely that one comes twice."""
    for start in range(0, number, size):
        yield random.integers(0, 2**64, min(size, number - start), dtype=np.uint64)


def measure_calls(options: argparse.Namespace) -> None:
    random = np.random.default_rng(1)
    table, size = new_table(options), options.batch
    known = np.concatenate(list(batches(random, options.capacity, size)))
    for start in range(0, len(known), size):
        table.pull(known[start : start + size])
    rows = np.ones((size, options.dim), np.float32)
    rounds = range(options.rounds)
    there = [random.choice(known, size, replace=False) for _ in rounds]
    repeated = [random.choice(known, size) for _ in rounds]
    for what, call, calls in (
        ("pull, all rows there", lambda ids: table.pull(ids, out=rows), there),
        ("pull without touching", lambda ids: table.pull(ids, out=rows, touch=False), there),
        ("push, all rows there", lambda ids: table.push(ids, rows), there),
        ("push, repeated ids", lambda ids: table.push(ids, rows), repeated),
        (
            "pull, each id new, and a row goes for it",
            lambda ids: table.pull(ids, out=rows),
            batches(random, size * options.rounds, size),
        ),
    ):
        report(what, size, call, calls)


def report(what: str, size: int, call: Callable[[Ids], None], calls: Iterable[Ids]) -> None:
    times = []
    for ids in calls:
        began = time.perf_counter()
        call(ids)
        times.append(1e3 * (time.perf_counter() - began))
    print(
        f"{what:41s} {size} ids: median {statistics.median(times):5.1f} ms "
        f"({min(times):.1f} to {max(times):.1f}, {len(times)} rounds)"
    )


def measure_memory(options: argparse.Namespace) -> int:
    random = np.random.default_rng(2)
    table, rows = new_table(options), np.ones((options.batch, options.dim), np.float32)
    before_mb = peak_mb()
    began = time.perf_counter()
    for ids in batches(random, options.ids, options.batch):
        table.pull(ids, out=rows[: len(ids)])
        table.push(ids, rows[: len(ids)])
    seconds = time.perf_counter() - began
    seen = table.statistics()
    used_mb, limit_mb = peak_mb() - before_mb, (seen.limit_bytes or 0) / 1e6
    print(
        f"{options.ids} ids pulled and pushed in {seconds:.1f} s; {seen.rows} rows, "
        f"{seen.evicted} evicted"
    )
    print(
        f"the table keeps {seen.nbytes / 1e6:.0f} MB of at most {limit_mb:.0f} MB; the process "
        f"grew by {used_mb:.0f} MB at the most"
    )
    holds = seen.nbytes / 1e6 <= limit_mb and used_mb <= limit_mb + ALLOWANCE_MB
    print("the limit holds" if holds else "the limit does NOT hold", flush=True)
    return 0 if holds else 1


def peak_mb() -> float:
    """The most resident memory that this process ever had."""
    status = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    sys.exit(main())
