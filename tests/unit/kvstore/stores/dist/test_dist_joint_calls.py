"""Calls that all workers make together, as one of them sees it; the servers are pretended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvstore.arrays.keys import Key
from kvstore.stores.dist.joint_calls import JointCalls
from pslite import Future
from pslite.errors import ClosedError


class Servers:
    """Who is asked to meet, and what is reported."""

    def __init__(self) -> None:
        self.meetings: list[tuple[int, str, Future[bytes | None]]] = []
        self.reports: list[tuple[int, list[Key], str, BaseException | None]] = []
        self.errors: list[BaseException | None] = []

    def meet(
        self, call: int, name: str, error: BaseException | None = None
    ) -> Future[bytes | None]:
        future: Future[bytes | None] = Future()
        self.errors.append(error)
        self.meetings.append((call, name, future))
        return future

    def report(
        self,
        call: int,
        deleted: Sequence[Key] = (),
        said: str = "",
        error: BaseException | None = None,
    ) -> Future[bytes]:
        self.reports.append((call, list(deleted), said, error))
        future: Future[bytes] = Future()
        future.set_result(b"our news")
        return future


class Worker:
    """One worker; while it waits for the others, ``meanwhile`` is called."""

    def __init__(self, meanwhile: Callable[[Future[Any]], None]) -> None:
        self.servers = Servers()
        servers: Any = self.servers
        self._meanwhile = meanwhile
        self.calls = JointCalls(servers, self._wait)

    def _wait(self, future: Future[Any]) -> Any:
        if not future.done():
            self._meanwhile(future)
        return future.result(0)


def interrupt(_: Future[Any]) -> None:
    raise KeyboardInterrupt


def never(_: int) -> list[Key]:
    raise AssertionError("another rank carries it out")


def test_who_decides_carries_it_out_and_reports() -> None:
    worker = Worker(lambda meeting: meeting.set_result(None))
    assert worker.calls.make("delete(['a'])", lambda call: ["a", call]) == (1, b"our news")
    assert worker.servers.meetings[0][:2] == (1, "delete(['a'])")
    assert worker.servers.reports == [(1, ["a", 1], "", None)]


def test_who_decides_says_a_text_to_all_once_it_has_carried_the_call_out() -> None:
    worker = Worker(lambda meeting: meeting.set_result(None))
    done: list[Key] = []

    def act(_: int) -> list[Key]:
        done.append("a")
        return done

    assert worker.calls.make("steps", act, lambda: f"deleted {done}") == (1, b"our news")
    assert worker.servers.reports == [(1, ["a"], "deleted ['a']", None)]


def test_a_text_that_cannot_be_said_is_a_failure_of_the_call() -> None:
    worker = Worker(lambda meeting: meeting.set_result(None))
    error = OSError("no such file")

    def fail() -> str:
        raise error

    with pytest.raises(OSError, match="no such file"):
        worker.calls.make("steps", lambda _: (), fail)
    assert worker.servers.reports == [(1, [], "", error)]


def test_the_others_hear_of_it() -> None:
    worker = Worker(lambda meeting: meeting.set_result(b"their news"))
    assert worker.calls.make("delete(['a'])", never) == (1, b"their news")
    assert worker.servers.reports == []


def test_calls_are_numbered_whoever_carries_them_out() -> None:
    worker = Worker(lambda meeting: meeting.set_result(b"their news"))
    assert [worker.calls.make("load", never)[0], worker.calls.begin()] == [1, 2]
    assert worker.calls.make("load", never)[0] == 3


def test_a_failure_is_reported_to_the_others_and_raised() -> None:
    worker = Worker(lambda meeting: meeting.set_result(None))
    error = OSError("no such file")

    def fail(_: int) -> list[Key]:
        raise error

    with pytest.raises(OSError, match="no such file"):
        worker.calls.make("load_checkpoint", fail)
    assert worker.servers.reports == [(1, [], "", error)]


def test_who_is_interrupted_and_then_turns_out_to_decide_tells_the_others() -> None:
    worker = Worker(interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.calls.make("delete(['a'])", never)
    assert worker.servers.reports == []
    worker.servers.meetings[0][2].set_result(None)
    call, deleted, said, error = worker.servers.reports[0]
    assert (call, deleted, said, type(error)) == (1, [], "", KeyboardInterrupt)


def test_who_is_interrupted_and_does_not_decide_says_nothing() -> None:
    worker = Worker(interrupt)
    with pytest.raises(KeyboardInterrupt):
        worker.calls.make("delete(['a'])", never)
    worker.servers.meetings[0][2].set_result(b"their news")
    assert worker.servers.reports == []


def test_who_cannot_take_part_says_so_at_that_call_and_raises_its_own_error() -> None:
    error = OSError("its file is damaged")
    worker = Worker(lambda meeting: meeting.set_error(ClosedError("as the directory has it")))

    def prepare() -> None:
        raise error

    with pytest.raises(OSError, match="its file is damaged") as caught:
        worker.calls.prepare("load", prepare)
    assert caught.value is error
    assert [meeting[:2] for meeting in worker.servers.meetings] == [(1, "load")]
    assert worker.servers.errors == [error]


def test_who_is_prepared_has_not_come_to_the_call_yet() -> None:
    worker = Worker(lambda meeting: meeting.set_result(b"their news"))
    assert worker.calls.prepare("load", lambda: "what was read") == "what was read"
    assert worker.servers.meetings == []
    assert worker.calls.make("load", never)[0] == 1
