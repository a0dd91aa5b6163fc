"""Checksums by blocks: the same whatever the pieces, and of every block of a file."""

from __future__ import annotations

import itertools
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.checkpoint.checksums import BlockSums, KnownSums

BLOCK = 1 << 18
DATA = np.random.default_rng(1).bytes(2 * BLOCK + 1000)


def expected(data: bytes, block: int = BLOCK) -> str:
    sums = [zlib.crc32(data[at : at + block]) for at in range(0, len(data), block)]
    return f"crc32 {block} {struct.pack(f'>{len(sums)}I', *sums).hex()}"


def never(at: int, length: int) -> bytes:
    raise AssertionError("a block that came in order is not read again")


@given(st.sets(st.integers(1, len(DATA) - 1), max_size=6))
def test_pieces_in_order_are_not_read_again(cuts: set[int]) -> None:
    sums = BlockSums(len(DATA))
    for start, stop in itertools.pairwise(sorted(cuts | {0, len(DATA)})):
        sums.add(start, memoryview(DATA)[start:stop])
    assert sums.text(never) == expected(DATA)


@given(st.data())
def test_pieces_in_any_order_and_twice_have_the_same_sums(data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(DATA) - 1), max_size=6)) | {0, len(DATA)})
    pieces = list(itertools.pairwise(cuts))
    pieces += data.draw(st.lists(st.sampled_from(pieces), max_size=3))
    sums = BlockSums(len(DATA))
    for start, stop in data.draw(st.permutations(pieces)):
        sums.add(start, memoryview(DATA)[start:stop])
    assert sums.text(lambda at, length: DATA[at : at + length]) == expected(DATA)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_what_is_written_is_read_at_every_edge(size: int) -> None:
    data = DATA[:size]
    sums = BlockSums(size)
    sums.add(0, memoryview(data))
    text = sums.text(never)
    assert len(text) == len(sums.blank())
    known = KnownSums.of(text, size)
    blocks = [memoryview(data)[at : at + BLOCK] for at in range(0, size, BLOCK)]
    assert len(known) == len(blocks)
    assert [known.length(number) for number in range(len(known))] == [*map(len, blocks)]
    assert all(known.fits(number, block) for number, block in enumerate(blocks))


def test_huge_files_have_larger_blocks_and_no_more_of_them() -> None:
    assert BlockSums(1 << 36).block_bytes == BLOCK
    sums = BlockSums((1 << 40) + 1)
    assert sums.block_bytes == 1 << 23
    assert len(sums.blank()) < 3 << 20


@pytest.mark.parametrize(
    "text",
    [
        "",
        "crc32",
        "crc32 262144",
        "crc32 262144 ",
        "crc32 262144 0011223",
        "crc32 262144 001122334455667g",
        "crc32 262144 00112233445566778899aabb",
        "crc32 262144 00112233\t4455667",
        "crc32 262144 00112233 44556677",
        "crc32 x 0011223344556677",
        "crc32 -262144 0011223344556677",
        "crc32 1 0011223344556677",
        "crc32 2147483648 00112233",
        "sha256 262144 0011223344556677",
    ],
)
def test_a_text_that_does_not_fit_the_values_is_refused(text: str) -> None:
    KnownSums.of("crc32 262144 0011223344556677", BLOCK + 1)
    with pytest.raises(
        ValueError,
        match=r"^expected .*, got .*; load an earlier checkpoint, or update kvstore if a newer "
        r"version wrote the file$",
    ):
        KnownSums.of(text, BLOCK + 1)
