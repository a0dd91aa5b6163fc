"""A server's tables, and the requests about them: making, statistics, saving and loading.

What ``row_stores.py`` is for row-sparse keys. Requests arrive on the I/O thread; what touches a
share is done on its lane's pool thread, behind the part's lock. Read next: ``table_parts.py`` for
rounds and pulls, ``dist_tables.py`` for the worker that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvstore.arena import StoreState
from kvstore.lanes import Lanes
from kvstore.optimizer.base import Optimizer
from kvstore.protocol import StoreCall, pack, unpack
from kvstore.sparse.ids import Ids, is_increasing
from kvstore.sparse.sums import RowValues
from kvstore.table_parts import TablePart
from kvstore.tables.ages import MOST_TIME, stamp_at
from kvstore.tables.loading import FileRows, Loading
from kvstore.tables.plain import (
    checked_lines,
    lineage_from_plain,
    lineage_to_plain,
    settings_from_plain,
)
from kvstore.tables.settings import checked_table_optimizer
from kvstore.tables.share import TableShare
from pslite import Incoming
from pslite.errors import ProtocolError, UsageError
from pslite.plane import NO_SIZE, Job, Outcome, ServerPlane

MOST_MARKS = 2**31 - 2
"""Marks are kept in 32 bits."""


class TableStores:
    """The shares of tables on one server."""

    def __init__(
        self,
        plane: ServerPlane,
        store_of: Callable[[int, bool], StoreState],
        optimizer_of: Callable[[list[Any]], Optimizer],
        next_lane: Callable[[], int],
        lanes: Lanes,
    ) -> None:
        self._plane = plane
        self._store_of = store_of
        self._optimizer_of = optimizer_of
        self._next_lane = next_lane
        self._lanes = lanes
        self._parts: dict[int, TablePart] = {}
        self.calls: dict[int, Callable[[Incoming], None]] = {
            StoreCall.CREATE_TABLE: self._create,
            StoreCall.TABLE_OPTIMIZER: self._set_optimizer,
            StoreCall.TABLE_STATS: self._stats,
            StoreCall.HELD_OF_TABLE: self._held,
            StoreCall.READ_TABLE: self._read,
            StoreCall.MARK_TABLE: self._mark,
            StoreCall.BEGIN_LOADING: self._begin_loading,
            StoreCall.LOAD_ROWS: self._load_rows,
            StoreCall.END_LOADING: self._end_loading,
        }

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[TablePart]:
        return iter(list(self._parts.values()))

    def get(self, number: int) -> TablePart | None:
        """A part, if it is there."""
        return self._parts.get(number)

    def remove(self, number: int) -> TablePart | None:
        """A part is gone; returns it, if it was there."""
        return self._parts.pop(number, None)

    def apply(self, job: Job) -> Outcome:
        """A round of one part. On the lane's thread."""
        part = self._parts.get(job.parts[0])
        try:
            if part is None:  # closed after its round was complete
                raise UsageError("the table was closed")
            part.apply([payload.rows for payload in job.batch.payloads])
        except Exception as error:
            return [error]
        return None

    # -- requests ----------------------------------------------------------------------

    def _create(self, incoming: Incoming) -> None:
        number, synchronous, part, share, num_shares, plain, optimizer = unpack(
            incoming.body, int, bool, int, int, int, list, list
        )
        if not 0 <= share < num_shares or part < 0:
            raise ProtocolError("a share of a table is malformed")
        settings = settings_from_plain(plain, num_shares)
        chosen = self._checked_optimizer(optimizer, settings.dtype)
        # A rank that stands in for one that left half-way finds some parts there; they stay.
        if part not in self._parts:
            store = self._store_of(number, synchronous)
            made = TableShare(settings, chosen, share, num_shares)
            found = self._parts[part] = TablePart(store, self._next_lane(), part, made)
            self._plane.open_part(part, NO_SIZE, store.ranks, found.lane)
        incoming.respond()

    def _checked_optimizer(self, plain: list[Any], dtype: np.dtype[Any]) -> Optimizer | None:
        return checked_table_optimizer(self._optimizer_of(plain), dtype) if plain else None

    def _set_optimizer(self, incoming: Incoming) -> None:
        """All workers are here, and nothing is under way."""
        number, only_check, plain = unpack(incoming.body, int, bool, list)
        part = self._found(number)
        chosen = self._checked_optimizer(plain, part.share.settings.dtype)

        def use(part: TablePart) -> None:
            if not only_check:
                with part.lock:
                    part.share.set_optimizer(chosen)

        self._lanes.run(incoming, [part], use, incoming.respond)

    def _stats(self, incoming: Incoming) -> None:
        (number,) = unpack(incoming.body, int)
        found: list[Any] = []

        def look(part: TablePart) -> None:
            with part.lock:
                found.extend(part.share.statistics())

        part = self._found(number)
        self._lanes.run(incoming, [part], look, lambda: incoming.respond(pack(found)))

    def _held(self, incoming: Incoming) -> None:
        """The ids of the rows that are there and above ``after``, sorted; as many as are asked.

        With when each of them was touched, and after which mark it has changed.
        """
        number, after, most = unpack(incoming.body, int, list, int)
        if len(after) > 1 or any(type(id_) is not int for id_ in after):
            raise ProtocolError("where a list of ids goes on is malformed")
        if after and not -(2**63) <= after[0] < 2**63:
            raise ProtocolError("where a list of ids goes on is no id")
        found: list[bytes] = []

        def look(part: TablePart) -> None:
            with part.lock:
                ids, places = part.share.held()
                start = int(np.searchsorted(ids, after[0], "right")) if after else 0
                some = slice(start, start + max(most, 1))
                stamps, changed = part.share.ages.stamps, part.share.changed
                arrays = (ids[some], stamps[places[some]], changed[places[some]])
            found.extend(array.astype("<i8").tobytes() for array in arrays)

        part = self._found(number)
        self._lanes.run(incoming, [part], look, lambda: incoming.respond(b"", found))

    def _read(self, incoming: Incoming) -> None:
        """Which of some ids are still there (a byte for each), and the rows of those.

        With states behind them, one frame for each array.
        """
        number, with_states = unpack(incoming.body, int, bool)
        part = self._found(number)
        ids = _ids_in(incoming)
        frames: list[bytes] = []

        def copy(part: TablePart) -> None:
            with part.lock:
                share = part.share
                share.expire()
                places = share.index.look_up(ids)
                is_there = places >= 0
                arrays = [share.slots.values, *(share.slots.states if with_states else ())]
                copies = [array[places[is_there]] for array in arrays]
            frames.extend(array.tobytes() for array in (is_there, *copies))

        self._lanes.run(incoming, [part], copy, lambda: incoming.respond(b"", frames))

    def _mark(self, incoming: Incoming) -> None:
        """The next mark, the counts of pushes and updates, and the lineage. If the mark that is
        given is not 0, what changes from now on is after it, and the lineage is the one given."""
        number, mark, plain = unpack(incoming.body, int, int, list)
        part = self._found(number)
        if not 0 <= mark < MOST_MARKS:
            raise ProtocolError("a mark of a table is malformed")
        lineage = lineage_from_plain(plain) if mark else None
        found: list[Any] = []

        def look(part: TablePart) -> None:
            with part.lock:
                share = part.share
                if lineage is not None:
                    share.next_mark = max(share.next_mark, mark + 1)
                    share.lineage = lineage
                plain = lineage_to_plain(share.lineage)
                found.extend((share.next_mark, share.ages.time, share.slots.count, plain))

        self._lanes.run(incoming, [part], look, lambda: incoming.respond(pack(*found)))

    def _begin_loading(self, incoming: Incoming) -> None:
        """An export comes, or without marks nothing: the share is empty then."""
        number, is_delta, mark = unpack(incoming.body, int, bool, int)
        part = self._found(number)
        arrays = [_longs(frame) for frame in incoming.frames]
        if len(arrays) != 4 or not 0 <= mark < MOST_MARKS:
            raise ProtocolError("the rows of an export are malformed")
        rows = FileRows(*arrays)
        _check_rows(rows.ids, rows.stamps)
        _check_rows(rows.kept, rows.kept_stamps)

        def begin(part: TablePart) -> None:
            with part.lock:
                part.loading = Loading(part.share, rows, mark, is_delta=is_delta)

        self._lanes.run(incoming, [part], begin, incoming.respond)

    def _load_rows(self, incoming: Incoming) -> None:
        """Some rows of an export: ids, stamps, values, and with states a frame for each array."""
        (number,) = unpack(incoming.body, int)
        part = self._found(number)
        if len(incoming.frames) < 3:
            raise ProtocolError("the rows of an export are malformed")
        ids, stamps = (_longs(frame) for frame in incoming.frames[:2])
        _check_rows(ids, stamps)
        frames = incoming.frames[2:]

        def put(part: TablePart) -> None:
            with part.lock:
                loading, slots = _loading_of(part), part.share.slots
                own = [slots.values, *slots.states]
                if len(frames) not in (1, len(own)):
                    raise ProtocolError("an export has other states than the table")
                arrays = [_rows_in(*pair) for pair in zip(frames, own, strict=False)]
                if any(len(array) != len(ids) for array in arrays):
                    raise ProtocolError("the rows of an export do not belong together")
                loading.put(ids, stamps, arrays)

        self._lanes.run(incoming, [part], put, incoming.respond)

    def _end_loading(self, incoming: Incoming) -> None:
        """All rows are there; a count of updates of -1 leaves that as it is."""
        number, time, count, plain = unpack(incoming.body, int, int, int, list)
        part = self._found(number)
        if not 0 <= time <= MOST_TIME or count < -1:
            raise ProtocolError("the counts of an export are malformed")
        lines = checked_lines(plain)

        def end(part: TablePart) -> None:
            with part.lock:
                _loading_of(part).finish(time, None if count < 0 else count, lines)
                part.loading = None

        self._lanes.run(incoming, [part], end, incoming.respond)

    def _found(self, number: int) -> TablePart:
        part = self._parts.get(number)
        if part is None:
            raise UsageError(f"part {number} is no table that this server knows")
        return part


