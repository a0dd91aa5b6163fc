"""Collective calls of workers on several machines, which are pretended by the nodes' settings."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S, InprocCluster
from collective_groups import SMALL_CHUNKS, Array, cluster_of, errors, groups, opened, results

from pslite import Communicator, Future
from pslite.collective.machines_route import MachinesRoute
from pslite.collective.sums import DTYPES
from pslite.errors import DeadlineError, MismatchError

#: Where each worker is. A machine's ranks need not follow each other, nor be equally many.
PLACES = {
    "two and two": "aabb",
    "mixed": "abab",
    "uneven": "aaab",
    "three machines": "abbca",
}
LENGTHS = [0, 1, 7, 1000, 300_000]


def on_machines(places: str, num_servers: int = 2, **config: Any) -> InprocCluster:
    return cluster_of(len(places), num_servers, machines=places, **config)


@pytest.fixture(scope="module", params=PLACES.values(), ids=PLACES)
def places(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def group(places: str) -> Iterator[list[Communicator]]:
    """A group of workers on several machines, for the tests that break nothing."""
    with on_machines(places, chunk_bytes=8192) as cluster:
        members = opened(groups(cluster, rings=True))
        results([member.all_reduce(np.zeros(300_000)) for member in members])  # starts threads
        yield members


def by_machine(places: str, arrays: list[Array]) -> Array:
    """The sum as the machines make it: by rank on each, and then machine by machine."""
    sums = []
    for machine in dict.fromkeys(places):
        own = [array for place, array in zip(places, arrays, strict=True) if place == machine]
        total = own[0].copy()
        for array in own[1:]:
            total += array
        sums.append(total)
    for each in sums[1:]:
        sums[0] += each
    return sums[0]


def noise(size: int, length: int) -> list[Array]:
    """Numbers whose sums depend on the order, a row for each rank."""
    chance = np.random.default_rng(length)
    return [*(10.0 ** chance.integers(-6, 6, (size, length))).astype(np.float32)]


@pytest.mark.parametrize("length", LENGTHS)
def test_sums_are_in_the_order_of_machines_bit_by_bit(
    group: list[Communicator], places: str, length: int
) -> None:
    sent = noise(len(group), length)
    wanted = by_machine(places, sent)
    for _ in range(3):
        for total in results([g.all_reduce(a) for g, a in zip(group, sent, strict=True)]):
            assert total.tobytes() == wanted.tobytes()


def test_sums_may_be_written_over_the_values(group: list[Communicator], places: str) -> None:
    sent = noise(len(group), 300_000)
    wanted = by_machine(places, sent)
    results([g.all_reduce(a, out=a) for g, a in zip(group, sent, strict=True)])
    assert [each.tobytes() == wanted.tobytes() for each in sent] == [True] * len(group)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_summed(group: list[Communicator], dtype: str) -> None:
    kind = np.float32 if dtype == "bfloat16" else DTYPES[dtype]
    sent: list[Array] = [(np.arange(50) % (rank + 2)).astype(kind) for rank in range(len(group))]
    wanted = sent[0].copy()
    for array in sent[1:]:
        wanted += array
    if dtype == "bfloat16":
        sent, wanted = (
            [(a.view(np.uint32) >> 16).astype(np.uint16) for a in sent],
            (wanted.view(np.uint32) >> 16),
        )
    for g in results([g.all_reduce(a, dtype=dtype) for g, a in zip(group, sent, strict=True)]):
        np.testing.assert_array_equal(g, wanted)


@pytest.mark.parametrize(
    ("op", "combine"),
    [
        ("average", lambda rows: np.mean(rows, 0)),
        ("product", lambda rows: np.prod(rows, 0)),
        ("min", lambda rows: np.min(rows, 0)),
        ("max", lambda rows: np.max(rows, 0)),
        ("premul_sum", lambda rows: np.sum(np.multiply(rows, 0.5), 0)),
    ],
)
def test_operations(group: list[Communicator], op: str, combine: Callable[[Any], Array]) -> None:
    sent = [np.arange(1.0, 40.0) + rank for rank in range(len(group))]
    factor = 0.5 if op == "premul_sum" else None
    futures = [g.all_reduce(a, op, factor=factor) for g, a in zip(group, sent, strict=True)]
    for found in results(futures):
        np.testing.assert_allclose(found, combine(sent), rtol=1e-14)


@pytest.mark.parametrize("dtype", ["int64", "int8", "uint16"])
def test_an_average_of_integers_is_cut_off_once(group: list[Communicator], dtype: str) -> None:
    size = len(group)
    sign = 1 if dtype == "uint16" else -1
    sent = [np.array([1, sign * 5, 7 * rank], dtype) for rank in range(size)]
    wanted = [1, sign * 5, 7 * (size - 1) // 2]
    for found in results([g.all_reduce(a, "average") for g, a in zip(group, sent, strict=True)]):
        np.testing.assert_array_equal(found, wanted)
    parts = [
        group[rank].reduce_scatter(np.tile(sent[rank], (size, 1)), "average")
        for rank in range(size)
    ]
    for found in results(parts):
        np.testing.assert_array_equal(np.ravel(found), wanted)
    roots = [g.reduce(a, 1, "average") for g, a in zip(group, sent, strict=True)]
    np.testing.assert_array_equal(results(roots)[1], wanted)


def test_an_average_of_halves_does_not_overflow(group: list[Communicator]) -> None:
    large = np.full(9, 60_000, np.float16)
    for found in results([g.all_reduce(large, "average") for g in group]):
        np.testing.assert_allclose(found, large, rtol=2e-3)


@pytest.mark.parametrize("length", LENGTHS)
def test_only_the_root_gets_what_is_reduced(
    group: list[Communicator], places: str, length: int
) -> None:
    sent = noise(len(group), length)
    wanted = by_machine(places, sent)
    for root in range(len(group)):
        found = results([g.reduce(a, root) for g, a in zip(group, sent, strict=True)])
        assert [each is None for each in found] == [rank != root for rank in range(len(group))]
        assert found[root].tobytes() == wanted.tobytes()


@pytest.mark.parametrize("length", LENGTHS)
def test_a_broadcast_reaches_all(group: list[Communicator], length: int) -> None:
    for root in range(len(group)):
        arrays = [np.full(length, float(rank)) for rank in range(len(group))]
        results([g.broadcast(a, root) for g, a in zip(group, arrays, strict=True)])
        assert all(np.array_equal(each, np.full(length, float(root))) for each in arrays)


@pytest.mark.parametrize("length", LENGTHS)
def test_each_rank_gets_its_part_of_the_sum(
    group: list[Communicator], places: str, length: int
) -> None:
    size = len(group)
    rows = [noise(size, length + to) for to in range(size)]  # rows[to][rank]
    sent = [[rows[to][rank] for to in range(size)] for rank in range(size)]
    found = results([g.reduce_scatter(row) for g, row in zip(group, sent, strict=True)])
    for rank in range(size):
        assert found[rank].tobytes() == by_machine(places, rows[rank]).tobytes()


@pytest.mark.parametrize("length", [0, 1, 1000, 300_000])
def test_all_ranks_get_the_arrays_of_all(group: list[Communicator], length: int) -> None:
    sent = [np.full((length * (g.rank % 3), 2), g.rank, np.int16) for g in group]
    for found in results([g.all_gather(a) for g, a in zip(group, sent, strict=True)]):
        for array, wanted in zip(found, sent, strict=True):
            assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape)
            np.testing.assert_array_equal(array, wanted)
    assert results([g.all_gather(np.array(g.rank)) for g in group]) == [[*range(len(group))]] * len(
        group
    )


def test_calls_of_all_kinds_follow_each_other(group: list[Communicator]) -> None:
    size = len(group)
    futures: list[list[Future[Any]]] = []
    for _ in range(5):
        futures += [
            [g.all_reduce(np.ones(5000)) for g in group],
            [g.all_gather(np.full(3, g.rank)) for g in group],
            [g.barrier() for g in group],
            [g.all_to_all([np.array([g.rank, to]) for to in range(size)]) for g in group],
            [g.broadcast(np.full(9, g.rank), 1) for g in group],
            [g.all_reduce(np.ones(5), name="named") for g in group],
            [g.gather(np.full(2, g.rank), 1) for g in group],
        ]
        sums, rows, _, swapped, copies, named, gathered = map(results, futures[-7:])
        for rank in range(size):
            assert set(sums[rank]) == {size}
            assert [set(row) for row in rows[rank]] == [{each} for each in range(size)]
            assert [list(each) for each in swapped[rank]] == [[i, rank] for i in range(size)]
            assert set(copies[rank]) == {1}
            assert set(named[rank]) == {size}
        assert [int(each[0]) for each in gathered[1]] == list(range(size))


def test_nobody_leaves_a_barrier_before_the_last_has_come(group: list[Communicator]) -> None:
    for last in range(len(group)):
        early = [g.barrier() for g in group if g.rank != last]
        time.sleep(0.05)
        assert [future.done() for future in early] == [False] * len(early)
        results([*early, group[last].barrier()])


# -- what a machine sends -----------------------------------------------------------------


@pytest.mark.parametrize("places", ["aabb", "aaab", "aaaabb"])
def test_a_machine_sends_a_gradient_once_however_many_workers_it_has(places: str) -> None:
    nbytes = 4_000_000
    with on_machines(places) as cluster:
        members = opened(groups(cluster, rings=True))
        before = sent_and_received(cluster, places)
        results([g.all_reduce(np.ones(nbytes // 4, np.float32)) for g in members])
        after = sent_and_received(cluster, places)
        for machine in set(places):
            for index in range(2):
                moved = after[machine][index] - before[machine][index]
                assert nbytes <= moved < 1.02 * nbytes, (machine, index, moved)


def test_a_machine_gets_what_is_gathered_once() -> None:
    places, nbytes = "aabb", 1_000_000
    with on_machines(places) as cluster:
        members = opened(groups(cluster, rings=True))
        before = sent_and_received(cluster, places)
        results([g.all_gather(np.full(nbytes, g.rank, np.uint8)) for g in members])
        after = sent_and_received(cluster, places)
        for machine in "ab":
            sent, received = (after[machine][i] - before[machine][i] for i in range(2))
            assert 2 * nbytes <= sent < 2.04 * nbytes
            assert 4 * nbytes <= received < 4.08 * nbytes


def test_a_setting_has_every_worker_send_and_sums_in_the_order_of_ranks() -> None:
    places, sent = "abab", noise(4, 100_000)
    with on_machines(places, sum_on_machines=False) as cluster:
        members = opened(groups(cluster, rings=True))
        before = sent_and_received(cluster, places)
        found = results([g.all_reduce(a) for g, a in zip(members, sent, strict=True)])
        wanted = ((sent[0] + sent[1]) + sent[2]) + sent[3]
        assert [each.tobytes() == wanted.tobytes() for each in found] == [True] * 4
        assert wanted.tobytes() != by_machine(places, sent).tobytes()
        after = sent_and_received(cluster, places)
        assert after["a"][0] - before["a"][0] > 2 * 400_000


def sent_and_received(cluster: InprocCluster, places: str) -> dict[str, list[int]]:
    """The bytes that each machine's workers have sent and received."""
    found = {machine: [0, 0] for machine in places}
    for machine, worker in zip(places, cluster.workers, strict=True):
        for sent, received in worker.links.byte_counts().values():
            found[machine][0] += sent
            found[machine][1] += received
    return found


