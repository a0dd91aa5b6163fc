"""How the status of a job is shown: as tables, as JSON, and in one line. Pure.

A ``pslite.Survey`` has counters; rates of traffic come from two of them, the later one and the
one before. Used by ``__init__.py``; ``docs/status.md`` explains each column to its reader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pslite.wire.survey import NodeStatus, Progressed, Survey

_SLOWER = 0.9
"""A worker is named as slower than the others below this share of the fastest one's rate, ..."""
_LESS_WAIT = 0.1
"""... or where it waits so much less than the others: they wait for it."""
_TRAFFIC = ("sent_bytes", "received_bytes", "shared_bytes")
_COUNTS = ("B", "kB", "MB", "GB", "TB", "PB")

# -- what is to be known of two surveys -------------------------------------------------------


class Summary(NamedTuple):
    """A job in a few numbers."""

    state: str
    workers_up: int
    num_workers: int
    steps: int
    """Of the worker that has come farthest."""
    steps_per_s: float
    """Of the slowest worker."""
    samples_per_s: float
    """Of all workers together; 0 where the samples of a step are not given."""
    communication: float
    """Mean of the workers' shares, 0 to 1."""
    slowest: str
    """The worker that the others wait for, or that is behind; empty without one."""


def rates(node: NodeStatus, before: Survey | None) -> tuple[float | None, ...]:
    """Return the bytes a second of ``_TRAFFIC`` since ``before``; None where that is not known."""
    now, then = node.report, None
    if before is not None:
        then = next((each.report for each in before.nodes if each[:4] == node[:4]), None)
    if now is None or then is None or now.uptime_s <= then.uptime_s:
        return (None,) * len(_TRAFFIC)
    seconds = now.uptime_s - then.uptime_s
    # Counters fall when a peer is forgotten; nothing was sent backwards.
    return tuple(max(0, getattr(now, name) - getattr(then, name)) / seconds for name in _TRAFFIC)


def summarise(survey: Survey) -> Summary:
    """The job in a few numbers."""
    workers = [node for node in survey.nodes if node.role == "worker"]
    found = [progress for _, progress in _trained(workers)]
    return Summary(
        state=survey.state,
        workers_up=sum(node.state in ("waiting", "running") for node in workers),
        num_workers=survey.num_workers,
        steps=max((each.steps for each in found), default=0),
        steps_per_s=min((each.steps_per_s for each in found), default=0.0),
        samples_per_s=sum(each.samples_per_s for each in found),
        communication=sum(each.communication for each in found) / len(found) if found else 0.0,
        slowest=_slowest(workers),
    )


def _trained(workers: Sequence[NodeStatus]) -> list[tuple[NodeStatus, Progressed]]:
    return [
        (node, node.report.progress)
        for node in workers
        if node.report is not None and node.report.progress is not None
    ]


def _slowest(workers: Sequence[NodeStatus]) -> str:
    """Who is silent while others are not; else who is behind; else who waits least for others."""
    silent = [node for node in workers if node.state == "silent"]
    if silent and len(workers) > 1:
        return max(silent, key=lambda node: node.silent_s).name
    trained = [(node, each) for node, each in _trained(workers) if each.steps]
    if len(trained) < 2:
        return ""
    fastest = max(each.steps_per_s for _, each in trained)
    node, each = min(trained, key=lambda pair: pair[1].steps_per_s)
    if each.steps_per_s < _SLOWER * fastest:
        return node.name
    shares = sorted(each.communication for _, each in trained)
    node, each = min(trained, key=lambda pair: pair[1].communication)
    return node.name if shares[1] - shares[0] >= _LESS_WAIT else ""


# -- one line ---------------------------------------------------------------------------------


def as_line(summary: Summary) -> str:
    """The job in one line of some 80 characters."""
    parts = [f"{summary.workers_up}/{summary.num_workers} workers"]
    if summary.state != "running":
        parts.append(summary.state)
    if summary.steps:
        parts.append(f"step {summary.steps}")
        parts.append(f"{_number(summary.steps_per_s)} steps/s")
        if summary.samples_per_s:
            parts.append(f"{_number(summary.samples_per_s)} samples/s")
        parts.append(f"{_share(summary.communication)} communication")
    if summary.slowest:
        parts.append(f"slowest: {summary.slowest}")
    return ", ".join(parts)


# -- tables -----------------------------------------------------------------------------------


