"""``KVStoreWork``: the result of a collective call, and threads for its futures.

PyTorch's own class around a future reports a failed call as done, and has no timeout. In this one,
``wait`` raises the call's error and obeys the timeout. Results are in the caller's tensors once the
call is *finished*. The thread that waits finishes it, or a thread of ``Completions`` for
``get_future``, which DistributedDataParallel uses.

Callbacks of a PyTorch future may wait for further calls, as the hook of PowerSGD does. So each
future is completed on a thread that has no other work, never on the node's I/O thread.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from pslite import Future, Postoffice
from pslite.errors import DeadlineError

_IDLE_S = 0.5


class Completions:
    """Runs each task on its own thread; idle threads wait a while for the next task."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards the two attributes below
        self._idle = 0
        self._is_closed = False

    def run(self, task: Callable[[], None]) -> None:
        """Run ``task`` on a thread. Any thread may call; returns at once."""
        with self._lock:
            is_new = self._idle == 0
            if not is_new:
                self._idle -= 1
        self._tasks.put(task)
        if is_new:
            name = f"kvstore-torch-{os.getpid()}"
            threading.Thread(target=self._loop, name=name, daemon=True).start()

    def close(self) -> None:
        """End idle threads at once, and the others after their tasks."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, 0
        for _ in range(idle):
            self._tasks.put(None)

    def _loop(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._idle > 0:
                        self._idle -= 1
                        return
                continue  # a task is on its way to this thread
            if task is None:
                return
            task()
            del task  # also frees its tensors
            with self._lock:
                if self._is_closed:
                    return
                self._idle += 1


class KVStoreWork(Work):  # type: ignore[misc]
    """One collective call in flight.

    Args:
        node: the node that makes the call, for the lines about long waits.
        future: the call's own future.
        finish: puts the call's result into the tensors; called once.
        tensors: the tensors that PyTorch treats as the result.
        limit_s: the default timeout of ``wait``.
        completions: runs the completion of the PyTorch future.
    """

    def __init__(
        self,
        node: Postoffice,
        future: Future[Any],
        finish: Callable[[Any], None],
        tensors: Sequence[torch.Tensor],
        limit_s: float,
        completions: Completions,
    ) -> None:
        super().__init__()
        self._node = node
        self._future = future
        self._finish: Callable[[Any], None] | None = finish
        self._tensors = list(tensors)
        self._limit_s = limit_s
        self._completions = completions
        self._lock = threading.RLock()  # guards the call's end, which happens once
        self._error: BaseException | None = None
        self._torch_future: Any = None

    # -- what PyTorch calls ----------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are in the tensors.

        Raises:
            DeadlineError: after ``timeout`` (default: that of the call, or of its group).
            PSError: the error of the call.
        """
        given_s = 0.0 if timeout is None else timeout.total_seconds()
        self._wait(given_s if given_s > 0 else self._limit_s)
        self._finish_once()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Return whether the call has results or an error; does not wait."""
        if self._future.done():
            self._try_to_finish()
        return self._future.done()

    def is_success(self) -> bool:
        """Return whether the call has succeeded."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, if any."""
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors."""
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank whose message was received."""
        self.wait()
        return int(getattr(self._future.result(0), "source", -1))

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a PyTorch future of the tensors; it fails as futures made in C++ do.

        ``Future.set_exception`` would store the error as a value, and DistributedDataParallel would
        treat that value as tensors. An error that a callback raises is an error for all users of
        the future.
        """
        with self._lock:
            if self._torch_future is None:
                begun: torch.futures.Future[None] = torch.futures.Future()
                self._torch_future = begun.then(self._value)
                self._future.on_done(
                    lambda _: self._completions.run(lambda: begun.set_result(None))
                )
            return self._torch_future

    # -- inside ------------------------------------------------------------------------------

    def finish_in_background(self) -> None:
        """Store the results in the tensors soon after the call, even if no thread waits."""

        def done(_: Future[Any]) -> None:
            if self._torch_future is None:  # otherwise its completion finishes this call
                self._completions.run(self._try_to_finish)

        self._future.on_done(done)

    def _value(self, _: Any) -> list[torch.Tensor]:
        self._finish_once()
        return self._tensors

    def _try_to_finish(self) -> None:
        try:
            self._finish_once()
        except Exception as error:
            self._error = error  # waiting threads raise it

    def _finish_once(self) -> None:
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    finish(self._future.result(0))
                except BaseException as error:
                    self._error = error
            if self._error is not None:
                raise self._error

    def _wait(self, limit_s: float) -> None:
        """Wait for the call; from time to time, log what it waits for."""
        report_s = self._node.config.report_after_s
        began = time.monotonic()
        while not self._future.done():
            waited_s = time.monotonic() - began
            if waited_s >= limit_s:
                raise DeadlineError(
                    f"Timed out after {limit_s:g} s, the timeout of the call or its group: "
                    f"{self._future.what}"
                )
            try:
                self._future.result(min(report_s, limit_s - waited_s))
            except DeadlineError:
                if self._future.done() or time.monotonic() - began >= limit_s:
                    continue
                waited_s = time.monotonic() - began
                self._node.log.warn(f"still waiting after {waited_s:.0f} s: {self._future.what}")
            except Exception:
                return  # raised when the call is finished
