"""Serve a server's shares of growing tables, each as one part of the data plane.

The plane (``pslite/plane``) hands over payloads as they arrive (``take``), complete rounds of them
(``apply``), and pulls that are due (``answer``), as for row-sparse keys (``sparse.py``). Requests
make, count, save and load tables on the thread of the part's lane. A pull may make and evict rows,
so a lock keeps these requests out meanwhile. What a worker sends is checked on arrival, so that a
malformed payload is an error of its sender alone. Read next: ``tables/shard.py``, and
``stores/dist/tables.py`` for the worker that asks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.checkpoint.tables import FileRows, Loading
from kvstore.optimizer.base import Optimizer
from kvstore.protocol.requests import StoreCall, pack, unpack
from kvstore.server.lanes import Lanes
from kvstore.server.memory import StoreState
from kvstore.sparse.ids import Ids, is_increasing
from kvstore.sparse.payload import Bytes, RowPayload, RowPayloadKind
from kvstore.sparse.sums import Contribution, RowValues
from kvstore.tables.eviction import MOST_TIME, stamp_at
from kvstore.tables.settings import (
    checked_lines,
    checked_table_optimizer,
    lineage_from_plain,
    lineage_to_plain,
    settings_from_plain,
)
from kvstore.tables.shard import TableShare
from pslite import Incoming
from pslite.errors import ProtocolError, UsageError
from pslite.plane import NO_SIZE, Job, Outcome, ServerPlane

Allocate = Callable[[int], Bytes]
"""Gives memory to send from."""


class TakenPush(NamedTuple):
    """A contribution to a share."""

    rows: Contribution
    nbytes: int


class WantedIds(NamedTuple):
    """A pull of rows."""

    ids: Ids
    touches: bool
    nbytes: int


class TablePart:
    """One server's share of one table."""

    def __init__(self, store: StoreState, lane: int, number: int, share: TableShare) -> None:
        self.store = store
        self.lane = lane
        self.number = number
        self.share = share
        self.loading: Loading | None = None
        """The export that is coming."""
        self.lock = threading.Lock()
        """Guards the share: pulls come on the I/O thread, all else on the lane's."""

    @property
    def title(self) -> str:
        """The table, for people."""
        return f"table {self.share.settings.name!r}"

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """One round, or one push of an asynchronous store. On the lane's thread."""
        with self.lock:
            self.share.push(contributions)

    def take(self, payload: RowPayload) -> TakenPush:
        """A contribution, checked."""
        settings, count = self.share.settings, payload.num_rows
        if payload.kind is not RowPayloadKind.ROWS:
            raise ProtocolError("a push to a table has gradients, and a pull has none")
        nbytes = self._checked_bytes(payload)
        if len(payload.values) != nbytes:
            raise ProtocolError(f"{len(payload.values)} bytes are not the values of {count} rows")
        values = payload.values.view(settings.dtype).reshape(count, settings.dim)
        return TakenPush(Contribution(payload.ids, values), nbytes)

    def take_pull(self, payload: RowPayload) -> WantedIds:
        """What a pull wants, checked."""
        touches = payload.kind is RowPayloadKind.WANTED
        if not (touches or payload.kind is RowPayloadKind.LOOK) or len(payload.values):
            raise ProtocolError("a push to a table has gradients, and a pull has none")
        return WantedIds(payload.ids.copy(), touches, self._checked_bytes(payload))

    def _checked_bytes(self, payload: RowPayload) -> int:
        """The size of the rows that a payload is about."""
        settings = self.share.settings
        if payload.width != settings.dim or payload.offset:
            raise ProtocolError(f"rows of {payload.width} numbers for a {self.title}")
        return payload.num_rows * settings.dim * settings.dtype.itemsize

    def answer(self, wanted: WantedIds, allocate: Allocate) -> Any:
        """A frame with the rows that are wanted; those that are not there may be made."""
        memory = allocate(wanted.nbytes)
        settings = self.share.settings
        out: np.ndarray[Any, Any] = memory.view(settings.dtype)
        with self.lock:
            rows = out.reshape(len(wanted.ids), settings.dim)
            self.share.pull(wanted.ids, rows, touches=wanted.touches)
        return memory.data


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
        except BaseException as error:  # an optimizer may call sys.exit
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
        """All workers are here, and nothing is in flight."""
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
            raise ProtocolError("the place where a list of ids continues is malformed")
        if after and not -(2**63) <= after[0] < 2**63:
            raise ProtocolError("the place where a list of ids continues is not an id")
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
        """All rows are there; a count of updates of -1 leaves that unchanged."""
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
            raise UsageError(f"this server knows no table with the part {number}")
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
        raise ProtocolError("an export ends within a row")
    return np.frombuffer(frame, np.uint8).view(like.dtype).reshape(-1, like.shape[1])


def _loading_of(part: TablePart) -> Loading:
    if part.loading is None:
        raise UsageError(f"the {part.title} is not being loaded")
    return part.loading
