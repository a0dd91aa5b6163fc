"""Where each part lies in a payload: frames hold whole parts, one after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pslite.errors import ProtocolError
from pslite.plane import Piece, cut, frames_of, piece_from, piece_of, side_by_side
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
    found = b""
    for begin, end, (part,) in side_by_side([piece], 0, stop - start):
        assert part.frame in frames  # so it is a frame, and no row
        assert begin == len(found)
        found += part.frame[part.start : part.stop]
        assert end == len(found)
    assert (bytes(row), len(row), found) == (whole, len(whole), whole[start:stop])


def test_frames_of_several_senders_are_cut_where_any_of_them_ends() -> None:
    pieces = [Piece(Row([b"ab", b"cdef"]), 0, 6), Piece(b"......", 0, 6)]
    pieces.append(Piece(Row([b".", b"abcd", b"ef."]), 1, 7))
    found = side_by_side(pieces, 1, 6)
    assert [(start, stop) for start, stop, _ in found] == [(1, 2), (2, 4), (4, 6)]
    assert found[1][2] == [Piece(b"cdef", 0, 2), Piece(b"......", 2, 4), Piece(b"abcd", 2, 4)]


# -- pieces as the frames of a record -----------------------------------------------------


@given(st.lists(st.binary(max_size=5), min_size=1, max_size=5), st.data())
def test_a_piece_of_several_frames_survives_the_journey_to_a_standby(
    frames: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(frames)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    sent = frames_of(Piece(Row(frames), start, stop))
    received = piece_from([bytes(frame) for frame in sent])
    assert (received.start, received.stop) == (0, stop - start)
    found = b"".join(map(bytes, frames_of(received)))
    assert found == whole[start:stop]


def test_the_frames_of_a_row_are_those_that_hold_the_bytes_and_no_copies() -> None:
    frames = [bytearray(b"abcd"), bytearray(b"efgh"), bytearray(b"ijkl")]
    views = Row(frames).frames(2, 8)
    assert [bytes(view) for view in views] == [b"cd", b"efgh"]
    frames[0][2:3] = b"C"
    assert bytes(views[0]) == b"Cd"
    assert [bytes(view) for view in Row(frames).frames(5, 7)] == [b"fg"]
    assert Row(frames).frames(4, 4) == []


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (0, 4), (4, 8), (3, 5), (3, 9), (11, 12)])
def test_bytes_of_a_row_are_cut_at_both_ends(start: int, stop: int) -> None:
    views = Row([b"abcd", b"efgh", b"ijkl"]).frames(start, stop)
    assert b"".join(map(bytes, views)) == b"abcdefghijkl"[start:stop]
    assert all(len(view) for view in views)


def test_a_piece_of_one_frame_is_sent_as_a_view_of_single_bytes() -> None:
    memory = np.arange(4, dtype=np.float32)
    (view,) = frames_of(Piece(memory.data, 4, 12))
    assert bytes(view) == memory[1:3].tobytes()
    memory[1] = 7
    assert bytes(view) == memory[1:3].tobytes()


def test_one_received_frame_is_a_piece_of_itself_and_several_are_a_row() -> None:
    assert piece_from([b"abc"]) == Piece(b"abc", 0, 3)
    memory = np.arange(2, dtype=np.float32)
    assert piece_from([memory.data])[1:] == (0, 8)
    piece = piece_from([b"ab", b"cde"])
    assert (type(piece.frame), piece.start, piece.stop) == (Row, 0, 5)
    assert [part[:2] for part in side_by_side([piece], 0, 5)] == [(0, 2), (2, 5)]
    assert piece_of(piece, 2, 5) == Piece(memoryview(b"cde"), 0, 3)


def test_a_payload_without_bytes_has_no_bytes_on_the_other_side() -> None:
    for frames in (list[bytes](), [b""], [b"", b""]):
        piece = piece_from(frames)
        assert (piece.start, piece.stop, side_by_side([piece], 0, 0)) == (0, 0, [])
        assert b"".join(map(bytes, frames_of(piece))) == b""
