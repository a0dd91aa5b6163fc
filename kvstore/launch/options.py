"""The launcher's command line, as data.

Pure: text in, :class:`LaunchOptions` or :class:`LaunchError` out; no process, file or
environment is touched (``--help`` and ``--version`` print). The names of the flags are those of
MXNet's ``tools/launch.py``. Unlike there, everything from the first argument that is not an
option of ours belongs to the user's command and is never looked at again. Read ``plan.py`` next.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import NoReturn

from kvstore.errors.hints import did_you_mean
from pslite.version import __version__

LAUNCHERS = ("local", "ssh", "mpi", "slurm", "sge", "ray", "yarn", "kubernetes")

# Where an option means something; with any other launcher it is an error.
_CLUSTERS = ("slurm", "sge", "ray", "yarn", "kubernetes")
# An array job of sge asks the same for all, and each cell has names of its own for memory.
_TWO_KINDS = ("slurm", "ray", "yarn", "kubernetes")
_MEANT_FOR: dict[str, tuple[str, ...]] = {
    "--hostfile": ("ssh", "mpi"),
    "--python": ("ssh", "mpi", "slurm", "sge", "ray", "yarn", "kubernetes"),
    "--launcher-args": ("ssh", "mpi", "slurm", "sge", "ray", "yarn"),
    "--jobname": _CLUSTERS,
    "--queue": ("slurm", "sge", "yarn"),
    "--worker-cores": _CLUSTERS,
    "--server-cores": _TWO_KINDS,
    "--worker-memory": _TWO_KINDS,
    "--server-memory": _TWO_KINDS,
    "--worker-gpus": ("slurm", "sge", "ray", "kubernetes"),
    "--image": ("kubernetes",),
    "--namespace": ("kubernetes",),
    "--apply": ("kubernetes",),
}

# The least that each number may be.
_LEAST = {
    "--num-workers": 1,
    "--num-servers": 1,
    "--worker-cores": 1,
    "--server-cores": 1,
    "--worker-gpus": 0,
}

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
        "PS_JOB_ID",
        "PS_JOB_KEY_FD",
        "PS_LISTEN_FD",
        "PS_JOINED_FD",
    }
)

# These and what else means something on the launcher's machine only.
OF_ONE_MACHINE = RESERVED_NAMES | {"PS_JOB_KEY_FILE", "DMLC_NODE_HOST", "DMLC_RANK"}

_MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*\Z")
_MEMORY = re.compile(r"([0-9]{1,9})([gGmM]?)[bB]?\Z")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_ASSIGNMENT = re.compile(r"([^=:]*)([=:])(.*)\Z", re.DOTALL)
_WITH_ITS_VALUE = re.compile(r"-[ns][0-9]+\Z|-H.")  # -n2, -Hhosts

_DESCRIPTION = """\
Start a job: one scheduler, the servers, and COMMAND once for each worker.
Everything from COMMAND on is passed to the workers as it stands, without a shell."""

_EXAMPLES = """\
examples:
  %(prog)s -n 2 -s 1 python train.py --kv-store dist_sync
      two workers and a server on this machine
  %(prog)s -n 4 -s 2 -H hosts python train.py --kv-store dist_sync
      on the hosts that the file "hosts" lists, one in each line, by ssh
  %(prog)s -n 8 --launcher slurm --queue gpu --worker-gpus 1 python train.py
      as a job of Slurm; mpi, sge, yarn, ray and kubernetes likewise
  %(prog)s -n 2 --check python train.py
      only look whether it could run; --dry-run prints what would run
  %(prog)s -n 2 --env OMP_NUM_THREADS=4 --env-server PS_VERBOSE=1 python train.py
      with variables for all processes, and for the servers alone"""

Assignment = tuple[str, str]


class LaunchError(Exception):
    """The launcher cannot do what was asked; the text says what to do.

    ``exit_code`` is how it ends: 2 where the words make no sense, wherever they are typed.

    Not a ``PSError``: importing that tree imports the whole runtime, and only
    :func:`kvstore.launch.cli.main` ever catches this.
    """

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Places:
    """What is asked of a cluster's own system. ``*_memory_mb`` in MiB; None leaves it to it.

    ``launcher_args`` are added to that system's own command (``srun``, ``mpirun``, ``qsub``,
    ``ssh``, ``yarn``) as they stand.
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
    """What the user asked for. ``command`` is the workers' argument vector, untouched."""

    num_workers: int
    num_servers: int
    command: tuple[str, ...]
    environment: tuple[Assignment, ...] = ()
    forwarded_names: tuple[str, ...] = ()  # --env NAME: with the value that it has here
    server_environment: tuple[Assignment, ...] = ()
    worker_environment: tuple[Assignment, ...] = ()
    server_imports: tuple[str, ...] = ()
    log_dir: str | None = None
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


