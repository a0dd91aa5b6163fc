"""``kv.steps`` with several workers: all go on from one step, with the bits of a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workers import Workers

from kvstore import KVStore, RowSparseArray, optimizer
from kvstore.errors import CheckpointError
from kvstore.mxnet.model import FeedForward, Progress

STOP = 6


def train(kv: KVStore, directory: Path, until: int = STOP) -> Any:
    """Train up to a step, from where the last call has ended."""
    kv.set_optimizer(optimizer.create("adam", learning_rate=0.1))
    kv.init(["w", "rows"], [np.zeros(300, np.float32), RowSparseArray.zeros((20, 3))])
    state = {"draws": np.random.default_rng(kv.rank), "done": 0}
    steps = kv.steps(STOP, state, directory, every=2)
    for step in steps:
        if step == until:
            break
        draws = state["draws"]
        kv.push("w", draws.normal(size=300).astype(np.float32))
        rows = np.sort(draws.choice(20, 4, replace=False))
        values = draws.normal(size=(4, 3)).astype(np.float32)
        kv.push("rows", RowSparseArray(rows, values, (20, 3)))
        state["done"] += 1
    kv.wait()
    kv.barrier()
    rows = kv.row_sparse_pull("rows", row_ids=np.arange(20))
    return steps.first, state["done"], kv.pull("w").tobytes(), np.asarray(rows.values).tobytes()


@pytest.mark.parametrize("until", [1, 3, 5])
def test_workers_go_on_from_the_last_step_that_all_had_done(tmp_path: Path, until: int) -> None:
    with Workers("dist_sync", 2, 2, chunk_bytes=256) as workers:
        expected = workers.run(lambda kv: train(kv, tmp_path / "whole"))
    with Workers("dist_sync", 2, 2, chunk_bytes=256) as workers:
        workers.run(lambda kv: train(kv, tmp_path / "ended", until))
    with Workers("dist_sync", 2, 3, chunk_bytes=256) as workers:  # another number of servers
        found = workers.run(lambda kv: train(kv, tmp_path / "ended"))
    for rank in range(2):
        assert found[rank] == (until // 2 * 2, *expected[rank][1:])


def test_asynchronous_pushes_of_saved_steps_count_once(tmp_path: Path) -> None:
    def train(kv: KVStore, until: int) -> Any:
        kv.set_optimizer(optimizer.create("sgd", learning_rate=-1.0))
        kv.init("w", np.zeros(3, np.float32))
        for step in kv.steps(STOP, {}, tmp_path, every=2):
            if step == until:
                break
            kv.push("w", np.full(3, 10.0**step, np.float32))
        kv.wait()
        kv.barrier()
        return kv.pull("w").tolist()

    for until in (3, 5, STOP):
        with Workers("dist_async", 3, 1) as workers:
            found = workers.run(lambda kv, until=until: train(kv, until))
        pushed = 3 * sum(10.0**step for step in range(until))
        assert found == [[pushed] * 3] * 3


def test_a_worker_without_a_state_is_named_at_the_first_save(tmp_path: Path) -> None:
    def train(kv: KVStore) -> None:
        kv.init("w", np.zeros(3, np.float32))
        state = None if kv.rank == 1 else {}
        list(kv.steps(1, state, tmp_path, every=1))

    missing = pytest.raises(CheckpointError, match="those of worker 1 are missing")
    with Workers("dist_sync", 2, 1) as workers, missing:
        workers.run(train)
    assert not (tmp_path / "latest.json").exists()


class Softmax:
    """A network of one layer for two classes."""

    def init_params(self, input_shape: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"weight": rng.normal(0, 0.1, (*input_shape, 2)).astype(np.float32)}

    def predict(self, params: Any, x: Any) -> Any:
        scores = np.exp(x @ params["weight"])
        return scores / scores.sum(axis=1, keepdims=True)

    def loss_and_gradients(self, params: Any, x: Any, y: Any) -> Any:
        wrong = self.predict(params, x)
        own = np.arange(len(y)), y
        loss, right = -np.log(wrong[own]).sum(), int((wrong.argmax(axis=1) == y).sum())
        wrong[own] -= 1
        return loss, right, {"weight": (x.T @ wrong).astype(np.float32)}


class Died(Exception):
    """The process dies here."""


def test_a_fit_of_two_workers_goes_on_after_the_last_epoch_that_was_saved(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    x = draws.normal(size=(70, 4)).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(np.int64)

    def fit(kv: KVStore, dies: bool, directory: Path) -> bytes:
        model = FeedForward(
            *(Softmax(), None, 4), numpy_batch_size=8, optimizer="adam", learning_rate=0.1
        )

        def batch(progress: Progress) -> None:
            if dies and progress.epoch == 2 and progress.nbatch == 2:
                raise Died

        try:
            model.fit(x, y, kvstore=kv, checkpoint=directory, batch_end_callback=batch)
        except Died:
            assert dies
        assert model.arg_params is not None
        return model.arg_params["weight"].tobytes()

    found = []
    for dies, directory in ((False, "whole"), (True, "died"), (False, "died")):
        with Workers("dist_sync", 2, 2) as workers:
            found.append(
                workers.run(lambda kv, d=dies, name=directory: fit(kv, d, tmp_path / name))
            )
    assert found[0] == found[2]
    assert found[0] != found[1]
