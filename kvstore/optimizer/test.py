"""The optimizer of MXNet's store tests: add the gradient, remember the weight.

Pure formulas; see ``base.py`` for the contract. For tests of stores, not for training. Read
next: ``base.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvstore.arrays.cpu.sums import Flat
from kvstore.optimizer.arithmetic import add_decay, descend, rescale
from kvstore.optimizer.base import Optimizer, register


@register
@dataclasses.dataclass(frozen=True)
class Test(Optimizer):
    """For each element::

        weight = weight - learning_rate * (rescale_grad * grad + wd * weight)
        weight_copy = weight

    With the defaults this is MXNet 1.9.1's ``weight += rescale_grad * grad``, whatever its
    tests push; 1.9.1 ignores a learning rate and a decay. With them given it is the
    optimizer of the same name in MXNet 2, which keeps no state and whose defaults are 0.01
    and 0 (both ``python/mxnet/optimizer/optimizer.py``).
    """

    positional: ClassVar[tuple[str, ...]] = ()

    learning_rate: float = -1.0
    wd: float = 0.0
    rescale_grad: float = 1.0

    def state_names(self) -> tuple[str, ...]:
        return ("weight_copy",)

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        (copy,) = state
        rescale(grad, self.rescale_grad)
        add_decay(grad, weight, self.wd, scratch)
        rescale(grad, self.rate(count))
        descend(weight, grad)
        np.positive(weight, out=copy, dtype=copy.dtype)