def _ids_in(incoming: Incoming) -> Ids:
    if len(incoming.frames) != 1:
        raise ProtocolError("the ids of a table are malformed")
    return _longs(incoming.frames[0])


def _longs(frame: Any) -> Ids:
    if memoryview(frame).nbytes % 8:
        raise ProtocolError("the ids of a table are malformed")
    numbers: Ids = np.frombuffer(frame, "<i8").astype(np.int64, copy=False)
    return numbers


def _check_rows(ids: Ids, stamps: Ids) -> None:
    """Raise ``ProtocolError`` unless these ids are sorted and have as many proper stamps."""
    is_fine = len(ids) == len(stamps) and is_increasing(ids)
    if not is_fine or ((stamps < 0) | (stamps >= stamp_at(MOST_TIME + 1))).any():
        raise ProtocolError("the rows of an export are not sorted, or have no proper times")


def _rows_in(frame: Any, like: RowValues) -> RowValues:
    """A frame as rows of the dtype and width of others."""
    if memoryview(frame).nbytes % (like.shape[1] * like.itemsize):
        raise ProtocolError("the rows of an export are no whole rows")
    return np.frombuffer(frame, np.uint8).view(like.dtype).reshape(-1, like.shape[1])


def _loading_of(part: TablePart) -> Loading:
    if part.loading is None:
        raise UsageError(f"the {part.title} is not being loaded")
    return part.loading
