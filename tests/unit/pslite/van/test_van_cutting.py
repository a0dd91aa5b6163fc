"""Large frames travel in pieces: what goes in comes out, and nothing else is taken in."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pslite.errors import ProtocolError
from pslite.van import cutting
from pslite.van.cutting import MARK, PIECE_BYTES, Reassembly, cut, is_piece
from pslite.wire.codec import Envelope, encode
from pslite.wire.messages import Beat

SMALL = 10
"""The size of pieces in these tests."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutting, "PIECE_BYTES", SMALL)


def head(*sizes: int) -> bytes:
    return MARK + struct.pack(f"<{len(sizes)}q", *sizes)


def limits(frame: int = 1000, total: int = 2000) -> Reassembly:
    return Reassembly(frame, total)


def joined(parts: Reassembly, messages: Sequence[Sequence[bytes]]) -> list[list[bytes]]:
    """What comes of messages that arrive one after the other."""
    results = [parts.take(message) for message in messages]
    return [[bytes(frame) for frame in frames] for frames in results if frames is not None]


def test_a_message_of_small_frames_stays_as_it_is() -> None:
    frames: list[bytes | memoryview] = [b"x" * SMALL, b"", memoryview(b"y" * SMALL)]
    (message,) = cut(frames)
    assert message is frames


def test_no_piece_is_larger_than_a_piece_and_none_is_copied() -> None:
    value = bytearray(range(35))
    messages = list(cut([b"head", memoryview(value)]))
    assert all(is_piece(message) for message in messages)
    assert [len(message[1]) for message in messages] == [4, 10, 10, 10, 5]
    value[12] = 99
    assert messages[2][1][2] == 99


@given(st.lists(st.binary(max_size=35), min_size=1, max_size=6))
def test_what_is_cut_comes_together_again(frames: list[bytes]) -> None:
    parts = limits()
    large = [*frames, b"z" * (SMALL + 1)]
    for _ in range(2):  # and leaves nothing behind
        messages = [[bytes(each) for each in message] for message in cut(list(large))]
        assert joined(parts, messages) == [large]


def test_other_messages_are_no_pieces() -> None:
    envelope = Envelope("job", 0, 1, 2, 0, 0, (), (), Beat())
    assert not is_piece([encode(envelope), b"payload"])
    assert not any(is_piece(each) for each in ([b""], [b"", b"x"], [MARK], [MARK, b"", b""]))


@pytest.mark.parametrize(
    "messages",
    [
        pytest.param([[MARK, b"12345"]], id="no beginning"),
        pytest.param([[head(20), b"1"], [head(20), b"1"]], id="two beginnings"),
        pytest.param([[head(5), b"123456"]], id="more than there should be"),
        pytest.param([[head(12), b"1234567890"], [MARK, b"123"]], id="more at the end"),
        pytest.param([[head(12), b""]], id="an empty piece"),
        pytest.param([[head(1001), b"1"]], id="a frame over the limit"),
        pytest.param([[head(900, 900, 900), b"1"]], id="a message over the limit"),
        pytest.param([[head(-1), b"1"]], id="less than nothing"),
        pytest.param([[head(0, 0), b"1"]], id="nothing"),
        pytest.param([[head(20)[:-1], b"1"]], id="half a size"),
        pytest.param([[head(*[1] * (cutting.MAX_FRAMES + 1)), b"1"]], id="too many frames"),
    ],
)
def test_what_does_not_fit_is_an_error_and_costs_no_memory(messages: list[list[bytes]]) -> None:
    parts = limits()
    with pytest.raises(ProtocolError):
        joined(parts, messages)


def test_the_messages_of_stores_and_collective_calls_fit_into_a_piece() -> None:
    """So they are neither cut nor copied."""
    from kvstore.stores.dist.plan import message_bytes
    from pslite.collective.server_route import COLLECTIVE_CHUNKS
    from pslite.config import Config

    assert message_bytes(Config(), by_tcp=True) <= PIECE_BYTES
    assert COLLECTIVE_CHUNKS * Config().chunk_bytes <= PIECE_BYTES
