"""Random sequences of calls on row-sparse and dense keys against a plain dictionary of rows.

All numbers are small multiples of powers of two in float64, so that every sum is exact and the
dictionary need not know an order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import KVStore, RowSparseArray, create, optimizer
from kvstore.errors import DuplicateKeyError, UnknownKeyError
from kvstore.sparse import table

NUM_ROWS, WIDTH = 7, 2
SHAPE = (NUM_ROWS, WIDTH)
KEYS = ["a", "b"]
RATE, MOMENTUM = 0.5, 0.5


class Model:
    """What a store holds of one key: numbers by row and column."""

    def __init__(self, value: RowSparseArray | np.ndarray[Any, Any]) -> None:
        self.rows = summed([value])
        self.momentum: dict[int, np.ndarray[Any, Any]] = defaultdict(lambda: np.zeros(WIDTH))

    def push(self, values: list[Any], is_lazy: bool | None) -> None:
        """``is_lazy`` None: without an optimizer."""
        total = summed(values)
        if is_lazy is None:
            self.rows = total
            return
        for row in sorted(total) if is_lazy else range(NUM_ROWS):
            gradient = total.get(row, np.zeros(WIDTH))
            self.momentum[row] = MOMENTUM * self.momentum[row] - RATE * gradient
            self.rows[row] = self.rows.get(row, np.zeros(WIDTH)) + self.momentum[row]

    def read(self, ids: list[int]) -> np.ndarray[Any, Any]:
        found = [self.rows.get(row, np.zeros(WIDTH)) for row in ids]
        return np.array(found).reshape(len(ids), WIDTH)


def summed(values: list[Any]) -> dict[int, np.ndarray[Any, Any]]:
    total: dict[int, np.ndarray[Any, Any]] = {}
    for value in values:
        is_dense = isinstance(value, np.ndarray)
        ids = range(NUM_ROWS) if is_dense else value.indices.tolist()
        for row, numbers in zip(ids, value if is_dense else value.values, strict=True):
            total[row] = total.get(row, np.zeros(WIDTH)) + numbers
    return total


NUMBERS = st.integers(-8, 8)
IDS = st.lists(st.integers(0, NUM_ROWS - 1), max_size=6)


@st.composite
def sparse(draw: st.DrawFn) -> RowSparseArray:
    ids = draw(IDS)
    values = [[draw(NUMBERS) for _ in range(WIDTH)] for _ in ids]
    return RowSparseArray(ids, np.array(values, "f8").reshape(len(ids), WIDTH), SHAPE)


DENSE = st.lists(NUMBERS, min_size=NUM_ROWS * WIDTH, max_size=NUM_ROWS * WIDTH).map(
    lambda numbers: np.array(numbers, "f8").reshape(SHAPE)
)
VALUES = st.one_of(sparse(), sparse(), DENSE)
KEY = st.sampled_from(KEYS)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("init"), KEY, VALUES),
        st.tuples(st.just("push"), KEY, st.lists(VALUES, min_size=1, max_size=3)),
        st.tuples(st.just("push"), KEY, st.lists(VALUES, min_size=1, max_size=3)),
        st.tuples(st.just("pull"), KEY, st.booleans()),
        st.tuples(st.just("rows"), KEY, st.lists(IDS, min_size=1, max_size=3)),
        st.tuples(st.just("optimizer"), KEY, st.booleans()),
        st.tuples(st.just("delete"), KEY, st.none()),
    ),
    min_size=4,
    max_size=14,
)


class Both:
    """A store and what it should hold."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.models: dict[str, Model] = {}
        self.is_lazy: bool | None = None

    def call(self, name: str, key: str, given: Any) -> None:
        if key not in self.models and name not in ("init", "optimizer"):
            with pytest.raises(UnknownKeyError):
                self.store.pull(key)
        else:
            getattr(self, name)(key, given)

    def init(self, key: str, value: Any) -> None:
        if key in self.models:
            with pytest.raises(DuplicateKeyError):
                self.store.init(key, value)
            return
        self.store.init(key, value)
        self.models[key] = Model(value)

    def push(self, key: str, values: list[Any]) -> None:
        self.store.push(key, values if len(values) > 1 else values[0])
        self.models[key].push(values, self.is_lazy)

    def pull(self, key: str, into_sparse: bool) -> None:
        expected = self.models[key].read(list(range(NUM_ROWS)))
        if into_sparse:
            out = RowSparseArray.zeros(SHAPE, "f8")
            self.store.pull(key, out=out, ignore_sparse=False)
            np.testing.assert_array_equal(out.to_dense(), expected)
        else:
            dense = np.full(SHAPE, 77.0)
            self.store.pull(key, out=dense)
            np.testing.assert_array_equal(dense, expected)

    def rows(self, key: str, id_sets: list[list[int]]) -> None:
        outs = [RowSparseArray.zeros(SHAPE, "f8") for _ in id_sets]
        ids = [np.array(one, np.int64) for one in id_sets]
        self.store.row_sparse_pull(key, out=outs, row_ids=ids)
        for out, one in zip(outs, id_sets, strict=True):
            assert out.indices.tolist() == sorted(set(one))
            np.testing.assert_array_equal(out.values, self.models[key].read(sorted(set(one))))
        dense = np.full((len(id_sets[0]), WIDTH), 77.0)
        self.store.row_sparse_pull(key, out=dense, row_ids=ids[0])
        np.testing.assert_array_equal(dense, self.models[key].read(id_sets[0]))

    def optimizer(self, key: str, is_lazy: bool) -> None:
        numbers = {"learning_rate": RATE, "momentum": MOMENTUM, "lazy_update": is_lazy}
        self.store.set_optimizer(optimizer.create("sgd", **numbers))
        self.is_lazy = is_lazy

    def delete(self, key: str, _: None) -> None:
        self.store.delete(key)
        del self.models[key]


@contextmanager
def direct_bytes(size: int) -> Iterator[None]:
    before, table.DIRECT_BYTES = table.DIRECT_BYTES, size
    try:
        yield
    finally:
        table.DIRECT_BYTES = before


@given(CALLS, st.sampled_from(["local", "device"]), st.sampled_from([0, table.DIRECT_BYTES]))
@settings(max_examples=300)
def test_a_store_holds_what_the_dictionary_does(calls: list[Any], name: str, size: int) -> None:
    with direct_bytes(size), create(name) as store:
        both = Both(store)
        for call in calls:
            both.call(*call)
        for key in both.models:
            both.pull(key, False)
            both.rows(key, [list(range(NUM_ROWS))])
