"""Exports of tables: one file of named arrays, whole or only what has changed.

Rows are sorted by id, so a file says nothing of the shares that wrote it, and any number of shares
can load it. The arrays: ``ids`` (int64), ``values`` (a row for each), ``touched`` (int64, their
stamps) and ``states/NAME``; in a delta ``kept`` and ``kept_touched`` too, of the rows that are
still there and have not changed. One line of metadata, ``table``, is JSON with what ``_HEADER``
names, and with the ``lineage``, which tells whether a delta goes on from what a table has loaded.
Nothing read is believed before it was checked. Written and read in blocks. Read next:
``kvstore/tensorfile.py``, then ``lineage.py`` and ``loading.py``.
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.dtypes import accumulation_dtype
from kvstore.errors import CheckpointError
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import state_names
from kvstore.sparse.ids import Ids, is_increasing
from kvstore.sparse.sums import RowValues
from kvstore.sparse.update import row_blocks
from kvstore.tables.ages import MOST_TIME, stamp_at
from kvstore.tables.lineage import Lines, lines_from_plain, lines_to_plain
from kvstore.tables.settings import TableSettings
from kvstore.tables.share import TableShare
from kvstore.tensorfile import TensorReader, TensorWriter

_HEADER = ("since", "mark", "time", "count")
"""The numbers of an export: from which mark on it has the changes (0: everything), up to which,
how many pushes there had been, and how many updates."""

_MOST = {"since": 2**31 - 2, "mark": 2**31 - 2, "time": MOST_TIME, "count": 2**62}
_STATE = "states/{}"


class Contents(NamedTuple):
    """What an export says of a table, but for the numbers of its rows."""

    settings: TableSettings
    optimizer: Optimizer | None
    """None as well where its states are left out."""
    ids: Ids
    """Of all rows, sorted."""
    stamps: Ids
    has_changed: np.ndarray[Any, np.dtype[np.bool_]]
    """Which rows are to be written; the others of a delta are only named."""
    since: int | None
    """From which mark on a delta has the changes; None for a whole export."""
    mark: int
    time: int
    num_updates: int
    lines: Lines
    """Up to this mark."""


ReadRows = Callable[[int, int], Sequence[RowValues]]
"""Values and states of rows [start, stop), of those that have changed."""


def write_table(path: Any, share: TableShare, since: int | None, *, with_states: bool) -> int:
    """Write the rows that have changed after the mark ``since``, None for all; the new mark."""
    ids, places = share.held()
    mark = share.next_mark
    has_changed = np.ones(len(ids), np.bool_)
    if since is not None:
        has_changed = share.changed[places] > since
    changed, stamps = places[has_changed], share.ages.stamps[places]
    optimizer = share.slots.optimizer if with_states else None
    states = share.slots.states if with_states else ()

    def read(start: int, stop: int) -> Sequence[RowValues]:
        return [rows[changed[start:stop]] for rows in (share.slots.values, *states)]

    numbers = (since, mark, share.ages.time, share.slots.count, share.lineage.until(mark))
    write_export(
        path, Contents(share.settings, optimizer, ids, stamps, has_changed, *numbers), read
    )
    share.next_mark = mark + 1
    return mark


def write_export(path: Any, found: Contents, read: ReadRows, block_rows: int | None = None) -> None:
    """Write an export; ``read`` is asked for ``block_rows`` at a time, or for a few."""
    specs, metadata = _layout(found)
    with TensorWriter(path, specs, {"table": json.dumps(metadata)}) as out:
        out.write("ids", 0, found.ids[found.has_changed])
        out.write("touched", 0, found.stamps[found.has_changed])
        if found.since is not None:
            out.write("kept", 0, found.ids[~found.has_changed])
            out.write("kept_touched", 0, found.stamps[~found.has_changed])
        names = ["values", *(name for name in specs if name.startswith("states/"))]
        width, number = found.settings.dim, int(np.count_nonzero(found.has_changed))
        blocks = row_blocks(number, width)
        if block_rows is not None:
            starts = range(0, number, block_rows)
            blocks = ((start, min(start + block_rows, number)) for start in starts)
        for start, stop in blocks:
            for name, rows in zip(names, read(start, stop), strict=True):
                out.write(name, start * width, rows)


def _layout(
    found: Contents,
) -> tuple[dict[str, tuple[tuple[int, ...], np.dtype[Any]]], dict[str, Any]]:
    long, settings = np.dtype(np.int64), found.settings
    num_rows, num_changed = len(found.ids), int(np.count_nonzero(found.has_changed))
    specs: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
        "ids": ((num_changed,), long),
        "touched": ((num_changed,), long),
        "values": ((num_changed, settings.dim), settings.dtype),
    }
    if found.since is not None:
        specs["kept"] = specs["kept_touched"] = ((num_rows - num_changed,), long)
    numbers = (found.since or 0, found.mark, found.time, found.num_updates)
    metadata: dict[str, Any] = dict(zip(_HEADER, numbers, strict=True))
    metadata |= {"name": settings.name, "is_delta": found.since is not None}
    metadata["lineage"] = lines_to_plain(found.lines)
    optimizer = found.optimizer
    if optimizer is not None:
        metadata["optimizer"] = optimizer.name or type(optimizer).__name__
        dtype = accumulation_dtype(settings.dtype)
        for name in state_names(optimizer, settings.dtype):
            specs[_STATE.format(name)] = ((num_changed, settings.dim), dtype)
    return specs, metadata


class TableFile:
    """Reads an export; its header, ids and stamps are checked when the object is made.

    Raises ``CheckpointError``.
    """

    since: int
    mark: int
    time: int
    count: int
    lines: Lines
    """Up to its mark; none in a file of an earlier version, which only fits as a whole."""

    def __init__(self, path: Any) -> None:
        self._path = path
        self._file = TensorReader(path)
        try:
            self._read_header()
            self.ids, self.stamps = self._ids("ids", "touched")
            self.kept, self.kept_stamps = np.empty((2, 0), np.int64)
            if self.is_delta:
                self.kept, self.kept_stamps = self._ids("kept", "kept_touched")
                if len(np.intersect1d(self.ids, self.kept, assume_unique=True)):
                    raise self.damaged("a row is both changed and unchanged")
            self.spec = self._file.spec("values")
            if len(self.spec.shape) != 2 or self.spec.shape[0] != len(self.ids):
                raise self.damaged(f"{len(self.ids)} ids and values of shape {self.spec.shape}")
        except BaseException:
            self._file.close()
            raise

    @property
    def count_of_updates(self) -> int | None:
        """How many updates there had been; None in a file without states."""
        return None if self.optimizer is None else self.count

    def states(self, names: tuple[str, ...], dtype: np.dtype[Any]) -> list[str]:
        """The names of these states' arrays, once they are known to fit the values."""
        arrays = [_STATE.format(name) for name in names]
        for array in arrays:
            if array not in self._file.names:
                raise self.damaged(f"{array} is missing")
            spec = self._file.spec(array)
            if spec.shape != self.spec.shape or spec.dtype != dtype:
                raise self.damaged(f"{array} has shape {spec.shape} and dtype {spec.dtype}")
        return arrays

    def rows(self, array: str, start: int, stop: int) -> RowValues:
        """Rows [start, stop) of ``values`` or of a state."""
        width = self.spec.shape[1]
        return self._file.read(array, start * width, stop * width).reshape(stop - start, width)

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} is no export of a table, or a damaged one: {what}")

    def refused(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} does not fit the table: {what}")

    def __enter__(self) -> TableFile:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._file.close()

    def _read_header(self) -> None:
        try:
            found = json.loads(self._file.metadata["table"])
            for name in _HEADER:
                number = found[name]
                if type(number) is not int or not 0 <= number <= _MOST[name]:
                    raise ValueError(f"{name} is {number!r}")
                setattr(self, name, number)
            self.is_delta, self.optimizer = found["is_delta"], found.get("optimizer")
            if type(self.is_delta) is not bool or type(self.optimizer) not in (str, type(None)):
                raise ValueError("is_delta or optimizer is of another kind")
            self.lines = lines_from_plain(found.get("lineage", []))
            if self.lines and self.lines[-1].mark != self.mark:
                raise ValueError("the lineage does not end at the mark")
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise self.damaged(f"its metadata are wrong: {error!r}") from error

    def _ids(self, ids_name: str, stamps_name: str) -> tuple[Ids, Ids]:
        found = []
        for name in (ids_name, stamps_name):
            if name not in self._file.names:
                raise self.damaged(f"{name} is missing")
            spec = self._file.spec(name)
            if len(spec.shape) != 1 or spec.dtype != np.int64:
                raise self.damaged(f"{name} has shape {spec.shape} and dtype {spec.dtype}")
            found.append(self._file.read(name))
        ids, stamps = found
        if len(ids) != len(stamps) or not is_increasing(ids):
            raise self.damaged(f"{ids_name} are not sorted, or not as many as {stamps_name}")
        if len(stamps) and not 0 <= stamps.min() <= stamps.max() < stamp_at(self.time + 1):
            raise self.damaged(f"{stamps_name} are out of range")
        return ids, stamps
