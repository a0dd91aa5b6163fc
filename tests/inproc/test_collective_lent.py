"""Arrays that a rank lends to a server in its own process, over in-process clusters."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S, InprocCluster
from collective_groups import Array, cluster_of, groups, results, sit_together

from pslite import CollectiveServer, Future, Postoffice, Role
from pslite.collective import pending_call, server
from pslite.collective.sums import BFLOAT16, DTYPES
from pslite.errors import NodeLostError
from pslite.node.customer import Incoming


def numbers(dtype: str, rank: int, length: int) -> Array:
    """Values whose sum depends on the order of its terms; bools and integers of all bits."""
    rng = np.random.default_rng(rank)
    kind = DTYPES[dtype].kind
    if dtype == BFLOAT16:
        return (rng.standard_normal(length).astype(np.float32).view(np.uint32) >> 16).astype("u2")
    if kind in "fc":
        return rng.standard_normal(length).astype(dtype)
    return rng.integers(0, 2 if kind == "b" else 100, length).astype(dtype)


def until(is_so: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < limit, "this has not come about"
        time.sleep(0.001)


def busy_until(cluster: InprocCluster, rank: int, go_on: threading.Event) -> None:
    """Let a worker's I/O thread accept nothing more until the event."""
    for _ in range(2):  # a request is queued twice before it is sent
        cluster.workers[rank].io_queue.perform(lambda: None).result(LIMIT_S)
    cluster.workers[rank].call(lambda: bool(go_on.wait(LIMIT_S)) and None)


@pytest.mark.parametrize("kind", ["broadcast", "scatter", "all_gather", "all_to_all"])
def test_a_rank_beside_its_server_may_change_its_array_when_its_call_is_done(kind: str) -> None:
    """The server reads it in place, and sends it to a rank that is busy until it has changed."""
    with cluster_of(2, 1, shm=False) as cluster:
        sit_together(cluster)
        first, second = groups(cluster)
        array, go_on = np.arange(1000.0), threading.Event()
        parts = [array[:10], array[10:]]
        calls: dict[str, tuple[Callable[[], Future[Any]], Callable[[], Future[Any]]]] = {
            "broadcast": (
                lambda: first.broadcast(array, 0),
                lambda: second.broadcast(np.zeros(1000), 0),
            ),
            "scatter": (lambda: first.scatter(parts, 0), lambda: second.scatter(None, 0)),
            "all_gather": (lambda: first.all_gather(array), lambda: second.all_gather(array[:0])),
            "all_to_all": (
                lambda: first.all_to_all(parts),
                lambda: second.all_to_all([array[:0], array[:0]]),
            ),
        }
        own, others = calls[kind]
        theirs = others()
        busy_until(cluster, 1, go_on)
        own().result(LIMIT_S)
        array[:] = 0
        go_on.set()
        found = theirs.result(LIMIT_S)
    whole = found if isinstance(found, np.ndarray) else np.concatenate(found)
    assert whole[-1] == 999.0, "the value from before the change"


