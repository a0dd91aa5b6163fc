"""Steps, samples and waits of a worker, as its reports tell them."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.stores.dist.progress import StoreProgress, note_step, progress_of
from pslite.errors import DeadlockError
from pslite.future import Future
from pslite.wire.survey import Progressed


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> StoreProgress:
    return StoreProgress(clock)


def test_before_the_first_step_there_are_no_rates(progress: StoreProgress) -> None:
    assert progress.progressed() == Progressed(0, 0, 0.0, 0.0, 0.0, 0.0)


def test_steps_of_two_seconds_are_half_a_step_a_second(
    clock: Clock, progress: StoreProgress
) -> None:
    for _ in range(5):
        clock.now += 2.0
        progress.step(32)
    clock.now += 1.0
    assert progress.progressed() == Progressed(5, 160, 0.5, 16.0, 0.0, 1.0, 9.0)


def test_rates_are_those_of_the_last_time_and_not_of_all(
    clock: Clock, progress: StoreProgress
) -> None:
    for _ in range(100):
        clock.now += 5.0
        progress.step(1)
    for _ in range(400):
        clock.now += 0.25
        progress.step(1)
    found = progress.progressed()
    assert (found.steps, found.samples) == (500, 500)
    assert found.steps_per_s == pytest.approx(4.0)


def test_a_step_that_is_overdue_makes_the_rate_fall(clock: Clock, progress: StoreProgress) -> None:
    for _ in range(5):
        clock.now += 1.0
        progress.step()
    clock.now += 1.0
    assert progress.progressed().steps_per_s == pytest.approx(1.0)
    clock.now += 95.0
    assert progress.progressed().steps_per_s == pytest.approx(4 / 99)


def test_rounds_count_pushes_of_the_key_that_is_pushed_most(progress: StoreProgress) -> None:
    progress.pushed(1, "once")
    for _ in range(3):
        for key in ("a", "b", "c"):
            progress.pushed(1, key)
        progress.pushed(2, "a")
    assert progress.progressed().steps == 3


def test_rounds_of_a_store_that_is_closed_stay_counted(progress: StoreProgress) -> None:
    for _ in range(3):
        progress.pushed(1, "a")
        progress.pushed(1, "b")
    progress.forget(1, ["a", "b", "never pushed"])
    for _ in range(2):
        progress.pushed(2, "a")
    assert progress.progressed().steps == 5


def test_rounds_go_on_with_the_keys_that_are_left(progress: StoreProgress) -> None:
    for _ in range(3):
        progress.pushed(1, "a")
    progress.pushed(1, "b")
    progress.forget(1, ["a"])
    progress.pushed(1, "b")
    assert progress.progressed().steps == 4


def test_steps_count_and_rounds_do_not_where_steps_are_told(
    clock: Clock, progress: StoreProgress
) -> None:
    for _ in range(4):
        clock.now += 1.0
        progress.pushed(1, "a")
        progress.pushed(1, "a")
        progress.step(10)
    assert progress.progressed() == Progressed(4, 40, 1.0, 10.0, 0.0, 0.0, 3.0)


def test_communication_is_the_share_of_time_in_waits(clock: Clock, progress: StoreProgress) -> None:
    future: Future[Any] = Future("the answer")
    for _ in range(8):
        clock.now += 3.0
        progress.begin_wait(future)
        clock.now += 1.0
        progress.end_wait()
        progress.step()
    assert progress.progressed().communication == pytest.approx(0.25)


def test_a_wait_within_a_wait_ends_both(clock: Clock, progress: StoreProgress) -> None:
    """As of a handler of a signal, which saves what the servers have."""
    future: Future[Any] = Future("the answer")
    progress.begin_wait(future)
    progress.begin_wait(future)
    progress.end_wait()
    progress.end_wait()
    assert progress.waits() == []


@pytest.mark.parametrize("samples", [1e300, float("inf")])
def test_no_number_of_samples_makes_a_report_impossible(
    clock: Clock, progress: StoreProgress, samples: float
) -> None:
    for _ in range(3):
        progress.step(samples)
        clock.now += 1.0
    found = progress.progressed()
    assert 0 <= found.samples < 1 << 63
    assert 0.0 <= found.samples_per_s < float("inf")


def test_a_wait_that_is_not_over_counts_and_is_named(clock: Clock, progress: StoreProgress) -> None:
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
    clock: Clock, progress: StoreProgress
) -> None:
    def describe() -> str:
        raise RuntimeError("dictionary changed size during iteration")

    progress.begin_wait(Future(describe))
    clock.now += 2.0
    assert [wait.what for wait in progress.waits()] == ["an answer"]


def test_a_node_has_one_progress_for_all_of_its_stores() -> None:
    class Node:
        def __init__(self) -> None:
            self.reporter = SimpleNamespace(progress=None)

    node: Any = Node()
    found = progress_of(node)
    assert progress_of(node) is found is node.reporter.progress
    assert progress_of(Node()) is not found  # type: ignore[arg-type]


def test_a_step_through_a_store_that_nobody_asks_about_is_not_counted() -> None:
    note_step(object(), 32)

    class Store:
        _progress = StoreProgress()

    note_step(Store(), 32)
    assert Store._progress.progressed()[:2] == (1, 32)


# -- threads that wait for long -------------------------------------------------------------


@pytest.fixture
def alone(progress: StoreProgress) -> StoreProgress:
    """Of a process without other threads."""
    progress.others_may_act = lambda waiting: False
    return progress


def test_who_waits_for_long_in_all_threads_is_stuck(alone: StoreProgress) -> None:
    assert alone.stuck() is None
    future: Future[None] = Future("worker 1")
    alone.begin_wait(future)
    assert alone.stuck() is None, "it has just begun"
    ended = alone.begin_long_wait(future)
    stuck = alone.stuck()
    assert stuck is not None
    count, (call,) = stuck
    assert (count, call.endswith(" for worker 1")) == (1, True)
    future.set_result(None)
    assert ended.done()
    assert alone.stuck() is None, "it is about to go on"
    alone.end_wait()
    assert alone.stuck() is None


def test_a_thread_whose_wait_has_a_limit_or_is_short_may_go_on(alone: StoreProgress) -> None:
    alone.begin_wait(Future())
    alone.begin_long_wait(Future())
    thread = threading.Thread(target=alone.begin_wait, args=(Future(),))
    thread.start()
    thread.join()
    assert alone.stuck() is None


def test_another_thread_may_go_on(alone: StoreProgress) -> None:
    alone.others_may_act = lambda waiting: list(waiting) == [threading.get_ident()]
    alone.begin_wait(Future())
    alone.begin_long_wait(Future())
    assert alone.stuck() is None


def test_a_deadlock_ends_the_wait_and_not_what_is_waited_for(alone: StoreProgress) -> None:
    future: Future[int] = Future()
    alone.begin_wait(future)
    ended = alone.begin_long_wait(future)
    alone.deadlocked("all wait")
    with pytest.raises(DeadlockError, match=r"^all wait$"):
        ended.result(0)
    assert not future.done()
    alone.end_wait()
    alone.deadlocked("nobody waits any more")


def test_a_process_whose_threads_all_wait_does_nothing_else() -> None:
    """In a process of its own: this one has threads of pytest."""
    code = """
