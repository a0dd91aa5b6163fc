"""Compressed pushes and pulls of all stores: the same bits as the codecs computed by hand."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from combinations import covering
from workers import Workers

import kvstore
from kvstore import KVStore, optimizer
from kvstore.compression import Chain, make_chain
from kvstore.errors import ArgumentTypeError, ArgumentValueError, NotSupportedError
from kvstore.protocol.placement import chunk_ranges
from pslite.errors import ProtocolError, PSError, UsageError

PARTS: dict[str, Any] = {"chunk_bytes": 1024, "credit_bytes": 4096}
SHAPES: dict[str, tuple[int, ...]] = {"large": (40, 50), "small": (7, 3), "one": (1,), "none": (0,)}
CHAINS: dict[str, dict[str, Any]] = {
    "2bit": {"type": "2bit", "threshold": 0.5},
    "1bit": {"type": "1bit", "threshold": 0.0},
    "fp16": {"type": "fp16"},
    "int8": {"type": "int8"},
    "topk": {"type": "topk", "ratio": 0.1},
    "topk with fp16": {"type": "topk+fp16", "ratio": 0.1},
}
ROUNDS = 4


def gradients(rank: int, dtype: str = "f4") -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(rank)
    return [rng.standard_normal(shape).astype(dtype) for shape in SHAPES.values()]


class Expected:
    """What comes out of a chain for the pushes of one worker, part by part, on one key."""

    def __init__(self, chain: Chain, shape: tuple[int, ...], chunk_bytes: int) -> None:
        self._chain = chain
        size = int(np.prod(shape))
        self._chunks = chunk_ranges(size, 4, chunk_bytes)
        self._residual = np.zeros(size, np.float32)

    def __call__(self, gradient: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        flat = gradient.reshape(-1)
        found = np.zeros_like(flat)
        for start, stop in self._chunks:
            residual = self._residual[start:stop] if self._chain.has_feedback else None
            data = self._chain.encode(flat[start:stop], residual=residual)
            self._chain.decode(data, found[start:stop])
        return found.reshape(gradient.shape)


def begin(kv: KVStore, given: object) -> None:
    kv.set_gradient_compression(given)  # type: ignore[arg-type]
    kv.set_optimizer(optimizer.create("test"))
    kv.init(list(SHAPES), [np.zeros(shape, np.float32) for shape in SHAPES.values()])


# -- the numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shm", "num_servers"), covering(list(CHAINS), [True, False], [1, 2, 3], together=1)
)
def test_servers_add_up_what_the_codecs_give(name: str, shm: bool, num_servers: int) -> None:
    def script(kv: KVStore) -> Sequence[np.ndarray[Any, Any]]:
        begin(kv, CHAINS[name])
        outs = [np.ones(shape, np.float32) for shape in SHAPES.values()]
        for _ in range(ROUNDS):
            kv.pushpull(list(SHAPES), gradients(kv.rank), outs)
        return outs

    with Workers("dist_sync", 2, num_servers, shm=shm, **PARTS) as workers:
        results = workers.run(script)
    for index, shape in enumerate(SHAPES.values()):
        chain = make_chain(CHAINS[name])
        each = [Expected(chain, shape, PARTS["chunk_bytes"]) for _ in range(2)]
        weight = np.zeros(shape, np.float32)
        for _ in range(ROUNDS):
            weight += each[0](gradients(0)[index]) + each[1](gradients(1)[index])
        for outs in results:
            np.testing.assert_array_equal(outs[index], weight)


@pytest.mark.parametrize("kind", ["local", "device"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_store_of_one_process_adds_up_what_the_codecs_give(kind: str, name: str) -> None:
    kv = kvstore.create(kind)
    begin(kv, CHAINS[name])
    outs = [np.ones(shape, np.float32) for shape in SHAPES.values()]
    for _ in range(ROUNDS):
        pairs = [list(pair) for pair in zip(gradients(0), gradients(1), strict=True)]
        kv.pushpull(list(SHAPES), pairs, outs)
    for index, shape in enumerate(SHAPES.values()):
        each = [Expected(make_chain(CHAINS[name]), shape, 1 << 30) for _ in range(2)]
        weight = np.zeros(shape, np.float32)
        for _ in range(ROUNDS):
            weight += each[0](gradients(0)[index]) + each[1](gradients(1)[index])
        np.testing.assert_array_equal(outs[index], weight)


@pytest.mark.parametrize("how", ["one by one", "lists", "lazy", "futures"])
def test_all_ways_to_push_and_pull_give_the_same(how: str) -> None:
    def script(kv: KVStore) -> Sequence[np.ndarray[Any, Any]]:
        begin(kv, CHAINS["2bit"])
        keys, mine = list(SHAPES), gradients(kv.rank)
        outs: list[Any] = [np.ones(shape, np.float32) for shape in SHAPES.values()]
        if how == "lazy":
            outs = [kvstore.nd.array(out) for out in outs]
        for _ in range(ROUNDS):
            if how == "lists":
                kv.push(keys, mine)
                kv.pull(keys, outs)
            elif how == "futures":
                kv.wait([kv.push_async(keys, mine), kv.pull_async(keys, outs)])
            else:
                for key, gradient, out in zip(keys, mine, outs, strict=True):
                    kv.push(key, gradient, priority=1)
                    kv.pull(key, out)
        return [np.asarray(out.asnumpy() if how == "lazy" else out) for out in outs]

    with Workers("dist_sync", 2, 2, **PARTS) as workers:
        results = workers.run(script)
    for index, shape in enumerate(SHAPES.values()):
        chain = make_chain(CHAINS["2bit"])
        each = [Expected(chain, shape, PARTS["chunk_bytes"]) for _ in range(2)]
        weight = np.zeros(shape, np.float32)
        for _ in range(ROUNDS):
            weight += each[0](gradients(0)[index]) + each[1](gradients(1)[index])
        for outs in results:
            np.testing.assert_array_equal(outs[index], weight)


def test_an_asynchronous_store_applies_each_push_as_it_was_decoded() -> None:
    def script(kv: KVStore) -> np.ndarray[Any, Any]:
        begin(kv, CHAINS["2bit"])
        for _ in range(ROUNDS):
            kv.push(list(SHAPES), gradients(kv.rank))
        kv.wait()
        kv.barrier()
        found: np.ndarray[Any, Any] = kv.pull("large")
        return found

    with Workers("dist_async", 2, 2, **PARTS) as workers:
        first, second = workers.run(script)
    chain = make_chain(CHAINS["2bit"])
    weight = np.zeros(SHAPES["large"], np.float32)
    for rank in range(2):
        mine = Expected(chain, SHAPES["large"], PARTS["chunk_bytes"])
        for _ in range(ROUNDS):
            weight += mine(gradients(rank)[0])  # multiples of a half: exact in any order
    np.testing.assert_array_equal(first, weight)
    np.testing.assert_array_equal(second, weight)


@pytest.mark.parametrize("dtype", ["f2", "bfloat16", "f8"])
@pytest.mark.parametrize("name", ["2bit", "fp16", "topk"])
def test_every_float_dtype_can_be_compressed(name: str, dtype: str) -> None:
    kind = np.dtype("f8" if dtype == "f8" else "f2")
    if dtype == "bfloat16":
        kind = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    gradient = np.array([3, -3, 0, 0.25] * 50).astype(kind)

    def script(kv: KVStore) -> np.ndarray[Any, Any]:
        kv.set_gradient_compression(CHAINS[name])
        kv.init("w", np.zeros(200, kind))
        kv.push("w", gradient)
        found: np.ndarray[Any, Any] = kv.pull("w")
        return found

    wanted = {
        "2bit": np.array([1, -1, 0, 0] * 50),
        "fp16": 2 * gradient.astype("f8"),
        "topk": np.where(np.arange(200) < 40, 2 * gradient.astype("f8"), 0),
    }[name]
    if name == "topk":  # the largest 20, the lower ids first
        wanted = np.where(np.abs(gradient.astype("f8")) == 3, 2 * gradient.astype("f8"), 0)
        wanted[np.flatnonzero(wanted)[20:]] = 0
    with Workers("dist_sync", 2, 1) as workers:
        for value in workers.run(script):
            assert value.dtype == kind
            np.testing.assert_array_equal(value.astype("f8"), wanted)


def test_integers_travel_as_they_are() -> None:
    def script(kv: KVStore) -> np.ndarray[Any, Any]:
        kv.set_gradient_compression(CHAINS["2bit"])
        kv.init(["i", "f"], [np.zeros(300, np.int64), np.zeros(300, np.float32)])
        kv.push(["i", "f"], [np.arange(300), np.ones(300, np.float32)])
        assert kv.pull("f").tolist() == [1.0] * 300
        found: np.ndarray[Any, Any] = kv.pull("i")
        return found

    with Workers("dist_sync", 2, 2, **PARTS) as workers:
        for value in workers.run(script):
            np.testing.assert_array_equal(value, 2 * np.arange(300))


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_values_come_back_compressed_where_that_is_asked(kind: str) -> None:
    given = {"type": "none", "only": ["large"], "pull": {"type": "fp16"}}

    def script(kv: KVStore) -> list[np.ndarray[Any, Any]]:
        begin(kv, given)
        kv.push(list(SHAPES), gradients(0))
        kv.wait()
        kv.barrier()
        return [kv.pull(key) for key in SHAPES]

    with Workers(kind, 2, 2, **PARTS) as workers:
        for large, small, *_ in workers.run(script):
            whole = 2 * gradients(0)[0]
            np.testing.assert_array_equal(large, whole.astype("f2").astype("f4"))
            np.testing.assert_array_equal(small, 2 * gradients(0)[1])


@pytest.mark.parametrize("codec", ["fp16", "int8"])
@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist_async"])
def test_every_call_gives_a_value_as_its_codec_of_pulls_carries_it(kind: str, codec: str) -> None:
    value = np.random.default_rng(0).standard_normal((7, 3)).astype("f4")
    chain = make_chain({"type": codec, "feedback": False})
    arrived = np.empty_like(value)
    chain.decode(chain.encode(value), arrived)

    def script(kv: KVStore) -> list[np.ndarray[Any, Any]]:
        kv.set_gradient_compression({"type": "none", "exclude": "b", "pull": {"type": codec}})
        made, outs = np.empty_like(value), [np.empty_like(value) for _ in range(8)]
        kv.broadcast("w", value, out=made)
        kv.init("b", value)
        kv.pull("w", out=outs[0])
        kv.pull(["b", "w"], out=[[outs[1], outs[2]], outs[3]])
        kv.pushpull(["w", "b"], [value, value], out=[[outs[4], outs[5]], outs[6]])
        lazy = kvstore.nd.zeros(value.shape)
        kv.pull("w", out=lazy)
        kv.push("w", value)
        found = kv.pull(["w", "b"])
        assert not np.may_share_memory(found[0], kv.pull("w"))
        # The store holds all of it; only what it hands out went through the codec.
        rows = kv.row_sparse_pull("w", row_ids=np.arange(7)).values
        np.testing.assert_array_equal(rows, value)
        from_b = [outs[1], outs[2], outs[6], found[1]]
        np.testing.assert_array_equal(from_b, [value] * 4)
        return [made, outs[0], outs[3], outs[4], outs[5], lazy.asnumpy(), found[0]]

    with Workers(kind, 1, 1) as workers:
        if kind == "dist_async":
            workers.stores[0].set_optimizer(optimizer.create("sgd", learning_rate=0.0))
        for each in workers.run(script)[0]:
            np.testing.assert_array_equal(each, arrived)
    assert (arrived != value).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist_async"])
def test_a_value_that_its_codec_of_pulls_cannot_carry_is_an_error_that_names_the_key(
    kind: str, bad: float
) -> None:
    values = [np.zeros(3000, np.float32), np.ones(3000, np.float32)]

    def script(kv: KVStore) -> float:
        kv.set_optimizer(optimizer.create("test"))
        kv.set_gradient_compression({"type": "fp16", "pull": {"type": "int8"}})
        kv.init(["w", "good"], values)
        gradient = np.zeros(3000, np.float32)
        gradient[1234] = bad
        kv.push("w", gradient)
        for call in (
            lambda: kv.pull("w"),
            lambda: kv.pull(["good", "w"], out=[np.empty_like(each) for each in values]),
            lambda: kv.pushpull("w", np.zeros_like(gradient), out=np.empty_like(gradient)),
            lambda: kv.wait(kv.pull_async("w", out=np.empty_like(gradient))),
        ):
            with pytest.raises(ArgumentValueError, match="'w' has NaN or infinity, which int8"):
                call()
        assert kv.pull("good").tolist() == [1.0] * 3000
        kv.set_gradient_compression({"type": "fp16", "pull": {"type": "fp16"}})
        return float(kv.pull("w")[1234])

    with Workers(kind, 1, 2, **PARTS) as workers:
        np.testing.assert_equal(workers.run(script), [bad])


@pytest.mark.parametrize("kind", ["local", "dist_sync", "dist_async"])
def test_another_codec_of_pulls_counts_for_values_that_were_pulled_before(kind: str) -> None:
    def script(kv: KVStore) -> list[float]:
        kv.init("w", np.full(600, 1 + 2**-10, np.float32))
        found = []
        for codec in ("int8", "fp16", "none"):
            kv.set_gradient_compression({"type": "none", "pull": {"type": codec}})
            found.append(float(kv.pull("w")[0]))
        return found

    with Workers(kind, 2, 2, **PARTS) as workers:
        for int8, *others in workers.run(script):
            assert int8 == pytest.approx(1 + 2**-10, rel=1e-6)
            assert others == [1 + 2**-10] * 2


def test_random_places_are_the_same_on_all_workers() -> None:
    given = {"type": "randomk", "ratio": 0.25, "seed": 3, "feedback": False}

    def script(kv: KVStore) -> np.ndarray[Any, Any]:
        kv.set_gradient_compression(given)
        kv.init("w", np.zeros(400, np.float32))
        kv.push("w", np.full(400, kv.rank + 1, np.float32))
        found: np.ndarray[Any, Any] = kv.pull("w")
        return found

    with Workers("dist_sync", 2, 1) as workers:
        value, _ = workers.run(script)
    assert np.count_nonzero(value) == 100
    assert set(value[value != 0]) == {3.0 * 4}


# -- when it is set, and by whom -------------------------------------------------------------


def test_it_can_be_set_changed_and_turned_off_while_training() -> None:
    steps = [
        None,
        {"type": "2bit"},
        {"type": "fp16", "pull": {"type": "fp16"}},
        None,
        {"type": "int8"},
    ]

    def script(kv: KVStore) -> list[np.ndarray[Any, Any]]:
        kv.init("w", np.zeros(1000, np.float32))
        found = []
        for step in steps:
            kv.set_gradient_compression(step)  # type: ignore[arg-type]
            kv.push("w", np.full(1000, 2.0, np.float32))
            found.append(kv.pull("w"))
        return found

    with Workers("dist_sync", 2, 2, **PARTS) as workers:
        for found in workers.run(script):
            assert [set(value) for value in found] == [{4.0}, {1.0}, {4.0}, {4.0}, {4.0}]


def test_what_was_lost_is_forgotten_when_it_is_set_again() -> None:
    def script(kv: KVStore) -> list[float]:
        kv.init("w", np.zeros(10, np.float32))
        found = []
        for _ in range(2):
            kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
            for _ in range(2):
                kv.push("w", np.full(10, 0.6, np.float32))
                found.append(float(kv.pull("w")[0]))
        return found

    with Workers("dist_sync", 1, 1) as workers:
        assert workers.run(script) == [[0.0, 1.0, 0.0, 1.0]]


def test_a_key_that_is_made_again_owes_nothing() -> None:
    def script(kv: KVStore) -> list[float]:
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        found = []
        for _ in range(2):
            kv.init("w", np.zeros(10, np.float32))
            for _ in range(2):
                kv.push("w", np.full(10, 0.6, np.float32))
                found.append(float(kv.pull("w")[0]))
            kv.delete("w")
        return found

    for kind in ("local", "dist_sync"):
        with Workers(kind, 1, 1) as workers:
            assert workers.run(script) == [[0.0, 1.0, 0.0, 1.0]]


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_workers_that_ask_for_different_compressions_all_get_an_error(kind: str) -> None:
    def script(kv: KVStore) -> float:
        begin(kv, None)
        threshold = 0.5 + kv.rank
        with pytest.raises(PSError, match=r"worker \d called set_gradient_compression") as caught:
            kv.set_gradient_compression({"type": "2bit", "threshold": threshold})
        assert all(f"'threshold': {each}" in str(caught.value) for each in (0.5, 1.5))
        kv.push("small", np.full(SHAPES["small"], 0.25, np.float32))
        kv.wait()
        kv.barrier()
        return float(kv.pull("small")[0, 0])

    with Workers(kind, 2, 2, **PARTS) as workers:
        assert workers.run(script) == [0.5, 0.5]


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_a_bad_number_changes_nothing_of_a_call_with_several_keys(kind: str) -> None:
    def script(kv: KVStore) -> float:
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        kv.init(["a", "b"], [np.zeros(4, np.float32)] * 2)
        bad = np.array([1, np.inf, 1, 1], np.float32)
        with pytest.raises(ArgumentValueError, match="2bit cannot encode"):
            kv.push(["a", "b"], [np.full(4, 0.6, np.float32), bad])
        kv.push("a", np.full(4, 0.6, np.float32))
        return float(kv.pull("a")[0])

    with Workers(kind, 1, 1) as workers:
        assert workers.run(script) == [0.0]  # 1.2 with what the call that failed had kept


def test_row_sparse_values_of_a_compressed_key_are_one_error() -> None:
    kv = kvstore.create("local")
    kv.set_gradient_compression({"type": "2bit", "exclude": ["table"]})
    rows = kvstore.RowSparseArray([1], np.ones((1, 2), np.float32), (5, 2))
    kv.init(["table", "w"], [kvstore.RowSparseArray.zeros((5, 2)), np.zeros((5, 2), np.float32)])
    kv.push("table", rows)
    with pytest.raises(NotSupportedError, match="exclude key 'w'"):
        kv.push("w", rows)
    assert kv.pull("w").tolist() == [[0, 0]] * 5


@pytest.mark.parametrize("kind", ["local", "device", "dist_sync", "dist_async"])
def test_pushes_that_are_row_sparse_in_value_or_key_are_refused_where_a_rule_is_for_the_key(
    kind: str,
) -> None:
    dense = np.ones((5, 2), np.float32)
    rows = kvstore.RowSparseArray([1], np.ones((1, 2), np.float32), (5, 2))
    keys = ["rows", "dense", "other rows", "other dense"]

    def script(kv: KVStore) -> list[Any]:
        kv.set_optimizer(optimizer.create("test"))
        kv.set_gradient_compression({"type": "fp16", "exclude": "other*"})
        kv.init(keys[::2], [kvstore.RowSparseArray.zeros((5, 2))] * 2)
        kv.broadcast(keys[1::2], [np.zeros((5, 2), np.float32)] * 2, [np.empty_like(dense)] * 2)
        for key, value in (("rows", dense), ("rows", rows), ("dense", rows)):
            for call in (kv.push, kv.push_async):
                with pytest.raises(NotSupportedError, match=f"exclude key '{key}'"):
                    call(key, value)
        with pytest.raises(NotSupportedError, match="exclude key 'rows'"):
            kv.push(keys[::-1], [dense] * 4)
        kv.push(["dense", "other dense", "other rows"], [dense, rows, dense])
        kv.wait()
        kv.barrier()
        outs = [np.empty_like(dense) for _ in keys]
        kv.pull(keys, outs, ignore_sparse=False)
        return [out.tolist() for out in outs]

    with Workers(kind, 2, 2) as workers:
        for found in workers.run(script):
            num = 2 if kind.startswith("dist") else 1
            ones, one_row = (num * dense).tolist(), (num * rows.asnumpy()).tolist()
            assert found == [np.zeros((5, 2)).tolist(), ones, ones, one_row]


# -- what it saves ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_statistics_tell_the_ratio(kind: str) -> None:
    def script(kv: KVStore) -> dict[str, Any]:
        kv.set_gradient_compression({"type": "2bit"})
        kv.init("w", np.zeros(100_000, np.float32))
        kv.push("w", np.ones(100_000, np.float32))
        kv.wait()
        found: dict[str, Any] = kv.stats()["store"]["compression"]["2bit"]
        return found

    with Workers(kind, 1, 1) as workers:
        (found,) = workers.run(script)
    assert found["bytes_before"] == 400_000
    assert found["ratio"] == pytest.approx(16, rel=0.01)


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_what_is_no_compression_is_an_error(kind: str) -> None:
    with Workers(kind, 1, 1) as workers:
        (kv,) = workers.stores
        with pytest.raises(ArgumentTypeError, match="compression must be a dictionary"):
            kv.set_gradient_compression(7)  # type: ignore[arg-type]
        kv.init("w", np.zeros(3))
        kv.push("w", np.ones(3))
        assert kv.pull("w").tolist() == [1, 1, 1]


# -- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["checkpoint", "states"])
@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_what_was_lost_is_saved_with_the_states(kind: str, how: str, tmp_path: Path) -> None:
    """Half of a threshold is owed when the states are saved; the next half makes it whole."""

    def begin_again(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        kv.set_optimizer(optimizer.create("test"))

    def save(kv: KVStore) -> None:
        begin_again(kv)
        kv.init("w", np.zeros(600, np.float32))
        kv.push("w", np.full(600, 0.6, np.float32))
        kv.wait()
        if how == "checkpoint":
            kv.save_checkpoint(tmp_path / "saved")
        else:
            kv.save_optimizer_states(tmp_path / "saved")

    def load(kv: KVStore) -> float:
        begin_again(kv)
        kv.init("w", np.zeros(600, np.float32))
        if how == "checkpoint":
            kv.load_checkpoint(tmp_path / "saved")
        else:
            kv.load_optimizer_states(tmp_path / "saved")
        kv.push("w", np.full(600, 0.6, np.float32))
        return float(kv.pull("w")[0])

    with Workers(kind, 2, 2, **PARTS) as workers:
        workers.run(save)
    with Workers(kind, 2, 2, **PARTS) as workers:
        assert workers.run(load) == ([1.0] if kind == "local" else [2.0, 2.0])


def test_another_compression_owes_nothing_of_what_was_saved(tmp_path: Path) -> None:
    def script(kv: KVStore) -> float:
        kv.set_optimizer(optimizer.create("test"))
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        kv.init("w", np.zeros(6, np.float32))
        kv.push("w", np.full(6, 0.6, np.float32))
        kv.save_checkpoint(tmp_path)
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.1})
        kv.load_checkpoint(tmp_path)
        kv.push("w", np.full(6, 0.6, np.float32))
        return float(kv.pull("w")[0])

    with Workers("local") as workers:
        assert workers.run(script) == [0.0]


# -- what threads and other calls do meanwhile -------------------------------------------------


@pytest.mark.parametrize("size", [6, 100, 5000])
@pytest.mark.parametrize("given", [{"type": "none"}, {"type": "fp16"}], ids=["none", "fp16"])
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_values_that_come_encoded_are_those_of_now(
    kind: str, given: dict[str, Any], size: int
) -> None:
    """Also where pushes are as long as values: nothing takes one for the other."""

    def script(kv: KVStore) -> list[float]:
        kv.set_gradient_compression({**given, "pull": {"type": "fp16"}})
        kv.set_optimizer(optimizer.create("test"))
        kv.init("w", np.zeros(size, np.float32))
        found, out = [], kvstore.nd.zeros((size,))
        plain = np.empty(size, np.float32)
        for _ in range(4):
            kv.pushpull("w", np.ones(size, np.float32), out=plain)
            found.append(float(plain[-1]))
            kv.push("w", np.ones(size, np.float32))
            kv.pull("w", out=out)  # lazy, and joined with the push
            found.append(float(out.asnumpy()[-1]))
        return found

    with Workers(kind, 1, 2, **PARTS) as workers:
        assert workers.run(script) == [[float(number) for number in range(1, 9)]]


def test_a_malformed_push_is_an_error_of_its_sender_alone() -> None:
    def script(kv: KVStore) -> np.ndarray[Any, Any]:
        begin(kv, CHAINS["fp16"])
        value = np.ones(SHAPES["large"], np.float32)
        if kv.rank == 0:
            chain: Any = kv._exchange.coding.compression.rules[0].chain  # type: ignore[attr-defined]
            chain.encode = lambda values, out, **_: out.fill(0)
            kv.push("large", value)
            with pytest.raises(ProtocolError, match="key 'large': an encoded part has"):
                kv.wait()
            del chain.encode
        kv.push("large", value)
        kv.wait()
        found: np.ndarray[Any, Any] = kv.pull("large")
        return found

    with Workers("dist_sync", 2, 2, **PARTS) as workers:
        for found in workers.run(script):
            np.testing.assert_array_equal(found, np.full(SHAPES["large"], 2, np.float32))


def test_a_key_that_is_being_made_is_waited_for() -> None:
    def script(kv: Any) -> float:
        made = kv.init_async("w", np.zeros(6, np.float32))
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        made.result(20)
        kv.push("w", np.ones(6, np.float32))
        return float(kv.pull("w")[0])

    for num_workers in (1, 2):
        with Workers("dist_sync", num_workers, 2, **PARTS) as workers:
            assert workers.run(script) == [float(num_workers)] * num_workers


def test_threads_that_push_while_it_is_set_get_an_error_or_the_right_numbers() -> None:
    """6 floats are 24 bytes as they are and with 2bit: sizes alone would not tell."""
    with Workers("dist_sync", 1, 1) as workers:
        (kv,) = workers.stores
        kv.set_optimizer(optimizer.create("test"))
        kv.init("w", np.zeros(6, np.float32))
        is_over = threading.Event()
        num_pushed, refusals = 0, set[str]()

        def push() -> None:
            nonlocal num_pushed
            while not is_over.is_set():
                try:
                    kv.push("w", np.ones(6, np.float32))
                    num_pushed += 1
                except UsageError as error:
                    refusals.add(str(error))

        thread = threading.Thread(target=push)
        thread.start()
        try:
            for number in range(60):
                given = {"type": "2bit", "threshold": 1.0} if number % 2 else None
                kv.set_gradient_compression(given)
        finally:
            is_over.set()
            thread.join(20)
        kv.wait()
        assert kv.pull("w").tolist() == [float(num_pushed)] * 6
        assert all("running in another thread" in text for text in refusals)


def test_a_push_that_a_dtype_forbids_keeps_nothing_of_its_other_keys() -> None:
    kv = kvstore.create("local")
    kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    kv.set_optimizer(optimizer.create("test"))
    kv.init(["a", "i"], [np.zeros(2, np.float32), np.zeros(2, np.int64)])
    with pytest.raises(ArgumentTypeError):
        kv.push(["a", "i"], [np.full(2, 0.6, np.float32), np.ones(2, np.int64)])
    kv.push("a", np.full(2, 0.6, np.float32))
    assert kv.pull("a").tolist() == [0.0, 0.0]


def test_residuals_of_another_dtype_or_number_of_workers_are_left_alone(tmp_path: Path) -> None:
    def save(kv: KVStore) -> None:
        kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
        kv.set_optimizer(optimizer.create("sgd", learning_rate=1.0))
        kv.init("w", np.zeros(6, np.float32))
        kv.push("w", np.full(6, 0.6, np.float32))
        kv.wait()
        kv.save_optimizer_states(tmp_path / "states")

    def load(dtype: str) -> Any:
        def script(kv: KVStore) -> float:
            kv.set_gradient_compression({"type": "2bit", "threshold": 1.0})
            kv.set_optimizer(optimizer.create("sgd", learning_rate=1.0))
            kv.init("w", np.zeros(6, dtype))
            states = tmp_path / "states"
            if dtype == "f8":
                states = tmp_path / "of float64"
                kv.save_optimizer_states(states)
                kv.barrier()
                name = f"residuals-{kv.rank}"
                shutil.copy(tmp_path / f"states.{name}", tmp_path / f"of float64.{name}")
            kv.load_optimizer_states(states)
            kv.push("w", np.full(6, 0.6, dtype))
            return abs(float(kv.pull("w")[0]))

        return script

    with Workers("dist_sync", 2, 1) as workers:
        workers.run(save)
    with Workers("dist_sync", 1, 1) as workers:
        assert workers.run(load("f4")) == [0.0]
    with Workers("dist_sync", 2, 1) as workers:
        assert workers.run(load("f8")) == [0.0, 0.0]
    with Workers("dist_sync", 2, 1) as workers:
        assert workers.run(load("f4")) == [2.0, 2.0]
    assert len(list(tmp_path.glob("states.residuals-*"))) == 2
    with Workers("dist_sync", 1, 1) as workers:
        workers.run(save)
    assert [path.name for path in tmp_path.glob("states.residuals-*")] == ["states.residuals-0"]
