"""The device store with arrays on the host; what needs GPUs is in ``tests/gpu``."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore import Context, create, optimizer
from kvstore.device import DeviceKVStore


def gradients(dtype: str) -> list[np.ndarray]:
    random = np.random.default_rng(9)
    lowest = -6 if dtype == "f2" else -4
    return [
        (random.normal(size=700) * 10.0 ** random.uniform(lowest, lowest + 9, 700)).astype(dtype)
        for _ in range(5)
    ]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "?"])
def test_sums_of_host_arrays_have_the_bits_of_the_local_store(dtype: str) -> None:
    values = [value.astype(dtype) for value in gradients("f4" if dtype in "i4?" else dtype)]
    results = []
    for name in ("local", "device"):
        store = create(name)
        store.init("w", np.zeros(700, dtype))
        store.push("w", values)
        results.append(store.pull("w").tobytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_updates_by_host_arrays_have_the_bits_of_the_local_store(name: str) -> None:
    results = []
    for kind in ("local", "device"):
        store = create(kind)
        store.set_optimizer(optimizer.create(name, learning_rate=0.1, wd=1e-3))
        store.init("w", np.ones(700, np.float32))
        for _ in range(4):
            store.push("w", gradients("f4"))
        results.append(store.pull("w").tobytes())
    assert results[0] == results[1]


def test_a_key_stays_on_the_host_while_only_host_arrays_are_pushed() -> None:
    store = DeviceKVStore()
    store.init("w", np.zeros(3))
    store.push("w", [np.ones(3), np.ones(3)])
    assert [entry.home for entry in store._entries.values()] == [Context("cpu", 0)]
