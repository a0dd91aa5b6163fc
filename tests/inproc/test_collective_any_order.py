"""Large calls in an order of each rank's own: by shared memory, as one order of all ranks."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S, InprocCluster
from collective_groups import Array, cluster_of, errors, groups, results

from pslite import Communicator, Future
from pslite.collective import ring_opening
from pslite.collective.shared_memory_route import SharedMemoryRoute
from pslite.errors import MismatchError, NodeLostError, UsageError
from pslite.memory.ring import Ring
from pslite.protocol.collective import CallKey

LARGE = 40_000
"""Floats of more than 128 KiB."""
NAMES = "abcdef"


def opened(members: list[Communicator]) -> list[Communicator]:
    """The same, whose rings are open: a test leaves nothing new behind."""
    results([member.all_reduce(np.zeros(LARGE), name="first") for member in members])
    return members


@pytest.fixture(scope="module", params=["aaa", "abab", "abb"])
def places(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def members(places: str) -> Iterator[list[Communicator]]:
    """A group on one machine or two, for the tests that break nothing; two servers."""
    with cluster_of(len(places), 2, machines=places, chunk_bytes=8192) as cluster:
        yield opened(groups(cluster, any_order=True))


def values(rank: int, name: str) -> Array:
    return np.arange(float(LARGE)) + 1000.0 * rank + ord(name)


def total(size: int, name: str) -> Array:
    return sum((values(rank, name) for rank in range(size)), np.zeros(LARGE))


def test_large_calls_with_names_go_by_shared_memory_in_any_order(
    members: list[Communicator], by_servers: list[str]
) -> None:
    for seed in range(5):
        futures: list[tuple[str, Future[Array]]] = []
        for group in members:
            names = random.Random(seed * 10 + group.rank).sample(NAMES, len(NAMES))
            futures += [(n, group.all_reduce(values(group.rank, n), name=n)) for n in names]
        for name, future in futures:
            np.testing.assert_array_equal(future.result(LIMIT_S), total(len(members), name))
    assert by_servers == []


def test_a_call_that_waits_for_a_rank_delays_no_other(members: list[Communicator]) -> None:
    *most, last = members
    early = [group.all_reduce(values(group.rank, "a"), name="early") for group in most]
    for name in "bcb":
        for found in results([g.all_reduce(values(g.rank, name), name=name) for g in members]):
            np.testing.assert_array_equal(found, total(len(members), name))
    assert not any(future.done() for future in early)
    results([*early, last.all_reduce(values(last.rank, "a"), name="early")])


def test_small_calls_and_those_of_any_size_go_by_the_servers_meanwhile(
    members: list[Communicator], by_servers: list[str]
) -> None:
    size = len(members)
    futures: list[list[Future[Any]]] = []
    for group in members:
        calls: list[Callable[[], Future[Any]]] = [
            lambda g=group: g.all_reduce(np.ones(5), name="small"),  # type: ignore[misc]
            lambda g=group: g.all_gather(np.ones(LARGE), name="gathered"),  # type: ignore[misc]
            lambda g=group: g.all_reduce(np.ones(LARGE), name="large"),  # type: ignore[misc]
            lambda g=group: g.broadcast(values(g.rank, "x"), 1, name="rows"),  # type: ignore[misc]
        ]
        order = random.Random(group.rank).sample(range(4), 4)
        made = {number: calls[number]() for number in order}
        futures.append([made[number] for number in range(4)])
    for small, gathered, large, rows in map(results, futures):
        assert set(small) == set(large) == {size}
        assert [len(each) for each in gathered] == [LARGE] * size
        np.testing.assert_array_equal(rows, values(1, "x"))
    assert set(by_servers) == {"small"}


def test_calls_without_a_name_are_matched_by_their_order_beside_the_others(
    members: list[Communicator], by_servers: list[str]
) -> None:
    futures = []
    for group in members:
        calls = {
            name: lambda n=name, g=group: g.all_reduce(values(g.rank, n[0]), name=n[1:] or None)
            for name in ("a", "b", "cx", "dy")
        }
        order = ["a", "b", "cx", "dy"] if group.rank % 2 else ["dy", "a", "cx", "b"]
        futures += [(name[0], calls[name]()) for name in order]  # type: ignore[no-untyped-call]
    for name, future in futures:
        np.testing.assert_array_equal(future.result(LIMIT_S), total(len(members), name))
    assert by_servers == []


def test_a_name_is_under_way_until_its_call_has_ended(members: list[Communicator]) -> None:
    first, *others = members
    for _ in range(3):
        held = first.all_reduce(np.ones(LARGE), name="again")
        with pytest.raises(UsageError, match="named 'again' is under way"):
            first.all_reduce(np.ones(LARGE), name="again")
        results([held, *(group.all_reduce(np.ones(LARGE), name="again") for group in others)])


@pytest.mark.parametrize("name", ["x", None])
@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (lambda g, name: g.all_reduce(np.ones(LARGE), "max", name=name), r"all_reduce\(max"),
        (lambda g, name: g.all_reduce(np.ones(5), name=name), r"shape \(5,\)"),
        (lambda g, name: g.all_gather(np.ones(5), name=name), r"all_gather"),
        (lambda g, name: g.broadcast(np.ones(LARGE), 1, name=name), r"broadcast"),
        (lambda g, name: g.barrier(name=name), r"barrier"),
    ],
    ids=["op", "small", "any size", "kind", "barrier"],
)
def test_calls_that_differ_end_on_all_ranks_with_both_named(
    members: list[Communicator], odd: Callable[..., Future[Any]], text: str, name: str | None
) -> None:
    for differs in (0, len(members) - 1):
        futures = [
            odd(g, name) if g.rank == differs else g.all_reduce(np.ones(LARGE), name=name)
            for g in members
        ]
        for error in errors(futures):
            assert isinstance(error, MismatchError)
            assert re.search(rf"rank {differs} calls [^;]*{text}", str(error))
        got = results([g.all_reduce(np.ones(LARGE), name=name) for g in members])
        assert {each[7] for each in got} == {len(members)}


def test_a_machine_sends_a_gradient_once_whatever_the_order(places: str) -> None:
    nbytes = 4_000_000
    with cluster_of(len(places), 2, machines=places) as cluster:
        group = opened(groups(cluster, any_order=True))
        before = bytes_sent(cluster, places)
        futures = []
        for member in group:
            names = NAMES if member.rank % 2 else NAMES[::-1]
            part = np.ones(nbytes // 4 // len(NAMES), np.float32)
            futures += [member.all_reduce(part, name=name) for name in names]
        results(futures)
        after = bytes_sent(cluster, places)
        wanted = 0 if len(set(places)) == 1 else nbytes
        for machine in set(places):
            assert wanted * 0.99 <= after[machine] - before[machine] < wanted * 1.02 + 20_000


def bytes_sent(cluster: InprocCluster, places: str) -> dict[str, int]:
    """The bytes that each machine's workers have sent."""
    found = dict.fromkeys(places, 0)
    for machine, worker in zip(places, cluster.workers, strict=True):
        found[machine] += sum(sent for sent, _ in worker.links.byte_counts().values())
    return found


