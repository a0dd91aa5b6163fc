"""What the original gets wrong and this store gets right, one test for each defect.

L numbers are those of a list of MXNet 1.9.1's limits; each docstring says what the original does
and in which of its files. KD is src/kvstore/kvstore_dist.h, KS kvstore_dist_server.h, KL
kvstore_local.h, CM comm.h, KC kvstore.cc, KP python/mxnet/kvstore/kvstore.py, SP kvstore_server.py.
Every test would fail on the original, most of them by waiting for ever.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S
from workers import Workers

import kvstore
from kvstore import KVStore, optimizer
from kvstore.errors import (
    ArgumentTypeError,
    DuplicateKeyError,
    OptimizerNotSet,
    UnknownKeyError,
    UnknownTypeError,
)
from kvstore.optimizer.serialize import from_plain
from pslite import WORKER_GROUP
from pslite.errors import DeadlineError, NodeLostError, ProtocolError, UsageError

PARTS: dict[str, Any] = {"chunk_bytes": 256, "credit_bytes": 512}
LARGE = 300
ONES = np.ones(LARGE)


def summed(kv: KVStore, key: Any, value: np.ndarray[Any, Any]) -> Any:
    """One round in which every worker pushes ``value``, and what it gave."""
    kv.push(key, value)
    return kv.pull(key)


# -- security, failures -------------------------------------------------------------------


def test_l1_an_optimizer_travels_as_names_and_numbers_only() -> None:
    """Servers unpickle what any peer sends as command 0, so it can run any code (SP:56)."""
    for body in (
        b"cos\nsystem\n(S'true'\ntR.",
        ["os.system", {"command": "true"}],
        ["sgd", {"a": {}}],
    ):
        with pytest.raises((ProtocolError, UsageError)):
            from_plain(body)


@pytest.mark.parametrize("head", range(6))
def test_l2_no_worker_can_stop_or_switch_the_servers(head: int) -> None:
    """Command 2 stops all servers, 3 their mode, 1 and 4 their arithmetic (KP:725-742, KS:200)."""
    with Workers("dist_sync", **PARTS) as workers:
        workers.run(lambda kv: kv.init("w", np.zeros(LARGE)))
        with pytest.raises(UsageError, match=f"this server has no command {head}"):
            workers.stores[0]._send_command_to_servers(head, "0")
        assert [value[0] for value in workers.run(lambda kv: summed(kv, "w", ONES))] == [2.0] * 2


def test_l4_a_worker_that_is_lost_is_named_to_those_who_wait_for_it() -> None:
    """Everybody waits for ever: nothing there has a time-out (KD:102-109, KS:354)."""
    with Workers("dist_sync", 2, 1, lost_after_s=0.2, **PARTS) as workers:
        workers.run(lambda kv: kv.init("w", np.zeros(LARGE)))
        assert workers.cluster is not None
        workers.cluster.kill(workers.cluster.workers[1])
        with pytest.raises(NodeLostError, match="worker 1"):
            summed(workers.stores[0], "w", ONES)


def test_l4_a_server_that_is_lost_is_named_to_those_who_wait_for_it() -> None:
    """A server's death is a hang of the job (L3, L4)."""
    with Workers("dist_sync", 1, 2, lost_after_s=0.2, **PARTS) as workers:
        (kv,) = workers.stores
        kv.init("w", np.zeros(LARGE))
        assert workers.cluster is not None
        workers.cluster.kill(workers.cluster.servers[1])
        with pytest.raises(NodeLostError, match="server 1"):
            kv.wait([kv.pull_async("w") for _ in range(3)])


def test_l4_one_batch_more_of_one_worker_is_an_error_once_the_other_has_left() -> None:
    """The others wait for ever; fit.py uses ResizeIter for this reason (KS:354)."""
    with Workers("dist_sync", 2, 1, **PARTS) as workers:
        workers.run(lambda kv: kv.init("w", np.zeros(LARGE)))
        assert workers.cluster is not None

        def script(kv: KVStore) -> None:
            summed(kv, "w", ONES)
            if kv.rank == 1:
                assert workers.cluster is not None
                workers.cluster.workers[1].close()
                return
            with pytest.raises(NodeLostError, match="worker 1"):
                summed(kv, "w", ONES)

        workers.run(script)


