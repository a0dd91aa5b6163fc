"""``mx.gluon`` with PyTorch: what is refused with advice, bfloat16; and clipping by a norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    UnknownOptimizerError,
    UnknownTypeError,
)
from kvstore.mxnet.gluon import Parameter, Trainer
from kvstore.mxnet.gluon.utils import clip_global_norm


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def linear(torch: Any) -> Any:
    return torch.nn.Linear(2, 1)


MISUSES: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "a state_dict": (
        lambda torch, net: Trainer(net.state_dict(), "sgd"),
        ArgumentValueError,
        r"none of the 2 tensors requires a gradient.*pass model.named_parameters\(\)",
    ),
    "a misspelt type of store": (
        lambda torch, net: Trainer(net.parameters(), "sgd", kvstore="dist_snyc"),
        UnknownTypeError,
        "did you mean 'dist_sync'",
    ),
    "a misspelt optimizer": (
        lambda torch, net: Trainer(net.parameters(), "sdg"),
        UnknownOptimizerError,
        "did you mean 'sgd'",
    ),
    "an optimizer of PyTorch": (
        lambda torch, net: Trainer(net.parameters(), torch.optim.SGD(net.parameters(), lr=0.1)),
        ArgumentTypeError,
        r"got SGD of PyTorch.*Trainer\(params, 'sgd', \{'learning_rate': 0.1\}\)",
    ),
    "a class of optimizers": (
        lambda torch, net: Trainer(net.parameters(), mx.optimizer.SGD),
        ArgumentTypeError,
        "got the class SGD instead of an instance",
    ),
    "an optimizer of PyTorch for a store": (
        lambda torch, net: mx.kv.create("local").set_optimizer(torch.optim.SGD(net.parameters())),
        ArgumentTypeError,
        "got SGD of PyTorch.*optimizer.create",
    ),
    "a module as a value": (
        lambda torch, net: mx.kv.create("local").init("net", net),
        ArgumentTypeError,
        r"got the module torch.nn.*Linear; pass its parameters.*named_parameters\(\)",
    ),
    "a module": (
        lambda torch, net: Trainer(net, "sgd"),
        ArgumentTypeError,
        r"such as model.named_parameters\(\), got Linear",
    ),
}


@pytest.mark.parametrize("case", MISUSES)
def test_what_cannot_be_is_refused_at_once_with_what_to_do(case: str, torch: Any) -> None:
    misuse, error, text = MISUSES[case]
    with pytest.raises(error, match=text):
        misuse(torch, linear(torch))


def test_the_advice_for_a_module_works(torch: Any) -> None:
    kv = mx.kv.create("local")
    net = linear(torch)
    kv.init(*zip(*net.named_parameters(), strict=True))
    assert kv.keys() == ["weight", "bias"]
    np.testing.assert_array_equal(kv.pull("weight"), net.weight.detach().numpy())


@pytest.mark.parametrize("options", [{}, {"kvstore": "local", "update_on_kvstore": False}])
def test_a_sparse_gradient_without_a_store_that_updates_is_refused_before_anything_changes(
    options: Any, torch: Any
) -> None:
    dense = torch.nn.Parameter(torch.zeros(2))
    table = torch.nn.Embedding(5, 2, sparse=True)
    trainer = Trainer([dense, table.weight], "sgd", reduction="sum", **options)
    dense.grad = torch.ones(2)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ArgumentTypeError, match=r"parameter 1 is sparse.*update_on_kvstore=True"):
        trainer.step(1)
    assert dense.tolist() == [0, 0]


# -- bfloat16 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"kvstore": "local", "update_on_kvstore": True}], ids=str)
def test_bfloat16_of_pytorch_trains_with_and_without_a_store(options: Any, torch: Any) -> None:
    pytest.importorskip("ml_dtypes")
    net = linear(torch).to(torch.bfloat16)
    trainer = Trainer(
        net.named_parameters(), "sgd", {"learning_rate": 0.05}, reduction="mean", **options
    )
    x = torch.tensor([[1.0, 0.5], [-1.0, 1.0], [0.0, -1.0]], dtype=torch.bfloat16)
    y = x @ torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16)
    for _ in range(200):
        net.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        trainer.step(3)
    assert net.weight.dtype == torch.bfloat16
    # A float32 master keeps what bfloat16 would round away: the weights come within its steps.
    assert abs(net.weight.detach().float() - torch.tensor([[1.0, 2.0]])).max() < 0.05


def test_bfloat16_of_pytorch_is_pushed_and_pulled(torch: Any) -> None:
    pytest.importorskip("ml_dtypes")
    kv = mx.kv.create("local")
    kv.init("w", torch.zeros(3, dtype=torch.bfloat16))
    kv.push("w", [torch.full((3,), 1.5, dtype=torch.bfloat16)] * 2)
    out = torch.zeros(3, dtype=torch.bfloat16)
    kv.pull("w", out=out)
    assert out.tolist() == [3, 3, 3]


# -- clipping ---------------------------------------------------------------------------------


def kinds() -> Iterator[Any]:
    yield np.array
    yield mx.nd.array
    yield lambda value: pytest.importorskip("torch").tensor(value)


RECORDED = {
    0.5: [0.06741999, 0.13483998, 0.20225997, 0.26967999, 0.33709997],
    3.0: [0.40451992, 0.80903983, 1.21355975, 1.61807966, 2.02259970],
    100.0: [1.0, 2.0, 3.0, 4.0, 5.0],
}
"""Of MXNet 1.9.1, for the numbers 1 to 5 in two arrays, whose norm it gives as 7.4161983."""


@pytest.mark.parametrize("max_norm", RECORDED)
@pytest.mark.parametrize("kind", range(3))
def test_arrays_are_scaled_to_a_norm_in_place_as_by_mxnet(kind: int, max_norm: float) -> None:
    make = list(kinds())[kind]
    values = [[1.0, 2.0, 3.0], [[4.0], [5.0]]]
    arrays = [make(np.array(each, np.float32)) for each in values]
    norm = clip_global_norm(arrays, max_norm)
    assert norm == pytest.approx(7.4161983)
    found = np.concatenate([np.asarray(each).reshape(-1) for each in arrays])
    np.testing.assert_allclose(found, RECORDED[max_norm], rtol=1e-6)


def test_squares_of_float16_stay_finite_and_nan_is_said_once() -> None:
    large = np.full(4, 6e4, np.float16)
    assert clip_global_norm([large], 2.0) == pytest.approx(2 * 6e4, rel=1e-3)
    assert large.tolist() == [1, 1, 1, 1]
    with pytest.warns(UserWarning, match="NaN or infinite"):
        clip_global_norm([np.array([1.0, np.nan])], 1.0)
    assert np.isnan(clip_global_norm([np.array([1.0, np.nan])], 1.0, check_isfinite=False))


def test_what_cannot_be_clipped_is_refused_and_nothing_has_changed() -> None:
    kept = np.ones(2)
    frozen = np.ones(2)
    frozen.setflags(write=False)
    with pytest.raises(ArgumentTypeError, match="cannot scale an array"):
        clip_global_norm([kept, frozen], 0.1)
    with pytest.raises(ArgumentTypeError, match="max_norm must be a number"):
        clip_global_norm([kept], "1")  # type: ignore[arg-type]
    for arrays, max_norm in (([], 1.0), (kept, 1.0), ([kept], -1.0), ([kept], float("nan"))):
        with pytest.raises(ArgumentValueError):
            clip_global_norm(arrays, max_norm)  # type: ignore[arg-type]
    assert kept.tolist() == [1, 1]


def test_sums_are_clipped_between_the_two_halves_of_a_step() -> None:
    parameter = Parameter([np.zeros(2), np.zeros(2)], [np.array([3.0, 0.0]), np.array([0.0, 4.0])])
    trainer = Trainer([parameter], "sgd", {"learning_rate": 1.0}, "local", None, False)
    trainer.allreduce_grads()
    assert clip_global_norm([parameter.grad[0]], 0.5) == 5.0
    assert clip_global_norm([parameter.grad[1]], 0.5) == 5.0
    trainer.update(1)
    for copy in parameter.list_data():
        np.testing.assert_allclose(copy, [-0.3, -0.4], rtol=1e-6)
