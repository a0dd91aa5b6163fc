"""What people read: the figures of a row, and the table of all asks. Pure: data in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from benchmarks.compare.contenders import CONTENDERS
from benchmarks.compare.figures import Verdict, significant, summary
from benchmarks.compare.measure import Result, RowResult
from benchmarks.compare.rows import Row

HEAD = ("work", "ours", "ms", "compared with", "ms", "times as fast", "asked", "holds")


def row_title(row: Row) -> str:
    """The work with its size."""
    if not {"keys", "rows"}.isdisjoint(row.task.settings):
        return row.title
    shapes = row.task.shapes
    size_mb = 4 * sum(prod(shape) for shape in shapes) / 1e6
    tensors = f"{len(shapes)} tensor{'s' if len(shapes) > 1 else ''}"
    cluster = f"{row.task.workers} workers, {row.task.servers} server"
    cluster += "s" if row.task.servers > 1 else ""
    where = f"; {cluster}" if row.task.store.startswith("dist") else ""
    return f"{row.title} ({tensors}, {size_mb:.1f} MB{where})"


def figures_of(outcome: RowResult) -> str:
    """One line for each contender of a row."""
    lines = []
    for name, result in outcome.results.items():
        known_ms = outcome.row.known_ms.get(name)
        lines.append(f"  {CONTENDERS[name].title:24s} {_figure(result, known_ms)}")
    return "\n".join(lines)


def _figure(result: Result, known_ms: float | None) -> str:
    if not result.runs and known_ms is not None:
        return f"{significant(known_ms)} ms on another machine, years ago: no pair of ours"
    if not result.runs:
        return "not measured"
    text = f"{summary(result.medians_ms).text()} ms, {len(result.runs)} runs"
    text += f" [{result.variant}]" if result.variant else ""
    text += "".join(
        f", {part} {_part_ms(result, part)} ms" for part in ("push", "pull") if _has(result, part)
    )
    return text + (f"  WRONG: {result.wrong}" if result.wrong else "")


def _has(result: Result, part: str) -> bool:
    return f"{part}_ms" in result.runs[0]["reports"][0]


def _part_ms(result: Result, part: str) -> str:
    of_runs = [summary(run["reports"][0][f"{part}_ms"]).median for run in result.runs]
    return significant(summary(of_runs).median)


def asks_table(outcomes: Sequence[RowResult]) -> str:
    """The table of all asks as Markdown."""
    rows: list[tuple[str, ...]] = [HEAD]
    for outcome in outcomes:
        rows += [_ask_line(outcome, verdict) for verdict in outcome.verdicts()]
    return markdown(rows)


def _ask_line(outcome: RowResult, verdict: Verdict) -> tuple[str, ...]:
    ask = verdict.ask
    theirs = CONTENDERS[verdict.to].title if verdict.to in CONTENDERS else verdict.to
    return (
        outcome.row.title,
        CONTENDERS[ask.of].title,
        _median_ms(outcome, ask.of),
        theirs,
        _median_ms(outcome, verdict.to),
        "" if verdict.ratio is None else verdict.ratio.text(),
        f"{ask.ratio:g}",
        verdict.word,
    )


def _median_ms(outcome: RowResult, name: str) -> str:
    result = outcome.results.get(name)
    if result is None or not result.runs:
        known_ms = outcome.row.known_ms.get(name)
        return "" if known_ms is None else f"({significant(known_ms)}, another machine)"
    return significant(summary(result.medians_ms).median)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length, the first of which is the head, with columns in line."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "| " + " | ".join("-" * width for width in widths) + " |")
    return "\n".join(lines)
