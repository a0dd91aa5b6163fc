"""Serve row-sparse keys, and rows of dense keys, as parts of the data plane.

The plane (``pslite/plane``) hands over payloads as they arrive (``taken``), complete rounds of them
(``apply``), and pulls that are due (``answer``). Rounds run on the pool thread of a part's lane,
the rest on the I/O thread, never at the same time for one part, so there are no locks. Requests
make, save and load parts; they run on the I/O thread before the part is known to others, and on its
lane later. What a worker sends is checked on arrival, so that a malformed payload is an error of
its sender alone. Read next: ``sparse/payload.py`` for the bytes, ``sparse/table.py`` for what is
stored, ``stores/dist/sparse_checkpoint.py`` for the worker that asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.cpu.sums import Flat, Workspace
from kvstore.arrays.keys import Key, KeySpec
from kvstore.errors import OptimizerNotSet, ValueMismatchError
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import has_master, state_dtypes
from kvstore.protocol.requests import RowPartEntry, StoreCall, pack, unpack, unpack_row_part
from kvstore.server.lanes import Lanes
from kvstore.server.memory import Part, StoreState
from kvstore.server.tables import TablePart
from kvstore.sparse.ids import Ids, is_increasing
from kvstore.sparse.partition import Cut, PartRows, read_part, update_part
from kvstore.sparse.payload import (
    Bytes,
    RowPayload,
    RowPayloadKind,
    id_bytes_for,
    payload_bytes,
    read_payload,
    write_payload,
)
from kvstore.sparse.sums import Contribution, RowValues
from kvstore.sparse.table import RowTable
from pslite import Incoming
from pslite.errors import ProtocolError, UsageError
from pslite.plane import NO_SIZE, Job, Outcome, Piece, ServerPlane

Allocate = Callable[[int], Bytes]
"""Gives memory to send from."""


class TakenRows(NamedTuple):
    """A contribution to a row-sparse part."""

    rows: Contribution
    nbytes: int


class TakenCut(NamedTuple):
    """A contribution to a part of a dense key: some of its rows."""

    cut: Cut
    rows: PartRows
    nbytes: int


class WantedRows(NamedTuple):
    """A pull of some rows; of a dense key's part as ``cut`` has them."""

    ids: Ids
    nbytes: int
    cut: Cut | None = None


class WantedHeld(NamedTuple):
    """A pull of the rows that are there, of those from ``first`` to ``stop``."""

    first: int
    stop: int
    nbytes: int = 0