@pytest.fixture
def own_sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each sum for which a server needs memory of its own; small ones count, too."""
    made: list[int] = []
    new_array = server.new_array

    def counted(node: Any, shape: Any, dtype: Any) -> Array:
        array = new_array(node, shape, dtype)
        made.append(array.nbytes)
        return array

    monkeypatch.setattr(server, "new_array", counted)
    for module in (server, pending_call):
        monkeypatch.setattr(module, "IN_PLACE_BYTES", 1)
    return made


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_sum_in_place_has_the_bits_of_another(num_ranks: int, own_sums: list[int]) -> None:
    with cluster_of(num_ranks, num_ranks, shm=False, chunk_bytes=250) as cluster:
        sit_together(cluster)
        ranks = groups(cluster)
        for dtype, op in [*((dtype, "sum") for dtype in DTYPES), ("float32", "average")]:
            arrays = [numbers(dtype, rank, 1500) for rank in range(num_ranks)]
            pairs = list(zip(ranks, arrays, strict=True))
            wanted = results([rank.all_reduce(array, op, dtype=dtype) for rank, array in pairs])
            own_sums.clear()
            found = results(
                [rank.all_reduce(array, op, dtype=dtype, out=array) for rank, array in pairs]
            )
            for array, value, other in zip(arrays, found, wanted, strict=True):
                assert value is array
                assert array.tobytes() == other.tobytes(), (dtype, op)
            if num_ranks == 2:  # a third rank's values are read after the first block is written
                assert not own_sums


def test_only_an_array_that_takes_the_result_is_lent_to_be_written(
    own_sums: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    arrived = CollectiveServer._arrived

    def noting(self: CollectiveServer, incoming: Incoming) -> None:
        if incoming.is_lent:
            seen.extend(frame.readonly for frame in incoming.frames)
        arrived(self, incoming)

    monkeypatch.setattr(CollectiveServer, "_arrived", noting)
    with cluster_of(2, 2, shm=False) as cluster:
        sit_together(cluster)
        ranks, arrays = groups(cluster), [np.arange(1000.0), np.arange(1000.0)]
        pairs = list(zip(ranks, arrays, strict=True))
        results([rank.all_reduce(array) for rank, array in pairs])
        results([rank.reduce(array, 0, out=array if rank is ranks[0] else None)
                 for rank, array in pairs])  # fmt: skip
        results([rank.all_gather(array) for rank, array in pairs])
        assert seen and all(seen)
        seen.clear()
        results([rank.all_reduce(array, out=array) for rank, array in pairs])
        assert seen and not any(seen)


def test_an_array_comes_back_when_the_others_have_accepted_its_sum(own_sums: list[int]) -> None:
    """What a rank does with it afterwards changes nothing on the others."""
    with cluster_of(2, 2, shm=False) as cluster:
        sit_together(cluster)
        arrays, go_on = [np.full(1 << 16, 1.0), np.full(1 << 16, 2.0)], threading.Event()
        first, second = groups(cluster)
        theirs = second.all_reduce(arrays[1], out=arrays[1])
        busy_until(cluster, 1, go_on)
        ours = first.all_reduce(arrays[0], out=arrays[0])
        until(lambda: bool((arrays[0] == 3.0).all()))
        with pytest.raises(TimeoutError):
            ours.result(0.1)
        go_on.set()
        ours.result(LIMIT_S)
        arrays[0][:] = 0.0
        theirs.result(LIMIT_S)
        assert (arrays[1] == 3.0).all()
    assert not own_sums


def test_a_rank_that_dies_before_it_accepts_a_sum_holds_nobody_up(
    own_sums: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[CollectiveServer] = []

    def serve(node: Postoffice) -> None:
        if node.role is Role.SERVER:
            made.append(CollectiveServer(node))

    with InprocCluster(2, 2, prepare=serve, shm=False, lost_after_s=0.2) as cluster:
        sit_together(cluster)
        arrays = [np.full(1 << 16, 1.0), np.full(1 << 16, 2.0)]
        first, second = groups(cluster)
        theirs = second.all_reduce(arrays[1], out=arrays[1])
        for _ in range(2):  # a request is queued twice before it is sent
            cluster.workers[1].io_queue.perform(lambda: None).result(LIMIT_S)
        monkeypatch.setattr(cluster.workers[1].links, "receive", lambda event, now: None)
        ours = first.all_reduce(arrays[0], out=arrays[0])
        until(lambda: bool((arrays[0] == 3.0).all()))
        until(lambda: any(each._lent for each in made))
        cluster.kill(cluster.workers[1])
        with contextlib.suppress(NodeLostError):  # whichever is noticed first
            ours.result(LIMIT_S)
        until(lambda: not any(each._lent for each in made))
        assert theirs.error() is not None
