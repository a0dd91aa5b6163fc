"""Which address a node binds and advertises, and who shares its machine."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pslite.config import Config
from pslite.errors import ConfigError
from pslite.node import address
from pslite.node.address import process_alive
from pslite.van.zmq.addresses import format_address

HOST_HAS = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["192.168.20.7", "2001:db8::7"],
    "eth10": ["10.1.2.3"],
    "wg0": ["fd00::9"],
}


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with three networks."""
    monkeypatch.setattr(address, "local_addresses", lambda: HOST_HAS)


@pytest.mark.usefixtures("networks")
@pytest.mark.parametrize(
    ("interface", "found"),
    [
        ("lo", "127.0.0.1"),
        ("eth10", "10.1.2.3"),
        ("192.168.20.7", "192.168.20.7"),
        ("192.168.20.0/24", "192.168.20.7"),
        ("10.0.0.0/8", "10.1.2.3"),
        ("eth0", "192.168.20.7"),
        ("wg0", "fd00::9"),
        ("::1", "::1"),
        ("2001:db8::/32", "2001:db8::7"),
        ("fd00::/8", "fd00::9"),
    ],
)
def test_an_interface_is_a_name_an_address_or_a_network(interface: str, found: str) -> None:
    assert address.interface_address(interface) == found


@pytest.mark.usefixtures("networks")
@pytest.mark.parametrize("interface", ["eth1", "eth", "172.16.0.0/12", "192.168.20.8", "fe80::/10"])
def test_an_interface_that_is_not_there_is_an_error_that_lists_those_that_are(
    interface: str,
) -> None:
    # ps-lite took the first name that began like it: eth1 was found as eth10.
    with pytest.raises(ConfigError) as caught:
        address.interface_address(interface)
    text = str(caught.value)
    assert text.startswith(f"DMLC_INTERFACE={interface}: ")
    assert text.endswith(
        "lo (127.0.0.1, ::1), eth0 (192.168.20.7, 2001:db8::7), eth10 (10.1.2.3), wg0 (fd00::9)"
    )


@pytest.mark.usefixtures("networks")
@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({"node_host": "alpha", "interface": "eth0", "root_uri": "127.0.0.1"}, "alpha"),
        ({"interface": "eth0", "root_uri": "127.0.0.1"}, "192.168.20.7"),
        ({"root_uri": "127.0.0.1", "root_port": 9000}, "127.0.0.1"),
    ],
)
def test_the_host_name_wins_over_the_interface_and_that_over_the_route(
    settings: dict[str, Any], host: str
) -> None:
    assert address.advertised_host(Config(**settings)) == host


def test_this_machine_has_a_loopback_address() -> None:
    assert any("127.0.0.1" in found for found in address.local_addresses().values())


def test_ipv6_addresses_are_read_from_the_systems_list_without_those_of_one_link(
    tmp_path: Path,
) -> None:
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe80000000000000021122fffe334455 02 40 20 80     eth0\n"
        "20010db8000000000000000000000007 02 40 00 80     eth0\n"
    )
    assert list(address._ipv6_addresses(table)) == [("lo", "::1"), ("eth0", "2001:db8::7")]
    assert list(address._ipv6_addresses(tmp_path / "none")) == []


def test_a_scheduler_whose_name_means_nothing_is_an_error_that_names_the_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match="cannot resolve DMLC_PS_ROOT_URI=head"):
        address.route_address("head", 9000)


def test_a_scheduler_that_cannot_be_reached_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"no route to the scheduler at 255\.255\.255\.255"):
        address.route_address("255.255.255.255", 9000)


@pytest.mark.parametrize(
    ("host", "endpoint"),
    [
        ("head", "tcp://head:9000"),
        ("10.0.0.1", "tcp://10.0.0.1:9000"),
        ("fe80::1", "tcp://[fe80::1]:9000"),
    ],
)
def test_an_ipv6_address_stands_in_brackets(host: str, endpoint: str) -> None:
    assert format_address(host, 9000) == endpoint


def test_processes_of_one_machine_agree_on_its_identity() -> None:
    code = "from pslite.node.address import machine_id; print(machine_id(), end='')"
    root = Path(address.__file__).parents[1]
    other = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout == address.machine_id() != ""


def test_a_process_is_alive_until_it_has_ended_also_while_nobody_asked_for_its_end() -> None:
    child = subprocess.Popen(["sleep", "60"])
    alive = address.process_alive(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = address.process_alive(child.pid)
    child.wait()
    assert (alive, zombie, address.process_alive(child.pid)) == (True, False, False)


def test_this_process_is_alive() -> None:
    assert address.process_alive(os.getpid())


def test_a_process_is_alive_also_where_no_more_files_can_be_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A node that may open no more files must not take its peers for dead."""
    ended = subprocess.Popen(["true"])
    ended.wait()

    def refuse(path: Path) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert process_alive(os.getpid())
    assert not process_alive(ended.pid)
