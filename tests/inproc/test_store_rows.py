"""Row-sparse keys of distributed stores: what they hold, and what travels."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from combinations import covering
from workers import Workers

import kvstore as mx
from kvstore import KVStore, RowSparseArray
from kvstore.errors import (
    ArgumentValueError,
    NotSupportedError,
    OptimizerNotSet,
    UsageError,
    ValueMismatchError,
)
from kvstore.stores.dist import sparse_transfer
from pslite.errors import ProtocolError
from pslite.node.data import Traffic
from pslite.plane import Send, Transfer
from pslite.testing.inproc import InprocVan
from pslite.wire.messages import Answer

SHAPE = (23, 3)
DIST = ["dist_sync", "dist_device_sync", "dist_async"]
CLUSTERS = [(1, 1), (2, 2), (2, 5)]
#: Row-sparse keys lie on all servers, and parts of dense keys end within rows.
PARTS = {"chunk_bytes": 100, "credit_bytes": 4096}

OPTIMIZERS: dict[str, mx.optimizer.Optimizer | None] = {
    "none": None,
    "lazy momentum": mx.optimizer.create("sgd", learning_rate=0.05, momentum=0.9, wd=0.01),
    "momentum": mx.optimizer.create(
        "sgd", learning_rate=0.05, momentum=0.9, wd=0.01, lazy_update=False
    ),
    "lazy adam": mx.optimizer.create("adam", learning_rate=0.01),
    "adam": mx.optimizer.create("adam", learning_rate=0.01, lazy_update=False),
    "adagrad": mx.optimizer.create("adagrad", learning_rate=0.1),
    "lamb": mx.optimizer.create("lamb", learning_rate=0.01),
    "rmsprop": mx.optimizer.create("rmsprop", learning_rate=0.01),  # as MXNet's, it is not lazy
    "lazy rmsprop": mx.optimizer.create("rmsprop", learning_rate=0.01, lazy_update=True),
    "ftrl": mx.optimizer.create("ftrl"),  # lazy on row-sparse keys only
    "dcasgd": mx.optimizer.create("dcasgd", learning_rate=0.05, wd=0.01),
    "sgld": mx.optimizer.create("sgld", learning_rate=0.01),
}


def some_rows(seed: int, dtype: Any = "f4", most: int = 12) -> RowSparseArray:
    """Unsorted, some ids repeated, numbers of nine orders of magnitude."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, SHAPE[0], random.integers(0, most))
    values = random.normal(size=(len(ids), SHAPE[1])) * 10.0 ** random.integers(-4, 5, SHAPE[1])
    with np.errstate(all="ignore"):
        return RowSparseArray(ids, values.astype(dtype), SHAPE)


def gradient(step: int, rank: int, dtype: Any) -> Any:
    """Row-sparse or dense, of one device or of several."""
    rows = some_rows(100 * step + rank, dtype)
    if step == 1 and rank == 0:
        return rows.to_dense()
    if step == 2:
        return [rows, some_rows(1000 + rank, dtype).to_dense(), some_rows(2000 + rank, dtype)]
    return rows


def start(key: str, dtype: Any) -> Any:
    whole = np.random.default_rng(5).normal(size=SHAPE).astype(dtype)
    if key == "dense":
        return whole
    if key == "some":
        return RowSparseArray([4, 20, 2], whole[[4, 20, 2]], SHAPE)
    if key == "none":
        return RowSparseArray.zeros(SHAPE, dtype)
    return RowSparseArray(np.arange(SHAPE[0]), whole, SHAPE)


KEYS = ["dense", "all", "some", "none"]


def trained(kv: KVStore, optimizer: Any, dtype: Any, push: Callable[[int, str], None]) -> Any:
    if optimizer is not None:
        kv.set_optimizer(optimizer)
    for key in KEYS:
        kv.init(key, start(key, dtype))
    for step in range(5):
        for key in KEYS:
            push(step, key)
    values = []
    for key in KEYS:
        out = np.empty(SHAPE, dtype)
        kv.pull(key, out=out)
        values.append(out)
    return values


