"""AdaDelta: steps with the units of the weight, from running means of squares.

Pure formulas; see ``base.py`` for the contract. Read next: ``ftrl.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvstore.aggregate import Flat
from kvstore.optimizer.arithmetic import add_decay, average_square, clip, descend, rescale, root
from kvstore.optimizer.base import Optimizer, register


@register
@dataclasses.dataclass(frozen=True)
class AdaDelta(Optimizer):
    """For each element::

        grad = clip(rescale_grad * grad, clip_gradient)
        square = rho * square + (1 - rho) * grad * grad
        delta = sqrt(moved + epsilon) / sqrt(square + epsilon) * grad
        moved = rho * moved + (1 - rho) * delta * delta
        weight = weight - learning_rate * (delta + wd * weight)

    Zeiler, arXiv 1212.5701, with numbers and formula of MXNet 1.9.1, which has no learning
    rate here (it ignores one): its formula is that of ``learning_rate`` 1, the default.
    ``decoupled_decay`` False adds ``wd * weight`` to the clipped gradient instead, as MXNet 2
    and PyTorch do.
    """

    learning_rate: float = 1.0
    rho: float = 0.9
    epsilon: float = 1e-5
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    decoupled_decay: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_unit("rho")
        self._check_not_negative("epsilon")

    def state_names(self) -> tuple[str, ...]:
        return "square", "moved"

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        square, moved = state
        rescale(grad, self.rescale_grad)
        clip(grad, self.clip_gradient)
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
