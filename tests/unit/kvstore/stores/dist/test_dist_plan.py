"""Which parts travel together to which server, and how bytes get from arrays to parts and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.placement import chunk_ranges
from kvstore.protocol.requests import KeyEntry, PartEntry
from kvstore.stores.base import KeySpec
from kvstore.stores.dist.plan import (
    MAX_PARTS,
    Group,
    Slice,
    flat_bytes,
    gather,
    group_bytes,
    part_entries,
    plan,
    scatter,
    views,
)
from pslite import Config
from pslite.plane import Piece

FLOAT = np.dtype(np.float32)


def entry(
    key: str, num_elements: int, first_part: int, *servers: int, chunk_bytes: int = 16
) -> KeyEntry:
    spec = KeySpec((num_elements,), FLOAT)
    return KeyEntry(key, spec, first_part, chunk_bytes, servers)


@st.composite
def tables(draw: st.DrawFn) -> list[KeyEntry]:
    """Keys of several sizes and dtypes on up to three servers."""
    table = []
    part = 1
    for number in range(draw(st.integers(1, 6))):
        dtype = np.dtype(draw(st.sampled_from(["|u1", "<f4", "<f8"])))
        spec = KeySpec((draw(st.integers(0, 20)),), dtype)
        count = len(chunk_ranges(spec.num_elements, dtype.itemsize, 32))
        servers = draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
        table.append(KeyEntry(f"k{number}", spec, part, 32, tuple(servers)))
        part += count
    return table


# -- plans --------------------------------------------------------------------------------


def test_small_keys_of_one_server_travel_together() -> None:
    table = [entry("a", 2, 1, 0), entry("b", 1, 2, 1), entry("c", 1, 3, 0)]
    assert plan(table, group_bytes=16) == [
        Group.of(8, (1, 3), (8, 4), (Slice(0, 0, 8), Slice(2, 0, 4))),
        Group.of(10, (2,), (4,), (Slice(1, 0, 4),)),
    ]


def test_a_message_grows_no_larger_than_allowed() -> None:
    table = [entry(f"k{i}", 2, i + 1, 0) for i in range(5)]
    assert [group.parts for group in plan(table, group_bytes=16)] == [(1, 2), (3, 4), (5,)]


def test_a_message_has_no_more_parts_than_allowed() -> None:
    table = [entry(f"k{i}", 1, i + 1, 0) for i in range(2 * MAX_PARTS + 1)]
    sizes = [len(group.parts) for group in plan(table, group_bytes=1 << 30)]
    assert sizes == [MAX_PARTS, MAX_PARTS, 1]


def test_a_part_larger_than_allowed_travels_alone() -> None:
    table = [entry("a", 1, 1, 0), entry("b", 4, 2, 0), entry("c", 1, 3, 0)]
    assert [group.parts for group in plan(table, group_bytes=8)] == [(1,), (2,), (3,)]


def test_the_parts_of_a_large_key_go_where_they_live() -> None:
    groups = plan([entry("a", 10, 5, 0, 1, 0)], group_bytes=16)
    assert [(group.server, group.parts, group.sizes) for group in groups] == [
        (8, (5,), (16,)),
        (10, (6,), (16,)),
        (8, (7,), (8,)),
    ]


def test_later_parts_of_a_large_key_travel_together_too() -> None:
    groups = plan([entry("a", 12, 1, 0, 0, 0)], group_bytes=32)
    assert [group.parts for group in groups] == [(1, 2), (3,)]


def test_an_empty_key_has_a_part_too() -> None:
    groups = plan([entry("a", 0, 1, 0)], group_bytes=16)
    assert groups == [Group.of(8, (1,), (0,), (Slice(0, 0, 0),))]


@given(tables(), st.integers(1, 100))
def test_every_byte_of_every_key_is_in_exactly_one_message(
    table: list[KeyEntry], group_bytes: int
) -> None:
    groups = plan(table, group_bytes)
    homes = {
        each.first_part + offset: 2 * server + 8
        for each in table
        for offset, server in enumerate(each.servers)
    }
    assert {part: group.server for group in groups for part in group.parts} == homes
    assert sum(len(group.parts) for group in groups) == len(homes)
    for group in groups:
        assert group.nbytes == sum(group.sizes)
        assert group.nbytes <= group_bytes or len([size for size in group.sizes if size]) == 1
    spans = sorted(piece for group in groups for piece in group.slices if piece.stop > piece.start)
    for position, each in enumerate(table):
        mine = [piece for piece in spans if piece.position == position]
        borders = [0, *(piece.stop for piece in mine)]
        assert [piece.start for piece in mine] == borders[:-1]
        assert borders[-1] == each.spec.num_elements * each.spec.dtype.itemsize


@given(tables(), st.integers(1, 100))
def test_what_is_gathered_and_scattered_is_the_same(
    table: list[KeyEntry], group_bytes: int
) -> None:
    generator = np.random.default_rng(3)
    sources = [
        generator.integers(0, 256, each.spec.num_elements * each.spec.dtype.itemsize, np.uint8)
        for each in table
    ]
    targets = [np.zeros_like(source) for source in sources]
    for group in plan(table, group_bytes):
        staging = np.empty(group.nbytes, np.uint8)
        gather(group, sources, staging)
        start = 0
        for index, size in enumerate(group.sizes):
            scatter(group, targets, [index], [Piece(staging.data, start, start + size)], [1])
            start += size
    assert [target.tolist() for target in targets] == [source.tolist() for source in sources]


def test_a_server_is_told_elements_and_dtype_of_each_part() -> None:
    table = [
        entry("a", 2, 1, 0),
        KeyEntry("b", KeySpec((3,), np.dtype(np.float64)), 2, 16, (0, 0)),
    ]
    (first, second) = plan(table, group_bytes=24)
    assert part_entries(first, table) == [
        PartEntry(1, "a", True, 2, FLOAT),
        PartEntry(2, "b", False, 2, np.dtype(np.float64)),
    ]
    assert part_entries(second, table) == [PartEntry(3, "b", False, 1, np.dtype(np.float64))]


# -- memory -------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_flat_bytes_are_the_arrays_own_memory(shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, np.int32)
    flat_bytes(array)[...] = 1
    assert array.tolist() == np.full(shape, 0x01010101, np.int32).tolist()


def test_views_share_the_memory_of_the_call() -> None:
    array = np.arange(8, dtype=np.uint8)
    group = Group.of(8, (1, 2), (2, 3), (Slice(0, 1, 3), Slice(0, 4, 7)))
    assert [view.tolist() for view in views(group, [array])] == [[1, 2], [4, 5, 6]]
    assert all(np.shares_memory(view, array) for view in views(group, [array]))


def test_values_of_several_frames_land_each_in_its_place() -> None:
    group = Group.of(8, (1, 2, 3), (2, 2, 2), (Slice(0, 0, 2), Slice(1, 0, 2), Slice(0, 2, 4)))
    targets = [np.zeros(4, np.uint8), np.zeros(2, np.uint8)]
    pieces = [Piece(b"xxAB", 2, 4), Piece(b"CDEF", 0, 2), Piece(b"CDEF", 2, 4)]
    scatter(group, targets, [2, 0, 1], pieces, [1, 1, 1])
    assert [bytes(target) for target in targets] == [b"CDAB", b"EF"]


@pytest.mark.parametrize(
    ("total_mib", "by_tcp", "message_mib"),
    [(1, False, 8), (7, False, 8), (48, False, 12), (102, False, 16), (7, True, 2), (102, True, 2)],
)
def test_a_call_goes_in_a_few_messages(total_mib: int, by_tcp: bool, message_mib: int) -> None:
    mib = 1 << 20
    config = Config(chunk_bytes=mib)
    assert group_bytes(config, total_mib * mib, by_tcp=by_tcp) == message_mib * mib
    tight = Config(chunk_bytes=mib, max_message_bytes=3 * mib)
    assert group_bytes(tight, total_mib * mib, by_tcp=by_tcp) == min(message_mib, 3) * mib
