"""The interface of clusters that start agents, and what they share.

Slurm, Grid Engine, YARN, Ray and mpirun start all agents of a job by one command. Each is a
:class:`Cluster` in ``launch/backends``: it states its commands and reads what they print. All else
is written once, in ``cluster_job.py``: the gate for the agents, the wait for
them, and what takes the job out of the queue however the launcher ends. The functions, which
``launch/backends/ssh.py`` uses too, say which of this machine's variables processes elsewhere get,
at which address the scheduler serves, and what agents have told of their machines.
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

_FIRST_LINES, _LAST_LINES = 10, 10  # of what a command said, around which the reason may be

Member = tuple[str, int]
"""A role and the rank in it."""


class Cluster:
    """One job on one kind of cluster: its commands, and how to read output.

    ``environ`` is what the commands get. A backend says the rest by its attributes and methods.
    """

    #: The program that submits, as people are told.
    program = ""
    #: An agent's rank is in the first of these variables that is set.
    rank_names: Sequence[str] = ()
    #: What the first rank is called.
    first_rank = 0
    #: Where ranks are only wishes, an agent whose rank is unknown, or taken, gets a free one.
    only_wishes = False
    #: The cluster starts another agent for one that is lost before the job has begun.
    replaces = False
    #: Seconds that the next agent may need to come; None where a job can wait in a queue.
    connect_s: float | None = None
    #: Seconds that the command may need to end once no agent is left.
    ending_s = 5.0
    #: The command takes the job out of the cluster by itself when it is ended.
    clears_up = False
    #: The command writes to a terminal: on a pipe many a program keeps its lines for long.
    has_terminal = False
    #: What agents run that have lost their launcher; variables in it are theirs.
    if_lost: Sequence[str] = ()
    #: The processors of each worker where no option names them but the cluster gives this many;
    #: None: those that agents see.
    worker_cores: int | None = None
    #: Of the GPUs that its agent sees, each worker gets this many; 0 leaves that to the cluster.
    worker_gpus = 0

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        self.options = options
        self.places = options.places
        self.environ = dict(environ)
        #: Who each agent will be, in the order of the agents' ranks.
        self.members: Sequence[Member] = servers_then_workers(options)

    def submit(self, directory: Path) -> list[str]:
        """Return the command that submits the job and runs until its end."""
        raise NotImplementedError

    def texts(self, ticket: AgentTicket) -> Mapping[str, str]:
        """Return further files of the job's directory, by name."""
        return {}

    def poll(self) -> str:
        """Return what the job waits for, in the system's own words; "" for nothing to say."""
        return ""

    def trouble(self) -> str | None:
        """Return why an agent cannot come; called each second while any is awaited."""
        return None

    def fatal(self, line: str) -> str | None:
        """Return why an agent cannot come, if this ``line`` of the command says so."""
        return None

    def is_news(self, line: str) -> bool:
        """Return whether people shall see this ``line`` of the command's."""
        return True

    def is_submitting(self) -> bool:
        """Return whether the job may be there and :meth:`cancel` does not know it yet."""
        return False

    def cancel(self, line: str) -> Sequence[str] | None:
        """Return the command that cancels the job, once a ``line`` identifies it."""
        return None

    def refusal(self, lines: Sequence[str]) -> str | None:
        """Return why no job exists, if the command has ended and its ``lines`` say so."""
        return None

    def explain(self, lines: Sequence[str], code: int) -> str:
        """Return why the command has ended before all agents had come."""
        return self.refusal(lines) or ended(self.program, lines, code)

    def agent(self, directory: Path) -> list[str]:
        """Return what hosts have to run to become agents of the job in ``directory``."""
        return [self.options.python or sys.executable, str(directory / PROGRAM_NAME)]


def servers_then_workers(options: LaunchOptions) -> list[Member]:
    return [
        *(("server", rank) for rank in range(options.num_servers)),
        *(("worker", rank) for rank in range(options.num_workers)),
    ]


def print_processes(options: LaunchOptions, named: Sequence[tuple[str, str]]) -> None:
    """Print the commands of servers and workers, by role and name, for a dry run."""
    print("# scheduler: this machine")
    for role, name in named:
        words = options.command if role == "worker" else ("python", "-m", "kvstore.server")
        print(f"# {name}: {shlex.join(words)}")


def ended(what: str, lines: Sequence[str], code: int) -> str:
    """Return a sentence on a command that ended too early; ``code`` as in subprocess."""
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{what} ended ({how}) before all processes had started{it_said(lines)}"


def it_said(lines: Sequence[str]) -> str:
    """Return the end of a sentence that quotes a command's output."""
    said = quoted(lines)
    return f"; it said:{said}" if said else ""


def ask(words: Sequence[str], environ: Mapping[str, str], timeout_s: float) -> tuple[str, int]:
    """Run a command that only looks; return what it printed and its exit code.

    "" and 127 where it cannot be run, or does not answer within ``timeout_s``.
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
    """Return the first and last lines of a command's output, a line each."""
    said = [line.strip() for line in lines]
    shown = [*said[:_FIRST_LINES], *said[_FIRST_LINES:][-_LAST_LINES:]]
    return "".join(f"\n  {line}" for line in shown)


# What of the launcher's environment the hosts get, but for OF_ONE_MACHINE.
_FORWARDED_PREFIXES = ("DMLC_", "PS_", "KVSTORE_", "MXNET_KVSTORE_")
_FORWARDED = (*THREAD_COUNT_NAMES, "KMP_AFFINITY", "LD_LIBRARY_PATH", "PYTHONPATH")


def forwarded_variables(options: LaunchOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return what all processes elsewhere get besides what their machine gives them."""
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
    """Return if the cluster's ``programs`` are on the PATH; False in dry runs.

    ``--dry-run`` alone continues without them and says so; otherwise raises :class:`LaunchError`.
    """
    for name in programs:
        if shutil.which(name, path=environ.get("PATH")) is None:
            without(f"there is no program '{name}' here: {remedy}", options)
            return False
    return True


def without(sentence: str, options: LaunchOptions, *, exit_code: int = 1) -> None:
    """Raise if a part of the cluster is missing, unless in ``--dry-run``."""
    if options.check or not options.dry_run:
        raise LaunchError(sentence, exit_code=exit_code)
    say(f"{sentence} (what follows is only shown)")


def wished_address(environ: Mapping[str, str]) -> tuple[str | None, int]:
    """Return the scheduler's address: exported, or DMLC_INTERFACE's, or None.

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
    """Return the commonest address of this machine that all others can use."""
    reached = [address for address, _ in Counter(seen).most_common()]
    return next((one for one in reached if not is_loopback(one)), (*seen, "127.0.0.1")[0])


def seen_from_away(greetings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the addresses of this machine that agents elsewhere have reached."""
    here = network_id()
    away = [one for one in greetings if one.get("network") != here]
    return [str(one.get("reached_from")) for one in away or greetings]


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def agent_row(label: str, found: Mapping[str, Any]) -> CheckResult:
    """Return the table row of an agent; its greeting proves login and Python."""
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
    """Return the processors of all agents together; some may be shared."""
    found: dict[str, set[int]] = {}
    for greeting in greetings:
        found.setdefault(str(greeting.get("machine")), set()).update(greeting.get("cores", ()))
    return max(1, sum(map(len, found.values())))
