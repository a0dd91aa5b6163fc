"""For tests of gradient compression: every chain of codecs, every dtype, and drawn gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.arrays.dtypes import accumulation_dtype, bfloat16
from kvstore.compression import Chain, make_chain

Array = np.ndarray[Any, Any]

DTYPES = ["f2", "bfloat16", "f4", "f8"]

CHAINS: dict[str, dict[str, Any]] = {
    "2bit": {"type": "2bit"},
    "1bit": {"type": "1bit", "threshold": 0.0},
    "fp16": {"type": "fp16"},
    "bf16": {"type": "bf16"},
    "int8": {"type": "int8"},
    "int8 in short blocks": {"type": "int8", "block": 10},
    "topk": {"type": "topk", "ratio": 0.1},
    "topk of a count": {"type": "topk", "k": 7},
    "randomk": {"type": "randomk", "ratio": 0.1, "seed": 5},
    "topk+fp16": {"type": "topk+fp16", "ratio": 0.25},
    "topk+2bit": {"type": "topk+2bit", "ratio": 0.25},
    "randomk+int8": {"type": "randomk+int8", "ratio": 0.25},
    "randomk+bf16": {"type": "randomk+bf16", "ratio": 0.25},
}

SIZES = [0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 32, 33, 255, 256, 257, 1000, 65536, 65537, 70001]


def kind(name: str) -> np.dtype[Any]:
    """The dtype of this name; skips the test where it is not there."""
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
        return bfloat16()
    return np.dtype(name)


def chain_of(name: str, **more: Any) -> Chain:
    """One of the chains, with other parameters; skips the test where it is not there."""
    if "bf16" in name:
        pytest.importorskip("ml_dtypes")
    return make_chain({**CHAINS[name], **more})


def gradient(seed: int, size: int, dtype: np.dtype[Any]) -> Array:
    """Numbers around 0, some of them equal, some 0, some at the usual thresholds."""
    random = np.random.default_rng(seed)
    values = random.normal(size=size)
    values[random.random(size) < 0.2] = 0.0
    at_threshold = random.random(size) < 0.1
    values[at_threshold] = random.choice([0.5, -0.5, 1.0, -1.0], at_threshold.sum())
    return values.astype(dtype)


def residual_of(chain: Chain, array: Array) -> Array | None:
    """What the chain needs to encode arrays like this one."""
    if not chain.has_feedback:
        return None
    return np.zeros(array.size, accumulation_dtype(array.dtype))


def encoded(chain: Chain, array: Array, **more: Any) -> tuple[bytes, Array]:
    """The header and the payload of an encoded part."""
    data = chain.encode(array, **more)
    return data[: chain.header_bytes].tobytes(), data[chain.header_bytes :]


def decode(chain: Chain, header: bytes, payload: Any, out: Array, **more: Any) -> None:
    """Decode what ``encoded`` gave."""
    chain.decode(np.frombuffer(header + bytes(payload), np.uint8), out, **more)
