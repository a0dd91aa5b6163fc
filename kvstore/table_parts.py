"""A server's share of a growing table, as one part of the data plane.

The plane (``pslite/plane``) hands payloads over as they arrive (``take``), complete rounds of
them (``apply``), and pulls that are due (``answer``), as for row-sparse keys (``row_parts.py``).
A pull may make rows and let others go, so a lock keeps the requests of ``table_stores.py`` out
meanwhile, which come on the thread of the part's lane. What a worker sends is checked on arrival,
so that what is malformed is an error of its sender alone. Read next: ``tables/share.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arena import StoreState
from kvstore.sparse.ids import Ids
from kvstore.sparse.payload import Bytes
from kvstore.sparse.sums import Contribution
from kvstore.tables.loading import Loading
from kvstore.tables.payload import Kind, read_payload
from kvstore.tables.share import TableShare
from pslite.errors import ProtocolError

Allocate = Callable[[int], Bytes]
"""Gives memory to send from."""


class TakenPush(NamedTuple):
    """A contribution to a share."""

    rows: Contribution
    nbytes: int


class WantedIds(NamedTuple):
    """A pull of rows."""

    ids: Ids
    touches: bool
    nbytes: int


class TablePart:
    """One server's share of one table."""

    def __init__(self, store: StoreState, lane: int, number: int, share: TableShare) -> None:
        self.store = store
        self.lane = lane
        self.number = number
        self.share = share
        self.loading: Loading | None = None
        """The export that is coming."""
        self.lock = threading.Lock()
        """Guards the share: pulls come on the I/O thread, all else on the lane's."""

    @property
    def title(self) -> str:
        """The table, for people."""
        return f"table {self.share.settings.name!r}"

    def apply(self, contributions: Sequence[Contribution]) -> None:
        """One round, or one push of an asynchronous store. On the lane's thread."""
        with self.lock:
            self.share.push(contributions)

    def take(self, memory: Bytes, *, is_push: bool) -> TakenPush | WantedIds:
        """A payload, checked and ready for its round or its answer."""
        settings = self.share.settings
        payload = read_payload(memory)
        if payload.width != settings.dim:
            raise ProtocolError(f"rows of {payload.width} numbers for a {self.title}")
        if (payload.kind is Kind.PUSH) != is_push:
            raise ProtocolError("a push to a table has gradients, and a pull has none")
        count = len(payload.ids)
        nbytes = count * settings.dim * settings.dtype.itemsize
        if len(payload.values) != (nbytes if is_push else 0):
            raise ProtocolError(f"{len(payload.values)} bytes are not the values of {count} rows")
        if not is_push:
            return WantedIds(payload.ids.copy(), payload.kind is Kind.PULL, nbytes)
        values = payload.values.view(settings.dtype).reshape(count, settings.dim)
        return TakenPush(Contribution(payload.ids, values), nbytes)

    def answer(self, wanted: WantedIds, allocate: Allocate) -> Any:
        """A frame with the rows that are wanted; those that are not there may be made."""
        memory = allocate(wanted.nbytes)
        settings = self.share.settings
        out: np.ndarray[Any, Any] = memory.view(settings.dtype)
        with self.lock:
            rows = out.reshape(len(wanted.ids), settings.dim)
            self.share.pull(wanted.ids, rows, touches=wanted.touches)
        return memory.data
