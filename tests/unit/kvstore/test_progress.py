"""Steps, samples and waits of a worker, as its reports tell them."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.progress import Progress, note_step, progress_of
from pslite.future import Future
from pslite.survey import Progressed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    return Progress(clock)


def test_before_the_first_step_there_are_no_rates(progress: Progress) -> None:
    assert progress.progressed() == Progressed(0, 0, 0.0, 0.0, 0.0, 0.0)


def test_steps_of_two_seconds_are_half_a_step_a_second(clock: Clock, progress: Progress) -> None:
    for _ in range(5):
        clock.now += 2.0
        progress.step(32)
    clock.now += 1.0
    assert progress.progressed() == Progressed(5, 160, 0.5, 16.0, 0.0, 1.0)


def test_rates_are_those_of_the_last_time_and_not_of_all(clock: Clock, progress: Progress) -> None:
    for _ in range(100):
        clock.now += 5.0
        progress.step(1)
    for _ in range(400):
        clock.now += 0.25
        progress.step(1)
    found = progress.progressed()
    assert (found.steps, found.samples) == (500, 500)
    assert found.steps_per_s == pytest.approx(4.0)


def test_a_step_that_is_overdue_makes_the_rate_fall(clock: Clock, progress: Progress) -> None:
    for _ in range(5):
        clock.now += 1.0
        progress.step()
    clock.now += 1.0
    assert progress.progressed().steps_per_s == pytest.approx(1.0)
    clock.now += 95.0
    assert progress.progressed().steps_per_s == pytest.approx(4 / 99)


def test_rounds_count_pushes_of_the_key_that_is_pushed_most(progress: Progress) -> None:
    progress.pushed(1, "once")
    for _ in range(3):
        for key in ("a", "b", "c"):
            progress.pushed(1, key)
        progress.pushed(2, "a")
    assert progress.progressed().steps == 3


def test_rounds_of_a_store_that_is_closed_stay_counted(progress: Progress) -> None:
    for _ in range(3):
        progress.pushed(1, "a")
        progress.pushed(1, "b")
    progress.forget(1, ["a", "b", "never pushed"])
    for _ in range(2):
        progress.pushed(2, "a")
    assert progress.progressed().steps == 5


def test_rounds_go_on_with_the_keys_that_are_left(progress: Progress) -> None:
    for _ in range(3):
        progress.pushed(1, "a")
    progress.pushed(1, "b")
    progress.forget(1, ["a"])
    progress.pushed(1, "b")
    assert progress.progressed().steps == 4


def test_steps_count_and_rounds_do_not_where_steps_are_told(
    clock: Clock, progress: Progress
) -> None:
    for _ in range(4):
        clock.now += 1.0
        progress.pushed(1, "a")
        progress.pushed(1, "a")
        progress.step(10)
    assert progress.progressed() == Progressed(4, 40, 1.0, 10.0, 0.0, 0.0)


def test_communication_is_the_share_of_time_in_waits(clock: Clock, progress: Progress) -> None:
    future: Future[Any] = Future("the answer")
    for _ in range(8):
        clock.now += 3.0
        progress.begin_wait(future)
        clock.now += 1.0
        progress.end_wait()
        progress.step()
    assert progress.progressed().communication == pytest.approx(0.25)


def test_a_wait_within_a_wait_ends_both(clock: Clock, progress: Progress) -> None:
    """As of a handler of a signal, which saves what the servers have."""
    future: Future[Any] = Future("the answer")
    progress.begin_wait(future)
    progress.begin_wait(future)
    progress.end_wait()
    progress.end_wait()
    assert progress.waits() == []


@pytest.mark.parametrize("samples", [1e300, float("inf")])
def test_no_number_of_samples_makes_a_report_impossible(
    clock: Clock, progress: Progress, samples: float
) -> None:
    for _ in range(3):
        progress.step(samples)
        clock.now += 1.0
    found = progress.progressed()
    assert 0 <= found.samples < 1 << 63
    assert 0.0 <= found.samples_per_s < float("inf")


def test_a_wait_that_is_not_over_counts_and_is_named(clock: Clock, progress: Progress) -> None:
    progress.step()
    progress.begin_wait(Future("the servers' answer for 'w'"))
    clock.now += 0.5
    assert progress.waits() == []
    clock.now += 9.5
    [wait] = progress.waits()
    assert wait == ("the servers' answer for 'w'", 0, (), 10.0)
    assert progress.progressed().communication == 1.0
    progress.end_wait()
    assert progress.waits() == []


def test_a_wait_that_cannot_be_described_is_told_nevertheless(
    clock: Clock, progress: Progress
) -> None:
    def describe() -> str:
        raise RuntimeError("dictionary changed size during iteration")

    progress.begin_wait(Future(describe))
    clock.now += 2.0
    assert [wait.what for wait in progress.waits()] == ["an answer"]


def test_a_node_has_one_progress_for_all_of_its_stores() -> None:
    class Node:
        progress: Any = None

    node: Any = Node()
    found = progress_of(node)
    assert progress_of(node) is found is node.progress
    assert progress_of(Node()) is not found  # type: ignore[arg-type]


def test_a_step_through_a_store_that_nobody_asks_about_is_not_counted() -> None:
    note_step(object(), 32)

    class Store:
        _progress = Progress()

    note_step(Store(), 32)
    assert Store._progress.progressed()[:2] == (1, 32)
