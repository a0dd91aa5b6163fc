"""Metrics: how good predictions are, added up over batches. ``mx.metric.create("acc")``.

Plain objects that keep two numbers, a sum and how many things it is over; no thread, no clock,
no file. Predictions and labels are host arrays that are only read. An object belongs to one
thread at a time. Read next: ``callback.py``, which shows them, and ``model.py``, which fills them.

Names, defaults and formulas are those of MXNet 1.9.1 (``python/mxnet/metric.py``). One thing is
new: a metric that needs no predictions says so, and a fit then spares the second forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy
from numpy.typing import NDArray

from kvstore.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "MSE",
    "Accuracy",
    "BatchResult",
    "CompositeEvalMetric",
    "CrossEntropy",
    "CustomMetric",
    "EvalMetric",
    "Loss",
    "MetricLike",
    "TopKAccuracy",
    "check_label_shapes",
    "create",
    "np",
    "register",
]

HostArray = NDArray[Any]
Function: TypeAlias = Callable[[HostArray, HostArray], Any]
MetricLike: TypeAlias = "str | Function | EvalMetric | Sequence[MetricLike]"
"""What ``create`` takes: a name, a function, a metric, or a list of these."""


class BatchResult(NamedTuple):
    """What a training step knows of its batch before it updates."""

    labels: HostArray
    loss_sum: float
    correct_count: int
    predictions: HostArray | None
    """(n, classes), in the order of the labels; None where no metric asked for them."""


class EvalMetric:
    """Base of all metrics. A subclass defines ``update`` and adds to the two numbers::

        class Misses(EvalMetric):
            def update(self, labels, preds):
                for label, pred in zip(labels, preds):
                    self.sum_metric += (pred.argmax(axis=1) != label).sum()
                    self.num_inst += len(label)

    The value is ``sum_metric / num_inst``, NaN when nothing was counted. ``reset`` forgets
    everything; ``reset_local`` begins to count anew for ``get``, and ``get_global`` still has
    all since ``reset``. So something that is shown every few batches does not disturb what is
    said of the whole epoch.
    """

    needs_predictions: ClassVar[bool] = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.reset()

    def update(self, labels: Sequence[HostArray], preds: Sequence[HostArray]) -> None:
        """Count more samples: lists of parallel arrays, labels (n,), predictions (n, classes)."""
        raise NotImplementedError(f"{type(self).__name__} does not define update()")

    def update_batch(self, result: BatchResult) -> None:
        """Count a batch of a fit."""
        assert result.predictions is not None, "needs_predictions is True"
        self.update([result.labels], [result.predictions])

    def reset(self) -> None:
        """Forget everything."""
        self._sum_before, self._num_before = 0.0, 0
        self.sum_metric, self.num_inst = 0.0, 0

    def reset_local(self) -> None:
        """Begin anew for ``get``; ``get_global`` forgets nothing."""
        self._sum_before += self.sum_metric
        self._num_before += self.num_inst
        self.sum_metric, self.num_inst = 0.0, 0

    def get(self) -> tuple[Any, Any]:
        """Name and value since the last reset of either kind; a list of each if composite."""
        return self.name, _ratio(self.sum_metric, self.num_inst)

    def get_global(self) -> tuple[Any, Any]:
        """Name and value since ``reset``."""
        total = self._sum_before + self.sum_metric
        return self.name, _ratio(total, self._num_before + self.num_inst)

    def get_name_value(self) -> list[tuple[str, float]]:
        """``get`` as a list of pairs."""
        return _pairs(self.get())

    def get_global_name_value(self) -> list[tuple[str, float]]:
        """``get_global`` as a list of pairs."""
        return _pairs(self.get_global())

    def __repr__(self) -> str:
        return f"EvalMetric: {dict(self.get_name_value())}"


_Class = TypeVar("_Class", bound=type[EvalMetric])
_registry: dict[str, type[EvalMetric]] = {}


def register(*aliases: str) -> Callable[[_Class], _Class]:
    """Class decorator: ``create`` finds the class by its name and these, in any case."""

    def add(cls: _Class) -> _Class:
        for name in (cls.__name__, *aliases):
            _registry[name.lower()] = cls
        return cls

    return add


@register("acc")
class Accuracy(EvalMetric):
    """The share of samples whose most likely class is their label (the first one, if several)."""

    needs_predictions = False

    def __init__(self, name: str = "accuracy") -> None:
        super().__init__(name)

    def update(self, labels: Sequence[HostArray], preds: Sequence[HostArray]) -> None:
        for label, pred in _checked(labels, preds):
            answer = pred.argmax(axis=1) if pred.ndim > label.ndim else pred
            self.sum_metric += int((answer == label).sum())
            self.num_inst += len(label)

    def update_batch(self, result: BatchResult) -> None:
        self.sum_metric += result.correct_count
        self.num_inst += len(result.labels)


@register()
class Loss(EvalMetric):
    """The mean of the network's own loss, in a fit; elsewhere the mean of all predictions."""

    needs_predictions = False

    def __init__(self, name: str = "loss") -> None:
        super().__init__(name)

    def update(self, labels: Sequence[HostArray], preds: Sequence[HostArray]) -> None:
        for pred in _as_list(preds):
            self.sum_metric += float(pred.sum())
            self.num_inst += pred.size

    def update_batch(self, result: BatchResult) -> None:
        self.sum_metric += result.loss_sum
        self.num_inst += len(result.labels)


