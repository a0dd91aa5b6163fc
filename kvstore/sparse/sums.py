"""Sum row-sparse contributions in a fixed order: the arithmetic of every store.

**Order.** Within a contribution, the rows of one id are added from left to right. Then the
contributions are added from left to right. The result equals the sum of the dense arrays to
the last bit, including the signs of zeros. The order of the rows in memory and the size of blocks
do not change a bit.

**How.** The ids of each contribution are sorted and made unique once. For 50,000 ids with rows of
64 floats, NumPy's ``add.reduceat`` takes five times as long as this module; it does not add in
order, and its order depends on the width. ``add.at`` takes four times as long. No I/O, no threads.
Read next: ``update.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.cpu import kernels
from kvstore.arrays.cpu.sums import add_up
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.sparse.ids import Ids, is_increasing, sorted_with_places, starts_of, union_of

RowValues = np.ndarray[Any, Any]
"""Rows as a 2-D array (number of rows, numbers in a row), in any layout."""

_NO_IDS: Ids = np.empty(0, np.int64)

_FEW = 32
"""Up to this many rows of each id are added for all ids at once; further rows id by id."""


class Contribution(NamedTuple):
    """The rows of one device or worker, with sorted, distinct ids."""

    ids: Ids
    values: RowValues


class Picked(NamedTuple):
    """A contribution that refers to rows in the caller's array."""

    ids: Ids
    """The distinct ids; sorted for row-sparse keys."""
    values: RowValues
    at: Ids | None = None
    """For each id the index of its row in ``values``; None if the rows are in the order of ids."""
    repeated: Ids = _NO_IDS
    """The sorted positions in ``ids`` of ids that were repeated; ``sums`` has their rows."""
    sums: RowValues = np.empty((0, 0))

    def take(self, share: Any, out: RowValues) -> None:
        """Copy the rows at positions ``share`` (a slice or sorted array) to ``out``.

        ``out`` is contiguous.
        """
        rows = share if self.at is None else self.at[share]
        if isinstance(rows, slice) or self.values.dtype != out.dtype:
            with np.errstate(all="ignore"):
                np.copyto(out, self.values[rows], casting="unsafe")
        elif len(out):
            # With "raise", NumPy would copy the rows to a temporary buffer first.
            np.take(self.values, rows, axis=0, out=out, mode="clip")
        if not len(self.repeated):
            return
        places = np.arange(len(self.ids))[share] if isinstance(share, slice) else share
        found = np.searchsorted(places, self.repeated)
        is_there = places.take(found, mode="clip") == self.repeated if len(places) else found < 0
        out[found[is_there]] = self.sums[is_there]

    def whole(self) -> Contribution:
        """Return the rows in the order of the ids, without a copy if they already are."""
        if self.at is None:
            return Contribution(self.ids, self.values)
        rows = self.values[self.at]
        if len(self.repeated):
            rows[self.repeated] = self.sums
        return Contribution(self.ids, rows)


def pick(ids: Ids, values: RowValues) -> Picked:
    """Return rows as a contribution; add the rows of each id in their order.

    They are added in the accumulation dtype and rounded once to the dtype of ``values``. Other
    rows are not copied.
    """
    if is_increasing(ids):
        return Picked(ids, values)
    ordered, order = sorted_with_places(ids)
    starts = starts_of(ordered)
    unique = ordered[starts]
    if len(unique) == len(ids):
        return Picked(unique, values, order)
    lengths = np.diff(starts, append=len(ids))
    repeated = np.flatnonzero(lengths > 1)
    with np.errstate(all="ignore"):
        sums = _sums(values, order, starts[repeated], starts[repeated] + lengths[repeated])
        sums = sums.astype(values.dtype, copy=False)
    return Picked(unique, values, order[starts], repeated, sums)


def sum_repeated(ids: Ids, values: RowValues) -> Contribution:
    """Sum rows of equal ids; return the arrays themselves if no id is repeated."""
    return pick(ids, values).whole()


def _sums(values: RowValues, order: Ids, starts: Ids, ends: Ids) -> RowValues:
    """Return the sum of each stretch of two or more rows, added in their order."""
    total: RowValues = values[order[starts]].astype(accumulation_dtype(values.dtype), copy=False)
    longer = np.arange(len(starts))
    for step in range(1, _FEW):
        total[longer] += values[order[starts[longer] + step]]
        longer = longer[ends[longer] - starts[longer] > step + 1]
        if not len(longer):
            return total
    for row in longer:
        rest = values[order[starts[row] + _FEW : ends[row]]].astype(total.dtype, copy=False)
        chain = np.concatenate([total[row : row + 1], rest])
        # accumulate adds in order; reduce would add in pairs.
        total[row] = np.add.accumulate(chain, axis=0, dtype=total.dtype)[-1]
    return total


