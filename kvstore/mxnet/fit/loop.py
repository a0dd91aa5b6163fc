"""The training loop of ``FeedForward``: devices, batches, evaluation.

``Replica`` is one device with its own copy of the parameters, ``Training`` runs batches on several
replicas, and ``Evaluation`` updates metrics. Devices compute on threads of a given pool; stores and
callbacks are called only on the caller's thread. Nothing here uses files. Read next: ``store.py``,
for what the store does, and ``mxnet/model.py``, which combines everything.
"""

from __future__ import annotations

import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.arrays import Array, adapter_on
from kvstore.arrays.context import Context
from kvstore.checkpoint.steps import state_from_bytes, state_to_bytes
from kvstore.errors import ArgumentTypeError, ArgumentValueError, CheckpointError
from kvstore.mxnet.fit.network import HostArray, Progress, checked_data, has_aux
from kvstore.mxnet.fit.store import Updates
from kvstore.mxnet.io import NDArrayIter
from kvstore.mxnet.metric import Accuracy, BatchResult, CompositeEvalMetric, EvalMetric
from kvstore.mxnet.metric.base import on_host
from kvstore.stores.dist.progress import note_step
from kvstore.stores.samples import as_int
from pslite.errors import UsageError

Callback = Callable[[Progress], Any]
Callbacks = Callback | Sequence[Callback] | None
Labels = NDArray[np.int64]
Data = tuple[HostArray, Labels]
"""Samples and their labels."""


class DeviceResult(NamedTuple):
    """The results of one device for its share of a batch."""

    loss_sum: float
    correct_count: int
    gradients: dict[str, Array]
    predictions: HostArray | None


class Replica:
    """One device: its share of every batch and its own copy of the parameters.

    ``compute`` and ``predict`` may run on any thread, but on only one at a time.
    """

    def __init__(
        self,
        context: Context,
        network: Any,
        part: slice,
        params: dict[str, HostArray],
        aux: dict[str, HostArray],
    ) -> None:
        self._context = context
        self._network = network
        self._part = part
        self._adapter = adapter_on(context)
        self.params = self._to_device(params)
        self.set_aux(aux)

    def set_aux(self, aux: dict[str, HostArray]) -> None:
        """Replace the untrained arrays by copies of these."""
        self._aux = self._to_device(aux)

    def compute(self, batch: Data, wants_predictions: bool) -> DeviceResult:
        """Return loss sum, number of right answers and gradients of this device's share."""
        with self._adapter.on(self._context):
            x, y = (self._adapter.to_context(part[self._part], self._context) for part in batch)
            predictions = None
            if wants_predictions:
                predictions = self._adapter.to_host(self._predict(x))
            loss_sum, correct_count, gradients = self._network.loss_and_gradients(
                self.params, x, y, *self._last_argument()
            )
            return DeviceResult(float(loss_sum), int(correct_count), dict(gradients), predictions)

    def predict(self, samples: HostArray) -> HostArray:
        """Return class probabilities on the host."""
        with self._adapter.on(self._context):
            x = self._adapter.to_context(samples, self._context)
            return self._adapter.to_host(self._predict(x))

    def to_host(self) -> dict[str, HostArray]:
        """Return new NumPy arrays with the parameters."""
        return self._copies(self.params)

    def aux_to_host(self) -> dict[str, HostArray]:
        """Return new NumPy arrays with the untrained values."""
        return self._copies(self._aux)

    def _predict(self, x: Array) -> Array:
        return self._network.predict(self.params, x, *self._last_argument())

    def _last_argument(self) -> tuple[dict[str, Array], ...]:
        """Return the argument that only a ``StatefulNetwork`` takes."""
        return (self._aux,) if has_aux(self._network) else ()

    def _to_device(self, values: dict[str, HostArray]) -> dict[str, Array]:
        with self._adapter.on(self._context):
            return {
                name: self._adapter.copy(self._adapter.to_context(value, self._context))
                for name, value in values.items()
            }

    def _copies(self, values: dict[str, Array]) -> dict[str, HostArray]:
        return {name: np.array(self._adapter.to_host(own)) for name, own in values.items()}


