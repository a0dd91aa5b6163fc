"""Export and load the rows of a growing table that servers hold.

Rows come sorted by id, merged from the servers' shares, a block at a time; of all rows at once
only ids, times and marks are there, 25 bytes each. Blocking waits are those of the caller. Read
next: ``checkpoint/tables.py`` for the format, ``row_pages.py`` for what is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.checkpoint.tables import (
    Contents,
    FileRows,
    TableFile,
    checked_arrays,
    rows_of,
    write_export,
)
from kvstore.errors import CheckpointError
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import state_names
from kvstore.protocol.requests import StoreCall, unpack
from kvstore.sparse.ids import Ids
from kvstore.sparse.sums import RowValues
from kvstore.stores.dist.row_pages import Flags, RowPages, Wait, memory_of
from kvstore.tables.lineage import Lineage, agreed, lines_to_plain
from kvstore.tables.settings import TableSettings, lineage_from_plain, lineage_to_plain
from pslite.node.customer import Reply

Frames = Sequence[Sequence[Any]]
"""For each server the frames of a message, by its rank."""

_BLOCK_BYTES = 16 << 20
_HEADER_BYTES = 4096


class TableRows(NamedTuple):
    """All rows of a table, sorted by id, but for their numbers."""

    ids: Ids
    stamps: Ids
    """When they were touched (``tables/eviction.py``); each server counts by itself."""
    changed: Ids
    """Since which mark they have not changed."""


class TableCounters(NamedTuple):
    """What the shares of a table count alike."""

    next_mark: int
    time: int
    """Pushes."""
    num_updates: int
    lineage: Lineage


class TableFiles:
    """Reads and writes one table on the servers."""

    def __init__(self, pages: RowPages, wait: Wait, most_bytes: int) -> None:
        """A message has at most ``most_bytes``."""
        self._pages = pages
        self._wait = wait
        self._most_bytes = most_bytes
        self._title = pages.home.title

    def held(self, most: int | None = None) -> TableRows:
        """The rows that there are, in messages of ``most`` rows or as many as fit."""
        most = max(self._most_bytes // 48, 1) if most is None else most
        found = [part.columns for part in self._pages.held(most, self._wait)]
        held = TableRows(*map(np.concatenate, zip(*found, strict=True)))
        order = np.argsort(held.ids)
        return TableRows(*(array[order] for array in held))

    def read(self, ids: Ids, dtypes: Sequence[np.dtype[Any]]) -> tuple[Flags, list[RowValues]]:
        """Which of these different ids have rows, and arrays of rows: values, then states.

        ``dtypes`` are those of the arrays; more than one for states, too. Other rows are not set.
        """
        return self._pages.read(ids, dtypes, self._wait, with_states=len(dtypes) > 1)

    def numbers(self) -> TableCounters:
        """What all servers count alike, and the lineage that they agree on."""
        found = [unpack(reply.body, int, int, int, list) for reply in self._mark(0, [])]
        next_mark, time, count = (max(row[column] for row in found) for column in range(3))
        return TableCounters(
            next_mark, time, count, agreed([lineage_from_plain(row[3]) for row in found])
        )

    def _mark(self, mark: int, lineage: list[Any]) -> list[Reply]:
        replies: list[Reply] = self._wait(self._pages.ask_each(StoreCall.MARK_TABLE, mark, lineage))
        return replies

    def write(
        self, path: Any, settings: TableSettings, optimizer: Optimizer | None, since: int | None
    ) -> None:
        """Write an export, with states where there is an ``optimizer``, and make a new mark.

        Nothing may change meanwhile; raises ``CheckpointError`` where rows have gone.
        """
        mark, time, count, lineage = self.numbers()
        self._mark(mark, lineage_to_plain(lineage))
        held = self.held()
        has_changed = np.ones(len(held.ids), np.bool_) if since is None else held.changed > since
        ids = held.ids[has_changed]
        dtypes = [settings.dtype]
        if optimizer is not None:
            num_states = len(state_names(optimizer, settings.dtype))
            dtypes += [accumulation_dtype(settings.dtype)] * num_states

        def read(start: int, stop: int) -> Sequence[RowValues]:
            is_there, arrays = self.read(ids[start:stop], dtypes)
            if not is_there.all():
                raise CheckpointError(
                    f"{path} was not written: rows of {self._title} were evicted meanwhile; "
                    "let no thread pull or push during an export"
                )
            return arrays

        block_rows = self._block_rows(settings.dim * sum(dtype.itemsize for dtype in dtypes))
        numbers = (since, mark, time, count, lineage.until(mark))
        found = Contents(settings, optimizer, held.ids, held.stamps, has_changed, *numbers)
        write_export(path, found, read, block_rows)

    def _block_rows(self, row_bytes: int) -> int:
        return max(min(_BLOCK_BYTES, self._most_bytes // 2) // (row_bytes + 16), 1)

    def load(self, path: Any, settings: TableSettings, optimizer: Optimizer | None) -> None:
        """Have the servers take over an export, each what falls to it.

        Raises ``CheckpointError``: before anything is sent, for a file that does not fit; a disk
        that fails in the middle leaves the table empty.
        """
        with TableFile(path) as file:
            arrays = checked_arrays(file, settings, optimizer, self.numbers().lineage.at)
            states_bytes = (len(arrays) - 1) * accumulation_dtype(settings.dtype).itemsize
            self._check_fits("a row of it", settings.dim * (settings.dtype.itemsize + states_bytes))
            frames = self._frames_of(rows_of(file))
            try:
                self._wait(self._pages.begin(file.is_delta, file.mark, frames=frames))
                self._load(file, arrays)
            except BaseException:
                nothing = self._frames_of(FileRows(*[np.empty(0, np.int64)] * 4))
                self._wait(self._pages.begin(False, 0, frames=nothing))
                raise

    def _load(self, file: TableFile, arrays: Sequence[str]) -> None:
        step = self._block_rows(8 * file.spec.shape[1] * len(arrays))
        for start in range(0, len(file.ids), step):
            stop = min(start + step, len(file.ids))
            rows = [file.rows(array, start, stop) for array in arrays]
            columns = [file.ids[start:stop], file.stamps[start:stop], *rows]
            self._wait(self._pages.write(columns))
        count = file.count_of_updates
        lines = lines_to_plain(file.lines)
        self._wait(self._pages.end(-1 if count is None else count, file.time, lines))

    def _frames_of(self, rows: FileRows) -> Frames:
        """For each server the rows of a file: it chooses among them, so it has to know all of
        them, 16 bytes each. Raises ``CheckpointError`` for more than a message holds."""
        changed, kept = map(self._pages.home.split, (rows.ids, rows.kept))
        frames = [
            [
                *(memory_of(array[mine.at]) for array in (rows.ids, rows.stamps)),
                *(memory_of(array[others.at]) for array in (rows.kept, rows.kept_stamps)),
            ]
            for mine, others in zip(changed, kept, strict=True)
        ]
        most = max(sum(frame.nbytes for frame in row) for row in frames)
        self._check_fits("the ids for one server", most)
        return frames

    def _check_fits(self, what: str, nbytes: int) -> None:
        if nbytes > self._most_bytes - _HEADER_BYTES:
            raise CheckpointError(
                f"the file does not fit {self._title}: {what}: {nbytes} bytes in a message, "
                f"of which PS_MAX_MESSAGE_BYTES allows {self._most_bytes}: use more servers, or "
                "raise that on all nodes"
            )
