"""The report at the end of a job: cause of a failure, logs and exit code.

When one process of a job dies, its peers notice it and raise errors as well. So the launcher waits
a little after the first failure (``lifecycle.py``) and then finds the cause with this module. It
prints the cause last, where users look first. The line that says that all have joined comes from
here too. Runs on the main thread; used by ``supervisor.py``, ``run.py`` and
``launch/backends/kubernetes/run.py``.
"""

from __future__ import annotations

import errno
import math
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvstore.launch.job.lifecycle import Lifecycle
from kvstore.launch.job.restarts import Exit
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec

_HEADING = "======== {} failed; this was the first failure ========"
FAILURE_HEADING = _HEADING.format("the job")
SHOWN_LINES = 20
_SHOWN_NAMES = 8
LONGEST_COMMAND = 2000
EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127
_UNJOINED = (
    "the workers ended without joining the job, so each ran alone; check that the script "
    "creates a dist_... store"
)

# The last line of a traceback in which a process names another process as the cause of its end.
_NAMES_ANOTHER = re.compile(r"(?:\w+\.)*NodeLostError\b")


@dataclass(frozen=True)
class EndedProcess:
    """One ended process, for reports.

    ``place`` says where it ran, if a process id of this machine is not enough. ``reason`` is what
    the cluster says about its end.
    """

    spec: ProcessSpec
    pid: int
    exit: Exit
    last_lines: Sequence[str]
    place: str = ""
    reason: str = ""


def failures_of(
    ended: Sequence[EndedProcess],
    specs: Sequence[ProcessSpec],
    setbacks: Sequence[EndedProcess] = (),
) -> tuple[list[EndedProcess], list[EndedProcess]]:
    """Return the failed processes, the cause first, and those that the launcher ended.

    ``setbacks`` are the earlier ends of processes that were started again and got no place.

    The failed processes are sorted by these rules, in this order. First come processes that ended
    with an error of their own, then service processes that ended with 0 too early, then processes
    whose log says NodeLostError: such a process names another as the cause, and a process that
    raises an error may take longer to exit than its peers take to notice. Next, a process that was
    noticed earlier comes first. Of those noticed in one sweep, a process killed by a signal comes
    first, since such a death may cause errors elsewhere, but an error does not cause such a death.
    """
    early = _ended_too_early(ended, specs)

    def weight(one: EndedProcess) -> tuple[int, int, bool, int]:
        kind = 1 if one.exit.status == 0 else 2 * (_named_by(one) is not None)
        return (kind, one.exit.sweep, one.exit.status > 0, one.exit.index)

    failed = [one for one in ended if one.exit.status != 0 or one.exit.index in early]
    failures = sorted([*setbacks, *(one for one in failed if not one.exit.stopped)], key=weight)
    return failures, [one for one in ended if one.exit.stopped]


def exit_code(found: Exit) -> int:
    """Return the launcher's exit code for this first failure, by the shell's rules."""
    if found.status == 0:
        return 1
    return found.status if found.status > 0 else 128 - found.status


