"""Encoded parts as they arrive: their headers, and that nothing malformed is decoded."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from compression_cases import (
    CHAINS,
    DTYPES,
    chain_of,
    decode,
    encoded,
    gradient,
    kind,
    residual_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.compression import Chain, Draw, make_chain
from pslite.errors import ProtocolError


def sent(chain: Chain, size: int, draw: Draw | None = None) -> tuple[bytes, bytes]:
    values = gradient(1, size, np.dtype("f4"))
    residual = residual_of(chain, values)
    header, payload = encoded(chain, values, residual=residual, draw=draw or Draw())
    return header, payload.tobytes()


def assert_refused(chain: Chain, header: bytes, payload: bytes, text: str, size: int) -> None:
    """By both ways to decode, and nothing is written."""
    for add in (False, True):
        out = np.full(size, 9, np.float32)
        with pytest.raises(ProtocolError, match=text):
            decode(chain, header, payload, out, add=add)
        assert (out == 9).all()


def test_a_header_has_the_layout_that_is_documented() -> None:
    assert sent(chain_of("2bit"), 9)[0] == struct.pack("<BBBBQd", 1, 0, 0, 1, 9, 0.5)
    assert sent(chain_of("1bit"), 9)[0] == struct.pack("<BBBBQd", 1, 0, 0, 2, 9, 0.0)
    assert sent(chain_of("fp16"), 9)[0] == struct.pack("<BBBBQ", 1, 0, 0, 3, 9)
    assert sent(chain_of("int8"), 9)[0] == struct.pack("<BBBBQI", 1, 0, 0, 5, 9, 256)
    assert sent(chain_of("topk"), 90)[0] == struct.pack("<BBBBQQ", 1, 0, 16, 0, 90, 9)
    assert sent(chain_of("randomk+int8"), 8, Draw(7, 4))[0] == struct.pack(
        "<BBBBQQQQQI", 1, 0, 17, 5, 8, 2, 0, 7, 4, 256
    )


@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=40)  # for each chain
@given(data=st.data())
def test_a_damaged_header_is_refused_or_makes_sense_for_this_part(
    name: str, data: st.DataObject
) -> None:
    chain = chain_of(name)
    header, payload = sent(chain, 100)
    place = data.draw(st.integers(0, len(header) - 1))
    damaged = bytearray(header)
    damaged[place] ^= data.draw(st.integers(1, 255))
    out = np.empty(100, np.float32)
    try:
        decode(chain, bytes(damaged), payload, out)
    except ProtocolError:
        return
    assert name.startswith("randomk")
    assert 28 <= place < 44  # what it was drawn by


@pytest.mark.parametrize("name", CHAINS)
def test_a_payload_of_another_length_is_refused(name: str) -> None:
    chain = chain_of(name)
    header, payload = sent(chain, 100)
    for wrong in (payload[:-1], payload + b"\0", b""):
        assert_refused(chain, header, wrong, f"has {len(header) + len(wrong)} bytes", 100)


@pytest.mark.parametrize("length", [0, 3, 19, 23, 25])
def test_a_part_of_another_length_is_refused(length: int) -> None:
    chain, out = chain_of("2bit", feedback=False), np.full(9, 9, np.float32)
    assert chain.encoded_bytes(9, out.dtype) == 24
    with pytest.raises(ProtocolError):
        chain.decode(np.zeros(length, np.uint8), out)
    assert (out == 9).all()


@pytest.mark.parametrize("header", [b"", b"\1", b"\2" + bytes(11), bytes(200)])
def test_what_is_no_header_is_refused(header: bytes) -> None:
    assert_refused(chain_of("2bit"), header, bytes(4), "has header", 9)


def test_codecs_and_dtypes_that_do_not_exist_are_refused() -> None:
    for fields in ((1, 0, 5, 1, 9), (1, 0, 0, 99, 9)):
        header = struct.pack("<BBBBQ", *fields) + struct.pack("<d", 0.5)
        assert_refused(chain_of("2bit"), header, bytes(4), "has header 010", 9)
    header = struct.pack("<BBBBQd", 1, 77, 0, 1, 9, 0.5)
    assert_refused(chain_of("2bit"), header, bytes(4), "has header 014d", 9)


def test_a_part_of_another_size_or_dtype_is_refused() -> None:
    chain = chain_of("fp16")
    header, payload = sent(chain, 9)
    assert_refused(chain, header, payload, "for 10 elements of float32 by fp16", 10)
    out = np.zeros(9, np.float64)
    with pytest.raises(ProtocolError, match="for 9 elements of float64 by fp16"):
        decode(chain, header, payload, out)


@pytest.mark.parametrize("name", CHAINS)
def test_what_other_codecs_made_is_refused(name: str) -> None:
    mine = make_chain({"type": "2bit", "threshold": 0.25})
    assert_refused(mine, *sent(chain_of(name), 100), "set the same compression on all workers", 100)


def test_what_the_same_codecs_made_with_other_numbers_is_refused() -> None:
    for numbers in ({"ratio": 0.5}, {"k": 11}):
        other = make_chain({"type": "topk", **numbers})
        assert_refused(chain_of("topk"), *sent(other, 100), "set the same", 100)
    other = make_chain({"type": "randomk", "ratio": 0.1, "seed": 6})
    assert_refused(chain_of("randomk"), *sent(other, 100), "set the same", 100)


@pytest.mark.parametrize("ids", [[0, 100], [0, 2**32 - 1], [5, 5], [5, 4], [101, 102]])
def test_ids_out_of_range_repeated_or_not_in_order_are_refused(ids: list[int]) -> None:
    chain = make_chain({"type": "topk", "k": 2})
    header, payload = sent(chain, 100)
    wrong = np.array(ids, "<u4").tobytes() + payload[8:]
    assert_refused(chain, header, wrong, "must increase and be below 100", 100)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0])
@pytest.mark.parametrize("name", ["int8", "randomk+int8"])
def test_scales_that_cannot_be_are_refused(name: str, scale: float) -> None:
    chain = chain_of(name)
    header, payload = sent(chain, 100)
    wrong = np.float32(scale).tobytes() + payload[4:]
    assert_refused(chain, header, wrong, "the scale of an int8 payload must be finite", 100)


@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=40)
@given(seed=st.integers(0, 9999))
def test_whatever_a_payload_holds_it_is_decoded_or_refused(name: str, seed: int) -> None:
    chain = chain_of(name)
    header, payload = sent(chain, 100)
    random = np.random.default_rng(seed)
    noise = bytearray(payload)
    for place in random.integers(0, len(payload), 1 + seed % 4):
        noise[place] = random.integers(256)
    memory = np.full(300, 9, np.float32)
    try:
        decode(chain, header, bytes(noise), memory[100:200])
    except ProtocolError:
        assert (memory == 9).all()
    assert (memory[:100] == 9).all()
    assert (memory[200:] == 9).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHAINS)
def test_a_part_is_checked_without_being_decoded(name: str, dtype: str) -> None:
    chain, values, draw = chain_of(name), gradient(1, 333, kind(dtype)), Draw(1, 2)
    part = chain.encode(values, residual=residual_of(chain, values), draw=draw)
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


@settings(max_examples=40)
@given(place=st.integers(0, 10**6), change=st.integers(1, 255))
@pytest.mark.parametrize("name", CHAINS)
def test_what_passes_the_check_can_be_decoded(name: str, place: int, change: int) -> None:
    chain, values = chain_of(name), gradient(1, 100, np.dtype("f4"))
    part = chain.encode(values, residual=residual_of(chain, values))
    part[place % len(part)] ^= change
    try:
        chain.check_encoded(part, 100, values.dtype)
    except ProtocolError:
        with pytest.raises(ProtocolError):
            chain.decode(part, values)
    else:
        chain.decode(part, values)
