"""Runs a row: tries variants, then all contenders one after the other, again and again.

Keeps what was measured as plain data, ready for JSON. Runs on the caller's thread; ``say`` is
told what happens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.compare.contenders import CONTENDERS, TOLERANCE, Contender, Programs, Variant
from benchmarks.compare.figures import Verdict, slowest, verdict
from benchmarks.compare.jobs import JobFailed, Report, run_task
from benchmarks.compare.loop import Task
from benchmarks.compare.rows import Row

Say = Callable[[str], None]


@dataclass
class Result:
    """What is known of one contender in one row."""

    variant: str = ""
    tried_ms: dict[str, float] = field(default_factory=dict)
    """Each variant's median in the trial."""
    runs: list[dict[str, Any]] = field(default_factory=list)
    """One for each repetition: ``median_ms`` and the reports of all ranks."""
    missing: str | None = None
    """Why it was not measured."""
    wrong: str | None = None
    """What was wrong with its weights."""

    @property
    def medians_ms(self) -> list[float]:
        return [run["median_ms"] for run in self.runs]


@dataclass
class RowResult:
    row: Row
    results: dict[str, Result] = field(default_factory=dict)

    def verdicts(self) -> list[Verdict]:
        runs = {name: result.medians_ms for name, result in self.results.items()}
        wrong = [name for name, result in self.results.items() if result.wrong]
        return [verdict(ask, runs, wrong) for ask in self.row.asks]


def measure(row: Row, repeats: int, programs: Programs, say: Say, *, trials: bool) -> RowResult:
    """All repetitions of a row. With ``trials`` every variant is tried first, else the first
    variant of each contender is taken."""
    outcome = RowResult(row)
    chosen: dict[str, Variant] = {}
    for name in row.contenders:
        contender, result = CONTENDERS[name], Result()
        outcome.results[name] = result
        result.missing = contender.missing(programs)
        if result.missing is not None:
            say(f"  {contender.title} is left out: {result.missing}")
            continue
        variants = contender.variants if trials else contender.variants[:1]
        chosen[name] = _fastest(contender, variants, row, programs, result, say)
        result.variant = chosen[name].name
    for repeat in range(repeats):
        for name, variant in chosen.items():
            result = outcome.results[name]
            if result.missing is not None:
                continue
            contender = CONTENDERS[name]
            try:
                run = run_once(contender, variant, row.task, programs)
            except JobFailed as failure:
                result.missing = f"it failed in run {repeat + 1}: {failure}"
                result.runs.clear()
                say(f"  {contender.title}: {result.missing}")
                continue
            result.runs.append(run)
            result.wrong = result.wrong or fault_in(contender, run["reports"])
            wrong = f" WRONG: {result.wrong}" if result.wrong else ""
            say(f"  run {repeat + 1}: {contender.title}: {run['median_ms']:.2f} ms{wrong}")
    return outcome


def run_once(
    contender: Contender, variant: Variant, task: Task, programs: Programs
) -> dict[str, Any]:
    """One run in fresh processes. Raises JobFailed."""
    # What all processes of the task see, such as its number of keys, includes the variant's.
    reports = run_task(
        task, lambda task: contender.processes(programs, variant, task), read=contender.read
    )
    times_ms = slowest([report["times_ms"] for report in reports])
    return {"median_ms": statistics.median(times_ms), "reports": reports}


def fault_in(contender: Contender, reports: list[Report]) -> str | None:
    """What is wrong with the weights of a run; None when nothing is."""
    checks = [report["check"] for report in reports if "check" in report]
    for check in checks:
        if contender.exact and not check["exact"]:
            return f"the weights differ from NumPy's by up to {check['difference']:.1e}"
        if not check["difference"] <= TOLERANCE:
            return f"the weights differ from NumPy's by {check['difference']:.1e}"
    sums = {report["checksum"] for report in reports if "checksum" in report}
    if contender.exact and len(sums) > 1:
        return "the workers have different weights"
    return None


def _fastest(
    contender: Contender,
    variants: tuple[Variant, ...],
    row: Row,
    programs: Programs,
    result: Result,
    say: Say,
) -> Variant:
    """The variant with the least median in one short run of each; failing ones are left out."""
    if len(variants) == 1:
        return variants[0]
    task = replace(row.task, rounds=min(row.task.rounds, 20), check=False)
    failures = []
    for variant in variants:
        try:
            result.tried_ms[variant.name] = run_once(contender, variant, task, programs)[
                "median_ms"
            ]
        except JobFailed as failure:
            failures.append(f"{variant.name}: {failure}")
    if not result.tried_ms:
        result.missing = f"no variant of it runs: {failures[-1]}"
        say(f"  {contender.title}: {result.missing}")
        return variants[0]
    tried = ", ".join(f"{name} {ms:.1f} ms" for name, ms in result.tried_ms.items())
    say(f"  {contender.title}, tried shortly: {tried}")
    for sentence in failures:
        say(f"  {contender.title}, {sentence}")
    return min(
        (variant for variant in variants if variant.name in result.tried_ms),
        key=lambda variant: result.tried_ms[variant.name],
    )
