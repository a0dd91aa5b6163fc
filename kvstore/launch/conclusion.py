"""How a job ends for whoever started it: the logs, the last words and the exit code.

Used by ``jobrun.py``, on the main thread.
"""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from kvstore.launch.failure import exit_code, failures_first_cause_first
from kvstore.launch.options import LaunchError
from kvstore.launch.report import Ended, failure_block
from kvstore.launch.supervisor import Outcome, StartFailure

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


def conclude(outcome: Outcome, log_dir: Path, is_temporary: bool) -> int:
    """Say how it ended and return the exit code."""
    if outcome.start_failure is not None:
        return _conclude_start_failure(outcome.start_failure, log_dir, is_temporary)
    if outcome.unjoined:
        _remove(log_dir, is_temporary)  # nothing but what has been on the terminal
        _say(f"[launcher] {_UNJOINED}\n")
        return 1
    if outcome.failed:
        failures, stopped = _failures(outcome)
        _say(failure_block(failures, stopped, str(log_dir), start_s=outcome.start_s))
        if outcome.interrupted_by is None:
            return exit_code(failures[0].exit)
    if outcome.interrupted_by is not None:
        if not outcome.failed:
            _conclude_interrupted(outcome.interrupted_by, log_dir, is_temporary)
        return 128 + outcome.interrupted_by
    if outcome.drain_expired:
        _say(f"[launcher] the workers succeeded; logs of all processes: {log_dir}\n")
    else:
        _remove(log_dir, is_temporary)
    return 0


def _conclude_interrupted(number: signal.Signals, log_dir: Path, is_temporary: bool) -> None:
    """Whoever pressed Ctrl-C has seen the output; a batch system, or a closed terminal, has not."""
    is_over = number is signal.SIGINT and is_temporary
    where = "" if is_over else f"; logs of all processes: {log_dir}"
    _remove(log_dir, is_over)
    _say(f"[launcher] ended by {number.name}{where}\n")


def _remove(log_dir: Path, is_temporary: bool) -> None:
    if is_temporary:
        shutil.rmtree(log_dir, ignore_errors=True)


def _conclude_start_failure(failure: StartFailure, log_dir: Path, is_temporary: bool) -> int:
    _remove(log_dir, is_temporary)
    argv, error = failure.spec.argv, failure.error
    name = failure.spec.name if failure.place is None else f"{failure.spec.name} on {failure.place}"
    program = argv[0]
    missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
    elsewhere = failure.place is not None
    if missing and len(program.split()) > 1 and (elsewhere or not os.path.exists(program)):
        reason = "there is no program of this name; write the command without the quotes around "
        reason += f"it: {shlex.join([*program.split(), *argv[1:]])}"
    elif missing and program.endswith(".py"):
        reason = "this is a script and no program; give it to its interpreter, as in: "
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
    _say(f"[launcher] cannot start {name}: '{program}': {reason}\n")
    return EXIT_NOT_FOUND if missing else EXIT_CANNOT_EXECUTE


def _failures(outcome: Outcome) -> tuple[list[Ended], list[Ended]]:
    """Those that failed, the cause first, and those that the launcher ended because of it."""
    by_index = {one.exit.index: one for one in outcome.ended}
    lines = {index: one.last_lines for index, one in by_index.items()}
    exits = [one.exit for one in outcome.ended]
    failures = failures_first_cause_first(exits, outcome.specs, lines)
    stopped = [one for one in outcome.ended if one.exit.stopped]
    return [by_index[found.index] for found in failures], stopped


def _say(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:  # nobody reads it; the exit code still says it
        pass
