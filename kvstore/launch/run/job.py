"""One job of ``kvstore.run`` or ``LocalCluster``, with its calls.

Each function is written to a file. The launcher runs in the background; its workers run
``worker.py`` and write their answers to files, too. One thread follows the job: it reads the
processes' output, collects the answers, orders the next call when one has finished, and removes
everything at the end. All other threads submit, wait and stop. They show the output on the thread
that waits, where notebooks and tests expect it. Nothing is left behind, even after an error, an
interrupt or the death of the caller. Read ``call_files.py`` and ``background.py`` next.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from kvstore.launch.run import call_files
from kvstore.launch.run.background import (
    BackgroundLauncher,
    JobOptions,
    LauncherExit,
    Line,
    checked_command,
    first_cause,
    show,
)
from kvstore.launch.run.call_files import WorkerAnswer
from pslite.errors import ClosedError, DeadlineError

LOOK_S = 1.0
"""The interval for checking for an announced answer that a shared file system does not show yet."""

PATIENCE_S = 2.0
"""The wait for the other workers' answers after one has raised an error, in a continuing cluster.
"""

VERDICT_S = 15.0
"""The wait for the launcher to name the lost process; it waits for the other processes first."""

END_S = 75.0
"""The wait for processes to end by themselves after the last answer. It is longer than a worker
waits for servers that do not accept its pushes (PS_CLOSE_TIMEOUT)."""

LAST_LINES_S = 1.0
"""The wait for the last lines of a call, after its answers."""

MOST_LINES = 20_000
"""At most this many lines are kept until a thread shows them; then the oldest are dropped."""

_STOP_S = 20.0
_KILL_S = 5.0


@dataclass(eq=False)
class JobCall:
    """One call: its answers by rank, and its end. The job's lock guards it.

    ``why`` makes the ``error`` of a failed call when it is first requested, and on that thread:
    unpickling an exception may import modules.
    """

    number: int
    answers: dict[int, WorkerAnswer] = field(default_factory=dict)
    failed_at_s: float = math.inf
    last_at_s: float = math.inf
    is_done: bool = False
    why: Callable[[], Exception] | None = None
    error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        """Return whether any answer so far is not a value."""
        return any(answer.failed for answer in self.answers.values())

    def end(self, why: Callable[[], Exception] | None = None) -> None:
        self.why = why
        self.is_done = True


class RunningJob:
    """A job and its calls; end it with :meth:`end`. Any thread may call.

    ``mode`` is that of ``worker.py``; with ``once``, only the first call is made. ``body`` is the
    function of the first call. Raises a ``UsageError`` before anything is started.
    """

    def __init__(self, options: JobOptions, mode: str, body: bytes) -> None:
        self._workers = options.workers
        #: The end of the launcher; None while it runs.
        self.ending: LauncherExit | None = None
        self._mode = mode
        # Guards all attributes below, and the calls.
        self._changed = threading.Condition()
        self._lines: deque[Line] = deque(maxlen=MOST_LINES)
        self._showing = threading.Lock()
        self._numbers = count()
        self._calls: deque[JobCall] = deque()
        self._orders: list[int] = []
        #: Why no further call can be made: a text, or the failed call.
        self._closed_by: str | JobCall = ""
        here = None if options.launcher == "local" else os.getcwd()
        self._directory = call_files.make_directory(options.share_dir or here)
        try:
            arguments = checked_command(options, self._directory, mode)
            #: The first call, which workers make without an order.
            self.first = self.submit(body)
            for rank in range(self._workers) if mode == "serve" else ():
                path = call_files.orders_path(self._directory, rank)
                os.mkfifo(path, 0o600)
                # Opened for reading, too, so that it can be opened before the worker has started.
                self._orders.append(os.open(path, os.O_RDWR | os.O_NONBLOCK))
            self._launcher = BackgroundLauncher(arguments, options.env, self._directory)
        except BaseException:
            self._remove()
            raise
        name = f"{self._directory.name}-launcher"
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
        self._thread.start()

    # -- calls -------------------------------------------------------------------------

    def submit(self, body: bytes) -> JobCall:
        """Call a packed function after the earlier calls; return its call."""
        with self._changed:
            if not self._closed_by:
                call = JobCall(next(self._numbers))
                if self.ending is None:
                    call_files.write_call(self._directory, call.number, body)
                    self._calls.append(call)
                    if call is self._calls[0]:
                        self._order(str(call.number))
                else:
                    self._fail(call)
                return call
        raise ClosedError(f"this cluster has ended: {self.why_closed}; create a new one")

    def result(self, call: JobCall, timeout_s: float) -> list[Any]:
        """Return the results by rank. Raises the call's error, or ``DeadlineError``.

        Shows the processes' output meanwhile.
        """
        self._wait(lambda: call.is_done, timeout_s, call)
        if call is self._closed_by:
            self.end()
        if error := self.error_of(call):
            raise error
        return [call_files.value_of(rank, call.answers[rank]) for rank in range(self._workers)]

    def error_of(self, call: JobCall) -> Exception | None:
        """Return the error of a finished call, or None."""
        if call.error is None and call.why is not None:
            call.error = call.why()
        return call.error

    @property
    def why_closed(self) -> str:
        """Why no further call can be made, or "" if calls are possible."""
        why = self._closed_by
        return why if isinstance(why, str) else f"a call failed: {self.error_of(why)}"

    @property
    def calls_under_way(self) -> int:
        return len(self._calls)

    # -- the end -----------------------------------------------------------------------

    def close(self, timeout_s: float) -> None:
        """Wait for all calls, and refuse later ones. Raises ``DeadlineError``."""

        def is_idle() -> bool:
            if not self._calls:
                self._closed_by = self._closed_by or "it was closed"
            return not self._calls

        self._wait(is_idle, timeout_s)

    def finish(self) -> None:
        """Let all processes end after the last answer; show their output.

        Processes that still run after :data:`END_S` are ended.
        """
        with self._changed:
            self._order(call_files.END)
        try:
            self._wait(lambda: self.ending is not None, END_S)
        except DeadlineError:
            show([(True, f"[launcher] the job did not end within {END_S:g} s; ending it")])
        if self.ending is not None and self.ending.report is not None:
            error = first_cause({}, self.ending)
            show([(True, f"[launcher] all workers had returned, but then {error}")])
        self.end()

    def refuse(self, why: str) -> None:
        """End all processes; unfinished and later calls fail."""
        with self._changed:
            self._closed_by = self._closed_by or why
            self._refuse_calls()
            self._changed.notify_all()
        self.end()

    def end(self) -> None:
        """End all processes and remove all files of the job. May be called again.

        Garbage collection may call this on any thread, even on the one that follows the job. That
        thread cannot wait for itself, and finishes the work later. After an interrupt of this call,
        the launcher is killed, and its guardian ends the job.
        """
        try:
            self._stop()
            if threading.current_thread() is self._thread:
                return
            self._thread.join(_STOP_S)
        except BaseException:
            self._launcher.signal(signal.SIGKILL)
            raise
        if self._thread.is_alive():
            self._launcher.signal(signal.SIGKILL)
            self._thread.join(_KILL_S)
        self._show_lines()

    def _stop(self) -> None:
        """Tell the launcher to end the job at once, without messages."""
        if self.ending is None:
            self._launcher.output.is_ending = True
            self._launcher.signal(signal.SIGTERM)

    # -- waiting -----------------------------------------------------------------------

    def _wait(
        self, is_over: Callable[[], bool], timeout_s: float, call: JobCall | None = None
    ) -> None:
        """Show the output until ``is_over``, which is called under the lock.

        Raises ``DeadlineError``, about ``call`` if one is awaited.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            left_s = None if until_s == math.inf else until_s - time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: is_over() or self._lines, left_s)
                over = is_over()
                late = "" if over or time.monotonic() < until_s else self._who_is_late(call)
            self._show_lines()
            if over:
                return
            if late:
                raise DeadlineError(f"after {timeout_s:g} s {late}")

    def _who_is_late(self, call: JobCall | None) -> str:
        if not self._calls:
            return "the job had not ended"
        first = self._calls[0]
        if call is not None and call is not first:
            return "a call before this one had not returned"
        missing = [str(rank) for rank in range(self._workers) if rank not in first.answers]
        if not missing:
            return "the launcher had not said which process failed"
        *others, last = missing
        names = f"workers {', '.join(others)} and {last}" if others else f"worker {last}"
        return f"{names} had not returned"

    def _show_lines(self) -> None:
        """Show lines, one thread at a time, so that they stay in order."""
        with self._showing:
            with self._changed:
                lines = list(self._lines)
                self._lines.clear()
            show(lines)

    # -- the thread --------------------------------------------------------------------

    def _follow(self) -> None:
        left_s: float | None = None
        try:
            while (lines := self._launcher.read(left_s)) is not None:
                with self._changed:
                    self._lines += lines
                    left_s = self._judge()
                    self._changed.notify_all()
        except BaseException:
            self._stop()
            raise
        finally:
            status = self._launcher.close()
            with self._changed:
                self._conclude(status)
                self._changed.notify_all()

    def _judge(self) -> float | None:
        """End the finished calls; return the seconds until the next check, or None."""
        while self._calls:
            call = self._calls[0]
            is_hidden = self._take_answers(call)
            left_s = self._over_at_s(call) - time.monotonic()
            if left_s > 0:
                left_s = min(left_s, LOOK_S) if is_hidden else left_s
                return None if left_s == math.inf else left_s
            self._settle(call)
        return None

    def _take_answers(self, call: JobCall) -> bool:
        """Read new answers; return whether an announced one is still missing."""
        is_hidden = False
        for rank in range(self._workers):
            has_come = self._launcher.output.has_answered(call.number, rank)
            if rank in call.answers or not (has_come or self.ending):
                continue
            try:
                path = call_files.answer_path(self._directory, call.number, rank)
                answer = call_files.read_answer(path)
            except FileNotFoundError:
                is_hidden = True
                continue
            except (call_files.NotReadable, OSError) as error:
                answer = WorkerAnswer("refusal", text=f"its answer cannot be read: {error}")
            call.answers[rank] = answer
            call.last_at_s = time.monotonic()
            if answer.failed:
                call.failed_at_s = min(call.failed_at_s, call.last_at_s)
        return is_hidden

    def _over_at_s(self, call: JobCall) -> float:
        """Return when to end a call, as known now, on the monotonic clock."""
        output = self._launcher.output
        failures = [answer for answer in call.answers.values() if answer.failed]
        has_all = len(call.answers) == self._workers
        if not failures and not has_all:
            return math.inf
        if failures and all(one.blames_another for one in failures):
            return call.failed_at_s + VERDICT_S
        if self._mode == "once" or output.has_all_of(call.number, self._workers):
            return call.last_at_s
        return call.last_at_s + LAST_LINES_S if has_all else call.failed_at_s + PATIENCE_S

    def _settle(self, call: JobCall) -> None:
        """Handle the end of the first call: order the next, or end the job."""
        waits = len(call.answers) < self._workers  # the others wait for a failed worker
        lost = any(answer.blames_another for answer in call.answers.values())
        call.end(partial(first_cause, call.answers, None) if call.has_failed else None)
        self._calls.popleft()
        if call.has_failed and (self._mode == "once" or waits or lost):
            self._closed_by = call
            self._refuse_calls()
            self._stop()
            return
        self._launcher.output.marks.clear()
        call_files.remove(self._directory, call.number, self._workers)
        if self._calls:
            self._order(str(self._calls[0].number))

    def _conclude(self, status: int) -> None:
        """Handle the launcher's end: read its report, end the calls, clean up."""
        output = self._launcher.output
        report = output.report(without=str(self._directory))
        self.ending = LauncherExit(status, report, output.said)
        while self._calls:
            call = self._calls.popleft()
            self._take_answers(call)
            if len(call.answers) < self._workers or call.has_failed:
                self._fail(call)
                break
            call.end()
        self._remove()

    # -- parts -------------------------------------------------------------------------

    def _fail(self, call: JobCall) -> None:
        """Handle a call for which the launcher ended before all workers had answered."""
        call.end(partial(first_cause, call.answers, self.ending))
        self._closed_by = call
        self._refuse_calls()

    def _refuse_calls(self) -> None:
        for call in self._calls:
            call.end(self._refusal)
        self._calls.clear()

    def _refusal(self) -> Exception:
        return ClosedError(f"the cluster ended before this call had returned: {self.why_closed}")

    def _order(self, text: str) -> None:
        for descriptor in self._orders:
            os.write(descriptor, f"{text}\n".encode())

    def _remove(self) -> None:
        while self._orders:
            os.close(self._orders.pop())
        shutil.rmtree(self._directory, ignore_errors=True)