# -- what goes wrong ----------------------------------------------------------------------


ODD: list[Callable[[Communicator], Future[Any]]] = [
    lambda g: g.barrier(),
    lambda g: g.all_reduce(np.zeros(4)),
    lambda g: g.all_reduce(np.zeros(400_000, np.float32)),
    lambda g: g.all_reduce(np.zeros(5, np.float32), "average"),
    lambda g: g.all_gather(np.zeros(5, np.float32)),
    lambda g: g.broadcast(np.zeros(5, np.float32), 0),
    lambda g: g.gather(np.zeros(5, np.float32), 0),
]


@pytest.mark.parametrize("odd", range(len(ODD)))
@pytest.mark.parametrize("length", [5, 300_000])
def test_calls_that_differ_end_on_all_ranks_with_two_named(
    group: list[Communicator], odd: int, length: int
) -> None:
    """Also where a machine's ranks agree among themselves."""
    size = len(group)
    machines = [set(ranks) for ranks in group[0]._rings._machines.members]  # type: ignore[union-attr]
    for differ in [{0}, {size - 1}, machines[1]]:
        futures = [
            ODD[odd](g) if g.rank in differ else g.all_reduce(np.zeros(length, np.float32))
            for g in group
        ]
        for error in errors(futures):
            assert isinstance(error, MismatchError)
            usual, found = re.findall(r"rank (\d) calls", str(error)), str(error)
            assert len(usual) == 2, found
            assert len({int(rank) in differ for rank in usual}) == 2, found
            assert f"all_reduce(sum, float32, shape ({length},))" in found
        assert {each[0] for each in results([g.all_reduce(np.ones(1)) for g in group])} == {size}


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_a_lost_worker_is_named_to_all_others(victim: int) -> None:
    with on_machines("aabb", lost_after_s=0.1) as cluster:
        members = opened(groups(cluster, rings=True))
        others = [g for g in members if g.rank != victim]
        futures = [g.all_reduce(np.zeros(100_000)) for g in others]
        cluster.kill(cluster.workers[victim])
        for error in errors(futures):  # in one process its rings are closed as if it had left
            text = f"(worker {victim} .*is lost|rank {victim} has left the group)"
            assert re.search(text, str(error)), error


