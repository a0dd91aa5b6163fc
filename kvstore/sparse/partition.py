"""Map the rows of a key to its parts.

**Row-sparse keys**: the parts get rows in turn. With n parts, row r is row r // n of part r % n.
So all parts have the same number of rows, give or take one. This also spreads the rows that are
used often, since most of their ids are consecutive
(``docs/decisions/0020-rows-over-servers.md``).

**Dense keys** are cut into parts by bytes, whatever their rows (``kvstore/protocol/placement.py``).
This module treats such a part as rows: at most one piece of a row at each end, and whole rows
between them. Updates work element by element, so each of the three is updated as a small table.
Pure; memory is the caller's. Read next: ``payload.py``, ``update.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.cpu.sums import Flat, Workspace
from kvstore.optimizer.base import Optimizer
from kvstore.sparse.ids import Ids
from kvstore.sparse.sums import Contribution, RowValues, Sum
from kvstore.sparse.update import assign, update_all, update_lazily


class Share(NamedTuple):
    """The ids in a list that belong to one part."""

    at: Any
    """The positions of these ids in the list: a slice, or an array."""
    ids: Ids
    """The part's own numbers of these rows; sorted if the list is."""
    is_all: bool = False
    """Whether these are all rows of the part."""


class Stripes(NamedTuple):
    """The placement of the rows of a key on its parts."""

    num_rows: int
    num_parts: int

    def rows_of(self, part: int) -> int:
        """Return how many rows a part has."""
        return max(self.num_rows - part + self.num_parts - 1, 0) // self.num_parts

    def split(self, ids: Ids) -> list[Share]:
        """Return the share of each part of sorted ids."""
        n = self.num_parts
        if n == 1:
            return [Share(slice(None), ids, len(ids) == self.num_rows)]
        if len(ids) == self.num_rows:  # all rows, since ids are distinct
            return [Share(slice(p, None, n), np.arange(self.rows_of(p)), True) for p in range(n)]
        rows, parts = np.divmod(ids, n)
        shares = []
        for part in range(n):
            at = np.flatnonzero(parts == part)
            shares.append(Share(at, rows[at], len(at) == self.rows_of(part)))
        return shares

    def ids_of(self, part: int, rows: Ids) -> Ids:
        """Return the key's row ids for the part's own row numbers."""
        return rows if self.num_parts == 1 else rows * self.num_parts + part


class RowSegment(NamedTuple):
    """Rows [first, stop) of a part, all of one width, beginning at element ``start``."""

    first: int
    stop: int
    start: int
    width: int

    def of(self, array: Flat) -> RowValues:
        """Return a view of these rows in an array of the part's elements."""
        num_rows = self.stop - self.first
        return array[self.start : self.start + num_rows * self.width].reshape(num_rows, self.width)


class PartRows(NamedTuple):
    """The values of some rows of a part; cut rows have only the numbers in the part."""

    ids: Ids
    """Sorted and distinct; row 0 is the row in which the part begins."""
    values: Flat
    """The numbers of all these rows, one row after the other."""


class Cut(NamedTuple):
    """A part of a dense key whose rows have ``width`` numbers (at least one)."""

    num_elements: int
    width: int
    skip: int
    """How many numbers of its first row are before the part."""

    @property
    def num_rows(self) -> int:
        """How many rows have at least one number in the part."""
        return -(-(self.skip + self.num_elements) // self.width)

    def trim(self, ids: Ids) -> tuple[int, int]:
        """Return how many numbers of the first and of the last row are outside the part."""
        if not len(ids):
            return 0, 0
        behind = self.num_rows * self.width - self.skip - self.num_elements
        return self.skip if ids[0] == 0 else 0, behind if ids[-1] == self.num_rows - 1 else 0

    def elements(self, ids: Ids) -> int:
        """Return how many numbers these rows have in the part."""
        return len(ids) * self.width - sum(self.trim(ids))

    def segments(self) -> Iterator[RowSegment]:
        """Yield the part as up to three segments; in each, rows have one width."""
        num_rows, width = self.num_rows, self.width
        is_cut = (num_rows * width - self.skip - self.num_elements) > 0
        if num_rows == 1:
            yield RowSegment(0, 1, 0, self.num_elements)
            return
        first, start = 0, 0
        if self.skip:
            first, start = 1, width - self.skip
            yield RowSegment(0, 1, 0, start)
        stop = num_rows - 1 if is_cut else num_rows
        if stop > first:
            yield RowSegment(first, stop, start, width)
        start += (stop - first) * width
        if is_cut:
            yield RowSegment(stop, num_rows, start, self.num_elements - start)

    def within(self, rows: PartRows, segment: RowSegment) -> Contribution:
        """Return the rows that are in a segment, numbered from its first row."""
        low, high = map(int, np.searchsorted(rows.ids, (segment.first, segment.stop)))
        start = low * self.width - (self.trim(rows.ids)[0] if low else 0)
        values = rows.values[start : start + (high - low) * segment.width]
        return Contribution(
            rows.ids[low:high] - segment.first, values.reshape(high - low, segment.width)
        )


def update_part(
    cut: Cut,
    weight: Flat,
    states: Sequence[Flat],
    contributions: Sequence[PartRows | Flat],
    optimizer: Optimizer | None,
    count: int,
    workspace: Workspace,
) -> None:
    """Update a part with the sum of contributions; each has some rows or all elements.

    Without an optimizer the sum becomes the value, and rows that are not in it become zero.
    """
    for segment in cut.segments():
        total = Sum([_within(cut, each, segment) for each in contributions])
        rows = segment.of(weight)
        if optimizer is None:
            rows.fill(0)
            assign(rows, total.ids, total, workspace)
            continue
        mine = [segment.of(state) for state in states]
        update = update_lazily if optimizer.is_lazy("default") else update_all
        update(rows, mine, total.ids, total, optimizer, count, workspace)


def read_part(cut: Cut, weight: Flat, ids: Ids, out: Flat) -> None:
    """Copy the values of rows into ``out``, an array of ``cut.elements(ids)`` numbers."""
    wanted = PartRows(ids, out)
    for segment in cut.segments():
        mine = cut.within(wanted, segment)
        if len(mine.ids):
            # With "raise", NumPy would copy the rows to a temporary buffer first.
            segment.of(weight).take(mine.ids, axis=0, out=mine.values, mode="clip")


def _within(cut: Cut, contribution: PartRows | Flat, segment: RowSegment) -> Contribution:
    if isinstance(contribution, PartRows):
        return cut.within(contribution, segment)
    return Contribution(np.arange(segment.stop - segment.first), segment.of(contribution))
