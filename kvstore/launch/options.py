"""The launcher's command line, parsed into :class:`LaunchOptions`.

This module only parses: it touches no process, file or environment (``--help`` and ``--version``
print). Wrong input raises :class:`LaunchError`. The flags have the same names as those of MXNet's
``tools/launch.py``. Unlike there, everything from the first argument that is not an option of ours
is the user's command, and the launcher does not parse it. Read ``plan.py`` next.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NoReturn

from kvstore.errors.hints import did_you_mean
from pslite.version import __version__

LAUNCHERS = ("local", "ssh", "mpi", "slurm", "sge", "ray", "yarn", "kubernetes")

_LEAST = {
    "--worker-gpus": 0,
    "--restarts": 0,
    "--worker-restarts": 0,
    "--standbys": 0,
}  # the minimum of all other numbers is 1
_MOST = {"--standbys": 1}  # all other numbers have no maximum

# The launcher decides these; a value given by hand would contradict the other processes.
RESERVED_NAMES = frozenset(
    {
        "DMLC_ROLE",
        "DMLC_TASK_ID",
        "DMLC_NUM_WORKER",
        "DMLC_NUM_SERVER",
        "DMLC_PS_ROOT_URI",
        "DMLC_PS_ROOT_PORT",
        "DMLC_JOB_CLUSTER",
        "DMLC_NUM_ATTEMPT",
        "PS_STANDBYS",
        "PS_STANDS_BY",
        "PS_JOB_ID",
        "PS_JOB_RESTARTS",
        "PS_RESTART_CAUSE",
        "PS_JOB_KEY_FD",
        "PS_LISTEN_FD",
        "PS_JOINED_FD",
        "PS_SCHEDULER_JOURNAL",
    }
)

# Variables that have a meaning only on the launcher's machine.
OF_ONE_MACHINE = RESERVED_NAMES | {"PS_JOB_KEY_FILE", "DMLC_NODE_HOST", "DMLC_RANK"}

_MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")
_MEMORY = re.compile(r"([0-9]{1,9})([gGmM]?)[bB]?\Z")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_ASSIGNMENT = re.compile(r"([^=:]*)([=:])(.*)\Z", re.DOTALL)
_WITH_ITS_VALUE = re.compile(r"-[ns][0-9]+\Z|-H.")  # -n2, -Hhosts

_DESCRIPTION = """\
Start a job: one scheduler, the servers, and COMMAND once for each worker.
COMMAND and everything after it is passed to the workers unchanged, without a shell."""

_EXAMPLES = """\
examples:
  %(prog)s -n 2 -s 1 python train.py --kv-store dist_sync
      two workers and a server on this machine
  %(prog)s -n 4 -s 2 -H hosts python train.py --kv-store dist_sync
      on the hosts that the file "hosts" lists, one in each line, by ssh
  %(prog)s -n 8 --launcher slurm --queue gpu --worker-gpus 1 python train.py
      as a job of Slurm; mpi, sge, yarn, ray and kubernetes likewise
  %(prog)s -n 2 --check python train.py
      only check whether it could run; --dry-run prints what would run
  %(prog)s -n 2 --env OMP_NUM_THREADS=4 --env-server PS_VERBOSE=1 python train.py
      with variables for all processes, and for the servers alone"""

Assignment = tuple[str, str]


class LaunchError(Exception):
    """The launcher cannot run the job as requested; the text says what to do.

    ``exit_code`` is the launcher's exit code. It is 2 if the command line itself is wrong, on any
    machine.

    This is not a ``PSError``, since importing that class would import the whole runtime, and only
    :func:`kvstore.launch.cli.main` catches this error.
    """

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Places:
    """Requested resources. ``*_memory_mb`` is in MiB; None: the system's default.

    ``launcher_args`` are added unchanged to the system's own command (``srun``, ``mpirun``,
    ``qsub``, ``ssh``, ``yarn``).
    """

    jobname: str | None = None
    queue: str | None = None
    worker_cores: int | None = None
    server_cores: int | None = None
    worker_memory_mb: int | None = None
    server_memory_mb: int | None = None
    worker_gpus: int | None = None
    launcher_args: tuple[str, ...] = ()
    image: str | None = None
    namespace: str | None = None
    apply: bool = False


@dataclass(frozen=True)
class LaunchOptions:
    """The user's request. ``command`` is the workers' argument vector, unchanged."""

    num_workers: int
    num_servers: int
    command: tuple[str, ...]
    environment: tuple[Assignment, ...] = ()
    forwarded_names: tuple[str, ...] = ()  # --env NAME: processes get the launcher's value
    server_environment: tuple[Assignment, ...] = ()
    worker_environment: tuple[Assignment, ...] = ()
    server_imports: tuple[str, ...] = ()
    log_dir: str | None = None
    restarts: int = 0
    worker_restarts: int = 0
    standbys: int = 0
    notes: tuple[str, ...] = ()
    launcher: str = "local"
    hostfile: str | None = None
    sync_dst_dir: str | None = None
    check: bool = False
    dry_run: bool = False
    show_status: bool = True
    python: str | None = None
    places: Places = Places()
    tied: str | None = None


# Attributes of LaunchOptions that are copied from argparse's result unchanged.
_AS_GIVEN = (
    *("num_workers", "num_servers", "log_dir", "launcher", "hostfile"),
    *("restarts", "worker_restarts", "standbys"),
    "sync_dst_dir",
    *("check", "dry_run", "show_status", "python", "tied"),
)


class _OptionParser(argparse.ArgumentParser):
    """A parser that raises instead of exiting: only one place decides on exit codes."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message} (--help lists the options)")


