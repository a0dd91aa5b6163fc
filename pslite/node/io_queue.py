"""The queue and the timers of a node's I/O thread.

Other threads give it functions to call on the I/O thread: now, later, or after each step of its
loop. ``postoffice.py`` calls them. Nothing here waits or holds a lock. Every function is called,
even if the node ends first: a thread that adds one after the end calls it itself, and finds the
node's error set. A forked child has no I/O thread, so its calls raise an error.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pslite.errors import UsageError
from pslite.future import Future


@dataclass(slots=True, eq=False)
class Timer:
    """A command with a time at which it is due. Made by ``Timers.new``."""

    timers: Timers
    command: Callable[[float], None]
    #: Whether to call it once, and at the end of the node if that is earlier.
    is_one_time: bool = False
    #: When to call it next; inf: not before the next ``set``.
    due: float = math.inf

    def set(self, due: float) -> None:
        """Schedule the command for ``due`` instead of its earlier time; inf: never."""
        self.due = due
        timers, waiting = self.timers, self.timers.waiting
        if due < math.inf:
            heapq.heappush(waiting, (due, next(timers.numbers), self))
        while waiting and waiting[0][0] != waiting[0][2].due:
            heapq.heappop(waiting)
        timers.due = waiting[0][0] if waiting else math.inf


class Timers:
    """Commands with due times, by the node's clock."""

    def __init__(self) -> None:
        #: When the next command is due.
        self.due = math.inf
        #: Tells timers of the same time apart: the one that was set first comes first.
        self.numbers = itertools.count()
        #: A heap. After a timer is set again, its older entries stay here with their old times, but
        #: never in front.
        self.waiting: list[tuple[float, int, Timer]] = []

    def new(self, command: Callable[[float], None]) -> Timer:
        """Make a timer that is not set yet; ``command`` is called with the time."""
        return Timer(self, command)

    def add(self, due: float, command: Callable[[], None]) -> None:
        """Schedule one call of ``command`` for ``due``, or for ``end`` if that is earlier.

        Commands that are due first are called first.
        """
        Timer(self, lambda _: command(), is_one_time=True).set(due)

    def every(self, interval_s: float, command: Callable[[float], None]) -> None:
        """Schedule ``command`` for the next ``run``, and again after each interval."""

        def again(now: float) -> None:
            timer.set(now + interval_s)
            command(now)

        timer = self.new(again)
        timer.set(-math.inf)

    def run(self, now: float) -> None:
        """Call the commands that are due."""
        while self.due <= now:
            timer = self.waiting[0][2]
            timer.set(math.inf)
            timer.command(now)

    def one_time(self) -> list[Timer]:
        """Return the waiting timers that ``add`` made, ordered by their times."""
        return [timer for _, _, timer in sorted(self.waiting) if timer.is_one_time]

    def end(self) -> None:
        """Call each waiting command of ``add`` now, and drop all other timers."""
        waiting = self.one_time()
        self.waiting.clear()
        self.due = math.inf
        for timer in waiting:
            timer.command(math.inf)


_queues: weakref.WeakSet[IOQueue] = weakref.WeakSet()
"""All queues of this process."""


def _note_fork() -> None:
    for queue in _queues:
        queue.is_forked = True


os.register_at_fork(after_in_child=_note_fork)


class IOQueue:
    """The queue of calls for a node's I/O thread; ``wake`` interrupts its poll."""

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float]) -> None:
        self._wake = wake
        self._clock = clock
        self._pid = os.getpid()
        #: Whether this is a forked child of the node's process. Every call of a store reads it.
        self.is_forked = False
        _queues.add(self)
        self._ended = False
        #: The I/O thread; None if the simulator drives the node.
        self.thread: threading.Thread | None = None
        #: The functions that ``run`` must call.
        self.commands: deque[Callable[[], None]] = deque()
        self.timers = Timers()
        #: When the thread must go on even if nothing arrives: for a timer or a channel.
        self.due = 0.0
        #: The functions that ``look`` must call.
        self.looks: list[Callable[[], bool]] = []

    # -- from any thread ---------------------------------------------------------------

    def call(self, command: Callable[[], None]) -> None:
        """Schedule ``command`` for the I/O thread; return at once.

        Raises:
            UsageError: this is a forked child, which does not have an I/O thread.
        """
        if self.is_forked:
            self.check_process()
        self.commands.append(command)
        if self._ended:
            # No other thread will run the command. It will find the node's error set.
            self.run()
        elif threading.current_thread() is not self.thread:
            self._wake()

    def call_later(self, delay_s: float, command: Callable[[], None]) -> None:
        """Schedule ``command`` for the I/O thread, after a delay or when the node ends.

        Returns at once. Raises as ``call`` does.
        """

        def set_timer() -> None:
            if self._ended:
                command()
            else:
                self.timers.add(self._clock() + delay_s, command)

        self.call(set_timer)

    def perform(self, action: Callable[[], None]) -> Future[None]:
        """Schedule ``action`` for the I/O thread; the future completes when it is done."""
        future: Future[None] = Future("the I/O thread")

        def run() -> None:
            try:
                action()
            except BaseException as error:
                future.set_error(error)
            else:
                future.set_result(None)

        self.call(run)
        return future

    def check_process(self) -> None:
        """Raise ``UsageError`` in a forked child, which has no I/O thread."""
        if self.is_forked:
            raise UsageError(
                f"this node belongs to process {self._pid}, and a forked child cannot use it; "
                "create stores in the child, or do not fork"
            )

    @property
    def is_io_thread(self) -> bool:
        """Whether the caller runs on the node's I/O thread, which must never wait."""
        return threading.current_thread() is self.thread

    # -- on the I/O thread -------------------------------------------------------------

    def look_after_each_step(self, look: Callable[[], bool]) -> None:
        """Call ``look`` after each step until it returns True."""
        self.looks.append(look)

    def run(self) -> None:
        """Call the waiting commands."""
        while self.commands:
            try:
                command = self.commands.popleft()
            except IndexError:  # after the end, another thread took the command first
                break
            command()

    def look(self) -> None:
        """Call the functions of ``look_after_each_step``."""
        self.looks = [look for look in self.looks if not look()]

    @property
    def has_work(self) -> bool:
        """Whether commands, timers of ``add`` or looks are waiting."""
        return bool(self.commands or self.looks or self.timers.one_time())

    def end(self) -> None:
        """Run all waiting commands and timers of ``add``, after the last step."""
        self._ended = True
        self.run()
        self.timers.end()
        self.looks.clear()
