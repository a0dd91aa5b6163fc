"""Cutting output into lines."""

from __future__ import annotations

from kvstore.launch.job.child import LONGEST_LINE_BYTES, LineSplitter


def test_a_line_that_arrives_in_pieces_comes_out_whole() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"one\ntw", 0.0) == [b"one"]
    assert splitter.feed(b"o\n\n", 0.0) == [b"two", b""]
    assert splitter.feed(b"end without newline", 0.0) == []
    assert splitter.finish() == [b"end without newline"]
    assert splitter.finish() == []


def test_windows_line_ends_are_one_end_also_when_cut_in_two() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"a\r\nb\r", 0.0) == [b"a"]
    assert splitter.feed(b"\nc\r\n", 5.0) == [b"b", b"c"]


def test_a_progress_bar_shows_its_latest_state_once_a_second_and_its_end() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"\r  1%", 0.0) == []
    assert splitter.feed(b"\r  2%", 0.1) == [b"  1%"]
    assert splitter.feed(b"\r  3%\r  4%", 0.9) == []
    assert splitter.feed(b"\r 50%", 1.2) == [b"  4%"]
    assert splitter.feed(b"\r100%\nnext\n", 1.3) == [b"100%", b"next"]


def test_a_progress_bar_that_ends_each_state_with_a_return_is_shown_too() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"1%\r", 0.0) == []
    assert splitter.feed(b"2%\r", 0.1) == [b"2%"]
    assert splitter.feed(b"3%\r", 0.2) == []
    assert splitter.finish() == [b"3%"]


def test_a_line_without_end_does_not_fill_the_memory() -> None:
    splitter = LineSplitter()
    (line,) = splitter.feed(b"x" * (LONGEST_LINE_BYTES + 1), 0.0)
    assert len(line) == LONGEST_LINE_BYTES + 1
    assert splitter.finish() == []
