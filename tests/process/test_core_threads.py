"""Threads of stores in one process: they keep no interpreter alive, and forks are safe."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from job import ROOT, clean_environment

pytestmark = pytest.mark.process

STORE = """
import os, sys, threading
import numpy as np
import kvstore as mx

def helpers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("kvstore-core")]

store = mx.create("local")
store.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.5, momentum=0.5))
store.init(["a", "b"], [np.zeros(500_000, np.float32), np.zeros(700_000, np.float32)])

def push(store):
    store.push(["a", "b"], [[np.ones(500_000, np.float32)] * 3, np.ones(700_000, np.float32)])

push(store)
assert len(helpers()) == 2, helpers()
"""

ENDS = {
    "at its end": "",
    "by an exception": "raise SystemExit(0)",
    "while a thread still pushes": """
def push_forever():
    while True:
        push(store)
threading.Thread(target=push_forever, daemon=True).start()
push(store)
""",
    "in an atexit handler that pushes": """
import atexit
atexit.register(push, store)
""",
}

FORK = """
first, second = store.pull(["a", "b"])
child = os.fork()
if child == 0:
    try:
        assert not helpers()
        push(store)
        assert len(helpers()) == 2
        other = mx.create("local")
        other.init(["a", "b"], store.pull(["a", "b"]))
        push(other)
        # Momentum: -1.5, then -1.5 / 2 - 1.5.
        ok = (store.pull("a") == -3.75).all() and (store.pull("b") == -1.25).all()
        os._exit(0 if ok and (other.pull("a") == 3).all() else 1)
    finally:
        os._exit(2)
push(store)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert (first == -1.5).all() and (store.pull("a") == -3.75).all()
"""


def run(script: str) -> None:
    environment = {
        **clean_environment(),
        "PYTHONPATH": str(ROOT),
        "MXNET_KVSTORE_REDUCTION_NTHREADS": "3",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("how", ENDS)
def test_the_interpreter_ends(how: str) -> None:
    run(STORE + ENDS[how])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_works_with_threads_of_its_own() -> None:
    run(STORE + FORK)
