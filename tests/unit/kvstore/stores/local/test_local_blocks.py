"""Stores of one process work in blocks on many threads: with the bits of a loop over whole keys."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kernel_sets import computing_with

from kvstore import KVStore, create, optimizer
from kvstore.arrays.cpu.sums import Workspace, apply_round
from kvstore.arrays.cpu.threads import Cores
from kvstore.arrays.dtypes import bfloat16
from kvstore.arrays.keys import KeySpec
from kvstore.errors import UnknownKeyError, ValueMismatchError
from kvstore.optimizer import Optimizer
from kvstore.optimizer.states import create_state
from kvstore.stores.local import blocks, memory
from kvstore.stores.local import values as rows

Array = np.ndarray[Any, Any]
Values = dict[Any, list[Array]]

CORES = {number: Cores(number) for number in (1, 2, 3, 4)}
SHAPES = [(3,), (2, 5), (), (300,), (1,), (0,), (64,), (7, 9), (65,), (33, 11), (16,), (40,)]
"""Of small keys, of keys of several blocks, and of every border between them."""

KEYS = [f"key{number:02d}" for number in range(len(SHAPES))]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few numbers are many blocks, shelves and tasks."""
    monkeypatch.setattr(blocks, "SPAN_ELEMENTS", 64)
    monkeypatch.setattr(blocks, "SHARED_BYTES", 0)
    monkeypatch.setattr(memory, "SMALL_ELEMENTS", 32)
    monkeypatch.setattr(memory, "SHELF_ELEMENTS", 100)


