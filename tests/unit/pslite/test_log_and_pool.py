"""Two small helpers of a node: its lines for people, and the threads that do a server's work."""

from __future__ import annotations

import threading
import time

import pytest

from pslite import log as log_module
from pslite.log import Log
from pslite.pool import InlinePool, ThreadPool


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(log_module, "_QUIET_S", 0.05)
    return []


def test_a_warning_on_one_topic_appears_once_in_a_while_with_a_count(lines: list[str]) -> None:
    log = Log("S[8]", 0, lines.append)
    for number in range(100):
        log.warn_seldom("wrong", f"message {number} is wrong")
    log.warn_seldom("other", "something else")
    time.sleep(0.06)
    log.warn_seldom("wrong", "message 100 is wrong")
    assert [line.partition("warning: ")[2] for line in lines] == [
        "message 0 is wrong",
        "something else",
        "message 100 is wrong (and 99 more like it)",
    ]


def test_ever_new_topics_share_one_place(lines: list[str]) -> None:
    log = Log("S[8]", 0, lines.append)
    for number in range(10_000):
        log.warn_seldom(f"topic {number}", "x")
    assert len(lines) <= 257 + 2
    assert len(log._quiet) <= 257


def test_a_pool_that_is_done_closes_at_once() -> None:
    pool = ThreadPool(2, "test")
    done: list[int] = []
    for lane in range(10):
        pool.submit(lane, lambda lane=lane: done.append(lane))  # type: ignore[misc]
    assert pool.close(5.0)
    assert sorted(done) == list(range(10))


def test_a_pool_that_is_stuck_lets_its_owner_go() -> None:
    pool = ThreadPool(1, "test")
    release = threading.Event()
    pool.submit(0, lambda: (release.wait(10.0), None)[1])
    begun_at = time.monotonic()
    assert not pool.close(0.1)
    assert time.monotonic() - begun_at < 2.0
    release.set()
    assert pool.close(5.0)


def test_a_pool_counts_what_is_not_done() -> None:
    pool = ThreadPool(2, "test")
    release = threading.Event()
    assert pool.num_jobs == 0
    for lane in (0, 0, 1):
        pool.submit(lane, lambda: (release.wait(10.0), None)[1])
    assert pool.num_jobs == 3
    release.set()
    assert pool.close(5.0)
    assert pool.num_jobs == 0
    assert InlinePool().num_jobs == 0