# Attributes of LaunchOptions that are what argparse has found.
_AS_GIVEN = (
    *("num_workers", "num_servers", "log_dir", "launcher", "hostfile", "sync_dst_dir"),
    *("check", "dry_run", "show_status", "python", "tied"),
)


class _OptionParser(argparse.ArgumentParser):
    """Raises instead of exiting, so that one place decides about exit codes."""

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message} (--help lists the options)")


def parse_arguments(argv: Sequence[str]) -> LaunchOptions:
    """Read a command line without the program's own name.

    Raises :class:`LaunchError` with exit code 2 when it makes no sense. ``--help`` and
    ``--version`` print and raise ``SystemExit(0)``, as argparse does.
    """
    for word in argv:
        check_word(word)
    parser = _build_parser()
    own_arguments, command = _split_command(argv, parser)
    found = parser.parse_args(own_arguments)
    if not command:
        raise LaunchError(
            "no command given: write the workers' command after the options, "
            "as in: -n 2 python train.py"
        )
    if found.num_servers is None:
        found.num_servers = found.num_workers
    found.launcher = _launcher(found.launcher, found.hostfile)
    _check_counts(found)
    _check_meaning(found, parser)
    notes = []
    if found.sync_dst_dir is not None and found.launcher != "ssh":
        notes.append(
            f"--sync-dst-dir has no effect with --launcher {found.launcher}: nothing is copied"
        )
    if found.p3:
        notes.append(
            "--p3 changes nothing: messages are always sent in the order of their priority"
        )
    found.launcher_args = tuple(found.launcher_args)
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
    """Raise :class:`LaunchError` for text that no process can be given: with NUL or surrogates."""
    try:
        encoded = os.fsencode(word)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise LaunchError(
            f"{word!r} cannot be given to a process: expected text without NUL and surrogates"
        )


