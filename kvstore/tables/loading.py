"""Taking an export into a share of a table: everything, or the changes of a delta.

All that a file says is checked before the share is changed; only a disk that fails in the middle
leaves it empty. Pure but for the file; whoever owns the share lets one thread in at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.dtypes import accumulation_dtype
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import state_names
from kvstore.sparse.ids import Ids
from kvstore.sparse.sums import RowValues
from kvstore.sparse.update import row_blocks
from kvstore.tables.files import TableFile
from kvstore.tables.hashing import shares_of
from kvstore.tables.index import Places
from kvstore.tables.lineage import Line, Lines, line_of, new_lineage
from kvstore.tables.settings import TableSettings
from kvstore.tables.share import TableShare


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
        share.lineage = new_lineage()  # no delta goes on from a part of a file
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
        raise delta.refused("it is a delta; load the full export that it begins at first")
    if not delta.since <= loaded.mark <= delta.mark:
        raise delta.refused(
            f"it has the changes from mark {delta.since} to {delta.mark}, and the table was loaded "
            f"up to mark {loaded.mark}"
        )
    if line_of(delta.lines, loaded.mark) != loaded.id:
        raise delta.refused(
            f"it is a delta of another table, or of another run, than the export with mark "
            f"{loaded.mark} that was loaded last; load the full export that it begins at first"
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
