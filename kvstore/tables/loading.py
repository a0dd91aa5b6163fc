"""Taking an export into a share of a table: everything, or the changes of a delta.

All that a file says is checked before the share is changed; only a disk that fails in the middle
leaves it empty. Pure but for the file; whoever owns the share lets one thread in at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.dtypes import accumulation_dtype
from kvstore.optimizer.states import state_names
from kvstore.sparse.update import row_blocks
from kvstore.tables.files import TableFile
from kvstore.tables.hashing import shares_of
from kvstore.tables.index import Places
from kvstore.tables.share import TableShare


def load_table(path: Any, share: TableShare) -> None:
    """Take from an export what falls to this share. Raises ``CheckpointError``."""
    with TableFile(path) as file:
        arrays = _checked_arrays(file, share)
        if not file.is_delta:
            share.clear()
        else:
            _keep_only(file, share)
        try:
            _put(file, arrays, share, _chosen(file, share))
        except BaseException:
            share.clear()
            raise
        if file.optimizer is not None:
            share.slots.count = file.count
        share.loaded_mark = file.mark


def _checked_arrays(file: TableFile, share: TableShare) -> list[str]:
    """The arrays to be read: values, and the states if the optimizer keeps any."""
    settings, optimizer = share.settings, share.slots.optimizer
    if (file.spec.shape[1], file.spec.dtype) != (settings.dim, settings.dtype):
        raise file.refused(
            f"its rows are {file.spec.shape[1]} of {file.spec.dtype}, those of the table "
            f"{settings.dim} of {settings.dtype}"
        )
    if file.is_delta and share.loaded_mark is None:
        raise file.refused("it is a delta; load the full export that it begins at first")
    if file.is_delta and not file.since <= (share.loaded_mark or 0) <= file.mark:
        raise file.refused(
            f"it has the changes from mark {file.since} to {file.mark}, and the table was loaded "
            f"up to mark {share.loaded_mark}"
        )
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


def _keep_only(file: TableFile, share: TableShare) -> None:
    """Remove the rows that the delta does not know, and mark the unchanged ones as touched."""
    ids, places = share.held()
    is_there = np.isin(ids, file.ids, assume_unique=True)
    is_there |= np.isin(ids, file.kept, assume_unique=True)
    share.remove(places[~is_there])
    places = share.index.look_up(file.kept)
    held = places >= 0
    share.ages.stamps[places[held]] = file.kept_stamps[held]


def _chosen(file: TableFile, share: TableShare) -> Places:
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


def _put(file: TableFile, arrays: list[str], share: TableShare, chosen: Places) -> None:
    share.next_mark = max(share.next_mark, file.mark) + 1
    for start, stop in row_blocks(len(file.ids), share.settings.dim):
        low, high = np.searchsorted(chosen, (start, stop))
        if low == high:
            continue
        mine = chosen[low:high]
        values, *states = (file.rows(array, start, stop)[mine - start] for array in arrays)
        share.put(file.ids[mine], values, states, file.stamps[mine], share.next_mark - 1)
    share.ages.resume(file.time)
