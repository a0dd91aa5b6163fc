"""How a job ends for its user: the logs, the last words and the exit code.

Used by ``run.py`` and ``launch/backends/kubernetes/run.py``, on the main thread.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvstore.launch.job.report import (
    EndedProcess,
    exit_code,
    failure_block,
    failures_first_cause_first,
)
from kvstore.launch.job.supervisor import JobOutcome, StartFailure
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec

EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127

_UNJOINED = (
    "the workers ended without joining the job: does the script create a dist_... store? "
    "(each of them ran by itself)"
)


def make_log_dir(wanted: str | None) -> tuple[Path, bool]:
    """The directory and whether it goes away after a success."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="kvstore-launch-")), True
    path = Path(wanted)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            f"cannot make the log directory {wanted}: {error.strerror}", exit_code=1
        ) from error
    return path.resolve(), False


def conclude(outcome: JobOutcome, log_dir: Path, is_temporary: bool) -> int:
    """Say how it ended and return the exit code."""
    if outcome.start_failure is not None:
        return _conclude_start_failure(outcome.start_failure, log_dir, is_temporary)
    if outcome.unjoined:
        remove_logs(log_dir, is_temporary)  # nothing but what has been on the terminal
        say(_UNJOINED)
        return 1
    if outcome.failed:
        failures, stopped = failures_of(outcome.ended, outcome.specs)
        write_error(failure_block(failures, stopped, str(log_dir), start_s=outcome.start_s))
        if outcome.interrupted_by is None:
            return exit_code(failures[0].exit)
    if outcome.interrupted_by is not None:
        if not outcome.failed:
            _conclude_interrupted(outcome.interrupted_by, log_dir, is_temporary)
        return 128 + outcome.interrupted_by
    if outcome.drain_expired:
        say(f"the workers succeeded; logs of all processes: {log_dir}")
    else:
        remove_logs(log_dir, is_temporary)
    return 0


def _conclude_interrupted(number: signal.Signals, log_dir: Path, is_temporary: bool) -> None:
    """Who pressed Ctrl-C has seen the output; a batch system or a closed terminal has not."""
    is_over = number is signal.SIGINT and is_temporary
    where = "" if is_over else f"; logs of all processes: {log_dir}"
    remove_logs(log_dir, is_over)
    say(f"ended by {number.name}{where}")


def remove_logs(log_dir: Path, is_temporary: bool) -> None:
    """Unless they are the user's, or are to be kept."""
    if is_temporary:
        shutil.rmtree(log_dir, ignore_errors=True)


def _conclude_start_failure(failure: StartFailure, log_dir: Path, is_temporary: bool) -> int:
    remove_logs(log_dir, is_temporary)
    argv, error = failure.spec.argv, failure.error
    name = failure.spec.name if failure.place is None else f"{failure.spec.name} on {failure.place}"
    program = argv[0]
    missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
    elsewhere = failure.place is not None
    if missing and len(program.split()) > 1 and (elsewhere or not os.path.exists(program)):
        reason = "there is no program of this name; write the command without the quotes around "
        reason += f"it: {shlex.join([*program.split(), *argv[1:]])}"
    elif missing and program.endswith(".py"):
        reason = "this is a script and not a program; give it to its interpreter, as in: "
        reason += shlex.join(["python", *argv])
    elif missing and "/" not in program:
        reason = "there is no such program on the PATH"
    elif missing and not elsewhere and os.path.exists(program):
        reason = "the interpreter that its first line names does not exist"
    elif missing:
        reason = "there is no such program"
    elif error.errno in (errno.EACCES, errno.ENOEXEC):
        reason = f"{error.strerror}; a script must be executable and begin with '#!', or be given "
        example = ("python", *argv) if program.endswith(".py") else ("python", "train.py")
        reason += f"to its interpreter, as in: {shlex.join(example)}"
    else:
        reason = str(error.strerror)
    say(f"cannot start {name}: '{program}': {reason}")
    return EXIT_NOT_FOUND if missing else EXIT_CANNOT_EXECUTE


def failures_of(
    ended: Sequence[EndedProcess], specs: Sequence[ProcessSpec]
) -> tuple[list[EndedProcess], list[EndedProcess]]:
    """Those that failed, the cause first, and those that the launcher ended because of it."""
    by_index = {one.exit.index: one for one in ended}
    lines = {index: one.last_lines for index, one in by_index.items()}
    found = failures_first_cause_first([one.exit for one in ended], specs, lines)
    stopped = [one for one in ended if one.exit.stopped]
    return [by_index[each.index] for each in found], stopped


def say(text: str) -> None:
    """A line of the launcher's own, when no supervisor is there to write it."""
    write_error(f"[launcher] {text}\n")


def write_error(text: str) -> None:
    """To standard error, whether or not somebody reads it: the exit code says it as well."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        pass
