"""Stochastic gradient descent with momentum, weight decay and clipping.

Pure formulas; see ``base.py`` for the contract. Read next: ``adam.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvstore.aggregate import Flat
from kvstore.optimizer.base import Optimizer, add_decay, clip, register, rescale


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

    def create_state(self, weight: Flat) -> tuple[Flat, ...]:
        """The velocity ``mom``; nothing when momentum is 0."""
        return self._zeros(weight, 1 if self.momentum != 0.0 else 0)

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        rescale(grad, self.rescale_grad)
        clip(grad, self.clip_gradient)
        add_decay(grad, weight, self.wd, scratch)
        np.multiply(grad, self.learning_rate, out=grad)
        if self.momentum == 0.0:
            np.subtract(weight, grad, out=weight, dtype=grad.dtype)
            return
        (velocity,) = state
        np.multiply(velocity, self.momentum, out=velocity)
        np.subtract(velocity, grad, out=velocity)
        np.add(weight, velocity, out=weight, dtype=grad.dtype)
