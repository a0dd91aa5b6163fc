"""The CUDA kernel's table, and its arithmetic: compiled as C++ for the processor.

No GPU and no stand-in for one: the text of the kernel is plain C++ but for three words and the
numbers of the block and the thread, which a loop runs through. So rows, borders and every
rounding are compared with ``kvstore/arrays/cpu/sums.py`` here; how it runs on a GPU is not.
"""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combinations import covering

from kvstore import optimizer
from kvstore.arrays.cpu.sums import Workspace, apply_round
from kvstore.arrays.gpu import kernels
from kvstore.arrays.gpu.kernels import (
    ARGUMENT_BYTES,
    BLOCK_ELEMENTS,
    FORMULAS,
    Kernel,
    KernelParameters,
    packed,
    rows_of,
    source_of,
    table_dtype,
    tables,
)
from kvstore.arrays.gpu.pipeline import RowSpan, cut
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import create_state
from kvstore.stores.local.device import kernel_for, numbers_of

KERNELS = [Kernel(dtype, copies, formula) for dtype in ("float16", "float64")
           for copies in (1, 4, 64) for formula in FORMULAS]  # fmt: skip


def struct_of(kernel: Kernel) -> type[ctypes.Structure]:
    """``struct Table`` as a C compiler lays it out."""
    rows = kernel.num_rows

    class Table(ctypes.Structure):
        _fields_ = [
            ("pointers", ctypes.c_ulonglong * (rows * kernel.num_columns)),
            ("lengths", ctypes.c_longlong * rows),
            ("first_blocks", ctypes.c_int * (rows + 1)),
        ]

    return Table


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_table_lies_in_memory_as_c_lays_it_out(kernel: Kernel) -> None:
    struct, dtype = struct_of(kernel), table_dtype(kernel)
    assert dtype.itemsize == ctypes.sizeof(struct)
    assert dtype.names is not None and dtype.fields is not None
    for name in dtype.names:
        assert dtype.fields[name][1] == getattr(struct, name).offset


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_table_and_five_numbers_fit_in_an_argument_and_a_row_more_would_not(
    kernel: Kernel,
) -> None:
    size = table_dtype(kernel).itemsize + 5 * kernel.working.itemsize
    assert size <= ARGUMENT_BYTES
    assert size + 8 * kernel.num_columns + 8 > ARGUMENT_BYTES - 64


def test_rows_that_are_too_many_make_several_launches() -> None:
    kernel = Kernel("float32", 4, "momentum")
    size = kernel.num_rows
    lengths = np.full(2 * size + 1, 10)
    pointers = np.arange(len(lengths) * 6, dtype=np.uint64).reshape(-1, 6)
    made = list(tables(kernel, pointers, lengths))
    assert [num_blocks for _, num_blocks in made] == [size, size, 1]
    assert [table["lengths"].tolist() for table, _ in made] == [
        [10] * size,
        [10] * size,
        [10] + [0] * (size - 1),
    ]
    seen = np.concatenate([table["pointers"] for table, _ in made])[: len(lengths)]
    np.testing.assert_array_equal(seen, pointers)


def test_every_block_of_the_grid_finds_its_row() -> None:
    kernel = Kernel("float32", 1, "sum")
    lengths = np.array([0, 1, BLOCK_ELEMENTS, 0, 0, BLOCK_ELEMENTS + 1, 0])
    ((table, num_blocks),) = tables(kernel, np.zeros((7, 2), np.uint64), lengths)
    assert num_blocks == 4
    assert table["first_blocks"][:8].tolist() == [0, 0, 1, 2, 2, 2, 4, 4]
    assert set(table["first_blocks"][8:].tolist()) == {4}


def test_rows_that_are_all_empty_are_no_launch() -> None:
    kernel = Kernel("float32", 1, "sum")
    assert list(tables(kernel, np.zeros((3, 2), np.uint64), np.zeros(3, np.int64))) == []


def test_a_span_begins_at_its_element_in_every_array_of_its_key() -> None:
    kernel = Kernel("float16", 2, "momentum")
    copies = np.array([[1000, 2000], [3000, 4000]], np.uint64)
    own = np.array([[5000, 6000, 9000], [7000, 8000, 10000]], np.uint64)
    pointers, lengths = rows_of(kernel, [RowSpan(1, 10, 15), RowSpan(0, 0, 3)], copies, own)
    # Velocity and master have 4 bytes for each number, all others 2.
    assert pointers.tolist() == [[3020, 4020, 7020, 8040, 10040], [1000, 2000, 5000, 6000, 9000]]
    assert lengths.tolist() == [5, 3]
    assert packed(kernel, [RowSpan(1, 10, 15), RowSpan(0, 0, 3)], 100).tolist() == [100, 110]


# -- the arithmetic ------------------------------------------------------------------------

