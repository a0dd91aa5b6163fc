"""Files that earlier versions have written are read, to the bit: see ``saved/make.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore import optimizer
from kvstore.mxnet.model import load_checkpoint
from kvstore.sparse.array import RowSparseArray
from kvstore.stores.base import KVStore

SAVED = Path(__file__).parents[1] / "saved"
VERSIONS = sorted(path.name for path in SAVED.glob("version-*"))

DENSE = np.arange(6, dtype=np.float32).reshape(2, 3)
HALF = np.array([0.5, -2.0, 1024.0], np.float16)
ROWS = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def loaded(path: Path, *, whole: bool) -> KVStore:
    kv = kvstore.create("local")
    kv.set_gradient_compression({"type": "2bit", "threshold": 0.25, "exclude": "rows"})
    if whole:
        kv.load_checkpoint(path)
    else:
        kv.init("dense", DENSE)
        kv.init("half", HALF)
        kv.init("rows", RowSparseArray([1, 7], ROWS, (10, 2)))
        kv.load_optimizer_states(path)
    return kv


@pytest.mark.parametrize("version", VERSIONS)
def test_a_checkpoint_of_before_goes_on_where_it_was(version: str) -> None:
    kv = loaded(SAVED / version / "checkpoint", whole=True)
    assert kv.keys() == ["dense", "half", "rows"]
    assert kv.current_optimizer() == optimizer.create("sgd", learning_rate=0.5, momentum=0.5)
    # Of the dense key 0.2 was owed and nothing pushed; the momentum of the others goes on.
    assert np.array_equal(kv.pull("dense"), DENSE)
    assert kv.pull("half").tolist() == [0.1875, -2.3125, 1023.5]  # by steps of 0.5
    kv.push("dense", np.full((2, 3), 0.1, np.float32))
    assert np.allclose(kv.pull("dense"), DENSE - 0.125)
    rows = kv.row_sparse_pull("rows", row_ids=np.array([1, 7]))
    assert rows.values.tolist() == [[1.0, 2.0], [1.75, 2.75]]


@pytest.mark.parametrize("version", VERSIONS)
def test_states_of_before_go_on_where_they_were(version: str) -> None:
    kv = loaded(SAVED / version / "states", whole=False)
    kv.push("rows", RowSparseArray([7], np.zeros((1, 2), np.float32), (10, 2)))
    kv.push("dense", np.full((2, 3), 0.1, np.float32))
    rows = kv.row_sparse_pull("rows", row_ids=np.array([1, 7]))
    assert rows.values.tolist() == [[1.0, 2.0], [2.625, 3.625]]
    assert np.allclose(kv.pull("dense"), DENSE - 0.125)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_model_of_before_is_read(version: str) -> None:
    _, arg_params, aux_params = load_checkpoint(SAVED / version / "model", 3)
    assert {name: value.dtype for name, value in arg_params.items()} == {
        "w": np.dtype("f4"),
        "h": np.dtype("f2"),
    }
    assert np.array_equal(arg_params["w"], DENSE) and np.array_equal(arg_params["h"], HALF)
    assert np.array_equal(aux_params["mean"], ROWS)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_export_of_a_table_of_before_is_read(version: str) -> None:
    sgd = optimizer.create("sgd", learning_rate=1.0)
    table = kvstore.create("local").create_table("words", 2, init=0.5, optimizer=sgd)
    table.load(SAVED / version / "table")
    assert table.pull([3, 5, 9]).tolist() == [[-0.5, -0.5], [-0.5, -0.5], [0.5, 0.5]]