def describe_status(status: int) -> str:
    """Return ``exit code 7`` or ``signal SIGKILL``."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _ended_too_early(ended: Sequence[EndedProcess], specs: Sequence[ProcessSpec]) -> set[int]:
    """Return the service processes that ended with 0 too early, by index.

    Too early means: while workers and other service processes still ran. If the whole service ended
    with 0 first, the workers had said goodbye, which is normal. It is also normal if all workers
    succeeded, since they would have noticed a missing process.
    """

    ranks = {spec.rank for spec in specs if spec.role == "server"}

    def role_of(spec: ProcessSpec) -> str:
        """Return "server" for a standby that has taken the place of its server."""
        return "server" if spec.role == "standby" and spec.rank not in ranks else spec.role

    def of(*roles: str) -> list[Exit]:
        return [one.exit for one in ended if role_of(one.spec) in roles]

    def end_of(*roles: str) -> float:
        """Return the sweep that saw the last of these roles end, or infinity."""
        sweeps = [found.sweep for found in of(*roles)]
        is_whole = len(sweeps) == len([spec for spec in specs if role_of(spec) in roles])
        return max(sweeps) if is_whole else math.inf

    def is_good(group: Sequence[Exit]) -> bool:
        return all(found.status == 0 and not found.stopped for found in group)

    service = of("scheduler", "server")
    last_worker = end_of("worker")
    if is_good(service) and (end_of("scheduler", "server") <= last_worker or is_good(of("worker"))):
        return set()
    return {found.index for found in service if found.status == 0 and found.sweep < last_worker}


def failure_block(
    failures: Sequence[EndedProcess],
    stopped: Sequence[EndedProcess],
    log_dir: str,
    *,
    start_s: float,
    remark: str = "",
    heading: str = FAILURE_HEADING,
) -> str:
    """Return the final report: the first failure in full, the others in a line each.

    ``failures`` and ``stopped`` are the results of :func:`failures_of`; there is at least one
    failure. ``remark`` is a further line, or "".
    """
    first, cause, end = failures[0], cause_of(failures), describe_end(failures[0])
    if cause == end:
        more = []
    elif cause.startswith(f"{end}; "):
        more = [f"not replaced: {cause.removeprefix(f'{end}; ')}"]
    else:
        more = [f"cause:    {cause}"]
    age_s = first.exit.at_s - start_s
    command = shlex.join(first.spec.argv)
    if len(command) > LONGEST_COMMAND:
        command = f"{command[:LONGEST_COMMAND]} ..."
    shown = list(first.last_lines)[-SHOWN_LINES:]
    count = "line" if len(shown) == 1 else f"{len(shown)} lines"
    lines = [
        "",
        heading,
        f"process:  {first.spec.name} ({first.place or f'pid {first.pid}'})",
        f"ended:    {_how(first)}, {age_s:.1f} s after the start",
        *more,
        f"command:  {command}",
        f"the last {count} of its log:" if shown else "its log is empty",
        *(f"    {line}" for line in shown),
    ]
    # Name the failures that equal the first one, and all others: two lines at most.
    same = [one for one in failures[1:] if _last_words(one) == _last_words(first)]
    if same:
        lines.append(f"the same on {', '.join(one.spec.name for one in same)}")
    if different := [one for one in failures[1:] if one not in same]:
        names = ", ".join(f"{one.spec.name} ({_how(one)})" for one in different)
        lines.append(f"other failures: {names}")
    if stopped:
        names = ", ".join(one.spec.name for one in stopped)
        lines.append(f"ended by the launcher: {names}")
    lines += [remark] if remark else []
    lines.append(f"logs of all processes: {log_dir}")
    return "\n".join(lines) + "\n"


def describe_end(ended: EndedProcess) -> str:
    """Return ``worker 1 (pid 4711) ended with signal SIGKILL``."""
    return f"{ended.spec.name} ({ended.place or f'pid {ended.pid}'}) ended with {_how(ended)}"


def cause_of(failures: Sequence[EndedProcess]) -> str:
    """Return why the job failed, in one line.

    ``failures`` are those of :func:`failures_of`, at least one. If no process has failed by itself,
    it is what the scheduler says: the lost process may not have ended. Otherwise the scheduler may
    say more about the loss than how the process has ended.
    """
    by_scheduler = sorted(failures, key=lambda one: one.spec.role != "scheduler")
    verdicts = [text for one in by_scheduler if (text := _named_by(one)) is not None]
    if not verdicts:
        return describe_end(failures[0])
    if not verdicts[0].startswith(f"{failures[0].spec.name} "):
        return verdicts[0]
    _, *more = verdicts[0].split("; ", 1)
    return "; ".join([describe_end(failures[0]), *more])


def _named_by(ended: EndedProcess) -> str | None:
    """Return the error with which a process names another one as the cause of its end."""
    lines = [line for line in ended.last_lines if _NAMES_ANOTHER.match(line)]
    return lines[-1].partition(": ")[2] if lines else None


def goes_on(lost: EndedProcess, *, is_awaited: bool) -> str:
    """Return the message for a lost process without which the job continues.

    ``is_awaited``: it is a server, and its standby has not taken its place yet.
    """
    rank = lost.spec.rank
    if is_awaited:
        return f"{describe_end(lost)}: waiting for standby {rank} to take its place"
    if lost.spec.role == "server":
        return f"{describe_end(lost)}: standby {rank} has already taken its place"
    return f"{describe_end(lost)}: server {rank} goes on without it"


def starts_again(lost: EndedProcess, count: str) -> str:
    """Return the message for a worker or a scheduler, with :meth:`Restarts.count`."""
    return f"{describe_end(lost)}: starting it again ({count})"


def starts_standby(standby: ProcessRecord, count: str) -> str:
    """Return the message for another standby, with :meth:`Restarts.count`."""
    where = "" if standby.label is None else f" on {standby.label}"
    return f"starting a standby of server {standby.spec.rank} again{where} ({count})"


def _last_words(ended: EndedProcess) -> tuple[str, int, Sequence[str]]:
    """Return role, status and last line: earlier lines may contain process ids."""
    return ended.spec.role, ended.exit.status, list(ended.last_lines)[-1:]


def _how(ended: EndedProcess) -> str:
    text = describe_status(ended.exit.status)
    if ended.reason:
        text = f"{text} ({ended.reason})"
    return f"{text}, while workers still ran" if ended.exit.status == 0 else text


def some_of(names: Sequence[str]) -> str:
    """Return the first names, and the number of the remaining ones."""
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def complete_line(
    specs: Sequence[ProcessSpec], hosts: Iterable[str], address: str, shown_logs: str
) -> str:
    """Return the line for when all have joined; ``address`` is the scheduler's."""
    counts = Counter(spec.role for spec in specs)
    *others, last = [
        f"{counts[role]} {role}{'s' * (counts[role] > 1)}"
        for role in ("worker", "server", "standby")
        if counts[role]
    ]
    nodes = f"{', '.join(others)} and {last}"
    return (
        f"all have joined: {nodes} on {', '.join(hosts)}; scheduler at {address}; "
        f"logs in {shown_logs}"
    )


