"""Rows as bytes: they survive the journey, and what does not add up is a ``ProtocolError``."""

from __future__ import annotations

import random
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.sparse.payload import (
    HEADER_BYTES,
    Bytes,
    RowPayloadKind,
    id_bytes_for,
    payload_bytes,
    read_payload,
    write_payload,
)
from pslite.errors import ProtocolError

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9)


def written(
    kind: RowPayloadKind, ids: list[int], values: bytes = b"", id_bytes: int = 8, offset: int = 0
) -> Bytes:
    memory = np.full(payload_bytes(len(ids), id_bytes, len(values)), 0xAA, np.uint8)
    array = np.array(ids, np.int64)
    place = write_payload(memory, kind, len(ids), 3, offset, array, id_bytes)
    place[:] = np.frombuffer(values, np.uint8)
    return memory


def header(
    kind: int = 1, id_bytes: int = 8, num_rows: int = 1, width: int = 3, offset: int = 0
) -> bytes:
    return struct.pack("<BBHIQQQ", kind, id_bytes, 0, 0, num_rows, width, offset)


@given(st.sampled_from([RowPayloadKind.ROWS, RowPayloadKind.LOOK]), IDS, st.binary(max_size=40))
def test_rows_survive_the_journey(kind: RowPayloadKind, ids: list[int], values: bytes) -> None:
    found = read_payload(written(kind, ids, values))
    assert (found.kind, found.num_rows, found.width, found.offset) == (kind, len(ids), 3, 0)
    assert (found.ids.tolist(), found.values.tobytes()) == (ids, values)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=9, unique=True).map(sorted))
def test_short_ids_take_four_bytes(ids: list[int]) -> None:
    memory = written(RowPayloadKind.ROWS, ids, b"abcd", 4)
    assert len(memory) == HEADER_BYTES + -(-4 * len(ids) // 16) * 16 + 4
    assert read_payload(memory).ids.tolist() == ids


def test_ids_are_short_where_the_part_has_no_longer_ones() -> None:
    assert [id_bytes_for(n) for n in (0, 2**32, 2**32 + 1, 2**63)] == [4, 4, 8, 8]


def test_values_are_not_copied() -> None:
    memory = written(RowPayloadKind.ROWS, [1], b"abcd")
    assert np.shares_memory(read_payload(memory).values, memory)


MALFORMED: dict[str, bytes] = {
    "nothing": b"",
    "too short for a header": header()[:-1],
    "no ids": header(num_rows=1),
    "more ids than bytes": header(num_rows=2**60) + bytes(16),
    "kind 0": header(kind=0) + bytes(16),
    "kind 6": header(kind=6) + bytes(16),
    "ids of two bytes": header(id_bytes=2) + bytes(16),
    "ids without bytes": header(id_bytes=0) + bytes(16),
    "ids of all rows": header(kind=2) + bytes(16),
    "unused bytes": header()[:2] + b"\1" + header()[3:] + bytes(16),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_does_not_add_up_is_refused(case: str) -> None:
    with pytest.raises(ProtocolError):
        read_payload(np.frombuffer(MALFORMED[case], np.uint8))


def test_any_bytes_are_a_payload_or_a_protocol_error() -> None:
    generator = random.Random(1)
    good: Any = written(RowPayloadKind.ROWS, [3, 70], b"abcdefgh").tobytes()
    for _ in range(3000):
        data = bytearray(good[: generator.randint(0, len(good))])
        for _ in range(generator.randint(0, 4)):
            if data:
                data[generator.randrange(len(data))] = generator.randrange(256)
        try:
            found = read_payload(np.frombuffer(data, np.uint8))
        except ProtocolError:
            continue
        assert len(found.ids) in (0, found.num_rows)
