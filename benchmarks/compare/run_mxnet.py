"""A process of a job of MXNet 1.9.1: ``python -m benchmarks.compare.run_mxnet TASK``.

Runs in the environment of MXNet's wheel and imports nothing of ours but the timed loop. In a
process whose DMLC_ROLE is server or scheduler, ``import mxnet`` serves until the job is over and
ends the process. Setting of the task: ``call`` is ``push, pull`` or ``pushpull``.

``prepare`` is needed, not only fair: a pull overwrites the array that was pushed last
(``src/kvstore/kvstore_dist.h`` of the original uses it as its receive buffer).
"""

from __future__ import annotations

from typing import Any

import mxnet as mx

from benchmarks.compare import arithmetic
from benchmarks.compare.loop import Task, run


class MXNet:
    """One worker's side of a run with MXNet."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._store: Any = mx.kv.create(task.store)
        self.rank = self._store.rank
        self._call = task.settings.get("call", "push, pull")
        self._keys = [f"{index:03d}" for index in range(len(task.shapes))]
        contexts = [mx.cpu(device) for device in range(task.devices)]
        self._sources = [
            [mx.nd.array(source, ctx=ctx) for source in task.gradients_of(self.rank, device)]
            for device, ctx in enumerate(contexts)
        ]
        self._gradients = [[source.copy() for source in sources] for sources in self._sources]
        self._outs = [[mx.nd.zeros(shape, ctx=ctx) for shape in task.shapes] for ctx in contexts]
        if self.rank == 0 or not task.store.startswith("dist"):
            sgd = mx.optimizer.create(
                "sgd",
                learning_rate=arithmetic.LEARNING_RATE,
                momentum=arithmetic.MOMENTUM,
                wd=0.0,
                rescale_grad=1.0,
            )
            self._store.set_optimizer(sgd)
        first = [mx.nd.array(weight) for weight in arithmetic.first_weights(task.shapes)]
        self._store.init(self._keys, first)
        self._pushed = self._by_key(self._gradients)
        self._pulled = self._by_key(self._outs)

    def prepare(self) -> None:
        for sources, gradients in zip(self._sources, self._gradients, strict=True):
            for source, gradient in zip(sources, gradients, strict=True):
                source.copyto(gradient)
        mx.nd.waitall()

    def barrier(self) -> None:
        self._store._barrier()

    def exchange(self) -> None:
        if self._task.by_key:
            for index, key in enumerate(self._keys):
                self._store.push(key, self._pushed[index], priority=-index)
                self._store.pull(key, out=self._pulled[index], priority=-index)
        elif self._call == "pushpull":
            self._store.pushpull(self._keys, self._pushed, out=self._pulled)
        else:
            self._store.push(self._keys, self._pushed)
            self._store.pull(self._keys, out=self._pulled)
        mx.nd.waitall()

    def notes(self) -> dict[str, Any]:
        return {}

    def weights(self) -> list[Any]:
        if self._task.is_async:
            self._store.pull(self._keys, out=self._pulled)
        return [array.asnumpy() for array in self._outs[-1]]

    def _by_key(self, of_devices: list[list[Any]]) -> list[Any]:
        if self._task.devices == 1:
            return of_devices[0]
        return [list(arrays) for arrays in zip(*of_devices, strict=True)]


def main() -> None:
    task = Task.from_arguments()
    worker = MXNet(task)
    run(task, worker)
    worker.barrier()


if __name__ == "__main__":
    main()
