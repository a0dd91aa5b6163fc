"""Runs a whole job, wherever its processes are.

Brings the parts together, on the main thread: an address that the scheduler will serve on, on
this machine; a place for the logs; the plan; the supervisor; and at the end the words and the
exit code. Where servers and workers run is the launchers' matter (``launch/backends/local.py``,
``launch/backends/ssh.py``). Read ``plan.py`` and ``supervisor.py`` next.
"""

from __future__ import annotations

import secrets
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.launch.environment import checkout_root, listen
from kvstore.launch.job.checks import by_role, check_key, check_server_imports, check_settings
from kvstore.launch.job.conclusion import conclude, make_log_dir
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.job.places import Place
from kvstore.launch.job.registry import new_key_file, note_job, write_key
from kvstore.launch.job.report import complete_line
from kvstore.launch.job.supervisor import JobOutcome, Supervisor
from kvstore.launch.options import LaunchError, LaunchOptions
from kvstore.launch.plan import (
    JobFacts,
    ProcessSpec,
    base_environment,
    brings_a_key,
    plan_job,
    requested_address,
)


@dataclass(frozen=True)
class Arrangement:
    """Where a job will run: the scheduler's address on this machine and the others' places.

    ``cpu_count`` is of all places together. ``assign`` takes the job's id, the text of its key
    and the plan, and returns each process with its place. ``key`` is what the job's key shall
    be, where somebody has been given it already. In ``directory``, which other machines of the
    cluster share and only this user can enter, they find the job's scheduler and key.
    """

    host: str
    port: int
    cpu_count: int
    assign: Callable[[str, str, Sequence[ProcessSpec]], list[tuple[ProcessSpec, Place]]]
    key: str | None = None
    directory: Path | None = None


def run_job(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
    arrange: Callable[[Supervisor], Arrangement],
) -> int:
    """Run the job to its end and return the exit code. Must be called on the main thread.

    Standard output and error of all processes are passed on; the report of a failure is the
    last thing on standard error. Raises :class:`LaunchError` when nothing could be started.
    """
    check_plan(options, environ, service_command)
    log_dir, is_temporary = make_log_dir(options.log_dir)
    try:
        shown_logs = f"{log_dir}, kept if the job fails" if is_temporary else str(log_dir)
        outcome = _supervise(
            options, environ, service_command, timing, arrange, log_dir, shown_logs
        )
    except BaseException:
        if is_temporary:
            shutil.rmtree(log_dir, ignore_errors=True)
        raise
    return conclude(outcome, log_dir, is_temporary)


def check_plan(
    options: LaunchOptions, environ: Mapping[str, str], service_command: Sequence[str]
) -> None:
    """What can be known of a job before it runs: its settings, its key, what servers import.

    Raises :class:`LaunchError`.
    """
    specs = _rough_plan(options, environ, service_command)
    environments = by_role(specs, base_environment(environ))
    check_settings(environments.values())
    if brings_a_key(options, environ):
        check_key(environments["scheduler"])
    _check_imports(options, environ, specs)


def check_imports(
    options: LaunchOptions, environ: Mapping[str, str], service_command: Sequence[str]
) -> None:
    """Import what servers will import when they start. Raises :class:`LaunchError`."""
    _check_imports(options, environ, _rough_plan(options, environ, service_command))


def _check_imports(
    options: LaunchOptions, environ: Mapping[str, str], specs: Sequence[ProcessSpec]
) -> None:
    check_server_imports(
        specs,
        base_environment(environ),
        options.server_imports,
        are_here=options.launcher == "local",
    )


def _rough_plan(
    options: LaunchOptions, environ: Mapping[str, str], service_command: Sequence[str]
) -> list[ProcessSpec]:
    """Return who will run, with what does not depend on addresses."""
    facts = JobFacts(
        job_id="none",
        host="127.0.0.1",
        port=0,
        listen_fd=-1,
        cpu_count=1,
        checkout_root=checkout_root(),
    )
    return plan_job(options, facts, environ, service_command)


def scheduler_address(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return what the user has exported, else loopback and port 0. Raises :class:`LaunchError`."""
    try:
        return requested_address(environ)
    except ValueError as error:
        raise LaunchError(
            f"DMLC_PS_ROOT_PORT is not a port number: {environ['DMLC_PS_ROOT_PORT']!r}",
            exit_code=2,
        ) from error


def _supervise(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
    arrange: Callable[[Supervisor], Arrangement],
    log_dir: Path,
    shown_logs: str,
) -> JobOutcome:
    job_id = secrets.token_hex(8)
    # One end goes to the scheduler, which says on it that all have joined.
    heard, joined = socket.socketpair()
    with heard, joined, Supervisor(job_id, environ, log_dir, timing) as supervisor:
        for note in options.notes:
            supervisor.say(note)
        arranged = arrange(supervisor)
        with listen(arranged.host, arranged.port) as listener:
            key_file = None if brings_a_key(options, environ) else new_key_file()
            facts = JobFacts(
                job_id=job_id,
                host=arranged.host,
                port=listener.getsockname()[1],
                listen_fd=listener.fileno(),
                cpu_count=arranged.cpu_count,
                checkout_root=checkout_root(),
                key_file=None if key_file is None else str(key_file),
                joined_fd=joined.fileno(),
                cluster=options.launcher,
            )
            specs = plan_job(options, facts, environ, service_command)
            variables = base_environment(environ)
            if key_file is not None:
                supervisor.remove_at_the_end(key_file.parent)
                write_key(key_file, arranged.key)
            scheduler = {**variables, **specs[0].environment}
            shown_host = f"[{facts.host}]" if ":" in facts.host else facts.host
            address = f"{shown_host}:{facts.port}"
            security = scheduler.get("PS_SECURITY", "")
            if key_file is not None:
                note_job(key_file.parent, address, security)
            if arranged.directory is not None:
                note_job(arranged.directory, address, security, arranged.key or "")
            assigned = arranged.assign(job_id, _key_text(scheduler), specs)
            if options.show_status:
                hosts = dict.fromkeys(place.label or "this machine" for _, place in assigned[1:])
                line = complete_line(specs, hosts, address, shown_logs)
                supervisor.show_status(scheduler, line)
            supervisor.start(assigned, variables)
            joined.close()  # only the scheduler holds it now, and its death is heard
            supervisor.listen_for_joined(heard)
            # When the scheduler dies, its port stays taken: no other process can listen there while
            # nodes of this job run. No connection is answered there either.
            return supervisor.wait()


def _key_text(environment: Mapping[str, str]) -> str:
    path = environment["PS_JOB_KEY_FILE"]
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"the job key {path} cannot be read: {error}", exit_code=1) from error
