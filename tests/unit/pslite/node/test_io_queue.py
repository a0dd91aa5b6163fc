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
    timers.run(math.inf)
    assert ran == ["first", "second", "late"]
    assert timers.next_due() == math.inf


def test_a_command_may_ask_for_another_one() -> None:
    timers, ran = Timers(), list[str]()
    timers.add(1.0, lambda: timers.add(3.0, lambda: ran.append("later")))
    timers.run(2.0)
    assert (ran, timers.next_due()) == ([], 3.0)
