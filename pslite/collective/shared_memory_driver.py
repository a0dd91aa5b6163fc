"""Collective calls among workers of one machine, through rings of shared memory.

A caller that waits for a call carries it out: ``Future.flush`` takes the steps of
``shared_memory_algorithms.py`` for two milliseconds, which is enough for a small call. After that,
or from the start if a call has many steps, a thread takes them, so that the others need not wait
for a member that looks at its result late. Every wait ends: a member that is lost, or leaves, ends
all calls.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pslite.collective.shared_memory_algorithms import (
    Array,
    Begin,
    Description,
    Mismatch,
    Reduce,
    RingCalls,
    Steps,
)
from pslite.errors import ClosedError, PSError, UsageError, describe
from pslite.future import Future, failed
from pslite.memory.ring import Bytes, Ring
from pslite.protocol.collective import waiting_text

T = TypeVar("T")

_SPIN_S = 0.002
"""How long a caller checks again and again before the thread takes over."""
_LOOKS = 50
"""How often it checks at first without letting other threads run."""
_NAP_S = 0.02
"""The longest sleep: a bell may be missed (``Ring.sleep``), and a member may be lost."""
_HEAR_S = 5.0
"""If a member has failed, the others learn the cause within this time, or never."""


class _Call:
    """A call that has not ended."""

    def __init__(self, steps: Steps, future: Future[Any], value: Any) -> None:
        self.steps = steps
        self.future = future
        self.value = value
        self.awaits: tuple[int, int] | None = None
        self.error: BaseException | None = None


class SharedMemoryFuture(Future[T]):
    """The result of a call; ``result`` and ``done`` also take steps of the call."""

    __slots__ = ("_host",)

    def __init__(self, host: SharedMemoryDriver, describe: Callable[[], str]) -> None:
        super().__init__(describe)
        self._host = host
        self.flush = host.help

    def done(self) -> bool:
        """Return whether there is a value or an error; first take all possible steps."""
        if not self._done:
            self._host.carry_on()
        return self._done

    def on_done(self, callback: Callable[[Future[T]], None]) -> None:
        """Call ``callback(self)`` on completion; the thread completes the call."""
        super().on_done(callback)
        if not self._done:
            self._host.hurry()


class SharedMemoryDriver:
    """The calls of one group on one of its members.

    Args:
        ring: connected to the rings of the other members; closed with this object.
        size: the number of members, at least two.
        why_over: returns why a wait for these ranks cannot end (one is lost), or None.
        mismatch: makes the error for a call that differs among members.
        name: the group's name, for people.
        ranks: the members' ranks in the group, if they are not the whole group.

    Each call takes a text for people, the arguments of ``RingCalls`` and the future's value. The
    futures fail with ``mismatch(...)`` if members make different calls, with the error that
    ``why_over`` returns, or with a ``UsageError`` if a member has left the group.
    """

    def __init__(
        self,
        ring: Ring,
        size: int,
        *,
        mismatch: Mismatch,
        why_over: Callable[[Sequence[int]], BaseException | None] = lambda ranks: None,
        name: str = "a group of workers",
        ranks: Sequence[int] = (),
    ) -> None:
        self.ring = ring
        self.calls = RingCalls(ring, size, mismatch)
        self._name = name
        self._ranks = ranks or range(size)
        self._why_over = why_over
        self._calls: deque[_Call] = deque()
        self._over: BaseException | None = None
        self._failure_seen_at: float | None = None
        # Held by the thread that takes steps.
        self._driver = threading.Lock()
        # Guards the start of the thread, so that it does not start after the end.
        self._beginning = threading.Lock()
        # Held while the others are told about the end, so that the ring is not closed meanwhile.
        self._ending = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()

    def all_reduce(
        self,
        text: str,
        call: Description,
        array: Array,
        out: Array,
        reduce: Reduce,
        *,
        value: T,
    ) -> Future[T]:
        """Combine all members' arrays with ``reduce`` into ``out`` (may be ``array``)."""
        steps = self.calls.all_reduce(call, array, out, reduce)
        return self.begin(text, steps, value, is_quick=self.calls.is_quick(array.nbytes))

    def exchange(
        self,
        text: str,
        call: Description,
        pieces: Sequence[Bytes],
        begin: Begin,
        *,
        is_each: bool = False,
        nbytes: int | None = None,
        value: T,
    ) -> Future[T]:
        """Let every member read a piece from each of the others.

        ``nbytes`` is the size of the longest piece of all members; None if this one does not know.
        """
        steps = self.calls.exchange(call, pieces, begin, is_each=is_each)
        is_quick = nbytes is not None and self.calls.is_quick(nbytes)
        return self.begin(text, steps, value, is_quick=is_quick)

    def begin(self, text: str, steps: Steps, value: T, *, is_quick: bool = False) -> Future[T]:
        """Begin a call with steps from ``calls``.

        With ``is_quick``, the others need nothing more from this member once it has staged.
        """
        if self._over is not None:
            return failed(self._over)
        began = time.monotonic()
        future: SharedMemoryFuture[T] = SharedMemoryFuture(
            self, lambda: f"{text}: {waiting_text(self._lacking(), time.monotonic() - began)}"
        )
        is_first = not self._calls
        self._calls.append(_Call(steps, future, value))
        if is_first and is_quick:
            self.carry_on()
        else:
            self.hurry()
        return future

    def _lacking(self) -> list[int] | None:
        """Return the ranks that the oldest call waits for."""
        try:
            awaited = self._calls[0].awaits
        except IndexError:  # the call has just ended
            return None
        lacking = self.ring.lacking(*awaited) if awaited else []
        return [self._ranks[rank] for rank in lacking] or None

    # -- who takes the steps -------------------------------------------------------------

    def carry_on(self) -> None:
        """Take the steps that can be taken now. From any thread; does not wait."""
        self._drive(0.0)

    def help(self) -> None:
        """Take steps for some milliseconds; then let the thread do the rest."""
        self._drive(_SPIN_S)
        if self._calls:
            self.hurry()

    def hurry(self) -> None:
        """Let the thread carry out all calls."""
        with self._beginning:
            if self._thread is None and self._over is None:
                name = f"pslite-collective-{self._name}"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()
        self._wanted.set()

    def close(self, error: BaseException | None = None) -> None:
        """Stop taking part; return at once. From any thread.

        Unfinished calls fail with ``error``, by default a ``ClosedError``. Calls that the others
        make from now on fail with an error that names this rank.
        """
        closed = ClosedError(f"{self._name} was closed before this call was over")
        with self._beginning:
            self._end(error or closed, has_failed=error is not None)
            thread = self._thread
        if thread is None:
            self._finish()
        else:
            self._wanted.set()

    def _run(self) -> None:
        while self._over is None:
            self._wanted.wait()
            self._wanted.clear()
            while self._calls and self._over is None:
                self._drive(_SPIN_S / 10, nap=True)
        self._finish()

    def _finish(self) -> None:
        with self._driver:
            self._deliver([])
            with self._ending:
                self.ring.close()

    def _drive(self, spin_s: float, *, nap: bool = False) -> None:
        """Take steps; wait up to ``spin_s`` for the next one. One thread at a time."""
        if not self._driver.acquire(blocking=nap):
            return
        over: list[_Call] = []
        try:
            self._take_steps(over, spin_s, nap=nap)
        except BaseException as error:  # even Ctrl-C, because a step may be half done
            kind, text = describe(error)
            cut_short = UsageError(f"a collective call was cut short by {kind}: {text}")
            self._end(cut_short, has_failed=False)
            if not nap:  # the futures report the thread's error
                raise
        finally:
            self._driver.release()
            self._deliver(over)

    def _take_steps(self, over: list[_Call], spin_s: float, *, nap: bool) -> None:
        """Take the possible steps of the first call; add it to ``over`` if it has ended."""
        calls = self._calls
        while calls and self._over is None:
            call = calls[0]
            try:
                if call.awaits is None or self._reaches(call.awaits, spin_s, nap=nap):
                    call.awaits = next(call.steps)
                    continue
                difference = self.calls.difference()
                if difference is None:
                    return
                call.steps.throw(difference)
            except StopIteration:
                pass
            except PSError as error:  # all members get the same error
                call.error = error
            over.append(calls.popleft())
            return

    def _reaches(self, awaited: tuple[int, int], spin_s: float, *, nap: bool) -> bool:
        """Return whether all have reached the counter, now or after some time."""
        ring = self.ring
        if ring.has_reached(*awaited) or (spin_s and self._spin(awaited, spin_s)):
            return True
        self._look(awaited)
        if nap and self._over is None:
            ring.sleep(*awaited, _NAP_S)
        return ring.has_reached(*awaited) and self._over is None

    def _spin(self, awaited: tuple[int, int], spin_s: float) -> bool:
        """Check again and again, for some time, whether all have reached the counter."""
        has_reached = self.ring.has_reached
        for _ in range(_LOOKS):
            if has_reached(*awaited):
                return True
        end_at = time.monotonic() + spin_s
        while time.monotonic() < end_at:
            os.sched_yield()
            if has_reached(*awaited):
                return True
        return False

    def _look(self, awaited: tuple[int, int]) -> None:
        """End all calls if a needed member is lost or has left."""
        given_up = self.ring.given_up()  # first: a member announces all its steps before it leaves
        lacking = self.ring.lacking(*awaited)
        error = self._why_over(lacking)
        gone = [rank for rank in sorted(given_up) if rank in lacking]
        if error is None and gone:
            error = self._why_gone(gone, given_up)
        if error is not None:
            self._end(error, has_failed=True)

    def _why_gone(self, gone: Sequence[int], given_up: Mapping[int, bool]) -> BaseException | None:
        """Return the error for calls that need ``gone``; None while the cause is unknown.

        A member that has failed, for example because a server was lost, is not itself the cause.
        """
        left = [rank for rank, has_failed in sorted(given_up.items()) if not has_failed]
        if left:
            return UsageError(
                f"rank {self._ranks[left[0]]} has left {self._name}, and a call waits for it: "
                "every rank has to make all calls of its group before it leaves"
            )
        now = time.monotonic()
        if self._failure_seen_at is None:
            self._failure_seen_at = now
        if now - self._failure_seen_at < _HEAR_S:
            return None
        return UsageError(
            f"rank {self._ranks[gone[0]]} has ended its calls of {self._name} with an error, and a "
            "call waits for it: read the output of that rank"
        )

    def _end(self, error: BaseException, *, has_failed: bool) -> None:
        """Stop taking part, and tell the other members."""
        with self._ending:
            if self._over is None:
                self._over = error
                self.ring.give_up(has_failed=has_failed)

    def _deliver(self, over: list[_Call]) -> None:
        """Complete ended calls' futures, without the lock: callbacks may make calls."""
        if self._over is not None:
            while self._calls:
                call = self._calls.popleft()
                call.error = self._over
                over.append(call)
        for call in over:
            if call.error is not None:
                call.future.set_error(call.error)
            else:
                call.future.set_result(call.value)
