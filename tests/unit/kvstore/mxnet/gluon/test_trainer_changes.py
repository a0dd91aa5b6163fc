"""What changes between the steps of a ``Trainer``: factors of parameters, and weights that are set;
and gradients that are means."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore.errors import ArgumentTypeError, ArgumentValueError, ValueMismatchError
from kvstore.mxnet.gluon import Parameter, Trainer
from kvstore.mxnet.gluon.trainer_store import ELEMENTS, HeldWeights

Array = Any
PLACES = [None, "local", "device"]
"""Updates here without a store, and on two stores (with two devices)."""


def two(value: Any = 1.0, dtype: Any = np.float64, size: int = 3) -> list[Array]:
    return [np.full(size, value, dtype), np.full(size, value, dtype)]


def copies(place: str | None, **options: Any) -> list[Array]:
    """One array, or two for the devices of a store."""
    return two(**options)[: 1 if place is None else 2]


def trained(place: str | None, **options: Any) -> tuple[Parameter, Parameter]:
    """Two parameters whose gradients are one over all devices."""
    arrays = [copies(place, **options) for _ in range(2)]
    return tuple(  # type: ignore[return-value]
        Parameter(each, [np.full_like(copy, 1 / len(each)) for copy in each]) for each in arrays
    )


def first(parameter: Parameter) -> list[float]:
    return [float(each[0]) for each in parameter.list_data()]


# -- factors of parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_a_factor_that_is_set_counts_from_the_next_step_on(place: str | None) -> None:
    frozen, free = trained(place)
    sgd = {"learning_rate": 0.5, "wd": 0.0}
    trainer = Trainer({"a": frozen, "b": free}, "sgd", sgd, place)
    trainer.step(1)
    frozen.lr_mult = 0.0
    trainer.step(1)
    assert set(first(frozen) + first(free)) == {0.5, 0.0}
    frozen.lr_mult = 0.5
    trainer.step(1)
    frozen.lr_mult = 1.0
    trainer.step(1)
    assert set(first(frozen)) == {-0.25}
    assert set(first(free)) == {-1.0}


def test_a_factor_of_the_decay_counts_too_and_keeps_states() -> None:
    (parameter, _), (other, _) = trained("local"), trained("local")
    numbers = {"learning_rate": 0.5, "momentum": 0.5, "wd": 1.0}
    trainer = Trainer([parameter], "sgd", numbers, "local")
    expected = Trainer([other], "sgd", numbers, "local")
    for each in (trainer, expected):
        each.step(1)
    parameter.wd_mult = 0.0
    # Without decay: the weight is 1 - 0.5 (1 + 1) = 0, so the decay would add nothing yet.
    trainer.step(1)
    expected.step(1)
    assert first(parameter) == first(other) == [-1.0, -1.0]
    trainer.step(1)
    expected.step(1)
    assert first(parameter)[0] == -1 + (0.5 * -1.0 - 0.5)
    assert first(other)[0] == -1 + (0.5 * -1.0 - 0.5 * (1 - 1))


def test_a_factor_of_one_gives_way_to_the_optimizers_own() -> None:
    parameter = Parameter(np.ones(1), np.ones(1), "w")
    sgd = mx.optimizer.SGD(learning_rate=1.0, lr_mult={"w": 0.5, "other": 3.0})
    trainer = Trainer([parameter], sgd, kvstore=None)
    trainer.step(1)
    parameter.lr_mult = 0.25
    trainer.step(1)
    parameter.lr_mult = 1.0
    trainer.step(1)
    assert parameter.data[0] == 1 - 0.5 - 0.25 - 0.5
    assert dict(trainer.optimizer.lr_mult) == {"w": 0.5, "other": 3.0}


# -- weights that are set ------------------------------------------------------------------------


def adam(place: str | None, steps: list[Any], dtype: Any = np.float64, size: int = 3) -> bytes:
    """Train by adam; each step first does something to the first parameter."""
    params = trained(place, dtype=dtype, size=size)
    trainer = Trainer(dict(zip("ab", params, strict=True)), "adam", {"wd": 0.1}, place)
    for change in steps:
        change(params[0])
        trainer.step(2)
    return b"".join(each.list_data()[0].tobytes() for each in params)


def nothing(parameter: Parameter) -> None:
    pass


def set_all(parameter: Parameter) -> None:
    parameter.set_data(np.array([3.0, -1.0, 2.0]))


def write_all(parameter: Parameter) -> None:
    for copy in parameter.list_data():
        copy[...] = [3.0, -1.0, 2.0]


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("place", ["local", "device"])
@pytest.mark.parametrize("change", [set_all, write_all])
def test_weights_that_are_set_are_taken_over_with_the_bits_of_updates_without_a_store(
    change: Any, place: str, dtype: Any
) -> None:
    steps = [nothing, nothing, change, nothing, change]
    found = adam(place, steps, dtype)
    assert found == adam(None, steps, dtype)
    assert found != adam(place, [nothing] * 5, dtype)


def test_a_tensor_that_is_loaded_is_taken_over_and_so_is_one_whose_memory_is_another() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        net.weight.zero_()
    trainer = Trainer(
        net.named_parameters(), "sgd", {"learning_rate": 1.0}, "local", None, True, reduction="sum"
    )

    def step() -> list[float]:
        net.weight.grad = torch.ones(1, 2)
        trainer.step(1)
        return net.weight.detach().reshape(-1).tolist()  # type: ignore[no-any-return]

    assert step() == [-1, -1]
    net.load_state_dict({"weight": torch.tensor([[5.0, 7.0]])})
    assert step() == [4, 6]
    assert step() == [3, 5]
    net.weight.data = torch.tensor([[10.0, 20.0]])
    assert step() == [9, 19]
    net.weight.data.clamp_(max=2.0)
    assert step() == [1, 1]


def test_a_change_of_one_element_is_seen_in_small_arrays_and_a_restored_one_is_none() -> None:
    params = {
        "a": Parameter(np.zeros(ELEMENTS), np.zeros(ELEMENTS)),
        "b": Parameter(np.zeros((50, 40), np.float32)),
        "c": Parameter(np.full(3, np.nan, np.float16)),
        "d": Parameter(np.zeros((4, 4))[:, ::2]),
        "e": Parameter(mx.nd.zeros((3,))),
    }
    held = HeldWeights(params)
    assert held.changed() == []
    held.note()
    assert held.changed() == []
    params["a"].data[7] = 1.0
    params["b"].data[...] += 1
    assert held.changed() == ["a", "b"]
    params["a"].data[7] = 0.0
    assert held.changed() == ["b"]
    params["d"].set_data(np.ones((4, 2)))
    params["e"].set_data(np.ones(3))
    params["c"].data[1] = 0
    assert held.changed() == ["b", "c", "d", "e"]
    held.note()
    assert held.changed() == []
    assert params["e"].data.asnumpy().tolist() == [1, 1, 1]


def test_a_frozen_weight_may_change_in_every_step() -> None:
    mean = Parameter(np.zeros(2), name="mean", grad_req="null")
    weight = Parameter(np.zeros(2), np.ones(2), name="weight")
    trainer = Trainer([mean, weight], "sgd", {"learning_rate": 1.0}, "local", None, True)
    for step in range(3):
        mean.data[...] = step
        trainer.step(1)
        assert mean.data.tolist() == [step, step]
    mean.grad_req, mean.grad = "write", np.ones(2)
    mean.data[...] = 7
    trainer.step(1)
    assert mean.data.tolist() == [6, 6]


def test_other_values_must_fit_and_reach_every_device() -> None:
    parameter = Parameter(two(), name="w")
    parameter.set_data(np.array([1, 2, 3], np.int32))
    assert [each.tolist() for each in parameter.list_data()] == [[1, 2, 3]] * 2
    with pytest.raises(ValueMismatchError, match=r"'w' must have shape \(3,\), got \(2,\)"):
        parameter.set_data(np.zeros(2))
    with pytest.raises(ArgumentTypeError):
        parameter.set_data([1.0, 2.0, 3.0])


# -- gradients that are means ---------------------------------------------------------------------


def fitted(batch: int, reduction: str | None) -> float:
    """The squared error of a linear regression by PyTorch with a loss that is a mean."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 3, generator=generator)
    y = x @ torch.tensor([[2.0], [-5.0], [1.0]])
    net = torch.nn.Linear(3, 1)
    with torch.no_grad():
        for each in net.parameters():
            each.zero_()
    trainer = Trainer(net.named_parameters(), "sgd", {"learning_rate": 0.3}, reduction=reduction)
    for _ in range(60):
        net.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        trainer.step(batch)
    return loss.item()  # type: ignore[no-any-return]


