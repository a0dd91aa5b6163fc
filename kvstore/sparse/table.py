"""``RowTable``: the rows of one key that are present, and their optimizer states.

A row that is not there is zero. What a store in one process holds of a row-sparse key; a server
can hold its share of the rows the same way, under ids of its own. Values and states are 2-D
arrays with a row in the same place in each of them:

* direct: the place is the id. For tables that are wholly there and for those of at most
  ``DIRECT_BYTES``, whose memory the system gives when a row is touched.
* by index: places are given out as rows come; a sorted index finds them. The number of rows that
  the shape speaks of costs nothing then.

Which of the two it is changes no result. The table's owner lets one thread in at a time.
Read next: ``kvstore/stores/local/sparse.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kvstore.arrays.cpu import kernels
from kvstore.arrays.cpu.sums import Flat, Workspace
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.arrays.keys import KeySpec, width_of
from kvstore.errors import NotSupportedError
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import (
    create_state,
    follow,
    has_master,
    state_names,
    take_over,
)
from kvstore.sparse.ids import Ids, is_increasing
from kvstore.sparse.sums import Contribution, RowValues, Sum
from kvstore.sparse.update import assign, keeps_zero, over_cores, update_all, update_lazily

Mask: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]

DIRECT_BYTES = 1 << 30
"""1 GiB of values: a million rows of 256 float32."""


class RowTable:
    """The rows of a key of this shape and dtype, none of them there at first."""

    def __init__(self, spec: KeySpec, *, is_whole: bool = False) -> None:
        """``is_whole`` says that all rows are about to come."""
        self.num_rows = spec.shape[0]
        self.width = width_of(spec.shape)
        self.dtype = spec.dtype
        self.states: tuple[RowValues, ...] | None = None
        """As ``values``, one for each of the optimizer's arrays; None before the first update."""
        row_bytes = max(self.width * self.dtype.itemsize, 1)
        is_direct = is_whole or self.num_rows * row_bytes <= DIRECT_BYTES
        self._places: _Direct | _Indexed = _Direct(self.num_rows) if is_direct else _Indexed()
        self.values: RowValues = np.zeros((self._places.num_places, self.width), self.dtype)
        """A row at each place; zero where no row is."""

    # -- reading -------------------------------------------------------------------------

    def __len__(self) -> int:
        """How many rows are there."""
        return self._places.num_used

    @property
    def nbytes(self) -> int:
        """The size of the rows that are there."""
        return len(self) * self.width * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """The size of what the optimizer keeps for these rows."""
        return sum(len(self) * self.width * state.itemsize for state in self.states or ())

    def ids(self) -> Ids:
        """The rows that are there, sorted; only to be read."""
        return self._places.ids()

    def read(self, ids: Ids, out: RowValues | None = None) -> RowValues:
        """Copies of the rows ``ids``, in this order, repeated where they are.

        In ``out``, which is C-contiguous and of the table's dtype, or in new memory.
        """
        if out is None:
            out = np.empty((len(ids), self.width), self.dtype)
        places, absent = self._places.look_up(ids)

        def take(_: int, start: int, stop: int) -> None:
            wanted, into = places[start:stop], out[start:stop]
            if not kernels.take_rows(self.values, wanted, into):
                self.values.take(wanted, axis=0, out=into, mode="clip")

        if len(self.values):
            over_cores(len(ids), self.width, take)
        if absent is not None:
            out[absent] = 0
        return out

    def read_states(self, ids: Ids, optimizer: Optimizer | None) -> list[RowValues]:
        """Copies of the states of rows that are there; as they begin if no update was made."""
        places, _ = self._places.look_up(ids)
        if self.states is None:
            return [] if optimizer is None else self._fresh(optimizer, self.values[places])
        return [state[places] for state in self.states]

    def dense(self) -> RowValues:
        """All rows; the table's own memory where that is what it holds, else new."""
        if isinstance(self._places, _Direct):
            return self.values
        out = np.zeros((self.num_rows, self.width), self.dtype)
        ids = self.ids()
        out[ids] = self.read(ids)
        return out

    # -- writing -------------------------------------------------------------------------

    def replace(self, contributions: Sequence[Contribution], workspace: Workspace) -> None:
        """Hold the sum of these, and no other rows. Their ids are in range."""
        total = Sum(contributions)
        self.states = None
        if len(total) < self.num_rows:
            self.clear()
        places = self._add(total.ids, None)
        assign(self.values, places, total, workspace)

    def clear(self) -> None:
        """Hold no rows, and no states."""
        self.states = None
        if isinstance(self._places, _Indexed):
            self._places = _Indexed()
            self.values = self.values[:0]
        else:
            self.values[self._places.used()] = 0
            self._places = _Direct(self.num_rows)

    def update(
        self,
        contributions: Sequence[Contribution],
        optimizer: Optimizer,
        count: int,
        workspace: Workspace,
    ) -> None:
        """One update, of number ``count``, with the sum of these as the gradient.

        Raises ``NotSupportedError`` where all rows would have to be updated and are not there;
        then nothing has changed.
        """
        total = Sum(contributions)
        if optimizer.is_lazy("row_sparse"):
            places = self._ready(total.ids, optimizer)
            update_lazily(
                self.values, self.states or (), places, total, optimizer, count, workspace
            )
            return
        self._check_wholeness(optimizer, count)
        places = self._ready(total.ids, optimizer)
        held = self._places.held()
        used = slice(0, self._places.num_places_used)
        states = [state[used] for state in self.states or ()]
        update_all(self.values[used], states, places, total, optimizer, count, workspace, held)

    def begin_afresh(self, *, keeps_values: bool) -> None:
        """Hold no states, and no rows unless they keep their values: ``merge`` brings them."""
        if not keeps_values:
            self.clear()
        self.states = None

    def merge(
        self, ids: Ids, values: RowValues | None, states: Sequence[RowValues], optimizer: Any
    ) -> None:
        """Set the states, and where there are any the values, of these rows: sorted, in range.

        Without ``values`` the rows keep theirs. The others stay as they are.
        """
        places = self._add(ids, optimizer)
        if values is not None:
            self.values[places] = values
        if optimizer is not None and self.states is None:
            self._make_states(optimizer)
        own: tuple[RowValues, ...] = self.states or ()
        for array, state in zip(own, states, strict=False):  # none, or all but the master
            array[places] = state
        if own and has_master(self.dtype):
            master, present = own[-1], self.values[places]
            rows = master[places] if len(states) == len(own) else present.astype(master.dtype)
            follow(present.reshape(-1), rows.reshape(-1))
            master[places] = rows

    def take_over(
        self, previous: Optimizer | None, optimizer: Optimizer, count: int
    ) -> tuple[tuple[Flat, ...], int]:
        """``Optimizer.take_over`` of all rows; ``keep_states`` makes it so."""
        flat = [state.reshape(-1) for state in self.states or ()]
        return take_over(optimizer, previous, self.values.reshape(-1), flat, count)

    def keep_states(self, states: Sequence[Flat] | None) -> None:
        """Take these for the states, flat, of all places; None for none."""
        shape = self.values.shape
        self.states = None if states is None else tuple(state.reshape(shape) for state in states)

    # -- inside --------------------------------------------------------------------------

    def _ready(self, ids: Ids, optimizer: Optimizer) -> Ids:
        """The places of these rows, which are there from now on, with states."""
        if self.states is None:
            self._make_states(optimizer)
        return self._add(ids, optimizer)

    def _add(self, ids: Ids, optimizer: Optimizer | None) -> Ids:
        """The places of these rows, which are there from now on: zero if they were not."""
        places = self._places.add(ids)
        if self._places.num_places > len(self.values):
            self._grow(optimizer)
        return places

    def _grow(self, optimizer: Optimizer | None) -> None:
        before, needed = len(self.values), self._places.num_places
        capacity = max(needed, before + before // 2)
        added = np.zeros((capacity - before, self.width), self.dtype)
        if self.states is not None and optimizer is not None:
            fresh = self._fresh(optimizer, added)
            self.states = tuple(map(_joined, self.states, fresh))
        self.values = _joined(self.values, added)

    def _make_states(self, optimizer: Optimizer) -> None:
        if type(optimizer).create_state is Optimizer.create_state:
            dtype = accumulation_dtype(self.dtype)
            # Memory that the system gives when it is touched, unlike that of zeros_like.
            names = state_names(optimizer, self.dtype)
            self.states = tuple(np.zeros(self.values.shape, dtype) for _ in names)
            if has_master(self.dtype):
                held = self._places.held()
                used = slice(None) if held is None else held
                self.states[-1][used] = self.values[used]
        else:
            self.states = tuple(self._fresh(optimizer, self.values))

    def _fresh(self, optimizer: Optimizer, rows: RowValues) -> list[RowValues]:
        return [state.reshape(rows.shape) for state in create_state(optimizer, rows.reshape(-1))]

    def _check_wholeness(self, optimizer: Optimizer, count: int) -> None:
        """Whether rows that are not there may be left out of an update of all rows."""
        is_whole = len(self) == self.num_rows
        if optimizer.scope != "key" and (is_whole or keeps_zero(optimizer, self.dtype, count)):
            return
        if isinstance(self._places, _Direct):
            self._places.use_all()
            return
        name = optimizer.name or type(optimizer).__name__
        instead = "another optimizer, such as adagrad: this one needs whole keys"
        if optimizer.scope != "key":
            instead = "lazy_update=True"
        raise NotSupportedError(
            f"{name} would change all {self.num_rows} rows of this key, of which only {len(self)} "
            f"are held; use {instead}"
        )


class _Direct:
    """The place of a row is its id."""

    def __init__(self, num_rows: int) -> None:
        self.num_places = self.num_places_used = num_rows
        self._is_used: Mask | None = np.zeros(num_rows, np.bool_)
        self.num_used = 0

    def look_up(self, ids: Ids) -> tuple[Ids, Mask | None]:
        """The places of rows; those that are not there are zero."""
        return ids, None

    def used(self) -> Any:
        """An index of the places of rows."""
        return slice(None) if self._is_used is None else self._is_used

    def ids(self) -> Ids:
        if self._is_used is None:
            return np.arange(self.num_places)
        return np.flatnonzero(self._is_used)

    def held(self) -> Ids | None:
        """The places of rows, sorted; None for all."""
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
    """Places in the order in which rows came; found in a sorted index."""

    def __init__(self) -> None:
        self._ids: Ids = np.empty(0, np.int64)
        self._places: Ids = np.empty(0, np.int64)

    @property
    def num_places(self) -> int:
        return len(self._ids)

    num_used = num_places_used = num_places

    def look_up(self, ids: Ids) -> tuple[Ids, Mask | None]:
        """The places of rows, and which are not there (their place is any), or None."""
        if not len(self._ids):
            return np.zeros(len(ids), np.int64), np.ones(len(ids), np.bool_)
        at = self._search(ids)
        absent: Mask = self._ids.take(at, mode="clip") != ids
        return self._places.take(at, mode="clip"), absent if absent.any() else None

    def _search(self, ids: Ids) -> Ids:
        if is_increasing(ids):
            return np.searchsorted(self._ids, ids)
        # A search in order goes through the index once; at random it misses the cache.
        order = np.argsort(ids)
        at = np.empty(len(ids), np.int64)
        at[order] = np.searchsorted(self._ids, ids[order])
        return at

    def ids(self) -> Ids:
        return self._ids

    def held(self) -> None:
        """All places that were given out."""

    def add(self, ids: Ids) -> Ids:
        """The places of different rows, sorted, which are there from now on."""
        places, absent = self.look_up(ids)
        if absent is None:
            return places
        new = ids[absent]
        places[absent] = np.arange(len(self._ids), len(self._ids) + len(new))
        at = np.searchsorted(self._ids, new)
        self._ids = np.insert(self._ids, at, new)
        self._places = np.insert(self._places, at, places[absent])
        return places


def _joined(rows: RowValues, added: RowValues) -> RowValues:
    return np.concatenate([rows, added])
