"""Where a server's work runs: a few threads, each with its lanes, or right here.

Work of one lane runs in order and never at the same time as other work of that lane, so what
belongs to a lane (a part's memory) needs no lock. Results are handed over by ``done``, which
the node lets run on its I/O thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

Work = Callable[[], None]


class Pool(Protocol):
    """Runs work by lanes."""

    def submit(self, lane: int, work: Work) -> None:
        """Run ``work`` after all earlier work of ``lane``. Work must not raise."""

    def close(self, timeout_s: float = 10.0) -> bool:
        """Finish what was submitted, then stop; whether that was done in time. Idempotent.

        What is still at work afterwards ends with the process.
        """


class InlinePool:
    """Runs work at once, on the caller's thread: for the simulator and for tests."""

    def submit(self, lane: int, work: Work) -> None:
        work()

    def close(self, timeout_s: float = 10.0) -> bool:
        return True


class ThreadPool:
    """Runs work on ``num_threads`` threads; lane n belongs to thread n modulo that."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._queues: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in range(num_threads)]
        self._threads = [
            threading.Thread(
                target=_run, args=(queue,), name=f"pslite-pool-{name}-{i}", daemon=True
            )
            for i, queue in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: int, work: Work) -> None:
        self._queues[lane % len(self._queues)].put(work)

    def close(self, timeout_s: float = 10.0) -> bool:
        for queue in self._queues:
            queue.put(None)
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        give_up_at = time.monotonic() + timeout_s
        for thread in others:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        return not any(thread.is_alive() for thread in others)


def _run(queue: SimpleQueue[Work | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # and what it worked on, which may be large
