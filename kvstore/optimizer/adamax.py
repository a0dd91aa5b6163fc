"""AdaMax: Adam with the largest gradient so far in place of the root of a mean.

Pure formulas; see ``base.py`` for the contract. Read next: ``nadam.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvstore.aggregate import Flat
from kvstore.optimizer.arithmetic import add_decay, average, clip, descend, rescale
from kvstore.optimizer.base import Optimizer, register


@register
@dataclasses.dataclass(frozen=True)
class Adamax(Optimizer):
    """For update number t (``count``) of an element::

        grad = clip(rescale_grad * grad + wd * weight, clip_gradient)
        mean = beta1 * mean + (1 - beta1) * grad
        largest = max(beta2 * largest, abs(grad) + epsilon)
        weight = weight - learning_rate / (1 - beta1 ** t) * mean / largest

    Kingma and Ba, arXiv 1412.6980, section 7, with the numbers of MXNet 1.9.1. That has no
    ``epsilon``, so an element whose gradients have all been zero becomes 0 / 0; here and in
    PyTorch it stays as it is. ``epsilon=0`` gives MXNet 1.9.1.
    """

    learning_rate: float = 0.002
    beta1: float = 0.9
    beta2: float = 0.999
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_unit("beta1", "beta2")
        self._check_not_negative("epsilon")

    def state_names(self) -> tuple[str, ...]:
        return "mean", "largest"

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        mean, largest = state
        rescale(grad, self.rescale_grad)
        add_decay(grad, weight, self.wd, scratch)
        clip(grad, self.clip_gradient)
        average(mean, grad, self.beta1, scratch)
        np.absolute(grad, out=scratch)
        np.add(scratch, self.epsilon, out=scratch)
        np.multiply(largest, self.beta2, out=largest)
        np.maximum(largest, scratch, out=largest)
        np.multiply(mean, self.rate(count) / (1.0 - self.beta1**count), out=grad)
        np.divide(grad, largest, out=grad)
        descend(weight, grad)
