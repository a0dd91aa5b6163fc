"""``Table``: a growing table of any store; its calls, with arguments checked.

Where the rows are the two subclasses know: ``local/tables.py`` and ``dist/tables.py``, to be read
next; how rows come and go says ``kvstore/sparse/tables/``. Arrays are the caller's.
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

    **Ids** are integers of 64 bits: arrays of any integer dtype and of any library, of any shape,
    unsorted, repeated or not, or lists of ints. int64 and uint64 are taken bit by bit, so that -1
    and 2**64 - 1 are one id; where a table gives ids, they are int64. Other than integers raise
    ``ArgumentTypeError``.

    A call may come from any thread; they run one at a time. One that raises has changed nothing.
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
        """The name that it was created with."""
        return self._settings.name

    @property
    def dim(self) -> int:
        """How many numbers a row has."""
        return self._settings.dim

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows."""
        return self._settings.dtype

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """How many rows there are."""

    def __len__(self) -> int:
        return self.size

    # -- rows ----------------------------------------------------------------------------

    def pull(self, ids: Any, out: Array | None = None, *, touch: bool = True) -> Any:
        """Return the rows of ids, in their order: shape ``(*shape of ids, dim)``.

        An id without a row gets one, with its first value, where it is admitted; where it is not,
        the result has the first value all the same. With ``touch`` False (for evaluation) the call
        makes no rows, counts nothing and keeps no row from being evicted. ``out`` is an array of
        any library with that shape, of any dtype, to be filled; then the call returns None.
        Raises ``ValueMismatchError`` for another shape.
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
        """Update once by the table's optimizer: a gradient for each id.

        ``gradients`` has shape ``(*shape of ids, dim)`` and the table's dtype; it is only read.
        Those of one id are added first, in their order. Without an optimizer the sums are the new
        rows. An id without a row gets one first; where ``admit_after`` is more than 1, what is
        pushed for it is dropped instead. Raises ``ValueMismatchError``.
        """
        with self._call():
            flat, shape = checked_table_ids(ids)
            self._push(flat, self._checked_gradients(shape, gradients))

    def _check_out(self, out: Array, wanted: tuple[int, ...]) -> None:
        """Raise ``ValueMismatchError`` unless the rows can be written to ``out``.

        Their shape and the dtype rule of pulls decide.
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
        """Return gradients as rows on the host. Raises ``ValueMismatchError``."""
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
        """Update by this one from now on.

        One of the same class keeps each row's states and the count of updates; for one of another
        class they start afresh.
        """
        chosen = checked_table_optimizer(optimizer, self.dtype)
        if chosen is None:
            raise ArgumentTypeError(
                "set_optimizer of a table needs an optimizer or its name, got None"
            )
        with self._call():
            self._use(chosen)
            self._optimizer = chosen

    # -- all of them ---------------------------------------------------------------------

    @abc.abstractmethod
    def statistics(self) -> TableStatistics:
        """Return rows, hits, evictions and more."""

    def ids(self) -> Ids:
        """Return the ids of all rows, int64, sorted."""
        with self._call():
            self._settle()
            return self._files.home.held().ids

    def rows(self, block_rows: int = 65536) -> Iterator[tuple[Ids, np.ndarray[Any, Any]]]:
        """Yield all rows in pieces, sorted by id: pairs of ids and new arrays.

        Each piece is read when it is asked for; rows that are gone by then are left out.
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
        """Write all rows to a file; returns its mark, for ``export_delta``.

        With ``states`` (the optimizer's) a table that loads the file continues as this one would,
        but for ids that wait for admission. Without, for serving, the file is smaller. On ``dist``
        stores the lowest rank's path is the one that counts; those of the others have to name the
        same file, in whatever directory. Raises ``CheckpointError``.
        """
        with self._call():
            return self._export(path, None, states=states)

    def export_delta(self, mark: int, path: Path, *, states: bool = True) -> int:
        """Write the changes since the export that returned ``mark``; return the new mark.

        That is the rows which were made or pushed since, and the ids of all others that are still
        there. Raises ``ArgumentValueError`` for a mark that is not one of this table's.
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
        """Take the rows of an export in place of all that are there, or apply a delta.

        A delta fits a table that has loaded the export it begins at, or one between its beginning
        and its end, and was only pulled from since; one of another table, or of another run, does
        not, whatever its marks. Where the capacity is too small, the rows that
        were touched last are kept. Raises ``CheckpointError`` for a damaged file and for one that
        does not fit.
        """
        with self._call():
            file = checked_path(path)
            self._together(
                f"load of {self.title} from {file.name!r}",
                lambda _: self._files.load(file, self._optimizer),
            )

    @abc.abstractmethod
    def close(self) -> None:
        """Forget all rows; the store may make another table of this name. Idempotent."""

    # -- what subclasses do, within a call -----------------------------------------------

    @abc.abstractmethod
    def _call(self) -> AbstractContextManager[None]:
        """Enter a call: raises if the table is closed, and keeps others out where need be."""

    @abc.abstractmethod
    def _pull(self, ids: Ids, out: RowValues, *, touches: bool) -> None:
        """Copy the rows of ids, in any order and repeated or not, to ``out``."""

    @abc.abstractmethod
    def _push(self, ids: Ids, gradients: RowValues) -> None:
        """Update once; ids in any order, repeated or not."""

    @abc.abstractmethod
    def _use(self, optimizer: Optimizer) -> None:
        """Update by this one from now on."""

    @abc.abstractmethod
    def _settle(self) -> None:
        """Wait for own pushes and pulls: what is asked goes another way."""

    @abc.abstractmethod
    def _together(self, name: str, act: Callable[[int], Any]) -> Any:
        """Have one worker ``act`` once all are here, and nothing is in flight."""


T = TypeVar("T", bound=Table)


class StoreTables(Generic[T]):
    """The tables of a store, by name."""

    def __init__(self) -> None:
        self._tables: dict[str, T] = {}

    def _checked(
        self, name: object, dim: object, optimizer: object, **options: Any
    ) -> tuple[TableSettings, Optimizer | None]:
        """Return the checked settings of a new table.

        Raises what ``checked_settings`` and ``checked_table_optimizer`` do, and
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
        """Warn, from the caller of the store's method, that a checkpoint has no tables."""
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