def parse_arguments(argv: Sequence[str]) -> LaunchOptions:
    """Parse a command line without the program's own name.

    Raises :class:`LaunchError` with exit code 2 if the command line is wrong. ``--help`` and
    ``--version`` print and raise ``SystemExit(0)``, as argparse does.
    """
    for word in argv:
        check_word(word)
    parser = _build_parser()
    own_arguments, command = _split_command(argv, parser)
    found = parser.parse_args(own_arguments)
    if not command:
        raise LaunchError(
            "the workers' command is missing; write it after the options, as in: -n 2 python "
            "train.py"
        )
    if found.num_servers is None:
        found.num_servers = found.num_workers
    found.launcher = _launcher(found.launcher, found.hostfile)
    _check(found, parser)
    notes = []
    if found.sync_dst_dir is not None and found.launcher != "ssh":
        notes.append(
            f"--sync-dst-dir has no effect with --launcher {found.launcher}, which copies no files"
        )
    if found.p3:
        notes.append("--p3 has no effect: messages are always sent in order of priority")
    found.launcher_args = tuple(word for words in found.launcher_args for word in words)
    return LaunchOptions(
        **{name: getattr(found, name) for name in _AS_GIVEN},
        command=tuple(command),
        environment=tuple(one for one in (*found.env, found.timeout) if isinstance(one, tuple)),
        forwarded_names=tuple(one for one in found.env if isinstance(one, str)),
        server_environment=tuple(found.env_server),
        worker_environment=tuple(found.env_worker),
        server_imports=tuple(dict.fromkeys(found.server_import)),
        notes=tuple(notes),
        places=Places(**{field.name: getattr(found, field.name) for field in fields(Places)}),
    )


def check_word(word: str) -> None:
    """Raise :class:`LaunchError` if ``word`` contains NUL or surrogates."""
    try:
        encoded = os.fsencode(word)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise LaunchError(
            f"an argument of a process must be text without NUL and surrogates, got {word!r}"
        )


def _split_command(
    argv: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], list[str]]:
    """Split ``argv`` before the first word that is not an option or an option's value.

    argparse.REMAINDER is not used, since Python versions treat ``--`` differently there. A leading
    ``--`` ends our options and is dropped; a later one belongs to the command. An unknown option
    raises an error that suggests a similar one.
    """
    known = parser._option_string_actions
    position = 0
    while position < len(argv):
        argument = argv[position]
        if argument == "--":
            return list(argv[:position]), list(argv[position + 1 :])
        if not argument.startswith("-") or argument == "-":
            break
        name = argument.partition("=")[0]
        if name not in known and not _WITH_ITS_VALUE.match(argument):
            raise LaunchError(
                f"unknown option '{name}'{did_you_mean(name, known)} (--help lists the options)"
            )
        position += 2 if argument in known and known[argument].nargs != 0 else 1
    return list(argv[:position]), list(argv[position:])


def _build_parser() -> _OptionParser:
    parser = _OptionParser(
        prog="kvstore-launch",
        usage="%(prog)s -n WORKERS [-s SERVERS] [options] [--] COMMAND [ARGUMENT ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvstore-launch {__version__}")
    group = parser.add_argument_group("for clusters")
    for names, launchers, value, text in _OPTIONS:
        name = names.split()[-1]
        more: dict[str, Any] = {"action": "store_true"}
        if value:
            read = partial(_READERS[value], name) if value in _READERS else str
            more = {"metavar": value, "type": int if value == "N" else read}
        if value in _SEVERAL:
            more |= {"action": "append", "default": []}
        more |= _MORE.get(name, {})
        add = (parser if launchers is LAUNCHERS else group).add_argument
        add(*names.split(), help=text, **more)
    return parser


