"""Long lists of keys over in-process clusters: they travel once, and never mean other keys."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S, InprocCluster
from numpy.typing import NDArray

from pslite import KVMeta, KVPairs, KVServer, KVWorker, Postoffice, SumHandle
from pslite.apps.kv_lists import MAX_LISTS, MIN_KEYS
from pslite.apps.kv_pairs import Keys
from pslite.errors import ProtocolError
from pslite.node.customer import Incoming
from pslite.wire.codec import pack_value

MAX_KEY = 2**64 - 1
Values = NDArray[np.float32]


def some_keys(count: int = MIN_KEYS, seed: int = 0) -> Keys:
    keys = np.unique(np.random.default_rng(seed).integers(0, 2**64, count, np.uint64))
    assert len(keys) == count
    return keys


def some_values(count: int = MIN_KEYS, seed: int = 0) -> Values:
    return np.random.default_rng(seed).standard_normal(count, np.float32)


def counting_requests(node: Postoffice) -> list[int]:
    """How many frames each request of a node has, from now on."""
    counts: list[int] = []
    request = node.request

    def noting(
        nodes: Any, app: int, head: int, body: bytes, frames: Any, *more: Any, **also: Any
    ) -> Any:
        counts.extend(len(frames[node]) for node in nodes)
        return request(nodes, app, head, body, frames, *more, **also)

    node.request = noting  # type: ignore[method-assign, assignment]
    return counts


class Summing:
    """A ``SumHandle`` that notes how often it is asked."""

    borrows = True

    def __init__(self) -> None:
        self.sums = SumHandle()
        self.asked: list[tuple[bool, bool]] = []

    def __call__(self, meta: KVMeta, pairs: KVPairs) -> KVPairs | None:
        self.asked.append((meta.push, meta.pull))
        return self.sums(meta, pairs)


class Job:
    """A cluster with one app of sums; the workers' sides of it."""

    def __init__(self, cluster: InprocCluster, **options: Any) -> None:
        self.cluster = cluster
        self.handles = [Summing() for _ in cluster.servers]
        self.servers = [
            KVServer(node, 0, handle)
            for node, handle in zip(cluster.servers, self.handles, strict=True)
        ]
        self.workers = [KVWorker(node, 0, **options) for node in cluster.workers]

    def push(self, keys: Any, values: Any, worker: int = 0, **options: Any) -> None:
        side = self.workers[worker]
        side.wait(side.push(keys, values, **options), LIMIT_S)

    def pull(self, keys: Any, worker: int = 0) -> NDArray[Any]:
        side = self.workers[worker]
        return side.wait(side.pull(keys), LIMIT_S)


@contextmanager
def small_job() -> Iterator[Job]:
    with InprocCluster(1, 1) as cluster:
        yield Job(cluster)


def hold(node: Postoffice, until: threading.Event) -> None:
    """Nothing leaves the node before ``until`` is set."""

    def wait() -> None:
        until.wait(LIMIT_S)

    node.call(wait)


# -- what travels -----------------------------------------------------------------------


def test_the_keys_of_a_long_list_travel_once_to_each_server() -> None:
    keys, values = some_keys(), some_values()
    with InprocCluster(1, 2) as cluster:
        counts = counting_requests(cluster.workers[0])
        job = Job(cluster)
        for _ in range(2):
            job.push(keys.copy(), values)
        assert np.array_equal(job.pull(keys), values + values)
        assert np.array_equal(job.workers[0].pushpull(keys, values).result(LIMIT_S), values * 3)
    assert counts == [2, 2, 1, 1, 0, 0, 1, 1]


def test_short_lists_travel_each_time_and_so_do_all_if_that_is_asked_for() -> None:
    with InprocCluster(1, 1) as cluster:
        counts = counting_requests(cluster.workers[0])
        job = Job(cluster)
        for _ in range(2):
            job.push(some_keys(MIN_KEYS - 1), some_values(MIN_KEYS - 1))
        job.workers[0] = KVWorker(cluster.workers[0], 0, cache_keys=False)
        for _ in range(2):
            job.push(some_keys(), some_values())
        assert job.servers[0]._lists.nbytes == 0
    assert counts == [2, 2, 2, 2]


