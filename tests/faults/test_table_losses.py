"""Tables on a network that loses, repeats, delays and reorders: every push counts exactly once."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from kvstore import optimizer
from kvstore.optimizer.serialize import to_plain
from kvstore.protocol.requests import StoreCall, unpack
from kvstore.server import install
from kvstore.sparse.payload import RowPayloadKind
from kvstore.sparse.tables.settings import checked_settings, settings_to_plain
from kvstore.stores.dist.store import create_dist
from kvstore.stores.dist.tables import DistTable
from pslite import Postoffice
from pslite.testing.simulator import Faults, Simulation

FAULTS = Faults(drop=0.1, duplicate=0.2, delay=0.2, reorder=0.3, cuts=2, cut_within_s=2.0)
NUM_WORKERS, NUM_SERVERS, NUM_ROUNDS, DIM = 3, 2, 6, 3
IDS = np.array([2**63 - 1, -5, 0, 7, 2**40, 11, 13], np.int64)
PLUS = optimizer.create("sgd", learning_rate=-1.0)
"""Adds what is pushed."""

SETTINGS = checked_settings(
    "t", DIM, init=0, capacity=None, ttl=None, admit_after=1, dtype="f8", seed=0
)


def pushed(seed: int, rank: int, round_: int) -> tuple[Any, Any]:
    """Small whole numbers for some ids, sometimes for none."""
    random_ = np.random.default_rng([seed, rank, round_])
    ids = random_.permutation(IDS)[: random_.integers(0, 5)]
    return ids, random_.integers(1, 100, (len(ids), DIM)).astype("f8")


def total(seed: int, num_rounds: int) -> np.ndarray[Any, Any]:
    """The rows of all ids after so many rounds."""
    rows = np.zeros((len(IDS), DIM))
    for rank in range(NUM_WORKERS):
        for round_ in range(num_rounds):
            ids, values = pushed(seed, rank, round_)
            for id_, row in zip(ids, values, strict=True):
                rows[id_ == IDS] += row
    return rows


def script_of(seed: int, kind: str) -> Any:
    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        chance = random.Random(seed * 31 + node.rank)
        store: Any = create_dist(kind, kind, node=node)
        owner = store._tables
        parts = owner.parts_of(1)
        if node.rank == 0:
            yield owner.servers.make_table(parts, settings_to_plain(SETTINGS), to_plain(PLUS))
        yield node.barrier(4)
        table = DistTable(owner, SETTINGS, PLUS, parts)
        for round_ in range(NUM_ROUNDS):
            yield chance.random() * 0.2
            push = table.begin_push(*pushed(seed, node.rank, round_))
            if kind == "dist_sync":
                yield from look(table, total(seed, round_ + 1), RowPayloadKind.WANTED)
            yield push
        yield node.barrier(4)
        yield from look(table, total(seed, NUM_ROUNDS), RowPayloadKind.LOOK)
        replies = yield table._pages.ask_each(StoreCall.TABLE_STATS)
        num_pushes = NUM_ROUNDS if kind == "dist_sync" else NUM_ROUNDS * NUM_WORKERS
        assert [unpack(reply.body, list)[0][10] for reply in replies] == [num_pushes] * NUM_SERVERS

    return script


def look(table: DistTable, expected: Any, kind: RowPayloadKind) -> Generator[Any, Any, None]:
    rows = np.full((len(IDS), DIM), -1.0)
    yield table.begin_pull(IDS, rows, kind)
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("seed", range(5))
def test_every_push_to_a_table_counts_once(seed: int, kind: str) -> None:
    simulation = Simulation(seed, NUM_WORKERS, NUM_SERVERS, FAULTS, prepare=install)
    simulation.run(*[script_of(seed, kind)] * NUM_WORKERS)
    simulation.finish()
