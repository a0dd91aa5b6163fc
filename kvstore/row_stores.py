"""A server's row-sparse parts, and the requests about them: making, saving and loading.

What ``dense_stores.py`` is for dense keys. Requests arrive on the I/O thread; what touches a
table is done there before anybody else knows of the part, and on its lane's pool thread later.
Read next: ``row_parts.py`` for rounds and pulls, ``row_files.py`` for the worker that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvstore.aggregate import Workspace
from kvstore.arena import Part, StoreState
from kvstore.errors import ValueMismatchError
from kvstore.lanes import Lanes
from kvstore.optimizer.states import has_master
from kvstore.protocol import StoreCall, pack, unpack, unpack_row_part
from kvstore.row_parts import RowPart, TakenRows, apply_cuts, taken
from kvstore.saving import state_dtypes
from kvstore.sparse.ids import Ids, is_increasing
from pslite import Incoming
from pslite.errors import ProtocolError, UsageError
from pslite.plane import NO_SIZE, Job, Outcome, Piece, ServerPlane


class RowStores:
    """The row-sparse parts of one server."""

    def __init__(
        self,
        plane: ServerPlane,
        store_of: Callable[[int, bool], StoreState],
        next_lane: Callable[[], int],
        lanes: Lanes,
    ) -> None:
        self._plane = plane
        self._store_of = store_of
        self._next_lane = next_lane
        self._lanes = lanes
        self._parts: dict[int, RowPart] = {}
        self.calls: dict[int, Callable[[Incoming], None]] = {
            StoreCall.INIT_ROWS: self._init,
            StoreCall.HELD_ROWS: self._held,
            StoreCall.READ_ROWS: self._read,
            StoreCall.WRITE_ROWS: self._write,
        }

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[RowPart]:
        return iter(list(self._parts.values()))

    def get(self, number: int) -> RowPart | None:
        """A part, if it is there."""
        return self._parts.get(number)

    def remove(self, number: int) -> RowPart | None:
        """A part is gone; returns it, if it was there."""
        return self._parts.pop(number, None)

    def apply(self, job: Job, dense: Part | None) -> Outcome:
        """A round with rows of one part, which is ``dense`` or here. On the lane's thread."""
        part = self._parts.get(job.parts[0])
        try:
            if part is not None:
                part.apply([payload.rows for payload in job.batch.payloads])
            elif dense is not None:
                apply_cuts(dense, job.batch.payloads)
            else:  # deleted after its round was complete
                raise UsageError("the key was deleted")
        except Exception as error:
            return [error]
        return None

    # -- requests ----------------------------------------------------------------------

    def _init(self, incoming: Incoming) -> None:
        """Create a part with the rows in the frame; more may follow by WRITE_ROWS."""
        number, synchronous, is_full, plain = unpack(incoming.body, int, bool, bool, list)
        entry = unpack_row_part(plain)
        store = self._store_of(number, synchronous)
        store.check_whole([entry])
        # A rank that stands in for one that left half-way finds some parts there; they stay.
        if entry.part not in self._parts:
            part = RowPart(store, self._next_lane(), entry, is_full=is_full)
            if len(incoming.frames) != 1:
                raise ProtocolError("a row-sparse part comes with one frame")
            frame = memoryview(incoming.frames[0])
            rows = taken(part, Piece(frame, 0, frame.nbytes), is_push=True)
            if isinstance(rows, TakenRows):
                part.table.replace([rows.rows], Workspace())
            self._plane.open_part(entry.part, NO_SIZE, store.ranks, part.lane)
            self._parts[entry.part] = part
            store.has_part(entry)
        incoming.respond()

    def _held(self, incoming: Incoming) -> None:
        """The number of updates, and ids of rows that are there: so many, from one on.

        All at once may be more than a message can hold.
        """
        number, first, most = unpack(incoming.body, int, int, int)
        if first < 0 or most < 1:
            raise ProtocolError("a question for the rows of a part is malformed")
        found: list[tuple[int, bool, bytes]] = []

        def look(part: RowPart) -> None:
            ids = part.table.ids()
            start = int(np.searchsorted(ids, first))
            some = ids[start : start + most].astype("<i8").tobytes()
            found.append((part.count, start + most < len(ids), some))

        def answer() -> None:
            count, are_more, ids = found[0]
            incoming.respond(pack(count, are_more), [ids])

        self._lanes.run(incoming, [self._found(number)], look, answer)

    def _read(self, incoming: Incoming) -> None:
        """Values and states of rows that are there."""
        (number,) = unpack(incoming.body, int)
        part = self._found(number)
        ids = _ids_of(part, incoming.frames[:1])
        frames: list[bytes] = []

        def copy(part: RowPart) -> None:
            optimizer = part.store.optimizer
            part.use(optimizer)
            arrays = [part.table.read(ids), *part.table.read_states(ids, optimizer)]
            frames.extend(array.tobytes() for array in arrays)

        self._lanes.run(incoming, [part], copy, lambda: incoming.respond(b"", frames))

    def _write(self, incoming: Incoming) -> None:
        """Set rows to what ``_read`` gave; the first of several such requests forgets the others.

        Those that ``init`` did not have room for come without states.
        """
        number, begins, count, has_values = unpack(incoming.body, int, bool, int, bool)
        part = self._found(number)
        if count < 0:
            raise ProtocolError("a count of updates is malformed")
        ids = _ids_of(part, incoming.frames[:1])
        frames = incoming.frames[1:]

        def write(part: RowPart) -> None:
            optimizer = part.store.optimizer
            dtypes = [part.entry.dtype] * has_values
            has_states = begins or count > 0 or len(frames) > len(dtypes)
            if has_states:
                dtypes += state_dtypes(optimizer, part.entry.dtype)
                if has_master(part.entry.dtype) and len(frames) == len(dtypes) - 1:
                    del dtypes[-1]  # a file of before there were masters
            values, states = None, _arrays(part, ids, frames, dtypes)
            if has_values:
                values, *states = states
            if begins:
                part.table.begin_afresh(keeps_values=not has_values)
            part.restored(ids, values, states, optimizer if has_states else None, count)

        self._lanes.run(incoming, [part], write, incoming.respond)

    def _found(self, number: int) -> RowPart:
        part = self._parts.get(number)
        if part is None:
            raise UsageError(f"the row-sparse part {number} is not known to this server")
        return part


