"""Collective calls by rings, step by step in one thread, in many orders."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from collective.rings import Members, total
from hypothesis import given, settings
from hypothesis import strategies as st

from pslite.collective.shared_memory_algorithms import (
    Bytes,
    Description,
    RingCalls,
    Steps,
    Take,
    as_bytes,
)
from pslite.errors import UsageError


@pytest.fixture
def three() -> Iterator[Members]:
    members = Members(3)
    yield members
    members.close()


def described(array: np.ndarray) -> Description:
    return Description(f"all_reduce({array.dtype}, {array.shape})".encode(), (array.nbytes,))


@settings(max_examples=60)
@given(
    size=st.integers(2, 5),
    lengths=st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    dtype=st.sampled_from(["u1", "f2", "f4", "f8", "c16"]),
    seed=st.integers(0, 1 << 30),
    in_place=st.booleans(),
)
def test_sums_are_those_of_rank_order_whatever_the_order_of_steps(
    size: int, lengths: list[int], dtype: str, seed: int, in_place: bool
) -> None:
    members = Members(size, 2048, seed)
    random = np.random.default_rng(seed)
    try:
        for length in lengths:
            arrays = [(random.random(length) * 9).astype(dtype) for _ in range(size)]
            expected = np.empty(length, dtype)
            total(arrays, expected)
            outs = [array if in_place else np.empty_like(array) for array in arrays]

            def begin(
                rank: int, calls: RingCalls, arrays: list = arrays, outs: list = outs
            ) -> Steps:
                return calls.all_reduce(described(arrays[rank]), arrays[rank], outs[rank], total)

            assert members.run(begin) == [None] * size
            for out in outs:
                assert out.tobytes() == expected.tobytes()
    finally:
        members.close()


def test_a_call_that_differs_ends_on_all_and_the_next_one_works(three: Members) -> None:
    small, large = np.ones(4, "f4"), np.ones(9000, "f4")

    def differing(rank: int, calls: RingCalls) -> Steps:
        array = large if rank == 2 else small
        return calls.all_reduce(described(array), array.copy(), np.empty_like(array), total)

    errors = three.run(differing)
    text = "rank 0 calls all_reduce(float32, (4,)); rank 2 calls all_reduce(float32, (9000,))"
    assert [(type(error), str(error)) for error in errors] == [(UsageError, text)] * 3

    outs = [np.empty_like(large) for _ in range(3)]
    assert not any(
        three.run(lambda rank, calls: calls.all_reduce(described(large), large, outs[rank], total))
    )
    assert all((out == 3).all() for out in outs)


def collecting(into: list[bytearray], sizes: list[int]) -> Take:
    """Takes each member's piece as it comes."""

    def take(start: int, pieces: list[Bytes]) -> None:
        for rank, piece in enumerate(pieces):
            into[rank] += piece[: max(0, sizes[rank] - start)].tobytes()

    return take


def test_pieces_of_unequal_length_reach_everyone(three: Members) -> None:
    arrays = [np.arange(length, dtype="i4") for length in (0, 3, 5000)]
    found = [[bytearray() for _ in arrays] for _ in arrays]

    def begin(rank: int, calls: RingCalls) -> Steps:
        array = arrays[rank]

        def begun(descriptions: list[Description]) -> Take:
            return collecting(found[rank], [each.sizes[0] for each in descriptions])

        return calls.exchange(Description(b"all_gather", (array.nbytes,)), [as_bytes(array)], begun)

    assert three.run(begin) == [None] * 3
    assert [list(map(bytes, each)) for each in found] == [[a.tobytes() for a in arrays]] * 3


def test_each_member_gets_the_piece_of_its_rank(three: Members) -> None:
    arrays = [
        [np.full(1 + 1000 * rank + 7 * to, 10 * rank + to, "u1") for to in range(3)]
        for rank in range(3)
    ]
    found = [[bytearray() for _ in range(3)] for _ in range(3)]

    def begin(rank: int, calls: RingCalls) -> Steps:
        def begun(descriptions: list[Description]) -> Take:
            return collecting(found[rank], [each.sizes[rank] for each in descriptions])

        sizes = tuple(len(array) for array in arrays[rank])
        return calls.exchange(Description(b"all_to_all", sizes), arrays[rank], begun, is_each=True)

    assert three.run(begin) == [None] * 3
    for rank in range(3):
        assert list(map(bytes, found[rank])) == [arrays[each][rank].tobytes() for each in range(3)]


def test_a_description_comes_back_as_it_went() -> None:
    for description in (Description(b"barrier"), Description(b"call", (0, 1 << 40), b"note")):
        assert Description.unpack(description.pack()) == description


def test_a_description_that_is_too_long_is_refused_at_the_caller() -> None:
    with pytest.raises(UsageError, match="shared memory has room for 65532: make several calls"):
        Description(b"call", (), bytes(70_000)).pack()


def test_a_member_that_cannot_take_its_pieces_alone_gets_the_error(three: Members) -> None:
    def begin(rank: int, calls: RingCalls) -> Steps:
        def begun(descriptions: list[Description]) -> Take:
            if rank == 1:
                raise UsageError("out has another shape")
            return lambda start, pieces: None

        piece = np.zeros(9000, "u1")
        return calls.exchange(Description(b"broadcast", (9000,)), [piece], begun)

    for _ in range(2):  # the rings are in order afterwards
        errors = three.run(begin)
        assert [str(error) for error in errors] == ["None", "out has another shape", "None"]
