"""Save and load the values and states of a distributed store.

Values and optimizer states are on the servers. The worker that writes or reads the file transfers
them piece by piece, so no node holds more of a model than its share and a few pieces. In files,
rows of row-sparse keys are sorted by id, whatever the number of servers. Runs on the caller's
thread, which waits. Read next: ``checkpoint/optimizer_states.py`` for the files,
``control_client.py`` for the requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvstore.arrays.keys import Key
from kvstore.checkpoint.optimizer_states import Content, SavedPiece, SavedStates
from kvstore.optimizer.base import Optimizer
from kvstore.optimizer.states import state_dtypes
from kvstore.protocol.requests import KeyEntry
from kvstore.sparse.ids import Ids
from kvstore.stores.dist.control_client import Reader, Servers
from kvstore.stores.dist.sparse_transfer import placement_of
from kvstore.stores.dist.transfer import DenseExchange
from pslite import Future


class DistFiles:
    """The checkpoint files of one store, read and written by one worker."""

    def __init__(
        self, servers: Servers, exchange: DenseExchange, wait: Callable[[Future[Any]], Any]
    ) -> None:
        self._servers = servers
        self._exchange = exchange
        self._wait = wait

    def contents(self) -> dict[Key, Content]:
        """Return a description of each key, without the rows of row-sparse keys."""
        no_rows = np.empty(0, np.int64)
        return {
            key: Content(entry.spec, len(entry.servers), no_rows if entry.is_row_sparse else None)
            for key, entry in self._exchange.entries.items()
        }

    def held(self, optimizer: Optimizer | None) -> tuple[dict[Key, Content], Iterator[SavedPiece]]:
        """Return a description of each key, and an iterator over the servers' data."""
        dense, row_sparse = self._entries()
        contents = self.contents()
        pieces = [self._servers.read(dense, optimizer, self._wait)]
        for entry in row_sparse:
            most = max(self._servers.piece_bytes // 8, 1)
            found = self._servers.pages(placement_of(entry)).held(most, self._wait)
            ids_of = entry.stripes.ids_of
            ids = [ids_of(index, part.columns[0]) for index, part in enumerate(found)]
            ordered = np.sort(np.concatenate(ids), kind="stable")
            num_pieces = max(-(-len(ordered) // self._servers.page_rows(entry)), 1)
            contents[entry.key] = Content(entry.spec, num_pieces, ordered)
            num_updates = max(part.num_updates for part in found)
            pieces.append(self._read_rows(entry, ordered, num_updates, optimizer))
        return contents, itertools.chain(*pieces)

    def _read_rows(
        self, entry: KeyEntry, all_ids: Ids, num_updates: int, optimizer: Optimizer | None
    ) -> Iterator[SavedPiece]:
        """Yield values and states of the rows of a row-sparse key, piece by piece."""
        pages, step = self._servers.pages(placement_of(entry)), self._servers.page_rows(entry)
        dtypes = [entry.spec.dtype, *state_dtypes(optimizer, entry.spec.dtype)]
        for start in range(0, max(len(all_ids), 1), step):
            ids = all_ids[start : start + step]
            has_states = optimizer is not None
            _, arrays = pages.read(ids, dtypes, self._wait, with_states=has_states)
            values, *states = [array.reshape(-1) for array in arrays]
            yield SavedPiece(entry.key, start * pages.home.width, values, states, num_updates)

    def take(self, saved: SavedStates, optimizer: Optimizer | None) -> None:
        """Send a file's data for all keys to the servers; check the file first."""

        def read(key: Key, start: int, stop: int) -> SavedPiece:
            return saved.read(key, start, stop, optimizer)

        dense, row_sparse = self._entries()
        self._servers.write(dense, optimizer, read, self._wait, self._exchange.relays)
        for entry in row_sparse:
            self._write_rows(entry, saved.rows_of(entry.key), read)

    def _write_rows(self, entry: KeyEntry, ids: Ids, read: Reader) -> None:
        """Set rows, sorted by id, to the values and states that ``read`` returns for them."""
        pages, step = self._servers.pages(placement_of(entry)), self._servers.page_rows(entry)
        width = pages.home.width
        num_updates = 0
        for start in range(0, max(len(ids), 1), step):
            some = ids[start : start + step]
            piece = read(entry.key, start * width, (start + len(some)) * width)
            flat = piece.states if piece.values is None else [piece.values, *piece.states]
            arrays = [np.asarray(array).reshape(len(some), width) for array in flat]
            num_updates = piece.num_updates
            if not start:
                self._wait(pages.begin(piece.values is not None))
            self._wait(pages.write([some, *arrays]))
        self._wait(pages.end(num_updates))

    def _entries(self) -> tuple[list[KeyEntry], list[KeyEntry]]:
        """Return the dense keys, and the row-sparse ones."""
        entries = self._exchange.entries.values()
        dense = [entry for entry in entries if not entry.is_row_sparse]
        return dense, [entry for entry in entries if entry.is_row_sparse]