@pytest.mark.parametrize("cache_keys", [True, False])
@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("shm", [True, False])
def test_the_bits_are_those_of_numpy_whether_lists_are_remembered_or_not(
    cache_keys: bool, num_servers: int, shm: bool
) -> None:
    rng = np.random.default_rng(3)
    keys = some_keys(4 * MIN_KEYS)
    sums = np.zeros(len(keys), np.float32)
    with InprocCluster(1, num_servers, shm=shm) as cluster:
        job = Job(cluster, cache_keys=cache_keys)
        for turn in range(8):
            pick = np.sort(rng.choice(len(keys), 2 * MIN_KEYS, replace=False))
            pick = np.arange(len(keys)) if turn % 3 == 0 else pick
            values = rng.standard_normal(len(pick), np.float32)
            job.push(keys[pick], values)
            sums[pick] += values
            assert np.array_equal(job.pull(keys[pick]), sums[pick])
        assert np.array_equal(job.pull(keys), sums)


# -- arrays that change -----------------------------------------------------------------


@pytest.mark.parametrize("copy", [True, False])
def test_keys_that_were_changed_in_place_are_other_keys(copy: bool) -> None:
    with small_job() as job:
        universe = some_keys(2 * MIN_KEYS)
        keys, values = universe[:MIN_KEYS].copy(), some_values()
        job.push(keys, values, copy=copy)
        keys[:] = universe[MIN_KEYS:]
        job.push(keys, 2 * values, copy=copy)
        assert np.array_equal(job.pull(keys), 2 * values)
        keys[:] = universe[:MIN_KEYS]
        assert np.array_equal(job.pull(keys), values)
        keys[-1] += np.uint64(1)
        assert job.pull(keys)[-1] == 0
        assert np.array_equal(job.pull(universe), np.concatenate([values, 2 * values]))


def test_a_call_under_way_means_the_keys_that_it_was_made_with() -> None:
    with small_job() as job:
        go_on = threading.Event()
        universe = some_keys(2 * MIN_KEYS)
        values = some_values()
        node = job.cluster.workers[0]
        keys = universe[::2].copy()
        job.push(keys, values)
        hold(node, go_on)
        push = job.workers[0].push(keys, values)
        keys[:] = universe[1::2]
        other = job.workers[0].push(keys, values)
        go_on.set()
        push.result(LIMIT_S)
        other.result(LIMIT_S)
        assert np.array_equal(job.pull(universe[::2]), values + values)
        assert np.array_equal(job.pull(universe[1::2]), values)


# -- several workers, several lists -----------------------------------------------------


def test_workers_with_the_same_list_share_it_on_the_server_and_others_do_not_mix() -> None:
    universe = some_keys(3 * MIN_KEYS)
    shared, own = universe[::3], [universe[1::3], universe[2::3]]
    with InprocCluster(2, 1) as cluster:
        job = Job(cluster)
        for worker in (0, 1):
            for _ in range(2):
                job.push(shared, np.full(MIN_KEYS, 1, np.float32), worker)
                job.push(own[worker], np.full(MIN_KEYS, 10 + worker, np.float32), worker)
        assert job.servers[0]._lists.nbytes == universe.nbytes
        assert set(job.pull(shared).tolist()) == {4.0}
        for worker in (0, 1):
            assert set(job.pull(own[worker], 1 - worker).tolist()) == {20.0 + 2 * worker}


def test_more_lists_than_are_remembered_take_turns_and_stay_right() -> None:
    universe = some_keys((MAX_LISTS + 4) * MIN_KEYS)
    lists = [universe[start :: MAX_LISTS + 4].copy() for start in range(MAX_LISTS + 4)]
    with InprocCluster(1, 1) as cluster:
        counts = counting_requests(cluster.workers[0])
        job = Job(cluster)
        for turn in range(2):
            for number, keys in enumerate(lists):
                job.push(keys, np.full(MIN_KEYS, number + turn, np.float32))
        assert counts == [2] * 2 * len(lists)
        for number, keys in enumerate(lists):
            assert set(job.pull(keys).tolist()) == {2.0 * number + 1}
        assert job.servers[0]._lists.nbytes == MAX_LISTS * MIN_KEYS * 8


def test_two_sides_of_one_worker_do_not_mix_their_numbers() -> None:
    universe = some_keys(2 * MIN_KEYS)
    with InprocCluster(1, 1) as cluster:
        job = Job(cluster)
        again = KVWorker(cluster.workers[0], 0)  # its numbers begin with 1, too
        for _ in range(2):
            job.push(universe[::2], np.full(MIN_KEYS, 1, np.float32))
            again.wait(again.push(universe[1::2], np.full(MIN_KEYS, 2, np.float32)), LIMIT_S)
        assert set(job.pull(universe[::2]).tolist()) == {2.0}
        assert set(job.pull(universe[1::2]).tolist()) == {4.0}


def test_the_lists_of_a_worker_that_has_left_are_forgotten() -> None:
    with InprocCluster(2, 1) as cluster:
        job = Job(cluster)
        job.push(some_keys(), some_values(), 1)
        assert job.servers[0]._lists.nbytes == 8 * MIN_KEYS
        cluster.workers[1].close()
        job.pull([1])
        assert job.servers[0]._lists.nbytes == 0


