"""Move rows between workers and servers, as ``transfer.py`` moves whole values.

Rows are dealt out to the parts of a key (``sparse/partition.py``; of a dense key, cut as its parts
are: ``sparse/partition.py``), written once into memory that is sent, and land where the caller
wants them. Every push goes to all parts of a key, also where none of its rows are, since a round is
complete when every worker has contributed; a pull goes to the parts that have rows of it. Rounds,
order and delivery are the data plane's business. Calls may come from any thread; values are copied
out by the node's I/O thread. Nothing here waits. Read next: ``sparse.py``, which uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.keys import Key, width_of
from kvstore.errors import ValueMismatchError
from kvstore.protocol.requests import KeyEntry
from kvstore.sparse.ids import Ids
from kvstore.sparse.partition import Cut
from kvstore.sparse.payload import (
    HEADER_BYTES,
    ROWS_FORM,
    Bytes,
    RowPayloadKind,
    id_bytes_for,
    payload_bytes,
    read_payload,
    write_payload,
)
from kvstore.sparse.sums import Contribution, Picked, RowValues
from kvstore.stores.arguments import KeyList
from kvstore.stores.dist.batching import answer_for
from kvstore.stores.dist.in_flight import Operation
from kvstore.stores.dist.plan import MAX_PARTS
from kvstore.stores.dist.transfer import DenseExchange
from pslite import Postoffice
from pslite.errors import ProtocolError
from pslite.ids import Role, node_id
from pslite.plane import Piece, Sink, Transfer

#: Rows come in answers of at most this many bytes, and of PS_MAX_MESSAGE_BYTES.
ANSWER_BYTES = 16 << 20
#: A payload's header, and what fills up its ids.
_ROOM_BYTES = HEADER_BYTES + 16
#: The most that an id takes.
_ID_BYTES = 8
#: All rows of a part are asked for in at most this many pieces: few may be there of very many.
_MOST_RANGES = 64

_NO_IDS: Ids = np.empty(0, np.int64)

Send = Callable[[], Operation]
"""Sends what was prepared, once."""


class Item(NamedTuple):
    """What one part is told."""

    server: int
    """Node id."""
    part: int
    nbytes: int
    write: Callable[[Bytes], None]
    """Fills its payload, of ``nbytes``."""
    answer_bytes: int = 0
    """The size of the answer, as far as it is known."""
    receive: Callable[[Bytes], None] | None = None
    """Takes the answer of a pull."""


class RowDestination(NamedTuple):
    """Where the rows of one key arrive."""

    key: Key
    ids: Ids
    """Sorted, each once, in range."""
    rows: RowValues
    """Of the key's dtype, C-contiguous; a row for each id."""


class ReceivedRows:
    """The rows that a row-sparse key holds, as they arrive."""

    def __init__(self, entry: KeyEntry) -> None:
        self.entry = entry
        self._ids: list[Ids] = []
        self._rows: list[RowValues] = []

    def add(self, ids: Ids, rows: RowValues) -> None:
        """Some of them, which are kept."""
        self._ids.append(ids)
        self._rows.append(rows)

    @property
    def nbytes(self) -> int:
        """The size of what has arrived."""
        return sum(array.nbytes for array in (*self._ids, *self._rows))

    def sorted(self) -> Contribution:
        """All of them, once they are there."""
        if len(self._ids) == 1:
            return Contribution(self._ids[0], self._rows[0])
        spec = self.entry.spec
        empty: RowValues = np.empty((0, width_of(spec.shape)), spec.dtype)
        ids = np.concatenate([_NO_IDS, *self._ids])
        order = np.argsort(ids, kind="stable")
        return Contribution(ids[order], np.concatenate([empty, *self._rows])[order])


