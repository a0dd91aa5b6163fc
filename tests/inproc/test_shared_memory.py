"""Values that lie in shared memory: the same bits as without, no copies, nothing kept."""

from __future__ import annotations

import gc
import hashlib
import itertools
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S
from workers import Workers

import kvstore
from kvstore.mxnet import nd
from kvstore.stores.base import KVStore
from pslite import Postoffice
from pslite.memory.segment import HEADER_BYTES
from pslite.memory.sharing import Sharing
from pslite.wire.base import Ints

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memfd here")

SHAPES = {"one": (1,), "bias": (33,), "dense": (120, 33), "large": (70_000,), "empty": (0,)}
STEPS = 6

Array = np.ndarray[Any, Any]


class Travelled:
    """The descriptors that nodes have sent and resolved."""

    def __init__(self) -> None:
        self.sent: Counter[Sharing] = Counter()
        #: Node's sharing -> (segment, offset, bytes) of each frame that it sent.
        self.places: dict[Sharing, list[tuple[int, int, int]]] = {}

    def note(self, sharing: Sharing, shared: Ints) -> None:
        self.sent[sharing] += len(shared) // 4
        places = self.places.setdefault(sharing, [])
        places += [(s, o, n) for _, s, o, n in zip(*[iter(shared)] * 4, strict=True)]

    def by(self, nodes: Sequence[Postoffice]) -> int:
        return sum(self.sent[node.sharing] for node in nodes)


@pytest.fixture
def travelled(monkeypatch: pytest.MonkeyPatch) -> Travelled:
    seen = Travelled()
    describe = Sharing.describe

    def noting(self: Sharing, peer: str, frames: Any) -> Any:
        rest, shared = describe(self, peer, frames)
        seen.note(self, shared)
        return rest, shared

    monkeypatch.setattr(Sharing, "describe", noting)
    return seen


def agree(workers: Workers) -> None:
    """Until the nodes have mapped each other's memory, so that what follows goes through it."""
    assert workers.cluster is not None
    cluster = workers.cluster
    ends = [(cluster.workers, cluster.servers), (cluster.servers, cluster.workers)]
    pairs = [pair for group in ends for pair in itertools.product(*group)]
    for node in [*cluster.workers, *cluster.servers]:
        node.buffer(1)
    give_up_at = time.monotonic() + LIMIT_S
    while not all(one.sharing.reaches(other.van.uid) for one, other in pairs):
        assert time.monotonic() < give_up_at
        time.sleep(0.002)


# -- the same bits ------------------------------------------------------------------------


def gradients(kind: str, rank: int, step: int) -> list[Array]:
    """Asynchronous pushes are applied in any order; sums of small whole numbers do not care."""
    draw = np.random.default_rng([rank, step])
    if "async" in kind:
        return [draw.integers(-8, 8, shape).astype(np.float32) for shape in SHAPES.values()]
    return [
        np.asarray(draw.standard_normal(shape) * 10.0 ** draw.uniform(-6, 3, shape), np.float32)
        for shape in SHAPES.values()
    ]


