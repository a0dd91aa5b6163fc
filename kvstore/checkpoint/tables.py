"""Export and import tables: one file of named arrays, whole or only the changes.

Rows are sorted by id, so a file does not depend on the number of shares that wrote it, and any
number of shares can load it. The arrays: ``ids`` (int64), ``values`` (a row for each), ``touched``
(int64, their stamps) and ``states/NAME``; a delta also has ``kept`` and ``kept_touched``, for the
rows that still exist and have not changed. One entry of the metadata, ``table``, is JSON with the
fields of ``_HEADER`` and the ``lineage``, which shows whether a delta continues the file that a
table has loaded. A file is checked in full before a table changes; only a disk error during the
load leaves the table empty. Files are written and read in blocks; only ids, times and marks are in
memory for all rows at once, 25 bytes each. The rows are in this process (``ShareRows``) or on
servers (``stores/dist/table_rows.py``). A share's owner allows one thread at a time. Read next:
``safetensors.py``.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
from kvstore.sparse.tables.admission import Mask
from kvstore.sparse.tables.ages import MOST_TIME, stamp_at
from kvstore.sparse.tables.hash_index import Places
from kvstore.sparse.tables.ids import shares_of
from kvstore.sparse.tables.lineage import (
    Line,
    Lineage,
    Lines,
    line_of,
    lines_from_plain,
    lines_to_plain,
    new_lineage,
)
from kvstore.sparse.tables.settings import TableSettings
from kvstore.sparse.tables.shard import TableShare

_HEADER = ("since", "mark", "time", "count")
"""The numbers of an export: the mark after which its changes begin (0: everything), the mark at
which they end, the number of pushes, and the number of updates."""

_MOST = {"since": 2**31 - 2, "mark": 2**31 - 2, "time": MOST_TIME, "count": 2**62}
_STATE = "states/{}"
_BLOCK_BYTES = 16 << 20
_MESSAGE_HEADER_BYTES = 4096


class TableRows(NamedTuple):
    """The rows of a table, sorted by id, without their values."""

    ids: Ids
    stamps: Ids
    """When each row was touched (``tables/ages.py``); each server has its own count."""
    changed: Ids
    """The mark since which each row has not changed."""


class TableCounters(NamedTuple):
    """The counters that are equal on all shares of a table."""

    next_mark: int
    time: int
    """The number of pushes."""
    num_updates: int
    lineage: Lineage


class FileRows(NamedTuple):
    """The rows of a file, sorted by id."""

    ids: Ids
    stamps: Ids
    kept: Ids
    """In a delta: the ids of rows that still exist and have not changed."""
    kept_stamps: Ids


class TableHome(ABC):
    """Where the rows of a table are: a share in this process, or servers."""

    title: str
    """The name of the table, for errors."""
    most_bytes: int = 1 << 62
    """The largest size of a message to the rows' owner."""

    @abstractmethod
    def held(self) -> TableRows:
        """Return all rows, without their values."""

    @abstractmethod
    def read(self, ids: Ids, dtypes: Sequence[np.dtype[Any]]) -> tuple[Mask, list[RowValues]]:
        """Return which of these different ids have rows, and arrays of values and states.

        ``dtypes`` are the dtypes of the arrays, values first; a single one: no states.
        """

    @abstractmethod
    def counters(self) -> TableCounters:
        """Return the counters and the lineage, which are equal on all shares."""

    @abstractmethod
    def set_mark(self, mark: int, lineage: Lineage) -> None:
        """Set the mark that later changes come after."""

    @abstractmethod
    def shared(self, rows: FileRows) -> Any:
        """Return these rows in the form that ``begin`` takes.

        Raises ``CheckpointError`` if they do not fit in a message.
        """

    @abstractmethod
    def begin(self, shared: Any, mark: int, *, is_delta: bool) -> None:
        """Drop rows that the file lacks; the table cannot be used before ``end``."""

    @abstractmethod
    def write(self, ids: Ids, stamps: Ids, arrays: Sequence[RowValues]) -> None:
        """Store those of these rows that were chosen; ``arrays`` are values, then states."""

    @abstractmethod
    def end(self, num_updates: int | None, time: int, lines: Lines) -> None:
        """End the load after all rows were written.

        ``num_updates`` is None if the file lacks it; ``lines`` are the file's lineage.
        """


