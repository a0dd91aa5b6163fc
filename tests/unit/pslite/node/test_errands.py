"""What other threads have a node do: each errand once, on the I/O thread, also at the end."""

from __future__ import annotations

import math
import threading

import pytest

from pslite.errors import UsageError
from pslite.node.io_queue import Errands


class Node:
    """A clock and a poll, which somebody wakes."""

    def __init__(self) -> None:
        self.now = 10.0
        self.wakes = 0
        self.ran: list[str] = []
        self.errands = Errands(self._wake, lambda: self.now)

    def _wake(self) -> None:
        self.wakes += 1

    def note(self, name: str) -> None:
        self.ran.append(name)


def test_commands_run_in_the_order_of_their_calls_and_wake_the_poll() -> None:
    node = Node()
    node.errands.call(lambda: node.note("first"))
    node.errands.call(lambda: node.note("second"))
    assert (node.wakes, node.ran) == (2, [])
    assert node.errands.run()
    assert node.ran == ["first", "second"]
    assert not node.errands.run()


def test_the_io_thread_need_not_be_woken() -> None:
    node = Node()
    assert not node.errands.is_io_thread
    node.errands.thread = threading.current_thread()
    node.errands.call(lambda: node.note("mine"))
    assert (node.errands.is_io_thread, node.wakes) == (True, 0)


def test_what_is_for_later_waits_for_its_time() -> None:
    node = Node()
    node.errands.call_later(2.0, lambda: node.note("later"))
    assert node.errands.timers.next_due() == math.inf
    node.errands.run()
    assert node.errands.timers.next_due() == 12.0
    node.errands.timers.run(12.0)
    assert node.ran == ["later"]


def test_a_look_is_repeated_until_it_has_seen_enough() -> None:
    node = Node()

    def look() -> bool:
        node.note("look")
        return len(node.ran) == 2

    node.errands.look_after_each_step(look)
    for _ in range(3):
        node.errands.look()
    assert (node.ran, node.errands.looks) == (["look", "look"], [])


def test_what_is_performed_tells_its_end() -> None:
    node = Node()
    done = node.errands.perform(lambda: node.note("done"))
    failed = node.errands.perform(lambda: [].pop())
    assert not done.done()
    node.errands.run()
    assert done.error() is None
    assert isinstance(failed.error(), IndexError)
    assert node.ran == ["done"]


def test_at_the_end_everything_is_run_and_what_comes_afterwards_at_once() -> None:
    node = Node()
    node.errands.call_later(100.0, lambda: node.note("a timer"))
    node.errands.run()
    node.errands.call_later(5.0, lambda: node.note("one that was not set yet"))
    node.errands.call(lambda: node.note("a command"))
    node.errands.look_after_each_step(lambda: False)
    node.errands.end()
    assert node.ran == ["one that was not set yet", "a command", "a timer"]
    assert node.errands.looks == []
    node.errands.call(lambda: node.note("a late command"))
    node.errands.call_later(5.0, lambda: node.note("a late timer"))
    assert node.ran[3:] == ["a late command", "a late timer"]


def test_a_forked_child_is_refused_and_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    assert not node.errands.is_forked
    monkeypatch.setattr("pslite.node.io_queue._pid", -1)
    assert node.errands.is_forked
    for ask in (
        node.errands.check_process,
        lambda: node.errands.call(lambda: node.note("never")),
        lambda: node.errands.call_later(0.0, lambda: node.note("never")),
    ):
        with pytest.raises(UsageError, match="a forked child cannot use it"):
            ask()
    assert (node.wakes, len(node.errands.commands)) == (0, 0)
