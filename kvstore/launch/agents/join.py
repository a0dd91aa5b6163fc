"""An agent that comes to its launcher: what mpirun, srun, qsub and the like start on the hosts.

:func:`main` reads the ticket beside the program that was started, :func:`enlist` connects to the
launcher's gate, proves that it knows the job's key and serves from then on (``agent.py``). Runs
on its process's main thread. The other end is ``gate.py``.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

from kvstore.launch.agents.agent import GREETING, Agent, machine
from kvstore.launch.agents.ticket import TICKET_NAME, AgentTicket
from kvstore.launch.agents.wire import (
    GREET,
    HELLO,
    NONCE_BYTES,
    PROOF_BYTES,
    AgentLink,
    Handshake,
    is_same,
)
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


class _Unanswered(NotEnlisted):
    """Nor is it clear that it never can: the launcher may be busy, or stopped."""


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
    connected.settimeout(None)
    read_fd, write_fd = connected.detach(), -1
    write_fd = os.dup(read_fd)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.close(null)
    seals = (handshake.seal_to_agent(), handshake.seal_to_launcher())
    link = AgentLink(read_fd, write_fd, time.monotonic(), seals=seals)
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
    try:
        subprocess.run(
            words,
            # What a user likes of scancel by hand (scancel(1)), such as to be asked.
            env={name: one for name, one in os.environ.items() if not name.startswith("SCANCEL_")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_COMMAND_S,
        )
    except (OSError, subprocess.SubprocessError):
        pass  # there is no launcher left to tell


def _reached(ticket: AgentTicket) -> tuple[socket.socket, Handshake, str]:
    """A connection to the launcher, and the address by which it was reached."""
    until_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _reached_now(ticket)
        except _Unanswered:
            if time.monotonic() >= until_s:
                raise
        time.sleep(random.uniform(0.5, 1.5) * _PAUSE_S)


def _reached_now(ticket: AgentTicket) -> tuple[socket.socket, Handshake, str]:
    failures = []
    kind: type[NotEnlisted] = NotEnlisted
    for address in ticket.addresses:
        try:
            connected = socket.create_connection((address, ticket.port), _CONNECT_S)
        except OSError as error:
            failures.append(f"{address}: {error.strerror or error}")
            if isinstance(error, TimeoutError):
                kind = _Unanswered
            continue
        try:
            return connected, _agreed(connected, ticket.key), address
        except (OSError, NotEnlisted) as error:
            connected.close()
            failures.append(f"{address}: {error}")
            if isinstance(error, OSError | _Unanswered):
                kind = _Unanswered
    raise kind(f"cannot reach the launcher on port {ticket.port} ({'; '.join(failures)})")


def _agreed(connected: socket.socket, key: str) -> Handshake:
    """Both sides have proved that they know ``key``."""
    head = _received(connected, len(HELLO) + NONCE_BYTES)
    if not head.startswith(HELLO):
        raise NotEnlisted("the program that answers is not a launcher")
    handshake = Handshake(key, head[len(HELLO) :], secrets.token_bytes(NONCE_BYTES))
    connected.sendall(handshake.agent_nonce + handshake.agent_proof())
    if not is_same(_received(connected, PROOF_BYTES), handshake.launcher_proof()):
        raise NotEnlisted("the launcher of another job answers")
    return handshake


def _received(connected: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connected.recv(size - len(data))
        if not part:
            raise _Unanswered("the connection was closed")
        data += part
    return data
