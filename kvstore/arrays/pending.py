"""Track the calls that still use an array's memory, for lazy arrays.

If a store's call returns before its work is done, it passes the future of that work to ``begin``.
From then on, reading one of the arrays waits for the calls that write to it, and writing also waits
for the calls that read it. This module does not read or write arrays, or keep them in memory. The
thread that accesses an array waits. The thread that completes the future, a node's I/O thread,
records the end of the call. Read next: ``mxnet/nd/ndarray.py``, whose arrays wait.

Source of the idea: the dependency engine of the original (``include/mxnet/engine.h``), where
every array has a variable and ``wait_to_read`` and ``waitall`` wait for it.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from pslite.errors import PSError
from pslite.future import Future

Wait: TypeAlias = Callable[[Future[Any]], Any]
"""A function that waits until the future is done; it may raise the future's error or its own."""

# Guards changes of the tuples of all ``Uses`` and of ``_failed``; never held during a wait.
# Reading these tuples needs no lock, since they are only ever replaced as a whole. Re-entrant,
# because a signal handler may read arrays (to save them).
_lock = threading.RLock()


class Use:
    """One call of a store that reads or writes arrays."""

    __slots__ = ("__weakref__", "_failure", "_is_told", "_work", "_writes")

    def __init__(self, future: Future[Any], wait: Wait, *, writes: bool) -> None:
        # Both are in one attribute, so that they are dropped together: a finished use must not
        # keep the call's buffers or its store alive.
        self._work: tuple[Future[Any], Wait] | None = (future, wait)
        self._failure: tuple[BaseException, str] | None = None
        self._is_told = False
        self._writes = writes

    @property
    def is_over(self) -> bool:
        """Whether the call has ended, with or without an error."""
        return self._work is None

    @property
    def has_succeeded(self) -> bool:
        """Whether the call has ended without an error."""
        # In this order, since the call may end meanwhile: ``end`` sets the failure first.
        return self._work is None and self._failure is None

    @property
    def has_failed(self) -> bool:
        """Whether the call has ended with an error."""
        return self._failure is not None

    def finish(self) -> None:
        """Wait until the call has ended, with or without an error.

        Raises other errors from the store's wait, such as ``KeyboardInterrupt``. The call has then
        not ended.
        """
        work = self._work
        if work is None:
            return
        future, wait = work
        if not future.done():
            try:
                wait(future)
            except BaseException as error:
                if not future.done() or future.error() is not error:
                    raise
        self.end(future)

    def end(self, future: Future[Any]) -> None:
        """Record how the call ended. Any thread may call; a second call has no effect."""
        if self._work is None:
            return
        error = future.error()
        if error is not None and self._writes:  # arrays that were only read are unchanged
            self._failure = (error, future.what)
            with _lock:
                if not self._is_told:
                    _failed.add(self)
        self._work = None
        _unfinished.pop(self, None)

    def note_told(self) -> None:
        """Record that a caller got the error, so that ``waitall`` does not raise it again."""
        with _lock:
            self._is_told = True
            _failed.discard(self)

    def raise_failure(self, whose: str) -> None:
        """Raise the call's error, if it has one; ``whose`` names the arrays.

        If it is an error of this project, a copy is raised whose message says what it means for the
        arrays. An error that cannot be copied, or of another kind (a bug), is raised unchanged.
        """
        if self._failure is None:
            return
        error, what = self._failure
        self.note_told()
        if not isinstance(error, PSError):
            raise error
        try:
            told = copy.copy(error)
        except TypeError:  # its constructor needs other arguments
            raise error from None
        told.args = (f"{whose} did not get the new values (waiting for {what}): {error}",)
        raise told from error


class Uses:
    """The unfinished calls that use one piece of memory, views included."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        #: Calls that may not have ended yet. Replaced under ``_lock``.
        self.writes: tuple[Use, ...] = ()
        self.reads: tuple[Use, ...] = ()

    def settle(self, *, for_writing: bool) -> None:
        """Wait until the memory may be read, or written.

        If a call that should have written there failed, this raises its error, once. The next
        access succeeds, but the values may be partly old and partly new.
        """
        writes = self.writes
        reads = self.reads if for_writing else ()
        if len(writes) == 1 and not reads and writes[0].has_succeeded:  # nearly always
            if for_writing:
                return  # the next ``begin`` replaces the tuple
            with _lock:
                if self.writes is writes:
                    self.writes = ()
                    return
        for use in (*writes, *reads):
            use.finish()
        with _lock:
            self.writes = tuple(use for use in self.writes if use not in writes)
            self.reads = tuple(use for use in self.reads if use not in reads)
        for use in writes:
            use.raise_failure("an array")


#: Unfinished calls, in the order in which they began (a dict keeps this order). Each is removed
#: when its future completes. Single operations on a dict need no lock.
_unfinished: dict[Use, None] = {}
#: Calls whose error has not been raised yet. A call is dropped when the last of its arrays is.
_failed: weakref.WeakSet[Use] = weakref.WeakSet()


def begin(
    future: Future[Any],
    writes: Iterable[Uses] = (),
    reads: Iterable[Uses] = (),
    wait: Wait = Future.result,
) -> None:
    """Record that a call has begun to write to, or read from, these arrays.

    ``future`` completes when the values are written (``writes``), or when the arrays are no longer
    needed (``reads``); its error is raised at the next access to ``writes``. ``wait`` waits for
    it; a store passes its own function if the default would block the wrong thread or wait too
    long without a report.
    """
    if future.done() and future.error() is None:
        return
    writes = tuple(writes)
    use = Use(future, wait, writes=bool(writes))
    _unfinished[use] = None  # before an access to an array can end the use
    with _lock:
        for uses in writes:
            # Failed calls stay until their error has been raised.
            kept = uses.writes and [u for u in uses.writes if not u.has_succeeded]
            uses.writes = (*kept, use) if kept else (use,)
        for uses in reads:
            uses.reads = (*[old for old in uses.reads if not old.is_over], use)
    future.on_done(use.end)


def waitall() -> None:
    """Wait for all unfinished calls on lazy arrays, including arrays already freed.

    Raises the first error that has not been raised yet, and says how many more there are. An
    array that did not get its new values still raises the error when it is accessed.
    """
    for use in list(_unfinished):
        use.finish()
    with _lock:
        unheard = list(_failed)
    for use in unheard:
        use.note_told()
    if unheard:
        more = len(unheard) - 1
        whose = f"an array, and those of {more} more calls," if more else "an array"
        unheard[0].raise_failure(whose)
