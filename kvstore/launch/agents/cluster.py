"""The interface of clusters that start agents, and functions that they share.

On Slurm, Grid Engine, YARN, Ray and mpirun, one command starts all agents of a job. Each of these
is a subclass of :class:`Cluster` in ``launch/backends``: it builds the commands and reads their
output. Everything else is in ``cluster_job.py``: the listener for the agents, the wait for them,
and the code that takes the job out of the queue however the launcher ends. The functions here,
which ``launch/backends/ssh.py`` uses too, choose the variables for processes on other machines and
the scheduler's address, and evaluate the agents' greetings.
"""

from __future__ import annotations

import ipaddress
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.launch.agents.join import PROGRAM_NAME, AgentTicket
from kvstore.launch.environment import network_id
from kvstore.launch.job.checks import CheckResult
from kvstore.launch.job.report import EXIT_NOT_FOUND, say
from kvstore.launch.options import OF_ONE_MACHINE, LaunchError, LaunchOptions
from kvstore.launch.plan import THREAD_COUNT_NAMES, scheduler_address
from pslite.errors import ConfigError
from pslite.node.address import interface_address

_FIRST_LINES, _LAST_LINES = 10, 10  # of a command's output; one of them usually says the reason

Member = tuple[str, int]
"""A role and a rank."""


class Cluster:
    """One job on one kind of cluster: its commands, and how to read their output.

    ``environ`` is the commands' environment. A backend overrides the attributes and methods.
    """

    #: The name of the submitting program, for messages.
    program = ""
    #: Names of variables; the first one that is set contains an agent's rank.
    rank_names: Sequence[str] = ()
    #: The number of the first rank.
    first_rank = 0
    #: Whether an agent without a valid, free rank gets any free rank.
    only_wishes = False
    #: Whether the cluster replaces an agent that is lost before the job has begun.
    replaces = False
    #: The longest wait for the next agent in seconds; None if a job can wait in a queue.
    connect_s: float | None = None
    #: Seconds that the command may take to end after all agents have ended.
    ending_s = 5.0
    #: Whether the command removes the job from the cluster by itself when it is ended.
    clears_up = False
    #: Whether the command writes to a terminal: many programs buffer what they write to a pipe.
    has_terminal = False
    #: The command that agents run when they lose their launcher; its variables are the agent's.
    if_lost: Sequence[str] = ()
    #: The processor cores of each worker, if no option sets them but the cluster does; None means
    #: the cores that agents see.
    worker_cores: int | None = None
    #: How many of its agent's GPUs each worker gets; 0 leaves that to the cluster.
    worker_gpus = 0

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        self.options = options
        self.places = options.places
        self.environ = dict(environ)
        #: Each agent's role and rank, in the order of the agents' ranks.
        self.members: Sequence[Member] = servers_then_workers(options)

    def submit(self, directory: Path) -> list[str]:
        """Return the command that submits the job and runs until its end."""
        raise NotImplementedError

    def texts(self, ticket: AgentTicket) -> Mapping[str, str]:
        """Return further files of the job's directory: their names and contents."""
        return {}

    def poll(self) -> str:
        """Return why the job waits, in the cluster's own words, or ""."""
        return ""

    def trouble(self) -> str | None:
        """Return why an agent cannot come, or None; called each second during the wait."""
        return None

    def fatal(self, line: str) -> str | None:
        """Return why an agent cannot come, if this ``line`` of the command says so."""
        return None

    def is_news(self, line: str) -> bool:
        """Return whether to show this ``line`` of the command's output to the user."""
        return True

    def is_submitting(self) -> bool:
        """Return whether the job may exist while :meth:`cancel` cannot cancel it yet."""
        return False

    def cancel(self, line: str) -> Sequence[str] | None:
        """Return the command that cancels the job; None until a ``line`` names the job."""
        return None

    def refusal(self, lines: Sequence[str]) -> str | None:
        """Return why no job exists, if ``lines`` of the ended command say so, else None."""
        return None

    def explain(self, lines: Sequence[str], code: int) -> str:
        """Return why the command ended before all agents had connected."""
        return self.refusal(lines) or ended(self.program, lines, code)

    def agent(self, directory: Path) -> list[str]:
        """Return the command that makes a host an agent of the job in ``directory``."""
        return [self.options.python or sys.executable, str(directory / PROGRAM_NAME)]


def servers_then_workers(options: LaunchOptions) -> list[Member]:
    """Return the servers, then their standbys, then the workers."""
    return [
        *(("server", rank) for rank in range(options.num_servers)),
        *(("standby", rank) for rank in range(options.num_servers * options.standbys)),
        *(("worker", rank) for rank in range(options.num_workers)),
    ]


def apart(members: Sequence[Member], hosts: Sequence[str]) -> list[Member]:
    """Return ``members`` with their standbys in another order.

    ``hosts`` are those of the members. As few standbys as possible are on their servers' hosts.
    """
    host_of = dict(zip(members, hosts, strict=True))
    where = [index for index, (role, _) in enumerate(members) if role == "standby"]
    standbys = [members[index] for index in where]

    def num_together(turn: int) -> int:
        turned = zip([*standbys[turn:], *standbys[:turn]], where, strict=True)
        return sum(host_of["server", rank] == hosts[index] for (_, rank), index in turned)

    best = min(range(len(standbys)), key=num_together, default=0)
    found = list(members)
    for index, standby in zip(where, [*standbys[best:], *standbys[:best]], strict=True):
        found[index] = standby
    return found


