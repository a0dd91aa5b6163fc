"""Addresses of vans: text form, name resolution, errors of bind and connect.

It checks what it can before a socket is opened, so that an error names the wrong setting and is
never a bare errno. It opens no connection. :func:`look_up` and :func:`resolve` may
ask a name server and so may block. A node's I/O thread uses :class:`HostResolver` instead, which
asks on a separate thread. Read next: ``van.py``.
"""

from __future__ import annotations

import errno
import ipaddress
import math
import os
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

from pslite.errors import ConfigError
from pslite.security import HOW_TO_MAKE_A_KEY

LOOK_AGAIN_S = 1.0
"""The least time between two questions to a name server about the same name."""


def check_bind_address(host: str, port: int) -> None:
    """Raise :class:`ConfigError` if a node cannot listen at this host or port."""
    if host in ("", "*"):
        raise ConfigError(
            f"cannot listen on {host or '(empty)'}:{port}: name a host or an address of this "
            "machine (0.0.0.0 opens every interface)"
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"cannot listen on {host}:{port}: the port must be from 0 to 65535")


def format_address(host: str, port: int) -> str:
    """Return ``tcp://host:port``, with brackets if ``host`` is IPv6."""
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
        raise ConfigError(f"a node's address must be tcp://host:port, got {address!r}")
    if not 1 <= int(port) <= 65535:
        raise ConfigError(f"the port in {address!r} must be from 1 to 65535")
    return host, int(port)


_ANSWER_S = 0.2
"""How long ``refuses`` waits; it follows an attempt that has failed at once."""


class Endpoint(NamedTuple):
    """An address in libzmq's form, from a host and a port."""

    text: str
    is_ipv6: bool
    is_local: bool
    """All addresses of the host are loopback ones, so the host is this machine."""


class HostAddresses(NamedTuple):
    """The addresses of a host name, IPv4 first."""

    addresses: tuple[str, ...]

    def endpoint(self, port: int, attempt: int = 0) -> Endpoint:
        """Return where to connect; successive attempts try all addresses in turn."""
        address = self.addresses[attempt % len(self.addresses)]
        is_local = all(map(is_loopback, self.addresses))
        return Endpoint(format_address(address, port), ":" in address, is_local)


def look_up(host: str, flags: int = 0) -> HostAddresses:
    """Ask a name server for the addresses of a name; raises :class:`OSError`."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError as error:
        raise OSError(f"{host!r} is not a valid host name") from error
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return HostAddresses(tuple(str(entry[4][0]) for entry in found))


def resolve(host: str, port: int) -> Endpoint:
    """Return the first endpoint of a host; raises as :func:`look_up` does."""
    return look_up(host).endpoint(port)


class HostResolver:
    """Looks up a host name on a separate thread, because a name server may be slow.

    ``found`` is called on that thread after each lookup. If the host is an address, no server is
    asked. ``known`` has the addresses that were found before.
    """

    def __init__(
        self, host: str, found: Callable[[], None], known: HostAddresses | None = None
    ) -> None:
        self.known = known
        #: Why there is no address, if that is known.
        self.problem: OSError | None = None
        self.is_looking = False
        self._host = host
        self._found = found
        self._is_name = False
        self._looked_at = -math.inf
        try:
            self.known = look_up(host, socket.AI_NUMERICHOST)
        except OSError:
            self._is_name = True

    def look(self, now: float) -> None:
        """Ask again, unless a lookup is running or began within :data:`LOOK_AGAIN_S`."""
        if self._is_name and not self.is_looking and now - self._looked_at >= LOOK_AGAIN_S:
            self._looked_at, self.is_looking = now, True
            threading.Thread(target=self._look, name="pslite-name", daemon=True).start()

    def _look(self) -> None:
        try:
            self.known = look_up(self._host)
        except OSError as error:
            self.problem = error
        self.is_looking = False
        self._found()


def is_loopback(address: str) -> bool:
    """Return whether an address (not a name) can only be reached from this machine."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def without_key(where: str) -> str:
    """Return why a node without a job key may not listen at, or connect to, ``where``."""
    return (
        "a node without a job key may use only loopback addresses (127.0.0.0/8, ::1), got "
        f"{where}; {HOW_TO_MAKE_A_KEY}"
    )


def listening_endpoint(descriptor: int, host: str, port: int) -> Endpoint:
    """Return the endpoint at which the inherited socket listens.

    ``port`` is the requested port (0: any). Raises a :class:`ConfigError` that names ``host``
    and ``port`` if the descriptor is not a listening TCP socket or has another port.
    """
    where = f"cannot listen on {host}:{port}: descriptor {descriptor}"
    family, address, listens = _inspect(descriptor, where)
    if family not in (socket.AF_INET, socket.AF_INET6) or not listens:
        raise ConfigError(f"{where} is not a listening TCP socket")
    if port not in (0, address[1]):
        raise ConfigError(f"{where} listens on port {address[1]}; set the same port in both places")
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


def connect_problem(address: str) -> str:
    """Return the local problem that prevents a connection to ``tcp://address:port``.

    It tries to connect, without waiting. The text is empty if this machine has no problem, whether
    or not a process listens there.
    """
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.setblocking(False)
            error = trial.connect_ex((host, port))
    except OSError as failed:
        error = failed.errno or 0
    if error == errno.EADDRNOTAVAIL:
        return (
            f"this machine has no local port left to connect to {host}:{port} (EADDRNOTAVAIL); "
            "close other connections, wait a minute for closed ones (TIME_WAIT), or widen "
            "net.ipv4.ip_local_port_range"
        )
    if error in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EPERM):
        return f"this machine cannot connect to {host}:{port}: {os.strerror(error)}"
    return ""


def refuses(address: str) -> bool:
    """Return whether a host answers that no process listens at ``tcp://address:port``.

    Waits for its answer for a short time.
    """
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.settimeout(_ANSWER_S)
            return trial.connect_ex((host, port)) == errno.ECONNREFUSED
    except OSError:
        return False


def bind_problem(error: int) -> str:
    """Explain the errno of a failed bind to the user who chose the address."""
    if error == errno.EADDRINUSE:
        return "the port is in use; choose another, or stop the process that uses it"
    if error in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return "this machine does not have this address"
    if error == errno.EACCES:
        return "this user may not open the port; choose one above 1023"
    return os.strerror(error)