@pytest.fixture(autouse=True, params=["numpy", "plain"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[None]:
    with computing_with(request.param):
        yield


@pytest.fixture
def with_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    def choose(number: int) -> None:
        monkeypatch.setattr(blocks, "shared", lambda: CORES[number])

    return choose


def drawn(seed: int, dtype: str = "f4", count: int = 3) -> Values:
    """For each key ``count`` arrays over many orders of magnitude."""
    random = np.random.default_rng(seed)
    kind = bfloat16() if dtype == "bfloat16" else np.dtype(dtype)

    def array(shape: tuple[int, ...]) -> Array:
        powers = 10.0 ** random.uniform(-4, 3, shape)
        return np.asarray(random.normal(size=shape) * powers).astype(kind)

    return {key: [array(s) for _ in range(count)] for key, s in zip(KEYS, SHAPES, strict=True)}


def initial(dtype: str = "f4") -> Values:
    return drawn(99, dtype, count=1)


def loop(chosen: Optimizer | None, start: Values, rounds: list[Values]) -> dict[Any, bytes]:
    """What the documented formula gives: each key whole, one after the other."""
    result = {}
    for key, (value,) in start.items():
        weight = value.reshape(-1).copy()
        state = () if chosen is None else create_state(chosen, weight)
        count = 0
        for values in rounds:
            if key in values:
                count += 1
                rows = [array.reshape(-1) for array in values[key]]
                width = KeySpec(value.shape, value.dtype).width
                variant = None if chosen is None else chosen.for_key(key, width)
                with computing_with("numpy"):
                    apply_round(weight, rows, variant, state, count, Workspace())
        result[key] = weight.tobytes()
    return result


def run(
    chosen: Optimizer | None, start: Values, rounds: list[Values], *, fused: bool = False
) -> dict[Any, bytes]:
    """The same by a store; what ``pushpull`` fills must be what a pull gives."""
    store = create("local")
    if chosen is not None:
        store.set_optimizer(chosen)
    store.init(list(start), [value for (value,) in start.values()])
    for values in rounds:
        keys, rows = list(values), list(values.values())
        if fused:
            outs = [[np.zeros_like(row[0]), np.zeros_like(row[0])] for row in rows]
            store.pushpull(keys, rows, out=outs)
            for key, row in zip(keys, outs, strict=True):
                expected = store.pull(key).tobytes()
                assert [out.tobytes() for out in row] == [expected] * 2
        else:
            store.push(keys, rows)
    return {key: store.pull(key).tobytes() for key in start}


OPTIMIZERS: list[Optimizer | None] = [
    None,
    optimizer.create("sgd", learning_rate=0.1, momentum=0.9, wd=1e-4, clip_gradient=50.0),
    optimizer.create("sgd", learning_rate=0.1, rescale_grad=0.25),
    optimizer.create("sgd", learning_rate=0.1, momentum=0.9, lr_mult={"key00": 2, "key10": 3}),
    optimizer.create("test"),
    *(
        optimizer.create(name, learning_rate=0.01)
        for name in (
            *("nag", "adam", "adamw", "adamax", "nadam", "adagrad", "rmsprop", "ftrl"),
            *("signum", "signsgd", "lars", "lamb", "groupadagrad"),
        )
    ),
    optimizer.create("adadelta"),
]


@pytest.mark.parametrize("fused", [False, True], ids=["push", "pushpull"])
@pytest.mark.parametrize("chosen", OPTIMIZERS, ids=repr)
def test_any_number_of_threads_gives_the_bits_of_a_loop(
    with_threads: Callable[[int], None], chosen: Optimizer | None, fused: bool
) -> None:
    # In the second round some keys are missing: from then on neighbours have different counts.
    rounds = [drawn(1), drawn(2), drawn(3), drawn(4)]
    for key in (KEYS[1], KEYS[3], KEYS[10]):
        del rounds[1][key]
    expected = loop(chosen, initial(), rounds)
    for number in CORES:
        with_threads(number)
        assert run(chosen, initial(), rounds, fused=fused) == expected


@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f8", "g", "i4", "u1", "?", "c8"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_so_do_all_dtypes(with_threads: Callable[[int], None], dtype: str, count: int) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    with_threads(3)
    with np.errstate(all="ignore"):
        rounds = [drawn(seed, dtype, count) for seed in (1, 2)]
        start = initial(dtype)
    chosen = [None]
    if dtype in ("f2", "bfloat16", "f8", "g"):
        chosen += [optimizer.create("sgd", learning_rate=0.1, momentum=0.9)]
    for each in chosen:
        found, expected = run(each, start, rounds, fused=True), loop(each, start, rounds)
        for key in KEYS:  # a long double has bytes without meaning
            one, other = (np.frombuffer(x[key], start[key][0].dtype) for x in (found, expected))
            np.testing.assert_array_equal(one, other)


def test_the_order_of_the_keys_in_a_call_makes_no_difference(
    with_threads: Callable[[int], None],
) -> None:
    with_threads(2)
    chosen = optimizer.create("adam", learning_rate=0.1)
    rounds = [drawn(1), drawn(2)]
    turned = [dict(reversed(values.items())) for values in rounds]
    assert run(chosen, initial(), turned) == loop(chosen, initial(), rounds)


def test_one_key_at_a_time_gives_what_a_list_gives(with_threads: Callable[[int], None]) -> None:
    with_threads(2)
    chosen = optimizer.create("adam", learning_rate=0.1)
    store = create("local")
    store.set_optimizer(chosen)
    for key, (value,) in initial().items():
        store.init(key, value)
    for key, row in drawn(1).items():
        store.push(key, row)
    store.push(KEYS, list(drawn(2).values()))
    expected = loop(chosen, initial(), [drawn(1), drawn(2)])
    assert {key: store.pull(key).tobytes() for key in KEYS} == expected


def test_arrays_with_strides_are_pushed_and_filled(with_threads: Callable[[int], None]) -> None:
    with_threads(3)
    values = drawn(1)
    spread = {
        key: [np.repeat(array.reshape(-1), 2)[::2].reshape(array.shape, order="A") for array in row]
        for key, row in values.items()
    }
    turned = {
        key: [np.asfortranarray(array) if array.ndim == 2 else array for array in row]
        for key, row in spread.items()
    }
    store = create("local")
    store.init(KEYS, [value for (value,) in initial().values()])
    outs = [np.zeros((*shape, 2), np.float32)[..., 0] for shape in SHAPES]
    store.pushpull(KEYS, list(turned.values()), out=outs)
    expected = loop(None, initial(), [values])
    assert {key: out.tobytes() for key, out in zip(KEYS, outs, strict=True)} == expected


def test_arrays_of_other_dtypes_are_filled(with_threads: Callable[[int], None]) -> None:
    with_threads(2)
    store = create("local")
    store.init(KEYS, [np.full(shape, 2.5, np.float32) for shape in SHAPES])
    outs = [[np.zeros(shape), np.zeros(shape, "<f2"), np.zeros(shape, "<f4")] for shape in SHAPES]
    store.pull(KEYS, out=outs)
    for row in outs:
        assert [np.unique(out).tolist() for out in row if out.size] in ([], [[2.5]] * 3)


class TestArraysThatShareMemory:
    """What a call fills must not depend on the order in which its threads get there."""

    @pytest.fixture(autouse=True)
    def store(self, with_threads: Callable[[int], None]) -> KVStore:
        with_threads(4)
        store: KVStore = create("local")
        store.init(["a", "b"], [np.full(200, 1, "f4"), np.full(200, 2, "f4")])
        return store

    def test_of_two_keys_with_one_array_the_later_wins(self, store: KVStore) -> None:
        for _ in range(20):
            out = np.zeros(200, "f4")
            store.pull(["a", "b"], out=[out, out])
            assert (out == 2).all()

    def test_pushpull_in_place_reads_before_it_writes(self, store: KVStore) -> None:
        first = [np.full(200, 10, "f4"), np.full(200, 20, "f4")]
        second = [np.full(200, 5, "f4")] * 2
        store.pushpull(["a", "b"], [first, second])
        assert [np.unique(array).tolist() for array in (*first, *second)] == [
            [30],
            [30],
            [10],
            [10],
        ]

    def test_pushpull_into_what_another_key_pushes_is_push_and_then_pull(
        self, store: KVStore
    ) -> None:
        for _ in range(20):
            first, second = np.full(200, 10, "f4"), np.full(200, 20, "f4")
            store.pushpull(["a", "b"], [first, second], out=[second, first])
            assert (first == 20).all()
            assert (second == 10).all()

    def test_the_halves_of_one_array_are_filled(self, store: KVStore) -> None:
        flat = np.arange(400, dtype="f4")
        store.pushpull(["a", "b"], [flat[:200], flat[200:]])
        np.testing.assert_array_equal(flat, np.arange(400))
        shifted = flat.copy()
        store.pushpull(["a", "b"], [shifted[100:300], flat[:200]], out=[shifted[:200], flat[:200]])
        np.testing.assert_array_equal(shifted[:200], np.arange(100, 300))


class Brittle(optimizer.SGD):
    """Raises for gradients that hold a NaN."""

    def update(self, weight: Array, grad: Array, state: Any, count: int, scratch: Array) -> None:
        if np.isnan(grad).any():
            raise FloatingPointError("a NaN came")
        super().update(weight, grad, state, count, scratch)


class TestAnOptimizerThatRaises:
    @pytest.mark.parametrize("threads", sorted(CORES))
    def test_raises_at_the_caller_and_the_store_goes_on(
        self, with_threads: Callable[[int], None], threads: int
    ) -> None:
        with_threads(threads)
        store = create("local")
        store.set_optimizer(Brittle(learning_rate=1.0))
        store.init(KEYS, [np.zeros(shape) for shape in SHAPES])
        wrong = [np.ones(shape) for shape in SHAPES]
        wrong[9][20, 3] = np.nan
        with pytest.raises(FloatingPointError, match="a NaN came"):
            store.push(KEYS, wrong)
        before, versions = store.pull(KEYS, with_version=True)
        store.push(KEYS, [np.ones(shape) for shape in SHAPES])
        after, later = store.pull(KEYS, with_version=True)
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(new, old - 1)
        assert [new - old for old, new in zip(versions, later, strict=True)] == [1] * len(KEYS)
        # A version counts what is in the value: all of it or not.
        for value, version in zip(before, versions, strict=True):
            assert version == 0 or (value == -1).all()

    def test_counts_are_those_of_the_updates_that_were_begun(
        self, with_threads: Callable[[int], None]
    ) -> None:
        with_threads(1)
        store = create("local")
        store.set_optimizer(Brittle())
        store.init(["a", "b", "c"], [np.zeros(40), np.zeros(40), np.zeros(40)])
        with pytest.raises(FloatingPointError):
            store.push(["a", "b", "c"], [np.ones(40), np.full(40, np.nan), np.ones(40)])
        assert [store._values.entries[key].count for key in "abc"] == [1, 1, 0]
        assert [store._values.entries[key].version for key in "abc"] == [1, 0, 0]


class TestListsOfKeys:
    """They are worked out once; nothing that happens to a key later may be missed."""

    def test_a_deleted_key_is_gone_and_comes_back_anew(self) -> None:
        store = create("local")
        store.init(["a", "b"], [np.ones(3), np.ones(3)])
        store.push(["a", "b"], [np.ones(3), np.ones(3)])
        store.delete("a")
        with pytest.raises(UnknownKeyError):
            store.push(["a", "b"], [np.ones(3), np.ones(3)])
        store.init("a", np.zeros(4))
        with pytest.raises(ValueMismatchError):
            store.push(["a", "b"], [np.ones(3), np.ones(3)])
        store.push(["a", "b"], [np.full(4, 7.0), np.ones(3)])
        np.testing.assert_array_equal(store.pull("a"), [7, 7, 7, 7])

    def test_another_optimizer_is_used_from_the_next_push_on(self) -> None:
        store = create("local")
        store.init(["a", "b"], [np.zeros(3), np.zeros(3)])
        for name, rate in (("sgd", 1.0), ("sgd", 2.0), ("adam", 0.5), ("sgd", 4.0)):
            store.set_optimizer(optimizer.create(name, learning_rate=rate))
            store.push(["a", "b"], [np.ones(3), np.ones(3)])
        np.testing.assert_allclose(store.pull("a"), np.full(3, -7.5), rtol=1e-6)

    def test_many_different_lists_are_no_burden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rows, "MOST_LISTS", 3)
        store = create("local")
        store.init(list(range(10)), [np.zeros(2) for _ in range(10)])
        for key in range(10):
            store.push([key, (key + 1) % 10], [np.ones(2), np.ones(2)])
            assert len(store._values._rows._blocks) <= 3
        np.testing.assert_array_equal(store.pull(list(range(10))), np.ones((10, 2)))

    @pytest.mark.parametrize("wrong", [True, 1.0, [1, True], [1, "1"], None])
    def test_what_only_equals_a_key_is_no_key(self, wrong: Any) -> None:
        store = create("local")
        store.init([0, 1], [np.ones(2), np.ones(2)])
        store.push(1, np.ones(2))
        store.push([0, 1], [np.ones(2), np.ones(2)])
        values = [np.ones(2), np.ones(2)] if isinstance(wrong, list) else np.ones(2)
        with pytest.raises(TypeError):
            store.push(wrong, values)


def test_an_updater_runs_on_the_callers_thread_in_the_order_of_the_keys(
    with_threads: Callable[[int], None],
) -> None:
    with_threads(4)
    calls = []
    store = create("local")
    store.init(KEYS, [np.zeros(shape) for shape in SHAPES])

    def updater(key: Any, received: Array, local: Array) -> None:
        calls.append((key, threading.current_thread()))
        local += received

    store.set_updater(updater)
    for _ in range(2):
        store.push(KEYS, [[np.ones(shape)] * 2 for shape in SHAPES])
    assert calls == [(key, threading.current_thread()) for key in KEYS] * 2
    assert all((value == 4).all() for value in store.pull(KEYS))


def test_checkpoints_of_shelved_keys_come_back(tmp_path: Any) -> None:
    chosen = optimizer.create("adam", learning_rate=0.1)
    rounds = [drawn(1), drawn(2)]
    store, other = create("local"), create("local")
    store.set_optimizer(chosen)
    store.init(KEYS, [value for (value,) in initial().values()])
    store.push(KEYS, list(rounds[0].values()))
    store.save_checkpoint(tmp_path)
    other.load_checkpoint(tmp_path)
    other.push(KEYS, list(rounds[1].values()))
    expected = loop(chosen, initial(), rounds)
    assert {key: other.pull(key).tobytes() for key in KEYS} == expected
