"""Export and import tables: one file of named arrays, whole or only the changes.

Rows are sorted by id, so a file does not depend on the number of shares that wrote it, and any
number of shares can load it. The arrays: ``ids`` (int64), ``values`` (a row for each), ``touched``
(int64, their stamps) and ``states/NAME``; a delta also has ``kept`` and ``kept_touched``, for the
rows that still exist and have not changed. One line of metadata, ``table``, is JSON with the fields
of ``_HEADER`` and the ``lineage``, which tells whether a delta continues what a table has loaded.

A file is checked in full before a share changes; only a disk that fails in the middle leaves the
share empty. Files are written and read in blocks. The share's owner lets one thread in at a time.
Read next: ``safetensors.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.checkpoint.safetensors import TensorReader, TensorWriter
from kvstore.errors import CheckpointError
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import state_names
from kvstore.sparse.ids import Ids, is_increasing
from kvstore.sparse.sums import RowValues
from kvstore.sparse.update import row_blocks
from kvstore.tables.eviction import MOST_TIME, stamp_at
from kvstore.tables.hash_index import Places
from kvstore.tables.ids import shares_of
from kvstore.tables.lineage import (
    Line,
    Lines,
    line_of,
    lines_from_plain,
    lines_to_plain,
    new_lineage,
)
from kvstore.tables.settings import TableSettings
from kvstore.tables.shard import TableShare

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


class TableFile(AbstractContextManager["TableFile"]):
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
            self._file.verify()  # before a table has changed
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
            if array not in self._file:
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
        return CheckpointError(f"{self._path} is not an export of a table, or is damaged: {what}")

    def refused(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path} does not fit the table: {what}")

    def __exit__(self, *_: object) -> None:
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
                raise ValueError("is_delta or optimizer is of the wrong type")
            self.lines = lines_from_plain(found.get("lineage", []))
            if self.lines and self.lines[-1].mark != self.mark:
                raise ValueError("the lineage does not end at the mark")
        except (LookupError, TypeError, ValueError, RecursionError) as error:
            raise self.damaged(f"its metadata are wrong: {error!r}") from error

    def _ids(self, ids_name: str, stamps_name: str) -> tuple[Ids, Ids]:
        found = []
        for name in (ids_name, stamps_name):
            if name not in self._file:
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


class FileRows(NamedTuple):
    """Which rows a file has, all sorted by id."""

    ids: Ids
    stamps: Ids
    kept: Ids
    """Of a delta: those that are still there and have not changed."""
    kept_stamps: Ids


class Loading:
    """An export on its way into a share, which is worth nothing before ``finish``."""

    def __init__(self, share: TableShare, rows: FileRows, mark: int, *, is_delta: bool) -> None:
        """Let go of what the file does not have. Ids of other shares are passed over."""
        self._share = share
        share.lineage = new_lineage()  # no delta continues a part of a file
        if is_delta:
            _keep_only(rows, share)
        else:
            share.clear()
        self.chosen = rows.ids[_chosen(rows, share)]
        """The rows to take, sorted."""
        share.next_mark = max(share.next_mark, mark) + 1

    def put(self, ids: Ids, stamps: Ids, arrays: Sequence[RowValues]) -> None:
        """Some rows of the file, of which those that are chosen are taken: values, then states."""
        at = np.searchsorted(self.chosen, ids)
        mine = self.chosen.take(at, mode="clip") == ids if len(self.chosen) else at < 0
        if mine.any():
            values, *states = (array[mine] for array in arrays)
            mark = self._share.next_mark - 1
            self._share.put(ids[mine], values, states, stamps[mine], mark)

    def finish(self, time: int, count: int | None, lines: Lines) -> None:
        """All rows are there; ``count`` updates were made, None if the file does not say.

        ``lines`` are the file's.
        """
        self._share.ages.resume(time)
        if count is not None:
            self._share.slots.count = count
        self._share.lineage = new_lineage(lines)


def load_table(path: Any, share: TableShare) -> None:
    """Take from an export what falls to this share. Raises ``CheckpointError``."""
    with TableFile(path) as file:
        arrays = checked_arrays(file, share.settings, share.slots.optimizer, share.lineage.at)
        try:
            loading = Loading(share, rows_of(file), file.mark, is_delta=file.is_delta)
            for start, stop in row_blocks(len(file.ids), share.settings.dim):
                ids = file.ids[start:stop]
                low = np.searchsorted(loading.chosen, ids[0])
                if low < len(loading.chosen) and loading.chosen[low] <= ids[-1]:
                    rows = [file.rows(array, start, stop) for array in arrays]
                    loading.put(ids, file.stamps[start:stop], rows)
            loading.finish(file.time, file.count_of_updates, file.lines)
        except BaseException:
            share.clear()
            raise


def rows_of(file: TableFile) -> FileRows:
    """Which rows a file has."""
    return FileRows(file.ids, file.stamps, file.kept, file.kept_stamps)


def checked_arrays(
    file: TableFile, settings: TableSettings, optimizer: Optimizer | None, loaded: Line | None
) -> list[str]:
    """The arrays to be read: values, and the states if the optimizer keeps any.

    ``loaded`` is where the file ended that the table has loaded last. Raises ``CheckpointError``.
    """
    if (file.spec.shape[1], file.spec.dtype) != (settings.dim, settings.dtype):
        raise file.refused(
            f"its rows are {file.spec.shape[1]} of {file.spec.dtype}, those of the table "
            f"{settings.dim} of {settings.dtype}"
        )
    if file.is_delta:
        _check_continues(file, loaded)
    if optimizer is None or file.optimizer is None:
        return ["values"]
    name = optimizer.name or type(optimizer).__name__
    if name != file.optimizer:
        raise file.refused(
            f"it has the states of {file.optimizer}, and the table's optimizer is {name}; export "
            "with states=False, or set that optimizer first"
        )
    dtype = accumulation_dtype(settings.dtype)
    return ["values", *file.states(state_names(optimizer, settings.dtype), dtype)]


def _check_continues(delta: TableFile, loaded: Line | None) -> None:
    if not delta.lines:
        raise delta.refused(
            "it is a delta that does not say of which table, from an earlier version; load a full "
            "export instead"
        )
    if loaded is None:
        raise delta.refused("it is a delta; first load the full export that it starts from")
    if not delta.since <= loaded.mark <= delta.mark:
        raise delta.refused(
            f"it has the changes from mark {delta.since} to {delta.mark}, and the table was loaded "
            f"up to mark {loaded.mark}"
        )
    if line_of(delta.lines, loaded.mark) != loaded.id:
        raise delta.refused(
            f"it is a delta of another table, or of another run, than the export with mark "
            f"{loaded.mark} that was loaded last; first load the full export that it starts from"
        )


def _keep_only(file: FileRows, share: TableShare) -> None:
    """Remove the rows that the delta does not know, and mark the unchanged ones as touched."""
    ids, places = share.held()
    is_there = np.isin(ids, file.ids, assume_unique=True)
    is_there |= np.isin(ids, file.kept, assume_unique=True)
    share.remove(places[~is_there])
    places = share.index.look_up(file.kept)
    held = places >= 0
    share.ages.stamps[places[held]] = file.kept_stamps[held]


def _chosen(file: FileRows, share: TableShare) -> Places:
    """Which rows of the file to take: those of the share, as far as there is room.

    Of these and the rows of the share that the file leaves as they are, those that were touched
    last stay; what is left out is removed.
    """
    chosen = np.arange(len(file.ids))
    if share.num_shares > 1:
        chosen = np.flatnonzero(shares_of(file.ids, share.num_shares) == share.share)
    if share.capacity is None:
        return chosen
    ids, places = share.held()
    others = places[~np.isin(ids, file.ids, assume_unique=True)]
    stamps = np.concatenate([share.ages.stamps[others], file.stamps[chosen]])
    excess = len(stamps) - share.capacity
    if excess <= 0:
        return chosen
    oldest = np.argsort(stamps, kind="stable")[:excess]
    left_out = chosen[oldest[oldest >= len(others)] - len(others)]
    replaced = share.index.look_up(file.ids[left_out])
    share.remove(np.concatenate([others[oldest[oldest < len(others)]], replaced[replaced >= 0]]))
    return np.setdiff1d(chosen, left_out, assume_unique=True)