# -- ranks that join ----------------------------------------------------------------------


def test_ranks_that_have_joined_count_as_zeros_and_the_servers_add_up(
    places: str, by_servers: list[str]
) -> None:
    with cluster_of(len(places), 2, machines=places) as cluster:
        all_ = opened(groups(cluster, any_order=True))
        size, ones = len(all_), np.ones(LARGE)
        for _ in range(2):
            first = [g.all_reduce(ones, name="x") for g in all_]
            joins = [all_[1].join()]
            with pytest.raises(UsageError, match="this rank has joined"):
                all_[1].all_reduce(ones, name="x")
            results(first)
            assert by_servers == []
            second = [g.all_reduce(ones, "average", name="x") for g in all_ if g.rank != 1]
            assert {each[9] for each in results(second)} == {(size - 1) / size}
            assert by_servers == ["x"] * (size - 1)
            (error,) = errors([all_[0].all_reduce(ones, "max", name="y")])
            assert "has joined and counts as zeros" in str(error)
            joins += [g.join() for g in all_ if g.rank != 1]
            assert len(set(results(joins))) == 1
            by_servers.clear()


def test_a_rank_that_joins_at_once_takes_part_in_the_calls_that_it_has_made(places: str) -> None:
    """Its rings are not open yet when it joins, in the first turn."""
    with cluster_of(len(places), 2, machines=places) as cluster:
        all_ = groups(cluster, any_order=True)
        first, *others = all_
        for _ in range(2):
            futures = [first.all_reduce(values(0, name), name=name) for name in "ab"]
            joins = [first.join()]
            for group in others:
                futures += [group.all_reduce(values(group.rank, n), name=n) for n in "ba"]
                joins.append(group.join())
            order = "ab" + "ba" * len(others)
            for name, found in zip(order, results(futures), strict=True):
                np.testing.assert_array_equal(found, total(len(all_), name))
            results(joins)


# -- what goes wrong ----------------------------------------------------------------------


