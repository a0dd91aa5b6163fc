"""A worker of one of our stores with a row-sparse key.

``python -m benchmarks.compare.run_rows TASK``: what ``run_stores.py`` is for whole tensors, for a
``RowTask``. Timed are the push of the round's gradients and the pull of the same rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import kvstore as mx
from benchmarks.compare.arithmetic import LEARNING_RATE
from benchmarks.compare.loop import run
from benchmarks.compare.row_numbers import KEY, RowTask


class Rows:
    """One worker's side of a run with a store of this package."""

    def __init__(self, task: RowTask) -> None:
        self._task = task
        self._store: Any = mx.kvstore.create(task.store)
        self.rank = self._store.rank
        if self.rank == 0:
            self._store.set_optimizer(mx.optimizer.create("sgd", learning_rate=LEARNING_RATE))
        table = task.first_table() if self.rank == 0 else np.empty((0, task.shape[1]), np.float32)
        self._store.init(KEY, mx.RowSparseArray(np.arange(len(table)), table, task.shape))
        self._source = task.gradients(self.rank)
        self._gradients = np.empty_like(self._source)
        self._out = mx.RowSparseArray.zeros(task.shape)
        self._round = 0

    def prepare(self) -> None:
        self._gradients[...] = self._source
        self._ids = self._task.ids(self.rank, self._round)
        self._pushed = mx.RowSparseArray(self._ids, self._gradients, self._task.shape)
        self._round += 1

    def barrier(self) -> None:
        self._store.barrier()

    def exchange(self) -> None:
        self._store.push(KEY, self._pushed)
        self._store.row_sparse_pull(KEY, out=self._out, row_ids=self._ids)

    def notes(self) -> dict[str, Any]:
        return {}

    def weights(self) -> list[Any]:
        return [self._store.row_sparse_pull(KEY, row_ids=self._task.compared_ids).values]

    def close(self) -> None:
        self.barrier()
        self._store.close()


def main() -> None:
    task = RowTask.from_arguments()
    worker = Rows(task)
    run(task, worker)
    worker.close()


if __name__ == "__main__":
    main()
