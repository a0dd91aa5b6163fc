"""Adam: steps scaled by running means of the gradient and of its square.

Pure formulas; see ``base.py`` for the contract. Read next: ``kvstore/local.py``, which calls it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from kvstore.aggregate import Flat
from kvstore.errors import OptimizerParameterError
from kvstore.optimizer.base import Optimizer, add_decay, clip, register, rescale


@register
@dataclasses.dataclass(frozen=True)
class Adam(Optimizer):
    """For update number t (``count``) of an element::

        grad = clip(rescale_grad * grad + wd * weight, clip_gradient)
        mean = beta1 * mean + (1 - beta1) * grad
        var = beta2 * var + (1 - beta2) * grad * grad
        rate = learning_rate * sqrt(1 - beta2 ** t) / (1 - beta1 ** t)
        weight = weight - rate * mean / (sqrt(var) + epsilon)

    Here the decay is added before clipping, unlike in SGD. Both are so in MXNet 1.9.1, whose
    numbers, defaults and formula these are (``AdamUpdateKernel`` in
    ``src/operator/optimizer_op-inl.h``); MXNet 2 clips first in both. The bias correction sits
    in the rate, so ``epsilon`` is added to the uncorrected root (end of section 2 of
    Kingma and Ba, arXiv 1412.6980). t counts the updates of the part, not of the store.
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise OptimizerParameterError(
                    f"{name} of Adam must lie in [0, 1), got {getattr(self, name)!r}"
                )
        if self.epsilon < 0.0:
            raise OptimizerParameterError(
                f"epsilon of Adam must not be negative, got {self.epsilon!r}"
            )

    def create_state(self, weight: Flat) -> tuple[Flat, ...]:
        """``mean`` and ``var``."""
        return self._zeros(weight, 2)

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        mean, var = state
        rescale(grad, self.rescale_grad)
        add_decay(grad, weight, self.wd, scratch)
        clip(grad, self.clip_gradient)
        np.multiply(mean, self.beta1, out=mean)
        np.multiply(grad, 1.0 - self.beta1, out=scratch)
        np.add(mean, scratch, out=mean)
        np.multiply(var, self.beta2, out=var)
        np.multiply(grad, 1.0 - self.beta2, out=scratch)
        np.multiply(scratch, grad, out=scratch)
        np.add(var, scratch, out=var)
        rate = self.learning_rate * math.sqrt(1.0 - self.beta2**count) / (1.0 - self.beta1**count)
        np.sqrt(var, out=scratch)
        np.add(scratch, self.epsilon, out=scratch)
        np.multiply(mean, rate, out=grad)
        np.divide(grad, scratch, out=grad)
        np.subtract(weight, grad, out=weight, dtype=grad.dtype)