def print_processes(options: LaunchOptions, named: Sequence[tuple[str, str]]) -> None:
    """Print the commands of servers and workers for a dry run; ``named``: role, name."""
    print("# scheduler: this machine")
    for role, name in named:
        words = options.command if role == "worker" else ("python", "-m", "kvstore.server")
        print(f"# {name}: {shlex.join(words)}")


def ended(what: str, lines: Sequence[str], code: int) -> str:
    """Return a sentence about a command that ended too early; ``code``: subprocess's."""
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{what} ended ({how}) before all processes had started{it_said(lines)}"


def it_said(lines: Sequence[str]) -> str:
    """Return the end of a sentence, with a quotation of a command's output."""
    said = quoted(lines)
    return f"; it said:{said}" if said else ""


def ask(words: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> tuple[str, int]:
    """Run a command that changes nothing; return its output and its exit code.

    Return "" and 127 if it cannot run or does not end within ``timeout_s``.
    """
    try:
        done = subprocess.run(
            words,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "", EXIT_NOT_FOUND
    return done.stdout + done.stderr, done.returncode


def quoted(lines: Sequence[str]) -> str:
    """Return the first and last lines of a command's output, each on its own line."""
    said = [line.strip() for line in lines]
    shown = [*said[:_FIRST_LINES], *said[_FIRST_LINES:][-_LAST_LINES:]]
    return "".join(f"\n  {line}" for line in shown)


# The launcher's variables that hosts get, except for OF_ONE_MACHINE.
_FORWARDED_PREFIXES = ("DMLC_", "PS_", "KVSTORE_", "MXNET_KVSTORE_")
_FORWARDED = (*THREAD_COUNT_NAMES, "KMP_AFFINITY", "LD_LIBRARY_PATH", "PYTHONPATH")


def forwarded_variables(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the launcher's variables that processes on other machines get."""
    return {
        name: value
        for name, value in environ.items()
        if name in options.forwarded_names
        or (
            (name.startswith(_FORWARDED_PREFIXES) or name in _FORWARDED)
            and name not in OF_ONE_MACHINE
        )
    }


def are_here(
    programs: Sequence[str], options: LaunchOptions, environ: Mapping[str, str], remedy: str
) -> bool:
    """Return whether the cluster's ``programs`` are on the PATH.

    If one is missing, ``--dry-run`` alone prints a note and continues; otherwise this raises
    :class:`LaunchError`.
    """
    for name in programs:
        if shutil.which(name, path=environ.get("PATH")) is None:
            without(f"there is no program '{name}' here: {remedy}", options)
            return False
    return True


def without(sentence: str, options: LaunchOptions, *, exit_code: int = 1) -> None:
    """Raise if a part of the cluster is missing, except in ``--dry-run``."""
    if options.check or not options.dry_run:
        raise LaunchError(sentence, exit_code=exit_code)
    say(f"{sentence} (what follows is only shown)")


def wished_address(environ: Mapping[str, str]) -> tuple[str | None, int]:
    """Return the scheduler's host and port from the environment.

    The host is the exported one, or the address of DMLC_INTERFACE, or None; port 0 means any.
    Raises :class:`LaunchError`.
    """
    host, port = scheduler_address(environ)
    if host != "127.0.0.1":
        return host, port
    if environ.get("DMLC_INTERFACE"):
        try:
            return interface_address(environ["DMLC_INTERFACE"]), port
        except ConfigError as error:
            raise LaunchError(str(error), exit_code=1) from error
    return None, port


def common_address(seen: Sequence[str]) -> str:
    """Return the address of this machine that most agents used; avoid loopback."""
    reached = [address for address, _ in Counter(seen).most_common()]
    return next((one for one in reached if not is_loopback(one)), (*seen, "127.0.0.1")[0])


def seen_from_away(greetings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the addresses at which agents on other machines reached this one."""
    here = network_id()
    away = [one for one in greetings if one.get("network") != here]
    return [str(one.get("reached_from")) for one in away or greetings]


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def agent_row(label: str, found: Mapping[str, Any]) -> CheckResult:
    """Return the ``--check`` row of an agent; its greeting proves login and Python."""
    away_s = float(found.get("time_s", 0.0)) - time.time()
    parts = [
        f"{found.get('host')}: Python {found.get('python')}, kvstore {found.get('version')}",
        f"in {found.get('directory')}",
        f"{len(found.get('cores', ()))} processors",
        f"{found.get('gpus')} GPUs",
        f"{found.get('shared_mb')} MiB of shared memory free",
        "a free port" if found.get("has_free_port") else "NO FREE PORT",
        f"clock {away_s:+.0f} s",
        f"reached from {found.get('reached_from') or 'this machine'}",
    ]
    script = found.get("missing_script")
    if script:
        parts.insert(0, f"THERE IS NO FILE {script}")
    return CheckResult(label, ", ".join(parts), bool(found.get("has_free_port")) and not script)


def core_count(greetings: Sequence[Mapping[str, Any]]) -> int:
    """Return how many processor cores all agents have; count shared cores once."""
    found: dict[str, set[int]] = {}
    for greeting in greetings:
        found.setdefault(str(greeting.get("machine")), set()).update(greeting.get("cores", ()))
    return max(1, sum(map(len, found.values())))
