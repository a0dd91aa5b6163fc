"""Compiled codecs give NumPy's bits, and check what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from compression_cases import DTYPES, SIZES, gradient, kind
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_sets import NATIVE, computing_with

from kvstore.arrays.cpu import kernels
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.compression import Chain, make_chain
from tests.combinations import covering

Array = np.ndarray[Any, Any]

CODECS: list[dict[str, Any]] = [
    {"type": "2bit", "threshold": 0.5},
    {"type": "2bit", "threshold": 1e-3},
    {"type": "1bit", "threshold": 0.0},
    {"type": "1bit", "threshold": -0.5},
    {"type": "int8"},
    {"type": "int8", "block": 8},
    {"type": "int8", "block": 1000},
    {"type": "int8", "block": 5000},
]

TINY = [0.0, -0.0, 1e-45, -3e-45, 1e-40, 1e-38, 0.5, -0.5, 3e38]


@pytest.fixture(autouse=True, params=NATIVE)
def native(request: pytest.FixtureRequest) -> Iterator[str]:
    with computing_with(request.param):
        yield request.param


def drawn(seed: int, size: int, dtype: np.dtype[Any]) -> Array:
    """Gradients, in which every tenth number and every tenth stretch is extreme."""
    values, random = gradient(seed, size, dtype), np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        special = random.choice(TINY, size).astype(dtype)
    chosen = (random.random(size) < 0.1) | (random.random(size // 100 + 1) < 0.1).repeat(100)[:size]
    chosen &= np.isfinite(special.astype(np.float64))
    values[chosen] = special[chosen]
    return values


def outcome(chain: Chain, values: list[Array], offset: int) -> list[bytes]:
    """Everything that some rounds with these gradients write."""
    size, working = len(values[0]), accumulation_dtype(values[0].dtype)
    residual = np.zeros(size, working) if chain.has_feedback else None
    out, total = np.full(size, 9, working), np.full(size, 0.25, working)
    narrow = np.full(size, 0.25, values[0].dtype)
    found = []
    for each in values:
        memory = np.full(offset + chain.encoded_bytes(size, each.dtype), 7, np.uint8)
        data = chain.encode(each, memory[offset:], residual=residual)
        chain.decode(data, out, dtype=each.dtype)
        chain.decode(data, total, dtype=each.dtype, add=True)
        chain.decode(data, narrow, add=True)
        found += [data.tobytes(), out.tobytes(), total.tobytes(), narrow.tobytes()]
        found.append(b"" if residual is None else residual.tobytes())
    return found


@pytest.mark.parametrize(("given_", "dtype", "feedback"), covering(CODECS, DTYPES, [True, False]))
@settings(max_examples=4)
@given(size=st.sampled_from(SIZES), offset=st.integers(0, 3), seed=st.integers(0, 99))
def test_codecs_have_the_bits_of_numpys(
    given_: dict[str, Any], dtype: str, feedback: bool, size: int, offset: int, seed: int
) -> None:
    chain = make_chain({**given_, "feedback": feedback})
    values = [drawn(seed + number, size, kind(dtype)) for number in range(2)]
    found = outcome(chain, values, offset)
    with computing_with("numpy"):
        assert found == outcome(chain, values, offset)


@pytest.mark.parametrize("codec", [1, 2, 5])
def test_lengths_and_spans_that_do_not_fit_are_an_error(codec: int) -> None:
    values, residual = np.zeros(64, np.float32), np.zeros(64, np.float32)
    name = {1: "2bit", 2: "1bit", 5: "int8"}[codec]
    number = 32.0 if codec == 5 else 0.5
    chain = make_chain({"type": name, **({"block": 32} if codec == 5 else {})})
    nbytes = chain.payload_bytes(64, values.dtype)
    payload, dtype = np.zeros(nbytes, np.uint8), values.dtype

    def encode(*arrays: Any, start: int = 0, stop: int = 64) -> bool:
        return kernels.encode(codec, number, dtype, *arrays, start, stop)

    assert encode(values, residual, payload)
    for wrong in (payload[:-1], np.zeros(nbytes + 1, np.uint8)):
        with pytest.raises(ValueError, match="the payload has a wrong length"):
            encode(values, residual, wrong)
        with pytest.raises(ValueError, match="the payload has a wrong length"):
            kernels.decode(codec, number, wrong, values, 0, 64, add=False)
    with pytest.raises(ValueError, match="as long as the source"):
        encode(values, residual[:63], payload)
    with pytest.raises(ValueError, match="a source or residual"):
        encode(None, None, payload)
    for start, stop in [(-32, 64), (0, 65), (32, 0), (1, 64), (0, 63)]:
        with pytest.raises(ValueError, match="a span does not fit"):
            encode(values, residual, payload, start=start, stop=stop)
        with pytest.raises(ValueError, match="a span does not fit"):
            kernels.decode(codec, number, payload, values, start, stop, add=True)


def test_a_block_of_no_or_too_many_numbers_is_an_error() -> None:
    values = np.zeros(4, np.float32)
    for number in (0.0, -1.0, float("nan"), 1e9):
        with pytest.raises(ValueError, match="no such codec"):
            kernels.encode(5, number, values.dtype, values, None, np.zeros(8, "u1"), 0, 4)


def test_what_is_not_covered_is_left_to_numpy() -> None:
    values, payload = np.zeros(64, np.float32), np.zeros(16, np.uint8)
    assert not kernels.encode(3, 0.0, values.dtype, values, None, payload, 0, 64)
    assert not kernels.encode(1, 0.5, np.dtype("i4"), values, None, payload, 0, 64)
    strided = np.zeros(128, np.float32)[::2]
    assert not kernels.encode(1, 0.5, values.dtype, strided, None, payload, 0, 64)
    assert not kernels.decode(1, 0.5, payload, np.zeros(64, np.float16), 0, 64, add=False)
    locked = np.zeros(64, np.float32)
    locked.flags.writeable = False
    assert not kernels.decode(1, 0.5, payload, locked, 0, 64, add=False)
