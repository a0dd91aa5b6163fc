"""``RowPart``: a server's share of the rows of a key or table.

The plane (``pslite/plane``) passes each payload when it arrives (``take``, ``take_pull``), each
complete round (``apply``), and each pull that can be answered (``answer``). Payloads are checked on
arrival, so that only the sender of a malformed one gets an error. Row-sparse keys (``sparse.py``)
and growing tables (``tables.py``) differ in their ids and in the value of an absent row. The
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
"""Returns memory of this many bytes, from which an answer is sent."""


class TakenRows(NamedTuple):
    """A checked contribution."""

    rows: Contribution
    nbytes: int
    source: tuple[int, Piece] | None = None
    """The form and the bytes that it was made from."""


class WantedRows(NamedTuple):
    """A checked pull of rows: ``ids``, or with ``HELD`` all stored rows in a range."""

    kind: RowPayloadKind
    ids: Ids
    nbytes: int
    held: range = range(0)


class RowPart(abc.ABC):
    """Rows of one width and dtype.

    Rounds and requests run on the thread of the part's lane. Pulls run on the I/O thread and may
    create rows of a table, so both take ``lock``.
    """

    ending: ClassVar[str]
    """The word for the removal of a key or table, for errors."""

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
        """The name of the key or table, for errors and reports."""
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
        """Check a contribution and return it."""
        count, nbytes = payload.num_rows, self._bytes_of(payload)
        if len(payload.values) != nbytes:
            raise ProtocolError(
                f"the values of {count} rows have the wrong size: {len(payload.values)} bytes"
            )
        values = payload.values.view(self.dtype).reshape(count, self.width)
        return TakenRows(Contribution(self._pushed_ids(payload), values), nbytes)

    def take_pull(self, payload: RowPayload) -> WantedRows:
        """Check the request of a pull and return it."""
        if len(payload.values):
            raise ProtocolError(f"a pull of rows of the {self.title} has values")
        return self._wanted(payload)

    def answer(
        self,
        wanted: WantedRows,
        allocate: Allocate,
        most_bytes: int,
        *,
        before_last: bool = False,
    ) -> Any:
        """Return a frame with the requested values, or those before the last round.

        Raises ``ValueMismatchError`` if it would have more than ``most_bytes``.
        """
        check_fits(self.title, len(wanted.ids), wanted.nbytes, most_bytes)
        memory = allocate(wanted.nbytes)
        rows = memory.view(self.dtype).reshape(len(wanted.ids), self.width)
        with self.lock:
            self._read(wanted, rows, before_last=before_last)
        return memory.data

    def _bytes_of(self, payload: RowPayload) -> int:
        """Return the size of the rows that a payload pushes or requests."""
        if payload.width != self.width:
            raise ProtocolError(
                f"the {self.title} needs rows of {self.width} numbers, got {payload.width}"
            )
        if payload.offset:
            raise ProtocolError(f"expected whole rows of the {self.title}, got an offset")
        return payload.num_rows * self.row_bytes

    @abc.abstractmethod
    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Apply one round, or one push of an asynchronous store. On the lane's thread."""

    @abc.abstractmethod
    def _pushed_ids(self, payload: RowPayload) -> Ids:
        """Check the ids of a contribution and return them."""

    @abc.abstractmethod
    def _wanted(self, payload: RowPayload) -> WantedRows:
        """Check the ids of a pull and return its request."""

    @abc.abstractmethod
    def _read(self, wanted: WantedRows, out: RowValues, *, before_last: bool) -> None:
        """Copy the requested rows to ``out``, or those before the last round."""

    # -- for files: with the lock, on the lane's thread --------------------------------

    @abc.abstractmethod
    def nbytes(self) -> tuple[int, int]:
        """Return the size of the rows, and of their optimizer states."""

    @abc.abstractmethod
    def held(self) -> tuple[int, Sequence[Ids]]:
        """Return the number of updates, all row ids, sorted, and other columns."""

    @abc.abstractmethod
    def copies(self, ids: Ids, *, with_states: bool) -> list[np.ndarray[Any, Any]]:
        """Return which of these ids have rows, and copies of rows and states."""

    @abc.abstractmethod
    def begin(self, fields: Sequence[Any], columns: Sequence[Ids]) -> None:
        """Begin to replace the stored rows with those of a file."""

    @abc.abstractmethod
    def write(self, frames: Sequence[Any]) -> None:
        """Store some rows of a file: ids and other columns, values, states."""

    @abc.abstractmethod
    def end(self, num_updates: int, fields: Sequence[Any]) -> None:
        """End the loading of a file; ``num_updates`` of -1 keeps the update count."""


def check_fits(title: str, num_rows: int, nbytes: int, most_bytes: int) -> None:
    """Raise ``ValueMismatchError`` for an answer that no message can hold."""
    if nbytes > most_bytes:
        raise ValueMismatchError(
            f"{title}: {num_rows} rows of a part make a message of {nbytes} bytes, over "
            f"PS_MAX_MESSAGE_BYTES ({most_bytes}); pull fewer rows at once with row_sparse_pull, "
            "or raise PS_MAX_MESSAGE_BYTES on all nodes"
        )


def check_ids(ids: Ids, num_rows: int) -> None:
    """Raise ``ProtocolError`` unless ids are ascending and below ``num_rows``."""
    if len(ids) and not (ids[0] >= 0 and ids[-1] < num_rows and is_increasing(ids)):
        raise ProtocolError(f"expected increasing ids of a part with {num_rows} rows, got {ids}")


def longs(frame: Any) -> Ids:
    """Return a frame as int64 numbers. Raises ``ProtocolError`` for a bad size."""
    if memoryview(frame).nbytes % 8:
        raise ProtocolError(f"expected numbers of 8 bytes, got {memoryview(frame).nbytes} bytes")
    numbers: Ids = np.frombuffer(frame, "<i8").astype(np.int64, copy=False)
    return numbers


def rows_in(
    title: str, num_rows: int, width: int, frames: Sequence[Any], dtypes: Sequence[np.dtype[Any]]
) -> list[RowValues]:
    """Return frames as rows of these dtypes. Raises ``ValueMismatchError``."""
    sizes = [num_rows * width * dtype.itemsize for dtype in dtypes]
    found = [memoryview(frame).nbytes for frame in frames]
    if found != sizes:
        raise ValueMismatchError(
            f"the values and states for {title} must be arrays of {sizes} bytes, got {found}"
        )
    pairs = zip(frames, dtypes, strict=True)
    return [
        np.frombuffer(frame, np.uint8).view(dtype).reshape(num_rows, width)
        for frame, dtype in pairs
    ]


def not_loading(title: str) -> UsageError:
    """Return the error for rows of a file that arrive before ``begin``."""
    return UsageError(f"the {title} is not being loaded")
