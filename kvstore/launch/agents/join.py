"""The code with which an agent of mpirun, srun, qsub or YARN joins its launcher.

The launcher makes a directory that the hosts of the job share (mode 0700), writes a ticket and a
program into it (mode 0600), and removes it at the end. The hosts get the command to run the
program, so no secret is on a command line and no variable has to be passed on. If hosts share no
directory, the ticket (a few hundred bytes of text) can reach them in another way. The program runs
:func:`main`, which reads the ticket, connects to the launcher's listener (``agent_listener.py``),
proves that it knows the job's key, and then serves as an agent (``agent.py``) on its process's main
thread.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import stat
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from kvstore.launch.agents.agent import Agent, agent_program, machine
from kvstore.launch.agents.join_answer import Handshake, WrongLauncher, shake_hands
from kvstore.launch.agents.wire import GREET, GREETING, AgentLink
from kvstore.launch.environment import checkout_root
from kvstore.launch.job.guardian import succeeds
from kvstore.launch.job.registry import SHARED, SHARED_NAME, write_secret
from kvstore.launch.job.signals import SignalPipe
from kvstore.launch.options import OF_ONE_MACHINE, LaunchError

TICKET_NAME = "ticket.json"
PROGRAM_NAME = "agent.py"
_ADVICE = f"set {SHARED_NAME} to a directory that all hosts of the job share and you can write to"
_CONNECT_S = 5.0  # for each address of the launcher
_PATIENCE_S = 45.0
_PAUSE_S = 1.0
_OF_MPI = ("OMPI_", "PMIX_", "PMI_", "HYDI_", "MPI_LOCAL")
_COMMAND_S = 20.0
_TURN_S = 0.2  # the first agent's command usually ends the others before their turn
_LAST_TURN_S = 10.0


@dataclass(frozen=True)
class AgentTicket:
    """The launcher's address, and everything that an agent needs to join.

    An agent tries the ``addresses`` in their order. Its rank is in the first variable of
    ``rank_names`` that is set; the first rank is ``first_rank``. ``if_lost`` is the command that an
    agent runs when it has lost its launcher; its variables are the agent's. ``script`` is a file
    whose existence the agent reports; "" means none.
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
        """Parse a ticket. Raises ValueError if ``text`` is not one."""
        try:
            return cls(**json.loads(text))
        except TypeError as error:
            raise ValueError(str(error)) from None


# -- the launcher's side -------------------------------------------------------------------


def job_directory(environ: Mapping[str, str]) -> Path:
    """Return an unguessable path for the directory of a new job; create nothing.

    Raises :class:`LaunchError` if there is no home directory for it.
    """
    parent = os.path.expanduser(environ.get(SHARED_NAME) or SHARED)
    if parent.startswith("~"):
        raise LaunchError(f"cannot find a home directory for {parent}; {_ADVICE}", exit_code=1)
    return Path(parent).absolute() / secrets.token_hex(8)


def write_ticket(
    directory: Path, ticket: AgentTicket, working_directory: str, files: Mapping[str, str]
) -> None:
    """Create ``directory`` with the files that an agent needs.

    All hosts of the job must run its ``agent.py``. Raises :class:`LaunchError` if it cannot be
    created.
    """
    remedy = "begin in one that all hosts share"
    program = agent_program(working_directory, checkout_root(), "agents.join", remedy=remedy)
    try:
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        for parent in directory.resolve().parents:
            _check_parent(parent)
        directory.mkdir(mode=0o700)
        for name, text in {TICKET_NAME: ticket.to_text(), PROGRAM_NAME: program, **files}.items():
            write_secret(directory / name, text)
    except OSError as error:
        raise LaunchError(
            f"cannot create {directory}: {error.strerror}; {_ADVICE}", exit_code=1
        ) from error


def _check_parent(parent: Path) -> None:
    """Refuse a parent directory where other users could replace the job's directory."""
    found = parent.stat()
    is_ours = found.st_uid in (0, os.geteuid())
    is_open = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if not is_ours or is_open:
        raise LaunchError(
            f"other users can rename files in {parent}; run 'chmod go-w' on it, or set "
            f"{SHARED_NAME} to a directory of your own",
            exit_code=1,
        )