def test_a_lost_worker_is_named_to_those_who_wait_for_it(places: str) -> None:
    with cluster_of(len(places), 2, machines=places, lost_after_s=0.1) as cluster:
        all_ = opened(groups(cluster, any_order=True))
        futures = [g.all_reduce(np.ones(LARGE), name="x") for g in all_[:-1]]
        cluster.kill(cluster.workers[-1])
        for error in errors(futures):
            assert isinstance(error, NodeLostError)
            assert (error.role, error.rank) == ("worker", len(all_) - 1)


def test_a_worker_that_left_ends_the_calls_that_need_it(places: str) -> None:
    with cluster_of(len(places), 2, machines=places) as cluster:
        all_ = opened(groups(cluster, any_order=True))
        cluster.workers[0].leave().result(LIMIT_S)
        for error in errors([g.all_reduce(np.ones(LARGE), name="x") for g in all_[1:]]):
            assert isinstance(error, NodeLostError)
            assert "worker 0" in str(error)


def test_a_long_wait_names_the_call_and_the_ranks_that_have_not_made_it() -> None:
    with cluster_of(4, 2) as cluster:
        all_ = opened(groups(cluster, any_order=True))
        waiting = [g.all_reduce(np.ones(LARGE), name="x") for g in all_[:2]]
        text = (
            r"all_reduce\(sum, float64, shape \(40000,\)\), the call named 'x' of the group of "
            r"workers 0, 1, 2, 3: waiting for ranks 2, 3 for \d s"
        )
        began = time.monotonic()
        while not all(re.fullmatch(text, future.what) for future in waiting):
            assert time.monotonic() < began + LIMIT_S, [future.what for future in waiting]
            time.sleep(0.02)
        results([*waiting, *(g.all_reduce(np.ones(LARGE), name="x") for g in all_[2:])])


def no_memory(_: int) -> Ring:
    raise OSError("no memory")


def test_calls_go_by_the_servers_where_one_rank_has_no_shared_memory(
    by_servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster_of(3, 2) as cluster:
        memory = iter([Ring, Ring, no_memory])
        monkeypatch.setattr(ring_opening, "Ring", lambda nbytes: next(memory)(nbytes))
        all_ = groups(cluster, any_order=True)
        for name in "ab":
            got = results([g.all_reduce(np.ones(LARGE), name=name) for g in all_])
            assert {each[3] for each in got} == {3.0}
        assert sorted(by_servers) == ["a"] * 3 + ["b"] * 3
        for group in all_:  # and not all by one of them
            asker, keys = group._servers._asker, (CallKey(group._group, name, 1) for name in NAMES)
            assert len({asker.server_of(key, 0) for key in keys}) == 2


def test_a_rank_that_cannot_begin_its_call_ends_the_group_and_no_sum_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with cluster_of(3, 1) as cluster:
        all_ = opened(groups(cluster, any_order=True))
        make = SharedMemoryRoute.make

        def failing(self: SharedMemoryRoute, key: CallKey, *rest: Any) -> Future[Any]:
            if key.name == "a" and self is all_[1]._rings._route:  # type: ignore[union-attr]
                raise MemoryError("no room")
            return make(self, key, *rest)

        monkeypatch.setattr(SharedMemoryRoute, "make", failing)
        futures = [
            group.all_reduce(values(group.rank, name), name=name)
            for name in "ab"  # of one shape, so that only their order tells them apart
            for group in all_
        ]
        found = errors(futures)
        assert isinstance(found[1], MemoryError)


def test_a_name_is_free_again_when_the_rings_could_not_be_opened_for_a_loss() -> None:
    with cluster_of(2, 1, lost_after_s=0.1) as cluster:
        group = Communicator(cluster.workers[0], any_order=True)
        first = group.all_reduce(np.ones(LARGE), name="a")  # waits for the other rank's rings
        cluster.kill(cluster.workers[1])
        for make in (lambda: first, lambda: group.all_reduce(np.ones(LARGE), name="a")):
            with pytest.raises(NodeLostError, match="worker 1"):
                make().result(LIMIT_S)


def test_a_group_that_is_closed_before_its_rings_are_open_keeps_none() -> None:
    with cluster_of(2, 1) as cluster:
        early = Communicator(cluster.workers[0], any_order=True)
        early.close()
        late = Communicator(cluster.workers[1], any_order=True)
        assert late._rings is not None
        assert late._rings._opened is not None
        assert late._rings._opened.result(LIMIT_S) is None
        late.close()


def test_workers_alone_on_their_machines_ask_nothing(by_servers: list[str]) -> None:
    with cluster_of(2, 2, machines="ab") as cluster:
        pair = groups(cluster, any_order=True)
        got = results([g.all_reduce(np.ones(LARGE), name="x") for g in pair])
        assert ({each[3] for each in got}, by_servers) == ({2.0}, ["x"] * 2)
        assert pair[0]._rings is None
