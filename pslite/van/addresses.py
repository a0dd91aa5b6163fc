"""Addresses of vans: their text form, and what the operating system makes of them.

Checks what can be checked before a socket is opened, so that a wrong setting is reported by
its name and never as a bare errno. Opens no connection; :func:`resolve` may ask a name server
and so may block. Runs on the owner's thread. Read next: ``zmq_van.py``.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import NamedTuple

from pslite.errors import ConfigError
from pslite.security import HOW_TO_MAKE_A_KEY


def check_bind_address(host: str, port: int) -> None:
    """Raise :class:`ConfigError` unless ``host`` and ``port`` can be meant for listening."""
    if host in ("", "*"):
        raise ConfigError(
            f"cannot listen on {host or '(empty)'}:{port}: name a host or an address of this "
            "machine (0.0.0.0 opens every interface)"
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"cannot listen on {host}:{port}: a port is a number from 0 to 65535")


def format_address(host: str, port: int) -> str:
    """``tcp://host:port``, with brackets where ``host`` is an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def parse_address(address: str) -> tuple[str, int]:
    """Split ``tcp://host:port`` or ``tcp://[ipv6]:port``; raises :class:`ConfigError`."""
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if scheme != "tcp" or not host or not port.isascii() or not port.isdigit():
        raise ConfigError(f"a node's address reads tcp://host:port, not {address!r}")
    if not 1 <= int(port) <= 65535:
        raise ConfigError(f"the port in {address!r} is not a number from 1 to 65535")
    return host, int(port)


class Endpoint(NamedTuple):
    """What a host and a port are to libzmq."""

    text: str
    is_ipv6: bool
    is_local: bool
    """All addresses of the host are loopback ones: nobody else can reach it, or be it."""


def resolve(host: str, port: int, attempt: int) -> Endpoint:
    """The endpoint of a name or an address; attempts go through all its addresses.

    IPv4 addresses come first. Raises :class:`OSError` while there is none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is not the form of a host name") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    family, _, _, _, address = found[attempt % len(found)]
    is_local = all(is_loopback(str(entry[4][0])) for entry in found)
    return Endpoint(format_address(str(address[0]), port), family == socket.AF_INET6, is_local)


def is_loopback(address: str) -> bool:
    """Whether an address (not a name) can only be reached from this machine."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def without_key(where: str) -> str:
    """Why a node without a job key may not listen at, or connect to, ``where``."""
    return (
        f"without a job key a node stays on this machine (127.0.0.0/8, ::1), and {where} is "
        f"beyond it: {HOW_TO_MAKE_A_KEY}"
    )


def listening_endpoint(descriptor: int, host: str, port: int) -> Endpoint:
    """The endpoint at which the inherited socket ``descriptor`` listens.

    ``port`` is what was asked for (0: any). Raises :class:`ConfigError`, which names ``host``
    and ``port``, if the descriptor is no listening TCP socket or has another port.
    """
    where = f"cannot listen on {host}:{port}: descriptor {descriptor}"
    family, address, listens = _inspect(descriptor, where)
    if family not in (socket.AF_INET, socket.AF_INET6) or not listens:
        raise ConfigError(f"{where} is not a listening TCP socket")
    if port not in (0, address[1]):
        raise ConfigError(f"{where} listens on port {address[1]}")
    text = format_address(address[0], address[1])
    return Endpoint(text, family == socket.AF_INET6, is_loopback(address[0]))


def _inspect(descriptor: int, where: str) -> tuple[int, tuple[str, int], bool]:
    try:
        copy = os.dup(descriptor)
    except OSError as error:
        raise ConfigError(f"{where} is not open in this process") from error
    try:
        inspected = socket.socket(fileno=copy)
    except OSError as error:
        os.close(copy)
        raise ConfigError(f"{where} is not a socket") from error
    with inspected:
        listens = bool(inspected.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        return inspected.family, inspected.getsockname(), listens


def bind_problem(error: int) -> str:
    """What the errno of a failed bind means to the person who chose the address."""
    if error == errno.EADDRINUSE:
        return "the port is in use; choose another, or stop the process that has it"
    if error in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return "this machine has no such address"
    if error == errno.EACCES:
        return "this user may not open the port; choose one above 1023"
    return os.strerror(error)
