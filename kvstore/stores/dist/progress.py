"""The progress of a worker for reports: steps, samples and time spent waiting.

``Trainer`` and ``FeedForward.fit`` call ``note_step`` when a step is done, with its number of
samples. If a script pushes and pulls by itself, its rounds are counted instead: the pushes of the
key that it pushes most. Stores record their waits (``node.py``). All this costs less than a
microsecond per step. The node's I/O thread computes rates when a report is requested
(``pslite/node/report.py``). Each node has one ``StoreProgress``, shared by its stores. Callers'
threads count without a lock; a lost count does no harm.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from kvstore.arrays.keys import Key
from kvstore.errors.tracebacks import call_of
from pslite import Future, Postoffice
from pslite.errors import DeadlockError
from pslite.wire.survey import LEAST_WAIT_S, Progressed, Wait

#: Rates are computed over ``_MARKS`` marks, which are at least ``_MARK_S`` apart.
_MARKS = 10
_MARK_S = 1.0
_MOST_SAMPLES = 1e18
"""Larger counts are not plausible and do not fit in a report (``survey.py``)."""


class _Mark(NamedTuple):
    """The counters at the end of a step."""

    at: float
    steps: int
    samples: float
    waited_s: float


class StoreProgress:
    """Counts for one node. ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._rounds = self._steps = 0
        self._samples = self._waited_s = 0.0
        #: How many times each key was pushed; a call with several keys counts for its first key.
        self._pushes: dict[tuple[int, Key], int] = {}
        self._most_pushes = 0
        #: Replaced, never modified, since another thread reads it.
        self._marks: tuple[_Mark, ...] = ()
        self._first_at = self._stepped_at = 0.0
        #: Thread -> when its wait began, the awaited future, and the future that ends the wait
        #: (None until the wait is long, and for a wait with a limit).
        self._waits: dict[int, tuple[float, Future[Any], Future[None] | None]] = {}
        self._num_long_waits = 0
        #: Returns whether threads other than these may act on a store.
        self.others_may_act: Callable[[Collection[int]], bool] = others_may_act

    # -- from the script's threads -----------------------------------------------------

    def step(self, samples: float = 0) -> None:
        """Record a finished step of training, with this worker's number of samples."""
        if not self._steps:
            self._marks = ()  # the old marks counted rounds
        self._steps += 1
        self._samples += samples
        self._mark(self._steps)

    def pushed(self, store: int, key: Key) -> None:
        """Record a call that pushes; ``key`` is its first key."""
        which = store, key
        count = self._pushes[which] = self._pushes.get(which, 0) + 1
        if count > self._most_pushes:
            self._most_pushes = count
            self._rounds += 1
            if not self._steps:
                self._mark(self._rounds)

    def forget(self, store: int, keys: Iterable[Key]) -> None:
        """Forget the counts of deleted keys."""
        for key in keys:
            self._pushes.pop((store, key), None)
        self._most_pushes = max(list(self._pushes.values()), default=0)

    def _mark(self, count: int) -> None:
        self._stepped_at = now = self._clock()
        if not self._marks:
            self._first_at = now
        if not self._marks or now - self._marks[-1].at >= _MARK_S:
            mark = _Mark(now, count, self._samples, self._waited_s)
            self._marks = (*self._marks[1 - _MARKS :], mark)

    def begin_wait(self, future: Future[Any]) -> None:
        """Record that the calling thread begins to wait."""
        self._waits[threading.get_ident()] = self._clock(), future, None

    def end_wait(self) -> None:
        """Record that the calling thread (or a signal handler in it) stopped waiting."""
        wait = self._waits.pop(threading.get_ident(), None)
        if wait is not None:
            self._waited_s += self._clock() - wait[0]

    def begin_long_wait(self, future: Future[Any]) -> Future[None]:
        """Record that the calling thread's wait is long and has no limit.

        Returns a future that ends the wait: it is done when ``future`` is, or fails with a
        ``DeadlockError``.
        """
        ended: Future[None] = Future(future.describer())
        self._num_long_waits += 1
        thread = threading.get_ident()
        began = self._waits[thread][0] if thread in self._waits else self._clock()
        self._waits[thread] = began, future, ended
        future.on_done(lambda _: ended.set_result(None))
        return ended

    # -- from the node's I/O thread ----------------------------------------------------

    def progressed(self) -> Progressed:
        """Return the counters, and rates over the last marks."""
        now, marks = self._clock(), self._marks
        count, samples = self._steps or self._rounds, self._samples
        waited_s = self._waited_s + sum(now - wait[0] for wait in list(self._waits.values()))
        first = marks[0] if marks else _Mark(self._began_at, 0, 0.0, 0.0)
        steps = count - first.steps if marks else 0
        per_s = 0.0
        if steps > 0:
            span_s = self._stepped_at - first.at
            # An overdue step reduces the rate; a step that is not due yet does not.
            per_s = 1 / max(span_s, now - first.at - span_s / steps, 1e-9)
        return Progressed(
            steps=count,
            samples=round(min(samples, _MOST_SAMPLES)),
            steps_per_s=steps * per_s,
            samples_per_s=max(0.0, min(samples, _MOST_SAMPLES) - first.samples) * per_s,
            communication=min(1.0, max(0.0, waited_s - first.waited_s) / max(now - first.at, 1e-9)),
            since_step_s=max(0.0, now - self._stepped_at) if count else 0.0,
            trained_s=max(0.0, now - self._first_at) if count else 0.0,
        )

    def waits(self) -> list[Wait]:
        """Describe the long waits of the script's threads."""
        now = self._clock()
        return [
            Wait(_what(future), 0, (), now - began)
            for began, future, _ in list(self._waits.values())
            if now - began >= LEAST_WAIT_S
        ]

    def stuck(self) -> tuple[int, list[str]] | None:
        """Return the number of long waits so far, and the waiting calls of all threads.

        Return None if a thread may continue even though no message arrives.
        """
        waits = self._waits.copy()
        if not waits or any(end is None or end.done() for _, _, end in waits.values()):
            return None
        if self.others_may_act(waits.keys()):
            return None
        frames = sys._current_frames()
        calls = [
            f"{call_of(frames.get(thread))} for {_what(future)}"
            for thread, (_, future, _) in waits.items()
        ]
        return self._num_long_waits, calls

    def deadlocked(self, text: str) -> None:
        """End all long waits with a ``DeadlockError``: no message will come."""
        for _, _, ended in list(self._waits.values()):
            if ended is not None:
                ended.set_error(DeadlockError(text))


