"""Rows on a network that loses, repeats, delays and reorders: every push counts exactly once."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from kvstore import RowSparseArray, optimizer
from kvstore.server import install
from kvstore.stores.arguments_sparse import check_wanted
from kvstore.stores.dist.store import create_dist
from pslite import Postoffice
from pslite.future import gather
from pslite.testing.simulator import Faults, Simulation

FAULTS = Faults(drop=0.1, duplicate=0.2, delay=0.2, reorder=0.3, cuts=2, cut_within_s=2.0)
NUM_WORKERS, NUM_ROUNDS = 3, 5
SHAPE = (11, 4)
KEYS = ["rows", "dense"]


def pushed(seed: int, rank: int, round_: int, key: str) -> RowSparseArray:
    """Rows of small whole numbers; often few, sometimes none."""
    random_ = np.random.default_rng([seed, rank, round_, len(key)])
    ids = random_.integers(0, SHAPE[0], random_.integers(0, 5))
    values = random_.integers(1, 100, (len(ids), SHAPE[1])).astype("f8")
    return RowSparseArray(ids, values, SHAPE)


def total(seed: int, key: str, num_rounds: int) -> np.ndarray[Any, Any]:
    """The sum of all pushes of so many rounds."""
    return sum(
        (
            pushed(seed, rank, round_, key).to_dense()
            for rank in range(NUM_WORKERS)
            for round_ in range(num_rounds)
        ),
        np.zeros(SHAPE),
    )


def script_of(seed: int, kind: str) -> Any:
    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        chance = random.Random(seed * 31 + node.rank)
        store = create_dist(kind, kind, node=node)
        yield store.set_optimizer_async(optimizer.create("test"))
        yield store.init_async(KEYS, [RowSparseArray.zeros(SHAPE, "f8"), np.zeros(SHAPE)])
        for round_ in range(NUM_ROUNDS):
            yield chance.random() * 0.2
            for key in chance.sample(KEYS, 2):
                rows = pushed(seed, node.rank, round_, key)
                value = rows.to_dense() if chance.random() < 0.2 else rows
                store.push_async(key, value)
            if kind == "dist_sync":
                yield from look(store, seed, round_ + 1, chance)
        yield gather(store._exchange.unfinished())
        yield node.barrier(4)
        yield from look(store, seed, NUM_ROUNDS, chance)

    return script


def look(store: Any, seed: int, num_rounds: int, chance: random.Random) -> Any:
    """The values are those of exactly so many rounds, whole and by rows."""
    for key in KEYS:
        expected = total(seed, key, num_rounds)
        out = np.full(SHAPE, -1.0)
        yield store.pull_async(key, out)
        np.testing.assert_array_equal(out, expected)
        ids = [chance.randrange(SHAPE[0]) for _ in range(4)]
        wanted, _ = check_wanted(store._table.spec, key, None, ids)
        pulled = store._rows.pull_rows(wanted, 0)
        yield gather(pulled.operations)
        pulled.finish()
        np.testing.assert_array_equal(pulled.results[0].values, expected[sorted(set(ids))])


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("seed", range(6))
def test_every_push_of_rows_counts_once(seed: int, kind: str) -> None:
    simulation = Simulation(seed, NUM_WORKERS, 2, FAULTS, prepare=install, chunk_bytes=100)
    simulation.run(*[script_of(seed, kind)] * NUM_WORKERS)
    simulation.finish()
