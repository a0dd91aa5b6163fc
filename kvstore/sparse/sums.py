"""Sum row-sparse contributions in a fixed order: the arithmetic of every store.

**Order.** First the rows of one id within a contribution, left to right; then contributions, left
to right: what adding the dense arrays would give, to the last bit, signs of zeros included.
Where the rows lie, and in which blocks they are worked on, changes no bit.

**How.** Ids are made unique and sorted once for each contribution. For 50,000 ids of rows of 64
floats, NumPy's ``add.reduceat`` takes five times as long as what is done here, and neither adds
in order nor takes the same order for all widths; ``add.at`` takes four times as long. No I/O, no
threads. Read next: ``update.py``.
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
"""Up to this many rows of one id are added step by step, each step for all ids; more, id by id."""


class Contribution(NamedTuple):
    """The contribution of one device or worker: sorted different ids and their rows."""

    ids: Ids
    values: RowValues


class Picked(NamedTuple):
    """A contribution whose rows still stand where its caller has them."""

    ids: Ids
    """Each there once; sorted for row-sparse keys."""
    values: RowValues
    at: Ids | None = None
    """The row of ``values`` for each id; None where they stand in this order."""
    repeated: Ids = _NO_IDS
    """The places of ids that came several times, sorted: their rows are ``sums``."""
    sums: RowValues = np.empty((0, 0))

    def take(self, share: Any, out: RowValues) -> None:
        """Set ``out``, contiguous, to the rows at some places: a slice, or a sorted array."""
        rows = share if self.at is None else self.at[share]
        if isinstance(rows, slice) or self.values.dtype != out.dtype:
            with np.errstate(all="ignore"):
                np.copyto(out, self.values[rows], casting="unsafe")
        elif len(out):
            # With "raise", NumPy would take the rows into a buffer of its own first.
            np.take(self.values, rows, axis=0, out=out, mode="clip")
        if not len(self.repeated):
            return
        places = np.arange(len(self.ids))[share] if isinstance(share, slice) else share
        found = np.searchsorted(places, self.repeated)
        is_there = places.take(found, mode="clip") == self.repeated if len(places) else found < 0
        out[found[is_there]] = self.sums[is_there]

    def whole(self) -> Contribution:
        """Return whole rows in order; the caller's own array if it has them so."""
        if self.at is None:
            return Contribution(self.ids, self.values)
        rows = self.values[self.at]
        if len(self.repeated):
            rows[self.repeated] = self.sums
        return Contribution(self.ids, rows)


def pick(ids: Ids, values: RowValues) -> Picked:
    """Return rows as a contribution; those of one id are added in their order.

    In the accumulation dtype, rounded once to the dtype of ``values``. Copies no others.
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
    """Sum rows of equal ids; return the arrays themselves if none repeats."""
    return pick(ids, values).whole()


def _sums(values: RowValues, order: Ids, starts: Ids, ends: Ids) -> RowValues:
    """Return the sums of stretches of at least two rows, each in its order."""
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
    """The sum of contributions of one dtype: its ids at once, its rows block by block."""

    def __init__(self, contributions: Sequence[Contribution]) -> None:
        """At least one contribution; they are only read, and used until the last ``rows``."""
        self.values = [part.values for part in contributions]
        """The rows of each contribution."""
        self.dtype = accumulation_dtype(self.values[0].dtype)
        self.width: int = self.values[0].shape[1]
        several = [part.ids for part in contributions]
        self.ids = several[0]
        # ``at``: for each contribution the places of its rows in the sum.
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
        """Set ``out``, C-contiguous of dtype ``dtype``, to rows [start, stop) of the sum.

        Within ``np.errstate(all="ignore")``. Several threads may call at the same time.
        """
        if self._is_same:
            add_up([values[start:stop] for values in self.values], out)
            return
        for at, values in zip(self.at, self.values, strict=True):
            low, high = np.searchsorted(at, (start, stop))
            put_rows(values[low:high], out, at[low:high] - start)
        if out.dtype.kind in "fc":
            # Where a contribution lacks the row, its dense form adds 0.0, which -0.0 does not stay.
            np.add(out, out.dtype.type(0), out=out)
        if self._shared is None:  # two threads may both make it: either will do
            self._shared = _Shared(self)
        self._shared.rows(start, stop, out)

    def whole(self) -> RowValues:
        """Return all rows, as a new array."""
        out = np.empty((len(self.ids), self.width), self.dtype)
        with np.errstate(all="ignore"):
            self.rows(0, len(self.ids), out)
        return out


class _Shared:
    """The rows of a sum that several contributions have, which are added up."""

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
        """Which of ``_places`` each contribution has, and in which of its rows."""

    def rows(self, start: int, stop: int, out: RowValues) -> None:
        """Set those of the rows [start, stop) of the sum, which are ``out``."""
        first, last = map(int, np.searchsorted(self._places, (start, stop)))
        if first == last:
            return
        block = np.zeros((last - first, self._total.width), out.dtype)
        if out.dtype.kind in "fc":
            # -0.0 + x is x for every x: a sum of nothing but -0.0 stays it.
            block[self._is_in_all[first:last]] = -out.dtype.type(0)
        for (numbers, rows), values in zip(self._own, self._total.values, strict=True):
            low, high = np.searchsorted(numbers, (first, last))
            block[numbers[low:high] - first] += values[rows[low:high]]
        out[self._places[first:last] - start] = block


def put_rows(rows: RowValues, array: RowValues, places: Ids) -> None:
    """Set the rows ``places`` of ``array`` to ``rows``, cast to its dtype."""
    is_plain = rows.dtype == array.dtype and rows.flags.c_contiguous and array.flags.c_contiguous
    if is_plain and rows.size:
        # As single elements, rows are copied in two thirds of the time.
        whole_row = np.dtype((np.void, rows.shape[1] * rows.itemsize))
        array.view(whole_row)[places] = rows.view(whole_row)
    else:
        array[places] = rows
