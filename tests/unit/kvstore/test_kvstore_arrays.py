"""Array libraries behind one small interface: NumPy for real, CuPy through a stand-in."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kvstore import cpu
from kvstore.arrays import adapter_for, check_dtype
from kvstore.errors import ArgumentTypeError

HOST = adapter_for(np.zeros(1))


@pytest.mark.parametrize(
    "value", [1.0, 3, [1.0, 2.0], "text", None, np.float32(1), memoryview(b"ab"), object()]
)
def test_a_value_that_is_no_array_is_refused_with_advice(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"pass a NumPy array"):
        adapter_for(value)


def test_a_masked_array_is_refused_since_its_mask_would_be_lost() -> None:
    with pytest.raises(ArgumentTypeError, match="filled"):
        adapter_for(np.ma.masked_array([1.0, 2.0], mask=[True, False]))


@pytest.mark.parametrize("dtype", ["O", "U3", "S3", "M8[s]", "m8[s]", "f4,i4", "V8"])
def test_a_dtype_that_cannot_be_added_is_refused(dtype: str) -> None:
    with pytest.raises(ArgumentTypeError, match="cannot be stored"):
        check_dtype(np.dtype(dtype))


@pytest.mark.parametrize("dtype", ["?", "i1", "u8", "f2", "f4", "f8", "g", "c8", "c16"])
def test_number_dtypes_are_accepted(dtype: str) -> None:
    check_dtype(np.dtype(dtype))


def test_a_contiguous_array_reaches_the_host_without_a_copy() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert np.shares_memory(HOST.to_host(array), array)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4)[:, ::2],
        np.arange(6.0).reshape(2, 3).T,
        np.array(3.5),
        np.zeros((0, 4)),
        np.arange(4, dtype=">f4"),
        np.arange(4.0).view(np.recarray),
    ],
)
def test_any_layout_becomes_a_plain_contiguous_array(array: np.ndarray[Any, Any]) -> None:
    host = HOST.to_host(array)
    assert type(host) is np.ndarray
    assert host.flags.c_contiguous
    assert host.dtype.isnative
    assert host.shape == array.shape
    assert host.reshape(-1).ndim == 1
    np.testing.assert_array_equal(host, np.asarray(array))


def test_copying_out_casts_and_keeps_the_strides_of_the_target() -> None:
    backing = np.zeros((4, 6), np.float16)
    HOST.from_host(np.arange(6.0).reshape(2, 3), backing[::2, ::2])
    expected = np.zeros((4, 6), np.float16)
    expected[::2, ::2] = [[0, 1, 2], [3, 4, 5]]
    np.testing.assert_array_equal(backing, expected)


def test_a_value_too_large_for_the_target_becomes_infinite_without_a_warning() -> None:
    out = np.zeros(2, np.float16)
    HOST.from_host(np.array([1e9, 1.0]), out)
    np.testing.assert_array_equal(out, [np.inf, 1])


def test_numpy_sums_are_new_arrays_added_left_to_right() -> None:
    arrays = [np.full((2, 2), value, np.float32) for value in (1e8, 1.0, -1e8)]
    total = HOST.sum_in_order(arrays, cpu(), np.dtype(np.float32))
    np.testing.assert_array_equal(total, np.zeros((2, 2)))  # (1e8 + 1) - 1e8 in float32
    alone = HOST.sum_in_order(arrays[:1], cpu(), np.dtype(np.float32))
    assert not np.shares_memory(alone, arrays[0])


def test_importing_the_stores_imports_no_cupy_and_nothing_of_the_network() -> None:
    program = (
        "import sys, kvstore; kvstore.create('local').init('w', __import__('numpy').ones(3)); "
        "print([name for name in ('cupy', 'zmq', 'kvstore.dist', 'kvstore.model') "
        "if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
