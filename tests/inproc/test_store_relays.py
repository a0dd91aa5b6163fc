"""Stores whose workers share machines with servers: the servers relay between machines."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S
from workers import Workers

import kvstore as mx
from kvstore import optimizer
from kvstore.server.app import ServerStores
from kvstore.server.relay import Relay
from kvstore.stores.base import KVStore
from kvstore.stores.dist.transfer import DenseExchange
from pslite import Postoffice
from pslite.errors import DeadlockError, NodeLostError, RemoteError, UsageError
from pslite.ids import Role
from pslite.plane import ServerPlane

SHAPES = {"w": (3, 5), "b": (7,), "large": (40, 11)}
PLACES = {
    "two of two": ("AABB", "AB"),
    "two and one": ("AAB", "AB"),
    "two servers on one": ("AAABB", "AAB"),
    "one machine without a server": ("AABB", "AA"),
    "a server alone": ("AABB", "ABC"),
}


def on(places: tuple[str, str], **config: Any) -> Workers:
    workers, servers = places
    return Workers(
        "dist_sync",
        len(workers),
        len(servers),
        machines=workers,
        server_machines=servers,
        chunk_bytes=256,
        **config,
    )


def gradient(rank: int, step: int, key: str) -> np.ndarray[Any, np.dtype[np.float32]]:
    chance = np.random.default_rng([rank, step, len(key)])
    return chance.integers(-99, 99, SHAPES[key]).astype(np.float32)  # sums are exact


def train(kv: KVStore) -> list[Any]:
    keys = list(SHAPES)
    kv.init(keys, [np.full(SHAPES[key], 5, np.float32) for key in keys])
    found = []
    for step in range(5):
        outs = [np.empty(SHAPES[key], np.float32) for key in keys]
        mine = [gradient(kv.rank, step, key) for key in keys]
        if step % 2:
            for key, value, out in zip(keys, mine, outs, strict=True):
                kv.push(key, value)
                kv.pull(key, out)
        else:
            kv.pushpull(keys, mine, out=outs)
        kv.wait()
        found += outs
    return found


@pytest.mark.parametrize("drop_percent", [0.0, 10.0])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
def test_all_workers_get_the_sum_of_all(places: tuple[str, str], drop_percent: float) -> None:
    size = len(places[0])
    with on(places, drop_percent=drop_percent, resend_timeout_s=0.02) as workers:
        found = workers.run(train)
    keys = list(SHAPES)
    for step in range(5):
        for index, key in enumerate(keys):
            expected = sum(gradient(rank, step, key) for rank in range(size))
            for mine in found:
                np.testing.assert_array_equal(mine[step * len(keys) + index], expected)


# -- who sends what -----------------------------------------------------------------------


@pytest.fixture
def senders(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(server, contributor) of each request to a server, from now on."""
    found: list[tuple[int, int]] = []
    usual = ServerPlane.exchange

    def exchange(plane: ServerPlane, rank: int, *arguments: Any) -> Any:
        found.append((plane.app._dense.relay.own_rank, rank))  # type: ignore[attr-defined]
        return usual(plane, rank, *arguments)

    monkeypatch.setattr(ServerPlane, "exchange", exchange)
    return found


def routes(places: tuple[str, str], senders: list[tuple[int, int]], **config: Any) -> set[Any]:
    with on(places, **config) as workers:
        workers.run(train)
    return set(senders)


LOCAL = {(0, 0), (0, 1), (1, 2), (1, 3)}
ALL = {(server, worker) for server in range(2) for worker in range(4)}


def test_one_sum_goes_from_a_machine_to_another(senders: list[tuple[int, int]]) -> None:
    assert routes(("AABB", "AB"), senders) == LOCAL | {(0, -2), (1, -1)}


def test_each_worker_sends_its_own_values_if_told_to(senders: list[tuple[int, int]]) -> None:
    assert routes(("AABB", "AB"), senders, hierarchical="off") == ALL


