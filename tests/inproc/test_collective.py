"""Collective calls of workers, over in-process clusters."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S, InprocCluster
from collective_groups import (
    SMALL_CHUNKS,
    Array,
    cluster_of,
    errors,
    groups,
    opened,
    results,
    sit_together,
)

from pslite import CollectiveServer, Communicator, Future, Postoffice, Role
from pslite.collective.sums import DTYPES
from pslite.errors import ClosedError, DeadlineError, MismatchError, NodeLostError, UsageError


@pytest.fixture(scope="module", params=["servers", "servers beside two workers", "rings"])
def three(request: pytest.FixtureRequest) -> Iterator[list[Communicator]]:
    """A group of three workers on two servers, for the tests that break nothing."""
    with cluster_of(3, 2, **SMALL_CHUNKS, shm=request.param == "rings") as cluster:
        if request.param == "servers beside two workers":
            sit_together(cluster)
        yield opened(groups(cluster, rings=request.param == "rings"))


def values(dtype: str, rank: int, length: int = 7) -> Array:
    if dtype == "bool":
        return (np.arange(length) + rank) % 2 == 0
    if dtype == "bfloat16":  # 1.5, 2.5, ... have few digits
        exact = np.arange(length, dtype=np.float32) + rank + 0.5
        return (exact.view(np.uint32) >> 16).astype(np.uint16)
    return (np.arange(length) + rank + 1).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_get_the_sum_in_every_dtype(three: list[Communicator], dtype: str) -> None:
    sent = [values(dtype, rank) for rank in range(3)]
    got = results([g.all_reduce(a, dtype=dtype) for g, a in zip(three, sent, strict=True)])
    if dtype == "bfloat16":
        wanted: Array = (np.arange(7, dtype=np.float32) * 3 + 4.5).view(np.uint32) >> 16
    else:
        wanted = sent[0] + sent[1] + sent[2]
    for each in got:
        np.testing.assert_array_equal(each, wanted)
        assert each.dtype == sent[0].dtype


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        ("sum", [12, 6]),
        ("average", [4, 2]),
        ("product", [48, 6]),
        ("min", [2, 1]),
        ("max", [6, 3]),
        ("premul_sum", [6, 3]),
    ],
)
def test_operations_on_floats(three: list[Communicator], op: str, wanted: list[int]) -> None:
    factor = 0.5 if op == "premul_sum" else None
    sent = [np.array([2 * r, r], np.float32) for r in (1, 2, 3)]
    futures = [g.all_reduce(a, op, factor=factor) for g, a in zip(three, sent, strict=True)]
    assert [each.tolist() for each in results(futures)] == [wanted] * 3


@pytest.mark.parametrize(("op", "wanted"), [("band", 0), ("bor", 7), ("bxor", 7), ("max", 4)])
def test_operations_on_integers(three: list[Communicator], op: str, wanted: int) -> None:
    futures = [g.all_reduce(np.array([1 << r]), op) for r, g in enumerate(three)]
    assert results(futures) == [wanted] * 3


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1000,), (17, 19)])
def test_any_shape_is_summed_in_chunks_on_both_servers(
    three: list[Communicator], shape: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(3)
    sent = [np.asarray(rng.standard_normal(shape)) for _ in range(3)]
    got = results([g.all_reduce(a) for g, a in zip(three, sent, strict=True)])
    for each in got:
        assert each.shape == shape
        assert each.tobytes() == (sent[0] + sent[1] + sent[2]).tobytes()


@pytest.mark.parametrize("nbytes", [1 << 18, (5 << 20) + 40, 8 << 20])
def test_each_server_gets_an_equal_part_of_a_large_array(nbytes: int) -> None:
    with cluster_of(1, 3, shm=False) as cluster:
        node = cluster.workers[0]
        array = np.ones(nbytes // 8)
        assert results([groups(cluster)[0].all_reduce(array)])[0].tobytes() == array.tobytes()
        sent = {peer: counts[0] for peer, counts in node.links.byte_counts().items()}
        parts = [sent[server.info.uid] for server in cluster.servers if server.info is not None]
        assert sum(parts) >= nbytes
        assert max(parts) - min(parts) < 4096


def test_the_result_may_be_written_over_the_values(three: list[Communicator]) -> None:
    arrays = [np.full(500, float(rank)) for rank in range(3)]
    got = results([g.all_reduce(a, out=a) for g, a in zip(three, arrays, strict=True)])
    for array, value in zip(arrays, got, strict=True):
        assert value is array
        assert set(array.tolist()) == {3.0}


def test_sums_have_the_same_bits_whoever_comes_first(three: list[Communicator]) -> None:
    sent = [np.float32([1e8, 1.0]), np.float32([-1e8, 2.0**-24]), np.float32([1.0, 2.0**-24])]
    for order in [(0, 1, 2), (2, 1, 0), (1, 2, 0)]:
        futures = {rank: three[rank].all_reduce(sent[rank]) for rank in order}
        got = [futures[rank].result(LIMIT_S).tolist() for rank in range(3)]
        assert got == [[1.0, 1.0]] * 3


def test_a_broadcast_fills_the_arrays_of_the_others(three: list[Communicator]) -> None:
    for root in range(3):
        arrays = [np.full((40, 3), rank, np.int16) for rank in range(3)]
        got = results([g.broadcast(a, root) for g, a in zip(three, arrays, strict=True)])
        assert [set(each.ravel().tolist()) for each in arrays] == [{root}] * 3
        assert all(value is array for value, array in zip(got, arrays, strict=True))


def test_nobody_leaves_a_barrier_before_the_last_has_come(three: list[Communicator]) -> None:
    first = [three[0].barrier(), three[2].barrier()]
    with pytest.raises(TimeoutError, match=r"barrier\(\), the call number"):
        first[0].result(0.05)
    results([*first, three[1].barrier()])


def test_named_calls_match_by_name_in_any_order(three: list[Communicator]) -> None:
    names = ["a", "b", "c"]
    futures: dict[tuple[int, str], Future[Array]] = {}
    for rank, group in enumerate(three):
        for name in names[rank:] + names[:rank]:
            value = np.array([float(ord(name))])
            futures[rank, name] = group.all_reduce(value, "max", name=name)
    for (_, name), future in futures.items():
        assert future.result(LIMIT_S).tolist() == [float(ord(name))]


def test_a_name_is_free_again_when_its_call_is_done(three: list[Communicator]) -> None:
    held = three[0].barrier(name="again")
    with pytest.raises(UsageError, match="named 'again' is under way"):
        three[0].barrier(name="again")
    results([held, three[1].barrier(name="again"), three[2].barrier(name="again")])
    for _ in range(20):
        results([group.barrier(name="again") for group in three])


def test_calls_of_several_threads_all_end(three: list[Communicator]) -> None:
    sums: list[list[float]] = []

    def run(group: Communicator, name: str) -> None:
        for _ in range(20):
            sums.append(group.all_reduce(np.ones(40), name=name).result(LIMIT_S).tolist())

    threads = [
        threading.Thread(target=run, args=(g, name)) for g in three for name in ("left", "right")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sums == [[3.0] * 40] * 120


def test_groups_of_some_workers_do_not_disturb_each_other() -> None:
    with cluster_of(4, 2) as cluster:
        nodes = cluster.workers
        pairs = [Communicator(nodes[r], ranks) for ranks in ((0, 3), (2, 1)) for r in ranks]
        assert [(g.rank, g.size, g.ranks) for g in pairs] == [
            (0, 2, (0, 3)),
            (1, 2, (0, 3)),
            (0, 2, (2, 1)),
            (1, 2, (2, 1)),
        ]
        got = results(
            [g.all_reduce(np.array([10**r])) for r, g in zip((0, 3, 2, 1), pairs, strict=True)]
        )
        assert [each.tolist() for each in got] == [[1001], [1001], [110], [110]]
        arrays = [np.array([r]) for r in (0, 3, 2, 1)]
        results([g.broadcast(a, 1) for g, a in zip(pairs, arrays, strict=True)])
        assert [each.tolist() for each in arrays] == [[3], [3], [1], [1]]


def test_two_groups_of_one_name_are_told_apart_by_the_order_of_their_making() -> None:
    with cluster_of(2, 1) as cluster:
        first, second, named = groups(cluster), groups(cluster), groups(cluster, name="x")
        futures = [
            first[0].all_reduce(np.array([1])),
            second[0].all_reduce(np.array([10])),
            named[0].all_reduce(np.array([100])),
            named[1].all_reduce(np.array([100])),
            second[1].all_reduce(np.array([10])),
            first[1].all_reduce(np.array([1])),
        ]
        assert [each.tolist() for each in results(futures)] == [[2], [20], [200], [200], [20], [2]]


DIFFERENT: list[tuple[Callable[[Communicator], Future[Any]], str]] = [
    (
        lambda g: g.broadcast(np.zeros(4, np.float32), 0),
        r"broadcast\(float32, shape \(4,\), root 0",
    ),
    (lambda g: g.barrier(), r"barrier\(\)"),
    (lambda g: g.all_reduce(np.zeros(4)), r"all_reduce\(sum, float64, shape \(4,\)\)"),
    (lambda g: g.all_reduce(np.zeros((2, 2), np.float32)), r"shape \(2, 2\)\)"),
    (lambda g: g.all_reduce(np.zeros(400, np.float32)), r"shape \(400,\)\)"),
    (lambda g: g.all_reduce(np.zeros(4, np.float32), "max"), r"all_reduce\(max, float32"),
    (lambda g: g.all_reduce(np.zeros(4, np.float32), "premul_sum", factor=2), "factor 2"),
]


@pytest.mark.parametrize(("call", "text"), DIFFERENT)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_different_calls_end_on_all_ranks_with_both_named(
    three: list[Communicator],
    call: Callable[[Communicator], Future[Any]],
    text: str,
    place: int,
) -> None:
    usual = r"all_reduce\(sum, float32, shape \(4,\)\)"
    futures = []
    for rank, group in enumerate(three):
        odd = rank == place
        futures.append(call(group) if odd else group.all_reduce(np.zeros(4, np.float32)))
    found = errors(futures)
    for error in found:
        assert isinstance(error, MismatchError)
        assert re.search(rf"rank {place} calls [^;]*{text}", str(error))
        assert re.search(rf"rank [^{place}] calls {usual}", str(error))
    assert results([g.all_reduce(np.ones(1)) for g in three]) == [3.0] * 3


@pytest.mark.parametrize("rings", [False, True])
def test_ranks_that_come_late_to_a_call_that_failed_get_its_error(rings: bool) -> None:
    with cluster_of(3, 2, **SMALL_CHUNKS) as cluster:
        all_ = opened(groups(cluster, rings=rings))
        early = [all_[0].all_reduce(np.zeros(1000)), all_[1].barrier()]
        assert [type(error) for error in errors(early)] == [MismatchError] * 2
        late = errors([all_[2].all_reduce(np.zeros(1000))])
        assert isinstance(late[0], MismatchError)
        assert results([g.all_reduce(np.ones(1)) for g in all_]) == [3.0] * 3


@pytest.mark.parametrize("rings", [False, True])
def test_a_lost_worker_is_named_to_those_who_wait_for_it(rings: bool) -> None:
    with cluster_of(3, 2, lost_after_s=0.1, **SMALL_CHUNKS) as cluster:
        all_ = groups(cluster, rings=rings)
        futures = [g.all_reduce(np.zeros(1000)) for g in all_[:2]]
        cluster.kill(cluster.workers[2])
        for error in errors(futures):
            assert isinstance(error, NodeLostError)
            assert (error.role, error.rank) == ("worker", 2)


@pytest.mark.parametrize("rings", [False, True])
def test_a_worker_that_left_ends_the_calls_that_need_it_and_no_others(rings: bool) -> None:
    with cluster_of(3, 2, **SMALL_CHUNKS) as cluster:
        all_ = opened(groups(cluster, rings=rings))
        pair = opened([Communicator(node, (0, 1)) for node in cluster.workers[:2]])
        given = all_[2].all_reduce(np.ones(100))
        cluster.workers[2].leave().result(LIMIT_S)
        got = results([g.all_reduce(np.ones(100)) for g in all_[:2]])
        assert [set(each.tolist()) for each in got] == [{3.0}] * 2
        del given
        for error in errors([g.all_reduce(np.ones(100)) for g in all_[:2]]):
            assert isinstance(error, NodeLostError)
            assert "worker 2" in str(error)
        assert results([g.all_reduce(np.ones(1)) for g in pair]) == [2.0] * 2


def test_ranks_without_data_count_as_zeros_until_all_have_joined() -> None:
    with cluster_of(3, 2, **SMALL_CHUNKS) as cluster:
        all_ = groups(cluster)
        for _ in range(2):
            ones = np.ones(100)
            first = [g.all_reduce(ones) for g in all_]
            joins = [all_[1].join()]
            with pytest.raises(UsageError, match="this rank has joined"):
                all_[1].barrier()
            second = [all_[r].all_reduce(ones, "average") for r in (0, 2)]
            joins.append(all_[2].join())
            named = all_[0].all_reduce(ones, name="x")
            assert {each[0] for each in results(first)} == {3.0}
            assert {each[0] for each in results(second)} == {2.0 / 3.0}
            assert named.result(LIMIT_S)[99] == 1.0
            (error,) = errors([all_[0].barrier()])
            assert "has joined and counts as zeros" in str(error)
            assert results([all_[0].join(), *joins]) == [0, 0, 0]
            results([g.barrier(name="x") for g in all_])


def test_a_lost_worker_ends_the_wait_of_those_who_have_joined() -> None:
    with cluster_of(2, 2, lost_after_s=0.1) as cluster:
        joined = groups(cluster)[0].join()
        cluster.kill(cluster.workers[1])
        (error,) = errors([joined])
        assert isinstance(error, NodeLostError)


def test_a_lost_server_ends_calls_with_its_name() -> None:
    with cluster_of(2, 2, lost_after_s=0.1, **SMALL_CHUNKS) as cluster:
        future = groups(cluster)[0].all_reduce(np.zeros(1000))
        cluster.kill(cluster.servers[1])
        (error,) = errors([future])
        assert isinstance(error, NodeLostError)
        assert (error.role, error.rank) == ("server", 1)


def test_a_call_that_fails_on_a_server_fails_on_all_ranks_and_the_next_succeeds() -> None:
    broken = threading.Event()
    broken.set()

    def serve_broken(node: Postoffice) -> None:
        if node.role is Role.SERVER:
            CollectiveServer(node, add_up)

    def add_up(dtype: str, arrays: Any, out: Array) -> bool:
        if broken.is_set() and arrays[0][0] == 5.0:
            raise MemoryError("no room")
        return False

    with InprocCluster(2, 2, prepare=serve_broken, **SMALL_CHUNKS, shm=False) as cluster:
        pair = groups(cluster)
        array = np.arange(320.0)
        array[128] = 5.0  # the first of a chunk
        array[5] = 0.0
        for error in errors([g.all_reduce(array) for g in pair]):
            assert "MemoryError: no room" in str(error)
        broken.clear()
        got = results([g.all_reduce(array) for g in pair])
        np.testing.assert_array_equal(got[0], array * 2)


@pytest.mark.parametrize("way", ["servers", "rings", "first"])
def test_a_long_wait_names_the_call_and_the_ranks_that_have_not_made_it(way: str) -> None:
    with cluster_of(4, 2, **SMALL_CHUNKS) as cluster:
        all_ = groups(cluster, rings=way != "servers")
        if way == "rings":
            opened(all_)
        waiting = [g.all_reduce(np.ones(300)) for g in all_[:2]]
        text = (
            r"all_reduce\(sum, float64, shape \(300,\)\), the call number \d of the group of "
            r"workers 0, 1, 2, 3: waiting for ranks 2, 3 for \d s"
        )
        began = time.monotonic()
        while not all(re.fullmatch(text, future.what) for future in waiting):
            assert time.monotonic() < began + LIMIT_S, [future.what for future in waiting]
            time.sleep(0.02)
        with pytest.raises(DeadlineError, match=r"for ranks 2, 3 for \d s"):
            waiting[0].result(0.01)
        assert set(results([*waiting, *(g.all_reduce(np.ones(300)) for g in all_[2:])])[3]) == {4}


def test_what_cannot_be_called_is_refused_at_the_caller(three: list[Communicator]) -> None:
    group = three[0]
    refused: list[tuple[str, Callable[[], object]]] = [
        ("NumPy array, got list", lambda: group.all_reduce([1.0])),  # type: ignore[arg-type]
        ("C-contiguous", lambda: group.all_reduce(np.zeros((3, 3))[:, 0])),
        ("dtype object", lambda: group.all_reduce(np.array([None]))),
        ("dtype >f4", lambda: group.all_reduce(np.zeros(3, ">f4"))),
        ("bfloat16 of uint16", lambda: group.all_reduce(np.zeros(3), dtype="bfloat16")),
        ("unknown op 'mean'", lambda: group.all_reduce(np.zeros(3), "mean")),
        (
            "'average' does not apply to bool",
            lambda: group.all_reduce(np.zeros(3, bool), "average"),
        ),
        ("'band' does not apply to float", lambda: group.all_reduce(np.zeros(3), "band")),
        ("'max' does not apply to complex", lambda: group.all_reduce(np.zeros(3, complex), "max")),
        ("needs a factor", lambda: group.all_reduce(np.zeros(3), "premul_sum")),
        ("no other op takes one", lambda: group.all_reduce(np.zeros(3), factor=2.0)),
        ("finite", lambda: group.all_reduce(np.zeros(3), "premul_sum", factor=float("inf"))),
        ("a rank of the group, 0 to 2, got 3", lambda: group.broadcast(np.zeros(3), 3)),
        ("out of shape", lambda: group.all_reduce(np.zeros(3), out=np.zeros(4))),
        ("read-only", lambda: group.broadcast(np.frombuffer(b"12345678"), 1)),
        ("must not be empty", lambda: group.barrier(name="")),
        ("different ranks", lambda: Communicator(group.node, (0, 0))),
        ("different ranks", lambda: Communicator(group.node, (0, 3))),
        ("not among the group's ranks", lambda: Communicator(group.node, (1, 2))),
    ]
    for text, call in refused:
        with pytest.raises(UsageError, match=text):
            call()
    assert results([g.all_reduce(np.ones(1)) for g in three]) == [3.0] * 3


def test_a_closed_group_makes_no_calls() -> None:
    with cluster_of(1, 1) as cluster:
        (group,) = groups(cluster)
        future = group.all_reduce(np.ones(1))
        group.close()
        with pytest.raises(ClosedError):
            group.barrier()
        assert future.result(LIMIT_S) == 1.0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_that_closes_a_group_leaves_it_to_its_parent() -> None:
    """As a script's last lines do that a child runs, too."""
    with cluster_of(2, 1, **SMALL_CHUNKS) as cluster:
        pair = opened(groups(cluster, rings=True))
        pid = os.fork()
        if pid == 0:
            try:
                pair[0].close()
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        early = pair[1].all_reduce(np.ones(1))
        assert not early.done()  # it looks whether the other has left
        assert results([pair[0].all_reduce(np.ones(1)), early]) == [2.0] * 2


def test_only_workers_make_groups() -> None:
    with cluster_of(1, 1) as cluster, pytest.raises(UsageError, match="node of a worker"):
        Communicator(cluster.servers[0])
