"""Fused sums, updates and copies on real GPUs, bit by bit against the host; skipped without one."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import pytest

from kvstore import create, gpu, optimizer
from kvstore.arrays.gpu import sums as cuda
from kvstore.arrays.gpu.pipeline import BufferPool
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.schedule import FactorScheduler
from kvstore.stores.arguments import spec_of
from kvstore.stores.dist.gpu_sums import sums_of
from kvstore.stores.local.device import DeviceKVStore, kernel_for
from kvstore.stores.local.store import LocalKVStore

pytestmark = pytest.mark.gpu

SHAPES = [(), (0,), (7,), (64, 3, 7, 7), (4096,), (4097,), (1000, 517), *[(5,)] * 150]
"""Empty, scalar, odd, at the borders of a block, and more keys than a launch has rows."""

KEYS = [f"{index:03d}" for index in range(len(SHAPES))]


def values(dtype: str, seed: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [
        np.asarray(rng.normal(size=shape) * 10.0 ** rng.uniform(-3, 2, shape)).astype(dtype)
        for shape in SHAPES
    ]


def gradients(dtype: str, num_copies: int, step: int) -> list[list[np.ndarray[Any, Any]]]:
    copies = [values(dtype, 100 * step + number) for number in range(num_copies)]
    return [list(row) for row in zip(*copies, strict=True)]


def trained(
    store: LocalKVStore, dtype: str, num_copies: int, used: Optimizer | None, place: Any
) -> list[bytes]:
    if used is not None:
        store.set_optimizer(used)
    store.init(KEYS, values(dtype, 1))
    for step in range(1, 4):
        rows = gradients(dtype, num_copies, step)
        store.push(
            KEYS, [[place(array, number) for number, array in enumerate(row)] for row in rows]
        )
    outs = [np.zeros(shape, dtype) for shape in SHAPES]
    store.pull(KEYS, out=outs)
    return [out.tobytes() for out in outs]


def compare(cupy: Any, dtype: str, num_copies: int, used: Optimizer | None) -> None:
    count = cupy.cuda.runtime.getDeviceCount()

    def on_gpus(array: np.ndarray[Any, Any], number: int) -> Any:
        with cupy.cuda.Device(number % count):
            return cupy.asarray(array)

    expected = trained(LocalKVStore(), dtype, num_copies, used, lambda array, _: array)
    assert trained(DeviceKVStore(), dtype, num_copies, used, on_gpus) == expected


FULL = {"learning_rate": 0.1, "wd": 1e-2, "rescale_grad": 0.37, "clip_gradient": 5.0}


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize("num_copies", [1, 2, 4, 17])
@pytest.mark.parametrize(
    "used",
    [
        None,
        optimizer.create("sgd", learning_rate=0.1),
        optimizer.create("sgd", **FULL),
        optimizer.create("sgd", momentum=0.9, **FULL),
    ],
    ids=["sum", "sgd", "sgd-full", "momentum"],
)
def test_fused_updates_have_the_bits_of_the_host(
    cupy: Any, dtype: str, num_copies: int, used: Optimizer | None
) -> None:
    compare(cupy, dtype, num_copies, used)


@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "i8", "?"])
def test_sums_of_integers_wrap_as_on_the_host(cupy: Any, dtype: str) -> None:
    with np.errstate(all="ignore"):
        compare(cupy, dtype, 3, None)


def test_schedules_and_multipliers_of_keys_are_kept(cupy: Any) -> None:
    used = optimizer.create(
        "sgd",
        learning_rate=0.5,
        momentum=0.9,
        wd=1e-3,
        lr_scheduler=FactorScheduler(step=1, factor=0.5),
        lr_mult={KEYS[3]: 0.1, KEYS[10]: 3.0},
        wd_mult={KEYS[4]: 0.0},
    )
    compare(cupy, "f4", 2, used)


def test_values_of_other_gpus_pass_through_slots_without_a_change(
    cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On one GPU every second value takes the way of another GPU's; small slots are used often.
    monkeypatch.setattr(cuda, "BLOCK_BYTES", 1 << 14)

    def every_second(devices: np.ndarray[Any, Any], home: int) -> np.ndarray[Any, Any]:
        chosen: np.ndarray[Any, Any] = np.indices(devices.shape).sum(axis=0) % 2 == 1
        chosen |= devices != home
        return chosen

    monkeypatch.setattr(cuda, "_are_elsewhere", every_second)
    compare(cupy, "f4", 4, optimizer.create("sgd", momentum=0.9, learning_rate=0.1))
    compare(cupy, "f2", 3, optimizer.create("sgd", momentum=0.9, learning_rate=0.1))


def test_strided_and_transposed_gradients_are_read_in_their_own_order(cupy: Any) -> None:
    backing = cupy.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (backing[::2, 1:4], backing.T, backing[:, ::-1]):
        store = DeviceKVStore()
        store.init("w", np.zeros(view.shape, np.float32))
        store.push("w", [view, view])
        np.testing.assert_array_equal(store.pull("w").get(), 2 * view.get())


def pushed(cupy: Any) -> DeviceKVStore:
    store = DeviceKVStore()
    store.init(KEYS, values("f4", 0))
    store.push(KEYS, [cupy.asarray(array) for array in values("f4", 1)])
    return store


def test_a_pull_fills_arrays_of_every_kind(cupy: Any) -> None:
    store = pushed(cupy)
    last = cupy.cuda.runtime.getDeviceCount() - 1
    outs: list[list[Any]] = []
    for shape in SHAPES:
        with cupy.cuda.Device(last):
            far = cupy.full(shape, -1, np.float32)
        outs.append([cupy.full(shape, -1, np.float32), far, np.full(shape, -1, np.float32)])
    store.pull(KEYS, out=outs)
    for row, expected in zip(outs, values("f4", 1), strict=True):
        for out in row:
            got = out if isinstance(out, np.ndarray) else out.get()
            assert got.tobytes() == expected.tobytes()
    # Another dtype, and strides.
    wide = [cupy.zeros(shape, np.float64) for shape in SHAPES]
    store.pull(KEYS, out=wide)
    backing = cupy.zeros((1000, 2 * 517), np.float32)
    store.pull(KEYS[6], out=backing[:, ::2])
    assert [array.get().astype("f4").tobytes() for array in wide] == [
        array.tobytes() for array in values("f4", 1)
    ]
    np.testing.assert_array_equal(backing.get()[:, ::2], values("f4", 1)[6])
    assert not backing.get()[:, 1::2].any()


def test_of_two_keys_for_one_array_the_later_wins(cupy: Any) -> None:
    store = DeviceKVStore()
    store.init(["a", "b"], [np.zeros(70_000, np.float32)] * 2)
    store.push(["a", "b"], [cupy.full(70_000, number, np.float32) for number in (1, 2)])
    out = cupy.zeros(70_000, np.float32)
    for _ in range(20):
        out.fill(0)
        store.pull(["a", "b"], out=[out, out])
        assert (out == 2).all()


def test_a_first_pushpull_from_a_gpu_into_arrays_of_the_host(cupy: Any) -> None:
    store = create("device")
    store.init(KEYS, values("f4", 0))
    outs = [np.zeros(shape, np.float32) for shape in SHAPES]
    store.pushpull(KEYS, [cupy.asarray(array) for array in values("f4", 1)], out=outs)
    assert [out.tobytes() for out in outs] == [array.tobytes() for array in values("f4", 1)]


@pytest.mark.parametrize("slots", ["in", "out"])
def test_work_on_the_callers_stream_comes_first(cupy: Any, slots: str) -> None:
    size = 1 << 20
    store = DeviceKVStore()
    store.init("w", np.zeros(size, np.float32))
    factor = cupy.eye(1024, dtype=np.float32)
    for step in range(1, 5):
        with cupy.cuda.Stream(non_blocking=True):
            busy = factor
            for _ in range(20):
                busy = busy @ factor
            gradient = cupy.full(size, step, np.float32) * busy[0, 0]
            store.push("w", [gradient, gradient])
            gradient.fill(-1)  # the caller's again
            assert (store.pull("w") == 2 * step).all()


def rows_on_gpu(cupy: Any, dtype: str, num_copies: int) -> tuple[list[list[Any]], list[bytes]]:
    rows = gradients(dtype, num_copies, 5)
    store = LocalKVStore()
    store.init(KEYS, values(dtype, 0))
    store.push(KEYS, rows)
    expected = [store.pull(key).tobytes() for key in KEYS]
    return [[cupy.asarray(array) for array in row] for row in rows], expected


@pytest.mark.parametrize("is_pinned", [True, False], ids=["pinned", "staged"])
@pytest.mark.parametrize("block_bytes", [1 << 14, 8 << 20])
@pytest.mark.parametrize(("dtype", "num_copies"), [("f4", 1), ("f4", 4), ("f2", 3), ("i8", 2)])
def test_sums_reach_the_host_with_its_bits(
    cupy: Any,
    monkeypatch: pytest.MonkeyPatch,
    is_pinned: bool,
    block_bytes: int,
    dtype: str,
    num_copies: int,
) -> None:
    monkeypatch.setattr(cuda, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(cuda, "_pinned", BufferPool(cuda._new_pinned_block, most_kept=9))
    rows, expected = rows_on_gpu(cupy, dtype, num_copies)

    def buffer(nbytes: int) -> Any:
        memory = cupy.cuda.alloc_pinned_memory(nbytes) if is_pinned else bytearray(nbytes)
        return np.frombuffer(memory, np.uint8, nbytes)

    specs = [spec_of(row[0]) for row in rows]
    for _ in range(3):
        sums = sums_of(rows, specs, buffer, lambda memory: is_pinned)
        assert [memory.tobytes() for memory in sums.memories] == expected
        assert sums.are_ours


def test_sums_of_other_dtypes_and_of_the_host_keep_their_places(cupy: Any) -> None:
    rows = [
        [cupy.ones(3, bool), cupy.zeros(3, bool)],
        [np.ones(2), np.ones(2)],
        [cupy.full(4, 2.0), cupy.full(4, 3.0)],
        [np.arange(3.0)],
    ]
    specs = [spec_of(row[0]) for row in rows]
    sums = sums_of(rows, specs, lambda nbytes: np.empty(nbytes, np.uint8), lambda memory: False)
    found = [
        memory.view(spec.dtype).tolist() for memory, spec in zip(sums.memories, specs, strict=True)
    ]
    assert found == [[True] * 3, [2.0, 2.0], [5.0] * 4, [0.0, 1.0, 2.0]]
    assert not sums.are_ours


class Mapping:
    """Memory such as a segment's, which others could map too."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


