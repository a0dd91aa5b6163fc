"""Futures complete once, tell everybody who waits, and say what they wait for; deadlines."""

from __future__ import annotations

import io
import sys
import threading
from typing import Any

import pytest

from pslite.errors import ClosedError, DeadlineError, UsageError
from pslite.future import Future, completed, failed, gather

ERROR = UsageError("no such key")


def test_a_waiting_thread_gets_the_value_of_another_thread() -> None:
    future: Future[int] = Future()
    waiting = threading.Event()
    got: list[int] = []

    def wait() -> None:
        waiting.set()
        got.append(future.result(30.0))

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    future.set_result(7)
    thread.join()
    assert got == [7]


def test_a_future_shows_what_it_is_of_and_how_far() -> None:
    future: Future[list[int]] = Future(lambda: "a pull of 'w'")
    assert repr(future) == "<Future of a pull of 'w': pending>"
    future.set_result([1])
    assert repr(future) == "<Future of a pull of 'w': done, list>"
    lost: Future[None] = Future("a push")
    lost.set_error(ERROR)
    assert repr(lost) == "<Future of a push: failed, UsageError: no such key>"


def test_the_first_completion_counts() -> None:
    future: Future[int] = Future()
    future.set_result(1)
    future.set_result(2)
    future.set_error(ERROR)
    assert (future.result(0), future.error(), future.done()) == (1, None, True)


def test_an_error_is_raised_to_everyone_who_asks() -> None:
    future = failed(ERROR)
    for _ in range(2):
        with pytest.raises(UsageError) as caught:
            future.result()
        assert caught.value is ERROR
    assert future.error() is ERROR


@pytest.mark.parametrize("describe", ["the barrier", lambda: "the barrier"])
def test_time_that_is_up_says_what_was_waited_for_and_ends_only_this_wait(describe: Any) -> None:
    future: Future[int] = Future(describe)
    with pytest.raises(DeadlineError, match=r"^timed out after 0.01 s waiting for the barrier$"):
        future.result(0.01)
    future.set_result(3)
    assert future.result(0) == 3


def test_callbacks_run_once_whether_added_before_or_after() -> None:
    future: Future[int] = Future()
    seen: list[str] = []
    future.on_done(lambda done: seen.append(f"before {done.result(0)}"))
    future.set_result(1)
    future.set_result(2)
    future.on_done(lambda done: seen.append(f"after {done.result(0)}"))
    assert seen == ["before 1", "after 1"]


def test_an_error_is_noted_before_a_waiting_thread_can_get_it() -> None:
    future: Future[int] = Future()
    seen: list[object] = []

    def note(failing: Future[int]) -> None:
        seen.append((failing.done(), failing.error()))
        failing.set_result(7)  # too late: it is failing already
        failing.on_error(lambda _: seen.append("a later callback"))

    future.on_error(note)
    future.on_done(lambda done: seen.append(done.done()))
    future.set_error(ERROR)
    assert seen == [(False, ERROR), "a later callback", True]
    with pytest.raises(UsageError):
        future.result(0)


def test_a_further_step_is_taken_with_the_value_of_the_first() -> None:
    first: Future[int] = Future()
    second: Future[str] = Future("the second step")
    taken: list[int] = []

    def step(value: int) -> Future[str]:
        taken.append(value)
        return second

    result = first.then(step)
    first.set_result(4)
    halfway = (list(taken), result.done(), result.describe)
    second.set_result("done")
    assert (halfway, result.result(0)) == (([4], False, "the second step"), "done")


def test_an_error_skips_the_steps_that_follow() -> None:
    taken: list[object] = []
    result = failed(ERROR).map(taken.append).then(lambda value: completed(value))
    assert (result.error(), taken) == (ERROR, [])


def test_an_error_within_a_step_is_the_result() -> None:
    def step(value: int) -> Future[int]:
        raise ERROR

    assert completed(1).then(step).error() is ERROR
    assert completed(0).map(lambda value: 1 // value).error().__class__ is ZeroDivisionError


@pytest.mark.parametrize("ending", [SystemExit(0), KeyboardInterrupt()], ids=repr)
def test_a_step_that_ends_the_thread_of_a_node_is_the_result(ending: BaseException) -> None:
    first: Future[int] = Future()

    def step(value: int) -> Future[int]:
        raise ending

    result = first.then(step)
    complete = threading.Thread(target=first.set_result, args=(1,))
    complete.start()
    complete.join()
    assert result.error() is ending


def test_a_callback_that_ends_the_thread_of_a_node_keeps_nobody_from_being_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first: Future[int] = Future()
    told: list[int] = []

    def end(done: Future[int]) -> None:
        raise SystemExit("the end")

    first.on_done(end)
    first.on_done(lambda done: told.append(done.result(0)))
    complete = threading.Thread(target=first.set_result, args=(1,))
    complete.start()
    complete.join()
    assert told == [1]
    assert "SystemExit: the end" in capsys.readouterr().err


def test_a_callback_may_end_its_own_script() -> None:
    with pytest.raises(SystemExit):
        completed(1).on_done(lambda done: sys.exit(3))


def test_a_callback_whose_error_nobody_can_be_shown_keeps_nobody_from_being_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first: Future[int] = Future()
    told: list[int] = []
    first.on_done(lambda done: told.append(1 // 0))
    first.on_done(lambda done: told.append(done.result(0)))
    monkeypatch.setattr("sys.stderr", (closed := io.StringIO()))
    closed.close()
    first.set_result(1)
    assert told == [1]


def test_the_error_of_a_further_step_is_the_result() -> None:
    assert completed(1).then(lambda _: failed(ERROR)).error() is ERROR
    assert completed(2).map(lambda value: value * 3).result(0) == 6


def test_gathered_values_come_in_order_once_all_are_there() -> None:
    futures: list[Future[int]] = [Future(), Future()]
    both = gather(futures)
    futures[1].set_result(2)
    halfway = both.done()
    futures[0].set_result(1)
    assert (halfway, both.result(0)) == (False, [1, 2])


def test_a_gathered_error_waits_until_nobodys_buffers_are_in_use() -> None:
    futures: list[Future[int]] = [Future(), Future()]
    both = gather(futures)
    futures[1].set_error(ERROR)
    halfway = both.done()
    futures[0].set_result(1)
    assert (halfway, both.error()) == (False, ERROR)


def test_of_several_gathered_errors_the_first_in_order_counts() -> None:
    assert gather([completed(1), failed(ERROR), failed(ClosedError("x"))]).error() is ERROR


def test_nothing_to_gather_is_gathered_at_once() -> None:
    assert gather([]).result(0) == []


def test_a_gathering_that_takes_too_long_names_one_that_is_missing() -> None:
    both = gather([completed(1), Future("server 1")])
    with pytest.raises(DeadlineError, match="server 1"):
        both.result(0.01)


# -- deadlines ----------------------------------------------------------------------------
