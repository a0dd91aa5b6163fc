"""Random calls on row-sparse and dense keys, and the dictionary of rows that they should fill.

All numbers are small multiples of powers of two in float64, so that every sum is exact and the
dictionary need not know an order. Shared by the tests of stores in one process and of clusters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from kvstore import KVStore, RowSparseArray, optimizer
from kvstore.errors import DuplicateKeyError, UnknownKeyError

NUM_ROWS, WIDTH = 7, 2
SHAPE = (NUM_ROWS, WIDTH)
ANY_ROWS = RowSparseArray([1], np.full((1, WIDTH), 9.0), SHAPE)
"""What the workers pass to ``init`` that do not decide."""
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

    def __init__(self, run: Callable[[Callable[[KVStore], None]], object]) -> None:
        """``run(script)`` calls ``script(kv)`` on every worker of the store."""
        self.run = run
        self.models: dict[str, Model] = {}
        self.is_lazy: bool | None = None

    def call(self, name: str, key: str, given: Any) -> None:
        """One call, on every worker; what a worker reads is compared."""
        if key not in self.models and name not in ("init", "optimizer"):
            self.run(lambda kv: _refused(UnknownKeyError, lambda: kv.pull(key)))
        else:
            getattr(self, name)(key, given)

    def init(self, key: str, value: Any) -> None:
        if key in self.models:
            self.run(lambda kv: _refused(DuplicateKeyError, lambda: kv.init(key, value)))
            return
        other = np.ones(SHAPE) if isinstance(value, np.ndarray) else ANY_ROWS
        self.run(lambda kv: kv.init(key, other if kv.rank else value))
        self.models[key] = Model(value)

    def push(self, key: str, values: list[Any]) -> None:
        def script(kv: KVStore) -> None:
            mine = values[kv.rank :: kv.num_workers] or [RowSparseArray.zeros(SHAPE, "f8")]
            kv.push(key, mine if len(mine) > 1 else mine[0])

        self.run(script)
        self.models[key].push(values, self.is_lazy)

    def pull(self, key: str, into_sparse: bool) -> None:
        expected = self.models[key].read(list(range(NUM_ROWS)))

        def script(kv: KVStore) -> None:
            if into_sparse:
                out = RowSparseArray.zeros(SHAPE, "f8")
                kv.pull(key, out=out, ignore_sparse=False)
                np.testing.assert_array_equal(out.to_dense(), expected)
            else:
                dense = np.full(SHAPE, 77.0)
                kv.pull(key, out=dense)
                np.testing.assert_array_equal(dense, expected)

        self.run(script)

    def rows(self, key: str, id_sets: list[list[int]]) -> None:
        model = self.models[key]
        ids = [np.array(one, np.int64) for one in id_sets]

        def script(kv: KVStore) -> None:
            outs = [RowSparseArray.zeros(SHAPE, "f8") for _ in id_sets]
            kv.row_sparse_pull(key, out=outs, row_ids=ids)
            for out, one in zip(outs, id_sets, strict=True):
                assert out.indices.tolist() == sorted(set(one))
                np.testing.assert_array_equal(out.values, model.read(sorted(set(one))))
            dense = np.full((len(id_sets[0]), WIDTH), 77.0)
            kv.row_sparse_pull(key, out=dense, row_ids=ids[0])
            np.testing.assert_array_equal(dense, model.read(id_sets[0]))

        self.run(script)

    def optimizer(self, key: str, is_lazy: bool) -> None:
        numbers = {"learning_rate": RATE, "momentum": MOMENTUM, "lazy_update": is_lazy}
        self.run(lambda kv: kv.set_optimizer(optimizer.create("sgd", **numbers)))
        self.is_lazy = is_lazy

    def delete(self, key: str, _: None) -> None:
        self.run(lambda kv: kv.delete(key))
        del self.models[key]


def _refused(error: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(error):
        call()
