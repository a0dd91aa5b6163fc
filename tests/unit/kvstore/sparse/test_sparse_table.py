"""The rows of a key, direct and by index: the same to whoever asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstore import optimizer
from kvstore.arrays.cpu.sums import Flat, Workspace
from kvstore.arrays.keys import KeySpec
from kvstore.errors import NotSupportedError
from kvstore.optimizer.base import Optimizer
from kvstore.sparse import table
from kvstore.sparse.sums import Contribution
from kvstore.sparse.table import RowTable
from kvstore.sparse.update import keeps_zero

Array = np.ndarray[Any, Any]
FLOAT = np.dtype("f4")
SPEC = KeySpec((50, 3), FLOAT)


@dataclasses.dataclass(frozen=True)
class Restless(Optimizer):
    """Moves every weight by what its state says, which begins at the weight, and 1 more."""

    def create_state(self, weight: Flat) -> tuple[Flat, ...]:
        return (weight.astype(FLOAT) + 1,)

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        np.add(weight, state[0], out=weight)
        np.add(state[0], grad, out=state[0])


@pytest.fixture(params=["direct", "by index"])
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RowTable:
    if request.param == "by index":
        monkeypatch.setattr(table, "DIRECT_BYTES", 0)
    return RowTable(SPEC)


def some(seed: int, num_ids: int = 10) -> Contribution:
    random = np.random.default_rng(seed)
    ids = np.sort(random.choice(SPEC.shape[0], num_ids, replace=False))
    return Contribution(ids, random.standard_normal((num_ids, 3)).astype(FLOAT))


def dense(value: Contribution) -> Array:
    out = np.zeros(SPEC.shape, FLOAT)
    out[value.ids] = value.values
    return out


def test_a_table_begins_with_no_rows(rows: RowTable) -> None:
    assert (len(rows), rows.nbytes, rows.ids().tolist()) == (0, 0, [])
    np.testing.assert_array_equal(rows.read(np.array([4, 4, 1])), np.zeros((3, 3)))
    np.testing.assert_array_equal(rows.dense(), np.zeros(SPEC.shape))


def test_rows_are_read_in_the_order_that_is_asked_for(rows: RowTable) -> None:
    value = some(1)
    rows.replace([value], Workspace())
    ids = np.array([49, 0, *value.ids[::-1], 0, 49])
    np.testing.assert_array_equal(rows.read(ids), dense(value)[ids])
    out = np.empty((len(ids), 3), FLOAT)
    assert rows.read(ids, out) is out
    np.testing.assert_array_equal(out, dense(value)[ids])
    assert rows.ids().tolist() == value.ids.tolist()
    np.testing.assert_array_equal(rows.dense(), dense(value))


def test_a_replaced_value_leaves_nothing_behind(rows: RowTable) -> None:
    for seed in range(4):
        rows.replace([some(seed), some(seed + 20)], Workspace())
    np.testing.assert_array_equal(rows.dense(), dense(some(3)) + dense(some(23)))
    assert len(rows) == len({*some(3).ids.tolist(), *some(23).ids.tolist()})
    rows.begin_afresh()
    assert len(rows) == 0
    np.testing.assert_array_equal(rows.dense(), np.zeros(SPEC.shape))


def test_all_rows_at_once_make_a_direct_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "DIRECT_BYTES", 0)
    rows = RowTable(SPEC, is_whole=True)
    value = some(1, SPEC.shape[0])
    rows.replace([value], Workspace())
    assert rows.dense() is rows.values
    assert rows.ids().tolist() == list(range(SPEC.shape[0]))
    rows.replace([some(2)], Workspace())
    np.testing.assert_array_equal(rows.dense(), dense(some(2)))


def test_states_grow_with_the_rows_and_begin_as_the_optimizer_says(rows: RowTable) -> None:
    chosen = Restless(lazy_update=True)
    rows.set_optimizer(chosen)
    weight, state = np.zeros(SPEC.shape, FLOAT), np.ones(SPEC.shape, FLOAT)
    for seed in range(6):
        value = some(seed)
        rows.update([value], chosen, Workspace())
        weight[value.ids] += state[value.ids]
        state[value.ids] += value.values
    ids = rows.ids()
    np.testing.assert_array_equal(rows.dense(), weight)
    np.testing.assert_array_equal(rows.read_states(ids)[0], state[ids])


def test_an_optimizer_that_moves_rows_of_zero_needs_them_all(rows: RowTable) -> None:
    chosen = Restless(lazy_update=False)
    rows.set_optimizer(chosen)
    assert not keeps_zero(chosen, FLOAT, 1)
    if rows.values.size:
        rows.update([some(1)], chosen, Workspace())
        np.testing.assert_array_equal(rows.dense(), np.ones(SPEC.shape))
        assert len(rows) == SPEC.shape[0]
    else:
        with pytest.raises(NotSupportedError, match="lazy_update=True"):
            rows.update([some(1)], chosen, Workspace())
        assert len(rows) == 0


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "ftrl", "rmsprop", "signum", "lamb"])
def test_rows_that_were_never_pushed_stay_zero_under_known_optimizers(name: str) -> None:
    for count in (1, 100):
        assert keeps_zero(optimizer.create(name), FLOAT, count)


def test_a_division_of_zero_by_zero_is_not_left_out() -> None:
    assert not keeps_zero(optimizer.create("adagrad", eps=0.0), FLOAT, 1)


def test_an_update_in_many_blocks_is_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore.sparse import update

    found = []
    for elements in (65536, 7):
        monkeypatch.setattr(update, "BLOCK_ELEMENTS", elements)
        for is_lazy in (True, False):
            rows = RowTable(SPEC)
            chosen = optimizer.create("adam", lazy_update=is_lazy)
            rows.set_optimizer(chosen)
            for seed in range(4):
                rows.update([some(seed), some(seed + 9)], chosen, Workspace())
            found.append(rows.dense().tobytes())
    assert found[:2] == found[2:]
    assert found[0] != found[1]
