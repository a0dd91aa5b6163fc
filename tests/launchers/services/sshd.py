"""Hosts to log in to: network namespaces of this machine, each with its own sshd.

A bridge joins the namespaces with this machine's own network, where the launcher runs. Each host
has an address, a host name, an /etc/hosts and a /dev/shm of its own; processes and all other
files are this machine's, as with a network file system. Needs root.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.daemon import COMMAND_S, Daemon, answers, command, kill_all, needed

_SSHD = "/usr/sbin/sshd"
# sshd wants it; Debian has it made when its own service starts.
_PRIVILEGE_SEPARATION = Path("/run/sshd")
_BRIDGE = re.compile(r"kvs([0-9]+)\Z")
PORTS = (22, 2222)

# Arguments: the host's name and its /etc/hosts.
_BE_A_HOST = """
set -e
hostname "$1"
mount -t tmpfs -o mode=1777 kvstore-shm /dev/shm
mount --bind "$2" /etc/hosts
ip link set lo up
exec sleep infinity
"""

_SERVER = """\
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/identity.pub
ListenAddress {address}
Port {ports[0]}
Port {ports[1]}
PubkeyAuthentication {with_key}
PasswordAuthentication {with_password}
KbdInteractiveAuthentication no
PermitRootLogin yes
StrictModes no
UsePAM {pam}
PidFile none
PrintMotd no
Subsystem sftp internal-sftp
LogLevel VERBOSE
"""

_CLIENT = """\
Host {names}
    User root
    IdentityFile {directory}/identity
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {directory}/known_hosts
    GlobalKnownHostsFile /dev/null
