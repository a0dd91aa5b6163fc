"""The device store on GPUs, through the stand-in for CuPy, which refuses to mix devices."""

from __future__ import annotations

from typing import Any

import fake_cupy
import numpy as np
import pytest

from kvstore import Context, create, gpu, optimizer
from kvstore.device import DeviceKVStore

pytestmark = pytest.mark.usefixtures("_cupy")


@pytest.fixture
def _cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cupy.install(monkeypatch)


def gradients(dtype: str = "f4", count: int = 4) -> list[Any]:
    random = np.random.default_rng(9)
    lowest = -6 if dtype == "f2" else -4
    return [
        (random.normal(size=(30, 7)) * 10.0 ** random.uniform(lowest, lowest + 9, (30, 7))).astype(
            dtype
        )
        for _ in range(count)
    ]


def homes(store: DeviceKVStore) -> dict[Any, Context]:
    return {key: entry.home for key, entry in store._entries.items()}


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("name", [None, "sgd", "adam"])
def test_gpus_give_the_bits_of_the_host(dtype: str, name: str | None) -> None:
    stores = create("local"), create("device")
    results = []
    for store, number_of_gpus in zip(stores, (0, 3), strict=True):
        if name is not None:
            numbers = {"momentum": 0.9} if name == "sgd" else {}
            store.set_optimizer(optimizer.create(name, learning_rate=0.1, wd=1e-3, **numbers))
        store.init("w", np.ones((30, 7), dtype))
        for _ in range(3):
            values = gradients(dtype)
            if number_of_gpus:
                values = [
                    fake_cupy.on_gpu(value, index % number_of_gpus)
                    for index, value in enumerate(values)
                ]
            store.push("w", values)
        out = np.zeros((30, 7), dtype)
        store.pull("w", out=out)
        results.append(out.tobytes())
    assert results[0] == results[1]


def test_keys_go_to_the_gpu_that_holds_the_fewest_bytes() -> None:
    store = DeviceKVStore()
    sizes = {"a": 10, "b": 6, "c": 3, "d": 2, "e": 100}
    store.init(list(sizes), [np.zeros(size, np.float32) for size in sizes.values()])
    for key, size in sizes.items():
        store.push(key, [fake_cupy.on_gpu(np.ones(size, np.float32), index) for index in (1, 0)])
    assert homes(store) == {"a": gpu(1), "b": gpu(0), "c": gpu(0), "d": gpu(0), "e": gpu(1)}


def test_a_key_stays_where_it_is() -> None:
    store = DeviceKVStore()
    store.init("w", np.zeros(3, np.float32))
    store.push("w", np.ones(3, np.float32))
    assert homes(store) == {"w": Context("cpu", 0)}
    store.push("w", fake_cupy.on_gpu(np.ones(3, np.float32), 2))
    store.push("w", [fake_cupy.on_gpu(np.ones(3, np.float32), 0), np.ones(3, np.float32)])
    assert homes(store) == {"w": gpu(2)}
    pulled = store.pull("w")
    assert (pulled.device.id, pulled.values.tolist()) == (2, [2.0, 2.0, 2.0])


def test_momentum_moves_with_the_key() -> None:
    store = DeviceKVStore()
    store.set_optimizer(optimizer.create("sgd", learning_rate=1.0, momentum=0.5))
    store.init("w", np.zeros(3, np.float32))
    store.push("w", np.full(3, -4, np.float32))  # momentum 4
    store.push("w", fake_cupy.on_gpu(np.zeros(3, np.float32), 1))  # momentum 2
    store.set_optimizer(optimizer.create("sgd", learning_rate=2.0, momentum=0.5))
    store.push("w", fake_cupy.on_gpu(np.zeros(3, np.float32), 1))  # momentum 1
    assert store.pull("w").values.tolist() == [7.0, 7.0, 7.0]
    store.set_optimizer(optimizer.create("adam", learning_rate=0.5, epsilon=0.0))
    store.push("w", fake_cupy.on_gpu(np.ones(3, np.float32), 1))
    np.testing.assert_allclose(store.pull("w").values, 6.5)


def test_values_are_pulled_to_every_device_and_dtype() -> None:
    store = DeviceKVStore()
    store.init("w", np.zeros((2, 2), np.float32))
    store.push("w", fake_cupy.on_gpu(np.full((2, 2), 3, np.float32), 1))
    backing = fake_cupy.on_gpu(np.zeros((4, 2), np.float16), 2)
    outs: list[Any] = [
        np.zeros((2, 2)),
        fake_cupy.on_gpu(np.zeros((2, 2), np.float32), 0),
        backing[::2],
    ]
    store.pull("w", out=outs)
    assert outs[0].tolist() == outs[1].values.tolist() == [[3, 3], [3, 3]]
    assert backing.values.tolist() == [[3, 3], [0, 0], [3, 3], [0, 0]]


def test_an_all_reduce_over_gpus_happens_in_place() -> None:
    store = DeviceKVStore()
    values = [fake_cupy.on_gpu(np.full(3, index + 1, np.float32), index) for index in range(3)]
    store.init("w", values[0])
    store.pushpull("w", values)
    assert [value.values.tolist() for value in values] == [[6.0] * 3] * 3
    values[1].values[:] = 99
    assert store.pull("w").values.tolist() == [6.0] * 3


def test_scalars_and_empty_arrays_live_on_gpus_too() -> None:
    store = DeviceKVStore()
    store.init(["scalar", "empty"], [np.array(1.0), np.zeros((0, 3))])
    store.push(
        ["scalar", "empty"],
        [
            [fake_cupy.on_gpu(2.0, 0), fake_cupy.on_gpu(3.0, 1)],
            fake_cupy.on_gpu(np.zeros((0, 3)), 0),
        ],
    )
    scalar, empty = store.pull(["scalar", "empty"])
    assert scalar.values == 5.0
    assert empty.shape == (0, 3)


def test_a_local_store_takes_gpu_arrays_and_works_on_the_host() -> None:
    store = create("local")
    store.init("w", fake_cupy.on_gpu(np.zeros(3, np.float32), 1))
    store.push("w", [fake_cupy.on_gpu(np.ones(3, np.float32), index) for index in range(2)])
    out = fake_cupy.on_gpu(np.zeros(3, np.float32), 1)
    store.pull("w", out=out)
    assert out.values.tolist() == [2.0] * 3
    assert isinstance(store.pull("w"), np.ndarray)
