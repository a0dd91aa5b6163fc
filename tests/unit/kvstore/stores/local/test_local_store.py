"""The stores of one process: what each call does, and the original's defects that stay out.

Everything here holds for ``local`` and, with arrays on the host, for ``device`` as well.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvstore import KVStore, create, optimizer
from kvstore.errors import (
    ArgumentTypeError,
    DuplicateKeyError,
    KeyTypeError,
    UnknownKeyError,
    ValueMismatchError,
)
from pslite.errors import ClosedError

Array = np.ndarray[Any, Any]


@pytest.fixture(params=["local", "device"])
def store(request: pytest.FixtureRequest) -> KVStore:
    return create(request.param)


def full(value: float, dtype: str = "f4") -> Array:
    return np.full((2, 3), value, dtype)


def test_a_store_of_one_process_is_rank_0_of_1(store: KVStore) -> None:
    assert (store.rank, store.num_workers) == (0, 1)
    store.barrier()
    store._barrier()


def test_a_pull_before_any_push_gives_the_initial_value(store: KVStore) -> None:
    store.init("w", full(7))
    out = full(0)
    assert store.pull("w", out=out) is None
    np.testing.assert_array_equal(out, full(7))


def test_without_an_optimizer_a_push_replaces_the_value_by_the_sum_of_the_list(
    store: KVStore,
) -> None:
    store.init(3, full(7))
    for _ in range(2):
        store.push(3, [full(1), full(2), full(4)])
    np.testing.assert_array_equal(store.pull(3), full(7))


def test_a_list_of_keys_moves_in_one_call(store: KVStore) -> None:
    store.init(["a", "b"], [full(0), np.zeros(2)])
    store.push(["a", "b", "a"], [full(1), [np.ones(2), np.ones(2)], full(2)], priority=5)
    outs: list[Any] = [[full(0), full(0)], np.zeros(2, np.float32)]
    store.pull(["a", "b"], out=outs, priority=-1)
    np.testing.assert_array_equal(outs[0][0], full(3))
    np.testing.assert_array_equal(outs[0][1], full(3))
    np.testing.assert_array_equal(outs[1], [2, 2])
    again, first = store.pull(["b", "a"])
    np.testing.assert_array_equal(again, [2, 2])
    np.testing.assert_array_equal(first, full(3))


def test_values_are_added_left_to_right_to_the_last_bit(store: KVStore) -> None:
    random = np.random.default_rng(4)
    values = [
        (random.normal(size=999) * 10.0 ** random.uniform(-4, 5, 999)).astype(np.float32)
        for _ in range(6)
    ]
    store.init("w", np.zeros(999, np.float32))
    store.push("w", values)
    expected = values[0]
    for value in values[1:]:
        expected = expected + value
    assert store.pull("w").tobytes() == expected.tobytes()


def test_pushpull_is_an_all_reduce_that_never_accumulates(store: KVStore) -> None:
    store.init("w", full(9))
    out = full(0)
    for _ in range(3):
        store.pushpull("w", [full(1), full(2)], out=out)
    np.testing.assert_array_equal(out, full(3))


def test_pushpull_without_out_writes_into_the_pushed_arrays(store: KVStore) -> None:
    store.init("w", full(0))
    gradients = [full(1), full(2)]
    store.pushpull("w", gradients)
    np.testing.assert_array_equal(gradients, [full(3), full(3)])


def test_broadcast_initialises_once_and_fills_every_device(store: KVStore) -> None:
    outs = [full(0), full(0, "f2")]
    store.broadcast("w", full(5), out=outs)
    np.testing.assert_array_equal(outs[0], full(5))
    np.testing.assert_array_equal(outs[1], full(5))
    with pytest.raises(DuplicateKeyError):
        store.broadcast("w", full(5), out=outs)


def test_pulled_values_are_cast_into_other_floats_and_any_layout(store: KVStore) -> None:
    store.init("w", full(300.5, "f8"))
    strided = np.zeros((3, 2), np.float16).T
    single = full(0, "f4")
    store.pull("w", out=[strided, single])
    np.testing.assert_array_equal(strided, full(300.5))
    np.testing.assert_array_equal(single, full(300.5))


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f4", "f8", "g", "c8"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (2, 3, 4)])
def test_every_number_dtype_and_shape_keeps_its_kind(
    store: KVStore, dtype: str, shape: tuple[int, ...]
) -> None:
    store.init("w", np.zeros(shape, dtype))
    store.push("w", [np.ones(shape, dtype)] * 2)
    result = store.pull("w")
    assert (result.dtype, result.shape) == (np.dtype(dtype), shape)
    assert (result == (1 if dtype == "?" else 2)).all()


def test_float64_stays_float64(store: KVStore) -> None:
    store.init("w", np.zeros(1))
    store.set_optimizer(optimizer.create("sgd", learning_rate=-1.0))
    store.push("w", np.array([1 + 2.0**-40]))
    assert store.pull("w")[0] == 1 + 2.0**-40


def test_views_and_other_byte_orders_can_be_pushed(store: KVStore) -> None:
    store.init("w", np.zeros((3, 2), ">f4"))
    store.push("w", np.arange(6, dtype=np.float32).reshape(2, 3).T)
    np.testing.assert_array_equal(store.pull("w"), [[0, 3], [1, 4], [2, 5]])


class TestOptimizer:
    def test_each_push_is_one_update_by_the_summed_gradient(self, store: KVStore) -> None:
        store.set_optimizer(optimizer.create("sgd", learning_rate=0.5, momentum=0.5))
        store.init("w", full(10))
        store.push("w", [full(1), full(1)])  # momentum -1
        store.push("w", full(1))  # momentum -1
        np.testing.assert_array_equal(store.pull("w"), full(8))

    def test_update_counts_belong_to_the_key(self, store: KVStore) -> None:
        chosen = optimizer.create("adam", learning_rate=0.1)
        store.set_optimizer(chosen)
        store.init(["a", "b"], [full(1), full(1)])
        gradient = full(0.5)
        for _ in range(3):
            store.push("a", gradient)
        store.push("b", gradient)
        alone = create("local")
        alone.set_optimizer(chosen)
        alone.init("b", full(1))
        alone.push("b", gradient)
        np.testing.assert_array_equal(store.pull("b"), alone.pull("b"), strict=True)

    def test_equal_numbers_again_change_nothing(self, store: KVStore) -> None:
        plain = run_with_optimizers(store, ["adam"] * 4, [0.1] * 4)
        np.testing.assert_array_equal(plain, run_once(["adam"], [0.1], rounds=4), strict=True)

    def test_another_learning_rate_keeps_momentum(self, store: KVStore) -> None:
        store.init("w", full(0))
        store.set_optimizer(optimizer.create("sgd", learning_rate=1.0, momentum=0.5))
        store.push("w", full(-4))  # momentum 4
        store.set_optimizer(optimizer.create("sgd", learning_rate=2.0, momentum=0.5))
        store.push("w", full(0))  # momentum 2
        np.testing.assert_array_equal(store.pull("w"), full(6))

    def test_another_kind_starts_afresh(self, store: KVStore) -> None:
        store.init("w", full(0))
        store.set_optimizer(optimizer.create("sgd", learning_rate=1.0, momentum=0.5))
        store.push("w", full(1))
        before = store.pull("w")
        store.set_optimizer(optimizer.create("adam", learning_rate=0.1))
        store.push("w", full(1))
        fresh = create("local")
        fresh.init("w", before)
        fresh.set_optimizer(optimizer.create("adam", learning_rate=0.1))
        fresh.push("w", full(1))
        np.testing.assert_array_equal(store.pull("w"), fresh.pull("w"), strict=True)

    @pytest.mark.parametrize("wrong", ["sgd", None, optimizer.SGD, {"learning_rate": 1}])
    def test_anything_else_is_refused_with_a_hint(self, store: KVStore, wrong: Any) -> None:
        with pytest.raises(ArgumentTypeError, match=r"kvstore\.optimizer\.create"):
            store.set_optimizer(wrong)

    def test_integer_keys_cannot_be_updated_and_nothing_of_the_call_is(
        self, store: KVStore
    ) -> None:
        store.init(["w", "steps"], [full(1), np.zeros(2, np.int64)])
        store.set_optimizer(optimizer.create("sgd", learning_rate=1.0))
        with pytest.raises(ArgumentTypeError, match="int64"):
            store.push(["w", "steps"], [full(1), np.ones(2, np.int64)])
        np.testing.assert_array_equal(store.pull("w"), full(1))

    def test_pushes_before_the_optimizer_are_no_updates(self, store: KVStore) -> None:
        store.init("w", full(0))
        store.push("w", full(1))
        store.set_optimizer(optimizer.create("adam", learning_rate=0.1))
        store.push("w", full(1))
        fresh = create("local")
        fresh.set_optimizer(optimizer.create("adam", learning_rate=0.1))
        fresh.init("w", full(1))
        fresh.push("w", full(1))
        np.testing.assert_array_equal(store.pull("w"), fresh.pull("w"), strict=True)


def run_with_optimizers(store: KVStore, names: list[str], rates: list[float]) -> Array:
    """One push after each optimizer is set."""
    store.init("w", full(1))
    for number, (name, rate) in enumerate(zip(names, rates, strict=True)):
        store.set_optimizer(optimizer.create(name, learning_rate=rate))
        store.push("w", full(number + 1))
    result: Array = store.pull("w")
    return result


def run_once(names: list[str], rates: list[float], rounds: int) -> Array:
    store = create("local")
    store.init("w", full(1))
    store.set_optimizer(optimizer.create(names[0], learning_rate=rates[0]))
    for number in range(rounds):
        store.push("w", full(number + 1))
    result: Array = store.pull("w")
    return result


class TestDefectsOfTheOriginal:
    """Numbers are those of this list: behaviour seen in MXNet 1.9.1 that must not come back."""

    def test_l9_a_pull_leaves_the_last_pushed_array_alone(self, store: KVStore) -> None:
        store.set_optimizer(optimizer.create("sgd", learning_rate=1.0))
        store.init("w", full(-57))
        gradient, out = full(1), full(0)
        store.push("w", gradient)
        store.pull("w", out=out)
        np.testing.assert_array_equal(gradient, full(1))
        np.testing.assert_array_equal(out, full(-58))

    def test_l10_the_store_never_shares_memory_with_a_caller(self, store: KVStore) -> None:
        initial, pushed, out = full(1), full(2), full(0)
        store.init("w", initial)
        initial[:] = 99
        np.testing.assert_array_equal(store.pull("w"), full(1))
        store.push("w", pushed)
        pushed[:] = 99
        np.testing.assert_array_equal(store.pull("w"), full(2))
        store.pull("w", out=out)
        out[:] = 99
        store.pull("w")[:] = 99
        np.testing.assert_array_equal(store.pull("w"), full(2))

    def test_l11_two_pushes_in_a_row_are_two_rounds(self, store: KVStore) -> None:
        store.init("w", full(0))
        store.push("w", full(1))
        store.push("w", full(5))
        np.testing.assert_array_equal(store.pull("w"), full(5))

    def test_l13_a_second_init_is_refused_and_a_push_is_no_init(self, store: KVStore) -> None:
        store.init(78, full(1))
        with pytest.raises(DuplicateKeyError, match="78"):
            store.init([1, 78], [full(2), full(2)])
        with pytest.raises(DuplicateKeyError):
            store.init([2, 3, 2], [full(2)] * 3)
        for key in (1, 2, 3):
            with pytest.raises(UnknownKeyError):
                store.push(key, full(3))
        np.testing.assert_array_equal(store.pull(78), full(1))


class TestNothingOfAFailingCallTakesEffect:
    def test_in_a_push_of_many_keys(self, store: KVStore) -> None:
        store.init(["a", "b"], [full(1), full(1)])
        with pytest.raises(ValueMismatchError):
            store.push(["a", "b"], [full(2), np.zeros(3, np.float32)])
        with pytest.raises(UnknownKeyError):
            store.push(["a", "z"], [full(2), full(2)])
        with pytest.raises(ArgumentTypeError):
            store.push(["a", "b"], [full(2), 2.0])
        np.testing.assert_array_equal(store.pull(["a", "b"]), [full(1), full(1)])

    def test_in_a_pull_and_a_pushpull(self, store: KVStore) -> None:
        store.init(["a", "b"], [full(1), full(1)])
        out = full(0)
        with pytest.raises(ValueMismatchError):
            store.pull(["a", "b"], out=[out, np.zeros(3)])
        with pytest.raises(ValueMismatchError):
            store.pushpull("a", full(2), out=[out, np.zeros(3)])
        np.testing.assert_array_equal(out, full(0))
        np.testing.assert_array_equal(store.pull("a"), full(1))

    def test_in_an_init_and_a_broadcast(self, store: KVStore) -> None:
        with pytest.raises(ArgumentTypeError):
            store.init(["a", "b"], [full(1), [1.0]])
        with pytest.raises(ValueMismatchError):
            store.broadcast("a", full(1), out=np.zeros(3))
        with pytest.raises(UnknownKeyError):
            store.pull("a")
        store.init(1, full(1))  # still free to have int keys
        with pytest.raises(KeyTypeError):
            store.init("a", full(1))


def test_a_closed_store_says_so(store: KVStore) -> None:
    with store as kv:
        kv.init("w", full(1))
    store.close()
    for call in (
        lambda: store.init("v", full(1)),
        lambda: store.push("w", full(1)),
        lambda: store.pull("w"),
        lambda: store.pushpull("w", full(1)),
        lambda: store.broadcast("v", full(1), full(1)),
        lambda: store.set_optimizer(optimizer.create("sgd")),
        store.barrier,
    ):
        with pytest.raises(ClosedError, match=f"{store.type} store is closed"):
            call()


def test_threads_that_push_at_once_lose_no_update(store: KVStore) -> None:
    store.init("w", np.zeros(50_000, np.float32))
    store.set_optimizer(optimizer.create("sgd", learning_rate=-1.0))

    def push_often() -> None:
        for _ in range(20):
            store.push("w", np.ones(50_000, np.float32))

    threads = [threading.Thread(target=push_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(store.pull("w"), np.full(50_000, 80, np.float32))