class RowExchange:
    """The pushes and pulls of rows of one store on one worker."""

    def __init__(self, node: Postoffice, exchange: DenseExchange) -> None:
        self._node = node
        self._exchange = exchange
        #: What a frame may have.
        self._most_bytes = node.config.max_message_bytes

    def prepare_push(self, keys: KeyList, values: Sequence[Picked], priority: int) -> Send:
        """Copy rows of each key, of its dtype; what this returns pushes them.

        Raises ``ValueMismatchError`` for more than a message can hold.
        """
        items: list[Item] = []
        for key, value in zip(keys.keys, values, strict=True):
            entry = self._exchange.entries[key]
            is_cut = not entry.is_row_sparse
            found = _cut(entry, value.whole()) if is_cut else _pushed_rows(entry, value)
            items += self._fitting(key, found)
        return self._prepare(keys, items, priority, None)

    def pull(self, keys: KeyList, landings: Sequence[RowDestination], priority: int) -> Operation:
        """Fill the landings, whose keys are these.

        Raises ``ValueMismatchError`` for more than a message can hold; then nothing is sent.
        """
        items: list[Item] = []
        for landing in landings:
            entry = self._exchange.entries[landing.key]
            found = (
                _wanted(entry, landing, self._most_bytes)
                if entry.is_row_sparse
                else _wanted_cut(entry, landing)
            )
            items += self._fitting(landing.key, found)
        return self.begin(keys, items, priority, {})

    def pull_held(
        self, keys: KeyList, priority: int, versions: dict[int, int]
    ) -> tuple[Operation, list[ReceivedRows]]:
        """All rows that each of these row-sparse keys holds; ``versions`` is filled."""
        held = [ReceivedRows(self._exchange.entries[key]) for key in keys.keys]
        items = [item for each in held for item in _wanted_held(each, self._most_bytes)]
        operation = self.begin(keys, items, priority, versions)

        def count(_: Any) -> None:  # a statistic: a lost count between threads does no harm
            self._exchange.counters["bytes_pulled"] += sum(each.nbytes for each in held)

        operation.future.on_done(count)
        return operation, held

    # -- inside ------------------------------------------------------------------------

    def _fitting(self, key: Key, items: Iterable[Item]) -> Iterator[Item]:
        """Items of which a message can hold each."""
        for item in items:
            if item.nbytes > self._most_bytes:
                raise ValueMismatchError(
                    f"key {key!r}: the rows for one server are {item.nbytes} bytes in a message, "
                    f"of which PS_MAX_MESSAGE_BYTES allows {self._most_bytes}: use fewer rows at "
                    "once, or more servers, or raise that on all nodes"
                )
            yield item

    def begin(
        self,
        keys: KeyList,
        items: Sequence[Item],
        priority: int,
        versions: dict[int, int] | None,
        form: int = ROWS_FORM,
    ) -> Operation:
        """Send what these items say, in this form; pulls note the versions of their parts."""
        return self._prepare(keys, items, priority, versions, form)()

    def _prepare(
        self,
        keys: KeyList,
        items: Sequence[Item],
        priority: int,
        versions: dict[int, int] | None,
        form: int = ROWS_FORM,
    ) -> Send:
        """``begin``, of which the last step is left."""
        groups = list(_grouped(items, self._exchange.message_bytes))
        operation = Operation(len(groups), lambda: answer_for(keys.keys))
        for group in groups:
            staging = self._node.buffer(sum(item.nbytes for item in group))
            start = 0
            for item in group:
                item.write(staging[start : start + item.nbytes])
                start += item.nbytes
            parts = tuple(item.part for item in group)
            sizes = tuple(item.nbytes for item in group)
            sink = None if versions is None else _sink(group, versions)
            operation.transfers.append(
                Transfer(
                    group[0].server,
                    parts,
                    sizes,
                    (staging.data,),
                    sink,
                    operation.part_done,
                    priority,
                    form,
                )
            )
        coding = self._exchange.coding

        def send() -> Operation:
            self._exchange.submit(
                keys,
                operation,
                coding,
                pushes=versions is None,
                pulls=versions is not None,
                nbytes=sum(item.nbytes + item.answer_bytes for item in items),
            )
            return operation

        return send


def _grouped(items: Sequence[Item], group_bytes: int) -> Iterator[list[Item]]:
    """Items for one server that travel together."""
    filling: dict[int, tuple[list[Item], int]] = {}
    for item in items:
        size = max(item.nbytes, item.answer_bytes)
        group, nbytes = filling.get(item.server, ([], 0))
        if group and (nbytes + size > group_bytes or len(group) >= MAX_PARTS):
            yield group
            group, nbytes = [], 0
        group.append(item)
        filling[item.server] = (group, nbytes + size)
    for group, _ in filling.values():
        yield group


