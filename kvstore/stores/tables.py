"""``Table``: the calls of a growing table of any store, with checked arguments.

Two subclasses store the rows: ``local/tables.py`` and ``dist/tables.py``, which come next.
``kvstore/sparse/tables/`` decides when rows are created and evicted. Arrays belong to the caller.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any, Generic, TypeVar

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.checkpoint.atomic import checked_path
from kvstore.checkpoint.tables import TableFiles, TableHome
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DuplicateKeyError,
    ValueMismatchError,
)
from kvstore.optimizer.base import Optimizer
from kvstore.sparse.ids import Ids
from kvstore.sparse.sums import RowValues
from kvstore.sparse.tables.ids import checked_table_ids
from kvstore.sparse.tables.settings import TableSettings, checked_settings, checked_table_optimizer
from kvstore.sparse.tables.shard import TableStatistics
from kvstore.stores.arguments import check_cast

Path = str | PathLike[str]


class Table(abc.ABC):
    """Rows of ``dim`` numbers by any 64-bit id, made by ``KVStore.create_table``.

    **Ids** are integers of 64 bits: arrays of any integer dtype, library and shape, unsorted,
    repeated or not, or lists of ints. int64 and uint64 are taken bit by bit, so that -1 and
    2**64 - 1 are the same id; a table returns ids as int64. Other values raise
    ``ArgumentTypeError``.

    Calls may come from any thread and run one at a time. A call that raises has changed nothing.
    """

    def __init__(
        self, settings: TableSettings, optimizer: Optimizer | None, home: TableHome
    ) -> None:
        self._settings = settings
        self._optimizer = optimizer
        self._files = TableFiles(home, settings)
        self.title = home.title

    @property
    def name(self) -> str:
        """The name that the table was created with."""
        return self._settings.name

    @property
    def dim(self) -> int:
        """The number of values in a row."""
        return self._settings.dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows."""
        return self._settings.dtype

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """The number of rows."""

    def __len__(self) -> int:
        return self.size

    # -- rows ----------------------------------------------------------------------------

    def pull(self, ids: Any, out: Array | None = None, *, touch: bool = True) -> Any:
        """Return the rows of ids, in their order: shape ``(*shape of ids, dim)``.

        An id without a row gets one, if it is admitted; the result has the row's first values in
        any case. With ``touch`` False (for evaluation) the call creates no rows, counts nothing and
        does not protect rows from eviction. ``out`` is an array of any library and dtype with that
        shape; it is filled, and the call returns None. Raises ``ValueMismatchError`` for another
        shape.
        """
        with self._call():
            flat, shape = checked_table_ids(ids)
            wanted = (*shape, self.dim)
            if out is not None:
                self._check_out(out, wanted)
            is_plain = type(out) is np.ndarray and out.dtype == self.dtype and out.flags.carray
            rows: Any = out if is_plain else np.empty(wanted, self.dtype)
            self._pull(flat, rows.reshape(len(flat), self.dim), touches=bool(touch))
            if out is None:
                return rows
            if not is_plain:
                adapter_for(out).assign(rows, out)
            return None

    def push(self, ids: Any, gradients: Array) -> None:
        """Update rows once by the table's optimizer, with a gradient for each id.

        ``gradients`` has shape ``(*shape of ids, dim)`` and the table's dtype; it is only read.
        Gradients of the same id are added first, in their order. Without an optimizer the sums
        replace the rows. An id without a row gets one first; if ``admit_after`` is more than 1, its
        gradient is dropped instead. Raises ``ValueMismatchError``.
        """
        with self._call():
            flat, shape = checked_table_ids(ids)
            self._push(flat, self._checked_gradients(shape, gradients))

    def _check_out(self, out: Array, wanted: tuple[int, ...]) -> None:
        """Raise ``ValueMismatchError`` unless rows can be written to ``out``.

        It must have the shape ``wanted``, be writable, and take the dtype as pulls do.
        """
        adapter = adapter_for(out)
        shape = adapter.shape(out)
        if shape != wanted:
            raise ValueMismatchError(
                f"{self.title}: the rows of these ids have shape {wanted}, the array to fill has "
                f"{shape}; pass an array of shape {wanted}"
            )
        check_cast(self.title, self.dtype, adapter.dtype(out))
        why = adapter.why_read_only(out)
        if why is not None:
            raise ValueMismatchError(f"{self.title}: the array to fill is read-only: {why}")

    def _checked_gradients(self, shape: tuple[int, ...], gradients: Array) -> RowValues:
        """Check gradients and return them as rows on the host.

        Raises ``ValueMismatchError``.
        """
        adapter = adapter_for(gradients)
        dtype = adapter.dtype(gradients)
        wanted = (*shape, self.dim)
        if adapter.shape(gradients) != wanted or dtype != self.dtype:
            raise ValueMismatchError(
                f"{self.title}: gradients for ids of shape {shape} have shape {wanted} "
                f"and dtype {self.dtype}, got {adapter.shape(gradients)} and {dtype}"
            )
        return adapter.to_host(gradients).reshape(-1, self.dim)

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer of the table."""
        with self._call():
            return self._optimizer

    def set_optimizer(self, optimizer: Optimizer | str) -> None:
        """Use this optimizer for all later pushes.

        If it has the class of the current one, the rows keep their states and the update count;
        otherwise both are reset.
        """
        chosen = checked_table_optimizer(optimizer, self.dtype)
        if chosen is None:
            raise ArgumentTypeError(
                "set_optimizer of a table needs an optimizer or its name, got None"
            )
        with self._call():
            self._use(chosen)
            self._optimizer = chosen

    # -- the whole table -----------------------------------------------------------------

    @abc.abstractmethod
    def statistics(self) -> TableStatistics:
        """Return the counts of rows, hits, evictions and more."""

    def ids(self) -> Ids:
        """Return the ids of all rows, int64, sorted."""
        with self._call():
            self._settle()
            return self._files.home.held().ids

    def rows(self, block_rows: int = 65536) -> Iterator[tuple[Ids, np.ndarray[Any, Any]]]:
        """Yield all rows in pieces, sorted by id: pairs of ids and new arrays.

        Each piece is read when the iterator reaches it; rows removed by then are left out.
        """
        if block_rows < 1:
            raise ArgumentValueError(f"block_rows must be at least 1, got {block_rows}")
        return self._blocks(self.ids(), block_rows)

    def _blocks(self, ids: Ids, block_rows: int) -> Iterator[tuple[Ids, np.ndarray[Any, Any]]]:
        for start in range(0, len(ids), block_rows):
            with self._call():
                self._settle()
                some = ids[start : start + block_rows]
                is_there, (rows,) = self._files.home.read(some, [self.dtype])
            yield some[is_there], rows

    def export(self, path: Path, *, states: bool = True) -> int:
        """Write all rows to a file; return its mark, for ``export_delta``.

        With ``states`` the file includes the optimizer's states, so that a table that loads it
        continues as this one would, except for ids that wait for admission. Without them, for
        serving, the file is smaller. On ``dist`` stores the lowest rank writes to its path; the
        other ranks' paths must have the same file name, in any directory. Raises
        ``CheckpointError``.
        """
        with self._call():
            return self._export(path, None, states=states)

    def export_delta(self, mark: int, path: Path, *, states: bool = True) -> int:
        """Write the changes since the export that returned ``mark``; return the new mark.

        The file has the rows that were created or pushed since then, and the ids of all other
        rows. Raises ``ArgumentValueError`` for a mark that this table has not returned.
        """
        with self._call():
            if type(mark) is not int or not 0 <= mark < self._files.home.counters().next_mark:
                raise ArgumentValueError(
                    f"{mark!r} is not a mark of {self.title}; pass the return value of export or "
                    "export_delta"
                )
            return self._export(path, mark, states=states)

    def _export(self, path: Path, since: int | None, *, states: bool) -> int:
        """Write the changes since a mark (None: all rows); return the new mark."""
        file, optimizer = checked_path(path), self._optimizer if states else None
        self._together(
            f"export of {self.title} to {file.name!r} (since mark {since}, states={bool(states)})",
            lambda _: self._files.export(file, optimizer, since),
        )
        return self._files.home.counters().next_mark - 1

    def load(self, path: Path) -> None:
        """Replace all rows with those of an export, or apply a delta.

        A delta fits a table that has loaded an export made at the delta's beginning, or between its
        beginning and its end, and that has only been pulled from since. A delta of another table or
        of another run never fits, whatever its marks. If the capacity is too small, the table keeps
        the rows that were touched last. Raises ``CheckpointError`` for a damaged file and for one
        that does not fit.
        """
        with self._call():
            file = checked_path(path)
            self._together(
                f"load of {self.title} from {file.name!r}",
                lambda _: self._files.load(file, self._optimizer),
            )

    @abc.abstractmethod
    def close(self) -> None:
        """Delete all rows; the name can be used for a new table. Idempotent."""

    # -- implemented by subclasses; the methods below run within `_call` -----------------

    @abc.abstractmethod
    def _call(self) -> AbstractContextManager[None]:
        """Begin a call: raise if the table is closed, and lock out other calls if needed."""

    @abc.abstractmethod
    def _pull(self, ids: Ids, out: RowValues, *, touches: bool) -> None:
        """Copy the rows of ids to ``out``; ids may be unsorted and repeated."""

    @abc.abstractmethod
    def _push(self, ids: Ids, gradients: RowValues) -> None:
        """Update rows once; ids may be unsorted and repeated."""

    @abc.abstractmethod
    def _use(self, optimizer: Optimizer) -> None:
        """Use this optimizer for all later pushes."""

    @abc.abstractmethod
    def _settle(self) -> None:
        """Wait for this worker's pushes and pulls, which later requests could overtake."""

    @abc.abstractmethod
    def _together(self, name: str, act: Callable[[int], Any]) -> Any:
        """Have one worker run ``act`` once all have called and nothing is in flight."""


T = TypeVar("T", bound=Table)


class StoreTables(Generic[T]):
    """The tables of a store, by name."""

    def __init__(self) -> None:
        self._tables: dict[str, T] = {}

    def _checked(
        self, name: object, dim: object, optimizer: object, **options: Any
    ) -> tuple[TableSettings, Optimizer | None]:
        """Check the settings and the optimizer of a new table, and return them.

        Raises the errors of ``checked_settings`` and ``checked_table_optimizer``, and
        ``DuplicateKeyError`` if the name is taken.
        """
        settings = checked_settings(name, dim, **options)
        chosen = checked_table_optimizer(optimizer, settings.dtype)
        if settings.name in self._tables:
            raise DuplicateKeyError(
                f"a table named {settings.name!r} already exists; close() it first, or choose "
                "another name"
            )
        return settings, chosen

    def warn_of_checkpoint(self) -> None:
        """Warn that a checkpoint does not include tables, with the caller's line."""
        if self._tables:
            warnings.warn(
                f"this checkpoint does not include the growing tables {', '.join(self._tables)}; "
                "save each with table.export",
                stacklevel=3,
            )

    def forget(self, table: T) -> None:
        """Forget a closed table."""
        if self._tables.get(table.name) is table:
            del self._tables[table.name]
