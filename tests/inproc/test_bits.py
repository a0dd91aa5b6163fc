"""A distributed sum is the local sum to the last bit, whatever happens on the way.

W workers with one device each must give the bits of one ``local`` store over W devices: with
any number of servers, whichever worker is late, with keys cut into chunks, with every dtype and
optimizer. The gradients span nine orders of magnitude, so another order of additions shows.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from cluster import InprocCluster
from combinations import covering

import kvstore as mx
from kvstore.server import install
from pslite import Postoffice

Array = np.ndarray[Any, Any]

STEPS = 8
CHUNK_BYTES = 256
LIMIT_S = 20.0

FLOAT_KEYS: dict[str, tuple[tuple[int, ...], type]] = {
    # Longer than one chunk, and no multiple of it; neighbours of one dtype lie together.
    "f4 matrix": ((31, 17), np.float32),
    "f4 vector": ((63,), np.float32),
    "f4 chunk": ((64,), np.float32),
    "f8 matrix": ((7, 41), np.float64),
    "f8 single": ((), np.float64),
    "f2 vector": ((401,), np.float16),
    "f4 small": ((1,), np.float32),
}
ALL_KEYS = {**FLOAT_KEYS, "i8 vector": ((77,), np.int64), "f4 empty": ((0,), np.float32)}

OPTIMIZERS: dict[str, dict[str, float] | None] = {
    "none": None,
    "sgd": {"learning_rate": 0.05, "wd": 0.001},
    "momentum": {"learning_rate": 0.05, "momentum": 0.9},
    "adam": {"learning_rate": 0.01},
}


def optimizer_of(name: str) -> mx.optimizer.Optimizer | None:
    params = OPTIMIZERS[name]
    if params is None:
        return None
    return mx.optimizer.create("adam" if name == "adam" else "sgd", **params)


def keys_of(optimizer: str) -> dict[str, tuple[tuple[int, ...], type]]:
    """Optimizers update floats only."""
    return ALL_KEYS if optimizer == "none" else FLOAT_KEYS


def draw(shape: tuple[int, ...], dtype: type, seed: Sequence[int]) -> Array:
    """A gradient of one rank, step and key."""
    numbers = np.random.default_rng(seed)
    if dtype is np.int64:
        return numbers.integers(-(2**40), 2**40, shape)
    scale = 10.0 ** numbers.uniform(-6, 3, shape)
    return np.asarray(numbers.standard_normal(shape) * scale, dtype)


def first_values(optimizer: str) -> list[Array]:
    return [
        draw(shape, dtype, (99, index))
        for index, (shape, dtype) in enumerate(keys_of(optimizer).values())
    ]


def gradients(optimizer: str, rank: int, step: int) -> list[Array]:
    return [
        draw(shape, dtype, (rank, step, index))
        for index, (shape, dtype) in enumerate(keys_of(optimizer).values())
    ]


def train_locally(optimizer: str, num_devices: int) -> list[bytes]:
    """The bits of all keys after every step, by one process with several devices."""
    keys = list(keys_of(optimizer))
    outs = [np.zeros_like(value) for value in first_values(optimizer)]
    bits = []
    with mx.kvstore.create("local") as store:
        store.init(keys, first_values(optimizer))
        chosen = optimizer_of(optimizer)
        if chosen is not None:
            store.set_optimizer(chosen)
        for step in range(STEPS):
            of_ranks = [gradients(optimizer, rank, step) for rank in range(num_devices)]
            store.push(keys, [list(of_key) for of_key in zip(*of_ranks, strict=True)])
            store.pull(keys, out=outs)
            bits.append(b"".join(out.tobytes() for out in outs))
    return bits


class Worker:
    """One worker's training. It dawdles and calls in ways that ``seed`` decides."""

    def __init__(self, node: Postoffice, optimizer: str, seed: int, pull_every: int) -> None:
        self._node = node
        self._pull_every = pull_every
        self._optimizer = optimizer
        self._keys = list(keys_of(optimizer))
        self._random = random.Random(seed)

    def train(self) -> list[bytes]:
        """The bits of all keys whenever they were pulled."""
        keys, chosen = self._keys, optimizer_of(self._optimizer)
        outs = [np.zeros_like(value) for value in first_values(self._optimizer)]
        bits = []
        with mx.kvstore.create("dist_sync", node=self._node) as store:
            store.init(keys, first_values(self._optimizer))
            if chosen is not None:
                store.set_optimizer(chosen)
            for step in range(STEPS):
                time.sleep(self._random.choice([0, 0, 0, 0.001, 0.005]))
                values = gradients(self._optimizer, store.rank, step)
                pulls = (step + 1) % self._pull_every == 0
                if pulls and self._random.random() < 0.25:
                    store.pushpull(keys, values, out=outs)
                else:
                    self._push(store, values)
                    if pulls:
                        store.pull(keys, out=outs)
                if pulls:
                    bits.append(b"".join(out.tobytes() for out in outs))
        return bits

    def _push(self, store: mx.KVStore, values: list[Array]) -> None:
        """One push of everything, by one of the ways that mean the same."""
        keys = self._keys
        order = self._random.sample(range(len(keys)), len(keys))
        way = self._random.choice([1, 2, 3])
        if way == 1:
            store.push(keys, values)
        elif way == 2:
            store.push([keys[i] for i in order], [values[i] for i in order])
        else:
            for index in order:
                store.push(keys[index], values[index], priority=self._random.randrange(9))
        # What was pushed is the store's no more.
        for value in values:
            value.fill(7)