# -- servers that do not have a list ----------------------------------------------------


def test_a_server_that_has_forgotten_gets_the_keys_again_and_the_handle_one_request() -> None:
    with small_job() as job:
        keys, values = some_keys(), some_values()
        counts = counting_requests(job.cluster.workers[0])
        job.push(keys, values)
        job.servers[0].close()
        fresh = Summing()
        KVServer(job.cluster.servers[0], 0, fresh).registered.result(LIMIT_S)
        job.push(keys, values)
        assert np.array_equal(job.pull(keys), values)
        assert counts == [2, 1, 2, 0]
        assert fresh.asked == [(True, False), (False, True)]


def test_a_pull_that_overtakes_the_push_which_names_its_keys_finds_them() -> None:
    with small_job() as job:
        go_on = threading.Event()
        node = job.cluster.workers[0]
        hold(node, go_on)
        counts = counting_requests(node)
        worker = job.workers[0]
        push = worker.push(some_keys(), some_values())
        pull = worker.pull(some_keys(), priority=1)
        go_on.set()
        push.result(LIMIT_S)
        assert set(pull.result(LIMIT_S).tolist()) == {0.0}
        assert counts == [1, 1]  # the pull took the keys along, the push its values only


def test_a_slicer_that_is_set_later_decides_anew() -> None:
    keys, values = some_keys(), some_values()
    with InprocCluster(1, 2) as cluster:
        job = Job(cluster)
        job.push(keys, values)
        job.workers[0].set_slicer(lambda keys, ranges: [slice(0, 0), slice(0, len(keys))])
        job.push(keys, values)
        job.pull(keys)
        assert [len(handle.asked) for handle in job.handles] == [1, 3]
        assert len(job.handles[1].sums) == len(keys)


# -- peers that err ---------------------------------------------------------------------


def ask_raw(node: Postoffice, body: list[Any], frames: list[bytes]) -> Any:
    return node.request([8], 0, 0, pack_value(body), {8: frames}).result(LIMIT_S)[8]


def test_a_list_that_was_never_sent_is_answered_with_its_number() -> None:
    with small_job() as job:
        node = job.cluster.workers[0]
        for body, frames in (
            ([False, True, "", -1, False, 5, 3], []),
            ([True, False, "<f4", -1, False, 5, 3], [bytes(4)]),
        ):
            reply = ask_raw(node, body, frames)
            assert (reply.body, list(reply.frames)) == (pack_value([3]), [])
        assert job.handles[0].asked == []


def test_a_name_that_is_used_for_other_keys_is_refused() -> None:
    with small_job() as job:
        node = job.cluster.workers[0]
        body = [False, True, "", -1, False, 5, 3]
        assert len(ask_raw(node, body, [np.uint64(1).tobytes()]).frames) == 1
        with pytest.raises(ProtocolError, match="key list 3 already exists with other keys"):
            ask_raw(node, body, [np.uint64(2).tobytes()])


def test_a_push_that_does_not_fit_its_list_is_refused() -> None:
    with small_job() as job:
        node = job.cluster.workers[0]
        ask_raw(node, [False, True, "", -1, False, 5, 3], [np.arange(2, dtype=np.uint64).tobytes()])
        with pytest.raises(ProtocolError, match="do not fit 2 keys"):
            ask_raw(node, [True, False, "<f4", -1, False, 5, 3], [bytes(12)])


@pytest.mark.parametrize(
    ("number", "match"),
    [(1, "still asks for a key list that was already sent"), (2, r"about key list 1, got 2")],
)
@pytest.mark.parametrize("pull", [True, False])
def test_a_server_that_asks_for_the_wrong_list_is_a_protocol_error(
    number: int, match: str, pull: bool
) -> None:
    def confused(incoming: Incoming) -> None:
        incoming.respond(pack_value([number]))

    with InprocCluster(1, 1) as cluster:
        cluster.servers[0].add_app(0, confused).result(LIMIT_S)
        worker = KVWorker(cluster.workers[0], 0)
        request: Any = worker.pull(some_keys()) if pull else worker.push(some_keys(), some_values())
        with pytest.raises(ProtocolError, match=match) as caught:
            request.result(LIMIT_S)
        assert "server 0" in str(caught.value)


# -- whose memory it is -----------------------------------------------------------------

LARGE = 1 << 15
"""So many float32 values lie in memory that peers read."""


