"""The loop of a fit: devices that compute, epochs over batches, and an evaluation.

``Replica`` is one device with its own copy of the parameters, ``Training`` runs epochs over
several of them, ``Evaluation`` fills metrics, ``Validation`` does so after each epoch. Devices
compute on the pool that they are given; stores and callbacks are only called from the caller's
thread. Nothing here knows of files. Read next: ``fit_store.py`` for what a store does in it,
``model.py``, which puts all together.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.arrays import Array, adapter_on
from kvstore.context import Context
from kvstore.fit_store import Updates
from kvstore.io import NDArrayIter
from kvstore.metric import Accuracy, BatchResult, EvalMetric
from kvstore.progress import note_step
from kvstore.training import HostArray, Progress, checked_data, has_aux
from pslite.errors import UsageError

Callback = Callable[[Progress], Any]
Callbacks = Callback | Sequence[Callback] | None
Labels = NDArray[np.int64]
Data = tuple[HostArray, Labels]
"""Samples and their labels."""


class DeviceResult(NamedTuple):
    """What one device found out about its share of a batch."""

    loss_sum: float
    correct_count: int
    gradients: dict[str, Array]
    predictions: HostArray | None


class Replica:
    """One device: its share of every batch and its own copy of the parameters.

    ``compute`` and ``predict`` may run on any one thread at a time.
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
        self._has_aux = has_aux(network)
        self.params = self._to_device(params)
        self.set_aux(aux)

    def set_aux(self, aux: dict[str, HostArray]) -> None:
        """Go on from copies of these."""
        self._aux = self._to_device(aux)

    def compute(self, batch: Data, wants_predictions: bool) -> DeviceResult:
        """Loss sum, right answers and gradients of this device's share of a batch."""
        with self._adapter.on(self._context):
            x, y = (self._adapter.to_context(part[self._part], self._context) for part in batch)
            predictions = None
            if wants_predictions:
                predictions = self._adapter.to_host(self._predict(x))
            more = (self._aux,) if self._has_aux else ()
            loss_sum, correct_count, gradients = self._network.loss_and_gradients(
                self.params, x, y, *more
            )
            return DeviceResult(float(loss_sum), int(correct_count), dict(gradients), predictions)

    def predict(self, samples: HostArray) -> HostArray:
        """Class probabilities on the host."""
        with self._adapter.on(self._context):
            x = self._adapter.to_context(samples, self._context)
            return self._adapter.to_host(self._predict(x))

    def to_host(self) -> dict[str, HostArray]:
        """New NumPy arrays with the parameters."""
        return self._copies(self.params)

    def aux_to_host(self) -> dict[str, HostArray]:
        """New NumPy arrays with what is not trained."""
        return self._copies(self._aux)

    def _predict(self, x: Array) -> Array:
        more = (self._aux,) if self._has_aux else ()
        return self._network.predict(self.params, x, *more)

    def _to_device(self, values: dict[str, HostArray]) -> dict[str, Array]:
        with self._adapter.on(self._context):
            return {
                name: self._adapter.copy(self._adapter.to_context(value, self._context))
                for name, value in values.items()
            }

    def _copies(self, values: dict[str, Array]) -> dict[str, HostArray]:
        return {name: np.array(self._adapter.to_host(own)) for name, own in values.items()}


