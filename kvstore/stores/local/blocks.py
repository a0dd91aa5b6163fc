"""Sum and update keys on the host in blocks, on all cores.

``Blocks`` is made once for a list of keys. Large keys are cut into blocks that stay in a
core's cache; small keys that are neighbours on a shelf form one block. For each block the
contributions are added, the weights updated and, if the call has arrays to fill, these are
written while the block is still in the cache. Every operation is elementwise (an optimizer of
scope ``"key"`` gets whole keys, each on one thread, one of scope ``"row"`` whole rows), so
neither the blocks nor the threads can change a bit of the result.

Several threads in a single pass are only correct if the arrays do not overlap (``are_apart``).
Different arrays that own their memory cannot overlap; for views, addresses are compared. The
result may be False for arrays that do not overlap (views with interleaved strides), but never
True for arrays that do.

The store's lock guards everything here; the tasks run on the caller's thread and on those of
``arrays/cpu/threads.py``. Read next: ``arrays/cpu/sums.py`` for the arithmetic.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise, repeat
from operator import attrgetter, is_not
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from kvstore.arrays.cpu import kernels
from kvstore.arrays.cpu.sums import Flat, Workspaces, add_up, apply_round, update_block
from kvstore.arrays.cpu.threads import Cores, Failure, Task, shared
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import create_state
from kvstore.stores.local.memory import Shelf, StoredKey

Arrays = Sequence[np.ndarray[Any, Any]]

_base = attrgetter("base")


def are_apart(writes: Sequence[Arrays], reads: Sequence[Arrays] = ()) -> bool:
    """Return whether ``writes`` share no memory with each other or ``reads``.

    Both have a row of arrays for each key. If an array is both read and written for the same key
    (the same object, or one with the same memory and layout), that is not a conflict: each of its
    elements is read before it is written.
    """
    written = list(chain.from_iterable(writes))
    read = [] if reads is writes else list(chain.from_iterable(reads))
    if _all_own_their_memory(written) and _all_own_their_memory(read):
        owners = set(map(id, written))
        if len(owners) == len(written) and owners.isdisjoint(map(id, read)):
            return True
    return _have_disjoint_addresses(writes, () if reads is writes else reads)


def _all_own_their_memory(arrays: Arrays) -> bool:
    return not any(map(is_not, map(_base, arrays), repeat(None)))


def _have_disjoint_addresses(writes: Sequence[Arrays], reads: Sequence[Arrays]) -> bool:
    ranges = sorted(_ranges(writes), key=lambda item: item[:2])
    for (_, high, _, _), (low, _, _, _) in pairwise(ranges):
        if low < high:
            return False
    lows = [low for low, _, _, _ in ranges]
    for low, high, row, array in _ranges(reads):
        # Ranges are disjoint and sorted: the last one that begins below `high` also ends last.
        index = bisect_right(lows, high - 1) - 1
        if index < 0 or ranges[index][1] <= low:
            continue
        _, _, row_written, written = ranges[index]
        if row != row_written or not _are_twins(written, array):
            return False
    return True


def _ranges(rows: Sequence[Arrays]) -> Iterable[tuple[int, int, int, np.ndarray[Any, Any]]]:
    """Yield (first address, end address, row number, array) for non-empty arrays."""
    for number, row in enumerate(rows):
        for array in row:
            if array.size:
                yield (*byte_bounds(array), number, array)


def _are_twins(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    return (
        byte_bounds(one) == byte_bounds(other)
        and one.strides == other.strides
        and one.shape == other.shape
        and one.dtype == other.dtype
    )


HostArray = np.ndarray[Any, Any]
Row = Sequence[HostArray]
"""One key's arrays in a call: one for each device."""

SPAN_ELEMENTS = 131072
"""The numbers in a block: 512 KiB of float32 for each operand. On one thread, blocks of a quarter
of this size are as fast. Two threads wait for the interpreter lock between NumPy's operations: with
this size half as often as with half of it (``docs/performance.md``)."""

SHARED_BYTES = 1 << 20
"""Work on fewer bytes is done on one thread: it ends before another thread would wake up."""

_ALONE = Cores(1)


@dataclass(slots=True)
class _Neighbours:
    """Consecutive keys of a shelf that together are no larger than a block."""

    shelf: Shelf
    start: int
    stop: int
    indices: list[int]
    entries: list[StoredKey]


