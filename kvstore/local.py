"""The store of one process on the host's memory: ``create("local")``.

Values of any device are brought to the host, added left to right and merged there by
``kvstore/aggregate.py``. No sockets and no threads of its own; calls may come from any thread
and run one at a time. The stored arrays are never handed out and never refer to a caller's
memory. Read next: ``device.py``, which moves the work to the GPU that holds the key.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from kvstore.aggregate import Flat, Workspace, apply_round
from kvstore.arrays import Array, adapter_for, adapter_on
from kvstore.base import KeyInfo, KVStore, Path, Version, check_optimizer
from kvstore.context import Context
from kvstore.errors import ArgumentTypeError, OptimizerNotSet
from kvstore.keys import (
    Key,
    Keys,
    KeySpec,
    KeyTable,
    UpdateFunction,
    Values,
    check_priority,
    normalise_keys,
    single_key,
    spec_of,
)
from kvstore.operation import futures_in
from kvstore.optimizer.base import Optimizer
from kvstore.saving import Checkpoint, Content, Piece, SavedStates, write_checkpoint, write_states
from pslite.errors import ClosedError, PSError
from pslite.future import Future, completed, failed

HOST = Context("cpu", 0)

T = TypeVar("T")


class Entry:
    """One key of a store in one process: its value and what its optimizer keeps for it."""

    def __init__(self, spec: KeySpec, weight: Array, generation: int) -> None:
        self.spec = spec
        self.generation = generation
        self.home = HOST
        """Where ``weight`` and ``state`` live."""
        self.weight = weight
        """C-contiguous, of the key's shape and dtype; owned by the store."""
        self.state: tuple[Flat, ...] | None = None
        """Flat arrays, made by the optimizer at the first update."""
        self.count = 0
        """Updates so far; the optimizer's own number of this key."""
        self.version = 0
        """Pushes so far."""


