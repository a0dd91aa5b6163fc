"""``RowTable``: the rows of one key that are present, and their optimizer states.

A missing row is zero. A store in one process holds a row-sparse key in a ``RowTable``; a server can
hold its share of the rows the same way, under its own ids. Values and states are 2-D arrays, in
which a row has the same place (``row_memory.py``). There are two ways to find the place:

* direct: the place is the id. Used if all rows will be added, or if all rows together have at most
  ``DIRECT_BYTES``; the operating system allocates memory when a row is touched.
* by index: each new row gets the next place, and a sorted index finds it. Missing rows take no
  memory.

Results are the same for both. Only one thread at a time may use a table.
Read next: ``kvstore/stores/local/sparse.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kvstore.arrays.cpu.sums import Workspace
from kvstore.arrays.keys import KeySpec, width_of
from kvstore.errors import NotSupportedError
from kvstore.optimizer.base import Optimizer
from kvstore.sparse.ids import Ids, is_increasing
from kvstore.sparse.row_memory import RowMemory
from kvstore.sparse.sums import Contribution, RowValues, Sum
from kvstore.sparse.update import keeps_zero, update_all

Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

DIRECT_BYTES = 1 << 30
"""1 GiB of values: a million rows of 256 float32."""


class RowTable(RowMemory):
    """The rows of a key with this shape and dtype; a new table is empty."""

    def __init__(self, spec: KeySpec, *, is_whole: bool = False) -> None:
        """Create an empty table. ``is_whole`` says that all rows will be added."""
        self.num_rows = spec.shape[0]
        width = width_of(spec.shape)
        row_bytes = max(width * spec.dtype.itemsize, 1)
        is_direct = is_whole or self.num_rows * row_bytes <= DIRECT_BYTES
        self._places: _Direct | _Indexed = _Direct(self.num_rows) if is_direct else _Indexed()
        super().__init__(self._places.num_places, width, spec.dtype)

    # -- reading -------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of rows present."""
        return self._places.num_used

    @property
    def nbytes(self) -> int:
        """The size in bytes of the rows present."""
        return len(self) * self.width * self.values.itemsize

    @property
    def state_bytes(self) -> int:
        """The size in bytes of the optimizer's states for these rows."""
        return sum(len(self) * self.width * state.itemsize for state in self._states or ())

    def held(self) -> Any:
        return self._places.used()

    def ids(self) -> Ids:
        """Return the sorted ids of the rows present; do not write to the result."""
        return self._places.ids()

    def read(self, ids: Ids, out: RowValues | None = None) -> RowValues:
        """Return copies of the rows ``ids``, in this order and with repetitions.

        They are in ``out``, which is C-contiguous and has the table's dtype, or in new memory.
        """
        if out is None:
            out = np.empty((len(ids), self.width), self.values.dtype)
        places, absent = self._places.look_up(ids)
        self.read_places(places, out)
        if absent is not None:
            out[absent] = 0
        return out

    def read_states(self, ids: Ids) -> list[RowValues]:
        """Return copies of the states of these rows, which must all be present."""
        places, _ = self._places.look_up(ids)
        return [state[places] for state in self.states]

    def absent(self, ids: Ids) -> Ids:
        """Return those of these ids that have no row."""
        return self._places.absent(ids)

    def dense(self) -> RowValues:
        """Return all rows, as the table's own memory (direct) or as a new array."""
        if isinstance(self._places, _Direct):
            return self.values
        out = np.zeros((self.num_rows, self.width), self.values.dtype)
        ids = self.ids()
        out[ids] = self.read(ids)
        return out

    # -- writing -------------------------------------------------------------------------

    def replace(self, contributions: Sequence[Contribution], workspace: Workspace) -> None:
        """Replace all rows by the sum of contributions, whose ids are in range."""
        total = Sum(contributions)
        self.begin_afresh(keeps_values=len(total) == self.num_rows)
        self.assign(self._add(total.ids), total, workspace)

    def begin_afresh(self, *, keeps_values: bool = False) -> None:
        """Drop all states, and all rows unless ``keeps_values``."""
        self._states = None
        if keeps_values:
            return
        if isinstance(self._places, _Indexed):
            self._places = _Indexed()
            self.values = self.values[:0]
        else:
            self.values[self._places.used()] = 0
            self._places = _Direct(self.num_rows)

    def update(
        self, contributions: Sequence[Contribution], optimizer: Optimizer, workspace: Workspace
    ) -> None:
        """Update once, with the sum of contributions as the gradient.

        Raises ``NotSupportedError`` if the optimizer would have to update missing rows; then
        nothing has changed.
        """
        total = Sum(contributions)
        if optimizer.is_lazy("row_sparse"):
            self.update_lazily(self._add(total.ids), total, optimizer, workspace)
            return
        self._check_wholeness(optimizer, self.count + 1)
        places = self._add(total.ids)
        used = slice(0, self._places.num_places_used)
        values, states = self.values[used], [state[used] for state in self.states]
        held = self._places.held()
        update_all(values, states, places, total, optimizer, self.count + 1, workspace, held)
        self.count += 1

    def merge(self, ids: Ids, values: RowValues | None, states: Sequence[RowValues] | None) -> None:
        """Set the values and states, if given, of rows with these sorted ids.

        Without ``values`` the rows keep theirs; without ``states``, states do not change.
        """
        places = self._add(ids)
        if states is not None:
            self.restore(places, values, states)
        elif values is not None:
            self.values[places] = values

    # -- inside --------------------------------------------------------------------------

    def _add(self, ids: Ids) -> Ids:
        """Return the places of these rows; create missing rows as zeros."""
        places = self._places.add(ids)
        before, needed = len(self.values), self._places.num_places
        if needed > before:
            self.grow(max(needed, before + before // 2))
        return places

    def _check_wholeness(self, optimizer: Optimizer, count: int) -> None:
        """Check that an update of all rows can skip or create missing rows."""
        is_whole, dtype = len(self) == self.num_rows, self.values.dtype
        if optimizer.scope != "key" and (is_whole or keeps_zero(optimizer, dtype, count)):
            return
        if isinstance(self._places, _Direct):
            self._places.use_all()
            return
        name = optimizer.name or type(optimizer).__name__
        instead = "another optimizer, such as adagrad: this one needs whole keys"
        if optimizer.scope != "key":
            instead = "lazy_update=True"
        raise NotSupportedError(
            f"{name} would change all {self.num_rows} rows of this key, but only {len(self)} of "
            f"them are stored; use {instead}"
        )


class RowsBefore:
    """The rows of a table before an update, for readers that are one update behind.

    It keeps what the update may change, and reads the rest from the table.
    """

    def __init__(self, table: RowTable, ids: Ids | None) -> None:
        """Keep the rows with these sorted ids; None: all rows present."""
        self._table = table
        self._has_all = ids is None
        self._ids = table.ids().copy() if ids is None else ids
        self._values = table.read(self._ids)
        self._absent = self._ids[:0] if ids is None else table.absent(ids)

    @classmethod
    def of(
        cls, table: RowTable, has_all: bool, ids: Ids, values: RowValues, absent: Ids
    ) -> RowsBefore:
        """Return what ``copy`` has described, for a copy of its table."""
        made = cls(table, ids[:0])
        made._has_all, made._ids, made._absent = has_all, ids.copy(), absent.copy()
        made._values = values.copy()
        return made

    def copy(self) -> tuple[bool, Ids, RowValues, Ids]:
        """Return whether it has all rows; the kept ids and rows; ids that were absent."""
        return self._has_all, self._ids.copy(), self._values.copy(), self._absent.copy()

    def ids(self) -> Ids:
        """Return the sorted ids of the rows that were present."""
        if self._has_all:
            return self._ids
        now = self._table.ids()
        return now[~np.isin(now, self._absent, assume_unique=True)]

    def read(self, ids: Ids, out: RowValues) -> RowValues:
        """Return copies of the rows ``ids`` in ``out``; see ``RowTable.read``."""
        self._table.read(ids, out)
        if not len(self._ids):
            is_kept = np.zeros(len(ids), np.bool_)
        else:
            at = np.searchsorted(self._ids, ids)
            is_kept = self._ids.take(at, mode="clip") == ids
            out[is_kept] = self._values[at[is_kept]]
        if self._has_all:
            out[~is_kept] = 0
        return out


class _Direct:
    """Places that are equal to the ids."""

    def __init__(self, num_rows: int) -> None:
        self.num_places = self.num_places_used = num_rows
        self._is_used: Mask | None = np.zeros(num_rows, np.bool_)
        self.num_used = 0

    def look_up(self, ids: Ids) -> tuple[Ids, Mask | None]:
        """Return the places of rows; missing rows have places too, which hold zeros."""
        return ids, None

    def used(self) -> Any:
        """Return a slice or mask that selects the places that hold rows."""
        return slice(None) if self._is_used is None else self._is_used

    def ids(self) -> Ids:
        if self._is_used is None:
            return np.arange(self.num_places)
        return np.flatnonzero(self._is_used)

    def absent(self, ids: Ids) -> Ids:
        return ids[:0] if self._is_used is None else ids[~self._is_used[ids]]

    def held(self) -> Ids | None:
        """Return the sorted places that hold rows; None if all do."""
        return None if self._is_used is None else np.flatnonzero(self._is_used)

    def add(self, ids: Ids) -> Ids:
        if self._is_used is not None:
            self.num_used += len(ids) - int(np.count_nonzero(self._is_used[ids]))
            self._is_used[ids] = True
            if self.num_used == self.num_places:
                self._is_used = None
        return ids

    def use_all(self) -> None:
        self._is_used, self.num_used = None, self.num_places


class _Indexed:
    """Places in the order in which rows were added, with a sorted index of ids."""

    def __init__(self) -> None:
        self._ids: Ids = np.empty(0, np.int64)
        self._places: Ids = np.empty(0, np.int64)

    @property
    def num_places(self) -> int:
        return len(self._ids)

    num_used = num_places_used = num_places

    def look_up(self, ids: Ids) -> tuple[Ids, Mask | None]:
        """Return the places of rows, and a mask of missing rows, or None.

        The place of a missing row is arbitrary.
        """
        if not len(self._ids):
            return np.zeros(len(ids), np.int64), np.ones(len(ids), np.bool_)
        at = self._search(ids)
        absent: Mask = self._ids.take(at, mode="clip") != ids
        return self._places.take(at, mode="clip"), absent if absent.any() else None

    def _search(self, ids: Ids) -> Ids:
        if is_increasing(ids):
            return np.searchsorted(self._ids, ids)
        # A search in sorted order goes through the index once; any other order misses the cache.
        order = np.argsort(ids)
        at = np.empty(len(ids), np.int64)
        at[order] = np.searchsorted(self._ids, ids[order])
        return at

    def used(self) -> Any:
        return slice(0, len(self._ids))

    def ids(self) -> Ids:
        return self._ids

    def absent(self, ids: Ids) -> Ids:
        _, absent = self.look_up(ids)
        return ids[:0] if absent is None else ids[absent]

    def held(self) -> None:
        """Return None: all places hold rows."""

    def add(self, ids: Ids) -> Ids:
        """Return the places of rows with these sorted, distinct ids; add missing rows."""
        places, absent = self.look_up(ids)
        if absent is None:
            return places
        new = ids[absent]
        places[absent] = np.arange(len(self._ids), len(self._ids) + len(new))
        at = np.searchsorted(self._ids, new)
        self._ids = np.insert(self._ids, at, new)
        self._places = np.insert(self._places, at, places[absent])
        return places