def test_mapped_memory_is_locked_once_and_unlocked_with_its_owner(cupy: Any) -> None:
    owner = Mapping(1 << 20)
    memory = owner.memory
    address = memory.ctypes.data
    if not cuda.lock_pages(address, len(memory), owner):
        pytest.skip("this system locks no mapped memory for GPUs")
    assert not cuda.lock_pages(address, len(memory), owner)
    array = cupy.arange(1 << 18, dtype=np.int32)
    kernel = kernel_for(array.dtype, 1, None)
    assert kernel is not None
    cuda.sum_to_host(0, kernel, [[array]], memory, lambda _: True)
    assert memory.tobytes() == array.get().tobytes()
    del owner
    again = Mapping(0x1000)
    assert cuda.lock_pages(address, len(memory), again)


def test_values_reach_several_gpus(cupy: Any) -> None:
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("needs two GPUs; with three NCCL passes the values on")
    store = pushed(cupy)
    outs: list[list[Any]] = [[] for _ in SHAPES]
    for number in range(count):
        with cupy.cuda.Device(number):
            for row, shape in zip(outs, SHAPES, strict=True):
                row.append(cupy.zeros(shape, np.float32))
    for _ in range(3):
        store.pull(KEYS, out=outs)
        for row, expected in zip(outs, values("f4", 1), strict=True):
            assert {out.get().tobytes() for out in row} == {expected.tobytes()}
    assert store.pull(KEYS[0]).device.id == gpu(0).device_id
