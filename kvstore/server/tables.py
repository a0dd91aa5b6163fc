"""``TablePart``: a server's share of a growing table, as a part with rows.

A pull may create and evict rows, so pulls, rounds and requests take a lock. Read next:
``sparse/tables/shard.py`` for the rules of creation and eviction, ``rows.py`` for the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.checkpoint.tables import FileRows, ShareRows
from kvstore.server.memory import StoreState
from kvstore.server.row_part import RowPart, WantedRows, longs, not_loading, rows_in
from kvstore.sparse.ids import Ids, is_increasing
from kvstore.sparse.payload import RowPayload, RowPayloadKind
from kvstore.sparse.sums import Contribution, RowValues
from kvstore.sparse.tables.ages import MOST_TIME, stamp_at
from kvstore.sparse.tables.settings import checked_lines, lineage_from_plain, lineage_to_plain
from kvstore.sparse.tables.shard import TableShare
from pslite.errors import ProtocolError, UsageError, unexpected

MOST_MARKS = 2**31 - 2
"""Marks are kept in 32 bits."""


class TablePart(RowPart):
    """A server's share of one table."""

    ending = "closed"

    def __init__(self, store: StoreState, lane: int, number: int, share: TableShare) -> None:
        settings = share.settings
        title = f"table {settings.name!r}"
        super().__init__(store, lane, number, title, settings.dim, settings.dtype)
        self.share = share
        self._rows = ShareRows(share)

    def apply(self, contributions: Sequence[Contribution]) -> None:
        with self.lock:
            self.share.push(contributions)

    def _pushed_ids(self, payload: RowPayload) -> Ids:
        if payload.kind is not RowPayloadKind.ROWS:
            raise ProtocolError(f"expected ids and gradients for the {self.title}, got a pull")
        return payload.ids

    def _wanted(self, payload: RowPayload) -> WantedRows:
        if payload.kind not in (RowPayloadKind.WANTED, RowPayloadKind.LOOK):
            raise ProtocolError(f"a pull of the {self.title} has no ids: {payload.kind.name}")
        # The worker may use its memory again while the pull waits for a round.
        return WantedRows(payload.kind, payload.ids.copy(), self._bytes_of(payload))

    def _read(self, wanted: WantedRows, out: RowValues, *, before_last: bool) -> None:
        if before_last:  # no worker that uses a table is replaced
            raise UsageError(f"the rows of {self.title} before the last round are not kept")
        self.share.pull(wanted.ids, out, touches=wanted.kind is RowPayloadKind.WANTED)

    # -- the table as a whole: with the lock, on the lane's thread ---------------------

    def mark(self, mark: int, plain: list[Any]) -> list[Any]:
        """Return the next mark, the counts of pushes and updates, and the lineage.

        Unless ``mark`` is 0, first set the mark, which later changes come after, and the lineage
        ``plain``.
        """
        _check_mark(mark)
        if mark:
            self._rows.set_mark(mark, lineage_from_plain(plain))
        *numbers, lineage = self._rows.counters()
        return [*numbers, lineage_to_plain(lineage)]

    # -- for files ---------------------------------------------------------------------

    def nbytes(self) -> tuple[int, int]:
        rows = self.share.rows
        return rows.values.nbytes, rows.memory_bytes - rows.values.nbytes

    def held(self) -> tuple[int, Sequence[Ids]]:
        """Return the count of updates, and the ids, touch times and marks of all rows."""
        return self.share.rows.count, self._rows.held()

    def copies(self, ids: Ids, *, with_states: bool) -> list[np.ndarray[Any, Any]]:
        is_there, arrays = self._rows.copies(ids, with_states=with_states)
        return [is_there, *arrays]

    def begin(self, fields: Sequence[Any], columns: Sequence[Ids]) -> None:
        """Begin to load an export or a delta."""
        if len(columns) != 4 or [type(field) for field in fields] != [bool, int]:
            raise unexpected("4 columns of rows, a flag and a mark", (len(columns), list(fields)))
        is_delta, mark = fields
        _check_mark(mark)
        rows = FileRows(*columns)
        _check_rows(rows.ids, rows.stamps)
        _check_rows(rows.kept, rows.kept_stamps)
        self._rows.begin(rows, mark, is_delta=is_delta)

    def write(self, frames: Sequence[Any]) -> None:
        if len(frames) < 3:
            raise unexpected("frames of ids, times and rows, at least 3", len(frames))
        ids, stamps, *_ = map(longs, frames[:2])
        _check_rows(ids, stamps)
        if not self._rows.is_loading:
            raise not_loading(self.title)
        own, arrays = self.share.rows, frames[2:]
        dtypes = [array.dtype for array in (own.values, *own.states)]
        some = dtypes[:1] if len(arrays) == 1 else dtypes
        self._rows.write(ids, stamps, rows_in(self.title, len(ids), self.width, arrays, some))

    def end(self, num_updates: int, fields: Sequence[Any]) -> None:
        if [type(field) for field in fields] != [int, list] or not 0 <= fields[0] <= MOST_TIME:
            raise unexpected("a time and the lineage of a table", list(fields))
        time, lines = fields[0], checked_lines(fields[1])
        if not self._rows.is_loading:
            raise not_loading(self.title)
        self._rows.end(None if num_updates < 0 else num_updates, time, lines)


def _check_mark(mark: int) -> None:
    if not 0 <= mark < MOST_MARKS:
        raise ProtocolError(f"a mark of a table must be below {MOST_MARKS}, got {mark}")


def _check_rows(ids: Ids, stamps: Ids) -> None:
    """Raise ``ProtocolError`` unless ids are sorted and stamps are valid."""
    is_fine = len(ids) == len(stamps) and is_increasing(ids)
    if not is_fine or ((stamps < 0) | (stamps >= stamp_at(MOST_TIME + 1))).any():
        found = (len(ids), len(stamps), ids[:3].tolist(), stamps[:3].tolist())
        raise unexpected("increasing ids of rows and a valid time for each", found)
