"""Every chain of codecs on every dtype: nothing is lost but what the residual keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compression_cases import (
    CHAINS,
    DTYPES,
    SIZES,
    chain_of,
    encoded,
    gradient,
    kind,
    residual_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.arrays.cpu.threads import Cores
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.compression import Draw, codec, sparsify
from kvstore.errors import ArgumentTypeError, ArgumentValueError

Array = np.ndarray[Any, Any]

sizes = st.sampled_from(SIZES)
seeds = st.integers(0, 999)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHAINS)
@settings(max_examples=8)  # for each chain and dtype
@given(size=sizes, seed=seeds)
def test_what_was_decoded_and_the_residual_are_together_what_was_pushed(
    name: str, dtype: str, size: int, seed: int
) -> None:
    chain, working = chain_of(name, feedback=True), accumulation_dtype(kind(dtype))
    residual, pushed, arrived = (np.zeros(size, working) for _ in range(3))
    for number in range(4):
        values = gradient(seed + number, size, kind(dtype))
        pushed += values
        draw = Draw(stream=3, round=number)
        data = chain.encode(values, residual=residual, draw=draw)
        assert len(data) == chain.encoded_bytes(size, values.dtype)
        chain.decode(data, arrived, dtype=values.dtype, add=True)
    np.testing.assert_allclose(arrived + residual, pushed, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in CHAINS if not name.startswith("randomk")])
@settings(max_examples=8)  # for each chain and dtype
@given(size=sizes, seed=seeds)
def test_what_was_decoded_is_encoded_without_loss(
    name: str, dtype: str, size: int, seed: int
) -> None:
    chain = chain_of(name, feedback=False)
    working = accumulation_dtype(kind(dtype))
    once, twice = np.full(size, 9, working), np.full(size, 9, working)
    chain.decode(chain.encode(gradient(seed, size, kind(dtype))), once, dtype=kind(dtype))
    if working != kind(dtype):  # its numbers may have none of 16 bits
        return
    chain.decode(chain.encode(once), twice)
    tolerance = 1e-6 if "int8" in name else 0
    np.testing.assert_allclose(twice, once, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CHAINS)
def test_decoding_into_the_keys_dtype_rounds_once(name: str, dtype: str) -> None:
    chain, values = chain_of(name), gradient(1, 1000, kind(dtype))
    wide, narrow = np.empty(1000, accumulation_dtype(values.dtype)), np.ones(1000, values.dtype)
    data = chain.encode(values, residual=residual_of(chain, values))
    chain.decode(data, wide, dtype=values.dtype)
    chain.decode(data, narrow)
    assert narrow.tobytes() == wide.astype(values.dtype).tobytes()
    chain.decode(data, narrow, add=True)
    expected = (wide.astype(values.dtype).astype(wide.dtype) + wide).astype(values.dtype)
    assert narrow.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", CHAINS)
def test_arrays_of_any_shape_and_strides_are_encoded_in_their_order(name: str) -> None:
    chain, values = chain_of(name), gradient(1, 6 * 7 * 5, np.dtype("f4")).reshape(6, 7, 5)
    residual = residual_of(chain, values)
    strided = np.asfortranarray(values)
    first = chain.encode(strided, residual=residual)
    second = chain.encode(values.reshape(-1), residual=residual_of(chain, values))
    assert first.tobytes() == second.tobytes()
    out = np.empty((6, 7, 5), np.float32)
    chain.decode(first, out)
    flat = np.empty(6 * 7 * 5, np.float32)
    chain.decode(second, flat)
    assert out.tobytes() == flat.tobytes()


@pytest.mark.parametrize("name", CHAINS)
def test_numbers_of_the_other_byte_order_are_encoded_too(name: str) -> None:
    chain, values = chain_of(name), gradient(1, 100, np.dtype("f4"))
    other = values.astype(values.dtype.newbyteorder())
    first = chain.encode(values, residual=residual_of(chain, values))
    second = chain.encode(other, residual=residual_of(chain, values))
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("name", CHAINS)
def test_neither_threads_nor_spans_change_a_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome(cores: Cores) -> list[bytes]:
        chain, residual = chain_of(name, feedback=True), np.zeros(300_001, np.float32)
        chain.encode(gradient(1, 300_001, np.dtype("f4")), residual=residual, cores=cores)
        data = chain.encode(gradient(2, 300_001, np.dtype("f4")), residual=residual, cores=cores)
        out = np.ones(300_001, np.float32)
        chain.decode(data, out, add=True, cores=cores)
        return [data.tobytes(), residual.tobytes(), out.tobytes()]

    alone = outcome(Cores(1))
    assert outcome(Cores(3)) == alone
    monkeypatch.setattr(codec, "SPAN_ELEMENTS", 4096)
    assert outcome(Cores(2)) == alone


@pytest.mark.parametrize("name", CHAINS)
def test_payloads_at_odd_addresses_are_written_and_read(name: str) -> None:
    chain, values = chain_of(name), gradient(1, 333, np.dtype("f4"))
    data = chain.encode(values, residual=residual_of(chain, values))
    memory = np.zeros(len(data) + 1, np.uint8)
    found = chain.encode(values, memory[1:], residual=residual_of(chain, values))
    assert found.tobytes() == data.tobytes()
    wanted, out = np.empty(333, np.float32), np.empty(333, np.float32)
    chain.decode(data, wanted)
    chain.decode(memory[1:], out)
    assert out.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", ["fp16", "bf16", "topk", "topk+fp16", "randomk"])
def test_nan_and_infinity_arrive_and_leave_no_residual(name: str) -> None:
    chain = chain_of(name, feedback=True, **({"ratio": 1.0} if "k" in name else {}))
    values = gradient(1, 64, np.dtype("f4"))
    values[[3, 5, 9]] = [np.nan, np.inf, -np.inf]
    residual, out = np.zeros(64, np.float32), np.empty(64, np.float32)
    chain.decode(chain.encode(values, residual=residual), out)
    np.testing.assert_array_equal(out[[3, 5, 9]], values[[3, 5, 9]])
    assert np.isfinite(residual).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["2bit", "1bit", "int8", "topk+2bit"])
def test_nan_and_infinity_are_refused_where_they_would_be_lost(
    name: str, bad: float, dtype: str
) -> None:
    chain, values = chain_of(name), gradient(1, 200, kind(dtype))
    chain.check(values)
    values[150] = bad
    with pytest.raises(ArgumentValueError, match="has NaN or infinity"):
        chain.check(values)


def test_numbers_too_large_for_fp16_become_infinite_and_do_not_come_back() -> None:
    chain, residual = chain_of("fp16", feedback=True), np.zeros(2, np.float32)
    out = np.empty(2, np.float32)
    chain.decode(chain.encode(np.array([1e6, -1e6], np.float32), residual=residual), out)
    assert list(out) == [np.inf, -np.inf]
    assert list(residual) == [0.0, 0.0]


@pytest.mark.parametrize("dtype", ["i4", "i8", "?", "c8"])
def test_values_that_are_no_floats_cannot_be_encoded(dtype: str) -> None:
    with pytest.raises(ArgumentTypeError, match="float16, bfloat16, float32 or float64"):
        chain_of("fp16").encode(np.zeros(3, dtype))


# -- int8 ---------------------------------------------------------------------------------


def test_int8_has_the_scales_and_then_the_codes() -> None:
    chain = chain_of("int8", block=8, feedback=False)
    values = np.array([254, -127, 1, 3, 0, 0, 0, 0, 0, 0, -1.27], np.float32)
    _, payload = encoded(chain, values)
    assert list(payload[:8].view("<f4")) == [2.0, np.float32(1.27) / np.float32(127)]
    # 1 / 2 and 3 / 2 are ties, which go to the even number.
    assert list(payload[8:].view(np.int8)) == [127, -64, 0, 2, 0, 0, 0, 0, 0, 0, -127]


def test_int8_is_off_by_half_a_step_of_its_block_at_most() -> None:
    chain, values = chain_of("int8", feedback=False), gradient(1, 1000, np.dtype("f4"))
    values[300] = 1000.0  # coarsens its own block only
    out = np.empty(1000, np.float32)
    chain.decode(chain.encode(values), out)
    for start in range(0, 1000, 256):
        own = slice(start, start + 256)
        step = np.abs(values[own]).max() / 127
        assert np.abs(out[own] - values[own]).max() <= step / 2 * 1.0001


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("smallest", [1, 3, 1000])
def test_int8_takes_numbers_that_are_almost_zero(dtype: str, smallest: int) -> None:
    tiny = np.finfo(dtype).smallest_subnormal * smallest
    values = np.array([tiny, -tiny, 0, tiny], dtype)
    chain, residual, out = chain_of("int8"), np.zeros(4, dtype), np.empty(4, dtype)
    chain.decode(chain.encode(values, residual=residual), out)
    np.testing.assert_array_equal(out + residual, values)


# -- topk and randomk ---------------------------------------------------------------------


def test_topk_sends_the_largest_and_of_equal_ones_the_first() -> None:
    chain = chain_of("topk", ratio=1.0, k=3, feedback=False)
    values = np.array([1, -2, 5, 2, -2, 2, 0], np.float32)
    _, payload = encoded(chain, values)
    assert list(payload[:12].view("<u4")) == [1, 2, 3]
    assert list(payload[12:].view("<f4")) == [-2.0, 5.0, 2.0]


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@given(size=st.sampled_from([1, 2, 50, 9000, 70001]), ratio=st.floats(1e-4, 1), seed=seeds)
def test_topk_is_a_stable_sort_by_magnitude(dtype: str, size: int, ratio: float, seed: int) -> None:
    chain = chain_of("topk", ratio=ratio, feedback=False)
    values = gradient(seed, size, np.dtype(dtype)).round(1)  # many are equal
    count = max(int(ratio * size), 1)
    expected = np.sort(np.argsort(-np.abs(values), kind="stable")[:count])
    _, payload = encoded(chain, values)
    assert list(payload[: 4 * count].view("<u4")) == list(expected)


def test_topk_leaves_what_it_does_not_send_in_the_residual() -> None:
    chain, residual = chain_of("topk", ratio=1.0, k=1), np.zeros(3, np.float32)
    chain.encode(np.array([1, 5, 2], np.float32), residual=residual)
    assert list(residual) == [1, 0, 2]
    chain.encode(np.array([0, 0, 1], np.float32), residual=residual)
    assert list(residual) == [1, 0, 0]


def test_randomk_chooses_the_same_places_everywhere_and_others_each_round() -> None:
    chosen = []
    for number in (0, 1, 0):
        chain = chain_of("randomk", feedback=False)
        out = np.empty(100, np.float32)
        draw = Draw(stream=2, round=number)
        chain.decode(chain.encode(np.ones(100, np.float32), draw=draw), out)
        chosen.append(list(np.flatnonzero(out)))
    assert chosen[0] == chosen[2] != chosen[1]
    # They must never change: workers of different versions would add up different places.
    assert chosen[0] == [8, 10, 21, 39, 49, 55, 67, 79, 82, 95]


def test_random_numbers_are_those_of_the_published_split_mix() -> None:
    found = [int(number) for number in sparsify.split_mix(1234567, 3)]
    assert found == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_randomk_gives_every_element_the_same_chance_and_the_right_mean() -> None:
    chain, values = chain_of("randomk", ratio=0.3, feedback=False), np.ones(10, np.float32)
    total = np.zeros(10)
    for number in range(1500):
        out = np.empty(10, np.float32)
        chain.decode(chain.encode(values, draw=Draw(0, number)), out)
        total += out
    np.testing.assert_allclose(total / 1500, 1.0, atol=0.2)


def test_randomk_with_feedback_sends_numbers_as_they_are() -> None:
    chain, out = chain_of("randomk", ratio=0.1), np.empty(100, np.float32)
    chain.decode(chain.encode(np.ones(100, np.float32), residual=np.zeros(100, "f4")), out)
    assert sorted(out) == [0.0] * 90 + [1.0] * 10


# -- statistics ---------------------------------------------------------------------------


def test_statistics_have_the_bytes_and_the_ratio() -> None:
    chain, values = chain_of("2bit", feedback=False), np.zeros(1600, np.float32)
    chain.decode(chain.encode(values), np.empty(1600, np.float32))
    after = chain.header_bytes + 400
    assert chain.statistics.plain() == {
        "2bit": {
            "parts_encoded": 1,
            "bytes_before": 6400,
            "bytes_after": after,
            "parts_decoded": 1,
            "bytes_received": after,
            "bytes_restored": 6400,
            "ratio": 6400 / after,
        }
    }
