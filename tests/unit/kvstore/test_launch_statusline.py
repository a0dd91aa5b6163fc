"""The launcher's line about a running job: what is written for it, on a terminal and elsewhere."""

from __future__ import annotations

from kvstore.launch.statusline import StatusDisplay

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