def train(kv: KVStore) -> str:
    """All ways to move values, one after the other; the digest of all that was seen."""
    keys = list(SHAPES)
    firsts = [np.ones(shape, np.float32) for shape in SHAPES.values()]
    rate = 1.0 if "async" in kv.type else 0.05
    momentum = 0.0 if "async" in kv.type else 0.9
    kv.set_optimizer(kvstore.optimizer.create("sgd", learning_rate=rate, momentum=momentum))
    kv.init(keys, firsts)
    outs = [np.zeros_like(value) for value in firsts]
    own = [kv.empty(shape) for shape in SHAPES.values()]
    lazy = [nd.zeros(shape) for shape in SHAPES.values()]
    digest = hashlib.sha256()
    for step in range(STEPS):
        values = gradients(kv.type, kv.rank, step)
        for array, value in zip(own, values, strict=True):
            array[...] = value
        pulled: Any = outs
        if step == 0:
            kv.push(keys, values)
            for value in values:
                value.fill(np.nan)
            kv.pull(keys, out=outs)
        elif step == 1:
            kv.pushpull(keys, own, out=outs)
        elif step == 2:
            pulled = own
            kv.pushpull(keys, own)
        elif step == 3:
            futures = [kv.push_async(keys, values), kv.pull_async(keys, out=outs)]  # type: ignore[attr-defined]
            kv.wait(futures)  # type: ignore[attr-defined]
        elif step == 4:
            kv.wait(kv.pushpull_async(keys, own, out=outs))  # type: ignore[attr-defined]
        else:
            pulled = lazy
            for index, key in enumerate(keys):
                kv.push(key, own[index], priority=-index)
                own[index].fill(np.nan)
                kv.pull(key, out=lazy[index], priority=-index)
        if "async" not in kv.type:
            for out in pulled:
                digest.update(np.asarray(out).tobytes())
    nd.waitall()  # by then the pushes have been applied, of which others are to see the effect
    kv.barrier()
    kv.pull(keys, out=outs)
    for out in outs:
        digest.update(out.tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async", "dist_device_sync"])
def test_neither_shared_memory_nor_chunks_nor_threads_change_a_bit(
    kind: str, travelled: Travelled
) -> None:
    found: set[str] = set()
    for number, (shm, chunk_bytes) in enumerate(
        itertools.product((False, True), (2048, 65_536, 1 << 20))
    ):
        settings = {"shm": shm, "chunk_bytes": chunk_bytes, "pool_threads": (1, 4, 2)[number % 3]}
        with Workers(kind, **settings) as workers:
            assert workers.cluster is not None
            if shm:
                agree(workers)
            travelled.sent.clear()
            found.update(workers.run(train))
            nodes = workers.cluster.workers, workers.cluster.servers
            if shm:
                assert all(travelled.by(each) > STEPS for each in nodes)
            else:
                assert not any(travelled.by(each) for each in nodes)
    assert len(found) == 1


# -- empty and zeros ----------------------------------------------------------------------

TYPES = ["local", "device", "dist_sync", "dist_async", "dist_device_sync"]


@pytest.fixture(scope="module", params=TYPES)
def store(request: pytest.FixtureRequest) -> Iterator[KVStore]:
    with Workers(request.param, 1, 1) as workers:
        if workers.cluster is not None:
            agree(workers)  # now: what is open before a test is no leak of it
        yield workers.stores[0]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (3, (3,)),
        ((3,), (3,)),
        ([2, 3], (2, 3)),
        ((2, 0, 3), (2, 0, 3)),
        (0, (0,)),
        ((), ()),
        (np.int64(4), (4,)),
        ((np.int32(2), np.uint8(5)), (2, 5)),
        (np.array([2, 2]), (2, 2)),
        ((100, 1000), (100, 1000)),
    ],
)
def test_arrays_of_any_shape_are_ordinary_arrays(
    store: KVStore, shape: Any, expected: tuple[int, ...]
) -> None:
    made = store.empty(shape)
    assert type(made) is np.ndarray
    assert (made.shape, made.dtype) == (expected, np.float32)
    assert made.flags.c_contiguous
    assert made.flags.writeable
    assert made.flags.aligned
    zeros = store.zeros(shape)
    assert zeros.shape == expected
    assert not zeros.any()


@pytest.mark.parametrize(
    "dtype", ["float16", "float32", float, int, bool, np.uint8, "<i2", np.complex64, ">f8"]
)
def test_arrays_of_all_dtypes_that_stores_hold(store: KVStore, dtype: Any) -> None:
    zeros = store.zeros((2, 5), dtype)
    assert zeros.dtype == np.dtype(dtype)
    assert (zeros == np.zeros((2, 5), dtype)).all()
    zeros[...] = 1
    assert zeros.sum() == 10


def test_arrays_of_bfloat16(store: KVStore) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    zeros = store.zeros((2, 5), ml_dtypes.bfloat16)
    assert zeros.dtype == ml_dtypes.bfloat16
    assert not zeros.astype(np.float32).any()
    store.init("bfloat16", zeros)
    assert store.pull("bfloat16").dtype == ml_dtypes.bfloat16
    store.delete("bfloat16")


@pytest.mark.parametrize("shape", [-1, (-1,), (3, -2), (0, -1)])
def test_negative_sizes_are_refused(store: KVStore, shape: Any) -> None:
    for make in store.empty, store.zeros:
        with pytest.raises(ValueError, match="a shape must not have negative sizes"):
            make(shape)