def _memory_mb(option: str, text: str) -> int:
    """Parse '4g', '512m' or '4096' (MiB, as in YARN) as MiB."""
    found = _MEMORY.match(text)
    if found is None or int(found[1]) == 0:
        raise LaunchError(f"{option} must be a size such as 4g or 512m, got '{text}'")
    return int(found[1]) * (1024 if found[2].lower() == "g" else 1)


def _words(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"{option} '{text}': {error}") from error


def _timeout(option: str, text: str) -> Assignment:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise LaunchError(f"{option} must be a number of seconds greater than 0, got '{text}'")
    return "PS_STALL_TIMEOUT", f"{seconds:g}"


def _launcher(launcher: str | None, hostfile: str | None) -> str:
    """Return the launcher's name; by default ssh with a host file, else local."""
    if launcher is None:
        launcher = "local" if hostfile is None else "ssh"
    if launcher not in LAUNCHERS:
        raise LaunchError(
            f"--launcher must be one of {', '.join(LAUNCHERS)}, got "
            f"'{launcher}'{did_you_mean(launcher, LAUNCHERS)}"
        )
    if launcher == "local" and hostfile is not None:
        raise LaunchError(
            "--launcher local starts all processes on this machine and cannot use --hostfile; "
            "remove one of the two"
        )
    return launcher


