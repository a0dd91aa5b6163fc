"""Follow-the-leader optimizers: FTRL-Proximal and FTML.

Both keep sums of gradients and compute the weight from them in each update. Pure formulas; see
``base.py`` for the contract. Read next: ``sgd.py``.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvstore.arrays.cpu.sums import Flat
from kvstore.optimizer.arithmetic import average, average_square
from kvstore.optimizer.base import ClippedOptimizer, State, register
from kvstore.optimizer.parameters import not_negative, unit


@register
@dataclasses.dataclass(frozen=True)
class Ftrl(ClippedOptimizer):
    """FTRL-Proximal. For each element::

        grad = clip(rescale_grad * grad, clip_gradient)
        sigma = (sqrt(n + grad * grad) - sqrt(n)) / learning_rate
        z = z + grad - sigma * weight
        n = n + grad * grad
        weight = 0 where abs(z) <= lamda1, else
                 (sign(z) * lamda1 - z) / ((beta + sqrt(n)) / learning_rate + wd)

    McMahan et al., "Ad Click Prediction: a View from the Trenches" (KDD 2013), algorithm 1,
    with names and defaults of MXNet 1.9.1 (``lamda1`` is the L1 strength, ``wd`` the L2 strength).
    The weight is computed from ``z`` and ``n`` alone. So its initial value matters only for
    gradients, and a new ``learning_rate`` changes all weights. With a rate of 0 (the multiplier of
    a frozen key) nothing changes; MXNet would compute NaN.
    """

    positional = ("lamda1", "learning_rate", "beta")
    rate_counts = "never"
    lazy_stypes = ("row_sparse",)
    states = "z", "n"

    learning_rate: float = not_negative(0.1)
    lamda1: float = not_negative(0.01)
    beta: float = not_negative(1.0)
    wd: float = not_negative(0.0)

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        z, n = state
        rate = self.rate(count)
        if rate == 0.0:
            return
        self._clip(grad)
        np.add(z, grad, out=z)
        np.sqrt(n, out=scratch)
        np.multiply(grad, grad, out=grad)
        np.add(n, grad, out=n)
        np.sqrt(n, out=grad)
        np.subtract(grad, scratch, out=scratch)
        np.divide(scratch, rate, out=scratch)
        np.multiply(scratch, weight, out=scratch, dtype=scratch.dtype)
        np.subtract(z, scratch, out=z)
        # grad holds sqrt(n) from here on; clip(z) - z is 0 where z is within the limits.
        np.add(grad, self.beta, out=grad)
        np.divide(grad, rate, out=grad)
        np.add(grad, self.wd, out=grad)
        np.minimum(z, self.lamda1, out=scratch)
        np.maximum(scratch, -self.lamda1, out=scratch)
        np.subtract(scratch, z, out=scratch)
        np.divide(scratch, grad, out=weight, dtype=scratch.dtype)


@register
@dataclasses.dataclass(frozen=True)
class FTML(ClippedOptimizer):
    """Follow the moving leader. For update number t (``count``) of an element::

        grad = clip(rescale_grad * grad + wd * weight, clip_gradient)
        v = beta2 * v + (1 - beta2) * grad * grad
        before, d = d, (1 - beta1 ** t) / learning_rate * (sqrt(v / (1 - beta2 ** t)) + epsilon)
        z = beta1 * z + (1 - beta1) * grad - (d - beta1 * before) * weight
        weight = -z / d

    Zheng and Kwok, "Follow the Moving Leader in Deep Learning" (ICML 2017), with numbers, defaults
    and formula of MXNet 1.9.1 (``FTMLKernel`` in ``src/operator/optimizer_op-inl.h``). A rate of 0
    (the multiplier of a frozen key) changes nothing; MXNet would compute NaN. With an ``epsilon``
    of 0, elements that never had a gradient become NaN, as in MXNet.
    """

    positional = ("beta1", "beta2", "epsilon")
    states = "d", "v", "z"

    learning_rate: float = 0.01
    beta1: float = unit(0.6)
    beta2: float = unit(0.999)
    epsilon: float = not_negative(1e-8)

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        before, square, z = state
        rate = self.rate(count)
        if rate == 0.0:
            return
        self._decay_and_clip(grad, weight, scratch)
        average_square(square, grad, self.beta2, scratch)
        average(z, grad, self.beta1, scratch)
        np.multiply(square, 1.0 / (1.0 - self.beta2**count), out=grad)
        np.sqrt(grad, out=grad)
        np.add(grad, self.epsilon, out=grad)
        np.multiply(grad, (1.0 - self.beta1**count) / rate, out=grad)
        # grad holds d from here on.
        np.multiply(before, self.beta1, out=scratch)
        np.subtract(grad, scratch, out=scratch)
        np.multiply(scratch, weight, out=scratch)
        np.subtract(z, scratch, out=z)
        np.positive(grad, out=before)
        np.divide(z, grad, out=weight)
        np.negative(weight, out=weight)
