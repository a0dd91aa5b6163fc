"""Row-sparse keys of a distributed store: their first rows, and their rows in files.

What ``servers.py`` does for dense keys, of which it is a part. Rows go to the servers, and come
from them, in messages of some MiB; in files they are sorted by id, whatever the number of
servers. Blocking waits are those of the caller. Read next: ``row_stores.py``, which answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvstore.keys import Key
from kvstore.optimizer.base import Optimizer
from kvstore.protocol import KeyEntry, RowPartEntry, StoreCall, pack, pack_row_part, unpack
from kvstore.row_calls import contribution_of
from kvstore.saving import Content, Piece, state_dtypes
from kvstore.sparse.array import RowSparseArray, width_of
from kvstore.sparse.ids import Ids
from kvstore.sparse.payload import Kind, id_bytes_for, payload_bytes, write_payload
from kvstore.sparse.sums import Contribution, RowValues
from pslite import Future
from pslite.customer import Reply
from pslite.errors import ProtocolError
from pslite.future import gather
from pslite.ids import Role, node_id

Reader = Callable[[Key, int, int], Piece]
Wait = Callable[[Future[Any]], Any]


class Ask(Protocol):
    """Asks one server."""

    def __call__(
        self, server: int, call: StoreCall, body: bytes, frames: Sequence[Any]
    ) -> Future[Reply]: ...


class HeldRows(NamedTuple):
    """The rows of a key that are on the servers."""

    entry: KeyEntry
    parts: list[Ids]
    """The ids of each part's rows, sorted."""
    num_updates: int
    """So many so far."""
    ids: Ids
    """All of them, sorted."""
    num_pieces: int
    """So many pieces ``read`` makes of them."""

    @property
    def content(self) -> Content:
        """What files will have of the key."""
        return Content(self.entry.spec, self.num_pieces, self.ids)