def train_in_a_cluster(
    optimizer: str,
    num_workers: int,
    num_servers: int,
    seed: int,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    pool_threads: int = 2,
    pull_every: int = 1,
) -> list[list[bytes]]:
    """What every worker saw whenever it pulled."""
    with (
        InprocCluster(
            num_workers,
            num_servers,
            prepare=install,
            chunk_bytes=chunk_bytes,
            pool_threads=pool_threads,
        ) as cluster,
        ThreadPoolExecutor(num_workers) as threads,
    ):
        workers = [
            Worker(node, optimizer, seed * 10 + rank, pull_every)
            for rank, node in enumerate(cluster.workers)
        ]
        futures = [threads.submit(worker.train) for worker in workers]
        return [future.result(LIMIT_S) for future in futures]


@pytest.fixture(scope="module")
def local_bits() -> dict[tuple[str, int], list[bytes]]:
    """(optimizer, number of devices) -> the bits after every step."""
    return {
        (optimizer, num_devices): train_locally(optimizer, num_devices)
        for optimizer in OPTIMIZERS
        for num_devices in (2, 3)
    }


@pytest.mark.parametrize(
    ("optimizer", "num_workers", "num_servers"), covering(list(OPTIMIZERS), [2, 3], [1, 2, 3])
)
def test_every_worker_sees_the_bits_of_as_many_local_devices_after_every_step(
    local_bits: dict[tuple[str, int], list[bytes]],
    optimizer: str,
    num_workers: int,
    num_servers: int,
) -> None:
    expected = [local_bits[optimizer, num_workers]] * num_workers
    # Twice, with other pauses and other ways to call.
    for seed in 1, 2:
        assert train_in_a_cluster(optimizer, num_workers, num_servers, seed) == expected


@pytest.mark.parametrize("chunk_bytes", [64, 1 << 20])
@pytest.mark.parametrize("pool_threads", [1, 4])
def test_neither_chunks_nor_threads_change_a_bit(
    local_bits: dict[tuple[str, int], list[bytes]], chunk_bytes: int, pool_threads: int
) -> None:
    seen = train_in_a_cluster("adam", 2, 2, 3, chunk_bytes=chunk_bytes, pool_threads=pool_threads)
    assert seen == [local_bits["adam", 2]] * 2


@pytest.mark.parametrize("pull_every", [2, 4, 8])
def test_pushes_that_run_ahead_of_pulls_change_no_bit(
    local_bits: dict[tuple[str, int], list[bytes]], pull_every: int
) -> None:
    """With a window of two rounds, the later of them wait at the worker."""
    seen = train_in_a_cluster("momentum", 3, 2, 4, pull_every=pull_every)
    assert seen == [local_bits["momentum", 3][pull_every - 1 :: pull_every]] * 3


def test_the_gradients_tell_orders_of_addition_apart() -> None:
    """Else the tests above could not fail."""
    for (shape, dtype), *of_ranks in zip(
        FLOAT_KEYS.values(), *(gradients("sgd", rank, 0) for rank in range(3)), strict=True
    ):
        if np.prod(shape) > 1:
            a, b, c = of_ranks
            assert not np.array_equal((a + b) + c, (c + b) + a), dtype
