"""Compiled kernels on rows of tables give NumPy's bits, and write nothing that does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sets import NATIVE, bits, computing_with

from kvstore import optimizer
from kvstore.arrays.cpu import kernels
from kvstore.arrays.cpu.sums import BLOCK_ELEMENTS, Workspace
from kvstore.arrays.dtypes import bfloat16
from kvstore.arrays.keys import KeySpec
from kvstore.optimizer import Optimizer
from kvstore.sparse.sums import Contribution, Sum
from kvstore.sparse.table import RowTable
from kvstore.sparse.update import update_all

Array = np.ndarray[Any, Any]

NUM_ROWS = 40
OPTIMIZERS = [
    optimizer.SGD(learning_rate=0.1, wd=0.01, rescale_grad=0.5, clip_gradient=2.0),
    optimizer.SGD(learning_rate=0.1, momentum=0.9),
    optimizer.TorchSGD(learning_rate=0.1, momentum=0.9, wd=0.01),
    optimizer.Adam(learning_rate=0.1),
]
DTYPES = {"f2": np.dtype("f2"), "f4": np.dtype("f4"), "f8": np.dtype("f8")}


def contributions(seed: int, num_rows: int, width: int, dtype: Any) -> list[Contribution]:
    """Three, of which some rows are in one, in two and in all; zeros of both signs among them."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(3):
        ids = np.flatnonzero(random.random(num_rows) < 0.5)
        values = random.standard_normal((len(ids), width))
        values[random.random(values.shape) < 0.3] = -0.0
        found.append(Contribution(ids, values.astype(dtype)))
    return found


def updated(native: str, rounds: list[list[Contribution]], by: Optimizer, spec: KeySpec) -> bytes:
    """Values and states of a table after these rounds."""
    table = RowTable(spec)
    with computing_with(native):
        table.set_optimizer(by)
        for of_round in rounds:
            table.update(of_round, by, Workspace())
    return b"".join(map(bits, (table.values, *table.states)))


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize("by", OPTIMIZERS, ids=["sgd", "momentum", "torchsgd", "adam"])
@pytest.mark.parametrize("name", [*DTYPES, "bfloat16"])
@given(width=st.integers(1, 9), seed=st.integers(0, 99))
@settings(max_examples=10)  # for each optimizer, dtype and set of kernels
def test_updates_of_rows_have_the_bits_of_numpys(
    native: str, by: Optimizer, name: str, width: int, seed: int
) -> None:
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    dtype = bfloat16() if name == "bfloat16" else DTYPES[name]
    rounds = [contributions(seed + index, NUM_ROWS, width, dtype) for index in range(2)]
    spec = KeySpec((NUM_ROWS, width), dtype)
    assert updated(native, rounds, by, spec) == updated("numpy", rounds, by, spec)


@pytest.mark.parametrize("native", ["numpy", *NATIVE])
def test_an_update_of_many_rows_on_several_threads_is_that_of_a_dense_table(native: str) -> None:
    spec = KeySpec((40_000, 64), np.dtype("f4"))
    parts = contributions(3, *spec.shape, "f4")
    total = np.zeros(spec.shape, "f4")
    for ids, values in parts:
        total[ids] += values
    table = RowTable(spec)
    with computing_with(native):
        by = optimizer.SGD(learning_rate=0.5)
        table.set_optimizer(by)
        table.update(parts, by, Workspace())
    assert np.array_equal(table.values, -(np.float32(0.5) * total))


@pytest.mark.parametrize("native", NATIVE)
@given(st.lists(st.lists(st.integers(0, 30), unique=True).map(sorted), min_size=1, max_size=4))
def test_sorted_ids_are_merged_with_the_place_of_each(native: str, lists: list[list[int]]) -> None:
    several = [np.array(each, np.int64) for each in lists]
    with computing_with(native):
        found = kernels.merge_ids(several)
    assert found is not None
    merged, places = found
    assert merged.tolist() == sorted({number for each in lists for number in each})
    for ids, at in zip(several, places, strict=True):
        assert np.array_equal(merged[at], ids)


@pytest.mark.parametrize("native", NATIVE)
def test_rows_are_taken_in_any_order_and_those_out_of_range_are_refused(native: str) -> None:
    table = np.arange(12.0).reshape(4, 3)
    out = np.full((3, 3), -1.0)
    with computing_with(native):
        assert kernels.take_rows(table, np.array([3, 0, 3]), out)
        assert np.array_equal(out, table[[3, 0, 3]])
        for place in (4, -1):
            with pytest.raises(ValueError, match="do not fit the table"):
                kernels.take_rows(table, np.array([0, 1, place]), out)
        assert not kernels.take_rows(table[:, ::2], np.array([0]), np.empty((1, 2)))
    assert np.array_equal(out, table[[3, 0, 3]])


@pytest.mark.parametrize("native", NATIVE)
@pytest.mark.parametrize(
    ("places", "at", "span", "sentence"),
    [
        ([0, 4], [0, 1], (0, 2), "no such row"),
        ([0, -1], [0, 1], (0, 2), "no such row"),
        ([0, 1], [1, 0], (0, 2), "sorted ones of the sum"),
        ([0, 1], [0, 2], (0, 2), "sorted ones of the sum"),
        ([0, 1], [0], (0, 2), "a row of values for each place"),
        ([0, 1], [0, 1], (0, 3), "a span does not fit"),
        ([0, 1], [0, 1], (-1, 2), "a span does not fit"),
    ],
)
def test_updates_that_do_not_fit_are_refused_and_nothing_is_written(
    native: str, places: list[int], at: list[int], span: tuple[int, int], sentence: str
) -> None:
    weight, values = np.zeros((4, 2)), np.ones((2, 2))
    numbers = np.array(places), [values], [np.array(at)]
    by = optimizer.SGD(learning_rate=1.0)
    with computing_with(native), pytest.raises(ValueError, match=sentence):
        kernels.update_rows(weight, [], *numbers, by, 1, span)
    assert not weight.any()


def test_an_update_of_all_rows_takes_places_in_any_order() -> None:
    weight = np.zeros((4, BLOCK_ELEMENTS), np.float32)  # each row is a block of its own
    sums = np.array([[1], [2], [3]], np.float32).repeat(BLOCK_ELEMENTS, axis=1)
    total = Sum([Contribution(np.array([10, 20, 30]), sums)])
    sgd = optimizer.create("sgd", learning_rate=1.0)
    update_all(weight, [], np.array([3, 0, 1]), total, sgd, 1, Workspace())
    assert weight[:, 0].tolist() == weight[:, -1].tolist() == [-2, -3, 0, -1]
