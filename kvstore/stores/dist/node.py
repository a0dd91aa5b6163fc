"""The node that all stores of this process share, and how callers wait.

A process has one such node because it has one environment. The node joins the cluster when the
first distributed store is created and leaves when the interpreter ends, so that a notebook can
close its stores and create others.

``Waiter`` makes callers of a distributed store wait, and reports long waits. It runs on the
caller's thread. A wait ends with the value or the error of its future; the node always completes
the future. A time limit of the call, or PS_STALL_TIMEOUT, ends the wait sooner.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from kvstore.errors.tracebacks import shorten_tracebacks
from kvstore.stores.dist.progress import progress_of
from pslite import Config, Future, Postoffice, Role, start
from pslite.errors import ConfigError, DeadlineError, UsageError
from pslite.node.log import try_to_stderr

# Guards the name below; stores may be created on any thread.
_lock = threading.Lock()
_node: Postoffice | None = None
_pid = 0


def worker_node(serve: Callable[[Config], int] | None = None) -> Postoffice:
    """Return the process's worker node.

    Raises:
        SystemExit: DMLC_ROLE is server or scheduler, and ``serve`` has run it until the end.
        ConfigError, DeadlineError: the cluster cannot be joined; the text says why.
    """
    global _node, _pid
    with _lock:
        if _node is None or _pid != os.getpid():  # a forked child needs a node of its own
            config, unknown = Config.from_env()
            for sentence in unknown:
                try_to_stderr(f"warning: {sentence}")
            if config.role != Role.WORKER.value:
                if serve is None:
                    raise ConfigError(
                        f"create() of a dist store needs DMLC_ROLE=worker, got {config.role!r}; "
                        "set it to worker in training scripts"
                    )
                sys.exit(serve(config))
            if config.verbose == 0:
                shorten_tracebacks()
            _node, _pid = start(config), os.getpid()
        return _node


_LONGEST_PAUSE_S = 60.0
"""The longest time between two reports of a wait, unless PS_STALL_REPORT is longer."""


_MOST_REPORTS = 3
"""An error has at most this many sentences about rounds with missing workers."""


class Waiter:
    """Waits for futures of one node."""

    def __init__(self, node: Postoffice) -> None:
        self._node = node
        self._progress = progress_of(node)
        self._report_after_s = node.config.report_after_s

    def check(self) -> None:
        """Raise ``UsageError`` on threads that must not wait.

        Callers check this before a call has any effect.
        """
        queue = self._node.io_queue
        if queue.is_forked:
            queue.check_process()
        if threading.current_thread() is queue.thread:
            raise UsageError(
                "a callback runs on the I/O thread and must not wait; use calls that return "
                "futures, such as push_async"
            )

    def wait(
        self,
        future: Future[Any],
        timeout_s: float | None = None,
        began_s: float | None = None,
        *,
        is_limited: bool | None = None,
    ) -> Any:
        """Return the future's value, or its error.

        Reports the missing answers after PS_STALL_REPORT, and repeatedly from then on. Raises
        ``DeadlineError`` after ``timeout_s``, by default PS_STALL_TIMEOUT if that is set; the call
        stays in flight. ``began_s`` is the time on the monotonic clock when the caller began to
        wait for this and other futures. ``is_limited`` says whether the limit comes from the
        caller, who may continue after it; by default, whether ``timeout_s`` is given. A wait
        without such a limit ends with a ``DeadlockError`` once no worker can end it any more.
        """
        if future.done():
            return future.result(0)
        self.check()
        self._progress.begin_wait(future)
        try:
            if is_limited is None:
                is_limited = timeout_s is not None
            began = began_s or time.monotonic()
            return self._wait(future, timeout_s, began, is_limited=is_limited)
        finally:
            self._progress.end_wait()

    def _wait(
        self, future: Future[Any], timeout_s: float | None, began: float, *, is_limited: bool
    ) -> Any:
        config = self._node.config
        limit_s = timeout_s or config.stall_timeout_s or math.inf
        report_at_s = self._report_after_s
        ended = future
        while True:
            left_s = min(report_at_s, limit_s) - (time.monotonic() - began)
            try:
                value = ended.result(max(0.0, left_s) if left_s < math.inf else None)
                return value if ended is future else future.result(0)
            except DeadlineError as error:
                if future.error() is error:
                    raise
            waited_s = time.monotonic() - began
            if waited_s >= limit_s:
                source = "" if timeout_s else " (PS_STALL_TIMEOUT)"
                told = [text for at_s, text in list(self._node.traffic.reports) if at_s >= began]
                missing = "".join(f"; {text}" for text in dict.fromkeys(told[-_MOST_REPORTS:]))
                raise DeadlineError(
                    f"timed out after {limit_s:g} s{source} waiting for {future.what}{missing}; "
                    "the call is still in progress, and kv.wait() waits for it again"
                )
            if waited_s >= report_at_s:
                if ended is future and not is_limited:
                    ended = self._progress.begin_long_wait(future)
                if ended is not future:
                    self._node.report_long_wait()
                self._node.log.warn(f"still waiting after {waited_s:.0f} s: {future.what}")
                pause_s = min(report_at_s, max(_LONGEST_PAUSE_S, config.stall_report_s))
                report_at_s += max(pause_s, 0.001)
