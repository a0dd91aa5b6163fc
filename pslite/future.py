"""``Future``: passes a result from the I/O thread to the thread that waits for it.

A future completes exactly once, with a value or an error; its creator sees to it that
it does (``node/customer.py``, ``plane/worker.py``). Callbacks run on the completing thread,
which is the I/O thread, so they must be short and must not wait. A leaf: it knows no node.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from pslite.errors import DeadlineError

T = TypeVar("T")
U = TypeVar("U")


class Future(Generic[T]):
    """The result of a request in flight."""

    # One condition serves all futures: waiters are few (usually one thread), and a lock a
    # future would cost more than it saves.
    _lock = threading.RLock()
    _condition = threading.Condition(_lock)

    __slots__ = ("_callbacks", "_done", "_error", "_on_error", "_value", "describe", "flush")

    def __init__(self, describe: Callable[[], str] | str = "a request") -> None:
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: tuple[Callable[[Future[T]], None], ...] = ()
        self._on_error: tuple[Callable[[Future[T]], None], ...] = ()
        #: What is being waited for, and on whom; used in the text of a time-out.
        self.describe = describe
        #: Called before a wait: what could go on without haste should go on now.
        self.flush: Callable[[], None] | None = None

    def done(self) -> bool:
        """Return whether there is a value or an error."""
        return self._done

    def set_result(self, value: T) -> None:
        """Complete with ``value``; without effect when it is complete already."""
        self._complete(value, None)

    def set_error(self, error: BaseException) -> None:
        """Complete with ``error``; without effect when it is complete already."""
        self._complete(None, error)

    def _complete(self, value: T | None, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                return
            self._value, self._error, self._done = value, error, True
            callbacks = self._callbacks if error is None else self._on_error + self._callbacks
            self._callbacks = self._on_error = ()
            self._condition.notify_all()
        for callback in callbacks:
            _tell(self, callback)

    @property
    def what(self) -> str:
        """The awaited event, and the nodes that are to answer."""
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
        """Return the description of a future made of this one; refers to no value."""
        return self.describe

    def error(self) -> BaseException | None:
        """Return the error that it completed with, if any; does not wait."""
        return self._error

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for the value.

        Raises:
            DeadlineError: ``timeout_s`` is over; the text says what was waited for.
            Exception: the error it completed with, whatever that is.
        """
        if not self._done:
            if self.flush is not None:
                self.flush()
            with self._condition:
                self._condition.wait_for(lambda: self._done, timeout_s)
        if not self._done:
            raise DeadlineError(f"timed out after {timeout_s:g} s waiting for {self.what}")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def on_done(self, callback: Callable[[Future[T]], None]) -> None:
        """Call ``callback(self)`` on completion, or now if that was before."""
        with self._lock:
            if not self._done:
                self._callbacks = (*self._callbacks, callback)
                return
        callback(self)

    def on_error(self, callback: Callable[[Future[T]], None]) -> None:
        """Call ``callback(self)`` on an error, before all of ``on_done``."""
        with self._lock:
            if not self._done:
                self._on_error = (*self._on_error, callback)
                return
        if self._error is not None:
            callback(self)

    def then(self, step: Callable[[T], Future[U]]) -> Future[U]:
        """Return the future of a further step, taken with this one's value."""
        result: Future[U] = Future(self.describer())
        result.flush = self.flush

        def take(done: Future[T]) -> None:
            if done._error is not None:
                result.set_error(done._error)
                return
            try:
                following = step(done._value)  # type: ignore[arg-type]
            except BaseException as error:  # those who wait must not wait for ever
                result.set_error(error)
                if _ends_the_script(error):
                    raise
                return
            result.describe, result.flush = following.describer(), following.flush
            following.on_done(result._adopt)

        self.on_done(take)
        return result

    def or_else(self, step: Callable[[BaseException], Future[Any]]) -> Future[T]:
        """Return this one's value; after an error, take ``step`` first and keep the error."""
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
        """Return the future of ``function`` of this one's value."""
        return self.then(lambda value: completed(function(value)))

    def _adopt(self, done: Future[T]) -> None:
        self._complete(done._value, done._error)


def _tell(future: Future[T], callback: Callable[[Future[T]], None]) -> None:
    """Call ``callback`` and show what it raises: the completing thread continues.

    That thread belongs to the node. Where standard error takes nothing, nothing is shown.
    """
    try:
        callback(future)
    except BaseException as error:
        if _ends_the_script(error):
            raise
        with contextlib.suppress(Exception):
            traceback.print_exc()


def _ends_the_script(error: BaseException) -> bool:
    """Return whether this is Ctrl-C or ``sys.exit`` on the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and not isinstance(error, Exception)


def complete_all(futures: Sequence[Future[None]]) -> None:
    """Complete all of them with None, at little more than the cost of one.

    A thread that waits for one of them is woken once.
    """
    told = []
    with Future._lock:
        for future in futures:
            if not future._done:
                future._done = True
                if future._callbacks:
                    told.append((future, future._callbacks))
                future._callbacks = future._on_error = ()
        Future._condition.notify_all()
    for future, callbacks in told:
        for callback in callbacks:
            _tell(future, callback)


def completed(value: T) -> Future[T]:
    """Make a future that has its value already."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def failed(error: BaseException) -> Future[Any]:
    """Make a future that has its error already."""
    future: Future[Any] = Future()
    future.set_error(error)
    return future


def settled(futures: Iterable[Future[Any]]) -> Future[None]:
    """Make a future that is done once all of them are, whatever they ended in."""
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
    """Make a future of all values, in order; or of the first error, once all are done.

    It waits for all of them also after an error, so that no buffers are still in use
    when it completes.
    """
    waited = list(futures)

    def collect(_: None) -> Future[list[Any]]:
        errors = [error for future in waited if (error := future.error()) is not None]
        return failed(errors[0]) if errors else completed([future.result(0) for future in waited])

    return settled(waited).then(collect)
