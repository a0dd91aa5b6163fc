"""A process of a job that pushes and pulls keys with ``KVWorker``, in any role.

``python -m benchmarks.compare.run_kv TASK``, with DMLC_ROLE and its companions in the
environment. What is timed does what ps-lite's own benchmark does (its
``tests/test_kv_app_benchmark.cc``): the server's handle keeps nothing of a push and answers a
pull with values that lie ready. After that one push and one pull go through a ``SumHandle``, and
what it answers is compared with NumPy. Settings of the task: ``keys`` is their number, ``anew``
is ``yes`` for other keys in every round, ``handle`` is ``empty`` or ``sum``.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import pslite
from benchmarks.compare.loop import Task, write_report

MAX_KEY = 2**64 - 1
TIMED_APP, CHECKED_APP = 0, 1


class EmptyHandle:
    """Keeps nothing; the values of a pull are made once for each number of keys.

    They lie in the node's own memory, from which a worker on this machine reads them.
    """

    def __init__(self, node: pslite.Postoffice) -> None:
        self._node = node
        self._values: dict[int, Any] = {}

    def __call__(self, meta: pslite.KVMeta, pairs: pslite.KVPairs) -> pslite.KVPairs | None:
        if not meta.pull:
            return None
        count = len(pairs.keys)
        if count not in self._values:
            self._values[count] = self._node.buffer(4 * count).view(np.float32)
            self._values[count][:] = np.arange(count, dtype=np.float32)
        return pslite.KVPairs(pairs.keys, self._values[count])


def sorted_keys(count: int, rng: np.random.Generator | None) -> Any:
    """Unique sorted keys: evenly spread, or drawn by ``rng`` (each from its own interval)."""
    step = MAX_KEY // count
    keys = np.arange(count, dtype=np.uint64) * np.uint64(step)
    if rng is not None:
        keys += rng.integers(0, step, count, dtype=np.uint64)
    return keys


def serve(task: Task) -> None:
    """A scheduler or a server, until the job is over."""

    def prepare(node: pslite.Postoffice) -> None:
        if node.role is not pslite.Role.SERVER:
            return
        adds = task.settings.get("handle") == "sum"
        pslite.KVServer(
            node, TIMED_APP, pslite.SumHandle() if adds else EmptyHandle(node), copy=adds
        )
        pslite.KVServer(node, CHECKED_APP, pslite.SumHandle())

    with pslite.start(prepare=prepare) as node:
        node.finished.result()


def work(task: Task) -> None:
    """The worker: times pushes and pulls, checks what comes back, and reports."""
    count = int(task.settings["keys"])
    rng = np.random.default_rng(5) if task.settings.get("anew") == "yes" else None
    values = np.random.default_rng(6).standard_normal(count, np.float32)
    answer = np.zeros(count, np.float32)
    pushes, pulls, exact = [], [], True
    with pslite.start() as node:
        worker = pslite.KVWorker(node, TIMED_APP)
        keys = sorted_keys(count, rng)
        for _ in range(task.total_rounds):
            if rng is not None:
                keys = sorted_keys(count, rng)
            begin = time.perf_counter()
            worker.wait(worker.push(keys, values))
            middle = time.perf_counter()
            worker.wait(worker.pull(keys, answer))
            pulls.append(1e3 * (time.perf_counter() - middle))
            pushes.append(1e3 * (middle - begin))
            exact = exact and _is_right(task, answer)
        checked = pslite.KVWorker(node, CHECKED_APP)
        checked.wait(checked.push(keys, values))
        checked.wait(checked.push(keys[::3], values[::3]))
        expected = values.copy()
        expected[::3] += values[::3]
        exact = exact and np.array_equal(checked.wait(checked.pull(keys)), expected)
    pushes, pulls = pushes[task.warmup :], pulls[task.warmup :]
    report: dict[str, Any] = {"push_ms": pushes, "pull_ms": pulls}
    report["times_ms"] = [push + pull for push, pull in zip(pushes, pulls, strict=True)]
    report["check"] = {"exact": bool(exact), "difference": 0.0 if exact else float("inf")}
    report["checksum"] = 0
    write_report(task.directory, 0, report)


def _is_right(task: Task, answer: Any) -> bool:
    if task.settings.get("handle") == "sum":
        return True  # what it adds up is compared once, at the end
    return bool(np.array_equal(answer, np.arange(len(answer), dtype=np.float32)))


def main() -> None:
    task = Task.from_arguments()
    config, _ = pslite.Config.from_env()
    if config.role == pslite.Role.WORKER.value:
        work(task)
    else:
        serve(task)


if __name__ == "__main__":
    main()
