"""The stores horovod and byteps, alone and with a Trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from horovod_ranks import ranks_of, sessions, values

import kvstore as mx
from kvstore.errors import ArgumentValueError, NotSupportedError
from kvstore.frameworks.horovod import session
from kvstore.frameworks.horovod.session import HorovodSession


@pytest.fixture(autouse=True)
def no_init(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of these tests have their sessions."""
    monkeypatch.setattr(session, "init", lambda: None)


@pytest.mark.parametrize("name", ["horovod", "BytePS"])
def test_values_are_added_over_devices_and_workers(name: str) -> None:
    def run(rank: int) -> Any:
        kv = mx.kv.create(name)
        assert (kv.type, kv.rank, kv.num_workers) == (name.lower(), rank, 2)
        assert (kv.local_rank, kv.size, kv.is_capable("optimizer")) == (rank, 2, False)
        own = [np.full(2, rank + 1.0), np.full(2, 10.0)]
        first = [np.empty(2), np.empty(2)]
        kv.broadcast("w", np.full(2, rank + 5.0), out=first)
        total = np.empty(2)
        kv.pushpull("w", own, out=total)
        kv.pushpull(["a", "b"], [own[0], own])
        return [each.tolist() for each in (*first, total, *own)]

    with ranks_of(2) as two:
        for found in values(two(run)):
            assert found[:3] == [[5.0, 5.0], [5.0, 5.0], [23.0, 23.0]]
            assert found[3] == found[4]


def test_what_the_store_cannot_do_is_said() -> None:
    def run(rank: int) -> None:
        kv: Any = mx.kv.create("horovod")
        calls = (
            lambda: kv.push("w", np.ones(1)),
            lambda: kv.pull("w"),
            lambda: kv.set_optimizer(mx.optimizer.create("sgd")),
        )
        for call in calls:
            with pytest.raises(NotSupportedError, match="keeps no values: call broadcast"):
                call()
        with pytest.raises(ArgumentValueError, match="unknown capability"):
            kv.is_capable("magic")

    with sessions([HorovodSession()]) as alone:
        values(alone(run))


def test_a_trainer_keeps_the_workers_alike() -> None:
    def run(rank: int) -> Any:
        data, grad = np.full(2, rank + 1.0), np.zeros(2)
        weight = mx.gluon.Parameter(data, grad, "w")
        trainer = mx.gluon.Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="horovod")
        for step in range(2):
            grad[:] = float(rank + step)
            trainer.step(batch_size=1)
        return data.tolist()

    with ranks_of(2) as two:
        assert values(two(run)) == [[-3.0, -3.0]] * 2  # 1 - (0 + 1) - (1 + 2)
