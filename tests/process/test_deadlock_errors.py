"""Real processes whose workers wait for each other: all end, and say in which calls they were."""

from __future__ import annotations

import re

from job import WORKER, MakeJob

SYNC = (
    WORKER
    + """
kv = mx.kvstore.create("dist_sync")
kv.init("w", vector(0, 0))
"""
)


def test_scripts_that_disagree_end_with_the_lines_of_both(make_job: MakeJob) -> None:
    job = make_job(2, 1, PS_STALL_REPORT="0.5")
    job.service()
    code = (
        SYNC
        + """
if kv.rank == 0:
    kv.push("w", vector(1, 1))
    kv.pull("w")
else:
    kv.init("b", vector(1))
"""
    )
    first, second = job.workers(code)
    codes = job.wait_all()
    assert codes[-2:] == [1, 1], job.output()
    for process in (first, second):
        assert re.search(
            r"DeadlockError: deadlock: all workers wait for each other: .*worker 0 waits in pull "
            r"\(\S+:\d+\) for .*worker 1 waits in init \(\S+:\d+\) for .*round 1 of key 'w' waits "
            r"for worker 1",
            process.text,
        ), process.text


def test_a_worker_whose_other_thread_will_make_the_call_is_waited_for(make_job: MakeJob) -> None:
    job = make_job(2, 1, PS_STALL_REPORT="0.2")
    job.service()
    code = (
        SYNC
        + """
import threading
if kv.rank == 0:
    def later():
        time.sleep(2.5)
        kv.init("b", vector(1))
    other = threading.Thread(target=later)
    other.start()
    kv.barrier()
    other.join()
else:
    kv.init("b", vector(1))
    kv.barrier()
"""
    )
    job.workers(code)
    assert job.wait_all() == [0, 0, 0, 0], job.output()