_BEFORE = """
#define __device__ static inline
#define __global__
#define __launch_bounds__(threads)
struct Position { unsigned int x; };
static Position blockIdx, threadIdx;
"""
_HOSTS_FLOAT16 = """
#include <immintrin.h>
static float widened(unsigned short value) { return _cvtsh_ss(value); }
static unsigned short rounded(float value) { return _cvtss_sh(value, 0); }
"""
_AFTER = """
extern "C" void run(
    const Table* table, Working rescale, Working limit, Working decay, Working rate,
    Working momentum, unsigned int blocks
) {
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
            fused(*table, rescale, limit, decay, rate, momentum);
}
"""

Launch = Callable[[np.ndarray[Any, Any], KernelParameters, int], None]


def compiled(kernel: Kernel, folder: Path) -> Launch:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler (g++) on this machine")
    name = folder / "-".join(map(str, kernel))
    source = source_of(kernel).replace(kernels._FLOAT16, _HOSTS_FLOAT16)
    name.with_suffix(".cc").write_text(_BEFORE + source + _AFTER)
    # As --fmad=false: no multiplication is joined with an addition.
    options = ["-O1", "-ffp-contract=off", "-shared", "-fPIC", "-w"]
    if kernel.dtype == "float16":
        if platform.machine() != "x86_64":
            pytest.skip("float16 is converted by instructions of x86-64")
        options.append("-mf16c")
    files = ["-o", str(name.with_suffix(".so")), str(name.with_suffix(".cc"))]
    subprocess.run([compiler, *options, *files], check=True)
    function = ctypes.CDLL(str(name.with_suffix(".so"))).run
    number: Any = np.ctypeslib.as_ctypes_type(kernel.working)
    function.argtypes = [ctypes.c_void_p, *[number] * 5, ctypes.c_uint]
    function.restype = None

    def launch(table: np.ndarray[Any, Any], numbers: KernelParameters, num_blocks: int) -> None:
        values = [0] * 5 if kernel.formula == "sum" else numbers
        function(table.ctypes.data, *values, num_blocks)

    return launch


def values(rng: np.random.Generator, size: int, dtype: str) -> np.ndarray[Any, Any]:
    return (rng.normal(size=size) * 10.0 ** rng.uniform(-3, 3, size)).astype(dtype)


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


SIZES = [1, 0, 700, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 0, 3 * BLOCK_ELEMENTS - 1, *[5] * 200]

FULL = {"learning_rate": 0.1, "wd": 1e-2, "rescale_grad": 0.37, "clip_gradient": 5.0}


CASES: list[tuple[str, int, Optimizer | None]] = [
    ("float32", 4, None),
    ("float32", 1, optimizer.create("sgd", learning_rate=0.1)),
    ("float32", 3, optimizer.create("sgd", **FULL)),
    ("float32", 4, optimizer.create("sgd", momentum=0.9, **FULL)),
    ("float64", 5, optimizer.create("sgd", momentum=0.9, learning_rate=0.3)),
    ("int32", 3, None),
    ("float16", 3, None),
    ("float16", 2, optimizer.create("sgd", **FULL)),
    ("float16", 3, optimizer.create("sgd", momentum=0.9, **FULL)),
]


@pytest.mark.parametrize(
    ("case", "most_elements"), covering(CASES, [10**9, 3000], together=1), ids=str
)
def test_the_kernels_bits_are_those_of_the_host(
    tmp_path: Path, case: tuple[str, int, Optimizer | None], most_elements: int
) -> None:
    dtype, num_copies, used = case
    rng = np.random.default_rng(5)
    copies = [[values(rng, size, dtype) for _ in range(num_copies)] for size in SIZES]
    weights = [values(rng, size, dtype) for size in SIZES]
    states = [[] if used is None else list(create_state(used, weight)) for weight in weights]
    for state in states:
        for array in state:
            array[:] += values(rng, len(array), "float32")
    expected = [weight.copy() for weight in weights]
    expected_states = [[array.copy() for array in state] for state in states]
    for index in range(len(SIZES)):
        apply_round(
            expected[index], copies[index], used, expected_states[index], 1, Workspace()
        )  # fmt: skip

    kernel = kernel_for(np.dtype(dtype), num_copies, used)
    assert kernel is not None
    launch = compiled(kernel, tmp_path)
    addresses = np.array([list(map(address, row)) for row in copies], np.uint64)
    own = [
        [address(weight), *map(address, state)]
        for weight, state in zip(weights, states, strict=True)
    ]
    for block in cut(SIZES, most_elements, kernel.num_rows):
        rows = rows_of(kernel, block, addresses, np.array(own, np.uint64))
        for table, num_blocks in tables(kernel, *rows):
            launch(table, numbers_of(used, 1), num_blocks)

    for mine, theirs in zip(weights, expected, strict=True):
        assert mine.tobytes() == theirs.tobytes()
    for mine_too, theirs_too in zip(states, expected_states, strict=True):
        assert [a.tobytes() for a in mine_too] == [a.tobytes() for a in theirs_too]
