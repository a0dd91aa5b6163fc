"""Move rows between workers and servers, as ``transfer.py`` moves whole values.

Rows of a row-sparse key or of a growing table are split by part (``RowPlacement``); rows of a dense
key are cut at the borders of its parts (``sparse/partition.py``). Pushed rows are copied once, into
the memory that is sent; pulled rows are received directly into the caller's memory. A push goes to
all parts, even those without any of its rows, since a round is complete only when every worker has
contributed. A pull goes only to the parts that have its rows. The data plane handles rounds, order
and delivery. Calls may come from any thread; the node's I/O thread copies received values. Nothing
here waits. Read next: ``sparse.py`` and ``tables.py``, which use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.cpu.sums import Flat
from kvstore.arrays.keys import Key, width_of
from kvstore.errors import ValueMismatchError
from kvstore.protocol.requests import KeyEntry, bytes_of
from kvstore.sparse.ids import Ids
from kvstore.sparse.partition import Cut, Share
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
from kvstore.stores.dist.in_flight import Operation
from kvstore.stores.dist.plan import MAX_PARTS, Bucket
from kvstore.stores.dist.transfer import DenseExchange
from pslite import Postoffice
from pslite.errors import ProtocolError
from pslite.ids import Role, node_id
from pslite.plane import Piece, Sink, Transfer

#: An answer with rows has at most this many bytes, and at most PS_MAX_MESSAGE_BYTES.
ANSWER_BYTES = 16 << 20
#: The bytes of a payload's header, and of the padding of its ids.
_ROOM_BYTES = HEADER_BYTES + 16
#: The largest size of an id.
_ID_BYTES = 8
#: All rows of a part are requested in at most this many pieces: a part with a very large number of
#: possible rows may store only a few.
_MOST_RANGES = 64

_NO_IDS: Ids = np.empty(0, np.int64)

Send = Callable[[], Operation]
"""Sends a prepared call; it must be called only once."""


class RowTarget(NamedTuple):
    """A part with rows, and its server."""

    server: int
    """The server's node id."""
    part: int
    id_bytes: int
    """The size of an id in messages."""


class Item(NamedTuple):
    """The request to one part: the fields of a payload, and functions for the values."""

    target: RowTarget
    kind: RowPayloadKind
    num_rows: int
    width: int
    offset: int
    ids: Ids
    value_bytes: int = 0
    fill: Callable[[Bytes], None] | None = None
    """Writes the values of a push, ``value_bytes`` in all."""
    answer_bytes: int = 0
    """The size of the answer, or 0 if it is unknown."""
    receive: Callable[[Bytes], None] | None = None
    """Stores the answer of a pull."""

    @property
    def nbytes(self) -> int:
        """The size of the payload."""
        return payload_bytes(len(self.ids), self.target.id_bytes, self.value_bytes)

    def write(self, memory: Bytes) -> None:
        """Write the payload."""
        header = self.kind, self.num_rows, self.width, self.offset
        values = write_payload(memory, *header, self.ids, self.target.id_bytes)
        if self.fill is not None:
            self.fill(values)


class RowPlacement(NamedTuple):
    """The parts of a row-sparse key or table, with the rows and row ids of each."""

    title: str
    """The name of the key or table, for errors."""
    targets: Sequence[RowTarget]
    width: int
    """How many numbers a row has."""
    dtype: np.dtype[Any]
    split: Callable[[Ids], list[Share]]
    """Splits distinct ids by part; ids of a key must be sorted."""

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return self.width * self.dtype.itemsize


def placement_of(entry: KeyEntry) -> RowPlacement:
    """Return where the rows of a row-sparse key are."""
    id_bytes, spec = id_bytes_for(entry.stripes.rows_of(0)), entry.spec
    servers = [node_id(Role.SERVER, rank) for rank in entry.servers]
    targets = [RowTarget(*pair, id_bytes) for pair in zip(servers, entry.parts, strict=True)]
    title = f"key {entry.key!r}"
    return RowPlacement(title, targets, width_of(spec.shape), spec.dtype, entry.stripes.split)