def _sink(group: Sequence[Item], versions: dict[int, int]) -> Sink:
    def sink(indices: Sequence[int], pieces: Sequence[Piece], found: Sequence[int]) -> None:
        for index, piece, version in zip(indices, pieces, found, strict=True):
            item = group[index]
            if item.receive is not None:
                item.receive(np.frombuffer(piece.frame, np.uint8)[piece.start : piece.stop])
            versions[item.part] = version

    return sink


def _pushed_rows(entry: KeyEntry, value: Picked) -> Iterator[Item]:
    """Pushes rows to the parts of a row-sparse key."""
    spec, stripes = entry.spec, entry.stripes
    width = width_of(spec.shape)
    for index, share in enumerate(stripes.split(value.ids)):
        num_rows, count = stripes.rows_of(index), len(share.ids)
        is_all = count == num_rows and count > 0
        ids = share.ids[:0] if is_all else share.ids
        id_bytes = id_bytes_for(num_rows)
        nbytes = payload_bytes(len(ids), id_bytes, count * width * spec.dtype.itemsize)

        def write(
            memory: Bytes,
            kind: RowPayloadKind = RowPayloadKind.ALL if is_all else RowPayloadKind.ROWS,
            count: int = count,
            ids: Ids = ids,
            id_bytes: int = id_bytes,
            at: Any = share.at,
        ) -> None:
            place = write_payload(memory, kind, count, width, 0, ids, id_bytes)
            value.take(at, place.view(spec.dtype).reshape(count, width))

        server = node_id(Role.SERVER, entry.servers[index])
        yield Item(server, entry.parts[index], nbytes, write)


