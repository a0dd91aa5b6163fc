"""``RowStores``: a server's parts with rows, and the requests about them.

The parts are those of row-sparse keys (``sparse.py``) and of growing tables (``tables.py``). The
rows of a file or of ``init`` come in three kinds of requests: BEGIN_ROWS (INIT_ROWS for ``init``),
WRITE_ROWS for each page, and END_ROWS. Requests arrive on the I/O thread and are carried out on the
thread of the part's lane. Read next: ``row_part.py``; ``stores/dist/row_pages.py`` for the worker's
side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np

from kvstore.optimizer.base import Optimizer
from kvstore.protocol.requests import (
    StoreCall,
    bytes_of,
    pack,
    pack_row_part,
    unpack,
    unpack_row_part,
)
from kvstore.server.lanes import Lanes
from kvstore.server.memory import Part, StoreState
from kvstore.server.row_part import RowPart, longs
from kvstore.server.sparse import KeyPart, apply_cuts, take_cut, take_cut_pull
from kvstore.server.tables import TablePart
from kvstore.sparse.payload import ROWS_FORM, read_payload
from kvstore.sparse.tables.settings import checked_table_optimizer, settings_from_plain
from kvstore.sparse.tables.shard import TableShare
from pslite import Incoming
from pslite.errors import ProtocolError, UsageError, unexpected
from pslite.plane import NO_SIZE, Job, Outcome, Piece, ServerPlane, StateRecord

P = TypeVar("P", bound=RowPart)
Answered = tuple[bytes, list[bytes]] | None
"""The body and the frames of an answer; None for an empty one."""


def taken(found: RowPart | Part, piece: Piece, *, is_push: bool) -> Any:
    """Check a payload of rows for a part; return the contribution or the pull."""
    payload = read_payload(bytes_of(piece))
    if isinstance(found, Part):
        if not is_push:
            return take_cut_pull(found, payload)
        return take_cut(found, payload)._replace(source=(ROWS_FORM, piece))
    if not is_push:
        return found.take_pull(payload)
    return found.take(payload)._replace(source=(ROWS_FORM, piece))


class RowStores:
    """The parts with rows of one server."""

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
        self._parts: dict[int, RowPart] = {}
        self.calls: dict[int, Callable[[Incoming], None]] = {
            StoreCall.INIT_ROWS: self._init,
            StoreCall.HELD_ROWS: self._held,
            StoreCall.READ_ROWS: self._read,
            StoreCall.BEGIN_ROWS: self._begin,
            StoreCall.WRITE_ROWS: self._write,
            StoreCall.END_ROWS: self._end,
            StoreCall.CREATE_TABLE: self._create_table,
            StoreCall.TABLE_OPTIMIZER: self._set_optimizer,
            StoreCall.TABLE_STATS: self._stats,
            StoreCall.MARK_TABLE: self._mark,
            StoreCall.COPY_ROWS: self._take_copy,
        }

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[RowPart]:
        return iter(list(self._parts.values()))

    def get(self, number: int) -> RowPart | None:
        """Return a part, if it is there."""
        return self._parts.get(number)

    def remove(self, number: int) -> RowPart | None:
        """Forget a part; returns it, if it was there."""
        return self._parts.pop(number, None)

    def _add(self, part: RowPart) -> None:
        self._parts[part.number] = part
        self._plane.open_part(part.number, NO_SIZE, part.store.ranks, part.lane)

    def apply(self, job: Job, dense: Part | None) -> Outcome:
        """Apply a round with rows of one part. On the lane's thread."""
        part = self._parts.get(job.parts[0])
        try:
            if part is not None:
                part.apply([payload.rows for payload in job.batch.payloads])
            elif dense is not None:
                apply_cuts(dense, job.batch.payloads)
            else:  # the part was removed after its round was complete
                raise UsageError("the key was deleted, or the table was closed")
        except BaseException as error:  # an optimizer may call sys.exit
            return [error]
        return None

    # -- rows of any kind --------------------------------------------------------------

    def _init(self, incoming: Incoming) -> None:
        """Create a part of a row-sparse key; answer whether its rows must be sent."""
        number, synchronous, is_full, plain = unpack(incoming.body, int, bool, bool, list)
        entry = unpack_row_part(plain)
        store = self._store_of(number, synchronous)
        store.check_cuts([entry])
        # If a rank left half-way, the rank that replaces it finds some parts here.
        part = self._parts.get(entry.part)
        if part is None:
            part = KeyPart(store, self._next_lane(), entry, is_full=is_full)
            self._add(part)
            store.has_part(entry)
        if not isinstance(part, KeyPart):
            raise UsageError(f"part {entry.part} belongs to the {part.title}")
        self._run(incoming, part, lambda part: (pack(part.needs_rows()), []))

    def _held(self, incoming: Incoming) -> None:
        """Answer with the number of updates, and the columns of the next rows by id."""
        number, after, most = unpack(incoming.body, int, list, int)
        if len(after) > 1 or any(type(id_) is not int for id_ in after) or most < 1:
            raise unexpected("at most one id and a number of rows above 0", (after, most))
        if after and not -(2**63) <= after[0] < 2**63:
            raise unexpected("an id of 64 bits", after[0])

        def look(part: RowPart) -> tuple[bytes, list[bytes]]:
            num_updates, columns = part.held()
            start = int(np.searchsorted(columns[0], after[0], "right")) if after else 0
            some = slice(start, start + most)
            frames = [column[some].astype("<i8").tobytes() for column in columns]
            return pack(num_updates), frames

        self._run(incoming, self._found(number), look)

    def _read(self, incoming: Incoming) -> None:
        """Answer with a byte for each id (1: it has a row), the rows, and their states."""
        number, with_states = unpack(incoming.body, int, bool)
        (ids,) = _columns(incoming, 1)

        def copy(part: RowPart) -> tuple[bytes, list[bytes]]:
            return b"", [each.tobytes() for each in part.copies(ids, with_states=with_states)]

        self._run(incoming, self._found(number), copy)

    def _begin(self, incoming: Incoming) -> None:
        number, fields = unpack(incoming.body, int, list)
        columns = _columns(incoming, len(incoming.frames))
        self._run(incoming, self._found(number), lambda part: part.begin(fields, columns))

    def _write(self, incoming: Incoming) -> None:
        (number,) = unpack(incoming.body, int)
        frames = incoming.frames
        if not frames:
            raise unexpected("a frame of ids and frames of rows", frames)
        self._run(incoming, self._found(number), lambda part: part.write(frames))

    def _end(self, incoming: Incoming) -> None:
        number, num_updates, fields = unpack(incoming.body, int, int, list)
        if num_updates < -1:
            raise unexpected("a number of updates, or -1", num_updates)
        self._run(incoming, self._found(number), lambda part: part.end(num_updates, fields))

    # -- a new standby -----------------------------------------------------------------

    def copies(self, number: int, store: StoreState) -> list[StateRecord] | None:
        """Return requests that give a new standby the parts of a store.

        None if the rows of a part are being loaded, or if it is a share of a table.
        """
        records = []
        for part in self._parts.values():
            if part.store is not store:
                continue
            found = part.copy() if isinstance(part, KeyPart) else None
            if found is None or not isinstance(part, KeyPart):
                return None
            fields, arrays = found
            is_full = len(part.table) == part.entry.num_rows
            body = pack(number, store.ranks is not None, is_full, pack_row_part(part.entry))
            records.append(StateRecord(0, StoreCall.INIT_ROWS, body, ()))
            rounds = list(map(list, self._plane.copies.counts(part.number)))
            body = pack(part.number, fields, rounds)
            frames = [np.ascontiguousarray(a).reshape(-1).view(np.uint8).data for a in arrays]
            records.append(StateRecord(0, StoreCall.COPY_ROWS, body, frames))
        return records

    def _take_copy(self, incoming: Incoming) -> None:
        number, fields, rounds = unpack(incoming.body, int, list, list)
        frames = incoming.frames
        self._plane.copies.resume(number, [(rank, count) for rank, count in rounds])

        def take(part: RowPart) -> None:
            if isinstance(part, KeyPart):
                part.take_copy(fields, frames)

        self._run(incoming, self._found(number), take)

    # -- tables ------------------------------------------------------------------------

    def _create_table(self, incoming: Incoming) -> None:
        number, synchronous, part, share, num_shares, plain, optimizer = unpack(
            incoming.body, int, bool, int, int, int, list, list
        )
        if not 0 <= share < num_shares or part < 0:
            raise unexpected(f"a part and a share from 0 to {num_shares - 1}", (part, share))
        settings = settings_from_plain(plain, num_shares)
        chosen = self._checked_optimizer(optimizer, settings.dtype)
        # If a rank left half-way, the rank that replaces it finds some parts here; they stay.
        if part not in self._parts:
            store = self._store_of(number, synchronous)
            made = TableShare(settings, chosen, share, num_shares)
            self._add(TablePart(store, self._next_lane(), part, made))
        incoming.respond()

    def _checked_optimizer(self, plain: list[Any], dtype: np.dtype[Any]) -> Optimizer | None:
        return checked_table_optimizer(self._optimizer_of(plain), dtype) if plain else None

    def _set_optimizer(self, incoming: Incoming) -> None:
        """Set a table's optimizer; all workers have called it, and nothing is in flight."""
        number, only_check, plain = unpack(incoming.body, int, bool, list)
        table = self._table(number)
        chosen = self._checked_optimizer(plain, table.dtype)

        def use(table: TablePart) -> None:
            if not only_check:
                table.share.set_optimizer(chosen)

        self._run(incoming, table, use)

    def _stats(self, incoming: Incoming) -> None:
        (number,) = unpack(incoming.body, int)

        def look(table: TablePart) -> tuple[bytes, list[bytes]]:
            return pack(list(table.share.statistics())), []

        self._run(incoming, self._table(number), look)

    def _mark(self, incoming: Incoming) -> None:
        number, mark, lineage = unpack(incoming.body, int, int, list)

        def look(table: TablePart) -> tuple[bytes, list[bytes]]:
            return pack(*table.mark(mark, lineage)), []

        self._run(incoming, self._table(number), look)

    # -- inside ------------------------------------------------------------------------

    def _run(self, incoming: Incoming, part: P, work: Callable[[P], Answered]) -> None:
        """Do ``work`` on the part's lane, with its lock; send the result as the answer."""
        answers: list[Answered] = []

        def run(part: P) -> None:
            with part.lock:
                answers.append(work(part))

        self._lanes.run(incoming, [part], run, lambda: incoming.respond(*answers[0] or ()))

    def _found(self, number: int) -> RowPart:
        part = self._parts.get(number)
        if part is None:
            raise UsageError(f"this server does not have part {number} with rows")
        return part

    def _table(self, number: int) -> TablePart:
        part = self._parts.get(number)
        if not isinstance(part, TablePart):
            raise UsageError(f"this server does not have a table with part {number}")
        return part


def _columns(incoming: Incoming, number: int) -> list[Any]:
    """Return the frames of a request as int64 arrays; check that there are ``number``."""
    if len(incoming.frames) != number:
        raise ProtocolError(f"expected {number} frames of ids, got {len(incoming.frames)}")
    return [longs(frame) for frame in incoming.frames]
