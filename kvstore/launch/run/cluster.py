"""``LocalCluster``: a job on this machine whose workers stay, for several calls.

::

    with kvstore.LocalCluster(workers=2, servers=1) as cluster:
        cluster.run(load)
        accuracies = cluster.run(train, args=(0.1,))

Calls are made one after the other, in the order in which they were submitted. Importing has no
effect. Any thread may call, also while another one waits for a result. Read ``job.py``
next; ``__init__.py`` is for one call.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from kvstore.launch.run.background import show
from kvstore.launch.run.checks import as_count, as_environment, as_path, as_seconds, as_words
from kvstore.launch.run.job import CallOutcome, JobOptions, RunningJob, packed
from pslite.errors import ClosedError, DeadlineError, UsageError

START_S = 120.0

SAY_S = 10.0
"""After so long ``close`` says for which workers it waits."""

MOST_CALLS = 4096
"""The most calls that may wait: their numbers fit into a worker's pipe."""


class Call:
    """A call of :meth:`LocalCluster.submit`, which may be under way."""

    def __init__(self, cluster: LocalCluster, number: int) -> None:
        self._cluster = cluster
        self._number = number
        self._outcome: CallOutcome | None = None

    def done(self) -> bool:
        """Return whether :meth:`result` would return or raise at once."""
        return self._outcome is not None or self._cluster._is_answered(self._number)

    def __repr__(self) -> str:
        state = "done" if self.done() else "under way"
        if self._outcome is not None and self._outcome.error is not None:
            state = f"failed, {type(self._outcome.error).__name__}"
        return f"<Call {self._number} of a LocalCluster: {state}>"

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """What each worker returned, in the order of the ranks; shows what they print meanwhile.

        Raises as ``kvstore.run`` does; after a ``DeadlineError`` the call continues, and this may
        be called again.
        """
        return self._cluster._settle(self, as_seconds(timeout_s)).values()


