"""LAMB: Adam whose step is scaled for each key to the norm of its weight.

Pure formulas; see ``base.py`` for the contract. Sees whole keys (scope ``"key"``). Read next:
``updater.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvstore.aggregate import BLOCK_ELEMENTS, Flat
from kvstore.optimizer.adam import step_into
from kvstore.optimizer.arithmetic import (
    add_decay,
    average,
    average_square,
    clip,
    descend,
    is_on_host,
    norm,
    rescale,
)
from kvstore.optimizer.base import Optimizer, register


@register
@dataclasses.dataclass(frozen=True)
class LAMB(Optimizer):
    """For update number t (``count``) of a key, with norms over the whole key::

        grad = clip(rescale_grad * grad, clip_gradient)
        mean = beta1 * mean + (1 - beta1) * grad
        var = beta2 * var + (1 - beta2) * grad * grad
        step = mean / (1 - beta1 ** t) / (sqrt(var / (1 - beta2 ** t)) + epsilon) + wd * weight
        size = min(max(norm(weight), lower_bound), upper_bound)
        ratio = size / norm(step), or 1 where one of the two is 0
        weight = weight - learning_rate * ratio * step

    You et al., arXiv 1904.00962, algorithm 2, with names, defaults and formula of MXNet 1.9.1
    (``LambUpdatePhaseOneKernel`` and ``...TwoKernel`` in ``src/operator/optimizer_op-inl.h``).
    ``bias_correction`` False leaves both divisors of the step's first term out. A bound of
    None, 0 or less is none.
    """

    scope: ClassVar[str] = "key"

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    lower_bound: float | None = None
    upper_bound: float | None = None
    bias_correction: bool = True
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_unit("beta1", "beta2")
        self._check_not_negative("epsilon")

    def state_names(self) -> tuple[str, ...]:
        return "mean", "var"

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        # On the host in blocks, since the caller hands over the whole key and memory is slow.
        step = BLOCK_ELEMENTS if is_on_host(weight) else max(len(weight), 1)
        for start in range(0, len(weight), step):
            block = slice(start, start + step)
            mean, var = (array[block] for array in state)
            self._step(weight[block], grad[block], mean, var, count, scratch[block])
        rate = self.rate(count) * self._ratio(norm(weight), norm(grad))
        np.multiply(grad, rate, out=grad)
        descend(weight, grad)

    def _step(
        self, weight: Flat, grad: Flat, mean: Flat, var: Flat, count: int, scratch: Flat
    ) -> None:
        """Turn the gradient into the step before its scaling."""
        rescale(grad, self.rescale_grad)
        clip(grad, self.clip_gradient)
        average(mean, grad, self.beta1, scratch)
        average_square(var, grad, self.beta2, scratch)
        factor, epsilon = 1.0, self.epsilon
        if self.bias_correction:
            # a / (sqrt(v) / c + e) = a * c / (sqrt(v) + e * c)
            correction = math.sqrt(1.0 - self.beta2**count)
            factor = correction / (1.0 - self.beta1**count)
            epsilon = self.epsilon * correction
        step_into(grad, mean, var, factor, epsilon, scratch)
        add_decay(grad, weight, self.wd, scratch)

    def _ratio(self, weight_norm: float, step_norm: float) -> float:
        size = weight_norm
        if self.lower_bound is not None and self.lower_bound > 0.0:
            size = max(size, self.lower_bound)
        if self.upper_bound is not None and self.upper_bound > 0.0:
            size = min(size, self.upper_bound)
        return 1.0 if size == 0.0 or step_norm == 0.0 else size / step_norm
