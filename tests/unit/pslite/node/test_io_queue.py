"""Commands for later: each once, in the order of their times."""

from __future__ import annotations

import math

from pslite.node.io_queue import Timers


def test_what_is_due_runs_once_in_the_order_of_time_and_of_asking() -> None:
    timers, ran = Timers(), list[str]()
    assert timers.next_due() == math.inf
    for due, name in [(2.0, "late"), (1.0, "first"), (1.0, "second")]:
        timers.add(due, lambda name=name: ran.append(name))  # type: ignore[misc]
    assert timers.next_due() == 1.0
    timers.run(0.5)
    assert ran == []
    timers.run(1.0)
    assert ran == ["first", "second"]
    timers.every(1.0, lambda now: ran.append("over"))
    timers.end()
    assert ran == ["first", "second", "late"]
    assert timers.next_due() == math.inf


def test_a_command_may_ask_for_another_one() -> None:
    timers, ran = Timers(), list[str]()
    timers.add(1.0, lambda: timers.add(3.0, lambda: ran.append("later")))
    timers.run(2.0)
    assert (ran, timers.next_due()) == ([], 3.0)


def test_a_timer_that_is_set_anew_is_due_at_the_last_time_only() -> None:
    timers, ran = Timers(), list[float]()
    timer = timers.new(ran.append)
    for due in (5.0, 1.0, 3.0):
        timer.set(due)
    timers.run(2.0)
    assert (ran, timers.next_due()) == ([], 3.0)
    timers.run(6.0)
    assert (ran, timer.due, timers.next_due()) == ([6.0], math.inf, math.inf)
    timer.set(8.0)
    timer.set(math.inf)
    timers.run(9.0)
    assert ran == [6.0]


def test_what_is_due_every_so_often_is_due_at_once_and_then_after_each_interval() -> None:
    timers, ran = Timers(), list[float]()
    timers.every(2.0, ran.append)
    for now in (10.0, 11.9, 13.0, 14.9, 15.0):
        timers.run(now)
    assert (ran, timers.next_due()) == ([10.0, 13.0, 15.0], 17.0)
