"""The rows of a table as they were before an update, for readers that are one update behind."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore import optimizer
from kvstore.arrays.cpu.sums import Workspace
from kvstore.arrays.keys import KeySpec
from kvstore.sparse import table as tables
from kvstore.sparse.sums import Contribution
from kvstore.sparse.table import RowsBefore, RowTable

ALL = np.arange(10)


@pytest.fixture(params=["direct", "indexed"])
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RowTable:
    """A table with the rows 2, 5 and 7."""
    if request.param == "indexed":
        monkeypatch.setattr(tables, "DIRECT_BYTES", 0)
    made = RowTable(KeySpec((10, 2), np.dtype(np.float32)))
    made.replace([rows(2, 5, 7)], Workspace())
    return made


def rows(*ids: int) -> Contribution:
    values = np.arange(1, 1 + 2 * len(ids), dtype=np.float32).reshape(len(ids), 2)
    return Contribution(np.array(ids), values)


def update(table: RowTable, lazy: bool, *ids: int) -> None:
    chosen = optimizer.create("sgd", learning_rate=0.5, momentum=0.9, lazy_update=lazy)
    table.set_optimizer(chosen)
    table.update([rows(*ids)], chosen, Workspace())


def assert_as_before(found: RowsBefore, ids: np.ndarray, values: np.ndarray) -> None:
    assert found.ids().tolist() == ids.tolist()
    assert found.read(ALL, np.full((10, 2), -1.0, np.float32)).tolist() == values.tolist()
    some = np.array([7, 0, 5])
    assert (found.read(some, np.empty((3, 2), np.float32)) == values[some]).all()
    assert found.read(ALL[:0], np.empty((0, 2), np.float32)).shape == (0, 2)


def test_an_update_of_some_rows_is_undone_for_a_reader(table: RowTable) -> None:
    update(table, True, 2, 7)
    ids, values = table.ids().copy(), table.read(ALL)
    found = RowsBefore(table, np.array([1, 5, 9]))
    update(table, True, 1, 5, 9)
    assert table.ids().tolist() == [1, 2, 5, 7, 9]
    assert not (table.read(ALL) == values).all()
    assert_as_before(found, ids, values)


@pytest.mark.parametrize("replaces", [False, True])
def test_an_update_of_all_rows_is_undone_for_a_reader(table: RowTable, replaces: bool) -> None:
    update(table, False, 2, 7)
    ids, values = table.ids().copy(), table.read(ALL)
    found = RowsBefore(table, None)
    if replaces:
        table.replace([rows(1, 5)], Workspace())
    else:
        update(table, False, 1, 5)
    assert not (table.read(ALL) == values).all()
    assert_as_before(found, ids, values)


def test_before_the_first_row_there_was_none(table: RowTable) -> None:
    table.begin_afresh()
    found = RowsBefore(table, None)
    table.replace([rows(3)], Workspace())
    assert_as_before(found, ALL[:0], np.zeros((10, 2), np.float32))


def test_an_update_without_rows_changes_nothing(table: RowTable) -> None:
    values = table.read(ALL)
    found = RowsBefore(table, ALL[:0])
    assert_as_before(found, table.ids(), values)


def test_absent_rows_are_those_that_nobody_has_pushed(table: RowTable) -> None:
    assert table.absent(np.array([0, 2, 6, 7])).tolist() == [0, 6]
    assert table.absent(ALL[:0]).tolist() == []
