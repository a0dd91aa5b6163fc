"""A script's last push by ``pslite.KVWorker`` is there, or its end is an error: real TCP."""

from __future__ import annotations

import re

import pytest
from job import MakeJob, needs_proc

pytestmark = [pytest.mark.process, needs_proc]

SERVE = """
import os, sys, time
import numpy as np
import pslite
def wait_for_file(path):
    while not os.path.exists(path):
        time.sleep(0.01)
stored = {}
def handle(meta, pairs):
    if meta.cmd == 1:
        raise ValueError("boom")
    if meta.cmd == 2:
        return pslite.Future("a push that never comes")
    if meta.push:
        time.sleep(0.5)
        stored.update(zip(pairs.keys.tolist(), pairs.values.tolist()))
    if meta.pull:
        return pslite.KVPairs(pairs.keys, np.array([stored[k] for k in pairs.keys.tolist()]))
node = pslite.start(prepare=lambda node: pslite.KVServer(node, 0, handle))
node.finished.result()
node.close()
"""

WORK = """
import pslite
node = pslite.start()
worker = pslite.KVWorker(node, 0)
"""


def end(make_job: MakeJob, code: str, checks: str = "") -> tuple[list[int], str]:
    """Codes of scheduler, server and both workers, and what the one that ends with ``code`` said.

    The other looks on: it runs ``checks`` when the first has ended.
    """
    job = make_job(2, 1)
    job.scheduler()
    job.start("server", 0, ("-c", SERVE))
    pushes = job.worker(0, WORK + code)
    job.worker(1, WORK + "wait_for_file('ended')\n" + checks)
    pushes.wait()
    job.allow("ended")
    return job.wait_all(), job.output() if not pushes.text else pushes.text


PUSH = "worker.push([3, 2**63], vector(1, 2))\n"


@pytest.mark.parametrize(
    "closes",
    ["", pytest.param("node.close()\n", marks=pytest.mark.slow(reason="without it runs always"))],
)
def test_a_push_as_the_last_line_of_a_script_is_applied(make_job: MakeJob, closes: str) -> None:
    looks = "assert worker.wait(worker.pull([3, 2**63])).tolist() == [1, 2]\n"
    codes, said = end(make_job, PUSH + closes, looks)
    assert codes == [0, 0, 0, 0], said


def test_a_last_push_that_the_handle_refuses_ends_the_script_with_an_error(
    make_job: MakeJob,
) -> None:
    codes, said = end(make_job, "worker.push([3], vector(1), cmd=1)\n")
    assert codes == [0, 0, 120, 0], said
    assert re.search(
        r"error: a push could not be applied: RemoteError: [\s\S]*ValueError: boom", said
    )


def test_a_refused_push_that_nobody_has_looked_at_is_raised_by_close(make_job: MakeJob) -> None:
    code = "worker.push([3], vector(1), cmd=1)\nworker.wait(worker.push([3], vector(1)))\n"
    codes, said = end(make_job, code + "node.close()\n")
    assert codes == [0, 0, 1, 0], said
    assert "ValueError: boom" in said


def test_a_refused_push_that_the_script_has_caught_is_no_error_of_its_end(
    make_job: MakeJob,
) -> None:
    code = """
try:
    worker.wait(worker.push([3], vector(1), cmd=1))
except PSError:
    print("caught")
"""
    codes, said = end(make_job, code)
    assert (codes, said) == ([0, 0, 0, 0], "caught\n")


def test_a_last_push_that_is_answered_only_after_others_that_never_come_is_an_error(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 1)
    job.scheduler()
    job.start("server", 0, ("-c", SERVE))
    pushes = job.worker(0, WORK + "worker.push([3], vector(1), cmd=2)\n")
    assert job.wait_all() == [0, 0, 120], job.output()
    assert re.search(
        r"error: a push could not be applied: NodeLostError: server 0 .* ended without", pushes.text
    )
