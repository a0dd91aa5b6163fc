"""Runs a whole job on this machine.

Brings the parts together, on the main thread: an address that the scheduler will serve on, a
place for the logs, the plan, the supervisor, and at the end the words and the exit code. Read
``plan.py`` and ``supervisor.py`` next.
"""

from __future__ import annotations

import errno
import os
import secrets
import shlex
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore.launch.address import listen
from kvstore.launch.failure import exit_code, failures_first_cause_first
from kvstore.launch.jobs import note_job
from kvstore.launch.key import new_key_file, write_key
from kvstore.launch.lifecycle import Timing
from kvstore.launch.options import LaunchError, LaunchOptions
from kvstore.launch.plan import (
    JobFacts,
    base_environment,
    brings_a_key,
    plan_local,
    requested_address,
)
from kvstore.launch.preflight import check_server_imports
from kvstore.launch.rehearsal import local_rows, rehearsal, table
from kvstore.launch.report import Ended, failure_block
from kvstore.launch.supervisor import Outcome, StartFailure, Supervisor

EXIT_CANNOT_EXECUTE = 126
EXIT_NOT_FOUND = 127

_UNJOINED = (
    "the workers ended without joining the job: does the script create a dist_... store? "
    "(each of them ran by itself)"
)


def run(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """Run the job to its end and return the exit code. Must be called on the main thread.

    Standard output and error of all processes are passed on; the report of a failure is the
    last thing on standard error. Raises :class:`LaunchError` when nothing could be started.
    """
    if options.check or options.dry_run:
        return rehearse(options, environ, service_command)
    host, port = _address(environ)
    job_id = secrets.token_hex(8)
    # One end goes to the scheduler, which says on it that all have joined.
    heard, joined = socket.socketpair()
    with heard, joined, listen(host, port) as listener:
        key_file = None if brings_a_key(options, environ) else new_key_file()
        facts = JobFacts(
            job_id=job_id,
            host=host,
            port=listener.getsockname()[1],
            listen_fd=listener.fileno(),
            cpu_count=available_cpu_count(),
            checkout_root=checkout_root(),
            key_file=None if key_file is None else str(key_file),
            joined_fd=joined.fileno(),
        )
        specs = plan_local(options, facts, environ, service_command)
        variables = base_environment(environ)
        check_server_imports(specs, variables, options.server_imports)
        log_dir, is_temporary = _make_log_dir(options.log_dir)
        with Supervisor(job_id, environ, log_dir, timing) as supervisor:
            for note in options.notes:
                supervisor.say(note)
            if key_file is not None:
                supervisor.remove_at_the_end(key_file.parent)
                write_key(key_file)
                security_used = {**variables, **specs[0].environment}.get("PS_SECURITY", "")
                shown_host = f"[{facts.host}]" if ":" in facts.host else facts.host
                note_job(key_file, f"{shown_host}:{facts.port}", security_used)
            if options.show_status:
                supervisor.show_status({**variables, **specs[0].environment})
            supervisor.start([(spec, supervisor.local) for spec in specs], variables)
            # Only the scheduler holds the sockets now: when it dies, connections are refused.
            listener.close()
            joined.close()
            supervisor.listen_for_joined(heard)
            outcome = supervisor.wait()
    return _conclude(outcome, log_dir, is_temporary)


def rehearse(
    options: LaunchOptions, environ: Mapping[str, str], service_command: Sequence[str]
) -> int:
    """``--check`` and ``--dry-run``: what would run, and whether it could; starts no job.

    Prints to standard output. Returns 0, or with ``--check`` 1 when something is missing.
    Raises :class:`LaunchError` as :func:`run` would.
    """
    host, port = _address(environ)
    with listen(host, port) as listener:
        facts = JobFacts(
            job_id="JOB",
            host=host,
            port=listener.getsockname()[1] if port else 0,
            listen_fd=-1,
            cpu_count=available_cpu_count(),
            checkout_root=checkout_root(),
            key_file=None if brings_a_key(options, environ) else "KEYFILE",
        )
        specs = plan_local(options, facts, environ, service_command)
        check_server_imports(specs, base_environment(environ), options.server_imports)
    if options.dry_run:
        print(rehearsal(specs, os.getcwd()), end="")
    if not options.check:
        return 0
    rows = local_rows(specs, environ)
    print(table(rows), end="")
    return 0 if all(row.is_good for row in rows) else 1


def available_cpu_count() -> int:
    """The processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def checkout_root() -> str | None:
    """The directory to put on PYTHONPATH, or None where ``kvstore`` is installed."""
    root = Path(__file__).resolve().parents[2]
    installed = {Path(sysconfig.get_path(name)).resolve() for name in ("purelib", "platlib")}
    if root in installed or root.name in ("site-packages", "dist-packages"):
        return None
    return str(root)


def _address(environ: Mapping[str, str]) -> tuple[str, int]:
    try:
        return requested_address(environ)
    except ValueError as error:
        raise LaunchError(
            f"DMLC_PS_ROOT_PORT is not a port number: {environ['DMLC_PS_ROOT_PORT']!r}",
            exit_code=2,
        ) from error


def _make_log_dir(wanted: str | None) -> tuple[Path, bool]:
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


def _conclude(outcome: Outcome, log_dir: Path, is_temporary: bool) -> int:
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
    program = argv[0]
    missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
    if missing and len(program.split()) > 1 and not os.path.exists(program):
        reason = "there is no program of this name; write the command without the quotes around "
        reason += f"it: {shlex.join([*program.split(), *argv[1:]])}"
    elif missing and program.endswith(".py"):
        reason = "this is a script and no program; give it to its interpreter, as in: "
        reason += shlex.join(["python", *argv])
    elif missing and "/" not in program:
        reason = "there is no such program on the PATH"
    elif missing and os.path.exists(program):
        reason = "the interpreter that its first line names does not exist"
    elif missing:
        reason = "there is no such program"
    elif error.errno in (errno.EACCES, errno.ENOEXEC):
        reason = f"{error.strerror}; a script must be executable and begin with '#!', or be given "
        example = ("python", *argv) if program.endswith(".py") else ("python", "train.py")
        reason += f"to its interpreter, as in: {shlex.join(example)}"
    else:
        reason = str(error.strerror)
    _say(f"[launcher] cannot start {failure.spec.name}: '{program}': {reason}\n")
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
