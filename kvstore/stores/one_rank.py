"""``OneRank``: the collective calls of a process without peers and servers.

Stores of one process use it, and so does ``kvstore.horovod`` in a script started as ``python
train.py``. It has the methods of ``pslite.Communicator`` that they need, and returns futures that
are already done. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from kvstore.arrays.dtypes import check_dtype
from kvstore.errors import ArgumentValueError, NotSupportedError
from pslite.collective.sums import check_op
from pslite.future import Future, completed

Array = np.ndarray[Any, Any]

_ALONE = (
    "a local or device store has one worker, and none to send to or to receive from: create a "
    "dist_sync store in a job of several workers"
)


class OneRank:
    """A group of one rank."""

    rank = 0
    size = 1
    ranks = (0,)

    def all_reduce(
        self,
        array: Array,
        op: str = "sum",
        *,
        factor: float | None = None,
        out: Array | None = None,
        name: str | None = None,
    ) -> Future[Array]:
        """Return a copy, or fill ``out``; ``premul_sum`` multiplies by ``factor``."""
        check_dtype(array.dtype)
        check_op(op, array.dtype.name, factor)
        result = np.empty(array.shape, array.dtype) if out is None else out
        if factor is not None:
            wide = np.result_type(array.dtype, np.float32)  # 16-bit floats are rounded once
            array = array.astype(wide) * wide.type(factor)
        np.copyto(result, array, casting="unsafe")
        return completed(result)

    def broadcast(self, array: Array, root: int, *, name: str | None = None) -> Future[Array]:
        """Return the array."""
        check_dtype(array.dtype)
        if root != 0:
            raise ArgumentValueError(f"root must be 0, since there is one rank, got {root}")
        return completed(array)

    def all_gather(self, array: Array, *, name: str | None = None) -> Future[list[Array]]:
        """Return a copy, in a list."""
        check_dtype(array.dtype)
        return completed([array.copy()])

    def reduce_scatter(
        self, arrays: Sequence[Array], op: str = "sum", **options: Any
    ) -> Future[Array]:
        """Reduce the one array as ``all_reduce`` does."""
        if len(arrays) != 1:
            raise ArgumentValueError(f"expected 1 array for the one rank, got {len(arrays)}")
        return self.all_reduce(arrays[0], op, **options)

    def all_to_all(
        self, arrays: Sequence[Array], *, name: str | None = None
    ) -> Future[list[Array]]:
        """Return a copy of the one array, in a list."""
        return self.all_gather(arrays[0])

    def barrier(self, *, name: str | None = None) -> Future[None]:
        """Return at once."""
        return completed(None)

    def join(self) -> Future[int]:
        """Return rank 0, the last one to join."""
        return completed(0)

    def send(self, array: Array, to: int, tag: int = 0) -> NoReturn:
        """Raise ``NotSupportedError``."""
        raise NotSupportedError(_ALONE)

    def recv(self, source: int | None = None, tag: int = 0) -> NoReturn:
        """Raise ``NotSupportedError``."""
        raise NotSupportedError(_ALONE)

    def close(self) -> None:
        """Do nothing: the group has nothing that must be ended."""
