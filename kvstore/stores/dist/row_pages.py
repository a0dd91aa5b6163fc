"""``RowPages``: list, read and write rows on servers page by page.

The requests are the same for row-sparse keys and growing tables; ``RowPlacement`` maps rows to
parts. Callers pass the function that waits. Read next: ``server/rows.py``, which answers;
``checkpoint.py`` and ``table_rows.py``, which use it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.protocol.requests import KeyEntry, RowPartEntry, StoreCall, pack, pack_row_part, unpack
from kvstore.sparse.array import RowSparseArray
from kvstore.sparse.ids import Ids
from kvstore.sparse.partition import Share
from kvstore.sparse.sums import RowValues
from kvstore.stores.arguments_sparse import contribution_of
from kvstore.stores.dist.sparse_transfer import RowPlacement, placement_of
from pslite import Future
from pslite.errors import ProtocolError, unexpected
from pslite.future import completed, gather
from pslite.node.customer import Reply

Wait = Callable[[Future[Any]], Any]
Flags = np.ndarray[Any, np.dtype[np.bool_]]


Ask = Callable[[int, StoreCall, bytes, Sequence[Any]], Future[Reply]]
"""Sends a request with a body and frames to one server."""


class HeldPart(NamedTuple):
    """The stored rows of one part."""

    num_updates: int
    columns: list[Ids]
    """The ids of its rows, sorted; for a table also the touch time of each row, and the mark since
    which it has not changed."""


class RowPages:
    """One worker's access to the rows of a row-sparse key or table."""

    def __init__(self, ask: Ask, home: RowPlacement) -> None:
        self._ask = ask
        self.home = home

    def ask(
        self, index: int, call: StoreCall, *fields: Any, frames: Sequence[Any] = ()
    ) -> Future[Reply]:
        """Send a request about one part."""
        target = self.home.targets[index]
        return self._ask(target.server, call, pack(target.part, *fields), frames)

    def ask_each(
        self, call: StoreCall, *fields: Any, frames: Sequence[Sequence[Any]] | None = None
    ) -> Future[list[Reply]]:
        """Send a request about each part, with its own frames."""
        rows = frames or [()] * len(self.home.targets)
        return gather([self.ask(at, call, *fields, frames=row) for at, row in enumerate(rows)])

    # -- reading -----------------------------------------------------------------------

    def held(self, most: int, wait: Wait) -> list[HeldPart]:
        """Return the contents of each part, in messages of ``most`` rows."""
        counts = [0] * len(self.home.targets)
        pages: list[list[list[Ids]]] = [[] for _ in counts]
        #: Index of a part -> the last received id.
        left: dict[int, list[int]] = {index: [] for index in range(len(counts))}
        while left:
            asked = [
                self.ask(index, StoreCall.HELD_ROWS, after, most) for index, after in left.items()
            ]
            for (index, after), reply in zip(list(left.items()), wait(gather(asked)), strict=True):
                (counts[index],) = unpack(reply.body, int)
                columns = self._columns(reply, after)
                pages[index].append(columns)
                if len(columns[0]) < most:
                    del left[index]
                else:
                    left[index] = [int(columns[0][-1])]
        joined = [list(map(np.concatenate, zip(*found, strict=True))) for found in pages]
        return list(map(HeldPart, counts, joined))

    def _columns(self, reply: Reply, after: list[int]) -> list[Ids]:
        sizes = {memoryview(frame).nbytes for frame in reply.frames}
        if len(sizes) != 1 or max(sizes) % 8:
            expected = f"columns of equally many 8-byte numbers about the {self.home.title}"
            raise unexpected(expected, sorted(sizes))
        arrays = [np.frombuffer(frame, "<i8") for frame in reply.frames]
        if after and len(arrays[0]) and arrays[0][0] <= after[0]:
            raise ProtocolError(
                f"{self.home.title}: expected rows with ids above {after[0]}, got {arrays[0][0]} "
                "first; the servers must have the same version as the workers"
            )
        return [array.astype(np.int64, copy=False) for array in arrays]

    def read(
        self, ids: Ids, dtypes: Sequence[np.dtype[Any]], wait: Wait, *, with_states: bool
    ) -> tuple[Flags, list[RowValues]]:
        """Return which of these distinct ids have rows, and arrays of values and states.

        ``dtypes`` are the dtypes of the arrays, values first. Rows that do not exist are not set.
        """
        home = self.home
        shares = home.split(ids)
        frames = [[share.ids.astype("<i8").data] for share in shares]
        arrays: list[RowValues] = [np.empty((len(ids), home.width), dtype) for dtype in dtypes]
        is_there = np.zeros(len(ids), np.bool_)
        replies = wait(self.ask_each(StoreCall.READ_ROWS, with_states, frames=frames))
        for share, reply in zip(shares, replies, strict=True):
            flags, *copies = (np.frombuffer(frame, np.uint8) for frame in reply.frames)
            places = np.arange(len(ids))[share.at]
            if len(flags) != len(places):
                raise unexpected(f"{len(places)} flags about the {home.title}", len(flags))
            held = places[flags != 0]
            is_there[held] = True
            sizes = [len(held) * home.width * dtype.itemsize for dtype in dtypes]
            if [len(copy) for copy in copies] != sizes:
                found = [len(copy) for copy in copies]
                raise unexpected(f"copies of {sizes} bytes of the {home.title}", found)
            for array, copy in zip(arrays, copies, strict=True):
                array[held] = copy.view(array.dtype).reshape(len(held), home.width)
        return is_there, arrays

    # -- writing -----------------------------------------------------------------------

    def begin(
        self, *fields: Any, frames: Sequence[Sequence[Any]] | None = None
    ) -> Future[list[Reply]]:
        """Begin to replace the stored rows with those of a file."""
        return self.ask_each(StoreCall.BEGIN_ROWS, list(fields), frames=frames)

    def write(self, columns: Sequence[np.ndarray[Any, Any]]) -> Future[list[Reply]]:
        """Send some rows of the file: ids and other numbers, values, states."""
        shares = self.home.split(columns[0])
        frames = [[memory_of(column[share.at]) for column in columns[1:]] for share in shares]
        for share, row in zip(shares, frames, strict=True):
            row.insert(0, memory_of(share.ids))
        return self.ask_each(StoreCall.WRITE_ROWS, frames=frames)

    def end(self, num_updates: int, *fields: Any) -> Future[list[Reply]]:
        """End the loading of a file; ``num_updates`` of -1 keeps the update count."""
        return self.ask_each(StoreCall.END_ROWS, num_updates, list(fields))