class LocalCluster:
    """A scheduler, ``servers`` servers and ``workers`` workers on this machine, until closed.

    All have joined when this returns, within ``timeout_s`` seconds; else ``DeadlineError`` is
    raised and nothing of them stays. ``env``, ``options``, ``log_dir`` and ``python`` are those of
    ``kvstore.run``. It is closed by :meth:`close`, by the end of a ``with`` block (at once, if an
    exception leaves it), at the end of the interpreter, and when nothing refers to it any more.

    An exception in a function is raised by the call. If all workers have answered, the cluster
    continues; if some have not within 2 s, since they wait for the one that raised, or if a worker
    or server is lost, it ends, and calls raise ``ClosedError``. Nothing is restarted.
    """

    def __init__(
        self,
        workers: int = 4,
        servers: int = 2,
        *,
        timeout_s: float | None = START_S,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        log_dir: str | os.PathLike[str] | None = None,
        python: str | os.PathLike[str] | None = None,
    ) -> None:
        wanted = JobOptions(
            workers=as_count("workers", workers),
            servers=as_count("servers", servers),
            env=as_environment(env),
            options=as_words(options),
            log_dir=as_path("log_dir", log_dir),
            python=as_path("python", python),
        )
        timeout_s = as_seconds(timeout_s)
        self._size = wanted.workers, wanted.servers
        # Guards all below and every outcome; never held for long.
        self._condition = threading.Condition()
        self._calls: deque[Call] = deque()
        self._last_number = 0
        self._why_closed = ""
        # One thread at a time awaits answers or ends the job: calls are answered in their order.
        self._is_turn_taken = False
        self._job = RunningJob(wanted, "serve")
        self._end = weakref.finalize(self, self._job.end)
        try:
            self._job.start()
            self._job.gather(0, timeout_s).values()
        except BaseException:
            self._end()
            raise

    def __repr__(self) -> str:
        with self._condition:
            state = f"{len(self._calls)} calls under way"
            if self._why_closed:
                state = f"ended: {self._why_closed}"
        return f"<LocalCluster of {self._size[0]} workers and {self._size[1]} servers, {state}>"

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._end_because("an exception left its with block")

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call ``fn`` once on each worker; return what they returned, in the order of the ranks.

        ``timeout_s`` are seconds, also for the calls before it that are not over. When they are
        over, and at a Ctrl-C, the cluster ends. Raises as ``kvstore.run`` does.
        """
        timeout_s = as_seconds(timeout_s)
        call = self.submit(fn, args, kwargs)
        try:
            return call.result(timeout_s)
        except DeadlineError:
            if call._outcome is None:  # else the function has raised it
                self._end_because("a call took longer than its timeout_s")
            raise
        except KeyboardInterrupt:
            self._end_because("a call was interrupted")
            raise

    def submit(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Call:
        """Have ``fn`` called after the calls before it, without waiting."""
        body = packed(fn, args, kwargs)
        with self._condition:
            self._check()
            if len(self._calls) >= MOST_CALLS:
                raise UsageError(
                    f"{MOST_CALLS} calls are waiting already; wait for their results first"
                )
            self._last_number += 1
            call = Call(self, self._last_number)
            self._job.leave_call(call._number, body)
            self._job.order(call._number)
            self._calls.append(call)
            return call

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the calls that are under way, then end everything; idempotent.

        ``timeout_s`` are seconds; when they are over, calls under way are ended, and a line on
        ``sys.stderr`` says so. None waits for as long as they take, and says after some seconds
        for whom. Errors of calls whose result was not asked for are not raised.
        """
        timeout_s = as_seconds(timeout_s)
        try:
            self._settle_all(timeout_s)
        except DeadlineError as error:
            show([(True, f"[launcher] closing the cluster: {error}; ending the job")])
            self._end_because("closing it took longer than its timeout_s")
        except KeyboardInterrupt:
            self._end_because("closing it was interrupted")
            raise
        with self._turn():
            if self._end.alive and self._job.goes_on:
                self._job.finish()
        self._end_because("it was closed")

    def _settle_all(self, timeout_s: float | None) -> None:
        """Take the answers of all calls; then none can follow. Raises ``DeadlineError``."""
        began_s = time.monotonic()
        while (last := self._last_call_or_closed()) is not None:
            if timeout_s is None:
                try:
                    self._settle(last, SAY_S)
                except DeadlineError as error:
                    show([(True, f"[launcher] closing the cluster: {error}; waiting on")])
            self._settle(last, timeout_s, began_s)

    # -- for Call ----------------------------------------------------------------------

    def _is_answered(self, number: int) -> bool:
        return not self._job.goes_on or self._job.is_answered(number)

    def _settle(
        self, call: Call, timeout_s: float | None, began_s: float | None = None
    ) -> CallOutcome:
        """Take the answers of all calls up to ``call``. Raises ``DeadlineError``.

        ``timeout_s`` count from ``began_s`` of the monotonic clock (now). Another thread may take
        some answers meanwhile, and end the job.
        """
        began_s = time.monotonic() if began_s is None else began_s
        while call._outcome is None:
            left_s = None if timeout_s is None else began_s + timeout_s - time.monotonic()
            with self._turn(call, left_s) as has_turn:
                if has_turn:
                    self._settle_first(timeout_s, began_s)
                elif call._outcome is None:
                    raise DeadlineError(
                        f"after {timeout_s:g} s a call before this one had not returned"
                    )
        return call._outcome

    def _settle_first(self, timeout_s: float | None, began_s: float) -> None:
        """On this thread's turn: take the answers of the first call that has none."""
        with self._condition:
            if not self._calls:  # another thread has just ended the job
                return
            first = self._calls[0]
        outcome = self._job.gather(first._number, timeout_s, began_s)
        with self._condition:
            if first._outcome is None:
                first._outcome = outcome
                self._calls.popleft()
        if not self._job.goes_on:
            self._refuse_calls(f"a call failed: {outcome.error}")
            self._end()

    @contextmanager
    def _turn(self, call: Call | None = None, timeout_s: float | None = None) -> Iterator[bool]:
        """Be the one thread that awaits answers or ends the job.

        Yields False without a turn when ``call`` has its outcome, or ``timeout_s`` are over.
        """
        with self._condition:
            self._condition.wait_for(lambda: not self._is_turn_taken or _is_over(call), timeout_s)
            is_mine = not self._is_turn_taken and not _is_over(call)
            self._is_turn_taken = self._is_turn_taken or is_mine
        try:
            yield is_mine
        finally:
            if is_mine:
                with self._condition:
                    self._is_turn_taken = False
                    self._condition.notify_all()

    def _check(self) -> None:
        if self._why_closed:
            raise ClosedError(f"this cluster has ended: {self._why_closed}; make a new one")

    def _last_call_or_closed(self) -> Call | None:
        """The last call without an outcome; where there is no such call, none will follow."""
        with self._condition:
            if self._calls:
                return self._calls[-1]
            self._why_closed = self._why_closed or "it was closed"
            return None

    def _refuse_calls(self, why: str) -> None:
        """Calls that have no answer yet fail, and so will any further one."""
        with self._condition:
            self._why_closed = self._why_closed or why
            for call in self._calls:
                error = ClosedError(f"the cluster ended before this call had returned: {why}")
                call._outcome = CallOutcome([], error)
            self._calls.clear()
            self._condition.notify_all()

    def _end_because(self, why: str) -> None:
        """End all processes, also while another thread waits for their answers."""
        self._refuse_calls(why)
        with self._condition:
            is_awaited = self._is_turn_taken
        if is_awaited:
            self._job.stop()
        with self._turn():
            self._end()


def _is_over(call: Call | None) -> bool:
    return call is not None and call._outcome is not None
