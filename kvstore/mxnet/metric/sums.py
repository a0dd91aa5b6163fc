"""Metrics that are sums over samples, or means over batches.

Read next: ``correlation.py``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy

from kvstore.errors import ArgumentValueError
from kvstore.mxnet.metric.base import (
    Arrays,
    BatchResult,
    EvalMetric,
    HostArray,
    Names,
    alias,
    check_label_shapes,
    host_pairs,
    on_host,
    register,
)


class Counted(EvalMetric):
    """A metric of this package: it keeps the sums of ``get_global`` itself.

    Without a name from the caller, it is named ``usual_name``.
    """

    usual_name = ""

    def __init__(
        self, name: str | None, output_names: Names, label_names: Names, **config: Any
    ) -> None:
        name = self.usual_name if name is None else name
        super().__init__(name, output_names, label_names, has_global_stats=True, **config)


class Plain(Counted):
    """A metric without further parameters."""

    def __init__(
        self, name: str | None = None, output_names: Names = None, label_names: Names = None
    ) -> None:
        super().__init__(name, output_names, label_names)


@register
@alias("acc")
class Accuracy(Counted):
    """The share of labels that are the most likely class along ``axis``.

    The first class counts if several are equally likely. Predictions of the same shape as the
    labels are classes already.
    """

    def __init__(
        self,
        axis: int = 1,
        name: str = "accuracy",
        output_names: Names = None,
        label_names: Names = None,
    ) -> None:
        super().__init__(name, output_names, label_names, axis=axis)
        self.axis = axis
        self.needs_predictions = axis != 1

    def update(self, labels: Arrays, preds: Arrays) -> None:
        for label, pred in host_pairs(labels, preds):
            answers = classes_of(label, pred, self.axis)
            self._count(int((answers == as_classes(label)).sum()), len(answers))

    def update_batch(self, result: BatchResult) -> None:
        if self.needs_predictions:
            super().update_batch(result)
        else:
            self._count(result.correct_count, len(result.labels))


@register
class Loss(Plain):
    """The mean of the network's loss in a fit; elsewhere, of all predictions."""

    usual_name = "loss"
    needs_predictions = False

    def update(self, labels: Arrays, preds: Arrays) -> None:
        for pred in on_host(preds):
            self._count(float(pred.sum(dtype=numpy.float64)), pred.size)

    def update_batch(self, result: BatchResult) -> None:
        self._count(result.loss_sum, len(result.labels))


@register
class Torch(Loss):
    """``Loss`` by another name."""

    usual_name = "torch"


@register
class Caffe(Loss):
    """``Loss`` by another name."""

    usual_name = "caffe"


@register
@alias("top_k_accuracy", "top_k_acc")
class TopKAccuracy(Counted):
    """The share of samples whose label is among the ``top_k`` most likely classes.

    ``top_k`` is 5 by default; MXNet requires it. Of equally likely classes, the first count.
    """

    def __init__(
        self,
        top_k: int = 5,
        name: str = "top_k_accuracy",
        output_names: Names = None,
        label_names: Names = None,
    ) -> None:
        if top_k < 1:
            raise ArgumentValueError(f"top_k must be at least 1, got {top_k}")
        super().__init__(name, output_names, label_names, top_k=top_k)
        self._plain_name = self.name
        self.name = f"{name}_{top_k}"
        self.top_k = top_k

    def update(self, labels: Arrays, preds: Arrays) -> None:
        for label, pred in host_pairs(labels, preds):
            if pred.ndim > 2:
                raise ArgumentValueError(
                    f"top_k_accuracy needs predictions of shape (n, classes), got {pred.shape}"
                )
            wanted = as_classes(label)
            best = as_classes(pred)[:, None]
            if pred.ndim == 2:
                # A stable sort keeps equal classes in order, so results repeat.
                best = numpy.argsort(-pred, axis=1, kind="stable")[:, : self.top_k]
            self._count(int((best == wanted[:, None]).any(axis=1).sum()), len(wanted))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "name": self._plain_name}


@register
@alias("ce", "cross-entropy")
class CrossEntropy(Counted):
    """The mean of -log(probability of the label + ``eps``)."""

    usual_name = "cross-entropy"

    def __init__(
        self,
        eps: float = 1e-12,
        name: str | None = None,
        output_names: Names = None,
        label_names: Names = None,
    ) -> None:
        super().__init__(name, output_names, label_names, eps=eps)
        self.eps = eps

    def update(self, labels: Arrays, preds: Arrays) -> None:
        for label, pred in host_pairs(labels, preds):
            of_label = probabilities(label, pred, -1) + self.eps
            self._count(-float(numpy.log(of_label, dtype=numpy.float64).sum()), label.size)


@register
@alias("nll_loss")
class NegativeLogLikelihood(CrossEntropy):
    """The same numbers as ``CrossEntropy``, under its own name."""

    usual_name = "nll-loss"


