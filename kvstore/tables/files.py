"""Exports of tables: one file of named arrays, whole or only what has changed.

Rows are sorted by id, so a file says nothing of the shares that wrote it, and any number of shares
can load it. The arrays: ``ids`` (int64), ``values`` (a row for each), ``touched`` (int64, their
stamps) and ``states/NAME``; in a delta ``kept`` and ``kept_touched`` too, of the rows that are
still there and have not changed. One line of metadata, ``table``, is JSON with what ``_HEADER``
names. Nothing read is believed before it was checked. Written and read in blocks. Read next:
``kvstore/tensorfile.py``, then ``loading.py``.
"""

from __future__ import annotations

import json
import types
from typing import Any

import numpy as np

from kvstore.errors import CheckpointError
from kvstore.optimizer.states import state_names
from kvstore.sparse.ids import Ids, is_increasing
from kvstore.sparse.sums import RowValues
from kvstore.sparse.update import row_blocks
from kvstore.tables.ages import MOST_TIME, stamp_at
from kvstore.tables.index import Places
from kvstore.tables.share import TableShare
from kvstore.tensorfile import TensorReader, TensorWriter

_HEADER = ("since", "mark", "time", "count")
"""The numbers of an export: from which mark on it has the changes (0: everything), up to which,
how many pushes there had been, and how many updates."""

_MOST = {"since": 2**31 - 2, "mark": 2**31 - 2, "time": MOST_TIME, "count": 2**62}
_STATE = "states/{}"


def write_table(path: Any, share: TableShare, since: int | None, *, with_states: bool) -> int:
    """Write the rows that have changed after the mark ``since``, None for all; the new mark."""
    ids, places = share.held()
    mark = share.next_mark
    has_changed = np.ones(len(ids), np.bool_)
    if since is not None:
        has_changed = share.changed[places] > since
    specs, metadata = _layout(share, int(np.count_nonzero(has_changed)), len(ids), since)
    optimizer = share.slots.optimizer
    states = share.slots.states if with_states else ()
    if with_states and optimizer is not None:
        metadata["optimizer"] = optimizer.name or type(optimizer).__name__
        for name, state in zip(state_names(optimizer, share.settings.dtype), states, strict=True):
            specs[_STATE.format(name)] = ((specs["ids"][0][0], share.settings.dim), state.dtype)
    with TensorWriter(path, specs, {"table": json.dumps(metadata)}) as out:
        changed = places[has_changed]
        out.write("ids", 0, ids[has_changed])
        out.write("touched", 0, share.ages.stamps[changed])
        if since is not None:
            out.write("kept", 0, ids[~has_changed])
            out.write("kept_touched", 0, share.ages.stamps[places[~has_changed]])
        names = [name for name in specs if name.startswith("states/")]
        for name, rows in zip(["values", *names], [share.slots.values, *states], strict=True):
            _write_rows(out, name, rows, changed)
    share.next_mark = mark + 1
    return mark


def _layout(
    share: TableShare, num_changed: int, num_rows: int, since: int | None
) -> tuple[dict[str, tuple[tuple[int, ...], np.dtype[Any]]], dict[str, Any]]:
    long = np.dtype(np.int64)
    specs: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
        "ids": ((num_changed,), long),
        "touched": ((num_changed,), long),
        "values": ((num_changed, share.settings.dim), share.settings.dtype),
    }
    if since is not None:
        specs["kept"] = specs["kept_touched"] = ((num_rows - num_changed,), long)
    numbers = (since or 0, share.next_mark, share.ages.time, share.slots.count)
    metadata: dict[str, Any] = dict(zip(_HEADER, numbers, strict=True))
    return specs, {**metadata, "name": share.settings.name, "is_delta": since is not None}


def _write_rows(out: TensorWriter, name: str, rows: RowValues, places: Places) -> None:
    width = rows.shape[1]
    for start, stop in row_blocks(len(places), width):
        out.write(name, start * width, rows[places[start:stop]])


class TableFile:
    """Reads an export; its header, ids and stamps are checked when the object is made.

    Raises ``CheckpointError``.
    """

    since: int
    mark: int
    time: int
    count: int

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
