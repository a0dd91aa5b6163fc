"""A system that starts a job's agents by one command: Slurm, Grid Engine, YARN, Ray or mpirun.

A backend is a :class:`BatchQueue`: it states its commands and reads what they print. All else is
written once: the gate for the agents, the wait for them, the command's lines, and what takes the
job out of the queue however the launcher ends. Read ``launch/agents/cluster_job.py`` next.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvstore.launch.agents.cluster import Cluster, Habits, Member, find_program, quoted
from kvstore.launch.agents.cluster_job import agent_command, run_carried, servers_then_workers
from kvstore.launch.agents.ticket import AgentTicket
from kvstore.launch.job.lifecycle import Timing
from kvstore.launch.options import LaunchOptions

Runner = Callable[[LaunchOptions, Mapping[str, str], Sequence[str], Timing], int]
"""As :func:`kvstore.launch.job.run.run_job`."""


class BatchQueue:
    """One job's way through one kind of queue. ``environ`` is what its commands get.

    The attributes are those of :class:`Cluster` and :class:`Habits`.
    """

    #: The program that submits, as people are told.
    program = ""
    rank_names: Sequence[str] = ()
    first_rank = 0
    if_lost: Sequence[str] = ()
    connect_s: float | None = None
    ending_s = Habits.ending_s
    only_wishes = clears_up = has_terminal = replaces = False
    worker_cores: int | None = None
    worker_gpus = 0

    def __init__(self, options: LaunchOptions, environ: Mapping[str, str]) -> None:
        self.options = options
        self.places = options.places
        self.environ = dict(environ)
        self.members: Sequence[Member] = servers_then_workers(options)

    def submit(self, directory: Path) -> list[str]:
        """Return the command that submits the job of ``directory`` and stays until its end."""
        raise NotImplementedError

    def texts(self, ticket: AgentTicket) -> Mapping[str, str]:
        """Further files of the job's directory, by name."""
        return {}

    def poll(self) -> str:
        """Return what the job waits for, in the system's own words; "" for nothing to say."""
        return ""

    def trouble(self) -> str | None:
        """Asked each second while agents are awaited: why one cannot come."""
        return None

    def fatal(self, line: str) -> str | None:
        """Why an agent cannot come, if this ``line`` of the command's tells."""
        return None

    def is_news(self, line: str) -> bool:
        """Return whether people shall see this ``line`` of the command's."""
        return True

    def is_submitting(self) -> bool:
        """Return whether the job may be there and :meth:`cancel` does not know it yet."""
        return False

    def cancel(self, line: str) -> Sequence[str] | None:
        """Return what takes the job out, once a ``line`` ("" at the start) tells which it is."""
        return None

    def refusal(self, lines: Sequence[str]) -> str | None:
        """Why there is no job, if the command has ended and its ``lines`` tell."""
        return None

    def explain(self, lines: Sequence[str], code: int) -> str:
        """Return why the command has ended before all agents had come."""
        return self.refusal(lines) or ended(self.program, lines, code)

    def agent(self, directory: Path) -> list[str]:
        """Return what hosts have to run to become agents of the job in ``directory``."""
        return agent_command(self.options, directory)

    def cluster(self) -> Cluster:
        """Return it as the launcher's loop takes it."""
        return Cluster(
            members=self.members,
            command=self.submit,
            environment=self.environ,
            rank_names=self.rank_names,
            first_rank=self.first_rank,
            bundle=self.texts,
            connect_s=self.connect_s,
            explain=self.explain,
            fatal=self.fatal,
            state=self.poll,
            trouble=self.trouble,
            cancel=self.cancel,
            habits=Habits(
                name=self.program,
                is_news=self.is_news,
                is_submitting=self.is_submitting,
                ending_s=self.ending_s,
                only_wishes=self.only_wishes,
                clears_up=self.clears_up,
                has_terminal=self.has_terminal,
            ),
            if_lost=self.if_lost,
            worker_cores=self.worker_cores,
            worker_gpus=self.worker_gpus,
            replaces=self.replaces,
        )


def launcher(queue_of: Callable[[LaunchOptions, Mapping[str, str]], BatchQueue]) -> Runner:
    """Return the function ``run`` of a launcher whose jobs go through such a queue."""

    def run(
        options: LaunchOptions,
        environ: Mapping[str, str],
        service_command: Sequence[str],
        timing: Timing,
    ) -> int:
        cluster = queue_of(options, environ).cluster()
        return run_carried(options, environ, service_command, timing, cluster)

    return run


def are_here(
    programs: Sequence[str], options: LaunchOptions, environ: Mapping[str, str], remedy: str
) -> bool:
    """Return whether ``programs`` are on the PATH; raises as :func:`find_program`."""
    return all(find_program(name, options, environ, remedy) is not None for name in programs)


def ended(what: str, lines: Sequence[str], code: int) -> str:
    """A sentence of a command that has ended too early; a negative ``code`` is a signal."""
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    return f"{what} ended ({how}) before all processes had started{it_said(lines)}"


def it_said(lines: Sequence[str]) -> str:
    """The end of a sentence, with what a command said."""
    said = quoted(lines)
    return f"; it said:{said}" if said else ""


def ask(
    words: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run a command that only looks. Raises OSError or subprocess.TimeoutExpired."""
    return subprocess.run(
        words,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
    )
