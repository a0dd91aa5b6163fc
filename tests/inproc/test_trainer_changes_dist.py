"""What changes between the steps of a ``Trainer`` on several workers: all follow or are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from workers import Workers

from kvstore import KVStore
from kvstore.errors import OptimizerMismatch
from kvstore.mxnet.gluon import Parameter, Trainer
from pslite.errors import UsageError

RATE_ONE = {"learning_rate": 1.0}


def parameters() -> dict[str, Parameter]:
    return {name: Parameter(np.zeros(3), np.ones(3), name) for name in ("a", "b")}


@pytest.mark.parametrize("on_store", [True, False])
def test_a_factor_that_all_workers_set_reaches_the_servers(on_store: bool) -> None:
    def train(kv: KVStore) -> list[float]:
        params = parameters()
        trainer = Trainer(params, "sgd", RATE_ONE, kv, update_on_kvstore=on_store)
        for factor in (1.0, 0.0, 0.5):
            params["a"].lr_mult = factor
            for each in params.values():
                each.grad = np.ones(3)
            trainer.step(2)
        return [float(each.data[0]) for each in params.values()]

    with Workers("dist_sync") as workers:
        assert workers.run(train) == [[-1.5, -3.0]] * 2


@pytest.mark.parametrize("changing", [0, 1])
def test_a_factor_of_one_worker_alone_is_an_error_on_all(changing: int) -> None:
    def train(kv: KVStore) -> list[float]:
        params = parameters()
        trainer = Trainer(params, "sgd", RATE_ONE, kv)
        trainer.step(2)
        if kv.rank == changing:
            params["a"].wd_mult = 2.0
        with pytest.raises(OptimizerMismatch, match="lr_mult and wd_mult"):
            trainer.step(2)
        params["a"].wd_mult = 2.0
        trainer.step(2)
        assert kv.optimizer_params()["wd_mult"] == (("a", 2.0),)
        return [float(each.data[0]) for each in params.values()]

    with Workers("dist_sync") as workers:
        assert workers.run(train) == [[-2.0, -2.0]] * 2


def test_asynchronous_workers_set_factors_in_the_same_order() -> None:
    def train(kv: KVStore) -> Any:
        params = parameters()
        trainer = Trainer(params, "sgd", RATE_ONE, kv)
        trainer.step(1)
        params["b"].lr_mult = 0.0
        trainer.step(1)
        kv.barrier()
        return kv.pull("a").tolist(), kv.optimizer_params()["lr_mult"]

    with Workers("dist_async") as workers:
        assert workers.run(train) == [([-4.0] * 3, (("b", 0.0),))] * 2


def set_one(params: dict[str, Parameter]) -> None:
    params["b"].set_data(np.full(3, 5.0))


def write_one(params: dict[str, Parameter]) -> None:
    params["b"].data[...] = 5.0


@pytest.mark.parametrize("changing", [0, 1])
@pytest.mark.parametrize("change", [set_one, write_one])
def test_weights_that_are_set_where_servers_keep_them_are_an_error_on_all_that_says_what_to_do(
    change: Any, changing: int
) -> None:
    def train(kv: KVStore) -> list[float]:
        params = parameters()
        change(params)  # before the first step: worker 0's values count
        trainer = Trainer(params, "sgd", RATE_ONE, kv)
        trainer.step(2)
        if kv.rank == changing:
            change(params)
        text = f"worker {changing} 1.*Set or load weights before the first.*update_on_kvstore=False"
        with pytest.raises(UsageError, match=text):
            trainer.step(2)
        kv.pull(["a", "b"], out=[params["a"].data, params["b"].data])
        return [float(each.data[0]) for each in params.values()]

    with Workers("dist_sync") as workers:
        assert workers.run(train) == [[-1.0, 4.0]] * 2


def test_one_worker_alone_and_asynchronous_ones_are_told_too() -> None:
    def train(kv: KVStore) -> None:
        params = parameters()
        trainer = Trainer(params, "sgd", RATE_ONE, kv)
        trainer.step(1)
        trainer.step(1)
        set_one(params)
        with pytest.raises(UsageError, match="the weights of 'b' were changed after the last step"):
            trainer.step(1)

    for kind, size in (("dist_sync", 1), ("dist_async", 2)):
        with Workers(kind, num_workers=size) as workers:
            workers.run(train)


def test_frozen_weights_may_change_until_they_are_trained_again() -> None:
    def train(kv: KVStore) -> None:
        params = parameters()
        params["b"].grad_req = "null"
        trainer = Trainer(params, "sgd", RATE_ONE, kv)
        for step in range(3):
            params["b"].data[...] = step
            trainer.step(2)
            assert params["b"].data[0] == step
        params["b"].grad_req = "write"
        with pytest.raises(UsageError, match="were set or loaded"):
            trainer.step(2)

    with Workers("dist_sync") as workers:
        workers.run(train)


@pytest.mark.parametrize(("kind", "expected"), [("dist_sync", -3.0), ("dist_async", -6.0)])
def test_means_of_several_workers_are_averaged_where_they_are_added(
    kind: str, expected: float
) -> None:
    def train(kv: KVStore) -> float:
        params = parameters()
        for each in params.values():
            each.grad = np.full(3, 2.0 + 2 * kv.rank)
        trainer = Trainer(params, "sgd", RATE_ONE, kv, reduction="mean")
        trainer.step(64)
        kv.barrier()
        return float(kv.pull("a")[0])

    with Workers(kind) as workers:
        assert workers.run(train) == [expected] * 2
