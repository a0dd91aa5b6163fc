"""Serve the rows of row-sparse keys, and rows of dense keys.

A row that a row-sparse key does not store is zero. A part of a dense key may begin and end within a
row: see ``sparse/partition.py``. A part's rounds and requests run on the thread of its lane, pulls
on the I/O thread while no round of the part is being applied. Read next: ``sparse/table.py`` for
the stored rows, ``rows.py`` for the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.cpu.sums import Flat, Workspace
from kvstore.arrays.keys import KeySpec
from kvstore.errors import OptimizerNotSet
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import has_master
from kvstore.protocol.requests import RowPartEntry, bytes_of
from kvstore.server.memory import Part, StoreState
from kvstore.server.row_part import (
    Allocate,
    RowPart,
    WantedRows,
    check_fits,
    check_ids,
    longs,
    not_loading,
    rows_in,
)
from kvstore.sparse.ids import Ids, union_of
from kvstore.sparse.partition import Cut, PartRows, read_part, update_part
from kvstore.sparse.payload import (
    ROWS_FORM,
    RowPayload,
    RowPayloadKind,
    id_bytes_for,
    payload_bytes,
    write_payload,
)
from kvstore.sparse.sums import Contribution, RowValues
from kvstore.sparse.table import RowsBefore, RowTable
from pslite.errors import ProtocolError
from pslite.plane import Piece

NO_OPTIMIZER = "dist_async needs an optimizer: call set_optimizer before push"


class _Arriving(NamedTuple):
    """The loading of rows from a file or from ``init``."""

    has_values: bool
    has_states: bool


class KeyPart(RowPart):
    """The rows of one row-sparse key on a server; ids count the rows of this part."""

    ending = "deleted"

    def __init__(self, store: StoreState, lane: int, entry: RowPartEntry, *, is_full: bool) -> None:
        """``is_full``: whether all of its rows will be sent."""
        super().__init__(store, lane, entry.part, f"key {entry.key!r}", entry.width, entry.dtype)
        self.entry = entry
        self.table = RowTable(KeySpec((entry.num_rows, entry.width), entry.dtype), is_whole=is_full)
        self.arriving: _Arriving | None = _Arriving(True, False)
        self._workspace = Workspace()
        #: The rows before the last round, if the store keeps them.
        self._before: RowsBefore | None = None

    def needs_rows(self) -> bool:
        """Return whether first rows must be sent; forget rows from a lost worker."""
        if self.arriving is None or self.arriving.has_states:
            return False
        self.table.begin_afresh()
        return True

    def apply(self, contributions: Sequence[Contribution]) -> None:
        base = self.store.optimizer  # read once: the I/O thread may set another one
        optimizer = None if base is None else base.for_key(self.entry.key, self.width)
        self._keep_before(contributions, optimizer)
        self.table.set_optimizer(base)
        if optimizer is None:
            if self.store.ranks is None:
                raise OptimizerNotSet(NO_OPTIMIZER)
            self.table.replace(contributions, self._workspace)
            return
        optimizer.check_dtype(self.dtype)
        self.table.update(contributions, optimizer, self._workspace)

    def _keep_before(
        self, contributions: Sequence[Contribution], optimizer: Optimizer | None
    ) -> None:
        """Keep the rows that a round may change, if the store keeps them."""
        if self.store.keeps_previous and self.store.ranks is not None:
            is_lazy = optimizer is not None and optimizer.is_lazy("row_sparse")
            touched = union_of([each.ids for each in contributions]) if is_lazy else None
            self._before = RowsBefore(self.table, touched)

    def _pushed_ids(self, payload: RowPayload) -> Ids:
        if payload.kind is RowPayloadKind.ALL and payload.num_rows == self.entry.num_rows:
            return np.arange(payload.num_rows)
        if payload.kind is not RowPayloadKind.ROWS:
            raise ProtocolError(f"a push of {payload.num_rows} rows to the {self.title} has no ids")
        check_ids(payload.ids, self.entry.num_rows)
        return payload.ids

    def _wanted(self, payload: RowPayload) -> WantedRows:
        num_rows = self.entry.num_rows
        if payload.kind is RowPayloadKind.WANTED:
            check_ids(payload.ids, num_rows)
            return WantedRows(payload.kind, payload.ids, self._bytes_of(payload))
        held = range(payload.offset, payload.offset + payload.num_rows)
        if payload.kind is not RowPayloadKind.HELD or held.stop > num_rows:
            raise ProtocolError(
                f"a pull of a part with {num_rows} rows names no valid row: {payload.kind.name} "
                f"from row {held.start} to {held.stop}"
            )
        return WantedRows(payload.kind, payload.ids, 0, held)

    def _read(self, wanted: WantedRows, out: RowValues, *, before_last: bool) -> None:
        self._rows(before_last).read(wanted.ids, out)

    def _rows(self, before_last: bool) -> RowTable | RowsBefore:
        return self._before if before_last and self._before is not None else self.table

    def answer(
        self,
        wanted: WantedRows,
        allocate: Allocate,
        most_bytes: int,
        *,
        before_last: bool = False,
    ) -> Any:
        if wanted.kind is RowPayloadKind.WANTED:
            return super().answer(wanted, allocate, most_bytes, before_last=before_last)
        rows = self._rows(before_last)
        ids, num_rows = rows.ids(), self.entry.num_rows
        # At the end, do not search for the stop of all rows, which may be 2**63.
        is_last = wanted.held.stop == num_rows
        high = len(ids) if is_last else np.searchsorted(ids, wanted.held.stop)
        ids = ids[np.searchsorted(ids, wanted.held.start) : high]
        is_all = len(ids) == num_rows
        id_bytes = 0 if is_all else id_bytes_for(num_rows)
        nbytes = payload_bytes(len(ids), id_bytes, len(ids) * self.row_bytes)
        check_fits(self.title, len(ids), nbytes, most_bytes)
        memory = allocate(nbytes)
        kind, named = (RowPayloadKind.ALL, ids[:0]) if is_all else (RowPayloadKind.ROWS, ids)
        place = write_payload(memory, kind, len(ids), self.width, 0, named, id_bytes)
        rows.read(ids, place.view(self.dtype).reshape(len(ids), self.width))
        return memory.data

    # -- for files ---------------------------------------------------------------------

    def nbytes(self) -> tuple[int, int]:
        return self.table.nbytes, self.table.state_bytes

    def held(self) -> tuple[int, Sequence[Ids]]:
        return self.table.count, [self.table.ids()]

    def copies(self, ids: Ids, *, with_states: bool) -> list[np.ndarray[Any, Any]]:
        check_ids(ids, self.entry.num_rows)
        self.table.set_optimizer(self.store.optimizer)
        states = self.table.read_states(ids) if with_states else []
        return [np.ones(len(ids), np.bool_), self.table.read(ids), *states]

    def begin(self, fields: Sequence[Any], columns: Sequence[Ids]) -> None:
        if len(fields) != 1 or type(fields[0]) is not bool or columns:
            raise ProtocolError(
                f"expected one field (whether values follow) for the {self.title}, got {fields}"
            )
        self.arriving = _Arriving(fields[0], True)
        self._before = None
        self.table.begin_afresh(keeps_values=not fields[0])
        self.table.set_optimizer(self.store.optimizer)

    def write(self, frames: Sequence[Any]) -> None:
        if self.arriving is None:
            raise not_loading(self.title)
        has_values, has_states = self.arriving
        ids, frames = longs(frames[0]), frames[1:]
        check_ids(ids, self.entry.num_rows)
        dtypes = [self.dtype] * has_values
        if has_states:
            dtypes += [state.dtype for state in self.table.states]
            if has_master(self.dtype) and len(frames) == len(dtypes) - 1:
                del dtypes[-1]  # a file from a version without master weights
        arrays = rows_in(self.title, len(ids), self.width, frames, dtypes)
        values = arrays.pop(0) if has_values else None
        self.table.merge(ids, values, arrays if has_states else None)

    def end(self, num_updates: int, fields: Sequence[Any]) -> None:
        if fields:
            raise ProtocolError(f"expected no fields for the {self.title}, got {fields}")
        if self.arriving is None:
            raise not_loading(self.title)
        if self.arriving.has_states and num_updates >= 0:
            self.table.count = num_updates
        self.arriving = None

    # -- a new standby -----------------------------------------------------------------

    def copy(self) -> tuple[list[Any], list[np.ndarray[Any, Any]]] | None:
        """Return all of it for ``take_copy``: numbers, and arrays that are copies.

        None if its rows are being loaded.
        """
        if self.arriving is not None:
            return None
        self.table.set_optimizer(self.store.optimizer)
        ids = self.table.ids().copy()
        states = self.table.read_states(ids)
        arrays = [ids, self.table.read(ids), *states]
        fields = [self.table.count, len(states), self._before is not None]
        if self._before is not None:
            has_all, *before = self._before.copy()
            fields.append(has_all)
            arrays += before
        return fields, arrays

    def take_copy(self, fields: Sequence[Any], frames: Sequence[Any]) -> None:
        """Become the part that ``copy`` has described."""
        count, num_states, has_before, *has_all = fields
        table, dtype = self.table, self.dtype
        table.begin_afresh()
        table.set_optimizer(self.store.optimizer)
        ids = longs(frames[0])
        dtypes = [dtype, *(state.dtype for state in table.states)] if num_states else [dtype]
        values, *states = rows_in(
            self.title, len(ids), self.width, frames[1 : 2 + num_states], dtypes
        )
        table.merge(ids, values, states if num_states else None)
        table.count = count
        self.arriving = None
        self._before = None
        if has_before:
            before, rows, absent = frames[2 + num_states :]
            (kept,) = rows_in(self.title, len(longs(before)), self.width, [rows], [dtype])
            self._before = RowsBefore.of(table, has_all[0], longs(before), kept, longs(absent))


# -- rows of parts of dense keys ----------------------------------------------------------


class TakenCut(NamedTuple):
    """A contribution to a part of a dense key: some of its rows."""

    cut: Cut
    rows: PartRows
    nbytes: int
    source: tuple[int, Piece] | None = None
    """The form and the bytes that it was made from."""


class WantedCut(NamedTuple):
    """A pull of some rows of a part of a dense key."""

    cut: Cut
    ids: Ids
    nbytes: int


def take_cut(part: Part, payload: RowPayload) -> TakenCut:
    """Check a contribution of rows to a part of a dense key, and return it."""
    cut = _cut_of(part, payload)
    if payload.kind is not RowPayloadKind.ROWS:
        raise ProtocolError("a contribution of rows to a dense key must have ids and values")
    dtype = part.entry.dtype
    if len(payload.values) != cut.elements(payload.ids) * dtype.itemsize:
        raise ProtocolError(
            f"the values of {payload.num_rows} rows have the wrong size: {len(payload.values)} "
            "bytes"
        )
    rows = PartRows(payload.ids, payload.values.view(dtype))
    return TakenCut(cut, rows, len(payload.values))


def take_cut_pull(part: Part, payload: RowPayload) -> WantedCut:
    """Check a pull of rows of a part of a dense key, and return it."""
    cut = _cut_of(part, payload)
    if payload.kind is not RowPayloadKind.WANTED or len(payload.values):
        raise ProtocolError("a pull of rows of a dense key must have their ids")
    return WantedCut(cut, payload.ids, cut.elements(payload.ids) * part.entry.dtype.itemsize)


def _cut_of(part: Part, payload: RowPayload) -> Cut:
    if not (0 <= payload.offset < payload.width) or not part.entry.num_elements:
        raise ProtocolError(
            "a row of a dense key must have at least one number and begin in its part"
        )
    cut = Cut(part.entry.num_elements, payload.width, payload.offset)
    check_ids(payload.ids, cut.num_rows)
    return cut


def _contributions(
    part: Part, payloads: Sequence[TakenCut | Piece]
) -> tuple[Cut, list[PartRows | Flat]]:
    cuts = {payload.cut for payload in payloads if isinstance(payload, TakenCut)}
    if len(cuts) != 1:
        raise ProtocolError(f"the workers disagree on the rows of {part.title}")
    dtype = part.entry.dtype
    return cuts.pop(), [
        each.rows if isinstance(each, TakenCut) else bytes_of(each).view(dtype) for each in payloads
    ]


def apply_cuts(part: Part, payloads: Sequence[TakenCut | Piece]) -> None:
    """Apply a round that has rows to a part of a dense key. Runs on the lane's thread."""
    arena = part.arena
    base = arena.store.optimizer  # read once: the I/O thread may set another one
    if base is None and arena.store.ranks is None:
        raise OptimizerNotSet(NO_OPTIMIZER)
    cut, contributions = _contributions(part, payloads)
    optimizer = None
    if base is not None:
        base.check_dtype(part.entry.dtype)
        optimizer = base.for_key(part.entry.key, part.entry.width)
    states = part.state(base)
    if arena.previous is not None:
        arena.previous[part.start : part.stop] = part.weight
    arena.changes += 1
    update_part(
        cut,
        part.weight,
        states,
        contributions,
        optimizer,
        part.count + 1,
        arena.workspace,
    )
    part.count += 1


