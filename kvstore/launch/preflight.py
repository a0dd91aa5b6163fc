"""What is checked before anything is started, so that a mistake costs one sentence and no job.

Runs on the main thread; may start one process, which has ended when it returns. Every function
raises :class:`LaunchError`. Called from ``cli.py``, ``jobrun.py`` and ``rehearsal.py``. The other
side of the imports is ``service.py``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence

from kvstore.launch.child import die_with_launcher
from kvstore.launch.failure import describe_status
from kvstore.launch.options import RESERVED_NAMES, LaunchError
from kvstore.launch.plan import SERVER_IMPORT_NAME, ProcessSpec
from pslite import Config
from pslite.address import interface_address
from pslite.errors import ConfigError
from pslite.security import read_key

CHECK_IMPORTS = "--check-imports"
"""What a service command is called with to import names and nothing more. Two words follow: the
names, and where they come from."""


def by_role(
    specs: Sequence[ProcessSpec], base_environment: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """The whole environment of each role's processes, but for their ranks."""
    return {spec.role: {**base_environment, **spec.environment} for spec in specs}


def check_forwarded(names: Sequence[str], environ: Mapping[str, str]) -> None:
    """What ``--env NAME`` passes on must be set here, but for names that the launcher sets.

    Raises :class:`LaunchError` (exit code 2).
    """
    missing = [name for name in names if name not in environ and name not in RESERVED_NAMES]
    if missing:
        raise LaunchError(
            f"--env {missing[0]}: there is no such variable here to pass on; "
            f"export it, or write --env {missing[0]}=VALUE",
            exit_code=2,
        )


def check_settings(environments: Iterable[Mapping[str, str]]) -> list[str]:
    """Read the settings as a process with each of these environments will.

    Returns sentences about names that nobody knows. Raises :class:`LaunchError` (exit code 2).
    """
    remarks: list[str] = []
    try:
        for environment in environments:
            remarks += Config.from_env(environment)[1]
    except ConfigError as error:
        raise LaunchError(str(error), exit_code=2) from error
    return list(dict.fromkeys(remarks))


def check_key(environment: Mapping[str, str]) -> str:
    """Read the job's key as a process will, and return its file. Exit code 1 when it cannot be."""
    path: str = Config.read("job_key_file", environment)
    if not path:
        raise LaunchError(
            "PS_JOB_KEY_FILE is empty: name the file with the job's key, or leave it out",
            exit_code=1,
        )
    try:
        read_key(Config(job_key_file=path))
    except ConfigError as error:
        raise LaunchError(str(error), exit_code=1) from error
    return path


def check_interface(environment: Mapping[str, str]) -> str:
    """What a server or worker on this machine will advertise. Exit code 1 when there is none."""
    interface: str = Config.read("interface", environment)
    if host := Config.read("node_host", environment):
        return f"{host} (DMLC_NODE_HOST)"
    if not interface:
        return "the one on the route to the scheduler"
    try:
        return f"{interface_address(interface)} (DMLC_INTERFACE={interface})"
    except ConfigError as error:
        raise LaunchError(str(error), exit_code=1) from error


def check_server_imports(
    specs: Sequence[ProcessSpec],
    base_environment: Mapping[str, str],
    given: Sequence[str],
    *,
    are_here: bool,
) -> None:
    """Import what the first server of ``specs`` will: with its program, variables, directory.

    ``given`` is what ``--server-import`` names, which every machine must have. Where the server's
    variable says something else, that counts, and is tried if servers run on this machine
    (``are_here``). Raises :class:`LaunchError` (exit code 2) with the last line of what went wrong.
    """
    server = next(spec for spec in specs if spec.role == "server")
    environment = {**base_environment, **server.environment}
    names = environment.get(SERVER_IMPORT_NAME, "")
    is_given = names == ",".join(given)
    if not names or not (is_given or are_here):
        return
    source = "--server-import" if is_given else SERVER_IMPORT_NAME
    done = subprocess.run(
        [*server.argv, CHECK_IMPORTS, names, source],
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
