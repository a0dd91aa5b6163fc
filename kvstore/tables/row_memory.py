"""``Slots``: rows by place, and their optimizer states.

Values and states are 2-D arrays with a row in the same place of each. They grow by doubling, into
memory that the system gives when it is touched. Pure; one thread at a time. Read next:
``shard.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.arrays.cpu.sums import Workspace
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import create_state, has_master, state_names, take_over
from kvstore.sparse.sums import RowValues, Sum
from kvstore.sparse.update import assign, update_lazily
from kvstore.tables.hash_index import Places


class Slots:
    """Rows of ``width`` numbers at places below ``num_places``."""

    def __init__(
        self, num_places: int, width: int, dtype: np.dtype[Any], optimizer: Optimizer | None
    ) -> None:
        self.values: RowValues = np.zeros((num_places, width), dtype)
        self.states: tuple[RowValues, ...] = ()
        self.optimizer: Optimizer | None = None
        self.count = 0
        """How many updates the optimizer has made: what its schedule and corrections go by."""
        self.set_optimizer(optimizer)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.values, *self.states))

    def grow(self, num_places: int) -> None:
        """Make room for this many places, more than before."""
        self.values = _grown(self.values, num_places)
        for at in range(len(self.states)):
            # One after the other, so that the old memory of only one is still there.
            grown = _grown(self.states[at], num_places)
            self.states = (*self.states[:at], grown, *self.states[at + 1 :])

    def begin(self, places: Places, values: RowValues) -> None:
        """New rows at different places, with states as they begin."""
        self.values[places] = values
        if self.optimizer is None or not self.states:
            return
        if _begins_at_zero(self.optimizer):
            for state in self.states:
                state[places] = 0
            if has_master(self.values.dtype):
                self.states[-1][places] = self.values[places]
            return
        fresh = create_state(self.optimizer, self.values[places].reshape(-1))
        for state, rows in zip(self.states, fresh, strict=True):
            state[places] = rows.reshape(values.shape)

    def restore(self, places: Places, values: RowValues, states: Sequence[RowValues]) -> None:
        """Set rows at different places; without states, they begin afresh."""
        self.begin(places, values)
        for own, rows in zip(self.states, states, strict=False):
            own[places] = rows

    def read(self, places: Places, out: RowValues) -> None:
        """Copy rows to ``out``, C-contiguous and of the same dtype; -1 gives any row."""
        if len(self.values):
            self.values.take(places, axis=0, out=out, mode="clip")

    def update(self, total: Sum, workspace: Workspace) -> None:
        """One update with a sum whose ids are places: the gradient, or without an optimizer the
        new values."""
        if self.optimizer is None:
            assign(self.values, total.ids, total, workspace)
            return
        self.count += 1
        chosen = self.optimizer.for_rows(self.values.shape[1])
        update_lazily(self.values, self.states, total.ids, total, chosen, self.count, workspace)

    def set_optimizer(self, optimizer: Optimizer | None) -> None:
        """Update by this one from now on: of the same class it keeps states and count."""
        if optimizer is None:
            self.states, self.count = (), 0
        elif type(optimizer) is not type(self.optimizer) and _begins_at_zero(optimizer):
            dtype = accumulation_dtype(self.values.dtype)
            # Memory that the system gives when it is touched, unlike that of zeros_like.
            kept = self.states[-1:] if has_master(self.values.dtype) else ()
            names = state_names(optimizer, self.values.dtype)
            if has_master(self.values.dtype) and not kept:
                kept = (self.values.astype(dtype),)
            fresh = [np.zeros(self.values.shape, dtype) for _ in names[: len(names) - len(kept)]]
            self.states = (*fresh, *kept)
            self.count = 0
        else:
            flat = [state.reshape(-1) for state in self.states]
            states, self.count = take_over(
                optimizer, self.optimizer, self.values.reshape(-1), flat, self.count
            )
            self.states = tuple(state.reshape(self.values.shape) for state in states)
        self.optimizer = optimizer


def _begins_at_zero(optimizer: Optimizer) -> bool:
    return type(optimizer).create_state is Optimizer.create_state


def _grown(rows: RowValues, num_places: int) -> RowValues:
    grown = np.zeros((num_places, rows.shape[1]), rows.dtype)
    grown[: len(rows)] = rows
    return grown