def test_means_of_pytorch_train_when_it_is_said_that_they_are_means(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        assert fitted(64, "mean") < 1e-6
        assert caplog.records == []
        assert fitted(64, None) > 1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "step(64) divides the gradients by 64" in lines[0]
    assert 'reduction="mean"' in lines[0]


def test_nothing_is_noted_where_it_is_said_or_the_batch_size_is_one_or_there_is_no_tensor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert fitted(64, "sum") > 1
        assert fitted(1, None) < 1e-6
        Trainer([Parameter(np.ones(2), np.ones(2))], "sgd").step(8)
    assert caplog.records == []


@pytest.mark.parametrize("on_store", [True, False])
def test_means_of_several_devices_are_averaged(on_store: bool) -> None:
    parameter = Parameter(two(0.0), [np.full(3, 2.0), np.full(3, 6.0)])
    trainer = Trainer(
        [parameter], "sgd", {"learning_rate": 1.0}, "local", None, on_store, reduction="mean"
    )
    trainer.step(16)
    assert first(parameter) == [-4.0, -4.0]
    parameter.grad = [np.full(3, 3.0), np.full(3, 5.0)]
    trainer.step(5)
    assert first(parameter) == [-8.0, -8.0]


def test_another_reduction_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match="one of sum, mean, got 'average'"):
        Trainer([Parameter(np.ones(2))], "sgd", reduction="average")


# -- how it is shown -------------------------------------------------------------------------------


def test_a_trainer_shows_what_it_is_and_creates_no_store_for_it() -> None:
    parameter = Parameter(np.ones(2), np.ones(2))
    trainer = Trainer([parameter], "sgd", {"learning_rate": 0.5}, "local", None, True)
    text = repr(trainer)
    assert text.startswith("<Trainer of 1 parameters by SGD(learning_rate=0.5,")
    assert text.endswith("kvstore='local', 0 steps>")
    trainer.step(1)
    assert repr(trainer).endswith("kvstore='local', updates on the store, 1 steps>")
    assert repr(Trainer([parameter], "sgd", kvstore=None)).endswith("kvstore=None, 0 steps>")