@pytest.mark.parametrize("dtype", [object, "U3", "M8[s]", "f4,i4", "no dtype", "S2"])
def test_dtypes_that_no_store_holds_are_refused(store: KVStore, dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"dtype|data type"):
        store.empty(3, dtype)


@pytest.mark.parametrize("shape", [1.5, "ab", (2, 1.0), None])
def test_a_shape_that_is_none_is_refused(store: KVStore, shape: Any) -> None:
    with pytest.raises(TypeError):
        store.empty(shape)


def test_zeros_are_zeros_in_memory_that_was_used_before(store: KVStore) -> None:
    for _ in range(3):
        array = store.zeros(5000)
        assert not array.any()
        array.fill(1)


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async", "dist_device_sync"])
def test_memory_of_arrays_that_are_dropped_is_free(kind: str) -> None:
    with Workers(kind, 1, 1) as workers:
        kv: Any = workers.stores[0]
        before = kv.node.heap.used_bytes
        arrays = [kv.empty((100, 10)) for _ in range(50)]
        assert kv.node.heap.used_bytes == before + 50 * 4032
        kept = arrays[7][5:6].T
        del arrays
        assert kv.node.heap.used_bytes == before + 4032
        del kept
        assert kv.node.heap.used_bytes == before


# -- copies -------------------------------------------------------------------------------


def test_calls_that_keep_their_arrays_send_them_from_where_they_lie(travelled: Travelled) -> None:
    """What the server is pointed at is the caller's own memory, chunk by chunk."""
    with Workers("dist_sync", 1, 1, chunk_bytes=32_768) as workers:
        kv: Any = workers.stores[0]
        kv.init("w", np.zeros(300_000, np.float32))  # too large to be joined with others
        gradient = kv.empty(300_000)
        gradient[:] = np.arange(300_000)
        agree(workers)
        place = kv.node.sharing.place_of(gradient.data)
        assert place is not None
        segment, offset = place
        used = kv.node.heap.used_bytes
        for call in (
            lambda out: kv.pushpull("w", gradient, out),
            lambda out: kv.wait(kv.pushpull_async("w", gradient, out)),
            lambda out: kv.wait([kv.push_async("w", gradient), kv.pull_async("w", out)]),
        ):
            travelled.places.clear()
            kv_out = np.empty_like(gradient)
            call(kv_out)
            # Neighbours travel together, as one frame for each message of nine chunks.
            assert travelled.places[kv.node.sharing] == [
                (segment, offset + start, min(294_912, 1_200_000 - start))
                for start in range(0, 1_200_000, 294_912)
            ]
            assert np.array_equal(kv_out, np.arange(300_000))
        assert kv.node.heap.used_bytes == used


@pytest.mark.parametrize("shm", [True, False])
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_push_async_keeps_arrays_that_nobody_else_refers_to(kind: str, shm: bool) -> None:
    """In whatever memory they lie, what is made meanwhile does not get it."""
    with Workers(kind, 2, 1, shm=shm, chunk_bytes=65_536, credit_bytes=131_072) as workers:
        if shm:
            agree(workers)

        def script(kv: Any) -> bool:
            kv.set_optimizer(kvstore.optimizer.create("sgd", learning_rate=1.0))
            kv.init("w", np.zeros(100_000, np.float32))
            for step in range(1, 11):
                make = kv.empty if step % 2 else np.empty
                gradient = make(100_000, np.float32)
                gradient.fill(step)
                kv.push_async("w", gradient)
                del gradient
                other = make(100_000, np.float32)
                other.fill(np.nan)
                del other
            kv.wait()
            kv.barrier()
            return bool((kv.pull("w") == -2 * 55).all())

        assert workers.run(script) == [True, True]


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_an_ndarray_is_the_callers_again_right_after_push_async(kind: str) -> None:
    with Workers(kind, 1, 1, chunk_bytes=65_536) as workers:
        kv: Any = workers.stores[0]
        agree(workers)
        kv.set_optimizer(kvstore.optimizer.create("sgd", learning_rate=1.0))
        kv.init("w", np.zeros(100_000, np.float32))
        gradient = nd.NDArray(kv.empty(100_000))
        for step in range(1, 6):
            gradient[:] = step
            kv.push_async("w", gradient)
            gradient[:] = np.nan
        assert (kv.pull("w") == -15).all()


