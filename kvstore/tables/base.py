"""``Table``: the interface of a growing table, for every kind of store.

Hardly anything here does anything. Read next: ``shard.py`` for how it is done,
``kvstore/stores/local/tables.py`` for the tables of a store in one process, and
``kvstore/stores/dist/tables.py`` for those on servers.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays import Array
from kvstore.optimizer.base import Optimizer
from kvstore.sparse.ids import Ids
from kvstore.tables.settings import TableSettings

Path = str | PathLike[str]


class TableStatistics(NamedTuple):
    """Numbers of a table since it was made."""

    rows: int
    capacity: int | None
    """The most rows that it may have; None for any number."""
    pulled: int
    """Ids in pulls, repeated ones as often as they stand there (on ``dist`` stores once a call)."""
    hits: int
    """Those of them that had a row."""
    made: int
    """Rows that were made."""
    evicted: int
    """Rows that went since there was no more room."""
    expired: int
    """Rows that went since their time (``ttl``) was over."""
    refused: int
    """How often an id got no row: not admitted yet, or no room in a call with too many ids."""
    dropped: int
    """Pushed gradients of ids without a row."""
    waiting: int
    """Ids that are counted for admission now."""
    pushes: int
    nbytes: int
    """The memory of rows, states, index and all else that the table keeps."""
    limit_bytes: int | None
    """What ``nbytes`` cannot exceed; None without a capacity."""

    @property
    def hit_rate(self) -> float:
        """Which part of the ids in pulls had a row; 0.0 before the first."""
        return self.hits / self.pulled if self.pulled else 0.0


class Table(abc.ABC):
    """Rows of ``dim`` numbers by any 64-bit id, made by ``KVStore.create_table``.

    **Ids** are integers of 64 bits: arrays of any integer dtype and of any library, of any shape,
    unsorted, repeated or not, or lists of ints. int64 and uint64 are taken bit by bit, so that -1
    and 2**64 - 1 are one id; where a table gives ids, they are int64. Other than integers raise
    ``ArgumentTypeError``.

    A call may come from any thread; they run one at a time. One that raises has changed nothing.
    """

    _settings: TableSettings

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

    @abc.abstractmethod
    def pull(self, ids: Any, out: Array | None = None, *, touch: bool = True) -> Any:
        """The rows of ids, in their order: shape ``(*shape of ids, dim)``.

        An id without a row gets one, with its first value, where it is admitted; where it is not,
        the result has the first value all the same. With ``touch`` False (for evaluation) the call
        makes no rows, counts nothing and keeps no row from being evicted. ``out`` is an array of
        any library with that shape, of any dtype, to be filled; then the call returns None.
        Raises ``ValueMismatchError`` for another shape.
        """

    @abc.abstractmethod
    def push(self, ids: Any, gradients: Array) -> None:
        """One update by the table's optimizer: a gradient for each id.

        ``gradients`` has shape ``(*shape of ids, dim)`` and the table's dtype; it is only read.
        Those of one id are added first, in their order. Without an optimizer the sums are the new
        rows. An id without a row gets one first; where ``admit_after`` is more than 1, what is
        pushed for it is dropped instead. Raises ``ValueMismatchError``.
        """

    @property
    @abc.abstractmethod
    def optimizer(self) -> Optimizer | None:
        """The optimizer of the table."""

    @abc.abstractmethod
    def set_optimizer(self, optimizer: Optimizer | str) -> None:
        """Update by this one from now on.

        One of the same class keeps each row's states and the count of updates; for one of another
        class they start afresh.
        """

    @abc.abstractmethod
    def statistics(self) -> TableStatistics:
        """Rows, hits, evictions and more."""

    @abc.abstractmethod
    def ids(self) -> Ids:
        """The ids of all rows, int64, sorted."""

    @abc.abstractmethod
    def rows(self, block_rows: int = 65536) -> Iterator[tuple[Ids, np.ndarray[Any, Any]]]:
        """All rows in pieces, sorted by id: pairs of ids and a new array of their rows.

        Each piece is read when it is asked for; rows that are gone by then are left out.
        """

    @abc.abstractmethod
    def export(self, path: Path, *, states: bool = True) -> int:
        """Write all rows to a file; returns its mark, for ``export_delta``.

        With ``states`` (the optimizer's) a table that loads the file continues as this one would,
        but for ids that wait for admission. Without, for serving, the file is smaller. On ``dist``
        stores the lowest rank's path is the one that counts; those of the others have to name the
        same file, in whatever directory. Raises ``CheckpointError``.
        """

    @abc.abstractmethod
    def export_delta(self, mark: int, path: Path, *, states: bool = True) -> int:
        """Write what has changed since the export that returned ``mark``; returns the new mark.

        That is the rows which were made or pushed since, and the ids of all others that are still
        there. Raises ``ArgumentValueError`` for a mark that is not one of this table's.
        """

    @abc.abstractmethod
    def load(self, path: Path) -> None:
        """Take the rows of an export in place of all that are there, or apply a delta.

        A delta fits a table that has loaded the export it begins at, or one between its beginning
        and its end, and was only pulled from since; one of another table, or of another run, does
        not, whatever its marks. Where the capacity is too small, the rows that
        were touched last are kept. Raises ``CheckpointError`` for a damaged file and for one that
        does not fit.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Forget all rows; the store may make another table of this name. Idempotent."""
