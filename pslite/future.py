"""``Future``: passes a result from the I/O thread to the thread that waits for it.

A future completes exactly once, with a value or an error. The code that creates it must make sure
of that (``node/customer.py``, ``plane/worker.py``). Callbacks run on the thread that completes the
future. That is the I/O thread, so callbacks must be short and must not wait. This module knows
nothing about nodes.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from pslite.errors import DeadlineError

T = TypeVar("T")
U = TypeVar("U")


class Future(Generic[T]):
    """The result of a request in flight."""

    # All futures share one condition: few threads wait (usually one), and a lock for each future
    # would cost more than it saves.
    _lock = threading.RLock()
    _condition = threading.Condition(_lock)

    __slots__ = ("_callbacks", "_done", "_error", "_on_error", "_value", "describe", "flush")

    def __init__(self, describe: Callable[[], str] | str = "a request") -> None:
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: tuple[Callable[[Future[T]], None], ...] = ()
        self._on_error: tuple[Callable[[Future[T]], None], ...] = ()
        #: The awaited event and the nodes that must answer, for the error of a time-out.
        self.describe = describe
        #: Called before a wait, to send the requests that were held back to be joined.
        self.flush: Callable[[], None] | None = None

    def done(self) -> bool:
        """Return whether there is a value or an error."""
        return self._done

    def set_result(self, value: T) -> None:
        """Complete with ``value``; has no effect if the future is already complete."""
        with self._lock:
            if self._done or self._error is not None:
                return
            self._value = value
            callbacks = self._end()
        for callback in callbacks:
            _tell(self, callback)

    def set_error(self, error: BaseException) -> None:
        """Complete with ``error``; has no effect if the future is already complete."""
        with self._lock:
            if self._done or self._error is not None:
                return
            self._error = error
            first = self._on_error
        try:
            for callback in first:  # before a waiting thread gets the error
                _tell(self, callback)
        finally:
            with self._lock:
                callbacks = self._end()
        for callback in callbacks:
            _tell(self, callback)

    def _end(self) -> tuple[Callable[[Future[T]], None], ...]:
        """Wake the waiting threads; return the callbacks to call. The lock is held."""
        self._done = True
        callbacks = self._callbacks
        self._callbacks = self._on_error = ()
        self._condition.notify_all()
        return callbacks

    @property
    def what(self) -> str:
        """The awaited event and the nodes that must answer, in words."""
        return self.describe if isinstance(self.describe, str) else self.describe()

    def __repr__(self) -> str:
        """Return ``<Future of a pull of 'w': pending>``; does not wait."""
        if not self._done:
            state = "pending"
        elif self._error is None:
            state = f"done, {type(self._value).__name__}"
        else:
            state = f"failed, {type(self._error).__name__}: {self._error}"
        return f"<Future of {self.what}: {state}>"

    def describer(self) -> Callable[[], str] | str:
        """Return a description for derived futures; it does not keep the value alive."""
        return self.describe

    def error(self) -> BaseException | None:
        """Return the error that the future completed with, or None; does not wait."""
        return self._error

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the value.

        Raises:
            DeadlineError: ``timeout_s`` has passed; the text names the awaited event.
            Exception: the error that the future completed with.
        """
        if not self._done:
            if self.flush is not None:
                self.flush()
            with self._condition:
                self._condition.wait_for(partial(getattr, self, "_done"), timeout_s)
        if not self._done:
            raise DeadlineError(f"timed out after {timeout_s:g} s waiting for {self.what}")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def on_done(self, callback: Callable[[Future[T]], None]) -> None:
        """Call ``callback(self)`` on completion, or now if the future is complete."""
        with self._lock:
            if not self._done:
                self._callbacks = (*self._callbacks, callback)
                return
        callback(self)

    def on_error(self, callback: Callable[[Future[T]], None]) -> None:
        """Call ``callback(self)`` on an error, before any thread gets it by a wait."""
        with self._lock:
            if not self._done and self._error is None:
                self._on_error = (*self._on_error, callback)
                return
        if self._error is not None:
            callback(self)

    def then(self, step: Callable[[T], Future[U]]) -> Future[U]:
        """Call ``step`` with this future's value; return the future of its result."""
        result: Future[U] = Future(self.describer())
        result.flush = self.flush

        def take(done: Future[T]) -> None:
            if done._error is not None:
                result.set_error(done._error)
                return
            try:
                following = step(done._value)  # type: ignore[arg-type]
            except BaseException as error:  # otherwise a waiting thread would wait for ever
                result.set_error(error)
                if _ends_the_script(error):
                    raise
                return
            result.describe, result.flush = following.describer(), following.flush
            following.on_done(result._adopt)

        self.on_done(take)
        return result

    def or_else(self, step: Callable[[BaseException], Future[Any]]) -> Future[T]:
        """Return a future that ends like this one; after an error, ``step`` runs first."""
        result: Future[T] = Future(self.describer())
        result.flush = self.flush

        def take(done: Future[T]) -> None:
            if done._error is None:
                result._adopt(done)
                return
            try:
                step(done._error).on_done(lambda _: result._adopt(done))
            except BaseException as error:
                result._adopt(done)
                if _ends_the_script(error):
                    raise

        self.on_done(take)
        return result

    def map(self, function: Callable[[T], U]) -> Future[U]:
        """Call ``function`` with this future's value; return the future of its result."""
        return self.then(lambda value: completed(function(value)))

    def _adopt(self, done: Future[T]) -> None:
        if done._error is not None:
            self.set_error(done._error)
        else:
            self.set_result(done._value)  # type: ignore[arg-type]