def test_l4_a_barrier_ends_and_names_who_is_missing() -> None:
    """Barriers count messages and have no time-out."""
    with Workers("dist_sync", 2, 1) as workers:
        assert workers.cluster is not None
        with pytest.raises(DeadlineError, match="worker 1"):
            workers.cluster.workers[0].barrier(WORKER_GROUP, 0.1).result(LIMIT_S)


def test_l6_a_healthy_job_has_no_dead_nodes_and_a_lost_one_is_counted() -> None:
    """Workers cannot see dead servers, and a healthy scheduler counts as dead (KD:119-129)."""
    with Workers("dist_sync", 1, 2, lost_after_s=0.2) as workers:
        (kv,) = workers.stores
        assert [kv.num_dead_node(group, timeout=0) for group in range(1, 8)] == [0] * 7
        assert workers.cluster is not None
        workers.cluster.kill(workers.cluster.servers[0])
        while kv.num_dead_node(2) == 0:
            time.sleep(0.01)
        assert [kv.num_dead_node(group) for group in range(1, 8)] == [0, 1, 1, 0, 0, 1, 1]


# -- correctness --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist_async"])
def test_l9_a_pull_leaves_the_array_that_was_pushed_as_it_is(kind: str) -> None:
    """The pull's buffer is the user's pushed array: g = 1 becomes -58 (KD:285-295, 359-364)."""
    with Workers(kind, **PARTS) as workers:

        def script(kv: KVStore) -> None:
            kv.set_optimizer(optimizer.create("test", rescale_grad=-58.0))
            kv.init("w", np.zeros(LARGE))
            gradient = ONES.copy()
            kv.push("w", gradient)
            kv.pull("w")
            kv.pull("w", out=np.empty(LARGE))
            np.testing.assert_array_equal(gradient, ONES)

        workers.run(script)


@pytest.mark.parametrize("kind", ["local", "device", "dist_sync"])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_l10_the_store_does_not_refer_to_the_arrays_that_were_pushed(
    kind: str, num_devices: int
) -> None:
    """Without an updater the store keeps the pushed array itself (CM:129-132, KL:270-274)."""
    with Workers(kind, 1, 1, **PARTS) as workers:
        (kv,) = workers.stores
        first = ONES.copy()
        kv.init("w", first)
        first[:] = 99
        assert kv.pull("w")[0] == 1.0
        values = [ONES.copy() for _ in range(num_devices)]
        kv.push("w", values)
        for value in values:
            value[:] = 99
        np.testing.assert_array_equal(kv.pull("w"), np.full(LARGE, num_devices))
        kv.pull("w")[:] = 77
        np.testing.assert_array_equal(kv.pull("w"), np.full(LARGE, num_devices))


def test_l11_two_pushes_of_one_worker_do_not_make_a_round_of_two_workers() -> None:
    """Requests are counted, not workers: 1 + 5 of one worker is a round (KS:354)."""
    with Workers("dist_sync", **PARTS) as workers:
        workers.run(lambda kv: kv.init("w", np.zeros(LARGE)))
        first, second = workers.stores
        pushed = [first.push_async("w", ONES), first.push_async("w", 5 * ONES)]
        assert second.pull("w")[0] == 0.0
        assert not any(future.done() for future in pushed)
        second.push("w", 10 * ONES)
        assert second.pull("w")[0] == 11.0
        second.push("w", 100 * ONES)
        assert second.pull("w")[0] == 105.0
        first.wait(pushed)


