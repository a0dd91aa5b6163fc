"""Nodes that the roster does not list are not heard; and nodes without signs of life."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from cluster import InprocCluster

import pslite
from pslite.ids import NodeInfo
from pslite.memory.heap import Heap
from pslite.memory.sharing import Sharing
from pslite.node import message_filter
from pslite.node.links import Links
from pslite.node.message_filter import EARLY, UNLISTED
from pslite.testing.inproc import InprocVan
from pslite.van.base import Van
from pslite.wire.base import Message
from pslite.wire.messages import (
    BarrierEnter,
    Beat,
    Exchange,
    Leave,
    Members,
    Refused,
    Register,
    Request,
)

EVERYTHING: list[Message] = [
    Beat(),
    Leave(),
    Members(9, (8, 9), (0, 0), ("lost", "lost")),
    BarrierEnter(7, 1, 0.0),
    Exchange(True, True, (1,), (1,), (4,)),
    Request(1, 0, 1, 1, b"body"),
    Refused("ConfigError", "go away"),
]


def wait_until(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


class Stranger:
    """Speaks the protocol, under a name that no roster lists."""

    def __init__(self, cluster: InprocCluster, address: str) -> None:
        self.van: Van = InprocVan(cluster._network, "stranger")
        self.links = Links(
            self.van, Sharing(Heap(shared=False)), job="", incarnation=77, resend_timeout_s=60.0
        )
        self.van.connect("node", address)

    def say(self, message: Message) -> None:
        self.links.send("node", message, (), 1, 0.0)

    def hear(self) -> list[Message]:
        deliveries = [
            self.links.receive(event, 0.0)
            for event in self.van.poll(0.05)
            if isinstance(event, pslite.van.base.Received)
        ]
        return [delivery.message for delivery in deliveries if delivery is not None]


def listening(cluster: InprocCluster) -> list[tuple[pslite.Postoffice, str]]:
    """The nodes that others connect to, and where."""
    nodes = [cluster.scheduler, *cluster.servers]
    infos = {node.node_id: node for node in cluster.scheduler.membership.roster}
    return [(node, infos[node.info.node_id].address) for node in nodes if node.info is not None]


def test_whoever_the_roster_does_not_list_is_counted_and_otherwise_ignored() -> None:
    with InprocCluster(1, 1) as cluster:
        for node, address in listening(cluster):
            stranger = Stranger(cluster, address)
            for message in EVERYTHING:
                stranger.say(message)
            wait_until(lambda node=node: node.links.dropped[UNLISTED] == len(EVERYTHING))  # type: ignore[misc]
            assert stranger.hear() == []
            assert "stranger" not in node.links._peers
            assert not node.membership.gone
            stranger.van.close()
        cluster.workers[0].barrier(pslite.ALL_GROUP)
        assert cluster.scheduler.membership.epoch == 1


def test_who_registers_with_a_complete_job_is_told_so() -> None:
    with InprocCluster(1, 1) as cluster:
        stranger = Stranger(cluster, "tcp://127.0.0.1:9091")
        node = NodeInfo("worker", -1, "stranger", 77, "", "host", "machine", 1)
        stranger.say(Register((node,), 1, 1, pslite.__version__))
        heard: list[Message] = []
        while not any(isinstance(message, Refused) for message in heard):
            heard += stranger.hear()
        refusal = Refused(
            "ConfigError", "this job is complete and does not accept further nodes", "", -1
        )
        assert refusal in heard
        stranger.van.close()


def test_what_comes_too_early_waits_up_to_a_limit_and_the_rest_is_not_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(message_filter, "MAX_EARLY", 3)
    cluster = InprocCluster(2, 1)
    cluster.scheduler = cluster._start("scheduler", None)
    try:
        stranger = Stranger(cluster, "tcp://127.0.0.1:9091")
        for number in range(10):
            stranger.say(Request(1, 0, number, 1, b"body"))
        wait_until(lambda: cluster.scheduler.links.dropped[EARLY] == 7)
        assert len(cluster.scheduler.admission._early) == 3
        stranger.hear()
        wait_until(lambda: stranger.hear() == [] and len(stranger.links._peers) == 1)
        assert not stranger.links.everything_accepted()
        stranger.van.close()
    finally:
        cluster.close(goodbye=False)


def test_a_cluster_without_signs_of_life_works_and_reports_no_stalls() -> None:
    quiet = {"heartbeat_interval_s": 0.0, "stall_report_s": 0.2}
    with InprocCluster(1, 1, **quiet) as cluster:
        time.sleep(1.5)
        cluster.workers[0].barrier(pslite.WORKER_GROUP).result(10.0)
    assert not any("silent" in line for line in cluster.lines), cluster.lines