@register
class Perplexity(Counted):
    """exp of the mean of -log(probability of the label), at least 1e-10 each.

    Labels equal to ``ignore_label`` do not count. ``axis`` is the axis of the classes in the
    predictions. Labels may have any shape, with one label for each sample.
    """

    def __init__(
        self,
        ignore_label: int | None = None,
        axis: int = -1,
        name: str = "perplexity",
        output_names: Names = None,
        label_names: Names = None,
    ) -> None:
        super().__init__(name, output_names, label_names, ignore_label=ignore_label, axis=axis)
        self.ignore_label = ignore_label
        self.axis = axis

    def update(self, labels: Arrays, preds: Arrays) -> None:
        several, answers = on_host(labels), on_host(preds)
        check_label_shapes(several, answers)
        for label, pred in zip(several, answers, strict=True):
            counts = numpy.ones(label.size, bool)
            if self.ignore_label is not None:
                counts = label.reshape(-1) != self.ignore_label
            chosen = probabilities(label, pred, self.axis, counts)
            logs = numpy.log(numpy.maximum(chosen, 1e-10), dtype=numpy.float64)
            self._count(-float(logs.sum()), int(counts.sum()))

    def get(self) -> tuple[Any, Any]:
        name, value = super().get()
        return name, math.exp(value)

    def get_global(self) -> tuple[Any, Any]:
        name, value = super().get_global()
        return name, math.exp(value)


class _OverBatches(Plain):
    """A mean over batches of ``_value(differences)``, of shape (n, ...)."""

    def update(self, labels: Arrays, preds: Arrays) -> None:
        for label, pred in host_pairs(labels, preds):
            # In float64, so that small integers do not wrap, and dtypes do not change the result.
            first, second = (
                each.reshape(len(each), -1).astype(numpy.float64) for each in (label, pred)
            )
            self._count(self._value(first - second), 1)

    def _value(self, differences: HostArray) -> float:
        raise NotImplementedError


@register
class MAE(_OverBatches):
    """The mean over batches of the mean absolute difference of labels and predictions."""

    usual_name = "mae"

    def _value(self, differences: HostArray) -> float:
        return float(numpy.abs(differences).mean())


@register
class MSE(_OverBatches):
    """The mean over batches of the mean squared difference of labels and predictions."""

    usual_name = "mse"

    def _value(self, differences: HostArray) -> float:
        return float((differences**2).mean())


@register
class RMSE(_OverBatches):
    """The mean over batches of the root of the mean squared difference."""

    usual_name = "rmse"

    def _value(self, differences: HostArray) -> float:
        return math.sqrt(float((differences**2).mean()))


def as_classes(labels: HostArray) -> HostArray:
    """Return labels as a vector of int64; fractions are truncated, as in MXNet."""
    return labels.reshape(-1).astype(numpy.int64)


def classes_of(label: HostArray, pred: HostArray, axis: int) -> HostArray:
    """Return the predicted classes: ``pred``, or the best class of each row.

    ``pred`` itself is used if it has the labels' shape. Raises ``ArgumentValueError`` unless there
    is one class for each label.
    """
    if pred.shape == label.shape or pred.ndim < 2:
        answers = as_classes(pred)
    elif -pred.ndim <= axis < pred.ndim:
        answers = pred.argmax(axis=axis).reshape(-1)
    else:
        raise _wrong_axis(pred, axis)
    if len(answers) != label.size:
        raise ArgumentValueError(
            f"predictions of shape {pred.shape} with classes on axis {axis} give {len(answers)} "
            f"answers, but there are {label.size} labels (shape {label.shape})"
        )
    return answers


def probabilities(
    label: HostArray, pred: HostArray, axis: int, counts: HostArray | None = None
) -> HostArray:
    """Return the probability of each label, or of those that ``counts`` chooses.

    Raises ``ArgumentValueError`` unless there is one prediction for each label, with its class.
    """
    if not pred.ndim or not -pred.ndim <= axis < pred.ndim:
        raise _wrong_axis(pred, axis)
    rows = numpy.moveaxis(pred, axis, -1).reshape(-1, pred.shape[axis])
    if len(rows) != label.size:
        raise ArgumentValueError(
            f"predictions of shape {pred.shape} have {len(rows)} samples of {rows.shape[1]} "
            f"classes, but there are {label.size} labels (shape {label.shape})"
        )
    wanted = as_classes(label)
    if counts is not None:
        rows, wanted = rows[counts], wanted[counts]
    if wanted.size and not 0 <= wanted.min() <= wanted.max() < rows.shape[1]:
        raise ArgumentValueError(
            f"labels must be from 0 to {rows.shape[1] - 1}, got {wanted.min()} to "
            f"{wanted.max()}; pass ignore_label to skip one label"
        )
    chosen: HostArray = rows[numpy.arange(len(rows)), wanted]
    return chosen


def _wrong_axis(pred: HostArray, axis: int) -> ArgumentValueError:
    return ArgumentValueError(
        f"axis must be one of the {pred.ndim} axes of predictions of shape {pred.shape}, got "
        f"{axis}; pass the axis of the classes"
    )
