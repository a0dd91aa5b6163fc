"""The device store and the CuPy adapter on real GPUs; skipped where there are none."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

from kvstore import KVStore, create, gpu, optimizer
from kvstore.arrays import adapter_for, adapter_on
from kvstore.stores.local.device import DeviceKVStore

pytestmark = pytest.mark.gpu


def number_of_gpus() -> int:
    """Skips the test, with the reason, when CuPy or a GPU is missing."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        pytest.skip(f"CuPy cannot be imported: {error}")
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        pytest.skip(f"CuPy finds no usable GPU: {error}")


@pytest.fixture
def gpus() -> list[int]:
    """Four device numbers to deal arrays out to; the same one again where there are fewer."""
    count = number_of_gpus()
    if count == 0:
        pytest.skip("this machine has no GPU")
    return [number % count for number in range(4)]


def on_gpu(values: np.ndarray[Any, Any], device_id: int) -> Any:
    return adapter_on(gpu(device_id)).to_context(values, gpu(device_id))


def gradients(dtype: str, size: int = 100_003) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(9)
    lowest = -6 if dtype == "f2" else -4
    return [
        (random.normal(size=size) * 10.0 ** random.uniform(lowest, lowest + 9, size)).astype(dtype)
        for _ in range(4)
    ]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i4", "?"])
def test_sums_on_gpus_have_the_bits_of_the_host(gpus: list[int], dtype: str) -> None:
    values = gradients("f4" if dtype in ("i4", "?") else dtype)
    values = [value.astype(dtype) for value in values]
    stores: list[KVStore] = [create("local"), create("device")]
    for store in stores:
        store.init("w", np.zeros(values[0].shape, dtype))
    stores[0].push("w", values)
    stores[1].push("w", [on_gpu(value, number) for value, number in zip(values, gpus, strict=True)])
    outs = [np.zeros(values[0].shape, dtype) for _ in stores]
    for store, out in zip(stores, outs, strict=True):
        store.pull("w", out=out)
    assert outs[0].tobytes() == outs[1].tobytes()


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_updates_on_gpus_agree_with_the_host(gpus: list[int], name: str, dtype: str) -> None:
    # Not bit for bit: a GPU's compiler may fuse a multiplication and an addition.
    random = np.random.default_rng(2)
    values = [random.normal(size=5000).astype(dtype) for _ in range(4)]
    results = []
    for kind in ("local", "device"):
        store = create(kind)
        store.set_optimizer(optimizer.create(name, learning_rate=0.1, wd=1e-3, clip_gradient=2.0))
        store.init("w", np.ones(5000, dtype))
        for _ in range(3):
            pushed: list[Any] = list(values)
            if kind == "device":
                pushed = [on_gpu(value, number) for value, number in zip(values, gpus, strict=True)]
            store.push("w", pushed)
        results.append(np.zeros(5000))
        store.pull("w", out=results[-1])
    tolerance = {"f2": 2e-3, "f4": 1e-5, "f8": 1e-12}[dtype]
    np.testing.assert_allclose(results[1], results[0], rtol=tolerance, atol=tolerance)


def test_an_all_reduce_in_place_reaches_strided_arrays(gpus: list[int]) -> None:
    store = DeviceKVStore()
    backing = [on_gpu(np.ones((6, 4), np.float32), number) for number in gpus]
    parts = [array[::2, 1:3] for array in backing]
    store.init("w", np.zeros((3, 2), np.float32))
    store.pushpull("w", parts)
    expected = np.ones((6, 4), np.float32)
    expected[::2, 1:3] = len(gpus)
    for array in backing:
        np.testing.assert_array_equal(adapter_for(array).to_host(array), expected)


def test_a_caller_may_overwrite_its_gradients_from_another_stream(gpus: list[int]) -> None:
    cupy = importlib.import_module("cupy")
    store = DeviceKVStore()
    size = 8_000_000
    store.init("w", np.zeros(size, np.float32))
    arrays = [on_gpu(np.ones(size, np.float32), number) for number in gpus]
    for _ in range(10):
        store.push("w", arrays)
        for array, number in zip(arrays, gpus, strict=True):
            with cupy.cuda.Device(number), cupy.cuda.Stream(non_blocking=True) as stream:
                array.fill(-1)
                stream.synchronize()
        out = np.zeros(size, np.float32)
        store.pull("w", out=out)
        assert (out == len(arrays)).all()
        for array, number in zip(arrays, gpus, strict=True):
            with cupy.cuda.Device(number):
                array.fill(1)
                cupy.cuda.get_current_stream().synchronize()


def test_a_pulled_copy_lives_on_the_device_of_the_key(gpus: list[int]) -> None:
    store = DeviceKVStore()
    store.init("w", np.zeros((), np.float64))
    store.push("w", on_gpu(np.array(2.5), gpus[-1]))
    pulled = store.pull("w")
    assert adapter_for(pulled).context(pulled) == gpu(gpus[-1])
    assert float(pulled) == 2.5
