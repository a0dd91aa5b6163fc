"""Row-sparse keys and gradients in the stores of one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import KVStore, RowSparseArray, create, optimizer
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CheckpointError,
    NotSupportedError,
    UnknownKeyError,
    ValueMismatchError,
)
from kvstore.optimizer.states import create_state
from kvstore.sparse import table
from kvstore.sparse.sums import Contribution, Sum
from kvstore.stores.local import sparse as local_rows
from tests.combinations import covering

Array = np.ndarray[Any, Any]
SHAPE = (6, 2)

OPTIMIZERS = {
    "sgd": optimizer.create("sgd", learning_rate=0.1, wd=0.01),
    "momentum": optimizer.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01),
    "adam": optimizer.create("adam", learning_rate=0.1, wd=0.01),
    "adagrad": optimizer.create("adagrad", learning_rate=0.1, wd=0.01),
    "nag": optimizer.create("nag", momentum=0.9),
    "ftrl": optimizer.create("ftrl"),
    "adadelta": optimizer.create("adadelta"),
    "rmsprop": optimizer.create("rmsprop"),
    "signum": optimizer.create("signum", momentum=0.9),
}


@pytest.fixture(params=["local", "device"])
def store(request: pytest.FixtureRequest) -> KVStore:
    return create(request.param)


@pytest.fixture(params=["direct", "by index"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by index":
        monkeypatch.setattr(table, "DIRECT_BYTES", 0)


def rows(ids: list[int], value: float = 1.0, shape: tuple[int, ...] = SHAPE) -> RowSparseArray:
    """Row number i of the ids is filled with value + i."""
    values = np.empty((len(ids), *shape[1:]), "f4")
    for index in range(len(ids)):
        values[index] = value + index
    return RowSparseArray(ids, values, shape)


def random_rows(seed: int, num_ids: int = 4, dtype: Any = "f4") -> RowSparseArray:
    random = np.random.default_rng(seed)
    values = random.standard_normal((num_ids, *SHAPE[1:])).astype(dtype)
    return RowSparseArray(random.integers(0, SHAPE[0], num_ids), values, SHAPE)


def dense(store: KVStore, key: str = "w") -> Array:
    out = np.full(SHAPE, 77, store.info(key).dtype)
    store.pull(key, out=out)
    return out


# -- init and pull ------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [[], [4, 1], [0, 1, 2, 3, 4, 5]])
@pytest.mark.usefixtures("layout")
def test_a_key_may_begin_with_no_rows_some_or_all(store: KVStore, ids: list[int]) -> None:
    value = rows(ids)
    store.init("w", value)
    value.values[:] = 9
    np.testing.assert_array_equal(dense(store), rows(ids).to_dense())
    found = store.pull("w")
    assert found.indices.tolist() == sorted(ids)
    assert store.info("w").stype == "row_sparse"
    assert store.info("w").shape == SHAPE


def test_a_pull_leaves_a_row_sparse_array_as_it_is_and_says_so_once(store: KVStore) -> None:
    store.init("w", rows([1, 2]))
    out = rows([5], 7)
    with pytest.warns(UserWarning, match="row_sparse_pull"):
        store.pull("w", out=out)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.pull("w", out=[out, out])
    assert (out.indices.tolist(), out.values.tolist()) == ([5], [[7, 7]])


def test_without_ignore_sparse_a_pull_brings_all_rows_there_are(store: KVStore) -> None:
    store.init(["w", "d"], [rows([1, 2]), np.ones(SHAPE, "f4")])
    outs = [RowSparseArray.zeros(SHAPE), RowSparseArray.zeros(SHAPE, "f8")]
    store.pull(["w", "d"], out=outs, ignore_sparse=False)
    assert [out.indices.tolist() for out in outs] == [[1, 2], [0, 1, 2, 3, 4, 5]]
    np.testing.assert_array_equal(outs[0].to_dense(), rows([1, 2]).to_dense())
    assert outs[1].dtype == np.float64


def test_what_a_pull_gives_is_a_copy(store: KVStore) -> None:
    store.init("w", rows([1, 2]))
    store.pull("w").values[:] = 9
    store.row_sparse_pull("w", row_ids=[1]).values[:] = 9
    np.testing.assert_array_equal(dense(store), rows([1, 2]).to_dense())


# -- row_sparse_pull ----------------------------------------------------------------------

ID_SETS: dict[str, Any] = {
    "unsorted": np.array([5, 1, 3]),
    "repeated": np.array([3, 3, 1, 3]),
    "in two dimensions": np.array([[5, 0], [0, 1]]),
    "none": np.array([], np.int64),
    "an empty list": [],
    "a list": [5, 1],
    "int32": np.array([2, 1], np.int32),
    "uint64": np.array([2, 1], np.uint64),
    "whole floats": np.array([2.0, 1.0]),
    "one": np.array(3),
    "an NDArray": kvstore.nd.array([4, 2]),
}


@pytest.mark.parametrize("name", ID_SETS)
@pytest.mark.usefixtures("layout")
def test_the_rows_asked_for_come_sorted_and_each_once(store: KVStore, name: str) -> None:
    ids = ID_SETS[name]
    store.init("w", rows([1, 3, 4]))
    out = rows([0, 2, 5], 7)
    assert store.row_sparse_pull("w", out=out, row_ids=ids) is None
    plain = np.asarray(ids.asnumpy() if name == "an NDArray" else ids)
    wanted = sorted({int(id_) for id_ in plain.reshape(-1)})
    assert out.indices.tolist() == wanted
    np.testing.assert_array_equal(out.values, rows([1, 3, 4]).to_dense()[wanted])
    found = store.row_sparse_pull("w", row_ids=ids)
    assert found.indices.tolist() == wanted
    np.testing.assert_array_equal(found.values, out.values)


def test_a_dense_array_gets_the_rows_in_the_order_of_the_ids(store: KVStore) -> None:
    store.init(["w", "d"], [rows([1, 3, 4]), rows([1, 3, 4]).to_dense()])
    ids = np.array([[5, 3], [3, 1]])
    for key in ("w", "d"):
        out = np.full((2, 2, 2), np.nan)
        store.row_sparse_pull(key, out=out, row_ids=ids)
        np.testing.assert_array_equal(out, rows([1, 3, 4]).to_dense()[ids])


def test_an_id_may_be_a_number_of_numpy(store: KVStore) -> None:
    store.init("w", np.arange(6, dtype=np.float32).reshape(3, 2))
    assert store.row_sparse_pull("w", row_ids=np.int64(2)).values.tolist() == [[4.0, 5.0]]


@pytest.mark.parametrize("ids", [[1.5], ["a"], {1, 2}, "12", 1.0, [[1], [2.0]]])
def test_what_cannot_be_ids_is_said_to_be_none(store: KVStore, ids: Any) -> None:
    store.init("w", np.zeros((3, 2), np.float32))
    with pytest.raises(ArgumentTypeError, match="row ids must be an array or a list of ints, got"):
        store.row_sparse_pull("w", row_ids=ids)


def test_one_set_of_ids_serves_all_arrays(store: KVStore) -> None:
    store.init("w", rows([1, 3, 4]))
    outs = [RowSparseArray.zeros(SHAPE) for _ in range(3)]
    store.row_sparse_pull("w", out=outs, row_ids=np.array([4, 1]))
    assert [out.indices.tolist() for out in outs] == [[1, 4]] * 3
    outs[0].values[:] = 9
    outs[0].indices[:] = 0
    assert outs[1].indices.tolist() == [1, 4]
    np.testing.assert_array_equal(outs[1].values, [[1, 1], [3, 3]])


def test_each_array_may_have_ids_of_its_own(store: KVStore) -> None:
    store.init("w", rows([1, 3, 4]))
    outs = [RowSparseArray.zeros(SHAPE) for _ in range(2)]
    store.row_sparse_pull("w", out=outs, row_ids=[np.array([4]), np.array([0, 1])])
    assert [out.indices.tolist() for out in outs] == [[4], [0, 1]]
    found = store.row_sparse_pull("w", row_ids=[np.array([4]), [0, 1]])
    assert [one.indices.tolist() for one in found] == [[4], [0, 1]]


def test_several_keys_have_parallel_lists(store: KVStore) -> None:
    store.init(["v", "w"], [rows([0]), rows([1, 3, 4])])
    outs = [RowSparseArray.zeros(SHAPE), [RowSparseArray.zeros(SHAPE) for _ in range(2)]]
    sets = [np.array([0]), [np.array([4]), np.array([0, 1])]]
    store.row_sparse_pull(["v", "w"], out=outs, row_ids=sets, priority=-1)
    assert outs[0].indices.tolist() == [0]
    assert [out.indices.tolist() for out in outs[1]] == [[4], [0, 1]]
    found = store.row_sparse_pull(["v", "w"], row_ids=[[0], [1]])
    assert [one.indices.tolist() for one in found] == [[0], [1]]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ArgumentValueError, "row_ids"),
        ({"row_ids": [6]}, ArgumentValueError, r"row id 6 .* key 'w' has rows 0 to 5"),
        ({"row_ids": np.array([-1])}, ArgumentValueError, r"row id -1"),
        ({"row_ids": np.array([0.5])}, ArgumentTypeError, "integers"),
        ({"row_ids": np.array([59e6])}, ArgumentTypeError, "int64"),
        (
            {"row_ids": [[0], [1]], "out": RowSparseArray.zeros(SHAPE)},
            ValueMismatchError,
            "got 2 lists",
        ),
        ({"row_ids": [0], "out": []}, ValueMismatchError, "0 arrays"),
        ({"row_ids": [0], "out": np.zeros(SHAPE)}, ValueMismatchError, r"\(6, 2\).*\(1, 2\)"),
        ({"row_ids": [0], "out": RowSparseArray.zeros((7, 2))}, ValueMismatchError, r"\(7, 2\)"),
        ({"row_ids": [0], "priority": "high"}, ArgumentTypeError, "priority"),
        ({"key": "v", "row_ids": [0]}, UnknownKeyError, "'v'"),
        ({"key": "s", "row_ids": [0]}, ValueMismatchError, "scalar"),
        ({"key": ["w", "w"], "row_ids": [[0]]}, ValueMismatchError, "2 keys"),
    ],
)
def test_what_does_not_fit_is_an_error_that_changes_nothing(
    store: KVStore, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    store.init(["w", "s"], [rows([1]), np.array(1.0)])
    with pytest.raises(error, match=text):
        store.row_sparse_pull(**{"key": "w", **arguments})
    assert store.stats()["store"]["pulls"] == 0


@pytest.mark.parametrize("id_", [2**24 + 1, 2**31 + 1, 2**53 + 1, 2**63 - 1])
def test_ids_of_any_size_give_exactly_their_rows(store: KVStore, id_: int) -> None:
    shape = (2**63, 2)
    store.init("w", RowSparseArray([id_, 3], np.array([[1, 2], [3, 4]], "f4"), shape))
    store.set_optimizer(optimizer.create("sgd", learning_rate=1.0))
    store.push("w", RowSparseArray([id_, id_ - 1], np.ones((2, 2), "f4"), shape))
    found = store.row_sparse_pull("w", row_ids=np.array([id_, id_ - 1, id_ - 2]))
    assert found.indices.tolist() == [id_ - 2, id_ - 1, id_]
    assert found.values.tolist() == [[0, 0], [-1, -1], [0, 1]]


# -- pushes -------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["w", "d"])
@pytest.mark.usefixtures("layout")
def test_without_an_optimizer_the_sum_is_the_whole_new_value(store: KVStore, key: str) -> None:
    store.init(["w", "d"], [rows([0, 1, 2]), np.ones(SHAPE, "f4")])
    first, second = rows([4, 1]), rows([1, 5, 1], 10)
    for _ in range(2):
        store.push(key, [first, second])
    np.testing.assert_array_equal(dense(store, key), first.to_dense() + second.to_dense())
    store.push(key, RowSparseArray.zeros(SHAPE))
    np.testing.assert_array_equal(dense(store, key), np.zeros(SHAPE))


def test_a_push_copies_what_it_needs(store: KVStore) -> None:
    store.init("w", RowSparseArray.zeros(SHAPE))
    value = rows([1, 2])
    store.push("w", value)
    value.values[:], value.indices[:] = 9, 5
    np.testing.assert_array_equal(dense(store), rows([1, 2]).to_dense())


@pytest.mark.parametrize("key", ["w", "d"])
def test_dense_and_row_sparse_values_may_be_pushed_together(store: KVStore, key: str) -> None:
    store.init(["w", "d"], [rows([0, 1, 2]), np.ones(SHAPE, "f4")])
    ones = np.ones(SHAPE, "f4")
    store.push(key, [ones, rows([4], 5), ones])
    np.testing.assert_array_equal(dense(store, key), 2 + rows([4], 5).to_dense())


def test_dense_and_row_sparse_keys_move_in_one_call(store: KVStore) -> None:
    store.init(["w", "d"], [rows([0]), np.ones(SHAPE, "f4")])
    store.push(["d", "w", "d"], [np.ones(SHAPE, "f4"), rows([3]), np.ones(SHAPE, "f4")])
    np.testing.assert_array_equal(dense(store, "d"), np.full(SHAPE, 2))
    np.testing.assert_array_equal(dense(store, "w"), rows([3]).to_dense())
    assert store.pull(["w", "d"], with_version=True)[1] == [1, 1]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("key", ["w", "d"])
@pytest.mark.usefixtures("layout")
def test_a_lazy_update_is_the_dense_one_on_the_touched_rows(
    store: KVStore, name: str, key: str
) -> None:
    start = np.arange(12, dtype="f4").reshape(SHAPE)
    store.set_optimizer(OPTIMIZERS[name].replace(lazy_update=True))
    store.init(["w", "d"], [RowSparseArray.from_dense(start), start])
    reference = create("local")
    reference.set_optimizer(OPTIMIZERS[name])
    for row in range(SHAPE[0]):
        reference.init(str(row), start[row])
    for seed in range(4):
        pushed = [random_rows(seed), random_rows(seed + 50)]
        store.push(key, pushed)
        touched = {int(id_) for one in pushed for id_ in one.indices}
        for row in range(SHAPE[0]):
            gradient = [one.to_dense()[row] for one in pushed]
            if row in touched:
                reference.push(str(row), gradient)
        wanted = np.stack([reference.pull(str(row)) for row in range(SHAPE[0])])
        if "adam" not in name or seed == 0:  # its bias correction counts the updates of the key
            np.testing.assert_array_equal(dense(store, key), wanted)
        before = dense(store, key)
        store.push(key, RowSparseArray.zeros(SHAPE))
        np.testing.assert_array_equal(dense(store, key), before)


@pytest.mark.parametrize(
    ("key", "name", "dtype"),
    covering(["w", "d"], [*OPTIMIZERS, "lars", "lamb"], ["f2", "f4", "f8"]),
)
def test_an_update_that_is_not_lazy_is_the_dense_one_to_the_last_bit(
    store: KVStore, name: str, key: str, dtype: str
) -> None:
    found = OPTIMIZERS.get(name) or optimizer.create(name, learning_rate=0.1)
    start = np.arange(12, dtype=dtype).reshape(SHAPE)
    start[4] = 0
    store.set_optimizer(found.replace(lazy_update=name in ("lars", "lamb")))
    store.init(["w", "d"], [RowSparseArray.from_dense(start), start])
    reference = create("local")
    reference.set_optimizer(found)
    reference.init("w", start)
    for seed in range(5):
        pushed = [random_rows(seed, dtype=dtype), random_rows(seed + 50, 2, dtype)]
        store.push(key, pushed)
        reference.push("w", [one.to_dense() for one in pushed])
        assert dense(store, key).tobytes() == reference.pull("w").tobytes()


def test_rows_that_are_not_held_need_no_memory_in_updates_that_are_not_lazy(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "DIRECT_BYTES", 0)
    for name in ("momentum", "adam"):
        store.set_optimizer(OPTIMIZERS[name].replace(lazy_update=False))
        store.init(name, RowSparseArray([2], np.ones((1, 2), "f4"), SHAPE))
        reference = create("local")
        reference.set_optimizer(OPTIMIZERS[name])
        reference.init("w", store.pull(name).to_dense())
        for seed in (1, 2, 3):
            store.push(name, random_rows(seed, 1))
            reference.push("w", random_rows(seed, 1).to_dense())
        assert len(store.pull(name).indices) < SHAPE[0]
        assert dense(store, name).tobytes() == reference.pull("w").tobytes()


def test_an_update_that_needs_rows_that_are_not_held_is_refused(store: KVStore) -> None:
    store.set_optimizer(optimizer.create("lars"))
    store.init("w", RowSparseArray.zeros((2**40, 2)))
    with pytest.raises(NotSupportedError, match="lars would change all 1099511627776 rows"):
        store.push("w", RowSparseArray([1], np.ones((1, 2), "f4"), (2**40, 2)))
    assert len(store.pull("w").indices) == 0


def test_a_change_of_numbers_keeps_states_and_another_optimizer_begins_anew(
    store: KVStore,
) -> None:
    for key in ("w", "d"):
        store.init(key, np.zeros(SHAPE, "f4") if key == "d" else RowSparseArray.zeros(SHAPE))
    for found in (
        OPTIMIZERS["momentum"],
        OPTIMIZERS["momentum"].replace(lr=0.5),
        OPTIMIZERS["adam"],
    ):
        store.set_optimizer(found)
        store.push(["w", "d"], [random_rows(3), random_rows(3)])
        assert dense(store, "w").tobytes() == dense(store, "d").tobytes()


def test_multipliers_of_a_key_count(store: KVStore) -> None:
    store.set_optimizer(optimizer.create("sgd", learning_rate=1.0, lr_mult={"w": 0.5}))
    store.init("w", RowSparseArray.zeros(SHAPE))
    store.push("w", rows([2]))
    assert store.row_sparse_pull("w", row_ids=[2]).values.tolist() == [[-0.5, -0.5]]


def test_an_updater_gets_the_sum_and_the_rows_of_the_value(store: KVStore) -> None:
    seen = []

    def descend(key: str, received: RowSparseArray, local: Any) -> None:
        seen.append((key, received.indices.tolist()))
        if isinstance(local, RowSparseArray):
            local.values[...] -= received.values
        else:
            local[received.indices] -= received.values

    store.init(["w", "d"], [rows([1]), rows([1]).to_dense()])
    store.set_updater(descend)
    for key in ("w", "d"):
        store.push(key, [rows([4, 1], 5), rows([4])])
        expected = rows([1]).to_dense() - rows([4, 1], 5).to_dense() - rows([4]).to_dense()
        np.testing.assert_array_equal(dense(store, key), expected)
    assert seen == [("w", [1, 4]), ("d", [1, 4])]


def test_an_updater_that_raises_changes_nothing(store: KVStore) -> None:
    def fail(key: str, received: RowSparseArray, local: RowSparseArray) -> None:
        local.values[...] = 9
        raise RuntimeError("no")

    store.init("w", rows([1]))
    store.set_updater(fail)
    with pytest.raises(RuntimeError):
        store.push("w", rows([1]))
    np.testing.assert_array_equal(dense(store), rows([1]).to_dense())


@pytest.mark.parametrize("dtype", ["?", "i4", "i8", "c8", "f2"])
def test_values_of_any_dtype_are_added(store: KVStore, dtype: str) -> None:
    store.init("w", RowSparseArray.zeros(SHAPE, dtype))
    one = RowSparseArray([1, 4, 1], np.ones((3, 2), dtype), SHAPE)
    store.push("w", [one, one])
    expected = np.zeros(SHAPE, dtype)
    expected[[1, 4]] = [[4], [2]]
    np.testing.assert_array_equal(dense(store), expected)


def test_an_optimizer_refuses_rows_that_are_not_floats(store: KVStore) -> None:
    store.init("w", RowSparseArray.zeros(SHAPE, "i4"))
    store.set_optimizer(OPTIMIZERS["sgd"])
    with pytest.raises(ArgumentTypeError, match="int32"):
        store.push("w", RowSparseArray.zeros(SHAPE, "i4"))


@pytest.mark.parametrize(
    "value",
    [RowSparseArray.zeros((7, 2)), RowSparseArray.zeros(SHAPE, "f8"), np.zeros((7, 2), "f4")],
)
@pytest.mark.parametrize("key", ["w", "d"])
def test_a_push_has_shape_and_dtype_of_the_key(store: KVStore, key: str, value: Any) -> None:
    store.init(["w", "d"], [rows([1]), np.zeros(SHAPE, "f4")])
    with pytest.raises(ValueMismatchError, match=f"key '{key}'"):
        store.push(key, value)


@pytest.mark.parametrize("call", ["pushpull", "broadcast"])
def test_pushpull_and_broadcast_fill_dense_arrays_only(store: KVStore, call: str) -> None:
    store.init("w", rows([1]))
    out = np.zeros(SHAPE, "f4")
    key = "w" if call == "pushpull" else "new"
    with pytest.raises(NotSupportedError, match="row_sparse_pull"):
        getattr(store, call)(key, rows([3]), out=RowSparseArray.zeros(SHAPE))
    np.testing.assert_array_equal(dense(store), rows([1]).to_dense())
    getattr(store, call)(key, rows([3]), out=out)
    np.testing.assert_array_equal(out, rows([3]).to_dense())


def test_a_pushpull_without_out_does_not_write_into_row_sparse_values(store: KVStore) -> None:
    store.init("w", rows([1]))
    with pytest.raises(NotSupportedError, match="pushpull"):
        store.pushpull("w", rows([3]))


def test_deleted_keys_may_come_again_as_another_kind(store: KVStore) -> None:
    store.init("w", rows([1]))
    store.delete("w")
    store.init("w", np.ones(SHAPE, "f4"))
    assert store.info("w").stype == "default"
    np.testing.assert_array_equal(dense(store), np.ones(SHAPE))


def test_statistics_count_the_bytes_of_rows(store: KVStore) -> None:
    store.init("w", rows([1]))
    store.push("w", rows([1, 2]))
    store.row_sparse_pull("w", row_ids=[3, 3])
    counted = store.stats()["store"]
    assert (counted["bytes_pushed"], counted["bytes_pulled"]) == (2 * 8 + 2 * 2 * 4, 8)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("name", [*OPTIMIZERS, None])
def test_what_is_done_on_a_gpu_gives_the_bits_of_the_host(name: str | None, lazy: bool) -> None:
    """The functions are NumPy's and CuPy's alike, so an entry of the host will do."""
    found = None if name is None else OPTIMIZERS[name].replace(lazy_update=lazy)
    here, there = create("local"), create("local")
    for each in (here, there):
        each.init("w", np.arange(12, dtype="f4").reshape(SHAPE))
        if found is not None:
            each.set_optimizer(found)
    entry = there._values.entries["w"]  # type: ignore[attr-defined]
    for seed in range(3):
        value = random_rows(seed).unique()
        here.push("w", value)
        if found is not None and entry.state is None:
            entry.keep_state(create_state(found, entry.flat), 0)
        total = Sum([Contribution(value.indices, value.values)])
        local_rows._apply_on_device(entry, total, found, seed + 1)
        assert dense(there).tobytes() == dense(here).tobytes()


def test_bfloat16_is_added_and_updated_in_float32(store: KVStore) -> None:
    kind = pytest.importorskip("ml_dtypes").bfloat16
    store.init(["w", "d"], [RowSparseArray.zeros(SHAPE, kind), np.zeros(SHAPE, kind)])
    store.set_optimizer(OPTIMIZERS["momentum"].replace(lazy_update=False))
    for seed in range(3):
        ones = random_rows(seed, 6, kind), random_rows(seed + 9, 6, kind)
        store.push("w", list(ones))
        store.push("d", [one.to_dense() for one in ones])
        assert dense(store).tobytes() == dense(store, "d").tobytes()


def test_rows_without_numbers_are_rows(store: KVStore) -> None:
    shape = (4, 0)
    store.set_optimizer(OPTIMIZERS["adam"])
    store.init("w", RowSparseArray.zeros(shape))
    store.push("w", RowSparseArray([2, 2], np.zeros((2, 0), "f4"), shape))
    assert store.row_sparse_pull("w", row_ids=[3, 2]).values.shape == (2, 0)
    assert store.pull("w").indices.tolist() == [2]


def test_rows_may_be_numbers_or_matrices(store: KVStore) -> None:
    for shape in ((5,), (5, 2, 3)):
        value = RowSparseArray([4, 1], np.ones((2, *shape[1:]), "f4"), shape)
        key = str(shape)
        store.init(key, value)
        store.push(key, [value, value])
        out = np.zeros((2, *shape[1:]), "f4")
        store.row_sparse_pull(key, out=out, row_ids=[1, 0])
        np.testing.assert_array_equal(out[0], np.full(shape[1:], 2))
        assert not out[1:].any()


def test_ids_may_be_those_of_the_array_to_fill(store: KVStore) -> None:
    store.init("w", rows([1, 3, 4]))
    out = rows([4, 1], 9)
    store.row_sparse_pull("w", out=out, row_ids=out.indices)
    assert (out.indices.tolist(), out.values.tolist()) == ([1, 4], [[1, 1], [3, 3]])
    ids = np.array([1, 3])
    found = store.row_sparse_pull("w", row_ids=ids)
    ids[:] = 0
    assert found.indices.tolist() == [1, 3]


# -- other libraries ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_sparse_values_of_other_libraries_are_pushed(store: KVStore) -> None:
    torch, sparse = pytest.importorskip("torch"), pytest.importorskip("scipy.sparse")
    value = rows([1, 4]).to_dense()
    store.init(["t", "s"], [torch.tensor(value).to_sparse(), sparse.csr_matrix(value)])
    for key in ("t", "s"):
        assert store.info(key).stype == "row_sparse"
        both = [torch.tensor(value).to_sparse_csr(), sparse.csr_array(value)]
        store.push(key, both)
        np.testing.assert_array_equal(dense(store, key), 2 * value)


def test_sparse_arrays_of_other_libraries_are_not_filled(store: KVStore) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    store.init("w", rows([1]))
    for call in (
        lambda out: store.pull("w", out=out),
        lambda out: store.row_sparse_pull("w", out=out, row_ids=[1]),
    ):
        with pytest.raises(ArgumentTypeError, match=r"kvstore\.RowSparseArray"):
            call(sparse.csr_matrix(SHAPE, dtype="f4"))


# -- files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["momentum", "adam", "sgd"])
@pytest.mark.usefixtures("layout")
def test_a_checkpoint_brings_rows_and_states_back(
    store: KVStore, name: str, tmp_path: Path
) -> None:
    store.set_optimizer(OPTIMIZERS[name])
    store.init(["w", "d"], [rows([1, 2]), np.ones(SHAPE, "f4")])
    store.push(["w", "d"], [random_rows(1, 2), random_rows(1, 2)])
    store.save_checkpoint(tmp_path)
    again, other = create("local"), create("local")
    again.load_checkpoint(tmp_path)
    other.init(["d", "w"], [np.zeros(SHAPE, "f4"), rows([5], 9)])
    other.load_checkpoint(tmp_path)
    for loaded in (again, other):
        assert loaded.info("w").stype == "row_sparse"
        assert loaded.pull("w").indices.tolist() == store.pull("w").indices.tolist()
    for seed in (4, 5):
        for each in (store, again, other):
            each.push(["w", "d"], [random_rows(seed), random_rows(seed)])
    for key in ("w", "d"):
        assert dense(again, key).tobytes() == dense(store, key).tobytes()
        assert dense(other, key).tobytes() == dense(store, key).tobytes()


@pytest.mark.usefixtures("layout")
def test_states_alone_are_taken_over_for_the_rows_of_the_file(
    store: KVStore, tmp_path: Path
) -> None:
    store.set_optimizer(OPTIMIZERS["momentum"])
    store.init("w", rows([1, 2]))
    store.push("w", rows([2, 4]))
    store.save_optimizer_states(tmp_path / "states")
    again = create("local")
    again.set_optimizer(OPTIMIZERS["momentum"])
    again.init("w", store.pull("w"))
    again.load_optimizer_states(tmp_path / "states")
    for each in (store, again):
        each.push("w", rows([0, 2, 4]))
    assert dense(again).tobytes() == dense(store).tobytes()


def test_a_checkpoint_of_another_kind_of_key_is_refused(store: KVStore, tmp_path: Path) -> None:
    store.set_optimizer(OPTIMIZERS["sgd"])
    store.init("w", rows([1]))
    store.save_checkpoint(tmp_path)
    other = create("local")
    other.init("w", np.zeros(SHAPE, "f4"))
    with pytest.raises(CheckpointError, match=r"row-sparse .*dense in this store"):
        other.load_checkpoint(tmp_path)


def test_a_huge_table_is_saved_by_its_rows(store: KVStore, tmp_path: Path) -> None:
    value = RowSparseArray([2**62], np.ones((1, 2), "f4"), (2**63, 2))
    store.init(7, value)
    store.save_checkpoint(tmp_path)
    again = create("local")
    again.load_checkpoint(tmp_path)
    assert again.info(7).shape == (2**63, 2)
    assert again.pull(7).indices.tolist() == [2**62]


# -- Trainer ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["local", "device"])
def test_a_trainer_hands_sparse_gradients_of_pytorch_to_the_store(name: str) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Embedding(6, 2, sparse=True)
    before = net.weight.detach().clone()
    params, numbers = dict(net.named_parameters()), {"learning_rate": 0.5}
    trainer = kvstore.gluon.Trainer(params, "sgd", numbers, name, update_on_kvstore=True)
    net(torch.tensor([1, 1, 4])).sum().backward()
    trainer.step(2)
    moved = (before - net.weight.detach()).numpy()
    np.testing.assert_allclose(moved[:, 0], [0, 0.5, 0, 0, 0.25, 0], atol=1e-6)
