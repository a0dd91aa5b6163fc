"""Embeddings with row-sparse keys: a step transfers the rows of its batch, not the tables.

    python examples/kvstore/embedding.py
    kvstore-launch -n 2 -s 2 python examples/kvstore/embedding.py --kv-store dist_sync

Factorises a made-up matrix of ratings: the rating of an item by a user is the product of a row of
one table with a row of another. Each step pulls the rows of its batch and pushes their gradients;
AdaGrad in the store updates only these rows. Prints the error and the number of bytes. In a
distributed store, each worker has a shard of the ratings, and the servers share the tables evenly.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import kvstore as mx

TABLES = ["users", "items"]
TRUE_DIM = 4


def ratings(random: np.random.Generator, sizes: list[int], number: int) -> tuple:
    """Users, items, and their ratings, computed from hidden vectors."""
    # Few users and items have most of the ratings, as in real data.
    ids = [(size * random.random(number) ** 4).astype(np.int64) for size in sizes]
    hidden = [random.standard_normal((size, TRUE_DIM)).astype(np.float32) for size in sizes]
    return *ids, np.einsum("nd,nd->n", hidden[0][ids[0]], hidden[1][ids[1]])


def step(kv: mx.KVStore, ids: list[np.ndarray], wanted: np.ndarray) -> float:
    """One update from a batch; returns the sum of squared errors before it."""
    shapes = [kv.info(table).shape for table in TABLES]
    users, items = (np.empty((len(wanted), shape[1]), np.float32) for shape in shapes)
    kv.row_sparse_pull(TABLES, out=[users, items], row_ids=ids)
    error = np.einsum("nd,nd->n", users, items) - wanted
    gradients = [error[:, None] * items, error[:, None] * users]
    # The store adds the gradients of users and items that the batch has several times.
    kv.push(TABLES, list(map(mx.RowSparseArray, ids, gradients, shapes)))
    return float(error @ error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--users", type=int, default=100_000)
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--ratings", type=int, default=200_000)
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--kv-store", default="local")
    given = parser.parse_args()

    random = np.random.default_rng(1)
    sizes = [given.users, given.items]
    *ids, wanted = ratings(random, sizes, given.ratings)
    with mx.create(given.kv_store) as kv:
        kv.set_optimizer(mx.optimizer.create("adagrad", learning_rate=0.2))
        for table, size in zip(TABLES, sizes, strict=True):
            start = random.standard_normal((size, given.dim)).astype(np.float32) * 0.3
            kv.init(table, mx.RowSparseArray(np.arange(size), start, start.shape))
        for epoch in range(given.epochs):
            order, total = kv.shard(len(wanted), seed=1, epoch=epoch), 0.0
            for first in range(0, len(wanted), given.batch_size):
                batch = order[first : first + given.batch_size]
                total += step(kv, [each[batch] for each in ids], wanted[batch])
            print(f"epoch {epoch}: error {np.sqrt(total / len(order)):.3f}")
        moved = kv.stats()["store"]
        steps = moved["pushes"]
        dense = sum(kv.info(table).nbytes for table in TABLES) * steps
        print(f"pushed {100 * moved['bytes_pushed'] / dense:.1f} % of what dense keys would take")


if __name__ == "__main__":
    main()
