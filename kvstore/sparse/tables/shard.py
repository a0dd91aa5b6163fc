"""``TableShare``: one server's share of a table.

A store in one process has one share with everything. Each of several servers has the ids that
``shares_of`` assigns to it, and an equal fraction of the capacity. A row's initial values depend
only on the seed, the table's name and the id. So as long as nothing is evicted, the rows do not
depend on the number of shares.

**A call** looks up its ids, marks their rows as touched, and creates rows for admitted ids without
one if there is room. It does not evict rows of its own ids. If a call has more ids than there is
room for, the first of them get rows. For an id without a row, a pull returns the initial values,
and pushed gradients are dropped and counted.

**Time** is the number of pushes, the same in all shares; no clock is read. Ids are flat int64
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
"""At most this much memory is allocated for rows at first, unless one row takes more."""


class TableStatistics(NamedTuple):
    """The counters of a table since its creation."""

    rows: int
    capacity: int | None
    """The most rows that it may have; None: no limit."""
    pulled: int
    """Ids in pulls, with repetitions (on ``dist`` stores each id counts once in a call)."""
    hits: int
    """How many of the pulled ids had a row."""
    made: int
    """Rows that were created."""
    evicted: int
    """Rows that were removed to make room."""
    expired: int
    """Rows that were removed because they had not been used for ``ttl`` pushes."""
    refused: int
    """How often an id got no row, since it was not admitted yet or the call had too many ids."""
    dropped: int
    """Pushed gradients that were dropped because their ids had no row."""
    waiting: int
    """Ids that wait for admission now."""
    pushes: int
    nbytes: int
    """The size in bytes of rows, states, index and all else that the table keeps."""
    limit_bytes: int | None
    """What ``nbytes`` cannot exceed; None without a capacity."""

    @property
    def hit_rate(self) -> float:
        """The fraction of the pulled ids that had a row; 0.0 before the first pull."""
        return self.hits / self.pulled if self.pulled else 0.0


class TableShare:
    """Share number ``share`` of a table that has ``num_shares`` shares."""

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
        """For each row the number of the first export after its last change."""
        self.next_mark = 1
        self.lineage = new_lineage()
        """Where its export numbers (marks) come from: see ``lineage.py``."""
        self._first_values = FirstValues(settings.init, settings.seed, settings.name)
        num_waiting = settings.num_waiting(self.capacity)
        self._waiting = WaitingIds(settings.admit_after, num_waiting) if num_waiting else None
        self._free = np.empty(0, np.int32)
        self._num_used = 0
        """How many places were ever used; all places from here on are free too."""
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
        """Apply one push of one worker, or of all workers in rank order.

        A contribution has ids in any order, perhaps repeated or empty, and a gradient for each of
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
        """Use this optimizer for updates from now on."""
        self.rows.set_optimizer(optimizer)

    def expire(self) -> None:
        """Remove the expired rows; pulls ignore them in any case."""
        if self.settings.ttl is not None:
            self._release(self.ages.older_than(self._oldest_stamp()))

    # -- what is there -------------------------------------------------------------------

    def __len__(self) -> int:
        self.expire()
        return len(self.index)

    @property
    def nbytes(self) -> int:
        """The size in bytes of rows, states, index and all else that the share keeps."""
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
        """Remove all rows and waiting ids, and set the number of pushes to 0."""
        self.index = IdIndex(self.num_places)
        self.ages.clear()
        self.ages.set_time(0)
        self._free = np.empty(0, np.int32)
        self._num_used = 0
        self.rows.count = 0
        if self._waiting is not None:
            self._waiting = WaitingIds(self.settings.admit_after, self._waiting.num_places)

    def remove(self, places: Places) -> None:
        """Remove the rows at distinct places, without counting them."""
        self._release(places, is_counted=False)

    def put(
        self, ids: Ids, values: RowValues, states: Sequence[RowValues], stamps: Ids, mark: int
    ) -> None:
        """Set rows of distinct ids as read from a file; there must be room for them."""
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
        """Mark ids as touched, create rows, and return places; -1: still without a row."""
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
        """Create rows for distinct ids and return their places, or -1 for no row.

        It evicts only rows with smaller stamps than ``before``.
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
        """Return up to ``number`` free places; evict older rows to free them if needed."""
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
        """Free this many places: remove expired rows, grow, then evict the oldest rows."""
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
        """Return how many places to allocate for this many rows."""
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
        """Remove the expired rows among these, and set their places to -1."""
        is_over = (places >= 0) & (self.ages.stamps[places] < self._oldest_stamp())
        if is_over.any():
            self._release(np.unique(places[is_over]))
            places[is_over] = -1

    def _release(
        self, places: Places, stamps: Ids | None = None, *, is_counted: bool = True
    ) -> int:
        """Remove the rows at distinct places, and return how many.

        If ``ages`` has already removed the rows, ``stamps`` are the stamps that they had.
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
        """Return the pushed values for ids that have rows, with places instead of ids."""
        has_row = places >= 0
        if has_row.all():
            return Contribution(places, values)
        self._counts["dropped"] += len(places) - int(np.count_nonzero(has_row))
        return Contribution(places[has_row], values[has_row])

    def _are_different(self, places: Places) -> bool:
        """Return whether the places that the last call touched are distinct.

        Each touch wrote a higher stamp, so a repeated place has the stamp of its last touch.
        """
        stamps = self.ages.stamps[places]
        return bool((stamps[1:] > stamps[:-1]).all())
