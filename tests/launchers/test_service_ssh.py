"""The hosts of the ssh launcher's tests do what they are there for, before it uses them."""

from __future__ import annotations

import os

import pytest
from services.sshd import SshHosts


def test_ssh_hosts_let_us_in_each_under_its_own_name(ssh_hosts: SshHosts) -> None:
    said = [ssh_hosts.ssh(address, "hostname").stdout for address in ssh_hosts.addresses]

    assert said == [f"{name}\n" for name in ssh_hosts.names]


def test_ssh_hosts_have_shared_memory_of_their_own(ssh_hosts: SshHosts) -> None:
    wrote = ssh_hosts.ssh(ssh_hosts.addresses[0], "touch /dev/shm/one; ls /dev/shm")
    other = ssh_hosts.ssh(ssh_hosts.addresses[1], "ls /dev/shm")

    assert (wrote.stdout, other.stdout) == ("one\n", "")
    assert not os.path.exists("/dev/shm/one")


def test_ssh_hosts_reach_each_other_and_the_launcher(ssh_hosts: SshHosts) -> None:
    names = " ".join(ssh_hosts.names)

    found = ssh_hosts.ssh(ssh_hosts.addresses[0], f"getent ahostsv4 {names} | cut -d' ' -f1 | uniq")
    routes = [
        ssh_hosts.ssh(ssh_hosts.addresses[0], f"echo > /dev/tcp/{address}/22 && echo open")
        for address in ssh_hosts.addresses
    ]

    assert found.stdout.split() == list(ssh_hosts.addresses)
    assert [route.stdout for route in routes] == ["open\n", "open\n"]


@pytest.mark.parametrize(
    ("host", "complaint"),
    [
        ("asks_password", "Permission denied (password)"),
        ("unknown_key", "Host key verification failed"),
        ("unknown_name", "Could not resolve hostname"),
    ],
)
def test_ssh_hosts_that_fail_do_so_by_themselves(
    ssh_hosts: SshHosts, host: str, complaint: str
) -> None:
    refused = ssh_hosts.ssh(getattr(ssh_hosts, host), "true")

    assert refused.returncode == 255
    assert complaint in refused.stderr


def test_ssh_hosts_tell_what_runs_on_them(ssh_hosts: SshHosts) -> None:
    before = ssh_hosts.processes()
    ssh_hosts.ssh(ssh_hosts.addresses[1], "setsid --fork sleep 87 >/dev/null 2>&1")

    running = ssh_hosts.processes()
    for pid in running:
        os.kill(pid, 9)

    assert before == {}
    assert len(running) == 1
    assert "sleep 87" in next(iter(running.values()))
