"""GroupAdaGrad: AdaGrad with one sum of squares for each row.

It is ``mx.optimizer.contrib``.

Pure formulas; see ``base.py`` for the contract. Sees whole rows (scope ``"row"``). Read next:
``adaptive.py``.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from kvstore.arrays.cpu.sums import Flat
from kvstore.errors import NotSupportedError, OptimizerParameterError
from kvstore.optimizer.arithmetic import descend, root
from kvstore.optimizer.base import ClippedOptimizer, Optimizer, State, register
from kvstore.optimizer.parameters import not_negative

__all__ = ["GroupAdaGrad"]


@register
@dataclasses.dataclass(frozen=True)
class GroupAdaGrad(ClippedOptimizer):
    """GroupAdaGrad. For each row, which is everything behind the first axis::

        grad = clip(rescale_grad * grad, clip_gradient)
        history = history + mean(grad * grad over the row)
        weight = weight - learning_rate * grad / sqrt(history + eps)

    With names, numbers and formula of MXNet 1.9.1 (``python/mxnet/optimizer/contrib.py``), which
    takes weights of two dimensions only; here each number of a 1-D weight is a row. As there,
    there is no decay: another ``wd`` than 0 is refused. The history of a row is kept beside each
    of its numbers, since stores cut states as they cut weights. Its dtype is the accumulation
    dtype, in which the mean is taken too.
    """

    scope = "row"
    positional = ("eps",)
    lazy_stypes = ("default", "row_sparse")
    states = ("history",)

    learning_rate: float = 0.01
    eps: float = not_negative(1e-5)

    _width: int = dataclasses.field(default=0, init=False, compare=False)
    """Numbers in a row, set by ``for_rows``; 0: not known yet."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wd != 0.0:
            raise OptimizerParameterError(
                f"GroupAdaGrad does not support weight decay, so wd must be 0, got {self.wd!r}; "
                "use AdaGrad, or add the decay to the gradient"
            )

    def for_rows(self, width: int) -> Optimizer:
        """Return itself, as in ``Optimizer``. Rows without numbers count as rows of one."""
        width = max(width, 1)
        if width == self._width:
            return self

        def with_width() -> Optimizer:
            own = self.replace()
            object.__setattr__(own, "_width", width)
            return own

        return self._variant(("width", width), with_width)

    def block_length(self, length: int, elements: int) -> int:
        """Return a multiple of the row's length, as in ``Optimizer``."""
        width = max(self._width, 1)
        return max(elements // width, 1) * width

    def update(self, weight: Flat, grad: Flat, state: State, count: int, scratch: Flat) -> None:
        if not self._width or len(grad) % self._width:
            raise NotSupportedError(
                f"groupadagrad needs whole rows of {self._width} numbers, got a gradient of "
                f"{len(grad)}; use the optimizer that optimizer.for_rows(width) returns"
            )
        (history,) = state
        self._clip(grad)
        np.multiply(grad, grad, out=scratch)
        means = scratch.reshape(-1, self._width).mean(axis=1, keepdims=True)
        by_row = history.reshape(-1, self._width)
        np.add(by_row, means, out=by_row)
        root(history, self.eps, True, scratch)
        np.divide(grad, scratch, out=grad)
        np.multiply(grad, self.rate(count), out=grad)
        descend(weight, grad)