@pytest.mark.parametrize("leaver", [0, 1, 2, 3])
def test_a_worker_that_left_ends_the_calls_that_need_it(leaver: int) -> None:
    with on_machines("aabb") as cluster:
        members = opened(groups(cluster, rings=True))
        others = [g for g in members if g.rank != leaver]
        cluster.workers[leaver].leave().result(LIMIT_S)
        for error in errors([g.all_reduce(np.ones(100)) for g in others]):
            assert f"worker {leaver}" in str(error) or "has left" in str(error), error


def test_results_are_right_on_a_network_that_loses_messages() -> None:
    with on_machines(
        "aabca", drop_percent=10.0, resend_timeout_s=0.02, chunk_bytes=1024
    ) as cluster:
        members = opened(groups(cluster, rings=True))
        for turn in range(6):
            sent = noise(5, 20_000 + turn)
            wanted = by_machine("aabca", sent).tobytes()
            totals = [g.all_reduce(a) for g, a in zip(members, sent, strict=True)]
            copies = [g.broadcast(a.copy(), turn % 5) for g, a in zip(members, sent, strict=True)]
            rows = [g.all_gather(a) for g, a in zip(members, sent, strict=True)]
            barriers = [g.barrier() for g in members]
            assert [each.tobytes() == wanted for each in results(totals)] == [True] * 5
            for copy in results(copies):
                assert copy.tobytes() == sent[turn % 5].tobytes()
            for row in results(rows):
                assert [each.tobytes() for each in row] == [each.tobytes() for each in sent]
            results(barriers)


