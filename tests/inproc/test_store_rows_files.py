"""Checkpoints of row-sparse keys: from any number of servers to any other, and to ``local``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workers import Workers

import kvstore as mx
from kvstore import KVStore, RowSparseArray
from kvstore.errors import CheckpointError
from pslite import Incoming

SHAPE = (40, 3)
KINDS = [("local", 1), ("dist_sync", 1), ("dist_sync", 2), ("dist_async", 5)]
#: Rows travel in several messages, and files have several pieces.
PARTS = {"chunk_bytes": 100, "credit_bytes": 4096}
ADAM = mx.optimizer.create("adam", learning_rate=0.01)


def rows(seed: int, count: int = 12) -> RowSparseArray:
    random = np.random.default_rng(seed)
    ids = random.integers(0, SHAPE[0], count)
    return RowSparseArray(ids, random.normal(size=(count, 3)).astype("f4"), SHAPE)


def begin(kv: KVStore) -> None:
    kv.set_optimizer(ADAM)
    kv.init(
        ["rows", "none", "dense"], [rows(1), RowSparseArray.zeros(SHAPE), np.ones((5, 3), "f4")]
    )


def train(kv: KVStore, steps: range) -> None:
    """One worker pushes, the others push nothing, so that all kinds of stores do the same."""
    for step in steps:
        quiet = kv.rank > 0
        kv.push("rows", RowSparseArray.zeros(SHAPE) if quiet else rows(100 + step, 6))
        kv.push("none", RowSparseArray.zeros(SHAPE) if quiet else rows(200 + step, 2))
        kv.push("dense", np.zeros((5, 3), "f4") if quiet else np.full((5, 3), step, "f4"))
    kv.wait()
    kv.barrier()


def values(kv: KVStore) -> list[Any]:
    found = [kv.pull(key) for key in ("rows", "none")]
    return [[each.indices.tolist(), each.values.tolist()] for each in found] + [
        kv.pull("dense").tolist()
    ]


def expected() -> list[Any]:
    kv = mx.create("local")
    begin(kv)
    train(kv, range(6))
    return values(kv)


@pytest.mark.parametrize(("to", "num_to"), KINDS)
@pytest.mark.parametrize(("kind", "num_servers"), KINDS)
def test_training_goes_on_from_a_checkpoint_of_any_store(
    tmp_path: Path, kind: str, num_servers: int, to: str, num_to: int
) -> None:
    with Workers(kind, 1, num_servers, **PARTS) as workers:
        kv = workers.stores[0]
        begin(kv)
        train(kv, range(3))
        kv.save_checkpoint(tmp_path)
    with Workers(to, 1, num_to, **PARTS) as workers:
        kv = workers.stores[0]
        kv.load_checkpoint(tmp_path)
        assert [kv.info(key).stype for key in ("rows", "dense")] == ["row_sparse", "default"]
        train(kv, range(3, 6))
        assert values(kv) == expected()


def test_a_key_with_more_rows_than_a_message_has_ids_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, respond = [], Incoming.respond

    def noting(incoming: Incoming, body: bytes = b"", frames: Sequence[Any] = ()) -> None:
        sizes.extend(memoryview(frame).nbytes for frame in frames)
        respond(incoming, body, frames)

    values_of = np.arange(3000, dtype="f4").reshape(1000, 3)
    limits = {"chunk_bytes": 256, "max_message_bytes": 1024}
    with Workers("dist_sync", 1, 2, **limits) as workers:
        kv = workers.stores[0]
        kv.init("w", RowSparseArray(np.arange(1000), values_of, (2000, 3)))
        monkeypatch.setattr(Incoming, "respond", noting)
        kv.save_checkpoint(tmp_path)
        assert 0 < max(sizes) <= 1024
    kv = mx.create("local")
    kv.load_checkpoint(tmp_path)
    found = kv.pull("w")
    assert found.indices.tolist() == list(range(1000))
    np.testing.assert_array_equal(found.values, values_of)


@pytest.mark.parametrize(("kind", "num_servers"), KINDS)
def test_states_go_to_the_rows_that_they_are_of(
    tmp_path: Path, kind: str, num_servers: int
) -> None:
    with Workers(kind, 1, num_servers, **PARTS) as workers:
        kv = workers.stores[0]
        begin(kv)
        train(kv, range(3))
        kept = [kv.pull("rows"), kv.pull("none"), kv.pull("dense")]
        kv.save_optimizer_states(tmp_path / "states")
        train(kv, range(10, 12))
        kv.delete(["rows", "none", "dense"])
        kv.init(["rows", "none", "dense"], kept)
        kv.load_optimizer_states(tmp_path / "states")
        train(kv, range(3, 6))
        assert values(kv) == expected()


def test_all_workers_load_what_the_lowest_rank_reads(tmp_path: Path) -> None:
    local = mx.create("local")
    begin(local)
    train(local, range(3))
    local.save_checkpoint(tmp_path)
    with Workers("dist_sync", 2, 2, **PARTS) as workers:

        def script(kv: KVStore) -> Any:
            kv.init("rows", rows(7))
            kv.load_checkpoint(tmp_path)
            train(kv, range(3, 6))
            kv.save_checkpoint(tmp_path / "again")
            kv.barrier()
            return values(kv)

        # Adam moves rows by their means, whatever the other worker's zeros say.
        first, second = workers.run(script)
        assert first == second
        assert first[0][0] == expected()[0][0]
    again = mx.create("local")
    again.load_checkpoint(tmp_path / "again")
    assert values(again) == first


@pytest.mark.parametrize(("kind", "num_servers"), KINDS[:3])
@pytest.mark.parametrize("is_row_sparse", [True, False])
def test_a_checkpoint_of_the_other_kind_is_refused(
    tmp_path: Path, kind: str, num_servers: int, is_row_sparse: bool
) -> None:
    whole = np.ones(SHAPE, "f4")
    both: list[Any] = [whole, RowSparseArray.from_dense(whole)]
    local = mx.create("local")
    local.init("w", both[not is_row_sparse])
    local.save_checkpoint(tmp_path)
    with Workers(kind, 2, num_servers, **PARTS) as workers:

        def script(kv: KVStore) -> None:
            kv.init("w", both[is_row_sparse])
            with pytest.raises(CheckpointError, match=r"row-sparse"):
                kv.load_checkpoint(tmp_path)
            out = np.zeros(SHAPE, "f4")
            kv.pull("w", out=out)
            np.testing.assert_array_equal(out, whole)

        workers.run(script)