class Training:
    """The loop of one fit: the devices, and where their gradients become updates."""

    def __init__(
        self, updates: Updates, replicas: Sequence[Replica], pool: ThreadPoolExecutor
    ) -> None:
        self._updates = updates
        self._replicas = replicas
        # One device computes on the caller's thread: a hand-over would only cost time.
        self._map: Callable[..., Iterator[Any]] = pool.map if len(replicas) > 1 else map
        self._names = list(replicas[0].params)
        self._weights = [[replica.params[name] for replica in replicas] for name in self._names]

    def start(self, params: dict[str, HostArray]) -> None:
        """First values of rank 0 for every device."""
        self._updates.start(self._names, [params[name] for name in self._names], self._weights)

    def run_epoch(
        self,
        epoch: int,
        order: Labels,
        data: Data,
        metric: EvalMetric,
        callbacks: Callbacks,
    ) -> Progress:
        """One batch for each row of ``order``; returns the progress at its end."""
        began_s = time.perf_counter()
        loss_sum, correct_count = 0.0, 0
        num_batches, batch_size = order.shape
        samples, labels = data
        metric.reset()
        for nbatch, chosen in enumerate(order, start=1):
            result = self._step((samples[chosen], labels[chosen]), metric.needs_predictions)
            metric.update_batch(result)
            loss_sum += result.loss_sum
            correct_count += result.correct_count
            seen = nbatch * batch_size
            progress = Progress(
                epoch=epoch,
                nbatch=nbatch,
                num_batches=num_batches,
                samples_per_s=seen / max(time.perf_counter() - began_s, 1e-9),
                loss=loss_sum / seen,
                accuracy=correct_count / seen,
                eval_metric=metric,
            )
            call(callbacks, progress)
        return progress

    def gather(self) -> tuple[dict[str, HostArray], dict[str, HostArray]]:
        """Parameters, and the mean of the devices' other arrays, from which all go on."""
        first = self._replicas[0]
        aux = first.aux_to_host()
        if len(self._replicas) > 1 and aux:
            copies = [replica.aux_to_host() for replica in self._replicas]
            for name, own in aux.items():
                own[...] = np.mean([each[name] for each in copies], axis=0)
            for replica in self._replicas:
                replica.set_aux(aux)
        return first.to_host(), aux

    def finish(self) -> None:
        """Wait until every worker's last update is in, then take the final weights."""
        self._updates.finish(self._names, self._weights)

    def _step(self, batch: Data, wants_predictions: bool) -> BatchResult:
        """Gradients on all devices, then one round through the store for the whole model."""
        count = len(self._replicas)
        results: list[DeviceResult] = list(
            self._map(Replica.compute, self._replicas, [batch] * count, [wants_predictions] * count)
        )
        for result in results:
            if result.gradients.keys() != set(self._names):
                raise UsageError(
                    f"the network has the parameters {', '.join(sorted(self._names))} but gives "
                    f"gradients for {', '.join(sorted(result.gradients))}"
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


class Evaluation:
    """Metrics over data that are not trained on, batch by batch in their order."""

    def __init__(self, metric: EvalMetric, batch_size: int, callbacks: Callbacks = None) -> None:
        self.metric = metric
        self._batch_size = batch_size
        self._callbacks = callbacks

    def run(self, replica: Replica, data: Data, progress: Progress) -> tuple[Progress, float]:
        """The last batch's progress, whose ``eval_metric`` has all, and the accuracy."""
        samples, labels = data
        accuracy = Accuracy()
        self.metric.reset()
        starts = range(0, len(labels), self._batch_size)
        for nbatch, at in enumerate(starts, start=1):
            part = slice(at, at + self._batch_size)
            predictions = replica.predict(samples[part])
            for metric in (accuracy, self.metric):
                metric.update([labels[part]], [predictions])
            progress = replace(
                progress, nbatch=nbatch, num_batches=len(starts), eval_metric=self.metric
            )
            call(self._callbacks, progress)
        return progress, accuracy.get()[1]


class Validation:
    """What a fit evaluates at the end of each epoch: nothing where it was given no ``data``."""

    def __init__(
        self,
        data: Data | None,
        evaluation: Evaluation,
        callbacks: Callbacks = None,
    ) -> None:
        self._data = data
        self._evaluation = evaluation
        self._callbacks = callbacks

    def end_epoch(self, replica: Replica, progress: Progress) -> Progress:
        """The progress of an epoch's end, with what was found."""
        if self._data is None:
            return progress
        last, accuracy = self._evaluation.run(replica, self._data, progress)
        call(self._callbacks, last)
        values = tuple(self._evaluation.metric.get_global_name_value())
        return replace(progress, eval_accuracy=accuracy, validation=values)


def call(callbacks: Callbacks, progress: Progress) -> None:
    """Call one callback or several, in their order."""
    for callback in as_list(callbacks):
        callback(progress)


def as_list(callbacks: Any) -> list[Any]:
    """One callback, several or None as a list."""
    if callbacks is None:
        return []
    return [callbacks] if callable(callbacks) else list(callbacks)


def takes_four(callback: Callable[..., Any]) -> bool:
    """Whether it can be called as MXNet calls one at an epoch's end."""
    try:
        inspect.signature(callback).bind(None, None, None, None)
    except (TypeError, ValueError):  # ValueError: written in C, without a signature
        return False
    return True


def checked_pair(x: Any, y: Any) -> Data:
    """Samples and labels as arrays; an iterator brings both."""
    return checked_data(x.data, x.label) if isinstance(x, NDArrayIter) else checked_data(x, y)


def checked_eval_data(data: Any) -> Data:
    """The same of ``eval_data``, a pair or an iterator. Raises ``UsageError``."""
    if isinstance(data, NDArrayIter):
        return checked_pair(data, None)
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise UsageError(
            f"eval_data must be a pair of samples and labels, or an NDArrayIter, got "
            f"{type(data).__name__}"
        )
    return checked_pair(*data)
