"""Find the process that made a job fail, and say so in words.

One death in a distributed job brings others: peers notice it and raise. The launcher therefore
waits a little after the first failure (``lifecycle.py``) and then asks here for the cause, which is
printed last on the screen, where users look first. A job that succeeds gets its first line here
too. Pure, but for the record of a process, which ``supervisor.py`` keeps on the main thread.
"""

from __future__ import annotations

import math
import re
import shlex
import signal
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvstore.launch.job.lifecycle import Exit
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec

# The last line of a traceback in which a process names another one as the cause of its end.
_NAMES_ANOTHER = re.compile(r"(?:\w+\.)*NodeLostError\b")


def failures_first_cause_first(
    exits: Sequence[Exit],
    specs: Sequence[ProcessSpec],
    last_lines: Mapping[int, Sequence[str]],
) -> list[Exit]:
    """Sort out the failures among ``exits`` and put the most likely cause at the front.

    The rules, in this order: a process that ended with an error of its own comes before a service
    process that ended with 0 too early, and that before one whose log says NodeLostError
    (it names somebody else: a process that raises may take longer to exit than its peers take
    to notice); then the one that was noticed first; of several noticed in one sweep, one killed by
    a signal first, since an error may be the answer to a signal death, never the reverse.
    """
    early = _ended_too_early(exits, specs)

    def is_failure(found: Exit) -> bool:
        return not found.stopped and (found.status != 0 or found.index in early)

    def weight(found: Exit) -> tuple[int, int, bool, int]:
        if found.status == 0:
            kind = 1
        else:
            kind = 2 if _blames_another(last_lines.get(found.index, ())) else 0
        return (kind, found.sweep, found.status > 0, found.index)

    return sorted(filter(is_failure, exits), key=weight)


def exit_code(found: Exit) -> int:
    """The launcher's exit code for this first failure, by the rules of the shell."""
    if found.status == 0:
        return 1
    return found.status if found.status > 0 else 128 - found.status