def test_each_worker_sends_its_own_values_where_nodes_may_be_replaced(
    senders: list[tuple[int, int]],
) -> None:
    assert routes(("AABB", "AB"), senders, rejoin_timeout_s=60.0) == ALL


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8, np.float64])
def test_numbers_of_16_bits_are_added_up_by_their_owner(
    dtype: Any, senders: list[tuple[int, int]]
) -> None:
    def script(kv: KVStore) -> Any:
        kv.init("w", np.zeros(600, dtype))
        out = np.empty(600, dtype)
        kv.pushpull("w", np.full(600, 3, dtype), out=out)
        return out

    with on(("AABB", "AB")) as workers:
        for out in workers.run(script):
            np.testing.assert_array_equal(out, np.full(600, 12, dtype))
    assert set(senders) == (ALL if dtype is np.float16 else LOCAL | {(0, -2), (1, -1)})


def test_asynchronous_stores_send_each_push_to_its_owner(senders: list[tuple[int, int]]) -> None:
    def script(kv: KVStore) -> Any:
        kv.set_optimizer(optimizer.create("sgd", learning_rate=-1.0))
        kv.init("w", np.zeros(600, np.float32))
        kv.push("w", np.ones(600, np.float32))
        kv.wait()
        kv.barrier()
        out = np.empty(600, np.float32)
        kv.pull("w", out)
        return out

    with Workers(
        "dist_async", 4, 2, machines="AABB", server_machines="AB", chunk_bytes=256
    ) as workers:
        for out in workers.run(script):
            np.testing.assert_array_equal(out, np.full(600, 4, np.float32))
    assert set(senders) == ALL


def owned_by(kv: Any, server: int, index: int = 0) -> Any:
    """A key of one part that this server has."""
    entries = kv._exchange.entries.values()
    return [entry.key for entry in entries if entry.servers == (server,)][index]


def test_workers_that_disagree_about_relays_get_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = DenseExchange.route

    def route(exchange: DenseExchange, entry: Any, owner: int) -> int:
        return owner if exchange._node.rank == 1 else usual(exchange, entry, owner)

    monkeypatch.setattr(DenseExchange, "route", route)

    def script(kv: Any) -> None:
        kv.init(list(range(8)), [np.zeros(60, np.float32)] * 8)
        if kv.rank == 1:
            kv.push(owned_by(kv, 1), np.ones(60, np.float32))
            with pytest.raises(UsageError, match="expects no push of worker 1 itself"):
                kv.wait()

    with on(("AABB", "AB")) as workers:
        workers.run(script)


# -- what is stored -----------------------------------------------------------------------


def sum_of(values: list[Any]) -> Any:
    total = values[0].copy()
    for value in values[1:]:
        total += value
    return total


def test_sums_are_the_same_bits_in_each_run() -> None:
    def script(kv: KVStore) -> Any:
        kv.init(list(range(8)), [np.zeros(60, np.float32)] * 8)
        out = np.empty(60, np.float32)
        chance = np.random.default_rng(kv.rank)
        mine = (10.0 ** chance.integers(-6, 6, 60)).astype(np.float32)
        kv.pushpull(owned_by(kv, 0), mine, out=out)
        return mine, out

    with on(("AABB", "AB")) as workers:
        found = workers.run(script)
    values = [mine for mine, _ in found]
    expected = sum_of([sum_of(values[2:]), *values[:2]])
    for _, out in found:
        assert out.tobytes() == expected.tobytes()


def test_an_optimizer_runs_once_at_the_owner() -> None:
    def script(kv: KVStore) -> Any:
        kv.set_optimizer(optimizer.create("sgd", learning_rate=0.5, momentum=0.5))
        return train(kv)

    with on(("AABB", "AB")) as workers:
        relayed = workers.run(script)
    with on(("AABB", "AB"), hierarchical="off") as workers:
        direct = workers.run(script)
    for mine, other in zip(relayed, direct, strict=True):
        for value, expected in zip(mine, other, strict=True):
            np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize("dense_ranks", [(), (1,), (0, 3)])
