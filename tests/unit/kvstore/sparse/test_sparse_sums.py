"""Sums of row-sparse contributions against sums of the dense arrays, to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import RowSparseArray
from kvstore.arrays.cpu.sums import sum_in_order
from kvstore.sparse.sums import Contribution, Sum, sum_repeated

Array = np.ndarray[Any, Any]


def in_order(ids: Array, values: Array) -> dict[int, Array]:
    """The rows of each id, added one after the other."""
    found: dict[int, Array] = {}
    for id_, row in zip(ids.tolist(), values, strict=True):
        found[id_] = found[id_] + row if id_ in found else row
    return found


@pytest.mark.parametrize("num_ids", [1, 3, 40, 1000])
@pytest.mark.parametrize("width", [1, 2, 7])
def test_rows_of_one_id_are_added_in_their_order(num_ids: int, width: int) -> None:
    random = np.random.default_rng(7)
    ids = random.integers(0, num_ids, 300)
    values = random.standard_normal((300, width)).astype("f4")
    found = sum_repeated(ids, values)
    expected = in_order(ids, values)
    assert found.ids.tolist() == sorted(expected)
    for id_, row in zip(found.ids.tolist(), found.values, strict=True):
        assert row.tobytes() == expected[id_].tobytes()


def test_the_largest_ids_are_told_apart() -> None:
    ids = np.array([2**63 - 1, 5, 2**62, 2**63 - 1, 2**63 - 2, 5, 0])
    found = sum_repeated(ids, np.arange(7, dtype="f4").reshape(7, 1))
    assert found.ids.tolist() == [0, 5, 2**62, 2**63 - 2, 2**63 - 1]
    assert found.values[:, 0].tolist() == [6, 6, 2, 4, 3]


def test_sums_of_float16_are_made_in_float32_and_rounded_once() -> None:
    values = np.full((100, 1), 1e-3, "f2")
    found = sum_repeated(np.zeros(100, np.int64), values)
    exact = np.float32(0)
    for value in values[:, 0]:
        exact += np.float32(value)
    assert found.values.dtype == np.float16
    assert found.values[0, 0] == np.float16(exact)


def test_ids_in_order_cost_no_copy() -> None:
    ids, values = np.array([1, 5]), np.ones((2, 2))
    found = sum_repeated(ids, values)
    assert found.ids is ids
    assert found.values is values


def some(draw: st.DrawFn, num_rows: int, width: int, dtype: str) -> RowSparseArray:
    ids = draw(st.lists(st.integers(0, num_rows - 1), max_size=8))
    numbers = st.sampled_from([0.0, -0.0, 1.5, -1.5, 3e-8, 1e8, -1e8])
    values = [[draw(numbers) for _ in range(width)] for _ in ids]
    with np.errstate(over="ignore"):
        array = np.array(values, dtype).reshape(len(ids), width)
    return RowSparseArray(ids, array, (num_rows, width))


@st.composite
def contributions(draw: st.DrawFn) -> list[RowSparseArray]:
    num_rows, width = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(["f2", "f4", "f8"]))
    return [some(draw, num_rows, width, dtype) for _ in range(draw(st.integers(1, 4)))]


@given(contributions(), st.integers(1, 4))
def test_a_sum_is_that_of_the_dense_arrays_to_the_last_bit(
    arrays: list[RowSparseArray], step: int
) -> None:
    total = Sum([Contribution(a.unique().indices, a.unique().values) for a in arrays])
    rows = np.full((len(total), total.width), 7, total.dtype)
    for start in range(0, len(total), step):
        with np.errstate(all="ignore"):
            total.rows(start, min(start + step, len(total)), rows[start : start + step])
    dense = [array.to_dense().reshape(-1) for array in arrays]
    expected = np.empty(dense[0].shape, total.dtype)
    sum_in_order(dense, expected)
    wanted = expected.reshape(arrays[0].shape)[total.ids]
    np.testing.assert_array_equal(rows.tobytes(), wanted.tobytes())
    touched = sorted({int(id_) for array in arrays for id_ in array.indices})
    assert total.ids.tolist() == touched
    assert total.whole().tobytes() == rows.tobytes()


def test_zeros_have_the_sign_that_the_dense_sum_gives_them() -> None:
    """-0.0 + -0.0 is -0.0; where a contribution lacks the row, it adds 0.0."""
    zeros = np.full((2, 1), -0.0)
    parts = [Contribution(np.array(ids), zeros) for ids in ([0, 1], [0, 2])]
    assert np.signbit(Sum(parts).whole()[:, 0]).tolist() == [True, False, False]
