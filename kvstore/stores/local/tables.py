"""Growing tables of the stores in one process: ``create_table``.

One share that holds everything, on the host, behind the store's lock; the work is done in
``kvstore/tables/``. Read next: ``tables/shard.py``.
"""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvstore.checkpoint.tables import load_table, write_table
from kvstore.optimizer.base import Optimizer
from kvstore.sparse.ids import Ids
from kvstore.sparse.sums import Contribution, RowValues
from kvstore.stores.tables import StoreTables, Table
from kvstore.tables.shard import TableShare, TableStatistics
from pslite.errors import ClosedError


class LocalTables(StoreTables["LocalTable"]):
    """The tables of a store in one process."""

    def __init__(self, lock: threading.RLock, check_open: Callable[[], None]) -> None:
        """``lock`` guards the store; ``check_open`` raises when that is closed."""
        super().__init__()
        self.lock = lock
        self.check_open = check_open

    def create(self, name: object, dim: object, optimizer: object, **options: Any) -> LocalTable:
        """A new table. Raises what ``_checked`` does."""
        settings, chosen = self._checked(name, dim, optimizer, **options)
        table = self._tables[settings.name] = LocalTable(self, TableShare(settings, chosen))
        return table

    def close(self) -> None:
        for table in list(self._tables.values()):
            table.close()


class LocalTable(Table):
    """A table whose rows are all here."""

    def __init__(self, owner: LocalTables, share: TableShare) -> None:
        super().__init__(share.settings)
        self._owner = owner
        self._share = share
        self._is_closed = False

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._owner.lock:
            self._owner.check_open()
            if self._is_closed:
                raise ClosedError(f"{self.title} is closed; create a new one")
            yield

    @property
    def size(self) -> int:
        with self._call():
            return len(self._share)

    def statistics(self) -> TableStatistics:
        with self._call():
            return self._share.statistics()

    def __repr__(self) -> str:
        """``<table 'user': 12 rows of 32 float32>``; never raises."""
        rows = "closed" if self._is_closed else f"{len(self._share.index)} rows"
        return f"<{self.title}: {rows} of {self.dim} {self.dtype}>"

    def _pull(self, ids: Ids, out: RowValues, *, touches: bool) -> None:
        self._share.pull(ids, out, touches=touches)

    def _push(self, ids: Ids, gradients: RowValues) -> None:
        self._share.push([Contribution(ids, gradients)])

    @property
    def optimizer(self) -> Optimizer | None:
        with self._call():
            return self._share.slots.optimizer

    def _use(self, optimizer: Optimizer) -> None:
        self._share.set_optimizer(optimizer)

    def ids(self) -> Ids:
        with self._call():
            return self._share.held()[0]

    def _rows_there(self, ids: Ids) -> tuple[Ids, RowValues]:
        share = self._share
        share.expire()
        places = share.index.look_up(ids)
        ids, places = ids[places >= 0], places[places >= 0]
        rows = np.empty((len(ids), self.dim), self.dtype)
        share.slots.read(places, rows)
        return ids, rows

    def _next_mark(self) -> int:
        return self._share.next_mark

    def _export(self, path: pathlib.Path, since: int | None, *, states: bool) -> int:
        return write_table(path, self._share, since, with_states=states)

    def _load(self, path: pathlib.Path) -> None:
        load_table(path, self._share)

    def close(self) -> None:
        with self._owner.lock:
            self._is_closed = True
            self._share = TableShare(self._settings)  # the memory of the other is free now
            self._owner.forget(self)
