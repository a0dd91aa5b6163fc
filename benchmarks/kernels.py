"""What the compiled kernels gain: ``python benchmarks/kernels.py``.

Sums and updates as servers and ``local`` stores do them, by NumPy in blocks and by each set of
kernels that this processor has: milliseconds of one call, the least of several, and the ratio.
The results are compared, bit for bit; a difference ends the command with an error. With
``--threads 2`` so many threads do the same at the same time, on arrays of their own, and the time
is that of the slowest: NumPy's take turns with the interpreter's lock between operations.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from kvstore import optimizer
from kvstore.arrays.cpu import kernels
from kvstore.arrays.cpu.sums import Workspace, apply_round
from kvstore.arrays.dtypes import bfloat16
from kvstore.optimizer import Optimizer
from kvstore.optimizer.states import create_state

SGD = optimizer.create("sgd", learning_rate=1e-3, momentum=0.9)
ADAM = optimizer.create("adam", learning_rate=1e-3)
WARM_UP = 2

#: What is done, to what, with which optimizer, with how many contributions.
ROWS: tuple[tuple[str, str, Optimizer | None, int], ...] = (
    ("sum of 2, float32", "f4", None, 2),
    ("sum of 4, float32", "f4", None, 4),
    ("sum of 2, SGD with momentum, float32", "f4", SGD, 2),
    ("sum of 4, SGD with momentum, float32", "f4", SGD, 4),
    ("sum of 2, Adam, float32", "f4", ADAM, 2),
    ("sum of 2, SGD with momentum, float64", "f8", SGD, 2),
    ("sum of 4, float16", "f2", None, 4),
    ("sum of 2, SGD with momentum, float16", "f2", SGD, 2),
    ("sum of 4, bfloat16", "bfloat16", None, 4),
    ("sum of 2, SGD with momentum, bfloat16", "bfloat16", SGD, 2),
)


class Work:
    """One row's arrays, of one thread."""

    def __init__(self, dtype: str, chosen: Optimizer | None, count: int, elements: int) -> None:
        draw = np.random.default_rng(1)
        kind = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)
        self.chosen = chosen
        self.weight, *self.values = (
            draw.standard_normal(elements, np.float32).astype(kind) for _ in range(count + 1)
        )
        self.state = () if chosen is None else create_state(chosen, self.weight)
        self.workspace = Workspace()
        self.count = 0

    def step(self) -> None:
        self.count += 1
        apply_round(self.weight, self.values, self.chosen, self.state, self.count, self.workspace)


def best_ms(works: Sequence[Work], steps: int, repeats: int) -> float:
    """Milliseconds of a step of the slowest thread, the least of some repetitions."""
    found = []
    for _ in range(WARM_UP + repeats):
        if len(works) == 1:
            began = time.thread_time()  # not disturbed by what else the machine does
            repeat(works[0].step, steps)
            found.append(time.thread_time() - began)
        else:
            threads = [threading.Thread(target=repeat, args=(work.step, steps)) for work in works]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found.append(time.perf_counter() - began)
    return 1e3 * min(found[WARM_UP:]) / steps


def repeat(step: Callable[[], None], steps: int) -> None:
    for _ in range(steps):
        step()


def measure(
    row: tuple[str, str, Optimizer | None, int], elements: int, options: argparse.Namespace
) -> str:
    """One line of the table."""
    text, *rest = row
    steps = max(1, options.elements // elements // 4)
    module = kernels.native()
    times: dict[str, float] = {}
    expected: list[bytes] = []
    for name in ("numpy", *(() if module is None else module.INSTRUCTIONS)):
        works = [Work(*rest, elements) for _ in range(options.threads)]  # type: ignore[arg-type]
        chosen = None if name == "numpy" else module
        if chosen is not None:
            chosen.use(name)
        with mock.patch.object(kernels, "native", return_value=chosen):
            times[name] = best_ms(works, steps, options.repeats)
        results: list[np.ndarray[Any, Any]] = [works[0].weight, *works[0].state]
        found = [array.tobytes() for array in results]
        expected = expected or found
        if found != expected:
            raise SystemExit(f"{text}: {name} gives other bits than NumPy")
    ours = ", ".join(
        f"{name} {took:.3g} ({times['numpy'] / took:.2f} times as fast)"
        for name, took in times.items()
        if name != "numpy"
    )
    return f"{elements:>10,d}  {text:40s} NumPy {times['numpy']:.3g} ms  {ours}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=25_000_000, help="of the larger arrays")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    if kernels.native() is None:
        print("there are no compiled kernels: not built, or KVSTORE_NATIVE=0", file=sys.stderr)
        return 1
    for elements in (65_536, options.elements):
        for row in ROWS:
            print(measure(row, elements, options), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
