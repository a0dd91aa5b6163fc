"""``kvstore status``: show what the nodes of a running job do.

The command asks as an observer (``pslite/apps/observer.py``), which does not join the job. It
prints the answer as tables, as JSON or in one line; ``docs/status.md`` explains the columns. A
``Survey`` has counters, so a rate of traffic needs two surveys. The exit code is 0 on success, 1 if
no answer comes or the key is wrong, and 2 if the command or a setting is invalid. An error is one
sentence. With ``--kubernetes``, the same command runs in the scheduler's pod, which has the address
and the key.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstore.launch.backends.kubernetes.cluster import ClusterError, connect
from kvstore.launch.job.registry import SHARED_NAME, FoundJob, running_jobs, shared_directory
from kvstore.launch.options import LaunchError
from pslite import Config, Observer, Survey, __version__
from pslite.errors import ConfigError, DeadlineError, PSError
from pslite.wire.survey import NodeStatus, Progressed, StandbyStatus

RATE_S = 1.0
"""Traffic is measured over this time if the command asks only once."""
WATCH_S = 2.0
LEAST_WATCH_S = 0.5
"""The shortest time between two surveys: the scheduler repeats a younger one."""
_CLEAR = "\x1b[H\x1b[2J"
_SLOWER = 0.9
"""A worker is reported as slow if its rate is below this share of the fastest worker's, ..."""
_LESS_WAIT = 0.1
"""... or if it waits this much less than the others, because they wait for it."""
_TOGETHER_S = 2.0
"""Workers whose first steps ended within this time have begun together."""
_LONGEST_AVERAGE_S, _AVERAGED_STEPS = 20.0, 10
"""A worker's averages are over no longer time than these (``stores/dist/progress.py``)."""
_TRAFFIC = ("sent_bytes", "received_bytes", "shared_bytes")
_COUNTS = ("B", "kB", "MB", "GB", "TB", "PB")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore status",
        description="Show what the nodes of a running job do: roles, ranks, traffic, queues, "
        "what waits for whom, steps and samples per second. The job does not notice.",
        epilog="Without a key only a job of this machine without a key can be asked. "
        "docs/status.md explains the columns.",
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="ADDR",
        help="host:port of the scheduler (default: DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT, or "
        "else your job on this machine or on the cluster); with --kubernetes the job's name",
    )
    parser.add_argument(
        "--key-file",
        metavar="FILE",
        help="file with the job's key (default: PS_JOB_KEY_FILE, or the key of your job)",
    )
    parser.add_argument(
        "--security",
        choices=("plain", "curve"),
        help="the job's PS_SECURITY (default: PS_SECURITY, or curve)",
    )
    parser.add_argument(
        "--kubernetes", action="store_true", help="ask a job in the current Kubernetes cluster"
    )
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        help="its Kubernetes namespace (default: that of the context)",
    )
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--json", action="store_true", help="print JSON, with --watch one line each time"
    )
    shape.add_argument("--line", action="store_true", help="print one line")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_interval,
        const=WATCH_S,
        metavar="SECONDS",
        help=f"repeat after this many seconds, until the job ends or Ctrl-C (default: {WATCH_S:g})",
    )
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not LEAST_WATCH_S <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"expected at least {LEAST_WATCH_S:g} seconds, got {text}")
    return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    ``arguments`` are those of this process by default.
    """
    options = _parser().parse_args(arguments)
    try:
        if options.kubernetes:
            return _ask_in_pod(options)
        return _run(options)
    except LaunchError as error:
        return _said(error, error.exit_code)
    except (PSError, ClusterError) as error:
        return _said(error, 1)
    except KeyboardInterrupt:
        return 0 if options.watch is not None else 130
    except BrokenPipeError:  # as of `| head`: the reader is gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(options: argparse.Namespace) -> int:
    try:
        observer = _observer(options)
    except ConfigError as error:  # no scheduler was asked: it is the command, or a setting
        return _said(error, 2)
    with observer:
        before, survey = None, observer.ask()
        if options.watch is not None:
            return _watch(observer, survey, options)
        if not options.line and survey.state != "gathering":
            time.sleep(RATE_S)
            before, survey = survey, observer.ask()
        print(_shown(survey, before, options, indent=2))
    return 0


def _ask_in_pod(options: argparse.Namespace) -> int:
    """Run this command in the scheduler's pod.

    Raises ``LaunchError`` and ``ClusterError``.
    """
    cluster = connect(options.namespace)
    words = [flag for flag in ("json", "line") if getattr(options, flag)]
    command = ["python", "-m", "kvstore.status", *(f"--{flag}" for flag in words)]
    if options.watch is not None:
        command.append(f"--watch={options.watch:g}")
    return cluster.run_in(cluster.scheduler_pod(options.address), command)


def _said(error: Exception, code: int) -> int:
    print(f"kvstore status: {error}", file=sys.stderr)
    return code


def _observer(options: argparse.Namespace) -> Observer:
    """Return the connection to the job's scheduler.

    If no key is given, use that of this user's job, if the launcher runs it here. Raises
    ``ConfigError`` and ``DeadlineError``.
    """
    given: dict[str, Any] = {}
    if options.key_file is not None:
        given.update(job_key_file=options.key_file, job_key_fd=None)
    if options.security is not None:
        given.update(security=options.security)
    config, _ = Config.from_env(**given)
    address, job = options.address, None
    if not config.job_key_file and config.job_key_fd is None:
        jobs = running_jobs()
        if address is None and not config.root_uri:
            address = _only_address(jobs)
        job = next((job for job in jobs if job.address == address), None)
    if job is not None:
        given.setdefault("security", job.security)
        config, _ = Config.from_env(**given, job_key_file=job.key_file)
    try:
        return Observer(address, config=config)
    except ConfigError:
        if job is None or os.path.exists(job.key_file):
            raise
        raise DeadlineError(f"the job at {address} has just ended") from None


def _only_address(jobs: Sequence[FoundJob]) -> str:
    """Return the address of this user's only job."""
    addresses = [job.address for job in jobs]
    if len(addresses) > 1:
        raise ConfigError(
            f"you run {len(addresses)} jobs; name the scheduler of one: {', '.join(addresses)}"
        )
    if not addresses:
        raise DeadlineError(
            "found no job of yours that kvstore-launch started, neither in "
            f"{tempfile.gettempdir()} (TMPDIR) nor in {shared_directory()} ({SHARED_NAME}); name "
            "its scheduler as HOST:PORT, or add --kubernetes if it runs there"
        )
    return addresses[0]


