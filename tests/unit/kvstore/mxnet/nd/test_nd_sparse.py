"""Row-sparse arrays as scripts for MXNet use them: what they are, arithmetic, and in stores."""

from __future__ import annotations

import json
import operator
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore import KVStore, RowSparseArray
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    KeyTypeError,
    NotSupportedError,
    ValueMismatchError,
)
from kvstore.mxnet import nd
from kvstore.mxnet.nd.sparse import RowSparseNDArray

REFERENCE = Path(__file__).parents[4] / "reference"
RECORDED = json.loads((REFERENCE / "arrays.json").read_text(encoding="utf-8"))["sparse"]
OPERANDS: Callable[[Any], dict[str, Any]] = runpy.run_path(str(REFERENCE / "record_arrays.py"))[
    "operands"
]
SHAPE = (4, 4)


def sparse(values: Any, dtype: str = "float32") -> RowSparseNDArray:
    made = nd.array(values, dtype=dtype).tostype("row_sparse")
    assert isinstance(made, RowSparseNDArray)
    return made


def check(array: Any, rows: list[int], values: Any) -> None:
    assert isinstance(array, RowSparseNDArray)
    assert array.indices.asnumpy().tolist() == rows
    np.testing.assert_array_equal(array.asnumpy(), values)


# -- arithmetic ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "left", "right", "stype", "values"), RECORDED)
def test_arithmetic_gives_the_values_and_storage_types_of_mxnet(
    name: str, left: str, right: str | None, stype: str, values: Any
) -> None:
    given = OPERANDS(mx)
    if right is None:
        made = getattr(nd, name)(given[left])
    else:
        made = getattr(operator, name)(given[left], given[right])
    assert made.stype == stype
    assert isinstance(made, RowSparseNDArray if stype == "row_sparse" else nd.NDArray)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made.asnumpy(), np.array(values, "f4"), rtol=1e-6)
    if name.startswith("i"):
        assert made is given[left]


def test_a_dense_array_changes_in_place_where_the_rows_are_and_nowhere_else() -> None:
    rows = RowSparseArray([3, 1, 3], np.array([[1, 1], [2, 2], [3, 3]], "f4"), (4, 2))
    for dense in (np.full((4, 2), np.float32(0.1)), nd.full((4, 2), 0.1)):
        before: Any = dense
        dense += rows
        assert dense is before
        tenth = np.float32(0.1)
        expected = [tenth, tenth + np.float32(2), tenth, tenth + np.float32(4)]
        np.testing.assert_array_equal(np.asarray(dense)[:, 1], np.array(expected))
    with pytest.raises(ValueError, match="broadcast"):
        before = np.ones((2, 2), "f4") + rows


def test_plain_row_sparse_arrays_compute_with_numpys_arrays() -> None:
    rows = RowSparseArray([2, 0, 2], np.ones((3, 2), "f4"), (3, 2))
    doubled = 2 * rows
    assert type(doubled) is RowSparseArray
    assert (doubled.ids.tolist(), doubled.values.tolist()) == ([0, 2], [[2, 2], [4, 4]])
    assert type(rows - doubled) is RowSparseArray
    assert type(rows + nd.ones((3, 2)).tostype("row_sparse")) is RowSparseNDArray
    total = rows + 1
    assert type(total) is np.ndarray
    assert total.tolist() == [[2, 2], [1, 1], [3, 3]]
    assert (np.float64(3) * rows).dtype == np.float32
    assert (rows == rows).all()
    assert len({rows, doubled, rows}) == 2
    assert np.add.reduce(rows, axis=0).tolist() == [3, 3]
    rows += rows
    assert (rows.ids.tolist(), rows.values.tolist()) == ([0, 2], [[2, 2], [4, 4]])
    np.sqrt(np.full((3, 2), 9.0), out=rows)
    assert rows.to_dense().tolist() == [[3, 3]] * 3
    target = np.zeros((3, 2), "f4")
    np.multiply(rows, 2, out=target)
    assert target.tolist() == [[6, 6]] * 3


def test_arrays_are_added_and_multiplied_as_dense_ones_are() -> None:
    one, other = sparse([[1, 0], [0, 0]]), sparse([[0, 0], [0, 2]])
    check(nd.add_n(one, other, one), [0, 1], [[2, 0], [0, 2]])
    check(nd.sparse.add_n(one), [0], [[1, 0], [0, 0]])
    assert nd.add_n(one, nd.ones((2, 2))).stype == "default"
    dense = nd.array([[1, 2], [3, 4]])
    for made in (nd.dot(one, dense), nd.sparse.dot(one, dense)):
        assert made.asnumpy().tolist() == [[1, 2], [0, 0]]
    with pytest.raises(ArgumentTypeError, match="expected an NDArray"):
        nd.add_n(one, [1.0])