class RowDestination(NamedTuple):
    """The destination of the rows of one key."""

    key: Key
    ids: Ids
    """Sorted, each once, in range."""
    rows: RowValues
    """A row for each id, in the key's dtype, C-contiguous."""


class ReceivedRows:
    """The stored rows of a row-sparse key, collected as they arrive."""

    def __init__(self, entry: KeyEntry) -> None:
        self.entry = entry
        self._ids: list[Ids] = []
        self._rows: list[RowValues] = []

    def add(self, ids: Ids, rows: RowValues) -> None:
        """Add some received rows; the arrays are kept, not copied."""
        self._ids.append(ids)
        self._rows.append(rows)

    @property
    def nbytes(self) -> int:
        """The size of the received rows and ids."""
        return sum(array.nbytes for array in (*self._ids, *self._rows))

    def sorted(self) -> Contribution:
        """Return all rows, sorted by id; call this when all have arrived."""
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
        #: The largest size of a frame.
        self._most_bytes = node.config.max_message_bytes

    def prepare_push(self, keys: Bucket, values: Sequence[Picked], priority: int) -> Send:
        """Copy each key's rows, in its dtype; return a function that pushes them.

        Raises ``ValueMismatchError`` if the rows of a part do not fit in a message.
        """
        items: list[Item] = []
        for key, value in zip(keys.keys, values, strict=True):
            entry = self._exchange.entries[key]
            is_cut = not entry.is_row_sparse
            if is_cut:
                found = _cut(entry, self._exchange.route, value.whole())
            else:
                found = pushed(placement_of(entry), value)
            items += self.fitting(f"key {key!r}", found)
        return self._prepare(keys, items, priority, None)

    def pull(self, keys: Bucket, landings: Sequence[RowDestination], priority: int) -> Operation:
        """Begin to pull rows of these keys into ``landings``.

        Raises ``ValueMismatchError`` if a request does not fit in a message; then nothing is sent.
        """
        items: list[Item] = []
        for landing in landings:
            entry = self._exchange.entries[landing.key]
            if entry.is_row_sparse:
                home = placement_of(entry)
                items += wanted(home, landing.ids, landing.rows, self._most_bytes)
            else:
                cuts = _wanted_cut(entry, self._exchange.route, landing)
                items += self.fitting(f"key {landing.key!r}", cuts)
        return self.begin(keys, items, priority, {})

    def pull_held(
        self, keys: Bucket, priority: int, versions: dict[int, int]
    ) -> tuple[Operation, list[ReceivedRows]]:
        """Begin to pull all rows of row-sparse keys; parts' versions go to ``versions``."""
        held = [ReceivedRows(self._exchange.entries[key]) for key in keys.keys]
        items = [item for each in held for item in _wanted_held(each, self._most_bytes)]
        operation = self.begin(keys, items, priority, versions)

        def count(_: Any) -> None:  # only a statistic: a lost count does no harm
            self._exchange.counters["bytes_pulled"] += sum(each.nbytes for each in held)

        operation.on_done(count)
        return operation, held

    def fitting(self, title: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items; raise ``ValueMismatchError`` if one does not fit in a message."""
        for item in items:
            if item.nbytes > self._most_bytes:
                raise ValueMismatchError(
                    f"{title}: the rows for one server make a message of {item.nbytes} bytes, "
                    f"over PS_MAX_MESSAGE_BYTES ({self._most_bytes}); use fewer rows in a call, "
                    "more servers, or raise PS_MAX_MESSAGE_BYTES on all nodes"
                )
            yield item

    def begin(
        self, keys: Bucket, items: Sequence[Item], priority: int, versions: dict[int, int] | None
    ) -> Operation:
        """Send these items; pulls record the versions of their parts in ``versions``."""
        return self._prepare(keys, items, priority, versions)()

    def _prepare(
        self, keys: Bucket, items: Sequence[Item], priority: int, versions: dict[int, int] | None
    ) -> Send:
        """Prepare a call; return the function that sends it."""
        groups = list(_grouped(items, self._exchange.message_bytes))
        operation = Operation(keys, priority=priority)
        operation.left = len(groups)
        for group in groups:
            staging = self._node.buffer(sum(item.nbytes for item in group))
            start = 0
            for item in group:
                item.write(staging[start : start + item.nbytes])
                start += item.nbytes
            parts = tuple(item.target.part for item in group)
            sizes = tuple(item.nbytes for item in group)
            sink = None if versions is None else _sink(group, versions)
            to, frames, done = group[0].target.server, (staging.data,), operation.part_done
            operation.transfers.append(
                Transfer(to, parts, sizes, frames, sink, done, priority, ROWS_FORM)
            )

        def send() -> Operation:
            self._exchange.submit(
                operation,
                pushes=versions is None,
                pulls=versions is not None,
                nbytes=sum(item.nbytes + item.answer_bytes for item in items),
            )
            return operation

        return send


def _grouped(items: Sequence[Item], group_bytes: int) -> Iterator[list[Item]]:
    """Yield lists of items for the same server that are sent together."""
    filling: dict[int, tuple[list[Item], int]] = {}
    for item in items:
        size = max(item.nbytes, item.answer_bytes)
        group, nbytes = filling.get(item.target.server, ([], 0))
        if group and (nbytes + size > group_bytes or len(group) >= MAX_PARTS):
            yield group
            group, nbytes = [], 0
        group.append(item)
        filling[item.target.server] = (group, nbytes + size)
    for group, _ in filling.values():
        yield group


def _sink(group: Sequence[Item], versions: dict[int, int]) -> Sink:
    def sink(indices: Sequence[int], pieces: Sequence[Piece], found: Sequence[int]) -> None:
        for index, piece, version in zip(indices, pieces, found, strict=True):
            item = group[index]
            if item.receive is not None:
                item.receive(bytes_of(piece))
            versions[item.target.part] = version

    return sink


def pushed(home: RowPlacement, value: Picked) -> Iterator[Item]:
    """Yield the items of a push of rows: one for each part."""
    for share, target in zip(home.split(value.ids), home.targets, strict=True):
        count = len(share.ids)
        kind, ids = RowPayloadKind.ROWS, share.ids
        if share.is_all and count:
            kind, ids = RowPayloadKind.ALL, _NO_IDS

        def fill(memory: Bytes, at: Any = share.at, count: int = count) -> None:
            value.take(at, memory.view(home.dtype).reshape(count, home.width))

        yield Item(target, kind, count, home.width, 0, ids, count * home.row_bytes, fill)


def wanted(
    home: RowPlacement,
    ids: Ids,
    into: RowValues,
    most_bytes: int,
    kind: RowPayloadKind = RowPayloadKind.WANTED,
) -> Iterator[Item]:
    """Yield the items of a pull of rows into ``into``, in frames up to ``most_bytes``."""
    most_rows = min(ANSWER_BYTES, most_bytes) // max(home.row_bytes, 1)
    most_rows = max(min(most_rows, (most_bytes - _ROOM_BYTES) // _ID_BYTES), 1)
    for share, target in zip(home.split(ids), home.targets, strict=True):
        at = share.at
        if isinstance(at, slice) and len(share.ids) > most_rows:
            at = np.arange(len(ids))[at]
        for start in range(0, len(share.ids), most_rows):
            some = share.ids[start : start + most_rows]
            rows = at if isinstance(at, slice) else at[start : start + most_rows]

            def receive(memory: Bytes, rows: Any = rows, count: int = len(some)) -> None:
                _check_answer(home.title, len(memory), count * home.row_bytes)
                into[rows] = memory.view(into.dtype).reshape(count, home.width)

            asked, nbytes = (kind, len(some), home.width, 0), len(some) * home.row_bytes
            yield Item(target, *asked, some, answer_bytes=nbytes, receive=receive)


def _wanted_held(held: ReceivedRows, most_bytes: int) -> Iterator[Item]:
    """Yield the items of a pull of all stored rows of a row-sparse key.

    Answers have at most ``most_bytes``, unless that would take too many requests.
    """
    stripes, home = held.entry.stripes, placement_of(held.entry)
    room = min(ANSWER_BYTES, most_bytes) - _ROOM_BYTES
    for index, target in enumerate(home.targets):
        num_rows = stripes.rows_of(index)
        step = max(room // (home.row_bytes + _ID_BYTES), -(-num_rows // _MOST_RANGES), 1)

        def receive(memory: Bytes, index: int = index) -> None:
            payload = read_payload(memory)
            ids = np.arange(payload.num_rows) if payload.kind is RowPayloadKind.ALL else payload.ids
            _check_answer(home.title, len(payload.values), len(ids) * home.row_bytes)
            rows = payload.values.view(home.dtype).reshape(len(ids), home.width).copy()
            held.add(stripes.ids_of(index, ids), rows)

        for start in range(0, max(num_rows, 1), step):
            # The size of the answer is only known when it arrives.
            asked = RowPayloadKind.HELD, min(step, num_rows - start), home.width, start
            yield Item(target, *asked, _NO_IDS, receive=receive)


# -- rows of dense keys -------------------------------------------------------------------


class _CutRows(NamedTuple):
    """A part of a dense key, and the rows of a list of ids that are in that part."""

    target: RowTarget
    cut: Cut
    ids: Ids
    """The ids, counted within the part."""
    span: slice
    """The range of their values in the flat rows of the list."""


_Route = Callable[[KeyEntry, int], int]
"""``DenseExchange.route``."""


def _cuts(entry: KeyEntry, route: _Route, ids: Ids) -> Iterator[_CutRows]:
    width = width_of(entry.spec.shape)
    if not entry.spec.num_elements:
        return
    for (start, stop), rank, part in zip(entry.chunks(), entry.servers, entry.parts, strict=True):
        first, skip = divmod(start, width)
        cut = Cut(stop - start, width, skip)
        low, high = map(int, np.searchsorted(ids, (first, first + cut.num_rows)))
        mine = ids[low:high] - first
        front, back = cut.trim(mine)
        server = route(entry, node_id(Role.SERVER, rank))
        target = RowTarget(server, part, id_bytes_for(cut.num_rows))
        yield _CutRows(target, cut, mine, slice(low * width + front, high * width - back))


def _cut(entry: KeyEntry, route: _Route, value: Contribution) -> Iterator[Item]:
    """Yield the items of a push of rows to a dense key: one for each part."""
    dtype = entry.spec.dtype
    flat = np.ascontiguousarray(value.values, dtype).reshape(-1)
    for target, cut, ids, span in _cuts(entry, route, value.ids):

        def fill(memory: Bytes, some: Flat = flat[span]) -> None:
            memory.view(dtype)[:] = some

        sizes = len(ids), cut.width, cut.skip
        yield Item(target, RowPayloadKind.ROWS, *sizes, ids, flat[span].nbytes, fill)


def _wanted_cut(entry: KeyEntry, route: _Route, landing: RowDestination) -> Iterator[Item]:
    """Yield the items of a pull of rows of a dense key."""
    flat = landing.rows.reshape(-1)
    for target, cut, ids, span in _cuts(entry, route, landing.ids):

        def receive(memory: Bytes, some: Flat = flat[span]) -> None:
            _check_answer(f"key {entry.key!r}", len(memory), some.nbytes)
            some[:] = memory.view(some.dtype)

        if len(ids):
            asked = RowPayloadKind.WANTED, len(ids), cut.width, cut.skip
            nbytes = flat[span].nbytes
            yield Item(target, *asked, ids, answer_bytes=nbytes, receive=receive)


def _check_answer(title: str, found: int, expected: int) -> None:
    if found != expected:
        raise ProtocolError(f"{title}: expected {expected} bytes of rows, got {found}")
