"""Nadam: Adam with Nesterov's momentum, whose strength follows a schedule of its own.

Pure formulas; see ``base.py`` for the contract. Read next: ``adagrad.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
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
)
from kvstore.optimizer.base import Optimizer, register


@register
@dataclasses.dataclass(frozen=True)
class Nadam(Optimizer):
    """For update number t (``count``) of an element::

        grad = clip(rescale_grad * grad + wd * weight, clip_gradient)
        mu(t) = beta1 * (1 - 0.5 * 0.96 ** (t * schedule_decay))
        product(t) = mu(1) * mu(2) * ... * mu(t)
        mean = beta1 * mean + (1 - beta1) * grad
        var = beta2 * var + (1 - beta2) * grad * grad
        step = (1 - mu(t)) * grad / (1 - product(t))
             + mu(t + 1) * mean / (1 - product(t + 1))
        weight = weight - learning_rate * step / (sqrt(var / (1 - beta2 ** t)) + epsilon)

    Dozat, "Incorporating Nesterov momentum into Adam" (ICLR workshop 2016), with the numbers
    of MXNet 1.9.1 and the formula of both MXNet and PyTorch. MXNet keeps one product for all
    keys, which shrinks with the number of keys; here it depends on t only.
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    schedule_decay: float = 0.004
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_unit("beta1", "beta2")
        self._check_not_negative("epsilon", "schedule_decay")

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
        beta, decay = self.beta1, self.schedule_decay
        ahead = _momentum(beta, decay, count + 1) / (1.0 - _product(beta, decay, count + 1))
        here = (1.0 - _momentum(beta, decay, count)) / (1.0 - _product(beta, decay, count))
        np.multiply(grad, here, out=grad)
        np.multiply(mean, ahead, out=scratch)
        np.add(grad, scratch, out=grad)
        np.sqrt(var, out=scratch)
        np.multiply(scratch, 1.0 / math.sqrt(1.0 - self.beta2**count), out=scratch)
        np.add(scratch, self.epsilon, out=scratch)
        np.multiply(grad, self.rate(count), out=grad)
        np.divide(grad, scratch, out=grad)
        descend(weight, grad)


NEGLIGIBLE = 1e-20
"""One minus anything smaller is 1.0, so the rest of a product need not be multiplied out."""

STRIDE = 1024
"""Factors that are multiplied out in one go, and kept."""


def _momentum(beta1: float, decay: float, count: int) -> float:
    return beta1 * (1.0 - 0.5 * math.pow(0.96, count * decay))


@functools.lru_cache(maxsize=1024)
def _product(beta1: float, decay: float, count: int) -> float:
    """mu(1) * ... * mu(count), the same bits whatever was asked before; 0.0 once negligible."""
    product = 1.0
    for first in range(1, count + 1, STRIDE):
        product *= _stretch(beta1, decay, first, min(first + STRIDE, count + 1))
        if product < NEGLIGIBLE:
            return 0.0
    return product


@functools.lru_cache(maxsize=1024)
def _stretch(beta1: float, decay: float, start: int, stop: int) -> float:
    product = 1.0
    for count in range(start, stop):
        product *= _momentum(beta1, decay, count)
        if product < NEGLIGIBLE:
            return 0.0
    return product
