"""What an agent needs to find its launcher: a directory that the hosts of a job share.

The launcher makes it (mode 0700), writes ``ticket.json`` (mode 0600) and ``agent.py`` into it and
removes it at the end; mpirun, srun and qsub are told to run ``agent.py`` everywhere, so that no
secret is on any command line and no variable has to be passed on. Where no directory is shared, a
ticket can be handed over in another way: it is a few hundred bytes of text. Read ``gate.py`` next.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore.launch.agents.agent import agent_program
from kvstore.launch.environment import checkout_root
from kvstore.launch.job.registry import SHARED, SHARED_NAME
from kvstore.launch.options import LaunchError

DIRECTORY_NAME = SHARED_NAME
_REMEDY = "begin in one that all hosts share"
TICKET_NAME = "ticket.json"
PROGRAM_NAME = "agent.py"
_ADVICE = (
    f"set {DIRECTORY_NAME} to a directory that all hosts of the job share and you can write to"
)


@dataclass(frozen=True)
class AgentTicket:
    """Where the launcher listens and what it takes to be let in.

    An agent tries the ``addresses`` in their order. Its rank is in the first of the variables
    ``rank_names`` that is set, where the first rank is ``first_rank``. ``if_lost`` is a command
    that it runs when it has lost its launcher; variables in it are the agent's. ``script`` is a
    file that it looks for, "" for none.
    """

    addresses: Sequence[str]
    port: int
    key: str
    rank_names: Sequence[str] = ()
    first_rank: int = 0
    if_lost: Sequence[str] = ()
    script: str = ""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> AgentTicket:
        """Raises ValueError when ``text`` is not a ticket."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(str(error)) from None


def job_directory(environ: Mapping[str, str]) -> Path:
    """Choose the directory of a new job, with a name that cannot be guessed; make nothing.

    Raises :class:`LaunchError` where there is no place for it.
    """
    parent = os.path.expanduser(environ.get(DIRECTORY_NAME) or SHARED)
    if parent.startswith("~"):
        raise LaunchError(f"there is no home directory for {parent}: {_ADVICE}", exit_code=1)
    return Path(parent).absolute() / secrets.token_hex(8)


def write_ticket(
    directory: Path, ticket: AgentTicket, working_directory: str, files: Mapping[str, str]
) -> None:
    """Make ``directory`` with what an agent needs, and with further ``files``, by their names.

    All hosts shall run its ``agent.py``. Raises :class:`LaunchError` when that cannot be.
    """
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for parent in directory.resolve().parents:
            _check_parent(parent)
        directory.mkdir(mode=0o700)
        _write(directory / TICKET_NAME, ticket.to_text())
        program = agent_program(working_directory, checkout_root(), "agents.join", remedy=_REMEDY)
        for name, text in {PROGRAM_NAME: program, **files}.items():
            _write(directory / name, text)
    except OSError as error:
        raise LaunchError(
            f"cannot make {directory}: {error.strerror}; {_ADVICE}", exit_code=1
        ) from error


def _check_parent(parent: Path) -> None:
    """Who may rename what is in it could put a program of their own there, which hosts run."""
    found = parent.stat()
    is_ours = found.st_uid in (0, os.geteuid())
    is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if not is_ours or is_open:
        raise LaunchError(
            f"others may rename what is in {parent}: 'chmod go-w' it, or set {DIRECTORY_NAME} to a "
            "directory that is yours",
            exit_code=1,
        )


def _write(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
