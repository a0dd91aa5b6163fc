"""The project's one CUDA kernel: sum and update many keys in one launch.

This module only builds text and numbers: the source of a ``Kernel``, and the ``Table`` that each
launch takes. It does not import CuPy or use a GPU; ``sums.py`` launches the kernel. Any thread may
call. Read next: ``sums.py``.

**The table.** A launch works on rows. A row is a key or a part of one. It has the addresses of its
copies (one value for each device), of what the kernel sets (the weight, or the place for the sum),
of the velocity and the float32 master if there are any, and its length. A launch passes the table
as an argument by value, so the table needs no memory on the GPU and need not outlive the call. An
argument has at most 4 KiB (CUDA C++ Programming Guide, "Function Parameters"), which limits the
rows of a launch.
The grid has blocks of ``BLOCK_ELEMENTS`` elements; each finds its row by ``first_blocks``.

**Bits.** The kernel adds copies left to right. Then it does the operations of ``optimizer/sgd.py``
in their order and rounds each separately: ``OPTIONS`` forbids the compiler to fuse a multiplication
and an addition. float16 is added in float32 and rounded once; the kernel updates its master and
rounds the weight from it. So the bits are those of ``kvstore/arrays/cpu/sums.py`` on the host,
except for NaN: a GPU has one NaN, while a processor keeps the sign and payload of an operand's NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.arrays.gpu.pipeline import RowSpan

NAME = "fused"
"""The kernel's name in its source."""

OPTIONS = ("--fmad=false",)
"""For NVRTC."""

THREADS = 256
BLOCK_ELEMENTS = 4096
"""How many elements one block of the grid processes."""

MOST_COPIES = 64
"""The most copies; the source has a line for each copy, so there must be a limit."""

ARGUMENT_BYTES = 4096
_NUMBERS_BYTES = 64
"""Room for the five numbers behind the table, the largest of which has 8 bytes, and alignment."""

_UNROLLED = 4
"""How many elements a thread loads at a time; several loads in flight hide memory latency."""

C_TYPES = {
    "float16": "unsigned short",
    "float32": "float",
    "float64": "double",
    "uint8": "unsigned char",
    "uint16": "unsigned short",
    "uint32": "unsigned int",
    "uint64": "unsigned long long",
}
"""The dtypes that the kernel supports, and their C types. Signed integers are added as unsigned
ones, which have the same bits and wrap."""

FORMULAS = ("sum", "sgd", "momentum")
"""What the kernel does with the sum: return it, or use it in SGD without or with momentum."""

Pointers = np.ndarray[Any, np.dtype[np.uint64]]
"""Addresses on a GPU: a row of ``Kernel.num_columns`` for each key or part of one."""

Lengths = np.ndarray[Any, np.dtype[np.int64]]
"""Elements of each row."""


class Kernel(NamedTuple):
    """The parameters of a kernel's source."""

    dtype: str
    """The dtype of copies and weight, a name in ``C_TYPES``. Integers support only ``"sum"``."""
    num_copies: int
    formula: str
    """One of ``FORMULAS``."""

    @property
    def num_columns(self) -> int:
        """Return the number of addresses in a row of the kernel's table.

        They are those of the copies, the destinations, the velocity and the master.
        """
        return self.num_copies + 1 + (self.formula == "momentum") + self.has_master

    @property
    def has_master(self) -> bool:
        """Whether the kernel updates a float32 master and rounds the weight from it."""
        return self.dtype == "float16" and self.formula != "sum"

    @property
    def num_rows(self) -> int:
        """How many rows fit in a launch."""
        room = ARGUMENT_BYTES - _NUMBERS_BYTES - np.dtype(np.int32).itemsize
        return room // (8 * self.num_columns + 8 + 4)

    @property
    def working(self) -> np.dtype[Any]:
        """The dtype of the arithmetic, the velocity, the master and the numbers."""
        return accumulation_dtype(np.dtype(self.dtype))