class Training:
    """The training loop of one fit: its devices and the updates of their gradients."""

    def __init__(
        self,
        updates: Updates,
        replicas: Sequence[Replica],
        pool: ThreadPoolExecutor,
        metric: EvalMetric,
        num_batches: int,
    ) -> None:
        self._updates = updates
        self._replicas = replicas
        # One device computes on the caller's thread: another thread would only cost time.
        self._map: Callable[..., Iterator[Any]] = pool.map if len(replicas) > 1 else map
        self._names = list(replicas[0].params)
        self._weights = [[replica.params[name] for replica in replicas] for name in self._names]
        self._metric = metric
        self._num_batches = num_batches
        self._loss_sum, self._correct_count = 0.0, 0
        self._is_within_epoch = False
        #: When this process ran its first batch of the epoch, and which that was.
        self._began: tuple[float, int] | None = None

    def start(self, params: dict[str, HostArray]) -> None:
        """Set the values of every device to rank 0's initial values."""
        self._updates.start(self._names, [params[name] for name in self._names], self._weights)

    def run_batch(self, epoch: int, index: int, batch: Data, callbacks: Callbacks) -> Progress:
        """Run the batch ``index`` of an epoch; return the progress after it."""
        if index == 0:
            self._metric.reset()
            self._loss_sum, self._correct_count = 0.0, 0
        if index == 0 or self._began is None:
            self._began = time.perf_counter(), index
        result = self._step(batch, self._metric.needs_predictions)
        self._metric.update_batch(result)
        self._loss_sum += result.loss_sum
        self._correct_count += result.correct_count
        nbatch, batch_size = index + 1, len(batch[1])
        self._is_within_epoch = nbatch < self._num_batches
        began_s, first = self._began
        timed, seen = (nbatch - first) * batch_size, nbatch * batch_size
        progress = Progress(
            epoch=epoch,
            nbatch=nbatch,
            num_batches=self._num_batches,
            samples_per_s=timed / max(time.perf_counter() - began_s, 1e-9),
            loss=self._loss_sum / seen,
            accuracy=self._correct_count / seen,
            eval_metric=self._metric,
        )
        call(callbacks, progress)
        return progress

    def average(self) -> None:
        """Let the devices go on with the mean of their untrained arrays."""
        if len(self._replicas) == 1:
            return
        copies = [replica.aux_to_host() for replica in self._replicas]
        for name, own in copies[0].items():
            own[...] = np.mean([each[name] for each in copies], axis=0)
        for replica in self._replicas:
            replica.set_aux(copies[0])

    def to_host(self) -> tuple[dict[str, HostArray], dict[str, HostArray]]:
        """Return the parameters, and the untrained arrays of the first device."""
        return self._replicas[0].to_host(), self._replicas[0].aux_to_host()

    def state_dict(self) -> dict[str, Any]:
        """Return what only this worker has between two batches."""
        sums = [self._loss_sum, self._correct_count, counted(self._metric)]
        return {
            "num_batches": self._num_batches,
            "aux": [replica.aux_to_host() for replica in self._replicas],
            "sums": sums if self._is_within_epoch else None,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue with what ``state_dict`` has returned.

        After an epoch, all devices have the same arrays, so their number may be another one.
        """
        if saved.get("num_batches") != self._num_batches:
            raise CheckpointError(
                f"the progress must be of epochs of {self._num_batches} batches, got "
                f"{saved.get('num_batches')}; pass the data, batch size and number of workers of "
                "the first run, or another directory"
            )
        for replica, aux in zip(self._replicas, itertools.cycle(saved["aux"]), strict=False):
            replica.set_aux(aux)
        if saved["sums"]:
            self._loss_sum, self._correct_count, counts = saved["sums"]
            count_on(self._metric, iter(counts))

    def pull(self) -> None:
        """Take the weights that the updates have made so far."""
        self._updates.states.pull(self._names, out=self._weights)

    def finish(self) -> None:
        """Wait until every worker's last update is done, then pull the final weights."""
        self._updates.finish()
        self.pull()

    def _step(self, batch: Data, wants_predictions: bool) -> BatchResult:
        """Compute gradients on all devices, then update the whole model in one round."""
        count = len(self._replicas)
        results: list[DeviceResult] = list(
            self._map(Replica.compute, self._replicas, [batch] * count, [wants_predictions] * count)
        )
        for result in results:
            if result.gradients.keys() != set(self._names):
                raise UsageError(
                    "the network must return gradients for its parameters "
                    f"{', '.join(sorted(self._names))}, got gradients for "
                    f"{', '.join(sorted(result.gradients))}"
                )
        gradients = [[result.gradients[name] for result in results] for name in self._names]
        self._updates.step(self._names, gradients, self._weights)
        note_step(self._updates.store, len(batch[1]))
        return BatchResult(
            labels=batch[1],
            loss_sum=sum(result.loss_sum for result in results),
            correct_count=sum(result.correct_count for result in results),
            predictions=np.concatenate([result.predictions for result in results])
            if wants_predictions
            else None,
        )


class Samples:
    """The data of an evaluation: arrays, or an iterator.

    An iterator returns batches with MXNet's ``data``, ``label`` and ``pad``; samples that only fill
    a batch are left out. ``num_batches`` is the number of batches, at most ``limit``; it is 0 if
    an iterator does not tell it.
    """

    def __init__(
        self,
        x: Any,
        y: Any = None,
        *,
        batch_size: int = 1,
        limit: int | None = None,
        reset: bool = True,
    ) -> None:
        if limit is not None and as_int("num_batch", limit) < 1:
            raise UsageError(f"num_batch must be at least 1, got {limit}")
        self._iterator = x if is_iterator(x) else None
        if self._iterator is not None and y is not None:
            raise UsageError("X is an iterator with labels; do not pass y too")
        self._x = x if self._iterator is not None else np.asarray(x)
        self._y = None if y is None else np.asarray(y)
        self._batch_size = batch_size
        self._limit = limit
        self._reset = reset
        self.num_batches = self._count()

    def batches(self) -> Iterator[tuple[HostArray, HostArray | None]]:
        """Yield samples and their labels, or None if there are no labels."""
        if self._iterator is None:
            yield from itertools.islice(self._slices(), self._limit)
            return
        if self._reset:
            self._iterator.reset()
        is_ours = isinstance(self._iterator, NDArrayIter)
        batches = self._iterator.on_host() if is_ours else iter(self._iterator)
        for batch in itertools.islice(batches, self._limit):
            kept = slice(None, -batch.pad if batch.pad else None)
            labels = [each[kept] for each in on_host(batch.label or [])]
            yield on_host(batch.data)[0][kept], labels[0] if labels else None

    def _slices(self) -> Iterator[tuple[HostArray, HostArray | None]]:
        # Yield at least one slice, so that empty data gives a result with the right columns.
        for at in range(0, max(len(self._x), 1), self._batch_size):
            part = slice(at, at + self._batch_size)
            yield self._x[part], None if self._y is None else self._y[part]

    def _count(self) -> int:
        if self._iterator is None:
            count = max(math.ceil(len(self._x) / self._batch_size), 1)
        elif isinstance(self._iterator, NDArrayIter):
            count = math.ceil(self._iterator.num_data / self._iterator.batch_size)
        else:
            return self._limit or 0
        return count if self._limit is None else min(count, self._limit)


class Evaluation:
    """The evaluation of metrics on held-out data, batch by batch."""

    def __init__(self, metric: EvalMetric, callbacks: Callbacks = None) -> None:
        self.metric = metric
        self._callbacks = callbacks

    def run(self, replica: Replica, samples: Samples, progress: Progress) -> tuple[Progress, float]:
        """Evaluate; return the last batch's progress and the accuracy."""
        accuracy = Accuracy()
        self.metric.reset()
        progress = replace(progress, nbatch=0, num_batches=samples.num_batches)
        for part in samples.batches():
            data = checked_data(*part)
            predictions = replica.predict(data[0])
            for metric in (accuracy, self.metric):
                metric.update([data[1]], [predictions])
            progress = replace(progress, nbatch=progress.nbatch + 1, eval_metric=self.metric)
            call(self._callbacks, progress)
        return progress, accuracy.get()[1]

    def end_epoch(
        self, replica: Replica, samples: Samples, progress: Progress, callbacks: Callbacks
    ) -> Progress:
        """Evaluate at the end of an epoch; return the progress with the results."""
        last, accuracy = self.run(replica, samples, progress)
        call(callbacks, last)
        values = tuple(self.metric.get_global_name_value())
        return replace(progress, eval_accuracy=accuracy, validation=values)


def counted(metric: EvalMetric) -> list[bytes]:
    """Return what a metric has counted, for ``count_on``; empty if that is not plain."""
    if isinstance(metric, CompositeEvalMetric):
        return [each for part in metric.metrics for each in counted(part)]
    own = {name: each for name, each in vars(metric).items() if not inspect.isroutine(each)}
    try:
        return [state_to_bytes(own)]
    except (ArgumentTypeError, ArgumentValueError):
        return [b""]


def count_on(metric: EvalMetric, counts: Iterator[bytes]) -> None:
    """Continue with what ``counted`` has returned for an equal metric."""
    if isinstance(metric, CompositeEvalMetric):
        for part in metric.metrics:
            count_on(part, counts)
    elif own := next(counts):
        vars(metric).update(state_from_bytes(own))


def call(callbacks: Callbacks, progress: Progress) -> None:
    """Call one callback or several, in their order."""
    for callback in as_list(callbacks):
        callback(progress)


def as_list(callbacks: Any) -> list[Any]:
    """Return one callback, several or None as a list."""
    if callbacks is None:
        return []
    return [callbacks] if callable(callbacks) else list(callbacks)


def takes_four(callback: Callable[..., Any]) -> bool:
    """Return whether a callback takes MXNet's four arguments of an epoch's end."""
    try:
        inspect.signature(callback).bind(None, None, None, None)
    except (TypeError, ValueError):  # ValueError: written in C, without a signature
        return False
    return True


def is_iterator(x: object) -> bool:
    """Return whether ``x`` can be iterated over and reset, as ``NDArrayIter`` can."""
    return callable(getattr(x, "reset", None)) and hasattr(x, "__iter__")


def checked_pair(x: Any, y: Any) -> Data:
    """Return samples and labels as arrays; an iterator has both."""
    return checked_data(*x.sources()) if isinstance(x, NDArrayIter) else checked_data(x, y)


def checked_eval_data(data: Any) -> tuple[Any, Any]:
    """Return ``eval_data`` (a pair or an iterator), checked; None stays None.

    Other iterators are returned unchanged. Raises ``UsageError``.
    """
    if isinstance(data, tuple | list) and len(data) == 2 and is_iterator(data[0]):
        data = data[0]  # MXNet takes an iterator in a pair too
    if is_iterator(data) and not isinstance(data, NDArrayIter):
        return data, None
    if isinstance(data, NDArrayIter):
        return checked_pair(data, None)
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise UsageError(
            f"eval_data must be a pair of samples and labels, or an NDArrayIter, got "
            f"{type(data).__name__}"
        )
    return checked_pair(*data)
