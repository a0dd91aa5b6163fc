"""The launcher ``local``: the whole job runs on this machine. Read ``launch/job/run.py`` next."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from kvstore.launch.environment import available_cpu_count, checkout_root, listen
from kvstore.launch.job.checks import conclude_check, local_rows, rehearsal
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.job.run import Arrangement, check_plan, run_job, scheduler_address
from kvstore.launch.job.supervisor import Supervisor
from kvstore.launch.options import LaunchOptions
from kvstore.launch.plan import JobFacts, brings_a_key, plan_job


def run(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """As :func:`kvstore.launch.job.run.run_job`."""
    if options.check or options.dry_run:
        return rehearse(options, environ, service_command)
    host, port = scheduler_address(environ)

    def arrange(supervisor: Supervisor, key: str) -> Arrangement:
        return Arrangement(host, port, available_cpu_count())

    return run_job(options, environ, service_command, timing, arrange)


def rehearse(
    options: LaunchOptions, environ: Mapping[str, str], service_command: Sequence[str]
) -> int:
    """``--check`` and ``--dry-run``: what would run, and whether it could; starts no job.

    Prints to standard output. Returns 0, or with ``--check`` 1 when something is missing.
    Raises :class:`LaunchError` as :func:`run` would, but for what the table of ``--check`` says.
    """
    check_plan(options, environ, service_command, only_imports=options.check)
    host, port = scheduler_address(environ)
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
        specs = plan_job(options, facts, environ, service_command)
    if options.dry_run:
        print(rehearsal(specs, os.getcwd()), end="")
    if not options.check:
        return 0
    return conclude_check(local_rows(specs, environ, has_key=brings_a_key(options, environ)))
