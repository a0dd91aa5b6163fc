"""Growing tables of the stores in one process: ``create_table``.

One share on the host has all rows, guarded by the store's lock; the work is done in
``kvstore/sparse/tables/``. Read next: ``sparse/tables/shard.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvstore.checkpoint.tables import ShareRows, TableFiles
from kvstore.optimizer.base import Optimizer
from kvstore.sparse.ids import Ids
from kvstore.sparse.sums import Contribution, RowValues
from kvstore.sparse.tables.settings import TableSettings
from kvstore.sparse.tables.shard import TableShare, TableStatistics
from kvstore.stores.tables import StoreTables, Table
from pslite.errors import ClosedError


class LocalTables(StoreTables["LocalTable"]):
    """The tables of a store in one process."""

    def __init__(self, lock: threading.RLock, check_open: Callable[[], None]) -> None:
        """``lock`` guards the store; ``check_open`` raises when the store is closed."""
        super().__init__()
        self.lock = lock
        self.check_open = check_open

    def create(self, name: object, dim: object, optimizer: object, **options: Any) -> LocalTable:
        """Create and return a table. Raises the errors of ``_checked``."""
        settings, chosen = self._checked(name, dim, optimizer, **options)
        table = self._tables[settings.name] = LocalTable(self, settings, chosen)
        return table

    def close(self) -> None:
        for table in list(self._tables.values()):
            table.close()


class LocalTable(Table):
    """A table whose rows are all in this process."""

    def __init__(
        self, owner: LocalTables, settings: TableSettings, optimizer: Optimizer | None
    ) -> None:
        self._share = TableShare(settings, optimizer)
        super().__init__(settings, optimizer, ShareRows(self._share))
        self._owner = owner
        self._is_closed = False

    @contextmanager
    def _call(self) -> Iterator[None]:
        with self._owner.lock:
            self._owner.check_open()
            if self._is_closed:
                raise ClosedError(f"{self.title} is closed; call create_table again")
            yield

    @property
    def size(self) -> int:
        with self._call():
            return len(self._share)

    def statistics(self) -> TableStatistics:
        with self._call():
            return self._share.statistics()

    def __repr__(self) -> str:
        """Return ``<table 'user': 12 rows of 32 float32>``; never raise."""
        rows = "closed" if self._is_closed else f"{len(self._share.index)} rows"
        return f"<{self.title}: {rows} of {self.dim} {self.dtype}>"

    def _pull(self, ids: Ids, out: RowValues, *, touches: bool) -> None:
        self._share.pull(ids, out, touches=touches)

    def _push(self, ids: Ids, gradients: RowValues) -> None:
        self._share.push([Contribution(ids, gradients)])

    def _use(self, optimizer: Optimizer) -> None:
        self._share.set_optimizer(optimizer)

    def _settle(self) -> None:
        """Do nothing: nothing is in flight in one process."""

    def _together(self, name: str, act: Callable[[int], Any]) -> Any:
        return act(0)

    def close(self) -> None:
        with self._owner.lock:
            self._is_closed = True
            # An empty share in its place frees the memory of the rows.
            self._share = TableShare(self._settings)
            self._files = TableFiles(ShareRows(self._share), self._settings)
            self._owner.forget(self)
