"""A process that is forked by ``prefork.py`` finds what a new interpreter finds."""

from __future__ import annotations

import importlib.util
import signal

import pytest
from job import CAN_FORK, ONE_THREAD, MakeJob

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not CAN_FORK, reason="processes are not forked here"),
]

LOOK = """
import json, os, signal, sys, threading
def hello():
    pass
with open("/proc/self/environ", "rb") as file:
    shown = {entry.decode() for entry in file.read().split(b"\\0") if entry}
print(json.dumps({
    "arguments": sys.argv, "path": sys.path, "directory": os.getcwd(), "stdin": sys.stdin.read(),
    "environment": dict(os.environ), "shown": sorted(shown), "leads": os.getsid(0) == os.getpid(),
    "main": [__name__, hello.__module__, sys.modules["__main__"].hello is hello],
    "signals": [str(signal.getsignal(number)) for number in (2, 13, 15, 17)],
    "threads": threading.active_count(), "descriptors": sorted(os.listdir("/proc/self/fd")),
}, sort_keys=True, indent=1))
sys.stdout.write("no line end")
sys.stdout.flush()
os.write(2, b"said last")
sys.exit(7)
"""


def test_a_forked_process_is_like_a_new_one_in_all_it_can_see(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    seen = []
    for forks in True, False:
        job.forks = forks
        process = job.start("worker", 0, ("-c", LOOK, "one", "two"))
        assert process.wait() == 7
        seen.append(process.lines)
    assert seen[0] == seen[1]
    assert seen[0][-1] == "no line endsaid last"


def test_a_line_that_a_forked_process_prints_is_one_write(make_job: MakeJob) -> None:
    """What its other threads log would otherwise fall between the arguments of ``print``."""
    code = """
import os
class Logs:
    def __str__(self):
        os.write(2, b"logged\\n")
        return "two"
print("one", Logs(), "three")
"""
    process = make_job(1, 1).start("worker", 0, ("-c", code))
    assert process.wait() == 0
    assert process.lines == ["logged", "one two three"]


def test_what_a_fork_would_find_imported_otherwise_makes_it_a_new_process(
    make_job: MakeJob,
) -> None:
    """Libraries read some variables when they are imported."""
    job = make_job(1, 1)
    code = ("-c", "import sys; print('numpy' in sys.modules)")
    plain = job.start("worker", 0, code)
    changed = job.start("worker", 0, code, {"OPENBLAS_NUM_THREADS": "2"})
    assert [plain.wait(), changed.wait()] == [0, 0]
    assert [plain.text, changed.text] == ["True\n", "False\n"]


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_a_process_of_pytorch_is_a_fork_that_has_imported_it_unless_that_reads_its_settings(
    make_job: MakeJob,
) -> None:
    job = make_job(1, 1)
    code = ("-c", "import sys; print('torch' in sys.modules)  # import torch")
    settings = {**ONE_THREAD, "RANK": "1"}
    plain = job.start("worker", 0, code, settings)
    changed = job.start("worker", 0, code, {**settings, "KVSTORE_TORCH_REPLACES": "gloo"})
    assert [plain.wait(), changed.wait()] == [0, 0]
    assert [plain.text, changed.text] == ["True\n", "False\n"]


def test_what_a_library_adds_to_the_environment_of_the_tests_makes_no_new_process(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "somewhere")
    job = make_job(1, 1)
    process = job.start("worker", 0, ("-c", "import sys; print('numpy' in sys.modules)"))
    assert (process.wait(), process.text) == (0, "True\n")


def test_a_forked_process_that_is_killed_ends_with_its_signal(make_job: MakeJob) -> None:
    job = make_job(1, 1)
    process = job.start("worker", 0, ("-c", "print('here'); import time; time.sleep(60)"))
    process.wait_for("here")
    process.send(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