def sharing(cluster: InprocCluster, job: Job) -> None:
    """Return once both ends read each other's memory."""
    for _ in range(3):
        for worker in range(len(job.workers)):
            job.push(some_keys(LARGE), np.zeros(LARGE, np.float32), worker)
            job.pull(some_keys(LARGE), worker)
    assert all(node.nearby.shares_with(8) for node in cluster.workers)


def test_buffers_are_free_again_when_their_request_is_answered() -> None:
    with small_job() as job:
        keys, values = some_keys(LARGE), some_values(LARGE)
        sharing(job.cluster, job)
        gc.collect()
        gc.disable()
        try:
            nodes = (job.cluster.workers[0], job.cluster.servers[0])
            futures = []
            for node in nodes:  # what was answered before is free once that is accepted
                node.wait_until_accepted()
            before = [node.heap.used_bytes for node in nodes]
            for _ in range(3):
                futures += [job.workers[0].push(keys, values)]
                futures[-1].result(LIMIT_S)
                job.pull(keys)
                job.pull(keys[:10])  # whatever hangs on the last request
            nodes[0].wait_until_accepted()
            nodes[1].wait_until_accepted()
            assert [node.heap.used_bytes for node in nodes] == before
        finally:
            gc.enable()


@pytest.mark.parametrize("borrows", [False, True])
def test_a_handle_may_keep_what_was_pushed_unless_it_borrows(borrows: bool) -> None:
    kept: list[tuple[Keys, NDArray[Any]]] = []

    class Keeper:
        def __init__(self) -> None:
            self.borrows = borrows

        def __call__(self, meta: KVMeta, pairs: KVPairs) -> KVPairs | None:
            if meta.push:
                kept.append((pairs.keys, pairs.values))
            return None

    with InprocCluster(1, 1) as cluster:
        node = cluster.workers[0]
        KVServer(cluster.servers[0], 0, Keeper())
        worker = KVWorker(node, 0)
        for turn in range(6):
            worker.wait(worker.push(some_keys(LARGE), np.full(LARGE, turn, np.float32)), LIMIT_S)
        assert node.nearby.shares_with(8)
        found = [set(values.tolist()) for _, values in kept]
        assert (found == [{float(turn)} for turn in range(6)]) == (not borrows)
        assert all(np.array_equal(keys, some_keys(LARGE)) for keys, _ in kept)


def test_an_answer_that_waits_for_another_servers_is_copied_before_its_memory_is_used_again() -> (
    None
):
    go_on = threading.Event()
    near = np.arange(LARGE, dtype=np.uint64)
    far = near + np.uint64(MAX_KEY // 2 + 1)

    def answer(number: float) -> Callable[[KVMeta, KVPairs], KVPairs]:
        def handle(meta: KVMeta, pairs: KVPairs) -> KVPairs:
            if meta.cmd == 1 and number == 2:
                go_on.wait(LIMIT_S)
            values = meta.empty(len(pairs.keys), np.float32)
            values[:] = meta.cmd * 10 + number
            return KVPairs(pairs.keys, values, fresh=True)

        return handle

    with InprocCluster(1, 2) as cluster:
        for number, node in enumerate(cluster.servers, start=1):
            KVServer(node, 0, answer(number))
        worker = KVWorker(cluster.workers[0], 0)
        for _ in range(3):
            worker.wait(worker.pull(np.concatenate([near, far])), LIMIT_S)
        assert all(node.nearby.shares_with(9) for node in cluster.servers)
        slow = worker.pull(np.concatenate([near, far]), cmd=1)
        for _ in range(3):  # the first server answers these where the first answer lay
            worker.wait(worker.pull(near, cmd=2), LIMIT_S)
        go_on.set()
        assert slow.result(LIMIT_S).tolist() == [11.0] * LARGE + [12.0] * LARGE


@pytest.mark.parametrize(("fresh", "copies"), [(True, 0), (False, 1)])
def test_an_answer_is_copied_unless_it_was_made_for_it(
    fresh: bool, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def handle(meta: KVMeta, pairs: KVPairs) -> KVPairs:
        values = meta.empty(LARGE, np.float32)
        values[:] = 3
        return KVPairs(pairs.keys, values, fresh=fresh)

    with InprocCluster(1, 1) as cluster:
        server = cluster.servers[0]
        KVServer(server, 0, handle)
        worker = KVWorker(cluster.workers[0], 0)
        buffer = server.buffer

        def counting(nbytes: int) -> Any:
            nonlocal made
            made += 1
            return buffer(nbytes)

        monkeypatch.setattr(server, "buffer", counting)
        got = worker.wait(worker.pull([7]), LIMIT_S)
        assert got.tolist() == [3.0] * LARGE
    assert made == 1 + copies
