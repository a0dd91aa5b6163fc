"""Signum and signSGD: steps of one size in the direction of a sign.

Pure formulas; see ``base.py`` for the contract. Read next: ``lars.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvstore.aggregate import Flat
from kvstore.optimizer.arithmetic import add_decay, average, clip, descend, rescale
from kvstore.optimizer.base import Optimizer, register


@register
@dataclasses.dataclass(frozen=True)
class Signum(Optimizer):
    """The sign of a running mean. For each element::

        grad = clip(rescale_grad * grad, clip_gradient) + wd * weight
        mom = momentum * mom + (1 - momentum) * grad
        weight = (1 - learning_rate * wd_lh) * weight - learning_rate * sign(mom)

    Bernstein et al., arXiv 1802.04434, algorithm 2, with numbers and defaults of MXNet 1.9.1
    (whose state is ``-mom``); ``wd_lh`` is a decoupled decay (arXiv 1711.05101). With momentum
    0 there is no state and it is ``SignSGD``, as in MXNet: ``wd`` is the decoupled decay then,
    and ``wd_lh`` has no effect. The sign of NaN is NaN.
    """

    learning_rate: float = 0.01
    momentum: float = 0.9
    wd_lh: float = 0.0
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_unit("momentum")

    def state_names(self) -> tuple[str, ...]:
        """The mean ``mom``; nothing when momentum is 0."""
        return ("mom",) if self.momentum != 0.0 else ()

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        rate = self.rate(count)
        rescale(grad, self.rescale_grad)
        if self.momentum == 0.0:
            step_by_sign(weight, grad, grad, rate, self.wd, scratch)
            return
        (mean,) = state
        clip(grad, self.clip_gradient)
        add_decay(grad, weight, self.wd, scratch)
        average(mean, grad, self.momentum, scratch)
        step_by_sign(weight, mean, grad, rate, self.wd_lh, scratch)


@register
@dataclasses.dataclass(frozen=True)
class SignSGD(Optimizer):
    """The sign of the gradient. For each element::

        weight = (1 - learning_rate * wd) * weight - learning_rate * sign(rescale_grad * grad)

    Bernstein et al., arXiv 1802.04434, algorithm 1; the operator ``signsgd_update`` of MXNet
    1.9.1, which is what its ``Signum`` does with momentum 0. Of ``rescale_grad`` only the sign
    counts, and clipping would change nothing.
    """

    learning_rate: float = 0.01
    wd: float = 0.0
    rescale_grad: float = 1.0

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        rescale(grad, self.rescale_grad)
        step_by_sign(weight, grad, grad, self.rate(count), self.wd, scratch)


def step_by_sign(
    weight: Flat, direction: Flat, step: Flat, rate: float, wd: float, scratch: Flat
) -> None:
    """weight -= rate * (sign(direction) + wd * weight); overwrites ``step`` and ``scratch``."""
    np.sign(direction, out=step)
    np.multiply(step, rate, out=step)
    add_decay(step, weight, rate * wd, scratch)
    descend(weight, step)
