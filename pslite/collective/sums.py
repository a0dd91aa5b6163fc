"""The arithmetic of collective calls with NumPy: operations and their dtypes.

Values are combined in the order of ranks, ((r0 + r1) + r2) + ..., so the bits do not depend on
which rank came first. float16 and bfloat16 are combined in float32 and rounded once at the end.
Integers wrap, and their averages are truncated towards zero; a sum of bools is a logical or. Here
bfloat16 is only a name and 2 bytes per element: it needs no package. Pure; runs on any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pslite.errors import UsageError

BFLOAT16 = "bfloat16"
DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
} | {BFLOAT16: np.dtype(np.uint16)}
"""Name -> the NumPy dtype of its elements in memory."""

_KINDS = {
    "sum": "biufc",
    "average": "iufc",
    "product": "biufc",
    "min": "biuf",
    "max": "biuf",
    "band": "biu",
    "bor": "biu",
    "bxor": "biu",
    "premul_sum": "fc",
}
OPS = tuple(_KINDS)
_COMBINE: dict[str, np.ufunc] = {
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_BLOCK_ELEMENTS = 1 << 16
"""A block stays in the processor's cache while the ranks' values are combined."""
_QUIET_NAN = 0x7FC0

Array: TypeAlias = NDArray[Any]

AddUp: TypeAlias = Callable[[str, Sequence[Array], Array], bool]
"""A function that sets ``out`` (last) to the ordered sum of the ranks' arrays of a dtype (name).

Returns whether it did. The arrays are 1-D, with the dtypes in ``DTYPES``; the ranks' are only read,
but ``out`` may be one of the first two.
"""


def check_op(op: str, dtype: str, factor: float | None) -> None:
    """Check that an operation exists and applies to a dtype.

    Raises:
        UsageError: it does not; the text says which operations do.
    """
    kinds = _KINDS.get(op)
    if kinds is None:
        raise UsageError(f"unknown op {op!r}; choose one of {', '.join(OPS)}")
    if ("f" if dtype == BFLOAT16 else DTYPES[dtype].kind) not in kinds:
        known = [op for op in OPS if _applies(op, dtype)]
        raise UsageError(f"op {op!r} does not apply to {dtype}; choose one of {', '.join(known)}")
    if (factor is not None) != (op == "premul_sum"):
        raise UsageError(
            f"op 'premul_sum' needs a factor and no other op takes one; got op {op!r} with factor "
            f"{factor}"
        )


def reduce_in_order(
    op: str,
    dtype: str,
    factor: float | None,
    arrays: Sequence[Array],
    out: Array,
    num_ranks: int = 0,
) -> None:
    """Combine the arrays in order, and write the result to ``out``.

    ``out`` may be one of the first two arrays. An average divides by ``num_ranks``, by default the
    number of arrays.
    """
    combine = _COMBINE.get(op, np.add)
    is_half = dtype in (BFLOAT16, "float16")
    with np.errstate(all="ignore"):
        for start in range(0, len(out), _BLOCK_ELEMENTS):
            part = slice(start, start + _BLOCK_ELEMENTS)
            blocks = [_widened(array[part], dtype) for array in arrays]
            if factor is not None:
                scale = blocks[0].dtype.type(factor)
                blocks = [block * scale for block in blocks]
            total = np.empty(len(out[part]), np.float32) if is_half else out[part]
            if len(blocks) == 1:
                np.copyto(total, blocks[0])
            else:
                combine(blocks[0], blocks[1], out=total)
            for block in blocks[2:]:
                combine(total, block, out=total)
            if op == "average":
                divide(total, num_ranks or len(arrays))
            if is_half:
                out[part] = _rounded(total, dtype)


def divide(total: Array, number: int) -> None:
    """Divide in place; integers are truncated towards zero."""
    if total.dtype.kind in "iu":
        wide = total.astype(np.uint64 if total.dtype.kind == "u" else np.int64)
        wide -= np.fmod(wide, wide.dtype.type(number))  # NumPy's division rounds down
        wide //= wide.dtype.type(number)
        np.copyto(total, wide, casting="same_kind")
    else:
        np.divide(total, total.dtype.type(number), out=total)


def _applies(op: str, dtype: str) -> bool:
    return ("f" if dtype == BFLOAT16 else DTYPES[dtype].kind) in _KINDS[op]


def _widened(block: Array, dtype: str) -> Array:
    """Return the values in the dtype that is used to combine them."""
    if dtype == BFLOAT16:
        bits: Array = block.astype(np.uint32) << np.uint32(16)
        return bits.view(np.float32)
    return block.astype(np.float32) if dtype == "float16" else block


def _rounded(total: Array, dtype: str) -> Array:
    """Round float32 values to the 16-bit ``dtype``: to nearest, ties to even.

    A NaN stays a NaN; plain rounding could turn it into another value.
    """
    if dtype != BFLOAT16:
        return total.astype(np.float16)
    bits = total.view(np.uint32)
    bias = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + bias) >> np.uint32(16)).astype(np.uint16)
    sign = (bits >> np.uint32(16)).astype(np.uint16) & np.uint16(0x8000)
    found: Array = np.where(np.isnan(total), sign | np.uint16(_QUIET_NAN), rounded)
    return found