def _ids_of(part: RowPart, frames: Sequence[Any]) -> Ids:
    """The ids in a frame, checked."""
    if len(frames) != 1 or memoryview(frames[0]).nbytes % 8:
        raise ProtocolError("the ids of rows are malformed")
    ids: Ids = np.frombuffer(frames[0], "<i8").astype(np.int64, copy=False)
    if len(ids) and not (ids[0] >= 0 and ids[-1] < part.entry.num_rows and is_increasing(ids)):
        raise ProtocolError(f"the ids are no sorted ones of {part.entry.num_rows} rows")
    return ids


def _arrays(
    part: RowPart, ids: Ids, frames: Sequence[Any], dtypes: Sequence[np.dtype[Any]]
) -> list[Any]:
    """The frames as rows of these dtypes, one each."""
    shape = len(ids), part.entry.width
    sizes = [shape[0] * shape[1] * dtype.itemsize for dtype in dtypes]
    if [memoryview(frame).nbytes for frame in frames] != sizes:
        raise ValueMismatchError(
            f"the values and states for key {part.entry.key!r} do not fit: {len(frames)} arrays "
            f"came, {len(dtypes)} are there"
        )
    pairs = zip(frames, dtypes, strict=True)
    return [np.frombuffer(frame, np.uint8).view(dtype).reshape(shape) for frame, dtype in pairs]