@pytest.mark.parametrize(("name", "size"), covering(list(OPTIMIZERS), CLUSTERS, together=1))
def test_rows_of_a_cluster_are_those_of_local_to_the_last_bit(
    name: str, size: tuple[int, int]
) -> None:
    num_workers, num_servers = size
    dtype, optimizer = "f4", OPTIMIZERS[name]

    def sums(step: int) -> list[Any]:
        """What each worker sends."""
        kv = mx.create("local")
        found = []
        for rank in range(num_workers):
            kv.init(str(rank), RowSparseArray.zeros(SHAPE, dtype))
            kv.push(str(rank), gradient(step, rank, dtype))
            found.append(kv.pull(str(rank)))
        return found

    local = mx.create("local")
    expected = trained(local, optimizer, dtype, lambda step, key: local.push(key, sums(step)))
    with Workers("dist_sync", num_workers, num_servers, **PARTS) as workers:
        found = workers.run(
            lambda kv: trained(
                kv,
                optimizer,
                dtype,
                lambda step, key: kv.push(key, gradient(step, kv.rank, dtype)),
            )
        )
        kv = workers.stores[0]
        assert [kv.info(key).stype for key in KEYS] == ["default", *["row_sparse"] * 3]
    for values in found:
        for one, other in zip(values, expected, strict=True):
            assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("dtype", ["f2", "f8", "i4", "i8"])
def test_sums_of_every_dtype_are_those_of_local(dtype: str) -> None:
    local = mx.create("local")
    pushed = [gradient(0, rank, dtype) for rank in range(2)]
    expected = trained(local, None, dtype, lambda step, key: local.push(key, pushed))
    with Workers("dist_sync", 2, 2, **PARTS) as workers:
        found = workers.run(
            lambda kv: trained(kv, None, dtype, lambda step, key: kv.push(key, pushed[kv.rank]))
        )
    for values in found:
        np.testing.assert_array_equal(values, expected)


@pytest.fixture(params=DIST)
def workers(request: pytest.FixtureRequest) -> Any:
    with Workers(request.param, 2, 2, **PARTS) as workers:
        workers.run(lambda kv: kv.set_optimizer(mx.optimizer.create("test")))
        yield workers


def numbered(shape: tuple[int, ...] = SHAPE) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape), dtype="f4").reshape(shape)


def full(values: np.ndarray[Any, Any]) -> RowSparseArray:
    return RowSparseArray(np.arange(len(values)), values, values.shape)


@pytest.mark.parametrize("key", ["rows", "dense"])
def test_rows_come_for_ids_of_every_kind(workers: Workers, key: str) -> None:
    whole = numbered()

    def script(kv: KVStore) -> None:
        kv.init("rows", full(whole))
        kv.init("dense", whole)
        batch = np.array([[7, 3], [3, 22]], np.int32)
        found = kv.row_sparse_pull(key, row_ids=batch)
        assert found.indices.tolist() == [3, 7, 22]
        np.testing.assert_array_equal(found.values, whole[[3, 7, 22]])
        out = np.empty((2, 2, 3), "f4")
        kv.row_sparse_pull(key, out=out, row_ids=batch)
        np.testing.assert_array_equal(out, whole[batch])
        wide = np.empty((3, 3), "f8")
        kv.row_sparse_pull(key, out=wide, row_ids=[1, 2, 5])
        np.testing.assert_array_equal(wide, whole[[1, 2, 5]])
        assert len(kv.row_sparse_pull(key, row_ids=[]).indices) == 0
        outs = [RowSparseArray.zeros(SHAPE), np.empty((2, 3), "f4")]
        kv.row_sparse_pull(key, out=outs, row_ids=[np.array([9, 9]), np.array([0, 0])])
        assert outs[0].indices.tolist() == [9]
        np.testing.assert_array_equal(outs[1], whole[[0, 0]])
        both = kv.row_sparse_pull(["rows", "dense"], row_ids=[[5], [22, 0]])
        assert [each.indices.tolist() for each in both] == [[5], [0, 22]]
        lists = [RowSparseArray.zeros(SHAPE, "f8"), RowSparseArray.zeros(SHAPE)]
        kv.row_sparse_pull(key, out=lists, row_ids=[8, 1])
        for each in lists:
            np.testing.assert_array_equal(each.values, whole[[1, 8]])

    workers.run(script)


