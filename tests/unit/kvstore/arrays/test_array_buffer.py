"""Objects of any library that offer their memory in a standard way are arrays to the stores."""

from __future__ import annotations

import array
import ctypes
from typing import Any

import numpy as np
import pytest

from kvstore import cpu
from kvstore.arrays import adapter_for
from kvstore.arrays.dtypes import check_dtype
from kvstore.errors import ArgumentTypeError


class Interface:
    """Offers ``__array_interface__`` and nothing else."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.values.__array_interface__


class Exchanged:
    """Offers DLPack and nothing else."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    def __dlpack__(self, **options: Any) -> Any:
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()


class OnAnotherDevice(Exchanged):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 8, 0  # kDLMetal


class Broken(Exchanged):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("not today")


def in_ctypes() -> Any:
    return (ctypes.c_double * 4)(0, 1, 2, 3)


OFFERS = [
    lambda: array.array("d", range(4)),
    lambda: memoryview(array.array("d", range(4))),
    in_ctypes,
    lambda: Interface(np.arange(4.0)),
    lambda: Exchanged(np.arange(4.0)),
]


@pytest.mark.parametrize("make", OFFERS)
def test_an_object_that_offers_its_memory_is_read_in_place(make: Any) -> None:
    value = make()
    adapter = adapter_for(value)
    assert adapter.dtype(value) == np.float64
    assert adapter.shape(value) == (4,)
    assert adapter.context(value) == cpu()
    host = adapter.to_host(value)
    np.testing.assert_array_equal(host, [0.0, 1, 2, 3], strict=True)
    assert np.shares_memory(host, adapter.to_host(value))
    assert not np.shares_memory(host, adapter.copy(value))


@pytest.mark.parametrize("make", OFFERS[:4])
def test_memory_that_may_be_written_is_filled_in_place(make: Any) -> None:
    value = make()
    adapter = adapter_for(value)
    assert adapter.why_read_only(value) is None
    adapter.from_host(np.array([4, 5, 6, 7]), value)
    np.testing.assert_array_equal(adapter.to_host(value), [4, 5, 6, 7])
    memory = adapter.memory(value)
    assert memory is not None
    memory.view(np.float64)[0] = 9
    adapter.written(value)
    adapter.assign(adapter.to_host(value) + 1, value)
    np.testing.assert_array_equal(adapter.to_host(value), [10, 6, 7, 8])


def test_a_read_only_buffer_can_be_pushed_and_not_filled() -> None:
    value = memoryview(b"\x01\x02")
    adapter = adapter_for(value)
    np.testing.assert_array_equal(adapter.to_host(value), np.array([1, 2], np.uint8), strict=True)
    assert adapter.memory(value) is None
    assert adapter.why_read_only(value) is not None


def test_a_buffer_keeps_its_shape_and_strides() -> None:
    grid = memoryview(array.array("i", range(6))).cast("B").cast("i", (2, 3))
    assert adapter_for(grid).shape(grid) == (2, 3)
    every_second = memoryview(array.array("i", range(6)))[::2]
    host = adapter_for(every_second).to_host(every_second)
    np.testing.assert_array_equal(host, np.array([0, 2, 4], np.int32), strict=True)
    assert adapter_for(every_second).memory(every_second) is None


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Broken(np.zeros(3)), r"BufferError: not today\); pass a NumPy array"),
        (OnAnotherDevice(np.zeros(3)), "device type 8"),
        (memoryview(b"ab").cast("c"), "dtype .S1; use"),
    ],
)
def test_memory_that_cannot_be_read_is_refused_with_the_reason(value: Any, reason: str) -> None:
    with pytest.raises(ArgumentTypeError, match=reason):
        check_dtype(adapter_for(value).dtype(value))
