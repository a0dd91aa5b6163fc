"""PyTorch's and JAX's arrays on real GPUs; skipped where a GPU, CuPy or the library is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore import KVStore, create, gpu, optimizer
from kvstore.arrays import adapter_for, adapter_on
from kvstore.stores.local.device import DeviceKVStore

pytestmark = pytest.mark.gpu

NAMES = ["bool", "uint8", "int8", "int32", "int64", "float16", "float32", "float64", "complex64"]


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("PyTorch finds no usable GPU")
    return module


@pytest.fixture
def jax() -> Any:
    module = pytest.importorskip("jax")
    if module.default_backend() != "gpu":
        pytest.skip("JAX finds no usable GPU")
    return module


def contributions(name: str) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(3)
    wide = [random.normal(size=10_007) * 10.0 ** random.uniform(-3, 3, 10_007) for _ in range(3)]
    with np.errstate(all="ignore"):  # most of these leave the range of the small integers
        return [value.astype(name) for value in wide]


@pytest.mark.parametrize("name", NAMES)
def test_a_cuda_tensor_is_seen_by_cupy_in_its_own_memory(cupy: Any, torch: Any, name: str) -> None:
    values = np.arange(6).reshape(2, 3).astype(name)
    tensor = torch.from_numpy(values).cuda()
    adapter = adapter_for(tensor)
    assert adapter.dtype(tensor) == values.dtype
    assert adapter.context(tensor) == gpu(0)
    view = adapter.view(tensor)
    assert isinstance(view, cupy.ndarray)
    assert view.data.ptr == tensor.data_ptr()
    assert adapter.memory(tensor) is None
    np.testing.assert_array_equal(adapter.to_host(tensor), values, strict=True)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["local", "device"])
def test_sums_of_cuda_tensors_have_the_bits_of_the_host(
    cupy: Any, torch: Any, kind: str, name: str
) -> None:
    values = contributions(name)
    stores = [create("local"), create(kind)]
    for store in stores:
        store.init("w", np.zeros_like(values[0]))
    stores[0].push("w", values)
    # The middle one is on the host: libraries and devices may be mixed.
    tensors = [torch.from_numpy(value.copy()) for value in values]
    stores[1].push("w", [tensors[0].cuda(), tensors[1], tensors[2].cuda()])
    out = torch.zeros_like(tensors[0]).cuda()
    stores[1].pull("w", out=out)
    assert out.cpu().numpy().tobytes() == stores[0].pull("w").tobytes()


def test_bfloat16_on_a_gpu_is_added_on_the_host_in_float32(torch: Any) -> None:
    pytest.importorskip("ml_dtypes")
    store = DeviceKVStore()
    tensors = [torch.full((5,), value, dtype=torch.bfloat16).cuda() for value in (256, 1, 1)]
    store.init("w", torch.zeros(5, dtype=torch.bfloat16))
    store.pushpull("w", tensors)
    assert {tuple(tensor.tolist()) for tensor in tensors} == {(258.0,) * 5}


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_strided_tensors_are_filled_where_they_lie_and_autograd_notices(
    cupy: Any, torch: Any, name: str
) -> None:
    store = create("device")
    backing = torch.zeros(6, 4, dtype=getattr(torch, name), device="cuda")
    store.init("w", np.arange(6, dtype=np.float32).reshape(3, 2))
    store.push("w", torch.ones(3, 2, device="cuda"))
    store.pull("w", out=backing[::2, 1:3])
    expected = np.zeros((6, 4))
    expected[::2, 1:3] = 1
    np.testing.assert_array_equal(backing.float().cpu().numpy(), expected)

    parameter = torch.nn.Parameter(torch.full((3, 2), 3.0, device="cuda"))
    loss = (parameter * parameter).sum()
    store.pull("w", out=parameter)
    assert parameter.tolist() == [[1, 1], [1, 1], [1, 1]]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_conjugated_tensors_are_resolved_and_filled(cupy: Any, torch: Any) -> None:
    base = torch.full((3,), 1 + 2j, dtype=torch.complex64, device="cuda")
    store = create("device")
    store.init("w", np.zeros(3, np.complex64))
    store.push("w", base.conj())
    assert adapter_for(store.pull("w")).to_host(store.pull("w")).tolist() == [1 - 2j] * 3
    lazy = torch.zeros_like(base).conj()
    store.pull("w", out=lazy)
    assert lazy.tolist() == [1 - 2j] * 3


def test_a_push_waits_for_what_is_queued_on_pytorchs_stream(cupy: Any, torch: Any) -> None:
    store = DeviceKVStore()
    size = 4_000_000
    store.init("w", np.zeros(size, np.float32))
    factor = torch.eye(2048, device="cuda")
    stream = torch.cuda.Stream()
    for step in range(1, 6):
        with torch.cuda.stream(stream):
            busy = factor
            for _ in range(20):
                busy = busy @ factor
            value = torch.full((size,), float(step), device="cuda") * busy[0, 0]
            store.push("w", [value, value])
            # When push has returned, the tensor is the caller's again.
            value.fill_(-1)
            out = torch.empty(size, device="cuda")
            store.pull("w", out=out)
            out.mul_(2)
        stream.synchronize()
        assert (out == 4 * step).all()


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_training_cuda_tensors_agrees_with_the_host(cupy: Any, torch: Any, name: str) -> None:
    gradients = [value.astype(np.float32) for value in contributions("float32")]
    results = []
    for kind in ("local", "device"):
        store: KVStore = create(kind)
        store.set_optimizer(optimizer.create(name, learning_rate=0.1, clip_gradient=2.0))
        store.init("w", np.ones_like(gradients[0]))
        for _ in range(3):
            pushed: list[Any] = list(gradients)
            if kind == "device":
                pushed = [torch.from_numpy(value.copy()).cuda() for value in gradients]
            store.push("w", pushed)
        results.append(np.zeros_like(gradients[0]))
        store.pull("w", out=results[-1])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bool", "int32", "float16", "float32", "complex64"])
def test_jax_arrays_on_a_gpu_are_added_there(cupy: Any, jax: Any, name: str) -> None:
    values = contributions(name)
    arrays = [jax.numpy.asarray(value) for value in values]
    adapter = adapter_for(arrays[0])
    assert adapter.context(arrays[0]) == gpu(0)
    view = adapter.view(arrays[0])
    assert view.data.ptr == arrays[0].unsafe_buffer_pointer()
    host = adapter_on(gpu(0)).sum_in_order(values, gpu(0), values[0].dtype)
    there = adapter.sum_in_order(arrays, gpu(0), values[0].dtype)
    assert there.get().tobytes() == host.get().tobytes()
    store = create("device")
    store.init("w", np.zeros_like(values[0]))
    store.push("w", arrays)
    pulled = store.pull("w")
    assert adapter_for(pulled).context(pulled) == gpu(0)
    assert pulled.get().tobytes() == host.get().tobytes()


def test_jax_bfloat16_on_a_gpu_reaches_the_host(jax: Any) -> None:
    array = jax.numpy.full((3,), 1.5, "bfloat16")
    host = adapter_for(array).to_host(array)
    assert host.astype(np.float32).tolist() == [1.5] * 3
