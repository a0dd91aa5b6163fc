"""GroupAdaGrad: AdaGrad with one sum of squares for each row.

This module is also ``mx.optimizer.contrib``.

Pure formulas; see ``base.py`` for the contract. It gets whole rows (scope ``"row"``). Read next:
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
    """GroupAdaGrad. For each row (all axes of a key but the first)::

        grad = clip(rescale_grad * grad, clip_gradient)
        history = history + mean(grad * grad over the row)
        weight = weight - learning_rate * grad / sqrt(history + eps)

    Names, numbers and formula are those of MXNet 1.9.1 (``python/mxnet/optimizer/contrib.py``),
    which accepts only weights of two dimensions; here each number of a 1-D weight is a row. As in
    MXNet, there is no decay: ``wd`` must be 0. Each number of a row has its own copy of the row's
    history, since stores split states in the same way as weights. History and mean have the
    accumulation dtype.
    """

    scope = "row"
    positional = ("eps",)
    lazy_stypes = ("default", "row_sparse")
    states = ("history",)

    learning_rate: float = 0.01
    eps: float = not_negative(1e-5)

    _width: int = dataclasses.field(default=0, init=False, compare=False)
    """The length of a row, set by ``for_rows``; 0 means not known yet."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.wd != 0.0:
            raise OptimizerParameterError(
                f"GroupAdaGrad does not support weight decay, so wd must be 0, got {self.wd!r}; "
                "use AdaGrad, or add the decay to the gradient"
            )

    def for_rows(self, width: int) -> Optimizer:
        """Return the optimizer for rows of this width; a width of 0 is treated as 1."""
        width = max(width, 1)
        if width == self._width:
            return self

        def with_width() -> Optimizer:
            own = self.replace()
            object.__setattr__(own, "_width", width)
            return own

        return self._variant(("width", width), with_width)

    def block_length(self, length: int, elements: int) -> int:
        """Return how many elements an update gets: a multiple of the row's length."""
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
