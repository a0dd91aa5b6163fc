"""What one call of a distributed store is made of: when it is done, and where values arrive.

A call becomes several transfers (``plan.py``); ``Operation`` is done when all of them are, and
``Landing`` takes their values. Pure but for the arrays that it fills. Used by ``dist.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.base import KeySpec
from kvstore.plan import Bytes, StagingPool, flat_bytes
from pslite.future import Future


class Operation:
    """Completes a future when all transfers of a call are done."""

    def __init__(self, count: int, describe: Callable[[], str], staging: StagingPool) -> None:
        self.future: Future[None] = Future(describe)
        self._left = count
        self._error: BaseException | None = None
        self._staging = staging
        if count == 0:
            self.future.set_result(None)

    def part_done(self, staging: Bytes | None) -> Callable[[BaseException | None], None]:
        """What to call when one transfer is done; ``staging`` is its buffer, if it has one.

        Runs on the I/O thread only, so it needs no lock.
        """

        def done(error: BaseException | None) -> None:
            if staging is not None and error is None:
                self._staging.give_back(staging)
            self._error = self._error or error
            self._left -= 1
            if self._left == 0:
                if self._error is not None:
                    self.future.set_error(self._error)
                else:
                    self.future.set_result(None)

        return done


class Landing:
    """Where the values of a call arrive: in the first array of a key when it is fit for it.

    An array is fit when it is NumPy's, contiguous, and of the key's dtype. Else the values
    land in memory of our own, and ``finish`` brings them to all the others, cast and strided.
    """

    def __init__(self, outs: Sequence[Sequence[Array]], specs: Sequence[KeySpec]) -> None:
        self.arrays: list[Bytes] = []
        self._rest: list[tuple[np.ndarray[Any, Any], Sequence[Array]]] = []
        for arrays, spec in zip(outs, specs, strict=True):
            first = arrays[0]
            fit = (
                type(first) is np.ndarray
                and first.dtype == spec.dtype
                and first.dtype.isnative
                and first.flags.c_contiguous
            )
            host = first if fit else np.empty(spec.shape, spec.dtype)
            self.arrays.append(flat_bytes(host))
            rest = arrays[1:] if fit else arrays
            if rest:
                self._rest.append((host, rest))

    def finish(self) -> None:
        """The values are there: bring them to the arrays that they did not land in."""
        for host, outs in self._rest:
            for out in outs:
                adapter_for(out).from_host(host, out)
