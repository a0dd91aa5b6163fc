"""The store of one process whose sums and updates run on the GPUs: ``create("device")``.

A ``local`` store whose keys move, at their first push with GPU arrays, to the one of those
GPUs that holds the fewest bytes of this store; from then on the key's value, optimizer state,
sums and updates stay there. With arrays on the host only, it is a ``local`` store and gives
the same bits. Not a collective library: one GPU adds what the others send it. Uses no threads
of its own. Read next: ``kvstore/arrays/cupy.py`` for the device work.

**What has been run.** The GPU branch has its tests in ``tests/gpu/test_device_gpu.py``, which
need real GPUs; ``docs/gpu.md`` says what has run on one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.arrays import Array, adapter_for, adapter_on
from kvstore.context import Context
from kvstore.dtypes import accumulation_dtype
from kvstore.keys import Key
from kvstore.local import Entry, LocalKVStore


class DeviceKVStore(LocalKVStore):
    """Adds and updates on the device that holds the key. See ``KVStore`` for each call.

    ``pull`` without ``out`` returns an array on that device.
    """

    def __init__(self, name: str = "device") -> None:
        super().__init__(name)

    def _settle(self, entry: Entry, arrays: Sequence[Array]) -> None:
        if entry.home.device_type == "cpu":
            devices = [adapter_for(array).context(array) for array in arrays]
            self._move(entry, [device for device in devices if device.device_type == "gpu"])

    def _apply(self, key: Key, entry: Entry, arrays: Sequence[Array]) -> None:
        if entry.home.device_type == "cpu":
            super()._apply(key, entry, arrays)
        else:
            self._apply_on_gpu(key, entry, arrays)

    def _move(self, entry: Entry, gpus: Sequence[Context]) -> None:
        """Take the key to the one of ``gpus`` with the fewest bytes; the first of equals."""
        if not gpus:
            return
        held = dict.fromkeys(gpus, 0)
        for other in self._entries.values():
            if other.home in held:
                held[other.home] += other.spec.nbytes
        home = min(held, key=lambda gpu: held[gpu])
        adapter = adapter_on(home)
        weight = adapter.to_context(entry.weight, home)
        if entry.state is not None:
            entry.state = tuple(adapter.to_context(array, home) for array in entry.state)
        entry.weight, entry.home = weight, home

    def _apply_on_gpu(self, key: Key, entry: Entry, arrays: Sequence[Array]) -> None:
        adapter = adapter_on(entry.home)
        working = accumulation_dtype(entry.spec.dtype)
        total = adapter.sum_in_order(arrays, entry.home, working)
        with adapter.on(entry.home):
            weight = entry.weight.reshape(-1)
            gradient = total.reshape(-1)
            optimizer, state = self._begin_update(key, entry, weight)
            if optimizer is None:
                weight[...] = gradient
                return
            scratch = np.empty_like(gradient)
            wide = weight.astype(working, copy=False)
            optimizer.update(wide, gradient, state, entry.count, scratch)
            if wide is not weight:
                weight[...] = wide
