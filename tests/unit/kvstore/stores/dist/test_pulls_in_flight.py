"""Values that arrive for a pull land in the first array's own memory where that is fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.arrays.dtypes import bfloat16
from kvstore.arrays.keys import KeySpec
from kvstore.protocol.requests import dtype_of, dtype_text
from kvstore.stores.dist.in_flight import Destination

SPEC_NAMES = ["<f4", "|b1", "<i8", "<c16", "bfloat16"]


def spec_like(values: np.ndarray[Any, Any]) -> KeySpec:
    return KeySpec(values.shape, values.dtype)


def arrive(landing: Destination, *values: np.ndarray[Any, Any]) -> None:
    """What the transport does: bytes into the memory of each key, then the end."""
    for memory, value in zip(landing.memories, values, strict=True):
        memory[...] = np.frombuffer(value.tobytes(), np.uint8)
    landing.finish()


def a_tensor(values: np.ndarray[Any, Any]) -> Any:
    torch = pytest.importorskip("torch")
    if values.dtype.kind == "V":
        return torch.from_numpy(values.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(values.copy())


def as_numpy(tensor: Any) -> np.ndarray[Any, Any]:
    torch = pytest.importorskip("torch")
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray[Any, Any] = tensor.view(torch.int16).numpy()
        return bits.view(bfloat16())
    array: np.ndarray[Any, Any] = tensor.numpy()
    return array


@pytest.mark.parametrize("name", SPEC_NAMES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 4)])
def test_values_land_in_a_tensors_memory_without_a_copy(name: str, shape: tuple[int, ...]) -> None:
    if name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    values = np.full(shape, 3).astype(dtype_of(name))
    assert dtype_text(values.dtype) == name
    tensor = a_tensor(np.zeros_like(values))
    landing = Destination.of([[tensor]], [spec_like(values)])
    assert values.size == 0 or landing.memories[0].ctypes.data == tensor.data_ptr()
    arrive(landing, values)
    np.testing.assert_array_equal(as_numpy(tensor), values, strict=True)


def test_the_end_of_a_landing_counts_as_a_write_to_the_tensor() -> None:
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(3))
    loss = (parameter * parameter).sum()
    arrive(
        Destination.of([[parameter]], [spec_like(np.zeros(3, np.float32))]),
        np.full(3, 7, np.float32),
    )
    assert parameter.tolist() == [7, 7, 7]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_other_arrays_of_the_key_are_filled_from_the_first() -> None:
    torch = pytest.importorskip("torch")
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    first, strided = torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.float64).t()
    plain = np.zeros((2, 3), np.int8)
    arrive(Destination.of([[first, strided, plain]], [spec_like(values)]), values)
    for out in (first.numpy(), strided.numpy(), plain):
        np.testing.assert_array_equal(out, values)


def test_a_first_array_that_is_not_fit_is_filled_at_the_end() -> None:
    torch = pytest.importorskip("torch")
    values = np.arange(3, dtype=np.float32)
    for first in (torch.zeros(3, dtype=torch.float16), torch.zeros(6)[::2], np.zeros(3, ">f4")):
        landing = Destination.of([[first]], [spec_like(values)])
        landing.memories[0][...] = np.frombuffer(values.tobytes(), np.uint8)
        assert not np.asarray(first).any()
        landing.finish()
        np.testing.assert_array_equal(np.asarray(first), values)


def test_each_key_lands_in_its_own_array() -> None:
    specs = [spec_like(np.zeros(2, np.float32)), spec_like(np.zeros((), np.int64))]
    outs = [np.zeros(2, np.float32), np.zeros((), np.int64)]
    landing = Destination.of([[out] for out in outs], specs)
    arrive(landing, np.array([1, 2], np.float32), np.array(5))
    assert (outs[0].tolist(), int(outs[1])) == ([1, 2], 5)
