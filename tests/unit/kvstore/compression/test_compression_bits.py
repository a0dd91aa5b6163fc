"""2bit and 1bit: the bytes and residuals of MXNet's rules, worked out by hand and one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from compression_cases import DTYPES, decode, encoded, gradient, kind
from hypothesis import given
from hypothesis import strategies as st
from kernel_sets import SETS, computing_with

from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.compression import Chain, make_chain

Array = np.ndarray[Any, Any]


def pushed(chain: Chain, values: list[float], residual: Array) -> str:
    _, payload = encoded(chain, np.array(values, np.float32), residual=residual)
    return payload.tobytes().hex(" ")


def decoded(chain: Chain, payload: str, size: int) -> list[float]:
    zeros, out = np.zeros(size, np.float32), np.full(size, 9, np.float32)
    header, _ = encoded(chain, zeros, residual=zeros.copy())
    decode(chain, header, bytes.fromhex(payload), out)
    return list(out)


@pytest.mark.parametrize("arithmetic", SETS)
def test_2bit_has_the_bytes_of_mxnet(arithmetic: str) -> None:
    chain, residual = make_chain({"type": "2bit", "threshold": 0.5}), np.zeros(9, np.float32)
    # 11 10 00 10 | 11 00 00 11 | 10, and what fills a word of 4 bytes
    values = [0.5, -0.5, 0.25, -1.25, 3.0, 0.0, -0.0, 0.75, -0.5]
    with computing_with(arithmetic):
        assert pushed(chain, values, residual) == "e2 c3 80 00"
    assert list(residual) == [0.0, 0.0, 0.25, -0.75, 2.5, 0.0, 0.0, 0.25, 0.0]


def test_2bit_sends_later_what_it_could_not_send_at_once() -> None:
    chain, residual = make_chain({"type": "2bit", "threshold": 0.5}), np.zeros(9, np.float32)
    pushed(chain, [0.5, -0.5, 0.25, -1.25, 3.0, 0.0, -0.0, 0.75, -0.5], residual)
    # 00 00 00 10 | 11 00 00 00 | 00
    assert pushed(chain, [0.0] * 9, residual) == "02 c0 00 00"
    assert list(residual) == [0.0, 0.0, 0.25, -0.25, 2.0, 0.0, 0.0, 0.25, 0.0]


def test_2bit_reads_01_as_zero_as_mxnet_does() -> None:
    chain = make_chain({"type": "2bit", "threshold": 2.0})
    # 11 10 01 00 | 01
    assert decoded(chain, "e4 40 00 00", 5) == [2.0, -2.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("arithmetic", SETS)
def test_1bit_has_the_bytes_of_mxnet(arithmetic: str) -> None:
    chain, residual = make_chain({"type": "1bit", "threshold": 0.5}), np.zeros(9, np.float32)
    # 1 0 0 1 1 0 0 1 | 1: exactly the threshold is not above it
    values = [0.75, 0.5, -1.0, 0.625, 2.0, 0.0, -0.25, 0.875, 0.5625]
    with computing_with(arithmetic):
        assert pushed(chain, values, residual) == "99 80 00 00"
    assert list(residual) == [-0.25, 1.5, 0.0, -0.375, 1.0, 1.0, 0.75, -0.125, -0.4375]


def test_1bit_sends_steps_of_one_whatever_the_threshold() -> None:
    assert decoded(make_chain({"type": "1bit", "threshold": -3}), "a0 00 00 00", 4) == [
        1,
        -1,
        1,
        -1,
    ]


@pytest.mark.parametrize(
    ("name", "size", "nbytes"),
    [("2bit", 0, 0), ("2bit", 1, 4), ("2bit", 16, 4), ("2bit", 17, 8), ("1bit", 0, 0),
     ("1bit", 1, 4), ("1bit", 32, 4), ("1bit", 33, 8)],
)  # fmt: skip
def test_payloads_are_whole_words_as_in_mxnet(name: str, size: int, nbytes: int) -> None:
    assert make_chain({"type": name}).payload_bytes(size, np.dtype(np.float32)) == nbytes


def one_by_one(
    name: str, threshold: Any, values: Array, residual: Array
) -> tuple[bytes, Array, Array]:
    """MXNet's loop over elements: bytes, what they mean, and the new residual."""
    wide = residual.dtype.type
    word, codes, sent, left = (16, [], [], []) if name == "2bit" else (32, [], [], [])
    for value, rest in zip(values.astype(wide), residual, strict=True):
        rest = wide(rest + value)
        if name == "2bit":
            code, step = (3, threshold) if rest >= threshold else (0, wide(0))
            code, step = (2, -threshold) if rest <= -threshold else (code, step)
        else:
            code, step = (1, wide(1)) if rest > threshold else (0, wide(-1))
        codes.append(code)
        sent.append(step)
        left.append(wide(rest - step))
    codes += [0] * (-len(codes) % word)
    width = 32 // word
    text = "".join(format(code, f"0{width}b") for code in codes)
    payload = bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8))
    return payload, np.array(sent, wide), np.array(left, wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["2bit", "1bit"])
@given(
    size=st.integers(0, 70),
    threshold=st.sampled_from([0.5, 0.1, 1.0, 1 / 3]),
    seed=st.integers(0, 999),
)
def test_bytes_and_residuals_are_those_of_the_rule_for_each_element(
    name: str, dtype: str, size: int, threshold: float, seed: int
) -> None:
    chain, key_dtype = make_chain({"type": name, "threshold": threshold}), kind(dtype)
    working = accumulation_dtype(key_dtype)
    residual, expected = np.zeros(size, working), np.zeros(size, working)
    for round_number in range(3):
        values = gradient(seed + round_number, size, key_dtype)
        data = chain.encode(values, residual=residual)
        wanted, sent, expected = one_by_one(name, working.type(threshold), values, expected)
        assert data[chain.header_bytes :].tobytes() == wanted
        assert residual.tobytes() == expected.tobytes()
        out = np.full(size, 9, working)
        chain.decode(data, out, dtype=key_dtype)
        assert out.tobytes() == sent.tobytes()
