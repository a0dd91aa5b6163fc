"""Check the row ids that callers pass, and convert them to flat int64.

Ids are integers, and exact up to 2**63 - 1. Floats are accepted only if they are whole numbers that
cannot have been rounded: below 2**24 for float32, 2**11 for float16 and 2**8 for bfloat16. The
limit of float64 is 2**24 too, so that a script works the same with both. Pure; any thread may call.
Read next: ``array.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from reprlib import repr as short
from typing import Any, TypeAlias

import numpy as np

from kvstore.arrays import adapter_for
from kvstore.arrays.dtypes import is_bfloat16, is_float
from kvstore.errors import ArgumentTypeError, ArgumentValueError

Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
"""A flat array of row ids."""

_INTEGERS = (int, np.integer)
_EXACT_FLOATS = 2**24
_EXACT_FLOAT16 = 2**11
_EXACT_BFLOAT16 = 2**8

_MOST_ROWS = 2**63


def checked_ids(ids: object, num_rows: int, owner: str) -> Ids:
    """Return the ids as flat int64, in the caller's order, with repetitions.

    ``ids`` is an array of any library and any shape, or an int, or a list of ints. ``owner`` names,
    for errors, what has these ``num_rows`` rows. The result may share the memory of ``ids``; do not
    write to it. Raises ``ArgumentTypeError`` for ids that are not integers, ``ArgumentValueError``
    for ids out of range.
    """
    if isinstance(ids, (list, tuple, range, *_INTEGERS)):
        return _of_numbers(ids, num_rows, owner)
    try:
        adapter = adapter_for(ids)
    except ArgumentTypeError:
        raise ArgumentTypeError(
            f"row ids must be an array or a list of ints, got {type(ids).__name__}: {short(ids)}"
        ) from None
    dtype = adapter.dtype(ids)
    if dtype.kind not in "iu" and not is_float(dtype):
        raise ArgumentTypeError(f"row ids must be integers, got {dtype}; pass an int64 array")
    flat = adapter.to_host(ids).reshape(-1)
    if is_float(dtype):
        _check_whole(flat)
    if len(flat):
        for id_ in (flat.min(), flat.max()):
            _check_range(int(id_), num_rows, owner)
    return flat.astype(np.int64, copy=False)


def check_num_rows(num_rows: int) -> None:
    """Raise ``ArgumentValueError`` for more rows than int64 ids can name."""
    if num_rows > _MOST_ROWS:
        raise ArgumentValueError(
            f"an array can have at most 2**63 rows, since row ids are int64, got {num_rows}"
        )


def is_increasing(ids: Ids) -> bool:
    """Return whether ids are sorted and distinct."""
    return bool((ids[1:] > ids[:-1]).all())


def unique_ids(ids: Ids) -> Ids:
    """Return the distinct ids, sorted; ``ids`` itself if it is sorted and distinct."""
    # numpy.unique of NumPy 2.3 and later uses a hash table, which takes ten times as long.
    return ids if is_increasing(ids) else _different(np.sort(ids))


def union_of(several: Sequence[Ids]) -> Ids:
    """Return the distinct ids of several sorted arrays, sorted."""
    # A stable sort merges sorted stretches, which is fast.
    return _different(np.sort(np.concatenate(several), kind="stable"))


def _different(ordered: Ids) -> Ids:
    return ordered[starts_of(ordered)] if len(ordered) else ordered


def sorted_with_places(ids: Ids) -> tuple[Ids, Ids]:
    """Sort ids with a stable sort; return them and their old positions.

    The ids must not be negative, and there must be at least one.
    """
    num_bits = max(len(ids) - 1, 1).bit_length()
    if int(ids.max()) >> (63 - num_bits) == 0:
        # Sorting id and position as one number is much faster than argsort.
        both = (ids << num_bits) | np.arange(len(ids))
        both.sort()
        return both >> num_bits, both & ((1 << num_bits) - 1)
    order = np.argsort(ids, kind="stable")
    return ids[order], order


def starts_of(ordered: Ids) -> Ids:
    """Return where each distinct id begins in a sorted array that is not empty."""
    is_new = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return np.flatnonzero(is_new)


def _of_numbers(ids: Any, num_rows: int, owner: str) -> Ids:
    numbers = [ids] if isinstance(ids, _INTEGERS) else list(ids)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, _INTEGERS):
            raise ArgumentTypeError(
                f"row ids must be an array or a list of ints, got {type(number).__name__}: "
                f"{number!r}"
            )
        _check_range(int(number), num_rows, owner)
    return np.array(numbers, np.int64)


def _check_range(id_: int, num_rows: int, owner: str) -> None:
    if not 0 <= id_ < num_rows:
        has = f"rows 0 to {num_rows - 1}" if num_rows else "no rows"
        raise ArgumentValueError(f"row id {id_} is out of range: {owner} has {has}")


def _check_whole(flat: np.ndarray[Any, Any]) -> None:
    limit = _EXACT_FLOATS
    if is_bfloat16(flat.dtype):
        limit = _EXACT_BFLOAT16
    elif flat.dtype == np.float16:
        limit = _EXACT_FLOAT16
    with np.errstate(all="ignore"):
        is_exact = (np.abs(flat) < limit) & (np.trunc(flat) == flat)
    if not is_exact.all():
        worst = float(flat[~is_exact][0])
        raise ArgumentTypeError(
            f"row ids must be integers; of {flat.dtype}, whole numbers below {limit} are "
            f"accepted (larger ones may have been rounded), got {worst}; pass an int64 array"
        )
