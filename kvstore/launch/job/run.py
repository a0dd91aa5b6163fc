"""Runs a whole job, wherever its processes are.

Brings the parts together, on the main thread: an address that the scheduler will serve on, on
this machine; a place for the logs; the plan; the supervisor; and at the end the words and the
exit code. Where servers and workers run is the launchers' matter (``launch/cli.py``,
``launch/backends/ssh.py``). Read ``plan.py`` and ``supervisor.py`` next.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.launch.environment import checkout_root, listen
from kvstore.launch.job.checks import (
    by_role,
    check_key,
    check_server_imports,
    check_settings,
    read_given_key,
)
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.job.places import Place
from kvstore.launch.job.registry import new_key, new_key_file, note_job, write_key
from kvstore.launch.job.report import JobReport, complete_line, conclude, make_log_dir, remove_logs
from kvstore.launch.job.supervisor import Supervisor
from kvstore.launch.options import LaunchOptions
from kvstore.launch.plan import JobFacts, base_environment, brings_a_key, plan_job


@dataclass(frozen=True)
class Arrangement:
    """Where a job will run: the scheduler's address and the other places.

    ``cpu_count`` is of all places together. ``places`` are those of servers and workers, by role
    and rank; who has none runs on this machine. In ``directory``, which other machines of the
    cluster share and only this user can enter, they find the job's scheduler and key.
    ``worker_hosts`` are the names of the workers' machines by rank; empty, this machine has all.
    """

    host: str
    port: int
    cpu_count: int
    places: Mapping[tuple[str, int], Place] = field(default_factory=dict)
    directory: Path | None = None
    worker_hosts: Sequence[str] = ()


def run_job(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
    arrange: Callable[[Supervisor, str], Arrangement],
) -> int:
    """Run the job to its end and return the exit code. Main thread only.

    ``arrange`` gets the text of the job's key too. Standard output and error of all processes are
    passed on; the report of a failure is the last thing on standard error. Raises
    :class:`LaunchError` when nothing could be started.
    """
    check_plan(options, environ, service_command)
    log_dir, is_temporary = make_log_dir(options.log_dir)
    try:
        shown_logs = f"{log_dir}, kept if the job fails" if is_temporary else str(log_dir)
        report = _supervise(options, environ, service_command, timing, arrange, log_dir, shown_logs)
    except BaseException:
        remove_logs(log_dir, is_temporary)
        raise
    return conclude(report, log_dir, is_temporary)


def check_plan(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    *,
    only_imports: bool = False,
) -> None:
    """Check what is known before a job runs: settings, key, servers' imports.

    Raises :class:`LaunchError`.
    """
    facts = JobFacts("none", checkout_root())  # what depends on addresses is not looked at
    specs = plan_job(options, facts, environ, service_command)
    environments = by_role(specs, base_environment(environ))
    if not only_imports:
        check_settings(environments.values())
        if brings_a_key(options, environ):
            check_key(environments["scheduler"])
    check_server_imports(
        specs[1].argv,
        environments["server"],
        options.server_imports,
        are_here=options.launcher == "local",
    )


def checking(environ: Mapping[str, str], timing: Timing) -> Supervisor:
    """Return a supervisor that serves places and has no processes, as for ``--check``."""
    return Supervisor(secrets.token_hex(8), environ, Path(), timing)


def _supervise(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
    arrange: Callable[[Supervisor, str], Arrangement],
    log_dir: Path,
    shown_logs: str,
) -> JobReport:
    job_id = secrets.token_hex(8)
    key_file = None if brings_a_key(options, environ) else new_key_file()
    given = {**environ, **dict(options.environment)}
    key = new_key() if key_file else read_given_key(given["PS_JOB_KEY_FILE"])
    # One end goes to the scheduler, which says on it that all have joined.
    heard, joined = socket.socketpair()
    with heard, joined, Supervisor(job_id, environ, log_dir, timing) as supervisor:
        for note in options.notes:
            supervisor.terminal.say(note)
        arranged = arrange(supervisor, key)
        with listen(arranged.host, arranged.port) as listener:
            facts = JobFacts(
                job_id=job_id,
                host=arranged.host,
                port=listener.getsockname()[1],
                listen_fd=listener.fileno(),
                cpu_count=arranged.cpu_count,
                checkout_root=checkout_root(),
                key_file=None if key_file is None else str(key_file),
                joined_fd=joined.fileno(),
                worker_hosts=tuple(arranged.worker_hosts),
                store_port=_store_port(),
            )
            specs = plan_job(options, facts, environ, service_command)
            variables = base_environment(environ)
            scheduler = {**variables, **specs[0].environment}
            shown_host = f"[{facts.host}]" if ":" in facts.host else facts.host
            address = f"{shown_host}:{facts.port}"
            security = scheduler.get("PS_SECURITY", "")
            if key_file is not None:
                supervisor.remove_at_the_end(key_file.parent)
                write_key(key_file, key)
                note_job(key_file.parent, address, security)
            if arranged.directory is not None:
                note_job(arranged.directory, address, security, key)
            assigned = [
                (spec, arranged.places.get((spec.role, spec.rank), supervisor.local))
                for spec in specs
            ]
            if options.show_status:
                hosts = dict.fromkeys(place.label or "this machine" for _, place in assigned[1:])
                line = complete_line(specs, hosts, address, shown_logs)
                supervisor.terminal.show_status(scheduler, line)
            supervisor.start(assigned, variables)
            joined.close()  # only the scheduler holds it now, and its death is heard
            supervisor.joined = heard
            # When the scheduler dies, its port stays taken: no other process can listen there while
            # nodes of this job run. No connection is answered there either.
            return supervisor.wait()


def _store_port() -> int:
    """Return a port for a framework's store on worker 0's machine.

    It is free on this machine.

    It is from below the ports that Linux gives to clients; only worker 0 can hold it.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
