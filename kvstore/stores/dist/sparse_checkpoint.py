"""Row-sparse keys of a distributed store: initial rows, and rows in files.

What ``control_client.py`` does for dense keys, of which it is a part. Rows go to the servers, and
come from them, in messages of some MiB; in files they are sorted by id, whatever the number of
servers. Blocking waits are those of the caller. Read next: ``server/sparse.py``, which answers.

All rows of a distributed table on one worker, and in files: reading them from the servers.

Rows come sorted by id, merged from the servers' shares, a block at a time; of all rows at once
only ids, times and marks are there, 25 bytes each. Blocking waits are those of the caller. Read
next: ``checkpoint/tables.py`` for the format, ``server/tables.py``, which answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.arrays.keys import Key, width_of
from kvstore.checkpoint.tables import (
    Contents,
    FileRows,
    TableFile,
    checked_arrays,
    rows_of,
    write_export,
)
from kvstore.checkpoint.values import Content, SavedPiece
from kvstore.errors import CheckpointError
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import state_dtypes, state_names
from kvstore.protocol.requests import KeyEntry, RowPartEntry, StoreCall, pack, pack_row_part, unpack
from kvstore.sparse.array import RowSparseArray
from kvstore.sparse.ids import Ids
from kvstore.sparse.payload import RowPayloadKind, id_bytes_for, payload_bytes, write_payload
from kvstore.sparse.sums import Contribution, RowValues
from kvstore.stores.arguments_sparse import contribution_of
from kvstore.tables.ids import split
from kvstore.tables.lineage import Lineage, agreed, lines_to_plain
from kvstore.tables.settings import TableSettings, lineage_from_plain, lineage_to_plain
from pslite import Future
from pslite.errors import ProtocolError
from pslite.future import gather
from pslite.ids import Role, node_id
from pslite.node.customer import Reply

Reader = Callable[[Key, int, int], SavedPiece]
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
    """How many so far."""
    ids: Ids
    """All of them, sorted."""
    num_pieces: int
    """How many pieces ``read`` makes of them."""

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
        """How many rows travel in one message."""
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
        place = write_payload(
            memory, RowPayloadKind.ROWS, len(first.ids), width, 0, first.ids, id_bytes
        )
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

    def read(self, held: HeldRows, optimizer: Optimizer | None, wait: Wait) -> Iterator[SavedPiece]:
        """Values and states of rows, sorted by id, piece by piece."""
        entry = held.entry
        dtypes = [entry.spec.dtype, *state_dtypes(optimizer, entry.spec.dtype)]
        width = width_of(entry.spec.shape)
        step = self._step(entry)
        for start in range(0, max(len(held.ids), 1), step):
            ids = held.ids[start : start + step]
            arrays = self._read_rows(entry, ids, dtypes, wait)
            values, *states = [array.reshape(-1) for array in arrays]
            yield SavedPiece(entry.key, start * width, values, states, held.num_updates)

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
        raise ProtocolError("a server's list of rows does not continue")
    return count, are_more, ids


def _memory(rows: RowValues) -> Any:
    """The bytes of rows, copied if they do not lie in a row."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data


Flags = np.ndarray[Any, np.dtype[np.bool_]]
Frames = Sequence[Sequence[Any]]
"""For each server the frames of a message, by its rank."""

_BLOCK_BYTES = 16 << 20
_HEADER_BYTES = 4096


class AskEach(Protocol):
    """Asks every server something of its own."""

    def __call__(
        self, call: StoreCall, bodies: Sequence[bytes], frames: Sequence[Sequence[Any]] = ()
    ) -> Future[list[Reply]]: ...


class TableRows(NamedTuple):
    """All rows of a table, sorted by id, but for their numbers."""

    ids: Ids
    stamps: Ids
    """When they were touched (``tables/eviction.py``); each server counts by itself."""
    changed: Ids
    """Since which mark they have not changed."""


class TableCounters(NamedTuple):
    """What the shares of a table count alike."""

    next_mark: int
    time: int
    """Pushes."""
    num_updates: int
    lineage: Lineage