def rows_of_cuts(
    part: Part, payloads: Sequence[TakenCut | Piece], allocate: Allocate, most_bytes: int
) -> tuple[int, Piece]:
    """Return the sum of a round that has rows, as its form and bytes.

    It has rows if all contributions have; otherwise all elements. On the lane's thread. Raises
    ``ProtocolError`` if the contributions contradict each other, and ``ValueMismatchError`` if the
    rows have more than ``most_bytes``.
    """
    cut, contributions = _contributions(part, payloads)
    total: Flat = np.empty(part.entry.num_elements, part.entry.dtype)
    update_part(cut, total, (), contributions, None, 1, part.arena.workspace)
    ids = [each.rows.ids for each in payloads if isinstance(each, TakenCut)]
    if len(ids) < len(payloads):
        return 0, Piece(total.view(np.uint8).data, 0, total.nbytes)
    found = np.unique(np.concatenate(ids))
    id_bytes = id_bytes_for(cut.num_rows)
    value_bytes = cut.elements(found) * total.itemsize
    nbytes = payload_bytes(len(found), id_bytes, value_bytes)
    check_fits(part.title, len(found), nbytes, most_bytes)
    memory = allocate(nbytes)
    head = RowPayloadKind.ROWS, len(found), cut.width, cut.skip
    values = write_payload(memory, *head, found, id_bytes)
    read_part(cut, total, found, values.view(total.dtype))
    return ROWS_FORM, Piece(memory.data, 0, len(memory))


def answer_cut(
    part: Part,
    wanted: WantedCut,
    allocate: Allocate,
    most_bytes: int,
    *,
    before_last: bool = False,
) -> Any:
    """Return a frame with the requested rows of a part of a dense key.

    With ``before_last``, they are those before the last round.

    Raises ``ValueMismatchError`` if it would have more than ``most_bytes``.
    """
    check_fits(part.title, len(wanted.ids), wanted.nbytes, most_bytes)
    memory = allocate(wanted.nbytes)
    out: Flat = memory.view(part.entry.dtype)
    weight = part.weight
    if before_last and part.arena.previous is not None:
        weight = part.arena.previous[part.start : part.stop]
    read_part(wanted.cut, weight, wanted.ids, out)
    return memory.data