def _tell(future: Future[T], callback: Callable[[Future[T]], None]) -> None:
    """Call ``callback``; print its exception, so that the calling thread continues.

    That thread belongs to the node. If standard error cannot be written, nothing is printed.
    """
    try:
        callback(future)
    except BaseException as error:
        if _ends_the_script(error):
            raise
        with contextlib.suppress(Exception):
            traceback.print_exc()


def _ends_the_script(error: BaseException) -> bool:
    """Return whether ``error`` is Ctrl-C or ``sys.exit`` on the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and not isinstance(error, Exception)


def complete_all(futures: Sequence[Future[None]]) -> None:
    """Complete all ``futures`` with None, at little more than the cost of one.

    A thread that waits for any of them is woken once.
    """
    told = []
    with Future._lock:
        for future in futures:
            if not future._done and future._error is None:
                future._done = True
                if future._callbacks:
                    told.append((future, future._callbacks))
                future._callbacks = future._on_error = ()
        Future._condition.notify_all()
    for future, callbacks in told:
        for callback in callbacks:
            _tell(future, callback)


def completed(value: T) -> Future[T]:
    """Make a future that is already complete with ``value``."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def failed(error: BaseException) -> Future[Any]:
    """Make a future that has already failed with ``error``."""
    future: Future[Any] = Future()
    future.set_error(error)
    return future


def settled(futures: Iterable[Future[Any]]) -> Future[None]:
    """Make a future that completes once all ``futures`` have a value or an error."""
    waited = list(futures)
    result: Future[None] = Future(
        lambda: next((future.what for future in waited if not future.done()), "several requests")
    )
    left = len(waited)
    lock = threading.Lock()

    def one_done(_: Future[Any]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        result.set_result(None)

    def flush() -> None:
        for future in waited:
            if future.flush is not None:
                future.flush()

    result.flush = flush
    if not waited:
        result.set_result(None)
    for future in waited:
        future.on_done(one_done)
    return result


def gather(futures: Iterable[Future[Any]]) -> Future[list[Any]]:
    """Make a future of all values in order, or of the first error in that order.

    Even after an error it completes only when all ``futures`` have completed, so that their buffers
    are no longer in use.
    """
    waited = list(futures)

    def collect(_: None) -> Future[list[Any]]:
        errors = [error for future in waited if (error := future.error()) is not None]
        return failed(errors[0]) if errors else completed([future.result(0) for future in waited])

    return settled(waited).then(collect)
