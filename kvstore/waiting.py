"""How callers of a distributed store wait: with reports of what takes long, never in silence.

Runs on the caller's thread. A wait has no end of its own: it ends in the value or the error of
its future, which the node completes in any case.
"""

from __future__ import annotations

import time
from typing import Any

from kvstore.progress import progress_of
from pslite import Future, Postoffice
from pslite.errors import DeadlineError, UsageError


class Waiter:
    """Waits for futures of one node."""

    def __init__(self, node: Postoffice) -> None:
        self._node = node
        self._progress = progress_of(node)

    def check(self) -> None:
        """Raise ``UsageError`` where nobody may wait: before a call has any effect."""
        self._node.errands.check_process()
        if self._node.errands.is_io_thread:
            raise UsageError(
                "a callback on the I/O thread must not wait: use the calls that return futures"
            )

    def wait(self, future: Future[Any]) -> Any:
        """The future's value, or its error. Says every PS_STALL_REPORT what it waits for."""
        if future.done():
            return future.result(0)
        self.check()
        self._progress.begin_wait(future)
        try:
            return self._wait(future)
        finally:
            self._progress.end_wait()

    def _wait(self, future: Future[Any]) -> Any:
        began = time.monotonic()
        report_s = self._node.config.stall_report_s
        while True:
            try:
                return future.result(report_s)
            except DeadlineError as error:
                if future.error() is error:
                    raise
                waited_s = time.monotonic() - began
                self._node.log.warn(f"still waiting after {waited_s:.0f} s: {future.what}")