def kernel_of(dtype: np.dtype[Any], num_copies: int, formula: str) -> Kernel | None:
    """Return the kernel of this formula for ``dtype``, or None."""
    name = f"uint{8 * dtype.itemsize}" if dtype.kind == "i" else dtype.name
    if name not in C_TYPES or num_copies > MOST_COPIES:
        return None
    return Kernel(name, num_copies, formula)


class KernelParameters(NamedTuple):
    """The parameters of an update, in the order of the kernel's arguments."""

    rescale: float = 1.0
    limit: float = np.inf
    """The limit for clipping; infinity means no clipping."""
    decay: float = 0.0
    rate: float = 0.0
    momentum: float = 0.0


@functools.cache
def table_dtype(kernel: Kernel) -> np.dtype[Any]:
    """Return the layout of the kernel's ``struct Table``, as C lays it out."""
    rows = kernel.num_rows
    return np.dtype(
        [
            ("pointers", np.uint64, (rows, kernel.num_columns)),
            ("lengths", np.int64, (rows,)),
            ("first_blocks", np.int32, (rows + 1,)),
        ],
        align=True,
    )


def tables(
    kernel: Kernel, pointers: Pointers, lengths: Lengths
) -> Iterator[tuple[np.ndarray[Any, Any], int]]:
    """Yield the launches for these rows: (a table as an array, blocks of the grid).

    ``pointers`` has the shape (rows, ``kernel.num_columns``), ``lengths`` (rows,). There is no
    launch if all its rows are empty.
    """
    for start in range(0, len(lengths), kernel.num_rows):
        part = lengths[start : start + kernel.num_rows]
        num_blocks = -(-part // BLOCK_ELEMENTS)
        ends = np.cumsum(num_blocks)
        if not ends[-1]:
            continue
        table = np.zeros((), table_dtype(kernel))
        table["pointers"][: len(part)] = pointers[start : start + len(part)]
        table["lengths"][: len(part)] = part
        # Unused rows begin after the last block, so no block finds them.
        table["first_blocks"][:] = ends[-1]
        table["first_blocks"][: len(part)] = ends - num_blocks
        yield table, int(ends[-1])


def rows_of(
    kernel: Kernel, spans: Sequence[RowSpan], copies: Pointers, own: Pointers
) -> tuple[Pointers, Lengths]:
    """Return the address of each span in every array of its key, and its length.

    ``copies`` and ``own`` have a row for each key with the addresses of its arrays. The result is
    a new array.
    """
    table = np.array(spans, np.int64).reshape(-1, 3)
    keys, starts, lengths = table[:, 0], table[:, 1].astype(np.uint64), table[:, 2] - table[:, 1]
    # Velocity and master, which come last, have elements of another size than a float16 weight.
    sizes = np.full(kernel.num_columns, np.dtype(kernel.dtype).itemsize, np.uint64)
    sizes[kernel.num_copies + 1 :] = kernel.working.itemsize
    pointers = np.concatenate([copies[keys], own[keys]], axis=1)
    pointers += starts[:, np.newaxis] * sizes
    return pointers, lengths


def packed(kernel: Kernel, spans: Sequence[RowSpan], address: int) -> Pointers:
    """Return the start of each span when they are packed from ``address``."""
    lengths = np.array([stop - start for _, start, stop in spans], np.uint64)
    before = np.cumsum(lengths) - lengths
    addresses: Pointers = np.uint64(address) + before * np.uint64(np.dtype(kernel.dtype).itemsize)
    return addresses


@functools.cache
def source_of(kernel: Kernel) -> str:
    """Return the kernel's source, CUDA C++ without any header."""
    stored = C_TYPES[kernel.dtype]
    working = "float" if kernel.dtype == "float16" else stored
    constants = {
        "ROWS": kernel.num_rows,
        "COPIES": kernel.num_copies,
        "COLUMNS": kernel.num_columns,
        "FORMULA": FORMULAS.index(kernel.formula),
        "MASTER": int(kernel.has_master),
        "THREADS": THREADS,
        "UNROLLED": _UNROLLED,
        "BLOCK_ELEMENTS": BLOCK_ELEMENTS,
    }
    lines = [f"#define {name} {value}" for name, value in constants.items()]
    lines += [f"typedef {stored} Stored;", f"typedef {working} Working;"]
    return "\n".join([*lines, _FLOAT16 if kernel.dtype == "float16" else _SAME, _BODY])


_SAME = r"""
__device__ Working widened(Stored value) { return value; }
__device__ Stored rounded(Working value) { return value; }
"""

# The conversions of PTX, so that no header is needed: exact, and to the nearest, ties to even.
_FLOAT16 = r"""
__device__ Working widened(Stored value) {
    Working wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
    return wide;
}
__device__ Stored rounded(Working value) {
    Stored narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow) : "f"(value));
    return narrow;
}
"""

_BODY = r"""
struct Table {
    unsigned long long pointers[ROWS][COLUMNS];
    long long lengths[ROWS];
    int first_blocks[ROWS + 1];
};

// The last row that begins at or before this block of the grid: empty rows begin where the
// next one does.
__device__ int row_of_this_block(const Table& table) {
    int low = 0, high = ROWS;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (table.first_blocks[middle] <= (int)blockIdx.x) low = middle; else high = middle;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(THREADS) fused(
    const Table table, Working rescale, Working limit, Working decay, Working rate,
    Working momentum
) {
    const int row = row_of_this_block(table);
    const Stored* copies[COPIES];
    #pragma unroll
    for (int copy = 0; copy < COPIES; ++copy)
        copies[copy] = (const Stored*)table.pointers[row][copy];
    Stored* target = (Stored*)table.pointers[row][COPIES];
    // What there is of these follows the target, the master last.
    Working* velocity = (Working*)table.pointers[row][COLUMNS - 1 - MASTER];
    Working* master = (Working*)table.pointers[row][COLUMNS - 1];

    const long long start = (long long)(blockIdx.x - table.first_blocks[row]) * BLOCK_ELEMENTS;
    const long long end = start + BLOCK_ELEMENTS;
    const long long stop = end < table.lengths[row] ? end : table.lengths[row];

    for (long long at = start + threadIdx.x; at < stop; at += THREADS * UNROLLED) {
        Working total[UNROLLED], weight[UNROLLED], speed[UNROLLED];
        // All loads first, and none of them under a condition, so that none waits for another.
        // Behind the end, the last element is loaded once more and not used.
        #pragma unroll
        for (int u = 0; u < UNROLLED; ++u) {
            const long long wanted = at + u * THREADS;
            const long long index = wanted < stop ? wanted : stop - 1;
            total[u] = widened(copies[0][index]);
            #pragma unroll
            for (int copy = 1; copy < COPIES; ++copy)
                total[u] = total[u] + widened(copies[copy][index]);
            if (FORMULA >= 1) weight[u] = MASTER ? master[index] : widened(target[index]);
            if (FORMULA == 2) speed[u] = velocity[index];
        }
        #pragma unroll
        for (int u = 0; u < UNROLLED; ++u) {
            const long long index = at + u * THREADS;
            if (index >= stop) continue;
            Working result = total[u];
            if (FORMULA >= 1) {
                result = result * rescale;
                result = result > limit ? limit : result;
                result = result < -limit ? -limit : result;
                if (decay != 0) result = result + weight[u] * decay;
                result = result * rate;
                if (FORMULA == 2) {
                    speed[u] = speed[u] * momentum;
                    speed[u] = speed[u] - result;
                    velocity[index] = speed[u];
                    result = weight[u] + speed[u];
                } else {
                    result = weight[u] - result;
                }
                if (MASTER) master[index] = result;
            }
            target[index] = rounded(result);
        }
    }
}
"""