def test_a_store_that_only_has_large_keys_finds_the_way_through_shared_memory(
    travelled: Travelled,
) -> None:
    """Nothing of it is gathered with others, so nothing but the arrays tells it to begin."""
    with Workers("dist_sync", 1, 1, chunk_bytes=65_536) as workers:
        kv: Any = workers.stores[0]
        kv.init("w", np.zeros(40_000, np.float32))
        gradient, out = np.ones(40_000, np.float32), np.empty(40_000, np.float32)
        for _ in range(3):
            travelled.places.clear()
            kv.pushpull("w", gradient, out=out)
            assert out[0] == out[-1] == 1.0
        assert sum(nbytes for _, _, nbytes in travelled.places[kv.node.sharing]) == 160_000


def test_asynchronous_values_are_copied_with_the_update_and_never_sent_when_they_are_old() -> None:
    """Whoever pushes and pulls gets the copy that was made then; whoever pulls later, the value."""
    keys = ["a", "b"]
    with Workers("dist_async", 1, 1) as workers:
        kv: Any = workers.stores[0]
        kv.set_optimizer(kvstore.optimizer.create("sgd", learning_rate=1.0))
        kv.init(keys, [np.zeros(5, np.float32)] * 2)
        assert workers.cluster is not None
        app: Any = workers.cluster.servers[0].traffic._server.app  # type: ignore[union-attr]
        table = app._parts
        made, kept = table._copies, []

        class Noting(dict[Any, Any]):
            def __setitem__(self, parts: Any, copy: Any) -> None:
                kept.append((parts, copy))
                super().__setitem__(parts, copy)

        table._copies = Noting(made)
        for step in range(1, 6):
            outs = [np.zeros(5, np.float32) for _ in keys]
            kv.pushpull(keys, [np.ones(5, np.float32)] * 2, out=outs)
            assert [out.tolist() for out in outs] == [[-step] * 5] * 2
        parts, copy = kept[-1]
        assert len(parts) == 2
        assert copy.is_current
        assert parts not in table._copies
        table._copies[parts] = copy  # as if nobody had asked for it
        assert [value.tolist() for value in kv.pull(keys)] == [[-5.0] * 5] * 2
        table._copies[parts] = copy
        kv.wait(kv.push_async("b", np.ones(5, np.float32)))
        assert [value.tolist() for value in kv.pull(keys)] == [[-5.0] * 5, [-6.0] * 5]


