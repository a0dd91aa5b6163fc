"""A server's tables, and the requests about them: making, optimizers, statistics, reading.

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
from kvstore.sparse.ids import Ids
from kvstore.table_parts import TablePart
from kvstore.tables.plain import settings_from_plain
from kvstore.tables.settings import checked_table_optimizer
from kvstore.tables.share import TableShare
from pslite import Incoming
from pslite.errors import ProtocolError, UsageError
from pslite.plane import NO_SIZE, Job, Outcome, ServerPlane


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
        """The ids of the rows that are there and above ``after``, sorted; as many as are asked."""
        number, after, most = unpack(incoming.body, int, list, int)
        if len(after) > 1 or any(type(id_) is not int or abs(id_) > 2**63 for id_ in after):
            raise ProtocolError("where a list of ids goes on is malformed")
        found: list[bytes] = []

        def look(part: TablePart) -> None:
            with part.lock:
                ids, _ = part.share.held()
            start = np.searchsorted(ids, after[0], "right") if after else 0
            found.append(ids[start : start + max(most, 1)].astype("<i8").tobytes())

        part = self._found(number)
        self._lanes.run(incoming, [part], look, lambda: incoming.respond(b"", found))

    def _read(self, incoming: Incoming) -> None:
        """Which of some ids are still there (a byte for each), and the rows of those."""
        (number,) = unpack(incoming.body, int)
        part = self._found(number)
        ids = _ids_in(incoming)
        frames: list[bytes] = []

        def copy(part: TablePart) -> None:
            with part.lock:
                share = part.share
                share.expire()
                places = share.index.look_up(ids)
                is_there = places >= 0
                rows = share.slots.values[places[is_there]]
            frames.extend((is_there.tobytes(), rows.tobytes()))

        self._lanes.run(incoming, [part], copy, lambda: incoming.respond(b"", frames))

    def _found(self, number: int) -> TablePart:
        part = self._parts.get(number)
        if part is None:
            raise UsageError(f"part {number} is no table that this server knows")
        return part


def _ids_in(incoming: Incoming) -> Ids:
    if len(incoming.frames) != 1 or memoryview(incoming.frames[0]).nbytes % 8:
        raise ProtocolError("the ids of a table are malformed")
    ids: Ids = np.frombuffer(incoming.frames[0], "<i8").astype(np.int64, copy=False)
    return ids
