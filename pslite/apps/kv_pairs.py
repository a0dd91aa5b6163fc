"""Keys with values: validation, slicing by server, and joining of answers. Pure.

All keys have values of the same length (1-D values with a whole number of elements per key, or 2-D
values with one row per key), or ``lens`` has the length for each key. The same rules (``fault_in``
and ``fault_in_values``) apply to callers, who get a ``UsageError``, and to received messages, which
raise a ``ProtocolError``. Runs on any thread. Read next: ``kv_wire.py``.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from pslite.errors import ProtocolError, UsageError

Keys: TypeAlias = NDArray[np.uint64]
Values: TypeAlias = NDArray[Any]
Lens: TypeAlias = "NDArray[np.int64] | NDArray[np.int32]"

MAX_KEY = (1 << 64) - 1

Empty: TypeAlias = Callable[["int | tuple[int, ...]", DTypeLike], NDArray[Any]]
"""A function like ``numpy.empty``: makes a C-contiguous array of a shape and dtype."""

#: Kinds of dtypes that values can have: bool, integers, floats, complex numbers.
VALUE_KINDS = "biufc"

#: Keys are compared in blocks of this many, which fit in the processor's cache.
_BLOCK_KEYS = 65_536
#: About how many keys are compared first, to see whether two lists may be equal.
_SAMPLE_KEYS = 64


@dataclass(frozen=True, slots=True, eq=False)
class KVPairs:
    """Sorted keys and their values, in the keys' order."""

    keys: Keys
    """Shape (n,), strictly increasing."""
    values: Values
    """Shape (n * width,), (n, width), or with ``lens`` (sum of lens,); bool to complex."""
    lens: Lens | None = None
    """Shape (n,): the number of elements of each key; None: the same for all."""
    fresh: bool = False
    """In a handle's answer: whether values and lens were made for it and will never change, so
    that they need not be copied."""

    @property
    def width(self) -> int:
        """The number of elements per key, if it is the same for all; 0 without keys.

        Raises:
            UsageError: the keys have different lengths (``lens``).
        """
        if self.lens is not None:
            raise UsageError("the values of these keys have different lengths; pass lens")
        return self.values.size // len(self.keys) if len(self.keys) else 0

    def rows(self) -> Values:
        """Return a view of shape (n, width): one row per key. Raises as ``width`` does."""
        return self.values.reshape(len(self.keys), self.width)

    def split(self) -> list[Values]:
        """Return a 1-D view of each key's values."""
        if self.lens is None:
            return list(self.rows())
        return np.split(self.values, np.cumsum(self.lens)[:-1]) if len(self.keys) else []


class KeyRange(NamedTuple):
    """The keys of one server: ``begin <= key < end``."""

    begin: int
    end: int


