"""What is said about stores: it survives the journey, and what is malformed is refused."""

from __future__ import annotations

import random
import string
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.placement import chunk_ranges
from kvstore.protocol.requests import (
    DIRECTORY_APP,
    STORE_APP,
    Declared,
    KeyEntry,
    PartEntry,
    RowPartEntry,
    dtype_of,
    dtype_text,
    pack,
    pack_entries,
    pack_parts,
    pack_row_part,
    pack_specs,
    unpack,
    unpack_entries,
    unpack_parts,
    unpack_row_part,
    unpack_specs,
)
from kvstore.stores.base import Key, KeySpec
from pslite.errors import ProtocolError
from pslite.wire.codec import pack_value, unpack_value

DTYPES = st.sampled_from(
    [np.dtype(text) for text in ("<f4", ">f4", "<f8", "<f2", "<i8", "|u1", "|b1", "<c16", "|i1")]
)
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
KEYS: st.SearchStrategy[Key] = st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5)
SPECS = st.builds(KeySpec, SHAPES, DTYPES)
BOOLEANS = st.booleans()


@st.composite
def entries(draw: st.DrawFn) -> KeyEntry:
    spec, chunk_bytes = draw(SPECS), draw(st.integers(1, 64))
    count = len(chunk_ranges(spec.num_elements, spec.dtype.itemsize, chunk_bytes))
    servers = tuple(draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)))
    first_part, generation = draw(st.integers(1, 2**40)), draw(st.integers(1, 2**20))
    is_row_sparse = bool(spec.shape) and len(servers) <= max(spec.shape[0], 1) and draw(BOOLEANS)
    return KeyEntry(draw(KEYS), spec, first_part, chunk_bytes, servers, generation, is_row_sparse)


# -- there and back -----------------------------------------------------------------------


@given(st.lists(entries(), max_size=3))
def test_directory_entries_survive_the_journey(table: list[KeyEntry]) -> None:
    assert unpack_entries(pack_entries(table)) == table


@given(st.lists(st.tuples(KEYS, SPECS, BOOLEANS), max_size=3))
def test_keys_with_shapes_survive_the_journey(table: list[tuple[Key, KeySpec, bool]]) -> None:
    specs = [Declared(key, spec, rows and bool(spec.shape)) for key, spec, rows in table]
    assert unpack_specs(unpack_value(pack_value(pack_specs(specs)))) == specs


@given(
    st.lists(
        st.builds(
            PartEntry,
            st.integers(0, 2**40),
            KEYS,
            st.booleans(),
            st.integers(0, 2**40),
            DTYPES,
            st.integers(1, 2**40),
        )
    )
)
def test_parts_survive_the_journey(parts: list[PartEntry]) -> None:
    assert unpack_parts(unpack_value(pack_value(pack_parts(parts)))) == parts


ROW_PARTS = st.builds(
    RowPartEntry,
    st.integers(0, 2**40),
    KEYS,
    BOOLEANS,
    st.integers(0, 2**63),
    st.integers(0, 2**40),
    DTYPES,
)


@given(ROW_PARTS)
def test_a_part_of_a_row_sparse_key_survives_the_journey(part: RowPartEntry) -> None:
    assert unpack_row_part(unpack_value(pack_value(pack_row_part(part)))) == part


def test_a_key_may_have_as_many_dimensions_as_an_array() -> None:
    spec = KeySpec((1,) * 64, np.dtype(np.float32))
    assert unpack_specs(pack_specs([Declared("w", spec)])) == [Declared("w", spec)]


def test_fields_of_a_body_keep_their_types() -> None:
    assert unpack(pack(1, "sync", True, [2], b"x"), int, str, bool, list, bytes) == [
        1,
        "sync",
        True,
        [2],
        b"x",
    ]


def test_the_apps_of_stores_have_different_numbers() -> None:
    assert DIRECTORY_APP != STORE_APP


# -- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [pack(1), pack(1, 2, 3), pack(1, "2"), pack(True, 2), pack(1, None), b"\xc1", b"\x07"]
)
def test_a_body_of_other_fields_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack(body, int, int)