def _split_command(
    argv: Sequence[str], parser: argparse.ArgumentParser
) -> tuple[list[str], list[str]]:
    """Cut ``argv`` before the first argument that is neither an option nor an option's value.

    argparse.REMAINDER is not used: what it does with ``--`` differs between Python versions.
    A leading ``--`` ends our options and is dropped; a later one belongs to the command. An
    option that does not exist is refused, with the one that was probably meant.
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
                f"there is no option '{name}'{did_you_mean(name, known)} (--help lists the options)"
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
    add = parser.add_argument
    add("--version", action="version", version=f"kvstore-launch {__version__}")
    add("-n", "--num-workers", type=int, required=True, metavar="N", help="how many workers")
    add("-s", "--num-servers", type=int, metavar="N", help="how many servers (default: as workers)")
    add("-H", "--hostfile", metavar="FILE", help="hosts, for launchers that reach other machines")
    add("--sync-dst-dir", metavar="DIR", help="directory on the hosts to copy this one to (ssh)")
    add(
        "--launcher",
        metavar="NAME",
        help=f"how processes are started: {', '.join(LAUNCHERS)} (default: local, everything on "
        "this machine; with --hostfile ssh)",
    )
    add("--check", action="store_true", help="look whether the job could run; start nothing")
    add("--dry-run", action="store_true", help="print exactly what would run; start nothing")
    add(
        "--timeout",
        metavar="SECONDS",
        type=_timeout,
        help="end what waits longer than this for other processes (a round, an init, a barrier) "
        "with an error that names who is missing; sets PS_STALL_TIMEOUT (default: no limit)",
    )
    add(
        "--no-status",
        action="store_false",
        dest="show_status",
        help="no line about the job's progress",
    )
    add(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set this variable for all processes; without a value pass on the one that is set "
        "here (local: all are inherited anyway)",
    )
    for role in "server", "worker":
        add(
            f"--env-{role}",
            type=partial(_assignment, f"--env-{role}"),
            action="append",
            default=[],
            metavar="NAME=VALUE",
            help=f"set this variable for {role}s only; NAME:VALUE means the same",
        )
    add(
        "--server-import",
        type=_module,
        action="append",
        default=[],
        metavar="MODULE",
        help="module (or .py file) that servers and the scheduler import when they start, such as "
        "the one that registers your own optimizers; may be repeated",
    )
    add("--p3", action="store_true", help="accepted for old scripts: priorities are always on")
    add(
        "--log-dir",
        metavar="DIR",
        help="keep one log file per process here (default: a temporary directory, "
        "which is kept only when the job fails)",
    )
    add("--tied", metavar="FD:DIRECTORY", help=argparse.SUPPRESS)  # see signals.py
    _add_places(parser)
    return parser


def _add_places(parser: argparse.ArgumentParser) -> None:
    """The options of single launchers; ``_MEANT_FOR`` says of which."""
    add = parser.add_argument_group("for clusters").add_argument
    add("--python", metavar="PATH", help="Python on the hosts (default: this one's path)")
    add(
        "--launcher-args",
        type=_words,
        action="extend",
        default=[],
        metavar="WORDS",
        help="further options of ssh, mpirun, srun, qsub, yarn or a Ray job, as in "
        "--launcher-args='-p gpu'",
    )
    add("--jobname", metavar="NAME", help="the job's name in the cluster's lists")
    add("--queue", metavar="NAME", help="queue or partition")
    add("--worker-cores", type=int, metavar="N", help="processors of each worker")
    add("--server-cores", type=int, metavar="N", help="processors of each server")
    add(
        "--worker-memory",
        type=partial(_memory_mb, "--worker-memory"),
        dest="worker_memory_mb",
        metavar="SIZE",
        help="memory of each worker, as in 4g or 512m",
    )
    add(
        "--server-memory",
        type=partial(_memory_mb, "--server-memory"),
        dest="server_memory_mb",
        metavar="SIZE",
        help="memory of each server",
    )
    add("--worker-gpus", type=int, metavar="N", help="GPUs of each worker; servers get none")
    add("--image", metavar="IMAGE", help="container image (kubernetes)")
    add("--namespace", metavar="NAME", help="namespace (kubernetes)")
    add("--apply", action="store_true", help="start the job and follow it (kubernetes)")


def _check_counts(found: argparse.Namespace) -> None:
    for option, least in _LEAST.items():
        count = getattr(found, option.removeprefix("--").replace("-", "_"))
        if count is not None and count < least:
            raise LaunchError(f"{option} must be at least {least}, not {count}")


def _memory_mb(option: str, text: str) -> int:
    """MiB of '4g', '512m' or '4096' (MiB, as in YARN)."""
    found = _MEMORY.match(text)
    if found is None or int(found[1]) == 0:
        raise LaunchError(f"{option} needs a size such as 4g or 512m, not '{text}'")
    return int(found[1]) * (1024 if found[2].lower() == "g" else 1)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"--launcher-args '{text}': {error}") from error


def _timeout(text: str) -> Assignment:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise LaunchError(f"--timeout needs a number of seconds greater than 0, not '{text}'")
    return "PS_STALL_TIMEOUT", f"{seconds:g}"


def _launcher(launcher: str | None, hostfile: str | None) -> str:
    """MXNet's default is ssh, which means nothing without hosts; so it is local then."""
    if launcher is None:
        launcher = "local" if hostfile is None else "ssh"
    if launcher not in LAUNCHERS:
        raise LaunchError(
            f"--launcher is one of {', '.join(LAUNCHERS)}; got '{launcher}'"
            f"{did_you_mean(launcher, LAUNCHERS)}"
        )
    if launcher == "local" and hostfile is not None:
        raise LaunchError(
            "--launcher local starts everything on this machine and takes no --hostfile; "
            "leave one of the two out"
        )
    return launcher


def _check_meaning(found: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for option, launchers in _MEANT_FOR.items():
        action = parser._option_string_actions[option]
        if getattr(found, action.dest) != action.default and found.launcher not in launchers:
            raise LaunchError(
                f"{option} is for --launcher {', '.join(launchers)}; {found.launcher} does not "
                "use it"
            )


def _variable(text: str) -> Assignment | str:
    """Of ``--env``: a name is that of a variable with the value that it has here."""
    if _ASSIGNMENT.match(text):
        return _assignment("--env", text)
    _check_name("--env", text, text)
    return text


def _assignment(option: str, text: str) -> Assignment:
    """NAME=VALUE, or NAME:VALUE as MXNet's launcher wants it; the first of both signs counts."""
    parts = _ASSIGNMENT.match(text)
    if parts is None:
        raise LaunchError(f"{option} needs NAME=VALUE, not '{text}'")
    _check_name(option, parts[1], text)
    return parts[1], parts[3]


def _module(name: str) -> str:
    is_file = name.endswith(".py") and "," not in name
    if not (is_file or _MODULE_NAME.match(name)):
        raise LaunchError(
            f"--server-import needs a module's name or .py file, without commas; not '{name}'"
        )
    return name


def _check_name(option: str, name: str, text: str) -> None:
    if not _VARIABLE_NAME.match(name):
        raise LaunchError(f"{option} '{text}': '{name}' is not the name of an environment variable")
    if name in RESERVED_NAMES and name != text:
        raise LaunchError(f"{option} cannot set {name}: the launcher sets it itself; leave it out")
