"""Encode rows of a part for messages between workers and servers.

A payload is a header of 32 bytes, ids, and values (``docs/wire.md``, section 18). An id has 4
bytes if all ids of the part fit, else 8. Parts of keys number their rows from 0; a share of a
table may have any 64-bit ids. ``read_payload`` checks all that can be checked without the part, and
raises ``ProtocolError``. Pure; values are not copied. Read next: ``partition.py``, which defines
the rows of a part.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

import numpy as np

from kvstore.sparse.ids import Ids
from pslite.errors import unexpected

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

ROWS_FORM = 1
"""The ``form`` of messages that carry these payloads."""

HEADER_BYTES = 32
_HEADER = struct.Struct("<BBHIQQQ")
#: Values begin at a multiple of this many bytes: the alignment of the widest dtype.
_ALIGNMENT = 16
_SHORT_IDS = 1 << 32
_ID_TYPES: dict[int, np.dtype[Any]] = {4: np.dtype("<u4"), 8: np.dtype("<i8")}


class RowPayloadKind(enum.IntEnum):
    """The kind of a payload of rows."""

    ROWS = 1
    """These rows have these values."""
    ALL = 2
    """All rows have these values; ids are not sent."""
    WANTED = 3
    """Asks for the values of these rows, without ids; a table creates missing rows."""
    HELD = 4
    """Asks for the stored rows among the ``num_rows`` rows from ``offset``, with their ids."""
    LOOK = 5
    """Like ``WANTED``, but a table does not create missing rows."""


_WITH_IDS = frozenset({RowPayloadKind.ROWS, RowPayloadKind.WANTED, RowPayloadKind.LOOK})


class RowPayload(NamedTuple):
    """A decoded payload of rows."""

    kind: RowPayloadKind
    num_rows: int
    width: int
    """Numbers in a row."""
    offset: int
    """How many numbers of the first row are before the part; with ``HELD``, the first row."""
    ids: Ids
    """In any order; empty for kinds without ids."""
    values: Bytes
    """A view of the payload's memory."""


def id_bytes_for(num_rows: int) -> int:
    """Return how many bytes an id takes in a payload of a part with this many rows."""
    return 4 if num_rows <= _SHORT_IDS else 8


def payload_bytes(num_ids: int, id_bytes: int, value_bytes: int) -> int:
    """Return the size of a payload."""
    return HEADER_BYTES + _padded(num_ids * id_bytes) + value_bytes


def write_payload(
    memory: Bytes,
    kind: RowPayloadKind,
    num_rows: int,
    width: int,
    offset: int,
    ids: Ids,
    id_bytes: int,
) -> Bytes:
    """Write header and ids into ``memory``; return the place for the values.

    The memory has ``payload_bytes`` bytes. ``ids`` is empty for kinds without ids.
    """
    size = id_bytes if len(ids) else 0
    memory[:HEADER_BYTES] = np.frombuffer(
        _HEADER.pack(kind, size, 0, 0, num_rows, width, offset), np.uint8
    )
    start = HEADER_BYTES + _padded(len(ids) * size)
    if len(ids):
        stop = HEADER_BYTES + len(ids) * size
        memory[HEADER_BYTES:stop].view(_ID_TYPES[size])[:] = ids
        memory[stop:start] = 0
    return memory[start:]


def read_payload(memory: Bytes) -> RowPayload:
    """Parse and check the output of ``write_payload``; the part need not be known."""
    if len(memory) < HEADER_BYTES:
        raise unexpected(f"a header of {HEADER_BYTES} bytes before rows", memory.tobytes())
    number, size, *unused, count, width, offset = _HEADER.unpack(memory[:HEADER_BYTES].tobytes())
    try:
        kind = RowPayloadKind(number)
    except ValueError:
        kinds = f"a kind of row payload from 1 to {max(RowPayloadKind)}"
        raise unexpected(kinds, number) from None
    has_ids = kind in _WITH_IDS and count > 0
    if any(unused) or (has_ids and size not in _ID_TYPES) or (size and not has_ids):
        found = f"kind {number}, {count} rows, {size} bytes for each id, unused {unused}"
        raise unexpected("a header that fits its rows", found)
    start = HEADER_BYTES + _padded(count * size)
    if start > len(memory):
        raise unexpected(f"at least {start} bytes for {count} ids", len(memory))
    ids: Ids = np.empty(0, np.int64)
    if has_ids:
        stop = HEADER_BYTES + count * size
        ids = memory[HEADER_BYTES:stop].view(_ID_TYPES[size]).astype(np.int64, copy=False)
    return RowPayload(kind, count, width, offset, ids, memory[start:])


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
