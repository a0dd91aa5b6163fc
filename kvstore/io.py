"""``NDArrayIter``: batches of arrays in host memory, in MXNet's form.

A loop of one's own can iterate over it; ``FeedForward`` takes the arrays out of it and deals
them out among workers itself. Plain Python: no thread, and the arrays are only read. An object
belongs to one thread at a time. Read next: ``model.py``.

Source of names and meaning: ``python/mxnet/io/io.py`` of the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.absent import missing
from kvstore.errors import ArgumentValueError

__all__ = ["DataBatch", "NDArrayIter"]

HANDLINGS = ("pad", "discard", "roll_over")


class DataBatch(NamedTuple):
    """A batch: lists with one array each, as MXNet has them."""

    data: list[NDArray[Any]]
    label: list[NDArray[Any]] | None
    pad: int
    """How many of the last samples are there to fill the batch only."""


class NDArrayIter:
    """Iterates over ``data`` (n, ...) and ``label`` (n,) in batches of ``batch_size``.

    With ``shuffle`` each pass has its own order, by ``seed``. What is left at the end of a pass
    is filled with samples from its start (``pad``), left out (``discard``), or kept for the
    start of the next pass (``roll_over``), as ``last_batch_handle`` says. Arrays are NumPy's
    and are not copied; batches are new. Each may come in a dict with a name, as in
    ``{"data": x}``, which is not kept. Raises ``ArgumentValueError`` for what does not fit.
    """

    def __init__(
        self,
        data: Any,
        label: Any = None,
        batch_size: int = 1,
        shuffle: bool = False,
        last_batch_handle: str = "pad",
        seed: int = 0,
    ) -> None:
        self.data: NDArray[Any] = np.asarray(_only("data", data))
        self.label: NDArray[Any] | None = None
        if label is not None:
            self.label = np.asarray(_only("label", label))
        if self.data.ndim < 1 or not 1 <= batch_size <= len(self.data):
            raise ArgumentValueError(
                f"data must be (n, ...) with n of at least the batch size, got the shape "
                f"{self.data.shape} and batches of {batch_size}"
            )
        if self.label is not None and self.label.shape[:1] != self.data.shape[:1]:
            raise ArgumentValueError(
                f"data and label need equally many rows, got {self.data.shape} and "
                f"{self.label.shape}"
            )
        if last_batch_handle not in HANDLINGS:
            raise ArgumentValueError(
                f"last_batch_handle is one of {', '.join(HANDLINGS)}, got {last_batch_handle!r}"
            )
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.last_batch_handle = last_batch_handle
        self._rng = np.random.default_rng(seed)
        self._left: NDArray[np.int64] = np.zeros(0, np.int64)
        self._batches = self._pass()

    def __iter__(self) -> NDArrayIter:
        return self

    def __next__(self) -> DataBatch:
        return next(self._batches)

    def next(self) -> DataBatch:
        """The next batch; raises ``StopIteration`` at the end of a pass."""
        return next(self)

    def reset(self) -> None:
        """Begin the next pass."""
        self._batches = self._pass()

    def _pass(self) -> Iterator[DataBatch]:
        count, size = len(self.data), self.batch_size
        order = self._rng.permutation(count) if self.shuffle else np.arange(count)
        order = np.concatenate([self._left, order])
        self._left = np.zeros(0, np.int64)
        whole = len(order) - len(order) % size
        for at in range(0, whole, size):
            yield self._batch(order[at : at + size], 0)
        rest = order[whole:]
        if len(rest) and self.last_batch_handle == "pad":
            pad = size - len(rest)
            yield self._batch(np.concatenate([rest, order[:pad]]), pad)
        elif self.last_batch_handle == "roll_over":
            self._left = rest

    def _batch(self, chosen: NDArray[np.int64], pad: int) -> DataBatch:
        label = None if self.label is None else [self.label[chosen]]
        return DataBatch([self.data[chosen]], label, pad)


def _only(what: str, given: Any) -> Any:
    """The one array of a dict, or what is no dict itself."""
    if not isinstance(given, Mapping):
        return given
    if len(given) != 1:
        raise ArgumentValueError(
            f"{what} is one array (n, ...), or a dict with one of them such as "
            f"{{{what!r}: array}}; got a dict of {len(given)}: {', '.join(map(repr, given))}"
        )
    return next(iter(given.values()))


def __getattr__(name: str) -> Any:
    raise missing("kvstore.io", name, __all__)
