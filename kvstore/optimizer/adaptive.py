"""Update weights by AdaGrad, AdaDelta or RMSProp.

AdaGrad divides steps by the root of the sum of all squared gradients, RMSProp (plain and centered)
by the root of their running mean. AdaDelta also multiplies by the root of a running mean of squared
steps, so that steps have the units of the weight. Pure formulas; see ``base.py`` for the contract.
Read next: ``ftrl.py``.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvstore.arrays.cpu.sums import Flat
from kvstore.optimizer.arithmetic import (
    add_decay,
    average,
    average_square,
    clip,
    descend,
    root,
)
from kvstore.optimizer.base import ClippedOptimizer, State, register
from kvstore.optimizer.parameters import not_negative, unit


@register
@dataclasses.dataclass(frozen=True)
class AdaGrad(ClippedOptimizer):
    """AdaGrad. For each element::

        grad = clip(rescale_grad * grad, clip_gradient)
        history = history + grad * grad
        weight = weight - learning_rate * (grad / sqrt(history + eps) + wd * weight)

    Duchi, Hazan and Singer (JMLR 12, 2011), with numbers, defaults and formula of MXNet 1.9.1.
    Two settings give PyTorch's: ``epsilon_inside`` False adds ``eps`` to the root,
    ``decoupled_decay`` False adds ``wd * weight`` to the clipped gradient instead.
    """

    positional = ("eps",)
    lazy_stypes = ("default", "row_sparse")
    states = ("history",)

    learning_rate: float = 0.01
    eps: float = not_negative(1e-7)
    epsilon_inside: bool = True
    decoupled_decay: bool = True

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        (history,) = state
        self._clip(grad)
        if not self.decoupled_decay:
            add_decay(grad, weight, self.wd, scratch)
        np.multiply(grad, grad, out=scratch)
        np.add(history, scratch, out=history)
        root(history, self.eps, self.epsilon_inside, scratch)
        np.divide(grad, scratch, out=grad)
        if self.decoupled_decay:
            add_decay(grad, weight, self.wd, scratch)
        np.multiply(grad, self.rate(count), out=grad)
        descend(weight, grad)


@register
@dataclasses.dataclass(frozen=True)
class AdaDelta(ClippedOptimizer):
    """AdaDelta. For each element::

        grad = clip(rescale_grad * grad, clip_gradient)
        square = rho * square + (1 - rho) * grad * grad
        delta = sqrt(moved + epsilon) / sqrt(square + epsilon) * grad
        moved = rho * moved + (1 - rho) * delta * delta
        weight = weight - learning_rate * (delta + wd * weight)

    Zeiler, arXiv 1212.5701, with numbers and formula of MXNet 1.9.1. MXNet ignores the learning
    rate; its formula is the one with ``learning_rate`` 1, the default here.
    ``decoupled_decay`` False adds ``wd * weight`` to the clipped gradient instead, as MXNet 2
    and PyTorch do.
    """

    positional = ("rho", "epsilon")
    states = "square", "moved"

    learning_rate: float = 1.0
    rho: float = unit(0.9)
    epsilon: float = not_negative(1e-5)
    decoupled_decay: bool = True

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        square, moved = state
        self._clip(grad)
        if not self.decoupled_decay:
            add_decay(grad, weight, self.wd, scratch)
        average_square(square, grad, self.rho, scratch)
        root(moved, self.epsilon, True, scratch)
        np.multiply(grad, scratch, out=grad)
        root(square, self.epsilon, True, scratch)
        np.divide(grad, scratch, out=grad)
        average_square(moved, grad, self.rho, scratch)
        if self.decoupled_decay:
            add_decay(grad, weight, self.wd, scratch)
        rate = self.rate(count)
        if rate != 1.0:
            np.multiply(grad, rate, out=grad)
        descend(weight, grad)


@register
@dataclasses.dataclass(frozen=True)
class RMSProp(ClippedOptimizer):
    """RMSProp. For each element::

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
    is its momentum. A variance below 0, due to rounding, is treated as 0.
    """

    positional = ("learning_rate", "gamma1", "gamma2", "epsilon", "centered", "clip_weights")
    rate_counts = "always"

    learning_rate: float = 0.001
    gamma1: float = unit(0.9)
    gamma2: float = unit(0.9)
    epsilon: float = not_negative(1e-8)
    centered: bool = False
    clip_weights: float | None = None
    epsilon_inside: bool = True

    def state_names(self) -> tuple[str, ...]:
        return ("square", "mean", "delta") if self.centered else ("square",)

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        square = state[0]
        self._decay_and_clip(grad, weight, scratch)
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
