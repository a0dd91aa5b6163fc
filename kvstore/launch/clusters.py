"""How a cluster starts agents: what the launchers say that have another program do it.

Data and functions, no more: ``mpi.py``, ``slurm.py`` and others make a :class:`Cluster`, and
``carrier.py`` and ``carried.py`` do what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.launch.ticket import Ticket

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
    agent whose rank is none, or taken, gets a free one. A command that ``clears_up`` takes the
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
    bundle: Callable[[Ticket], Mapping[str, str]] = lambda ticket: {}
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
    #: The processors of each worker where no option names them but the cluster gives so many;
    #: None: those that agents see.
    worker_cores: int | None = None
    #: Of the GPUs that its agent sees, each worker gets so many; 0 leaves that to the cluster.
    worker_gpus: int = 0
    #: The cluster starts another agent for one that is lost before the job has begun.
    replaces: bool = False
