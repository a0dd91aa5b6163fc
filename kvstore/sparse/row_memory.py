"""``RowMemory``: numbered places for rows and for their optimizer states.

Row-sparse keys (``table.py``) and shares of growing tables (``tables/shard.py``) both store their
rows in it. They differ in how they find the place of an id, and in the value of a missing row.
Values and states are 2-D arrays; a row has the same place in each. The operating system allocates
their memory when it is first touched. States are created at their first use. Pure; only one thread
at a time may use a ``RowMemory``. Read next: ``update.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.arrays.cpu import kernels
from kvstore.arrays.cpu.sums import Workspace
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import create_state, follow, has_master, state_names, take_over
from kvstore.sparse.ids import Ids
from kvstore.sparse.sums import RowValues, Sum
from kvstore.sparse.update import assign, over_cores, update_lazily


class RowMemory:
    """Rows of ``width`` numbers at places below ``len(values)``."""

    def __init__(self, num_places: int, width: int, dtype: np.dtype[Any]) -> None:
        self.width = width
        self.values: RowValues = np.zeros((num_places, width), dtype)
        self.optimizer: Optimizer | None = None
        self.count = 0
        """How many updates the optimizer has made; its schedule and corrections use this."""
        self._states: tuple[RowValues, ...] | None = None

    @property
    def states(self) -> tuple[RowValues, ...]:
        """The optimizer's state arrays, each with the shape of ``values``."""
        if self._states is None:
            if self.optimizer is None:
                return ()
            self._states = self._fresh(self.optimizer)
        return self._states

    @property
    def memory_bytes(self) -> int:
        """The size of values and states in bytes."""
        return sum(array.nbytes for array in (self.values, *(self._states or ())))

    def held(self) -> Any:
        """Return a slice or mask that selects the places that hold rows, or all places."""
        return slice(None)

    def grow(self, num_places: int) -> None:
        """Make room for this many places, which must be more than before."""
        before = len(self.values)
        self.values = grown(self.values, num_places)
        states = self._states or ()
        for at in range(len(states)):
            # One at a time, so that only one array has its old and new memory at once.
            states = (*states[:at], grown(states[at], num_places), *states[at + 1 :])
            self._states = states
        self._begin_states(slice(before, None), is_zero=True)

    def begin(self, places: Ids, values: RowValues) -> None:
        """Put new rows at distinct places, with initial states."""
        self.values[places] = values
        self._begin_states(places, is_zero=False)

    def _begin_states(self, places: Any, *, is_zero: bool) -> None:
        """Set initial states; ``is_zero`` says that these states are zero already."""
        if self.optimizer is None or not self._states:
            return
        if not _begins_at_zero(self.optimizer):
            rows = self.values[places]
            fresh = create_state(self.optimizer, rows.reshape(-1))
            for state, new in zip(self._states, fresh, strict=True):
                state[places] = new.reshape(rows.shape)
        elif not is_zero:
            for state in self._states:
                state[places] = 0
            if has_master(self.values.dtype):
                self._states[-1][places] = self.values[places]

    def restore(self, places: Ids, values: RowValues | None, states: Sequence[RowValues]) -> None:
        """Set rows at distinct places from a file; without ``values`` they keep theirs.

        ``states`` may be empty, or lack the master weights. A master weight that does not round to
        its value is set to the value.
        """
        if values is not None:
            self.values[places] = values
        own = self.states
        for array, rows in zip(own, states, strict=False):
            array[places] = rows
        if own and has_master(self.values.dtype):
            master, present = own[-1], self.values[places]
            rows = master[places] if len(states) == len(own) else present.astype(master.dtype)
            follow(present.reshape(-1), rows.reshape(-1))
            master[places] = rows

    def read_places(self, places: Ids, out: RowValues) -> None:
        """Copy rows to ``out``, which is C-contiguous and has the same dtype.

        If there are many rows, all cores share the work.
        """

        def take(_: int, start: int, stop: int) -> None:
            wanted, into = places[start:stop], out[start:stop]
            if not kernels.take_rows(self.values, wanted, into):
                self.values.take(wanted, axis=0, out=into, mode="clip")

        if len(self.values):
            over_cores(len(places), self.width, take)

    def assign(self, places: Ids, total: Sum, workspace: Workspace) -> None:
        """Set the rows at distinct places to the rows of a sum."""
        assign(self.values, places, total, workspace)

    def update_lazily(
        self, places: Ids, total: Sum, optimizer: Optimizer, workspace: Workspace
    ) -> None:
        """Update the rows at distinct places, and no others.

        ``optimizer`` is the optimizer that was set, perhaps adapted to this key.
        """
        states, count = self.states, self.count + 1
        update_lazily(self.values, states, places, total, optimizer, count, workspace)
        self.count = count

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """Use this optimizer from now on; one of the same class keeps states and count."""
        previous = self.optimizer
        if optimizer is previous:
            return
        is_other = type(optimizer) is not type(previous)
        states, count = self._states, 0 if is_other else self.count
        if optimizer is None:
            states = None
        elif states is not None and is_other and _begins_at_zero(optimizer):
            master = states[-1:] if has_master(self.values.dtype) else ()
            fresh = self._fresh(optimizer)
            states = (*fresh[: len(fresh) - len(master)], *master)
        elif states is not None:
            values, flat = self.values.reshape(-1), [state.reshape(-1) for state in states]
            taken, count = take_over(optimizer, previous, values, flat, self.count)
            states = tuple(state.reshape(self.values.shape) for state in taken)
        self.optimizer, self._states, self.count = optimizer, states, count

    def _fresh(self, optimizer: Optimizer) -> tuple[RowValues, ...]:
        """Return initial states for all places."""
        shape, dtype = self.values.shape, self.values.dtype
        if not _begins_at_zero(optimizer):
            states = create_state(optimizer, self.values.reshape(-1))
            return tuple(state.reshape(shape) for state in states)
        # Unlike zeros_like, zeros does not touch the memory, so the system allocates it later.
        fresh = [np.zeros(shape, accumulation_dtype(dtype)) for _ in state_names(optimizer, dtype)]
        if has_master(dtype):
            held = self.held()
            fresh[-1][held] = self.values[held]
        return tuple(fresh)


def _begins_at_zero(optimizer: Optimizer) -> bool:
    kind = type(optimizer)
    return kind.create_state is Optimizer.create_state and kind.take_over is Optimizer.take_over


def grown(rows: RowValues, num_places: int) -> RowValues:
    """Return a copy that has this many rows; new rows are zero."""
    copy = np.zeros((num_places, *rows.shape[1:]), rows.dtype)
    copy[: len(rows)] = rows
    return copy
