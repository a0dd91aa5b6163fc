"""Run a whole job, wherever its processes are.

On the main thread, this module combines the parts: an address on this machine for the scheduler, a
directory for the logs, the plan, the supervisor, and at the end the report and the exit code. The
launchers decide where servers and workers run (``launch/cli.py``, ``launch/backends/ssh.py``). Read
``plan.py`` and ``supervisor.py`` next.
"""

from __future__ import annotations

import secrets
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvstore.launch.environment import checkout_root, listen
from kvstore.launch.job.checks import (
    by_role,
    check_key,
    check_server_imports,
    check_settings,
    read_given_key,
)
from kvstore.launch.job.lifecycle import Lifecycle
from kvstore.launch.job.places import Place, SchedulerLines
from kvstore.launch.job.registry import new_key, new_key_file, note_job, write_key
from kvstore.launch.job.report import (
    JobReport,
    attempt_log_dir,
    cause_of,
    complete_line,
    conclude,
    make_log_dir,
    may_restart,
    remove_logs,
    say,
    show_failure,
)
from kvstore.launch.job.restarts import Timing
from kvstore.launch.job.supervisor import Supervisor
from kvstore.launch.options import LaunchError, LaunchOptions
from kvstore.launch.plan import (
    REJOIN_NAME,
    REJOIN_S,
    JobFacts,
    base_environment,
    brings_a_key,
    plan_job,
)


@dataclass(frozen=True)
class Arrangement:
    """Where a job will run: the scheduler's address and the other places.

    ``cpu_count`` is the sum over all places. ``places`` are those of servers and workers, by role
    and rank; all other processes run on this machine. Other machines of the cluster share
    ``directory``, which only this user can enter, and find the job's scheduler and key there.
    ``worker_hosts`` are the names of the workers' machines by rank; if empty, this machine runs
    all.
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

    ``arrange`` gets the supervisor and the text of the job's key, for each attempt. The output of
    all processes is passed on; the report of a failure is the last text on standard error. Raises
    :class:`LaunchError` if the job could not start.
    """
    check_plan(options, environ, service_command)
    log_dir, is_temporary = make_log_dir(options.log_dir)
    logs, num_failed, num_single, cause = log_dir, 0, 0, ""
    mended = Counter[str]()
    try:
        while True:
            facts = JobFacts(
                secrets.token_hex(8), checkout_root(), attempt=num_failed, restart_cause=cause
            )
            when_kept = ", kept if the job fails or loses a process" if is_temporary else ""
            shown_logs = f"{logs}{when_kept}"
            num_left = options.restarts - num_failed - num_single
            may_try = num_left > 0
            try:
                report = _supervise(
                    options,
                    environ,
                    service_command,
                    timing,
                    arrange,
                    facts,
                    logs,
                    shown_logs,
                    num_left or options.worker_restarts,
                    num_failed + num_single,
                )
            except LaunchError as error:  # of an attempt: a host may answer a little later
                if num_failed == 0 or not may_try or error.exit_code != 1:
                    raise
                cause = str(error)
                say(cause)
            else:
                num_single += report.lifecycle.num_restarts
                mended.update(_mended(report.lifecycle))
                may_try = num_left > report.lifecycle.num_restarts
                if not (may_try and may_restart(report)):
                    break
                cause = cause_of(show_failure(report, logs, num_failed))
            wait_s = min(timing.restart_s * 2 ** min(num_failed, 16), timing.longest_restart_s)
            num_failed += 1
            used = f"{num_failed + num_single} of {options.restarts} restarts are used"
            again = f"starting all processes again in {wait_s:g} s ({used})"
            say(f"restart {num_failed} of the job: {again}")
            time.sleep(wait_s)
            logs = attempt_log_dir(log_dir, num_failed)
    except BaseException:
        remove_logs(log_dir, is_temporary and num_failed == 0)  # a report may have named them
        raise
    was_mended = num_failed > 0 or mended.total() > 0  # its logs tell how
    code = conclude(report, logs, is_temporary and not was_mended)
    if was_mended and code == 0:
        remarks = list(report.lifecycle.standbys.remarks)
        if num_failed:
            remarks.append(f"logs of all attempts: {log_dir}")
        elif is_temporary:
            remarks.append(f"logs of all processes: {log_dir}")
        say("; ".join([*_success(num_failed, mended), *remarks]))
    return code


