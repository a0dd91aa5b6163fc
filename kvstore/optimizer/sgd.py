"""Optimizers SGD, NAG, Signum, SGLD, DCASGD and MXNet's ``test``.

SGD may have momentum, in MXNet's form or PyTorch's (TorchSGD); NAG has Nesterov's. Signum and
signSGD make steps of equal size in the direction of a sign. SGLD adds noise, so that weights are
samples of a posterior. The noise depends only on the seed, the key, the number of the update and
the position of an element (scope ``"key"``), so a restarted server computes the same noise. DCASGD
corrects gradients in asynchronous stores for the updates that other workers made meanwhile. Pure
formulas; see ``base.py`` for the contract. Read next: ``layerwise.py``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import numpy as np

from kvstore.arrays.cpu import kernels
from kvstore.arrays.cpu.sums import BLOCK_ELEMENTS, Flat
from kvstore.arrays.keys import Key
from kvstore.optimizer.arithmetic import add_decay, average, descend, is_on_host, move, rescale
from kvstore.optimizer.base import ClippedOptimizer, Optimizer, State, register
from kvstore.optimizer.parameters import not_negative, unit


@dataclasses.dataclass(frozen=True, repr=False)
class MomentumOptimizer(ClippedOptimizer):
    """An optimizer that keeps a velocity, ``mom``, unless its ``momentum`` is 0."""

    learning_rate: float = 0.01
    momentum: float = 0.0

    def state_names(self) -> tuple[str, ...]:
        """Return ``mom``, the velocity, or no name if momentum is 0."""
        return ("mom",) if self.momentum != 0.0 else ()


@register
@dataclasses.dataclass(frozen=True)
class SGD(MomentumOptimizer):
    """Stochastic gradient descent. For each element::

        grad = clip(rescale_grad * grad, clip_gradient) + wd * weight
        mom = momentum * mom - learning_rate * grad
        weight = weight + mom

    Clipping comes before the decay. With momentum 0 there is no state and
    ``weight = weight - learning_rate * grad``. Numbers, defaults and formula are those of
    MXNet 1.9.1 (``python/mxnet/optimizer/optimizer.py``, ``SGDMomKernel`` in
    ``src/operator/optimizer_op-inl.h``). The caller chooses ``rescale_grad``: stores add gradients
    and never average them.
    """

    positional = ("momentum", "lazy_update")
    lazy_stypes = ("default", "row_sparse")

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        self._clip_and_decay(grad, weight, scratch)
        np.multiply(grad, self.rate(count), out=grad)
        if self.momentum == 0.0:
            descend(weight, grad)
        else:
            move(weight, grad, state[0], self.momentum)


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
class NAG(MomentumOptimizer):
    """Nesterov's accelerated gradient. For each element::

        grad = clip(rescale_grad * grad, clip_gradient) + wd * weight
        mom = momentum * mom - learning_rate * grad
        weight = weight + momentum * mom - learning_rate * grad

    With momentum 0 it is SGD, without state. Formula and defaults of MXNet 1.9.1
    (``NAGMomKernel`` in ``src/operator/optimizer_op-inl.h``); the form is that of Bengio et al.
    (arXiv 1212.0901, section 3.5) and, at a constant learning rate, PyTorch's.
    """

    positional = ("momentum",)

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        self._clip_and_decay(grad, weight, scratch)
        np.multiply(grad, self.rate(count), out=grad)
        if self.momentum != 0.0:
            (velocity,) = state
            np.multiply(velocity, self.momentum, out=velocity)
            np.subtract(velocity, grad, out=velocity)
            np.multiply(velocity, self.momentum, out=scratch)
            np.subtract(grad, scratch, out=grad)
        descend(weight, grad)


@register
@dataclasses.dataclass(frozen=True)
class TorchSGD(MomentumOptimizer):
    """PyTorch's SGD. For each element::

        grad = clip(rescale_grad * grad, clip_gradient) + wd * weight
        mom = momentum * mom + (1 - dampening) * grad
        weight = weight - learning_rate * mom

    With ``nesterov`` the last line subtracts ``learning_rate * (grad + momentum * mom)``. The
    current rate multiplies the whole velocity; in ``SGD`` each gradient in the velocity keeps the
    rate of its own update. The first ``mom`` is ``grad``, as in ``torch.optim.SGD``.
    """

    lazy_stypes = ("default", "row_sparse")

    dampening: float = 0.0
    nesterov: bool = False

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        self._clip_and_decay(grad, weight, scratch)
        step = grad
        if self.momentum != 0.0:
            step = velocity = state[0]
            np.multiply(velocity, self.momentum, out=velocity)
            fresh = grad
            if self.dampening != 0.0 and count > 1:
                fresh = np.multiply(grad, 1.0 - self.dampening, out=scratch)
            np.add(velocity, fresh, out=velocity)
            if self.nesterov:
                np.multiply(velocity, self.momentum, out=scratch)
                step = np.add(grad, scratch, out=grad)
        np.multiply(step, self.rate(count), out=grad)
        descend(weight, grad)


@kernels.formula_of(TorchSGD)
def _compiled_but_for_nesterov(sgd: TorchSGD, count: int) -> kernels.Formula | None:
    if sgd.momentum != 0.0 and (sgd.nesterov or sgd.dampening != 0.0):
        return None
    return kernels.Formula(
        kernels.SGD if sgd.momentum == 0.0 else kernels.TORCH_MOMENTUM,
        rescale=sgd.rescale_grad,
        limit=max(sgd.clip_gradient or 0.0, 0.0),
        decay=sgd.wd,
        rate=sgd.rate(count),
        momentum=sgd.momentum,
    )


@register
@dataclasses.dataclass(frozen=True)
class Signum(MomentumOptimizer):
    """The sign of a running mean. For each element::

        grad = clip(rescale_grad * grad, clip_gradient) + wd * weight
        mom = momentum * mom + (1 - momentum) * grad
        weight = (1 - learning_rate * wd_lh) * weight - learning_rate * sign(mom)

    Bernstein et al., arXiv 1802.04434, algorithm 2, with numbers and defaults of MXNet 1.9.1
    (whose state is ``-mom``); ``wd_lh`` is a decoupled decay (arXiv 1711.05101). With momentum
    0 it is ``SignSGD`` without state, as in MXNet; then ``wd`` is the decoupled decay, and
    ``wd_lh`` has no effect. The sign of NaN is NaN.
    """

    positional = ("learning_rate", "momentum", "wd_lh")
    rate_counts = "always"

    momentum: float = unit(0.9)
    wd_lh: float = 0.0

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        rate = self.rate(count)
        if self.momentum == 0.0:
            rescale(grad, self.rescale_grad)
            step_by_sign(weight, grad, grad, rate, self.wd, scratch)
        else:
            self._clip_and_decay(grad, weight, scratch)
            average(state[0], grad, self.momentum, scratch)
            step_by_sign(weight, state[0], grad, rate, self.wd_lh, scratch)


@register
@dataclasses.dataclass(frozen=True)
class SignSGD(Optimizer):
    """The sign of the gradient. For each element::

        weight = (1 - learning_rate * wd) * weight - learning_rate * sign(rescale_grad * grad)

    Bernstein et al., arXiv 1802.04434, algorithm 1; the operator ``signsgd_update`` of MXNet
    1.9.1, which MXNet's ``Signum`` uses with momentum 0. Only the sign of ``rescale_grad`` matters,
    and clipping would have no effect.
    """

    learning_rate: float = 0.01
    wd: float = 0.0
    rescale_grad: float = 1.0

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        rescale(grad, self.rescale_grad)
        step_by_sign(weight, grad, grad, self.rate(count), self.wd, scratch)


def step_by_sign(
    weight: Flat, direction: Flat, step: Flat, rate: float, wd: float, scratch: Flat
) -> None:
    """Set weight -= rate * (sign(direction) + wd * weight).

    Overwrites ``step`` and ``scratch``.
    """
    np.sign(direction, out=step)
    np.multiply(step, rate, out=step)
    add_decay(step, weight, rate * wd, scratch)
    descend(weight, step)


@register
@dataclasses.dataclass(frozen=True)
class SGLD(ClippedOptimizer):
    """Stochastic gradient Langevin dynamics. For each element::

        grad = clip(rescale_grad * grad, clip_gradient)
        weight = weight - learning_rate / 2 * (grad + wd * weight)
        weight = weight + sqrt(learning_rate) * noise

    noise is normal, of mean 0 and variance 1, drawn anew for each element and update. Welling and
    Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics" (ICML 2011), with names,
    defaults and formula of MXNet 1.9.1 (``python/mxnet/optimizer/optimizer.py``), which cites a
    later paper. MXNet uses the generator of ``mx.random.seed``; here the noise depends on ``seed``.
    The noise is drawn on the host, by NumPy's Philox, also for weights on a GPU.
    """

    scope = "key"
    positional = ()

    learning_rate: float = not_negative(0.01)
    seed: int = not_negative(0)

    _stream: int = dataclasses.field(default=0, init=False, compare=False)
    """A number made from the key, set by ``for_key``, so that keys get different noise."""

    def for_key(self, key: Key, width: int | None = None) -> Optimizer:
        """Return the optimizer of a key, with the key's own stream of noise."""
        found = super().for_key(key)

        def with_stream() -> Optimizer:
            own = found.replace(lr_mult=(), wd_mult=())
            digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
            object.__setattr__(own, "_stream", int.from_bytes(digest, "big"))
            return own

        return found._variant(("stream", key), with_stream)

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        rate = self.rate(count)
        self._clip_and_decay(grad, weight, scratch)
        np.multiply(grad, rate / 2, out=grad)
        descend(weight, grad)
        if rate == 0.0:
            return
        generator = self._generator(count)
        for start in range(0, len(weight), BLOCK_ELEMENTS):
            _draw(generator, scratch[start : start + BLOCK_ELEMENTS])
        np.multiply(scratch, math.sqrt(rate), out=scratch)
        np.add(weight, scratch, out=weight)

    def _generator(self, count: int) -> np.random.Generator:
        entropy = [self.seed, self._stream, count]
        return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))


