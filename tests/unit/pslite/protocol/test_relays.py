"""Which servers relay for which workers, from the roster alone."""

from __future__ import annotations

import pytest

from pslite.config import Config
from pslite.ids import NodeInfo, Role, node_id
from pslite.protocol.relays import Relays, contributor_of, node_of, relays_of


def roster(workers: str, servers: str) -> list[NodeInfo]:
    places = {"worker": workers, "server": servers, "scheduler": "S"}
    return [
        NodeInfo(role, rank, f"{role}{rank}", 1, "tcp://h:1", "h", machine, 1)
        for role, machines in places.items()
        for rank, machine in enumerate(machines)
    ]


def server(rank: int) -> int:
    return node_id(Role.SERVER, rank)


@pytest.mark.parametrize("number", [0, 1, 17, -1, -2, -18])
def test_a_contributor_has_a_number_of_its_own(number: int) -> None:
    assert contributor_of(node_of(number)) == number
    rank = number if number >= 0 else -1 - number
    assert node_of(number) == node_id(Role.WORKER if number >= 0 else Role.SERVER, rank)


def test_two_workers_of_a_machine_are_one_contributor_to_the_others() -> None:
    relays = Relays(roster("AABB", "AB"))
    assert relays
    assert relays.contributors(0) == (-2, 0, 1)  # server 1 adds up for B
    assert relays.contributors(1) == (-1, 2, 3)
    assert relays.members(0) == (0, 1)
    assert relays.owners(0) == (1,)
    assert relays.fellows(0) == {server(1)}
    assert relays.of_machine("A", 1) == 0
    assert relays.of_machine("A", 0) is None  # its own server


def test_a_worker_that_is_alone_on_its_machine_sends_its_own_values() -> None:
    relays = Relays(roster("AAB", "AB"))
    assert relays.contributors(0) == (0, 1, 2)
    assert relays.contributors(1) == (-1, 2)
    assert relays.members(1) == ()


def test_servers_of_one_machine_relay_in_turn() -> None:
    relays = Relays(roster("AABB", "AABB"))
    assert [relays.of_machine("A", owner) for owner in range(4)] == [None, None, 0, 1]
    assert [relays.of_machine("B", owner) for owner in range(4)] == [2, 3, None, None]
    assert relays.fellows(0) == {server(2)}
    assert relays.relays_to(3) == (1,)


@pytest.mark.parametrize(
    ("workers", "servers"), [("AAAA", "AA"), ("ABCD", "ABCD"), ("AABB", "CD"), ("", ""), ("AA", "")]
)
def test_nothing_is_relayed_where_it_saves_nothing(workers: str, servers: str) -> None:
    relays = Relays(roster(workers, servers))
    assert not relays
    for rank in range(len(servers)):
        assert relays.contributors(rank) == tuple(range(len(workers)))
        assert relays.fellows(rank) == frozenset()


def test_the_order_of_the_roster_does_not_matter() -> None:
    nodes = roster("ABAB", "BA")
    turned = Relays(nodes[::-1])
    assert turned.contributors(0) == Relays(nodes).contributors(0) == (-2, 1, 3)


def test_every_worker_contributes_exactly_once_to_each_owner() -> None:
    for workers, servers in [("AABBC", "ABC"), ("AAABBB", "AABBB"), ("ABABAB", "BACC")]:
        relays = Relays(roster(workers, servers))
        for owner in range(len(servers)):
            ranks: list[int] = []
            for number in relays.contributors(owner):
                ranks += [number] if number >= 0 else relays.members(-1 - number)
            assert sorted(ranks) == list(range(len(workers)))


@pytest.mark.parametrize("change", [{"hierarchical": "off"}, {"rejoin_timeout_s": 60.0}])
def test_it_can_be_switched_off_and_is_where_nodes_may_be_replaced(
    change: dict[str, object],
) -> None:
    assert relays_of(roster("AABB", "AB"), Config())
    assert not relays_of(roster("AABB", "AB"), Config(**change))  # type: ignore[arg-type]
