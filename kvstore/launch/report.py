"""The words that a failed job ends with.

Pure formatting: the cause comes last on the screen, where users look first. Used by
``local.py``.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.launch.failure import describe_status, exit_code
from kvstore.launch.lifecycle import Exit
from kvstore.launch.plan import ProcessSpec

FAILURE_HEADING = "======== the job failed; this was the first failure ========"
GOES_ON = "push and pull go on"
SHOWN_LINES = 20
LONGEST_COMMAND = 2000


@dataclass(frozen=True)
class Ended:
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
    failures: Sequence[Ended], stopped: Sequence[Ended], log_dir: str, *, start_s: float
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


def without_scheduler(scheduler: Ended) -> str:
    """What the launcher says when the scheduler has failed and the workers go on."""
    status = scheduler.exit.status
    how = describe_status(status)
    ended = f"was killed by {how.removeprefix('signal ')}" if status < 0 else f"ended with {how}"
    where = scheduler.place or f"pid {scheduler.pid}"
    return (
        f"the scheduler {ended} ({where}): {GOES_ON}; barriers, init and joins no longer work; "
        f"at its end the job counts as failed (exit code {exit_code(scheduler.exit)})"
    )


def _other_failures(first: Ended, others: Sequence[Ended]) -> list[str]:
    """Two lines at most: whoever ended in the words of the first failure, and all the others."""
    same = [one for one in others if _last_words(one) == _last_words(first)]
    different = [one for one in others if one not in same]
    lines = []
    if same:
        lines.append(f"the same on {', '.join(one.spec.name for one in same)}")
    if different:
        names = ", ".join(f"{one.spec.name} ({_how(one)})" for one in different)
        lines.append(f"other failures: {names}")
    return lines


def _last_words(ended: Ended) -> tuple[str, int, Sequence[str]]:
    """The last line says the error; those before may hold numbers of processes and times."""
    return ended.spec.role, ended.exit.status, list(ended.last_lines)[-1:]


def _how(ended: Ended) -> str:
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
