"""Array libraries behind one small interface: NumPy's arrays, and what is no array."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import cpu
from kvstore.arrays import adapter_for
from kvstore.arrays.keys import KeySpec
from kvstore.errors import ArgumentTypeError
from kvstore.stores.arguments import spec_of

HOST = adapter_for(np.zeros(1))
NO_ARRAYS: list[object] = [
    *(1.0, 3, True, 1j, [1.0], (1,), {1: 2}, range(3), None),
    *(np.float32(1), np.ndarray, type("ndarray", (), {})(), object()),
    *("text", b"bytes", bytearray(4)),
]


@pytest.mark.parametrize(
    "value",
    NO_ARRAYS,
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_is_no_array_is_refused_with_advice(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match=r"pass a NumPy array"):
        adapter_for(value)


def test_a_masked_array_is_refused_since_its_mask_would_be_lost() -> None:
    with pytest.raises(ArgumentTypeError, match="filled"):
        adapter_for(np.ma.masked_array([1.0, 2.0], mask=[True, False]))


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


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 3), np.float32),
        np.zeros((), np.int8),
        np.zeros((0, 3)),
        np.frombuffer(bytearray(9), np.float64, offset=1),  # unaligned
    ],
)
def test_values_may_be_written_straight_into_the_memory_of(array: np.ndarray[Any, Any]) -> None:
    memory = HOST.memory(array)
    assert memory is not None
    assert (memory.dtype, memory.shape) == (np.uint8, (array.nbytes,))
    memory[:] = np.frombuffer(np.ones_like(array).tobytes(), np.uint8)
    HOST.written(array)
    np.testing.assert_array_equal(array, np.ones_like(array))


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros(3)
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4))[:, ::2],
        np.zeros((2, 3)).T,
        np.zeros(3, ">f4"),
        np.zeros((2, 2)).view(np.matrix),
        read_only(),
    ],
    ids=["strided", "transposed", "byte order", "matrix", "read-only"],
)
def test_values_must_not_be_written_straight_into_the_memory_of(
    array: np.ndarray[Any, Any],
) -> None:
    assert HOST.memory(array) is None


def test_an_array_that_may_not_be_written_says_what_to_pass() -> None:
    assert HOST.why_read_only(np.zeros(3)) is None
    assert "pass a copy" in str(HOST.why_read_only(read_only()))
    assert HOST.why_read_only(np.broadcast_to(np.zeros(1), 3)) is not None


def test_a_file_in_memory_is_read_and_filled_in_place(tmp_path: Path) -> None:
    array = np.memmap(tmp_path / "values", np.float32, "w+", shape=(2, 3))
    host = HOST.to_host(array)
    assert type(host) is np.ndarray
    memory = HOST.memory(array)
    assert memory is not None
    memory[:4] = np.frombuffer(np.float32(2.5).tobytes(), np.uint8)
    assert array[0, 0] == host[0, 0] == 2.5


def test_an_array_beyond_2_gib_is_described_and_cut_without_a_copy(tmp_path: Path) -> None:
    # A file with a hole: 6 GiB of it take neither memory nor space.
    array = np.memmap(tmp_path / "hole", np.uint8, "w+", shape=(3, 2**31))
    memory = HOST.memory(array)
    assert memory is not None
    assert len(memory) == 3 * 2**31
    memory[-1] = 7
    assert HOST.to_host(array)[2, -1] == 7
    spec = spec_of(array)
    assert (spec.num_elements, spec.nbytes) == (3 * 2**31, 3 * 2**31)
    assert KeySpec((2**20, 2**20), np.dtype(np.float64)).nbytes == 2**43
    assert KeySpec((2**40, 2**40), np.dtype(np.float64)).num_elements == 2**80


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
        "print([name for name in ('cupy', 'zmq', 'kvstore.stores.dist.store', 'kvstore.model') "
        "if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