class RowFiles:
    """Moves rows between one worker and the servers, outside of rounds."""

    def __init__(self, ask: Ask, piece_bytes: int) -> None:
        """Messages have about ``piece_bytes``."""
        self._ask = ask
        self._piece_bytes = piece_bytes

    def _ask_part(
        self, entry: KeyEntry, index: int, call: StoreCall, body: bytes, frames: Sequence[Any]
    ) -> Future[Reply]:
        return self._ask(node_id(Role.SERVER, entry.servers[index]), call, body, frames)

    def _step(self, entry: KeyEntry) -> int:
        """So many rows travel in one message."""
        row_bytes = width_of(entry.spec.shape) * max(entry.spec.dtype.itemsize, 4)
        return max(self._piece_bytes // max(row_bytes, 8), 1)

    # -- init --------------------------------------------------------------------------

    def create(
        self, number: int, synchronous: bool, entry: KeyEntry, value: RowSparseArray
    ) -> list[Future[Any]]:
        """Make the key's parts, with these rows."""
        ids, rows = contribution_of(value)
        shares = entry.stripes.split(ids)
        made = []
        for index, share in enumerate(shares):
            # An array of its own for each server: they are sent from there.
            mine = Contribution(share.ids, np.ascontiguousarray(rows[share.at]))
            made.append(self._create_part(number, synchronous, entry, index, mine))
        return made

    def _create_part(
        self, number: int, synchronous: bool, entry: KeyEntry, index: int, rows: Contribution
    ) -> Future[Any]:
        spec, num_rows = entry.spec, entry.stripes.rows_of(index)
        width = width_of(spec.shape)
        part = RowPartEntry(
            entry.parts[index], entry.key, len(entry.servers) == 1, num_rows, width, spec.dtype
        )
        step = self._step(entry)
        first = Contribution(rows.ids[:step], rows.values[:step])
        id_bytes = id_bytes_for(num_rows)
        memory = np.empty(payload_bytes(len(first.ids), id_bytes, first.values.nbytes), np.uint8)
        place = write_payload(memory, Kind.ROWS, len(first.ids), width, 0, first.ids, id_bytes)
        place.view(spec.dtype).reshape(first.values.shape)[...] = first.values
        is_full = len(rows.ids) == num_rows
        body = pack(number, synchronous, is_full, pack_row_part(part))
        made = self._ask_part(entry, index, StoreCall.INIT_ROWS, body, [memory.data])

        def more(start: int) -> Callable[[Any], Future[Any]]:
            def ask(_: Any) -> Future[Any]:
                some = slice(start, start + step)
                body = pack(entry.parts[index], False, 0, True)
                frames = [rows.ids[some].astype("<i8").data, _memory(rows.values[some])]
                return self._ask_part(entry, index, StoreCall.WRITE_ROWS, body, frames)

            return ask

        for start in range(step, len(rows.ids), step):
            made = made.then(more(start))
        return made

    # -- saving ------------------------------------------------------------------------

    def held(self, entry: KeyEntry, wait: Wait) -> HeldRows:
        """Which rows there are."""
        pages: list[list[Ids]] = [[] for _ in entry.parts]
        counts = [0] * len(entry.parts)
        #: Part's index -> the first row that is not known yet.
        left = dict.fromkeys(range(len(entry.parts)), 0)
        while left:
            asked = [self._ask_held(entry, index, first) for index, first in left.items()]
            for index, reply in zip(list(left), wait(gather(asked)), strict=True):
                counts[index], are_more, ids = _held_in(reply, left[index])
                pages[index].append(ids)
                if are_more:
                    left[index] = int(ids[-1]) + 1
                else:
                    del left[index]
        found = [
            entry.stripes.ids_of(index, np.concatenate(ids)) for index, ids in enumerate(pages)
        ]
        ordered = np.sort(np.concatenate(found), kind="stable")
        num_pieces = max(-(-len(ordered) // self._step(entry)), 1)
        return HeldRows(entry, found, max(counts), ordered, num_pieces)

    def _ask_held(self, entry: KeyEntry, index: int, first: int) -> Future[Reply]:
        most = max(self._piece_bytes // 8, 1)
        body = pack(entry.parts[index], first, most)
        return self._ask_part(entry, index, StoreCall.HELD_ROWS, body, ())

    def read(self, held: HeldRows, optimizer: Optimizer | None, wait: Wait) -> Iterator[Piece]:
        """Values and states of rows, sorted by id, piece by piece."""
        entry = held.entry
        dtypes = [entry.spec.dtype, *state_dtypes(optimizer, entry.spec.dtype)]
        width = width_of(entry.spec.shape)
        step = self._step(entry)
        for start in range(0, max(len(held.ids), 1), step):
            ids = held.ids[start : start + step]
            arrays = self._read_rows(entry, ids, dtypes, wait)
            values, *states = [array.reshape(-1) for array in arrays]
            yield Piece(entry.key, start * width, values, states, held.num_updates)

    def _read_rows(
        self, entry: KeyEntry, ids: Ids, dtypes: Sequence[np.dtype[Any]], wait: Wait
    ) -> list[RowValues]:
        """Arrays of these rows that are there: values, then states."""
        width = width_of(entry.spec.shape)
        arrays: list[RowValues] = [np.empty((len(ids), width), dtype) for dtype in dtypes]
        shares = entry.stripes.split(ids)
        asked = [
            self._ask_part(
                entry,
                index,
                StoreCall.READ_ROWS,
                pack(entry.parts[index]),
                [share.ids.astype("<i8").data],
            )
            for index, share in enumerate(shares)
        ]
        for share, reply in zip(shares, wait(gather(asked)), strict=True):
            sizes = [len(share.ids) * width * dtype.itemsize for dtype in dtypes]
            if [memoryview(frame).nbytes for frame in reply.frames] != sizes:
                raise ProtocolError("a server's copy of rows and states is malformed")
            for array, frame in zip(arrays, reply.frames, strict=True):
                found = np.frombuffer(frame, np.uint8).view(array.dtype)
                array[share.at] = found.reshape(len(share.ids), width)
        return arrays

    # -- loading -----------------------------------------------------------------------

    def write(self, entry: KeyEntry, ids: Ids, read: Reader, wait: Wait) -> None:
        """Set rows, sorted by id, to what ``read`` gives for their elements in the files."""
        width, step = width_of(entry.spec.shape), self._step(entry)
        for start in range(0, max(len(ids), 1), step):
            some = ids[start : start + step]
            piece = read(entry.key, start * width, (start + len(some)) * width)
            flat = piece.states if piece.values is None else [piece.values, *piece.states]
            arrays = [np.asarray(array).reshape(len(some), width) for array in flat]
            has_values = piece.values is not None
            asked = []
            for index, share in enumerate(entry.stripes.split(some)):
                body = pack(entry.parts[index], start == 0, piece.num_updates, has_values)
                frames = [share.ids.astype("<i8").data]
                frames += [_memory(array[share.at]) for array in arrays]
                asked.append(self._ask_part(entry, index, StoreCall.WRITE_ROWS, body, frames))
            wait(gather(asked))


def _held_in(reply: Reply, first: int) -> tuple[int, bool, Ids]:
    """A part's number of updates, whether it has more rows behind these, and their ids."""
    count, are_more = unpack(reply.body, int, bool)
    if len(reply.frames) != 1 or memoryview(reply.frames[0]).nbytes % 8:
        raise ProtocolError("a server's list of rows is malformed")
    ids: Ids = np.frombuffer(reply.frames[0], "<i8").astype(np.int64, copy=False)
    if (are_more and not len(ids)) or (len(ids) and int(ids[0]) < first):
        raise ProtocolError("a server's list of rows does not go on")
    return count, are_more, ids


def _memory(rows: RowValues) -> Any:
    """The bytes of rows, copied if they do not lie in a row."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
