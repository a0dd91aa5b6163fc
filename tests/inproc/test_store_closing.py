"""Closing stores and nodes: errors of pushes that had returned are raised there, once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from cluster import LIMIT_S, InprocCluster
from workers import Workers

from kvstore.server import install
from kvstore.stores.base import KVStore
from kvstore.stores.dist.store import create_dist
from pslite.errors import ClosedError, DeadlineError, NodeLostError

LEFT = r"worker 1 \(.*\) has left the job"


@contextmanager
def left_alone() -> Iterator[tuple[InprocCluster, KVStore]]:
    """A store of worker 0 with a key; the only other worker has left."""
    with InprocCluster(2, 1, prepare=install) as cluster:
        stores = [create_dist("dist_sync", "dist_sync", node=node) for node in cluster.workers]
        threads = [threading.Thread(target=store.init, args=("w", np.zeros(3))) for store in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        cluster.workers[1].close()
        yield cluster, stores[0]


def test_close_of_a_store_raises_what_became_of_its_last_push_and_the_node_does_not_again() -> None:
    with left_alone() as (cluster, store):
        store.push("w", np.ones(3))
        with pytest.raises(NodeLostError, match=LEFT):
            store.close()
        with pytest.raises(ClosedError):
            store.push("w", np.ones(3))
        store.close()
        cluster.workers[0].close()


def test_close_of_a_node_raises_what_became_of_the_last_push_of_its_stores() -> None:
    with left_alone() as (cluster, store):
        store.push("w", np.ones(3))
        with pytest.raises(NodeLostError, match=LEFT):
            cluster.workers[0].close()
        cluster.workers[0].close()


def test_what_a_call_has_raised_is_not_raised_again_at_the_end() -> None:
    with left_alone() as (cluster, store):
        store.push("w", np.ones(3))
        with pytest.raises(NodeLostError, match=LEFT):
            store.pull("w")
        store.close()
        cluster.workers[0].close()


def test_a_push_whose_future_nobody_looks_at_is_raised_at_the_end() -> None:
    with left_alone() as (cluster, store):
        store.push_async("w", np.ones(3))  # type: ignore[attr-defined]
        with pytest.raises(NodeLostError, match=LEFT):
            cluster.workers[0].close()


def test_an_exception_in_a_with_block_is_not_hidden_by_that_of_a_push() -> None:
    with left_alone() as (cluster, store):
        store.push("w", np.ones(3))
        with pytest.raises(ValueError, match="my own mistake"), store:
            raise ValueError("my own mistake")
        with pytest.raises(NodeLostError, match=LEFT):
            cluster.workers[0].close()


def test_close_waits_for_the_other_workers_part_of_the_last_round() -> None:
    with InprocCluster(2, 1, prepare=install) as cluster:
        first, second = (
            create_dist("dist_sync", "dist_sync", node=node) for node in cluster.workers
        )
        closed = threading.Event()

        def push_and_close() -> None:
            first.init("w", np.zeros(3))
            first.push("w", np.ones(3))
            first.close()
            closed.set()

        thread = threading.Thread(target=push_and_close)
        thread.start()
        second.init("w", np.zeros(3))
        assert not closed.wait(0.2)
        second.push("w", np.ones(3))
        assert closed.wait(LIMIT_S)
        thread.join(LIMIT_S)
        assert second.pull("w").tolist() == [2.0, 2.0, 2.0]


def test_a_round_that_lacks_a_worker_is_waited_for_at_the_end_as_long_as_the_limit_says() -> None:
    settings = {"stall_timeout_s": 0.4, "heartbeat_interval_s": 0.02}
    with Workers("dist_sync", 2, 1, **settings) as workers:
        assert workers.cluster is not None
        workers.run(lambda kv: kv.init("w", np.zeros(3)))
        workers.stores[0].push("w", np.ones(3))
        with pytest.raises(
            DeadlineError,
            match=r"closed, but 1 request to.*0\.4 s \(PS_STALL_TIMEOUT\).*may never be",
        ):
            workers.cluster.workers[0].close()
        workers.cluster.workers[0].close()


def test_the_last_node_of_a_job_ends_at_once() -> None:
    """Nobody is left to accept its goodbye: nothing would come that ends its wait."""
    took = []
    for _ in range(5):  # of which the machine may make one or another slow
        with InprocCluster(2, 1) as cluster:
            for worker in cluster.workers:
                worker.leave()
            for node in (*cluster.workers, *cluster.servers):
                node.close()
            cluster.scheduler.finished.result(LIMIT_S)
            began = time.monotonic()
            cluster.scheduler.leave().result(LIMIT_S)
            took.append(time.monotonic() - began)
    assert min(took) < 0.1
