"""Push and pull of keys with values, over in-process clusters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S, InprocCluster
from numpy.typing import NDArray

from pslite import Future, KVMeta, KVPairs, KVServer, KVWorker, Postoffice, Role, SumHandle
from pslite.apps.kv_pairs import KeyRange, server_ranges
from pslite.errors import (
    ClosedError,
    DeadlineError,
    NodeLostError,
    ProtocolError,
    RemoteError,
    UsageError,
)
from pslite.wire.codec import pack_value

MAX_KEY = 2**64 - 1
EDGES = [
    0,
    1,
    MAX_KEY // 3,
    MAX_KEY // 2,
    MAX_KEY // 2 + 1,
    2 * (MAX_KEY // 3),
    MAX_KEY - 1,
    MAX_KEY,
]

DTYPES = ["bool", "int8", "uint16", "int64", "uint64", "float16", "float32", "float64", "complex64"]


class Recorder:
    """Keeps what was pushed under each key, and notes the keys of every request."""

    def __init__(self) -> None:
        self.values: dict[int, NDArray[Any]] = {}
        self.requests: list[tuple[KVMeta, list[int]]] = []

    def __call__(self, meta: KVMeta, pairs: KVPairs) -> KVPairs | None:
        keys = pairs.keys.tolist()
        self.requests.append((meta, keys))
        if meta.push:
            self.values.update(zip(keys, pairs.split(), strict=True))
        if not meta.pull:
            return None
        found = [self.values[key] for key in keys]
        lens = np.array([len(value) for value in found])
        return KVPairs(pairs.keys, np.concatenate(found), lens)

    @property
    def keys(self) -> list[list[int]]:
        return [keys for _, keys in self.requests]


def echo(meta: KVMeta, pairs: KVPairs) -> KVPairs | None:
    """Answers a pushpull with what was pushed."""
    return pairs if meta.pull else None


def serve(make: Callable[[], Any]) -> Callable[[Postoffice], None]:
    """Gives every server an app 0 with a handle of its own."""

    def prepare(node: Postoffice) -> None:
        if node.role is Role.SERVER:
            KVServer(node, 0, make())

    return prepare


def serve_all(cluster: InprocCluster) -> list[Recorder]:
    handles = [Recorder() for _ in cluster.servers]
    for server, handle in zip(cluster.servers, handles, strict=True):
        KVServer(server, 0, handle)
    return handles


def hold(node: Postoffice, until: threading.Event) -> None:
    """Nothing leaves the node before ``until`` is set."""

    def wait() -> None:
        until.wait(LIMIT_S)

    node.call(wait)


# -- where keys go ----------------------------------------------------------------------


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7])
def test_server_ranges_cover_every_key_once(num_servers: int) -> None:
    ranges = server_ranges(num_servers)
    assert ranges[0].begin == 0
    assert ranges[-1].end == MAX_KEY + 1
    assert [one.end for one in ranges[:-1]] == [one.begin for one in ranges[1:]]
    assert [one.begin for one in ranges] == [i * MAX_KEY // num_servers for i in range(num_servers)]


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_the_smallest_and_largest_keys_find_their_server_and_come_back(num_servers: int) -> None:
    with InprocCluster(1, num_servers) as cluster:
        handles = serve_all(cluster)
        worker = KVWorker(cluster.workers[0], 0)
        values = np.arange(len(EDGES), dtype=np.float64) + 0.5
        worker.wait(worker.push(EDGES, values), LIMIT_S)
        wanted = [
            [[key for key in EDGES if one.begin <= key < one.end]]
            for one in server_ranges(num_servers)
        ]
        assert [handle.keys for handle in handles] == wanted
        assert np.array_equal(worker.wait(worker.pull(EDGES), LIMIT_S), values)


def test_a_server_without_keys_in_the_call_hears_nothing_of_it() -> None:
    with InprocCluster(1, 3) as cluster:
        handles = serve_all(cluster)
        worker = KVWorker(cluster.workers[0], 0)
        worker.wait(worker.push([5, MAX_KEY], np.ones(2)), LIMIT_S)
        assert [handle.keys for handle in handles] == [[[5]], [], [[MAX_KEY]]]


def test_a_call_without_keys_is_done_without_any_server() -> None:
    done: list[str] = []
    with InprocCluster(1, 2) as cluster:  # no server has the app
        worker = KVWorker(cluster.workers[0], 0)
        worker.wait(worker.push([], [], callback=lambda _: done.append("push")), LIMIT_S)
        assert worker.wait(worker.pull(np.empty(0, np.uint64)), LIMIT_S).shape == (0,)
        out = np.empty((0, 4), np.int32)
        assert worker.wait(worker.pull([], out), LIMIT_S) is out
        with pytest.raises(UsageError, match="values and no keys"):
            worker.pull([], np.empty(1))
    assert done == ["push"]


def test_a_slicer_of_ones_own_decides_who_gets_what() -> None:
    def reversed_halves(keys: NDArray[np.uint64], ranges: Sequence[KeyRange]) -> list[slice]:
        half = len(keys) // 2
        return [slice(half, None), slice(0, half)]

    with InprocCluster(1, 2) as cluster:
        handles = serve_all(cluster)
        worker = KVWorker(cluster.workers[0], 0)
        worker.set_slicer(reversed_halves)
        worker.wait(worker.push([1, 2, 3, 4, 5], np.arange(10)), LIMIT_S)
        assert [handle.keys for handle in handles] == [[[3, 4, 5]], [[1, 2]]]
        assert worker.wait(worker.pull([1, 2, 3, 4, 5]), LIMIT_S).tolist() == list(range(10))


@pytest.mark.parametrize(
    "slices",
    [
        [slice(0, 3)],
        [slice(0, 2), slice(1, 3)],
        [slice(0, 1), slice(2, 3)],
        [slice(0, 3, 2), slice(1, 2)],
        [[0], [1, 2]],
    ],
)
def test_a_slicer_that_loses_or_repeats_keys_is_refused(slices: Any) -> None:
    with InprocCluster(1, 2) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        worker.set_slicer(lambda keys, ranges: slices)
        with pytest.raises(UsageError, match="slicer must"):
            worker.push([1, 2, 3], np.ones(3))


# -- layouts of values ------------------------------------------------------------------


@pytest.mark.parametrize("num_servers", [1, 2, 3])
def test_values_of_different_lengths_come_back_with_their_lens(num_servers: int) -> None:
    keys = np.array(EDGES, np.uint64)
    lens = np.array([3, 0, 1, 5, 0, 2, 4, 1], np.int32)
    values = np.arange(lens.sum(), dtype=np.float32)
    with InprocCluster(1, num_servers) as cluster:
        handles = serve_all(cluster)
        worker = KVWorker(cluster.workers[0], 0)
        worker.wait(worker.push(keys, values, lens), LIMIT_S)
        stored = {key: value.tolist() for one in handles for key, value in one.values.items()}
        pieces = np.split(values, np.cumsum(lens)[:-1])
        assert stored == {k: v.tolist() for k, v in zip(EDGES, pieces, strict=True)}
        for dtype in (np.int32, np.int64):
            got_lens = np.full(len(keys), -1, dtype)
            got = worker.wait(worker.pull(keys, lens=got_lens), LIMIT_S)
            assert got.tolist() == values.tolist()
            assert got_lens.tolist() == lens.tolist()


def test_lens_of_equal_values_are_filled_in_too() -> None:
    with InprocCluster(1, 2, prepare=serve(lambda: SumHandle(width=3))) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        lens = np.zeros(2, np.int64)
        worker.wait(worker.pull([0, MAX_KEY], lens=lens), LIMIT_S)
        assert lens.tolist() == [3, 3]


def test_rows_stay_rows() -> None:
    rows = np.arange(24, dtype=np.float32).reshape(8, 3)
    with InprocCluster(1, 3, prepare=serve(lambda: SumHandle(width=3))) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        worker.wait(worker.push(EDGES, rows), LIMIT_S)
        assert np.array_equal(worker.wait(worker.pull(EDGES), LIMIT_S), rows)
        flat, out = np.empty(24, np.float32), np.empty((8, 3), np.float32)
        assert worker.wait(worker.pull(EDGES, flat), LIMIT_S) is flat
        assert worker.wait(worker.pull(EDGES, out), LIMIT_S) is out
        assert np.array_equal(out, rows) and np.array_equal(flat, rows.reshape(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_every_dtype_arrive_as_they_were(dtype: str) -> None:
    values = np.random.default_rng(3).integers(0, 2, 16).astype(dtype)
    with InprocCluster(1, 2, prepare=serve(lambda: echo)) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        got = worker.wait(worker.pushpull(EDGES, values), LIMIT_S)
        assert got.dtype == values.dtype
        assert np.array_equal(got, values)


def test_values_of_foreign_byte_order_and_layout_arrive_with_the_same_numbers() -> None:
    swapped = np.arange(4, dtype=">f4")
    strided = np.arange(8, dtype=np.float32)[::2]
    with InprocCluster(1, 2, prepare=serve(lambda: echo)) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        keys = np.array([1, 9, 2, 9, MAX_KEY - 1, 9, MAX_KEY, 9], ">u8")[::2]
        for copy in (True, False):
            got = worker.wait(worker.pushpull(keys, swapped, copy=copy), LIMIT_S)
            assert got.tolist() == [0, 1, 2, 3] and got.dtype.isnative
            got = worker.wait(worker.pushpull(keys, strided, copy=copy), LIMIT_S)
            assert got.tolist() == [0, 2, 4, 6]


def test_pushpull_may_write_its_result_over_what_it_sends() -> None:
    with InprocCluster(2, 2, prepare=serve(SumHandle)) as cluster:
        first, second = (KVWorker(node, 0) for node in cluster.workers)
        first.wait(first.push(EDGES, np.ones(8, np.float32)), LIMIT_S)
        values = np.full(8, 2, np.float32)
        got = second.wait(second.pushpull(EDGES, values, out=values, copy=False), LIMIT_S)
        assert got is values
        assert values.tolist() == [3] * 8


# -- who owns the buffers ---------------------------------------------------------------


@pytest.mark.parametrize(("copy", "arrives"), [(True, [1.0, 1.0]), (False, [7.0, 7.0])])
def test_push_sends_what_was_there_unless_it_is_told_not_to_copy(
    copy: bool, arrives: list[float]
) -> None:
    go_on = threading.Event()
    with InprocCluster(1, 1, prepare=serve(SumHandle)) as cluster:
        node = cluster.workers[0]
        worker = KVWorker(node, 0)
        hold(node, go_on)
        values = np.ones(2, np.float32)
        push = worker.push([1, 2], values, copy=copy)
        values[:] = 7.0
        go_on.set()
        worker.wait(push, LIMIT_S)
        assert worker.wait(worker.pull([1, 2]), LIMIT_S).tolist() == arrives


def test_a_handle_may_return_its_own_memory_and_change_it_afterwards() -> None:
    store = np.zeros(1000, np.float64)

    def handle(meta: KVMeta, pairs: KVPairs) -> KVPairs:
        store[:] += 1
        return KVPairs(pairs.keys, store)

    with InprocCluster(1, 1, prepare=serve(lambda: handle)) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        pulls = [worker.pull([5]) for _ in range(20)]
        got = [set(worker.wait(pull, LIMIT_S).tolist()) for pull in pulls]
        assert got == [{float(turn)} for turn in range(1, 21)]


def test_pushed_arrays_are_read_only_for_the_handle() -> None:
    def handle(meta: KVMeta, pairs: KVPairs) -> None:
        pairs.values[0] = 1

    with InprocCluster(1, 1, prepare=serve(lambda: handle)) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        with pytest.raises(RemoteError, match="read-only"):
            worker.wait(worker.push([1], [0.0]), LIMIT_S)


# -- sums -------------------------------------------------------------------------------


def test_sums_equal_a_plain_dictionary_over_many_random_pushes() -> None:
    rng = np.random.default_rng(11)
    sums: dict[int, NDArray[np.int64]] = {}
    with InprocCluster(2, 3, prepare=serve(lambda: SumHandle(2, np.int64))) as cluster:
        workers = [KVWorker(node, 0) for node in cluster.workers]
        pushes = []
        for turn in range(40):
            keys = np.unique(rng.integers(0, 200, rng.integers(1, 60)).astype(np.uint64))
            keys *= np.uint64(MAX_KEY // 200)
            values = rng.integers(-9, 9, (len(keys), 2))
            for key, value in zip(keys.tolist(), values, strict=True):
                sums[key] = sums.get(key, np.zeros(2, np.int64)) + value
            pushes.append(workers[turn % 2].push(keys, values))
        for push in pushes:
            push.result(LIMIT_S)
        everything = np.arange(201, dtype=np.uint64) * np.uint64(MAX_KEY // 200)
        got = workers[0].wait(workers[0].pull(everything), LIMIT_S)
        wanted = [sums.get(key, np.zeros(2)).tolist() for key in everything.tolist()]
        assert got.tolist() == wanted


def test_keys_that_were_never_pushed_are_zero() -> None:
    with InprocCluster(1, 3, prepare=serve(SumHandle)) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        assert worker.wait(worker.pull(EDGES), LIMIT_S).tolist() == [0] * 8
        worker.wait(worker.push([1, MAX_KEY], np.array([2, 3], np.float32)), LIMIT_S)
        got = worker.wait(worker.pull([0, 1, 2, MAX_KEY]), LIMIT_S)
        assert got.tolist() == [0, 2, 0, 3] and got.dtype == np.float32


@pytest.mark.parametrize(
    ("values", "lens", "match"),
    [
        (np.ones(2), None, "needs values of float32, got float64"),
        (np.ones((2, 2), np.float32), None, "needs 1 elements for each key"),
        (np.ones(2, np.float32), np.array([0, 2]), "needs 1 elements for each key"),
    ],
)
def test_sums_refuse_values_of_another_kind_and_stay_as_they_are(
    values: NDArray[Any], lens: NDArray[Any] | None, match: str
) -> None:
    with InprocCluster(1, 1, prepare=serve(SumHandle)) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        with pytest.raises(UsageError, match=match):
            worker.wait(worker.push([1, 2], values, lens), LIMIT_S)
        assert worker.wait(worker.pull([1, 2]), LIMIT_S).tolist() == [0, 0]


# -- misuse -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "values", "lens", "match"),
    [
        ([2, 1], [1, 1], None, "keys must be sorted: 1 at position 1 comes after 2"),
        ([1, 4, 4], [1, 1, 1], None, "key 4 appears twice"),
        ([1.0, 2.0], [1, 1], None, "integers from 0 to"),
        (np.array([1.0, 2.0]), [1, 1], None, "uint64"),
        ([-1, 2], [1, 1], None, "integers from 0 to"),
        (np.array([-1, 2]), [1, 1], None, "must not be negative, got -1"),
        ([2**64], [1], None, "integers from 0 to"),
        (np.array([[1], [2]]), [1, 1], None, "1-D"),
        ([1, 2], [1, 1, 1], None, r"shape \(3,\) do not fit 2 keys"),
        ([1, 2], np.ones((3, 2)), None, r"shape \(3, 2\) do not fit 2 keys"),
        ([1, 2], np.ones((2, 2, 2)), None, "do not fit 2 keys"),
        ([1, 2], 5.0, None, "do not fit 2 keys"),
        ([], [1], None, "do not fit 0 keys"),
        ([1, 2], ["a", "b"], None, "values must be bool"),
        ([1, 2], [1, 1, 1], [1, 1], "the sum of lens must be the number of values, 3, got 2"),
        ([1, 2], [1, 1, 1], [4, -1], "each length in lens must be from 0"),
        ([1, 2], [1, 1, 1], [3], "one length for each"),
        ([1, 2], [1, 1], [1.0, 1.0], "int32 or int64"),
        ([1, 2], np.ones((2, 1)), [1, 1], "must be 1-D if lens are given"),
    ],
)
def test_misuse_is_refused_at_the_caller(keys: Any, values: Any, lens: Any, match: str) -> None:
    with InprocCluster(1, 2) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        for call in (worker.push, worker.pushpull):
            with pytest.raises(UsageError, match=match):
                call(keys, values, lens)


@pytest.mark.parametrize(
    ("values", "lens", "match"),
    [
        ([1.0, 2.0], None, "must be a NumPy array"),
        (np.ones((3, 1)), None, "one row for each key"),
        (np.ones(4)[::2], None, "writable and C-contiguous"),
        (np.broadcast_to(1.0, (2,)), None, "writable and C-contiguous"),
        (None, np.zeros(3, np.int64), "int32 or int64 of shape"),
        (None, np.zeros(2, np.int16), "int32 or int64 of shape"),
        (None, [0, 0], "must be a NumPy array"),
    ],
)
def test_arrays_that_cannot_take_a_result_are_refused_at_the_caller(
    values: Any, lens: Any, match: str
) -> None:
    with InprocCluster(1, 1) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        with pytest.raises(UsageError, match=match):
            worker.pull([1, 2], values, lens)


def test_a_message_over_the_limit_is_refused_at_the_caller_both_ways() -> None:
    def generous(meta: KVMeta, pairs: KVPairs) -> KVPairs | None:
        return KVPairs(pairs.keys, np.ones(2000, np.float64)) if meta.pull else None

    with InprocCluster(1, 1, max_message_bytes=10_000, prepare=serve(lambda: generous)) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        with pytest.raises(UsageError, match="PS_MAX_MESSAGE_BYTES"):
            worker.push([1], np.ones(2000))
        with pytest.raises(UsageError, match="PS_MAX_MESSAGE_BYTES"):
            worker.wait(worker.pull([1]), LIMIT_S)
        worker.wait(worker.push([1], np.ones(1000)), LIMIT_S)


def test_each_side_wants_a_node_of_its_role() -> None:
    with InprocCluster(1, 1) as cluster:
        with pytest.raises(
            UsageError, match="needs the node of a worker, got the node of a server"
        ):
            KVWorker(cluster.servers[0], 0)
        with pytest.raises(
            UsageError, match="needs the node of a server, got the node of a worker"
        ):
            KVServer(cluster.workers[0], 0, echo)


# -- servers that err -------------------------------------------------------------------


def test_a_failing_handle_is_an_error_with_its_traceback_and_the_next_push_is_right() -> None:
    sums = SumHandle()

    def fragile(meta: KVMeta, pairs: KVPairs) -> KVPairs | None:
        if meta.cmd == 13:
            raise KeyError("unlucky")
        return sums(meta, pairs)

    with InprocCluster(1, 1, prepare=serve(lambda: fragile)) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        one = np.ones(1, np.float32)
        pushes = [worker.push([4], one, cmd=cmd) for cmd in (0, 13, 0)]
        worker.wait(pushes[0], LIMIT_S)
        with pytest.raises(RemoteError, match=r"in fragile[\s\S]*KeyError: 'unlucky'") as caught:
            worker.wait(pushes[1], LIMIT_S)
        assert (caught.value.kind, caught.value.where) == ("KeyError", "node 8")
        worker.wait(pushes[2], LIMIT_S)
        assert worker.wait(worker.pull([4]), LIMIT_S).tolist() == [2]


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (lambda pairs: None, "NoneType instead of KVPairs"),
        (lambda pairs: KVPairs(pairs.keys + np.uint64(1), np.ones(2)), "different keys"),
        (lambda pairs: KVPairs(pairs.keys[:1], np.ones(1)), "different keys"),
        (lambda pairs: KVPairs(pairs.keys, np.ones(3)), "values that do not fit the keys"),
        (
            lambda pairs: KVPairs(pairs.keys, np.ones(3), np.array([1, 1])),
            "the sum of lens must be .* got 2",
        ),
        (lambda pairs: KVPairs(pairs.keys, np.array([None, None])), "unsupported type"),
        (lambda pairs: KVPairs(pairs.keys, np.ones(4)), "4 values of float64 for these keys"),
        (lambda pairs: KVPairs(pairs.keys, np.ones(2, np.int32)), "values of int32"),
    ],
)
def test_a_wrong_answer_is_a_protocol_error_and_writes_nothing(
    answer: Callable[[KVPairs], Any], match: str
) -> None:
    with InprocCluster(1, 1, prepare=serve(lambda: lambda meta, pairs: answer(pairs))) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        out, lens = np.full(2, 5.0), np.full(2, 5)
        with pytest.raises(ProtocolError, match=match):
            worker.wait(worker.pull([1, 2], out, lens), LIMIT_S)
        assert out.tolist() == lens.tolist() == [5, 5]


def test_servers_whose_values_do_not_fit_each_other_are_a_protocol_error() -> None:
    with InprocCluster(1, 2) as cluster:
        for server, dtype in zip(cluster.servers, (np.float32, np.float64), strict=True):
            KVServer(server, 0, SumHandle(dtype=dtype))
            KVServer(server, 1, SumHandle(width=server.rank + 1))
        for app in (0, 1):
            worker = KVWorker(cluster.workers[0], app)
            with pytest.raises(ProtocolError, match="differ in dtype or shape"):
                worker.wait(worker.pull([0, MAX_KEY]), LIMIT_S)


@pytest.mark.parametrize(
    ("body", "frames"),
    [
        (b"\xc1", [bytes(8)]),
        ([True, False, "<f4", -1, False], [bytes(8), bytes(4)]),
        ([False, False, "", -1, False, 0, 0], [bytes(8)]),
        ([False, True, "", -1, False, 0, 0], []),
        ([False, True, "", -1, False, 0, 0], [bytes(7)]),
        ([False, True, "", -1, False, 0, 0], [bytes(16)]),
        ([False, True, "", -1, False, 0, 0], [bytes(8), bytes(8)]),
        ([True, False, "|O", -1, False, 0, 0], [bytes(8), bytes(8)]),
        ([True, False, "<f4,<f4", -1, False, 0, 0], [bytes(8), bytes(8)]),
        ([True, False, "<f0", -1, False, 0, 0], [bytes(8), bytes(8)]),
        ([True, False, "<f4", -1, False, 0, 0], [bytes(8), bytes(7)]),
        ([True, False, "<f4", -1, True, 0, 0], [bytes(8), bytes(8)]),
        ([True, False, "<f4", 3, False, 0, 0], [bytes(8), bytes(8)]),
        ([True, False, "<f4", -2, False, 0, 0], [bytes(8), bytes(8)]),
        ([True, False, "<f4", -1, True, 0, 0], [bytes(8), bytes(8), bytes(8)]),
        ([True, False, "<f4", -1, True, 0, 0], [bytes(8), bytes(8), b"\xff" * 8]),
        ([False, True, "", -1, False, 5, 0], [bytes(8)]),
        ([False, True, "", -1, False, 5, -1], [bytes(8)]),
        ([False, True, "", -1, False, -5, 1], [bytes(8)]),
        ([False, True, "", -1, False, 5, 1], [bytes(16)]),
        ([True, False, "<f4", -1, False, 5, 1], []),
    ],
)
def test_malformed_requests_are_refused_before_the_handle_sees_them(
    body: Any, frames: list[bytes]
) -> None:
    seen: list[KVMeta] = []

    def handle(meta: KVMeta, pairs: KVPairs) -> None:
        seen.append(meta)

    with InprocCluster(1, 1, prepare=serve(lambda: handle)) as cluster:
        packed = body if isinstance(body, bytes) else pack_value(body)
        request = cluster.workers[0].request([8], 0, 0, packed, {8: frames})
        with pytest.raises(ProtocolError):
            request.result(LIMIT_S)
    assert seen == []


# -- time, order, callbacks -------------------------------------------------------------


def test_requests_that_come_before_the_app_wait_for_it_and_time_is_up_names_the_server() -> None:
    with InprocCluster(1, 2) as cluster:
        KVServer(cluster.servers[1], 0, SumHandle())
        worker = KVWorker(cluster.workers[0], 0)
        worker.wait(worker.push([MAX_KEY], np.ones(1, np.float32)), LIMIT_S)
        push = worker.push([1, MAX_KEY], np.ones(2, np.float32))
        # Server 1 serves in order: when this is answered, the push before it is, too.
        worker.wait(worker.pull([MAX_KEY]), LIMIT_S)
        with pytest.raises(DeadlineError, match=r"app 0 waits for server 0 \(pid [^,]*$"):
            worker.wait(push, 0.05)
        KVServer(cluster.servers[0], 0, SumHandle())
        worker.wait(push, LIMIT_S)
        assert worker.wait(worker.pull([1, MAX_KEY]), LIMIT_S).tolist() == [1, 2]


def test_a_handle_may_answer_later() -> None:
    waiting: list[Future[KVPairs | None]] = []

    def both_at_once(meta: KVMeta, pairs: KVPairs) -> Future[KVPairs | None]:
        answer: Future[KVPairs | None] = Future()
        waiting.append(answer)
        if len(waiting) == 2:
            for one in waiting:
                one.set_result(KVPairs(pairs.keys, pairs.values * 2))
        if len(waiting) == 3:
            answer.set_error(RuntimeError("too many"))
        return answer

    with InprocCluster(2, 1, prepare=serve(lambda: both_at_once)) as cluster:
        first, second = (KVWorker(node, 0) for node in cluster.workers)
        early = first.pushpull([1], [3.0])
        with pytest.raises(DeadlineError):
            first.wait(early, 0.05)
        late = second.pushpull([1], [3.0])
        assert [first.wait(early, LIMIT_S).tolist(), second.wait(late, LIMIT_S).tolist()] == [
            [6.0],
            [6.0],
        ]
        with pytest.raises(RemoteError, match="too many"):
            second.wait(second.push([1], [3.0]), LIMIT_S)


def test_a_callback_runs_once_with_the_finished_future_also_after_an_error() -> None:
    def fragile(meta: KVMeta, pairs: KVPairs) -> KVPairs:
        if meta.cmd:
            raise ValueError("no")
        return KVPairs(pairs.keys, np.ones(len(pairs.keys)))

    calls: list[tuple[str, Any]] = []
    both = threading.Event()

    def note(name: str) -> Callable[[Future[Any]], None]:
        def callback(done: Future[Any]) -> None:
            error = done.error()
            calls.append((name, type(error) if error else done.result(0).tolist()))
            if len(calls) == 2:
                both.set()

        return callback

    with InprocCluster(1, 2, prepare=serve(lambda: fragile)) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        worker.pull([0, MAX_KEY], callback=note("good"))
        worker.pull([0, MAX_KEY], cmd=1, callback=note("bad"))
        assert both.wait(LIMIT_S)
    assert calls == [("good", [1.0, 1.0]), ("bad", RemoteError)]


def test_a_callback_that_raises_is_logged_and_hurts_nobody() -> None:
    def careless(done: Future[None]) -> None:
        raise LookupError("lost my way")

    with InprocCluster(1, 1, prepare=serve(SumHandle)) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        one = np.ones(1, np.float32)
        worker.wait(worker.push([1], one, callback=careless), LIMIT_S)
        assert worker.wait(worker.pushpull([1], one), LIMIT_S).tolist() == [2]
        assert any("lost my way" in line for line in cluster.lines)


def test_a_callback_that_waits_is_told_not_to_and_may_go_on_in_another_callback() -> None:
    told: list[str] = []
    second: Future[Any] = Future()

    with InprocCluster(1, 1, prepare=serve(SumHandle)) as cluster:
        worker = KVWorker(cluster.workers[0], 0)

        def impatient(done: Future[Any]) -> None:
            pull = worker.pull([2], callback=second.set_result)
            with pytest.raises(UsageError, match="must not wait") as caught:
                worker.wait(pull)
            told.append(str(caught.value))

        worker.pull([1], callback=impatient)
        assert second.result(LIMIT_S).result(0).tolist() == [0]
    assert len(told) == 1


def test_requests_keep_their_order_and_a_higher_priority_goes_first() -> None:
    go_on = threading.Event()
    with InprocCluster(1, 1) as cluster:
        (handle,) = serve_all(cluster)
        node = cluster.workers[0]
        worker = KVWorker(node, 0)
        hold(node, go_on)
        pushes = [
            worker.push([key], [0.0], priority=priority)
            for key, priority in [(1, 0), (2, 0), (3, 5), (4, -1), (5, 5), (6, 0)]
        ]
        go_on.set()
        for push in pushes:
            worker.wait(push, LIMIT_S)
    assert handle.keys == [[3], [5], [1], [2], [6], [4]]


def test_a_handle_sees_the_command_and_who_sent_it() -> None:
    with InprocCluster(2, 1) as cluster:
        (handle,) = serve_all(cluster)
        worker = KVWorker(cluster.workers[1], 0, customer=4)
        worker.wait(worker.push([1], [1.0], cmd=-7), LIMIT_S)
        worker.wait(worker.pull([1], cmd=2), LIMIT_S)
        worker.wait(worker.pushpull([1], [1.0]), LIMIT_S)
    assert [meta[:6] for meta, _ in handle.requests] == [
        (-7, True, False, 11, 0, 4),
        (2, False, True, 11, 0, 4),
        (0, True, True, 11, 0, 4),
    ]


def test_handles_of_one_app_never_overlap() -> None:
    inside = 0
    most = 0

    def handle(meta: KVMeta, pairs: KVPairs) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        np.sort(np.random.default_rng(0).random(20_000))
        inside -= 1

    with InprocCluster(3, 1, pool_threads=4, prepare=serve(lambda: handle)) as cluster:
        workers = [KVWorker(node, 0) for node in cluster.workers]
        pushes = [worker.push([turn], [0.0]) for turn in range(10) for worker in workers]
        for push in pushes:
            push.result(LIMIT_S)
    assert most == 1


# -- several apps, several clusters, ends -----------------------------------------------


def test_two_apps_keep_their_values_apart() -> None:
    with InprocCluster(1, 2) as cluster:
        for server in cluster.servers:
            KVServer(server, 0, SumHandle())
            KVServer(server, 1, SumHandle(dtype=np.int64))
        floats, integers = (KVWorker(cluster.workers[0], app) for app in (0, 1))
        for _ in range(3):
            pushes: list[Future[None]] = [
                floats.push(EDGES, np.full(8, 0.5, np.float32)),
                integers.push(EDGES, np.full(8, 2)),
            ]
            for push in pushes:
                push.result(LIMIT_S)
        assert floats.wait(floats.pull(EDGES), LIMIT_S).tolist() == [1.5] * 8
        assert integers.wait(integers.pull(EDGES), LIMIT_S).tolist() == [6] * 8


def test_a_second_app_of_the_same_number_is_refused() -> None:
    with InprocCluster(1, 1) as cluster:
        KVServer(cluster.servers[0], 0, SumHandle())
        second = KVServer(cluster.servers[0], 0, SumHandle())
        with pytest.raises(UsageError, match="already has an app 0"):
            second.registered.result(LIMIT_S)


def test_a_closed_app_leaves_its_number_to_another() -> None:
    with InprocCluster(1, 1) as cluster:
        first = KVServer(cluster.servers[0], 0, SumHandle())
        worker = KVWorker(cluster.workers[0], 0)
        worker.wait(worker.push([1], np.ones(1, np.float32)), LIMIT_S)
        first.close()
        pull = worker.pull([1])
        KVServer(cluster.servers[0], 0, SumHandle()).registered.result(LIMIT_S)
        assert worker.wait(pull, LIMIT_S).tolist() in ([0.0], [1.0])
        assert worker.wait(worker.pull([1]), LIMIT_S).tolist() == [0.0]


def test_two_clusters_of_one_process_do_not_meet() -> None:
    with (
        InprocCluster(1, 2, prepare=serve(SumHandle)) as one,
        InprocCluster(1, 2, prepare=serve(SumHandle)) as other,
    ):
        workers = [KVWorker(cluster.workers[0], 0) for cluster in (one, other)]
        pushes = [
            worker.push(EDGES, np.full(8, number, np.float32))
            for number, worker in enumerate(workers, start=1)
        ]
        for push in pushes:
            push.result(LIMIT_S)
        got = [worker.wait(worker.pull(EDGES), LIMIT_S).tolist() for worker in workers]
    assert got == [[1] * 8, [2] * 8]


def test_a_lost_server_ends_what_waits_for_it() -> None:
    with InprocCluster(1, 2, lost_after_s=0.1) as cluster:
        KVServer(cluster.servers[0], 0, SumHandle())
        worker = KVWorker(cluster.workers[0], 0)
        pull = worker.pull([0, MAX_KEY])  # server 1 has no app and never answers
        cluster.kill(cluster.servers[1])
        with pytest.raises(NodeLostError, match="server 1"):
            worker.wait(pull, LIMIT_S)


def test_closing_a_node_ends_what_still_waits() -> None:
    with InprocCluster(1, 1) as cluster:
        worker = KVWorker(cluster.workers[0], 0)
        pull = worker.pull([1])
        cluster.workers[0].close()
        with pytest.raises(ClosedError):
            worker.wait(pull, LIMIT_S)
        with pytest.raises(ClosedError):
            worker.wait(worker.push([1], [1.0]), LIMIT_S)
