"""Save and load the values and states of a store in one process.

Only the stored rows of row-sparse keys are written. The store's lock guards everything here. Read
next: ``checkpoint/optimizer_states.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from kvstore.arrays import adapter_for, adapter_on
from kvstore.arrays.keys import Key
from kvstore.checkpoint.optimizer_states import Content, SavedPiece, SavedStates
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import create_state, has_master, restored
from kvstore.sparse.table import RowTable
from kvstore.stores.local.memory import StoredKey
from kvstore.stores.local.values import LocalValues


def contents_of(entries: Iterable[StoredKey]) -> dict[Key, Content]:
    """Return a description of each key that ``pieces_of`` yields."""
    return {
        entry.key: Content(entry.spec, 1, None if entry.table is None else entry.table.ids())
        for entry in entries
    }


def pieces_of(entries: Iterable[StoredKey], optimizer: Optimizer | None) -> Iterator[SavedPiece]:
    """Yield a piece for each key, with its values and states."""
    for entry in entries:
        if entry.table is not None:
            entry.table.set_optimizer(optimizer)
            ids = entry.table.ids()
            values = entry.table.read(ids).reshape(-1)
            states = [rows.reshape(-1) for rows in entry.table.read_states(ids)]
            yield SavedPiece(entry.key, 0, values, states, entry.table.count)
            continue
        values = adapter_for(entry.weight).to_host(entry.weight).reshape(-1)
        state = entry.state
        if state is None:
            state = () if optimizer is None else create_state(optimizer, values)
        states = [adapter_for(array).to_host(array) for array in state]
        yield SavedPiece(entry.key, 0, values, states, entry.count)


def take(values: LocalValues, saved: SavedStates) -> None:
    """Load everything from a file or checkpoint; create missing keys.

    Raises the errors of ``saved.check``, before anything has changed.
    """
    optimizer = saved.optimizer or values.optimizer
    saved.check(contents_of(values.entries.values()), optimizer)
    values.add(saved.missing(values.entries))
    if optimizer is not None:
        values.set_optimizer(optimizer)
    for entry in values.entries.values():
        if entry.table is None:
            _take_dense(entry, saved, optimizer)
        else:
            _take_rows(entry.key, entry.table, saved, optimizer)


def _take_dense(entry: StoredKey, saved: SavedStates, optimizer: Optimizer | None) -> None:
    piece = saved.read(entry.key, 0, entry.spec.num_elements, optimizer)
    weight, home = adapter_for(entry.weight), adapter_on(entry.home)
    states = piece.states
    if piece.values is not None:
        weight.from_host(np.asarray(piece.values).reshape(entry.spec.shape), entry.weight)
    if has_master(entry.spec.dtype):
        values = weight.to_host(entry.weight).reshape(-1)
        states = list(restored(optimizer, values, states))
    entry.keep_state((home.to_context(each, entry.home) for each in states), piece.num_updates)


def _take_rows(key: Key, table: RowTable, saved: SavedStates, optimizer: Optimizer | None) -> None:
    ids = saved.rows_of(key)
    shape = len(ids), table.width
    piece = saved.read(key, 0, math.prod(shape), optimizer)
    values = None if piece.values is None else piece.values.reshape(shape)
    table.begin_afresh(keeps_values=values is None)
    table.merge(ids, values, [state.reshape(shape) for state in piece.states])
    table.count = piece.num_updates
