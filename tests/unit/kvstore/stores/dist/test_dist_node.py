"""Waits: they end in the value or the error, and say what takes long."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.stores.dist.node import Waiter, worker_node
from pslite import Config
from pslite.errors import ConfigError, DeadlineError, NodeLostError, UsageError
from pslite.future import Future, completed, failed

LIMIT_S = 20.0


class Node:
    """What a ``Waiter`` needs of a node; reports come after a hundredth of a second."""

    def __init__(self, *, is_io_thread: bool = False, is_forked: bool = False) -> None:
        self.lines: list[str] = []
        self.reported = threading.Event()
        thread = threading.current_thread() if is_io_thread else None
        self.io_queue = SimpleNamespace(
            thread=thread, is_forked=is_forked, check_process=self._check_process
        )
        self.config = SimpleNamespace(stall_report_s=0.01, report_after_s=0.01, stall_timeout_s=0.0)
        self.long_waits = 0
        self.reporter = SimpleNamespace(progress=None)
        self.log = SimpleNamespace(warn=self._warn)

    def _check_process(self) -> None:
        raise UsageError("a forked child cannot use it")

    def report_long_wait(self) -> None:
        self.long_waits += 1

    def _warn(self, line: str) -> None:
        self.lines.append(line)
        if len(self.lines) >= 3:
            self.reported.set()


def waiter(node: Any) -> Waiter:
    return Waiter(node)


def test_what_is_done_is_there_at_once() -> None:
    node = Node()
    assert waiter(node).wait(completed(7)) == 7
    with pytest.raises(NodeLostError, match="server 1"):
        waiter(node).wait(failed(NodeLostError("server 1 is lost")))
    assert node.lines == []


def test_a_long_wait_says_again_and_again_what_it_waits_for() -> None:
    node = Node()
    future: Future[int] = Future("the answer of server 3")
    answering = threading.Thread(
        target=lambda: (node.reported.wait(LIMIT_S), future.set_result(42))
    )
    answering.start()
    assert waiter(node).wait(future) == 42
    answering.join()
    assert len(node.lines) >= 3
    assert set(node.lines) == {"still waiting after 0 s: the answer of server 3"}


def test_an_error_ends_a_wait() -> None:
    node = Node()
    future: Future[int] = Future()
    failing = threading.Thread(
        target=lambda: (node.reported.wait(LIMIT_S), future.set_error(ValueError("no")))
    )
    failing.start()
    with pytest.raises(ValueError, match="no"):
        waiter(node).wait(future)
    failing.join()


def test_a_deadline_that_is_the_answer_is_no_report() -> None:
    """A barrier that the scheduler gives up ends in a ``DeadlineError`` of its own."""
    node = Node()
    future: Future[int] = Future()
    given_up = DeadlineError("worker 1 did not come")
    failing = threading.Thread(
        target=lambda: (node.reported.wait(LIMIT_S), future.set_error(given_up))
    )
    failing.start()
    with pytest.raises(DeadlineError) as caught:
        waiter(node).wait(future)
    failing.join()
    assert caught.value is given_up


def test_the_io_thread_may_take_what_is_done_and_wait_for_nothing() -> None:
    node = Node(is_io_thread=True)
    assert waiter(node).wait(completed(7)) == 7
    for call in (lambda: waiter(node).wait(Future()), waiter(node).check):
        with pytest.raises(UsageError, match="must not wait"):
            call()
    waiter(Node()).check()


def test_a_forked_child_may_take_what_is_done_and_wait_for_nothing() -> None:
    node = Node(is_forked=True)
    assert waiter(node).wait(completed(7)) == 7
    for call in (lambda: waiter(node).wait(Future()), waiter(node).check):
        with pytest.raises(UsageError, match="forked"):
            call()


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_a_process_that_is_not_a_worker_gets_no_worker_node(
    monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    monkeypatch.setenv("DMLC_ROLE", role)
    with pytest.raises(ConfigError, match=f"DMLC_ROLE=worker, got '{role}'"):
        worker_node()
    served: list[Config] = []
    with pytest.raises(SystemExit) as ended:
        worker_node(lambda config: served.append(config) or 3)
    assert ended.value.code == 3
    assert [config.role for config in served] == [role]