class RowPart:
    """A server's share of the rows of one row-sparse key."""

    def __init__(self, store: StoreState, lane: int, entry: RowPartEntry, *, is_full: bool) -> None:
        """``is_full`` says that all of its rows are about to come."""
        self.store = store
        self.lane = lane
        self.entry = entry
        self.table = RowTable(KeySpec((entry.num_rows, entry.width), entry.dtype), is_whole=is_full)
        self.count = 0
        """Updates by the present optimizer."""
        self._optimizer: Optimizer | None = None
        self._workspace = Workspace()

    def use(self, optimizer: Optimizer | None) -> None:
        """Take states over for ``optimizer`` from the one before. On the lane's thread."""
        if optimizer is None or optimizer is self._optimizer:
            return
        if self.table.states is not None:
            states, self.count = self.table.take_over(self._optimizer, optimizer, self.count)
            self.table.keep_states(states)
        self._optimizer = optimizer

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """One round. On the lane's thread."""
        base = self.store.optimizer  # read once: the I/O thread may set another one
        self.use(base)
        if base is None:
            if self.store.ranks is None:
                raise OptimizerNotSet(NO_OPTIMIZER)
            self.table.replace(contributions, self._workspace)
            return
        base.check_dtype(self.entry.dtype)
        optimizer = base.for_key(self.entry.key, self.entry.width)
        self.table.update(contributions, optimizer, self.count + 1, self._workspace)
        self.count += 1

    def restored(
        self,
        ids: Ids,
        values: RowValues | None,
        states: Sequence[RowValues],
        optimizer: Optimizer | None,
        count: int,
    ) -> None:
        """Take over rows from a file; with an optimizer, also what that keeps for them."""
        keeper = optimizer
        if optimizer is None and self.table.states is not None:
            keeper = self._optimizer  # new rows have states of their own, too
        self.table.merge(ids, values, states, keeper)
        if optimizer is not None:
            self._optimizer, self.count = optimizer, count

    # -- what workers send -------------------------------------------------------------

    def take(self, payload: RowPayload) -> TakenRows:
        """A contribution, checked."""
        entry, count = self.entry, payload.num_rows
        ids = payload.ids
        if payload.kind is RowPayloadKind.ALL:
            if count != entry.num_rows:
                raise ProtocolError(f"all rows of a part are {entry.num_rows}, not {count}")
        elif payload.kind is RowPayloadKind.ROWS:
            _check_ids(ids, entry.num_rows)
        else:
            raise ProtocolError("a contribution of rows has no values")
        if payload.width != entry.width or payload.offset:
            raise ProtocolError(f"rows of {payload.width} numbers for a key with {entry.width}")
        if len(payload.values) != count * entry.row_bytes:
            raise ProtocolError(f"{len(payload.values)} bytes are not the values of {count} rows")
        if payload.kind is RowPayloadKind.ALL:
            ids = np.arange(count)
        values = payload.values.view(entry.dtype).reshape(count, entry.width)
        return TakenRows(Contribution(ids, values), len(payload.values))

    def take_pull(self, payload: RowPayload) -> WantedRows | WantedHeld:
        """What a pull wants, checked."""
        if len(payload.values):
            raise ProtocolError("a pull of rows has values")
        if payload.kind is RowPayloadKind.WANTED:
            _check_ids(payload.ids, self.entry.num_rows)
            return WantedRows(payload.ids, payload.num_rows * self.entry.row_bytes)
        if payload.kind is RowPayloadKind.HELD:
            stop = payload.offset + payload.num_rows
            if stop > self.entry.num_rows:
                raise ProtocolError(f"a part with {self.entry.num_rows} rows has no row {stop - 1}")
            return WantedHeld(payload.offset, stop)
        raise ProtocolError("a pull of rows names no rows")

    def answer(self, wanted: Any, allocate: Allocate, most_bytes: int) -> Any:
        """A frame with the values that are wanted.

        Raises ``ValueMismatchError`` where it would have more than ``most_bytes``.
        """
        if isinstance(wanted, WantedHeld):
            return self._held(wanted, allocate, most_bytes)
        _check_fits(self.entry.key, len(wanted.ids), wanted.nbytes, most_bytes)
        memory = allocate(wanted.nbytes)
        values = memory.view(self.entry.dtype).reshape(len(wanted.ids), self.entry.width)
        self.table.read(wanted.ids, values)
        return memory.data

    def _held(self, wanted: WantedHeld, allocate: Allocate, most_bytes: int) -> Any:
        ids = self.table.ids()
        # Not the stop of all rows, which may be 2**63.
        high = len(ids) if wanted.stop == self.entry.num_rows else np.searchsorted(ids, wanted.stop)
        ids = ids[np.searchsorted(ids, wanted.first) : high]
        is_all = len(ids) == self.entry.num_rows
        id_bytes = 0 if is_all else id_bytes_for(self.entry.num_rows)
        value_bytes = len(ids) * self.entry.row_bytes
        nbytes = payload_bytes(len(ids), id_bytes, value_bytes)
        _check_fits(self.entry.key, len(ids), nbytes, most_bytes)
        memory = allocate(nbytes)
        kind, named = (RowPayloadKind.ALL, ids[:0]) if is_all else (RowPayloadKind.ROWS, ids)
        place = write_payload(memory, kind, len(ids), self.entry.width, 0, named, id_bytes)
        values = place.view(self.entry.dtype).reshape(len(ids), self.entry.width)
        self.table.read(ids, values)
        return memory.data


def _check_fits(key: Key, num_rows: int, nbytes: int, most_bytes: int) -> None:
    if nbytes > most_bytes:
        raise ValueMismatchError(
            f"key {key!r}: {num_rows} rows of a part are {nbytes} bytes in a message, of which "
            f"PS_MAX_MESSAGE_BYTES allows {most_bytes}: pull them by row_sparse_pull, fewer at "
            "once, or raise that on all nodes"
        )


NO_OPTIMIZER = "dist_async needs an optimizer: call set_optimizer before push"


# -- rows of parts of dense keys ----------------------------------------------------------


def take_cut(part: Part, payload: RowPayload) -> TakenCut:
    """Some rows of a dense key's part as a contribution, checked."""
    cut = _cut_of(part, payload)
    if payload.kind is not RowPayloadKind.ROWS:
        raise ProtocolError("a contribution of rows to a dense key has ids and values")
    dtype = part.entry.dtype
    if len(payload.values) != cut.elements(payload.ids) * dtype.itemsize:
        raise ProtocolError(
            f"{len(payload.values)} bytes are not the values of {payload.num_rows} rows"
        )
    rows = PartRows(payload.ids, payload.values.view(dtype))
    return TakenCut(cut, rows, len(payload.values))


def take_cut_pull(part: Part, payload: RowPayload) -> WantedRows:
    """A pull of some rows of a dense key's part, checked."""
    cut = _cut_of(part, payload)
    if payload.kind is not RowPayloadKind.WANTED or len(payload.values):
        raise ProtocolError("a pull of rows of a dense key has their ids")
    nbytes = cut.elements(payload.ids) * part.entry.dtype.itemsize
    return WantedRows(payload.ids, nbytes, cut)


