"""Where each part lies in a payload: frames hold whole parts, one after the other."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pslite.errors import ProtocolError
from pslite.plane import Piece, cut, cuts_of, piece_of
from pslite.plane.interface import Row


@given(st.lists(st.lists(st.integers(1, 9), max_size=4), max_size=5))
def test_every_part_is_found_again_however_they_are_framed(framing: list[list[int]]) -> None:
    # A part of no bytes gets a frame of its own: inside another one it would leave no trace.
    framing = [sizes or [0] for sizes in framing]
    contents = iter(range(256))
    parts = [[bytes([next(contents)]) * size for size in sizes] for sizes in framing]
    frames = [b"".join(group) for group in parts]
    pieces = cut([size for sizes in framing for size in sizes], frames)
    found = [bytes(piece.frame[piece.start : piece.stop]) for piece in pieces]
    assert found == [part for group in parts for part in group]


@pytest.mark.parametrize(
    ("sizes", "frames"),
    [
        ((0,), [b""]),
        ((0, 0), [b""]),
        ((4, 0), [b"abcd"]),
        ((0, 4), [b"abcd"]),
        ((4, 0, 4), [b"abcd", b"efgh"]),
        ((4, 0, 4), [b"abcd", b"", b"efgh"]),
        ((4, 0, 4), [b"abcdefgh"]),
    ],
)
def test_parts_of_no_bytes_may_lie_anywhere(sizes: tuple[int, ...], frames: list[bytes]) -> None:
    pieces = cut(sizes, frames)
    found = [bytes(piece.frame[piece.start : piece.stop]) for piece in pieces]
    assert [len(part) for part in found] == list(sizes)
    assert b"".join(found) == b"".join(frames)


@pytest.mark.parametrize(
    ("sizes", "frames"),
    [
        ((8,), []),
        ((8,), [b"1234567"]),
        ((8,), [b"1234", b"5678"]),
        ((4,), [b"12345"]),
        ((4,), [b"1234", b""]),
        ((), [b"1"]),
        ((-1, 5), [b"1234"]),
        ((2**62,), [b"1234"]),
    ],
)
def test_a_payload_that_is_no_whole_parts_is_refused(
    sizes: tuple[int, ...], frames: list[bytes]
) -> None:
    with pytest.raises(ProtocolError):
        cut(sizes, frames)


@given(st.lists(st.integers(-3, 9), max_size=6), st.lists(st.binary(max_size=9), max_size=4))
def test_any_sizes_and_frames_end_in_pieces_or_in_a_protocol_error(
    sizes: list[int], frames: list[bytes]
) -> None:
    try:
        pieces = cut(sizes, frames)
    except ProtocolError:
        return
    assert sum(piece.stop - piece.start for piece in pieces) == sum(map(len, frames))


def test_frames_of_wider_elements_are_measured_in_bytes() -> None:
    memory = np.arange(4, dtype=np.float32).data
    pieces = cut((8, 8), [memory])
    assert [(piece.start, piece.stop) for piece in pieces] == [(0, 8), (8, 16)]


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=5), st.data())
def test_several_frames_are_read_as_if_they_were_one(
    frames: list[bytes], data: st.DataObject
) -> None:
    row, whole = Row(frames), b"".join(frames)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    piece = piece_of(Piece(row, 0, len(whole)), start, stop)
    cuts = [0, *cuts_of([piece]), stop - start]
    found = b""
    for begin, end in itertools.pairwise(cuts):
        part = piece_of(piece, begin, end)
        assert part.frame in frames  # so it is a frame, and no row
        found += part.frame[part.start : part.stop]
    assert (bytes(row), len(row), found) == (whole, len(whole), whole[start:stop])


def test_frames_of_several_senders_are_cut_where_any_of_them_ends() -> None:
    pieces = [Piece(Row([b"ab", b"cdef"]), 0, 6), Piece(b"......", 0, 6)]
    pieces.append(Piece(Row([b".", b"abcd", b"ef."]), 1, 7))
    assert cuts_of(pieces) == [2, 4]
