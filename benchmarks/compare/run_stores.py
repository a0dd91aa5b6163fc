"""A worker of one of our stores: ``python -m benchmarks.compare.run_stores TASK``.

Settings of the task: ``arrays`` is ``plain``, ``empty`` for gradients and results that lie in
arrays of ``kv.empty()``, or ``views`` for such gradients and views of the weights; ``call`` is
``pushpull`` (the default), ``push, pull``, ``push`` (timed until the servers have applied it) or
``barrier``; ``optimizer`` is ``sgd`` (the default) or ``none``; ``prepare`` is ``no`` where the
copying of gradients between rounds would be counted; ``memory`` is ``yes`` to report what each
process of the job holds.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

import kvstore as mx
from benchmarks.compare import arithmetic
from benchmarks.compare.loop import Task, run


class Stores:
    """One worker's side of a run with a store of this package."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._store: Any = mx.kvstore.create(task.store)
        self.rank = self._store.rank
        self._call = task.settings.get("call", "pushpull")
        self._keys = [f"{index:03d}" for index in range(len(task.shapes))]
        self._sources = [task.gradients_of(self.rank, device) for device in range(task.devices)]
        self._gradients = [self._arrays() for _ in range(task.devices)]
        self._outs = [self._arrays() for _ in range(task.devices)]
        if self.rank == 0 and task.settings.get("optimizer") != "none":
            sgd = mx.optimizer.create(
                "sgd", learning_rate=arithmetic.LEARNING_RATE, momentum=arithmetic.MOMENTUM
            )
            self._store.set_optimizer(sgd)
        self._store.init(self._keys, arithmetic.first_weights(task.shapes))
        if task.settings.get("arrays") == "views":
            self._outs = [self._store.view(self._keys)]
        # One array a key, or with several devices a list of them.
        self._pushed = self._by_key(self._gradients)
        self._pulled = self._by_key(self._outs)

    def prepare(self) -> None:
        if self._task.settings.get("prepare") == "no":
            return
        for sources, gradients in zip(self._sources, self._gradients, strict=True):
            for source, gradient in zip(sources, gradients, strict=True):
                gradient[...] = source

    def barrier(self) -> None:
        if self._task.store.startswith("dist"):
            self._store.barrier()

    def exchange(self) -> None:
        if self._task.by_key:
            for index, key in enumerate(self._keys):
                self._store.push(key, self._pushed[index], priority=-index)
                self._store.pull(key, out=self._pulled[index], priority=-index)
            mx.nd.waitall()
        elif self._call == "pushpull":
            self._store.pushpull(self._keys, self._pushed, out=self._pulled)
        elif self._call == "push":
            self._store.wait(self._store.push_async(self._keys, self._pushed))
        elif self._call == "barrier":
            self._store.barrier()
        else:
            self._store.push(self._keys, self._pushed)
            self._store.pull(self._keys, out=self._pulled)

    def notes(self) -> dict[str, Any]:
        if self._task.settings.get("memory") != "yes" or self.rank != 0:
            return {}
        nodes = self._store.node.membership.neighbours()
        found = {node.role: resident_mb(node.pid) for node in nodes}
        return {"memory_mb": {**found, "worker": resident_mb(os.getpid())}}

    def weights(self) -> list[Any]:
        if self._task.is_async:  # what this worker got last need not have the others' last push
            self._store.pull(self._keys, out=self._pulled)
        return [np.asarray(self._as_numpy(array)) for array in self._outs[-1]]

    def close(self) -> None:
        self.barrier()
        self._store.close()

    def _arrays(self) -> list[Any]:
        shapes = self._task.shapes
        if self._task.by_key:
            return [mx.nd.zeros(shape) for shape in shapes]
        if self._task.settings.get("arrays") in ("empty", "views"):
            return [self._store.empty(shape, np.float32) for shape in shapes]
        return [np.zeros(shape, np.float32) for shape in shapes]

    def _by_key(self, of_devices: list[list[Any]]) -> list[Any]:
        if self._task.devices == 1:
            return of_devices[0]
        return [list(arrays) for arrays in zip(*of_devices, strict=True)]

    @staticmethod
    def _as_numpy(array: Any) -> Any:
        return array.asnumpy() if hasattr(array, "asnumpy") else array


def resident_mb(pid: int) -> dict[str, float]:
    """Resident memory of a process on this machine: its own pages, and shared ones."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssShmem", "VmRSS"):
            found[name] = int(value.split()[0]) * 1024 / 1e6
    return found


def main() -> None:
    task = Task.from_arguments()
    worker = Stores(task)
    run(task, worker)
    worker.close()


if __name__ == "__main__":
    main()
