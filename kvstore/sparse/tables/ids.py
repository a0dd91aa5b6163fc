"""Read ids of tables as flat int64, and hash them to shares.

Every value of int64 and of uint64 is an id. An id is its 64 bits: -1 and 2**64 - 1 are the same
id, as with ``array.view``. The hash is the finaliser of SplitMix64: every bit of the result
depends on every bit of the id, distinct ids have distinct hashes, and the hash is the same on
every machine. Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014; constants of Vigna's splitmix64.c. Pure; any thread may call. Read next:
``hash_index.py``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from kvstore.arrays import adapter_for
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.sparse.ids import Ids
from kvstore.sparse.partition import Share

_INTEGERS = (int, np.integer)
_LISTS = (list, tuple, range)


def checked_table_ids(ids: object) -> tuple[Ids, tuple[int, ...]]:
    """Return ids as flat int64, in order and with repetitions, and their shape.

    ``ids`` is an array of any library, of any integer dtype and any shape, or an int, or a list of
    ints. The result may share the memory of ``ids``; do not write to it. Raises
    ``ArgumentTypeError`` for ids that are not integers, including floats with whole numbers, and
    ``ArgumentValueError`` for an int of more than 64 bits.
    """
    if isinstance(ids, (*_LISTS, *_INTEGERS)):
        return _of_numbers(ids)
    adapter = adapter_for(ids)
    dtype = adapter.dtype(ids)
    if dtype.kind not in "iu":
        raise ArgumentTypeError(
            f"ids of a table must be integers, got {dtype}; pass an int64 or uint64 array"
        )
    flat = adapter.to_host(ids).reshape(-1)
    wide = flat.view(np.int64) if flat.dtype == np.uint64 else flat.astype(np.int64, copy=False)
    return wide, tuple(adapter.shape(ids))


def first_appearances(ids: Ids) -> tuple[Ids, Ids]:
    """Return distinct ids in order of first appearance, and each id's index there.

    There must be at least one id.
    """
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    is_new = np.ones(len(ids), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    firsts = order[is_new]
    by_appearance = np.argsort(firsts)
    rank = np.empty(len(firsts), np.int64)
    rank[by_appearance] = np.arange(len(firsts))
    inverse = np.empty(len(ids), np.int64)
    inverse[order] = rank[np.cumsum(is_new) - 1]
    return ids[firsts[by_appearance]], inverse


def _of_numbers(ids: Any) -> tuple[Ids, tuple[int, ...]]:
    is_single = isinstance(ids, _INTEGERS)
    numbers = [ids] if is_single else list(ids)
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, _INTEGERS):
            raise ArgumentTypeError(
                "ids of a table must be an array or a list of ints, got "
                f"{type(number).__name__}: {number!r}"
            )
        if not -(2**63) <= int(number) < 2**64:
            raise ArgumentValueError(f"ids of a table must fit in 64 bits, got {number}")
    words = np.array([int(number) % 2**64 for number in numbers], np.uint64)
    return words.view(np.int64), () if is_single else (len(numbers),)


Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: the step of SplitMix64's counter."""

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


def mix(words: Words) -> Words:
    """Hash each word in place, and return the array itself."""
    shifted = words >> np.uint64(30)
    words ^= shifted
    words *= _FIRST
    np.right_shift(words, np.uint64(27), out=shifted)
    words ^= shifted
    words *= _SECOND
    np.right_shift(words, np.uint64(31), out=shifted)
    words ^= shifted
    return words


def spread(ids: Ids, num_slots: int) -> Ids:
    """Return a slot from 0 to ``num_slots`` - 1 for each id.

    The slot depends on the upper half of the id's hash.

    ``num_slots`` is below 2**32.
    """
    words = mix(ids.view(np.uint64).copy())
    words >>= _HALF
    return _scaled(words, num_slots)


def shares_of(ids: Ids, num_shares: int) -> Ids:
    """Return the table share of each id, by the lower half of its hash.

    ``spread`` uses the other half, so that the ids of a share are spread over its whole index.
    """
    words = mix(ids.view(np.uint64).copy())
    words &= _LOW
    return _scaled(words, num_shares)


def split(ids: Ids, num_shares: int) -> list[Share]:
    """Return the ids of each share of a table."""
    shares = shares_of(ids, num_shares)
    places = [np.flatnonzero(shares == share) for share in range(num_shares)]
    return [Share(at, ids[at]) for at in places]


def _scaled(halves: Words, number: int) -> Ids:
    halves *= np.uint64(number)
    halves >>= _HALF
    return halves.view(np.int64)
