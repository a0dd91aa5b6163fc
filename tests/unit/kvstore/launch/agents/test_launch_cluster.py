"""What launchers that reach other machines have in common."""

from __future__ import annotations

import pytest

from kvstore.launch.agents.agent import with_environment_of_python
from kvstore.launch.agents.cluster import (
    agent_row,
    apart,
    common_address,
    core_count,
    seen_from_away,
    servers_then_workers,
)
from kvstore.launch.environment import network_id
from kvstore.launch.options import parse_arguments


def greeting(network: str, address: str) -> dict[str, str]:
    return {"host": "localhost", "machine": "this", "network": network, "reached_from": address}


def test_the_scheduler_serves_where_other_machines_saw_this_one() -> None:
    here = network_id()
    greetings = [
        greeting(here, "192.0.2.2"),
        greeting(here, "192.0.2.2"),
        greeting(f"not-{here}", "10.0.0.1"),
    ]
    assert common_address(seen_from_away(greetings)) == "10.0.0.1"


def test_agents_that_are_all_on_this_machine_count() -> None:
    here = network_id()
    assert seen_from_away([greeting(here, "192.0.2.2")]) == ["192.0.2.2"]


def test_an_address_of_this_machine_alone_is_the_last_choice() -> None:
    assert common_address(["127.0.0.1", "127.0.0.1", "10.0.0.1"]) == "10.0.0.1"
    assert common_address(["127.0.0.1"]) == "127.0.0.1"


def test_agents_of_one_machine_share_its_processors() -> None:
    found = [
        {"host": "localhost", "machine": "a", "cores": [0, 1]},
        {"host": "localhost", "machine": "a", "cores": [1, 2]},
        {"host": "localhost", "machine": "b", "cores": [0, 1]},
    ]
    assert core_count(found) == 5
    assert core_count([]) == 1


def test_python_is_the_agents_own_where_it_is_in_a_virtual_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.base_prefix", "/usr")
    monkeypatch.setattr("sys.prefix", "/home/ann/venv")
    found = with_environment_of_python({"PATH": "/bin", "A": "b"})
    assert found == {"PATH": "/home/ann/venv/bin:/bin", "VIRTUAL_ENV": "/home/ann/venv", "A": "b"}
    monkeypatch.setattr("sys.prefix", "/usr")
    assert with_environment_of_python({"PATH": "/bin"}) == {"PATH": "/bin"}


def test_a_machine_without_a_free_port_is_no_good() -> None:
    assert agent_row("node1", {"has_free_port": True}).is_good
    row = agent_row("node1", {"has_free_port": True, "missing_script": "train.py"})
    assert (row.is_good, row.found[:26]) == (False, "THERE IS NO FILE train.py,")
    row = agent_row("node1", {"has_free_port": False})
    assert not row.is_good and "NO FREE PORT" in row.found


@pytest.mark.parametrize(
    ("hosts", "ranks"),
    [
        ("ab ab w", [1, 0]),
        ("ab ba w", [0, 1]),
        ("aba bab w", [0, 1, 2]),
        ("abc abc w", [1, 2, 0]),
        ("aab abc w", [2, 0, 1]),
        ("aa aa w", [0, 1]),
        ("a a w", [0]),
    ],
)
def test_standbys_change_places_so_that_few_are_with_their_servers(
    hosts: str, ranks: list[int]
) -> None:
    options = parse_arguments(["-n", "1", "-s", str(len(ranks)), "--standbys", "1", "true"])
    members = servers_then_workers(options)
    found = apart(members, hosts.replace(" ", ""))
    assert [rank for role, rank in found if role == "standby"] == ranks
    others = [member for member in members if member[0] != "standby"]
    assert [member for member in found if member[0] != "standby"] == others
    assert apart(others, ["a"] * len(others)) == others
