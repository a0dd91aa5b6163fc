"""How long a job takes to be ready: ``python benchmarks/startup_time.py``.

From the moment at which the launcher is started to the moment at which the last worker has its
store, on this machine: several interpreters start, import the package, and find each other.
Prints the median of a few runs, after one that is not counted.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]

WORKER = """
import time
import kvstore as mx
store = mx.kvstore.create("dist_sync")
print("ready", time.time())
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


def seconds_until_ready(num_workers: int, num_servers: int) -> tuple[float, float]:
    """(until the last worker is ready, until everything has ended again), in seconds."""
    command = [sys.executable, str(ROOT / "tools" / "launch.py"), "--launcher", "local"]
    command += ["-n", str(num_workers), "-s", str(num_servers), sys.executable, "-c", WORKER]
    # The wall clock, because it is read in several processes.
    begin = time.time()
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    ended_s = time.time() - begin
    ready = [float(line.rpartition(" ")[2]) for line in run.stdout.splitlines() if "ready" in line]
    if len(ready) != num_workers:
        raise SystemExit(f"{len(ready)} of {num_workers} workers were ready:\n{run.stdout}")
    return max(ready) - begin, ended_s


def main() -> int:
    options = arguments()
    seconds_until_ready(options.workers, options.servers)
    times = [seconds_until_ready(options.workers, options.servers) for _ in range(options.runs)]
    for what, of_runs in zip(("ready", "over"), zip(*times, strict=True), strict=True):
        print(
            f"{options.workers} workers, {options.servers} servers: {what} after median "
            f"{statistics.median(of_runs):.2f} s (min {min(of_runs):.2f}, max {max(of_runs):.2f}, "
            f"{options.runs} runs)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
