"""``kv.steps`` with several workers: all go on from one step, with the bits of a whole run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workers import Workers

from kvstore import KVStore, RowSparseArray, optimizer
from kvstore.errors import CheckpointError
from kvstore.mxnet.model import FeedForward, Progress
from kvstore.mxnet.nd.ndarray import NDArray
from pslite.errors import UsageError

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


# -- with PS_REJOIN_TIMEOUT: what another process would need is kept in each step ------------


def two_loops(kv: KVStore) -> Any:
    """Loops one after the other, whose last pull has not arrived when the next one begins."""
    kv.set_optimizer(optimizer.create("sgd", learning_rate=0.1))
    kv.init("w", np.ones(3, np.float32))
    out = NDArray(np.zeros(3, np.float32))
    for _ in range(5):
        for _ in kv.steps(3):
            kv.push("w", np.ones(3, np.float32))
            kv.pull("w", out=out)
    return out.asnumpy().tolist(), is_ruled_out(kv)


def is_ruled_out(kv: Any) -> bool:
    """Whether the worker has said that no other process can take its place."""
    return bool(kv.node.control._never_returns)


def test_steps_that_are_kept_change_nothing_for_those_who_stay() -> None:
    with Workers("dist_sync", 2, 2) as workers:
        expected = workers.run(two_loops)
    with Workers("dist_sync", 2, 2, rejoin_timeout_s=60.0) as workers:
        assert workers.run(two_loops) == expected
    assert [ruled_out for _, ruled_out in expected] == [False, False]


def test_a_worker_says_when_no_other_could_repeat_its_steps() -> None:
    def nested(kv: KVStore) -> None:
        for _ in kv.steps(2):
            for _ in kv.steps(2):
                kv.push("w", np.ones(3, np.float32))

    def twice(kv: KVStore) -> None:
        for _ in kv.steps(3):
            kv.push("w", np.ones(3, np.float32))
            kv.push("w", np.ones(3, np.float32))

    def collective(kv: KVStore) -> None:
        for _ in kv.steps(2):
            kv.all_reduce(np.ones(3))

    def deleted(kv: KVStore) -> None:
        kv.init("other", np.ones(3, np.float32))
        kv.delete("other")
        for _ in kv.steps(2):
            pass

    def large(kv: KVStore) -> None:
        for _ in kv.steps(2, {"mine": np.zeros(40_000)}):
            pass

    def viewed(kv: KVStore) -> None:
        kv.view("w")
        for _ in kv.steps(2):
            pass

    def fine(kv: KVStore) -> None:
        for _ in kv.steps(2, {"mine": np.zeros(10)}):
            kv.push("w", np.ones(3, np.float32))

    def ruled_out(train: Any) -> list[bool]:
        def run(kv: KVStore) -> bool:
            kv.init("w", np.zeros(3, np.float32))
            train(kv)
            kv.wait()
            kv.barrier()
            return is_ruled_out(kv)

        sizes = {"max_message_bytes": 300_000, "chunk_bytes": 100_000}
        with Workers("dist_sync", 2, 1, rejoin_timeout_s=60.0, **sizes) as workers:
            return workers.run(run)

    for train in (nested, twice, collective, deleted, large, viewed):
        assert ruled_out(train) == [True, True], train
    assert ruled_out(fine) == [False, False]


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


def test_what_is_saved_has_the_pushes_of_the_slowest_worker_and_none_of_a_later_step(
    tmp_path: Path,
) -> None:
    def train(kv: KVStore) -> None:
        kv.set_optimizer(optimizer.create("sgd", learning_rate=-1.0))
        kv.init("w", np.zeros(3, np.float32))
        for step in kv.steps(4, None, tmp_path, every=2):
            if step == 3:
                break
            if kv.rank == 1 and step == 1:
                time.sleep(0.3)  # the others are at the end of the step
            kv.push("w", np.full(3, 10.0**step, np.float32))
        kv.wait()

    def load(kv: KVStore) -> Any:
        kv.load_checkpoint(tmp_path / "kvstore-step-00000002")
        return kv.pull("w").tolist()

    with Workers("dist_async", 2, 1) as workers:
        workers.run(train)
    with Workers("dist_async", 1, 1) as workers:
        assert workers.run(load) == [[22.0] * 3]


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        (
            [(1, {}, 1), (1, None, 1)],
            ["steps(1, every=1, with a state)", "steps(1, every=1, with no state)"],
        ),
        (
            [(1, None, 1), (1, {}, 1)],
            ["steps(1, every=1, with no state)", "steps(1, every=1, with a state)"],
        ),
        (
            [(4, {}, 1), (5, {}, 1)],
            ["steps(4, every=1, with a state)", "steps(5, every=1, with a state)"],
        ),
        (
            [(4, {}, 1), (4, {}, 2)],
            ["steps(4, every=1, with a state)", "steps(4, every=2, with a state)"],
        ),
    ],
)
def test_workers_that_differ_are_told_so_before_the_first_step(
    tmp_path: Path, arguments: list[Any], calls: list[str]
) -> None:
    said = [f"worker {rank} called {call}" for rank, call in enumerate(calls)]
    # The error begins with the worker that came last.
    texts = {f"{last}, but {first}; make" for last, first in (said, said[::-1])}

    def begin(kv: KVStore) -> None:
        stop, state, every = arguments[kv.rank]
        with pytest.raises(UsageError) as caught:
            kv.steps(stop, state, tmp_path, every)
        assert str(caught.value).partition(" the same calls")[0] in texts

    with Workers("dist_sync", 2, 1) as workers:
        workers.run(begin)


def test_a_state_of_one_worker_that_cannot_be_saved_is_told_before_the_first_step(
    tmp_path: Path,
) -> None:
    def begin(kv: KVStore) -> None:
        state = {"a": object()} if kv.rank == 1 else {}
        with pytest.raises(CheckpointError, match=r"^worker 1: state\['a'\] cannot be saved: an"):
            kv.steps(4, state, tmp_path, 1)

    with Workers("dist_sync", 2, 1) as workers:
        workers.run(begin)


@pytest.mark.parametrize(
    ("name", "text"),
    [("latest.json", "latest.json is damaged"), ("worker-1.safetensors", "^worker 1: .* missing")],
)
def test_what_one_worker_cannot_read_is_an_error_of_all_and_nothing_is_loaded(
    tmp_path: Path, name: str, text: str
) -> None:
    def save(kv: KVStore) -> None:
        kv.init("w", np.ones(3, np.float32))
        list(kv.steps(1, {}, tmp_path, 1))

    def load(kv: KVStore) -> Any:
        kv.init("w", np.zeros(3, np.float32))
        with pytest.raises(CheckpointError, match=text):
            kv.steps(1, {}, tmp_path, 1)
        return kv.pull("w").tolist()

    with Workers("dist_sync", 2, 1) as workers:
        workers.run(save)
    (path,) = tmp_path.rglob(name)
    if name == "latest.json":
        path.write_text("{")
    else:
        path.unlink()
    with Workers("dist_sync", 2, 1) as workers:
        assert workers.run(load) == [[0.0] * 3] * 2


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
