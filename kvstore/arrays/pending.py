"""Tracking of calls that still use an array's memory, for lazy arrays.

A store that returns before its work is done hands ``begin`` the future of that work. From then
on every access to one of the arrays waits as long as it must: reading for the calls that write
there, writing for those that read there too. The stores own all work on values: nothing here
reads or writes an array, or keeps one in memory. Waits happen on the thread that accesses the
array; a future's end is noted on the thread that completes it, which is a node's I/O thread.
Read next: ``mxnet/nd/ndarray.py``, the array that asks.

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
"""Waits until the future is done; may raise the future's error, or one of its own before."""

# Guards changes of the tuples of all ``Uses`` and of ``_failed``; never held during a wait.
# That there is nothing to wait for is read without it: one load of an attribute that is only
# ever replaced. Re-entrant for the handler of a signal that reads arrays (to save them).
_lock = threading.RLock()


class Use:
    """One call of a store that reads or writes arrays."""

    __slots__ = ("__weakref__", "_failure", "_is_told", "_work", "_writes")

    def __init__(self, future: Future[Any], wait: Wait, *, writes: bool) -> None:
        # Both in one attribute, so that they vanish at once: a finished use keeps neither the
        # call's buffers nor its store alive.
        self._work: tuple[Future[Any], Wait] | None = (future, wait)
        self._failure: tuple[BaseException, str] | None = None
        self._is_told = False
        self._writes = writes

    @property
    def is_over(self) -> bool:
        """Whether the call has ended, in whatever."""
        return self._work is None

    @property
    def has_succeeded(self) -> bool:
        """Whether the call has ended without an error."""
        # In this order, since it may end meanwhile: it has failed before it is over.
        return self._work is None and self._failure is None

    @property
    def has_failed(self) -> bool:
        """Whether the call has ended in an error."""
        return self._failure is not None

    def finish(self) -> None:
        """Return when the call has ended, in whatever.

        Raises what the store's wait raises of itself, such as ``KeyboardInterrupt``; then the
        call is still under way.
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
        """Note how the call ended. Any thread; again is without effect."""
        if self._work is None:
            return
        error = future.error()
        if error is not None and self._writes:  # what was only read is as good as before
            self._failure = (error, future.what)
            with _lock:
                if not self._is_told:
                    _failed.add(self)
        self._work = None
        _unfinished.pop(self, None)

    def note_told(self) -> None:
        """Record that a caller got the error, so ``waitall`` need not raise it."""
        with _lock:
            self._is_told = True
            _failed.discard(self)

    def raise_failure(self, whose: str) -> None:
        """Raise the call's error; ``whose`` names the arrays. Without one, do nothing.

        An error of the project is raised as a copy whose text says what it means for the
        arrays. One that cannot be copied, and what is not an error of the project and so a bug, is
        raised as it is.
        """
        if self._failure is None:
            return
        error, what = self._failure
        self.note_told()
        if not isinstance(error, PSError):
            raise error
        try:
            told = copy.copy(error)
        except TypeError:  # its constructor wants other arguments
            raise error from None
        told.args = (f"{whose} did not get the new values (waiting for {what}): {error}",)
        raise told from error


class Uses:
    """The unfinished calls that use one piece of memory, views included."""

    __slots__ = ("reads", "writes")

    def __init__(self) -> None:
        #: Not ended yet, or not noticed yet to have ended. Replaced under ``_lock``.
        self.writes: tuple[Use, ...] = ()
        self.reads: tuple[Use, ...] = ()

    def settle(self, *, for_writing: bool) -> None:
        """Wait until the memory may be read, or written.

        Raises the first error of a call that should have written there. It is raised once:
        the next access goes through, to values that are neither all old nor all new.
        """
        writes = self.writes
        reads = self.reads if for_writing else ()
        if len(writes) == 1 and not reads and writes[0].has_succeeded:  # nearly always
            if for_writing:
                return  # to the next ``begin``, which replaces it
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


#: Calls under way, in the order in which they began (a dict for its order). Each leaves by
#: itself when its future completes. Single operations on a dict need no lock.
_unfinished: dict[Use, None] = {}
#: Calls whose error has not been raised yet. They vanish with the last of their arrays.
_failed: weakref.WeakSet[Use] = weakref.WeakSet()


def begin(
    future: Future[Any],
    writes: Iterable[Uses] = (),
    reads: Iterable[Uses] = (),
    wait: Wait = Future.result,
) -> None:
    """Record that a call has begun to write to, or read from, these arrays.

    ``future`` completes when the values are there (``writes``), or when what is read is not
    needed any more (``reads``); an error of it is raised where ``writes`` are accessed.
    ``wait`` is how to wait for it; where the default would block the wrong thread, or say
    nothing for too long, the store passes its own.
    """
    if future.done() and future.error() is None:
        return
    writes = tuple(writes)
    use = Use(future, wait, writes=bool(writes))
    _unfinished[use] = None  # before an array can end it
    with _lock:
        for uses in writes:
            # What has failed stays until somebody was told.
            kept = uses.writes and [u for u in uses.writes if not u.has_succeeded]
            uses.writes = (*kept, use) if kept else (use,)
        for uses in reads:
            uses.reads = (*[old for old in uses.reads if not old.is_over], use)
    future.on_done(use.end)


def waitall() -> None:
    """Wait for every call under way that works in any lazy array, also in freed ones.

    Raises the first error that has not been raised yet, and says how many more there are. An
    array that should have got new values still raises when it is accessed: it did not.
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