@pytest.mark.parametrize("order", list(itertools.permutations(["push", "pushpull", "push_async"])))
def test_l12_workers_may_use_different_calls_in_one_round(order: tuple[str, ...]) -> None:
    """If one request of a round wants the value, those that do not are never answered (KS:377)."""
    with Workers("dist_sync", 3, 1, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.init("w", np.zeros(LARGE))
            out = np.empty(LARGE)
            how = order[kv.rank]
            if how == "pushpull":
                kv.pushpull("w", ONES, out=out)
                return out[0]
            getattr(kv, how)("w", ONES)
            kv.wait("w")
            return kv.pull("w")[0]

        assert workers.run(script) == [3.0] * 3


def test_l13_a_second_init_of_an_int_key_is_an_error_and_a_push_is_never_one() -> None:
    """The second init hangs; the first push of any worker is the init (KD:620-625, KS:758)."""
    with Workers("dist_sync", **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            with pytest.raises(UnknownKeyError):
                kv.push(7, 5 * ONES)
            kv.init(7, ONES)
            for keys in (7, [8, 9, 8]):
                with pytest.raises(DuplicateKeyError):
                    kv.init(keys, [ONES] * 3 if keys != 7 else ONES)
            return kv.pull(7)[0], kv.keys()

        assert workers.run(script) == [(1.0, [7])] * 2


def test_l14_names_mean_the_same_on_all_workers_whatever_the_order_of_init() -> None:
    """Ids are given in the order of init on each worker, and nobody compares (KL:95-109)."""
    with Workers("dist_sync", **PARTS) as workers:
        threads = {kv.rank: threading.Event() for kv in workers.stores}

        def script(kv: KVStore) -> Any:
            names = ["a", "b"] if kv.rank == 0 else ["b", "a"]
            values = {"a": np.full(LARGE, 1.0), "b": np.full(LARGE, 2.0)}
            futures = [kv.init_async(name, values[name]) for name in names]  # type: ignore[attr-defined]
            for future in futures:
                future.result(LIMIT_S)
            threads[kv.rank].set()
            return kv.pull("a")[0], kv.pull("b")[0]

        assert workers.run(script) == [(1.0, 2.0)] * 2


def test_l14_two_stores_of_a_process_do_not_share_their_keys() -> None:
    """All stores of a process share the servers' keys, and both number from 0 (KD:190-199)."""
    with Workers("dist_sync", **PARTS) as workers:
        others = workers.create()
        workers.run(lambda kv: kv.init("weight", np.full(LARGE, 1.0)))
        workers.run(lambda kv: kv.init("bias", np.full(LARGE, 2.0)), others)
        assert workers.run(lambda kv: kv.pull("weight")[0]) == [1.0, 1.0]
        assert workers.run(lambda kv: kv.pull("bias")[0], others) == [2.0, 2.0]


@pytest.mark.parametrize("key", [215_330, 300_001, 2**31 - 1, 2**31, 2**63 - 1, -1, -(2**63)])
def test_l15_any_64_bit_key_works(key: int) -> None:
    """key * 9973 overflows 32 bits: a crash at key 300001 with two servers (KD:652)."""
    with Workers("dist_sync", 2, 2, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.init([key, 1], [np.zeros(LARGE), np.zeros(2)])
            return summed(kv, [key, 1], [ONES, np.ones(2)])  # type: ignore[arg-type]

        for large, small in workers.run(script):
            np.testing.assert_array_equal(large, np.full(LARGE, 2.0))
            np.testing.assert_array_equal(small, np.full(2, 2.0))


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_l16_float64_stays_float64(kind: str) -> None:
    """multi_precision makes it float32 on servers: 1 + 2**-40 becomes 1 (KS:345-347)."""
    fine = 1.0 + 2.0**-40
    with Workers(kind, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.set_optimizer(optimizer.create("test", rescale_grad=2.0**-41))
            kv.init("w", np.full(LARGE, fine))
            value = summed(kv, "w", ONES)
            return value.dtype, value[0]

        num_workers = workers.stores[0].num_workers
        assert workers.run(script) == [(np.float64, fine + num_workers * 2.0**-41)] * num_workers


@pytest.mark.parametrize("by", ["every worker", "rank 0"])
def test_l20_a_new_learning_rate_reaches_the_servers_and_keeps_the_momentum(by: str) -> None:
    """It does not reach them, and set_optimizer again resets the state, once a worker (KP:593)."""
    momentum = optimizer.create("sgd", learning_rate=1.0, momentum=0.5)
    gradient = np.ones(LARGE)

    def script(kv: KVStore) -> list[float]:
        kv.set_optimizer(momentum)
        kv.init("w", np.zeros(LARGE))
        seen = [float(summed(kv, "w", gradient)[0]) for _ in range(2)]
        kv.barrier()
        if by == "every worker" or kv.rank == 0:
            kv.set_optimizer(momentum.replace(learning_rate=0.25))
        kv.barrier()
        return [*seen, *(float(summed(kv, "w", gradient)[0]) for _ in range(2))]

    with Workers("dist_sync", 2, 2, **PARTS) as workers:
        # Velocities, with a gradient of 2: -2, -3, then -1.5 - 0.5, then -1 - 0.5.
        assert workers.run(script) == [[-2.0, -5.0, -7.0, -8.5]] * 2


def test_l20_every_worker_may_set_the_same_optimizer_at_any_time() -> None:
    """Each call makes a new updater on all servers, so a late one resets the state (SP:54-59)."""
    momentum = optimizer.create("sgd", learning_rate=1.0, momentum=0.5)

    def script(kv: KVStore) -> list[float]:
        kv.init("w", np.zeros(LARGE))
        seen = []
        for _ in range(4):
            kv.set_optimizer(momentum)
            seen.append(float(summed(kv, "w", ONES)[0]))
        return seen

    with Workers("dist_sync", 2, 2, **PARTS) as workers:
        assert workers.run(script) == [[-2.0, -5.0, -8.5, -12.25]] * 2


def test_l21_the_layout_is_decided_once_and_not_by_each_workers_settings() -> None:
    """BIGARRAY_BOUND must be equal on all workers, and nothing checks it (KD:650, 717)."""
    with Workers("dist_sync", 2, 2, **PARTS) as workers:
        assert workers.cluster is not None
        # Worker 1 has other ideas of how keys are cut.
        node = workers.cluster.workers[1]
        object.__setattr__(node.config, "chunk_bytes", 512)

        def script(kv: KVStore) -> Any:
            kv.init("w", np.zeros(LARGE))
            return summed(kv, "w", ONES), kv.placement()

        (first, placed), (second, placed_too) = workers.run(script)
        np.testing.assert_array_equal(first, 2 * ONES)
        np.testing.assert_array_equal(second, 2 * ONES)
        assert placed == placed_too


@pytest.mark.parametrize(
    "dtype", ["int8", "int32", "uint16", "int64", "bool", "complex64", "bfloat16"]
)
def test_l24_every_dtype_is_added_up(dtype: str) -> None:
    """Servers abort for all but float16, float32 and float64 (KS:754)."""
    if dtype == "bfloat16":
        kind = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    else:
        kind = np.dtype(dtype)
    with Workers("dist_sync", 2, 2, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.init("w", np.zeros(LARGE, kind))
            return summed(kv, "w", np.full(LARGE, kv.rank + 1).astype(kind))

        for value in workers.run(script):
            assert value.dtype == kind
            np.testing.assert_array_equal(value, np.full(LARGE, 3).astype(kind))


def test_l26_an_unknown_type_of_store_is_no_local_one() -> None:
    """create('FooBar') gives a local store of the type 'foobar' (KC:66-77)."""
    with pytest.raises(UnknownTypeError, match="'FooBar'"):
        kvstore.create("FooBar")


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_l26_no_pull_is_skipped_in_silence(kind: str) -> None:
    """With ignore_sparse a pull may leave its arrays untouched (KL:384-404)."""
    with Workers(kind, 1, 1) as workers:
        (kv,) = workers.stores
        kv.init("w", ONES)
        for ignore_sparse in (True, False):
            out = np.zeros(LARGE)
            kv.pull("w", out=out, ignore_sparse=ignore_sparse)
            np.testing.assert_array_equal(out, ONES)


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_l27_a_store_adds_up_and_never_averages(kind: str) -> None:
    """Whose business the number of workers is differs between Trainer, Module and FeedForward.

    The rule here is one: stores add up; rescale_grad is the optimizer's (TR:359, M19:900).
    """
    with Workers(kind, **PARTS) as workers:
        num_workers = workers.stores[0].num_workers

        def script(kv: KVStore) -> Any:
            kv.set_optimizer(optimizer.create("test", rescale_grad=1.0 / num_workers))
            kv.init("w", np.zeros(LARGE))
            kv.push("w", [ONES, ONES])
            kv.wait()
            kv.barrier()
            return kv.pull("w")[0]

        assert workers.run(script) == [2.0] * num_workers


def test_l28_sums_do_not_depend_on_the_order_of_arrival() -> None:
    """Servers add in the order of arrival, so float sums differ from run to run (KS:796-801)."""
    numbers = [np.float32(1e8), np.float32(1.0), np.float32(-1e8)]  # each order another sum
    expected = np.full(LARGE, (numbers[0] + numbers[1]) + numbers[2])

    for order in itertools.permutations(range(3)):
        with Workers("dist_sync", 3, 2, **PARTS) as workers:
            workers.run(lambda kv: kv.init("w", np.zeros(LARGE, np.float32)))
            for rank in order:
                # Pushed one after the other; each waits until the servers have it.
                kv = workers.stores[rank]
                kv.push("w", np.full(LARGE, numbers[rank]))
                while kv.stats()["servers"][0]["waiting_contributions"] == 0 and rank != order[-1]:
                    pass
            for kv in workers.stores:
                np.testing.assert_array_equal(kv.pull("w"), expected)
    assert (numbers[0] + numbers[2]) + numbers[1] != expected[0]


def test_l29_ranks_are_those_that_the_launcher_gave() -> None:
    """They follow host names and random ports, so data shards move between runs (PS van.cc:57)."""
    with Workers("dist_sync", 4, 1) as workers:
        assert [kv.rank for kv in workers.stores] == [0, 1, 2, 3]
        shards = [kv.shard(10, seed=3, even=False).tolist() for kv in workers.stores]
    with Workers("dist_sync", 4, 2) as workers:
        assert [kv.shard(10, seed=3, even=False).tolist() for kv in workers.stores] == shards


def test_l30_small_keys_travel_together() -> None:
    """There is one message for each key and server (KD:457, 601, KS:740)."""
    keys = [f"k{n}" for n in range(200)]
    with Workers("dist_sync", 1, 2) as workers:
        (kv,) = workers.stores
        kv.init(keys, [np.zeros(10) for _ in keys])
        assert workers.cluster is not None
        sent: list[int] = []
        node = workers.cluster.workers[0]
        submit = node.traffic.submit
        node.traffic.submit = lambda transfers: (sent.append(len(transfers)), submit(transfers))[1]  # type: ignore[method-assign, func-returns-value]
        kv.pushpull(keys, [np.ones(10) for _ in keys])
        assert sum(sent) == 2


def test_l32_keys_are_spread_by_their_bytes() -> None:
    """The server is (key * 9973) mod S, whatever the size (KD:650-674)."""
    sizes = [3, 900, 17, 450, 1, 2000, 60, 60, 60, 700]
    with Workers("dist_sync", 1, 3, chunk_bytes=1024, credit_bytes=2048) as workers:
        (kv,) = workers.stores
        kv.init(list(range(0, 30, 3)), [np.zeros(size) for size in sizes])
        loads = [sum(keys.values()) for keys in kv.placement().values()]
        assert max(loads) - min(loads) <= 2 * 1024
        assert sum(loads) == 8 * sum(sizes)


def test_l34_a_list_of_keys_and_keys_one_by_one_are_both_initialised() -> None:
    """Each call of init is a barrier of all workers there, so workers must agree (KD:209-211)."""
    with Workers("dist_sync", **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            if kv.rank == 0:
                kv.init(["a", "b"], [ONES, 2 * ONES])
            else:
                kv.init("b", ONES)
                kv.init("a", ONES)
            return kv.pull("a")[0], kv.pull("b")[0]

        assert workers.run(script) == [(1.0, 2.0)] * 2


# -- what is missing there ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_missing_keys_can_be_listed_looked_at_and_deleted(kind: str) -> None:
    """Nothing lists, describes or deletes keys."""
    with Workers(kind, **PARTS) as workers:

        def script(kv: KVStore) -> None:
            kv.init(["a", "b"], [ONES, np.zeros((2, 3), np.float16)])
            assert kv.keys() == ["a", "b"]
            assert "a" in kv
            assert kv.info("b")[:3] == ((2, 3), np.float16, 12)
            kv.delete("a")
            assert kv.keys() == ["b"]
            kv.init("a", np.zeros(3, np.int8))
            assert kv.info("a")[:3] == ((3,), np.int8, 3)
            assert kv.info("a").generation == 2

        workers.run(script)


def test_missing_a_pull_tells_how_many_rounds_it_includes() -> None:
    """There are no versions."""
    with Workers("dist_sync", **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.init("w", np.zeros(LARGE))
            seen = []
            for _ in range(3):
                kv.push("w", ONES)
                _, version = kv.pull("w", with_version=True)
                seen.append((int(version), set(version.parts)))
                kv.barrier()
            return seen

        assert workers.run(script) == [[(n, {n}) for n in (1, 2, 3)]] * 2


def test_missing_the_state_on_servers_can_be_read_and_written(tmp_path: Any) -> None:
    """'Cannot save states for distributed training' (KP:659, 671, L3)."""
    file = tmp_path / "states"
    momentum = optimizer.create("sgd", learning_rate=1.0, momentum=0.5)
    with Workers("dist_sync", 2, 2, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.set_optimizer(momentum)
            kv.init("w", np.zeros(LARGE))
            summed(kv, "w", ONES)
            kv.barrier()
            kv.save_optimizer_states(file)
            kv.barrier()
            return float(summed(kv, "w", ONES)[0])

        assert workers.run(script) == [-5.0, -5.0]
    local = kvstore.create("local")
    local.set_optimizer(momentum)
    local.init("w", np.full(LARGE, -2.0))
    local.load_optimizer_states(file)
    local.push("w", [ONES, ONES])
    assert local.pull("w")[0] == -5.0


def test_missing_the_servers_optimizer_can_be_read_and_its_numbers_changed() -> None:
    """Nobody can read or change a number of an optimizer on a server."""
    with Workers("dist_sync", **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            with pytest.raises(OptimizerNotSet):
                kv.optimizer_params()
            kv.barrier()
            kv.set_optimizer(optimizer.create("adam", learning_rate=0.5))
            kv.set_optimizer_params(lr=0.25, wd=0.5)
            params = kv.optimizer_params()
            return params["learning_rate"], params["wd"]

        assert workers.run(script) == [(0.25, 0.5)] * 2


def test_missing_wait_for_keys() -> None:
    """The C++ header documents Wait(keys), which does not exist (KH:136-139)."""
    with Workers("dist_sync", **PARTS) as workers:
        workers.run(lambda kv: kv.init(["a", "b"], [ONES, ONES]))
        first, second = workers.stores
        both = [first.push_async(key, ONES) for key in ("a", "b")]
        second.push("a", ONES)
        first.wait("a")
        assert [future.done() for future in both] == [True, False]
        second.push("b", ONES)
        first.wait()
        assert both[1].done()


def test_missing_an_error_on_a_server_reaches_the_worker_whose_push_it_was() -> None:
    """Errors of updates are lost; the push reports success (L8, KP:34-41)."""
    with Workers("dist_sync", **PARTS) as workers:
        workers.run(lambda kv: kv.set_optimizer(optimizer.create("sgd")))
        workers.run(lambda kv: kv.init(["i", "f"], [np.ones(3, np.int32), np.zeros(3)]))

        def script(kv: KVStore) -> Any:
            future = kv.push_async("i", np.ones(3, np.int32))
            with pytest.raises(ArgumentTypeError, match="got int32"):
                kv.wait(future)
            kv.push("f", np.ones(3))
            return kv.pull("f")[0]

        assert workers.run(script) == [-0.02] * 2
