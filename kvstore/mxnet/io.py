"""``NDArrayIter``: batches of arrays in host memory, and ``ResizeIter``.

Your own loop can iterate over an ``NDArrayIter``. ``FeedForward`` instead takes its arrays and
distributes the samples over the workers itself. No threads; the arrays are only read. One thread
at a time may use an object.
Read next: ``model.py``.

Source of names and meaning: ``python/mxnet/io/io.py`` of the original.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import ArgumentValueError, NotSupportedError
from kvstore.errors.hints import missing
from kvstore.mxnet import nd

__all__ = ["DataBatch", "DataDesc", "NDArrayIter", "ResizeIter"]

HANDLINGS = ("pad", "discard", "roll_over")

HostArray = NDArray[Any]


class _NameAndShape(NamedTuple):
    name: str
    shape: tuple[int, ...]


class DataDesc(_NameAndShape):
    """The name and shape of a batch's array; with ``dtype`` and ``layout``."""

    dtype: Any
    layout: str | None

    def __new__(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: Any = np.float32,
        layout: str | None = "NCHW",
    ) -> DataDesc:
        made = super().__new__(cls, name, tuple(shape))
        made.dtype, made.layout = np.dtype(dtype), layout
        return made

    def __repr__(self) -> str:
        return f"DataDesc[{self.name},{self.shape},{self.dtype},{self.layout}]"


@dataclass(eq=False)
class DataBatch:
    """A batch with lists of arrays, as in MXNet."""

    data: list[Any]
    label: list[Any] | None = None
    pad: int = 0
    """How many samples at the end only fill the batch."""
    index: HostArray | None = None
    """The indices of the samples."""
    bucket_key: Any = None
    provide_data: list[DataDesc] | None = None
    provide_label: list[DataDesc] | None = None


