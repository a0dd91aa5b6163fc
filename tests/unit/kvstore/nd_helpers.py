"""What the tests of NDArrays share: a look at one, and a store's call that is under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from kvstore.arrays import pending
from kvstore.mxnet import nd
from kvstore.mxnet.nd import NDArray
from pslite.future import Future


def check(array: object, values: Any, dtype: str = "float32") -> None:
    """An NDArray of exactly these values, this shape and dtype."""
    assert type(array) is NDArray
    assert array.dtype == dtype
    host = array.asnumpy()
    assert host.shape == np.shape(values)
    np.testing.assert_array_equal(host, values)


def counted(*shape: int) -> NDArray:
    """0, 1, 2, ... in this shape."""
    return nd.arange(int(np.prod(shape))).reshape(shape)


def begin(
    future: Future[Any],
    writes: Iterable[NDArray] = (),
    reads: Iterable[NDArray] = (),
    wait: Callable[[Any], Any] = Future.result,
) -> None:
    """A call of a store has begun to write to, or to read from, these arrays."""
    pending.begin(future, [array._uses for array in writes], [array._uses for array in reads], wait)


class Call:
    """A call of a store that is under way: its values arrive when somebody waits for them."""

    def __init__(
        self, *outs: NDArray, value: float = 5, wait: Callable[[Any], Any] | None = None
    ) -> None:
        self.memories = [out._memory_to_write() for out in outs]
        self.future: Future[None] = Future("the servers' answer for 'w'")
        self.value = value
        self.waits = 0
        begin(self.future, writes=outs, wait=wait or self.wait)

    def wait(self, future: Future[Any]) -> None:
        self.waits += 1
        assert future is self.future
        self.arrive()

    def arrive(self) -> None:
        for memory in self.memories:
            memory[...] = self.value
        self.future.set_result(None)
