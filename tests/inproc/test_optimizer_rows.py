"""An optimizer that sees rows, with servers: keys are cut between rows, and all is as in one
process, with dense and row-sparse values, 16-bit weights and checkpoints.

MXNet's GroupAdaGrad is one: it has a sum of squares for each row.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workers import Workers

import kvstore
from kvstore import KVStore, RowSparseArray, optimizer
from kvstore.errors import UsageError, ValueMismatchError

PARTS: dict[str, Any] = {"chunk_bytes": 256, "credit_bytes": 1024}
SHAPE = (40, 20)
"""80 bytes in a row of float32: three rows and a bit are a chunk."""

BY_ROW = optimizer.create("groupadagrad", learning_rate=0.1, eps=0.01)
STEPS = 4
ROWS = ([3, 1, 39], [0], [3, 4, 5, 20], [])


def first(dtype: str = "f4") -> Any:
    return np.random.default_rng(0).normal(size=SHAPE).astype(dtype)


def gradient(step: int, *, by_rows: bool, dtype: str = "f4") -> Any:
    values = np.random.default_rng(step + 1).normal(size=SHAPE).astype(dtype)
    ids = ROWS[step % len(ROWS)]
    return RowSparseArray(ids, values[ids], SHAPE) if by_rows else values


def trained(
    kv: KVStore, stype: str, *, by_rows: bool, dtype: str = "f4", steps: range = range(STEPS)
) -> list[bytes]:
    """The weight after each step; the key is made at step 0."""
    if steps[0] == 0:
        kv.set_optimizer(BY_ROW)
        weight = first(dtype)
        kv.init("w", RowSparseArray.from_dense(weight) if stype == "row_sparse" else weight)
    found = []
    for step in steps:
        kv.push("w", gradient(step, by_rows=by_rows, dtype=dtype))
        out = np.empty(SHAPE, dtype)
        kv.pull("w", out=out)
        found.append(out.tobytes())
    return found


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
@pytest.mark.parametrize(
    ("stype", "by_rows"), [("default", False), ("default", True), ("row_sparse", True)]
)
@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
def test_servers_give_the_bits_of_one_process(
    kind: str, stype: str, by_rows: bool, dtype: str
) -> None:
    expected = trained(kvstore.create("local"), stype, by_rows=by_rows, dtype=dtype)
    with Workers(kind, 1, 3, **PARTS) as workers:
        found = workers.run(lambda kv: trained(kv, stype, by_rows=by_rows, dtype=dtype))
    assert found == [expected]
    assert len(set(expected)) >= STEPS - 1  # the last has no rows


def test_dense_keys_are_cut_between_rows_and_row_sparse_ones_over_all_servers() -> None:
    with Workers("dist_sync", 1, 3, **PARTS) as workers:
        (kv,) = workers.stores
        kv.set_optimizer(BY_ROW)
        kv.init("dense", first())
        kv.init("wide", np.ones((2, 300), np.float32))  # a row is larger than a chunk
        kv.init("flat", np.ones(300, np.float32))
        kv.init("table", RowSparseArray.from_dense(first()))
        assert [kv.info(key).num_parts for key in ("dense", "wide", "flat", "table")] == [
            *(14, 2, 5, 3)
        ]


def test_keys_that_init_has_cut_within_rows_are_named() -> None:
    with Workers("dist_sync", 2, 2, **PARTS) as workers:

        def script(kv: KVStore) -> str:
            kv.init("torn", first())
            kv.init("fitting", np.ones((64, 16), np.float32))  # 64 bytes in a row
            with pytest.raises(UsageError, match="call set_optimizer before init") as caught:
                kv.set_optimizer(BY_ROW)
            kv.barrier()
            kv.delete("torn")
            kv.set_optimizer(BY_ROW)
            kv.push("fitting", np.ones((64, 16), np.float32))
            np.testing.assert_allclose(kv.pull("fitting"), 1.0 - 0.2 / np.sqrt(4.01), rtol=1e-6)
            return str(caught.value)

        for sentence in workers.run(script):
            assert "groupadagrad needs whole rows, but init split 'torn' into parts" in sentence


def test_a_row_that_no_message_can_carry_is_refused() -> None:
    with Workers("dist_sync", 1, 2, max_message_bytes=100_000, **PARTS) as workers:
        (kv,) = workers.stores
        kv.set_optimizer(BY_ROW)
        kv.init("many", np.ones((100, 1000), np.float32))
        with pytest.raises(ValueMismatchError, match=r"'one' has 160000 bytes.*each of its rows"):
            kv.init("one", np.ones((2, 20_000), np.float32))


@pytest.mark.parametrize("stype", ["default", "row_sparse"])
def test_a_checkpoint_has_the_history_of_every_row(stype: str, tmp_path: Path) -> None:
    by_rows = stype == "row_sparse"
    expected = trained(kvstore.create("local"), stype, by_rows=by_rows)

    def begin(kv: KVStore) -> None:
        trained(kv, stype, by_rows=by_rows, steps=range(2))
        kv.save_checkpoint(tmp_path)

    def go_on(kv: KVStore) -> list[bytes]:
        kv.load_checkpoint(tmp_path)
        return trained(kv, stype, by_rows=by_rows, steps=range(2, STEPS))

    with Workers("dist_sync", 1, 3, **PARTS) as workers:
        workers.run(begin)
    with Workers("dist_sync", 1, 2, **PARTS) as workers:
        assert workers.run(go_on) == [expected[2:]]
    assert go_on(kvstore.create("local")) == expected[2:]


@pytest.mark.parametrize("kind", ["local", "dist_sync"])
def test_the_rows_of_a_table_have_histories_of_their_own(kind: str) -> None:
    def script(kv: KVStore) -> Any:
        table = kv.create_table("t", 3, init="zero", optimizer=BY_ROW)
        table.push([7, 2**40], np.array([[1, 2, 2], [0, 0, 0.3]], np.float32))
        table.push([7], np.array([[3, 0, 0]], np.float32))
        return table.pull([7, 2**40])

    steps = np.array([1, 2, 2]) / np.sqrt(3.01) + np.array([3, 0, 0]) / np.sqrt(6.01)
    expected = [-0.1 * steps, [0, 0, -0.1 * 0.3 / np.sqrt(0.04)]]
    if kind == "local":
        found = script(kvstore.create("local"))
    else:
        with Workers(kind, 1, 2) as workers:
            (found,) = workers.run(script)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