@pytest.mark.parametrize("rule", ["none", "sgd", "adagrad"])
def test_rows_for_dense_keys(dense_ranks: tuple[int, ...], rule: str) -> None:
    shape = (30, 7)  # rows are cut by the borders of parts

    def script(kv: KVStore) -> Any:
        if rule != "none":
            kv.set_optimizer(optimizer.create(rule, learning_rate=0.5))
        kv.init("w", np.ones(shape, np.float32))
        found = []
        for step in range(3):
            chance = np.random.default_rng([kv.rank, step])
            ids = np.unique(chance.integers(0, 30, 5))
            value = np.zeros(shape, np.float32)
            value[ids] = chance.integers(-9, 9, (len(ids), 7))
            if kv.rank in dense_ranks:
                kv.push("w", value)
            else:
                kv.push("w", mx.nd.sparse.row_sparse_array((value[ids], ids), shape=shape))
            rows = kv.row_sparse_pull("w", row_ids=[3, 4, 29])
            out = np.empty(shape, np.float32)
            kv.pull("w", out)
            np.testing.assert_array_equal(rows.values, out[[3, 4, 29]])
            found.append(out)
        return found

    with on(("AABB", "AB")) as workers:
        relayed = workers.run(script)
    with on(("AABB", "AB"), hierarchical="off") as workers:
        direct = workers.run(script)
    for mine in relayed:
        np.testing.assert_array_equal(mine, direct[0])


def test_row_sparse_keys_go_to_their_owners(senders: list[tuple[int, int]]) -> None:
    def script(kv: KVStore) -> Any:
        kv.init("rows", mx.nd.ones((40, 3)).tostype("row_sparse"))
        value = mx.nd.sparse.row_sparse_array((np.ones((2, 3), np.float32), [1, 39]), shape=(40, 3))
        kv.push("rows", value)
        return kv.row_sparse_pull("rows", row_ids=[1, 39]).values

    with on(("AABB", "AB")) as workers:
        for values in workers.run(script):
            np.testing.assert_array_equal(values, np.full((2, 3), 4))
    assert set(senders) == ALL


def test_compressed_pushes_go_to_their_owners(senders: list[tuple[int, int]]) -> None:
    def push(kv: KVStore, times: int) -> Any:
        for _ in range(times):
            kv.push("w", np.ones(600, np.float32))
        out = np.empty(600, np.float32)
        kv.pull("w", out)
        kv.wait()
        kv.barrier()
        return out

    def script(kv: KVStore) -> Any:
        kv.set_optimizer(optimizer.create("sgd", learning_rate=-1.0))
        kv.init("w", np.zeros(600, np.float32))
        found = [push(kv, 3)]
        kv.set_gradient_compression({"type": "fp16"})
        found.append(push(kv, 2))
        kv.set_gradient_compression({"type": "none"})
        kv.init("late", np.zeros(5, np.float32))
        late = np.empty(5, np.float32)
        kv.pushpull("late", np.ones(5, np.float32), out=late)
        return [*found, push(kv, 1), late]

    with on(("AABB", "AB")) as workers:
        for found in workers.run(script):
            assert [set(values) for values in found] == [{12.0}, {20.0}, {24.0}, {4.0}]
    assert set(senders) == ALL | {(0, -2), (1, -1)}


