"""LARS: SGD whose learning rate is scaled for each key by the ratio of two norms.

Pure formulas; see ``base.py`` for the contract. Sees whole keys (scope ``"key"``). Read next:
``lamb.py``, which does the same for Adam.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvstore.aggregate import Flat
from kvstore.optimizer.arithmetic import add_decay, clip, descend, norm, rescale
from kvstore.optimizer.base import Optimizer, register
from kvstore.optimizer.fields import Key

UNSCALED = ("gamma", "beta", "bias")
"""Keys whose names end so have a learning rate that is not scaled (MXNet 1.9.1)."""


@register
@dataclasses.dataclass(frozen=True)
class LARS(Optimizer):
    """For update number t (``count``) of a key, with norms over the whole key::

        grad = rescale_grad * grad
        ratio = eta * norm(weight) / (norm(grad) + wd * norm(weight) + eps)
        ratio = 1 where one of the norms is 0, or the name ends in gamma, beta or bias
        grad = clip(grad, clip_gradient) + wd * weight
        mom = m * mom - learning_rate(t) * ratio * grad
        weight = weight + mom

    You, Gitman and Ginsburg, arXiv 1708.03888, with names, defaults and formula of MXNet 1.9.1
    (``python/mxnet/optimizer/optimizer.py``, ``src/operator/contrib/multi_lars-inl.h``). m is
    ``momentum``; under a schedule with ``momentum_correction`` it is
    ``momentum * learning_rate(t) / learning_rate(t - 1)`` (arXiv 1706.02677, section 3, remark
    2), where that divisor is not 0. With momentum 0 there is no state. ``adapt`` False makes
    the ratio 1; ``for_key`` sets it for the names above.
    """

    scope: ClassVar[str] = "key"

    learning_rate: float = 0.01
    momentum: float = 0.0
    eta: float = 0.001
    eps: float = 0.0
    momentum_correction: bool = True
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None
    adapt: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_not_negative("eta", "eps")

    def for_key(self, key: Key) -> Optimizer:
        """As in ``Optimizer``; keys named like biases get one that does not adapt."""
        found = super().for_key(key)
        is_unscaled = isinstance(key, str) and key.endswith(UNSCALED)
        if not (is_unscaled and isinstance(found, LARS) and found.adapt):
            return found
        plain = found._variants.get("plain")
        if plain is None:
            changes = {"adapt": False, "lr_mult": (), "wd_mult": ()}
            plain = found._variants.setdefault("plain", found.replace(**changes))
        result: Optimizer = plain
        return result

    def state_names(self) -> tuple[str, ...]:
        """The velocity ``mom``; nothing when momentum is 0."""
        return ("mom",) if self.momentum != 0.0 else ()

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        rate = self.rate(count)
        rescale(grad, self.rescale_grad)
        ratio = self._ratio(norm(weight), norm(grad)) if self.adapt else 1.0
        clip(grad, self.clip_gradient)
        add_decay(grad, weight, self.wd, scratch)
        np.multiply(grad, rate * ratio, out=grad)
        if self.momentum == 0.0:
            descend(weight, grad)
            return
        (velocity,) = state
        np.multiply(velocity, self._momentum(rate, count), out=velocity)
        np.subtract(velocity, grad, out=velocity)
        np.add(weight, velocity, out=weight, dtype=grad.dtype)

    def _ratio(self, weight_norm: float, grad_norm: float) -> float:
        divisor = grad_norm + self.wd * weight_norm + self.eps
        if weight_norm > 0.0 and grad_norm > 0.0 and divisor != 0.0:
            return self.eta * weight_norm / divisor
        return 1.0

    def _momentum(self, rate: float, count: int) -> float:
        if self.lr_scheduler is None or not self.momentum_correction or count < 2:
            return self.momentum
        before = self.rate(count - 1)
        return self.momentum * (rate / before) if before != 0.0 else self.momentum
