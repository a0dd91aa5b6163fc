"""RMSProp, plain and centered: steps divided by a running root of the squared gradients.

Pure formulas; see ``base.py`` for the contract. Read next: ``adadelta.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvstore.aggregate import Flat
from kvstore.optimizer.arithmetic import (
    add_decay,
    average,
    average_square,
    clip,
    descend,
    rescale,
    root,
)
from kvstore.optimizer.base import Optimizer, register


@register
@dataclasses.dataclass(frozen=True)
class RMSProp(Optimizer):
    """For each element::

        grad = clip(rescale_grad * grad + wd * weight, clip_gradient)
        square = gamma1 * square + (1 - gamma1) * grad * grad

        weight = weight - learning_rate * grad / sqrt(square + epsilon)

    and, instead of the last line, with ``centered``::

        mean = gamma1 * mean + (1 - gamma1) * grad
        delta = gamma2 * delta - learning_rate * grad / sqrt(square - mean * mean + epsilon)
        weight = weight + delta

    Then ``weight`` is clipped to ``clip_weights``, if that is set. The plain form is Tieleman
    and Hinton's (Coursera 2012, lecture 6e), the centered one Graves' (arXiv 1308.0850,
    equations 38 to 45); numbers, defaults and formulas are those of MXNet 1.9.1.
    ``epsilon_inside`` False adds ``epsilon`` to the root instead, as PyTorch does; ``gamma2``
    is its momentum. A variance that rounding brought below 0 counts as 0.
    """

    learning_rate: float = 0.001
    gamma1: float = 0.9
    gamma2: float = 0.9
    epsilon: float = 1e-8
    centered: bool = False
    clip_weights: float | None = None
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    epsilon_inside: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_unit("gamma1", "gamma2")
        self._check_not_negative("epsilon")

    def state_names(self) -> tuple[str, ...]:
        return ("square", "mean", "delta") if self.centered else ("square",)

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        square = state[0]
        rescale(grad, self.rescale_grad)
        add_decay(grad, weight, self.wd, scratch)
        clip(grad, self.clip_gradient)
        average_square(square, grad, self.gamma1, scratch)
        if not self.centered:
            root(square, self.epsilon, self.epsilon_inside, scratch)
            np.divide(grad, scratch, out=grad)
            np.multiply(grad, self.rate(count), out=grad)
            descend(weight, grad)
        else:
            _, mean, delta = state
            average(mean, grad, self.gamma1, scratch)
            np.multiply(mean, mean, out=scratch)
            np.subtract(square, scratch, out=scratch)
            np.maximum(scratch, 0.0, out=scratch)
            root(scratch, self.epsilon, self.epsilon_inside, scratch)
            np.divide(grad, scratch, out=grad)
            np.multiply(grad, self.rate(count), out=grad)
            np.multiply(delta, self.gamma2, out=delta)
            np.subtract(delta, grad, out=delta)
            np.add(weight, delta, out=weight, dtype=grad.dtype)
        clip(weight, self.clip_weights)
