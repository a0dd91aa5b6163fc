"""Encode rows of tables for messages between workers and servers.

A payload is a header of 16 bytes, ids, and values (``docs/wire.md``, section 19). Ids are any
64-bit ones, in the order of the caller, each once; the server takes repeated ones, too. The
reader of a payload checks everything: a contradiction is a ``ProtocolError``. Pure; nothing is
copied that need not be. Read next: ``kvstore/server/tables.py``, which reads them.
"""

from __future__ import annotations

import enum
import struct
from typing import Any, NamedTuple

import numpy as np

from kvstore.sparse.ids import Ids
from kvstore.sparse.payload import Bytes
from pslite.errors import ProtocolError

TABLE_FORM = 2
"""The ``form`` of exchanges whose payloads are these."""

_HEADER = struct.Struct("<BBHIQ")
_ALIGNMENT = 16
"""Values begin at a multiple of this many bytes."""


class TablePayloadKind(enum.IntEnum):
    """What a payload says."""

    PUSH = 1
    """These gradients are for these ids."""
    PULL = 2
    """The rows of these ids are wanted, and made where there are none."""
    LOOK = 3
    """The rows of these ids are wanted, and nothing is to change."""


class TablePayload(NamedTuple):
    """A payload, read."""

    kind: TablePayloadKind
    width: int
    """Numbers in a row."""
    ids: Ids
    """The memory of the payload itself, as the values."""
    values: np.ndarray[Any, np.dtype[np.uint8]]


def payload_bytes(num_ids: int, value_bytes: int) -> int:
    """The size of a payload."""
    return _values_start(num_ids) + value_bytes


def write_payload(memory: Bytes, kind: TablePayloadKind, width: int, ids: Ids) -> Bytes:
    """Write header and ids into ``memory``, of ``payload_bytes``; returns where values go."""
    size = _HEADER.size
    memory[:size] = np.frombuffer(_HEADER.pack(kind, 0, 0, width, len(ids)), np.uint8)
    stop, start = size + 8 * len(ids), _values_start(len(ids))
    memory[size:stop].view("<i8")[:] = ids
    memory[stop:start] = 0
    return memory[start:]


def read_payload(memory: Bytes) -> TablePayload:
    """What ``write_payload`` wrote, checked as far as it can be without knowing the table."""
    size = _HEADER.size
    if len(memory) < size:
        raise ProtocolError(f"a payload of a table has {len(memory)} bytes, too few for its header")
    number, *unused, width, count = _HEADER.unpack(memory[:size].tobytes())
    try:
        kind = TablePayloadKind(number)
    except ValueError:
        raise ProtocolError(f"unknown kind of table payload: {number}") from None
    if any(unused):
        raise ProtocolError("the header of a payload of a table is malformed")
    start = _values_start(count)
    if start > len(memory):
        raise ProtocolError(f"a payload of a table is too short for {count} ids")
    ids = memory[size : size + 8 * count].view("<i8").astype(np.int64, copy=False)
    return TablePayload(kind, width, ids, memory[start:])


def _values_start(num_ids: int) -> int:
    return -(-(_HEADER.size + 8 * num_ids) // _ALIGNMENT) * _ALIGNMENT
