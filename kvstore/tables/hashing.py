"""A hash of 64-bit ids, and which share of a table an id falls to.

The finaliser of SplitMix64: every bit of the result depends on every bit of the id, and different
ids have different results. It is the same on every machine. Source: Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014; constants of Vigna's ``splitmix64.c``.
Pure; any thread may call. Read next: ``index.py``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from kvstore.sparse.ids import Ids

Words: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: the step of SplitMix64's counter."""

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


def mix(words: Words) -> Words:
    """Hash each word, in place; returns the array itself."""
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
    """For each id a number from 0 to ``num_slots`` - 1, from the upper half of its hash.

    ``num_slots`` is below 2**32.
    """
    words = mix(ids.view(np.uint64).copy())
    words >>= _HALF
    return _scaled(words, num_slots)


def shares_of(ids: Ids, num_shares: int) -> Ids:
    """The share of a table that each id belongs to, from the lower half of its hash.

    Not the half of ``spread``, so that the ids of a share lie everywhere in its index.
    """
    words = mix(ids.view(np.uint64).copy())
    words &= _LOW
    return _scaled(words, num_shares)


def _scaled(halves: Words, number: int) -> Ids:
    halves *= np.uint64(number)
    halves >>= _HALF
    return halves.view(np.int64)
