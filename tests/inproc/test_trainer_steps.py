"""``Trainer.steps``: a training that is started again comes to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from workers import Workers

import kvstore as mx
from kvstore import KVStore
from kvstore.mxnet.gluon import Parameter, Trainer
from pslite.errors import UsageError

STOP = 6


def train(kv: KVStore, directory: Path, until: int, **options: Any) -> Any:
    """Train up to a step, from where the last call has ended."""
    made = np.random.default_rng(kv.rank)
    params = {
        name: Parameter(made.normal(size=shape).astype("f4"), name=name)
        for name, shape in {"weight": (30, 5), "bias": (5,)}.items()
    }
    numbers = {"learning_rate": 0.1, "wd": 0.01}
    trainer = Trainer(params, "adam", numbers, kv, **options)
    state = {"draws": np.random.default_rng(kv.rank)}
    steps = trainer.steps(STOP, state, directory, every=2)
    for step in steps:
        if step == until:
            break
        if step == 3:
            trainer.set_learning_rate(0.05)
        for parameter in params.values():
            noise = state["draws"].normal(size=parameter.data.shape)
            parameter.grad = (parameter.data + noise).astype("f4")
        trainer.step(4)
    weights = [each.data.tobytes() for each in params.values()]
    return steps.first, trainer.learning_rate, trainer._num_updates, weights


@pytest.mark.parametrize("until", [1, 3, 5])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dist_sync", {}),
        ("dist_sync", {"update_on_kvstore": False}),
        ("local", {"update_on_kvstore": True}),
        ("local", {"update_on_kvstore": False}),
    ],
)
def test_a_training_that_is_started_again_comes_to_the_same_bits(
    tmp_path: Path, kind: str, options: dict[str, Any], until: int
) -> None:
    num_workers = 1 if kind == "local" else 2

    def run(name: str, until: int) -> list[Any]:
        with Workers(kind, num_workers, 2) as workers:
            return workers.run(lambda kv: train(kv, tmp_path / name, until, **options))

    whole = run("whole", STOP)
    run("ended", until)
    assert run("ended", STOP) == [(until // 2 * 2, *found[1:]) for found in whole]
    assert whole[0][1:3] == (0.05, STOP)


def test_a_trainer_without_a_store_says_what_it_needs(tmp_path: Path) -> None:
    trainer = Trainer([Parameter(np.zeros(3, "f4"))], "sgd", kvstore=None)
    with pytest.raises(UsageError, match="steps needs a store of this package"):
        trainer.steps(3, None, tmp_path, 1)


def test_tensors_and_a_module_go_on(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def run(name: str, until: int) -> Any:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        kv = mx.kv.create("local")
        trainer = Trainer(dict(model.named_parameters()), "sgd", {"momentum": 0.9}, kv)
        buffers = {key: value for key, value in model.named_buffers() if value.ndim}
        state = {**buffers, "draws": torch.Generator().manual_seed(3)}
        for step in trainer.steps(STOP, state, tmp_path / name, every=2):
            if step == until:
                break
            model.zero_grad()
            model(torch.randn(16, 4, generator=state["draws"])).square().sum().backward()
            trainer.step(16)
        return [value.tolist() for value in (*model.parameters(), *buffers.values())]

    whole = run("whole", STOP)
    run("ended", 5)
    assert run("ended", STOP) == whole
