"""Checks before a job starts, and the output of --dry-run and --check.

With them, a mistake costs one sentence instead of a job. Runs on the main thread, and may start one
process, which has ended when the check returns. A failed check raises :class:`LaunchError`.
:func:`local_rows` inspects this machine and changes nothing. Used by ``cli.py``, ``run.py`` and the
launchers.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.launch.environment import available_cpu_count, gpu_count
from kvstore.launch.job.child import die_with_launcher
from kvstore.launch.job.report import describe_status
from kvstore.launch.options import RESERVED_NAMES, LaunchError
from kvstore.launch.plan import SERVER_IMPORT_NAME, ProcessSpec, base_environment, script_of
from pslite import Config
from pslite.errors import ConfigError
from pslite.node.address import interface_address
from pslite.security import read_key
from pslite.version import __version__

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_BYTES = 64 << 20  # the default of containers, too small for any model


@dataclass(frozen=True)
class CheckResult:
    """One check: its name, what it found, and whether a job can run with that."""

    name: str
    found: str
    is_good: bool = True


def rehearsal(specs: Sequence[ProcessSpec], directory: str) -> str:
    """Return the commands that a job would start, each with its own variables.

    A shell could run the lines. Names in capitals, such as JOB, stand for values that are known
    only when the job starts.
    """
    lines = [f"cd {shlex.quote(directory)}"]
    for spec in specs:
        variables = sorted(spec.environment.items())
        words = [f"{name}={shlex.quote(value)}" for name, value in variables]
        lines += [f"# {spec.name}", " ".join([*words, shlex.join(spec.argv)])]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[CheckResult]) -> str:
    """Return the rows in columns, each marked as ok or NO."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'ok' if row.is_good else 'NO':<4}{row.name:<{width}}  {row.found}" for row in rows]
    return "\n".join(lines) + "\n"


def conclude_check(rows: Sequence[CheckResult]) -> int:
    """Print the table to standard output; return the exit code of ``--check``, 0 or 1."""
    print(table(rows), end="")
    return 0 if all(row.is_good for row in rows) else 1


def local_rows(
    specs: Sequence[ProcessSpec], environ: Mapping[str, str], *, has_key: bool
) -> list[CheckResult]:
    """Return the rows of this machine; ``has_key``: the user has provided a key.

    The scheduler's address and the servers' modules are checked earlier, and raise errors.
    """
    from kvstore.arrays.cpu import kernels  # imports NumPy, which launching does not need

    environments = by_role(specs, base_environment(environ))
    worker = next(spec for spec in specs if spec.role == "worker")
    path = worker.environment.get("PATH", environ.get("PATH", os.defpath))
    program = shutil.which(worker.argv[0], path=path)
    host, port = (worker.environment[f"DMLC_PS_ROOT_{name}"] for name in ("URI", "PORT"))
    return [
        CheckResult("python", f"{sys.version.split()[0]} ({sys.executable})"),
        CheckResult("kvstore", __version__),
        CheckResult("compiled kernels", kernels.why_missing() or kernels.instructions()),
        CheckResult(
            "worker's program", program or f"there is no program '{worker.argv[0]}'", bool(program)
        ),
        script_row(script_of(worker.argv)),
        CheckResult("directory", os.getcwd()),
        _tried("settings", lambda: "; ".join(check_settings(environments.values())) or "readable"),
        _tried("job key", lambda: check_key(environments["scheduler"]))
        if has_key
        else CheckResult("job key", "a new one"),
        CheckResult("scheduler's address", f"{host}, port {'of its own' if port == '0' else port}"),
        _tried("servers' address", lambda: _advertised(environments["server"])),
        _tried("workers' address", lambda: _advertised(environments["worker"])),
        _shared_memory(),
        CheckResult("processors", f"{available_cpu_count()} for {len(specs)} processes"),
        CheckResult("GPUs", str(gpu_count())),
    ]


def script_row(script: str) -> CheckResult:
    """Return the row on the workers' script; "" if their command names no script."""
    if not script:
        return CheckResult("worker's script", "the command names none")
    is_here = os.path.exists(script)
    found = script if is_here else f"there is no file {script}"
    return CheckResult("worker's script", found, is_here)


def _tried(name: str, look: Callable[[], str]) -> CheckResult:
    """Return a row with the result of ``look``, or with the text of its error."""
    try:
        return CheckResult(name, look())
    except (LaunchError, ConfigError) as error:
        return CheckResult(name, str(error), False)