def test_a_pull_of_a_row_sparse_key_gives_what_it_holds(workers: Workers) -> None:
    held = RowSparseArray([20, 3], np.array([[1, 2, 3], [4, 5, 6]], "f4"), SHAPE)

    def script(kv: KVStore) -> None:
        kv.init(["rows", "dense"], [held, numbered()])
        rows, dense = kv.pull(["rows", "dense"])
        assert rows.indices.tolist() == [3, 20]
        np.testing.assert_array_equal(rows.to_dense(), held.to_dense())
        np.testing.assert_array_equal(dense, numbered())
        out = RowSparseArray.zeros(SHAPE)
        if kv.rank == 0:
            with pytest.warns(UserWarning, match="left the RowSparseArray"):
                kv.pull("rows", out=out)
        kv.pull("rows", out=out, ignore_sparse=False)
        assert out.indices.tolist() == [3, 20]
        kv.pull("dense", out=out, ignore_sparse=False)
        np.testing.assert_array_equal(out.to_dense(), numbered())
        whole, (version, _) = kv.pull(["rows", "dense"], with_version=True)
        np.testing.assert_array_equal(whole[0].values, rows.values)
        assert (version, len(version.parts)) == (0, 2)
        future = kv.pull_async("rows")
        np.testing.assert_array_equal(kv.wait(future).to_dense(), held.to_dense())

    workers.run(script)


def test_arrays_of_mx_nd_carry_rows_as_scripts_for_mxnet_use_them(workers: Workers) -> None:
    def script(kv: KVStore) -> None:
        kv.init(["rows", "dense"], [mx.nd.ones(SHAPE).tostype("row_sparse"), mx.nd.ones(SHAPE)])
        kv.set_optimizer(mx.optimizer.create("test", rescale_grad=2))
        kv.barrier()
        gradient = mx.nd.zeros(SHAPE)
        gradient[kv.rank] = kv.rank + 1
        kv.push(["rows", "dense"], [gradient.tostype("row_sparse")] * 2)
        kv.push("rows", mx.nd.sparse.zeros("row_sparse", SHAPE))
        kv.wait()
        kv.barrier()
        expected = np.ones(SHAPE, "f4")
        expected[:2] += [[2], [4]]
        dense = mx.nd.zeros(SHAPE)
        kv.pull("dense", out=dense)
        assert ((dense - expected).asnumpy() == 0).all()
        out = mx.nd.zeros(SHAPE, stype="row_sparse")
        ids = mx.nd.array([0, 1, 5, 0]).reshape((4 / 2, 2))
        kv.row_sparse_pull("rows", out=out, row_ids=ids)
        assert out.indices.asnumpy().tolist() == [0, 1, 5]
        assert ((out - mx.nd.array(expected)).asnumpy()[[0, 1, 5]] == 0).all()
        kv.row_sparse_pull("rows", out=out, row_ids=mx.nd.array([]))
        assert ((out - 0).asnumpy() == 0).all()

    workers.run(script)


def test_pushes_of_all_kinds_reach_the_rows_that_they_name(workers: Workers) -> None:
    ones = RowSparseArray([2, 21], np.ones((2, 3), "f4"), SHAPE)

    def script(kv: KVStore) -> Any:
        kv.init(["rows", "dense"], [full(numbered()), numbered()])
        kv.push("rows", ones)
        kv.push(["rows", "dense"], [[ones, ones], ones])
        kv.wait(kv.push_async("dense", ones))
        kv.pushpull("rows", ones, out=np.empty(SHAPE, "f4"))
        kv.wait(kv.pushpull_async("rows", ones, out=np.empty(SHAPE, "f4")))
        kv.wait()
        kv.barrier()
        return kv.pull("rows").to_dense(), kv.pull("dense")

    grown = np.zeros(SHAPE, "f4")
    grown[[2, 21]] = 2  # workers
    for rows, dense in workers.run(script):
        np.testing.assert_array_equal(rows, numbered() + 5 * grown)
        np.testing.assert_array_equal(dense, numbered() + 2 * grown)


def test_broadcast_and_pushpull_fill_dense_arrays_only(workers: Workers) -> None:
    def script(kv: KVStore) -> None:
        out = np.empty(SHAPE, "f4")
        kv.broadcast("rows", full(numbered()), out)
        np.testing.assert_array_equal(out, numbered())
        before = kv.stats()["store"]["pushes"]
        with pytest.raises(NotSupportedError, match="cannot fill a RowSparseArray"):
            kv.pushpull("rows", full(numbered()))
        with pytest.raises(NotSupportedError, match="cannot fill a RowSparseArray"):
            kv.broadcast("more", full(numbered()), RowSparseArray.zeros(SHAPE))
        assert kv.stats()["store"]["pushes"] == before

    workers.run(script)


