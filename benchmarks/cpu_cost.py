"""How much processor time a gigabyte costs: ``python benchmarks/cpu_cost.py``.

User and system time of all processes of a job, scheduler and servers included, for exchanges of
ResNet-50 (push, sum, SGD with momentum, pull). Taken as the difference between a long and a short
run, so that starting and ending cancel out.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare.loop import Task
from benchmarks.compare.scripts import TRANSPORTS, parser, reports_of, task_of


def cpu_s(task: Task, environment: dict[str, str]) -> float:
    """User and system seconds of all processes of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    reports_of(task, environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    options = parser(__doc__).parse_args()
    for name, environment in TRANSPORTS:
        for arrays in ("plain",) if environment else ("plain", "empty"):
            settings = {"prepare": "no", "arrays": arrays}
            short = task_of(options, rounds=5, settings=settings)
            long = replace(short, rounds=short.rounds + (10 if options.quick else 60))
            seconds = cpu_s(long, environment) - cpu_s(short, environment)
            gigabytes = 2 * long.nbytes * long.workers * (long.rounds - short.rounds) / 1e9
            print(f"{name}, {arrays} arrays: {seconds / gigabytes:.3f} CPU s per GB", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
