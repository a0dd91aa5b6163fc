"""All rows of a distributed table on one worker, and in files: reading them from the servers.

Rows come sorted by id, merged from the servers' shares, a block at a time; of all rows at once
only ids, times and marks are there, 25 bytes each. Blocking waits are those of the caller. Read
next: ``tables/files.py`` for the format, ``table_stores.py``, which answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvstore.dtypes import accumulation_dtype
from kvstore.errors import CheckpointError
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import state_names
from kvstore.protocol import StoreCall, pack, unpack
from kvstore.sparse.ids import Ids
from kvstore.sparse.sums import RowValues
from kvstore.tables.files import Contents, TableFile, write_export
from kvstore.tables.hashing import shares_of
from kvstore.tables.lineage import Lineage, agreed, lines_to_plain
from kvstore.tables.loading import FileRows, checked_arrays, rows_of
from kvstore.tables.plain import lineage_from_plain, lineage_to_plain
from kvstore.tables.settings import TableSettings
from pslite import Future
from pslite.customer import Reply
from pslite.errors import ProtocolError

Flags = np.ndarray[Any, np.dtype[np.bool_]]
Frames = Sequence[Sequence[Any]]
"""For each server the frames of a message, by its rank."""

_BLOCK_BYTES = 16 << 20
_HEADER_BYTES = 4096


class AskEach(Protocol):
    """Asks every server something of its own."""

    def __call__(
        self, call: StoreCall, bodies: Sequence[bytes], frames: Sequence[Sequence[Any]] = ()
    ) -> Future[list[Reply]]: ...


class Held(NamedTuple):
    """All rows of a table, sorted by id, but for their numbers."""

    ids: Ids
    stamps: Ids
    """When they were touched (``tables/ages.py``); each server counts by itself."""
    changed: Ids
    """Since which mark they have not changed."""


class Numbers(NamedTuple):
    """What the shares of a table count alike."""

    next_mark: int
    time: int
    """Pushes."""
    num_updates: int
    lineage: Lineage


class TableFiles:
    """Reads one table from the servers."""

    def __init__(
        self,
        ask_each: AskEach,
        wait: Callable[[Future[Any]], Any],
        parts: Sequence[int],
        most_bytes: int,
        title: str,
    ) -> None:
        """``parts`` are those of the servers by rank; a message has at most ``most_bytes``."""
        self._ask_each = ask_each
        self._wait = wait
        self._parts = parts
        self._most_bytes = most_bytes
        self._title = title

    def held(self, most: int | None = None) -> Held:
        """The rows that there are, in messages of ``most`` rows or as many as fit."""
        most = max(self._most_bytes // 48, 1) if most is None else most
        found: list[list[Ids]] = [[np.empty(0, np.int64)] * 3]
        after: list[list[int]] = [[] for _ in self._parts]
        while True:
            pieces = self._held_above(after, most)
            found += pieces
            if all(len(ids) < most for ids, *_ in pieces):
                break
            after = [
                [int(ids[-1])] if len(ids) else before
                for (ids, *_), before in zip(pieces, after, strict=True)
            ]
        held = Held(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
        order = np.argsort(held.ids)
        return Held(*(array[order] for array in held))

    def _held_above(self, after: Sequence[list[int]], most: int) -> list[list[Ids]]:
        bodies = [pack(part, last, most) for part, last in zip(self._parts, after, strict=True)]
        found = []
        for reply in self._wait(self._ask_each(StoreCall.HELD_OF_TABLE, bodies)):
            sizes = {memoryview(frame).nbytes for frame in reply.frames}
            if len(reply.frames) != 3 or len(sizes) != 1 or max(sizes) % 8:
                raise ProtocolError(f"{self._title}: a server's list of rows is malformed")
            arrays = [np.frombuffer(frame, "<i8") for frame in reply.frames]
            found.append([array.astype(np.int64, copy=False) for array in arrays])
        return found

    def read(
        self, ids: Ids, dtypes: Sequence[np.dtype[Any]], width: int
    ) -> tuple[Flags, list[RowValues]]:
        """Which of these different ids have rows, and arrays of rows: values, then states.

        ``dtypes`` are those of the arrays; more than one for states, too. Other rows are not set.
        """
        places = split(ids, len(self._parts))
        bodies = [pack(part, len(dtypes) > 1) for part in self._parts]
        frames = [[ids[mine].astype("<i8").data] for mine in places]
        arrays: list[RowValues] = [np.empty((len(ids), width), dtype) for dtype in dtypes]
        is_there = np.zeros(len(ids), np.bool_)
        replies = self._wait(self._ask_each(StoreCall.READ_TABLE, bodies, frames))
        for mine, reply in zip(places, replies, strict=True):
            flags, *copies = (np.frombuffer(frame, np.uint8) for frame in reply.frames)
            if len(flags) != len(mine) or len(copies) != len(arrays):
                raise ProtocolError(f"{self._title}: a server's copy of rows is malformed")
            held = mine[flags != 0]
            is_there[held] = True
            for array, copy in zip(arrays, copies, strict=True):
                if len(copy) != len(held) * width * array.itemsize:
                    raise ProtocolError(f"{self._title}: a server's copy of rows is malformed")
                array[held] = copy.view(array.dtype).reshape(len(held), width)
        return is_there, arrays

    def numbers(self) -> Numbers:
        """What all servers count alike, and the lineage that they agree on."""
        found = [unpack(reply.body, int, int, int, list) for reply in self._mark(0, [])]
        next_mark, time, count = (max(row[column] for row in found) for column in range(3))
        return Numbers(
            next_mark, time, count, agreed([lineage_from_plain(row[3]) for row in found])
        )

    def _mark(self, mark: int, lineage: list[Any]) -> list[Reply]:
        bodies = [pack(part, mark, lineage) for part in self._parts]
        replies: list[Reply] = self._wait(self._ask_each(StoreCall.MARK_TABLE, bodies))
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
            is_there, arrays = self.read(ids[start:stop], dtypes, settings.dim)
            if not is_there.all():
                raise CheckpointError(
                    f"{path} was not written: rows of {self._title} went meanwhile; let no thread "
                    "pull or push during an export"
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
                self._load(file, arrays, frames)
            except BaseException:
                nothing = self._frames_of(FileRows(*[np.empty(0, np.int64)] * 4))
                self._begin_loading(nothing, 0, is_delta=False)
                raise

    def _load(self, file: TableFile, arrays: Sequence[str], frames: Frames) -> None:
        self._begin_loading(frames, file.mark, is_delta=file.is_delta)
        step = self._block_rows(8 * file.spec.shape[1] * len(arrays))
        for start in range(0, len(file.ids), step):
            stop = min(start + step, len(file.ids))
            rows = [file.rows(array, start, stop) for array in arrays]
            columns = [file.ids[start:stop], file.stamps[start:stop], *rows]
            frames = [
                [_memory(column[mine]) for column in columns]
                for mine in split(columns[0], len(self._parts))
            ]
            bodies = [pack(part) for part in self._parts]
            self._wait(self._ask_each(StoreCall.LOAD_ROWS, bodies, frames))
        count = file.count_of_updates
        ends = [file.time, -1 if count is None else count, lines_to_plain(file.lines)]
        bodies = [pack(part, *ends) for part in self._parts]
        self._wait(self._ask_each(StoreCall.END_LOADING, bodies))

    def _frames_of(self, rows: FileRows) -> Frames:
        """For each server the rows of a file: it chooses among them, so it has to know all of
        them, 16 bytes each. Raises ``CheckpointError`` for more than a message holds."""
        changed, kept = (split(ids, len(self._parts)) for ids in (rows.ids, rows.kept))
        frames = [
            [
                *(_memory(array[mine]) for array in (rows.ids, rows.stamps)),
                *(_memory(array[others]) for array in (rows.kept, rows.kept_stamps)),
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

    def _begin_loading(self, frames: Frames, mark: int, *, is_delta: bool) -> None:
        bodies = [pack(part, is_delta, mark) for part in self._parts]
        self._wait(self._ask_each(StoreCall.BEGIN_LOADING, bodies, frames))


def _memory(rows: np.ndarray[Any, Any]) -> Any:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


def split(ids: Ids, num_shares: int) -> list[Ids]:
    """Where the ids of each share stand."""
    shares = shares_of(ids, num_shares)
    return [np.flatnonzero(shares == share) for share in range(num_shares)]
