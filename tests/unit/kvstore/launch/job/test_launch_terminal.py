"""The launcher's line about a running job: what is written for it, on a terminal and elsewhere."""

from __future__ import annotations

import os
import selectors
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.launch.job import terminal
from kvstore.launch.job.terminal import StatusDisplay, Terminal, terminal_columns

ERASE = b"\r\x1b[K"


def test_on_a_terminal_a_status_replaces_the_one_before_and_ends_no_line() -> None:
    display = StatusDisplay(80)
    assert display.news("step 1", 0.0) == ERASE + b"[launcher] step 1"
    assert display.news("step 2", 0.1) == ERASE + b"[launcher] step 2"
    assert display.line == b"[launcher] step 2"


def test_a_status_is_narrower_than_the_terminal_so_that_it_can_be_erased() -> None:
    display = StatusDisplay(20)
    assert display.news("x" * 50, 0.0) == ERASE + b"[launcher] xxxxxxxx"
    display.columns = 13
    assert display.news("x" * 50, 0.0) == ERASE + b"[launcher] x"


def test_what_a_status_says_cannot_move_the_cursor() -> None:
    assert StatusDisplay(80).news("a\x1b[2Jb\n", 0.0) == ERASE + b"[launcher] a?[2Jb?"
    assert StatusDisplay(None).news("a\rb", 0.0) == b"[launcher] a?b\n"


def test_elsewhere_a_line_a_minute_is_written_if_anything_has_changed() -> None:
    display = StatusDisplay(None)
    assert display.news("step 1", 0.0) == b"[launcher] step 1\n"
    assert display.news("step 2", 30.0) == b""
    assert display.news("step 1", 61.0) == b""
    assert display.news("step 3", 62.0) == b"[launcher] step 3\n"
    assert display.news("step 4", 121.5) == b"[launcher] step 4\n"
    assert display.line == b""


def test_a_terminal_wants_news_often_and_a_file_seldom() -> None:
    on_terminal, in_file = StatusDisplay(80), StatusDisplay(None)
    assert (on_terminal.first_after_s, on_terminal.interval_s) == (3.0, 2.0)
    assert (in_file.first_after_s, in_file.interval_s) == (60.0, 60.0)


# -- the process that asks ------------------------------------------------------------------


class Outputs:
    """A terminal of the launcher's, with files or a pseudo-terminal in the place of its outputs."""

    def __init__(self, output_fd: int, errors_fd: int) -> None:
        self.terminal = Terminal(output_fd, errors_fd)

    def begin(self, environment: dict[str, str], now_s: float) -> None:
        self.terminal.show_status(environment, "all have joined")
        self.terminal.begin_status(now_s)

    def turn(self) -> bool:
        """Read what the process that asks has written; whether there is one."""
        with selectors.PollSelector() as selector:
            self.terminal.adjust(selector)
            if not selector.get_map():
                return False
            ready = selector.select(20.0)
        assert ready
        for key, _ in ready:
            key.data(time.monotonic())
        return True


@pytest.fixture
def errors(tmp_path: Path) -> Path:
    return tmp_path / "errors"


@pytest.fixture
def outputs(errors: Path) -> Iterator[Outputs]:
    with errors.open("wb") as file:
        outputs = Outputs(file.fileno(), file.fileno())
        yield outputs
        outputs.terminal.end_status()


def test_the_feed_begins_when_it_is_of_use_and_its_lines_are_shown(
    monkeypatch: pytest.MonkeyPatch, outputs: Outputs, errors: Path
) -> None:
    monkeypatch.setattr(
        terminal, "_COMMAND", "import os, sys; print('asked every', sys.argv[1], os.environ)"
    )
    shown = outputs.terminal
    shown.tick(1e9)
    shown.begin_status(0.0)
    assert (shown.due_s, errors.read_text()) == (None, "")
    outputs.begin({"NAME": "of the job"}, 100.0)
    assert shown.due_s == 160.0
    shown.tick(159.9)
    assert shown.due_s == 160.0
    shown.tick(160.0)
    assert shown.due_s is None
    while outputs.turn():
        pass
    first, line = errors.read_text().splitlines()
    assert first == "[launcher] all have joined"
    assert line.startswith("[launcher] asked every 60 ")
    assert "'NAME': 'of the job'" in line
    shown.end_status()


def test_a_feed_that_goes_on_is_ended(monkeypatch: pytest.MonkeyPatch, outputs: Outputs) -> None:
    monkeypatch.setattr(terminal, "_COMMAND", "import time; time.sleep(600)")
    outputs.begin({}, 0.0)
    outputs.terminal.tick(60.0)
    began = time.monotonic()
    outputs.terminal.end_status()
    assert time.monotonic() - began < 5.0
    assert not outputs.turn()


def test_the_status_waits_while_there_is_no_scheduler(
    monkeypatch: pytest.MonkeyPatch, outputs: Outputs, errors: Path
) -> None:
    monkeypatch.setattr(terminal, "_COMMAND", "import time; time.sleep(600)")
    outputs.begin({}, 0.0)
    for number in range(3):
        assert outputs.terminal.due_s == 60.0 * number + 60.0
        outputs.terminal.tick(60.0 * number + 60.0)
        process = outputs.terminal._process
        assert process is not None
        if number < 2:
            outputs.terminal.pause_status()
            assert outputs.terminal.due_s is None
        outputs.terminal.begin_status(60.0 * number + 60.0)
        assert process.poll() is not None, "it had asked the lost scheduler"
    outputs.terminal.end_status()
    outputs.terminal.begin_status(1000.0)
    assert outputs.terminal.due_s is None
    assert errors.read_text() == "[launcher] all have joined\n"


def test_where_no_process_can_be_started_there_is_no_status(
    monkeypatch: pytest.MonkeyPatch, outputs: Outputs
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    outputs.begin({}, 0.0)
    outputs.terminal.tick(60.0)
    assert not outputs.turn()
    assert outputs.terminal.due_s is None


def test_lines_of_output_appear_above_the_status_and_its_end_leaves_no_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        terminal, "_COMMAND", "import time; print('step 1', flush=True); time.sleep(600)"
    )
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = os.openpty()
    outputs = Outputs(theirs, theirs)
    outputs.begin({}, 0.0)
    outputs.terminal.tick(60.0)
    assert outputs.turn()
    outputs.terminal.write(b"[worker 0] hello\n", is_error=False)
    outputs.terminal.end_status()
    outputs.terminal.end_status()
    outputs.terminal.write(b"[worker 0] bye\n", is_error=False)
    status = ERASE + b"[launcher] step 1"
    found = b""
    while not found.endswith(b"bye\r\n"):
        found += os.read(ours, 4096)
    assert found == (
        b"[launcher] all have joined\r\n"
        + status
        + ERASE
        + b"[worker 0] hello\r\n"
        + status.removeprefix(ERASE)
        + ERASE
        + b"[worker 0] bye\r\n"
    )
    os.close(ours)
    os.close(theirs)


def test_a_terminal_that_cannot_rewrite_a_line_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    assert terminal_columns(second) == 80
    with (tmp_path / "file").open("wb") as file:
        assert terminal_columns(file.fileno()) is None
    monkeypatch.setenv("TERM", "dumb")
    assert terminal_columns(second) is None
    os.close(first)
    os.close(second)