class ProcessRecord:
    """A process's log file, its last lines and its process id (0 before its start).

    ``label`` follows its name (``worker 1@label``), unless it is None. Raises :class:`LaunchError`
    (exit code 1) if the log cannot be created.
    """

    def __init__(self, spec: ProcessSpec, label: str | None, log_dir: Path) -> None:
        self.spec = spec
        self.pid = 0
        self.why: str | None = None
        self.setback: EndedProcess | None = None
        """The first end of a process that was started again, until it has its place."""
        self.last_lines: deque[bytes] = deque(maxlen=SHOWN_LINES)
        self.label = label
        self._log: IO[bytes] | None = None
        path = log_dir / f"{spec.name.replace(' ', '-')}.log"
        try:
            self._log = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by stop_logging
        except OSError as error:
            raise LaunchError(f"cannot write {path}: {error.strerror}", exit_code=1) from error

    def record(self, lines: list[bytes]) -> bytes:
        """Write lines to the log file; return them with the prefix for the terminal."""
        self.last_lines.extend(lines)
        if self._log is not None and lines:
            self._log.write(b"".join(line + b"\n" for line in lines))
        name = self.spec.name if self.label is None else f"{self.spec.name}@{self.label}"
        prefix = f"[{name}] ".encode()
        return b"".join(prefix + line + b"\n" for line in lines)

    def trade_seats(self, other: ProcessRecord) -> None:
        """Exchange names and log files with a process whose place this one takes."""
        self.spec, other.spec = other.spec, self.spec
        self._log, other._log = other._log, self._log

    def stop_logging(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def ended(self, found: Exit) -> EndedProcess:
        """Return the record of the process's end for the report."""
        lines = [line.decode(errors="replace") for line in self.last_lines]
        place = "" if self.label is None else f"pid {self.pid} on {self.label}"
        return EndedProcess(self.spec, self.pid, found, lines, place=place, reason=self.why or "")


@dataclass(frozen=True)
class JobReport:
    """All facts about a job after all its processes have ended."""

    lifecycle: Lifecycle
    specs: Sequence[ProcessSpec]
    ended: Sequence[EndedProcess]
    start_s: float
    was_signalled: bool = False
    """Whether a signal told the launcher to end, also after the last process had ended."""
    setbacks: Sequence[EndedProcess] = ()
    """The ends of processes that were started again and did not get their places."""


def make_log_dir(wanted: str | None) -> tuple[Path, bool]:
    """Return the log directory, and whether to remove it after a success."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="kvstore-launch-")), True
    path = Path(wanted)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"cannot create the log directory {wanted}: {error.strerror}; choose another with "
            "--log-dir",
            exit_code=1,
        ) from error
    return path.resolve(), False


def remove_logs(log_dir: Path, is_temporary: bool) -> None:
    """Remove the logs if their directory is temporary."""
    if is_temporary:
        shutil.rmtree(log_dir, ignore_errors=True)


def attempt_log_dir(log_dir: Path, attempt: int) -> Path:
    """Create the directory for the logs of a restarted job, within ``log_dir``."""
    path = log_dir / f"restart-{attempt}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"cannot create {path}: {error.strerror}", exit_code=1) from error
    return path


def may_restart(report: JobReport) -> bool:
    """Return whether another attempt may succeed where this one failed.

    It may not if the user has ended the job, or if its script does not join it. It need not if all
    workers have succeeded, and another process was lost only then.
    """
    job = report.lifecycle
    if not job.failed or job.unjoined or report.was_signalled:
        return False
    workers = (one for one in report.ended if one.spec.role == "worker")
    return bool(report.setbacks) or any(one.exit.status != 0 for one in workers)


def show_failure(
    report: JobReport, log_dir: Path, attempt: int | None = None
) -> list[EndedProcess]:
    """Print why the job failed; return the failed processes, the cause first.

    ``attempt`` is the number of an attempt that another one follows; the first is 0.
    """
    failures, stopped = failures_of(report.ended, report.specs, report.setbacks)
    restarts = report.lifecycle.restarts
    is_last = attempt is None and restarts.are_used_up and may_restart(report)
    block = failure_block(
        failures,
        stopped,
        str(log_dir),
        start_s=report.start_s,
        remark=restarts.used_up if is_last else "",
        heading=_HEADING.format(
            "the job" if attempt is None else f"attempt {attempt + 1} of the job"
        ),
    )
    write_error(block)
    return failures


def conclude(report: JobReport, log_dir: Path, is_temporary: bool) -> int:
    """Print how the job ended, keep or remove its logs, and return the exit code."""
    job = report.lifecycle
    if job.unjoined:
        remove_logs(log_dir, is_temporary)  # the logs contain only what the terminal has shown
        say(_UNJOINED)
        return 1
    if job.failed:
        failures = show_failure(report, log_dir)
        if job.interrupted_by is None:
            return exit_code(failures[0].exit)
    elif job.interrupted_by is not None:
        # A user who pressed Ctrl-C has seen the output; a batch system or a closed terminal has
        # not.
        is_over = is_temporary and job.interrupted_by is signal.SIGINT
        remove_logs(log_dir, is_over)
        where = "" if is_over else f"; logs of all processes: {log_dir}"
        say(f"ended by {job.interrupted_by.name}{where}")
    elif job.drain_expired:
        say(f"the workers succeeded; logs of all processes: {log_dir}")
    else:
        remove_logs(log_dir, is_temporary)
    return 0 if job.interrupted_by is None else 128 + job.interrupted_by


def cannot_start(spec: ProcessSpec, place: str | None, number: int, text: str) -> LaunchError:
    """Return the error for a program that cannot be executed; ``number`` is the errno.

    ``place`` is the host, or None for this machine. ``text`` is the system's message.
    """
    argv, program = spec.argv, spec.argv[0]
    is_there = place is None and os.path.exists(program)
    missing = number in (errno.ENOENT, errno.ENOTDIR)
    if missing and len(program.split()) > 1 and not is_there:
        reason = "there is no program of this name; write the command without the quotes around "
        reason += f"it: {shlex.join([*program.split(), *argv[1:]])}"
    elif missing and program.endswith(".py"):
        reason = "this is a script and not a program; give it to its interpreter, as in: "
        reason += shlex.join(["python", *argv])
    elif missing and "/" not in program:
        reason = "there is no such program on the PATH"
    elif missing and is_there:
        reason = "the interpreter that its first line names does not exist"
    elif missing:
        reason = "there is no such program"
    elif number in (errno.EACCES, errno.ENOEXEC):
        reason = f"{text}; a script must be executable and begin with '#!', or be given "
        example = ("python", *argv) if program.endswith(".py") else ("python", "train.py")
        reason += f"to its interpreter, as in: {shlex.join(example)}"
    else:
        reason = text
    name = spec.name if place is None else f"{spec.name} on {place}"
    return LaunchError(
        f"cannot start {name}: '{program}': {reason}",
        exit_code=EXIT_NOT_FOUND if missing else EXIT_CANNOT_EXECUTE,
    )


def say(text: str) -> None:
    """Print a line of the launcher's own if no supervisor exists to write it."""
    write_error(f"[launcher] {text}\n")


def write_error(text: str) -> None:
    """Write to standard error; ignore failures, since the exit code tells the result."""
    with suppress(OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