@register("top_k_accuracy", "top_k_acc")
class TopKAccuracy(EvalMetric):
    """The share of samples whose label is among the ``top_k`` most likely classes."""

    def __init__(self, top_k: int = 5, name: str = "top_k_accuracy") -> None:
        if top_k < 1:
            raise ArgumentValueError(f"top_k must be at least 1, got {top_k}")
        super().__init__(f"{name}_{top_k}")
        self.top_k = top_k

    def update(self, labels: Sequence[HostArray], preds: Sequence[HostArray]) -> None:
        for label, pred in _checked(labels, preds):
            # Stable, so that equal classes come in their order and results repeat.
            best = numpy.argsort(-pred, axis=1, kind="stable")[:, : self.top_k]
            self.sum_metric += int((best == label[:, None]).any(axis=1).sum())
            self.num_inst += len(label)


@register("ce", "cross-entropy")
class CrossEntropy(EvalMetric):
    """The mean of -log(probability of the label + ``eps``)."""

    def __init__(self, eps: float = 1e-12, name: str = "cross-entropy") -> None:
        super().__init__(name)
        self.eps = eps

    def update(self, labels: Sequence[HostArray], preds: Sequence[HostArray]) -> None:
        for label, pred in _checked(labels, preds):
            of_label = pred[numpy.arange(len(label)), label.astype(numpy.int64)]
            self.sum_metric -= float(numpy.log(of_label + self.eps, dtype=numpy.float64).sum())
            self.num_inst += len(label)


@register()
class MSE(EvalMetric):
    """The mean over batches of the mean squared difference of labels and predictions."""

    def __init__(self, name: str = "mse") -> None:
        super().__init__(name)

    def update(self, labels: Sequence[HostArray], preds: Sequence[HostArray]) -> None:
        for label, pred in _checked(labels, preds):
            column = label.reshape(len(label), -1)
            self.sum_metric += float(((column - pred.reshape(len(pred), -1)) ** 2.0).mean())
            self.num_inst += 1


class CustomMetric(EvalMetric):
    """What a function of (label, prediction) returns: a number for the batch, averaged over
    batches, or a pair (sum, number of things)."""

    def __init__(self, feval: Function, name: str | None = None) -> None:
        super().__init__(name or f"custom({getattr(feval, '__name__', type(feval).__name__)})")
        self._feval = feval

    def update(self, labels: Sequence[HostArray], preds: Sequence[HostArray]) -> None:
        for label, pred in _checked(labels, preds):
            value = self._feval(label, pred)
            total, number = value if isinstance(value, tuple) else (value, 1)
            self.sum_metric += float(total)
            self.num_inst += int(number)