import threading, time, sys
from kvstore.stores.dist.progress import others_may_act
from pslite.future import Future
future, found = Future(), []
def look():
    main = threading.main_thread().ident
    deadline = time.monotonic() + 20
    while others_may_act({main}) and time.monotonic() < deadline:
        time.sleep(0.01)
    found.append(others_may_act({main}))
    found.append(others_may_act({main, 1}))
    release = threading.Event()
    computing = threading.Thread(target=release.wait)
    computing.start()
    found.append(others_may_act({main}))
    release.set()
    computing.join()
    found.append(others_may_act({main}))
    found.append(others_may_act(set()))
    future.set_result(None)
threading.Thread(target=look, name="pslite-io-test").start()
future.result()
print(found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[False, True, True, False, True]\n", "")


def test_a_handler_of_a_signal_may_act_though_its_thread_waits() -> None:
    code = """
import signal, threading
from kvstore.stores.dist.progress import others_may_act
from pslite.future import Future
future, found, main = Future(), [], threading.main_thread().ident
looked, began = threading.Event(), threading.Event()
def handle(*_):
    began.set()
    while not looked.is_set():
        pass
def look():
    signal.pthread_kill(main, signal.SIGUSR1)
    began.wait(20)
    found.append(others_may_act({main}))
    looked.set()
    future.set_result(None)
signal.signal(signal.SIGUSR1, handle)
threading.Thread(target=look, name="pslite-io-test").start()
future.result()
print(found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[True]\n", "")
