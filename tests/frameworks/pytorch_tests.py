"""PyTorch's own tests of a distributed backend, run with ``kvstore``, in one set of processes.

::

    python tests/frameworks/pytorch_tests.py            # 3 ranks; exit code 1 if a test failed
    python tests/frameworks/pytorch_tests.py --ranks 4 test_all_reduce_sum test_gather_object
    python tests/frameworks/pytorch_tests.py --backend gloo

They come with PyTorch: ``torch/testing/_internal/distributed/distributed_test.py``. Its text lets
in the backends that it knows by their names; ``widened`` adds the name of this one, and changes
nothing else. ``pytorch_tests.txt`` lists the tests that apply to a backend on CPUs: not those that
want GPUs, NCCL, eight ranks, torchvision, or gloo's words in the errors of ``monitored_barrier``.
They need the package ``expecttest``.

PyTorch starts new processes for each test. Here a set of processes runs all, with a group that is
made anew after a failure; the seeds are the same before each test.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import traceback
import unittest
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "kvstore"
ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("pytorch_tests.txt")
LIMIT_S = 60.0
"""Of each call: ranks that wait for one whose test has failed."""
CONTROL_S = 600.0
_SKIPS = range(72, 90)
"""Exit codes by which PyTorch's tests say that they were skipped (``TEST_SKIPS``)."""


def names() -> list[str]:
    """The tests that apply to a backend on CPUs."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def widened(text: str) -> str:
    """The text of PyTorch's tests with this backend beside those that it names."""
    available = "@require_backend_is_available({{{}}})"
    changes = {
        available.format('"gloo"'): available.format('"gloo", BACKEND'),
        'BACKEND == "mpi" or': f'BACKEND in ("mpi", "{NAME}") or',
        'BACKEND != "mpi"': f'BACKEND not in ("mpi", "{NAME}")',
        'BACKEND != "gloo"': f'BACKEND not in ("gloo", "{NAME}")',
    }
    for known, wider in changes.items():
        if known not in text:
            raise SystemExit(f"expected {known!r} in PyTorch's tests: look what has changed there")
        text = text.replace(known, wider)
    return text


def tests_of(folder: Path) -> ModuleType:
    """PyTorch's tests, widened."""
    from torch.testing._internal.common_distributed import DistTestCases

    for feature in ("plugin", "ddp", "subgroup", "gpu"):  # the last: also with GPUs
        DistTestCases.backend_feature[feature].add(NAME)
    found = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert found is not None and found.origin is not None
    path = folder / "widened_distributed_test.py"
    path.write_text(widened(Path(found.origin).read_text(encoding="utf-8")), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # its objects are pickled by this name
    spec.loader.exec_module(module)
    return module


# -- one rank ------------------------------------------------------------------------------------


class Rank:
    """One process: runs each test with a group that all share, and tells the others how it went."""

    def __init__(self, control: Any, rank: int, size: int, backend: str, folder: Path) -> None:
        import torch.distributed as dist

        self.dist, self.control, self.rank, self.size = dist, control, rank, size
        self.backend, self.groups = backend, 0
        self.module = tests_of(folder)
        bases = (self.module.TestDistBackend, self.module.DistributedTest._DistTestBase)
        self.cls = type("TestKVStore", bases, {})
        dist.distributed_c10d.default_pg_timeout = timedelta(seconds=LIMIT_S)  # of subgroups

    def begin(self) -> None:
        """Make a group; the store of each has keys of its own."""
        self.groups += 1
        store = self.dist.PrefixStore(f"group {self.groups}", self.control)
        limit = timedelta(seconds=LIMIT_S)
        self.dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.size, timeout=limit
        )

    def run(self, name: str) -> str:
        """``ok``, ``skip: ...`` or the traceback of a failure, of this rank."""
        import torch

        torch.manual_seed(20)
        random.seed(20)
        test = self.cls(name)
        test.rank = self.rank
        method = getattr(test, name)
        if getattr(method, "__unittest_skip__", False):
            return f"skip: {method.__unittest_skip_why__}"
        try:
            method()
        except unittest.SkipTest as skipped:
            return f"skip: {skipped}"
        except SystemExit as ended:
            if ended.code in (0, None):
                return "ok"
            is_skip = ended.code in _SKIPS
            return f"skip: code {ended.code}" if is_skip else f"exit code {ended.code}"
        except BaseException:
            return traceback.format_exc()
        return "ok"

    def agree(self, name: str, found: str) -> list[str]:
        """How a test went on every rank."""
        self.control.set(f"{name}/{self.rank}", found)
        return [self.control.get(f"{name}/{rank}").decode() for rank in range(self.size)]

    def run_all(self, tests: Sequence[str]) -> int:
        """Run the tests; rank 0 prints how they went. Returns the exit code."""
        self.begin()
        counts = {"ok": 0, "skip": 0, "FAIL": 0}
        for name in tests:
            results = self.agree(name, self.run(name))
            kinds = {result.partition(":")[0] for result in results}
            word = "ok" if kinds == {"ok"} else "skip" if kinds <= {"ok", "skip"} else "FAIL"
            counts[word] += 1
            if self.rank == 0:
                reason = next((each for each in results if each.startswith("skip")), "")
                print(f"{word:4} {name} {reason if word == 'skip' else ''}".rstrip(), flush=True)
                if word == "FAIL":
                    for rank, result in enumerate(results):
                        print(f"--- rank {rank}\n{result}", flush=True)
            if word == "FAIL":
                self.dist.destroy_process_group()
                self.begin()
        if self.rank == 0:
            print(f"{counts['ok']} passed, {counts['FAIL']} failed, {counts['skip']} were skipped")
        self.dist.destroy_process_group()
        self.control.set(f"the end/{self.rank}", "ok")
        if self.rank == 0:  # the store is in this process
            self.control.wait([f"the end/{rank}" for rank in range(self.size)])
        return 1 if counts["FAIL"] else 0


def run_rank(options: argparse.Namespace) -> int:
    """What one of the processes does."""
    import kvstore.torch  # noqa: F401  (registers, also where no entry point is installed)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    limit = timedelta(seconds=CONTROL_S)
    rank = options.rank
    control = dist.TCPStore("127.0.0.1", options.port, options.ranks, rank == 0, limit)
    folder = Path(os.environ["TEMP_DIR"]) / f"rank{rank}"
    folder.mkdir()
    return Rank(control, rank, options.ranks, options.backend, folder).run_all(options.tests)


# -- all ranks -----------------------------------------------------------------------------------


def start(options: argparse.Namespace, folder: Path) -> int:
    """Run all ranks; the exit code of the first that failed."""
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir()
    environment = {
        **os.environ,
        "BACKEND": options.backend,
        "WORLD_SIZE": str(options.ranks),
        "TEMP_DIR": str(folder),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(options.port + 1),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        *(sys.executable, __file__, "--ranks", str(options.ranks)),
        *("--port", str(options.port), "--backend", options.backend),
    ]
    ranks = [
        subprocess.Popen([*command, "--rank", str(rank), *options.tests], env=environment)
        for rank in range(options.ranks)
    ]
    codes = [rank.wait() for rank in ranks]
    return next((code for code in codes if code), 0)


def main() -> int:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Run PyTorch's own tests of a backend.")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--backend", default=NAME)
    parser.add_argument("--port", type=int, default=20_000 + 2 * random.randrange(6_000))
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("tests", nargs="*", default=[])
    options = parser.parse_args()
    options.tests = options.tests or names()
    if options.rank >= 0:
        return run_rank(options)
    with tempfile.TemporaryDirectory() as folder:
        return start(options, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