@pytest.mark.parametrize(
    "table",
    [
        None,
        [1],
        [["w", [2]]],
        [["w", [2], "<f4"]],
        [["w", [2], "<f4", False, 1]],
        [["w", [2], "<f4", 1]],
        [["w", [], "<f4", True]],
        [[1.5, [2], "<f4", False]],
        [[True, [2], "<f4", False]],
        [["w", 2, "<f4", False]],
        [["w", [-1], "<f4", False]],
        [["w", [True], "<f4", False]],
        [["v", [1], "<f4", False], ["w", [True], "<f4", False]],
        [["v", [1], "<f4", False], ["w", [1], ["<f4"], False]],
        [["w", [1] * 65, "<f4", False]],
        [["w", [2], "<f5", False]],
    ],
)
def test_a_malformed_table_of_keys_is_refused(table: Any) -> None:
    with pytest.raises(ProtocolError):
        unpack_specs(table)


@pytest.mark.parametrize(
    "row",
    [
        ["w", [4], "<f4", False, 1, 16, 1],
        ["w", [4], "<f4", False, 1, 16, 0, 1],
        ["w", [4], "<f4", False, 1, 16, [-1], 1],
        ["w", [4], "<f4", False, 1, 16, ["0"], 1],
        ["w", [4], "<f4", False, -1, 16, [0], 1],
        ["w", [4], "<f4", False, 1, 0, [0], 1],
        ["w", [4], "<f4", False, 1, True, [0], 1],
        ["w", [4], "<f4", False, 1, 16, [], 1],
        ["w", [4], "<f4", False, 1, 16, [0, 1], 1],
        ["w", [5], "<f4", False, 1, 16, [0], 1],
        ["w", [4], "<f4", False, 1, 16, [0], -1],
        ["w", [4], "<f4", False, 1, 16, [0], "1"],
        ["w", [4], "<f4", True, 1, 16, [], 1],
        ["w", [2], "<f4", True, 1, 16, [0, 1, 2], 1],
        ["w", [4], "<f4", 1, 16, [0], 1],
    ],
)
def test_a_directory_entry_that_makes_no_sense_is_refused(row: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        unpack_entries(pack([row]))


@pytest.mark.parametrize(
    "table",
    [
        {},
        [[1, 2]],
        [["1", "w", True, 2, "<f4"]],
        [[1, "w", True, -1, "<f4"]],
        [[1, "w", True, 2.0, "<f4"]],
        [[1, "w", True, 2, "O"]],
        [[1, "w", 1, 2, "<f4"]],
        [[1, 1.5, True, 2, "<f4"]],
    ],
)
def test_a_malformed_table_of_parts_is_refused(table: Any) -> None:
    with pytest.raises(ProtocolError):
        unpack_parts(table)


@pytest.mark.parametrize(
    "row",
    [
        [1, "w", True, 2, 3],
        [1, "w", True, 2, 3, "<f4", 1],
        [-1, "w", True, 2, 3, "<f4"],
        [1, 1.5, True, 2, 3, "<f4"],
        [1, "w", 1, 2, 3, "<f4"],
        [1, "w", True, -2, 3, "<f4"],
        [1, "w", True, 2, True, "<f4"],
        [1, "w", True, 2, 3, "O"],
    ],
)
def test_a_malformed_part_of_a_row_sparse_key_is_refused(row: list[Any]) -> None:
    with pytest.raises(ProtocolError):
        unpack_row_part(row)


@pytest.mark.parametrize("text", ["|O", "<M8[s]", "|S4", "<U1", "|V8", "f4,f4", "(2,)f4", 4, None])
def test_only_numbers_can_be_stored(text: object) -> None:
    with pytest.raises(ProtocolError):
        dtype_of(text)


@given(DTYPES)
def test_a_dtype_survives_as_text(dtype: np.dtype[Any]) -> None:
    assert dtype_of(dtype_text(dtype)) == dtype


def test_any_text_is_a_dtype_or_a_protocol_error() -> None:
    generator = random.Random(1)
    symbols = string.ascii_letters + string.digits + "<>|=?,():[]{}' "
    texts = ["".join(generator.choices(symbols, k=generator.randint(0, 9))) for _ in range(3000)]
    for text in texts:
        try:
            assert dtype_of(text).kind in "biufc"
        except ProtocolError:
            pass


def test_a_claimed_shape_allocates_nothing() -> None:
    body = pack([["w", [300_000], "|u1", False, 1, 1, []]])
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            unpack_entries(body)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
