"""Compare a model with dense keys and with row-sparse keys: loss, seconds and bytes.

Run from the repository::

    kvstore-launch -n 2 -s 2 --launcher local python examples/kvstore/dense_or_sparse.py

The model is that of ``embedding.py``, with a million users. With dense keys, a step pushes
gradients of all rows and gets all rows back; with row-sparse keys, it transfers only the rows of
the batch. AdaGrad does not change rows with zero gradients, so both end with bit-identical weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from embedding import TABLES, ratings, step

import kvstore as mx

DENSE = [f"dense {table}" for table in TABLES]


def dense_step(kv: mx.KVStore, tables: list, gradients: list, ids: list, wanted: np.ndarray):
    """Like ``step`` of ``embedding.py``; the tables are this worker's copies of the keys."""
    users, items = (table[batch] for table, batch in zip(tables, ids, strict=True))
    error = np.einsum("nd,nd->n", users, items) - wanted
    np.add.at(gradients[0], ids[0], error[:, None] * items)
    np.add.at(gradients[1], ids[1], error[:, None] * users)
    kv.pushpull(DENSE, gradients, out=tables)
    for gradient, batch in zip(gradients, ids, strict=True):
        gradient[batch] = 0


def train(kv: mx.KVStore, step: Callable, ids: list, wanted: np.ndarray, batch_size: int) -> tuple:
    """One pass over the ratings; returns seconds, and bytes pushed and pulled by this worker."""
    order, before = kv.shard(len(wanted), seed=1, epoch=0), kv.stats()["store"]
    kv.barrier()
    begin = time.perf_counter()
    for first in range(0, len(order), batch_size):
        batch = order[first : first + batch_size]
        step([each[batch] for each in ids], wanted[batch])
    kv.barrier()
    seconds, after = time.perf_counter() - begin, kv.stats()["store"]
    return seconds, sum(after[name] - before[name] for name in ("bytes_pushed", "bytes_pulled"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--ratings", type=int, default=400_000)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--kv-store", default="dist_sync")
    given = parser.parse_args()

    random = np.random.default_rng(1)
    sizes = [given.users, given.items]
    *ids, wanted = ratings(random, sizes, given.ratings)
    tables = [random.standard_normal((n, given.dim)).astype(np.float32) * 0.3 for n in sizes]
    with mx.create(given.kv_store) as kv:
        kv.set_optimizer(mx.optimizer.create("adagrad", learning_rate=0.2))
        kv.init(DENSE, tables)
        kv.init(TABLES, [mx.RowSparseArray(np.arange(len(t)), t, t.shape) for t in tables])
        dense = partial(dense_step, kv, tables, [np.zeros_like(table) for table in tables])
        for name, keys, how in [("dense", DENSE, dense), ("sparse", TABLES, partial(step, kv))]:
            seconds, moved = train(kv, how, ids, wanted, given.batch_size)
            rows = [np.empty((len(wanted), given.dim), np.float32) for _ in keys]
            kv.row_sparse_pull(keys, out=rows, row_ids=ids)
            error = np.sqrt(np.mean((np.einsum("nd,nd->n", *rows) - wanted) ** 2))
            if kv.rank == 0:
                print(f"{name}: error {error:.8f}, {seconds:.2f} s, {moved / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
