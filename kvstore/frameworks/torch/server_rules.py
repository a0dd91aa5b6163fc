"""The servers' optimizers under PyTorch's names, with its numbers and formulas.

``rule_for`` takes what a script writes (``"adam", lr=1e-3, betas=(0.9, 0.99)``), and
``ServerRule.make`` turns the numbers of ``param_groups`` into the optimizer of a store. Pure. Read
next: ``server_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore.arrays.keys import Key
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.errors.hints import did_you_mean
from kvstore.optimizer import Optimizer, create
from kvstore.optimizer.parameters import parameter_names
from pslite.errors import UsageError

Numbers = Mapping[str, Any]

_BY_GROUP = ("lr", "weight_decay")
"""The numbers that may differ between groups; all others belong to the whole optimizer."""

_MOMENTS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


def _moments(numbers: Numbers) -> dict[str, Any]:
    beta1, beta2 = numbers["betas"]
    return {"beta1": beta1, "beta2": beta2, "epsilon": numbers["eps"]}


def _sgd(numbers: Numbers) -> Optimizer:
    names = ("momentum", "dampening", "nesterov")
    return create("torchsgd", **{name: numbers[name] for name in names})


#: PyTorch's names in small letters -> its numbers with their defaults, and a function that makes
#: our optimizer.
_RULES: dict[str, tuple[dict[str, Any], Callable[[Numbers], Optimizer]]] = {
    "sgd": (
        {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False},
        _sgd,
    ),
    "adam": (
        {"lr": 1e-3, **_MOMENTS},
        lambda numbers: create("adam", epsilon_corrected=True, **_moments(numbers)),
    ),
    "adamw": (
        {"lr": 1e-3, **_MOMENTS, "weight_decay": 1e-2},
        lambda numbers: create(
            "adamw", epsilon_corrected=True, decay_corrected=False, **_moments(numbers)
        ),
    ),
    "adamax": (
        {"lr": 2e-3, **_MOMENTS},
        lambda numbers: create("adamax", **_moments(numbers)),
    ),
    "nadam": (
        {"lr": 2e-3, **_MOMENTS, "momentum_decay": 4e-3},
        lambda numbers: create(
            "nadam", schedule_decay=numbers["momentum_decay"], **_moments(numbers)
        ),
    ),
    "adagrad": (
        {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0},
        lambda numbers: create(
            "adagrad", eps=numbers["eps"], epsilon_inside=False, decoupled_decay=False
        ),
    ),
    "adadelta": (
        {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0.0},
        lambda numbers: create(
            "adadelta", rho=numbers["rho"], epsilon=numbers["eps"], decoupled_decay=False
        ),
    ),
    "rmsprop": (
        {"lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "centered": False},
        lambda numbers: create(
            "rmsprop",
            gamma1=numbers["alpha"],
            gamma2=0.0,
            epsilon=numbers["eps"],
            centered=numbers["centered"],
            epsilon_inside=False,
        ),
    ),
}


class ServerRule(NamedTuple):
    """An optimizer of the servers, with PyTorch's numbers."""

    defaults: dict[str, Any]
    """The default numbers of a group."""
    create: Callable[[Numbers], Optimizer]
    """Makes the optimizer without learning rate and weight decay."""

    def make(self, groups: Sequence[tuple[Numbers, Sequence[Key]]], share: float) -> Optimizer:
        """Return the optimizer of all groups, each with its keys.

        ``share`` is the factor for the sums of gradients.
        """
        first = groups[0][0]
        for name in self.defaults:
            values = [numbers[name] for numbers, _ in groups]
            if name not in _BY_GROUP and any(value != values[0] for value in values):
                raise UsageError(
                    f"{name} must be the same in all groups of parameters of a ServerOptimizer, "
                    f"got {values}; only lr and weight_decay may differ"
                )
        made = self.create(first)
        changes = _for_keys("learning_rate", "lr_mult", "lr", groups)
        if "weight_decay" in self.defaults:
            changes |= _for_keys("wd", "wd_mult", "weight_decay", groups)
        return made.replace(rescale_grad=made.params()["rescale_grad"] * share, **changes)


def rule_for(optimizer: str | Optimizer, numbers: Numbers) -> ServerRule:
    """Return the rule for PyTorch's name and numbers, or for a kvstore ``Optimizer``.

    Names that PyTorch lacks are those of ``kvstore.optimizer``, with its numbers.

    Raises:
        ArgumentTypeError: ``optimizer`` is neither, or its numbers cannot be changed.
        ArgumentValueError: a number is unknown; the text lists the known ones.
    """
    if isinstance(optimizer, str) and optimizer.lower() in _RULES:
        defaults, create_one = _RULES[optimizer.lower()]
        unknown = [name for name in numbers if name not in defaults]
        if unknown:
            raise ArgumentValueError(
                f"{optimizer} on servers has no number {', '.join(unknown)}; known: "
                f"{', '.join(defaults)}{did_you_mean(unknown[0], defaults)}"
            )
        return ServerRule({**defaults, **numbers}, create_one)
    if isinstance(optimizer, str):
        renamed = {"lr": "learning_rate", "weight_decay": "wd"}
        own = {renamed.get(name, name): value for name, value in numbers.items()}
        optimizer = create(optimizer, **own)
    elif isinstance(optimizer, Optimizer) and set(numbers) <= {"lr"}:
        optimizer = optimizer.replace(**numbers)
    else:
        raise ArgumentTypeError(
            "optimizer must be a name with its numbers, such as 'adam', lr=1e-3, or an optimizer "
            f"of kvstore.optimizer with no number but lr, got {optimizer!r:.80} with "
            f"{', '.join(numbers) or 'none'}"
        )
    chosen = optimizer
    names, values = parameter_names(type(chosen)), chosen.params()
    if "rescale_grad" not in names or "learning_rate" not in names:
        raise ArgumentTypeError(
            f"a ServerOptimizer needs an optimizer with rescale_grad and learning_rate, which "
            f"{chosen.name} lacks"
        )
    defaults = {"lr": values["learning_rate"]}
    if "wd" in names:
        defaults["weight_decay"] = values["wd"]
    return ServerRule(defaults, lambda _: chosen)


def _for_keys(
    number: str,
    factors: str,
    name: str,
    groups: Sequence[tuple[Numbers, Sequence[Key]]],
) -> dict[str, Any]:
    """Return one number for all keys, or 1 and a factor for each key if groups differ."""
    values = [float(numbers[name]) for numbers, _ in groups]
    if len(set(values)) == 1:
        return {number: values[0], factors: ()}
    by_key = {key: value for (_, keys), value in zip(groups, values, strict=True) for key in keys}
    return {number: 1.0, factors: by_key}
