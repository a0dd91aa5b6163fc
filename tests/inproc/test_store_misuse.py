"""Distributed stores in awkward hands: failed updates, interrupts, overlaps, wrong threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from cluster import InprocCluster

import pslite
from kvstore import optimizer
from kvstore.mxnet.nd.sparse import row_sparse_array
from kvstore.protocol import commands
from kvstore.server import install
from kvstore.stores.dist.store import DistKVStore, create_dist
from pslite import WORKER_GROUP
from pslite.errors import ConfigError, DeadlineError, NodeLostError, RemoteError, UsageError
from pslite.future import settled
from pslite.node.control import SCHEDULER
from pslite.testing.inproc import InprocNetwork, InprocVan
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
        assert server.io_queue.thread is not None
        on_io = [name == server.io_queue.thread.name for name in Slow.threads]
        assert on_io[0]
        assert not any(on_io[-3:])
        assert store.pull("w").tolist() == [8.0] * 3
        store.close()


# -- code of a user's that ends the script, on a server -------------------------------------


@optimizer.register
@dataclasses.dataclass(frozen=True)
class Ends(optimizer.Optimizer):
    """Ends the process where it updates (or makes states), as a script might."""

    of_states: bool = False
    ending: ClassVar[type[BaseException]] = SystemExit

    def create_state(self, weight: Any) -> Any:
        if self.of_states:
            raise self.ending(0)
        return ()

    def update(self, weight: Any, grad: Any, state: Any, count: int, scratch: Any) -> None:
        raise self.ending(0)


def end_it(body: str) -> str:
    if body:
        raise Ends.ending(body)
    return "still here"


def command(kv: DistKVStore) -> None:
    kv.send_command_to_servers(4713, "the end")


def dense_round(kv: DistKVStore) -> None:
    kv.set_optimizer(Ends())
    kv.pushpull("dense", np.ones(100), out=np.zeros(100))


def states(kv: DistKVStore) -> None:
    kv.set_optimizer(Ends(of_states=True))
    kv.pushpull("dense", np.ones(100), out=np.zeros(100))


def large_round(kv: DistKVStore) -> None:
    kv.set_optimizer(Ends())
    kv.pushpull("large", np.ones(100_000), out=np.zeros(100_000))


def rows_round(kv: DistKVStore) -> None:
    kv.set_optimizer(Ends())
    kv.push("rows", row_sparse_array((np.ones((1, 2)), [3]), (9, 2)))
    kv.row_sparse_pull("rows", row_ids=[3])


def table_round(kv: DistKVStore) -> None:
    table = kv.create_table("t", 2, init=0, optimizer=Ends())
    table.push([1], np.ones((1, 2), np.float32))
    table.pull([1])


@pytest.mark.parametrize(
    "ending",
    [SystemExit, KeyboardInterrupt, asyncio.CancelledError],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize(
    "misuse",
    [command, dense_round, states, large_round, rows_round, table_round],
    ids=lambda each: each.__name__,
)
def test_code_that_ends_the_process_is_an_error_at_the_caller_and_servers_go_on(
    misuse: Any, ending: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ends, "ending", ending)
    monkeypatch.setattr(commands, "_commands", {})
    commands.register_command(4713)(end_it)
    with InprocCluster(1, 1, prepare=install, pool_threads=1) as cluster:
        (kv,) = stores_of(cluster)
        kv.init(["dense", "large"], [np.zeros(100), np.zeros(100_000)])
        kv.init("rows", row_sparse_array((np.ones((9, 2)), np.arange(9)), (9, 2)))
        with ThreadPoolExecutor(1) as threads, pytest.raises(RemoteError, match=ending.__name__):
            threads.submit(misuse, kv).result(LIMIT_S)
        kv.set_optimizer(optimizer.create("test"))
        kv.pushpull("dense", np.ones(100), out=(out := np.zeros(100)))
        assert out.tolist() == [1.0] * 100
        assert kv.send_command_to_servers(4713, "") == ["still here"]


def test_a_bug_in_the_work_of_a_pool_ends_the_node_and_every_wait_for_it() -> None:
    with InprocCluster(1, 1, prepare=install, lost_after_s=0.2) as cluster:
        (kv,) = stores_of(cluster)
        kv.init("w", np.zeros(100))
        (server,) = cluster.servers

        def bug() -> None:
            raise SystemExit(0)

        server.pool.submit(0, bug)
        with pytest.raises(RuntimeError, match="a thread of this node ended with SystemExit: 0"):
            server.finished.result(LIMIT_S)
        cluster.kill(server)
        with pytest.raises(NodeLostError, match="server 0"):
            kv.pull("w")
        assert any("a task of the thread pool failed: Traceback" in line for line in cluster.lines)


class NoRoomVan(InprocVan):
    """Opens the connection with the scheduler, and no more."""

    def connect(self, peer: str, address: str) -> None:
        if peer != SCHEDULER:
            raise ConfigError("cannot open another socket (Too many open files)")
        super().connect(peer, address)


def test_a_worker_that_cannot_open_its_connections_ends_with_that_error() -> None:
    network, lines = InprocNetwork(), list[str]()
    vans = {"scheduler": InprocVan, "server": InprocVan, "worker": NoRoomVan}
    nodes = [
        pslite.start(
            pslite.Config(role, 1, 1, root_uri="127.0.0.1", root_port=9091),
            make_van=partial(van, network),
            write=lines.append,
            wait=False,
        )
        for role, van in vans.items()
    ]
    try:
        with pytest.raises(ConfigError, match="Too many open files"):
            nodes[2].ready.result(LIMIT_S)
    finally:
        for node in nodes:
            node.close(goodbye=False)
    assert not any("is wrong" in line for line in lines)
