"""Two small helpers of a node: its lines for people, and the threads that do a server's work."""

from __future__ import annotations

import io
import logging
import re
import threading
import time

import pytest

from pslite.node import log as log_module
from pslite.node.log import Log, try_to_stderr
from pslite.node.pool import InlinePool, ThreadPool


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


def test_lines_go_to_the_logging_of_an_application_that_has_set_it_up(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log("S[8]", 1)
    with caplog.at_level(logging.DEBUG, "pslite"):
        log.info(1, "connected")
        log.info(2, "not at this level")
        log.warn("slow")
        log.error("ends")
    assert caplog.record_tuples == [
        ("pslite", logging.INFO, "S[8]: connected"),
        ("pslite", logging.WARNING, "S[8]: slow"),
        ("pslite", logging.ERROR, "S[8]: ends"),
    ]
    assert capsys.readouterr().err == ""


def test_without_any_handler_lines_go_to_standard_error_with_date_and_time(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_module, "_LOGGER", logging.Logger("alone"))
    Log("S[8]", 0).warn("slow")
    line = capsys.readouterr().err
    assert re.fullmatch(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] S\[8\]: warning: slow\n", line)


class Output:
    """Takes lines, or fails with what was put into ``error``."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None

    def write(self, line: str) -> None:
        if self.error is not None:
            raise self.error
        self.lines.append(line.partition("S[8]: ")[2])


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), BrokenPipeError(), ValueError("closed file")],
    ids=["full", "pipe", "closed"],
)
def test_lines_that_cannot_be_written_are_counted_and_told_later(error: Exception) -> None:
    output = Output()
    log = Log("S[8]", 1, output.write)
    log.info(1, "first")
    output.error = error
    for number in range(3):
        log.warn(f"lost {number}")
    log.error("the I/O thread ends")
    output.error = None
    log.info(0, "again")
    log.info(0, "and again")
    assert output.lines == [
        "first",
        f"warning: lines missing here: 4 could not be written ({error})",
        "again",
        "and again",
    ]


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("stream", [FullDisk(), None], ids=["full", "closed"])
def test_standard_error_that_takes_nothing_is_no_exception(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None
) -> None:
    monkeypatch.setattr("sys.stderr", stream)
    assert not try_to_stderr("a line")
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    assert try_to_stderr("a line")
    assert shown.getvalue() == "a line\n"


def test_a_pool_that_is_done_closes_at_once() -> None:
    pool = ThreadPool(2, "test")
    done: list[int] = []
    for lane in range(10):
        pool.submit(lane, lambda lane=lane: done.append(lane))  # type: ignore[misc]
    assert pool.close(5.0)
    assert sorted(done) == list(range(10))


@pytest.mark.parametrize("ending", [SystemExit(0), KeyboardInterrupt(), ValueError("bug")])
def test_work_that_raises_is_told_and_the_thread_goes_on(ending: BaseException) -> None:
    pool = ThreadPool(1, "test")
    told: list[BaseException] = []
    done: list[int] = []
    pool.on_failure = told.append

    def end() -> None:
        raise ending

    pool.submit(0, end)
    pool.submit(0, lambda: done.append(1))
    assert pool.close(5.0)
    assert (told, done, pool.num_jobs) == ([ending], [1], 0)


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


def test_a_handler_that_raises_costs_a_line_and_not_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = Output()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            output.write(record.getMessage())

    logger = logging.Logger("one of its own")
    logger.addHandler(Handler())
    monkeypatch.setattr(log_module, "_LOGGER", logger)
    output.error = RuntimeError("the sink is gone")
    log = Log("S[8]", 0)
    log.warn("lost")
    output.error = None
    log.warn("again")
    assert output.lines == [
        "lines missing here: 1 could not be written (the sink is gone)",
        "again",
    ]