def _shared_memory() -> CheckResult:
    if not _SHARED_MEMORY.is_dir():
        return CheckResult("shared memory", f"there is no {_SHARED_MEMORY}; TCP is used instead")
    free = shutil.disk_usage(_SHARED_MEMORY).free
    is_good = free >= _LEAST_SHARED_BYTES
    advice = "" if is_good else ": too little (PS_SHM=0 does without)"
    return CheckResult("shared memory", f"{free / 2**20:.0f} MiB free{advice}", is_good)


CHECK_IMPORTS = "--check-imports"
"""The argument with which a service command only imports modules. Two arguments follow: the
modules' names, and the option or variable that named them."""


def by_role(
    specs: Sequence[ProcessSpec], base_environment: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """Return the environment of each role's processes, without their ranks."""
    return {spec.role: {**base_environment, **spec.environment} for spec in specs}


def check_forwarded(names: Sequence[str], environ: Mapping[str, str]) -> None:
    """Check that the variables of ``--env NAME`` are set here.

    Raises :class:`LaunchError` (exit code 2).
    """
    missing = [name for name in names if name not in environ and name not in RESERVED_NAMES]
    if missing:
        raise LaunchError(
            f"--env {missing[0]}: the variable is not set here; export it, or write --env "
            f"{missing[0]}=VALUE",
            exit_code=2,
        )


def check_settings(environments: Iterable[Mapping[str, str]]) -> list[str]:
    """Read the settings as a process with each of these environments will.

    Returns sentences about unknown names. Raises :class:`LaunchError` (exit code 2).
    """
    remarks: list[str] = []
    try:
        for environment in environments:
            remarks += Config.from_env(environment)[1]
    except ConfigError as error:
        raise LaunchError(str(error), exit_code=2) from error
    return list(dict.fromkeys(remarks))


def check_key(environment: Mapping[str, str]) -> str:
    """Check that processes can read the job's key, and return its path.

    Raises :class:`LaunchError` (exit code 1).
    """
    path: str = Config.read("job_key_file", environment)
    if not path:
        raise LaunchError(
            "PS_JOB_KEY_FILE is empty; set it to the file with the job's key, or unset it",
            exit_code=1,
        )
    read_given_key(path)
    return path


def read_given_key(path: str) -> str:
    """Return the text of the user's key. Raises :class:`LaunchError` (exit code 1)."""
    try:
        return (read_key(Config(job_key_file=path)) or b"").decode()
    except (ConfigError, UnicodeDecodeError) as error:
        raise LaunchError(str(error), exit_code=1) from error


def _advertised(environment: Mapping[str, str]) -> str:
    """Return the address of a server or worker here. Raises ``ConfigError``."""
    interface: str = Config.read("interface", environment)
    if host := Config.read("node_host", environment):
        return f"{host} (DMLC_NODE_HOST)"
    if not interface:
        return "the one on the route to the scheduler"
    return f"{interface_address(interface)} (DMLC_INTERFACE={interface})"


def check_server_imports(
    server_argv: Sequence[str],
    environment: Mapping[str, str],
    given: Sequence[str],
    *,
    are_here: bool,
) -> None:
    """Import the servers' modules with the servers' program, in this directory.

    ``given`` are the modules of ``--server-import``, which must exist on every machine. If the
    servers' variable names other modules, those are used instead, and are imported only if servers
    run on this machine (``are_here``). Raises :class:`LaunchError` (exit code 2) with the last line
    of the error output.
    """
    names = environment.get(SERVER_IMPORT_NAME, "")
    is_given = names == ",".join(given)
    if not names or not (is_given or are_here):
        return
    source = "--server-import" if is_given else SERVER_IMPORT_NAME
    done = subprocess.run(
        [*server_argv, CHECK_IMPORTS, names, source],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=die_with_launcher(),  # safe: the launcher has one thread
        check=False,
    )
    if done.returncode == 0:
        return
    lines = done.stderr.strip().splitlines()
    if done.returncode < 0 or not lines:
        # A module that ends the process (a segmentation fault) leaves no line of ours.
        how = describe_status(done.returncode)
        sentence = f"importing {names.replace(',', ', ')} ({source}) failed: {how}"
    else:
        sentence = lines[-1]
    raise LaunchError(f"{sentence}; nothing was started", exit_code=2)