def test_a_loaded_value_is_there_for_all(tmp_path: pathlib.Path) -> None:
    def script(kv: KVStore) -> Any:
        kv.set_optimizer(optimizer.create("sgd", learning_rate=-1.0, momentum=0.5))
        kv.init("w", np.zeros(600, np.float32))
        out = np.empty(600, np.float32)
        kv.pushpull("w", np.ones(600, np.float32), out=out)
        kv.save_checkpoint(tmp_path)
        kv.pushpull("w", np.ones(600, np.float32), out=out)
        later = out.copy()
        kv.load_checkpoint(tmp_path)
        kv.pull("w", out)
        loaded = out.copy()
        kv.pushpull("w", np.ones(600, np.float32), out=out)
        return loaded, later, out

    with on(("AABB", "AB")) as workers:
        for loaded, later, again in workers.run(script):
            assert set(loaded) == {4.0}
            np.testing.assert_array_equal(again, later)


def test_a_key_is_deleted_and_made_again_and_a_store_closed() -> None:
    def script(kv: KVStore) -> Any:
        out = np.empty(600, np.float32)
        for value in (1, 2):
            kv.init("w", np.full(600, value, np.float32))
            kv.pull("w", out)
            assert set(out) == {value}
            kv.pushpull("w", np.ones(600, np.float32), out=out)
            assert set(out) == {4}
            kv.delete("w")
        return kv

    with on(("AABB", "AB")) as workers:
        workers.run(script)
        again = workers.create()
        workers.run(script, again)
        workers.run(lambda kv: kv.close(), again)
        servers = workers.cluster.servers if workers.cluster is not None else []
        for server in servers:
            assert not server.traffic.relay._owners  # type: ignore[union-attr]


def test_views_of_relayed_keys_are_live_on_the_workers_machine() -> None:
    large = np.zeros((300, 300), np.float32)

    def script(kv: Any) -> list[bool]:
        kv.set_optimizer(optimizer.create("sgd", learning_rate=-1.0))
        kv.init(["a", "b"], [large, large])
        views = kv.view(["a", "b"])
        kept = views[0]
        for step in range(1, 4):
            kv.pushpull(["a", "b"], [large + 1, large + 1], out=views)
            for view in views:
                assert (view == step * 4).all()
        live = [bool(kv._views.by_key[key].is_live) for key in ("a", "b")]
        kv.push(["a", "b"], [large + 1, large + 1])
        assert (kept == 12).all()
        return live

    with Workers("dist_sync", 4, 2, machines="AABB", server_machines="AB") as workers:
        assert workers.run(script) == [[True, True]] * 4


@optimizer.register
@dataclasses.dataclass(frozen=True)
class RefusesNegatives(optimizer.Optimizer):
    """Fails on gradients that are negative."""

    def update(self, weight: Any, grad: Any, state: Any, count: int, scratch: Any) -> None:
        if grad[0] < 0:
            raise ZeroDivisionError("a bug in an optimizer")
        weight += grad


# -- what goes wrong ----------------------------------------------------------------------


@pytest.mark.parametrize("hierarchical", ["auto", "off"])
def test_a_worker_that_leaves_ends_the_rounds_of_all_machines(hierarchical: str) -> None:
    def script(kv: KVStore) -> Any:
        kv.init(list(SHAPES), [np.zeros(shape, np.float32) for shape in SHAPES.values()])
        values = [np.ones(shape, np.float32) for shape in SHAPES.values()]
        outs = [np.empty(shape, np.float32) for shape in SHAPES.values()]
        for _ in range(3):
            kv.push(list(SHAPES), values)
        if kv.rank == 1:
            kv._node.leave()  # type: ignore[attr-defined]
            return None
        kv.pull(list(SHAPES), outs)
        kv.wait()
        assert all((out == 4).all() for out in outs)  # its last pushes count
        with pytest.raises(NodeLostError, match="worker 1"):
            kv.wait(kv.pushpull_async(list(SHAPES), values, out=outs))
        for key, out in zip(SHAPES, outs, strict=True):
            push = kv.push_async(list(SHAPES), values)
            with pytest.raises(NodeLostError, match="worker 1"):
                kv.pull(key, out)  # a request of its own; not the value of an earlier round
            with pytest.raises(NodeLostError, match="worker 1"):
                push.result(LIMIT_S)
        return None

    with on(("AABB", "AB"), hierarchical=hierarchical) as workers:
        workers.run(script)


