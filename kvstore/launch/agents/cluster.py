"""How a cluster starts agents, and what launchers with other machines have in common.

``launch/backends/mpi.py``, ``launch/backends/slurm.py`` and others make a :class:`Cluster`, which
is data; ``command.py`` and ``cluster_job.py`` do what it says. The functions, which
``launch/backends/ssh.py`` uses too, say which of this machine's variables processes elsewhere get,
at which address the scheduler serves, and what agents have told of their machines.
"""

from __future__ import annotations

import ipaddress
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.launch.agents.ticket import AgentTicket
from kvstore.launch.environment import network_id
from kvstore.launch.job.checks import CheckResult
from kvstore.launch.job.report import say
from kvstore.launch.job.run import scheduler_address
from kvstore.launch.options import OF_ONE_MACHINE, LaunchError, LaunchOptions
from kvstore.launch.plan import THREAD_COUNT_NAMES
from pslite.errors import ConfigError
from pslite.node.address import interface_address

_FIRST_LINES, _LAST_LINES = 10, 10  # of what a command said, around which the reason may be

Member = tuple[str, int]
"""A role and the rank in it."""

Explain = Callable[[Sequence[str], int], str]
"""What a command said and its exit code (negative for a signal), as a sentence."""


def quoted(lines: Sequence[str]) -> str:
    """The first and the last lines of what a command said, each on a line of its own."""
    said = [line.strip() for line in lines]
    shown = [*said[:_FIRST_LINES], *said[_FIRST_LINES:][-_LAST_LINES:]]
    return "".join(f"\n  {line}" for line in shown)


@dataclass(frozen=True)
class Habits:
    """How a command differs from others.

    ``name`` is what people are told it is, where its first word is not. ``is_news`` is given each
    line that it prints and says whether people shall see it. ``is_submitting`` says whether the
    job may be in the cluster without that it is known yet how to take it out. ``ending_s`` is how
    long the command may need to end once no agent is left. Where ranks are ``only_wishes``, an
    agent whose rank is unknown, or taken, gets a free one. A command that ``clears_up`` takes the
    job out of the cluster by itself when it is ended. One that ``has_terminal`` writes to a
    terminal: on a pipe many a program keeps its lines for long.
    """

    name: str | None = None
    is_news: Callable[[str], bool] = lambda line: True
    is_submitting: Callable[[], bool] = lambda: False
    ending_s: float = 5.0
    only_wishes: bool = False
    clears_up: bool = False
    has_terminal: bool = False


USUAL = Habits()


@dataclass(frozen=True)
class Cluster:
    """How one kind of cluster starts agents."""

    #: Who each agent will be, in the order of the agents' ranks.
    members: Sequence[Member]
    #: Makes the command out of the job's directory, in which all hosts find ``agent.py``.
    command: Callable[[Path], Sequence[str]]
    #: The command's variables.
    environment: Mapping[str, str]
    #: An agent's rank is in the first of these variables that is set.
    rank_names: Sequence[str]
    #: Asked when the command ends before all agents have come.
    explain: Explain
    #: What the first rank is called.
    first_rank: int = 0
    #: Further texts in the job's directory, by name.
    files: Mapping[str, str] = field(default_factory=dict)
    #: Makes such texts of the ticket, for hosts that share no directory.
    bundle: Callable[[AgentTicket], Mapping[str, str]] = lambda ticket: {}
    #: Seconds that the next agent may need to come; None where a job can wait in a queue.
    connect_s: float | None = None
    #: Given each line until all agents have come: a sentence if after it one cannot.
    fatal: Callable[[str], str | None] = lambda line: None
    #: What the job waits for, in a few words or none.
    state: Callable[[], str] = lambda: ""
    #: Asked each second until all agents have come: a sentence if one cannot.
    trouble: Callable[[], str | None] = lambda: None
    #: Given "" before the command starts, and then each line, until it makes of one, which tells
    #: how the job is known to the cluster, the command that takes it out of there.
    cancel: Callable[[str], Sequence[str] | None] = lambda line: None
    #: What may be special about the command itself.
    habits: Habits = USUAL
    #: What agents run that have lost their launcher; variables in it are theirs.
    if_lost: Sequence[str] = ()
    #: The processors of each worker where no option names them but the cluster gives this many;
    #: None: those that agents see.
    worker_cores: int | None = None
    #: Of the GPUs that its agent sees, each worker gets this many; 0 leaves that to the cluster.
    worker_gpus: int = 0
    #: The cluster starts another agent for one that is lost before the job has begun.
    replaces: bool = False


# What of the launcher's environment the hosts get, but for OF_ONE_MACHINE.
_FORWARDED_PREFIXES = ("DMLC_", "PS_", "KVSTORE_", "MXNET_KVSTORE_")
_FORWARDED = (*THREAD_COUNT_NAMES, "KMP_AFFINITY", "LD_LIBRARY_PATH", "PYTHONPATH")


def forwarded_variables(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what all processes elsewhere get besides what their machine gives them."""
    found = {
        name: value
        for name, value in environ.items()
        if (name.startswith(_FORWARDED_PREFIXES) or name in _FORWARDED)
        and name not in OF_ONE_MACHINE
    }
    for name in options.forwarded_names:
        if name in environ:
            found[name] = environ[name]
    return found


def find_program(
    name: str, options: LaunchOptions, environ: Mapping[str, str], remedy: str
) -> str | None:
    """Where the cluster's program ``name`` is; None where it is missing and nothing is started.

    ``--dry-run`` alone goes without it, and says so. Raises :class:`LaunchError` else.
    """
    found = shutil.which(name, path=environ.get("PATH"))
    if found is None:
        without(f"there is no program '{name}' here: {remedy}", options)
    return found


def without(sentence: str, options: LaunchOptions, *, exit_code: int = 1) -> None:
    """Refuse to go on without a part of the cluster, unless only ``--dry-run`` is asked for."""
    if options.check or not options.dry_run:
        raise LaunchError(sentence, exit_code=exit_code)
    say(f"{sentence} (what follows is only shown)")


def wished_address(environ: Mapping[str, str]) -> tuple[str | None, int]:
    """Where the user wants the scheduler: as exported, else DMLC_INTERFACE's address, else None.

    And the port, 0 for any. Raises :class:`LaunchError`.
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
    """Of the addresses by which others reached this machine the most usual that all can use."""
    for address, _ in Counter(seen).most_common():
        if not is_loopback(address):
            return address
    return seen[0] if seen else "127.0.0.1"


def seen_from_away(greetings: Sequence[Mapping[str, Any]]) -> list[str]:
    """By which addresses agents reached this machine; those that are on it can use any of them."""
    here = network_id()
    away = [one for one in greetings if one.get("network") != here]
    return [str(one.get("reached_from")) for one in away or greetings]


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def agent_row(label: str, found: Mapping[str, Any]) -> CheckResult:
    """Return what an agent says of its machine. That it greets proves login, Python and version."""
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
    """The processors of all agents together; those on one machine may share some."""
    found: dict[str, set[int]] = {}
    for greeting in greetings:
        found.setdefault(str(greeting.get("machine")), set()).update(greeting.get("cores", ()))
    return max(1, sum(map(len, found.values())))