def _cut_of(part: Part, payload: RowPayload) -> Cut:
    if not (0 <= payload.offset < payload.width) or not part.entry.num_elements:
        raise ProtocolError("a row of a dense key has one number at least, and begins in its part")
    cut = Cut(part.entry.num_elements, payload.width, payload.offset)
    _check_ids(payload.ids, cut.num_rows)
    return cut


def apply_cuts(part: Part, payloads: Sequence[TakenCut | Piece]) -> None:
    """One round of a dense key's part to which some workers give rows. On the lane's thread."""
    arena = part.arena
    base = arena.store.optimizer  # read once: the I/O thread may set another one
    if base is None and arena.store.ranks is None:
        raise OptimizerNotSet(NO_OPTIMIZER)
    cuts = {payload.cut for payload in payloads if isinstance(payload, TakenCut)}
    if len(cuts) != 1:
        raise ProtocolError(f"workers see the rows of key {part.entry.key!r} differently")
    dtype = part.entry.dtype
    contributions = [
        each.rows if isinstance(each, TakenCut) else bytes_of(each).view(dtype) for each in payloads
    ]
    optimizer = None
    if base is not None:
        base.check_dtype(dtype)
        optimizer = base.for_key(part.entry.key, part.entry.width)
    states = part.state(base)
    arena.changes += 1
    update_part(
        cuts.pop(),
        part.weight,
        states,
        contributions,
        optimizer,
        part.count + 1,
        arena.workspace,
    )
    part.count += 1


def answer_cut(part: Part, wanted: WantedRows, allocate: Allocate, most_bytes: int) -> Any:
    """A frame with the values that are wanted of a dense key's part.

    Raises ``ValueMismatchError`` where it would have more than ``most_bytes``.
    """
    _check_fits(part.entry.key, len(wanted.ids), wanted.nbytes, most_bytes)
    memory = allocate(wanted.nbytes)
    if wanted.cut is not None:
        out: Flat = memory.view(part.entry.dtype)
        read_part(wanted.cut, part.weight, wanted.ids, out)
    return memory.data


def taken(found: RowPart | TablePart | Part, piece: Piece, *, is_push: bool) -> Any:
    """A payload of rows for a part, checked and ready for its round or its answer."""
    payload = read_payload(bytes_of(piece))
    if isinstance(found, Part):
        return take_cut(found, payload) if is_push else take_cut_pull(found, payload)
    return found.take(payload) if is_push else found.take_pull(payload)


def bytes_of(piece: Piece) -> Bytes:
    """A piece as an array, which shares its memory."""
    return np.frombuffer(piece.frame, np.uint8)[piece.start : piece.stop]


