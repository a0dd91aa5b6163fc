"""The threads that stores share: every task once, errors and Ctrl-C at the caller, no dead ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from kvstore.arrays.cpu import threads as cores
from kvstore.arrays.cpu.threads import Cores
from pslite import Config
from pslite.errors import ConfigError

# Their helpers sleep until the test process ends.
CORES = {number: Cores(number) for number in (1, 2, 4)}
WAIT_S = 10


@pytest.fixture(params=sorted(CORES))
def some_cores(request: pytest.FixtureRequest) -> Cores:
    return CORES[request.param]


def test_every_task_is_done_once(some_cores: Cores) -> None:
    for count in (0, 1, 2, 3, 500):
        done: list[int] = []
        assert some_cores.run([partial(done.append, number) for number in range(count)]) is None
        assert sorted(done) == list(range(count))


def test_several_threads_are_at_it_at_the_same_time() -> None:
    meeting = threading.Barrier(4)
    threads: set[str] = set()

    def meet() -> None:
        meeting.wait(WAIT_S)
        threads.add(threading.current_thread().name)

    assert CORES[4].run([meet] * 4) is None
    assert len(threads) == 4
    assert threading.current_thread().name in threads


def test_helpers_are_daemons_that_start_when_there_is_work_for_them() -> None:
    fresh, before = Cores(3), threading.active_count()
    fresh.run([lambda: None])
    assert threading.active_count() == before
    fresh.run([lambda: None] * 2)
    assert threading.active_count() == before + 1
    fresh.run([lambda: None] * 9)
    fresh.run([lambda: None] * 9)
    assert threading.active_count() == before + 2
    assert all(
        thread.daemon for thread in threading.enumerate() if thread.name.startswith("kvstore-core")
    )


def test_a_caller_does_everything_alone_while_the_helpers_are_busy() -> None:
    both = CORES[2]
    release, busy = threading.Event(), threading.Event()

    def block() -> None:
        busy.set()
        assert release.wait(WAIT_S)

    other = threading.Thread(target=lambda: both.run([block, block]))
    other.start()
    assert busy.wait(WAIT_S)
    done: list[str] = []
    assert both.run([lambda: done.append(threading.current_thread().name)] * 5) is None
    release.set()
    other.join()
    assert done == [threading.current_thread().name] * 5


def test_a_task_may_have_tasks(some_cores: Cores) -> None:
    done: list[int] = []

    def outer() -> None:
        assert some_cores.run([lambda n=n: done.append(n) for n in range(5)]) is None

    assert some_cores.run([outer] * 6) is None
    assert sorted(done) == sorted([*range(5)] * 6)


def test_the_error_of_the_first_task_comes_back_and_no_more_are_begun() -> None:
    done: list[int] = []

    def task(number: int) -> Callable[[], None]:
        def run() -> None:
            if number in (3, 5):
                raise ValueError(f"task {number}")
            done.append(number)

        return run

    failure = CORES[1].run([task(number) for number in range(8)])
    assert failure is not None
    assert str(failure.error) == "task 3"
    assert done == [0, 1, 2]
    assert failure.not_done == {3, 4, 5, 6, 7}
    assert failure.not_begun == {4, 5, 6, 7}


def test_what_was_done_on_any_thread_is_told_from_what_was_not(some_cores: Cores) -> None:
    done: set[int] = set()

    def task(number: int) -> None:
        if number % 50 == 20:
            raise KeyError(number)
        done.add(number)

    failure = some_cores.run([lambda n=n: task(n) for n in range(200)])
    assert failure is not None
    assert isinstance(failure.error, KeyError)
    assert done == set(range(200)) - failure.not_done
    assert failure.not_begun < failure.not_done
    assert some_cores.run([lambda: None] * 20) is None


def test_an_error_on_a_helper_comes_back_to_the_caller() -> None:
    meeting = threading.Barrier(2)

    def fail_on_a_helper() -> None:
        meeting.wait(WAIT_S)
        if threading.current_thread().name.startswith("kvstore-core"):
            raise ZeroDivisionError("on a helper")

    failure = CORES[2].run([fail_on_a_helper] * 2)
    assert failure is not None
    assert str(failure.error) == "on a helper"


def test_ctrl_c_comes_out_when_no_thread_is_at_it_any_more() -> None:
    both, helping, ended = CORES[2], threading.Barrier(2), threading.Event()

    def task() -> None:
        helping.wait(WAIT_S)
        if threading.current_thread().name.startswith("kvstore-core"):
            assert not ended.wait(0.05)
            ended.set()
        else:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        both.run([task, task, lambda: pytest.fail("begun after Ctrl-C")])
    assert ended.is_set()
    assert both.run([lambda: None] * 3) is None


def test_arithmetic_warns_on_no_thread() -> None:
    meeting = threading.Barrier(2)

    def overflow() -> None:
        meeting.wait(WAIT_S)
        assert np.float32(3e38) * np.full(1, 10, np.float32) == np.inf

    assert CORES[2].run([overflow, overflow]) is None


def test_without_more_threads_from_the_system_the_caller_does_it_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    assert Cores(4).run([lambda: done.append(1)] * 10) is None
    assert len(done) == 10


@pytest.fixture
def no_cores_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_by_process", {})
    monkeypatch.delenv("MXNET_KVSTORE_REDUCTION_NTHREADS", raising=False)


@pytest.mark.usefixtures("no_cores_yet")
class TestShared:
    def test_a_process_has_one_with_as_many_threads_as_cores(self) -> None:
        made = cores.shared()
        assert cores.shared() is made
        if hasattr(os, "sched_getaffinity"):
            assert made.num_threads == min(len(os.sched_getaffinity(0)), cores.MOST_THREADS)

    def test_the_setting_says_how_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MXNET_KVSTORE_REDUCTION_NTHREADS", "3")
        assert cores.shared().num_threads == 3

    def test_a_forked_child_makes_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        parents = cores.shared()
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert cores.shared() is not parents
        assert cores.shared() is cores.shared()

    def test_a_wrong_setting_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for text in ("many", "-1"):
            monkeypatch.setenv("MXNET_KVSTORE_REDUCTION_NTHREADS", text)
            with pytest.raises(ConfigError, match="MXNET_KVSTORE_REDUCTION_NTHREADS"):
                cores.shared()


def test_one_setting_is_read_without_the_others() -> None:
    mapping = {"MXNET_KVSTORE_REDUCTION_NTHREADS": "5", "PS_VERBOSE": "loud"}
    assert Config.read("reduction_threads", mapping) == 5
    assert Config.read("reduction_threads", {}) == 0
    with pytest.raises(ConfigError, match="PS_VERBOSE"):
        Config.read("verbose", mapping)
    with pytest.raises(ConfigError, match="is -2; it must be 0 or greater"):
        Config.from_env({"MXNET_KVSTORE_REDUCTION_NTHREADS": "-2"})
