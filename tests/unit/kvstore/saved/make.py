"""Write one file of each kind that stores and models save, with small known contents.

``python make.py DIRECTORY``. The directories beside this script were written by it, each with
the version of the format that it is named after: what they hold has to be readable for ever
(``test_saved_before.py``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import kvstore
from kvstore import optimizer
from kvstore.mxnet.model import save_checkpoint
from kvstore.sparse.array import RowSparseArray
from kvstore.stores.base import KVStore

DENSE = np.arange(6, dtype=np.float32).reshape(2, 3)
HALF = np.array([0.5, -2.0, 1024.0], np.float16)
ROWS = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
IDS = np.array([1, 7])


def store() -> KVStore:
    """Three keys of different kinds, after two pushes with momentum and compression."""
    kv = kvstore.create("local")
    kv.set_optimizer(optimizer.create("sgd", learning_rate=0.5, momentum=0.5))
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.25, "exclude": "rows"})
    kv.init("dense", DENSE)
    kv.init("half", HALF)
    kv.init("rows", RowSparseArray(IDS, ROWS, (10, 2)))
    for _ in range(2):
        kv.push("dense", np.full((2, 3), 0.1, np.float32))
        kv.push("half", np.ones(3, np.float16))
        kv.push("rows", RowSparseArray([7], np.ones((1, 2), np.float32), (10, 2)))
    return kv


def main(directory: Path) -> None:
    kv = store()
    kv.save_checkpoint(directory / "checkpoint")
    kv.save_optimizer_states(directory / "states", dump_optimizer=True)
    save_checkpoint(directory / "model", 3, None, {"w": DENSE, "h": HALF}, {"mean": ROWS})
    sgd = optimizer.create("sgd", learning_rate=1.0)
    table = kv.create_table("words", 2, init=0.5, optimizer=sgd)
    table.push([3, 5], np.ones((2, 2), np.float32))
    table.export(directory / "table")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
