"""Your own optimizer: Lion (X. Chen et al., arXiv 2302.06675, algorithm 2).

The workers' script and the servers import this module; ``register`` makes the class known under
its name. Workers send only the name and numbers. ``kvstore/optimizer/base.py`` says what the
methods must do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.optimizer import Optimizer, register


@register
@dataclasses.dataclass(frozen=True)
class Lion(Optimizer):
    """For each element::

    weight = weight - learning_rate * (sign(beta1 * m + (1 - beta1) * grad) + wd * weight)
    m = beta2 * m + (1 - beta2) * grad
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    wd: float = 0.0
    rescale_grad: float = 1.0

    def state_names(self) -> tuple[str, ...]:
        return ("m",)

    def update(
        self, weight: Any, grad: Any, state: Sequence[Any], count: int, scratch: Any
    ) -> None:
        (momentum,) = state
        np.multiply(grad, self.rescale_grad, out=grad)
        np.subtract(momentum, grad, out=scratch)
        np.multiply(scratch, self.beta1, out=scratch)
        np.add(scratch, grad, out=scratch)  # beta1 * m + (1 - beta1) * grad
        np.sign(scratch, out=scratch)
        np.subtract(momentum, grad, out=momentum)
        np.multiply(momentum, self.beta2, out=momentum)
        np.add(momentum, grad, out=momentum)
        np.multiply(weight, self.wd, out=grad, dtype=grad.dtype)
        np.add(scratch, grad, out=scratch)
        np.multiply(scratch, self.rate(count), out=scratch)
        np.subtract(weight, scratch, out=weight, dtype=scratch.dtype)