def _draw(generator: np.random.Generator, out: Any) -> None:
    """Fill a block on the host or a GPU with the same normal numbers."""
    if is_on_host(out):
        generator.standard_normal(dtype=out.dtype, out=out)
    else:
        out.set(generator.standard_normal(len(out), dtype=out.dtype))


@register
@dataclasses.dataclass(frozen=True)
class DCASGD(ClippedOptimizer):
    """Delay-compensated asynchronous SGD. For each element::

        grad = clip(rescale_grad * grad, clip_gradient)
        grad = grad + wd * weight + lamda * grad * grad * moved
        mom = momentum * mom - learning_rate * grad
        before, weight = weight, weight + mom
        moved = weight - before

    Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation" (arXiv
    1609.08326), with names, defaults and formula of MXNet 1.9.1
    (``python/mxnet/optimizer/optimizer.py``). The paper compares the weight with the one that the
    worker had pulled. This class, like MXNet, compares it with the weight before the last update.
    The state ``moved`` is the difference of the two; it begins at zero. MXNet's momentum raises
    ``ValueError`` for keys of more than one element; here it works as in the formula.
    """

    positional = ("momentum", "lamda")

    learning_rate: float = 0.01
    momentum: float = 0.0
    lamda: float = 0.04

    def state_names(self) -> tuple[str, ...]:
        """Return ``moved`` (the last update) and, with momentum, ``mom`` (the velocity)."""
        return ("moved",) if self.momentum == 0.0 else ("moved", "mom")

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        moved = state[0]
        self._clip(grad)
        np.multiply(grad, self.lamda, out=scratch)
        np.multiply(scratch, grad, out=scratch)
        np.multiply(scratch, moved, out=moved)
        add_decay(grad, weight, self.wd, scratch)
        np.add(grad, moved, out=grad)
        np.multiply(grad, -self.rate(count), out=grad)
        if self.momentum != 0.0:
            velocity = state[1]
            np.multiply(velocity, self.momentum, out=velocity)
            np.add(velocity, grad, out=velocity)
            np.positive(velocity, out=grad)
        np.positive(weight, out=scratch)
        np.add(weight, grad, out=weight)
        np.subtract(weight, scratch, out=moved)


@register
@dataclasses.dataclass(frozen=True)
class Test(Optimizer):
    """The rule of MXNet's store tests. For each element::

        weight = weight - learning_rate * (rescale_grad * grad + wd * weight)
        weight_copy = weight

    With the defaults this is MXNet 1.9.1's ``weight += rescale_grad * grad``; MXNet 1.9.1 ignores
    a learning rate and a decay. If they are given, it is the optimizer of this name in MXNet 2,
    which keeps no state and whose defaults are 0.01 and 0 (both in
    ``python/mxnet/optimizer/optimizer.py``).
    """

    positional = ()
    states = ("weight_copy",)

    learning_rate: float = -1.0
    wd: float = 0.0
    rescale_grad: float = 1.0

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        (copy,) = state
        rescale(grad, self.rescale_grad)
        add_decay(grad, weight, self.wd, scratch)
        rescale(grad, self.rate(count))
        descend(weight, grad)
        np.positive(weight, out=copy, dtype=copy.dtype)
