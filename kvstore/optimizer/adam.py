"""Update weights by Adam, AdamW, AdaMax or Nadam.

AdamW decays weights separately from the gradient. AdaMax uses the largest gradient so far instead
of the root of a mean. Nadam adds Nesterov's momentum, which follows its own schedule.
Pure formulas; see ``base.py`` for the contract. Read next: ``adaptive.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from kvstore.arrays.cpu import kernels
from kvstore.arrays.cpu.sums import Flat
from kvstore.optimizer.arithmetic import add_decay, average, average_square, descend
from kvstore.optimizer.base import ClippedOptimizer, State, register
from kvstore.optimizer.parameters import not_negative, unit

BETAS = ("learning_rate", "beta1", "beta2", "epsilon")
"""The first positional parameters of Adam and its variants."""


@dataclasses.dataclass(frozen=True, repr=False)
class MomentsOptimizer(ClippedOptimizer):
    """The base of Adam and its variants: running means of gradients and their squares."""

    rate_counts = "always"
    states = ("mean", "var")

    learning_rate: float = 0.001
    beta1: float = unit(0.9)
    beta2: float = unit(0.999)
    epsilon: float = not_negative(1e-8)

    def _average(self, grad: Flat, state: State, scratch: Flat) -> None:
        average(state[0], grad, self.beta1, scratch)
        average_square(state[1], grad, self.beta2, scratch)

    def _corrected(self, rate: float, count: int) -> tuple[float, float]:
        """Return the bias-corrected rate, and the factor of a corrected epsilon.

        a / (sqrt(v) / c + e) = a * c / (sqrt(v) + e * c), and this c is the factor.
        """
        correction = math.sqrt(1.0 - self.beta2**count)
        return rate * correction / (1.0 - self.beta1**count), correction

    def _formula(
        self, rate: float, epsilon: float, decay: float = 0.0, late_decay: float = 0.0
    ) -> kernels.Formula:
        return kernels.Formula(
            kernels.ADAM,
            rescale=self.rescale_grad,
            limit=max(self.clip_gradient or 0.0, 0.0),
            decay=decay,
            rate=rate,
            beta1=self.beta1,
            beta2=self.beta2,
            epsilon=epsilon,
            late_decay=late_decay,
        )


@register
@dataclasses.dataclass(frozen=True)
class Adam(MomentsOptimizer):
    """Adam. For update number t (``count``) of an element::

        grad = clip(rescale_grad * grad + wd * weight, clip_gradient)
        mean = beta1 * mean + (1 - beta1) * grad
        var = beta2 * var + (1 - beta2) * grad * grad
        rate = learning_rate * sqrt(1 - beta2 ** t) / (1 - beta1 ** t)
        weight = weight - rate * mean / (sqrt(var) + epsilon)

    Numbers, defaults and formula are those of MXNet 1.9.1 (``AdamUpdateKernel`` in
    ``src/operator/optimizer_op-inl.h``). As there, the decay is added before clipping in Adam, but
    after it in SGD; MXNet 2 clips first in both. The rate includes the bias correction, so
    ``epsilon`` is added to the uncorrected root (end of section 2 of Kingma and Ba, arXiv
    1412.6980). With ``epsilon_corrected`` it is added to the corrected root,
    ``sqrt(var / (1 - beta2 ** t)) + epsilon``, as in the paper's algorithm 1 and in PyTorch. t
    counts the updates of the part, not of the store.
    """

    positional = (*BETAS, "lazy_update")
    lazy_stypes = ("default", "row_sparse")

    epsilon_corrected: bool = False

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        mean, var = state
        self._decay_and_clip(grad, weight, scratch)
        self._average(grad, state, scratch)
        rate, epsilon = self._rate_and_epsilon(count)
        step_into(grad, mean, var, rate, epsilon, scratch)
        descend(weight, grad)

    def _rate_and_epsilon(self, count: int) -> tuple[float, float]:
        rate, correction = self._corrected(self.rate(count), count)
        return rate, self.epsilon * correction if self.epsilon_corrected else self.epsilon


@kernels.formula_of(Adam)
def _compiled(adam: Adam, count: int) -> kernels.Formula:
    rate, epsilon = adam._rate_and_epsilon(count)
    return adam._formula(rate, epsilon, decay=adam.wd)


@register
@dataclasses.dataclass(frozen=True)
class AdamW(MomentsOptimizer):
    """AdamW: Adam with decoupled weight decay, for update t (``count``)::

        grad = clip(rescale_grad * grad, clip_gradient)
        mean = beta1 * mean + (1 - beta1) * grad
        var = beta2 * var + (1 - beta2) * grad * grad
        rate = learning_rate * sqrt(1 - beta2 ** t) / (1 - beta1 ** t)
        weight = weight - rate * (mean / (sqrt(var) + epsilon) + wd * weight)

    Loshchilov and Hutter, arXiv 1711.05101, in the form of MXNet's class ``AdamW`` (2.0;
    1.9.1 has only its kernel, ``src/operator/contrib/adamw-inl.h``): the decay is multiplied
    by the corrected rate, so it starts small. With ``decay_corrected`` False it is multiplied only
    by ``learning_rate``, as in the paper and in PyTorch. With ``correct_bias`` False the rate is
    not corrected (BERT's Adam); then ``epsilon_corrected``, which is as in ``Adam``, has no effect.
    """

    positional = (*BETAS, "correct_bias")
    lazy_stypes = ("default", "row_sparse")

    epsilon: float = not_negative(1e-6)
    correct_bias: bool = True
    epsilon_corrected: bool = False
    decay_corrected: bool = True

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        mean, var = state
        self._clip(grad)
        self._average(grad, state, scratch)
        rate, epsilon, decay = self._rate_epsilon_and_decay(count)
        step_into(grad, mean, var, rate, epsilon, scratch)
        add_decay(grad, weight, decay, scratch)
        descend(weight, grad)

    def _rate_epsilon_and_decay(self, count: int) -> tuple[float, float, float]:
        base = rate = self.rate(count)
        epsilon = self.epsilon
        if self.correct_bias:
            rate, correction = self._corrected(base, count)
            epsilon = epsilon * correction if self.epsilon_corrected else epsilon
        return rate, epsilon, self.wd * (rate if self.decay_corrected else base)


@kernels.formula_of(AdamW)
def _compiled_with_late_decay(adam: AdamW, count: int) -> kernels.Formula:
    rate, epsilon, decay = adam._rate_epsilon_and_decay(count)
    return adam._formula(rate, epsilon, late_decay=decay)


def step_into(out: Flat, mean: Flat, var: Flat, rate: float, epsilon: float, scratch: Flat) -> None:
    """out = rate * mean / (sqrt(var) + epsilon); overwrites ``scratch``."""
    np.sqrt(var, out=scratch)
    np.add(scratch, epsilon, out=scratch)
    np.multiply(mean, rate, out=out)
    np.divide(out, scratch, out=out)


@register
@dataclasses.dataclass(frozen=True)
class Adamax(MomentsOptimizer):
    """AdaMax. For update number t (``count``) of an element::

        grad = clip(rescale_grad * grad + wd * weight, clip_gradient)
        mean = beta1 * mean + (1 - beta1) * grad
        largest = max(beta2 * largest, abs(grad) + epsilon)
        weight = weight - learning_rate / (1 - beta1 ** t) * mean / largest

    Kingma and Ba, arXiv 1412.6980, section 7, with the numbers of MXNet 1.9.1. MXNet has no
    ``epsilon``, so an element whose gradients were all zero becomes 0 / 0; here and in PyTorch it
    does not change. ``epsilon=0`` gives MXNet's result.
    """

    positional = ("learning_rate", "beta1", "beta2")
    states = "mean", "largest"

    learning_rate: float = 0.002

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        mean, largest = state
        self._decay_and_clip(grad, weight, scratch)
        average(mean, grad, self.beta1, scratch)
        np.absolute(grad, out=scratch)
        np.add(scratch, self.epsilon, out=scratch)
        np.multiply(largest, self.beta2, out=largest)
        np.maximum(largest, scratch, out=largest)
        np.multiply(mean, self.rate(count) / (1.0 - self.beta1**count), out=grad)
        np.divide(grad, largest, out=grad)
        descend(weight, grad)


@register
@dataclasses.dataclass(frozen=True)
class Nadam(MomentsOptimizer):
    """Nadam. For update number t (``count``) of an element::

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
    keys, which shrinks faster with more keys; here it depends only on t.
    """

    positional = (*BETAS, "schedule_decay")

    schedule_decay: float = not_negative(0.004)

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        mean, var = state
        self._decay_and_clip(grad, weight, scratch)
        self._average(grad, state, scratch)
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
"""One minus a smaller product is 1.0, so further factors are not needed."""

STRIDE = 1024
"""How many factors one cached product has."""


def _momentum(beta1: float, decay: float, count: int) -> float:
    return beta1 * (1.0 - 0.5 * math.pow(0.96, count * decay))


@functools.lru_cache(maxsize=1024)
def _product(beta1: float, decay: float, count: int) -> float:
    """Return mu(1) * ... * mu(count), or 0.0 if that is negligible.

    The bits do not depend on earlier calls.
    """
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
