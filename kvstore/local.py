"""The store of one process on the host's memory: ``create("local")``.

Values of any device are brought to the host, added left to right and merged there by
``kvstore/blocks.py``, on all cores for large models. No sockets; calls may come from any thread
and run one at a time. The stored arrays are never handed out and never refer to a caller's
memory. Read next: ``blocks.py``, then ``device.py``, which moves the work to the GPU that holds
the key.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from kvstore import local_rows
from kvstore.aggregate import Flat
from kvstore.arrays import Array, adapter_for, adapter_on
from kvstore.base import (
    CompressionParams,
    KeyInfo,
    KVStore,
    Path,
    Version,
    check_optimizer,
)
from kvstore.blocks import Blocks, HostArray, Row, Workspaces
from kvstore.compression import Compression
from kvstore.errors import ArgumentTypeError, OptimizerNotSet
from kvstore.keys import (
    Key,
    Keys,
    KeyTable,
    UpdateFunction,
    Values,
    check_priority,
    normalise_keys,
    single_key,
    spec_of,
)
from kvstore.local_coding import LocalCoding
from kvstore.local_files import contents_of, pieces_of, take_states, take_values
from kvstore.local_tables import LocalTables
from kvstore.operation import futures_in
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import take_over
from kvstore.residual_files import path_beside_states, path_in_checkpoint
from kvstore.row_calls import check_dense_outs, check_wanted
from kvstore.rows import RowReader, Rows
from kvstore.saving import Checkpoint, SavedStates, write_checkpoint, write_states
from kvstore.shelf import HOST, Entry, Shelves
from kvstore.sparse.array import RowSparseArray
from kvstore.tables.base import Table
from pslite.errors import ClosedError, PSError
from pslite.future import Future, completed, failed

T = TypeVar("T")


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
        #: What pushed values pass through; None: nothing.
        self._coding: LocalCoding | None = None
        self._shelves = Shelves()
        self._workspaces = Workspaces()
        self._rows = RowReader(self._table, self._entries)
        self._counters = dict.fromkeys(("pushes", "pulls", "bytes_pushed", "bytes_pulled"), 0)
        self._tables = LocalTables(self._lock, self._check_open)
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
            self._merge(self._pushed(key, value))

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
            values = self._pulled(key, out, ignore_sparse)
            if not with_version:
                return values
            keys, single = normalise_keys(key)
            versions = [Version([self._entries[item].version]) for item in keys]
            return values, versions[0] if single else versions

    def _pulled(self, key: Keys, out: Values | None, ignore_sparse: bool) -> Any:
        if out is not None:
            self._fill(self._rows.filled(key, out, ignores_sparse=bool(ignore_sparse)))
            return None
        keys, single = normalise_keys(key)
        for item in keys:
            self._table.spec(item)
        came = self._decoded(keys)
        copies = [_copy(self._entries[item]) for item in keys]
        for item, copy in zip(keys, copies, strict=True):
            if item in came:
                adapter_for(copy).assign(came[item], copy)
        self._count("pulls", keys)
        return copies[0] if single else copies

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> None:
        with self._lock:
            self._check_open()
            check_priority(priority)
            pushed, filled = self._pushed_and_filled(key, value, value if out is None else out)
            is_plain = pushed.blocks and filled.blocks and self._updater is None
            if is_plain and not (self._coding is not None and self._coding.encodes_pulls):
                assert filled.blocks is not None
                self._merge(pushed, filled.rows)
                self._count("pulls", filled.keys, filled.blocks)
            else:
                self._merge(pushed)
                # Blocks are of keys on the host, and an array on a GPU may have moved some.
                self._fill(filled if pushed.blocks else filled._replace(blocks=None))

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        with self._lock:
            self._check_open()
            check_priority(priority)
            values, filled = self._table.check_broadcast(key, value, out)
            check_dense_outs(filled)
            self._add(values)
            self._fill(self._rows.split(filled))

    def row_sparse_pull(
        self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> Any:
        with self._lock:
            self._check_open()
            check_priority(priority)
            wanted, is_single = check_wanted(self._table.spec, key, out, row_ids)
            pulled = [local_rows.pull_rows(self._entries[each.key], each) for each in wanted]
            self._counters["pulls"] += 1
            self._counters["bytes_pulled"] += sum(each.nbytes for each in wanted)
            if out is not None:
                return None
            return pulled[0] if is_single else pulled

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
            updated = [entry for entry in self._entries.values() if entry.has_state]
            taken = [self._taken_over(entry, optimizer) for entry in updated]
            for entry, (state, count) in zip(updated, taken, strict=True):
                entry.keep_state(state, count)
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
                entry.keep_state(None, 0)

    # -- compression -------------------------------------------------------------------

    def set_gradient_compression(self, compression_params: CompressionParams) -> None:
        compression = Compression.of(compression_params)
        with self._lock:
            self._check_open()
            self._coding = LocalCoding(compression, self._table) if compression.rules else None

    def _pushed(self, key: Keys, value: Values) -> Rows:
        if self._coding is None:
            return self._rows.pushed(key, value)
        groups = self._table.check_push(key, value)
        if self._optimizer is not None:
            for item in groups:
                self._optimizer.check_dtype(self._table.spec(item).dtype)
        return self._rows.pushed(list(groups), self._coding.passed(groups))

    def _pushed_and_filled(self, key: Keys, value: Values, out: Values) -> tuple[Rows, Rows]:
        """Checks both before anything changes."""
        if self._coding is None:
            return self._rows.pushed(key, value), self._rows.filled(key, out)
        filled = self._rows.filled(key, out)
        return self._pushed(key, value), filled

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
            entry = self._entries[key]
            stype = "default" if entry.table is None else RowSparseArray.stype
            return KeyInfo(*spec, spec.nbytes, 1, entry.generation, stype)

    def delete(self, key: Keys) -> None:
        with self._lock:
            self._check_open()
            keys, _ = normalise_keys(key)
            for item in keys:
                self._table.spec(item)
            self._table.remove(keys)
            for item in keys:
                self._entries.pop(item, None)
            self._rows.forget()
            if self._coding is not None:
                self._coding.forget(keys)

    def _create_table(self, name: object, dim: object, optimizer: object, **options: Any) -> Table:
        with self._lock:
            self._check_open()
            return self._tables.create(name, dim, optimizer, **options)

    # -- files -------------------------------------------------------------------------

    def save_checkpoint(self, directory: Path) -> None:
        with self._lock:
            self._check_open()
            self._tables.warn_of_checkpoint()
            entries = self._entries.values()
            pieces = pieces_of(entries, self._optimizer)
            write_checkpoint(directory, contents_of(entries), self._optimizer, pieces)
            self._save_residuals(path_in_checkpoint(directory, 0))

    def load_checkpoint(self, directory: Path) -> None:
        with self._lock, Checkpoint(directory) as saved:
            self._check_open()
            optimizer = saved.states.optimizer or self._optimizer
            contents = contents_of(self._entries.values())
            saved.check(contents)
            saved.states.check(contents, optimizer)
            missing = {key: spec for key, spec in saved.specs.items() if key not in self._entries}
            self._add(
                {
                    key: (RowSparseArray.zeros if saved.is_row_sparse(key) else np.zeros)(*spec)
                    for key, spec in missing.items()
                }
            )
            if optimizer is not None:
                self.set_optimizer(optimizer)
            for entry in self._entries.values():
                take_values(entry, saved, optimizer)
            if self._coding is not None:
                self._coding.load(path_in_checkpoint(directory, 0))

    def save_optimizer_states(self, fname: Path, dump_optimizer: bool = False) -> None:
        with self._lock:
            self._check_open()
            entries, optimizer = self._entries.values(), self._optimizer
            contents, pieces = contents_of(entries), pieces_of(entries, optimizer)
            write_states(fname, contents, optimizer, pieces, dump_optimizer=dump_optimizer)
            self._save_residuals(path_beside_states(fname, 0))

    def load_optimizer_states(self, fname: Path) -> None:
        with self._lock, SavedStates(fname, takes_rows=True) as saved:
            self._check_open()
            optimizer = saved.optimizer or self._optimizer
            saved.check(contents_of(self._entries.values()), optimizer)
            if optimizer is not None:
                self.set_optimizer(optimizer)
            for entry in self._entries.values():
                take_states(entry, saved, optimizer)
            if self._coding is not None:
                self._coding.load(path_beside_states(fname, 0))

    def _save_residuals(self, path: pathlib.Path) -> None:
        if self._coding is None:
            path.unlink(missing_ok=True)  # of an earlier save
        else:
            self._coding.save(path)

    # -- the rest ----------------------------------------------------------------------

    def placement(self) -> dict[int, dict[Key, int]]:
        return {}

    def stats(self) -> dict[str, Any]:
        with self._lock:
            self._check_open()
            store: dict[str, Any] = {"keys": len(self._entries), **self._counters}
            if self._coding is not None:
                store["compression"] = self._coding.compression.statistics.plain()
            return {"store": store, "servers": {}}

    def barrier(self) -> None:
        with self._lock:
            self._check_open()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._entries.clear()
            self._rows.forget()
            self._shelves = Shelves()
            self._tables.close()

    # -- inside ------------------------------------------------------------------------

    def _add(self, values: dict[Key, Array]) -> None:
        specs = {key: spec_of(array) for key, array in values.items()}
        hosts = {
            key: array if isinstance(array, RowSparseArray) else adapter_for(array).to_host(array)
            for key, array in values.items()
        }
        for key, host in hosts.items():
            generation = self._generations.get(key, 0) + 1
            if isinstance(host, RowSparseArray):
                self._entries[key] = local_rows.new_entry(key, host, generation)
            else:
                self._entries[key] = self._shelves.place(key, host, generation)
            self._generations[key] = generation
        row_sparse = [key for key, host in hosts.items() if isinstance(host, RowSparseArray)]
        self._table.add(specs, row_sparse)

    def _merge(self, pushed: Rows, outs: Sequence[Row] | None = None) -> None:
        """Add up and update; ``outs``, of the same keys and plain as well, get the new values."""
        entries = [self._entries[key] for key in pushed.keys]
        sparse = [self._entries[key] for key, _ in pushed.sparse]
        if self._optimizer is not None:
            for dtype in dict.fromkeys(entry.spec.dtype for entry in (*entries, *sparse)):
                self._optimizer.check_dtype(dtype)
        if pushed.blocks is None:
            self._settle(entries, pushed.rows)
        if self._updater is not None:
            for entry, row in zip(entries, pushed.rows, strict=True):
                self._apply_updater(self._updater, entry, row)
                entry.version += 1
        elif pushed.blocks is None:
            self._apply(entries, pushed.rows)
        else:
            pushed.blocks.apply(pushed.rows, self._optimizer, self._workspaces, outs)
        for entry, (_, arrays) in zip(sparse, pushed.sparse, strict=True):
            self._merge_rows(entry, arrays)
        self._count("pushes", pushed.keys, pushed.blocks)

    def _merge_rows(self, entry: Entry, arrays: Sequence[Array]) -> None:
        self._counters["bytes_pushed"] += max(map(local_rows.size_of, arrays))
        if self._updater is not None:
            local_rows.apply_updater(self._updater, entry, arrays)
            return
        workspace = self._workspaces.take()
        local_rows.apply(entry, arrays, self._optimizer, workspace)
        self._workspaces.give(workspace)

    def _settle(self, entries: Sequence[Entry], rows: Sequence[Sequence[Array]]) -> None:
        """Choose where keys live, given the arrays of a push."""

    def _apply(self, entries: Sequence[Entry], rows: Sequence[Sequence[Array]]) -> None:
        """Merge each key's arrays, of any library, into it, where it lives."""
        here, hosts = [], []
        elsewhere: list[tuple[Entry, Sequence[Array]]] = []
        for entry, row in zip(entries, rows, strict=True):
            if entry.home is HOST:
                here.append(entry.key)
                hosts.append([adapter_for(array).to_host(array) for array in row])
            else:
                elsewhere.append((entry, row))
        if elsewhere:
            self._apply_elsewhere(elsewhere)
        if here:
            self._rows.blocks_of(tuple(here)).apply(hosts, self._optimizer, self._workspaces)

    def _apply_elsewhere(self, work: Sequence[tuple[Entry, Sequence[Array]]]) -> None:
        """Merge arrays into keys that are not on the host, and count."""
        raise NotImplementedError

    def _apply_updater(
        self, updater: UpdateFunction, entry: Entry, arrays: Sequence[Array]
    ) -> None:
        """Let the caller's function change a copy, so that one that raises changes nothing."""
        adapter = adapter_on(entry.home)
        received = adapter.sum_in_order(arrays, entry.home, entry.spec.dtype)
        local = adapter.copy(entry.weight)
        with adapter.on(entry.home):
            updater(entry.key, received, local)
        entry.set_weight(local)

    def _taken_over(self, entry: Entry, optimizer: Optimizer) -> tuple[tuple[Flat, ...], int]:
        if entry.table is not None:
            return entry.table.take_over(self._optimizer, optimizer, entry.count)
        with adapter_on(entry.home).on(entry.home):
            return take_over(optimizer, self._optimizer, entry.flat, entry.state or (), entry.count)

    def _fill(self, filled: Rows) -> None:
        """Write the values into the arrays of a call."""
        came = self._decoded(filled.keys)
        if came:
            self._fill_any([self._entries[key] for key in filled.keys], filled.rows)
            for key, outs in zip(filled.keys, filled.rows, strict=True):
                for out in outs if key in came else ():
                    adapter_for(out).assign(came[key], out)
        elif filled.blocks is None:
            self._fill_any([self._entries[key] for key in filled.keys], filled.rows)
        else:
            filled.blocks.fill(filled.rows)
        for key, outs in filled.sparse:
            local_rows.fill(self._entries[key], outs)
        self._count("pulls", [*filled.keys, *dict(filled.sparse)], filled.blocks)

    def _decoded(self, keys: Sequence[Key]) -> dict[Key, Array]:
        """The values of those dense keys that come back through a codec."""
        if self._coding is None or not self._coding.encodes_pulls:
            return {}
        dense = [key for key in keys if self._entries[key].table is None]
        came = {key: self._coding.pulled(key, self._entries[key].weight) for key in dense}
        return {key: value for key, value in came.items() if value is not None}

    def _fill_any(self, entries: Sequence[Entry], rows: Sequence[Sequence[Array]]) -> None:
        here: list[Key] = []
        targets: list[list[HostArray]] = []
        written: list[Array] = []
        elsewhere: list[tuple[Entry, Sequence[Array]]] = []
        for entry, row in zip(entries, rows, strict=True):
            if entry.home is not HOST:
                elsewhere.append((entry, row))
                continue
            here.append(entry.key)
            targets.append([])
            for out in row:
                target = _memory(out)
                if target is None:
                    adapter_for(out).assign(entry.weight, out)
                else:
                    targets[-1].append(target.reshape(entry.spec.shape))
                    written.append(out)
        if elsewhere:
            self._fill_elsewhere(elsewhere)
        try:
            self._rows.blocks_of(tuple(here)).fill(targets)
        finally:
            for out in written:
                adapter_for(out).written(out)

    def _fill_elsewhere(self, work: Sequence[tuple[Entry, Sequence[Array]]]) -> None:
        """Write the values of keys that are not on the host into arrays of any library."""
        for entry, row in work:
            for out in row:
                adapter_for(out).assign(entry.weight, out)

    def _count(self, what: str, keys: Sequence[Key], blocks: Blocks | None = None) -> None:
        nbytes = blocks.nbytes if blocks else sum(self._entries[key].nbytes for key in keys)
        self._counters[what] += 1
        self._counters["bytes_pushed" if what == "pushes" else "bytes_pulled"] += nbytes

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"this {self._name} store is closed; create a new one")


def _memory(out: Array) -> HostArray | None:
    """The memory of an array of any library to write values to, flat; None if there is none."""
    adapter = adapter_for(out)
    memory = adapter.memory(out)
    return None if memory is None else memory.view(adapter.dtype(out))


def _copy(entry: Entry) -> Array:
    if entry.table is not None:
        return local_rows.value_of(entry)
    return adapter_for(entry.weight).copy(entry.weight)


def _done(call: Callable[[], T]) -> Future[T]:
    """What a call has come to. A misuse raises at once, as it does with servers."""
    try:
        return completed(call())
    except PSError:
        raise
    except Exception as error:  # an updater's: it comes out of the future
        return failed(error)
