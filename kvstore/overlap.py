"""Whether arrays that a call writes lie apart from each other and from those that it reads.

If so, the order of its reads and writes makes no difference, and they may happen on several
threads and in one pass. Arrays that own their memory are told apart by being different
objects; only for views are addresses looked at. The answer may be "no" where the truth is
"yes" (views with strides that interleave), never the other way round. Pure: no value is read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise, repeat
from operator import attrgetter, is_not
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

Arrays = Sequence[np.ndarray[Any, Any]]

_base = attrgetter("base")


def are_apart(writes: Sequence[Arrays], reads: Sequence[Arrays] = ()) -> bool:
    """Whether no array of ``writes`` shares memory with another of them, or with one of ``reads``.

    Both have a row of arrays for each key. One that stands in the same key's rows of both, or
    whose twin with the same memory and layout does, is no conflict: each of its elements is
    read before it is written.
    """
    written = list(chain.from_iterable(writes))
    read = [] if reads is writes else list(chain.from_iterable(reads))
    if _all_own_their_memory(written) and _all_own_their_memory(read):
        owners = set(map(id, written))
        if len(owners) == len(written) and owners.isdisjoint(map(id, read)):
            return True
    return _have_disjoint_addresses(writes, () if reads is writes else reads)


def _all_own_their_memory(arrays: Arrays) -> bool:
    return not any(map(is_not, map(_base, arrays), repeat(None)))


def _have_disjoint_addresses(writes: Sequence[Arrays], reads: Sequence[Arrays]) -> bool:
    ranges = sorted(_ranges(writes), key=lambda item: item[:2])
    for (_, high, _, _), (low, _, _, _) in pairwise(ranges):
        if low < high:
            return False
    lows = [low for low, _, _, _ in ranges]
    for low, high, row, array in _ranges(reads):
        # The ranges are disjoint and in order: the last that begins below `high` reaches furthest.
        index = bisect_right(lows, high - 1) - 1
        if index < 0 or ranges[index][1] <= low:
            continue
        _, _, row_written, written = ranges[index]
        if row != row_written or not _are_twins(written, array):
            return False
    return True


def _ranges(rows: Sequence[Arrays]) -> Iterable[tuple[int, int, int, np.ndarray[Any, Any]]]:
    """(first address, address behind the last, row, array) of every array that is not empty."""
    for number, row in enumerate(rows):
        for array in row:
            if array.size:
                yield (*byte_bounds(array), number, array)


def _are_twins(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return (
        byte_bounds(one) == byte_bounds(other)
        and one.strides == other.strides
        and one.shape == other.shape
        and one.dtype == other.dtype
    )
