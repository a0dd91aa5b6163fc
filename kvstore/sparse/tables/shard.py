"""``TableShare``: one server's share of a table.

A store of one process has one share with everything; of several servers each has the ids that
``shares_of`` sends it, and an even part of the capacity. A row's first value depends on the seed,
the table's name and the id alone, so shares of any number hold the same rows as long as nothing is
evicted.

**A call** looks its ids up, marks the rows as touched, and makes rows for ids that have none, where
they are admitted and there is room. Rows of the call itself are the last to be evicted; where a
call has more ids than there is room for, the first get rows. An id without a row has its first
value in pulls, and what is pushed for it is dropped and counted.

**Time** is the number of pushes, which all shares count alike: no clock is read. Ids are flat int64
(``ids.py``). Pure; the share's owner lets one thread in at a time. Read next:
``checkpoint/tables.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvstore.arrays.cpu.sums import Workspace
from kvstore.optimizer.base import Optimizer
from kvstore.sparse.ids import Ids
from kvstore.sparse.row_memory import RowMemory, grown
from kvstore.sparse.sums import Contribution, RowValues, Sum, sum_repeated
from kvstore.sparse.tables.admission import FIRST_PLACES, Mask, WaitingIds, step_towards
from kvstore.sparse.tables.ages import Ages, stamp_at
from kvstore.sparse.tables.hash_index import MOST_PLACES, IdIndex, Places
from kvstore.sparse.tables.ids import first_appearances
from kvstore.sparse.tables.initial_rows import FirstValues
from kvstore.sparse.tables.lineage import new_lineage
from kvstore.sparse.tables.settings import TableSettings

FIRST_BYTES = 4 << 20
"""Less than ``FIRST_PLACES`` rows are there at first where these would be more than this."""


class TableStatistics(NamedTuple):
    """The counters of a table since its creation."""

    rows: int
    capacity: int | None
    """The most rows that it may have; None for any number."""
    pulled: int
    """Ids in pulls, repeated ones as often as they stand there (on ``dist`` stores once a call)."""
    hits: int
    """Those of them that had a row."""
    made: int
    """Rows that were made."""
    evicted: int
    """Rows that went since there was no more room."""
    expired: int
    """Rows that went since their time (``ttl``) was over."""
    refused: int
    """How often an id got no row: not admitted yet, or no room in a call with too many ids."""
    dropped: int
    """Pushed gradients of ids without a row."""
    waiting: int
    """Ids that are counted for admission now."""
    pushes: int
    nbytes: int
    """The memory of rows, states, index and all else that the table keeps."""
    limit_bytes: int | None
    """What ``nbytes`` cannot exceed; None without a capacity."""

    @property
    def hit_rate(self) -> float:
        """Which part of the ids in pulls had a row; 0.0 before the first."""
        return self.hits / self.pulled if self.pulled else 0.0


class TableShare:
    """The share ``share`` of ``num_shares`` of a table, for its own ids."""

    def __init__(
        self,
        settings: TableSettings,
        optimizer: Optimizer | None = None,
        share: int = 0,
        num_shares: int = 1,
    ) -> None:
        self.settings = settings
        self.share, self.num_shares = share, num_shares
        self.capacity = settings.capacity_of(share, num_shares)
        most_first = max(FIRST_BYTES // settings.row_bytes(optimizer), 1)
        self.num_places = self._size_for(min(FIRST_PLACES, most_first))
        self.index = IdIndex(self.num_places)
        self.ages = Ages(self.num_places)
        self.rows = RowMemory(self.num_places, settings.dim, settings.dtype)
        self.rows.set_optimizer(optimizer)
        self.changed = np.zeros(self.num_places, np.int32)
        """For each row the number of the export that is the next after its last change."""
        self.next_mark = 1
        self.lineage = new_lineage()
        """What its marks belong to, and which file was loaded last."""
        self._first_values = FirstValues(settings.init, settings.seed, settings.name)
        num_waiting = settings.num_waiting(self.capacity)
        self._waiting = WaitingIds(settings.admit_after, num_waiting) if num_waiting else None
        self._free = np.empty(0, np.int32)
        self._num_used = 0
        """Places that were ever given out; those from here on are free too."""
        self._counts = dict.fromkeys(
            ("pulled", "hits", "made", "evicted", "expired", "dropped", "refused"), 0
        )
        self._workspace = Workspace()

    # -- what callers do -----------------------------------------------------------------

    def pull(self, ids: Ids, out: RowValues, *, touches: bool = True) -> None:
        """Copy the rows of ids to ``out``; ids may be unsorted and repeated.

        ``out`` is 2-D, C-contiguous, of the table's dtype. Without ``touches`` no row is
        created or kept from eviction.
        """
        if touches:
            places = self._touch(ids, is_pull=True)
        else:
            places = self.index.look_up(ids)
            places[self.ages.stamps[places] < self._oldest_stamp()] = -1
        absent = np.flatnonzero(places < 0)
        self.rows.read_places(np.maximum(places, 0) if len(absent) else places, out)
        if len(absent):
            out[absent] = self._first_values.make(ids[absent], out.shape[1], out.dtype)

    def push(self, contributions: Sequence[Contribution]) -> None:
        """Apply a push of one worker, or of each of them in rank order.

        Each has ids in any order, repeated or not, none at all too, and a gradient for each of
        them, 2-D of the table's dtype. The time advances by one.
        """
        self.ages.tick()
        is_single = len(contributions) == 1
        all_ids = [part.ids for part in contributions]
        places = self._touch(all_ids[0] if is_single else np.concatenate(all_ids), is_pull=False)
        ends = np.cumsum([len(ids) for ids in all_ids])
        parts = [
            self._held(mine, part.values)
            for mine, part in zip(np.split(places, ends[:-1]), contributions, strict=True)
        ]
        if not (is_single and self._are_different(parts[0].ids)):
            parts = [sum_repeated(*part) for part in parts]
        total, optimizer = Sum(parts), self.rows.optimizer
        if optimizer is None:
            self.rows.assign(total.ids, total, self._workspace)
        else:
            chosen = optimizer.for_rows(self.settings.dim)
            self.rows.update_lazily(total.ids, total, chosen, self._workspace)
        self.changed[total.ids] = self.next_mark

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """Update by this one from now on."""
        self.rows.set_optimizer(optimizer)

    def expire(self) -> None:
        """Let go of the rows whose time is over; no pull sees those anyway."""
        if self.settings.ttl is not None:
            self._release(self.ages.older_than(self._oldest_stamp()))

    # -- what is there -------------------------------------------------------------------

    def __len__(self) -> int:
        self.expire()
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """The memory of rows, states, index and all else that is kept."""
        waiting_bytes = 0 if self._waiting is None else self._waiting.nbytes
        parts = (self.index, self.ages, self.changed, self._free)
        return self.rows.memory_bytes + sum(part.nbytes for part in parts) + waiting_bytes

    def statistics(self) -> TableStatistics:
        self.expire()
        optimizer = self.rows.optimizer
        return TableStatistics(
            **self._counts,
            rows=len(self),
            capacity=self.capacity,
            pushes=self.ages.time,
            waiting=0 if self._waiting is None else len(self._waiting),
            nbytes=self.nbytes,
            limit_bytes=self.settings.limit_bytes(optimizer, self.capacity),
        )

    def held(self) -> tuple[Ids, Places]:
        """Return the ids of all rows, sorted, and their places."""
        self.expire()
        places = self.ages.held()
        ids = self.index.ids[places]
        order = np.argsort(ids)
        return ids[order], places[order]

    # -- for files -----------------------------------------------------------------------

    def clear(self) -> None:
        """Hold no rows, no waiting ids and no pushes."""
        self.index = IdIndex(self.num_places)
        self.ages.clear()
        self.ages.set_time(0)
        self._free = np.empty(0, np.int32)
        self._num_used = 0
        self.rows.count = 0
        if self._waiting is not None:
            self._waiting = WaitingIds(self.settings.admit_after, self._waiting.num_places)

    def remove(self, places: Places) -> None:
        """Let go of the rows at different places."""
        self._release(places, is_counted=False)

    def put(
        self, ids: Ids, values: RowValues, states: Sequence[RowValues], stamps: Ids, mark: int
    ) -> None:
        """Set rows of different ids, for which there is room, as a file has them."""
        places = self.index.look_up(ids)
        is_new = places < 0
        places[is_new] = self._take_places(int(np.count_nonzero(is_new)), 0)
        self.index.add(ids[is_new], places[is_new])
        self.rows.begin(places, values)
        self.rows.restore(places, None, states)
        self.ages.stamps[places] = stamps
        self.changed[places] = mark

    # -- how rows come -------------------------------------------------------------------

    def _touch(self, ids: Ids, *, is_pull: bool) -> Places:
        """Return the places of ids, -1 for those that have and get no row."""
        stamps = self.ages.next_stamps(len(ids))
        places = self.index.look_up(ids)
        if self.settings.ttl is not None:
            self._expire_among(places)
        absent = np.flatnonzero(places < 0)
        if is_pull:
            self._counts["pulled"] += len(ids)
            self._counts["hits"] += len(ids) - len(absent)
        if not len(absent):
            self.ages.stamps[places] = stamps
            return places
        self._stamp(places, stamps)
        new, inverse = first_appearances(ids[absent])
        places[absent] = self._make(new, is_pull, int(stamps[0]))[inverse]
        self._stamp(places, stamps)
        return places

    def _stamp(self, places: Places, stamps: Ids) -> None:
        has_row = places >= 0
        self.ages.stamps[places[has_row]] = stamps[has_row]

    def _make(self, ids: Ids, is_pull: bool, before: int) -> Places:
        """Return new places for different ids, -1 for those that get none.

        Only rows with smaller stamps than ``before`` are evicted.
        """
        is_admitted = self._admitted(ids, is_pull)
        chosen = np.flatnonzero(is_admitted)
        taken = self._take_places(len(chosen), before)
        chosen = chosen[: len(taken)]
        self.index.add(ids[chosen], taken)
        if self._waiting is not None:
            self._waiting.remove(ids[chosen])
        width, dtype = self.settings.dim, self.settings.dtype
        self.rows.begin(taken, self._first_values.make(ids[chosen], width, dtype))
        self.changed[taken] = self.next_mark
        self._counts["made"] += len(taken)
        self._counts["refused"] += len(ids) - len(taken)
        places = np.full(len(ids), -1, np.intp)
        places[chosen] = taken
        return places

    def _admitted(self, ids: Ids, is_pull: bool) -> Mask:
        if self._waiting is None:
            return np.ones(len(ids), np.bool_)
        return self._waiting.touch(ids) if is_pull else np.zeros(len(ids), np.bool_)

    def _take_places(self, number: int, before: int) -> Places:
        """Free places, as many as there are or can be made; the owner puts rows there."""
        short = number - len(self._free) - (self.num_places - self._num_used)
        if short > 0:
            self._make_room(short, before)
        from_free = min(number, len(self._free))
        split = len(self._free) - from_free
        taken = self._free[split:].astype(np.intp)
        self._free = self._free[:split].copy()
        stop = min(self._num_used + number - from_free, self.num_places)
        unused = np.arange(self._num_used, stop)
        self._num_used = stop
        return np.concatenate([taken, unused])

    def _make_room(self, number: int, before: int) -> None:
        """Free this many places: expired rows first, then new ones, then the oldest."""
        limit = MOST_PLACES if self.capacity is None else self.capacity
        if self.settings.ttl is not None:
            wanted = max(number, self._num_used // 8)
            number -= self._release(*self.ages.take_oldest(wanted, self._oldest_stamp()))
        if number > 0 and self.num_places < limit:
            num_before = self.num_places
            self._grow(self._size_for(max(2 * num_before, num_before + number)))
            number -= self.num_places - num_before
        if number > 0:
            self._release(*self.ages.take_oldest(number, before))

    def _size_for(self, num_places: int) -> int:
        """Return the size for this many rows, or with a capacity a step towards it."""
        if self.capacity is None:
            return min(num_places, MOST_PLACES)
        return step_towards(num_places, self.capacity)

    def _grow(self, num_places: int) -> None:
        for part in (self.index, self.ages, self.rows):
            part.grow(num_places)
        self.changed, self.num_places = grown(self.changed, num_places), num_places

    # -- how they go ---------------------------------------------------------------------

    def _oldest_stamp(self) -> int:
        """Return the oldest stamp: rows with a smaller one have expired."""
        if self.settings.ttl is None:
            return 0
        return stamp_at(self.ages.time - self.settings.ttl)

    def _expire_among(self, places: Places) -> None:
        """Remove the expired rows among these, and set their indices to -1."""
        is_over = (places >= 0) & (self.ages.stamps[places] < self._oldest_stamp())
        if is_over.any():
            self._release(np.unique(places[is_over]))
            places[is_over] = -1

    def _release(
        self, places: Places, stamps: Ids | None = None, *, is_counted: bool = True
    ) -> int:
        """Remove the rows at different places, and return how many.

        ``stamps`` are theirs if ``ages`` has already removed them.
        """
        if stamps is None:
            stamps = self.ages.stamps[places]
            self.ages.forget(places)
        self.index.remove(places)
        self._free = np.concatenate([self._free, places.astype(np.int32)])
        if is_counted:
            num_expired = int(np.count_nonzero(stamps < self._oldest_stamp()))
            self._counts["expired"] += num_expired
            self._counts["evicted"] += len(places) - num_expired
        return len(places)

    # -- inside --------------------------------------------------------------------------

    def _held(self, places: Places, values: RowValues) -> Contribution:
        """Return the pushed values for ids that have rows, by index."""
        has_row = places >= 0
        if has_row.all():
            return Contribution(places, values)
        self._counts["dropped"] += len(places) - int(np.count_nonzero(has_row))
        return Contribution(places[has_row], values[has_row])

    def _are_different(self, places: Places) -> bool:
        """Return whether no place stands twice among those that the last call has touched.

        Each touch wrote another stamp, and of several at one place the last has stayed.
        """
        stamps = self.ages.stamps[places]
        return bool((stamps[1:] > stamps[:-1]).all())
