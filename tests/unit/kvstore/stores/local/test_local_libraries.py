"""Local and device stores with arrays of every library and dtype: NumPy's bits, whoever asks."""

from __future__ import annotations

import array
from typing import Any

import numpy as np
import pytest

from kvstore import KVStore, create, optimizer
from kvstore.arrays.dtypes import bfloat16
from kvstore.errors import ArgumentTypeError, ValueMismatchError

LENGTH = 1001
INTEGERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"]
DTYPES = ["?", *INTEGERS, "f2", "bfloat16", "f4", "f8", "c8", "c16"]


@pytest.fixture(params=["local", "device"])
def store(request: pytest.FixtureRequest) -> KVStore:
    return create(request.param)


def dtype_named(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
        return bfloat16()
    return np.dtype(name)


def contributions(name: str, count: int = 3) -> list[np.ndarray[Any, Any]]:
    """Values of which another order of additions, or another rounding, gives other bits."""
    dtype = dtype_named(name)
    random = np.random.default_rng(5)
    if dtype.kind == "b":
        return [random.random(LENGTH) < 0.3 for _ in range(count)]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return [
            random.integers(limits.min, limits.max, LENGTH, dtype, endpoint=True)
            for _ in range(count)
        ]
    return [
        (random.normal(size=LENGTH) * 10.0 ** random.uniform(-3, 3, LENGTH)).astype(dtype)
        for _ in range(count)
    ]


def naive_sum(values: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Whole arrays, one after the other; halves in float32."""
    dtype = values[0].dtype
    working = np.dtype("f4") if dtype.itemsize == 2 and dtype.kind in "fV" else dtype
    total = values[0].astype(working)
    with np.errstate(all="ignore"):
        for value in values[1:]:
            total = total + value.astype(working)
    return total.astype(dtype)


def to_torch(value: np.ndarray[Any, Any]) -> Any:
    torch = pytest.importorskip("torch")
    if value.dtype.kind == "V":
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(value.copy())


def to_jax(value: np.ndarray[Any, Any]) -> Any:
    return pytest.importorskip("jax").numpy.asarray(value)


def bytes_of(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    torch = pytest.importorskip("torch")
    plain = value.view(torch.int16) if value.dtype == torch.bfloat16 else value
    return bytes(plain.numpy().tobytes())


def test_sums_of_tensors_have_numpys_bits(store: KVStore) -> None:
    for name in DTYPES:
        values = contributions(name)
        store.init(name, to_torch(np.zeros_like(values[0])))
        store.push(name, [to_torch(value) for value in values])
        expected = naive_sum(values)
        assert store.pull(name).dtype == expected.dtype
        assert store.pull(name).tobytes() == expected.tobytes(), name
        out = to_torch(np.zeros_like(expected))
        store.pull(name, out=out)
        assert bytes_of(out) == expected.tobytes(), name


@pytest.mark.parametrize("name", DTYPES)
def test_an_all_reduce_of_tensors_in_place_gives_each_the_sum(store: KVStore, name: str) -> None:
    values = contributions(name, count=4)
    tensors = [to_torch(value) for value in values]
    store.init("w", np.zeros_like(values[0]))
    store.pushpull("w", tensors)
    expected = naive_sum(values).tobytes()
    assert {bytes_of(tensor) for tensor in tensors} == {expected}


@pytest.mark.parametrize("name", ["?", "i1", "u2", "i4", "f2", "bfloat16", "f4", "c8"])
def test_libraries_may_be_mixed_in_one_list_of_devices(store: KVStore, name: str) -> None:
    values = contributions(name, count=4)
    mixed = [values[0], to_torch(values[1]), to_jax(values[2]), values[3]]
    store.init("w", to_jax(np.zeros_like(values[0])))
    outs = [to_torch(np.zeros_like(values[0])), np.zeros_like(values[0])]
    store.pushpull("w", mixed, out=outs)
    assert {bytes_of(out) for out in outs} == {naive_sum(values).tobytes()}


def test_buffers_and_arrays_may_be_mixed_too(store: KVStore) -> None:
    store.init("w", array.array("d", [0, 0, 0]))
    out = array.array("d", [0, 0, 0])
    store.pushpull("w", [array.array("d", [1, 2, 3]), np.array([0.5, 0.5, 0.5])], out=out)
    assert out.tolist() == [1.5, 2.5, 3.5]


@pytest.mark.parametrize("name", ["f2", "bfloat16", "f4", "f8"])
@pytest.mark.parametrize("chosen", ["sgd", "adam"])
def test_training_tensors_gives_the_bits_of_training_arrays(
    store: KVStore, name: str, chosen: str
) -> None:
    gradients = contributions(name)
    weight = np.linspace(-1, 1, LENGTH).astype(gradients[0].dtype)
    reference = create("local")
    pulled = [np.zeros_like(weight), to_torch(weight)]
    for each, convert, out in ((reference, np.array, pulled[0]), (store, to_torch, pulled[1])):
        each.set_optimizer(optimizer.create(chosen, learning_rate=0.1, wd=1e-3))
        each.init("w", convert(weight))
        for _ in range(3):
            each.push("w", [convert(gradient) for gradient in gradients])
        each.pull("w", out=out)
    assert bytes_of(pulled[1]) == pulled[0].tobytes()
    assert pulled[0].tobytes() != weight.tobytes()


def test_a_bfloat16_weight_is_updated_in_float32_and_rounded_once(store: KVStore) -> None:
    dtype = dtype_named("bfloat16")
    store.set_optimizer(optimizer.create("sgd", learning_rate=0.5))
    store.init("w", np.full(3, 256, dtype))
    # In bfloat16, 256 - 1/2 is 256 again, so four of them one by one would change nothing.
    store.push("w", [np.ones(3, dtype)] * 4)
    assert store.pull("w").astype("f4").tolist() == [254, 254, 254]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
@pytest.mark.parametrize("name", ["?", "u2", "bfloat16", "f8"])
def test_scalars_and_empty_arrays_keep_their_shape(
    store: KVStore, shape: tuple[int, ...], name: str
) -> None:
    ones = np.ones(shape, dtype_named(name))
    store.init("w", to_torch(ones))
    store.push("w", [to_torch(ones), ones])
    pulled, out = store.pull("w"), to_torch(np.zeros_like(ones))
    store.pull("w", out=out)
    assert pulled.shape == tuple(out.shape) == shape
    assert bytes_of(out) == pulled.tobytes() == naive_sum([ones, ones]).tobytes()


def test_a_pull_casts_to_the_dtype_of_the_tensor(store: KVStore) -> None:
    torch = pytest.importorskip("torch")
    store.init("w", np.array([1.0, 2.5, -3.0], np.float64))
    outs = [torch.zeros(3, dtype=kind) for kind in (torch.float16, torch.bfloat16, torch.float32)]
    store.pull("w", out=outs)
    assert [out.tolist() for out in outs] == [[1, 2.5, -3]] * 3
    with pytest.raises(
        ValueMismatchError, match="has dtype float64, and the array to fill has int32"
    ):
        store.pull("w", out=torch.zeros(3, dtype=torch.int32))


def test_a_pulled_parameter_still_trains(store: KVStore) -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.zeros(3))
    store.init("w", parameter)
    store.push("w", torch.tensor([1.0, 2.0, 3.0]))
    store.pull("w", out=parameter)
    (parameter * parameter).sum().backward()
    assert parameter.grad.tolist() == [2, 4, 6]
    store.push("w", parameter.grad)
    assert store.pull("w").tolist() == [2, 4, 6]


def test_what_was_pushed_stays_the_callers(store: KVStore) -> None:
    torch = pytest.importorskip("torch")
    value = torch.ones(3)
    store.init("w", value)
    value.fill_(5)
    assert store.pull("w").tolist() == [1, 1, 1]
    store.push("w", value)
    value.fill_(7)
    assert store.pull("w").tolist() == [5, 5, 5]


def test_a_jax_array_as_out_is_refused_with_advice_and_nothing_is_pushed(store: KVStore) -> None:
    ones = to_jax(np.ones(3, np.float32))
    store.init("w", ones)
    with pytest.raises(ValueMismatchError, match=r"a JAX array is immutable; pull without out"):
        store.pull("w", out=ones)
    with pytest.raises(ValueMismatchError, match=r"or pass a NumPy array as out"):
        store.pushpull("w", [ones, ones])
    assert store.pull("w").tolist() == [1, 1, 1]


def test_an_array_of_another_dtype_is_refused_with_both(store: KVStore) -> None:
    torch = pytest.importorskip("torch")
    store.init("w", torch.zeros(3))
    with pytest.raises(ValueMismatchError, match=r"float32.*float64"):
        store.push("w", torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueMismatchError, match=r"\(3,\).*\(3, 3\)"):
        store.push("w", torch.eye(3).to_sparse())


def test_an_optimizer_refuses_integer_tensors(store: KVStore) -> None:
    torch = pytest.importorskip("torch")
    store.set_optimizer(optimizer.create("sgd"))
    store.init("w", torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ArgumentTypeError, match="needs float weights"):
        store.push("w", torch.ones(3, dtype=torch.int64))