_BLOCKED = threading.Condition.wait.__code__
"""The code that a waiting thread executes, unless it runs a signal handler."""
_OUR_THREADS = ("pslite-", "kvstore-")
_QUIET_LIBRARIES = frozenset({"tqdm", "zmq"})
"""Threads of these libraries never call a store: they draw a bar, or free memory."""


def others_may_act(waiting: Collection[int]) -> bool:
    """Return whether a thread outside ``waiting`` may call a store."""
    frames = sys._current_frames()
    known = {thread.ident: thread for thread in threading.enumerate()}
    for ident, frame in frames.items():
        thread = known.get(ident)
        if ident in waiting:
            if frame.f_code is not _BLOCKED:
                return True
        elif thread is None or not (
            thread.name.startswith(_OUR_THREADS)
            or type(thread).__module__.partition(".")[0] in _QUIET_LIBRARIES
        ):
            return True
    return not frames.keys() >= set(waiting)


def _what(future: Future[Any]) -> str:
    try:
        return future.what
    except Exception:  # a description may read data that another thread is changing
        return "an answer"


_of_nodes: weakref.WeakKeyDictionary[Postoffice, StoreProgress] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def progress_of(node: Postoffice) -> StoreProgress:
    """Return a worker's progress, and include it in the worker's reports from now on."""
    with _lock:
        progress = _of_nodes.get(node)
        if progress is None:
            progress = _of_nodes[node] = StoreProgress()
            node.reporter.progress = progress
        return progress


def note_step(store: object, samples: float) -> None:
    """Record a step of training; only distributed stores report it."""
    progress = getattr(store, "_progress", None)
    if isinstance(progress, StoreProgress):
        progress.step(samples)