def _watch(observer: Observer, survey: Survey, options: argparse.Namespace) -> int:
    before: Survey | None = None
    is_table = not (options.json or options.line)
    while True:
        shown = _shown(survey, before, options, indent=None)
        if is_table:
            shown = _CLEAR + shown if sys.stdout.isatty() else f"{shown}\n"
        print(shown, flush=True)
        time.sleep(options.watch)
        try:
            before, survey = survey, observer.ask()
        except PSError as error:
            return _said(error, 0)


def _shown(
    survey: Survey, before: Survey | None, options: argparse.Namespace, indent: int | None
) -> str:
    if options.json:
        return json.dumps(as_json(survey, before), indent=indent)
    if options.line:
        return as_line(summarise(survey))
    return as_table(survey, before)


# -- numbers from two surveys -----------------------------------------------------------------


class Summary(NamedTuple):
    """A job in a few numbers."""

    state: str
    workers_up: int
    num_workers: int
    steps: int
    """Steps of the worker that is furthest ahead."""
    steps_per_s: float
    """The rate of the slowest worker."""
    samples_per_s: float
    """The rate of all workers together; 0 if the samples of a step are unknown."""
    communication: float
    """Mean of the workers' shares, 0 to 1."""
    slowest: str
    """The worker that the others wait for, or that is behind; empty without one."""