# -- what they are ------------------------------------------------------------------------


def test_arrays_change_their_storage_type_and_keep_their_values() -> None:
    values = [[0, 0], [3, 4], [0, 0]]
    dense = nd.array(values)
    made = dense.tostype("row_sparse")
    check(made, [1], values)
    assert (made.data.asnumpy().tolist(), made.data.dtype) == ([[3, 4]], "float32")
    assert (made.indices.dtype, made.stype, made.shape, made.ndim) == (
        *("int64", "row_sparse", (3, 2), 2),
    )
    assert len(made) == 3
    assert repr(made) == "\n<RowSparseNDArray 3x2 @cpu(0)>"
    back = made.tostype("default")
    back += 1
    assert type(back) is nd.NDArray
    check(made.tostype("row_sparse"), [1], values)
    dense.tostype("default")[:] = 9
    assert dense.asnumpy().tolist() == values
    for array in (dense, made):
        with pytest.raises(NotSupportedError, match="nd does not support CSR arrays"):
            array.tostype("csr")
        with pytest.raises(
            ArgumentValueError, match="storage type must be 'row_sparse' or 'default'"
        ):
            array.tostype("sparse")


def test_new_arrays_take_a_storage_type() -> None:
    for make in (nd.zeros, nd.empty):
        check(make((3, 2), None, "float16", "row_sparse"), [], np.zeros((3, 2)))
        assert make((3, 2), stype="row_sparse", dtype="float16").dtype == np.float16
        assert make((3, 2), stype="default").stype == make((3, 2)).stype == "default"
    check(nd.ones((2, 1), stype="row_sparse"), [0, 1], [[1], [1]])
    check(nd.sparse.zeros("row_sparse", (2, 1)), [], [[0], [0]])
    check(nd.sparse.array(sparse([[0], [2]])), [1], [[0], [2]])
    check(nd.array(sparse([[0], [2]])), [1], [[0], [2]])
    with pytest.raises(ArgumentTypeError, match=r"needs a sparse array, got list; use nd\.array"):
        nd.sparse.array([1.0])


def test_ids_are_sorted_and_each_is_there_once() -> None:
    made = nd.sparse.row_sparse_array(([[1], [2], [3]], [2, 0, 2]), shape=(3, 1), ctx=mx.cpu(3))
    check(made, [0, 2], [[2], [0], [4]])
    assert made.context == made.ctx == mx.cpu(3)
    assert (2 * made).context == mx.cpu(3)


def test_arrays_are_copied_into_arrays_and_devices_of_any_kind() -> None:
    made = sparse([[0, 0], [3, 4]])
    dense = nd.ones((2, 2))
    assert made.copyto(dense) is dense
    assert dense.asnumpy().tolist() == [[0, 0], [3, 4]]
    other = nd.zeros((2, 2), stype="row_sparse")
    assert nd.array([[1, 1], [0, 0]]).copyto(other) is other
    check(other, [0], [[1, 1], [0, 0]])
    check(made.copyto(other), [1], [[0, 0], [3, 4]])
    there = made.copyto(mx.cpu(1))
    check(there, [1], [[0, 0], [3, 4]])
    assert (there.context, there.as_in_context(mx.cpu(1)) is there) == (mx.cpu(1), True)
    assert made.as_in_context(mx.cpu(2)).context == mx.cpu(2)
    there.data[:] = 7  # the memory of the array itself
    check(there, [1], [[0, 0], [7, 7]])
    check(made, [1], [[0, 0], [3, 4]])
    wide = made.astype("float64")
    assert (wide.dtype, made.astype("float32", copy=False) is made) == (np.float64, True)
    made.wait_to_read()
    for wrong in (nd.zeros((3, 2)), nd.zeros((3, 2), stype="row_sparse")):
        with pytest.raises(ValueMismatchError, match=r"shape \(2, 2\) into shape \(3, 2\)"):
            made.copyto(wrong)


def test_rows_are_retained_and_all_are_set_at_once() -> None:
    made = sparse([[1], [0], [3], [4]])
    check(made.retain(nd.array([3, 1, 3])), [3], [[0], [0], [0], [4]])
    check(nd.sparse.retain(made, [0, 2]), [0, 2], [[1], [0], [3], [0]])
    made[:] = sparse([[0], [5], [0], [0]])
    check(made, [1], [[0], [5], [0], [0]])
    made[:] = np.array([[6], [0], [0], [0]])
    check(made[:], [0], [[6], [0], [0], [0]])
    made[:] = 2
    check(made, [0, 1, 2, 3], [[2]] * 4)
    with pytest.raises(NotSupportedError, match=r"the only index of a row-sparse array is \[:\]"):
        made[0]
    with pytest.raises(ArgumentValueError, match="row id 4 is out of range"):
        made.retain([4])
    with pytest.raises(ArgumentTypeError, match="retain needs a RowSparseNDArray, got NDArray"):
        nd.sparse.retain(nd.zeros(3), [0])  # type: ignore[arg-type]


