"""The optimizers against PyTorch's, where it has the same algorithm: 50 updates, within 1e-6."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore import optimizer as opt
from kvstore.arrays.cpu.sums import Workspace, apply_round
from kvstore.optimizer import Optimizer
from kvstore.optimizer import schedule as schedules

torch = pytest.importorskip("torch")

STEPS = 50

SAME_EPSILON: dict[str, Any] = {"epsilon": 1e-6, "epsilon_corrected": True}
TORCH_ADAM = {"eps": 1e-6}

#: Ours, PyTorch's class, and its arguments for the same algorithm.
PAIRS: list[tuple[Optimizer, str, dict[str, Any]]] = [
    (opt.SGD(learning_rate=0.1, wd=0.1), "SGD", {"lr": 0.1, "weight_decay": 0.1}),
    (
        opt.SGD(learning_rate=0.05, momentum=0.9, wd=0.01),
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    ),
    (
        opt.NAG(learning_rate=0.05, momentum=0.9, wd=0.01),
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
    ),
    (
        opt.TorchSGD(learning_rate=0.05, momentum=0.9, dampening=0.3, wd=0.01),
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    ),
    (
        opt.TorchSGD(learning_rate=0.05, momentum=0.9, nesterov=True),
        "SGD",
        {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    ),
    (
        opt.Adam(learning_rate=0.05, wd=0.1, **SAME_EPSILON),
        "Adam",
        {"lr": 0.05, "weight_decay": 0.1, **TORCH_ADAM},
    ),
    (
        opt.AdamW(learning_rate=0.05, wd=0.1, decay_corrected=False, **SAME_EPSILON),
        "AdamW",
        {"lr": 0.05, "weight_decay": 0.1, **TORCH_ADAM},
    ),
    (
        opt.Adamax(learning_rate=0.05, wd=0.1),
        "Adamax",
        {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-8},
    ),
    (
        opt.Nadam(learning_rate=0.05, wd=0.1, schedule_decay=0.01),
        "NAdam",
        {"lr": 0.05, "weight_decay": 0.1, "momentum_decay": 0.01, "eps": 1e-8},
    ),
    (
        opt.AdaGrad(learning_rate=0.2, wd=0.1, epsilon_inside=False, decoupled_decay=False),
        "Adagrad",
        {"lr": 0.2, "weight_decay": 0.1, "eps": 1e-7},
    ),
    (
        opt.RMSProp(learning_rate=0.02, wd=0.1, epsilon_inside=False),
        "RMSprop",
        {"lr": 0.02, "alpha": 0.9, "weight_decay": 0.1, "eps": 1e-8},
    ),
    (
        opt.RMSProp(
            learning_rate=0.02, gamma2=0.7, wd=0.1, centered=True, epsilon_inside=False, epsilon=0.1
        ),
        "RMSprop",
        {
            "lr": 0.02,
            "alpha": 0.9,
            "momentum": 0.7,
            "weight_decay": 0.1,
            "centered": True,
            "eps": 0.1,
        },
    ),
    (
        opt.AdaDelta(learning_rate=0.5, wd=0.1, decoupled_decay=False),
        "Adadelta",
        {"lr": 0.5, "rho": 0.9, "weight_decay": 0.1, "eps": 1e-5},
    ),
]


def ours(chosen: Optimizer, weight: Any, gradients: Any) -> Any:
    weight, workspace = weight.copy(), Workspace()
    state = chosen.create_state(weight)
    for count, gradient in enumerate(gradients, start=1):
        apply_round(weight, [gradient], chosen, state, count, workspace)
    return weight


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize(("chosen", "name", "arguments"), PAIRS, ids=lambda value: str(value)[:20])
def test_fifty_updates_agree_with_pytorch(
    chosen: Optimizer, name: str, arguments: dict[str, Any], dtype: Any
) -> None:
    random = np.random.default_rng(3)
    weight = random.normal(size=300).astype(dtype)
    gradients = random.normal(size=(STEPS, 300)).astype(dtype)
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    theirs = getattr(torch.optim, name)([parameter], **arguments)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        theirs.step()
    result = ours(chosen, weight, gradients)
    np.testing.assert_allclose(result, parameter.detach().numpy(), rtol=1e-6, atol=1e-6)
    assert np.abs(result - weight).max() > 0.1


@pytest.mark.parametrize(
    ("schedule", "name", "arguments"),
    [
        (schedules.FactorScheduler(step=7, factor=0.5), "StepLR", {"step_size": 7, "gamma": 0.5}),
        (
            schedules.MultiFactorScheduler(step=[5, 11, 30], factor=0.3),
            "MultiStepLR",
            {"milestones": [5, 11, 30], "gamma": 0.3},
        ),
    ],
    ids=["factor", "multifactor"],
)
def test_schedules_of_steps_agree_with_pytorch(
    schedule: schedules.Schedule, name: str, arguments: dict[str, Any]
) -> None:
    descent = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    theirs = getattr(torch.optim.lr_scheduler, name)(descent, **arguments)
    for count in range(1, STEPS + 1):
        assert schedule.rate(count, 0.4) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12)
        descent.step()
        theirs.step()
