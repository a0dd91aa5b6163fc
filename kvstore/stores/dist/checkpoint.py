"""Save and load the values and states of a distributed store.

Values and optimizer states are the servers'. The worker that has the file asks for them, or hands
them over, piece by piece; so no node holds more of a model than its share and some pieces.
Residuals of compression are each worker's own. On the caller's thread, which waits. Read next:
``checkpoint/values.py`` for the files, ``control_client.py`` for what is asked.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvstore.arrays.keys import Key
from kvstore.checkpoint.directory import CheckpointReader
from kvstore.checkpoint.residuals import read_store_residuals, remove_beyond, save_store_residuals
from kvstore.checkpoint.values import Content, SavedPiece, SavedStates
from kvstore.optimizer.base import Optimizer
from kvstore.protocol.requests import KeyEntry
from kvstore.stores.dist.control_client import Reader, Servers
from kvstore.stores.dist.transfer import DenseExchange
from pslite import Future


class DistFiles:
    """What files hold of one store, as one worker reads and writes it."""

    def __init__(
        self, servers: Servers, exchange: DenseExchange, wait: Callable[[Future[Any]], Any]
    ) -> None:
        self._servers = servers
        self._exchange = exchange
        self._wait = wait

    def contents(self) -> dict[Key, Content]:
        """What there is of each key; of row-sparse ones without their rows."""
        no_rows = np.empty(0, np.int64)
        return {
            key: Content(entry.spec, len(entry.servers), no_rows if entry.is_row_sparse else None)
            for key, entry in self._exchange.entries.items()
        }

    def held(self, optimizer: Optimizer | None) -> tuple[dict[Key, Content], Iterator[SavedPiece]]:
        """What there is of each key, and all of it, read from the servers on the way."""
        dense, row_sparse = self._entries()
        held = [self._servers.rows.held(entry, self._wait) for entry in row_sparse]
        pieces = [self._servers.rows.read(each, optimizer, self._wait) for each in held]
        contents = self.contents() | {each.entry.key: each.content for each in held}
        return contents, itertools.chain(self._servers.read(dense, optimizer, self._wait), *pieces)

    def take_checkpoint(self, saved: CheckpointReader, optimizer: Optimizer | None) -> None:
        """Have the servers take over what a checkpoint has of every key; it was checked."""

        def read(key: Key, start: int, stop: int) -> SavedPiece:
            return saved.read(key, start, stop, optimizer)

        self._write(read, saved.states, optimizer)

    def take_states(self, saved: SavedStates, optimizer: Optimizer | None) -> None:
        """Have the servers take over the states of every key; the file was checked."""

        def read(key: Key, start: int, stop: int) -> SavedPiece:
            return SavedPiece(key, start, None, *saved.read(key, start, stop, optimizer))

        self._write(read, saved, optimizer)

    def _write(self, read: Reader, states: SavedStates, optimizer: Optimizer | None) -> None:
        dense, row_sparse = self._entries()
        self._servers.write(dense, optimizer, read, self._wait)
        for entry in row_sparse:
            self._servers.rows.write(entry, states.rows_of(entry.key), read, self._wait)

    def _entries(self) -> tuple[list[KeyEntry], list[KeyEntry]]:
        """The dense keys, and the row-sparse ones."""
        entries = self._exchange.entries.values()
        dense = [entry for entry in entries if not entry.is_row_sparse]
        return dense, [entry for entry in entries if entry.is_row_sparse]

    def save_residuals(
        self, path_of: Callable[[int], pathlib.Path], rank: int, num_workers: int
    ) -> None:
        """Write this worker's residuals; ``path_of`` gives the file of a rank."""
        if self._servers.decides:
            remove_beyond(path_of, num_workers)
        save_store_residuals(self._exchange.coding, path_of(rank))

    def read_residuals(self, path: pathlib.Path) -> Callable[[], None]:
        """Read this worker's file; a call of what is returned has it owe what is in it."""
        return read_store_residuals(self._exchange.coding, path)