# -- in stores, in the spirit of MXNet's own tests of its store ------------------------------


@pytest.fixture(params=["local", "device"])
def store(request: pytest.FixtureRequest) -> KVStore:
    return mx.kv.create(request.param)


KEYS = {"str": ("a", ["b", "c", "d"]), "int": (3, [5, 7, 11])}
BOTH_KEYS = pytest.mark.parametrize("kind", KEYS)
STYPES = pytest.mark.parametrize("stype", ["default", "row_sparse"])


def filled(store: KVStore, kind: str, stype: str = "default") -> tuple[Any, list[Any]]:
    one, several = KEYS[kind]
    store.init(one, nd.zeros(SHAPE, stype=stype))
    store.init(several, [nd.zeros(SHAPE, stype=stype)] * len(several))
    return one, several


@BOTH_KEYS
@STYPES
def test_rows_of_several_devices_are_added_into_dense_keys(
    store: KVStore, kind: str, stype: str
) -> None:
    one, several = filled(store, kind)
    devices = [mx.Context("cpu", number) for number in range(4)]
    store.push(one, [nd.ones(SHAPE, device).tostype(stype) for device in devices])
    store.push(several, [[nd.ones(SHAPE, device).tostype(stype) * 2 for device in devices]] * 3)
    outs = [nd.empty(SHAPE, device) for device in devices]
    for key, expected in ((one, 4), *((key, 8) for key in several)):
        store.pull(key, out=outs)
        for out in outs:
            assert (out.asnumpy() == expected).all()


@BOTH_KEYS
@STYPES
@pytest.mark.parametrize("stored", ["default", "row_sparse"])
def test_an_updater_adds_what_is_pushed_to_what_is_stored(
    store: KVStore, kind: str, stype: str, stored: str
) -> None:
    one, several = filled(store, kind, stored)

    def add(key: Any, received: Any, local: Any) -> None:
        assert isinstance(key, str if kind == "str" else int)
        local += received

    store._set_updater(add)
    devices = [mx.Context("cpu", number) for number in range(4)]
    pushed = np.arange(16, dtype="f4").reshape(SHAPE) * [[0], [1], [0], [1]]
    for _ in range(3):
        store.push(one, [nd.array(pushed, device).tostype(stype) for device in devices])
        store.push(several, [[nd.array(pushed, device).tostype(stype) for device in devices]] * 3)
    out = nd.empty(SHAPE)
    for key in (one, *several):
        store.pull(key, out=out)
        np.testing.assert_array_equal(out.asnumpy(), 12 * pushed)


@pytest.mark.parametrize("by_ids", [True, False])
def test_sums_of_rows_come_back_as_rows(store: KVStore, by_ids: bool) -> None:
    _, several = filled(store, "str", "row_sparse")
    rng = np.random.default_rng(2)
    dense = [rng.random(SHAPE, np.float32) * [[0], [1], [1], [0]] for _ in range(4)]
    arrays = [sparse(each).copyto(mx.cpu(device)) for device, each in enumerate(dense)]
    expected = sum(each.asnumpy() for each in arrays)
    store.push(several, [arrays] * len(several))
    for key in several:
        if by_ids:
            store.row_sparse_pull(key, out=arrays, row_ids=nd.arange(SHAPE[0]))
        else:
            store.pull(key, out=arrays, ignore_sparse=False)
        for array in arrays:
            check(array, [0, 1, 2, 3] if by_ids else [1, 2], expected)


def test_rows_are_pulled_by_ids_in_any_form_and_others_are_left(store: KVStore) -> None:
    store.init("e", nd.ones(SHAPE).tostype("row_sparse"))
    outs = [nd.zeros(SHAPE).tostype("row_sparse") for _ in range(2)]
    ids = nd.array([3, 0, 3, 0]).reshape((4 / 2, 2))
    store.row_sparse_pull("e", out=outs, row_ids=[ids, nd.array([])])
    check(outs[0], [0, 3], [[1] * 4, [0] * 4, [0] * 4, [1] * 4])
    check(outs[1], [], np.zeros(SHAPE))
    kept = nd.full(SHAPE, 2).tostype("row_sparse")
    with pytest.warns(UserWarning, match="pull left the RowSparseArray"):
        store.pull("e", out=kept)
    check(kept, [0, 1, 2, 3], np.full(SHAPE, 2))
    with pytest.raises(mx.MXNetError):
        store.row_sparse_pull("e", out=nd.ones(SHAPE), row_ids=nd.array([1]))
    with pytest.raises(KeyTypeError):
        store.row_sparse_pull(3, kept, row_ids=nd.array([1]))