def rates(node: NodeStatus, before: Survey | None) -> tuple[float | None, ...]:
    """Return the bytes per second of each of ``_TRAFFIC`` since ``before``, or None."""
    now, then = node.report, None
    if before is not None:
        then = next((each.report for each in before.nodes if each[:4] == node[:4]), None)
    if now is None or then is None or now.uptime_s <= then.uptime_s:
        return (None,) * len(_TRAFFIC)
    seconds = now.uptime_s - then.uptime_s
    # Counters fall when a peer is forgotten, but a rate is never negative.
    return tuple(max(0, getattr(now, name) - getattr(then, name)) / seconds for name in _TRAFFIC)


def summarise(survey: Survey) -> Summary:
    """Return the job in a few numbers."""
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
    """Return the worker that is silent, or else is behind, or else waits least."""
    silent = [node for node in workers if node.state == "silent"]
    if silent and len(workers) > 1:
        return max(silent, key=lambda node: node.silent_s).name
    trained = [(node, each) for node, each in _trained(workers) if each.steps]
    if len(trained) < 2 or not _are_comparable([each for _, each in trained]):
        return ""
    fastest = max(each.steps_per_s for _, each in trained)
    node, each = min(trained, key=lambda pair: pair[1].steps_per_s)
    if each.steps_per_s < _SLOWER * fastest:
        return node.name
    shares = sorted(each.communication for _, each in trained)
    node, each = min(trained, key=lambda pair: pair[1].communication)
    return node.name if shares[1] - shares[0] >= _LESS_WAIT else ""


def _are_comparable(found: Sequence[Progressed]) -> bool:
    """Return whether the averages of all workers are of the same time.

    They are not if one has begun later, in place of a lost one: the others' contain the pause.
    """
    times = [each.trained_s for each in found]
    has_averaged = min(times) >= _LONGEST_AVERAGE_S and all(
        each.steps > _AVERAGED_STEPS for each in found
    )
    return has_averaged or max(times) - min(times) < _TOGETHER_S


# -- one line ---------------------------------------------------------------------------------


def as_line(summary: Summary) -> str:
    """Return the job in one line of about 80 characters."""
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
    """Return the job as text of several lines; the last one ends without a line end."""
    sections = [_headline(survey), _grid(_NODE_HEAD, [_row(n, before) for n in survey.nodes], 2)]
    workers = [node for node in survey.nodes if node.role == "worker"]
    trained = _trained(workers)
    if trained:
        rows = [_worker_row(node, progress) for node, progress in trained]
        sections.append(_grid(_WORKER_HEAD, rows, 1))
    for lines in (list(map(_standby_line, survey.standbys)), _remarks(survey)):
        if lines:
            sections.append("\n".join(lines))
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


def _standby_line(standby: StandbyStatus) -> str:
    if standby.state == "none":
        return f"server {standby.server}: no standby"
    which = f"server {standby.server}: standby pid {standby.pid} on {standby.host}"
    return which if standby.state == "ready" else f"{which}, is being filled"


def _remarks(survey: Survey) -> list[str]:
    """Return lines about silent and lost nodes, waits (longest first), and events."""
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
    lines += [f"{_seconds(event.ago_s)} ago: {event.text}" for event in survey.events]
    return lines


# -- JSON -------------------------------------------------------------------------------------


def as_json(survey: Survey, before: Survey | None) -> dict[str, Any]:
    """Return the job as plain data: the survey, with rates and a summary."""
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
    """Format bytes as ``1.5 MB``: three digits, by powers of 1000."""
    if count is None:
        return ""
    unit = 0
    while count >= 999.5 and unit < len(_COUNTS) - 1:
        count /= 1000
        unit += 1
    return f"{count:.0f} B" if unit == 0 else f"{_number(count)} {_COUNTS[unit]}"


def _number(value: float) -> str:
    """Format a number with three digits, or all of them above that."""
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"


def _share(share: float) -> str:
    return f"{share * 100:.0f}%"


def _seconds(seconds: float) -> str:
    """Format seconds as ``12 s``, ``3:05 min`` or ``2:03:59 h``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d} min"
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d} h"


if __name__ == "__main__":
    sys.exit(main())
