"""Adding up row-sparse contributions, in a fixed order: the arithmetic of every store.

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

from kvstore.aggregate import add_up
from kvstore.dtypes import accumulation_dtype
from kvstore.sparse.ids import Ids, is_increasing, starts_of, unique_ids

RowValues = np.ndarray[Any, Any]
"""Rows as a 2-D array (number of rows, numbers in a row), in any layout."""

_FEW = 32
"""So many rows of one id are added step by step, in one step for all ids; more of them id by id."""


class Contribution(NamedTuple):
    """What one device, or one worker, adds: ids sorted, each there once, and their rows."""

    ids: Ids
    values: RowValues


def sum_repeated(ids: Ids, values: RowValues) -> Contribution:
    """Ids sorted and each there once; rows of one id are added in the order they stand.

    In the accumulation dtype, rounded once to the dtype of ``values``. The arrays themselves
    where there is nothing to do, else new ones.
    """
    if is_increasing(ids):
        return Contribution(ids, values)
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    starts = starts_of(ordered)
    unique = ordered[starts]
    if len(unique) == len(ids):
        return Contribution(unique, values[order])
    total = values[order[starts]].astype(accumulation_dtype(values.dtype), copy=False)
    ends = np.append(starts[1:], len(ids))
    with np.errstate(all="ignore"):
        _add_rest(total, values, order, starts, ends)
        return Contribution(unique, total.astype(values.dtype, copy=False))


def _add_rest(total: RowValues, values: RowValues, order: Ids, starts: Ids, ends: Ids) -> None:
    """Add to each row of ``total``, which is the first of its id, the others of that id."""
    longer = np.flatnonzero(ends - starts > 1)
    for step in range(1, _FEW):
        total[longer] += values[order[starts[longer] + step]]
        longer = longer[ends[longer] - starts[longer] > step + 1]
        if not len(longer):
            return
    for row in longer:
        rest = values[order[starts[row] + _FEW : ends[row]]].astype(total.dtype, copy=False)
        chain = np.concatenate([total[row : row + 1], rest])
        # accumulate adds in order; reduce would add in pairs.
        total[row] = np.add.accumulate(chain, axis=0, dtype=total.dtype)[-1]


class Sum:
    """The sum of contributions of one dtype: its ids at once, its rows block by block."""

    def __init__(self, contributions: Sequence[Contribution]) -> None:
        """At least one contribution; they are only read, and used until the last ``rows``."""
        self._values = [part.values for part in contributions]
        self.dtype = accumulation_dtype(self._values[0].dtype)
        self.width: int = self._values[0].shape[1]
        first = contributions[0].ids
        is_same = all(np.array_equal(first, part.ids) for part in contributions[1:])
        self.ids = first
        self._places: list[Ids] | None = None
        """For each contribution the places of its rows in the sum; None if all have all rows."""
        if not is_same:
            self.ids = unique_ids(np.concatenate([part.ids for part in contributions]))
            self._places = [np.searchsorted(self.ids, part.ids) for part in contributions]
            counts = np.zeros(len(self.ids), np.intp)
            for places in self._places:
                counts[places] += 1
            self._is_in_all = counts == len(contributions)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, start: int, stop: int, out: RowValues) -> None:
        """Set ``out``, C-contiguous of dtype ``dtype``, to rows [start, stop) of the sum.

        Within ``np.errstate(all="ignore")``.
        """
        if self._places is None:
            add_up([values[start:stop] for values in self._values], out)
            return
        out.fill(0)
        if out.dtype.kind in "fc":
            # -0.0 + x is x for every x: a sum of nothing but -0.0 stays it. Where a contribution
            # lacks the row, its dense form adds 0.0.
            out[self._is_in_all[start:stop]] = -out.dtype.type(0)
        for places, values in zip(self._places, self._values, strict=True):
            low, high = np.searchsorted(places, (start, stop))
            if high - low == stop - start:
                np.add(out, values[low:high], out=out, dtype=out.dtype)
            else:
                out[places[low:high] - start] += values[low:high]

    def whole(self) -> RowValues:
        """All rows, as a new array."""
        out = np.empty((len(self.ids), self.width), self.dtype)
        with np.errstate(all="ignore"):
            self.rows(0, len(self.ids), out)
        return out