def as_table(survey: Survey, before: Survey | None) -> str:
    """The job as text of several lines; the last one ends without a line end."""
    sections = [_headline(survey), _grid(_NODE_HEAD, [_row(n, before) for n in survey.nodes], 2)]
    workers = [node for node in survey.nodes if node.role == "worker"]
    trained = _trained(workers)
    if trained:
        rows = [_worker_row(node, progress) for node, progress in trained]
        sections.append(_grid(_WORKER_HEAD, rows, 1))
    remarks = _remarks(survey)
    if remarks:
        sections.append("\n".join(remarks))
    slowest = summarise(survey).slowest
    if slowest:
        sections.append(f"slowest: {slowest}")
    return "\n\n".join(sections)


def _headline(survey: Survey) -> str:
    job = f"job {survey.job}" if survey.job else "a job without an id"
    text = f"{job}, version {survey.version}: {survey.state}"
    if survey.state == "gathering":
        missing = ", ".join(survey.missing) or "none"
        return f"{text} since {_seconds(survey.waited_s)}, {missing} missing"
    counts = [
        f"{sum(node.role == role and node.state == 'running' for node in survey.nodes)} of "
        f"{number} {role}{'' if number == 1 else 's'}"
        for role, number in (("worker", survey.num_workers), ("server", survey.num_servers))
    ]
    return f"{text}, {' and '.join(counts)} answer"


_NODE_HEAD = (
    *("node", "host", "pid", "version", "state", "up"),
    *("sent", "/s", "received", "/s", "shared", "/s", "requests", "rounds", "jobs"),
)
_WORKER_HEAD = ("", "steps", "steps/s", "samples", "samples/s", "communication", "last step")


def _row(node: NodeStatus, before: Survey | None) -> list[str]:
    report = node.report
    if report is None:
        return [node.name, node.host, str(node.pid), "", node.state]
    traffic = zip((getattr(report, name) for name in _TRAFFIC), rates(node, before), strict=True)
    return [
        *(node.name, node.host, str(node.pid), report.version, node.state),
        _seconds(report.uptime_s),
        *(_bytes(count) for pair in traffic for count in pair),
        *(str(report.requests), str(report.open_rounds), str(report.pool_jobs)),
    ]


def _worker_row(node: NodeStatus, progress: Progressed) -> list[str]:
    return [
        node.name,
        str(progress.steps),
        _number(progress.steps_per_s),
        str(progress.samples) if progress.samples else "",
        _number(progress.samples_per_s) if progress.samples else "",
        _share(progress.communication),
        f"{_seconds(progress.since_step_s)} ago" if progress.steps else "",
    ]


def _grid(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Lay out columns of equal width: texts to the left, numbers to the right."""
    lines = [[*row, *[""] * (len(head) - len(row))] for row in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _remarks(survey: Survey) -> list[str]:
    """Return who is silent or lost, and what is waited for, the longest first."""
    lines = []
    for node in survey.nodes:
        where = f"{node.name} (pid {node.pid} on {node.host})"
        if node.state == "silent":
            lines.append(f"{where} does not answer; silent for {_seconds(node.silent_s)}")
        elif node.state == "lost":
            lines.append(f"{where} is lost: {node.reason}")
    found = [(wait, node) for node in survey.nodes if node.report for wait in node.report.waits]
    for wait, node in sorted(found, key=lambda pair: -pair[0].waited_s):
        what = f"round {wait.round} of {wait.what}" if wait.round else wait.what
        waited = f"has waited {_seconds(wait.waited_s)}"
        if wait.missing:
            lines.append(f"{what} {waited} for {', '.join(wait.missing)}")
        else:
            lines.append(f"{node.name} {waited}: {what}")
    return lines


# -- JSON -------------------------------------------------------------------------------------


def as_json(survey: Survey, before: Survey | None) -> dict[str, Any]:
    """The job as plain data: all fields of the survey, with rates and a summary."""
    fields: dict[str, Any] = _plain(survey)
    for node, shown in zip(survey.nodes, fields["nodes"], strict=True):
        if shown["report"] is not None:
            per_s = zip(_TRAFFIC, rates(node, before), strict=True)
            shown["report"] |= {f"{name}_per_s": rate for name, rate in per_s}
    return {**fields, "summary": summarise(survey)._asdict()}


def _plain(value: Any) -> Any:
    if hasattr(value, "_asdict"):
        return {name: _plain(each) for name, each in value._asdict().items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


# -- numbers for people -----------------------------------------------------------------------


def _bytes(count: float | None) -> str:
    """``1.5 MB``: three digits, by powers of 1000."""
    if count is None:
        return ""
    unit = 0
    while count >= 999.5 and unit < len(_COUNTS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{_number(count)} {_COUNTS[unit]}"


def _number(value: float) -> str:
    """Three digits, and all of them above."""
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"


def _share(share: float) -> str:
    return f"{share * 100:.0f}%"


def _seconds(seconds: float) -> str:
    """``12 s``, ``3:05 min`` or ``2:03:59 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"
