"""The entry point of ``kvstore-launch`` and ``tools/launch.py``.

Only this module of the launcher reads the process's arguments and environment. It also contains the
launcher ``local``, which runs the whole job on this machine. Read ``options.py`` and
``launch/job/run.py`` next.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvstore.launch.environment import available_cpu_count, checkout_root, listen
from kvstore.launch.job.checks import check_forwarded, conclude_check, local_rows, rehearsal
from kvstore.launch.job.report import say
from kvstore.launch.job.restarts import Timing
from kvstore.launch.job.run import Arrangement, check_plan, run_job
from kvstore.launch.job.signals import Tie, parse
from kvstore.launch.job.supervisor import Supervisor
from kvstore.launch.options import LaunchError, LaunchOptions, parse_arguments
from kvstore.launch.plan import JobFacts, brings_a_key, plan_job, scheduler_address
from kvstore.launch.service import missing_packages


def main(
    argv: Sequence[str] | None = None,
    *,
    service_command: Sequence[str] | None = None,
    timing: Timing | None = None,
) -> int:
    """Run one job and return the launcher's exit code; call it on the main thread.

    ``argv`` is the command line without the program's name; None means that of this process.
    ``service_command`` starts a scheduler or a server; None means ``service.py``, which does the
    same as ``python -m kvstore.server``.
    """
    arguments = sys.argv[1:] if argv is None else argv
    service = service_command or (sys.executable, str(Path(__file__).with_name("service.py")))
    tie: Tie | None = None
    try:
        options = parse_arguments(arguments)
        if options.tied is not None:
            tie = parse(options.tied)
            tie.hold()
        missing = missing_packages() if service_command is None else None
        if missing is not None:
            raise LaunchError(missing, exit_code=2)
        check_forwarded(options.forwarded_names, os.environ)
        run: Callable[..., int] = run_local
        if options.launcher != "local":  # the other launchers are modules, imported on demand
            name = "kubernetes.run" if options.launcher == "kubernetes" else options.launcher
            run = importlib.import_module(f"kvstore.launch.backends.{name}").run
        return run(options, os.environ, service, timing or Timing())
    except LaunchError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:  # before the first process has started, or after the last has ended
        return 130
    finally:
        if tie is not None:
            tie.clean_up()


def run_local(
    options: LaunchOptions,
    environ: Mapping[str, str],
    service_command: Sequence[str],
    timing: Timing,
) -> int:
    """Run a job on this machine; see :func:`kvstore.launch.job.run.run_job`."""
    if options.check or options.dry_run:
        return _rehearse(options, environ, service_command)
    host, port = scheduler_address(environ)

    def arrange(supervisor: Supervisor, key: str) -> Arrangement:
        return Arrangement(host, port, available_cpu_count())

    return run_job(options, environ, service_command, timing, arrange)


def _rehearse(
    options: LaunchOptions, environ: Mapping[str, str], service_command: Sequence[str]
) -> int:
    """Run ``--check`` or ``--dry-run``: show what would run, without starting a job.

    Print to standard output. Return 0, or 1 if ``--check`` finds that something is missing. Raise
    :class:`LaunchError` as for a job, except for what the table of ``--check`` shows.
    """
    check_plan(options, environ, service_command, only_imports=options.check)
    host, port = scheduler_address(environ)
    with listen(host, port) as listener:
        facts = JobFacts(
            job_id="JOB",
            host=host,
            port=listener.getsockname()[1] if port else 0,
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


if __name__ == "__main__":
    sys.exit(main())
