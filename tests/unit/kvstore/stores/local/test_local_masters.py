"""float16 keys of the stores of one process: row-sparse keys, updaters and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import KVStore, RowSparseArray, optimizer
from kvstore.errors import CheckpointError
from kvstore.optimizer.base import Optimizer
from kvstore.sparse import table

Array = np.ndarray[Any, Any]
SHAPE = (50, 4)
PLAIN = optimizer.create("sgd", learning_rate=1.0)
OPTIMIZERS = [
    PLAIN,
    optimizer.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01),
    optimizer.create("adam", learning_rate=0.001),
]


@pytest.fixture(params=["direct", "by index"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[KVStore]:
    if request.param == "by index":
        monkeypatch.setattr(table, "DIRECT_BYTES", 0)
    with kvstore.create("local") as store:
        yield store


def rows(seed: int, size: float = 1e-3) -> RowSparseArray:
    draw = np.random.default_rng(seed)
    values = (size * draw.normal(size=(9, 4))).astype("f2")
    return RowSparseArray(draw.permutation(SHAPE[0])[:9], values, SHAPE)


def wide(array: RowSparseArray) -> RowSparseArray:
    return RowSparseArray(array.indices, array.values.astype("f4"), SHAPE)


def start() -> RowSparseArray:
    return RowSparseArray(
        np.arange(0, 50, 2), np.linspace(1, 2, 100, dtype="f2").reshape(25, 4), SHAPE
    )


def dense(store: KVStore, key: str) -> Array:
    out = np.empty(SHAPE, store.info(key).dtype)
    store.pull(key, out=out, ignore_sparse=False)
    return out


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("chosen", OPTIMIZERS, ids=repr)
def test_rows_are_what_their_masters_round_to(
    store: KVStore, chosen: Optimizer, lazy: bool
) -> None:
    """Of a row-sparse key, and of a dense one with row-sparse gradients."""
    store.init(["rows", "dense"], [start(), start().to_dense()])
    store.init(["wide rows", "wide dense"], [wide(start()), wide(start()).to_dense()])
    store.set_optimizer(chosen.replace(lazy_update=lazy))
    for seed in range(5):
        store.push(["rows", "dense"], [rows(seed)] * 2)
        store.push(["wide rows", "wide dense"], [wide(rows(seed))] * 2)
    for key in ("rows", "dense"):
        expected = dense(store, f"wide {key}").astype("f2")
        assert dense(store, key).tobytes() == expected.tobytes()


@pytest.mark.parametrize("lazy", [True, False])
def test_small_steps_of_rows_add_up(store: KVStore, lazy: bool) -> None:
    store.init("w", RowSparseArray([3], np.full((1, 4), 64, "f2"), SHAPE))
    store.set_optimizer(PLAIN.replace(lazy_update=lazy))
    small = RowSparseArray([3, 8], np.full((2, 4), 2**-7, "f2"), SHAPE)
    for _ in range(64):
        store.push("w", small)
    pulled = store.row_sparse_pull("w", row_ids=[3, 8]).values
    assert pulled.tolist() == [[63.5] * 4, [-0.5] * 4]


def test_rows_of_a_checkpoint_go_on_from_their_masters(store: KVStore, tmp_path: Path) -> None:
    store.init(["rows", "dense"], [start(), start().to_dense()])
    store.set_optimizer(OPTIMIZERS[1])
    for seed in range(3):
        store.push(["rows", "dense"], [rows(seed)] * 2)
    store.save_checkpoint(tmp_path)
    store.save_optimizer_states(tmp_path / "states")
    with kvstore.create("local") as other, kvstore.create("local") as third:
        other.load_checkpoint(tmp_path)
        third.init(["rows", "dense"], [store.pull("rows"), store.pull("dense")])
        third.set_optimizer(OPTIMIZERS[1])
        third.load_optimizer_states(tmp_path / "states")
        for each in (store, other, third):
            for seed in range(3, 9):
                each.push(["rows", "dense"], [rows(seed)] * 2)
        for key in ("rows", "dense"):
            expected = dense(store, key).tobytes()
            assert [dense(each, key).tobytes() for each in (other, third)] == [expected] * 2


def test_states_of_rows_that_have_other_values_now_follow_them(
    store: KVStore, tmp_path: Path
) -> None:
    ones = RowSparseArray([3, 7], np.full((2, 4), 2**-6, "f2"), SHAPE)
    store.init("w", RowSparseArray([3, 7], np.full((2, 4), 64, "f2"), SHAPE))
    store.set_optimizer(PLAIN)
    store.push("w", ones)
    store.save_optimizer_states(tmp_path / "states")
    with kvstore.create("local") as other:
        values = np.repeat([[64], [32], [16]], 4, axis=1).astype("f2")
        other.init("w", RowSparseArray([3, 7, 9], values, SHAPE))
        other.set_optimizer(PLAIN)
        other.load_optimizer_states(tmp_path / "states")
        other.push("w", RowSparseArray([3, 7, 9], np.full((3, 4), 2**-6, "f2"), SHAPE))
        pulled = other.row_sparse_pull("w", row_ids=[3, 7, 9]).values[:, 0]
    assert pulled.tolist() == [64 - 2**-5, 32 - 2**-6, 16 - 2**-6]


class Memory(Optimizer):
    """Keeps an array that it makes by itself."""

    def create_state(self, weight: Array) -> tuple[Array, ...]:
        return (np.full_like(weight, 3),)

    def update(self, weight: Any, grad: Any, state: Any, count: int, scratch: Any) -> None:
        assert weight.dtype == state[0].dtype == np.float32
        np.subtract(weight, grad, out=weight)


def test_an_optimizer_of_ones_own_sees_float32(store: KVStore) -> None:
    store.init(["rows", "dense"], [start(), np.full(3, 64, "f2")])
    store.set_optimizer(Memory())
    for seed in range(3):
        store.push(["rows", "dense"], [rows(seed), np.full(3, 2**-6, "f2")])
    assert store.pull("dense").tolist() == [64 - 2**-4] * 3


def test_what_a_function_of_ones_own_has_set_counts(store: KVStore) -> None:
    def set_to_received(key: Any, received: Array, stored: Array) -> None:
        stored[...] = received

    store.init("w", np.full(3, 64, "f2"))
    store.set_optimizer(PLAIN)
    store.push("w", np.full(3, 2**-6, "f2"))
    store.set_updater(set_to_received)
    store.push("w", np.full(3, 32, "f2"))
    store.set_optimizer(PLAIN)
    store.push("w", np.full(3, 2**-6, "f2"))
    assert store.pull("w").tolist() == [32 - 2**-6] * 3


def test_a_state_that_is_called_like_the_master_cannot_be_saved(tmp_path: Path) -> None:
    class Named(Memory):
        def state_names(self) -> tuple[str, ...]:
            return ("master",)

    for dtype in ("f4", "f2"):
        with kvstore.create("local") as store:
            store.init("w", np.ones(3, dtype))
            store.set_optimizer(Named())
            if dtype == "f4":
                store.save_optimizer_states(tmp_path / "s")
                continue
            with pytest.raises(CheckpointError, match="for float16 and bfloat16 keys"):
                store.save_optimizer_states(tmp_path / "s")