"""


@dataclass(frozen=True)
class SshHosts:
    """What the tests know of the hosts. All of ``addresses`` let this user in by its key."""

    addresses: tuple[str, ...]  # of the hosts kv-host1, kv-host2
    names: tuple[str, ...]  # what `hostname` says there, in the same order
    launcher_address: str  # of this machine, as the hosts see it
    interface: str  # the network interface that has it
    asks_password: str  # a host that takes no keys
    unknown_key: str  # a host whose key is not in known_hosts
    unreachable: str  # an address that nothing has
    unknown_name: str  # a host name that does not exist
    config: Path  # for ssh -F
    _holders: tuple[Daemon, ...]

    @property
    def launcher_args(self) -> str:
        """For the launcher's option --launcher-args."""
        return f"-F {self.config}"

    def write_hostfile(self, path: Path, *lines: str) -> Path:
        """A hosts file with these lines, or with the hosts that work; returns ``path``."""
        path.write_text("".join(f"{line}\n" for line in lines or self.addresses))
        return path

    def ssh(self, host: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command there as a user would, without a terminal; it may fail."""
        return subprocess.run(
            ["ssh", "-F", str(self.config), "-o", "BatchMode=yes", host, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )

    def processes(self) -> dict[int, str]:
        """What runs on any of the hosts besides sshd: process ids and command lines."""
        found = {}
        for pid in _in_namespaces(self._holders):
            words = _command_line(pid)
            if words and not words.startswith(("sshd:", _SSHD, "sleep infinity")):
                found[pid] = words
        return found


@contextmanager
def ssh_hosts(directory: Path) -> Iterator[SshHosts]:
    """The hosts while the block runs; ``directory`` gets keys, configurations and logs."""
    needed(_SSHD, "/usr/bin/ssh", "/usr/sbin/ip")
    _remove_orphaned_bridges()
    network = _unused_network()
    names = ("kv-host1", "kv-host2", "kv-host3")
    hosts_file = directory / "hosts"
    hosts_file.write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"{network}.{number} {name}\n" for number, name in enumerate(names, start=2))
    )
    _make_keys(directory, known=[f"{network}.{number}" for number in (2, 3, 4)])
    with ExitStack() as stack:
        stack.enter_context(_privilege_separation())
        bridge = stack.enter_context(_bridge(f"{network}.1"))
        holders = tuple(stack.enter_context(_host(name, directory)) for name in names)
        _plug_in(bridge, holders[0], [f"{network}.2"])
        _plug_in(bridge, holders[1], [f"{network}.3"])
        _plug_in(bridge, holders[2], [f"{network}.4", f"{network}.5"])
        for number, holder in ((2, holders[0]), (3, holders[1]), (4, holders[2]), (5, holders[2])):
            stack.enter_context(_sshd(holder, f"{network}.{number}", directory, number == 4))
        yield SshHosts(
            addresses=(f"{network}.2", f"{network}.3"),
            names=names[:2],
            launcher_address=f"{network}.1",
            interface=bridge,
            asks_password=f"{network}.4",
            unknown_key=f"{network}.5",
            unreachable=f"{network}.9",
            unknown_name="no-such-host.invalid",
            config=directory / "ssh_config",
            _holders=holders,
        )


def _make_keys(directory: Path, known: list[str]) -> None:
    for name in ("identity", "host_key"):
        command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", directory / name)
    kind, key, _comment = (directory / "host_key.pub").read_text().split()
    entries = [f"{host} {kind} {key}\n[{host}]:{PORTS[1]} {kind} {key}\n" for host in known]
    (directory / "known_hosts").write_text("".join(entries))
    network = known[0].rpartition(".")[0]
    (directory / "ssh_config").write_text(_CLIENT.format(names=f"{network}.*", directory=directory))


@contextmanager
def _privilege_separation() -> Iterator[None]:
    made = not _PRIVILEGE_SEPARATION.exists()
    _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    yield
    if made:
        _PRIVILEGE_SEPARATION.rmdir()


@contextmanager
def _bridge(address: str) -> Iterator[str]:
    """A bridge that this machine is at under ``address``; its name has our process id in it."""
    name = f"kvs{os.getpid()}"
    command("ip", "link", "add", name, "type", "bridge")
    try:
        command("ip", "address", "add", f"{address}/24", "dev", name)
        command("ip", "link", "set", name, "up")
        yield name
    finally:
        command("ip", "link", "delete", name)


@contextmanager
def _host(name: str, directory: Path) -> Iterator[Daemon]:
    """Namespaces, kept open by a process that sleeps; what runs in them ends with the block."""
    words = ["unshare", "--net", "--uts", "--ipc", "--mount", "--propagation", "private"]
    words += ["sh", "-c", _BE_A_HOST, "sh", name, str(directory / "hosts")]
    holder = Daemon(f"host {name}", words, directory / f"{name}.log")
    try:
        holder.wait_until("namespace", lambda: _command_line(holder.pid) == "sleep infinity")
        yield holder
    finally:
        kill_all(lambda: [pid for pid in _in_namespaces((holder,)) if pid != holder.pid])
        holder.stop()


def _plug_in(bridge: str, holder: Daemon, addresses: list[str]) -> None:
    """Give a host a network cable to the bridge; it vanishes with the host."""
    ours, inside = f"kvv{holder.pid}", ["nsenter", "--target", str(holder.pid), "--net", "ip"]
    peer = ["peer", "name", "eth0", "netns", str(holder.pid)]
    command("ip", "link", "add", ours, "type", "veth", *peer)
    command("ip", "link", "set", ours, "master", bridge, "up")
    for address in addresses:
        command(*inside, "address", "add", f"{address}/24", "dev", "eth0")
    command(*inside, "link", "set", "eth0", "up")


@contextmanager
def _sshd(holder: Daemon, address: str, directory: Path, asks_password: bool) -> Iterator[None]:
    config = directory / f"sshd_config-{address}"
    # Without PAM, sshd lets nobody in whose password is locked, not even with a key.
    locked = command("getent", "shadow", "root").split(":")[1].startswith("!")
    config.write_text(
        _SERVER.format(
            directory=directory,
            address=address,
            ports=PORTS,
            with_key="no" if asks_password else "yes",
            with_password="yes" if asks_password else "no",
            pam="yes" if locked else "no",
        )
    )
    enter = ["nsenter", "--target", str(holder.pid), "--net", "--uts", "--ipc", "--mount", "--"]
    server = Daemon(
        f"sshd at {address}",
        [*enter, _SSHD, "-D", "-e", "-f", str(config)],
        directory / f"sshd-{address}.log",
    )
    try:
        server.wait_until("answer", lambda: all(answers(port, address) for port in PORTS))
        yield
    finally:
        server.stop()


def _in_namespaces(holders: tuple[Daemon, ...]) -> list[int]:
    """All processes in the network namespaces that these keep open."""
    theirs = {_network_namespace(holder.pid) for holder in holders} - {"", _network_namespace(1)}
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return [pid for pid in pids if _network_namespace(pid) in theirs]


def _network_namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


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
        network = f"10.77.{number % 250}"
        if f"{network}." not in used:
            return network
    raise OSError("every network 10.77.0.0/24 to 10.77.249.0/24 is in use on this machine")


def _remove_orphaned_bridges() -> None:
    """Those of test runs that were killed; their hosts have died with them."""
    for _index, name in socket.if_nameindex():
        found = _BRIDGE.match(name)
        if found is not None and not Path(f"/proc/{found[1]}").exists():
            command("ip", "link", "delete", name)