def test_rows_of_a_table_lie_evenly_over_the_servers() -> None:
    with Workers("dist_sync", 1, 5) as workers:
        kv = workers.stores[0]
        kv.init("large", RowSparseArray.zeros((1_000_001, 4)))
        kv.init("small", RowSparseArray.zeros((10, 4)))
        kv.init("endless", RowSparseArray.zeros((2**63, 4)))
        placed = [kv.placement()[rank]["large"] // 16 for rank in range(5)]
        assert placed == [200_001, 200_000, 200_000, 200_000, 200_000]
        assert kv.info("small").num_parts == 1
        last = RowSparseArray([2**63 - 1, 0], np.ones((2, 4), "f4"), (2**63, 4))
        kv.push("endless", last)
        assert kv.pull("endless").indices.tolist() == [0, 2**63 - 1]
        assert kv.row_sparse_pull("endless", row_ids=[2**63 - 1, 5]).values[:, 0].tolist() == [0, 1]


def test_bytes_on_the_way_are_those_of_the_rows() -> None:
    """2 % of the rows, and no more than 4 % of the bytes; ids, headers and answers count."""
    shape, touched = (20_000, 16), 400
    whole_bytes = shape[0] * shape[1] * 4
    ids = np.random.default_rng(1).integers(0, shape[0], touched)
    rows = RowSparseArray(ids, np.ones((touched, 16), "f4"), shape)
    with Workers("dist_sync", 1, 2, shm=False) as workers:
        kv = workers.stores[0]
        assert workers.cluster is not None
        links = workers.cluster.workers[0].links
        kv.set_optimizer(mx.optimizer.create("sgd", learning_rate=1.0))
        kv.init("table", RowSparseArray.zeros(shape))
        kv.init("dense", np.zeros(shape, "f4"))

        def moved(act: Callable[[], object]) -> tuple[int, int]:
            before = np.sum(list(links.byte_counts().values()), axis=0)
            act()
            kv.wait()
            after = np.sum(list(links.byte_counts().values()), axis=0)
            sent, received = (after - before).tolist()
            return sent, received

        for key in ("table", "dense"):
            sent, received = moved(lambda key=key: kv.push(key, rows))  # type: ignore[misc]
            assert rows.nbytes <= sent + 12 * touched
            assert sent < 0.04 * whole_bytes and received < 0.01 * whole_bytes
            sent, received = moved(lambda key=key: kv.row_sparse_pull(key, row_ids=ids))  # type: ignore[misc]
            assert sent < 0.01 * whole_bytes and received < 0.04 * whole_bytes
        repeated = np.repeat(ids, 10)
        _, received = moved(lambda: kv.row_sparse_pull("table", row_ids=repeated))
        assert received < 0.04 * whole_bytes


def test_rows_reach_the_servers_in_shared_memory() -> None:
    shape = (5000, 16)
    rows = RowSparseArray(np.arange(0, 5000, 5), np.ones((1000, 16), "f4"), shape)
    with Workers("dist_sync", 1, 2, chunk_bytes=65_536) as workers:
        kv = workers.stores[0]
        assert workers.cluster is not None
        links = workers.cluster.workers[0].links
        kv.init("table", RowSparseArray.zeros(shape))
        kv.push("table", rows)
        kv.row_sparse_pull("table", row_ids=rows.indices)
        before = sum(map(sum, links.byte_counts().values()))
        for _ in range(3):
            kv.push("table", rows)
            found = kv.row_sparse_pull("table", row_ids=rows.indices)
        np.testing.assert_array_equal(found.values, rows.values)
        assert sum(map(sum, links.byte_counts().values())) - before < 3 * rows.nbytes // 10


@pytest.mark.parametrize("shape", [(5, 0), (0, 3), (0,), (5,), (4, 2, 3)])
@pytest.mark.parametrize("is_dense", [True, False])
def test_rows_have_any_shape(workers: Workers, shape: tuple[int, ...], is_dense: bool) -> None:
    whole = numbered(shape)
    ids = np.arange(shape[0])[-2:]
    some = RowSparseArray(ids, np.ones((len(ids), *shape[1:]), "f4"), shape)

    def script(kv: KVStore) -> Any:
        kv.init("w", whole if is_dense else full(whole))
        kv.push("w", some)
        kv.push("w", [some.to_dense(), some])
        kv.wait()
        kv.barrier()
        rows = kv.row_sparse_pull("w", row_ids=ids[::-1].copy())
        assert rows.indices.tolist() == ids.tolist()
        out = np.empty((1, len(ids), *shape[1:]), "f4")
        kv.row_sparse_pull("w", out=out, row_ids=ids[::-1].reshape(1, -1))
        np.testing.assert_array_equal(out[0, ::-1], rows.values)
        found = np.empty(shape, "f4")
        kv.pull("w", out=found)
        np.testing.assert_array_equal(found[ids], rows.values)
        return found

    for found in workers.run(script):
        np.testing.assert_array_equal(found, whole + 6 * some.to_dense())


def test_what_a_row_sparse_key_gives_is_counted() -> None:
    with Workers("dist_sync", 1, 2) as workers:
        kv = workers.stores[0]
        kv.init("w", full(numbered((100, 4))))
        before = kv.stats()["store"]["bytes_pulled"]
        kv.pull("w")
        assert kv.stats()["store"]["bytes_pulled"] - before >= 1600
        assert kv.stats()["store"]["pulls"] == 1
        servers = kv.stats()["servers"].values()
        assert sum(each["value_bytes"] for each in servers) == 1600


def test_many_rows_come_in_several_answers(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_transfer, "ANSWER_BYTES", 40)
    whole = numbered((200, 3))

    def script(kv: KVStore) -> None:
        kv.init("all", full(whole))
        some = np.arange(200)[kv.rank :: 3]
        np.testing.assert_array_equal(kv.row_sparse_pull("all", row_ids=some).values, whole[some])
        np.testing.assert_array_equal(kv.pull("all").values, whole)
        kv.barrier()
        held = RowSparseArray([5, 6, 150], np.ones((3, 3), "f4"), whole.shape)
        kv.push("all", held)
        kv.wait()
        kv.barrier()
        found = kv.pull("all")
        assert found.indices.tolist() == list(range(200))
        grown = found.values - whole
        assert np.flatnonzero(grown.any(axis=1)).tolist() == [5, 6, 150]
        assert grown.max() == 2

    workers.run(script)


def test_a_round_of_rows_that_waits_says_for_whom() -> None:
    with Workers("dist_sync", 2, 2, stall_report_s=0.1, **PARTS) as workers:
        cluster = workers.cluster
        assert cluster is not None
        text = r"round 1 of key 'w' \(part \d of 2\) has waited \d s for worker 1"

        def script(kv: KVStore) -> None:
            kv.init("w", full(numbered()))
            if kv.rank == 0:
                kv.push("w", full(numbered()))
            deadline = time.monotonic() + 20
            while not any(re.search(text, line) for line in cluster.lines):
                assert time.monotonic() < deadline, cluster.lines
                time.sleep(0.05)
            if kv.rank == 1:
                kv.push("w", RowSparseArray.zeros(SHAPE))
            np.testing.assert_array_equal(kv.pull("w").to_dense(), numbered())

        workers.run(script)


# -- what does not fit --------------------------------------------------------------------


def test_a_key_is_row_sparse_on_all_workers_or_on_none() -> None:
    with Workers("dist_sync", 2, 2, **PARTS) as workers:

        def script(kv: KVStore) -> None:
            value = [full(numbered()), numbered()][kv.rank]
            if kv.rank:
                with pytest.raises(ValueMismatchError, match=r"is row-sparse.*value is dense"):
                    kv.init("w", value)
            else:
                kv.init("w", value)
            kv.barrier()
            kv.init("v", full(numbered()))
            kv.push("v", full(numbered()))
            np.testing.assert_array_equal(kv.pull("v").to_dense(), 2 * numbered())

        workers.run(script)


def test_an_asynchronous_push_of_rows_needs_an_optimizer() -> None:
    with Workers("dist_async", 1, 2, **PARTS) as workers:
        kv = workers.stores[0]
        kv.init("w", full(numbered()))
        with pytest.raises(OptimizerNotSet):
            kv.push("w", full(numbered()))


def test_more_rows_than_a_message_can_hold_are_an_error_before_any_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits = {"max_message_bytes": 4096, "chunk_bytes": 1024}
    with Workers("dist_sync", 1, 2, **limits) as workers:
        kv = workers.stores[0]
        whole = numbered((1000, 4))
        kv.init(["w", "d"], [full(whole), whole])
        with pytest.raises(ValueMismatchError, match="PS_MAX_MESSAGE_BYTES"):
            kv.push(["d", "w"], [whole, full(whole)])
        with monkeypatch.context() as patch:
            patch.setattr(sparse_transfer, "_ROOM_BYTES", -(1 << 20))
            with pytest.raises(ValueMismatchError, match="PS_MAX_MESSAGE_BYTES"):
                kv.pull("w")
        rows = kv.row_sparse_pull("w", row_ids=np.arange(1000)[::7])
        np.testing.assert_array_equal(rows.values, whole[::7])
        np.testing.assert_array_equal(kv.pull("d"), whole)
        some = RowSparseArray([0, 999], whole[[0, 999]], whole.shape)
        kv.push("w", some)
        assert kv.pull("w").indices.tolist() == [0, 999]


def test_rows_that_lie_too_close_in_a_huge_key_are_pulled_by_their_ids() -> None:
    limits = {"max_message_bytes": 4096, "chunk_bytes": 1024}
    with Workers("dist_sync", 1, 2, **limits) as workers:
        kv = workers.stores[0]
        ids, values = np.arange(500), numbered((500, 4))
        held = RowSparseArray(ids, values, (2**40, 4))
        kv.init(["w", "d"], [held, np.ones(3, np.float32)])
        text = (
            "key 'w': 250 rows of a part make a message of .* bytes, over.*pull fewer rows at once"
        )
        with pytest.raises(ValueMismatchError, match=text):
            kv.pull("w")
        np.testing.assert_array_equal(kv.row_sparse_pull("w", row_ids=ids).values, values)
        np.testing.assert_array_equal(kv.pull("d"), np.ones(3))


@pytest.mark.parametrize("call", ["push", "push_async", "pushpull", "pushpull_async"])
@pytest.mark.parametrize("wrong", ["rows", "numbers"])
def test_a_call_that_raises_has_pushed_none_of_its_keys(call: str, wrong: str) -> None:
    limits = {"max_message_bytes": 4096, "chunk_bytes": 1024}
    with Workers("dist_sync", 1, 2, **limits) as workers:
        kv = workers.stores[0]
        if wrong == "numbers":
            kv.set_gradient_compression({"type": "int8", "exclude": ["w", "e"]})
        kv.set_optimizer(mx.optimizer.create("test"))
        whole = numbered((1000, 4))
        kv.init(["w", "d"], [full(whole), whole])
        kv.init("e", whole)
        rows = full(whole)
        if wrong == "numbers":
            rows, bad = RowSparseArray([0], whole[:1], whole.shape), whole.copy()
            bad[0, 0] = np.nan
        pushed = [rows, whole if wrong == "rows" else bad]
        keys = ["w", "d"]
        outs = {"out": [np.empty_like(whole)] * 2} if call.startswith("pushpull") else {}
        error = ValueMismatchError if wrong == "rows" else ArgumentValueError
        for _ in range(2):
            with pytest.raises(error):
                getattr(kv, call)(keys, pushed, **outs)
        kv.wait()
        np.testing.assert_array_equal(kv.pull("w").to_dense(), whole)
        np.testing.assert_array_equal(kv.pull("d"), whole)


@pytest.mark.parametrize("dtype", ["f4", "u1"])
def test_rows_come_in_answers_that_a_van_carries(
    monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    limit, send = 2048, InprocVan.send

    def limited(van: InprocVan, peer: str, frames: Sequence[Any]) -> None:
        if max(memoryview(frame).nbytes for frame in frames) > limit:
            raise UsageError("a frame is over this van's limit")
        send(van, peer, frames)

    with Workers("dist_sync", 1, 2, max_message_bytes=limit, chunk_bytes=1024) as workers:
        kv = workers.stores[0]
        whole = numbered((1000, 4 if dtype == "f4" else 1)).astype(dtype)
        kv.init(["w", "d"], [full(whole), whole])
        monkeypatch.setattr(InprocVan, "send", limited)
        for key in ("w", "d") if dtype == "f4" else ("w",):  # ids of "d" are wider than rows
            pulled = kv.row_sparse_pull(key, row_ids=np.arange(1000))
            np.testing.assert_array_equal(pulled.values, whole)
        np.testing.assert_array_equal(kv.pull("w").values, whole)


@pytest.mark.parametrize("key", ["rows", "dense"])
def test_an_answer_that_arrives_malformed_is_an_error_and_the_next_one_counts(
    monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    send = Traffic._send

    def spoilt(traffic: Traffic, worker: int, effect: Send) -> None:
        message = effect.message
        if isinstance(message, Answer):
            sizes = tuple(size + 1 for size in message.sizes)
            effect = effect._replace(message=replace(message, sizes=sizes))
        send(traffic, worker, effect)

    with Workers("dist_sync", 1, 1) as workers:
        kv = workers.stores[0]
        kv.init(["rows", "dense"], [full(numbered()), numbered()])
        with monkeypatch.context() as patch:
            patch.setattr(Traffic, "_send", spoilt)
            with pytest.raises(
                ProtocolError, match=r"server 0 sent an invalid answer for part \d+"
            ):
                kv.pull(key)
        pulled = kv.pull(key)
        np.testing.assert_array_equal(pulled.values if key == "rows" else pulled, numbered())


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("key", ["rows", "dense"])
def test_a_push_that_arrives_malformed_is_an_error_and_the_next_one_counts(
    monkeypatch: pytest.MonkeyPatch, kind: str, key: str
) -> None:
    submit = Traffic.submit

    def spoilt(traffic: Traffic, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            transfer.push_sizes = tuple(size + 1 for size in transfer.push_sizes)
        submit(traffic, transfers)

    with Workers(kind, 1, 1) as workers:
        kv = workers.stores[0]
        kv.set_optimizer(mx.optimizer.create("test"))
        kv.init(["rows", "dense"], [full(numbered()), numbered()])
        value = full(numbered()) if key == "rows" else numbered()
        with monkeypatch.context() as patch:
            patch.setattr(Traffic, "submit", spoilt)
            with pytest.raises(ProtocolError, match="expected frames of whole parts"):
                kv.push_async(key, value).result(20)
        kv.push(key, value)
        found = kv.pull(key)
        whole = found.values if key == "rows" else found
        np.testing.assert_array_equal(whole, 2 * numbered())
        cluster = workers.cluster
        assert cluster is not None
        assert any("expected frames of whole parts" in line for line in cluster.lines)


def test_an_update_that_a_server_refuses_is_an_error_of_the_push() -> None:
    with Workers("dist_sync", 2, 2, **PARTS) as workers:

        def script(kv: KVStore) -> None:
            kv.set_optimizer(mx.optimizer.create("sgd"))
            kv.init("w", RowSparseArray.zeros(SHAPE, "i4"))
            kv.push("w", RowSparseArray.zeros(SHAPE, "i4"))
            with pytest.raises(UsageError, match="int32"):
                kv.wait("w")
            kv.init("v", full(numbered()))
            kv.push("v", full(numbered()))
            kv.wait()

        workers.run(script)


def test_ids_out_of_range_never_leave_the_worker(workers: Workers) -> None:
    def script(kv: KVStore) -> None:
        kv.init("w", full(numbered()))
        with pytest.raises(ArgumentValueError, match="out of range"):
            kv.row_sparse_pull("w", row_ids=[23])
        with pytest.raises(ValueMismatchError, match="shape"):
            kv.push("w", RowSparseArray.zeros((24, 3)))
        kv.push("w", RowSparseArray.zeros(SHAPE))
        kv.wait()
        np.testing.assert_array_equal(kv.pull("w").to_dense(), numbered())

    workers.run(script)


def test_a_deleted_key_may_come_back_in_the_other_kind(workers: Workers) -> None:
    def script(kv: KVStore) -> None:
        kv.init("w", full(numbered()))
        kv.delete("w")
        kv.init("w", numbered())
        assert kv.info("w")[4:] == (2, "default")
        kv.delete("w")
        kv.init("w", RowSparseArray.zeros(SHAPE))
        assert kv.info("w")[4:] == (3, "row_sparse")
        assert len(kv.pull("w").indices) == 0

    workers.run(script)
