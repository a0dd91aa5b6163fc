"""What ``import kvstore`` costs beyond its libraries: ``python benchmarks/import_time.py``.

Each run is a fresh interpreter that imports numpy, zmq and msgpack first and then the package;
printed are the medians. A first run, which is not counted, compiles and fills the file cache.
Exits with 1 when the package costs more than the limit.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]

TIMED_IMPORTS = """
import importlib, sys, time
def milliseconds(*modules):
    begin = time.perf_counter()
    for module in modules:
        importlib.import_module(module)
    return 1e3 * (time.perf_counter() - begin)
print(milliseconds("numpy", "zmq", "msgpack"), milliseconds(*sys.argv[1:]))
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--limit-ms", type=float, default=50.0, help="for import kvstore")
    return parser.parse_args()


def measure(modules: list[str], runs: int) -> tuple[list[float], list[float]]:
    """(times of the libraries, times of ``modules`` after them), in milliseconds."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TIMED_IMPORTS, *modules]
    pairs = []
    for _ in range(runs + 1):
        run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        pairs.append([float(number) for number in run.stdout.split()])
    libraries, package = zip(*pairs[1:], strict=True)
    return list(libraries), list(package)


def main() -> int:
    options = arguments()
    cost_ms = 0.0
    for modules in (
        ["kvstore"],
        ["kvstore.stores.local.store"],
        ["kvstore.stores.dist.store", "kvstore.stores.dist.node", "pslite.van.zmq.van"],
    ):
        libraries, package = measure(modules, options.runs)
        print(
            f"import {', '.join(modules)}: median {statistics.median(package):.1f} ms "
            f"(min {min(package):.1f}, max {max(package):.1f}, {options.runs} runs) after "
            f"numpy, zmq, msgpack: median {statistics.median(libraries):.1f} ms"
        )
        cost_ms = cost_ms or statistics.median(package)
    if cost_ms > options.limit_ms:
        print(f"import kvstore costs more than {options.limit_ms:g} ms", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
