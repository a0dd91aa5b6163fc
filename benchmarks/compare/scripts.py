"""What the small scripts of this folder share: a run of our stores, and how it is printed."""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks.compare.figures import Summary, slowest, summary
from benchmarks.compare.jobs import JobFailed, Report, launched, run_task
from benchmarks.compare.loop import Task

MODULE = "benchmarks.compare.run_stores"
SHARED: dict[str, str] = {}
TCP = {"PS_SHM": "0"}
TRANSPORTS = (("shared memory", SHARED), ("TCP", TCP))
"""Name and environment. Shared memory is used by itself where it can be."""


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options that all of them have."""
    made = argparse.ArgumentParser(description=(doc or "").strip().splitlines()[0])
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--servers", type=int, default=1)
    made.add_argument("--quick", action="store_true", help="few rounds: only to see that it runs")
    return made


def task_of(options: argparse.Namespace, *, rounds: int, **fields: object) -> Task:
    """A task without a check, with as many rounds as the options allow."""
    rounds = min(rounds, 3) if options.quick else rounds
    task = Task(workers=options.workers, servers=options.servers, rounds=rounds, check=False)
    return replace(task, **fields)  # type: ignore[arg-type]


def reports_of(task: Task, environment: dict[str, str]) -> list[Report]:
    """One run of our stores in fresh processes, on this machine; ends the script if it fails."""
    try:
        return run_task(task, lambda task: launched(MODULE, task, environment))
    except JobFailed as failure:
        raise SystemExit(f"a run failed: {failure}") from None


def exchange_ms(task: Task, environment: dict[str, str]) -> Summary:
    """The slowest worker's milliseconds of a round: median, least and greatest."""
    reports = reports_of(task, environment)
    return summary(slowest([report["times_ms"] for report in reports]))


def holds(ratio: float, asked: float, *, at_least: bool) -> str:
    """A sentence about a ratio, such as ``0.83 (asked: at least 0.8, holds)``."""
    fine = ratio >= asked if at_least else ratio <= asked
    word = "at least" if at_least else "at most"
    return f"{ratio:.2f} (asked: {word} {asked:g}, {'holds' if fine else 'does NOT hold'})"