class Blocks:
    """The keys of a call in its order, all different and on the host."""

    def __init__(self, entries: Sequence[StoredKey]) -> None:
        self.entries = tuple(entries)
        self.nbytes = sum(entry.spec.nbytes for entry in entries)
        self._expected = [tuple(entry.spec) for entry in entries]
        self._large = [index for index, entry in enumerate(entries) if entry.shelf is None]
        self._neighbours = list(_neighbours(self.entries))
        self._optimizer: Optimizer | None = None
        self._variants: list[Optimizer] = []

    # -- arguments of calls ------------------------------------------------------------

    def plain_rows(self, values: object, *, are_written: bool) -> list[Row] | None:
        """Return a call's rows if they are NumPy arrays that match the keys.

        Return None for all other values, valid or not: then the checks of ``KeyTable`` decide.
        ``values`` has an item for each key: an array or a list of arrays.
        """
        if type(values) not in (list, tuple) or len(values) != len(self._expected):  # type: ignore[arg-type]
            return None
        rows: list[Row] = []
        for item, (shape, dtype) in zip(values, self._expected, strict=True):  # type: ignore[call-overload]
            row = item if type(item) in (list, tuple) else (item,)
            for array in row:
                if type(array) is not np.ndarray or array.shape != shape or array.dtype != dtype:
                    return None
                if are_written and not array.flags.writeable:
                    return None
            if not row:
                return None
            rows.append(row)
        return rows

    # -- the work of a call ------------------------------------------------------------

    def apply(
        self,
        rows: Sequence[Row],
        optimizer: Optimizer | None,
        workspaces: Workspaces,
        outs: Sequence[Row] | None = None,
    ) -> None:
        """Add up each key's row; update the key by the sum, or set it to the sum.

        Rows have the shapes and dtypes of their keys and are only read. ``outs`` are arrays of the
        keys' shapes and any dtypes, which get the new values: in the same pass, if the result is
        the same as that of two calls. When an optimizer raises, some other keys of the call may
        have been updated; the counts and versions of exactly those keys are increased.
        """
        fused = outs if outs is not None and self._can_fuse(outs, rows) else None
        variants = self._begin(optimizer)
        tasks, of_tasks = self._tasks(rows, variants, workspaces, fused)
        nbytes = self.nbytes * (len(rows[0]) if rows else 0)
        cores = shared() if nbytes >= SHARED_BYTES else _ALONE
        self._end(cores.run(tasks), of_tasks, optimizer)
        if outs is not None and fused is None:
            self.fill(outs)

    def _can_fuse(self, outs: Sequence[Row], rows: Sequence[Row]) -> bool:
        """Return whether these arrays can be filled in the same pass as the update."""
        is_flat = all(_is_flat(out) for index in self._large for out in outs[index])
        return is_flat and are_apart(outs, rows)

    def fill(self, outs: Sequence[Row]) -> None:
        """Write each key's value into all arrays of its row.

        If a caller passes the same array for two keys, it gets the later key, as in a loop.
        """
        nbytes = self.nbytes * (len(outs[0]) if outs else 0)
        if nbytes < SHARED_BYTES or not are_apart(outs):
            with np.errstate(all="ignore"):
                _write_all(self.entries, outs)
            return
        tasks: list[Task] = [
            partial(_write_all, group.entries, [outs[index] for index in group.indices])
            for group in self._neighbours
        ]
        for index in self._large:
            entry, row = self.entries[index], outs[index]
            if not all(map(_is_flat, row)):
                tasks.append(partial(_write_all, (entry,), (row,)))
                continue
            flat, targets = entry.flat, [out.reshape(-1) for out in row]
            tasks += [
                partial(_write_span, flat[start:stop], start, stop, targets)
                for start, stop in _spans(len(flat))
            ]
        failure = shared().run(tasks)
        if failure is not None:
            raise failure.error

    # -- updates -----------------------------------------------------------------------

    def _begin(self, optimizer: Optimizer | None) -> Sequence[Optimizer | None]:
        """Create missing states, count the update, and return each key's optimizer."""
        if optimizer is not None:
            if optimizer is not self._optimizer:
                self._variants = [
                    optimizer.for_key(entry.key, entry.spec.width) for entry in self.entries
                ]
                self._optimizer = optimizer
            for entry in self.entries:
                if entry.state is None:
                    entry.keep_state(create_state(optimizer, entry.flat), entry.count)
        for entry in self.entries:
            entry.version += 1
            entry.count += optimizer is not None
        return [None] * len(self.entries) if optimizer is None else self._variants

    def _end(
        self,
        failure: Failure | None,
        of_tasks: Sequence[Sequence[StoredKey]],
        optimizer: Optimizer | None,
    ) -> None:
        """If a task failed, undo the counts of keys without an update and raise its error."""
        if failure is None:
            return
        begun = {
            id(entry)
            for index, entries in enumerate(of_tasks)
            if index not in failure.not_begun
            for entry in entries
        }
        unfinished = {id(entry) for index in failure.not_done for entry in of_tasks[index]}
        for entry in self.entries:
            entry.version -= id(entry) in unfinished
            if optimizer is not None and id(entry) not in begun:
                entry.count -= 1
        raise failure.error

    def _tasks(
        self,
        rows: Sequence[Row],
        variants: Sequence[Optimizer | None],
        workspaces: Workspaces,
        outs: Sequence[Row] | None,
    ) -> tuple[list[Task], list[Sequence[StoredKey]]]:
        """Return the tasks, and the keys of each task."""
        tasks: list[Task] = []
        of_tasks: list[Sequence[StoredKey]] = []
        for group in self._neighbours:
            chosen = [variants[index] for index in group.indices]
            mine = [rows[index] for index in group.indices]
            theirs = None if outs is None else [outs[index] for index in group.indices]
            work = _update_together if _can_be_one(group, chosen) else _update_singly
            tasks.append(partial(work, group, chosen, mine, theirs, workspaces))
            of_tasks.append(group.entries)
        for index in self._large:
            entry, optimizer = self.entries[index], variants[index]
            row = [array.reshape(-1) for array in rows[index]]
            targets = () if outs is None else [out.reshape(-1) for out in outs[index]]
            size, step = entry.spec.num_elements, SPAN_ELEMENTS
            if optimizer is not None:
                step = optimizer.block_length(size, step)
            for span in _spans(size, step):
                tasks.append(
                    partial(_update_span, entry, span, optimizer, row, targets, workspaces)
                )
                of_tasks.append((entry,))
        return tasks, of_tasks