def _wanted(entry: KeyEntry, landing: RowDestination, most_bytes: int) -> Iterator[Item]:
    """Asks the parts of a row-sparse key for rows; no frame has more than ``most_bytes``."""
    stripes = entry.stripes
    row_bytes = landing.rows.shape[1] * landing.rows.itemsize
    most_rows = min(ANSWER_BYTES, most_bytes) // max(row_bytes, 1)
    most_rows = max(min(most_rows, (most_bytes - _ROOM_BYTES) // _ID_BYTES), 1)
    for index, share in enumerate(stripes.split(landing.ids)):
        at = share.at
        if isinstance(at, slice) and (len(share.ids) > most_rows):
            at = np.arange(len(landing.ids))[at]
        for start in range(0, len(share.ids), most_rows):
            ids = share.ids[start : start + most_rows]
            rows = at if isinstance(at, slice) else at[start : start + most_rows]
            yield _ask_for_rows(entry, index, ids, landing.rows, rows)


def _ask_for_rows(entry: KeyEntry, index: int, ids: Ids, into: RowValues, at: Any) -> Item:
    id_bytes = id_bytes_for(entry.stripes.rows_of(index))
    width = into.shape[1]
    answer_bytes = len(ids) * width * into.itemsize

    def write(memory: Bytes) -> None:
        write_payload(memory, RowPayloadKind.WANTED, len(ids), width, 0, ids, id_bytes)

    def receive(memory: Bytes) -> None:
        _check_answer(entry, len(memory), answer_bytes)
        into[at] = memory.view(into.dtype).reshape(len(ids), width)

    server = node_id(Role.SERVER, entry.servers[index])
    nbytes = payload_bytes(len(ids), id_bytes, 0)
    return Item(server, entry.parts[index], nbytes, write, answer_bytes, receive)


def _wanted_held(held: ReceivedRows, most_bytes: int) -> Iterator[Item]:
    """Asks the parts of a row-sparse key for all rows that are there.

    In answers of ``most_bytes`` at most, unless that were too many.
    """
    entry = held.entry
    width = width_of(entry.spec.shape)
    row_bytes = width * entry.spec.dtype.itemsize
    room = min(ANSWER_BYTES, most_bytes) - _ROOM_BYTES
    for index in range(len(entry.servers)):
        num_rows = entry.stripes.rows_of(index)
        step = max(room // (row_bytes + _ID_BYTES), -(-num_rows // _MOST_RANGES), 1)
        for start in range(0, max(num_rows, 1), step):
            count = min(step, num_rows - start)
            yield _ask_for_held(held, index, start, count)


def _ask_for_held(held: ReceivedRows, index: int, start: int, count: int) -> Item:
    entry = held.entry
    width, dtype = width_of(entry.spec.shape), entry.spec.dtype

    def write(memory: Bytes) -> None:
        write_payload(memory, RowPayloadKind.HELD, count, width, start, _NO_IDS, 0)

    def receive(memory: Bytes) -> None:
        payload = read_payload(memory)
        ids = np.arange(payload.num_rows) if payload.kind is RowPayloadKind.ALL else payload.ids
        _check_answer(entry, len(payload.values), len(ids) * width * dtype.itemsize)
        rows = payload.values.view(dtype).reshape(len(ids), width).copy()
        held.add(entry.stripes.ids_of(index, ids), rows)

    server = node_id(Role.SERVER, entry.servers[index])
    # The answer may be as large as that; what it is shows when it is there.
    return Item(server, entry.parts[index], payload_bytes(0, 0, 0), write, 0, receive)


# -- rows of dense keys -------------------------------------------------------------------


class _Cuts(NamedTuple):
    """A part of a dense key, and the rows of a list of ids that lie in it."""

    place: int
    """Which of the key's parts it is."""
    cut: Cut
    ids: Ids
    """As the part numbers them."""
    start: int
    stop: int
    """Where their numbers lie in the flat rows of the list."""


def _cuts(entry: KeyEntry, ids: Ids) -> Iterator[_Cuts]:
    width = width_of(entry.spec.shape)
    if not entry.spec.num_elements:
        return
    for index, (start, stop) in enumerate(entry.chunks()):
        first, skip = divmod(start, width)
        cut = Cut(stop - start, width, skip)
        low, high = map(int, np.searchsorted(ids, (first, first + cut.num_rows)))
        mine = ids[low:high] - first
        front, back = cut.trim(mine)
        yield _Cuts(index, cut, mine, low * width + front, high * width - back)


def _cut(entry: KeyEntry, value: Contribution) -> Iterator[Item]:
    """Pushes rows to the parts of a dense key."""
    dtype = entry.spec.dtype
    flat = np.ascontiguousarray(value.values, dtype).reshape(-1)
    for index, cut, ids, start, stop in _cuts(entry, value.ids):
        id_bytes = id_bytes_for(cut.num_rows)

        def write(
            memory: Bytes,
            cut: Cut = cut,
            ids: Ids = ids,
            some: slice = slice(start, stop),
            id_bytes: int = id_bytes,
        ) -> None:
            place = write_payload(
                memory, RowPayloadKind.ROWS, len(ids), cut.width, cut.skip, ids, id_bytes
            )
            place.view(dtype)[:] = flat[some]

        nbytes = payload_bytes(len(ids), id_bytes, (stop - start) * dtype.itemsize)
        server = node_id(Role.SERVER, entry.servers[index])
        yield Item(server, entry.parts[index], nbytes, write)


def _wanted_cut(entry: KeyEntry, landing: RowDestination) -> Iterator[Item]:
    """Asks the parts of a dense key for rows."""
    flat = landing.rows.reshape(-1)
    for index, cut, ids, start, stop in _cuts(entry, landing.ids):
        if not len(ids):
            continue
        id_bytes = id_bytes_for(cut.num_rows)
        answer_bytes = (stop - start) * flat.itemsize

        def write(memory: Bytes, cut: Cut = cut, ids: Ids = ids, id_bytes: int = id_bytes) -> None:
            write_payload(
                memory, RowPayloadKind.WANTED, len(ids), cut.width, cut.skip, ids, id_bytes
            )

        def receive(memory: Bytes, place: RowValues = flat[start:stop]) -> None:
            _check_answer(entry, len(memory), place.nbytes)
            place[:] = memory.view(place.dtype)

        server = node_id(Role.SERVER, entry.servers[index])
        nbytes = payload_bytes(len(ids), id_bytes, 0)
        yield Item(server, entry.parts[index], nbytes, write, answer_bytes, receive)


def _check_answer(entry: KeyEntry, found: int, wanted: int) -> None:
    if found != wanted:
        raise ProtocolError(f"key {entry.key!r}: expected {wanted} bytes of rows, got {found}")
