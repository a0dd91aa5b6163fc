"""Calls that return futures, ``wait``, versions, and the smaller calls of a store."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from workers import Workers

import kvstore
from kvstore import KVStore, optimizer
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NotSupportedError,
    OptimizerNotSet,
    OptimizerParameterError,
    UnknownKeyError,
)
from kvstore.protocol import commands
from pslite import Future
from pslite.errors import UsageError

KINDS = ["local", "device", "dist_sync", "dist_device_sync", "dist_async"]
LARGE = 300


@pytest.fixture(params=KINDS)
def workers(request: pytest.FixtureRequest) -> Any:
    with Workers(request.param, chunk_bytes=256, credit_bytes=512) as workers:
        workers.run(lambda kv: kv.set_optimizer(optimizer.create("test")))
        workers.run(lambda kv: kv.init(["a", "b"], [np.zeros(LARGE), np.zeros(2)]))
        yield workers


def test_futures_of_pushes_and_pulls_carry_what_the_calls_return(workers: Workers) -> None:
    def script(kv: KVStore) -> Any:
        gradients = [np.ones(LARGE), np.ones(2)]
        pushed = kv.push_async(["a", "b"], gradients)
        outs = [np.empty(LARGE), np.empty(2)]
        assert isinstance(pushed, Future)
        assert kv.wait([pushed, kv.pull_async(["a", "b"], outs)]) == [None, None]
        for gradient in gradients:
            gradient[:] = 1e9  # the caller's again
        kv.barrier()
        return outs, kv.wait(kv.pull_async("a")), kv.wait(kv.pull_async(["a", "b"]))

    for (a, b), alone, both in workers.run(script):
        # The parts of an asynchronous key are read one by one.
        assert set(a) <= {1.0, 2.0}
        for value in (alone, both[0]):
            np.testing.assert_array_equal(value, np.full(LARGE, workers.stores[0].num_workers))
        assert b.shape == both[1].shape == (2,)


def test_pushpull_async_writes_into_its_arrays(workers: Workers) -> None:
    def script(kv: KVStore) -> Any:
        out = np.empty(LARGE)
        kv.wait(kv.pushpull_async("a", np.ones(LARGE), out))
        value = np.ones(2)
        kv.wait(kv.pushpull_async("b", value))
        return out[0], value[0]

    seen = workers.run(script)
    most = float(workers.stores[0].num_workers)
    # Of two asynchronous workers, another one may be the last for each key.
    assert [max(values) for values in zip(*seen, strict=True)] == [most, most]


def test_wait_covers_all_that_is_under_way(workers: Workers) -> None:
    def script(kv: KVStore) -> None:
        out = np.empty(LARGE)
        kv.push("a", np.ones(LARGE))
        future = kv.pull_async("a", out)
        kv.wait()
        assert future.done()
        assert kv.wait("a") is None
        assert kv.wait(["a", "b"]) is None
        with pytest.raises(UnknownKeyError):
            kv.wait("c")

    workers.run(script)


def test_a_pull_tells_how_many_pushes_it_includes(workers: Workers) -> None:
    def script(kv: KVStore) -> Any:
        value, version = kv.pull("a", with_version=True)
        assert (version, value[0]) == (0, 0.0)
        kv.barrier()  # the other worker's pushes may come before this pull else
        for _ in range(3):
            kv.push(["a", "b"], [np.ones(LARGE), np.ones(2)])
        kv.wait()
        kv.barrier()
        out = np.empty(LARGE)
        none, version = kv.pull("a", out=out, with_version=True)
        assert none is None
        (_, small), versions = kv.pull(["a", "b"], with_version=True)
        return version, versions, out[0], small[0]

    per_version = 1 if "async" in workers.kind else workers.stores[0].num_workers
    pushes = 3 * workers.stores[0].num_workers
    for version, versions, a, b in workers.run(script):
        assert [version, *versions] == [pushes // per_version] * 3
        assert (a, b) == (pushes, pushes)
        assert set(version.parts) == {version}
        assert len(version.parts) == (10 if "dist" in workers.kind else 1)


def test_numbers_of_the_optimizer_change_and_its_state_stays(workers: Workers) -> None:
    momentum = optimizer.create("sgd", learning_rate=1.0, momentum=0.5)
    reference = kvstore.create("local")

    def rounds(kv: KVStore, gradient: Any) -> Any:
        for _ in range(2):
            kv.push("b", gradient)
            kv.wait()
            kv.barrier()
        return kv.pull("b")

    def script(kv: KVStore) -> list[Any]:
        kv.set_optimizer(momentum)
        values = [rounds(kv, np.ones(2))]
        kv.set_optimizer_params(lr=0.25)
        assert kv.optimizer_params()["learning_rate"] == 0.25
        assert kv.current_optimizer() == momentum.replace(learning_rate=0.25)
        kv.barrier()
        values.append(rounds(kv, np.ones(2)))
        return values

    results = workers.run(script)
    if "async" in workers.kind:  # another order of updates, so other values
        assert all(values[1][0] < values[0][0] for values in results)
        return
    reference.init("b", np.zeros(2))
    num_workers = workers.stores[0].num_workers
    reference.set_optimizer(momentum)
    expected = [rounds(reference, [np.ones(2)] * num_workers)]
    reference.set_optimizer(momentum.replace(learning_rate=0.25))
    expected.append(rounds(reference, [np.ones(2)] * num_workers))
    for values in results:
        np.testing.assert_array_equal(values, expected)


def test_numbers_that_make_no_sense_are_an_error_and_change_nothing(workers: Workers) -> None:
    def script(kv: KVStore) -> None:
        before = kv.optimizer_params()
        with pytest.raises(OptimizerParameterError, match="speed"):
            kv.set_optimizer_params(speed=3)
        assert kv.optimizer_params() == before

    workers.run(script)


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_optimizer_there_are_no_numbers(kind: str) -> None:
    with Workers(kind, 1, 1) as workers:
        (kv,) = workers.stores
        for call in (kv.optimizer_params, lambda: kv.set_optimizer_params(lr=1.0)):
            with pytest.raises(OptimizerNotSet):
                call()


def test_info_placement_and_stats_agree_about_the_keys(workers: Workers) -> None:
    def script(kv: KVStore) -> None:
        assert kv.keys() == ["a", "b"]
        info = kv.info("a")
        assert info[:3] == ((LARGE,), np.float64, LARGE * 8)
        placed = kv.placement()
        stats = kv.stats()
        assert stats["store"]["keys"] == 2
        if not placed:
            assert stats["servers"] == {}
            return
        assert sum(keys.get("a", 0) for keys in placed.values()) == LARGE * 8
        assert {rank: sum(keys.values()) for rank, keys in placed.items()} == {
            rank: server["value_bytes"] for rank, server in stats["servers"].items()
        }

    workers.run(script)


def test_stats_count_calls_and_bytes(workers: Workers) -> None:
    def script(kv: KVStore) -> Any:
        before = kv.stats()["store"]
        kv.push("b", np.ones(2))
        kv.pull("b")
        after = kv.stats()["store"]
        return [after[name] - before[name] for name in ("pushes", "pulls")] + [
            after[name] - before[name] for name in ("bytes_pushed", "bytes_pulled")
        ]

    for counted in workers.run(script):
        assert counted == [1, 1, 16, 16]


def test_nobody_is_dead_in_a_healthy_job(workers: Workers) -> None:
    assert [kv.num_dead_node() for kv in workers.stores] == [0] * len(workers.stores)
    assert workers.stores[0].get_num_dead_node(2, timeout=1) == 0


def test_a_lost_worker_is_counted_by_its_group() -> None:
    with Workers("dist_async", 2, 1, lost_after_s=0.2) as workers:
        assert workers.cluster is not None
        first, _ = workers.stores
        workers.cluster.kill(workers.cluster.workers[1])
        while first.num_dead_node(4) == 0:
            pass
        assert (first.num_dead_node(4), first.num_dead_node(2), first.num_dead_node(7)) == (1, 0, 1)


def test_commands_reach_every_server_and_their_answers_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "_commands", {})

    @kvstore.register_command(4711)
    def shout(body: str) -> str:
        if not body:
            raise ValueError("nothing to shout")
        return body.upper()

    with Workers("dist_sync", 1, 3) as workers:
        (kv,) = workers.stores
        assert kv.send_command_to_servers(4711, "hello") == ["HELLO"] * 3
        assert kv._send_command_to_servers(4711, "again") == ["AGAIN"] * 3
        with pytest.raises(Exception, match="nothing to shout"):
            kv.send_command_to_servers(4711, "")
        with pytest.raises(UsageError, match="no command 4712"):
            kv.send_command_to_servers(4712, "x")
        assert kv.send_command_to_servers(4711, "hello") == ["HELLO"] * 3
    assert kvstore.create("local").send_command_to_servers(1, "x") == []


def test_an_updater_of_ones_own_is_for_one_process(workers: Workers) -> None:
    def script(kv: KVStore) -> None:
        seen = []

        def updater(key: Any, recv: Any, local: Any) -> None:
            seen.append(key)
            local += 2 * recv

        if kv.type.startswith("dist"):
            with pytest.raises(NotSupportedError, match="server-import"):
                kv.set_updater(updater)
            return
        kv._set_updater(updater)
        kv.push(["a", "b"], [[np.ones(LARGE), np.ones(LARGE)], [np.ones(2)] * 3])
        assert seen == ["a", "b"]
        assert kv.pull("a")[0] == 4.0
        assert kv.pull("b")[0] == 6.0

    workers.run(script)


@pytest.mark.parametrize("kind", ["local", "device"])
def test_an_updater_that_raises_changes_nothing_and_the_push_says_so(kind: str) -> None:
    kv = kvstore.create(kind)
    kv.init("w", np.ones(3))

    def broken(key: Any, recv: Any, local: Any) -> None:
        local[:] = 99
        raise ZeroDivisionError("my own bug")

    kv.set_updater(broken)
    with pytest.raises(ZeroDivisionError, match="my own bug"):
        kv.push("w", np.ones(3))
    np.testing.assert_array_equal(kv.pull("w"), np.ones(3))
    with pytest.raises(ArgumentTypeError):
        kv.set_updater("not a function")  # type: ignore[arg-type]
    kv.set_optimizer(optimizer.create("test"))
    kv.push("w", np.ones(3))
    np.testing.assert_array_equal(kv.pull("w"), np.full(3, 2.0))


def test_an_updater_may_use_the_store(workers: Workers) -> None:
    kv = kvstore.create("local")
    kv.init(["w", "other"], [np.ones(3), np.full(3, 5.0)])
    kv.set_updater(lambda key, recv, local: np.copyto(local, recv + kv.pull("other")))
    kv.push("w", np.ones(3))
    np.testing.assert_array_equal(kv.pull("w"), np.full(3, 6.0))


def test_what_a_store_is_capable_of(workers: Workers) -> None:
    kv = workers.stores[0]
    assert kv.is_capable("optimizer")
    assert kv.is_capable("Optimizer")
    with pytest.raises(ArgumentValueError, match="unknown capability"):
        kv.is_capable("flying")


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("num_samples", [1, 2, 7, 10])
def test_shards_cover_all_samples(num_samples: int, even: bool) -> None:
    with Workers("dist_sync", 3, 1) as workers:
        shards = workers.run(lambda kv: kv.shard(num_samples, seed=1, epoch=4, even=even))
        assert set(np.concatenate(shards)) == set(range(num_samples))
        if even:
            assert len({len(shard) for shard in shards}) == 1
        else:
            assert sum(len(shard) for shard in shards) == num_samples
            assert max(map(len, shards)) - min(map(len, shards)) <= 1
        other_epoch = workers.run(lambda kv: kv.shard(num_samples, seed=1, epoch=5, even=even))
        if num_samples == 10:
            assert any(not np.array_equal(a, b) for a, b in zip(shards, other_epoch, strict=True))


def test_an_asynchronous_worker_need_not_know_the_class_of_the_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Workers("dist_async", 2, 1) as workers:
        first, second = workers.stores
        first.set_optimizer(optimizer.create("test"))
        workers.run(lambda kv: kv.init("w", np.zeros(2)))

        def unknown(_: Any) -> Any:
            raise AssertionError("a worker that only pushes has no use for the optimizer")

        monkeypatch.setattr("kvstore.stores.dist.control_client.from_plain", unknown)
        second.push("w", np.ones(2))
        np.testing.assert_array_equal(second.pull("w"), np.ones(2))