class Sum:
    """The sum of contributions of one dtype; rows are computed block by block."""

    def __init__(self, contributions: Sequence[Contribution]) -> None:
        """Keep one or more contributions; they must not change until the last ``rows``."""
        self.values = [part.values for part in contributions]
        """The rows of each contribution."""
        self.dtype = accumulation_dtype(self.values[0].dtype)
        self.width: int = self.values[0].shape[1]
        several = [part.ids for part in contributions]
        self.ids = several[0]
        # ``at``: for each contribution the positions of its rows in the sum.
        self._is_same = all(np.array_equal(self.ids, ids) for ids in several[1:])
        merged = None if self._is_same else kernels.merge_ids(several)
        if self._is_same:
            self.at = [np.arange(len(self.ids))] * len(several)
        elif merged is not None:
            self.ids, self.at = merged
        else:
            self.ids = union_of(several)
            self.at = [np.searchsorted(self.ids, ids) for ids in several]
        self._shared: _Shared | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, start: int, stop: int, out: RowValues) -> None:
        """Set ``out`` to rows [start, stop) of the sum.

        ``out`` is C-contiguous and has the dtype ``dtype``. Call this method within
        ``np.errstate(all="ignore")``. Several threads may call it at the same time.
        """
        if self._is_same:
            add_up([values[start:stop] for values in self.values], out)
            return
        for at, values in zip(self.at, self.values, strict=True):
            low, high = np.searchsorted(at, (start, stop))
            put_rows(values[low:high], out, at[low:high] - start)
        if out.dtype.kind in "fc":
            # A contribution without the row adds 0.0 in its dense form, and -0.0 + 0.0 is 0.0.
            np.add(out, out.dtype.type(0), out=out)
        if self._shared is None:  # if two threads both create it, either object is fine
            self._shared = _Shared(self)
        self._shared.rows(start, stop, out)

    def whole(self) -> RowValues:
        """Return all rows, as a new array."""
        out = np.empty((len(self.ids), self.width), self.dtype)
        with np.errstate(all="ignore"):
            self.rows(0, len(self.ids), out)
        return out


class _Shared:
    """The rows of a sum to which several contributions add."""

    def __init__(self, total: Sum) -> None:
        counts = np.zeros(len(total), np.intp)
        for at in total.at:
            counts[at] += 1
        self._total = total
        self._places = np.flatnonzero(counts > 1)
        self._is_in_all = counts[self._places] == len(total.at)
        own = [np.flatnonzero(counts[at] > 1) for at in total.at]
        self._own = [
            (np.searchsorted(self._places, at[rows]), rows)
            for at, rows in zip(total.at, own, strict=True)
        ]
        """For each contribution: indices into ``_places``, and the rows that belong there."""

    def rows(self, start: int, stop: int, out: RowValues) -> None:
        """Set the shared rows in ``out``, which has rows [start, stop) of the sum."""
        first, last = map(int, np.searchsorted(self._places, (start, stop)))
        if first == last:
            return
        block = np.zeros((last - first, self._total.width), out.dtype)
        if out.dtype.kind in "fc":
            # -0.0 + x is x for every x, so a sum of only -0.0 stays -0.0.
            block[self._is_in_all[first:last]] = -out.dtype.type(0)
        for (numbers, rows), values in zip(self._own, self._total.values, strict=True):
            low, high = np.searchsorted(numbers, (first, last))
            block[numbers[low:high] - first] += values[rows[low:high]]
        out[self._places[first:last] - start] = block


def put_rows(rows: RowValues, array: RowValues, places: Ids) -> None:
    """Set the rows ``places`` of ``array`` to ``rows``, cast to its dtype."""
    is_plain = rows.dtype == array.dtype and rows.flags.c_contiguous and array.flags.c_contiguous
    if is_plain and rows.size:
        # Copying each row as one element takes two thirds of the time.
        whole_row = np.dtype((np.void, rows.shape[1] * rows.itemsize))
        array.view(whole_row)[places] = rows.view(whole_row)
    else:
        array[places] = rows
