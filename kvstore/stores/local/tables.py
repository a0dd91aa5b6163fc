"""Growing tables of the stores in one process: ``create_table``.

One share that holds everything, on the host, behind the store's lock. Here arguments are checked
and arrays of other libraries brought to the host; the work is done in ``kvstore/tables/``. Read
next: ``tables/shard.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.checkpoint.atomic import checked_path
from kvstore.checkpoint.tables import load_table, write_table
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.optimizer.base import Optimizer
from kvstore.sparse.ids import Ids
from kvstore.sparse.sums import Contribution
from kvstore.stores.arguments_sparse import (
    check_name,
    check_out,
    checked_gradients,
    warn_of_checkpoint,
)
from kvstore.tables.base import Path, Table, TableStatistics
from kvstore.tables.ids import checked_table_ids
from kvstore.tables.settings import checked_settings, checked_table_optimizer
from kvstore.tables.shard import TableShare
from pslite.errors import ClosedError


class LocalTables:
    """The tables of a store, by name."""

    def __init__(self, lock: threading.RLock, check_open: Callable[[], None]) -> None:
        """``lock`` guards the store; ``check_open`` raises when that is closed."""
        self.lock = lock
        self.check_open = check_open
        self._tables: dict[str, LocalTable] = {}

    def create(self, name: object, dim: object, optimizer: object, **options: Any) -> LocalTable:
        """A new table, with what ``checked_settings`` takes. Raises what it does, what
        ``checked_table_optimizer`` does, and ``DuplicateKeyError`` if the name is taken."""
        settings = checked_settings(name, dim, **options)
        chosen = checked_table_optimizer(optimizer, settings.dtype)
        check_name(self._tables, settings.name)
        table = self._tables[settings.name] = LocalTable(self, TableShare(settings, chosen))
        return table

    def warn_of_checkpoint(self) -> None:
        """Warn, from the caller of the store's method, if there are tables."""
        warn_of_checkpoint(self._tables, 4)

    def forget(self, table: LocalTable) -> None:
        if self._tables.get(table.name) is table:
            del self._tables[table.name]

    def close(self) -> None:
        for table in list(self._tables.values()):
            table.close()


class LocalTable(Table):
    """A table whose rows are all here. What each call promises is said in ``Table``."""

    def __init__(self, owner: LocalTables, share: TableShare) -> None:
        self._owner = owner
        self._settings = share.settings
        self._share: TableShare | None = share

    # -- what it is ----------------------------------------------------------------------

    @property
    def size(self) -> int:
        with self._owner.lock:
            return len(self._open())

    def statistics(self) -> TableStatistics:
        with self._owner.lock:
            return self._open().statistics()

    def __repr__(self) -> str:
        """``<table 'user': 12 rows of 32 float32>``; never raises."""
        share = self._share
        rows = "closed" if share is None else f"{len(share.index)} rows"
        return f"<table {self.name!r}: {rows} of {self.dim} {self.dtype}>"

    # -- rows ----------------------------------------------------------------------------

    def pull(self, ids: Any, out: Array | None = None, *, touch: bool = True) -> Any:
        with self._owner.lock:
            share = self._open()
            flat, shape = checked_table_ids(ids)
            wanted = (*shape, self.dim)
            if out is not None:
                check_out(self._settings, out, wanted)
            is_plain = type(out) is np.ndarray and out.dtype == self.dtype and out.flags.carray
            rows: Any = out if is_plain else np.empty(wanted, self.dtype)
            share.pull(flat, rows.reshape(len(flat), self.dim), touches=bool(touch))
            if out is None:
                return rows
            if not is_plain:
                adapter_for(out).assign(rows, out)
            return None

    def push(self, ids: Any, gradients: Array) -> None:
        with self._owner.lock:
            share = self._open()
            flat, shape = checked_table_ids(ids)
            rows = checked_gradients(self._settings, shape, gradients)
            share.push([Contribution(flat, rows)])

    @property
    def optimizer(self) -> Optimizer | None:
        with self._owner.lock:
            return self._open().slots.optimizer

    def set_optimizer(self, optimizer: Optimizer | str) -> None:
        chosen = checked_table_optimizer(optimizer, self.dtype)
        if chosen is None:
            raise ArgumentTypeError("set_optimizer of a table takes an optimizer or its name")
        with self._owner.lock:
            self._open().set_optimizer(chosen)

    # -- files ---------------------------------------------------------------------------

    def ids(self) -> Ids:
        with self._owner.lock:
            ids, _ = self._open().held()
            return ids

    def rows(self, block_rows: int = 65536) -> Iterator[tuple[Ids, np.ndarray[Any, Any]]]:
        if block_rows < 1:
            raise ArgumentValueError(f"block_rows is 1 or more, got {block_rows}")
        return self._blocks(self.ids(), block_rows)

    def _blocks(self, ids: Ids, block_rows: int) -> Iterator[tuple[Ids, np.ndarray[Any, Any]]]:
        for start in range(0, len(ids), block_rows):
            with self._owner.lock:
                share = self._open()
                share.expire()
                block = ids[start : start + block_rows]
                places = share.index.look_up(block)
                block, places = block[places >= 0], places[places >= 0]
                rows = np.empty((len(block), self.dim), self.dtype)
                share.slots.read(places, rows)
            yield block, rows

    def export(self, path: Path, *, states: bool = True) -> int:
        with self._owner.lock:
            return write_table(checked_path(path), self._open(), None, with_states=states)

    def export_delta(self, mark: int, path: Path, *, states: bool = True) -> int:
        with self._owner.lock:
            share = self._open()
            if type(mark) is not int or not 0 <= mark < share.next_mark:
                raise ArgumentValueError(
                    f"{mark!r} is not a mark of table {self.name!r}: pass what export or "
                    "export_delta returned"
                )
            return write_table(checked_path(path), share, mark, with_states=states)

    def load(self, path: Path) -> None:
        with self._owner.lock:
            load_table(checked_path(path), self._open())

    def close(self) -> None:
        with self._owner.lock:
            self._share = None
            self._owner.forget(self)

    # -- inside --------------------------------------------------------------------------

    def _open(self) -> TableShare:
        self._owner.check_open()
        if self._share is None:
            raise ClosedError(f"table {self.name!r} is closed; create a new one")
        return self._share
