"""``dist_device_sync`` without a GPU: the bits of ``dist_sync``, and arrays that are free at once.

``tests/gpu/test_dist_device_gpu.py`` has the same for values on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from several_values import (
    CHUNK_BYTES,
    KEYS,
    SEVERAL,
    SHAPES,
    SHM,
    WAYS,
    bits,
    expected,
    expected_of,
    held,
    lazy_like,
    needs_memfd,
    spoil,
    values,
    zeros,
)
from workers import Workers

from kvstore import KVStore
from kvstore.arrays.keys import KeySpec
from kvstore.stores.dist.arguments import Sums, sums_on_host
from kvstore.stores.dist.gpu_sums import split
from kvstore.stores.dist.store import DistKVStore
from pslite import Postoffice


@pytest.mark.parametrize("shm", SHM)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_device_sync"])
def test_every_way_to_push_host_values_gives_the_same_sums_in_both_stores(
    kind: str, shm: bool
) -> None:
    def script(kv: KVStore) -> list[list[bytes]]:
        kv.init(KEYS, zeros())
        return [way(kv, values(kv.rank, step)) for step, way in enumerate(WAYS)]

    with Workers(kind, 2, 2, chunk_bytes=CHUNK_BYTES, credit_bytes=1024, shm=shm) as workers:
        assert workers.run(script) == [[expected(step) for step in range(len(WAYS))]] * 2


def test_lazy_values_are_waited_for_before_they_are_added() -> None:
    def script(kv: KVStore) -> list[bytes]:
        kv.init(KEYS, zeros())
        kv.push(KEYS, values(kv.rank, 0))
        lazy = [lazy_like(row) for row in values(9, 9)]
        kv.pull(KEYS, out=lazy)  # returns before anything has arrived
        kv.push(KEYS, lazy)
        return bits(kv.pull(KEYS))

    first = expected_of([values(rank, 0) for rank in range(2)])
    again = [[value] * SHAPES[key][2] for key, value in zip(KEYS, first, strict=True)]
    with Workers("dist_device_sync", 2, 2, chunk_bytes=CHUNK_BYTES) as workers:
        assert workers.run(script) == [bits(expected_of([again, again]))] * 2


@pytest.mark.parametrize("shm", SHM)
@pytest.mark.parametrize("keys", [KEYS, SEVERAL, ["half"]], ids=["mixed", "sums", "small"])
@pytest.mark.parametrize("is_lazy", [False, True])
def test_the_callers_arrays_are_free_before_anything_was_sent(
    keys: list[str], shm: bool, is_lazy: bool
) -> None:
    def script(kv: KVStore) -> list[bytes]:
        assert isinstance(kv, DistKVStore)
        kv.init(keys, zeros(keys))
        rows, outs = values(kv.rank, 0, keys), lazy_like(zeros(keys))
        with held(kv.node):
            if is_lazy:
                kv.pushpull(keys, rows, out=outs)
            else:
                kv.push(keys, rows)
            spoil(rows)
        if not is_lazy:
            kv.pull(keys, out=outs)
        return bits(outs)

    with Workers("dist_device_sync", 2, 2, chunk_bytes=CHUNK_BYTES, shm=shm) as workers:
        assert workers.run(script) == [expected(0, keys)] * 2


@needs_memfd
@pytest.mark.parametrize(("keys", "is_copied"), [(KEYS, True), (SEVERAL, False)])
def test_sums_are_not_copied_before_their_turn_and_single_values_are(
    keys: list[str], is_copied: bool
) -> None:
    def script(kv: KVStore) -> int:
        assert isinstance(kv, DistKVStore)
        kv.init(keys, zeros(keys))
        kv.barrier()
        with held(kv.node):
            before = kv.node.heap.used_bytes
            kv.push(keys, values(kv.rank, 0, keys))
            taken = kv.node.heap.used_bytes - before
        kv.pull(keys)
        return taken

    nbytes = sum(array.nbytes for array in zeros(keys))
    with Workers("dist_device_sync", 2, 2, chunk_bytes=CHUNK_BYTES) as workers:
        for taken in workers.run(script):
            assert taken >= nbytes if is_copied else taken == 0


class SumsInBuffers:
    """Sums as a GPU leaves them: one after the other in a buffer of the node."""

    def __init__(self, node: Postoffice) -> None:
        self._node = node
        self.nbytes = 0

    def __call__(self, rows: Sequence[Sequence[Any]], specs: Sequence[KeySpec]) -> Sums:
        found = sums_on_host(rows, specs).memories
        self.nbytes = sum(map(len, found))
        buffer = self._node.buffer(self.nbytes)
        np.concatenate(found, out=buffer)
        return Sums(split(buffer, [len(memory) for memory in found]), True)


@pytest.mark.parametrize("shm", SHM)
def test_sums_in_memory_of_the_node_are_sent_from_there_and_it_is_free_afterwards(
    shm: bool,
) -> None:
    def script(kv: KVStore) -> list[list[bytes]]:
        assert isinstance(kv, DistKVStore)
        kv._add_up = add_up = SumsInBuffers(kv.node)
        kv.init(KEYS, zeros())
        kv.barrier()
        with held(kv.node):
            before = kv.node.heap.used_bytes
            kv.push(KEYS, values(kv.rank, 0))
            if shm:  # by TCP, small keys are gathered
                assert 0 <= kv.node.heap.used_bytes - before - add_up.nbytes < 64
        found = [bits(kv.pull(KEYS))]
        found += [way(kv, values(kv.rank, step)) for step, way in enumerate(WAYS, 1)]
        kv.wait()
        kv.barrier()  # by then the I/O thread has let go of the last answer
        assert kv.node.heap.used_bytes == before
        return found

    with Workers("dist_device_sync", 2, 1, chunk_bytes=CHUNK_BYTES, shm=shm) as workers:
        assert workers.run(script) == [[expected(step) for step in range(len(WAYS) + 1)]] * 2