class TableFiles:
    """Reads one table from the servers."""

    def __init__(
        self,
        ask_each: AskEach,
        wait: Callable[[Future[Any]], Any],
        parts: Sequence[int],
        most_bytes: int,
        title: str,
    ) -> None:
        """``parts`` are those of the servers by rank; a message has at most ``most_bytes``."""
        self._ask_each = ask_each
        self._wait = wait
        self._parts = parts
        self._most_bytes = most_bytes
        self._title = title

    def held(self, most: int | None = None) -> TableRows:
        """The rows that there are, in messages of ``most`` rows or as many as fit."""
        most = max(self._most_bytes // 48, 1) if most is None else most
        found: list[list[Ids]] = [[np.empty(0, np.int64)] * 3]
        after: list[list[int]] = [[] for _ in self._parts]
        while True:
            pieces = self._held_above(after, most)
            found += pieces
            if all(len(ids) < most for ids, *_ in pieces):
                break
            after = [
                [int(ids[-1])] if len(ids) else before
                for (ids, *_), before in zip(pieces, after, strict=True)
            ]
        held = TableRows(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))
        order = np.argsort(held.ids)
        return TableRows(*(array[order] for array in held))

    def _held_above(self, after: Sequence[list[int]], most: int) -> list[list[Ids]]:
        bodies = [pack(part, last, most) for part, last in zip(self._parts, after, strict=True)]
        found = []
        for reply in self._wait(self._ask_each(StoreCall.HELD_OF_TABLE, bodies)):
            sizes = {memoryview(frame).nbytes for frame in reply.frames}
            if len(reply.frames) != 3 or len(sizes) != 1 or max(sizes) % 8:
                raise ProtocolError(f"{self._title}: a server's list of rows is malformed")
            arrays = [np.frombuffer(frame, "<i8") for frame in reply.frames]
            found.append([array.astype(np.int64, copy=False) for array in arrays])
        return found

    def read(
        self, ids: Ids, dtypes: Sequence[np.dtype[Any]], width: int
    ) -> tuple[Flags, list[RowValues]]:
        """Which of these different ids have rows, and arrays of rows: values, then states.

        ``dtypes`` are those of the arrays; more than one for states, too. Other rows are not set.
        """
        places = [share.at for share in split(ids, len(self._parts))]
        bodies = [pack(part, len(dtypes) > 1) for part in self._parts]
        frames = [[ids[mine].astype("<i8").data] for mine in places]
        arrays: list[RowValues] = [np.empty((len(ids), width), dtype) for dtype in dtypes]
        is_there = np.zeros(len(ids), np.bool_)
        replies = self._wait(self._ask_each(StoreCall.READ_TABLE, bodies, frames))
        for mine, reply in zip(places, replies, strict=True):
            flags, *copies = (np.frombuffer(frame, np.uint8) for frame in reply.frames)
            if len(flags) != len(mine) or len(copies) != len(arrays):
                raise ProtocolError(f"{self._title}: a server's copy of rows is malformed")
            held = mine[flags != 0]
            is_there[held] = True
            for array, copy in zip(arrays, copies, strict=True):
                if len(copy) != len(held) * width * array.itemsize:
                    raise ProtocolError(f"{self._title}: a server's copy of rows is malformed")
                array[held] = copy.view(array.dtype).reshape(len(held), width)
        return is_there, arrays

    def numbers(self) -> TableCounters:
        """What all servers count alike, and the lineage that they agree on."""
        found = [unpack(reply.body, int, int, int, list) for reply in self._mark(0, [])]
        next_mark, time, count = (max(row[column] for row in found) for column in range(3))
        return TableCounters(
            next_mark, time, count, agreed([lineage_from_plain(row[3]) for row in found])
        )

    def _mark(self, mark: int, lineage: list[Any]) -> list[Reply]:
        bodies = [pack(part, mark, lineage) for part in self._parts]
        replies: list[Reply] = self._wait(self._ask_each(StoreCall.MARK_TABLE, bodies))
        return replies

    def write(
        self, path: Any, settings: TableSettings, optimizer: Optimizer | None, since: int | None
    ) -> None:
        """Write an export, with states where there is an ``optimizer``, and make a new mark.

        Nothing may change meanwhile; raises ``CheckpointError`` where rows have gone.
        """
        mark, time, count, lineage = self.numbers()
        self._mark(mark, lineage_to_plain(lineage))
        held = self.held()
        has_changed = np.ones(len(held.ids), np.bool_) if since is None else held.changed > since
        ids = held.ids[has_changed]
        dtypes = [settings.dtype]
        if optimizer is not None:
            num_states = len(state_names(optimizer, settings.dtype))
            dtypes += [accumulation_dtype(settings.dtype)] * num_states

        def read(start: int, stop: int) -> Sequence[RowValues]:
            is_there, arrays = self.read(ids[start:stop], dtypes, settings.dim)
            if not is_there.all():
                raise CheckpointError(
                    f"{path} was not written: rows of {self._title} were evicted meanwhile; "
                    "let no thread pull or push during an export"
                )
            return arrays

        block_rows = self._block_rows(settings.dim * sum(dtype.itemsize for dtype in dtypes))
        numbers = (since, mark, time, count, lineage.until(mark))
        found = Contents(settings, optimizer, held.ids, held.stamps, has_changed, *numbers)
        write_export(path, found, read, block_rows)

    def _block_rows(self, row_bytes: int) -> int:
        return max(min(_BLOCK_BYTES, self._most_bytes // 2) // (row_bytes + 16), 1)

    def load(self, path: Any, settings: TableSettings, optimizer: Optimizer | None) -> None:
        """Have the servers take over an export, each what falls to it.

        Raises ``CheckpointError``: before anything is sent, for a file that does not fit; a disk
        that fails in the middle leaves the table empty.
        """
        with TableFile(path) as file:
            arrays = checked_arrays(file, settings, optimizer, self.numbers().lineage.at)
            states_bytes = (len(arrays) - 1) * accumulation_dtype(settings.dtype).itemsize
            self._check_fits("a row of it", settings.dim * (settings.dtype.itemsize + states_bytes))
            frames = self._frames_of(rows_of(file))
            try:
                self._load(file, arrays, frames)
            except BaseException:
                nothing = self._frames_of(FileRows(*[np.empty(0, np.int64)] * 4))
                self._begin_loading(nothing, 0, is_delta=False)
                raise

    def _load(self, file: TableFile, arrays: Sequence[str], frames: Frames) -> None:
        self._begin_loading(frames, file.mark, is_delta=file.is_delta)
        step = self._block_rows(8 * file.spec.shape[1] * len(arrays))
        for start in range(0, len(file.ids), step):
            stop = min(start + step, len(file.ids))
            rows = [file.rows(array, start, stop) for array in arrays]
            columns = [file.ids[start:stop], file.stamps[start:stop], *rows]
            frames = [
                [_memory_of_rows(column[share.at]) for column in columns]
                for share in split(columns[0], len(self._parts))
            ]
            bodies = [pack(part) for part in self._parts]
            self._wait(self._ask_each(StoreCall.LOAD_ROWS, bodies, frames))
        count = file.count_of_updates
        ends = [file.time, -1 if count is None else count, lines_to_plain(file.lines)]
        bodies = [pack(part, *ends) for part in self._parts]
        self._wait(self._ask_each(StoreCall.END_LOADING, bodies))

    def _frames_of(self, rows: FileRows) -> Frames:
        """For each server the rows of a file: it chooses among them, so it has to know all of
        them, 16 bytes each. Raises ``CheckpointError`` for more than a message holds."""
        changed, kept = (split(ids, len(self._parts)) for ids in (rows.ids, rows.kept))
        frames = [
            [
                *(_memory_of_rows(array[mine.at]) for array in (rows.ids, rows.stamps)),
                *(_memory_of_rows(array[others.at]) for array in (rows.kept, rows.kept_stamps)),
            ]
            for mine, others in zip(changed, kept, strict=True)
        ]
        most = max(sum(frame.nbytes for frame in row) for row in frames)
        self._check_fits("the ids for one server", most)
        return frames

    def _check_fits(self, what: str, nbytes: int) -> None:
        if nbytes > self._most_bytes - _HEADER_BYTES:
            raise CheckpointError(
                f"the file does not fit {self._title}: {what}: {nbytes} bytes in a message, "
                f"of which PS_MAX_MESSAGE_BYTES allows {self._most_bytes}: use more servers, or "
                "raise that on all nodes"
            )

    def _begin_loading(self, frames: Frames, mark: int, *, is_delta: bool) -> None:
        bodies = [pack(part, is_delta, mark) for part in self._parts]
        self._wait(self._ask_each(StoreCall.BEGIN_LOADING, bodies, frames))


def _memory_of_rows(rows: np.ndarray[Any, Any]) -> Any:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