class CompositeEvalMetric(EvalMetric):
    """Several metrics that are filled together; names and values are lists."""

    def __init__(
        self, metrics: Iterable[MetricLike] | None = None, name: str = "composite"
    ) -> None:
        self.metrics = [create(metric) for metric in metrics or ()]
        super().__init__(name)

    @property
    def needs_predictions(self) -> bool:  # type: ignore[override]
        return any(metric.needs_predictions for metric in self.metrics)

    def add(self, metric: MetricLike) -> None:
        """One more."""
        self.metrics.append(create(metric))

    def update(self, labels: Sequence[HostArray], preds: Sequence[HostArray]) -> None:
        for metric in self.metrics:
            metric.update(labels, preds)

    def update_batch(self, result: BatchResult) -> None:
        for metric in self.metrics:
            metric.update_batch(result)

    def reset(self) -> None:
        for metric in self.metrics:
            metric.reset()

    def reset_local(self) -> None:
        for metric in self.metrics:
            metric.reset_local()

    def get(self) -> tuple[Any, Any]:
        pairs = [pair for metric in self.metrics for pair in metric.get_name_value()]
        return [name for name, _ in pairs], [value for _, value in pairs]

    def get_global(self) -> tuple[Any, Any]:
        pairs = [pair for metric in self.metrics for pair in metric.get_global_name_value()]
        return [name for name, _ in pairs], [value for _, value in pairs]


def create(metric: MetricLike, *args: Any, **kwargs: Any) -> EvalMetric:
    """A metric by name (``acc``, ``ce``, ``top_k_accuracy``, ``mse``, ``loss``), from a function
    of (label, prediction), or of a list of these; a metric comes back as it is.

    ``args`` and ``kwargs`` are for the class. Raises ``ArgumentValueError``, which lists the
    names, and ``ArgumentTypeError``.
    """
    if isinstance(metric, EvalMetric):
        return metric
    if isinstance(metric, str):
        cls = _registry.get(metric.lower())
        if cls is None:
            known = ", ".join(sorted(_registry))
            raise ArgumentValueError(f"no metric is named {metric!r}; known: {known}")
        return cls(*args, **kwargs)
    if callable(metric):
        return CustomMetric(metric, *args, **kwargs)
    if isinstance(metric, list | tuple):
        return CompositeEvalMetric(metric)
    raise ArgumentTypeError(
        f"a metric is a name, a function of (label, prediction), an EvalMetric or a list of "
        f"these, got {type(metric).__name__}"
    )


def np(numpy_feval: Function, name: str | None = None) -> CustomMetric:
    """A metric from a function of two NumPy arrays, named after it."""
    return CustomMetric(numpy_feval, name or getattr(numpy_feval, "__name__", None))


def check_label_shapes(labels: Sized, preds: Sized) -> None:
    """Raise ``ArgumentValueError`` unless there are as many of one as of the other."""
    if len(labels) != len(preds):
        raise ArgumentValueError(
            f"a metric needs as many labels as predictions, got {len(labels)} and {len(preds)}"
        )


def _checked(
    labels: Sequence[HostArray], preds: Sequence[HostArray]
) -> list[tuple[HostArray, HostArray]]:
    """Pairs of arrays of the same length."""
    several, answers = _as_list(labels), _as_list(preds)
    check_label_shapes(several, answers)
    for label, pred in zip(several, answers, strict=True):
        check_label_shapes(label, pred)
    return list(zip(several, answers, strict=True))


def _as_list(arrays: Sequence[HostArray]) -> list[HostArray]:
    several = list(arrays) if isinstance(arrays, list | tuple) else [arrays]
    return [numpy.asarray(each) for each in several]


def _ratio(total: float, number: int) -> float:
    return total / number if number else math.nan


def _pairs(named: tuple[Any, Any]) -> list[tuple[str, float]]:
    names, values = named
    if isinstance(names, str):
        return [(names, values)]
    return list(zip(names, values, strict=True))