def server_ranges(num_servers: int) -> list[KeyRange]:
    """Return equal shares of all keys: server i begins at i*(2^64-1)//S.

    The last range includes 2^64-1, the largest key. (In ps-lite, ``GetServerKeyRanges`` in
    ``src/postoffice.cc``, this key and a few below it do not belong to any server.)
    """
    begins = [server * MAX_KEY // num_servers for server in range(num_servers)]
    return [KeyRange(*pair) for pair in zip(begins, [*begins[1:], MAX_KEY + 1], strict=True)]


Slicer: TypeAlias = Callable[[Keys, Sequence[KeyRange]], Sequence[slice]]
"""A function that divides sorted keys: it returns one slice per server, perhaps empty."""


def slice_by_range(keys: Keys, ranges: Sequence[KeyRange]) -> list[slice]:
    """Give each server the keys of its range; the default slicer."""
    if len(ranges) == 1:
        return [slice(0, len(keys))]
    begins = np.array([key_range.begin for key_range in ranges], dtype=np.uint64)
    cuts = [*np.searchsorted(keys, begins).tolist(), len(keys)]
    return [slice(start, stop) for start, stop in itertools.pairwise(cuts)]


def checked_slices(slices: Sequence[slice], num_keys: int, num_servers: int) -> list[slice]:
    """Check the result of a slicer; return the slices with bounds from 0.

    Raises:
        UsageError: the slices do not assign every key to exactly one server.
    """
    if len(slices) != num_servers or not all(isinstance(part, slice) for part in slices):
        raise UsageError(
            f"the slicer must return one slice for each of the {num_servers} servers, got {slices}"
        )
    plain = [slice(*part.indices(num_keys)) for part in slices]
    parts = sorted((part.start, part.stop) for part in plain if part.stop > part.start)
    ends = [0, *(stop for _, stop in parts)]
    starts = [*(start for start, _ in parts), num_keys]
    if starts != ends or any(part.step != 1 for part in plain):
        raise UsageError(
            "the slicer must assign each key to exactly one server, as consecutive runs of keys, "
            f"got {slices} for {num_keys} keys"
        )
    return plain


def cut_pairs(pairs: KVPairs, parts: Sequence[slice]) -> list[KVPairs]:
    """Return the pairs of each slice of the keys, as views."""
    n, values, lens = len(pairs.keys), pairs.values, pairs.lens
    if len(parts) == 1:
        return [pairs]
    if lens is not None:
        offsets = [0, *np.cumsum(lens).tolist()]
        return [
            KVPairs(pairs.keys[at], values[offsets[at.start] : offsets[at.stop]], lens[at])
            for at in parts
        ]
    width = 1 if values.ndim == 2 or n == 0 else len(values) // n
    return [KVPairs(pairs.keys[at], values[at.start * width : at.stop * width]) for at in parts]


# -- what callers pass ------------------------------------------------------------------


def as_keys(keys: ArrayLike) -> Keys:
    """Return keys as a uint64 array, if possible without a copy.

    Raises:
        UsageError: the keys are not 1-D, not integers, or negative.
    """
    array = _key_list(keys) if isinstance(keys, list | tuple) else _as_array(keys, "keys")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UsageError(
            "keys must be a 1-D array of unsigned 64-bit integers (numpy.uint64), got "
            f"{array.ndim}-D {array.dtype}"
        )
    if array.dtype.kind == "i":
        if array.size and (smallest := array.min()) < 0:
            raise UsageError(f"keys must not be negative, got {smallest}")
        if array.dtype == np.int64:
            return array.view(np.uint64)  # the same bits
    return array.astype(np.uint64, copy=False)


def _key_list(keys: Sequence[Any]) -> Keys:
    """Make an array of Python integers. (NumPy would turn [0, 2^64-1] into floats.)"""
    try:
        numbers = [operator.index(key) for key in keys]
        if min(numbers, default=0) < 0:  # NumPy 1 would turn it into a large number
            raise OverflowError(f"{min(numbers)} is negative")
        return np.array(numbers, dtype=np.uint64)
    except (TypeError, OverflowError) as error:
        raise UsageError(f"keys must be integers from 0 to 2^64-1: {error}") from error


def as_values(values: ArrayLike, empty: Empty | None) -> Values:
    """Return values C-contiguous, in native byte order; see ``owned`` for ``empty``.

    Raises:
        UsageError: the values are not bool, integers, floats or complex numbers.
    """
    array = _as_array(values, "values")
    if array.dtype.kind not in VALUE_KINDS:
        raise UsageError(f"values must be bool, integers, floats or complex, got {array.dtype}")
    return owned(array, array.dtype.newbyteorder("="), empty)


def as_lens(lens: ArrayLike, empty: Empty | None) -> Lens:
    """Return lengths as C-contiguous int32 or int64; see ``owned`` for ``empty``.

    Raises:
        UsageError: the lengths have another dtype.
    """
    array = _as_array(lens, "lens")
    if not array.size and not isinstance(lens, np.ndarray):
        array = array.astype(np.int64)
    if array.dtype not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise UsageError(f"lens must be int32 or int64, got {array.dtype}")
    return owned(array, array.dtype, empty)


def owned(array: NDArray[Any], dtype: DTypeLike, empty: Empty | None) -> NDArray[Any]:
    """Copy to a C-contiguous array made by ``empty``; if it is None, only if needed."""
    if empty is None:
        return array.astype(dtype, order="C", copy=False)
    copy = empty(array.shape, dtype)
    copy[...] = array
    return copy


def _as_array(data: ArrayLike, what: str) -> NDArray[Any]:
    try:
        return np.asarray(data)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{what} must be convertible to a NumPy array: {error}") from error


def check_result(array: Any, num_keys: int) -> None:
    """Check that pulled values can be written to an array.

    Raises:
        UsageError: they cannot; the text says why.
    """
    _check_writable(array, "the array for the values")
    if array.ndim not in (1, 2) or (array.ndim == 2 and len(array) != num_keys):
        raise UsageError(
            f"the array for the values of {num_keys} keys must be 1-D, or 2-D with one row for "
            f"each key, got shape {array.shape}"
        )
    if array.size and not num_keys:
        raise UsageError(f"got {array.size} values and no keys; pass keys, or an empty array")


def check_lens_result(array: Any, num_keys: int) -> None:
    """Check that the lengths of pulled values can be written to an array."""
    _check_writable(array, "the array for the lens")
    if array.dtype not in (np.dtype(np.int32), np.dtype(np.int64)) or array.shape != (num_keys,):
        raise UsageError(
            f"the array for the lens must be int32 or int64 of shape ({num_keys},), got "
            f"{array.dtype} of shape {array.shape}"
        )


def _check_writable(array: Any, what: str) -> None:
    if not isinstance(array, np.ndarray):
        raise UsageError(f"{what} must be a NumPy array, got {type(array).__name__}")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise UsageError(f"{what} must be writable and C-contiguous")


# -- the rules --------------------------------------------------------------------------


def fault_in(keys: Keys) -> str | None:
    """Return a text that says what is wrong with the order of keys; None if correct."""
    at = _first_breach(np.less, keys[:-1], keys[1:])
    if at is None:
        return None
    if keys[at] == keys[at + 1]:
        return f"key {keys[at]} appears twice (at positions {at} and {at + 1})"
    return (
        f"keys must be sorted: {keys[at + 1]} at position {at + 1} comes after {keys[at]}; "
        "sort keys and values with numpy.argsort(keys)"
    )


def is_rising(numbers: NDArray[Any]) -> bool:
    """Return whether each number is larger than the one before."""
    return _first_breach(np.less, numbers[:-1], numbers[1:]) is None


def same_keys(one: Keys, other: Keys) -> bool:
    """Return whether two lists are equal; compares a sample of the keys first."""
    if one is other:
        return True
    if len(one) != len(other):
        return False
    step = max(len(one) // _SAMPLE_KEYS, 1)
    sampled = np.array_equal(one[::step], other[::step])
    return sampled and _first_breach(np.equal, one, other) is None


def _first_breach(rule: np.ufunc, one: NDArray[Any], other: NDArray[Any]) -> int | None:
    """Find the first position where ``rule(one, other)`` does not hold."""
    for start in range(0, len(one), _BLOCK_KEYS):
        stop = start + _BLOCK_KEYS
        holds = rule(one[start:stop], other[start:stop])
        if np.count_nonzero(holds) != len(holds):  # faster than all() for few elements
            return start + int(holds.argmin())
    return None


def fault_in_values(num_keys: int, values: Values, lens: Lens | None) -> str | None:
    """Return a text that says what is wrong with the layout; None if correct."""
    if lens is not None:
        return _fault_in_lens(num_keys, values, lens)
    if values.ndim == 2:
        fits = len(values) == num_keys
    else:
        fits = values.ndim == 1 and (len(values) % num_keys == 0 if num_keys else not len(values))
    if fits:
        return None
    return (
        f"values of shape {values.shape} do not fit {num_keys} keys; pass a 1-D array with "
        "the same number of elements for each key, a 2-D array with one row for each key, or lens"
    )


def _fault_in_lens(num_keys: int, values: Values, lens: Lens) -> str | None:
    if lens.shape != (num_keys,):
        return f"lens must have one length for each of the {num_keys} keys, got shape {lens.shape}"
    if values.ndim != 1:
        return f"values must be 1-D if lens are given, got shape {values.shape}"
    # Check each length first, so that the sum cannot overflow.
    if (lens < 0).any() or (lens > len(values)).any():
        return f"each length in lens must be from 0 to the number of values, {len(values)}"
    total = int(lens.sum(dtype=np.int64))
    return (
        None
        if total == len(values)
        else f"the sum of lens must be the number of values, {len(values)}, got {total}"
    )


# -- putting answers together -----------------------------------------------------------


def assemble(answers: Sequence[KVPairs], out: Values | None, lens_out: Lens | None) -> Values:
    """Join the values of all servers in the order of the keys; fill ``lens_out``.

    Args:
        answers: in the order of the keys, without gaps.
        out: C-contiguous; None makes a new array, 2-D if all servers answered in rows.

    Raises:
        ProtocolError: the answers do not fit each other or ``out``; nothing was written.
    """
    if not answers:
        return np.empty(0, np.float32) if out is None else out
    dtypes = {answer.values.dtype for answer in answers}
    widths = {answer.width for answer in answers if answer.lens is None}
    if len(dtypes) > 1 or (len(widths) > 1 and lens_out is None):
        what = sorted({f"{a.values.dtype} of shape {a.values.shape}" for a in answers})
        raise ProtocolError(f"the servers' values differ in dtype or shape: {'; '.join(what)}")
    if out is None:
        out = _new_result(answers)
    total = sum(answer.values.size for answer in answers)
    if out.size != total or out.dtype not in dtypes:
        raise ProtocolError(
            f"the servers have {total} values of {answers[0].values.dtype} for these keys, the "
            f"array to fill has {out.size} of {out.dtype}"
        )
    np.concatenate([answer.values.reshape(-1) for answer in answers], out=out.reshape(-1))
    if lens_out is not None:
        lens_out[:] = np.concatenate(
            [
                np.full(len(answer.keys), answer.width) if answer.lens is None else answer.lens
                for answer in answers
            ]
        )
    return out


def _new_result(answers: Sequence[KVPairs]) -> Values:
    total = sum(answer.values.size for answer in answers)
    dtype = answers[0].values.dtype
    columns = {answer.values.shape[1:] for answer in answers}
    if len(columns) == 1 and answers[0].values.ndim == 2:
        num_keys = sum(len(answer.keys) for answer in answers)
        return np.empty((num_keys, *columns.pop()), dtype)
    return np.empty(total, dtype)
