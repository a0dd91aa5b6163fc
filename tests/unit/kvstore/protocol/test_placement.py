"""Chunk borders and the balance of bytes over servers, by example and by property."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.protocol.placement import chunk_ranges, place
from kvstore.server.shares import server_shares

MIB = 1 << 20


def test_a_key_is_cut_into_chunks_of_one_mebibyte() -> None:
    assert chunk_ranges(600_000, 4) == [(0, 262144), (262144, 524288), (524288, 600_000)]
    assert chunk_ranges(262144, 4) == [(0, 262144)]
    assert chunk_ranges(1, 4) == [(0, 1)]


def test_an_empty_key_has_one_empty_chunk() -> None:
    assert chunk_ranges(0, 8) == [(0, 0)]


def test_an_element_larger_than_a_chunk_is_a_chunk() -> None:
    assert chunk_ranges(3, 16, chunk_bytes=10) == [(0, 1), (1, 2), (2, 3)]


@given(st.integers(1, 10**6), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 10**5))
def test_chunks_cover_a_key_without_gaps(elements: int, itemsize: int, chunk_bytes: int) -> None:
    ranges = chunk_ranges(elements, itemsize, max(chunk_bytes, elements * itemsize // 500 + 1))
    assert [ranges[0][0], ranges[-1][1]] == [0, elements]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    lengths = [stop - start for start, stop in ranges]
    assert len(set(lengths[:-1])) <= 1
    assert 1 <= lengths[-1] <= lengths[0]


def filled(parts: list[int], placed: list[int], loads: list[int]) -> list[int]:
    result = list(loads)
    for size, server in zip(parts, placed, strict=True):
        result[server] += size
    return result


def targets(total: int, shares: list[float]) -> list[float]:
    return [total * share / sum(shares) for share in shares]


def runs(placed: list[int]) -> list[int]:
    return [server for server, _ in itertools.groupby(placed)]


SIZES = st.lists(st.integers(0, MIB), min_size=1, max_size=60)
SHARES = st.lists(st.sampled_from([0.0, 0.05, 1.0, 1.0, 2.5, 7.0]), min_size=1, max_size=8).filter(
    any
)


@given(SIZES, SHARES)
def test_each_server_ends_within_one_part_of_its_target(
    parts: list[int], shares: list[float]
) -> None:
    placed = place(parts, [0] * len(shares), shares)
    loads = filled(parts, placed, [0] * len(shares))
    for load, target, share in zip(loads, targets(sum(parts), shares), shares, strict=True):
        assert abs(load - target) <= max(parts) + 1e-6
        assert share > 0 or load == 0


@given(SIZES, SHARES)
def test_the_parts_of_a_server_are_neighbours(parts: list[int], shares: list[float]) -> None:
    placed = place(parts, [0] * len(shares), shares)
    assert len(runs(placed)) == len(set(placed))


@given(st.lists(SIZES, min_size=1, max_size=10), st.integers(1, 8))
@settings(deadline=None)
def test_many_calls_keep_equal_shares_within_two_parts(calls: list[list[int]], num: int) -> None:
    loads = [0] * num
    for parts in calls:
        placed = place(parts, loads)
        assert place(parts, loads) == placed
        loads = filled(parts, placed, loads)
    largest = max(max(parts) for parts in calls)
    assert max(loads) - sum(loads) / num <= largest + 1e-6
    assert sum(loads) / num - min(loads) <= 2 * largest + 1e-6


@given(SIZES, st.lists(st.integers(0, 50 * MIB), min_size=1, max_size=8))
def test_servers_fill_up_to_one_level_and_none_beyond(parts: list[int], loads: list[int]) -> None:
    after = filled(parts, place(parts, loads), loads)
    grown = [new for new, old in zip(after, loads, strict=True) if new > old]
    lowest = min(after)
    if grown:
        assert max(grown) - lowest <= 2 * max(parts) + 1e-6


def test_keys_that_come_one_by_one_are_spread() -> None:
    loads = [0, 0, 0]
    for _ in range(9):
        loads = filled([10], place([10], loads), loads)
    assert loads == [30, 30, 30]


def test_the_tensors_of_a_model_go_out_in_two_equal_runs() -> None:
    parts = [MIB] * 20 + [100] * 40
    placed = place(parts, [0, 0])
    assert runs(placed) == [0, 1]
    assert sorted(filled(parts, placed, [0, 0])) == [10 * MIB, 10 * MIB + 4000]


def test_a_server_with_more_room_gets_more() -> None:
    assert place([10] * 10, [60, 0]) == [1] * 8 + [0] * 2


def test_a_single_part_goes_to_no_server_with_a_small_share() -> None:
    assert place([100], [0, 0, 0], [29.0, 4.0, 30.0]) == [0]


def test_parts_without_bytes_go_where_least_lies() -> None:
    assert place([0, 0], [5, 3, 9]) == [1, 1]
    assert place([0], [0, 0], [0.0, 1.0]) == [1]


def byteps_bound(n: int, k: int) -> float:
    """What the busiest of n machines with a worker and k more sends in a round, in models.

    It is never less than what a worker sends.
    """
    return max(2 * n * (n - 1) / (n * n + k * n - 2 * k), 1.0)


@pytest.mark.parametrize("n", [*(2**power for power in range(1, 13)), 3, 12, 100, 1000])
def test_bytes_of_machines_and_servers_are_near_the_optimum(n: int) -> None:
    for k in {0, n // 4, n // 2, n, 2 * n} if n < 4096 else {0, n // 4, n // 2, n}:
        homes = [f"worker's {rank}" for rank in range(n)]
        shares = server_shares(homes, homes + [f"server's {rank}" for rank in range(k)])
        # So many parts that one of them is little even for a machine that sends it n times.
        draw = random.Random(n + k)
        parts = draw.choices([MIB, MIB, MIB, 700_000, 4000], k=60 * n)
        model = sum(parts)
        loads = filled(parts, place(parts, [0] * (n + k), shares), [0] * (n + k))
        sent = [model + load * (n - 2) for load in loads[:n]] + [load * n for load in loads[n:]]
        assert max(sent) <= 1.05 * byteps_bound(n, k) * model
        for load, share in zip(loads, shares, strict=True):
            assert load <= max(1.05 * share * model, share * model + MIB)