class LocalKVStore(KVStore):
    """Adds and updates on the CPU. What each call promises is said in ``KVStore``."""

    def __init__(self, name: str = "local") -> None:
        self._name = name
        # Guards everything below: a caller may push from one thread for each device. The same
        # thread may come again, from inside an updater.
        self._lock = threading.RLock()
        self._table = KeyTable()
        self._entries: dict[Key, Entry] = {}
        self._generations: dict[Key, int] = {}
        self._optimizer: Optimizer | None = None
        self._updater: UpdateFunction | None = None
        self._workspace = Workspace()
        self._counters = dict.fromkeys(("pushes", "pulls", "bytes_pushed", "bytes_pulled"), 0)
        self._is_closed = False

    # -- what it is --------------------------------------------------------------------

    @property
    def type(self) -> str:
        return self._name

    @property
    def rank(self) -> int:
        return 0

    @property
    def num_workers(self) -> int:
        return 1

    # -- values ------------------------------------------------------------------------

    def init(self, key: Keys, value: Values) -> None:
        with self._lock:
            self._check_open()
            self._add(self._table.check_init(key, value))

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        with self._lock:
            self._check_open()
            check_priority(priority)
            self._merge(self._table.check_push(key, value))

    def pull(
        self,
        key: Keys,
        out: Values | None = None,
        priority: int = 0,
        ignore_sparse: bool = True,
        with_version: bool = False,
    ) -> Any:
        with self._lock:
            self._check_open()
            check_priority(priority)
            values = self._pulled(key, out)
            if not with_version:
                return values
            keys, single = normalise_keys(key)
            versions = [Version([self._entries[item].version]) for item in keys]
            return values, versions[0] if single else versions

    def _pulled(self, key: Keys, out: Values | None) -> Any:
        if out is not None:
            self._fill(self._table.check_out(key, out))
            return None
        keys, single = normalise_keys(key)
        for item in keys:
            self._table.spec(item)
        copies = [_copy(self._entries[item].weight) for item in keys]
        self._count("pulls", sum(self._entries[item].spec.nbytes for item in keys))
        return copies[0] if single else copies

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> None:
        with self._lock:
            self._check_open()
            check_priority(priority)
            pushed, filled = self._table.check_pushpull(key, value, out)
            self._merge(pushed)
            self._fill(filled)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        with self._lock:
            self._check_open()
            check_priority(priority)
            values, filled = self._table.check_broadcast(key, value, out)
            self._add(values)
            self._fill(filled)

    # -- the same as futures: all is done when the call returns ------------------------

    def push_async(self, key: Keys, value: Values, priority: int = 0) -> Future[None]:
        return _done(lambda: self.push(key, value, priority))

    def pull_async(self, key: Keys, out: Values | None = None, priority: int = 0) -> Future[Any]:
        return _done(lambda: self.pull(key, out, priority))

    def pushpull_async(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> Future[None]:
        return _done(lambda: self.pushpull(key, value, out, priority))

    def wait(self, what: Any = None) -> Any:
        self._check_open()
        futures = futures_in(what)
        if futures is None:
            for key in [] if what is None else normalise_keys(what)[0]:
                self._table.spec(key)
            return None
        values = [future.result() for future in futures]
        return values[0] if isinstance(what, Future) else values

    # -- optimizers --------------------------------------------------------------------

    def set_optimizer(self, optimizer: Optimizer) -> None:
        optimizer = check_optimizer(optimizer)
        with self._lock:
            self._check_open()
            updated = [entry for entry in self._entries.values() if entry.state is not None]
            taken = [self._taken_over(entry, optimizer) for entry in updated]
            for entry, (state, count) in zip(updated, taken, strict=True):
                entry.state, entry.count = state, count
            self._optimizer = optimizer
            self._updater = None

    def current_optimizer(self) -> Optimizer:
        with self._lock:
            self._check_open()
            if self._optimizer is None:
                raise OptimizerNotSet("no optimizer is set: call set_optimizer first")
            return self._optimizer

    def set_updater(self, updater: UpdateFunction) -> None:
        if not callable(updater):
            raise ArgumentTypeError(f"an updater is a function, got {type(updater).__name__}")
        with self._lock:
            self._check_open()
            self._updater = updater
            self._optimizer = None
            for entry in self._entries.values():
                entry.state, entry.count = None, 0

    # -- keys --------------------------------------------------------------------------

    def keys(self) -> list[Key]:
        with self._lock:
            self._check_open()
            return self._table.keys()

    def info(self, key: Key) -> KeyInfo:
        with self._lock:
            self._check_open()
            key = single_key(key)
            spec = self._table.spec(key)
            return KeyInfo(*spec, spec.nbytes, 1, self._entries[key].generation)

    def delete(self, key: Keys) -> None:
        with self._lock:
            self._check_open()
            keys, _ = normalise_keys(key)
            for item in keys:
                self._table.spec(item)
            self._table.remove(keys)
            for item in keys:
                self._entries.pop(item, None)

    # -- files -------------------------------------------------------------------------

    def save_checkpoint(self, directory: Path) -> None:
        with self._lock:
            self._check_open()
            write_checkpoint(directory, self._contents(), self._optimizer, self._pieces())

    def load_checkpoint(self, directory: Path) -> None:
        with self._lock, Checkpoint(directory) as saved:
            self._check_open()
            optimizer = saved.states.optimizer or self._optimizer
            saved.check(self._contents())
            saved.states.check(self._contents(), optimizer)
            missing = {key: spec for key, spec in saved.specs.items() if key not in self._entries}
            self._add({key: np.zeros(*spec) for key, spec in missing.items()})
            if optimizer is not None:
                self.set_optimizer(optimizer)
            for key, entry in self._entries.items():
                piece = saved.read(key, 0, entry.spec.num_elements, optimizer)
                values = np.asarray(piece.values).reshape(entry.spec.shape)
                adapter_for(entry.weight).from_host(values, entry.weight)
                self._take_states(entry, piece.states, piece.num_updates)

    def save_optimizer_states(self, fname: Path, dump_optimizer: bool = False) -> None:
        with self._lock:
            self._check_open()
            write_states(
                fname,
                self._contents(),
                self._optimizer,
                self._pieces(),
                dump_optimizer=dump_optimizer,
            )

    def load_optimizer_states(self, fname: Path) -> None:
        with self._lock, SavedStates(fname) as saved:
            self._check_open()
            optimizer = saved.optimizer or self._optimizer
            saved.check(self._contents(), optimizer)
            if optimizer is not None:
                self.set_optimizer(optimizer)
            for key, entry in self._entries.items():
                states, count = saved.read(key, 0, entry.spec.num_elements, optimizer)
                self._take_states(entry, states, count)

    def _contents(self) -> dict[Key, Content]:
        return {key: Content(entry.spec, 1) for key, entry in self._entries.items()}

    def _pieces(self) -> Iterator[Piece]:
        for key, entry in self._entries.items():
            values = adapter_for(entry.weight).to_host(entry.weight).reshape(-1)
            state = entry.state
            if state is None:
                state = () if self._optimizer is None else self._optimizer.create_state(values)
            states = [adapter_for(array).to_host(array) for array in state]
            yield Piece(key, 0, values, states, entry.count)

    def _take_states(self, entry: Entry, states: Sequence[Flat], count: int) -> None:
        adapter = adapter_on(entry.home)
        entry.state = tuple(adapter.to_context(array, entry.home) for array in states)
        entry.count = count

    # -- the rest ----------------------------------------------------------------------

    def placement(self) -> dict[int, dict[Key, int]]:
        return {}

    def stats(self) -> dict[str, Any]:
        with self._lock:
            self._check_open()
            return {"store": {"keys": len(self._entries), **self._counters}, "servers": {}}

    def barrier(self) -> None:
        with self._lock:
            self._check_open()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._entries.clear()

    # -- inside ------------------------------------------------------------------------

    def _add(self, values: dict[Key, Array]) -> None:
        specs = {key: spec_of(array) for key, array in values.items()}
        copies = {key: np.array(adapter_for(array).to_host(array)) for key, array in values.items()}
        self._table.add(specs)
        for key, weight in copies.items():
            generation = self._generations[key] = self._generations.get(key, 0) + 1
            self._entries[key] = Entry(specs[key], weight, generation)

    def _merge(self, pushed: dict[Key, list[Array]]) -> None:
        if self._optimizer is not None:
            for key in pushed:
                self._optimizer.check_dtype(self._entries[key].spec.dtype)
        for key, arrays in pushed.items():
            entry = self._entries[key]
            self._settle(entry, arrays)
            if self._updater is not None:
                self._apply_updater(self._updater, key, entry, arrays)
            else:
                self._apply(key, entry, arrays)
            entry.version += 1
        self._count("pushes", sum(self._entries[key].spec.nbytes for key in pushed))

    def _settle(self, entry: Entry, arrays: Sequence[Array]) -> None:
        """Choose where a key lives, given the arrays of a push."""

    def _apply(self, key: Key, entry: Entry, arrays: Sequence[Array]) -> None:
        """Merge one key's arrays into it, where it lives."""
        weight = entry.weight.reshape(-1)
        contributions = [adapter_for(array).to_host(array).reshape(-1) for array in arrays]
        optimizer, state = self._begin_update(key, entry, weight)
        apply_round(weight, contributions, optimizer, state, entry.count, self._workspace)

    def _apply_updater(
        self, updater: UpdateFunction, key: Key, entry: Entry, arrays: Sequence[Array]
    ) -> None:
        """Let the caller's function change a copy, so that one that raises changes nothing."""
        adapter = adapter_on(entry.home)
        received = adapter.sum_in_order(arrays, entry.home, entry.spec.dtype)
        local = adapter.copy(entry.weight)
        with adapter.on(entry.home):
            updater(key, received, local)
        entry.weight = local

    def _begin_update(
        self, key: Key, entry: Entry, weight: Flat
    ) -> tuple[Optimizer | None, Sequence[Flat]]:
        """The key's optimizer and its state, made when there is none yet; counts the update."""
        if self._optimizer is None:
            return None, ()
        if entry.state is None:
            entry.state = self._optimizer.create_state(weight)
        entry.count += 1
        return self._optimizer.for_key(key), entry.state

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
        self._count("pulls", sum(self._entries[key].spec.nbytes for key in filled))

    def _read(self, weight: Array, out: Array) -> None:
        """Copy a stored value into a caller's array, wherever both live."""
        adapter_for(out).assign(weight, out)

    def _count(self, what: str, nbytes: int) -> None:
        self._counters[what] += 1
        self._counters["bytes_pushed" if what == "pushes" else "bytes_pulled"] += nbytes

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"this {self._name} store is closed; create a new one")


def _copy(array: Array) -> Array:
    return adapter_for(array).copy(array)


def _done(call: Callable[[], T]) -> Future[T]:
    """What a call has come to. A misuse raises at once, as it does with servers."""
    try:
        return completed(call())
    except PSError:
        raise
    except Exception as error:  # an updater's: it comes out of the future
        return failed(error)