class TableFiles:
    """Writes a table to files and reads it from them."""

    def __init__(self, home: TableHome, settings: TableSettings) -> None:
        self.home = home
        self._settings = settings

    def export(self, path: Any, optimizer: Optimizer | None, since: int | None) -> int:
        """Write the rows changed since a mark (None: all); return the new mark.

        With an ``optimizer``, its states are written, too. Nothing may change meanwhile: raises
        ``CheckpointError`` if rows have disappeared.
        """
        mark, time, count, lineage = self.home.counters()
        self.home.set_mark(mark, lineage)
        held = self.home.held()
        has_changed = np.ones(len(held.ids), np.bool_) if since is None else held.changed > since
        ids, kept = held.ids[has_changed], held.ids[~has_changed]
        numbers = (since or 0, mark, time, count)
        specs, metadata = self._layout(len(ids), None if since is None else len(kept), optimizer)
        metadata |= dict(zip(_HEADER, numbers, strict=True))
        metadata["lineage"] = lines_to_plain(lineage.until(mark))
        names = ["values", *(name for name in specs if name.startswith("states/"))]
        dtypes = [specs[name][1] for name in names]
        width = self._settings.dim
        step = self._block_rows(width * sum(dtype.itemsize for dtype in dtypes))
        with TensorWriter(path, specs, {"table": json.dumps(metadata)}) as out:
            out.write("ids", 0, ids)
            out.write("touched", 0, held.stamps[has_changed])
            if since is not None:
                out.write("kept", 0, kept)
                out.write("kept_touched", 0, held.stamps[~has_changed])
            for start in range(0, len(ids), step):
                is_there, arrays = self.home.read(ids[start : start + step], dtypes)
                if not is_there.all():
                    raise CheckpointError(
                        f"{path} was not written: rows of {self.home.title} were evicted during "
                        "the export; do not pull or push in other threads during an export"
                    )
                for name, rows in zip(names, arrays, strict=True):
                    out.write(name, start * width, rows)
        return mark

    def _layout(
        self, num_rows: int, num_kept: int | None, optimizer: Optimizer | None
    ) -> tuple[dict[str, tuple[tuple[int, ...], np.dtype[Any]]], dict[str, Any]]:
        """Return the specs of a file's arrays, and its metadata."""
        long, settings = np.dtype(np.int64), self._settings
        specs: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {
            "ids": ((num_rows,), long),
            "touched": ((num_rows,), long),
            "values": ((num_rows, settings.dim), settings.dtype),
        }
        if num_kept is not None:
            specs["kept"] = specs["kept_touched"] = ((num_kept,), long)
        metadata = {"name": settings.name, "is_delta": num_kept is not None}
        if optimizer is not None:
            metadata["optimizer"] = optimizer.name or type(optimizer).__name__
            dtype = accumulation_dtype(settings.dtype)
            for name in state_names(optimizer, settings.dtype):
                specs[_STATE.format(name)] = ((num_rows, settings.dim), dtype)
        return specs, metadata

    def _block_rows(self, row_bytes: int) -> int:
        return max(min(_BLOCK_BYTES, self.home.most_bytes // 2) // (row_bytes + 16), 1)

    def load(self, path: Any, optimizer: Optimizer | None) -> None:
        """Load an export or a delta; each share loads its own rows.

        Raises ``CheckpointError`` for a file that does not fit, before anything has changed; a disk
        error during the load leaves the table empty.
        """
        home, settings = self.home, self._settings
        with TableFile(path) as file:
            arrays = checked_arrays(file, settings, optimizer, home.counters().lineage.at)
            states_bytes = (len(arrays) - 1) * accumulation_dtype(settings.dtype).itemsize
            row_bytes = settings.dim * (settings.dtype.itemsize + states_bytes)
            check_fits(home, "one of its rows", row_bytes)
            shared = home.shared(FileRows(file.ids, file.stamps, file.kept, file.kept_stamps))
            nothing = home.shared(FileRows(*[np.empty(0, np.int64)] * 4))
            step = self._block_rows(8 * settings.dim * len(arrays))
            try:
                home.begin(shared, file.mark, is_delta=file.is_delta)
                for start in range(0, len(file.ids), step):
                    stop = min(start + step, len(file.ids))
                    rows = [file.rows(array, start, stop) for array in arrays]
                    home.write(file.ids[start:stop], file.stamps[start:stop], rows)
                home.end(file.count_of_updates, file.time, file.lines)
            except BaseException:
                home.begin(nothing, 0, is_delta=False)
                raise


def check_fits(home: TableHome, what: str, nbytes: int) -> None:
    """Raise ``CheckpointError`` if an item of the file exceeds a message."""
    if nbytes > home.most_bytes - _MESSAGE_HEADER_BYTES:
        raise CheckpointError(
            f"the file does not fit {home.title}: {what} would be a message of {nbytes} "
            f"bytes, over PS_MAX_MESSAGE_BYTES ({home.most_bytes}); use more servers, or "
            "raise PS_MAX_MESSAGE_BYTES on all nodes"
        )


class TableFile(AbstractContextManager["TableFile"]):
    """Reads an export; its header, ids and stamps are checked when the object is made.

    Raises ``CheckpointError``.
    """

    since: int
    mark: int
    time: int
    count: int
    lines: Lines
    """The lineage up to its mark; empty in files of earlier versions, which only fit whole."""

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
        """Return the number of updates; None in a file without states."""
        return None if self.optimizer is None else self.count

    def states(self, names: tuple[str, ...], dtype: np.dtype[Any]) -> list[str]:
        """Check that these states fit the values; return the names of their arrays."""
        arrays = [_STATE.format(name) for name in names]
        for array in arrays:
            if array not in self._file:
                raise self.damaged(f"{array} is missing")
            spec = self._file.spec(array)
            if spec.shape != self.spec.shape or spec.dtype != dtype:
                raise self.damaged(f"{array} has shape {spec.shape} and dtype {spec.dtype}")
        return arrays

    def rows(self, array: str, start: int, stop: int) -> RowValues:
        """Return rows [start, stop) of ``values`` or of a state."""
        width = self.spec.shape[1]
        return self._file.read(array, start * width, stop * width).reshape(stop - start, width)

    def damaged(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path} is damaged or not an export of a table: {what}; load another export"
        )

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
                raise ValueError("is_delta or optimizer has the wrong type")
            self.lines = lines_from_plain(found.get("lineage", []))
            if self.lines and self.lines[-1].mark != self.mark:
                raise ValueError("the lineage does not end with the mark")
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


class ShareRows(TableHome):
    """The rows of one share. A file is loaded by ``begin``, ``write`` and ``end``."""

    def __init__(self, share: TableShare) -> None:
        self.title = f"table {share.settings.name!r}"
        self.share = share
        self._chosen: Ids | None = None
        """The ids of the rows to load, sorted; None when no file is being loaded."""

    @property
    def is_loading(self) -> bool:
        """Whether a file is being loaded."""
        return self._chosen is not None

    def held(self) -> TableRows:
        ids, places = self.share.held()
        changed = self.share.changed[places].astype(np.int64)
        return TableRows(ids, self.share.ages.stamps[places], changed)

    def read(self, ids: Ids, dtypes: Sequence[np.dtype[Any]]) -> tuple[Mask, list[RowValues]]:
        is_there, arrays = self.copies(ids, with_states=len(dtypes) > 1)
        return is_there, arrays

    def copies(self, ids: Ids, *, with_states: bool) -> tuple[Mask, list[RowValues]]:
        """Do as ``read``, with all states or none."""
        self.share.expire()
        places = self.share.index.look_up(ids)
        is_there: Mask = places >= 0
        rows = self.share.rows
        arrays = [rows.values, *(rows.states if with_states else ())]
        return is_there, [array[places[is_there]] for array in arrays]

    def counters(self) -> TableCounters:
        share = self.share
        return TableCounters(share.next_mark, share.ages.time, share.rows.count, share.lineage)

    def set_mark(self, mark: int, lineage: Lineage) -> None:
        self.share.lineage = lineage
        self.share.next_mark = max(self.share.next_mark, mark + 1)

    def shared(self, rows: FileRows) -> FileRows:
        return rows

    def begin(self, shared: FileRows, mark: int, *, is_delta: bool) -> None:
        """Begin a load as in ``TableHome``; skip the ids of other shares."""
        self.share.lineage = new_lineage()  # no delta continues a part of a file
        if is_delta:
            _keep_only(shared, self.share)
        else:
            self.share.clear()
        self._chosen = shared.ids[_chosen(shared, self.share)]
        self.share.next_mark = max(self.share.next_mark, mark) + 1

    def write(self, ids: Ids, stamps: Ids, arrays: Sequence[RowValues]) -> None:
        chosen = self._chosen
        assert chosen is not None
        at = np.searchsorted(chosen, ids)
        mine = chosen.take(at, mode="clip") == ids if len(chosen) else at < 0
        if mine.any():
            values, *states = (array[mine] for array in arrays)
            self.share.put(ids[mine], values, states, stamps[mine], self.share.next_mark - 1)

    def end(self, num_updates: int | None, time: int, lines: Lines) -> None:
        self.share.ages.resume(time)
        if num_updates is not None:
            self.share.rows.count = num_updates
        self.share.lineage = new_lineage(lines)
        self._chosen = None


def checked_arrays(
    file: TableFile, settings: TableSettings, optimizer: Optimizer | None, loaded: Line | None
) -> list[str]:
    """Check that a file fits a table; return the names of the arrays to read.

    ``loaded`` is the end of the file that the table loaded last. Raises ``CheckpointError``.
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
    """Remove rows that the delta lacks, and take its touch times for unchanged rows."""
    ids, places = share.held()
    is_there = np.isin(ids, file.ids, assume_unique=True)
    is_there |= np.isin(ids, file.kept, assume_unique=True)
    share.remove(places[~is_there])
    places = share.index.look_up(file.kept)
    held = places >= 0
    share.ages.stamps[places[held]] = file.kept_stamps[held]


def _chosen(file: FileRows, share: TableShare) -> Places:
    """Return the rows of the file to load: this share's, as far as they fit.

    Of these and the share's rows that the file does not change, those that were touched last are
    kept; the others are removed.
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