def test_a_round_that_its_owner_refuses_leaves_the_value_as_it_was() -> None:
    def script(kv: KVStore) -> Any:
        kv.set_optimizer(RefusesNegatives())
        kv.init("w", np.zeros(600, np.float32))
        out = np.empty(600, np.float32)
        found = []
        for value in (1, -1, 2):
            kv.push("w", np.full(600, value, np.float32))
            if value < 0:
                with pytest.raises(RemoteError, match="a bug in an optimizer"):
                    kv.wait()
            kv.pull("w", out)
            kv.wait()
            found.append(set(out))
        return found

    with on(("AABB", "AB")) as workers:
        assert workers.run(script) == [[{4.0}, {4.0}, {12.0}]] * 4


@pytest.mark.parametrize("victim", [0, 1])
def test_a_lost_server_is_named_by_all(victim: int) -> None:
    with on(("AABB", "AB"), lost_after_s=0.5) as workers:
        assert workers.cluster is not None
        workers.run(train)
        workers.cluster.kill(workers.cluster.servers[victim])

        def script(kv: KVStore) -> str:
            values = [gradient(kv.rank, 0, key) for key in SHAPES]
            kv.push(list(SHAPES), values)
            with pytest.raises(NodeLostError) as caught:
                kv.wait()
            return str(caught.value)

        for text in workers.run(script):
            assert f"server {victim}" in text


def test_a_long_round_names_the_workers_that_are_missing() -> None:
    with on(("AABB", "AB"), stall_report_s=0.3) as workers:
        assert workers.cluster is not None

        def script(kv: KVStore) -> None:
            kv.init("w", np.zeros(600, np.float32))
            if kv.rank == 3:
                wait_until(lambda: all(len(list(each.traffic.reports)) for each in others))
            kv.push("w", np.ones(600, np.float32))
            kv.wait()

        others = workers.cluster.workers[:3]
        workers.run(script)
        for each in others:
            assert any("worker 3" in text for _, text in each.traffic.reports)


def wait_until(condition: Any) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.05)


# -- departures, one step after the other -------------------------------------------------


def twelve(kv: KVStore) -> tuple[Any, Any]:
    """Small keys on both servers; a value and an array for answers."""
    kv.init(list(range(12)), [np.zeros(60, np.float32)] * 12)
    return np.ones(60, np.float32), np.empty(60, np.float32)


def later(monkeypatch: pytest.MonkeyPatch, delay_s: float) -> None:
    """Sums take this long before they are sent."""
    usual = Relay._forward

    def forward(relay: Relay, jobs: Any, sums: Any) -> None:
        relay._node.io_queue.call_later(delay_s, lambda: usual(relay, jobs, sums))

    monkeypatch.setattr(Relay, "_forward", forward)


