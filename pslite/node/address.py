"""The address that a node binds and advertises. Calls the operating system.

A node uses DMLC_NODE_HOST if it is set, else DMLC_INTERFACE (an interface's name, an address or a
network), else the local address on the route to the scheduler. It never binds all interfaces.
(ps-lite uses the first interface whose name begins with DMLC_INTERFACE, or the first one that is
not loopback (``network_utils.h``). This is wrong on hosts with several networks.)
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from pslite.config import Config
from pslite.errors import ConfigError

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")


def advertised_host(config: Config, scheduler: str | None = None) -> str:
    """Choose the address at which other nodes can reach this node.

    Raises:
        ConfigError: this host does not have the interface or network of DMLC_INTERFACE.
    """
    if config.node_host:
        return config.node_host
    if config.interface:
        return interface_address(config.interface)
    return route_address(scheduler or config.root_uri, config.root_port)


def interface_address(interface: str) -> str:
    """Return the local address of an interface, given by name, address or network."""
    addresses = local_addresses()
    if interface in addresses:
        return addresses[interface][0]
    listing = ", ".join(f"{name} ({', '.join(found)})" for name, found in addresses.items())
    network = _network(interface)
    if network is None:
        raise ConfigError(
            f"DMLC_INTERFACE={interface}: this host does not have such an interface with an "
            f"address; choose one of {listing}"
        )
    for address in (address for found in addresses.values() for address in found):
        if ipaddress.ip_address(address) in network:
            return address
    raise ConfigError(
        f"DMLC_INTERFACE={interface}: this host does not have an address in this network; choose "
        f"one of {listing}"
    )


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def local_addresses() -> dict[str, list[str]]:
    """Return each interface's first IPv4 address, if any, and its IPv6 addresses."""
    import fcntl

    addresses: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue
            addresses[name] = [socket.inet_ntoa(reply[20:24])]
    for name, address in _ipv6_addresses(_IF_INET6):
        addresses.setdefault(name, []).append(address)
    return addresses


def _ipv6_addresses(table: Path) -> Iterator[tuple[str, str]]:
    """Read (interface, address) from Linux's list, without link-local addresses.

    A link-local address needs the interface's name too (``fe80::1%eth0``), and that name is not
    valid on other hosts.
    """
    try:
        rows = [line.split() for line in table.read_text().splitlines()]
    except OSError:  # no IPv6 here
        return
    for row in rows:
        address = ipaddress.IPv6Address(int(row[0], 16))
        if not address.is_link_local:
            yield row[5], str(address)


def route_address(host: str, port: int) -> str:
    """Return the local address that is used to reach ``host``; does not send anything."""
    try:
        found = socket.getaddrinfo(host, port or 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise ConfigError(
            f"cannot resolve DMLC_PS_ROOT_URI={host}: {error}; correct the name, or use an address"
        ) from None
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.connect(address)
        except OSError as error:
            raise ConfigError(f"there is no route to the scheduler at {host}: {error}") from None
        return str(probe.getsockname()[0])


@lru_cache(maxsize=1)
def machine_id() -> str:
    """Return an id that is equal for processes exactly if they share process ids.

    It is the kernel's boot id together with the process-id namespace, because containers of one
    host have the same boot id but may have separate process ids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        import uuid  # not at the start of every process

        return f"{uuid.getnode():x}"
    return f"{boot}/{namespace}"


def process_alive(pid: int) -> bool:
    """Return whether a process of this machine exists and is not a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended, or this process cannot open files or see other processes
        return _takes_signals(pid)
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def _takes_signals(pid: int) -> bool:
    """Return whether the process exists, perhaps as a zombie; does not open a file."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True
