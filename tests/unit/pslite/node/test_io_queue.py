"""The queue and the timers of the I/O thread: each call once, in order, also at the end."""

from __future__ import annotations

import math
import threading

import pytest

from pslite.errors import UsageError
from pslite.node.io_queue import IOQueue, Timers, _note_fork


def test_what_is_due_runs_once_in_the_order_of_time_and_of_asking() -> None:
    timers, ran = Timers(), list[str]()
    assert timers.due == math.inf
    for due, name in [(2.0, "late"), (1.0, "first"), (1.0, "second")]:
        timers.add(due, lambda name=name: ran.append(name))  # type: ignore[misc]
    assert timers.due == 1.0
    timers.run(0.5)
    assert ran == []
    timers.run(1.0)
    assert ran == ["first", "second"]
    timers.every(1.0, lambda now: ran.append("over"))
    timers.end()
    assert ran == ["first", "second", "late"]
    assert timers.due == math.inf


def test_a_command_may_ask_for_another_one() -> None:
    timers, ran = Timers(), list[str]()
    timers.add(1.0, lambda: timers.add(3.0, lambda: ran.append("later")))
    timers.run(2.0)
    assert (ran, timers.due) == ([], 3.0)


def test_a_timer_that_is_set_anew_is_due_at_the_last_time_only() -> None:
    timers, ran = Timers(), list[float]()
    timer = timers.new(ran.append)
    for due in (5.0, 1.0, 3.0):
        timer.set(due)
    timers.run(2.0)
    assert (ran, timers.due) == ([], 3.0)
    timers.run(6.0)
    assert (ran, timer.due, timers.due) == ([6.0], math.inf, math.inf)
    timer.set(8.0)
    timer.set(math.inf)
    timers.run(9.0)
    assert ran == [6.0]


def test_what_is_due_every_so_often_is_due_at_once_and_then_after_each_interval() -> None:
    timers, ran = Timers(), list[float]()
    timers.every(2.0, ran.append)
    for now in (10.0, 11.9, 13.0, 14.9, 15.0):
        timers.run(now)
    assert (ran, timers.due) == ([10.0, 13.0, 15.0], 17.0)


class Node:
    """A clock and a poll, which somebody wakes."""

    def __init__(self) -> None:
        self.now = 10.0
        self.wakes = 0
        self.ran: list[str] = []
        self.io_queue = IOQueue(self._wake, lambda: self.now)

    def _wake(self) -> None:
        self.wakes += 1

    def note(self, name: str) -> None:
        self.ran.append(name)


def test_commands_run_in_the_order_of_their_calls_and_wake_the_poll() -> None:
    node = Node()
    node.io_queue.call(lambda: node.note("first"))
    node.io_queue.call(lambda: node.note("second"))
    assert (node.wakes, node.ran) == (2, [])
    node.io_queue.run()
    assert node.ran == ["first", "second"]
    node.io_queue.run()
    assert node.ran == ["first", "second"]


def test_the_io_thread_need_not_be_woken() -> None:
    node = Node()
    assert not node.io_queue.is_io_thread
    node.io_queue.thread = threading.current_thread()
    node.io_queue.call(lambda: node.note("mine"))
    assert (node.io_queue.is_io_thread, node.wakes) == (True, 0)


def test_what_is_for_later_waits_for_its_time() -> None:
    node = Node()
    node.io_queue.call_later(2.0, lambda: node.note("later"))
    assert node.io_queue.timers.due == math.inf
    node.io_queue.run()
    assert node.io_queue.timers.due == 12.0
    node.io_queue.timers.run(12.0)
    assert node.ran == ["later"]


def test_a_look_is_repeated_until_it_has_seen_enough() -> None:
    node = Node()

    def look() -> bool:
        node.note("look")
        return len(node.ran) == 2

    node.io_queue.look_after_each_step(look)
    for _ in range(3):
        node.io_queue.look()
    assert (node.ran, node.io_queue.looks) == (["look", "look"], [])


def test_what_is_performed_tells_its_end() -> None:
    node = Node()
    done = node.io_queue.perform(lambda: node.note("done"))
    failed = node.io_queue.perform(lambda: [].pop())
    assert not done.done()
    node.io_queue.run()
    assert done.error() is None
    assert isinstance(failed.error(), IndexError)
    assert node.ran == ["done"]


def test_at_the_end_everything_is_run_and_what_comes_afterwards_at_once() -> None:
    node = Node()
    node.io_queue.call_later(100.0, lambda: node.note("a timer"))
    node.io_queue.run()
    node.io_queue.call_later(5.0, lambda: node.note("one that was not set yet"))
    node.io_queue.call(lambda: node.note("a command"))
    node.io_queue.look_after_each_step(lambda: False)
    node.io_queue.end()
    assert node.ran == ["one that was not set yet", "a command", "a timer"]
    assert node.io_queue.looks == []
    node.io_queue.call(lambda: node.note("a late command"))
    node.io_queue.call_later(5.0, lambda: node.note("a late timer"))
    assert node.ran[3:] == ["a late command", "a late timer"]


def test_a_forked_child_is_refused_and_nothing_is_kept() -> None:
    node = Node()
    assert not node.io_queue.is_forked
    _note_fork()
    assert node.io_queue.is_forked
    for ask in (
        node.io_queue.check_process,
        lambda: node.io_queue.call(lambda: node.note("never")),
        lambda: node.io_queue.call_later(0.0, lambda: node.note("never")),
    ):
        with pytest.raises(UsageError, match="a forked child cannot use it"):
            ask()
    assert (node.wakes, len(node.io_queue.commands)) == (0, 0)
