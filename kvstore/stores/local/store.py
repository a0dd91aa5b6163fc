"""The store of one process in host memory: ``create("local")``.

Calls may come from any thread and run one at a time: each takes the store's lock, checks that the
store is open, and passes work on values to ``values.py``. No sockets. Read next: ``values.py``,
then ``device.py``, which moves the work to the GPU that holds the key.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any, TypeVar

from kvstore.arrays.keys import Key, Keys, UpdateFunction, Values
from kvstore.checkpoint.atomic import read_bytes, write_bytes
from kvstore.checkpoint.directory import CheckpointReader, write_checkpoint
from kvstore.checkpoint.optimizer_states import SavedStates, write_states
from kvstore.checkpoint.residuals import (
    path_beside_states,
    path_in_checkpoint,
    read_residuals,
    save_residuals,
)
from kvstore.compression import Compression
from kvstore.errors import ArgumentTypeError, OptimizerNotSet
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.scripted import ScriptedOptimizer, check_travels
from kvstore.optimizer.serialize import check_optimizer
from kvstore.optimizer.updater import Updater
from kvstore.sparse.array import RowSparseArray
from kvstore.stores.arguments import (
    check_priority,
    checked_timeout,
    futures_in,
    normalise_keys,
    single_key,
)
from kvstore.stores.arguments_sparse import check_wanted
from kvstore.stores.base import CompressionParams, KeyInfo, KVStore, Path, Version
from kvstore.stores.local.checkpoint import contents_of, pieces_of, take
from kvstore.stores.local.compression import LocalCompression
from kvstore.stores.local.tables import LocalTables
from kvstore.stores.local.values import LocalValues
from kvstore.stores.one_rank import OneRank
from kvstore.stores.tables import Table
from pslite.errors import ClosedError, PSError
from pslite.future import Future, completed, failed

T = TypeVar("T")


class LocalKVStore(KVStore):
    """A store of one process that adds and updates on the CPU.

    See ``KVStore`` for each call.
    """

    def __init__(self, name: str = "local", values: LocalValues | None = None) -> None:
        """``values`` stores the keys; by default they are on the host."""
        self._name = name
        # Guards everything below: a caller may push from one thread for each device. It is
        # re-entrant, since an updater may call the store.
        self._lock = threading.RLock()
        self._group = OneRank()
        self._values = LocalValues() if values is None else values
        self._table = self._values.table
        self._tables = LocalTables(self._lock, self._check_open)
        self._is_closed = False

    # -- properties --------------------------------------------------------------------

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
            self._values.add(self._table.check_init(key, value))

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        with self._lock:
            self._check_open()
            check_priority(priority)
            self._values.push(key, value)

    def pull(
        self,
        key: Keys,
        out: Values | None = None,
        priority: int = 0,
        ignore_sparse: bool = True,
        *,
        with_version: bool = False,
    ) -> Any:
        with self._lock:
            self._check_open()
            check_priority(priority)
            values = self._values.pull(key, out, ignores_sparse=bool(ignore_sparse))
            if not with_version:
                return values
            keys, single = normalise_keys(key)
            versions = [Version([self._values.entries[item].version]) for item in keys]
            return values, versions[0] if single else versions

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> None:
        with self._lock:
            self._check_open()
            check_priority(priority)
            self._values.pushpull(key, value, value if out is None else out)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        with self._lock:
            self._check_open()
            check_priority(priority)
            self._values.broadcast(key, value, out)

    def view(self, key: Keys) -> Any:
        with self._lock:
            self._check_open()
            keys, single = normalise_keys(key)
            for item in keys:
                self._table.spec(item)
            different = list(dict.fromkeys(keys))
            views = dict(zip(different, self._values.view(different), strict=True))
            return views[keys[0]] if single else [views[item] for item in keys]

    def row_sparse_pull(
        self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> Any:
        with self._lock:
            self._check_open()
            check_priority(priority)
            wanted, is_single = check_wanted(self._table.spec, key, out, row_ids)
            pulled = self._values.pull_rows(wanted)
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

    def wait(self, what: Any = None, timeout: float | None = None) -> Any:
        self._check_open()
        checked_timeout(timeout)
        futures = futures_in(what)
        if futures is None:
            for key in [] if what is None else normalise_keys(what)[0]:
                self._table.spec(key)
            return None
        values = [future.result() for future in futures]
        return values[0] if isinstance(what, Future) else values

    # -- optimizers --------------------------------------------------------------------

    def set_optimizer(self, optimizer: Optimizer) -> None:
        given: object = optimizer
        if isinstance(given, ScriptedOptimizer):
            self.set_updater(Updater(given))
            return
        optimizer = check_optimizer(optimizer)
        with self._lock:
            self._check_open()
            self._values.set_optimizer(optimizer)

    def current_optimizer(self) -> Optimizer:
        with self._lock:
            self._check_open()
            self._check_value()
            if self._values.optimizer is None:
                raise OptimizerNotSet("no optimizer is set: call set_optimizer first")
            return self._values.optimizer

    def _check_value(self) -> None:
        """Raise ``NotSupportedError`` if checkpoints cannot store the updater's optimizer."""
        updater = self._values.updater
        if isinstance(updater, Updater):
            check_travels(updater.optimizer)

    def set_updater(self, updater: UpdateFunction) -> None:
        if not callable(updater):
            raise ArgumentTypeError(
                "an updater must be a function (key, gradient, weight), got "
                f"{type(updater).__name__}"
            )
        with self._lock:
            self._check_open()
            self._values.set_updater(updater)

    # -- compression -------------------------------------------------------------------

    def set_gradient_compression(self, compression_params: CompressionParams) -> None:
        compression = Compression.of(compression_params)
        with self._lock:
            self._check_open()
            self._values.views.end()
            coding = LocalCompression(compression, self._table) if compression.rules else None
            self._values.coding = coding

    # -- keys --------------------------------------------------------------------------

    def keys(self) -> list[Key]:
        with self._lock:
            self._check_open()
            return self._table.keys()

    def __contains__(self, key: object) -> bool:
        with self._lock:
            self._check_open()
            return isinstance(key, Hashable) and key in self._table

    def info(self, key: Key) -> KeyInfo:
        with self._lock:
            self._check_open()
            key = single_key(key)
            spec = self._table.spec(key)
            entry = self._values.entries[key]
            stype = "default" if entry.table is None else RowSparseArray.stype
            return KeyInfo(*spec, spec.nbytes, 1, entry.generation, stype)

    def delete(self, key: Keys) -> None:
        with self._lock:
            self._check_open()
            keys, _ = normalise_keys(key)
            for item in keys:
                self._table.spec(item)
            self._values.remove(keys)

    def _overwrite(self, values: Mapping[Key, Any]) -> None:
        """Overwrite the values of dense keys; their optimizer states stay."""
        with self._lock:
            self._check_open()
            for key, value in values.items():
                self._values.overwrite(key, value)

    def _create_table(self, name: object, dim: object, optimizer: object, **options: Any) -> Table:
        with self._lock:
            self._check_open()
            return self._tables.create(name, dim, optimizer, **options)

    # -- files -------------------------------------------------------------------------

    def save_checkpoint(self, directory: Path) -> None:
        with self._lock:
            self._check_open()
            self._check_value()
            self._tables.warn_of_checkpoint()
            self._save(partial(write_checkpoint, directory), path_in_checkpoint(directory, 0))

    def load_checkpoint(self, directory: Path) -> None:
        with self._lock, CheckpointReader(directory) as saved:
            self._check_open()
            self._values.views.end()
            self._load(saved, path_in_checkpoint(directory, 0))

    def save_optimizer_states(self, fname: Path, dump_optimizer: bool = False) -> None:
        with self._lock:
            self._check_open()
            if isinstance(self._values.updater, Updater):
                write_bytes(fname, self._values.updater.get_states(dump_optimizer))
                return
            write = partial(write_states, fname, dump_optimizer=dump_optimizer)
            self._save(write, path_beside_states(fname, 0))

    def load_optimizer_states(self, fname: Path) -> None:
        with self._lock:
            self._check_open()
            if isinstance(self._values.updater, Updater):
                self._values.updater.set_states(read_bytes(fname))
                return
        with self._lock, SavedStates(fname, takes_rows=True) as saved:
            self._load(saved, path_beside_states(fname, 0))

    def _save(self, write: Callable[..., None], residuals: pathlib.Path) -> None:
        entries, optimizer = self._values.entries.values(), self._values.optimizer
        write(contents_of(entries), optimizer, pieces_of(entries, optimizer))
        save_residuals(self._values.coding, residuals)

    def _load(self, saved: SavedStates, residuals: pathlib.Path) -> None:
        self._check_open()
        restore_residuals = read_residuals(self._values.coding, residuals)
        take(self._values, saved)
        restore_residuals()

    # -- the rest ----------------------------------------------------------------------

    def placement(self) -> dict[int, dict[Key, int]]:
        return {}

    def stats(self) -> dict[str, Any]:
        with self._lock:
            self._check_open()
            values = self._values
            store: dict[str, Any] = {"keys": len(values.entries), **values.counters}
            if values.coding is not None:
                store["compression"] = values.coding.compression.statistics.plain()
            return {"store": store, "servers": {}}

    def barrier(self, timeout: float | None = None) -> None:
        checked_timeout(timeout)
        with self._lock:
            self._check_open()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._values.free()
            self._tables.close()

    def _check_may_wait(self) -> None:
        self._check_open()

    def _wait(self, future: Future[Any]) -> Any:
        return future.result()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"this {self._name} store is closed; call kvstore.create again")


def _done(call: Callable[[], T]) -> Future[T]:
    """Return a call's outcome as a future; misuse raises at once, as with servers."""
    try:
        return completed(call())
    except PSError:
        raise
    except Exception as error:  # an updater's: the future raises it
        return failed(error)
