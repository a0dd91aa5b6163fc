"""Several stores in one process: side by side, one after another, and at the end of it."""

from __future__ import annotations

import pytest
from job import MakeJob, assert_no_traceback, needs_proc

pytestmark = [pytest.mark.process, needs_proc]

SGD = 'mx.optimizer.create("sgd", learning_rate=1.0)'


def run(make_job: MakeJob, code: str, num_workers: int = 2, num_servers: int = 2) -> list[str]:
    """Run a job to its good end; returns what each worker has printed, which is the same."""
    job = make_job(num_workers, num_servers)
    scheduler, servers = job.service()
    workers = job.workers(code)
    assert set(job.wait_all()) == {0}, job.output()
    assert_no_traceback(scheduler, *servers)
    assert len({worker.text for worker in workers}) == 1, job.output()
    return workers[0].lines


def test_a_synchronous_and_an_asynchronous_store_work_side_by_side(make_job: MakeJob) -> None:
    lines = run(
        make_job,
        f"""
rounds, at_once = mx.kvstore.create("dist_sync"), mx.kvstore.create("dist_async")
rounds.init("w", vector(0)); at_once.init("w", vector(100)); at_once.init("only here", vector(5))
at_once.set_optimizer({SGD})
for step in range(1, 21):
    rounds.push("w", vector(step))
    at_once.push("w", vector(1))
    assert rounds.pull("w").tolist() == [2 * step]
    # The other worker is at most one push ahead: it waits for the next round.
    assert 100 - 2 * step - 1 <= at_once.pull("w")[0] <= 100 - step
rounds.barrier()
print(rounds.pull("w").tolist(), at_once.pull("w").tolist(), at_once.pull("only here").tolist())
print(rounds.type, at_once.type, rounds.num_workers)
""",
    )
    assert lines == ["[40.0] [60.0] [5.0]", "dist_sync dist_async 2"]


def test_a_notebook_may_close_its_stores_and_create_others(make_job: MakeJob) -> None:
    lines = run(
        make_job,
        """
for turn in range(3):
    with mx.kvstore.create("dist_sync") as kv:
        kv.init(["a", "b"], [vector(turn), vector(turn, turn)])
        kv.push("a", vector(10 * turn))
        print(kv.pull("a").tolist(), kv.pull("b").tolist())
    try:
        kv.pull("a")
    except PSError as error:
        print(f"{type(error).__name__}: {error}")
kv = mx.kvstore.create("dist_async")
kv.init(3, vector(7))
print(kv.pull(3).tolist())
kv.close()
kv.close()
""",
    )
    closed = "ClosedError: this dist_sync store is closed; call kvstore.create again"
    turns = [f"[{20.0 * turn}] [{1.0 * turn}, {1.0 * turn}]" for turn in range(3)]
    assert lines == [line for turn in turns for line in (turn, closed)] + ["[7.0]"]


def test_local_and_distributed_stores_live_in_one_process(make_job: MakeJob) -> None:
    lines = run(
        make_job,
        """
local, kv = mx.kvstore.create("local"), mx.kvstore.create("dist_device_sync")
for store in local, kv:
    store.init("w", vector(0))
    store.push("w", [vector(1), vector(2)])
    print(store.type, store.num_workers, store.pull("w").tolist())
""",
    )
    assert lines == ["local 1 [3.0]", "dist_device_sync 2 [6.0]"]


def test_threads_of_a_worker_share_a_store(make_job: MakeJob) -> None:
    """Also when each waits for what another worker's thread pushes last."""
    lines = run(
        make_job,
        """
from concurrent.futures import ThreadPoolExecutor
kv = mx.kvstore.create("dist_sync")
keys = list(range(8))
kv.init(keys, [vector(0)] * 8)
def train(key):
    for step in range(1, 11):
        kv.push(key, vector(step + key))
        assert kv.pull(key).tolist() == [2 * (step + key)]
    return kv.pull(key)[0]
with ThreadPoolExecutor(8) as threads:
    order = keys if kv.rank else keys[::-1]
    print(sorted(float(value) for value in threads.map(train, order)))
""",
    )
    assert lines == [str([2.0 * (10 + key) for key in range(8)])]


def test_stores_of_another_kind_on_another_worker_are_an_error_that_says_so(
    make_job: MakeJob,
) -> None:
    job = make_job(2, 1)
    job.service()
    code = """
kv = mx.kvstore.create("dist_sync" if os.environ["DMLC_TASK_ID"] == "0" else "dist_async")
kv.init("w", vector(0))
kv.barrier()
"""
    first, second = job.workers(code)
    assert {first.wait(), second.wait()} <= {0, 1}
    text = first.text + second.text
    assert "store 1 of this job is 'sync' on another worker and 'async' on worker 1; " in text or (
        "store 1 of this job is 'async' on another worker and 'sync' on worker 0; " in text
    )
    assert "create the same stores in the same order" in text
    job.wait_all()


def test_a_script_that_never_creates_a_distributed_store_needs_no_cluster(
    make_job: MakeJob,
) -> None:
    """Not even with the variables of one in its environment."""
    worker = make_job(2, 1).worker(
        0, 'kv = mx.kvstore.create("local"); kv.init("w", vector(1)); print(kv.pull("w").tolist())'
    )
    assert worker.wait() == 0
    assert worker.lines == ["[1.0]"]


def test_rows_travel_between_processes(make_job: MakeJob) -> None:
    """Through shared memory and, where rows are few, through sockets."""
    lines = run(
        make_job,
        f"""
import numpy as np
shape = (100_001, 8)
for kind in ("dist_sync", "dist_async"):
    kv = mx.kvstore.create(kind)
    kv.set_optimizer({SGD})
    kv.init(["t", "d"], [mx.RowSparseArray.zeros(shape), np.zeros(shape, np.float32)])
    ids = np.arange(3 * kv.rank, shape[0], 1000 if kv.rank else 2)
    for key in ("t", "d"):
        for _ in range(3):
            kv.push(key, mx.RowSparseArray(ids, np.ones((len(ids), 8), np.float32), shape))
    kv.wait()
    kv.barrier()
    for key in ("t", "d"):
        rows = kv.row_sparse_pull(key, row_ids=[0, 1003, 2, 3, 100_000])
        print(kind, key, rows.indices.tolist(), rows.values[:, 7].tolist())
    print(len(kv.pull("t").indices), float(kv.pull("d").sum()), sorted(kv.placement()[1]))
    kv.barrier()
""",
    )
    rows = "[0, 2, 3, 1003, 100000] [-3.0, -3.0, -3.0, -3.0, -3.0]"
    held = 50_001 + 100
    for kind in ("dist_sync", "dist_async"):
        assert lines[:2] == [f"{kind} t {rows}", f"{kind} d {rows}"]
        assert lines[2] == f"{held} {-3.0 * 8 * (50_001 + 100)} ['d', 't']"
        lines = lines[3:]