def describe_status(status: int) -> str:
    """``exit code 7`` or ``signal SIGKILL``."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


def _ended_too_early(exits: Sequence[Exit], specs: Sequence[ProcessSpec]) -> set[int]:
    """Service processes that ended with 0 while workers ran and others of the service stayed.

    When all of the service ended with 0 first, the workers had said goodbye: nothing is wrong.
    Nor is it when the workers succeeded, who would have missed them. A scheduler that failed
    before any server ended is not counted: the servers are the service then.
    """
    by_index = {found.index: found for found in exits}

    def end_of(is_worker: bool) -> float:
        """The sweep that saw the last of them end; infinite if one never did."""
        group = [index for index, spec in enumerate(specs) if (spec.role == "worker") == is_worker]
        if any(index not in by_index for index in group):
            return math.inf
        return max(by_index[index].sweep for index in group)

    def is_good(group: Sequence[Exit]) -> bool:
        return all(found.status == 0 and not found.stopped for found in group)

    workers = [found for found in exits if specs[found.index].role == "worker"]
    servers = [found for found in exits if specs[found.index].role == "server"]
    service = [found for found in exits if specs[found.index].role != "worker"]
    last_worker, last_service = end_of(True), end_of(False)
    first_server = min((found.sweep for found in servers), default=0)
    is_lost = any(not is_good([found]) and found.sweep < first_server for found in service)
    whole = is_good(servers if is_lost else service)
    if whole and (last_service <= last_worker or is_good(workers)):
        return set()
    return {found.index for found in service if found.status == 0 and found.sweep < last_worker}


def _blames_another(lines: Sequence[str]) -> bool:
    return any(_NAMES_ANOTHER.match(line) for line in lines)


FAILURE_HEADING = "======== the job failed; this was the first failure ========"
GOES_ON = "push and pull go on"
SHOWN_LINES = 20
LONGEST_COMMAND = 2000


@dataclass(frozen=True)
class EndedProcess:
    """One ended process with all that a report says about it. ``at_s`` counts from the start.

    ``place`` says where it ran, where that is more than a process id of this machine; ``reason``
    what the cluster says about its end.
    """

    spec: ProcessSpec
    pid: int
    exit: Exit
    last_lines: Sequence[str]
    place: str = ""
    reason: str = ""


def failure_block(
    failures: Sequence[EndedProcess],
    stopped: Sequence[EndedProcess],
    log_dir: str,
    *,
    start_s: float,
) -> str:
    """The final block: the first failure in full, the others in one line, the logs' place.

    ``failures`` is in the order of ``failure.failures_first_cause_first``, not empty;
    ``stopped`` were ended by the launcher.
    """
    first = failures[0]
    age_s = first.exit.at_s - start_s
    shown = list(first.last_lines)[-SHOWN_LINES:]
    lines = [
        "",
        FAILURE_HEADING,
        f"process:  {first.spec.name} ({first.place or f'pid {first.pid}'})",
        f"ended:    {_how(first)}, {age_s:.1f} s after the start",
        f"command:  {_command(first.spec.argv)}",
        *_log_lines(shown),
    ]
    lines += _other_failures(first, failures[1:])
    if first.spec.role == "scheduler" and not failures[1:] and not stopped:
        lines.append("all others ended with exit code 0")
    if stopped:
        names = ", ".join(one.spec.name for one in stopped)
        lines.append(f"ended by the launcher: {names}")
    lines.append(f"logs of all processes: {log_dir}")
    return "\n".join(lines) + "\n"


def without_scheduler(scheduler: EndedProcess) -> str:
    """Return what the launcher says when the scheduler has failed and the workers go on."""
    status = scheduler.exit.status
    how = describe_status(status)
    ended = f"was killed by {how.removeprefix('signal ')}" if status < 0 else f"ended with {how}"
    where = scheduler.place or f"pid {scheduler.pid}"
    return (
        f"the scheduler {ended} ({where}): {GOES_ON}; barriers, init and joins no longer work; "
        f"at its end the job counts as failed (exit code {exit_code(scheduler.exit)})"
    )


def _other_failures(first: EndedProcess, others: Sequence[EndedProcess]) -> list[str]:
    """Name the failures like the first one, and all others: two lines at most."""
    same = [one for one in others if _last_words(one) == _last_words(first)]
    different = [one for one in others if one not in same]
    lines = []
    if same:
        lines.append(f"the same on {', '.join(one.spec.name for one in same)}")
    if different:
        names = ", ".join(f"{one.spec.name} ({_how(one)})" for one in different)
        lines.append(f"other failures: {names}")
    return lines


def _last_words(ended: EndedProcess) -> tuple[str, int, Sequence[str]]:
    """The last line says the error; those before may hold numbers of processes and times."""
    return ended.spec.role, ended.exit.status, list(ended.last_lines)[-1:]


def _how(ended: EndedProcess) -> str:
    text = describe_status(ended.exit.status)
    if ended.reason:
        text = f"{text} ({ended.reason})"
    return f"{text}, while workers still ran" if ended.exit.status == 0 else text


def _command(argv: Sequence[str]) -> str:
    text = shlex.join(argv)
    return text if len(text) <= LONGEST_COMMAND else text[:LONGEST_COMMAND] + " ..."


def _log_lines(shown: Sequence[str]) -> list[str]:
    if not shown:
        return ["its log is empty"]
    heading = (
        "the last line of its log:"
        if len(shown) == 1
        else (f"the last {len(shown)} lines of its log:")
    )
    return [heading, *(f"    {line}" for line in shown)]


def complete_line(
    specs: Sequence[ProcessSpec], hosts: Iterable[str], address: str, shown_logs: str
) -> str:
    """Return what is said once all have joined; ``address`` is the scheduler's."""
    counts = Counter(spec.role for spec in specs)
    nodes = " and ".join(
        f"{counts[role]} {role}{'s' * (counts[role] > 1)}" for role in ("worker", "server")
    )
    return (
        f"all have joined: {nodes} on {', '.join(hosts)}; scheduler at {address}; "
        f"logs in {shown_logs}"
    )


class ProcessRecord:
    """Its log file, its last lines and its number, which is 0 until it has started.

    ``label`` stands behind its name (``worker 1@label``); None says nothing of its place. Raises
    :class:`LaunchError` (exit code 1) when the log cannot be made.
    """

    def __init__(self, spec: ProcessSpec, label: str | None, log_dir: Path) -> None:
        self.spec = spec
        self.pid = 0
        self.why: str | None = None
        self.last_lines: deque[bytes] = deque(maxlen=SHOWN_LINES)
        self._label = label
        self._name = spec.name if label is None else f"{spec.name}@{label}"
        self._prefix = f"[{self._name}] ".encode()
        self._log: IO[bytes] | None = None
        path = log_dir / f"{spec.name.replace(' ', '-')}.log"
        try:
            self._log = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by stop_logging
        except OSError as error:
            raise LaunchError(f"cannot write {path}: {error.strerror}", exit_code=1) from error

    def record(self, lines: list[bytes]) -> bytes:
        """Write lines to the log file; return them as they go to the terminal."""
        self.last_lines.extend(lines)
        if self._log is not None and lines:
            self._log.write(b"".join(line + b"\n" for line in lines))
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def stop_logging(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None

    def ended(self, found: Exit) -> EndedProcess:
        """For the report."""
        lines = [line.decode(errors="replace") for line in self.last_lines]
        place = "" if self._label is None else f"pid {self.pid} on {self._label}"
        return EndedProcess(self.spec, self.pid, found, lines, place=place, reason=self.why or "")
