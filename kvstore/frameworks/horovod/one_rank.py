"""``OneRank``: the collective calls of a process that has no peers, without servers.

A script that is started as ``python train.py`` runs with it. It has the methods of
``pslite.Communicator`` that this package uses, and returns futures that are done. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from kvstore.arrays.dtypes import check_dtype
from pslite import Future

T = TypeVar("T")
Array = np.ndarray[Any, Any]


class OneRank:
    """A group of one rank."""

    rank = 0
    size = 1
    ranks = (0,)

    def all_reduce(
        self, array: Array, op: str = "sum", *, out: Array | None = None, name: str | None = None
    ) -> Future[Array]:
        """Return a copy, or fill ``out``."""
        check_dtype(array.dtype)
        if out is None:
            return _done(array.copy())
        np.copyto(out, array)
        return _done(out)

    def broadcast(self, array: Array, root: int, *, name: str | None = None) -> Future[Array]:
        """Return the array."""
        check_dtype(array.dtype)
        return _done(array)

    def all_gather(self, array: Array, *, name: str | None = None) -> Future[list[Array]]:
        """Return a copy, in a list."""
        return self.all_reduce(array).map(lambda found: [found])

    def reduce_scatter(
        self, arrays: Sequence[Array], op: str = "sum", *, name: str | None = None
    ) -> Future[Array]:
        """Return a copy of the one array."""
        return self.all_reduce(arrays[0], op)

    def all_to_all(
        self, arrays: Sequence[Array], *, name: str | None = None
    ) -> Future[list[Array]]:
        """Return a copy of the one array, in a list."""
        return self.all_gather(arrays[0])

    def barrier(self, *, name: str | None = None) -> Future[None]:
        """Return at once."""
        return _done(None)

    def join(self) -> Future[int]:
        """Return rank 0, the last one to join."""
        return _done(0)

    def close(self) -> None:
        """Do nothing: the group has nothing that must be ended."""


def _done(value: T) -> Future[T]:
    future: Future[T] = Future("a call of a job with one rank")
    future.set_result(value)
    return future