def _check(found: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse numbers that are too small, and options of other launchers."""
    for names, launchers, value, _ in _OPTIONS:
        option = names.split()[-1]
        action = parser._option_string_actions[option]
        given = getattr(found, action.dest)
        if value == "N" and given is not None and given < (least := _LEAST.get(option, 1)):
            raise LaunchError(f"{option} must be at least {least}, got {given}")
        if given is not None and given > (most := _MOST.get(option, given)):
            raise LaunchError(f"{option} must be at most {most}, got {given}")
        if given != action.default and found.launcher not in launchers:
            raise LaunchError(
                f"{option} works only with --launcher {', '.join(launchers)}, got "
                f"{found.launcher}; remove it"
            )


def _variable(option: str, text: str) -> Assignment | str:
    """Parse a value of ``--env``; a bare name means the variable's value here."""
    if _ASSIGNMENT.match(text):
        return _assignment(option, text)
    _check_name(option, text, text)
    return text


def _assignment(option: str, text: str) -> Assignment:
    """Parse NAME=VALUE or MXNet's NAME:VALUE; split at the first of the two signs."""
    parts = _ASSIGNMENT.match(text)
    if parts is None:
        raise LaunchError(f"{option} must be NAME=VALUE, got '{text}'")
    _check_name(option, parts[1], text)
    return parts[1], parts[3]


def _module(option: str, name: str) -> str:
    is_file = name.endswith(".py") and "," not in name
    if not (is_file or _MODULE_NAME.match(name)):
        raise LaunchError(
            f"{option} must be a module's name or .py file, without commas, got '{name}'"
        )
    return name


def _check_name(option: str, name: str, text: str) -> None:
    if not _VARIABLE_NAME.match(name):
        raise LaunchError(
            f"{option} '{text}': '{name}' cannot name an environment variable; use letters, digits "
            "and _, and no digit first"
        )
    if name in RESERVED_NAMES and name != text:
        raise LaunchError(f"{option} cannot set {name}, since the launcher sets it; remove it")


_REACHING = ("ssh", "mpi")
_CLUSTERS = ("slurm", "sge", "ray", "yarn", "kubernetes")
# In an array job of sge, all tasks request the same, and each site names memory differently.
_TWO_KINDS = ("slurm", "ray", "yarn", "kubernetes")
_KUBERNETES = ("kubernetes",)

# Each option: its names, the launchers that accept it, the name of its value, and its help text.
_OPTIONS: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    ("-n --num-workers", LAUNCHERS, "N", "number of workers"),
    ("-s --num-servers", LAUNCHERS, "N", "number of servers (default: number of workers)"),
    ("-H --hostfile", _REACHING, "FILE", "file with one host on each line"),
    (
        *("--sync-dst-dir", LAUNCHERS, "DIR"),
        "copy the current directory to this directory on the hosts (ssh)",
    ),
    (
        *("--launcher", LAUNCHERS, "NAME"),
        f"how to start processes: {', '.join(LAUNCHERS)} (default: local, all on this "
        "machine; with --hostfile: ssh)",
    ),
    ("--check", LAUNCHERS, "", "check whether the job could run, without starting it"),
    ("--dry-run", LAUNCHERS, "", "print the exact commands without running them"),
    (
        *("--timeout", LAUNCHERS, "SECONDS"),
        "end calls that wait longer than this for other processes (a round, an init, a "
        "barrier) with an error that names the missing processes; sets PS_STALL_TIMEOUT "
        "(default: no limit)",
    ),
    ("--no-status", LAUNCHERS, "", "do not show the line with the job's progress"),
    (
        *("--env", LAUNCHERS, "NAME[=VALUE]"),
        "set this variable for all processes; without a value, pass on its value here (with "
        "local, processes inherit all variables)",
    ),
    *(
        (
            *(f"--env-{role}", LAUNCHERS, "NAME=VALUE"),
            f"set this variable for {role}s only; NAME:VALUE means the same",
        )
        for role in ("server", "worker")
    ),
    (
        *("--server-import", LAUNCHERS, "MODULE"),
        "module (or .py file) that servers and the scheduler import at their start, such as "
        "the module that registers your optimizers; may be repeated",
    ),
    (
        *("--restarts", LAUNCHERS[:-1], "N"),
        "at most N times, start a worker again that fails in a loop over kv.steps: it takes its "
        "old place and repeats its step; or a standby, for a server that has none any more; after "
        "any other failure end all processes and start the whole job again: "
        "kv.steps(..., checkpoint=DIR) goes on where it has last saved",
    ),
    (
        *("--standbys", LAUNCHERS[:-1], "N"),
        "N standbys for each server, 0 or 1: a standby repeats what its server does, and takes its "
        "place if the server is lost (default: 0)",
    ),
    ("--p3", LAUNCHERS, "", "no effect (for old scripts): priorities are always on"),
    (
        *("--log-dir", LAUNCHERS, "DIR"),
        "directory for one log file per process (default: a temporary directory, kept only "
        "if the job fails)",
    ),
    ("--tied", LAUNCHERS, "FD:DIRECTORY", argparse.SUPPRESS),  # see signals.py
    ("--worker-restarts", LAUNCHERS[:-1], "N", argparse.SUPPRESS),  # --restarts, but not of the job
    ("--python", LAUNCHERS[1:], "PATH", "Python on the hosts (default: the path of this Python)"),
    (
        *("--launcher-args", LAUNCHERS[1:-1], "WORDS"),
        "further options of ssh, mpirun, srun, qsub, yarn or a Ray job, as in "
        "--launcher-args='-p gpu'",
    ),
    ("--jobname", _CLUSTERS, "NAME", "the job's name in the cluster's lists"),
    ("--queue", ("slurm", "sge", "yarn"), "NAME", "queue or partition"),
    ("--worker-cores", _CLUSTERS, "N", "processors of each worker"),
    ("--server-cores", _TWO_KINDS, "N", "processors of each server"),
    ("--worker-memory", _TWO_KINDS, "SIZE", "memory of each worker, as in 4g or 512m"),
    ("--server-memory", _TWO_KINDS, "SIZE", "memory of each server"),
    (
        *("--worker-gpus", ("slurm", "sge", "ray", "kubernetes"), "N"),
        "GPUs of each worker",
    ),
    ("--image", _KUBERNETES, "IMAGE", "container image (kubernetes)"),
    ("--namespace", _KUBERNETES, "NAME", "namespace (kubernetes)"),
    ("--apply", _KUBERNETES, "", "start the job and follow it (kubernetes)"),
)
_MORE: dict[str, dict[str, Any]] = {
    "--num-workers": {"required": True},
    "--restarts": {"default": 0},
    "--worker-restarts": {"default": 0},
    "--standbys": {"default": 0},
    "--no-status": {"action": "store_false", "dest": "show_status"},
    "--worker-memory": {"dest": "worker_memory_mb"},
    "--server-memory": {"dest": "server_memory_mb"},
}
_READERS: dict[str, Callable[[str, str], object]] = {
    "SECONDS": _timeout,
    "NAME[=VALUE]": _variable,
    "NAME=VALUE": _assignment,
    "MODULE": _module,
    "WORDS": _words,
    "SIZE": _memory_mb,
}
_SEVERAL = ("NAME[=VALUE]", "NAME=VALUE", "MODULE", "WORDS")
