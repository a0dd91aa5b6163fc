"""Random sequences of calls on growing tables against plain dictionaries (``table_model.py``)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import DIM, OPTIMIZER, Model, settings_of

from kvstore import create
from kvstore.checkpoint.tables import ShareRows, TableFiles
from kvstore.sparse.sums import Contribution
from kvstore.sparse.tables.ids import shares_of
from kvstore.sparse.tables.shard import TableShare
from kvstore.stores.tables import Table

POOL = [0, 1, -1, 2**63 - 1, -(2**63), 7, 8, 9, 10, 2**53 + 1, 2**53, -12]
ID = st.sampled_from(POOL)
IDS = st.lists(ID, max_size=8)
GRADIENT = st.lists(st.integers(-4, 4), min_size=DIM, max_size=DIM)


@st.composite
def contribution(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    ids = draw(IDS)
    return ids, [draw(GRADIENT) for _ in ids]


PULL = st.tuples(st.just("pull"), IDS)
PUSH = st.tuples(st.just("push"), st.lists(contribution(), min_size=1, max_size=3))
CALLS = st.lists(st.one_of(PULL, PULL, PUSH, PUSH, st.tuples(st.just("look"), IDS)), max_size=14)
OPTIONS = st.builds(
    settings_of,
    capacity=st.none() | st.integers(5, 12),
    ttl=st.none() | st.integers(1, 3),
    admit_after=st.sampled_from([1, 1, 2, 3]),
)


class Both:
    """The shares of a table, and what each of them should hold."""

    def __init__(self, options: Any, num_shares: int) -> None:
        self.shares = [TableShare(options, OPTIMIZER, n, num_shares) for n in range(num_shares)]
        self.models = []
        for share in self.shares:
            num_waiting = options.num_waiting(share.capacity)
            self.models.append(Model(options, share.capacity, num_waiting))

    def pull(self, ids: list[int], *, touch: bool = True) -> None:
        flat = np.array(ids, np.int64)
        for number, (share, model) in enumerate(zip(self.shares, self.models, strict=True)):
            mine = flat[shares_of(flat, len(self.shares)) == number]
            out = np.full((len(mine), DIM), 77.0)
            share.pull(mine, out, touches=touch)
            expected = model.pull(mine.tolist(), touch=touch)
            np.testing.assert_array_equal(out, np.array(expected).reshape(-1, DIM))

    def look(self, ids: list[int]) -> None:
        self.pull(ids, touch=False)

    def push(self, contributions: list[tuple[list[int], list[list[int]]]]) -> None:
        for number, (share, model) in enumerate(zip(self.shares, self.models, strict=True)):
            mine, plain = [], []
            for ids, gradients in contributions:
                flat = np.array(ids, np.int64)
                is_mine = shares_of(flat, len(self.shares)) == number
                rows = np.array(gradients, "f8").reshape(-1, DIM)[is_mine]
                mine.append(Contribution(flat[is_mine], rows))
                plain.append((flat[is_mine].tolist(), rows.tolist()))
            share.push(mine)
            model.push(plain)

    def check(self) -> None:
        for share, model in zip(self.shares, self.models, strict=True):
            assert held(share) == model.held()
            found = share.statistics()._asdict()
            assert {name: found[name] for name in model.counts} == model.counts
            assert found["waiting"] == len(model.waiting)
            limit = found["limit_bytes"]
            assert limit is None or found["nbytes"] <= limit


def held(share: TableShare) -> dict[int, tuple[list[float], list[float]]]:
    ids, places = share.held()
    values, momentum = share.rows.values[places].tolist(), share.rows.states[0][places].tolist()
    return dict(zip(ids.tolist(), zip(values, momentum, strict=True), strict=True))


@given(CALLS, OPTIONS, st.sampled_from([1, 2, 5]))
@settings(max_examples=120)
def test_shares_hold_what_the_dictionaries_do(
    calls: list[tuple[str, Any]], options: Any, num_shares: int
) -> None:
    both = Both(options, num_shares)
    for name, given_ in calls:
        getattr(both, name)(given_)
    both.check()


@given(CALLS, st.sampled_from([None, 2]), st.sampled_from([1, 2]))
@settings(max_examples=40)
def test_rows_are_the_same_whatever_the_number_of_shares(
    calls: list[tuple[str, Any]], ttl: int | None, admit_after: int
) -> None:
    tables = [Both(settings_of(None, ttl, admit_after), number) for number in (1, 2, 5)]
    for name, given_ in calls:
        for table in tables:
            getattr(table, name)(given_)
    merged = []
    for table in tables:
        table.check()
        merged.append({id_: row for share in table.shares for id_, row in held(share).items()})
    assert merged[0] == merged[1] == merged[2]


@given(CALLS, CALLS, OPTIONS)
@settings(max_examples=40)
def test_a_share_that_loads_an_export_goes_on_as_the_one_that_wrote_it(
    before: list[tuple[str, Any]], after: list[tuple[str, Any]], options: Any
) -> None:
    both = Both(options, 1)
    for name, given_ in before:
        getattr(both, name)(given_)
    other = Both(options, 1)
    other.pull(POOL)
    with tempfile.TemporaryDirectory() as directory:
        mine, others = (TableFiles(ShareRows(each.shares[0]), options) for each in (both, other))
        mine.export(Path(directory) / "all", OPTIMIZER, None)
        others.load(Path(directory) / "all", OPTIMIZER)
    both.models[0].expire()
    other.models[0].load(both.models[0])
    for name, given_ in after:
        getattr(other, name)(given_)
    assert held(other.shares[0]) == other.models[0].held()


@given(st.lists(CALLS, min_size=1, max_size=4), OPTIONS)
@settings(max_examples=40)
def test_a_table_that_follows_by_deltas_holds_the_same_rows(
    stretches: list[list[tuple[str, Any]]], options: Any
) -> None:
    with tempfile.TemporaryDirectory() as directory, create("local") as store:
        leader, follower = (table_of(store, name, options) for name in ("leader", "follower"))
        marks = [leader.export(Path(directory) / "0")]
        follower.load(Path(directory) / "0")
        for number, calls in enumerate(stretches, 1):
            for name, given_ in calls:
                if name == "push":
                    for ids, gradients in given_:
                        leader.push(ids, np.array(gradients, "f8").reshape(-1, DIM))
                else:
                    leader.pull(ids_of(given_), touch=name == "pull")
            path = Path(directory) / str(number)
            # From the last mark, or from the one before: both must do.
            marks.append(leader.export_delta(marks[-1 - number % 2 * (number > 1)], path))
            follower.load(path)
            assert contents(follower) == contents(leader)
            assert follower.statistics().pushes == leader.statistics().pushes


def ids_of(ids: list[int]) -> np.ndarray[Any, Any]:
    return np.array(ids, np.int64)


def table_of(store: Any, name: str, options: Any) -> Table:
    table: Table = store.create_table(
        name,
        DIM,
        options.init,
        OPTIMIZER,
        options.capacity,
        options.ttl,
        options.admit_after,
        dtype="f8",
    )
    return table


def contents(table: Table) -> dict[int, list[float]]:
    return {
        id_: row
        for ids, rows in table.rows(3)
        for id_, row in zip(ids.tolist(), rows.tolist(), strict=True)
    }
