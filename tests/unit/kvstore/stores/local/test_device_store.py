"""The device store with arrays on the host; what needs GPUs is in ``tests/gpu``."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore import Context, create, optimizer
from kvstore.arrays import adapter_on
from kvstore.stores.local import device
from kvstore.stores.local import values as local_values
from kvstore.stores.local.device import DeviceKVStore


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
    assert [entry.home for entry in store._values.entries.values()] == [Context("cpu", 0)]


class OnGpu(np.ndarray):
    """An array that says it lives on a GPU, on a machine without one."""


def on_gpu(values: np.ndarray) -> np.ndarray:
    return values.view(OnGpu)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU 0 is the host's memory: what is tested is who does what, not where."""
    host = adapter_on(Context("cpu", 0))
    place = {OnGpu: Context("gpu", 0)}
    monkeypatch.setattr(
        type(host), "context", lambda _, array: place.get(type(array), Context("cpu", 0))
    )
    monkeypatch.setattr(device, "adapter_on", lambda context: host)
    monkeypatch.setattr(local_values, "adapter_on", lambda context: host)


@pytest.mark.usefixtures("pretended_gpu")
def test_a_key_moves_to_the_gpu_of_its_values_and_the_others_stay() -> None:
    store = DeviceKVStore()
    store.set_optimizer(optimizer.create("sgd", learning_rate=1.0, momentum=0.5))
    keys, zeros, ones = ["a", "b", "c"], np.zeros(4), np.ones(4)
    store.init(keys, [zeros] * 3)
    store.push(keys, [ones] * 3)  # momentum -1
    store.push(keys, [ones, [on_gpu(ones), on_gpu(ones)], ones])  # -1.5, -2.5, -1.5
    assert [entry.home.device_type for entry in store._values.entries.values()] == [
        "cpu",
        "gpu",
        "cpu",
    ]
    assert store._values.entries["b"].shelf is None
    outs = [np.zeros(4) for _ in keys]
    store.pushpull(keys, [ones] * 3, out=outs)  # -1.75, -2.25, -1.75
    np.testing.assert_array_equal([out[0] for out in outs], [-4.25, -5.75, -4.25])
    values, versions = store.pull(keys, with_version=True)
    np.testing.assert_array_equal(values, outs)
    assert versions == [3, 3, 3]
    assert [entry.count for entry in store._values.entries.values()] == [3, 3, 3]


@pytest.mark.usefixtures("pretended_gpu")
def test_without_an_optimizer_a_key_on_a_gpu_is_set_to_the_sum() -> None:
    store = DeviceKVStore()
    store.init("w", np.zeros((2, 2), np.float16))
    ones = np.ones((2, 2), np.float16)
    store.push("w", [on_gpu(ones), ones])
    np.testing.assert_array_equal(store.pull("w"), ones + ones)
