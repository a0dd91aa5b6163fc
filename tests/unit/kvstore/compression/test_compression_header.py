"""Encoded parts as they arrive: their headers, and that nothing malformed is decoded."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from compression_cases import CHAINS, DTYPES, chain_of, gradient, kind, residual_of
from hypothesis import given
from hypothesis import strategies as st

from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.compression import Chain, Draw, make_chain
from kvstore.compression.header import Header
from kvstore.errors import ArgumentValueError, ValueMismatchError
from pslite.errors import ProtocolError


def encoded(chain: Chain, size: int, draw: Draw | None = None) -> tuple[bytes, bytes]:
    values = gradient(1, size, np.dtype("f4"))
    header, payload = chain.encode(values, residual=residual_of(chain, values), draw=draw or Draw())
    return header, payload.tobytes()


def assert_refused(
    chain: Chain, header: bytes, payload: bytes, text: str, size: int, draw: Draw | None = None
) -> None:
    """By both ways to decode, and nothing is written."""
    for decode in (chain.decode, chain.decode_add):
        out = np.full(size, 9, np.float32)
        with pytest.raises(ProtocolError, match=text):
            decode(header, payload, out, draw=draw)
        assert (out == 9).all()


def test_a_header_has_the_layout_that_is_documented() -> None:
    assert encoded(chain_of("2bit"), 9)[0] == struct.pack("<BBBBQd", 1, 0, 0, 1, 9, 0.5)
    assert encoded(chain_of("1bit"), 9)[0] == struct.pack("<BBBBQd", 1, 0, 0, 2, 9, 0.0)
    assert encoded(chain_of("fp16"), 9)[0] == struct.pack("<BBBBQ", 1, 0, 0, 3, 9)
    assert encoded(chain_of("int8"), 9)[0] == struct.pack("<BBBBQI", 1, 0, 0, 5, 9, 256)
    assert encoded(chain_of("topk"), 90)[0] == struct.pack("<BBBBQQ", 1, 0, 16, 0, 90, 9)
    assert encoded(chain_of("randomk+int8"), 8, Draw(7, 4))[0] == struct.pack(
        "<BBBBQQQQQI", 1, 0, 17, 5, 8, 2, 0, 7, 4, 256
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHAINS)
def test_a_header_says_what_it_was_made_of(name: str, dtype: str) -> None:
    chain, values = chain_of(name), np.zeros(40, kind(dtype))
    header = chain.encode(values, residual=residual_of(chain, values), draw=Draw(2, 3)).header
    found = Header.unpacked(header)
    assert found.dtype == values.dtype
    assert found.num_elements == 40
    assert found.packed() == header


@pytest.mark.parametrize("name", CHAINS)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_makes_sense_for_this_part(
    name: str, data: st.DataObject
) -> None:
    chain = chain_of(name)
    header, payload = encoded(chain, 100)
    place = data.draw(st.integers(0, len(header) - 1))
    damaged = bytearray(header)
    damaged[place] ^= data.draw(st.integers(1, 255))
    out = np.empty(100, np.float32)
    try:
        chain.decode(bytes(damaged), payload, out)
    except ProtocolError:
        return
    found, sent = Header.unpacked(bytes(damaged)), Header.unpacked(header)
    if found.dtype != sent.dtype:  # sums of float16 are made in float32, too
        assert place == 1
        assert accumulation_dtype(found.dtype) == out.dtype
        return
    assert found._replace(draw=Draw()) == sent._replace(draw=Draw())
    assert found.draw != Draw()


@pytest.mark.parametrize("name", CHAINS)
def test_a_payload_of_another_length_is_refused(name: str) -> None:
    chain = chain_of(name)
    header, payload = encoded(chain, 100)
    for wrong in (payload[:-1], payload + b"\0", b""):
        assert_refused(chain, header, wrong, f"has {len(wrong)} bytes, not {len(payload)}", 100)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHAINS)
def test_a_part_may_travel_in_one_piece_of_a_known_length(name: str, dtype: str) -> None:
    chain, values, draw = chain_of(name), gradient(1, 333, kind(dtype)), Draw(1, 2)
    part = np.empty(chain.encoded_bytes(333, values.dtype), np.uint8)
    chain.encode_into(values, part, residual=residual_of(chain, values), draw=draw)
    header, payload = chain.encode(values, residual=residual_of(chain, values), draw=draw)
    assert part.tobytes() == header + payload.tobytes()
    wanted, out = np.ones(333, values.dtype), np.ones(333, values.dtype)
    for add in (False, True):
        chain.decode_from(part, out, add=add)
        (chain.decode_add if add else chain.decode)(header, payload, wanted)
        assert out.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("length", [0, 3, 19, 23, 25])
def test_a_part_of_another_length_is_refused(length: int) -> None:
    chain, out = chain_of("2bit", feedback=False), np.full(9, 9, np.float32)
    assert chain.encoded_bytes(9, out.dtype) == 24
    with pytest.raises(ProtocolError):
        chain.decode_from(np.zeros(length, np.uint8), out)
    assert (out == 9).all()
    with pytest.raises(ValueMismatchError, match="uint8 array"):
        chain.encode_into(out, np.empty(length, np.uint8))


@pytest.mark.parametrize("header", [b"", b"\1", b"\2" + bytes(11), bytes(200)])
def test_what_is_no_header_is_refused(header: bytes) -> None:
    assert_refused(chain_of("2bit"), header, bytes(4), "this version cannot read the header", 9)


def test_codecs_and_dtypes_that_do_not_exist_are_refused() -> None:
    for fields in ((1, 0, 5, 1, 9), (1, 0, 0, 99, 9)):
        header = struct.pack("<BBBBQ", *fields) + struct.pack("<d", 0.5)
        assert_refused(chain_of("2bit"), header, bytes(4), "names the unknown codecs", 9)
    header = struct.pack("<BBBBQd", 1, 77, 0, 1, 9, 0.5)
    assert_refused(chain_of("2bit"), header, bytes(4), "unknown dtype code", 9)


def test_a_part_of_another_size_or_dtype_is_refused() -> None:
    chain = chain_of("fp16")
    header, payload = encoded(chain, 9)
    assert_refused(chain, header, payload, "of 10 elements, got 9", 10)
    out = np.zeros(9, np.float64)
    with pytest.raises(ProtocolError, match="of float64, got float32"):
        chain.decode(header, payload, out)


@pytest.mark.parametrize("name", CHAINS)
def test_what_other_codecs_made_is_refused(name: str) -> None:
    mine = make_chain({"type": "2bit", "threshold": 0.25})
    assert_refused(mine, *encoded(chain_of(name), 100), "must all set the same compression", 100)


def test_what_the_same_codecs_made_with_other_numbers_is_refused() -> None:
    for numbers in ({"ratio": 0.5}, {"k": 11}):
        other = make_chain({"type": "topk", **numbers})
        assert_refused(chain_of("topk"), *encoded(other, 100), "must all set the same", 100)
    other = make_chain({"type": "randomk", "ratio": 0.1, "seed": 6})
    assert_refused(chain_of("randomk"), *encoded(other, 100), "must all set the same", 100)


def test_what_was_drawn_for_another_part_or_round_is_refused() -> None:
    chain = chain_of("randomk")
    header, payload = encoded(chain, 100, Draw(2, 7))
    text = "drawn for stream 2 and round 7, not 2 and 8"
    assert_refused(chain, header, payload, text, 100, Draw(2, 8))


@pytest.mark.parametrize("ids", [[0, 100], [0, 2**32 - 1], [5, 5], [5, 4], [101, 102]])
def test_ids_out_of_range_repeated_or_not_in_order_are_refused(ids: list[int]) -> None:
    chain = make_chain({"type": "topk", "k": 2})
    header, payload = encoded(chain, 100)
    wrong = np.array(ids, "<u4").tobytes() + payload[8:]
    assert_refused(chain, header, wrong, "not in rising order below 100", 100)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize("name", ["int8", "randomk+int8"])
def test_scales_that_cannot_be_are_refused(name: str, scale: float) -> None:
    chain = chain_of(name)
    header, payload = encoded(chain, 100)
    wrong = np.float32(scale).tobytes() + payload[4:]
    assert_refused(chain, header, wrong, "scale that is negative, infinite or NaN", 100)


@pytest.mark.parametrize("name", CHAINS)
@given(seed=st.integers(0, 9999))
def test_whatever_a_payload_holds_it_is_decoded_or_refused(name: str, seed: int) -> None:
    chain = chain_of(name)
    header, payload = encoded(chain, 100)
    random = np.random.default_rng(seed)
    noise = bytearray(payload)
    for place in random.integers(0, len(payload), 1 + seed % 4):
        noise[place] = random.integers(256)
    memory = np.full(300, 9, np.float32)
    try:
        chain.decode(header, bytes(noise), memory[100:200])
    except ProtocolError:
        assert (memory == 9).all()
    assert (memory[:100] == 9).all()
    assert (memory[200:] == 9).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHAINS)
def test_a_part_is_checked_without_being_decoded(name: str, dtype: str) -> None:
    chain, values, draw = chain_of(name), gradient(1, 333, kind(dtype)), Draw(1, 2)
    part = np.empty(chain.encoded_bytes(333, values.dtype), np.uint8)
    chain.encode_into(values, part, residual=residual_of(chain, values), draw=draw)
    for _ in range(2):  # the first time the header is made, then it is known
        chain.check_encoded(part, 333, values.dtype)
    other = np.dtype("f8") if values.dtype.itemsize < 8 else np.dtype("f4")
    for data, size, wrong in (
        (part[:-1], 333, values.dtype),
        (part, 334, values.dtype),
        (part, 333, other),
        (np.zeros_like(part), 333, values.dtype),
    ):
        with pytest.raises(ProtocolError):
            chain.check_encoded(data, size, wrong)


@given(place=st.integers(0, 10**6), change=st.integers(1, 255))
@pytest.mark.parametrize("name", CHAINS)
def test_what_passes_the_check_can_be_decoded(name: str, place: int, change: int) -> None:
    chain, values = chain_of(name), gradient(1, 100, np.dtype("f4"))
    part = np.empty(chain.encoded_bytes(100, values.dtype), np.uint8)
    chain.encode_into(values, part, residual=residual_of(chain, values))
    part[place % len(part)] ^= change
    try:
        chain.check_encoded(part, 100, values.dtype)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            chain.decode_from(part, values)
    else:
        chain.decode_from(part, values)


def test_a_part_is_decoded_into_memory_that_lies_together() -> None:
    chain = chain_of("fp16")
    header, payload = encoded(chain, 9)
    locked = np.zeros(9, np.float32)
    locked.flags.writeable = False
    for out in (np.zeros(18, np.float32)[::2], locked):
        with pytest.raises(ArgumentValueError, match="C-contiguous, writeable"):
            chain.decode(header, payload, out)
