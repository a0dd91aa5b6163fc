"""Hosts to log in to, each with its own sshd. Needs root. How hosts are made: hosts.py."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.daemon import COMMAND_S, Daemon, answers, command, needed
from services.hosts import Host, Network, network_of_hosts

_SSHD = "/usr/sbin/sshd"
# sshd wants it; Debian has it made when its own service starts.
_PRIVILEGE_SEPARATION = Path("/run/sshd")
PORTS = (22, 2222)

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
    network: Network

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
        return {
            pid: words
            for host in self.network.hosts
            for pid, words in host.processes().items()
            if not words.startswith(("sshd:", _SSHD))
        }


@contextmanager
def ssh_hosts(directory: Path) -> Iterator[SshHosts]:
    """The hosts while the block runs; ``directory`` gets keys, configurations and logs."""
    needed(_SSHD, "/usr/bin/ssh", "/usr/sbin/ip")
    names = ("kv-host1", "kv-host2", "kv-host3")
    with ExitStack() as stack:
        stack.enter_context(_privilege_separation())
        network = stack.enter_context(network_of_hosts(directory, names))
        one, two, three = network.hosts
        asks_password, unknown_key = three.addresses
        _make_keys(directory, known=[one.addresses[0], two.addresses[0], asks_password])
        stack.enter_context(_sshd(one, one.addresses[0], directory))
        stack.enter_context(_sshd(two, two.addresses[0], directory))
        stack.enter_context(_sshd(three, asks_password, directory, asks_password=True))
        stack.enter_context(_sshd(three, unknown_key, directory))
        yield SshHosts(
            addresses=(one.addresses[0], two.addresses[0]),
            names=names[:2],
            launcher_address=network.address,
            interface=network.interface,
            asks_password=asks_password,
            unknown_key=unknown_key,
            unreachable=network.unreachable,
            unknown_name="no-such-host.invalid",
            config=directory / "ssh_config",
            network=network,
        )


def _make_keys(directory: Path, known: list[str]) -> None:
    for name in ("identity", "host_key"):
        command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", directory / name)
    kind, key, _comment = (directory / "host_key.pub").read_text().split()
    entries = [f"{host} {kind} {key}\n[{host}]:{PORTS[1]} {kind} {key}\n" for host in known]
    (directory / "known_hosts").write_text("".join(entries))
    prefix = known[0].rpartition(".")[0]
    (directory / "ssh_config").write_text(_CLIENT.format(names=f"{prefix}.*", directory=directory))


@contextmanager
def _privilege_separation() -> Iterator[None]:
    made = not _PRIVILEGE_SEPARATION.exists()
    _PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
    yield
    if made:
        _PRIVILEGE_SEPARATION.rmdir()


@contextmanager
def _sshd(host: Host, address: str, directory: Path, asks_password: bool = False) -> Iterator[None]:
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
    server = Daemon(
        f"sshd at {address}",
        [*host.enter, _SSHD, "-D", "-e", "-f", str(config)],
        directory / f"sshd-{address}.log",
    )
    try:
        server.wait_until("answer", lambda: all(answers(port, address) for port in PORTS))
        yield
    finally:
        server.stop()
