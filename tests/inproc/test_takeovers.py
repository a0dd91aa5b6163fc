"""Somebody takes the address of a node that has ended: nobody comes, and nothing is told there."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from cluster import LIMIT_S, InprocCluster

import pslite
from pslite.ids import SCHEDULER_ID
from pslite.testing.inproc import InprocVan


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def has_hung_up(node: pslite.Postoffice, uid: str) -> bool:
    """Whether its van does not try to reach that node any more."""
    assert isinstance(node.van, InprocVan)
    return uid not in node.van._links


def address_of(cluster: InprocCluster, node_id: int) -> tuple[str, int]:
    (node,) = [node for node in cluster.scheduler.membership.roster if node.node_id == node_id]
    host, _, port = node.address.rpartition("//")[2].rpartition(":")
    return host, int(port)


@pytest.mark.parametrize("kind", ["lost", "left"])
def test_nobody_comes_back_to_the_address_of_a_scheduler_that_is_gone(kind: str) -> None:
    with InprocCluster(2, 1, lost_after_s=0.2) as cluster:
        host, port = address_of(cluster, SCHEDULER_ID)
        members = [*cluster.workers, *cluster.servers]
        if kind == "left":
            cluster.scheduler.close()
        else:
            cluster.kill(cluster.scheduler)
        wait_until(lambda: all(has_hung_up(node, "scheduler") for node in members))
        thief = InprocVan(cluster._network, "scheduler")
        assert thief.bind(host, port) == port
        assert thief.poll(0.05) == []
        thief.close()
        cluster._killed = True
        assert [node.error is None for node in members] == [kind == "left"] * 3


def test_nobody_comes_back_to_the_address_of_a_server_that_is_lost() -> None:
    with InprocCluster(2, 1, lost_after_s=0.2) as cluster:
        (server,) = cluster.servers
        assert server.info is not None
        host, port = address_of(cluster, server.info.node_id)
        cluster.kill(server)
        uid = server.info.uid
        wait_until(lambda: all(has_hung_up(node, uid) for node in cluster.workers))
        thief = InprocVan(cluster._network, server.info.uid)
        assert thief.bind(host, port) == port
        assert thief.poll(0.05) == []
        thief.close()