class RowStores:
    """The row-sparse parts of one server."""

    def __init__(
        self,
        plane: ServerPlane,
        store_of: Callable[[int, bool], StoreState],
        next_lane: Callable[[], int],
        lanes: Lanes,
    ) -> None:
        self._plane = plane
        self._store_of = store_of
        self._next_lane = next_lane
        self._lanes = lanes
        self._parts: dict[int, RowPart] = {}
        self.calls: dict[int, Callable[[Incoming], None]] = {
            StoreCall.INIT_ROWS: self._init,
            StoreCall.HELD_ROWS: self._held,
            StoreCall.READ_ROWS: self._read,
            StoreCall.WRITE_ROWS: self._write,
        }

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[RowPart]:
        return iter(list(self._parts.values()))

    def get(self, number: int) -> RowPart | None:
        """A part, if it is there."""
        return self._parts.get(number)

    def remove(self, number: int) -> RowPart | None:
        """A part is gone; returns it, if it was there."""
        return self._parts.pop(number, None)

    def apply(self, job: Job, dense: Part | None) -> Outcome:
        """A round with rows of one part, which is ``dense`` or here. On the lane's thread."""
        part = self._parts.get(job.parts[0])
        try:
            if part is not None:
                part.apply([payload.rows for payload in job.batch.payloads])
            elif dense is not None:
                apply_cuts(dense, job.batch.payloads)
            else:  # deleted after its round was complete
                raise UsageError("the key was deleted")
        except BaseException as error:  # an optimizer may call sys.exit
            return [error]
        return None

    # -- requests ----------------------------------------------------------------------

    def _init(self, incoming: Incoming) -> None:
        """Create a part with the rows in the frame; more may follow by WRITE_ROWS."""
        number, synchronous, is_full, plain = unpack(incoming.body, int, bool, bool, list)
        entry = unpack_row_part(plain)
        store = self._store_of(number, synchronous)
        store.check_cuts([entry])
        # A rank that stands in for one that left half-way finds some parts there; they stay.
        if entry.part not in self._parts:
            part = RowPart(store, self._next_lane(), entry, is_full=is_full)
            if len(incoming.frames) != 1:
                raise ProtocolError("a row-sparse part comes with one frame")
            frame = memoryview(incoming.frames[0])
            rows = taken(part, Piece(frame, 0, frame.nbytes), is_push=True)
            if isinstance(rows, TakenRows):
                part.table.replace([rows.rows], Workspace())
            self._plane.open_part(entry.part, NO_SIZE, store.ranks, part.lane)
            self._parts[entry.part] = part
            store.has_part(entry)
        incoming.respond()

    def _held(self, incoming: Incoming) -> None:
        """The number of updates, and the ids of this many rows that are there, from one on.

        All at once may be more than a message can hold.
        """
        number, first, most = unpack(incoming.body, int, int, int)
        if first < 0 or most < 1:
            raise ProtocolError("a question for the rows of a part is malformed")
        found: list[tuple[int, bool, bytes]] = []

        def look(part: RowPart) -> None:
            ids = part.table.ids()
            start = int(np.searchsorted(ids, first))
            some = ids[start : start + most].astype("<i8").tobytes()
            found.append((part.count, start + most < len(ids), some))

        def answer() -> None:
            count, are_more, ids = found[0]
            incoming.respond(pack(count, are_more), [ids])

        self._lanes.run(incoming, [self._found(number)], look, answer)

    def _read(self, incoming: Incoming) -> None:
        """Values and states of rows that are there."""
        (number,) = unpack(incoming.body, int)
        part = self._found(number)
        ids = _ids_of(part, incoming.frames[:1])
        frames: list[bytes] = []

        def copy(part: RowPart) -> None:
            optimizer = part.store.optimizer
            part.use(optimizer)
            arrays = [part.table.read(ids), *part.table.read_states(ids, optimizer)]
            frames.extend(array.tobytes() for array in arrays)

        self._lanes.run(incoming, [part], copy, lambda: incoming.respond(b"", frames))

    def _write(self, incoming: Incoming) -> None:
        """Set rows to what ``_read`` gave; the first of several such requests forgets the others.

        Those that ``init`` did not have room for come without states.
        """
        number, begins, count, has_values = unpack(incoming.body, int, bool, int, bool)
        part = self._found(number)
        if count < 0:
            raise ProtocolError("a count of updates is malformed")
        ids = _ids_of(part, incoming.frames[:1])
        frames = incoming.frames[1:]

        def write(part: RowPart) -> None:
            optimizer = part.store.optimizer
            dtypes = [part.entry.dtype] * has_values
            has_states = begins or count > 0 or len(frames) > len(dtypes)
            if has_states:
                dtypes += state_dtypes(optimizer, part.entry.dtype)
                if has_master(part.entry.dtype) and len(frames) == len(dtypes) - 1:
                    del dtypes[-1]  # a file of before there were masters
            values, states = None, _arrays(part, ids, frames, dtypes)
            if has_values:
                values, *states = states
            if begins:
                part.table.begin_afresh(keeps_values=not has_values)
            part.restored(ids, values, states, optimizer if has_states else None, count)

        self._lanes.run(incoming, [part], write, incoming.respond)

    def _found(self, number: int) -> RowPart:
        part = self._parts.get(number)
        if part is None:
            raise UsageError(f"the row-sparse part {number} is not known to this server")
        return part


def _ids_of(part: RowPart, frames: Sequence[Any]) -> Ids:
    """The ids in a frame, checked."""
    if len(frames) != 1 or memoryview(frames[0]).nbytes % 8:
        raise ProtocolError("the ids of rows are malformed")
    ids: Ids = np.frombuffer(frames[0], "<i8").astype(np.int64, copy=False)
    _check_ids(ids, part.entry.num_rows)
    return ids


def _check_ids(ids: Ids, num_rows: int) -> None:
    """Raise ``ProtocolError`` unless ids are rising and below ``num_rows``."""
    if len(ids) and not (ids[0] >= 0 and ids[-1] < num_rows and is_increasing(ids)):
        raise ProtocolError(f"expected rising ids of a part with {num_rows} rows, got {ids}")


def _arrays(
    part: RowPart, ids: Ids, frames: Sequence[Any], dtypes: Sequence[np.dtype[Any]]
) -> list[Any]:
    """The frames as rows of these dtypes, one each."""
    shape = len(ids), part.entry.width
    sizes = [shape[0] * shape[1] * dtype.itemsize for dtype in dtypes]
    if [memoryview(frame).nbytes for frame in frames] != sizes:
        raise ValueMismatchError(
            f"the values and states for key {part.entry.key!r} do not fit: {len(frames)} arrays "
            f"came, {len(dtypes)} are there"
        )
    pairs = zip(frames, dtypes, strict=True)
    return [np.frombuffer(frame, np.uint8).view(dtype).reshape(shape) for frame, dtype in pairs]