def test_a_long_wait_names_the_ranks_of_other_machines_that_have_not_come() -> None:
    with on_machines("aabb") as cluster:
        members = opened(groups(cluster, rings=True))
        came = [members[rank].all_reduce(np.ones(300)) for rank in (0, 1, 3)]
        began = time.monotonic()
        while not all("waiting for rank 2 for" in future.what for future in came):
            assert time.monotonic() < began + LIMIT_S, [future.what for future in came]
            time.sleep(0.05)
        with pytest.raises(DeadlineError, match="waiting for rank 2 for"):
            came[0].result(0.01)
        found = results([*came, members[2].all_reduce(np.ones(300))])
        assert {each[0] for each in found} == {4.0}


def test_groups_of_some_ranks_and_alone_on_their_machines() -> None:
    with on_machines("aabb", **SMALL_CHUNKS) as cluster:
        apart = [Communicator(cluster.workers[rank], (0, 2)) for rank in (0, 2)]
        assert {each[0] for each in results([g.all_reduce(np.ones(900)) for g in apart])} == {2.0}
        backwards = [Communicator(cluster.workers[rank], (3, 1, 2)) for rank in (3, 1, 2)]
        sent = noise(3, 1000)
        found = results([g.all_reduce(a) for g, a in zip(backwards, sent, strict=True)])
        wanted = by_machine("bab", sent)
        assert [each.tobytes() == wanted.tobytes() for each in found] == [True] * 3
        assert isinstance(backwards[0]._rings._route, MachinesRoute)  # type: ignore[union-attr]