def _success(num_failed: int, mended: Mapping[str, int]) -> list[str]:
    """Return how a job succeeded that has failed, or lost processes, before."""
    times = f" after {num_failed} restart{'s' * (num_failed > 1)}" if num_failed else ""
    parts = [f"{what} {count} time{'s' * (count > 1)}" for what, count in mended.items() if count]
    if len(parts) > 1:
        parts = [f"{', '.join(parts[:-1])} and {parts[-1]}"]
    return [f"the job succeeded{times}", *parts]


def _mended(job: Lifecycle) -> dict[str, int]:
    """Return what was done about lost processes, and how many times."""
    return {
        "a lost worker was replaced": job.num_returned,
        "a lost server was replaced": job.standbys.num_seated,
        "the scheduler was replaced": job.num_schedulers,
        "a standby was started again": job.standbys.num_started,
    }


def check_plan(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    *,
    only_imports: bool = False,
) -> None:
    """Check settings, key and servers' imports before a job runs.

    Raises :class:`LaunchError`.
    """
    facts = JobFacts("none", checkout_root())  # checks ignore what depends on addresses
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
    """Return a supervisor that serves places but no processes, as for ``--check``."""
    return Supervisor(secrets.token_hex(8), environ, Path(), timing)


def _supervise(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
    arrange: Callable[[Supervisor, str], Arrangement],
    facts: JobFacts,
    log_dir: Path,
    shown_logs: str,
    num_restarts: int,
    num_used: int,
) -> JobReport:
    key_file = None if brings_a_key(options, environ) else new_key_file()
    given = {**environ, **dict(options.environment)}
    key = new_key() if key_file else read_given_key(given["PS_JOB_KEY_FILE"])
    # One end goes to the scheduler, which reports on it that all have joined.
    heard, joined = socket.socketpair()
    restarts = num_restarts if _waits_for_workers(given) else 0
    folder = Path(tempfile.gettempdir()) / f"kvstore-scheduler-{facts.job_id}"
    with heard, joined, Supervisor(facts.job_id, environ, log_dir, timing) as supervisor:
        if restarts:
            supervisor.remove_at_the_end(folder)
            folder.mkdir(mode=0o700)
        for note in options.notes if facts.attempt == 0 else ():
            supervisor.terminal.say(note)
        arranged = arrange(supervisor, key)
        with listen(arranged.host, arranged.port) as listener:
            facts = replace(
                facts,
                host=arranged.host,
                port=listener.getsockname()[1],
                listen_fd=listener.fileno(),
                cpu_count=arranged.cpu_count,
                key_file=None if key_file is None else str(key_file),
                joined_fd=joined.fileno(),
                journal=str(folder / "journal") if restarts else None,
                worker_hosts=tuple(arranged.worker_hosts),
                store_port=_store_port(),
            )
            # Without further restarts, no process will take the place of a lost worker.
            planned = replace(options, restarts=num_restarts)
            specs = plan_job(planned, facts, environ, service_command)
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
            supervisor.start(assigned, variables, restarts, num_used)
            if not restarts:
                joined.close()  # only the scheduler holds it now, so its death closes it
            supervisor.joined = SchedulerLines(heard)
            # When the scheduler dies, its port stays taken: only the process that is started in its
            # place, which inherits the socket, too, can listen there.
            return supervisor.wait()


def _waits_for_workers(given: Mapping[str, str]) -> bool:
    """Return whether the job waits for a process in place of a lost worker."""
    try:
        return float(given.get(REJOIN_NAME, REJOIN_S)) > 0
    except ValueError:
        return False  # the nodes say what is wrong with it


def _store_port() -> int:
    """Return a port for a framework's store on worker 0's machine.

    The port is free on this machine. It is below the ports that Linux gives to clients, and only
    worker 0 can listen on it.
    """
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
