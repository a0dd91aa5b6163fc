"""What a standby costs: ``sudo python benchmarks/standby.py``.

Times an exchange of a model (pushpull; SGD with momentum on the servers) with a standby for each
server and without, in turns. First all processes are on this machine, then on machines of their
own: network namespaces with a worker, a server, and the standby of another server each. Prints the
medians of both and the median of the ratios of neighbouring runs. In the namespaces, values travel
over TCP, and ``--gbit`` limits what a machine sends and receives (0: no limit). The processors are
the same in both cases, so a standby takes them from the others there, too. Without root or ``ip``,
only the first part runs. Figures: docs/recovery.md.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare.figures import slowest
from benchmarks.compare.jobs import JobFailed, launched, run_task
from benchmarks.compare.loop import Task
from benchmarks.compare.scripts import MODULE
from benchmarks.network import measure


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", default="2", help="workers, with as many servers (2)")
    parser.add_argument("--models", default="resnet50,resnet110,lenet")
    parser.add_argument("--gbit", default="0,1", help="limits of a machine; 0: none")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    return parser.parse_args()


def main() -> int:
    options = arguments()
    has_namespaces = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
    for count, model in product(map(int, options.workers.split(",")), options.models.split(",")):
        task = Task(model, workers=count, servers=count, rounds=options.rounds)
        name = f"{model}, {count} workers, {count} servers"
        compare(f"{name}, one machine", options.pairs, partial(here, task))
        for gbit in map(float, options.gbit.split(",") if has_namespaces else ()):
            limit = f" with {gbit:g} Gbit/s" if gbit else ""
            compare(f"{name}, {count} machines{limit}", options.pairs, partial(apart, task, gbit))
    return 0


def compare(what: str, pairs: int, time_of: Callable[[bool], float]) -> None:
    """Measure without and with standbys in turns; print both."""
    without, with_them = [], []
    for _ in range(pairs):
        without.append(time_of(False))
        with_them.append(time_of(True))
    ratios = [one / other for one, other in zip(with_them, without, strict=True)]
    print(
        f"{what}: {statistics.median(without):.2f} ms, with standbys "
        f"{statistics.median(with_them):.2f} ms, ratio {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} to {max(ratios):.2f}, {pairs} pairs)",
        flush=True,
    )


def here(task: Task, has_standbys: bool) -> float:
    """Return the median of an exchange in ms; all processes are on this machine."""
    options = ("--standbys", "1") if has_standbys else ()
    try:
        reports = run_task(task, lambda task: launched(MODULE, task, {}, options))
    except JobFailed as failure:
        raise SystemExit(f"a run failed: {failure}") from None
    return statistics.median(slowest([report["times_ms"] for report in reports]))


def apart(task: Task, gbit: float, has_standbys: bool) -> float:
    """Return the median of an exchange in ms between network namespaces."""
    settings = {"PS_SECURITY": "plain", "PS_STANDBYS": str(int(has_standbys))}
    return measure(task, gbit, 0.0, settings).median


if __name__ == "__main__":
    sys.exit(main())
