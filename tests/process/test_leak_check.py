"""The leak check of ``tests/conftest.py`` is worth something only if it finds leaks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]

LEAKY = """
import os, subprocess, sys, threading, time
import zmq
kept = []

def test_clean():
    kept.append(threading.Thread(target=time.sleep, args=(0.3,), name="pslite-late"))
    kept[-1].start()  # it ends by itself within the time of grace
    with zmq.Context() as context:
        kept.append(context)
    subprocess.run([sys.executable, "-c", ""], check=True)

def test_leaky():
    done = threading.Event()
    kept.append(threading.Thread(target=done.wait, args=(8,), name="kvstore-pool", daemon=True))
    kept[-1].start()
    kept.append(zmq.Context())
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(8)"]))
    kept.append(os.memfd_create("psl-segment"))

def test_next_is_not_blamed():
    pass

def test_cleanup():
    kept[3].term()
    kept[4].kill()
    kept[4].wait()
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_each_kind_of_leak_fails_the_test_that_left_it_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "4 passed, 1 error" in run.stdout, run.stdout + run.stderr
    [report] = [line for line in run.stdout.splitlines() if line.startswith("the test left")]
    for kind in ("thread kvstore-pool", "open ZeroMQ context", "child process", "memfd:psl"):
        assert kind in report
    assert "ERROR test_leaky.py::test_leaky" in run.stdout
