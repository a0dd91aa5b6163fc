"""Read and write the rows of a growing table on servers, for files.

Rows are merged from the servers' shares, sorted by id, and transferred in blocks. Callers pass the
function that waits. Read next: ``checkpoint/tables.py`` for the files, ``row_pages.py`` for the
requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.checkpoint.tables import FileRows, TableCounters, TableHome, TableRows, check_fits
from kvstore.protocol.requests import StoreCall, unpack
from kvstore.sparse.ids import Ids
from kvstore.sparse.sums import RowValues
from kvstore.sparse.tables.lineage import Lineage, Lines, agreed, lines_to_plain
from kvstore.sparse.tables.settings import lineage_from_plain, lineage_to_plain
from kvstore.stores.dist.row_pages import Flags, RowPages, Wait, memory_of
from pslite.node.customer import Reply

Frames = Sequence[Sequence[Any]]
"""The frames of a message to each server, by rank."""


class ServerRows(TableHome):
    """One table on the servers."""

    def __init__(self, pages: RowPages, wait: Wait, most_bytes: int) -> None:
        """Limit messages to ``most_bytes``."""
        self.title = pages.home.title
        self.most_bytes = most_bytes
        self._pages = pages
        self._wait = wait

    def held(self, most: int | None = None) -> TableRows:
        """Return all rows; they arrive in messages of ``most`` rows, or as many as fit."""
        most = max(self.most_bytes // 48, 1) if most is None else most
        found = [part.columns for part in self._pages.held(most, self._wait)]
        held = TableRows(*map(np.concatenate, zip(*found, strict=True)))
        order = np.argsort(held.ids)
        return TableRows(*(array[order] for array in held))

    def read(self, ids: Ids, dtypes: Sequence[np.dtype[Any]]) -> tuple[Flags, list[RowValues]]:
        is_there, arrays = self._pages.read(ids, dtypes, self._wait, with_states=len(dtypes) > 1)
        return is_there, arrays if is_there.all() else [array[is_there] for array in arrays]

    def counters(self) -> TableCounters:
        found = [unpack(reply.body, int, int, int, list) for reply in self._mark(0, [])]
        next_mark, time, count = (max(row[column] for row in found) for column in range(3))
        return TableCounters(
            next_mark, time, count, agreed([lineage_from_plain(row[3]) for row in found])
        )

    def set_mark(self, mark: int, lineage: Lineage) -> None:
        self._mark(mark, lineage_to_plain(lineage))

    def _mark(self, mark: int, lineage: list[Any]) -> list[Reply]:
        replies: list[Reply] = self._wait(self._pages.ask_each(StoreCall.MARK_TABLE, mark, lineage))
        return replies

    def shared(self, rows: FileRows) -> Frames:
        """Return each server's share of a file's ids and stamps.

        A server needs all of its ids, 16 bytes each, since it chooses which rows to keep.
        """
        changed, kept = map(self._pages.home.split, (rows.ids, rows.kept))
        frames = [
            [
                *(memory_of(array[mine.at]) for array in (rows.ids, rows.stamps)),
                *(memory_of(array[others.at]) for array in (rows.kept, rows.kept_stamps)),
            ]
            for mine, others in zip(changed, kept, strict=True)
        ]
        most = max(sum(frame.nbytes for frame in row) for row in frames)
        check_fits(self, "the list of ids for one server", most)
        return frames

    def begin(self, shared: Frames, mark: int, *, is_delta: bool) -> None:
        self._wait(self._pages.begin(is_delta, mark, frames=shared))

    def write(self, ids: Ids, stamps: Ids, arrays: Sequence[RowValues]) -> None:
        self._wait(self._pages.write([ids, stamps, *arrays]))

    def end(self, num_updates: int | None, time: int, lines: Lines) -> None:
        count = -1 if num_updates is None else num_updates
        self._wait(self._pages.end(count, time, lines_to_plain(lines)))
