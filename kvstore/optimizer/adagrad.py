"""AdaGrad: steps divided by the root of the sum of all squared gradients.

Pure formulas; see ``base.py`` for the contract. Read next: ``rmsprop.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvstore.aggregate import Flat
from kvstore.optimizer.arithmetic import add_decay, clip, descend, rescale, root
from kvstore.optimizer.base import Optimizer, register


@register
@dataclasses.dataclass(frozen=True)
class AdaGrad(Optimizer):
    """For each element::

        grad = clip(rescale_grad * grad, clip_gradient)
        history = history + grad * grad
        weight = weight - learning_rate * (grad / sqrt(history + eps) + wd * weight)

    Duchi, Hazan and Singer (JMLR 12, 2011), with numbers, defaults and formula of MXNet 1.9.1.
    Two settings give PyTorch's: ``epsilon_inside`` False adds ``eps`` to the root,
    ``decoupled_decay`` False adds ``wd * weight`` to the clipped gradient instead.
    """

    learning_rate: float = 0.01
    eps: float = 1e-7
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    epsilon_inside: bool = True
    decoupled_decay: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_not_negative("eps")

    def state_names(self) -> tuple[str, ...]:
        return ("history",)

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        (history,) = state
        rescale(grad, self.rescale_grad)
        clip(grad, self.clip_gradient)
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
