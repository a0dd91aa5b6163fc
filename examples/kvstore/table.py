"""Growing tables: embeddings for an unknown number of ids, in bounded memory.

    python examples/kvstore/table.py
    kvstore-launch -n 2 -s 2 python examples/kvstore/table.py --kv-store dist_sync

Learns ratings from a stream in which new users appear and old ones disappear. Users and items are
64-bit ids, such as hashes of names. The table has room for only a few users: it evicts users not
seen for a long time, and gives no row to a user who appears only once. Prints the error, the
table's counters, and the sizes of a full export and of an export of the changes since then.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import kvstore as mx

NUM_ITEMS, TRUE_DIM = 500, 4
ALL_IDS = np.random.default_rng(7).integers(0, 2**64, 1 << 20, dtype=np.uint64)


class Stream:
    """Batches of (users, items, ratings). Half of the users come once; the rest change slowly."""

    def __init__(self, rank: int, num_workers: int) -> None:
        random = np.random.default_rng(1)
        self.tastes = random.standard_normal((1 << 20, TRUE_DIM)).astype(np.float32) / 2
        self.items = random.standard_normal((NUM_ITEMS, TRUE_DIM)).astype(np.float32)
        self.random, self.size = np.random.default_rng([2, rank]), 1000 // num_workers
        self.first_user, self.stranger = 0, 500_000 + rank * (500_000 // num_workers)

    def batch(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        users = self.first_user + (1000 * self.random.random(self.size)).astype(np.int64)
        users[::2] = self.stranger + np.arange(self.size // 2)
        self.stranger, self.first_user = self.stranger + self.size // 2, self.first_user + 2
        items = self.random.integers(0, NUM_ITEMS, self.size)
        ratings = np.einsum("nd,nd->n", self.tastes[users], self.items[items])
        return ALL_IDS[users], ALL_IDS[-1 - items], ratings


def step(users: mx.Table, items: mx.Table, batch: tuple) -> float:
    """One update; returns the squared error for users who appear again."""
    user_ids, item_ids, ratings = batch
    mine, theirs = users.pull(user_ids), items.pull(item_ids)
    error = np.einsum("nd,nd->n", mine, theirs) - ratings
    users.push(user_ids, error[:, None] * theirs)
    items.push(item_ids, error[:, None] * mine)
    return float(np.mean(error[1::2] ** 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv-store", default="local")
    given = parser.parse_args()
    adagrad, init = mx.optimizer.create("adagrad", learning_rate=0.4), mx.init.Normal(0.3)
    with mx.create(given.kv_store) as kv, tempfile.TemporaryDirectory() as folder:
        users = kv.create_table("users", 8, init, adagrad, capacity=1200, admit_after=2)
        items = kv.create_table("items", 8, init, adagrad)
        stream = Stream(kv.rank, kv.num_workers)
        for quarter in range(4):
            errors = [step(users, items, stream.batch()) for _ in range(100)]
            print(f"quarter {quarter + 1}: error {np.mean(errors):.3f}, {users.size} users")
        mark = users.export(Path(folder, "all"), states=False)
        step(users, items, stream.batch())
        users.export_delta(mark, Path(folder, "changes"), states=False)
        sizes = [path.stat().st_size for path in sorted(Path(folder).iterdir())]
        if kv.rank == 0:  # which wrote them, all workers having called
            print(f"bytes of exports: all {sizes[0]}, changes {sizes[1]}")
        seen = users.statistics()
        print(f"made {seen.made}, evicted {seen.evicted}, hits {seen.hit_rate:.2f}")
        print(f"memory: {seen.nbytes} bytes of at most {seen.limit_bytes}")


if __name__ == "__main__":
    main()
