"""The scheduler's listening socket, made before anything is started.

The launcher binds and listens, and the scheduler inherits the descriptor: no other program
can take the port in between, and processes that start earlier than the scheduler queue up
instead of being refused. Called once, from ``local.py``.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

from kvstore.launch.options import LaunchError

_LISTEN_STATE = "0A"  # /proc/net/tcp: TCP_LISTEN
_BACKLOG = 1024


def listen(host: str, port: int) -> socket.socket:
    """Listen on ``host``, on ``port`` or (0) on one that the kernel chooses.

    The caller owns the socket. Raises :class:`LaunchError` (exit code 1) when the address
    cannot be used, naming who holds it where that can be read.
    """
    try:
        candidates = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise LaunchError(
            f"cannot resolve the scheduler's address '{host}' ({error.strerror}); "
            "correct or unset DMLC_PS_ROOT_URI",
            exit_code=1,
        ) from error
    # A name such as localhost may stand for both; clients try IPv4 first, too.
    family, kind, protocol, _, address = min(candidates, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.socket(family, kind, protocol)
    try:
        # Lets a port be used again at once after a job; never beside another listener.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise LaunchError(_refusal(host, port, error), exit_code=1) from error
    return listener


def _refusal(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        holders = ", ".join(str(pid) for pid in listening_processes(port))
        by_whom = f" by process {holders}" if holders else ""
        return (
            f"port {port} on {host} is in use{by_whom}; unset DMLC_PS_ROOT_PORT to let the "
            "launcher choose a free one"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"{host} is not an address of this machine; unset DMLC_PS_ROOT_URI or set it to one "
            "of this machine's addresses"
        )
    return f"cannot listen on {host} port {port}: {error.strerror}"


def listening_processes(port: int) -> list[int]:
    """The processes that listen on a TCP port of this machine, as far as they can be seen."""
    names = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not names:
        return []
    return [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and names & _open_names(pid)]


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as file:
                rows = [line.split() for line in file][1:]
        except OSError:
            continue
        for row in rows:
            if row[3] == _LISTEN_STATE and int(row[1].rpartition(":")[2], 16) == port:
                yield row[9]


def _open_names(pid: str) -> set[str]:
    names = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            names.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    except OSError:  # it has ended, or belongs to another user
        pass
    return names
