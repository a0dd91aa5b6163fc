"""Update weights by LARS, LAMB or LBSGD, which scale the step of each key.

LARS multiplies SGD's learning rate by the ratio of two norms. LAMB scales Adam's step to the norm
of the weight. LBSGD emulates large batches by adding gradients; one of its strategies uses norms.
All need whole keys (scope ``"key"``). Pure formulas; see ``base.py`` for the contract. Read next:
``updater.py``.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from kvstore.arrays.cpu.sums import BLOCK_ELEMENTS, Flat
from kvstore.arrays.keys import Key
from kvstore.optimizer.adam import BETAS, MomentsOptimizer, step_into
from kvstore.optimizer.arithmetic import add_decay, clip, descend, is_on_host, move, norm, rescale
from kvstore.optimizer.base import ClippedOptimizer, Optimizer, State, register
from kvstore.optimizer.parameters import not_negative, positive
from kvstore.optimizer.sgd import MomentumOptimizer

UNSCALED = ("gamma", "beta", "bias")
"""LARS does not scale the learning rate of keys with these name endings (MXNet 1.9.1)."""


@register
@dataclasses.dataclass(frozen=True)
class LARS(MomentumOptimizer):
    """LARS. For update number t (``count``) of a key, with norms over the whole key::

        grad = rescale_grad * grad
        ratio = eta * norm(weight) / (norm(grad) + wd * norm(weight) + eps)
        ratio = 1 if one of the norms is 0, or the name ends in gamma, beta or bias
        grad = clip(grad, clip_gradient) + wd * weight
        mom = m * mom - learning_rate(t) * ratio * grad
        weight = weight + mom

    You, Gitman and Ginsburg, arXiv 1708.03888, with names, defaults and formula of MXNet 1.9.1
    (``python/mxnet/optimizer/optimizer.py``, ``src/operator/contrib/multi_lars-inl.h``). m is
    ``momentum``; under a schedule with ``momentum_correction`` it is
    ``momentum * learning_rate(t) / learning_rate(t - 1)`` (arXiv 1706.02677, section 3, remark
    2), unless the divisor is 0. With momentum 0 there is no state. With ``adapt`` False the ratio
    is 1; ``for_key`` sets it to False for the names above.
    """

    scope = "key"
    positional = ("momentum", "lazy_update", "eta", "eps", "momentum_correction")

    eta: float = not_negative(0.001)
    eps: float = not_negative(0.0)
    momentum_correction: bool = True
    adapt: bool = True

    def for_key(self, key: Key, width: int | None = None) -> Optimizer:
        """Return the optimizer of a key, with ``adapt`` False for ``UNSCALED`` names."""
        found = super().for_key(key)
        is_unscaled = isinstance(key, str) and key.endswith(UNSCALED)
        if not (is_unscaled and isinstance(found, LARS) and found.adapt):
            return found
        changes = {"adapt": False, "lr_mult": (), "wd_mult": ()}
        return found._variant("plain", lambda: found.replace(**changes))

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        rate = self.rate(count)
        rescale(grad, self.rescale_grad)
        ratio = self._ratio(norm(weight), norm(grad)) if self.adapt else 1.0
        clip(grad, self.clip_gradient)
        add_decay(grad, weight, self.wd, scratch)
        np.multiply(grad, rate * ratio, out=grad)
        if self.momentum == 0.0:
            descend(weight, grad)
        else:
            move(weight, grad, state[0], self._momentum(rate, count))

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


@register
@dataclasses.dataclass(frozen=True)
class LAMB(MomentsOptimizer):
    """LAMB. For update number t (``count``) of a key, with norms over the whole key::

        grad = clip(rescale_grad * grad, clip_gradient)
        mean = beta1 * mean + (1 - beta1) * grad
        var = beta2 * var + (1 - beta2) * grad * grad
        step = mean / (1 - beta1 ** t) / (sqrt(var / (1 - beta2 ** t)) + epsilon) + wd * weight
        size = min(max(norm(weight), lower_bound), upper_bound)
        ratio = size / norm(step), or 1 if one of the two is 0
        weight = weight - learning_rate * ratio * step

    You et al., arXiv 1904.00962, algorithm 2, with names, defaults and formula of MXNet 1.9.1
    (``LambUpdatePhaseOneKernel`` and ``...TwoKernel`` in ``src/operator/optimizer_op-inl.h``).
    With ``bias_correction`` False, the step leaves out the two divisors (1 - beta ** t). A
    bound of None, 0 or less means no limit.
    """

    scope = "key"
    positional = (*BETAS, "lower_bound", "upper_bound", "bias_correction")

    epsilon: float = not_negative(1e-6)
    lower_bound: float | None = None
    upper_bound: float | None = None
    bias_correction: bool = True

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        # In blocks on the host, since the caller passes the whole key and memory is slow.
        step = BLOCK_ELEMENTS if is_on_host(weight) else max(len(weight), 1)
        for start in range(0, len(weight), step):
            block = slice(start, start + step)
            means = [array[block] for array in state]
            self._step(weight[block], grad[block], means, count, scratch[block])
        rate = self.rate(count) * self._ratio(norm(weight), norm(grad))
        np.multiply(grad, rate, out=grad)
        descend(weight, grad)

    def _step(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        """Replace the gradient by the step, before scaling."""
        self._clip(grad)
        self._average(grad, state, scratch)
        mean, var = state
        factor, correction = self._corrected(1.0, count) if self.bias_correction else (1.0, 1.0)
        step_into(grad, mean, var, factor, self.epsilon * correction, scratch)
        add_decay(grad, weight, self.wd, scratch)

    def _ratio(self, weight_norm: float, step_norm: float) -> float:
        size = weight_norm
        if self.lower_bound is not None and self.lower_bound > 0.0:
            size = max(size, self.lower_bound)
        if self.upper_bound is not None and self.upper_bound > 0.0:
            size = min(size, self.upper_bound)
        return 1.0 if size == 0.0 or step_norm == 0.0 else size / step_norm


_LEAST, _MOST = 0.01, 100.0
"""The limits of the factor of the strategy ``"lars"``."""


@register
@dataclasses.dataclass(frozen=True)
class LBSGD(ClippedOptimizer):
    """LBSGD: large-batch SGD. For update t (``count``) of a key::

        sum = sum + grad
        if batch_scale divides n (else nothing more happens)
            grad = sum / batch_scale
            rate = learning_rate * factor(n)
            grad = clip(rescale_grad * grad, clip_gradient) + wd * weight
            mom = momentum * mom - rate * grad
            weight = weight + mom
            sum = 0

    The factor grows from 1 to ``batch_scale`` during ``warmup_epochs * updates_per_epoch`` updates
    and then stays there. If p is the fraction of these updates that are done, the growth follows p
    (``warmup_strategy="linear"``), p * p (``"power2"``) or sqrt(p) (``"sqrt"``); with an unknown
    name the factor is 1 until the end. With ``"lars"`` the factor is
    ``norm(weight) / sqrt(norm(grad) ** 2 + wd * norm(weight) ** 2 + 1e-18)``, with norms over the
    whole key, limited to 0.01 to 100.

    Names, defaults and formula are those of MXNet 1.9.1 (``python/mxnet/optimizer/optimizer.py``).
    As in MXNet, a schedule gives the rate of the previous update, and ``num_epochs`` has no
    effect. With momentum 0 there is no ``mom``.
    """

    scope = "key"
    positional = (
        "momentum",
        "multi_precision",
        "warmup_strategy",
        "warmup_epochs",
        "batch_scale",
        "updates_per_epoch",
        "begin_epoch",
        "num_epochs",
    )

    learning_rate: float = 0.01
    momentum: float = 0.0
    warmup_strategy: str = "linear"
    warmup_epochs: int = not_negative(5)
    batch_scale: int = positive(1)
    updates_per_epoch: int = not_negative(32)
    begin_epoch: int = not_negative(0)
    num_epochs: int = not_negative(60)

    def state_names(self) -> tuple[str, ...]:
        """Return ``sum`` if gradients are added up, and ``mom`` with momentum."""
        adds, moves = self.batch_scale != 1, self.momentum != 0.0
        return ("sum",) * adds + ("mom",) * moves

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        number = self.begin_epoch * self.updates_per_epoch + count
        if self.batch_scale != 1:
            total = state[0]
            if number % self.batch_scale == 1:
                np.positive(grad, out=total)
            else:
                np.add(total, grad, out=total)
            if number % self.batch_scale:
                return
            np.divide(total, float(self.batch_scale), out=grad)
        factor = self._adapted(weight, grad) if self._adapts else self._warmed_up(number)
        self._clip_and_decay(grad, weight, scratch)
        np.multiply(grad, self.rate(count - 1) * factor, out=grad)
        if self.momentum == 0.0:
            descend(weight, grad)
        else:
            move(weight, grad, state[-1], self.momentum)

    @property
    def _adapts(self) -> bool:
        return self.warmup_strategy == "lars"

    def _adapted(self, weight: Flat, grad: Flat) -> float:
        of_weight, of_grad = norm(weight) ** 2, norm(grad) ** 2
        divisor = of_grad + self.wd * of_weight + 1e-18
        return min(max(math.sqrt(of_weight / divisor), _LEAST), _MOST)

    def _warmed_up(self, number: int) -> float:
        num_updates = self.warmup_epochs * self.updates_per_epoch
        if number >= num_updates:
            return float(self.batch_scale)
        if num_updates <= 1:
            return 1.0
        share = number / num_updates
        grown = {"linear": share, "power2": share * share, "sqrt": math.sqrt(share)}
        return 1.0 + (self.batch_scale - 1) * grown.get(self.warmup_strategy, 0.0)