@pytest.mark.parametrize("places", [("AABB", "AB"), ("AAB", "AB")])
def test_the_last_push_of_a_job_is_applied(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    later(monkeypatch, 0.2)
    applied: list[int] = []
    usual = ServerStores.apply

    def apply(stores: ServerStores, jobs: Any) -> Any:
        applied.extend(part for job in jobs for part in job.parts)
        return usual(stores, jobs)

    monkeypatch.setattr(ServerStores, "apply", apply)

    def script(kv: KVStore) -> None:
        one, _ = twelve(kv)
        kv.push(list(range(12)), [one] * 12)

    with on(places, placement="equal") as workers:  # all servers own some
        workers.run(script)
        cluster = workers.cluster
        assert cluster is not None
        with ThreadPoolExecutor(len(cluster.nodes)) as threads:  # each ends when it may
            ends = [threads.submit(end, node) for node in cluster.nodes]
        for each in ends:
            each.result()
    assert sorted(applied) == list(range(min(applied), min(applied) + 12))


def end(node: Postoffice) -> None:
    if node.role is not Role.WORKER:
        node.finished.result(LIMIT_S)
    node.close()


@pytest.mark.parametrize("hierarchical", ["auto", "off"])
def test_others_do_not_wait_for_rounds_that_a_gone_worker_did_not_begin(hierarchical: str) -> None:
    """Even if its neighbour is behind with other keys."""
    told = threading.Event()

    def script(kv: Any) -> None:
        one, out = twelve(kv)
        first, second = owned_by(kv, 1), owned_by(kv, 1, 1)
        if kv.rank == 1:
            kv.push(first, one)
            kv._node.leave()
        elif kv.rank == 0:
            assert told.wait(LIMIT_S)
            kv.push(first, one)
        else:
            with pytest.raises(NodeLostError, match="worker 1"):
                kv.pushpull_async(second, one, out=out).result(LIMIT_S)
            if kv.rank == 3:
                told.set()
            kv.pushpull_async(first, one, out=out).result(LIMIT_S)
            assert set(out) == {4.0}

    with on(("AABB", "AB"), hierarchical=hierarchical) as workers:
        workers.run(script)


@pytest.mark.parametrize("hierarchical", ["auto", "off"])
def test_pushes_ahead_of_a_round_without_a_contributor_fail_too(hierarchical: str) -> None:
    def script(kv: Any) -> None:
        one, out = twelve(kv)
        key = owned_by(kv, 1)
        kv.pushpull(key, one, out=out)
        kv.barrier()
        if kv.rank == 3:
            kv._node.leave()
            return
        for push in [kv.push_async(key, one) for _ in range(3)]:
            with pytest.raises(NodeLostError, match="worker 3"):
                push.result(LIMIT_S)

    with on(("AABB", "AB"), hierarchical=hierarchical) as workers:
        workers.run(script)


# -- who waits for whom -------------------------------------------------------------------


def test_a_report_names_only_the_worker_that_is_missing_on_another_machine() -> None:
    with on(("AABB", "AB"), stall_report_s=0.4) as workers:
        assert workers.cluster is not None
        others = workers.cluster.workers[:3]

        def script(kv: Any) -> None:
            one, _ = twelve(kv)
            if kv.rank == 3:
                wait_until(lambda: all(len(list(each.traffic.reports)) > 1 for each in others))
            kv.push(owned_by(kv, 0), one)
            kv.wait()

        workers.run(script)
        for each in others:
            _, text = list(each.traffic.reports)[-1]
            assert "worker 3" in text
            assert "worker 2" not in text


def test_a_relayed_round_does_not_hide_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(kv: Any) -> None:
        one, out = twelve(kv)
        kv._progress.others_may_act = lambda waiting: False  # this process has many threads
        key = owned_by(kv, 1)
        wait = kv.barrier if kv.rank > 1 else partial(kv.pushpull, key, one, out=out)
        with pytest.raises(DeadlockError):
            wait()

    with on(("AABB", "AB"), stall_report_s=0.1, heartbeat_interval_s=0.02) as workers:
        workers.run(script)
        workers.has_failed = True  # rounds are open for ever


# -- what a server cannot do --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "rows"])
def test_all_workers_get_the_error_of_an_update(kind: str) -> None:
    shape = (10, 6)

    def pushed(value: float) -> Any:
        rows = np.full(shape, value, np.float32)
        if kind == "dense":
            return rows
        return mx.nd.sparse.row_sparse_array((rows, np.arange(10)), shape=shape)

    def script(kv: Any) -> Any:
        kv.set_optimizer(RefusesNegatives())
        kv.init(list(range(8)), [np.zeros(shape, np.float32)] * 8)
        key, out = owned_by(kv, 1), np.empty(shape, np.float32)
        for value in (1, -1, 2):
            kv.push(key, pushed(value))
            if value < 0:
                with pytest.raises(RemoteError, match="a bug in an optimizer"):
                    kv.wait()
            kv.wait()
        kv.pull(key, out)
        return set(out.reshape(-1))

    with on(("AABB", "AB")) as workers:
        assert workers.run(script) == [{12.0}] * 4


def test_a_sum_that_cannot_be_made_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(relay: Relay, job: Any) -> Any:
        raise MemoryError("no memory for the sum")

    monkeypatch.setattr(Relay, "_sum", no_memory)

    with on(("AABB", "AB"), lost_after_s=0.5) as workers:
        cluster = workers.cluster
        assert cluster is not None

        def script(kv: Any) -> None:
            one, out = twelve(kv)
            call = kv.pushpull_async(owned_by(kv, 1), one, out=out)
            if kv.rank == 0:
                wait_until(lambda: cluster.servers[0].error is not None)
                cluster.kill(cluster.servers[0])  # its process ends with this error
            with pytest.raises(NodeLostError, match="server 0"):
                call.result(LIMIT_S)

        workers.run(script)
        workers.has_failed = True
        assert "no memory for the sum" in str(cluster.servers[0].error)


def test_sums_of_rows_are_made_on_several_threads() -> None:
    shape, keys = (4000, 16), list(range(8))

    def script(kv: KVStore) -> None:
        kv.init(keys, [np.zeros(shape, np.float32)] * len(keys))
        ids = np.arange(kv.rank % 2, shape[0], 2)
        outs = [np.empty(shape, np.float32) for _ in keys]
        for step in range(1, 4):
            for key in keys:
                rows = np.full((len(ids), shape[1]), step * (key + 1), np.float32)
                kv.push(key, mx.nd.sparse.row_sparse_array((rows, ids), shape=shape))
            for key, out in zip(keys, outs, strict=True):
                kv.pull(key, out)
            kv.wait()
            for key, out in zip(keys, outs, strict=True):
                assert set(out.reshape(-1)) == {2.0 * step * (key + 1)}

    with Workers(
        "dist_sync", 4, 2, machines="AABB", server_machines="AB", pool_threads=4
    ) as workers:
        workers.run(script)


def test_a_key_that_is_deleted_while_a_sum_is_made_does_not_hold_others_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual, deleted = Relay._forward, threading.Event()
    held: list[Any] = []

    def forward(relay: Relay, jobs: Any, sums: Any) -> None:
        if relay.own_rank == 0 and not held and any(len(job.parts) > 1 for job in jobs):
            held.append(jobs)

            def look() -> None:
                if deleted.is_set():
                    usual(relay, jobs, sums)
                else:
                    relay._node.io_queue.call_later(0.01, look)

            look()
        else:
            usual(relay, jobs, sums)

    def script(kv: Any) -> None:
        one, out = twelve(kv)
        gone, stays = owned_by(kv, 1), owned_by(kv, 1, 1)
        outs = [np.empty(60, np.float32) for _ in range(2)]
        for _ in range(5):  # the server takes them together from now on
            kv.pushpull([gone, stays], [one, one], out=outs)
        kv.barrier()
        if kv.rank == 0:
            monkeypatch.setattr(Relay, "_forward", forward)
        kv.barrier()
        call = kv.pushpull_async([gone, stays], [one, one], out=outs)
        if kv.rank == 0:
            wait_until(lambda: held)
            kv._servers.delete([kv._exchange.entries[gone]]).result(LIMIT_S)
            deleted.set()
        with pytest.raises(UsageError, match="deleted"):
            call.result(LIMIT_S)
        for value in (10, 20):
            mine = np.full(60, value + kv.rank, np.float32)
            kv.pushpull_async(stays, mine, out=out).result(LIMIT_S)
            assert set(out) == {4.0 * value + 6}

    with on(("AABB", "AB")) as workers:
        workers.run(script)
