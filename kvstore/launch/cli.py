"""The launcher's entry point: ``kvstore-launch`` and ``tools/launch.py`` call :func:`main`.

The only place of the launcher that reads the process's arguments and environment. Read
``options.py`` and ``launch/backends/local.py`` next.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvstore.launch.job.checks import check_forwarded
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.job.report import say
from kvstore.launch.job.tie import Tie, parse
from kvstore.launch.options import LaunchError, LaunchOptions, parse_arguments
from kvstore.launch.requirements import missing_packages

# Each launcher is a module of its own with a function run(options, environ, service_command,
# timing) -> exit code, and is imported when it is asked for.
_MODULES = {
    "local": "kvstore.launch.backends.local",
    "ssh": "kvstore.launch.backends.ssh",
    "mpi": "kvstore.launch.backends.mpi",
    "slurm": "kvstore.launch.backends.slurm",
    "sge": "kvstore.launch.backends.sge",
    "ray": "kvstore.launch.backends.ray",
    "yarn": "kvstore.launch.backends.yarn",
    "kubernetes": "kvstore.launch.backends.kubernetes.run",
}


def main(
    argv: Sequence[str] | None = None,
    *,
    service_command: Sequence[str] | None = None,
    timing: Timing | None = None,
) -> int:
    """Run one job and return the launcher's exit code; call it on the main thread.

    ``argv`` is the command line without the program's name (default: this process's);
    ``service_command`` starts a scheduler or a server (default: ``service.py``, which does what
    ``python -m kvstore.server`` does).
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
        run = _runner(options)
        return run(options, os.environ, service, timing or Timing())
    except LaunchError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:  # before the first process was started, or after the last ended
        return 130
    finally:
        if tie is not None:
            tie.clean_up()


def _runner(options: LaunchOptions) -> Callable[..., int]:
    module = _MODULES.get(options.launcher)
    if module is None:
        raise LaunchError(
            f"launcher '{options.launcher}' is not available in this version; "
            f"available: {', '.join(_MODULES)}",
            exit_code=2,
        )
    run: Callable[..., int] = importlib.import_module(module).run
    return run


if __name__ == "__main__":
    sys.exit(main())
