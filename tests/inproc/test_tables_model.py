"""Random calls on tables of distributed stores against plain dictionaries (``table_model.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import DIM, OPTIMIZER, Model, settings_of
from workers import Workers

from kvstore.sparse.tables.ids import shares_of

POOL = [0, 1, -1, 2**63 - 1, -(2**63), 7, 8, 9, 10, 2**53 + 1, 2**53, -12]
IDS = st.lists(st.sampled_from(POOL), max_size=8)
GRADIENT = st.lists(st.integers(-4, 4), min_size=DIM, max_size=DIM)


@st.composite
def contribution(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    ids = draw(IDS)
    return ids, [draw(GRADIENT) for _ in ids]


PULL = st.tuples(st.sampled_from(["pull", "pull", "look"]), st.integers(0, 1), IDS)
PUSH = st.tuples(st.just("push"), st.just(0), st.tuples(contribution(), contribution()))
CALLS = st.lists(st.one_of(PULL, PUSH), max_size=12)
OPTIONS = st.builds(
    settings_of,
    capacity=st.none() | st.integers(5, 12),
    ttl=st.none() | st.integers(1, 3),
    admit_after=st.sampled_from([1, 1, 2]),
)
#: Kind of store, workers, servers.
CLUSTERS = [
    ("dist_sync", 1, 1),
    ("dist_sync", 2, 2),
    ("dist_sync", 2, 5),
    ("dist_async", 2, 2),
    ("dist_async", 1, 5),
]


class Both:
    """A table as each worker sees it, and what the shares of the servers should hold."""

    def __init__(self, workers: Workers, options: Any, num_servers: int) -> None:
        self.is_sync = workers.kind == "dist_sync"

        def make(kv: Any) -> Any:
            return kv.create_table(
                options.name,
                DIM,
                options.init,
                OPTIMIZER,
                options.capacity,
                options.ttl,
                options.admit_after,
                dtype="f8",
                seed=options.seed,
            )

        self.workers = workers
        self.tables = workers.run(make)
        self.models = []
        for share in range(num_servers):
            capacity = options.capacity_of(share, num_servers)
            self.models.append(Model(options, capacity, options.num_waiting(capacity)))

    def call(self, name: str, rank: int, what: Any) -> None:
        if name == "push":
            self.push(what[: len(self.tables)])
        else:
            self.pull(self.tables[rank % len(self.tables)], what, touch=name == "pull")

    def pull(self, table: Any, ids: list[int], *, touch: bool) -> None:
        rows = table.pull(np.array(ids, np.int64), touch=touch)
        expected: dict[int, Any] = {}
        for mine, model in zip(self.split(list(dict.fromkeys(ids))), self.models, strict=True):
            expected |= dict(zip(mine, model.pull(mine, touch=touch), strict=True))
        np.testing.assert_array_equal(
            rows, np.array([expected[id_] for id_ in ids]).reshape(-1, DIM)
        )

    def push(self, contributions: Sequence[Any]) -> None:
        for table, (ids, gradients) in zip(self.tables, contributions, strict=True):
            table.push(np.array(ids, np.int64), np.array(gradients, "f8").reshape(-1, DIM))
            if not self.is_sync:
                table.pull([0], touch=False)  # so that pushes come in the order of ranks
        rounds = [contributions] if self.is_sync else [[each] for each in contributions]
        for each in rounds:
            sums = [_sums(*one) for one in each]
            split = [self.split(list(one)) for one in sums]
            for share, model in enumerate(self.models):
                mine = [parts[share] for parts in split]
                pairs = zip(mine, sums, strict=True)
                model.push([(ids, [one[id_] for id_ in ids]) for ids, one in pairs])

    def split(self, ids: list[int]) -> list[list[int]]:
        flat = np.array(ids, np.int64)
        shares = shares_of(flat, len(self.models))
        return [flat[shares == share].tolist() for share in range(len(self.models))]

    def check(self) -> None:
        held = {id_: row[0] for model in self.models for id_, row in model.held().items()}
        for table in self.tables:
            found = {
                id_: row
                for ids, rows in table.rows(5)
                for id_, row in zip(ids.tolist(), rows.tolist(), strict=True)
            }
            assert found == held
        seen = self.tables[0].statistics()._asdict()
        for name in self.models[0].counts:
            assert seen[name] == sum(model.counts[name] for model in self.models), name
        assert seen["waiting"] == sum(len(model.waiting) for model in self.models)

    def close(self) -> None:
        by_rank = {
            kv.rank: table for kv, table in zip(self.workers.stores, self.tables, strict=True)
        }
        self.workers.run(lambda kv: by_rank[kv.rank].close())


def _sums(ids: list[int], gradients: list[list[int]]) -> dict[int, list[int]]:
    """The gradients of each id added up, ids in the order of their first appearance."""
    total: dict[int, list[int]] = {}
    for id_, gradient in zip(ids, gradients, strict=True):
        before = total.get(id_, [0] * DIM)
        total[id_] = [a + b for a, b in zip(before, gradient, strict=True)]
    return total


@pytest.mark.parametrize(("kind", "num_workers", "num_servers"), CLUSTERS)
def test_tables_hold_what_the_dictionaries_do(
    kind: str, num_workers: int, num_servers: int
) -> None:
    with Workers(kind, num_workers, num_servers) as workers:

        @given(CALLS, OPTIONS)
        @settings(max_examples=20, deadline=None)
        def check(calls: list[Any], options: Any) -> None:
            both = Both(workers, options, num_servers)
            for call in calls:
                both.call(*call)
            both.check()
            both.close()

        check()
