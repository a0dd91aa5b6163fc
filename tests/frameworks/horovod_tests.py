"""Horovod's own tests of ``horovod.torch``, run with ``kvstore.horovod.torch`` in its place.

::

    git clone https://github.com/horovod/horovod
    python tests/frameworks/horovod_tests.py horovod                # 2 ranks; 1 if a test failed
    python tests/frameworks/horovod_tests.py horovod --ranks 3 test_horovod_join_allreduce

They are in ``test/parallel/test_torch.py`` of a checkout; the package on PyPI does not have them,
so this is run by hand. Horovod itself need not be installed. Every test of the file runs but those
of ``horovod_tests.txt``, which has a reason for each; tests that skip themselves, as those that
want GPUs, are counted as skipped. The file's helpers (test/utils/common.py) import
Horovod's runner, so the three that it uses are written here anew.

All ranks of a job run all tests, one after the other, and each test joins the job anew.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("horovod_tests.txt")
LIMIT_S = "20"
"""Of each wait: ranks that wait for one whose test has failed."""
TIMED = ("test_global_barrier_op", "test_process_set_barrier_op", "duplicate_name_error")
"""Parts of the names of tests that are tried three times.

In those of barriers a rank that wakes up after rank 0 waits less than the 5 seconds that they
expect, which begin on each rank by itself. Those of names in use expect that the first call is not
over when the second is made; with three ranks it may be, if this process had to wait for a core.
"""


def left_out(ranks: int) -> dict[str, str]:
    """The tests that are not run with so many ranks, each with its reason."""
    found = {}
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, reason = line.partition(": ")
            name, _, only = name.partition(" with ")
            if not only or only == f"{ranks} ranks":
                found[name] = reason
    return found


def helpers() -> ModuleType:
    """What the tests import from their ``common``."""
    module = ModuleType("common")

    @contextlib.contextmanager
    def temppath() -> Iterator[str]:
        with tempfile.TemporaryDirectory() as folder:
            yield str(Path(folder) / "temp_test_file")

    def mpi_env_rank_and_size() -> tuple[int, int]:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def skip_or_fail_gpu_test(test: unittest.TestCase, message: str) -> None:
        test.skipTest(message)

    vars(module).update(
        temppath=temppath,
        mpi_env_rank_and_size=mpi_env_rank_and_size,
        skip_or_fail_gpu_test=skip_or_fail_gpu_test,
    )
    return module


def tests_of(checkout: Path) -> type[unittest.TestCase]:
    """Horovod's class of tests, with this project's layer under its names.

    Some try all optimizers of PyTorch; they were written before Muon, which takes matrices only.
    """
    import kvstore.horovod
    import kvstore.horovod.torch
    import torch

    sys.modules["horovod"] = kvstore.horovod
    sys.modules["horovod.torch"] = kvstore.horovod.torch
    sys.modules["common"] = helpers()
    if hasattr(torch.optim, "Muon"):
        torch.optim.Muon.__module__ = "muon"  # they look for modules that begin with torch.optim
    path = checkout / "test" / "parallel" / "test_torch.py"
    spec = importlib.util.spec_from_file_location("horovod_test_torch", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: type[unittest.TestCase] = module.TorchTests
    return found


def outcome(case: type[unittest.TestCase], name: str) -> str:
    """``ok``, ``skip: ...`` or the traceback of a failure, of this rank."""
    marks = getattr(getattr(case, name), "pytestmark", [])
    for mark in marks:
        if mark.name == "skip":
            return f"skip: {mark.kwargs.get('reason', 'its authors skip it')}"
    result = unittest.TestResult()
    case(name).run(result)
    for _, text in [*result.errors, *result.failures]:
        return text
    return f"skip: {result.skipped[0][1]}" if result.skipped else "ok"


def run_rank(options: argparse.Namespace) -> int:
    """What one of the processes does."""
    import kvstore.horovod as hvd
    import torch
    from torch.distributed import TCPStore

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    control = TCPStore(*place, options.ranks, rank == 0, timedelta(seconds=600))
    os.environ["HOROVOD_RANK"] = os.environ["RANK"]  # as where Horovod runs with Gloo
    os.environ["HOROVOD_SIZE"] = os.environ["WORLD_SIZE"]
    case = tests_of(options.checkout)
    names = options.tests or unittest.defaultTestLoader.getTestCaseNames(case)
    skipped = {} if options.tests else left_out(options.ranks)
    counts = {"ok": 0, "skip": 0, "FAIL": 0}
    for name in [each for each in names if each not in skipped]:
        began = time.monotonic()
        for attempt in range(3 if any(part in name for part in TIMED) else 1):
            own = outcome(case, name)
            hvd.shutdown()
            control.set(f"{name}/{attempt}/{rank}", own)
            keys = [f"{name}/{attempt}/{each}" for each in range(options.ranks)]
            found = [control.get(key).decode() for key in keys]
            if set(found) == {"ok"}:
                break
        kinds = {each.partition(":")[0] for each in found}
        word = "ok" if kinds == {"ok"} else "skip" if kinds <= {"ok", "skip"} else "FAIL"
        counts[word] += 1
        if rank == 0:
            reason = next((each for each in found if each.startswith("skip")), "")
            text = f"{word:4} {name} {time.monotonic() - began:.1f} s {reason}".rstrip()
            print(text, flush=True)
            if word == "FAIL":
                for other, each in enumerate(found):
                    print(f"--- rank {other}\n{each}", flush=True)
    if rank == 0:
        print(
            f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} were skipped, "
            f"{len(skipped)} were left out"
        )
    control.set(f"the end/{rank}", "")
    if rank == 0:  # the store is in this process
        control.wait([f"the end/{each}" for each in range(options.ranks)])
    return 1 if counts["FAIL"] else 0


def start(options: argparse.Namespace) -> int:
    """Run all ranks under this project's launcher."""
    command: list[Any] = [sys.executable, "-m", "kvstore", "launch", "-n", options.ranks, "-s", 1]
    command += ["--launcher", "local", "--no-status", sys.executable, __file__]
    command += ["--worker", "--ranks", options.ranks, options.checkout.resolve(), *options.tests]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PS_STALL_TIMEOUT": LIMIT_S,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    return subprocess.run([*map(str, command)], env=environment, check=False).returncode


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Run Horovod's own tests with kvstore.")
    parser.add_argument("checkout", type=Path, help="a checkout of github.com/horovod/horovod")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*", default=[])
    options = parser.parse_args()
    if not (options.checkout / "test" / "parallel" / "test_torch.py").is_file():
        parser.error(f"{options.checkout} is not a checkout of Horovod: it lacks test/parallel")
    return run_rank(options) if options.worker else start(options)


if __name__ == "__main__":
    sys.exit(main())
