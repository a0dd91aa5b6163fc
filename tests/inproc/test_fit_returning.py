"""A worker is lost anywhere in a fit; another process takes its place, with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster import LIMIT_S, InprocCluster

from kvstore import KVStore
from kvstore.arrays.context import cpu
from kvstore.mxnet.model import FeedForward, Progress
from kvstore.server import install
from kvstore.stores.dist.store import create_dist

NUM_BATCHES, NUM_EPOCHS = 5, 3

draws = np.random.default_rng(0)
X = draws.normal(size=(70, 4)).astype(np.float32)
Y = (X.sum(axis=1) > 0).astype(np.int64)


class Lost(Exception):
    """The process is killed here."""


class Drifting:
    """A network whose gradients depend on what each device has seen before."""

    def init_params(self, input_shape: Any, rng: np.random.Generator) -> dict[str, Any]:
        return {"weight": rng.normal(0, 0.1, (*input_shape, 2)).astype(np.float32)}

    def init_aux_params(self, input_shape: Any) -> dict[str, Any]:
        return {"mean": np.zeros(input_shape, np.float32)}

    def predict(self, params: Any, x: Any, aux: Any) -> Any:
        scores = np.exp((x - aux["mean"]) @ params["weight"])
        return scores / scores.sum(axis=1, keepdims=True)

    def loss_and_gradients(self, params: Any, x: Any, y: Any, aux: Any) -> Any:
        aux["mean"] += 0.3 * (x.mean(axis=0) - aux["mean"])
        wrong = self.predict(params, x, aux)
        own = np.arange(len(y)), y
        loss, right = -np.log(wrong[own]).sum(), int((wrong.argmax(axis=1) == y).sum())
        wrong[own] -= 1
        return loss, right, {"weight": ((x - aux["mean"]).T @ wrong).astype(np.float32)}


class DiesBeforeItPushes(Drifting):
    """Dies when it has computed some gradients, before they are pushed."""

    def __init__(self, num_left: int) -> None:
        self._num_left = num_left

    def loss_and_gradients(self, params: Any, x: Any, y: Any, aux: Any) -> Any:
        self._num_left -= 1
        if not self._num_left:
            raise Lost
        return super().loss_and_gradients(params, x, y, aux)


Seen = dict[tuple[str, int, int], Any]
"""What a callback saw: (its name, epoch, batch) -> the numbers."""


def fit(kv: KVStore, dies: str = "", checkpoint: Path | None = None, **options: Any) -> Any:
    """Train; return the weights, the worker's untrained arrays, and what callbacks saw.

    ``dies`` says where a process raises ``Lost``: the name of a callback, epoch and batch; after
    which of the barriers of the first save; while it computes; or at the end.
    """
    seen: Seen = {}

    def look(name: str) -> Callable[[Progress], None]:
        def callback(at: Progress) -> None:
            assert at.eval_metric is not None
            numbers = at.loss, at.accuracy, at.validation, at.eval_metric.get_global()
            seen[name, at.epoch, at.nbatch] = repr(numbers)
            if dies == f"{name} {at.epoch} {at.nbatch}":
                raise Lost

        return callback

    def misses(label: Any, prediction: Any) -> float:
        return float((prediction.argmax(axis=1) != label).sum())

    # Gradients of two devices are computed for each batch.
    num_gradients = 2 * NUM_BATCHES + 2 * 2
    network = DiesBeforeItPushes(num_gradients) if dies == "gradient" else Drifting()
    model = FeedForward(
        *(network, [cpu(0), cpu(1)], NUM_EPOCHS), numpy_batch_size=8, optimizer="adam"
    )
    if dies.startswith("save"):
        meet, left = kv.barrier, [int(dies.split()[1])]

        def barrier(timeout: float | None = None) -> None:
            meet(timeout)
            left[0] -= 1
            if not left[0]:
                raise Lost

        kv.barrier = barrier  # type: ignore[method-assign]
    arguments = {"X": X, "y": Y, "eval_data": (X[:20], Y[:20]), **options}
    model.fit(
        **arguments,
        eval_metric=["acc", "ce", misses],
        kvstore=kv,
        checkpoint=checkpoint,
        batch_end_callback=look("batch"),
        eval_batch_end_callback=look("evaluation"),
        epoch_end_callback=look("epoch"),
    )
    if dies == "end":
        raise Lost
    assert model.arg_params is not None
    assert model.aux_params is not None
    return model.arg_params["weight"].tobytes(), model.aux_params["mean"].tobytes(), seen


def run(
    script: Callable[[KVStore, bool], Any],
    victim: int | None = None,
    kind: str = "dist_sync",
    num_workers: int = 2,
) -> list[Any]:
    """What ``script(kv, dies)`` returns on each worker; the victim dies in it and is replaced."""
    config = {} if victim is None else {"rejoin_timeout_s": 60.0, "lost_after_s": 0.2}
    with (
        InprocCluster(num_workers, 2, prepare=install, **config) as cluster,
        ThreadPoolExecutor(num_workers) as threads,
    ):

        def work(rank: int) -> Any:
            node = cluster.workers[rank]
            try:
                return script(create_dist(kind, kind, node=node), rank == victim)
            except Lost:
                node = cluster.replace(node)
                found = script(create_dist(kind, kind, node=node), False)
                assert node.attempt == 1
                return found
            except BaseException:
                cluster.close(goodbye=False)  # so that no other worker waits for this one
                raise

        asked = [threads.submit(work, rank) for rank in range(num_workers)]
        return [future.result(LIMIT_S) for future in asked]


def assert_equal(found: list[Any], expected: list[Any], first_seen: int) -> None:
    """The same bits; a process that came later saw the same from ``first_seen`` batches on."""
    for mine, its in zip(found, expected, strict=True):
        assert mine[:2] == its[:2]
        assert mine[2].items() <= its[2].items()
        assert len(mine[2]) + 1 >= len(its[2]) * (1 - first_seen / NUM_BATCHES / NUM_EPOCHS)


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return run(lambda kv, dies: fit(kv))


def test_what_a_replaced_worker_depends_on_matters(expected: list[Any]) -> None:
    """The tests below could not fail if all workers had the same."""
    (weights, mean, seen), (its_weights, its_mean, its_seen) = expected
    assert weights == its_weights
    assert mean != its_mean
    assert seen.keys() == its_seen.keys()
    assert len(set(seen.values()) | set(its_seen.values())) > len(seen)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("dies", "first_seen"),
    [
        ("batch 0 1", 0),
        ("gradient", 6),
        ("batch 1 3", 7),
        ("evaluation 1 2", 9),
        ("epoch 1 5", 9),
        ("epoch 2 5", 14),
        ("end", 15),
    ],
)
def test_a_worker_that_is_lost_in_a_batch_is_replaced_in_it(
    expected: list[Any], dies: str, first_seen: int, victim: int
) -> None:
    found = run(lambda kv, is_victim: fit(kv, dies if is_victim else ""), victim)
    assert_equal(found, expected, first_seen)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("dies", ["save 1", "save 2"])
def test_a_worker_that_is_lost_while_all_save_is_replaced(
    tmp_path: Path, expected: list[Any], dies: str, victim: int
) -> None:
    found = run(lambda kv, is_victim: fit(kv, dies if is_victim else "", tmp_path), victim)
    assert_equal(found, expected, 4)
    (saved,) = tmp_path.glob("kvstore-step-*")
    assert saved.name == f"kvstore-step-{NUM_BATCHES * NUM_EPOCHS:08}"


def test_a_worker_that_is_lost_after_the_whole_job_has_started_again_is_replaced(
    tmp_path: Path, expected: list[Any]
) -> None:
    def half(kv: KVStore, _: bool) -> None:
        with pytest.raises(Lost):
            fit(kv, "batch 1 2", tmp_path)

    run(half)
    found = run(lambda kv, dies: fit(kv, "batch 2 3" if dies else "", tmp_path), 1)
    assert_equal(found, expected, 12)
    assert [min(epoch for _, epoch, _ in seen) for *_, seen in found] == [1, 2]


def test_workers_with_own_data_know_after_a_loss_how_many_batches_the_others_have() -> None:
    def script(kv: KVStore, dies: bool) -> Any:
        mine = slice(0, 25) if kv.rank else slice(25, None)
        return fit(kv, "batch 1 4" if dies else "", X=X[mine], y=Y[mine], shard=False)

    expected = run(script, num_workers=2)
    assert max(nbatch for _, _, nbatch in expected[1][2]) == 6
    assert_equal(run(script, 1), expected, 9)


def test_each_push_of_an_asynchronous_worker_counts_once() -> None:
    """Losses may differ: the weights that it pulls have the push that it repeats."""

    def script(kv: KVStore, dies: bool) -> Any:
        return fit(kv, "batch 1 4" if dies else "")[:2]

    expected = run(script, kind="dist_async", num_workers=1)
    assert run(script, 0, "dist_async", 1) == expected


def test_asynchronous_workers_that_save_agree_on_the_number_of_batches(tmp_path: Path) -> None:
    def script(kv: KVStore, _: bool) -> Any:
        mine = slice(0, 25) if kv.rank else slice(25, None)
        return fit(kv, "", tmp_path, X=X[mine], y=Y[mine], shard=False)

    found = run(script, kind="dist_async")
    batches = [{nbatch for name, _, nbatch in seen if name == "batch"} for *_, seen in found]
    assert batches == [{1, 2, 3, 4, 5, 6}] * 2
