"""Distributed stores in awkward hands: failed updates, interrupts, overlaps, wrong threads."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import numpy as np
import pytest
from cluster import InprocCluster

from kvstore import optimizer
from kvstore.dist import DistKVStore, create_dist
from kvstore.server import install
from pslite import WORKER_GROUP
from pslite.errors import DeadlineError, RemoteError, UsageError
from pslite.future import settled
from pslite.van.inproc import InprocVan
from pslite.wire.codec import Envelope, encode
from pslite.wire.messages import Members

LIMIT_S = 20.0


@optimizer.register
@dataclasses.dataclass(frozen=True)
class TooLarge(optimizer.Optimizer):
    """Its state cannot be made."""

    def create_state(self, weight: Any) -> Any:
        raise MemoryError("no room for the state")


@optimizer.register
@dataclasses.dataclass(frozen=True)
class Slow(optimizer.Optimizer):
    """Takes 10 ms whatever it updates, and notes where."""

    threads: ClassVar[list[str]] = []

    def update(self, weight: Any, grad: Any, state: Any, count: int, scratch: Any) -> None:
        self.threads.append(threading.current_thread().name)
        time.sleep(0.01)
        weight += grad


@pytest.fixture
def cluster() -> Iterator[InprocCluster]:
    with InprocCluster(2, 2, prepare=install, chunk_bytes=256, credit_bytes=512) as cluster:
        yield cluster


def stores_of(cluster: InprocCluster, name: str = "dist_sync") -> list[DistKVStore]:
    return [create_dist(name, name, node=node) for node in cluster.workers]


def both(*calls: Any) -> list[Any]:
    """The calls at the same time, as two workers make them."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(LIMIT_S) for future in [threads.submit(call) for call in calls]]


def init(stores: list[DistKVStore], **values: Any) -> None:
    both(*[lambda s=store: s.init(list(values), list(values.values())) for store in stores])


def test_a_state_that_cannot_be_made_is_an_error_and_the_next_push_is_right(
    cluster: InprocCluster,
) -> None:
    stores = stores_of(cluster)
    init(stores, w=np.ones(100))
    both(*[lambda s=store: s.set_optimizer(TooLarge()) for store in stores])
    gradient = np.ones(100)
    for store in stores:
        store.push("w", gradient)
    for store in stores:
        settled(store._exchange.unfinished()).result(LIMIT_S)
        with pytest.raises(RemoteError, match="no room for the state"):
            store.pull("w")
    sgd = optimizer.create("sgd", learning_rate=0.5)
    both(*[lambda s=store: s.set_optimizer(sgd) for store in stores])
    results = both(*[lambda s=store: (s.push("w", gradient), s.pull("w"))[1] for store in stores])
    assert [result.tolist() for result in results] == [[0.0] * 100] * 2


