"""The store of one process on the host's memory: ``create("local")``.

Values of any device are brought to the host, added left to right and merged there by
``kvstore/aggregate.py``. No sockets and no threads of its own; calls may come from any thread
and run one at a time. The stored arrays are never handed out and never refer to a caller's
memory. Read next: ``device.py``, which moves the work to the GPU that holds the key.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.aggregate import Flat, Workspace, apply_round
from kvstore.arrays import Array, adapter_for, adapter_on
from kvstore.base import (
    Key,
    Keys,
    KeySpec,
    KeyTable,
    KVStore,
    Values,
    check_optimizer,
    normalise_keys,
    spec_of,
)
from kvstore.context import Context
from pslite.errors import ClosedError

if TYPE_CHECKING:
    from kvstore.optimizer.base import Optimizer

HOST = Context("cpu", 0)


class Entry:
    """One key of a store in one process: its value and what its optimizer keeps for it."""

    def __init__(self, spec: KeySpec, weight: Array) -> None:
        self.spec = spec
        self.home = HOST
        """Where ``weight`` and ``state`` live."""
        self.weight = weight
        """C-contiguous, of the key's shape and dtype; owned by the store."""
        self.state: tuple[Flat, ...] | None = None
        """Flat arrays, made by the optimizer at the first update."""
        self.count = 0
        """Updates so far; the optimizer's own number of this key."""


class LocalKVStore(KVStore):
    """Adds and updates on the CPU. What each call promises is said in ``KVStore``."""

    def __init__(self, name: str = "local") -> None:
        self._name = name
        # Guards everything below: a caller may push from one thread for each device.
        self._lock = threading.Lock()
        self._table = KeyTable()
        self._entries: dict[Key, Entry] = {}
        self._optimizer: Optimizer | None = None
        self._workspace = Workspace()
        self._is_closed = False

    @property
    def type(self) -> str:
        return self._name

    @property
    def rank(self) -> int:
        return 0

    @property
    def num_workers(self) -> int:
        return 1

    def init(self, key: Keys, value: Values) -> None:
        with self._lock:
            self._check_open()
            self._add(self._table.check_init(key, value))

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        with self._lock:
            self._check_open()
            self._merge(self._table.check_push(key, value))

    def pull(self, key: Keys, out: Values | None = None, priority: int = 0) -> Any:
        with self._lock:
            self._check_open()
            if out is not None:
                self._fill(self._table.check_out(key, out))
                return None
            keys, single = normalise_keys(key)
            for item in keys:
                self._table.spec(item)
            copies = [_copy(self._entries[item].weight) for item in keys]
            return copies[0] if single else copies

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> None:
        with self._lock:
            self._check_open()
            pushed, filled = self._table.check_pushpull(key, value, out)
            self._merge(pushed)
            self._fill(filled)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        with self._lock:
            self._check_open()
            values, filled = self._table.check_broadcast(key, value, out)
            self._add(values)
            self._fill(filled)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        optimizer = check_optimizer(optimizer)
        with self._lock:
            self._check_open()
            updated = [entry for entry in self._entries.values() if entry.state is not None]
            taken = [self._taken_over(entry, optimizer) for entry in updated]
            for entry, (state, count) in zip(updated, taken, strict=True):
                entry.state, entry.count = state, count
            self._optimizer = optimizer

    def barrier(self) -> None:
        with self._lock:
            self._check_open()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._entries.clear()

    def _add(self, values: dict[Key, Array]) -> None:
        specs = {key: spec_of(array) for key, array in values.items()}
        copies = {key: np.array(adapter_for(array).to_host(array)) for key, array in values.items()}
        self._table.add(specs)
        for key, weight in copies.items():
            self._entries[key] = Entry(specs[key], weight)

    def _merge(self, pushed: dict[Key, list[Array]]) -> None:
        optimizer = self._optimizer
        if optimizer is not None:
            for key in pushed:
                optimizer.check_dtype(self._entries[key].spec.dtype)
        for key, arrays in pushed.items():
            self._apply(self._entries[key], arrays)

    def _apply(self, entry: Entry, arrays: Sequence[Array]) -> None:
        """Merge one key's arrays into it, where it lives."""
        weight = entry.weight.reshape(-1)
        contributions = [adapter_for(array).to_host(array).reshape(-1) for array in arrays]
        state = self._begin_update(entry, weight)
        apply_round(weight, contributions, self._optimizer, state, entry.count, self._workspace)

    def _begin_update(self, entry: Entry, weight: Flat) -> Sequence[Flat]:
        """The entry's state, made when it has none yet; counts the update."""
        if self._optimizer is None:
            return ()
        if entry.state is None:
            entry.state = self._optimizer.create_state(weight)
        entry.count += 1
        return entry.state

    def _taken_over(self, entry: Entry, optimizer: Optimizer) -> tuple[tuple[Flat, ...], int]:
        with adapter_on(entry.home).on(entry.home):
            return optimizer.take_over(
                self._optimizer, entry.weight.reshape(-1), entry.state or (), entry.count
            )

    def _fill(self, filled: dict[Key, list[Array]]) -> None:
        for key, outs in filled.items():
            weight = self._entries[key].weight
            for out in outs:
                self._read(weight, out)

    def _read(self, weight: Array, out: Array) -> None:
        """Copy a stored value into a caller's array, wherever both live."""
        adapter_for(out).from_host(adapter_for(weight).to_host(weight), out)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"this {self._name} store is closed; create a new one")


def _copy(array: Array) -> Array:
    return adapter_for(array).copy(array)
