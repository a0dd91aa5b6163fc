"""Every dtype with every codec, dense and row-sparse, on stores of three types.

Each cell gives the right numbers, computed here part by part with the codec alone, or raises the
one error that the documentation names: row-sparse values are not compressed, and ``dist_async``
needs an optimizer, which updates floats only. The originals mix these in ways of their own
(mx#15252): float64 is narrowed, halves add up in halves, integers end the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from workers import Workers

import kvstore as mx
from kvstore import KVStore, RowSparseArray, optimizer
from kvstore.arrays.dtypes import accumulation_dtype, bfloat16
from kvstore.compression import make_chain
from kvstore.errors import ArgumentTypeError, NotSupportedError
from kvstore.protocol.placement import chunk_ranges
from tests.combinations import covering

CHUNK_BYTES = 512
SHAPE = (40, 5)
DTYPES = ["float16", "bfloat16", "float32", "float64", "int32", "int64"]
CODECS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "fp16": {"type": "fp16"},
    "2bit": {"type": "2bit", "threshold": 0.75},
    "1bit": {"type": "1bit", "threshold": 0.25},
    "int8": {"type": "int8", "block": 64},
    "topk": {"type": "topk", "ratio": 0.2},
}
KINDS = ["local", "dist_sync", "dist_async"]
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module", params=KINDS)
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    config = {"chunk_bytes": CHUNK_BYTES, "credit_bytes": 4096, "shm": False}
    with Workers(request.param, 2, 2, **config) as workers:
        yield workers


def dtype_named(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
        return bfloat16()
    return np.dtype(name)


def gradient(rank: int, dtype: np.dtype[Any], form: str) -> Array:
    """Numbers of this rank, exact in every dtype: quarters for floats, whole ones for integers."""
    generator = np.random.default_rng(rank)
    numbers = generator.integers(-12, 13, SHAPE) / (4 if dtype.kind != "i" else 1)
    if form == "row-sparse":
        numbers[generator.random(SHAPE[0]) < 0.7] = 0
    return numbers.astype(dtype)


def arrived(sent: Array, codec: str, kind: str) -> Array:
    """What comes out of a codec, in the dtype in which it is added up."""
    working = accumulation_dtype(sent.dtype)
    parameters = CODECS[codec]
    if parameters is None or sent.dtype.kind == "i":
        return sent.astype(working)
    chain, flat = make_chain(parameters), sent.reshape(-1)
    whole = [(0, sent.size)]
    chunks = whole if kind == "local" else chunk_ranges(sent.size, sent.itemsize, CHUNK_BYTES)
    found = np.zeros(sent.size, working)
    for start, stop in chunks:
        residual = np.zeros(stop - start, working) if chain.has_feedback else None
        data = chain.encode(flat[start:stop], residual=residual)
        chain.decode(data, found[start:stop], dtype=sent.dtype)
    return found.reshape(sent.shape)


def value_of(array: Array, form: str) -> Any:
    return array if form == "dense" else RowSparseArray.from_dense(array)


def push_once(kv: KVStore, dtype: np.dtype[Any], codec: str, form: str) -> Array:
    """The key's value after a push by every worker; on ``local`` by two devices."""
    kv.set_gradient_compression(CODECS[codec])
    if kv.type == "dist_async":
        kv.set_optimizer(optimizer.create("test"))
    kv.init("w", value_of(np.zeros(SHAPE, dtype), form))
    ranks = (0, 1) if kv.num_workers == 1 else (kv.rank,)
    failure: Exception | None = None
    try:
        kv.push("w", [value_of(gradient(rank, dtype, form), form) for rank in ranks])
        kv.wait()
    except Exception as error:
        failure = error
    kv.barrier()
    out = np.empty(SHAPE, dtype)
    kv.pull("w", out=out)
    kv.barrier()
    if failure is not None:
        assert not out.astype(float).any(), "what failed has changed the value"
        raise failure
    return out


def error_of(kind: str, dtype: np.dtype[Any], codec: str, form: str) -> Any:
    """The documented error of a cell, and what it says."""
    if form == "row-sparse" and codec != "none" and dtype.kind != "i":
        return NotSupportedError, "row-sparse values cannot be compressed"
    if kind == "dist_async" and dtype.kind == "i":
        return ArgumentTypeError, "needs float weights, got int"
    return None


@pytest.mark.parametrize(
    ("name", "codec", "form"), covering([*DTYPES], [*CODECS], ["dense", "row-sparse"])
)
def test_a_cell_has_the_right_numbers_or_the_one_error(
    workers: Workers, name: str, codec: str, form: str
) -> None:
    dtype = dtype_named(name)
    stores = workers.create()
    found: list[Any] = []

    def script(kv: KVStore) -> None:
        wanted = error_of(workers.kind, dtype, codec, form)
        if wanted is None:
            found.append(push_once(kv, dtype, codec, form))
            return
        with pytest.raises(wanted[0], match=wanted[1]):
            push_once(kv, dtype, codec, form)

    workers.run(script, stores)
    sent = [gradient(rank, dtype, form) for rank in range(2)]
    total = arrived(sent[0], codec, workers.kind) + arrived(sent[1], codec, workers.kind)
    if workers.kind == "local" and codec != "none" and dtype.kind != "i":
        # Devices hand over arrays of the key's dtype.
        passed = [arrived(each, codec, "local").astype(dtype) for each in sent]
        total = passed[0].astype(total.dtype) + passed[1].astype(total.dtype)
    for value in found:
        assert value.dtype == dtype
        np.testing.assert_array_equal(value, total.astype(dtype))
    for kv in stores:
        kv.close()


def test_ten_thousand_small_updates_of_halves_add_up() -> None:
    """In float16 alone 1e-3 would stop to count at 4 (mx PR#10183)."""
    kv = mx.create("local")
    kv.set_optimizer(optimizer.create("test"))
    kv.init("w", np.zeros(3, np.float16))
    for _ in range(10_000):
        kv.push("w", np.full(3, 1e-3, np.float16))
    np.testing.assert_allclose(kv.pull("w").astype(float), 10.0, rtol=2e-3)
