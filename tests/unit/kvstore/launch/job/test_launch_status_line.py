"""The launcher's line about a running job: what is written for it, on a terminal and elsewhere."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.launch.job import status_line
from kvstore.launch.job.status_line import JobStatus, StatusDisplay, terminal_columns

ERASE = b"\r\x1b[K"


def test_on_a_terminal_a_status_replaces_the_one_before_and_ends_no_line() -> None:
    display = StatusDisplay(80)
    assert display.news("step 1", 0.0) == ERASE + b"[launcher] step 1"
    assert display.news("step 2", 0.1) == ERASE + b"[launcher] step 2"


def test_whole_lines_of_output_appear_above_the_status() -> None:
    display = StatusDisplay(80)
    assert (display.before_output(), display.after_output()) == (b"", b"")
    display.news("step 1", 0.0)
    assert display.before_output() == ERASE
    assert display.after_output() == b"[launcher] step 1"


def test_a_status_is_narrower_than_the_terminal_so_that_it_can_be_erased() -> None:
    display = StatusDisplay(20)
    assert display.news("x" * 50, 0.0) == ERASE + b"[launcher] xxxxxxxx"
    display.resize(13)
    assert display.news("x" * 50, 0.0) == ERASE + b"[launcher] x"


def test_what_a_status_says_cannot_move_the_cursor() -> None:
    assert StatusDisplay(80).news("a\x1b[2Jb\n", 0.0) == ERASE + b"[launcher] a?[2Jb?"
    assert StatusDisplay(None).news("a\rb", 0.0) == b"[launcher] a?b\n"


def test_the_end_leaves_no_trace_on_the_terminal() -> None:
    display = StatusDisplay(80)
    assert display.end() == b""
    display.news("step 1", 0.0)
    assert display.end() == ERASE
    assert (display.before_output(), display.after_output(), display.end()) == (b"", b"", b"")


def test_elsewhere_a_line_a_minute_is_written_if_anything_has_changed() -> None:
    display = StatusDisplay(None)
    assert display.news("step 1", 0.0) == b"[launcher] step 1\n"
    assert display.news("step 2", 30.0) == b""
    assert display.news("step 1", 61.0) == b""
    assert display.news("step 3", 62.0) == b"[launcher] step 3\n"
    assert display.news("step 4", 121.5) == b"[launcher] step 4\n"
    assert (display.before_output(), display.after_output(), display.end()) == (b"", b"", b"")


def test_a_terminal_wants_news_often_and_a_file_seldom() -> None:
    terminal, file = StatusDisplay(80), StatusDisplay(None)
    assert (terminal.first_after_s, terminal.interval_s) == (3.0, 2.0)
    assert (file.first_after_s, file.interval_s) == (60.0, 60.0)


# -- the process that asks ------------------------------------------------------------------


@pytest.fixture
def no_terminal(tmp_path: Path) -> Iterator[int]:
    with (tmp_path / "errors").open("wb") as file:
        yield file.fileno()


def read_all(status: JobStatus) -> list[bytes]:
    """What is written for all that the feed says, to its end."""
    written, is_open = [], True
    while is_open:
        ready, _, _ = select.select([status], [], [], 20.0)
        assert ready
        text, is_open = status.read(time.monotonic())
        written.append(text)
    return [text for text in written if text]


def test_the_feed_begins_when_it_is_of_use_and_its_lines_are_shown(
    monkeypatch: pytest.MonkeyPatch, no_terminal: int
) -> None:
    monkeypatch.setattr(
        status_line, "_COMMAND", "import os, sys; print('asked every', sys.argv[1], os.environ)"
    )
    status = JobStatus({"NAME": "of the job"}, no_terminal, None)
    assert (status.tick(1e9), status.due_s) == (False, None)
    status.begin(100.0)
    assert status.due_s == 160.0
    assert not status.tick(159.9)
    assert status.tick(160.0)
    [line] = read_all(status)
    assert line.startswith(b"[launcher] asked every 60 ")
    assert b"'NAME': 'of the job'" in line
    assert (status.end(), status.end()) == (b"", b"")
    assert not status.is_asking


def test_a_feed_that_goes_on_is_ended(monkeypatch: pytest.MonkeyPatch, no_terminal: int) -> None:
    monkeypatch.setattr(status_line, "_COMMAND", "import time; time.sleep(600)")
    status = JobStatus({}, no_terminal, None)
    status.begin(0.0)
    assert status.tick(60.0)
    began = time.monotonic()
    status.end()
    assert time.monotonic() - began < 5.0


def test_where_no_process_can_be_started_there_is_no_status(
    monkeypatch: pytest.MonkeyPatch, no_terminal: int
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    status = JobStatus({}, no_terminal, None)
    status.begin(0.0)
    assert not status.tick(60.0)
    assert (status.end(), status.due_s) == (b"", None)


def test_a_terminal_that_cannot_rewrite_a_line_is_none(
    monkeypatch: pytest.MonkeyPatch, no_terminal: int
) -> None:
    first, second = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    assert terminal_columns(second) == 80
    assert terminal_columns(no_terminal) is None
    monkeypatch.setenv("TERM", "dumb")
    assert terminal_columns(second) is None
    os.close(first)
    os.close(second)
