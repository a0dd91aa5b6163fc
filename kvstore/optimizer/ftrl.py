"""FTRL-Proximal: online learning with exact zeros, for sparse linear models.

Pure formulas; see ``base.py`` for the contract. Read next: ``signum.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvstore.aggregate import Flat
from kvstore.optimizer.arithmetic import clip, rescale
from kvstore.optimizer.base import Optimizer, register


@register
@dataclasses.dataclass(frozen=True)
class Ftrl(Optimizer):
    """For each element::

        grad = clip(rescale_grad * grad, clip_gradient)
        sigma = (sqrt(n + grad * grad) - sqrt(n)) / learning_rate
        z = z + grad - sigma * weight
        n = n + grad * grad
        weight = 0 where abs(z) <= lamda1, else
                 (sign(z) * lamda1 - z) / ((beta + sqrt(n)) / learning_rate + wd)

    McMahan et al., "Ad Click Prediction: a View from the Trenches" (KDD 2013), algorithm 1,
    with names and defaults of MXNet 1.9.1 (``lamda1`` is the L1 strength, ``wd`` the L2 one).
    The weight follows from ``z`` and ``n`` alone: its first value counts for the gradients
    only, and changing ``learning_rate`` on the way changes all weights. A rate of 0 (the
    multiplier of a frozen key) leaves everything as it is, where MXNet would set weights to 0.
    """

    learning_rate: float = 0.1
    lamda1: float = 0.01
    beta: float = 1.0
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_not_negative("learning_rate", "lamda1", "beta", "wd")

    def state_names(self) -> tuple[str, ...]:
        return "z", "n"

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        z, n = state
        rate = self.rate(count)
        if rate == 0.0:
            return
        rescale(grad, self.rescale_grad)
        clip(grad, self.clip_gradient)
        np.add(z, grad, out=z)
        np.sqrt(n, out=scratch)
        np.multiply(grad, grad, out=grad)
        np.add(n, grad, out=n)
        np.sqrt(n, out=grad)
        np.subtract(grad, scratch, out=scratch)
        np.divide(scratch, rate, out=scratch)
        np.multiply(scratch, weight, out=scratch, dtype=scratch.dtype)
        np.subtract(z, scratch, out=z)
        # grad holds sqrt(n) from here on; clip(z) - z is 0 where z lies within the limits.
        np.add(grad, self.beta, out=grad)
        np.divide(grad, rate, out=grad)
        np.add(grad, self.wd, out=grad)
        np.minimum(z, self.lamda1, out=scratch)
        np.maximum(scratch, -self.lamda1, out=scratch)
        np.subtract(scratch, z, out=scratch)
        np.divide(scratch, grad, out=weight, dtype=scratch.dtype)
