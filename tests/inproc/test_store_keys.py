"""Keys that come and go: ``delete`` and ``init`` again, several stores, closing and creating."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from workers import Workers

from kvstore import KVStore, optimizer
from kvstore.errors import DuplicateKeyError, KeyTypeError, UnknownKeyError, ValueMismatchError
from pslite.errors import ClosedError, UsageError

KINDS = ["local", "dist_sync", "dist_async"]
LARGE = 300  # elements of float64: several parts of 256 bytes


@pytest.fixture(params=KINDS)
def workers(request: pytest.FixtureRequest) -> Any:
    with Workers(request.param, chunk_bytes=256, credit_bytes=512) as workers:
        workers.run(lambda kv: kv.set_optimizer(optimizer.create("test")))
        yield workers


def pushed_value(kv: KVStore, key: Any, value: float, like: np.ndarray[Any, Any]) -> Any:
    """The stored value after one push of every worker (they all push the same)."""
    kv.push(key, np.full_like(like, value))
    kv.wait(key)
    kv.barrier()
    return kv.pull(key)


def test_a_deleted_key_is_unknown_and_its_neighbours_stay(workers: Workers) -> None:
    def script(kv: KVStore) -> None:
        kv.init(["a", "b"], [np.ones(LARGE), np.full(LARGE, 2.0)])
        kv.delete("a")
        assert kv.keys() == ["b"]
        assert "a" not in kv
        with pytest.raises(UnknownKeyError):
            kv.pull("a")
        with pytest.raises(UnknownKeyError):
            kv.push("a", np.ones(LARGE))
        np.testing.assert_array_equal(kv.pull("b"), np.full(LARGE, 2.0))

    workers.run(script)


def test_a_key_can_be_made_anew_with_another_shape_and_dtype(workers: Workers) -> None:
    def script(kv: KVStore) -> Any:
        kv.init("w", np.ones(LARGE))
        pushed_value(kv, "w", 1.0, np.ones(LARGE))
        kv.delete("w")
        kv.init("w", np.zeros((2, 3), np.float32))
        info = kv.info("w")
        assert (info.shape, info.dtype, info.generation) == ((2, 3), np.float32, 2)
        return pushed_value(kv, "w", 1.0, np.zeros((2, 3), np.float32))

    for value in workers.run(script):
        np.testing.assert_array_equal(value, np.full((2, 3), kv_sum(workers), np.float32))


def kv_sum(workers: Workers) -> float:
    """What each worker's push of 1 adds up to with the ``test`` optimizer."""
    return float(workers.stores[0].num_workers)


def test_the_state_of_a_deleted_key_is_gone(workers: Workers) -> None:
    momentum = optimizer.create("sgd", learning_rate=1.0, momentum=0.5)

    def script(kv: KVStore) -> list[Any]:
        kv.set_optimizer(momentum)
        values = []
        for _ in range(2):
            kv.init("w", np.zeros(LARGE))
            values.append(pushed_value(kv, "w", 1.0, np.zeros(LARGE)))
            kv.barrier()
            kv.delete("w")
        return values

    for first, second in workers.run(script):
        np.testing.assert_array_equal(first, second)


def test_the_directory_frees_what_is_deleted_so_that_new_keys_are_spread_evenly() -> None:
    with Workers("dist_sync", 1, 2, chunk_bytes=256) as workers:

        def script(kv: KVStore) -> None:
            for _ in range(5):
                kv.init("w", np.zeros(320))
                placed = [sum(keys.values()) for keys in kv.placement().values()]
                assert placed == [1280, 1280]
                kv.delete("w")
            assert kv.stats()["servers"][0]["parts"] == 0
            for _ in range(3):  # a part that fits either server goes to the emptier one
                kv.init(["first", "second"], [np.zeros(32), np.zeros(16)])
                assert list(kv.placement()[0]) == ["first"]
                kv.delete(["first", "second"])

        workers.run(script)


def test_workers_that_delete_different_keys_are_told_both_names() -> None:
    with Workers("dist_sync") as workers:

        def script(kv: KVStore) -> str:
            kv.init(["a", "b"], [np.ones(3), np.ones(3)])
            with pytest.raises(UsageError, match="same order") as caught:
                kv.delete("ab"[kv.rank])
            assert kv.keys() == ["a", "b"]
            return str(caught.value)

        for sentence in workers.run(script):
            assert "delete(['a'])" in sentence
            assert "delete(['b'])" in sentence


def test_what_was_pushed_before_is_applied_before_the_key_is_deleted() -> None:
    with Workers("dist_sync") as workers:

        def script(kv: KVStore) -> None:
            kv.init("w", np.zeros(LARGE))
            for _ in range(5):
                kv.push("w", np.ones(LARGE))
            kv.delete("w")
            kv.wait()

        workers.run(script)


def test_several_stores_of_one_process_have_keys_of_their_own(workers: Workers) -> None:
    others = workers.create()

    def script(kv: KVStore) -> None:
        kv.init("w", np.full(3, 1.0))

    def script_of_other(kv: KVStore) -> Any:
        kv.init("w", np.full((2, 2), 7.0))
        return kv.pull("w")

    workers.run(script)
    for value in workers.run(script_of_other, others):
        np.testing.assert_array_equal(value, np.full((2, 2), 7.0))
    for kv in workers.stores:
        np.testing.assert_array_equal(kv.pull("w"), np.full(3, 1.0))


def test_a_notebook_creates_closes_and_creates_again(workers: Workers) -> None:
    for number in range(3):
        stores = workers.create()

        def script(kv: KVStore, number: int = number) -> Any:
            kv.set_optimizer(optimizer.create("test"))
            kv.init("w", np.full(LARGE, float(number)))
            value = pushed_value(kv, "w", 1.0, np.zeros(LARGE))
            kv.barrier()
            kv.close()
            with pytest.raises(ClosedError):
                kv.pull("w")
            return value

        for value in workers.run(script, stores):
            np.testing.assert_array_equal(value, np.full(LARGE, number + kv_sum(workers)))


def test_servers_free_the_memory_of_a_store_that_all_workers_have_closed() -> None:
    with Workers("dist_sync", 2, 1) as workers:
        stores = workers.create()
        workers.run(lambda kv: kv.init("w", np.zeros(1000)), stores)
        assert workers.stores[0].stats()["servers"][0]["value_bytes"] == 8000
        for kv in stores:
            kv.close()
        for _ in range(200):  # nobody waits for it, so look until it has happened
            if workers.stores[0].stats()["servers"][0]["value_bytes"] == 0:
                break
        assert workers.stores[0].stats()["servers"][0]["value_bytes"] == 0


def test_misuse_of_keys_is_an_error_at_the_caller(workers: Workers) -> None:
    def script(kv: KVStore) -> None:
        kv.init("w", np.zeros(3))
        with pytest.raises(DuplicateKeyError):
            kv.init("w", np.zeros(3))
        with pytest.raises(UnknownKeyError):
            kv.delete("x")
        with pytest.raises(UnknownKeyError):
            kv.info("x")
        with pytest.raises(KeyTypeError):
            kv.init(3, np.zeros(3))
        with pytest.raises(ValueMismatchError):
            kv.push("w", np.zeros(4))

    workers.run(script)