# -- the agent's side ----------------------------------------------------------------------


class NotEnlisted(Exception):
    """This agent cannot serve; the text says why."""


def main() -> None:
    """Join the launcher of the ticket beside this program (``sys.argv[0]``)."""
    path = Path(sys.argv[0]).absolute().with_name(TICKET_NAME)
    try:
        ticket = AgentTicket.from_text(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        fail(f"the ticket {path} cannot be read: {error}")
    try:
        enlist(ticket, own_rank(ticket))
    except NotEnlisted as error:
        fail(str(error))


def fail(text: str) -> NoReturn:
    """Print why the agent cannot run, as a greeting for the launcher, and exit."""
    found = {"error": text, "host": socket.gethostname()}
    print(f"{GREETING.decode()}{json.dumps(found)}", flush=True)
    sys.exit(3)


def own_rank(ticket: AgentTicket) -> int:
    """Return this agent's rank, counted from 0. Raises :class:`NotEnlisted`."""
    for name in ticket.rank_names:
        if value := os.environ.get(name):
            try:
                return int(value) - ticket.first_rank
            except ValueError:
                raise NotEnlisted(f"{name} must be a number, got {value!r}") from None
    raise NotEnlisted(
        f"cannot tell this process's rank: none of {', '.join(ticket.rank_names)} is set"
    )


def enlist(ticket: AgentTicket, rank: int) -> None:
    """Connect to the launcher and serve it until the job ends or the link is lost.

    Raises :class:`NotEnlisted` if the launcher cannot be reached.
    """
    forget_outside(os.environ)
    connected, handshake, address = _reached(ticket)
    read_fd = connected.detach()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    seals = handshake.seal_to_agent(), handshake.seal_to_launcher()
    link = AgentLink(read_fd, os.dup(read_fd), time.monotonic(), seals=seals)
    link.send(GREET, {**machine(ticket.script), "rank": rank, "reached_from": address})
    with SignalPipe() as signals:
        is_lost = Agent(link, signals, ticket.key).serve()
    if is_lost and ticket.if_lost:
        time.sleep(min(rank * _TURN_S, _LAST_TURN_S))
        words = [os.path.expandvars(word) for word in ticket.if_lost]
        # These variables hold a user's options for scancel (scancel(1)), such as to ask first.
        environ = {name: one for name, one in os.environ.items() if not name.startswith("SCANCEL_")}
        succeeds(words, _COMMAND_S, environ)  # after a failure, there is no launcher left to tell


def forget_outside(environ: MutableMapping[str, str]) -> None:
    """Remove variables that describe this agent's parent or the launcher's machine.

    With them, a process that uses MPI itself would believe that it is a rank of the mpirun that
    started the agents.
    """
    for name in list(environ):
        is_mpi = name.startswith(_OF_MPI) and not name.startswith("OMPI_ALLOW_")
        if is_mpi or name in OF_ONE_MACHINE:
            del environ[name]


def _reached(ticket: AgentTicket) -> tuple[socket.socket, Handshake, str]:
    """Connect to the launcher; return connection, handshake and the used address.

    Try again as long as success is possible: the launcher may be busy or suspended.
    """
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        failures = []
        may_be_busy = False
        for address in ticket.addresses:
            try:
                connected = socket.create_connection((address, ticket.port), _CONNECT_S)
            except OSError as error:
                failures.append(f"{address}: {error.strerror or error}")
                may_be_busy = may_be_busy or isinstance(error, TimeoutError)
                continue
            try:
                return connected, shake_hands(connected, ticket.key), address
            except (OSError, WrongLauncher) as error:
                connected.close()
                failures.append(f"{address}: {error}")
                may_be_busy = may_be_busy or isinstance(error, OSError)
        if not may_be_busy or time.monotonic() >= until_s:
            reasons = "; ".join(failures)
            raise NotEnlisted(f"cannot reach the launcher on port {ticket.port} ({reasons})")
        time.sleep(random.uniform(0.5, 1.5) * _PAUSE_S)