def create_rows(
    ask: Ask, begin: Sequence[Any], entry: KeyEntry, value: RowSparseArray, step: int
) -> list[Future[Any]]:
    """Create a row-sparse key's parts and rows, ``step`` rows in a message.

    ``begin`` has the number of the store and whether it is synchronous.
    """
    pages = RowPages(ask, placement_of(entry))
    ids, values = contribution_of(value)

    def create(index: int, share: Share) -> Future[Any]:
        home, is_whole = pages.home, len(entry.servers) == 1
        named = entry.parts[index], entry.key, is_whole, entry.stripes.rows_of(index)
        described = RowPartEntry(*named, home.width, home.dtype)

        def fill(reply: Reply) -> Future[Any]:
            (needs_rows,) = unpack(reply.body, bool)
            # Each server's rows are sent from an array of their own.
            rows = np.ascontiguousarray(values[share.at])
            return write(rows, 0) if needs_rows else completed(None)

        def write(rows: RowValues, start: int) -> Future[Any]:
            if start >= len(rows):
                return pages.ask(index, StoreCall.END_ROWS, -1, [])
            some = slice(start, start + step)
            frames = [memory_of(share.ids[some]), memory_of(rows[some])]
            sent = pages.ask(index, StoreCall.WRITE_ROWS, frames=frames)
            return sent.then(lambda _: write(rows, start + step))

        body = pack(*begin, share.is_all, pack_row_part(described))
        return ask(home.targets[index].server, StoreCall.INIT_ROWS, body, ()).then(fill)

    return [create(index, share) for index, share in enumerate(pages.home.split(ids))]


def memory_of(rows: np.ndarray[Any, Any]) -> Any:
    """Return the bytes of an array, copied if they are not contiguous."""
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