def test_an_interrupted_pushpull_neither_reads_nor_writes_the_callers_arrays_any_more(
    cluster: InprocCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores = stores_of(cluster)
    init(stores, w=np.zeros(300))
    value, out = np.ones(300), np.zeros(300)

    def interrupted(future: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stores[0], "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stores[0].pushpull("w", value, out=out)
    monkeypatch.undo()
    value[:], out[:] = 777.0, -1.0
    assert stores[1].pushpull("w", np.ones(300), out=(mine := np.zeros(300))) is None
    assert (mine.tolist(), out.tolist()) == ([2.0] * 300, [-1.0] * 300)
    assert stores[0].pull("w").tolist() == [2.0] * 300


def test_values_may_land_in_the_memory_of_other_keys(cluster: InprocCluster) -> None:
    stores = stores_of(cluster)
    keys = [f"k{n}" for n in range(8)]
    init(stores, **{key: np.zeros(32) for key in keys})

    def exchange(store: DistKVStore) -> list[list[float]]:
        values = [np.full(32, float(n)) for n in range(8)]
        store.pushpull(keys, values, out=values[::-1])
        return [value.tolist() for value in values]

    for result in both(*[lambda s=store: exchange(s) for store in stores]):
        assert result == [[2.0 * (7 - n)] * 32 for n in range(8)]


def test_pushes_of_keys_in_changing_orders_are_bounded_as_well(cluster: InprocCluster) -> None:
    stores = stores_of(cluster)
    keys = ["a", "b", "c", "d"]
    init(stores, **{key: np.zeros(3) for key in keys})
    orders = itertools.permutations(keys)

    def push() -> int:
        for count, order in enumerate(orders):
            if cluster.workers[0].error is not None:
                return count
            stores[0].push(list(order), [np.ones(3)] * 4)
        return -1

    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(push)
        with pytest.raises(concurrent.futures.TimeoutError):
            future.result(0.3)  # it waits, since the other worker pushes nothing
        assert len(stores[0]._exchange.unfinished()) == 1 + cluster.workers[0].config.round_window
        for order in itertools.permutations(keys):
            stores[1].push(list(order), [np.ones(3)] * 4)
        assert future.result(LIMIT_S) == -1


def test_a_callback_that_waits_is_refused_instead_of_waiting_for_itself(
    cluster: InprocCluster,
) -> None:
    stores = stores_of(cluster)
    init(stores, w=np.zeros(3))
    seen: list[BaseException] = []

    def callback(_: Any) -> None:
        try:
            stores[0].pull("w")
        except UsageError as error:
            seen.append(error)

    done = stores[0].pull_async("w", np.zeros(3))
    done.on_done(callback)
    done.result(LIMIT_S)
    stores[0].pull("w")
    assert "must not wait" in str(seen[0])


def test_a_stranger_can_declare_nobody_lost(cluster: InprocCluster) -> None:
    server = cluster.servers[0]
    stranger = InprocVan(cluster._network, "W00stranger")
    assert server.info is not None
    stranger.connect(server.info.uid, server.info.address)
    news = Members(1_000_000, (9,), (0,), ("says a stranger",))
    stranger.send(server.info.uid, [encode(Envelope("", 1, 77, 0, 1, 0, (), (), news))])
    stores = stores_of(cluster)
    init(stores, w=np.zeros(3))
    results = both(*[lambda s=s: (s.push("w", np.ones(3)), s.pull("w"))[1] for s in stores])
    stranger.close()
    assert [result.tolist() for result in results] == [[2.0] * 3] * 2
    assert (server.error, server.membership.epoch) == (None, 1)


def test_a_barrier_that_times_out_names_who_is_missing(cluster: InprocCluster) -> None:
    with pytest.raises(DeadlineError, match="worker 1"):
        cluster.workers[0].barrier(WORKER_GROUP, 0.2).result(LIMIT_S)


def test_a_store_shows_its_rank_and_keys_also_after_its_end(cluster: InprocCluster) -> None:
    first, second = stores_of(cluster)
    assert repr(second) == "<dist_sync store: rank 1 of 2, 0 keys>"
    both(*(lambda kv=kv: kv.init(["w", "v"], [np.ones(2)] * 2) for kv in (first, second)))
    assert repr(first) == "<dist_sync store: rank 0 of 2, 2 keys>"
    first.close()
    assert repr(first) == "<dist_sync store: rank 0 of 2, 2 keys, closed>"


def test_a_slow_optimizer_does_not_keep_a_server_from_answering_others() -> None:
    """Small updates are made on the I/O thread, but not for long if they are not quick."""
    Slow.threads.clear()
    with InprocCluster(1, 1, prepare=install) as cluster:
        (store,) = stores_of(cluster)
        store.set_optimizer(optimizer.create("slow"))
        store.init("w", np.zeros(3, np.float32))
        for _ in range(8):
            store.pushpull("w", np.ones(3, np.float32))
        (server,) = cluster.servers
        assert server.errands.thread is not None
        on_io = [name == server.errands.thread.name for name in Slow.threads]
        assert on_io[0]
        assert not any(on_io[-3:])
        assert store.pull("w").tolist() == [8.0] * 3
        store.close()
