"""``RowPart``: a server's share of the rows of one key or table, a part of the data plane.

The plane (``pslite/plane``) hands over payloads as they arrive (``take``, ``take_pull``), complete
rounds of them (``apply``), and pulls that are due (``answer``). What a worker sends is checked on
arrival, so that a malformed payload is an error of its sender alone. Row-sparse keys and growing
tables differ in what an id is and what an absent row is: ``sparse.py`` and ``tables.py``. The
requests about both are in ``rows.py``. Read next: ``sparse/payload.py`` for the bytes.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kvstore.errors import ValueMismatchError
from kvstore.server.memory import StoreState
from kvstore.sparse.ids import Ids, is_increasing
from kvstore.sparse.payload import Bytes, RowPayload, RowPayloadKind
from kvstore.sparse.sums import Contribution, RowValues
from pslite.errors import ProtocolError, UsageError
from pslite.plane import Piece

Allocate = Callable[[int], Bytes]
"""Gives memory to send from."""


class TakenRows(NamedTuple):
    """A contribution."""

    rows: Contribution
    nbytes: int


class WantedRows(NamedTuple):
    """A pull: ``nbytes`` of the rows ``ids``, or with ``HELD`` of those there of a range."""

    kind: RowPayloadKind
    ids: Ids
    nbytes: int
    held: range = range(0)


class RowPart(abc.ABC):
    """Rows of one width and dtype.

    Rounds and requests run on the thread of the part's lane. Pulls run on the I/O thread, and may
    make rows of a table: ``lock`` keeps these out meanwhile.
    """

    ending: ClassVar[str]
    """What happens to a key or table that is forgotten."""

    def __init__(
        self,
        store: StoreState,
        lane: int,
        number: int,
        title: str,
        width: int,
        dtype: np.dtype[Any],
    ) -> None:
        self.store = store
        self.lane = lane
        self.number = number
        self.title = title
        """The key or table, for people."""
        self.width = width
        """Numbers in a row."""
        self.dtype = dtype
        self.lock = threading.Lock()

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return self.width * self.dtype.itemsize

    # -- rounds and pulls --------------------------------------------------------------

    def take(self, payload: RowPayload) -> TakenRows:
        """A contribution, checked."""
        count, nbytes = payload.num_rows, self._bytes_of(payload)
        if len(payload.values) != nbytes:
            raise ProtocolError(f"{len(payload.values)} bytes are not the values of {count} rows")
        values = payload.values.view(self.dtype).reshape(count, self.width)
        return TakenRows(Contribution(self._pushed_ids(payload), values), nbytes)

    def take_pull(self, payload: RowPayload) -> WantedRows:
        """What a pull wants, checked."""
        if len(payload.values):
            raise ProtocolError(f"a pull of rows of the {self.title} has values")
        return self._wanted(payload)

    def answer(self, wanted: WantedRows, allocate: Allocate, most_bytes: int) -> Any:
        """A frame with the values that are wanted.

        Raises ``ValueMismatchError`` where it would have more than ``most_bytes``.
        """
        check_fits(self.title, len(wanted.ids), wanted.nbytes, most_bytes)
        memory = allocate(wanted.nbytes)
        rows = memory.view(self.dtype).reshape(len(wanted.ids), self.width)
        with self.lock:
            self._read(wanted, rows)
        return memory.data

    def _bytes_of(self, payload: RowPayload) -> int:
        """The size of the rows that a payload is about."""
        if payload.width != self.width:
            raise ProtocolError(
                f"rows of {payload.width} numbers for the {self.title}, which has {self.width}"
            )
        if payload.offset:
            raise ProtocolError(f"expected whole rows of the {self.title}, got an offset")
        return payload.num_rows * self.row_bytes

    @abc.abstractmethod
    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Apply one round, or one push of an asynchronous store. On the lane's thread."""

    @abc.abstractmethod
    def _pushed_ids(self, payload: RowPayload) -> Ids:
        """The ids of a contribution, checked."""

    @abc.abstractmethod
    def _wanted(self, payload: RowPayload) -> WantedRows:
        """What a pull wants, checked but for values."""

    @abc.abstractmethod
    def _read(self, wanted: WantedRows, out: RowValues) -> None:
        """Copy the rows that are wanted."""

    # -- for files: with the lock, on the lane's thread --------------------------------

    @abc.abstractmethod
    def nbytes(self) -> tuple[int, int]:
        """The size of the rows, and of what the optimizer keeps for them."""

    @abc.abstractmethod
    def held(self) -> tuple[int, Sequence[Ids]]:
        """The number of updates; the ids of all rows, sorted, and other columns about them."""

    @abc.abstractmethod
    def copies(self, ids: Ids, *, with_states: bool) -> list[np.ndarray[Any, Any]]:
        """Which of these ids have rows, then copies of these rows and of their states."""

    @abc.abstractmethod
    def begin(self, fields: Sequence[Any], columns: Sequence[Ids]) -> None:
        """Let rows of a file come in place of those that are there."""

    @abc.abstractmethod
    def write(self, frames: Sequence[Any]) -> None:
        """Take some rows of a file: ids and other columns, values, states."""

    @abc.abstractmethod
    def end(self, num_updates: int, fields: Sequence[Any]) -> None:
        """All rows of the file are there; -1 leaves the number of updates as it is."""


def check_fits(title: str, num_rows: int, nbytes: int, most_bytes: int) -> None:
    """Raise ``ValueMismatchError`` for an answer that no message can hold."""
    if nbytes > most_bytes:
        raise ValueMismatchError(
            f"{title}: {num_rows} rows of a part are {nbytes} bytes in a message, of which "
            f"PS_MAX_MESSAGE_BYTES allows {most_bytes}: pull them by row_sparse_pull, fewer at "
            "once, or raise that on all nodes"
        )


def check_ids(ids: Ids, num_rows: int) -> None:
    """Raise ``ProtocolError`` unless ids are rising and below ``num_rows``."""
    if len(ids) and not (ids[0] >= 0 and ids[-1] < num_rows and is_increasing(ids)):
        raise ProtocolError(f"expected rising ids of a part with {num_rows} rows, got {ids}")


def longs(frame: Any) -> Ids:
    """A frame of ids, or of other numbers of 8 bytes."""
    if memoryview(frame).nbytes % 8:
        raise ProtocolError(f"expected numbers of 8 bytes, got {memoryview(frame).nbytes} bytes")
    numbers: Ids = np.frombuffer(frame, "<i8").astype(np.int64, copy=False)
    return numbers


def rows_in(
    title: str, num_rows: int, width: int, frames: Sequence[Any], dtypes: Sequence[np.dtype[Any]]
) -> list[RowValues]:
    """Frames as rows of these dtypes, one each. Raises ``ValueMismatchError``."""
    sizes = [num_rows * width * dtype.itemsize for dtype in dtypes]
    found = [memoryview(frame).nbytes for frame in frames]
    if found != sizes:
        raise ValueMismatchError(
            f"the values and states for {title} do not fit: expected arrays of {sizes} bytes, "
            f"got {found}"
        )
    pairs = zip(frames, dtypes, strict=True)
    return [
        np.frombuffer(frame, np.uint8).view(dtype).reshape(num_rows, width)
        for frame, dtype in pairs
    ]


def not_loading(title: str) -> UsageError:
    """What rows of a file get that nothing announced."""
    return UsageError(f"the {title} is not being loaded")


def bytes_of(piece: Piece) -> Bytes:
    """A piece as an array, which shares its memory."""
    return np.frombuffer(piece.frame, np.uint8)[piece.start : piece.stop]
