"""The thread pool of a server: each thread has its own lanes.

The work of one lane runs in order, one piece at a time. So the data of a lane (a part's memory)
needs no lock. Only the I/O thread submits work. The work passes its results back to the I/O thread
through the node's queue (``io_queue.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

Work = Callable[[], None]


class Pool(Protocol):
    """The interface of a pool: work in lanes."""

    def submit(self, lane: int, work: Work) -> None:
        """Run ``work`` after all earlier work of ``lane``. Work must not raise."""

    def is_idle(self, lane: int) -> bool:
        """Return whether all work of ``lane`` is done.

        Only the submitting thread may ask. If the lane is idle, that thread may do quick work
        itself, because no other thread works on this lane before the next ``submit``.
        """

    @property
    def num_jobs(self) -> int:
        """The number of submitted pieces of work that are not done yet."""

    def close(self, timeout_s: float = 10.0) -> bool:
        """Finish submitted work and stop; return whether that was in time. Idempotent.

        Work that still runs after that ends with the process.
        """


class InlinePool:
    """Runs work at once, on the caller's thread: for the simulator and for tests."""

    def submit(self, lane: int, work: Work) -> None:
        work()

    def is_idle(self, lane: int) -> bool:
        return True

    @property
    def num_jobs(self) -> int:
        return 0

    def close(self, timeout_s: float = 10.0) -> bool:
        return True


class ThreadPool:
    """Runs work on ``num_threads`` threads; lane n belongs to thread n modulo that."""

    def __init__(self, num_threads: int, name: str) -> None:
        #: Called with an exception that work raised, though it must not; the thread continues.
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self._queues: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in range(num_threads)]
        #: For each thread: pieces of work submitted (the submitter counts), and done (it counts).
        self._submitted = [0] * num_threads
        self._done = [0] * num_threads
        self._threads = [
            threading.Thread(
                target=self._run, args=(index,), name=f"pslite-pool-{name}-{index}", daemon=True
            )
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: int, work: Work) -> None:
        index = lane % len(self._queues)
        self._submitted[index] += 1
        self._queues[index].put(work)

    def is_idle(self, lane: int) -> bool:
        index = lane % len(self._queues)
        return self._submitted[index] == self._done[index]

    @property
    def num_jobs(self) -> int:
        return max(0, sum(self._submitted) - sum(self._done))

    def close(self, timeout_s: float = 10.0) -> bool:
        for queue in self._queues:
            queue.put(None)
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        give_up_at = time.monotonic() + timeout_s
        for thread in others:
            thread.join(max(0.0, give_up_at - time.monotonic()))
        return not any(thread.is_alive() for thread in others)

    def _run(self, index: int) -> None:
        queue = self._queues[index]
        while (work := queue.get()) is not None:
            try:
                work()
            except BaseException as error:  # otherwise code that waits for it waits for ever
                self.on_failure(error)
            del work  # frees its data, which may be large
            self._done[index] += 1