def _neighbours(entries: Sequence[StoredKey]) -> Iterator[_Neighbours]:
    shelves: dict[int, list[tuple[int, int, int, StoredKey]]] = {}
    for index, entry in enumerate(entries):
        if entry.shelf is not None:
            row = (entry.start, entry.stop, index, entry)
            shelves.setdefault(id(entry.shelf), []).append(row)
    for found in shelves.values():
        group: _Neighbours | None = None
        for start, stop, index, entry in sorted(found, key=lambda row: row[:2]):
            fits = group is not None and group.stop == start
            if group is None or not fits or stop - group.start > SPAN_ELEMENTS:
                if group is not None:
                    yield group
                assert entry.shelf is not None
                group = _Neighbours(entry.shelf, start, stop, [], [])
            group.stop = stop
            group.indices.append(index)
            group.entries.append(entry)
        if group is not None:
            yield group


def _can_be_one(group: _Neighbours, chosen: Sequence[Optimizer | None]) -> bool:
    """Return whether all keys of a group can be updated as one array."""
    first, optimizer = group.entries[0], chosen[0]
    if optimizer is None:
        dtype = first.spec.dtype
        return accumulation_dtype(dtype) == dtype
    if optimizer.scope == "key" or first.shelved is None:
        return False
    if any(variant is not optimizer for variant in chosen):
        return False
    return all(
        entry.count == first.count and entry.shelved == first.shelved for entry in group.entries
    )


def _spans(size: int, step: int = SPAN_ELEMENTS) -> Iterator[tuple[int, int]]:
    for start in range(0, size, step):
        yield start, min(start + step, size)


def _is_flat(out: HostArray) -> bool:
    """Return whether an array can be filled in blocks, as a 1-D view."""
    return out.ndim == 1 or out.flags.c_contiguous


# -- the tasks -----------------------------------------------------------------------------


def _update_together(
    group: _Neighbours,
    chosen: Sequence[Optimizer | None],
    rows: Sequence[Row],
    outs: Sequence[Row] | None,
    workspaces: Workspaces,
) -> None:
    weight = group.shelf.values[group.start : group.stop]
    first, optimizer = group.entries[0], chosen[0]
    state: list[Flat] = []
    if optimizer is not None:
        state = [
            group.shelf.state(index, dtype)[group.start : group.stop]
            for index, dtype in enumerate(first.shelved or ())
        ]
    if kernels.apply(weight, rows, optimizer, state, first.count, outs or ()):
        return
    workspace = workspaces.take()
    total = weight
    if optimizer is not None:
        total = workspace.block(0, accumulation_dtype(weight.dtype), len(weight))
    for entry, row in zip(group.entries, rows, strict=True):
        own = total[entry.start - group.start : entry.stop - group.start]
        add_up(row, own.reshape(entry.spec.shape) if len(entry.spec.shape) != 1 else own)
    if optimizer is not None:
        update_block(weight, total, optimizer, state, first.count, workspace)
    workspaces.give(workspace)
    if outs is not None:
        _write_all(group.entries, outs)


def _update_singly(
    group: _Neighbours,
    chosen: Sequence[Optimizer | None],
    rows: Sequence[Row],
    outs: Sequence[Row] | None,
    workspaces: Workspaces,
) -> None:
    for entry, optimizer, row in zip(group.entries, chosen, rows, strict=True):
        flat = [array.reshape(-1) for array in row]
        _update_span(entry, (0, entry.spec.num_elements), optimizer, flat, (), workspaces)
    if outs is not None:
        _write_all(group.entries, outs)


def _update_span(
    entry: StoredKey,
    span: tuple[int, int],
    optimizer: Optimizer | None,
    row: Sequence[Flat],
    targets: Sequence[Flat],
    workspaces: Workspaces,
) -> None:
    some, workspace = slice(*span), workspaces.take()
    apply_round(
        entry.flat[some],
        [array[some] for array in row],
        optimizer,
        [array[some] for array in entry.state or ()],
        entry.count,
        workspace,
        outs=[target[some] for target in targets],
        block_elements=SPAN_ELEMENTS,
    )
    workspaces.give(workspace)


def _write_all(entries: Sequence[StoredKey], outs: Sequence[Row]) -> None:
    for entry, row in zip(entries, outs, strict=True):
        for out in row:
            out[...] = entry.weight


def _write_span(weight: Flat, start: int, stop: int, targets: Sequence[Flat]) -> None:
    for target in targets:
        target[start:stop] = weight
