"""``dist_device_sync`` with values on real GPUs, in a cluster in this process; skipped without one.

Sums have the bits of the host, wherever the values are and whatever way they are pushed. Servers
compute on the CPU, so nothing else of a GPU takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from several_values import (
    CHUNK_BYTES,
    KEYS,
    SHAPES,
    SHM,
    WAYS,
    Rows,
    bits,
    expected,
    expected_of,
    held,
    lazy_like,
    values,
    zeros,
)
from workers import Workers

from kvstore import KVStore, create, gpu, optimizer
from kvstore.arrays import adapter_on
from kvstore.arrays.gpu import sums
from kvstore.stores.dist.gpu_sums import _pinned
from kvstore.stores.dist.store import DistKVStore
from pslite import Postoffice

pytestmark = pytest.mark.gpu


@pytest.fixture
def place(cupy: Any) -> Callable[[Rows], list[list[Any]]]:
    """Deals the values of each key out to the GPUs."""
    count = cupy.cuda.runtime.getDeviceCount()

    def deal(rows: Rows) -> list[list[Any]]:
        placed = []
        for row in rows:
            devices = [gpu(number % count) for number in range(len(row))]
            pairs = zip(row, devices, strict=True)
            placed.append([adapter_on(where).to_context(array, where) for array, where in pairs])
        return placed

    return deal


@pytest.mark.parametrize("shm", SHM)
def test_every_way_to_push_values_on_gpus_gives_the_sums_of_the_host(
    place: Callable[[Rows], list[list[Any]]], shm: bool
) -> None:
    def script(kv: KVStore) -> list[list[bytes]]:
        kv.init(KEYS, zeros())
        return [way(kv, place(values(kv.rank, step))) for step, way in enumerate(WAYS)]

    for num_servers in (1, 2):
        config = {"chunk_bytes": CHUNK_BYTES, "shm": shm}
        with Workers("dist_device_sync", 2, num_servers, **config) as workers:
            assert workers.run(script) == [[expected(step) for step in range(len(WAYS))]] * 2


def test_values_of_one_key_or_call_may_be_on_gpus_and_on_the_host(
    place: Callable[[Rows], list[list[Any]]],
) -> None:
    def script(kv: KVStore) -> list[list[bytes]]:
        kv.init(KEYS, zeros())
        found = []
        for step, way in enumerate(WAYS):
            rows: list[list[Any]] = [list(row) for row in values(kv.rank, step)]
            for index, row in enumerate(place(rows)):
                # All values of a key, the first one, all others, or none.
                chosen = [slice(None), slice(1), slice(1, None), slice(0)][index % 4]
                rows[index][chosen] = row[chosen]
            found.append(way(kv, rows))
        return found

    with Workers("dist_device_sync", 2, 2, chunk_bytes=CHUNK_BYTES) as workers:
        assert workers.run(script) == [[expected(step) for step in range(len(WAYS))]] * 2


@pytest.mark.parametrize("shm", SHM)
@pytest.mark.parametrize("keys", [KEYS, ["half"]], ids=["together", "small"])
def test_arrays_on_gpus_are_free_for_other_streams_before_anything_was_sent(
    cupy: Any, place: Callable[[Rows], list[list[Any]]], shm: bool, keys: list[str]
) -> None:
    def script(kv: KVStore) -> list[bytes]:
        assert isinstance(kv, DistKVStore)
        kv.init(keys, zeros(keys))
        rows = place(values(kv.rank, 0, keys))
        with held(kv.node):
            kv.push(keys, rows)
            for row in rows:
                for array in row:
                    with cupy.cuda.Device(array.device.id), cupy.cuda.Stream(non_blocking=True):
                        array.fill(1)
                        cupy.cuda.get_current_stream().synchronize()
        return bits(kv.pull(keys))

    with Workers("dist_device_sync", 2, 2, chunk_bytes=CHUNK_BYTES, shm=shm) as workers:
        assert workers.run(script) == [expected(0, keys)] * 2


def test_lazy_values_on_gpus_are_waited_for_before_they_are_added(cupy: Any) -> None:
    def script(kv: KVStore) -> list[bytes]:
        kv.init(KEYS, zeros())
        kv.push(KEYS, values(kv.rank, 0))
        lazy = [lazy_like(row, gpu(0)) for row in values(9, 9)]
        kv.pull(KEYS, out=lazy)
        kv.push(KEYS, lazy)
        return bits(kv.pull(KEYS))

    first = expected_of([values(rank, 0) for rank in range(2)])
    again = [[value] * SHAPES[key][2] for key, value in zip(KEYS, first, strict=True)]
    with Workers("dist_device_sync", 2, 2, chunk_bytes=CHUNK_BYTES) as workers:
        assert workers.run(script) == [bits(expected_of([again, again]))] * 2


def test_a_large_model_trains_as_in_one_process(cupy: Any) -> None:
    """Larger than a message and than a block that leaves the GPU at a time."""
    shapes = {"large": (3_000_001,), "second": (700, 999), "small": (10,)}
    keys = list(shapes)

    def gradients(rank: int, step: int) -> list[np.ndarray[Any, Any]]:
        rng = np.random.default_rng([rank, step])
        return [rng.normal(size=shape).astype(np.float32) for shape in shapes.values()]

    def prepare(kv: KVStore) -> None:
        kv.set_optimizer(optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
        kv.init(keys, [np.zeros(shape, np.float32) for shape in shapes.values()])

    def script(kv: KVStore) -> list[bytes]:
        prepare(kv)
        outs = [cupy.zeros(shape, np.float32) for shape in shapes.values()]
        for step in range(4):
            arrays = [cupy.asarray(array) for array in gradients(kv.rank, step)]
            kv.push(keys, arrays)
            for array in arrays:
                array.fill(9)
            kv.pull(keys, out=outs)
        return bits(outs)

    local = create("local")
    prepare(local)
    for step in range(4):
        pairs = zip(gradients(0, step), gradients(1, step), strict=True)
        local.push(keys, [list(pair) for pair in pairs])
    with Workers("dist_device_sync", 2, 1) as workers:
        assert workers.run(script) == [bits(local.pull(keys))] * 2


def test_the_memory_that_is_sent_is_page_locked_once_for_all_stores_of_a_node(cupy: Any) -> None:
    def script(kv: KVStore) -> Any:
        assert isinstance(kv, DistKVStore)
        kv.init("w", np.zeros(5000, np.float32))
        for _ in range(3):
            kv.push("w", [cupy.ones(5000, np.float32)] * 2)
        assert (kv.pull("w") == 4).all()
        return Postoffice.whole_of(kv.node.buffer(100))

    with Workers("dist_device_sync", 2, 1) as workers:
        first = workers.run(script)
        assert workers.run(script, workers.create()) == first
        node = workers.stores[0].node  # type: ignore[attr-defined]
        if not _pinned.holds(node.buffer(100)):
            pytest.skip("this system locks no shared memory for GPUs")
        for whole in first:
            assert not sums.lock_pages(*whole)  # it is locked already
