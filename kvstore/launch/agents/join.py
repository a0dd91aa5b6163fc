"""An agent that comes to its launcher: what mpirun, srun, qsub and the like start on the hosts.

:func:`main` reads the ticket beside the program that was started, :func:`enlist` connects to the
launcher's gate, proves that it knows the job's key and serves from then on (``agent.py``). Runs
on its process's main thread. The other end is ``gate.py``.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

from kvstore.launch.agents.agent import Agent, machine
from kvstore.launch.agents.join_answer import Handshake, WrongLauncher, shake_hands
from kvstore.launch.agents.ticket import TICKET_NAME, AgentTicket
from kvstore.launch.agents.wire import GREET, GREETING, AgentLink
from kvstore.launch.job.guardian import succeeds
from kvstore.launch.job.signals import SignalPipe
from kvstore.launch.options import OF_ONE_MACHINE

_CONNECT_S = 5.0  # for each of the launcher's addresses
_PATIENCE_S = 45.0
_PAUSE_S = 1.0
_OF_MPI = ("OMPI_", "PMIX_", "PMI_", "HYDI_", "MPI_LOCAL")
_COMMAND_S = 20.0
_TURN_S = 0.2  # the first agent's command ends the others, mostly before it is their turn
_LAST_TURN_S = 10.0


class NotEnlisted(Exception):
    """This agent cannot serve; the text says why."""


def main() -> None:
    """Serve the launcher of the ticket beside this program (``sys.argv[0]``), and end."""
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
    """Say why there is no agent, in a line that the launcher finds among others, and end."""
    found = {"error": text, "host": socket.gethostname()}
    print(f"{GREETING.decode()}{json.dumps(found)}", flush=True)
    sys.exit(3)


def own_rank(ticket: AgentTicket) -> int:
    """Which of the agents this one is, from 0. Raises :class:`NotEnlisted`."""
    for name in ticket.rank_names:
        if value := os.environ.get(name):
            try:
                return int(value) - ticket.first_rank
            except ValueError:
                raise NotEnlisted(f"{name} must be a number, got {value!r}") from None
    raise NotEnlisted(f"none of {', '.join(ticket.rank_names)} is set: nothing says who this is")


def enlist(ticket: AgentTicket, rank: int) -> None:
    """Serve the launcher until it has no more use for this agent, or is gone.

    Raises :class:`NotEnlisted` when it cannot be reached.
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
        _run_if_lost(ticket.if_lost, rank)


def forget_outside(environ: MutableMapping[str, str]) -> None:
    """Drop variables that describe this agent's parent, or the launcher's machine.

    To an MPI of its own a process would seem to be a rank of the mpirun that started agents.
    """
    for name in list(environ):
        is_mpi = name.startswith(_OF_MPI) and not name.startswith("OMPI_ALLOW_")
        if is_mpi or name in OF_ONE_MACHINE:
            del environ[name]


def _run_if_lost(command: Sequence[str], rank: int) -> None:
    time.sleep(min(rank * _TURN_S, _LAST_TURN_S))
    words = [os.path.expandvars(word) for word in command]
    # What a user likes of scancel by hand (scancel(1)), such as to be asked.
    environ = {name: one for name, one in os.environ.items() if not name.startswith("SCANCEL_")}
    succeeds(words, _COMMAND_S, environ)  # if not, there is no launcher left to tell


def _reached(ticket: AgentTicket) -> tuple[socket.socket, Handshake, str]:
    """A connection to the launcher, and the address by which it was reached.

    Tries again while it is not clear that this never can be: the launcher may be busy, or stopped.
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
