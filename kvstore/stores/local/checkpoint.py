"""Save and load the values and states of a store in one process.

Row-sparse keys are written with the rows that are there. The store's lock guards everything
here. Read next: ``checkpoint/optimizer_states.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvstore.arrays import adapter_for, adapter_on
from kvstore.arrays.cpu.sums import Flat
from kvstore.arrays.keys import Key
from kvstore.checkpoint.directory import CheckpointReader
from kvstore.checkpoint.optimizer_states import Content, SavedPiece, SavedStates
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import create_state, has_master, restored
from kvstore.sparse.array import RowSparseArray
from kvstore.sparse.sums import RowValues
from kvstore.stores.local.memory import StoredKey
from kvstore.stores.local.values import LocalValues


def contents_of(entries: Iterable[StoredKey]) -> dict[Key, Content]:
    """What ``pieces_of`` will hand over."""
    return {
        entry.key: Content(entry.spec, 1, None if entry.table is None else entry.table.ids())
        for entry in entries
    }


def pieces_of(entries: Iterable[StoredKey], optimizer: Optimizer | None) -> Iterator[SavedPiece]:
    """A piece for each key, with its values."""
    for entry in entries:
        if entry.table is not None:
            ids = entry.table.ids()
            values = entry.table.read(ids).reshape(-1)
            rows = entry.table.read_states(ids, optimizer)
            yield SavedPiece(entry.key, 0, values, [row.reshape(-1) for row in rows], entry.count)
            continue
        values = adapter_for(entry.weight).to_host(entry.weight).reshape(-1)
        state = entry.state
        if state is None:
            state = () if optimizer is None else create_state(optimizer, values)
        states = [adapter_for(array).to_host(array) for array in state]
        yield SavedPiece(entry.key, 0, values, states, entry.count)


def take_checkpoint(values: LocalValues, saved: CheckpointReader) -> None:
    """Take everything over from a checkpoint; keys that are not there are made.

    Raises what the checks of ``saved`` do, before anything has changed.
    """
    optimizer = saved.states.optimizer or values.optimizer
    contents = contents_of(values.entries.values())
    saved.check(contents)
    saved.states.check(contents, optimizer)
    missing = {key: spec for key, spec in saved.specs.items() if key not in values.entries}
    values.add(
        {
            key: (RowSparseArray.zeros if saved.is_row_sparse(key) else np.zeros)(*spec)
            for key, spec in missing.items()
        }
    )
    if optimizer is not None:
        values.set_optimizer(optimizer)
    for entry in values.entries.values():
        _take_values(entry, saved, optimizer)


def take_states(values: LocalValues, saved: SavedStates) -> None:
    """Take states, counts and the optimizer over from a file.

    Raises what the check of ``saved`` does, before anything has changed.
    """
    optimizer = saved.optimizer or values.optimizer
    saved.check(contents_of(values.entries.values()), optimizer)
    if optimizer is not None:
        values.set_optimizer(optimizer)
    for entry in values.entries.values():
        _take_states(entry, saved, optimizer)


def _take_values(entry: StoredKey, saved: CheckpointReader, optimizer: Optimizer | None) -> None:
    """Set value, states and count of a key to those in a checkpoint."""
    if entry.table is not None:
        ids = saved.states.rows_of(entry.key)
        shape = len(ids), entry.table.width
        piece = saved.read(entry.key, 0, math.prod(shape), optimizer)
        rows = np.asarray(piece.values).reshape(shape)
        entry.table.begin_afresh(keeps_values=False)
        entry.table.merge(ids, rows, _by_rows(piece.states, rows.shape), optimizer)
        entry.count = piece.num_updates
        return
    piece = saved.read(entry.key, 0, entry.spec.num_elements, optimizer)
    values = np.asarray(piece.values).reshape(entry.spec.shape)
    adapter_for(entry.weight).from_host(values, entry.weight)
    _keep(entry, restored(optimizer, values.reshape(-1), piece.states), piece.num_updates)


def _take_states(entry: StoredKey, saved: SavedStates, optimizer: Optimizer | None) -> None:
    """Set states and count of a key to those in a file."""
    if entry.table is not None:
        ids = saved.rows_of(entry.key)
        shape = len(ids), entry.table.width
        states, entry.count = saved.read(entry.key, 0, math.prod(shape), optimizer)
        entry.table.begin_afresh(keeps_values=True)
        entry.table.merge(ids, None, _by_rows(states, shape), optimizer)
        return
    states, count = saved.read(entry.key, 0, entry.spec.num_elements, optimizer)
    if has_master(entry.spec.dtype):
        weight = adapter_for(entry.weight).to_host(entry.weight).reshape(-1)
        states = list(restored(optimizer, weight, states))
    _keep(entry, states, count)


def _keep(entry: StoredKey, states: Sequence[Flat], count: int) -> None:
    adapter = adapter_on(entry.home)
    entry.keep_state((adapter.to_context(array, entry.home) for array in states), count)


def _by_rows(states: Sequence[Flat], shape: tuple[int, ...]) -> list[RowValues]:
    return [state.reshape(shape) for state in states]
