"""Who shares a machine decides which server holds how much; PS_MACHINE says who does."""

from __future__ import annotations

from typing import Any

import numpy as np
from cluster import InprocCluster

import pslite
from kvstore.server import install
from kvstore.stores.dist.store import create_dist
from pslite.node.address import machine_id

CHUNK_BYTES = 256
NUM_CHUNKS = 72


class Spread(InprocCluster):
    """Nodes that run on machines of these names, each role's by rank."""

    def __init__(self, workers: list[str], servers: list[str], **config: Any) -> None:
        super().__init__(len(workers), len(servers), prepare=install, **config)
        self._places = {"worker": workers, "server": servers}

    def _start(self, role: str, rank: int | None) -> pslite.Postoffice:
        self._config["machine"] = "" if rank is None else self._places[role][rank]
        return super()._start(role, rank)


def placed(cluster: Spread) -> list[int]:
    """How many chunks each server holds of a key that rank 0 makes."""
    kv = create_dist("dist_async", "dist_async", node=cluster.workers[0])
    kv.init("w", np.zeros(CHUNK_BYTES // 4 * NUM_CHUNKS, np.float32))
    loads = [sum(keys.values()) // CHUNK_BYTES for keys in kv.placement().values()]
    kv.close()
    return loads


WORKERS, SERVERS = ["a", "b", "c", "d"], ["d", "alone", "c", "b", "a"]


def test_a_server_alone_on_its_machine_holds_twice_as_much_as_one_beside_a_worker() -> None:
    with Spread(WORKERS, SERVERS, chunk_bytes=CHUNK_BYTES, verbose=1) as cluster:
        assert placed(cluster) == [12, 24, 12, 12, 12]
        assert placed(cluster) == [12, 24, 12, 12, 12]
    said = [line for line in cluster.lines if "placement:" in line]
    assert len(said) == 1
    assert said[0].endswith("placement: 16.7 % on servers 0, 2, 3, 4; 33.3 % on server 1")


def test_placement_can_be_asked_to_be_equal_whatever_the_machines() -> None:
    spread = Spread(WORKERS, SERVERS, chunk_bytes=CHUNK_BYTES, placement="equal")
    with spread as cluster:
        assert max(placed(cluster)) <= NUM_CHUNKS // len(SERVERS) + 1


def test_on_one_machine_all_servers_hold_the_same() -> None:
    with Spread(["", ""], ["", "", ""], chunk_bytes=CHUNK_BYTES) as cluster:
        assert placed(cluster) == [24, 24, 24]


def test_a_node_runs_on_the_machine_that_its_settings_name() -> None:
    with Spread(["here"], [""]) as cluster:
        machines = {node.role: node.machine for node in cluster.scheduler.membership.roster}
    assert machines == {"scheduler": machine_id(), "server": machine_id(), "worker": "here"}
