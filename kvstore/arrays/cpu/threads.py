"""The thread pool that all stores of a process share for arithmetic on the host.

``Cores.run`` distributes a list of tasks over the caller and helper threads. It does not know
about arrays; ``stores/local/blocks.py`` decides what may run at the same time. ``shared`` returns
the one ``Cores`` of the process. It is created at the first use, with as many threads as the
process may use cores, at most ``MOST_THREADS``. Helpers are daemon threads; they start when there
is work for them, and sleep when there is none. A forked child creates its own. Importing this
module starts no thread.

The caller always takes part and could do everything alone, so a call never waits for a helper
that is busy elsewhere, and a task may itself call ``run``. Waking a helper costs some ten
microseconds, once for each helper and call, however many tasks there are.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pslite import Config

Task = Callable[[], object]

MOST_THREADS = 8
"""The default limit: with more threads, they wait for each other's interpreter lock."""


class Failure(NamedTuple):
    """The reason why a call of ``run`` did not finish all of its tasks."""

    error: BaseException
    """The error of the first task in the list that raised."""
    not_done: frozenset[int]
    """The tasks that raised or did not begin; the others were done."""
    not_begun: frozenset[int]


class Cores:
    """A thread pool that includes the calling thread. Any thread may call it."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = max(num_threads, 1)
        self._waiting: queue.SimpleQueue[_Batch] = queue.SimpleQueue()
        # Guards the number of helpers.
        self._lock = threading.Lock()
        self._num_helpers = 0

    def run(self, tasks: Sequence[Task]) -> Failure | None:
        """Run all tasks, in any order and in parallel; return when all have ended.

        After a task has raised, no other begins. NumPy's arithmetic warnings are off in tasks. If
        ``KeyboardInterrupt`` is raised in the calling thread, ``run`` raises it after
        the other threads have finished their current tasks.
        """
        if self.num_threads == 1 or len(tasks) < 2:
            with np.errstate(all="ignore"):
                return _alone(tasks)
        batch = _Batch(tasks)
        for _ in range(min(self._ready_helpers(len(tasks) - 1), len(tasks) - 1)):
            self._waiting.put(batch)
        try:
            with np.errstate(all="ignore"):
                batch.take_part()
        except BaseException:  # Ctrl-C between two tasks
            batch.give_up()
            batch.end()
            raise
        return batch.end()

    def _ready_helpers(self, wanted: int) -> int:
        """Start helpers if more are wanted, and return how many there are."""
        if self._num_helpers >= min(wanted, self.num_threads - 1):
            return self._num_helpers
        with self._lock:
            while self._num_helpers < min(wanted, self.num_threads - 1):
                name = f"kvstore-core-{self._num_helpers + 1}"
                helper = threading.Thread(target=_help, args=(self._waiting,), name=name)
                helper.daemon = True
                try:
                    helper.start()
                except RuntimeError:  # the interpreter is ending, or the system has no more threads
                    break
                self._num_helpers += 1
            return self._num_helpers


def _alone(tasks: Sequence[Task]) -> Failure | None:
    for index, task in enumerate(tasks):
        try:
            task()
        except Exception as error:
            later = frozenset(range(index + 1, len(tasks)))
            return Failure(error, later | {index}, later)
    return None


class _Batch:
    """The tasks of one call, and the threads that work on them."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        # One operation on a deque is atomic, so that taking a task needs no lock.
        self._tasks = deque(enumerate(tasks))
        self._errors: list[tuple[int, BaseException]] = []
        self._not_begun: list[tuple[int, Task]] = []
        # Guards the next two: a helper that comes after the caller has left does nothing.
        self._lock = threading.Lock()
        self._num_helping = 0
        self._is_over = False
        self._is_idle = threading.Lock()
        self._is_idle.acquire()

    def help(self) -> None:
        """Run tasks on a helper thread, unless the call has already ended."""
        with self._lock:
            is_late = self._is_over
            self._num_helping += not is_late
        if is_late:
            return
        self.take_part()
        with self._lock:
            self._num_helping -= 1
            if self._is_over and not self._num_helping:
                self._is_idle.release()

    def take_part(self) -> None:
        """Run tasks until none is left."""
        while True:
            try:
                index, task = self._tasks.popleft()
            except IndexError:
                return
            try:
                task()
            except BaseException as error:
                self._errors.append((index, error))
                self.give_up()

    def end(self) -> Failure | None:
        """Wait on the caller's thread until the helpers have finished; return a failure."""
        interrupt: BaseException | None = None
        with self._lock:
            self._is_over = True
            is_idle = self._num_helping == 0
        while not is_idle:
            try:
                is_idle = self._is_idle.acquire()
            except BaseException as error:  # Ctrl-C: the helpers still work in the arrays
                interrupt = error
                self.give_up()
        for raised in [interrupt, *(error for _, error in self._errors)]:
            if raised is not None and not isinstance(raised, Exception):
                raise raised
        if not self._errors:
            return None
        _, first = min(self._errors, key=lambda item: item[0])
        not_begun = frozenset(index for index, _ in self._not_begun)
        return Failure(first, not_begun | {index for index, _ in self._errors}, not_begun)

    def give_up(self) -> None:
        """Cancel the tasks that have not begun; ``end`` reports them."""
        while True:
            try:
                self._not_begun.append(self._tasks.popleft())
            except IndexError:
                return


def _help(waiting: queue.SimpleQueue[_Batch]) -> None:
    np.seterr(all="ignore")  # of this thread alone
    while True:
        batch = waiting.get()
        batch.help()
        del batch  # keeps a call's arrays alive


_by_process: dict[int, Cores] = {}


def shared() -> Cores:
    """Return the ``Cores`` of this process, with the settings of the first call."""
    process = os.getpid()
    found = _by_process.get(process)
    if found is None:
        # A parent's, in a forked child: its threads are not here, and its locks may be held.
        for other in [number for number in _by_process if number != process]:
            del _by_process[other]
        found = _by_process.setdefault(process, Cores(_number_of_threads()))
    return found


def _number_of_threads() -> int:
    wanted: int = Config.read("reduction_threads")
    if wanted:
        return wanted
    if hasattr(os, "sched_getaffinity"):  # Linux; not macOS
        return min(len(os.sched_getaffinity(0)), MOST_THREADS)
    return min(os.cpu_count() or 1, MOST_THREADS)
