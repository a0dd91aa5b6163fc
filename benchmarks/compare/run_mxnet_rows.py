"""A process of a job of MXNet 1.9.1 with a row-sparse key.

``python -m benchmarks.compare.run_mxnet_rows TASK``: what ``run_mxnet.py`` is for whole tensors,
for a ``RowTask``. Ids are sorted and each there once, since MXNet makes nothing of others in a
push; in a pull it sorts them itself.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
import numpy as np

from benchmarks.compare.arithmetic import LEARNING_RATE
from benchmarks.compare.loop import run
from benchmarks.compare.row_numbers import KEY, RowTask


class MXNetRows:
    """One worker's side of a run with MXNet."""

    def __init__(self, task: RowTask) -> None:
        self._task = task
        self._store: Any = mx.kv.create(task.store)
        self.rank = self._store.rank
        if self.rank == 0:
            sgd = mx.optimizer.create(
                "sgd", learning_rate=LEARNING_RATE, momentum=0.0, wd=0.0, rescale_grad=1.0
            )
            self._store.set_optimizer(sgd)
        # Its optimizers update rows of tables that are wholly there.
        self._store.init(KEY, self._rows(task.first_table(), np.arange(task.shape[0])))
        self._source = task.gradients(self.rank)
        self._out = mx.nd.sparse.zeros("row_sparse", task.shape)
        self._round = 0
        mx.nd.waitall()

    def _rows(self, values: Any, ids: Any) -> Any:
        return mx.nd.sparse.row_sparse_array((values, ids), shape=self._task.shape)

    def prepare(self) -> None:
        ids = self._task.ids(self.rank, self._round)
        self._pushed = self._rows(self._source, ids)
        self._ids = mx.nd.array(ids, dtype="int64")
        self._round += 1
        mx.nd.waitall()

    def barrier(self) -> None:
        self._store._barrier()

    def exchange(self) -> None:
        self._store.push(KEY, self._pushed)
        self._store.row_sparse_pull(KEY, out=self._out, row_ids=self._ids)
        mx.nd.waitall()

    def notes(self) -> dict[str, Any]:
        return {}

    def weights(self) -> list[Any]:
        ids = mx.nd.array(self._task.compared_ids, dtype="int64")
        out = mx.nd.sparse.zeros("row_sparse", self._task.shape)
        self._store.row_sparse_pull(KEY, out=out, row_ids=ids)
        return [out.data.asnumpy()]


def main() -> None:
    task = RowTask.from_arguments()
    worker = MXNetRows(task)
    run(task, worker)
    worker.barrier()


if __name__ == "__main__":
    main()
