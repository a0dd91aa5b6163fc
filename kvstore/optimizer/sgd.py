"""Stochastic gradient descent: with momentum, and with Nesterov's.

Pure formulas; see ``base.py`` for the contract. Read next: ``adam.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvstore import kernels
from kvstore.aggregate import Flat
from kvstore.optimizer.arithmetic import add_decay, clip, descend, rescale
from kvstore.optimizer.base import Optimizer, register


@register
@dataclasses.dataclass(frozen=True)
class SGD(Optimizer):
    """For each element::

        grad = clip(rescale_grad * grad, clip_gradient) + wd * weight
        mom = momentum * mom - learning_rate * grad
        weight = weight + mom

    Clipping comes before the decay. With momentum 0 there is no state and
    ``weight = weight - learning_rate * grad``. Numbers, defaults and formula are those of
    MXNet 1.9.1 (``python/mxnet/optimizer/optimizer.py``, ``SGDMomKernel`` in
    ``src/operator/optimizer_op-inl.h``). ``rescale_grad`` is the caller's business: stores
    add gradients up and never average them.
    """

    learning_rate: float = 0.01
    momentum: float = 0.0
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None

    def state_names(self) -> tuple[str, ...]:
        """The velocity ``mom``; nothing when momentum is 0."""
        return ("mom",) if self.momentum != 0.0 else ()

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        rescale(grad, self.rescale_grad)
        clip(grad, self.clip_gradient)
        add_decay(grad, weight, self.wd, scratch)
        np.multiply(grad, self.rate(count), out=grad)
        if self.momentum == 0.0:
            descend(weight, grad)
            return
        (velocity,) = state
        np.multiply(velocity, self.momentum, out=velocity)
        np.subtract(velocity, grad, out=velocity)
        np.add(weight, velocity, out=weight, dtype=grad.dtype)


@kernels.formula_of(SGD)
def _compiled(sgd: SGD, count: int) -> kernels.Formula:
    return kernels.Formula(
        kernels.SGD if sgd.momentum == 0.0 else kernels.MOMENTUM,
        rescale=sgd.rescale_grad,
        limit=max(sgd.clip_gradient or 0.0, 0.0),
        decay=sgd.wd,
        rate=sgd.rate(count),
        momentum=sgd.momentum,
    )


@register
@dataclasses.dataclass(frozen=True)
class NAG(Optimizer):
    """Nesterov's accelerated gradient. For each element::

        grad = clip(rescale_grad * grad, clip_gradient) + wd * weight
        mom = momentum * mom - learning_rate * grad
        weight = weight + momentum * mom - learning_rate * grad

    With momentum 0 it is SGD, without state. Formula and defaults of MXNet 1.9.1
    (``NAGMomKernel`` in ``src/operator/optimizer_op-inl.h``); the form is that of Bengio et al.
    (arXiv 1212.0901, section 3.5) and, at a constant learning rate, PyTorch's.
    """

    learning_rate: float = 0.01
    momentum: float = 0.0
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None

    def state_names(self) -> tuple[str, ...]:
        """The velocity ``mom``; nothing when momentum is 0."""
        return ("mom",) if self.momentum != 0.0 else ()

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        rescale(grad, self.rescale_grad)
        clip(grad, self.clip_gradient)
        add_decay(grad, weight, self.wd, scratch)
        np.multiply(grad, self.rate(count), out=grad)
        if self.momentum != 0.0:
            (velocity,) = state
            np.multiply(velocity, self.momentum, out=velocity)
            np.subtract(velocity, grad, out=velocity)
            np.multiply(velocity, self.momentum, out=scratch)
            np.subtract(grad, scratch, out=grad)
        descend(weight, grad)
