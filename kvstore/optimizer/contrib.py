"""GroupAdaGrad: AdaGrad with one sum of squares for each row, where MXNet has it.

Pure formulas; see ``base.py`` for the contract. Sees whole rows (scope ``"row"``). Read next:
``adaptive.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from kvstore.arrays.cpu.sums import Flat
from kvstore.errors import NotSupportedError, OptimizerParameterError
from kvstore.optimizer.arithmetic import clip, descend, rescale, root
from kvstore.optimizer.base import Optimizer, register

__all__ = ["GroupAdaGrad"]


@register
@dataclasses.dataclass(frozen=True)
class GroupAdaGrad(Optimizer):
    """For each row, which is everything behind the first axis::

        grad = clip(rescale_grad * grad, clip_gradient)
        history = history + mean(grad * grad over the row)
        weight = weight - learning_rate * grad / sqrt(history + eps)

    With names, numbers and formula of MXNet 1.9.1 (``python/mxnet/optimizer/contrib.py``), which
    takes weights of two dimensions only; here each number of a 1-D weight is a row. As there,
    there is no decay: another ``wd`` than 0 is refused. The history of a row is kept beside each
    of its numbers, since stores cut states as they cut weights. Its dtype is the accumulation
    dtype, in which the mean is taken too.
    """

    scope: ClassVar[str] = "row"
    positional: ClassVar[tuple[str, ...]] = ("eps",)
    lazy_stypes: ClassVar[tuple[str, ...]] = ("default", "row_sparse")

    learning_rate: float = 0.01
    eps: float = 1e-5
    wd: float = 0.0
    rescale_grad: float = 1.0
    clip_gradient: float | None = None

    _width: int = dataclasses.field(default=0, init=False, compare=False)
    """Numbers in a row, set by ``for_rows``; 0: not known yet."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_not_negative("eps")
        if self.wd != 0.0:
            raise OptimizerParameterError(
                f"GroupAdaGrad has no weight decay, so wd must be 0, got {self.wd!r}; use AdaGrad, "
                "or add the decay to the gradient"
            )

    def for_rows(self, width: int) -> Optimizer:
        """As in ``Optimizer``. Rows without numbers count as rows of one."""
        width = max(width, 1)
        if width == self._width:
            return self
        own = self._variants.get(("width", width))
        if own is None:
            own = self.replace()
            object.__setattr__(own, "_width", width)
            own = self._variants.setdefault(("width", width), own)
        result: Optimizer = own
        return result

    def block_length(self, length: int, elements: int) -> int:
        """As in ``Optimizer``: a multiple of the row's length."""
        width = max(self._width, 1)
        return max(elements // width, 1) * width

    def state_names(self) -> tuple[str, ...]:
        return ("history",)

    def update(
        self, weight: Flat, grad: Flat, state: Sequence[Flat], count: int, scratch: Flat
    ) -> None:
        if not self._width or len(grad) % self._width:
            raise NotSupportedError(
                f"groupadagrad updates whole rows, got {len(grad)} numbers and rows of "
                f"{self._width}; optimizer.for_rows(width) gives one that knows the rows"
            )
        (history,) = state
        rescale(grad, self.rescale_grad)
        clip(grad, self.clip_gradient)
        np.multiply(grad, grad, out=scratch)
        means = scratch.reshape(-1, self._width).mean(axis=1, keepdims=True)
        by_row = history.reshape(-1, self._width)
        np.add(by_row, means, out=by_row)
        root(history, self.eps, True, scratch)
        np.divide(grad, scratch, out=grad)
        np.multiply(grad, self.rate(count), out=grad)
        descend(weight, grad)