class NDArrayIter:
    """An iterator over ``data`` and ``label`` in batches of ``batch_size``.

    Each is an array of any library on the host, a list of arrays, or a dict of named arrays; arrays
    without names are named after ``data_name`` and ``label_name``. The first axis is that of the
    samples. The arrays are not copied. A batch has lists of new ``mx.nd`` arrays: of float32, or
    for a given NDArray of its dtype.

    With ``shuffle`` each pass has its own order, decided by ``seed``; ``idx`` is the current order.
    ``last_batch_handle`` decides about an incomplete last batch: it is filled with samples from the
    start of the pass (``pad``), left out (``discard``), or kept for the start of the next pass
    (``roll_over``). Raises ``ArgumentValueError`` for arrays that do not fit, and
    ``NotSupportedError`` for a ``layout`` that does not begin with N.
    """

    def __init__(
        self,
        data: Any,
        label: Any = None,
        batch_size: int = 1,
        shuffle: bool = False,
        last_batch_handle: str = "pad",
        data_name: str = "data",
        label_name: str = "softmax_label",
        layout: str = "NCHW",
        *,
        seed: int = 0,
    ) -> None:
        self._data = _named("data", data, data_name)
        self._label = {} if label is None else _named("label", label, label_name)
        if not self._data:
            raise ArgumentValueError("data must be an array or a non-empty list or dict of arrays")
        first = next(iter(self._data.values())).values
        is_small = last_batch_handle == "pad" or batch_size <= first.shape[0]
        if not first.shape[0] or batch_size < 1 or not is_small:
            raise ArgumentValueError(
                f"batch_size must be from 1 to the number of samples, got {batch_size} for data "
                f"of shape {first.shape}; use last_batch_handle='pad' to fill a batch"
            )
        for name, each in (self._data | self._label).items():
            if each.values.shape[0] != first.shape[0]:
                raise ArgumentValueError(
                    "data and label must have the same number of samples, got shapes "
                    f"{first.shape} and {each.values.shape} ({name!r})"
                )
        if last_batch_handle not in HANDLINGS:
            raise ArgumentValueError(
                f"last_batch_handle must be one of {', '.join(HANDLINGS)}, got "
                f"{last_batch_handle!r}"
            )
        if not layout.startswith("N"):
            raise NotSupportedError(f"the first axis of layout must be N (samples), got {layout!r}")
        self.batch_size = batch_size
        self.num_data = first.shape[0]
        self.shuffle = shuffle
        self.last_batch_handle = last_batch_handle
        self.layout = layout
        self._rng = np.random.default_rng(seed)
        self.hard_reset()

    @property
    def data(self) -> list[tuple[str, nd.NDArray]]:
        """The names, and copies of the arrays in the order of this pass."""
        return [(name, each.batch(self.idx)) for name, each in self._data.items()]

    @property
    def label(self) -> list[tuple[str, nd.NDArray]]:
        """The names and copies of the labels, like ``data``; empty without labels."""
        return [(name, each.batch(self.idx)) for name, each in self._label.items()]

    @property
    def provide_data(self) -> list[DataDesc]:
        """The names and shapes of a batch's ``data``."""
        return [each.described(name, self) for name, each in self._data.items()]

    @property
    def provide_label(self) -> list[DataDesc]:
        """The names and shapes of a batch's ``label``; empty without labels."""
        return [each.described(name, self) for name, each in self._label.items()]

    def __iter__(self) -> NDArrayIter:
        return self

    def __next__(self) -> DataBatch:
        chosen, pad = next(self._batches)
        data = [each.batch(chosen) for each in self._data.values()]
        label = [each.batch(chosen) for each in self._label.values()]
        return DataBatch(data, label, pad, chosen)

    def next(self) -> DataBatch:
        """Return the next batch; raises ``StopIteration`` at the end of a pass."""
        return next(self)

    def reset(self) -> None:
        """Begin the next pass."""
        self.idx = np.arange(self.num_data)
        if self.shuffle:
            self.idx = self._rng.permutation(self.num_data)
        self._batches = self._pass()

    def hard_reset(self) -> None:
        """Begin the next pass, and drop the samples that ``roll_over`` kept."""
        self._left = np.zeros(0, np.int64)
        self.reset()

    # -- for FeedForward -------------------------------------------------------------------

    def sources(self) -> tuple[HostArray, HostArray | None]:
        """Return the given arrays of samples and labels as NumPy arrays.

        Raises ``ArgumentValueError`` if there are several arrays of samples or of labels.
        """
        for what, arrays in (("data", self._data), ("label", self._label)):
            if len(arrays) > 1:
                raise ArgumentValueError(
                    "FeedForward needs an iterator with one data array and one label array; "
                    f"{what} has {len(arrays)}: {', '.join(map(repr, arrays))}"
                )
        labels = [each.values for each in self._label.values()]
        return next(iter(self._data.values())).values, labels[0] if labels else None

    def on_host(self) -> Iterator[DataBatch]:
        """Yield the remaining batches as NumPy arrays of the given dtypes."""
        for chosen, pad in self._batches:
            data = [each.values[chosen] for each in self._data.values()]
            yield DataBatch(data, [each.values[chosen] for each in self._label.values()], pad)

    # -- inside ----------------------------------------------------------------------------

    def _pass(self) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Yield the sample indices of each batch, and how many only fill the batch."""
        size = self.batch_size
        order = np.concatenate([self._left, self.idx])
        self._left = np.zeros(0, np.int64)
        whole = len(order) - len(order) % size
        for at in range(0, whole, size):
            yield order[at : at + size], 0
        rest = order[whole:]
        if len(rest) and self.last_batch_handle == "pad":
            pad = size - len(rest)
            yield np.concatenate([rest, np.resize(order, pad)]), pad
        elif self.last_batch_handle == "roll_over":
            self._left = rest


class ResizeIter:
    """Passes of ``size`` batches over ``data_iter``, which is reset as needed.

    Use it to give all workers of a synchronous job the same number of batches. ``data_iter`` has
    ``next`` and ``reset``, like an ``NDArrayIter``; it is not copied. With ``reset_internal=False``
    a new pass continues where the last one stopped. Raises ``ArgumentValueError`` for a ``size``
    below 1 and for an empty iterator.
    """

    def __init__(self, data_iter: Any, size: int, reset_internal: bool = True) -> None:
        if operator.index(size) < 1:
            raise ArgumentValueError(f"size must be at least 1 batch, got {size}")
        self.data_iter = data_iter
        self.size = size
        self.reset_internal = reset_internal
        self.cur = 0
        """How many batches of this pass were returned."""
        self.batch_size = data_iter.batch_size
        self.provide_data = data_iter.provide_data
        self.provide_label = data_iter.provide_label

    def __iter__(self) -> ResizeIter:
        return self

    def __next__(self) -> DataBatch:
        if self.cur == self.size:
            raise StopIteration
        batch = next(self.data_iter, None)
        if batch is None:
            self.data_iter.reset()
            batch = next(self.data_iter, None)
            if batch is None:
                raise ArgumentValueError(
                    "data_iter returned no batch, not even after reset(); pass an iterator with "
                    "at least one batch"
                )
        self.cur += 1
        return cast(DataBatch, batch)

    def next(self) -> DataBatch:
        """Return the next batch; raise ``StopIteration`` at the end of a pass."""
        return next(self)

    def reset(self) -> None:
        """Begin the next pass."""
        self.cur = 0
        if self.reset_internal:
            self.data_iter.reset()


class _Source(NamedTuple):
    """A given array, from which batches are taken."""

    values: HostArray
    dtype: Any

    def batch(self, chosen: NDArray[np.int64]) -> nd.NDArray:
        return nd.array(self.values[chosen], dtype=self.dtype)

    def described(self, name: str, owner: NDArrayIter) -> DataDesc:
        shape = (owner.batch_size, *self.values.shape[1:])
        return DataDesc(name, shape, self.dtype, owner.layout)


def _named(what: str, given: Any, name: str) -> dict[str, _Source]:
    """Return the arrays of ``data`` or ``label`` by name, in order."""
    if isinstance(given, Mapping):
        arrays = dict(sorted(given.items()))
    elif isinstance(given, list | tuple) and given and all(hasattr(one, "shape") for one in given):
        single = len(given) == 1
        arrays = {name if single else f"_{at}_{name}": one for at, one in enumerate(given)}
    else:
        arrays = {name: given}
    sources = {
        key: _Source(
            np.asarray(one), one.dtype if isinstance(one, nd.NDArray) else np.dtype(np.float32)
        )
        for key, one in arrays.items()
    }
    for key, source in sources.items():
        if not source.values.ndim:
            raise ArgumentValueError(
                f"{what} must have shape (n, ...), got a single number for {key!r}"
            )
    return sources


if not TYPE_CHECKING:  # with this, a type checker would accept misspelt names

    def __getattr__(name):
        raise missing("kvstore.io", name, __all__)