@pytest.mark.parametrize("layout", ["as in the call", "backwards", "every second one"])
def test_several_arrays_travel_in_one_message_from_where_they_lie(
    layout: str, travelled: Travelled
) -> None:
    """However they lie; each worker has another layout, and the server takes rounds as one."""
    shapes = [(20_000,), (64, 300), (17_000,), (25_000, 1)]
    keys = [str(number) for number in range(len(shapes))]

    def arrays(kv: KVStore) -> list[Array]:
        if kv.rank == 1 or layout == "as in the call":
            return [kv.zeros(shape) for shape in shapes]
        if layout == "backwards":
            return [kv.zeros(shape) for shape in reversed(shapes)][::-1]
        pairs = [(kv.zeros(shape), kv.zeros(shape)) for shape in shapes]
        return [first for first, _ in pairs]

    def script(kv: KVStore) -> tuple[list[Array], set[int]]:
        values, outs = arrays(kv), [np.zeros(shape, np.float32) for shape in shapes]
        for step in range(5):
            for number, value in enumerate(values):
                value[...] = np.random.default_rng([kv.rank, step, number]).normal(size=value.shape)
            kv.pushpull(keys, values, out=outs)
        return outs, {value.__array_interface__["data"][0] for value in values}

    def local() -> list[Array]:
        kv = kvstore.create("local")
        kv.set_optimizer(kvstore.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
        kv.init(keys, [np.zeros(shape, np.float32) for shape in shapes])
        for step in range(5):
            for number, (key, shape) in enumerate(zip(keys, shapes, strict=True)):
                draws = [np.random.default_rng([rank, step, number]) for rank in range(2)]
                kv.push(key, [draw.normal(size=shape).astype(np.float32) for draw in draws])
        found: list[Array] = kv.pull(keys)
        return found

    with Workers("dist_sync", 2, 1) as workers:
        agree(workers)
        momentum = kvstore.optimizer.create("sgd", learning_rate=0.1, momentum=0.9)
        workers.run(lambda kv: kv.set_optimizer(momentum))
        workers.run(lambda kv: kv.init(keys, [np.zeros(shape, np.float32) for shape in shapes]))
        travelled.places.clear()
        assert workers.cluster is not None
        heaps = [node.heap for node in workers.cluster.workers]
        wanted = local()
        for (outs, starts), heap, node in zip(
            workers.run(script), heaps, workers.cluster.workers, strict=True
        ):
            for found, value in zip(outs, wanted, strict=True):
                np.testing.assert_array_equal(found, value)
            bases = {number: segment.address for number, segment in heap.segments()}
            sent = {bases[s] + offset for s, offset, _ in travelled.places[node.sharing]}
            assert sent <= starts


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_weights_come_from_where_they_lie_unless_the_next_push_may_change_them(
    kind: str, travelled: Travelled
) -> None:
    with Workers(kind, 1, 1) as workers:
        assert workers.cluster is not None
        kv: Any = workers.stores[0]
        kv.init("w", np.ones(40_000, np.float32))
        agree(workers)
        (server,) = workers.cluster.servers
        used = server.heap.used_bytes
        weights = (1, HEADER_BYTES, 160_000)  # the server has made nothing before them
        for _ in range(3):
            assert (kv.pull("w") == 1).all()
        places = travelled.places[server.sharing]
        assert len(places) == 3
        if kind == "dist_sync":
            assert set(places) == {weights}
        else:
            assert weights not in places
        settle(workers.cluster.nodes)
        assert server.heap.used_bytes == used == 160_000


@pytest.mark.parametrize("shm", [True, False])
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("nbytes", [100, 5000, 400_000])
def test_a_gradient_is_the_callers_again_right_after_push(
    kind: str, nbytes: int, shm: bool
) -> None:
    """Also one that lies in shared memory itself, and also when the server is slow to read it."""
    with Workers(kind, 2, 1, shm=shm, chunk_bytes=65_536) as workers:
        if shm:
            agree(workers)

        def script(kv: Any) -> bool:
            kv.set_optimizer(kvstore.optimizer.create("sgd", learning_rate=1.0))
            kv.init("w", np.zeros(nbytes // 4, np.float32))
            for step in range(1, 11):
                gradient = np.empty(nbytes // 4, np.float32) if step % 2 else kv.empty(nbytes // 4)
                gradient.fill(step)
                kv.push("w", gradient)
                gradient.fill(np.nan)
                if step % 2:
                    del gradient  # and what comes next may get its memory
            kv.wait()
            kv.barrier()
            return bool((kv.pull("w") == -2 * 55).all())

        assert workers.run(script) == [True, True]


# -- the limit ----------------------------------------------------------------------------

NUM_KEYS, KEY_BYTES = 20, 300_000


@pytest.mark.parametrize("round_window", [0, 1, 2])
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_workers_that_push_in_opposite_orders_get_through_with_memory_for_a_tenth_of_the_model(
    kind: str, round_window: int
) -> None:
    limit = NUM_KEYS * KEY_BYTES // 10
    settings = {"shm_bytes": limit, "round_window": round_window, "chunk_bytes": 65_536}
    with Workers(kind, 2, 1, credit_bytes=131_072, **settings) as workers:

        def script(kv: Any) -> bool:
            names = [f"key{number}" for number in range(NUM_KEYS)]
            kv.set_optimizer(kvstore.optimizer.create("sgd", learning_rate=1.0))
            kv.init(names, [np.zeros(KEY_BYTES // 4, np.float32) for _ in names])
            order = names if kv.rank == 0 else names[::-1]
            for step in range(3):
                futures = [
                    kv.push_async(name, np.full(KEY_BYTES // 4, step + 1, np.float32))
                    for name in order
                ]
                if kv.rank == step % 2:
                    kv.wait(futures)
            kv.wait()
            kv.barrier()
            return all((value == -12).all() for value in kv.pull(names))

        assert workers.run(script) == [True, True]
        assert workers.cluster is not None
        for node in workers.cluster.nodes:
            assert sum(segment.nbytes for _, segment in node.heap.segments()) <= limit + 4096


# -- nothing is kept ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_two_hundred_rounds_keep_no_more_memory_than_twenty(kind: str) -> None:
    """Without the garbage collection: what a call used is free when the call is over."""
    with Workers(kind, 2, 2, chunk_bytes=4096) as workers:
        assert workers.cluster is not None
        cluster = workers.cluster
        levels: list[list[int]] = []

        def begin(kv: Any) -> list[Array]:
            kv.set_optimizer(kvstore.optimizer.create("sgd", learning_rate=0.0))
            kv.init(["a", "b"], [np.zeros(3000, np.float32), np.zeros(400, np.float32)])
            return [kv.empty(3000), kv.empty(400)]

        def rounds(kv: Any, own: list[Array], count: int) -> None:
            lazy = [nd.zeros((3000,)), nd.zeros((400,))]
            for step in range(count):
                way = step % 5
                if way == 0:
                    kv.push(["a", "b"], own)
                    kv.pull(["a", "b"], out=lazy)
                elif way == 1:
                    kv.pushpull(["a", "b"], own)
                elif way == 2:
                    kv.wait(kv.pushpull_async(["b", "a"], own[::-1]))
                elif way == 3:
                    for index, key in enumerate("ab"):
                        kv.push(key, np.zeros(own[index].shape, np.float32), priority=-index)
                        kv.pull(key, out=lazy[index])
                    lazy[1].wait_to_read()
                else:
                    with pytest.raises(Exception, match="shape"):
                        kv.push("a", np.zeros(7, np.float32))
                    kv.wait([kv.push_async("a", own[0]), kv.pull_async("b")])
                    kv.wait([kv.push_async("b", own[1]), kv.pull_async("a")])
            kv.wait()
            kv.barrier()

        def script(kv: Any) -> None:
            own = begin(kv)
            for count in 20, 180:
                rounds(kv, own, count)
                if kv.rank == 0:
                    settle(cluster.nodes)
                    levels.append([node.heap.used_bytes for node in cluster.nodes])
                kv.barrier()

        gc.collect()
        gc.disable()
        try:
            workers.run(script)
        finally:
            gc.enable()
        assert levels[0] == levels[1]
        assert all(levels[0][:4])  # workers and servers; the scheduler needs none


def settle(nodes: Sequence[Postoffice]) -> None:
    """Until what was sent last is accepted, and forgotten."""
    give_up_at = time.monotonic() + LIMIT_S
    last: list[int] = []
    while time.monotonic() < give_up_at:
        if all(node.links.everything_accepted() for node in nodes):
            found = [node.heap.used_bytes for node in nodes]
            if found == last:
                return
            last = found
        time.sleep(0.01)
    raise AssertionError("not everything was accepted")


# -- interrupts, deletions, ends ----------------------------------------------------------


def test_memory_of_an_interrupted_pushpull_is_not_used_again_while_the_server_may_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller drops his array with the exception, and goes on."""
    with Workers("dist_sync", 2, 1) as workers:
        agree(workers)
        workers.run(lambda kv: kv.init(["w", "v"], [np.zeros(5000, np.float32)] * 2))
        interrupted = threading.Event()
        waited = type(workers.stores[0])._wait  # type: ignore[attr-defined]

        def wait(kv: Any, future: Any) -> Any:
            if kv.rank == 0 and not interrupted.is_set():
                kv.node.wait_until_accepted()
                raise KeyboardInterrupt
            return waited(kv, future)

        def first(kv: Any) -> None:
            gradient = kv.empty(5000)
            gradient.fill(1)
            with pytest.raises(KeyboardInterrupt):
                kv.pushpull("w", gradient, np.empty_like(gradient))

        def script(kv: Any) -> list[float]:
            if kv.rank == 0:
                first(kv)
                gc.collect()  # the exception's traceback
                others = [kv.zeros(5000) for _ in range(4)]  # one of them where the gradient was
                for other in others:
                    other.fill(1000)
                interrupted.set()
                kv.push("v", others[0])
            else:
                assert interrupted.wait(LIMIT_S)
                kv.push("v", np.full(5000, 1, np.float32))
                kv.push("w", np.full(5000, 1, np.float32))
            value = kv.pull("w")
            return [float(value.min()), float(value.max())]

        with monkeypatch.context() as patched:
            patched.setattr(type(workers.stores[0]), "_wait", wait)
            assert workers.run(script) == [[2, 2], [2, 2]]


def test_a_key_that_is_deleted_while_its_value_is_read_leaves_its_memory_to_the_reader() -> None:
    with Workers("dist_sync", 1, 1) as workers:
        assert workers.cluster is not None
        agree(workers)
        kv: Any = workers.stores[0]
        (server,) = workers.cluster.servers
        for number in range(20):
            kv.init("w", np.full(50_000, number, np.float32))
            value = kv.pull_async("w")
            deleted = threading.Thread(target=kv.delete, args=("w",))
            deleted.start()
            assert (value.result(LIMIT_S) == number).all()
            deleted.join()
        settle(workers.cluster.nodes)
        gc.collect()
        assert server.heap.used_bytes == 0


def test_stores_that_all_have_closed_give_their_memory_back() -> None:
    with Workers("dist_sync", 2, 1) as workers:
        assert workers.cluster is not None
        cluster = workers.cluster
        settle(cluster.nodes)
        before = [node.heap.used_bytes for node in cluster.nodes]

        def script(kv: Any) -> None:
            kv.init("w", np.zeros(50_000, np.float32))
            kv.pushpull("w", kv.zeros(50_000))
            kv.push("w", np.zeros(50_000, np.float32))
            kv.close()

        for _ in range(3):
            workers.run(script, workers.create())
        give_up_at = time.monotonic() + LIMIT_S
        while [node.heap.used_bytes for node in cluster.nodes] != before:
            assert time.monotonic() < give_up_at
            gc.collect()
            time.sleep(0.01)


def test_a_lost_worker_takes_nothing_with_it_that_others_still_read() -> None:
    """Its pushes were complete and are applied; the server has them after it is gone."""
    with Workers("dist_async", 2, 1, lost_after_s=1.0) as workers:
        assert workers.cluster is not None
        agree(workers)
        workers.run(lambda kv: kv.set_optimizer(kvstore.optimizer.create("sgd", learning_rate=1.0)))
        workers.run(lambda kv: kv.init("w", np.zeros(50_000, np.float32)))

        def push(kv: Any) -> None:
            if kv.rank == 1:
                kv.wait([kv.push_async("w", np.full(50_000, 2, np.float32)) for _ in range(5)])
            kv.barrier()

        workers.run(push)
        workers.cluster.kill(workers.cluster.workers[1])
        value = workers.stores[0].pull("w")
        assert (value == -10).all()
        workers.has_failed = True


def test_a_forked_child_cannot_make_arrays_of_a_store_of_its_parent() -> None:
    with Workers("dist_sync", 1, 1) as workers:
        kv: Any = workers.stores[0]
        node = kv.node
        node.io_queue.is_forked = True  # as a child sees it
        try:
            for make in kv.empty, kv.zeros:
                with pytest.raises(kvstore.errors.UsageError, match="forked child"):
                    make(5)
        finally:
            node.io_queue.is_forked = False
        assert kv.zeros(5).tolist() == [0] * 5


def test_a_node_that_has_ended_keeps_no_memory_of_pushes_that_were_never_answered() -> None:
    """Worker 1 pushes nothing, so no round is complete; the node's object outlives the node."""
    with Workers("dist_sync", 2, 1) as workers:
        assert workers.cluster is not None
        agree(workers)
        workers.run(lambda kv: kv.init("w", np.zeros(2_000_000, np.float32)))
        kv: Any = workers.stores[0]
        node = workers.cluster.workers[0]
        kv.push("w", np.ones(2_000_000, np.float32))  # too large to wait for others to join it
        node.wait_until_accepted()
        segments = [weakref.ref(segment) for _, segment in node.heap.segments()]
        assert segments
        workers.cluster.kill(node)
        del kv
        workers.stores.clear()
        gc.collect()
        assert [segment() for segment in segments] == [None] * len(segments)
