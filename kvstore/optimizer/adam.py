"""Adam, with the decay in the gradient or apart from it (AdamW).

Pure formulas; see ``base.py`` for the contract. Read next: ``adamax.py`` and ``nadam.py``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from kvstore import kernels
from kvstore.aggregate import Flat
from kvstore.optimizer.arithmetic import (
    add_decay,
    average,
    average_square,
    clip,
    descend,
    rescale,
)
from kvstore.optimizer.base import Optimizer, register


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
    Kingma and Ba, arXiv 1412.6980). With ``epsilon_corrected`` it is added to the corrected
    root, ``sqrt(var / (1 - beta2 ** t)) + epsilon``, as in the paper's algorithm 1 and in
    PyTorch. t counts the updates of the part, not of the store.
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    epsilon_corrected: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_unit("beta1", "beta2")
        self._check_not_negative("epsilon")

    def state_names(self) -> tuple[str, ...]:
        return "mean", "var"

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        mean, var = state
        rescale(grad, self.rescale_grad)
        add_decay(grad, weight, self.wd, scratch)
        clip(grad, self.clip_gradient)
        average(mean, grad, self.beta1, scratch)
        average_square(var, grad, self.beta2, scratch)
        rate, epsilon = self._rate_and_epsilon(count)
        step_into(grad, mean, var, rate, epsilon, scratch)
        descend(weight, grad)

    def _rate_and_epsilon(self, count: int) -> tuple[float, float]:
        correction = math.sqrt(1.0 - self.beta2**count)
        rate = self.rate(count) * correction / (1.0 - self.beta1**count)
        return rate, self.epsilon * correction if self.epsilon_corrected else self.epsilon


@kernels.formula_of(Adam)
def _compiled(adam: Adam, count: int) -> kernels.Formula:
    rate, epsilon = adam._rate_and_epsilon(count)
    return kernels.Formula(
        kernels.ADAM,
        rescale=adam.rescale_grad,
        limit=max(adam.clip_gradient or 0.0, 0.0),
        decay=adam.wd,
        rate=rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        epsilon=epsilon,
    )


@register
@dataclasses.dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled decay. For update number t (``count``) of an element::

        grad = clip(rescale_grad * grad, clip_gradient)
        mean = beta1 * mean + (1 - beta1) * grad
        var = beta2 * var + (1 - beta2) * grad * grad
        rate = learning_rate * sqrt(1 - beta2 ** t) / (1 - beta1 ** t)
        weight = weight - rate * (mean / (sqrt(var) + epsilon) + wd * weight)

    Loshchilov and Hutter, arXiv 1711.05101, in the form of MXNet's class ``AdamW`` (2.0;
    1.9.1 has its kernel only, ``src/operator/contrib/adamw-inl.h``): the decay is multiplied
    by the rate with its correction, so it starts small. With ``decay_corrected`` False
    ``learning_rate`` alone multiplies it, as in the paper and in PyTorch.
    ``correct_bias`` False leaves the correction out of the rate (BERT's Adam);
    ``epsilon_corrected`` is as in ``Adam``, and means nothing without the correction.
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-6
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    correct_bias: bool = True
    epsilon_corrected: bool = False
    decay_corrected: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_unit("beta1", "beta2")
        self._check_not_negative("epsilon")

    def state_names(self) -> tuple[str, ...]:
        return "mean", "var"

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        mean, var = state
        rescale(grad, self.rescale_grad)
        clip(grad, self.clip_gradient)
        average(mean, grad, self.beta1, scratch)
        average_square(var, grad, self.beta2, scratch)
        rate, epsilon, decay = self._rate_epsilon_and_decay(count)
        step_into(grad, mean, var, rate, epsilon, scratch)
        add_decay(grad, weight, decay, scratch)
        descend(weight, grad)

    def _rate_epsilon_and_decay(self, count: int) -> tuple[float, float, float]:
        base = rate = self.rate(count)
        epsilon = self.epsilon
        if self.correct_bias:
            correction = math.sqrt(1.0 - self.beta2**count)
            rate = base * correction / (1.0 - self.beta1**count)
            epsilon = epsilon * correction if self.epsilon_corrected else epsilon
        return rate, epsilon, self.wd * (rate if self.decay_corrected else base)


@kernels.formula_of(AdamW)
def _compiled_with_late_decay(adam: AdamW, count: int) -> kernels.Formula:
    rate, epsilon, decay = adam._rate_epsilon_and_decay(count)
    return kernels.Formula(
        kernels.ADAM,
        rescale=adam.rescale_grad,
        limit=max(adam.clip_gradient or 0.0, 0.0),
        rate=rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        epsilon=epsilon,
        late_decay=decay,
    )


def step_into(out: Flat, mean: Flat, var: Flat, rate: float, epsilon: float, scratch: Flat) -> None:
    """out = rate * mean / (sqrt(var) + epsilon); overwrites ``scratch``."""
    np.sqrt(var, out=scratch)
    np.add(scratch, epsilon, out=scratch)
    np.multiply(mean, rate, out=out)
    np.divide(out, scratch, out=out)
