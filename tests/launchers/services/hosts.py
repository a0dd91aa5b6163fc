"""Hosts on one machine: network namespaces, joined by a bridge with this machine's own network.

Each host has an address, a host name, an /etc/hosts and a /dev/shm of its own; processes and all
other files are this machine's, as with a network file system. Needs root. What runs on a host ends
with it, and hosts end with the process that made them (sweeper.py sees to it if that is killed).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.daemon import (
    Daemon,
    ServiceError,
    command,
    kill_all,
    network_namespace,
    process_ids,
)
from services.sweeper import BRIDGES, NAMESPACES

# Arguments: the host's name and its /etc/hosts.
_BE_A_HOST = """
set -e
hostname "$1"
mount -t tmpfs -o mode=1777 kvstore-shm /dev/shm
mount --bind "$2" /etc/hosts
ip link set lo up
exec sleep infinity
"""


@dataclass(frozen=True)
class Host:
    """One host: a process that sleeps keeps its namespaces open."""

    name: str
    addresses: tuple[str, ...]
    holder: Daemon

    @property
    def enter(self) -> list[str]:
        """The words that, before a command, run it on this host."""
        spaces = ["--net", "--uts", "--ipc", "--mount"]
        return ["nsenter", "--target", str(self.holder.pid), *spaces, "--"]

    def processes(self) -> dict[int, str]:
        """What runs there now: process ids and command lines."""
        space = network_namespace(self.holder.pid)
        if space in ("", network_namespace(os.getpid())):
            return {}
        there = {
            pid: _command_line(pid) for pid in process_ids() if network_namespace(pid) == space
        }
        return {pid: words for pid, words in there.items() if words and pid != self.holder.pid}


@dataclass(frozen=True)
class Network:
    """The hosts, and how this machine is connected with them."""

    interface: str
    address: str  # this machine's, as the hosts see it
    hosts: tuple[Host, ...]
    unreachable: str  # an address that nothing has


@contextmanager
def network_of_hosts(directory: Path, names: Sequence[str]) -> Iterator[Network]:
    """Hosts of these names. Each has two addresses: number N from 0 has .N+2 and .N+102."""
    prefix = _unused_network()
    hosts_file = directory / "hosts"
    hosts_file.write_text(
        f"127.0.0.1 localhost\n{prefix}.1 {socket.gethostname()}\n"
        + "".join(f"{prefix}.{number} {name}\n" for number, name in enumerate(names, start=2))
    )
    with ExitStack() as stack:
        interface = stack.enter_context(_bridge(f"{prefix}.1", directory))
        hosts = []
        for number, name in enumerate(names, start=2):
            addresses = (f"{prefix}.{number}", f"{prefix}.{number + 100}")
            hosts.append(stack.enter_context(_host(name, addresses, directory)))
            _plug_in(interface, hosts[-1])
        yield Network(interface, f"{prefix}.1", tuple(hosts), f"{prefix}.99")


@contextmanager
def _bridge(address: str, directory: Path) -> Iterator[str]:
    """A bridge that this machine is at under ``address``; its name has our process id in it."""
    used = {name for _index, name in socket.if_nameindex()}
    name = next(name for letter in "abcdefgh" if (name := f"kvs{os.getpid()}{letter}") not in used)
    command("ip", "link", "add", name, "type", "bridge")
    _note(directory / BRIDGES, name)
    try:
        command("ip", "address", "add", f"{address}/24", "dev", name)
        command("ip", "link", "set", name, "up")
        yield name
    finally:
        command("ip", "link", "delete", name)


@contextmanager
def _host(name: str, addresses: tuple[str, ...], directory: Path) -> Iterator[Host]:
    words = ["unshare", "--net", "--uts", "--ipc", "--mount", "--propagation", "private"]
    words += ["sh", "-c", _BE_A_HOST, "sh", name, str(directory / "hosts")]
    holder = Daemon(f"host {name}", words, directory / f"{name}.log")
    host = Host(name, addresses, holder)
    try:
        holder.wait_until("namespace", lambda: _command_line(holder.pid) == "sleep infinity")
        _note(directory / NAMESPACES, network_namespace(holder.pid))
        yield host
    finally:
        kill_all(host.processes)
        holder.stop()


def _plug_in(bridge: str, host: Host) -> None:
    """Give a host a network cable to the bridge; it vanishes with the host.

    Its end has the bridge's name: DMLC_INTERFACE is one name for all machines of a job.
    """
    ours = f"kvv{host.holder.pid}"
    peer = ["peer", "name", bridge, "netns", str(host.holder.pid)]
    command("ip", "link", "add", ours, "type", "veth", *peer)
    command("ip", "link", "set", ours, "master", bridge, "up")
    for address in host.addresses:
        command(*host.enter, "ip", "address", "add", f"{address}/24", "dev", bridge)
    command(*host.enter, "ip", "link", "set", bridge, "up")


def _note(file: Path, name: str) -> None:
    """Tell the sweeper."""
    with file.open("a") as notes:
        notes.write(f"{name}\n")


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def _unused_network() -> str:
    """The first three numbers of a /24 of private addresses that this machine does not use."""
    used = command("ip", "-4", "address") + command("ip", "-4", "route")
    start = os.getpid() % 250
    for number in range(start, start + 250):
        prefix = f"10.77.{number % 250}"
        if f"{prefix}." not in used:
            return prefix
    raise ServiceError("every network from 10.77.0.0/24 to 10.77.249.0/24 is in use here")
