"""What every test gets: the project on the path, settings of hypothesis, and the leak check.

A test fails if it leaves behind a thread of the project, a child process, a ZeroMQ context or a
shared-memory segment. What is on its way out has two seconds to vanish.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import zmq
import zmq.utils.garbage

# NumPy's BLAS and PyTorch read these when they are loaded, here and in the processes that tests
# start: the other processors run other tests, and a thread of OpenMP computes even while it waits.
# Tests of launchers run alone, and see what launchers set.
if "KVSTORE_LAUNCHER_TESTS" not in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# Derandomized: a test that passes today passes tomorrow. No deadline: the machine is shared.
hypothesis.settings.register_profile("project", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("project")

# Python looks for garbage after every 700 objects. The leak check does so after each test that may
# have left some, and in between a tenth of the tests' time is better spent.
gc.set_threshold(20_000, 10, 10)

GRACE_S = 2.0
THREAD_PREFIXES = ("pslite-", "kvstore-")
# Made once for a process by its first large call, and asleep in between
# (kvstore/arrays/cpu/threads.py).
LASTING_THREADS = "kvstore-core-"
SEGMENT_PREFIX = "psl"
SHARED_MEMORY = "/dev/shm"
MANY_MODULES = 100
# Started once, by the standard library or by tests/process/forker.py, and meant to outlive whoever
# needed them.
LASTING_CHILDREN = (
    b"multiprocessing.resource_tracker",
    b"multiprocessing.forkserver",
    b"prefork.py",
)

_contexts: weakref.WeakSet[zmq.Context[Any]] = weakref.WeakSet()
#: Whether a descriptor of this process may be one of a shared-memory segment.
_may_have_segments = True
#: How many modules there were when what stays was last set aside.
_num_modules = 0


def _record_contexts() -> None:
    """Keep note of every ZeroMQ context that is made from here on."""
    made = zmq.Context.__init__

    @wraps(made)
    def noting(self: zmq.Context[Any], *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        _contexts.add(self)

    zmq.Context.__init__ = noting  # type: ignore[method-assign]


_record_contexts()


def _record_segments() -> None:
    """Keep note of descriptors that may be shared memory: a look at all of them takes long."""

    def note(name: str) -> None:
        made: Callable[..., int] = getattr(os, name)

        @wraps(made)
        def noting(what: Any, *args: Any, **kwargs: Any) -> int:
            global _may_have_segments
            descriptor = made(what, *args, **kwargs)
            # A peer's is opened through its process.
            if name == "memfd_create" or str(what).startswith("/proc/"):
                _may_have_segments = True
            return descriptor

        setattr(os, name, noting)

    for name in "memfd_create", "open":
        if hasattr(os, name):
            note(name)


_record_segments()


def _threads() -> set[str]:
    return {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if thread.name.startswith(THREAD_PREFIXES) and not thread.name.startswith(LASTING_THREADS)
    }


def _open_contexts() -> set[str]:
    # pyzmq's own context frees the buffers of zero-copy sends; it lives as long as the process.
    own = zmq.utils.garbage.gc._context
    return {
        f"open ZeroMQ context {id(context):#x}"
        for context in list(_contexts)
        if context is not own and not context.closed
    }


def _child_processes() -> set[str]:
    found: set[str] = set()
    for task in _listed("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", "rb", buffering=0) as file:
                pids = file.read().decode().split()
        except OSError:  # the thread has just ended
            continue
        found.update(f"child process {pid}" for pid in pids if _is_alive(pid))
    return found


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:  # this system has none
        return []


def _is_alive(pid: str) -> bool:
    """Whether ``pid`` runs and should not. Zombies are dead: they only wait for a wait()."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return state != "Z" and not any(lasting in command for lasting in LASTING_CHILDREN)


def _segments() -> set[str]:
    global _may_have_segments
    named = {
        f"shared memory {SHARED_MEMORY}/{name}"
        for name in _listed(SHARED_MEMORY)
        if name.startswith(SEGMENT_PREFIX)
    }
    if not _may_have_segments:
        return named
    _may_have_segments = False  # before the look, which another thread may overtake
    found = set()
    for descriptor in _listed("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith(f"/memfd:{SEGMENT_PREFIX}"):
            found.add(f"shared memory {target} at descriptor {descriptor}")
    _may_have_segments = _may_have_segments or bool(found)
    return named | found


def leaks() -> set[str]:
    """Everything that exists now and that no test may leave behind, in words."""
    return _threads() | _open_contexts() | _child_processes() | _segments()


def _set_aside_what_stays() -> None:
    """What was imported until now stays: collecting garbage need not look at it each time.

    Several hundred tests collect garbage, and PyTorch alone makes each time a tenth of a second
    longer; so this is done again when a test has imported much.
    """
    global _num_modules
    if len(sys.modules) >= _num_modules + MANY_MODULES:
        _num_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """A slow test says why ``make test`` may leave it out; tests that wait are spread."""
    for item in items:
        if any(not mark.kwargs.get("reason") for mark in item.iter_markers("slow")):
            raise pytest.UsageError(
                f'{item.nodeid}: expected pytest.mark.slow(reason="..."), found a mark without a'
                " reason; say why make test may leave the test to make test-slow"
            )
    yield
    items[:] = _spread(items)


def _spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put those that start processes evenly between the files of the others.

    Those of PyTorch come first, side by side: the process that imports it for them (``job.py`` of
    tests/process) is one of this process, and one or two of them should do.

    They mostly wait: at any time some of them run beside tests that compute, in each of the
    processes of pytest-xdist, and they are not what is left in the end.
    """
    waiting = [item for item in items if item.get_closest_marker("process")]
    waiting.sort(key=lambda item: not _is_of_pytorch(item))
    computing = [item for item in items if not item.get_closest_marker("process")]
    arranged: list[pytest.Item] = []
    placed = 0
    for number, item in enumerate(computing, start=1):
        arranged.append(item)
        if number == len(computing) or computing[number].path != item.path:
            due = len(waiting) * number // len(computing)
            arranged += waiting[placed:due]
            placed = due
    return arranged if computing else waiting


def _is_of_pytorch(item: pytest.Item) -> bool:
    """Whether its processes are forks of the one that has imported PyTorch."""
    module = getattr(item, "module", None)
    return hasattr(module, "ONE_THREAD") or hasattr(module, "start_ranks")


def pytest_collection_finish() -> None:
    """Everything that the files of tests import is there."""
    _set_aside_what_stays()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail the test that leaves something of the project running or open."""
    _set_aside_what_stays()
    before = leaks()
    yield
    left = leaks() - before
    # A node's memory is freed with the last that refers to it, which may be a cycle. What this test
    # has made is young, and to look for that alone takes a tenth of the time.
    for generation in (1, 2):
        if not left:
            return
        gc.collect(generation)
        left = leaks() - before
    give_up_at = time.monotonic() + GRACE_S
    while left and time.monotonic() < give_up_at:
        time.sleep(0.02)
        left = leaks() - before
    if left:
        pytest.fail("the test left behind: " + "; ".join(sorted(left)), pytrace=False)
