"""What tests of ``dist_device_sync`` share: keys with one or several values, and ways to push them.

Two workers push ``values(rank, step)``, on whatever devices, and see ``expected(step)``, bit for
bit. A way returns the bits that a worker sees.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S

import kvstore as mx
from kvstore import KVStore
from kvstore.arrays import adapter_for
from pslite import Postoffice

Array = np.ndarray[Any, Any]
Rows = Sequence[Sequence[Any]]
"""For each key its values."""

SHAPES: dict[str, tuple[tuple[int, ...], str, int]] = {
    "matrix": ((31, 17), "f4", 3),
    "half": ((401,), "f2", 2),
    "one": ((1,), "f8", 2),
    "single": ((300,), "f4", 1),
    "whole": ((77,), "i8", 4),
    "truth": ((9,), "?", 2),
    "empty": ((0, 3), "f4", 2),
    "double": ((7, 41), "f8", 2),
}
"""Shape, dtype and number of values. Most keys alone are a small call; all together are not."""

KEYS = list(SHAPES)
SEVERAL = [key for key in KEYS if SHAPES[key][2] > 1]
CHUNK_BYTES = 256

needs_memfd = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd here")
SHM = [pytest.param(True, marks=needs_memfd), False]


def values(rank: int, step: int, keys: Sequence[str] = KEYS) -> list[list[Array]]:
    """Over seven orders of magnitude, so that another order of additions shows."""
    rng = np.random.default_rng([rank, step])
    return [[_draw(key, rng) for _ in range(SHAPES[key][2])] for key in keys]


def _draw(key: str, rng: np.random.Generator) -> Array:
    shape, dtype, _ = SHAPES[key]
    value = np.asarray(rng.normal(size=shape) * 10.0 ** rng.uniform(-4, 3, shape))
    return value > 1 if dtype == "?" else value.astype(dtype)


def zeros(keys: Sequence[str] = KEYS) -> list[Array]:
    return [np.zeros(shape, dtype) for shape, dtype, _ in (SHAPES[key] for key in keys)]


def lazy_like(arrays: Sequence[Array], ctx: mx.Context | None = None) -> list[Any]:
    return [mx.nd.array(array, ctx, array.dtype) for array in arrays]


def bits(arrays: Sequence[Any]) -> list[bytes]:
    return [adapter_for(array).to_host(array).tobytes() for array in arrays]


def spoil(rows: Rows) -> None:
    """The caller's arrays are the caller's again."""
    for row in rows:
        for array in row:
            adapter = adapter_for(array)
            adapter.from_host(np.ones(adapter.shape(array)), array)


# -- what workers see ---------------------------------------------------------------------


def expected(step: int, keys: Sequence[str] = KEYS) -> list[bytes]:
    """The bits after a round of ``values``."""
    return bits(expected_of([values(rank, step, keys) for rank in range(2)], keys))


def expected_of(of_ranks: Sequence[Rows], keys: Sequence[str] = KEYS) -> list[Array]:
    """The sum of the workers' sums."""
    sums = [_summed(rows, keys) for rows in of_ranks]
    return _summed([list(pair) for pair in zip(*sums, strict=True)], keys)


def _summed(rows: Rows, keys: Sequence[str]) -> list[Array]:
    with mx.kvstore.create("local") as kv:
        kv.init(list(keys), zeros(keys))
        kv.push(list(keys), rows)
        found: list[Array] = kv.pull(list(keys))
        return found


# -- ways to push -------------------------------------------------------------------------


def by_lists(kv: KVStore, rows: Rows) -> list[bytes]:
    kv.push(KEYS, rows)
    spoil(rows)
    return bits(kv.pull(KEYS))


def by_pushpull(kv: KVStore, rows: Rows) -> list[bytes]:
    outs = zeros()
    kv.pushpull(KEYS, rows, out=outs)
    return bits(outs)


def in_place(kv: KVStore, rows: Rows) -> list[bytes]:
    kv.pushpull(KEYS, rows)
    return bits([row[-1] for row in rows])


def into_lazy_arrays(kv: KVStore, rows: Rows) -> list[bytes]:
    outs = lazy_like(zeros())
    kv.pushpull(KEYS, rows, out=outs)
    spoil(rows)
    return bits(outs)


def key_by_key(kv: KVStore, rows: Rows) -> list[bytes]:
    outs = lazy_like(zeros())
    for index, (key, row, out) in enumerate(zip(KEYS, rows, outs, strict=True)):
        kv.push(key, row, priority=-index)
        spoil([row])
        kv.pull(key, out=out, priority=-index)
    return bits(outs)


def as_futures(kv: KVStore, rows: Rows) -> list[bytes]:
    outs = zeros()
    kv.wait(kv.pushpull_async(KEYS, rows, out=outs))
    return bits(outs)


Way = Callable[[KVStore, Rows], list[bytes]]
WAYS: list[Way] = [by_lists, by_pushpull, in_place, into_lazy_arrays, key_by_key, as_futures]


@contextmanager
def held(node: Postoffice) -> Iterator[None]:
    """Nothing is sent inside the block, and nothing copied that is copied when it is sent."""
    holding, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        go_on.wait(LIMIT_S)

    node.call(hold)
    assert holding.wait(LIMIT_S)
    try:
        yield
    finally:
        go_on.set()
