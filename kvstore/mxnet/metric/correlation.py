"""Metrics of all samples together: F1, MCC, PCC and Pearson's correlation.

Read next: ``making.py``.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy

from kvstore.errors import ArgumentValueError
from kvstore.mxnet.metric.base import (
    Arrays,
    HostArray,
    Names,
    alias,
    check_label_shapes,
    host_pairs,
    ratio,
    register,
)
from kvstore.mxnet.metric.sums import Counted, Plain, as_classes, classes_of

AVERAGES = ("macro", "micro")


@dataclass(frozen=True)
class ConfusionMatrix:
    """How often each class was predicted (row) for each label (column), (k, k)."""

    counts: HostArray

    def __add__(self, other: ConfusionMatrix) -> ConfusionMatrix:
        size = max(len(self.counts), len(other.counts))
        total = numpy.zeros((size, size), numpy.int64)
        for each in (self.counts, other.counts):
            total[: len(each), : len(each)] += each
        return ConfusionMatrix(total)


NOTHING = ConfusionMatrix(numpy.zeros((2, 2), numpy.int64))


@dataclass(frozen=True)
class Moments:
    """Means and summed products of two variables; moments can be added.

    Source of the formulas: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm
    for computing sample variances" (1979).
    """

    count: int = 0
    means: tuple[float, float] = (0.0, 0.0)
    squares: tuple[float, float] = (0.0, 0.0)
    product: float = 0.0

    @classmethod
    def of(cls, first: HostArray, second: HostArray) -> Moments:
        """Return the moments of two vectors of float64 of equal length."""
        means = float(first.mean()), float(second.mean())
        one, other = first - means[0], second - means[1]
        return cls(len(first), means, (float(one @ one), float(other @ other)), float(one @ other))

    def __add__(self, other: Moments) -> Moments:
        total = self.count + other.count
        apart = other.means[0] - self.means[0], other.means[1] - self.means[1]
        weight = self.count * other.count / total
        share = other.count / total
        return Moments(
            total,
            (self.means[0] + apart[0] * share, self.means[1] + apart[1] * share),
            (
                self.squares[0] + other.squares[0] + apart[0] ** 2 * weight,
                self.squares[1] + other.squares[1] + apart[1] ** 2 * weight,
            ),
            self.product + other.product + apart[0] * apart[1] * weight,
        )


class _Together(Counted):
    """The base of metrics that are computed from the combined data of all samples."""

    empty: Any = NOTHING

    def reset(self) -> None:
        super().reset()
        self._recent = self._all = self.empty

    def reset_local(self) -> None:
        super().reset_local()
        self._recent = self.empty

    def _add(self, samples: Any, number: int) -> None:
        """Add samples; they are counted as ``number`` instances."""
        self._recent, self._all = self._recent + samples, self._all + samples
        self.num_inst += number
        self.global_num_inst += number
        self.sum_metric = self._value(self._recent) * self.num_inst
        self.global_sum_metric = self._value(self._all) * self.global_num_inst

    def _value(self, samples: Any) -> float:
        raise NotImplementedError


class _Averaged(_Together):
    """A base with ``average``: the mean over batches (``"macro"``) or all samples."""

    def __init__(
        self,
        name: str | None = None,
        output_names: Names = None,
        label_names: Names = None,
        average: str = "macro",
    ) -> None:
        if average not in AVERAGES:
            raise ArgumentValueError(
                f"average must be one of {', '.join(AVERAGES)}, got {average!r}"
            )
        super().__init__(name, output_names, label_names, average=average)
        self.average = average

    def _add_batch(self, batch: Any, number: int) -> None:
        if self.average == "macro":
            self._count(self._value(batch), 1)
        else:
            self._add(batch, number)


class _Binary(_Averaged):
    """A number computed from a confusion matrix of two classes."""

    def update(self, labels: Arrays, preds: Arrays) -> None:
        batch = _total(_of_two_classes(*pair) for pair in host_pairs(labels, preds))
        self._add_batch(batch, int(batch.counts.sum()))


@register
class F1(_Binary):
    """The harmonic mean of precision and recall of class 1, for labels 0 and 1.

    ``average``: ``"macro"`` for the mean over batches, ``"micro"`` for all samples together.
    """

    usual_name = "f1"

    def _value(self, samples: ConfusionMatrix) -> float:
        counts = samples.counts
        hits = int(counts[1, 1])
        # 2 PR / (P + R) with P = hits / predicted and R = hits / labels; 0 where none is hit.
        return 2.0 * hits / max(int(counts[1].sum() + counts[:, 1].sum()), 1)


@register
class MCC(_Binary):
    """Matthews' correlation coefficient for labels 0 and 1; ``average`` as in ``F1``.

    (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)), without factors of 0.
    """

    usual_name = "mcc"

    def _value(self, samples: ConfusionMatrix) -> float:
        counts = samples.counts.astype(numpy.float64).tolist()
        (true_neg, false_neg), (false_pos, true_pos) = counts
        of_positives = true_pos + false_pos, true_pos + false_neg
        of_negatives = true_neg + false_pos, true_neg + false_neg
        product = math.prod(term for term in (*of_positives, *of_negatives) if term)
        return float(true_pos * true_neg - false_pos * false_neg) / math.sqrt(product)


@register
class PCC(_Together, Plain):
    """Pearson's correlation of predicted classes and labels.

    There may be any number of classes. For two classes it is ``MCC`` of all samples together. It is
    NaN while all predictions or all labels are of one class.
    """

    usual_name = "pcc"

    def update(self, labels: Arrays, preds: Arrays) -> None:
        batch = _total(
            _confusion(classes_of(label, pred, 1), as_classes(label))
            for label, pred in host_pairs(labels, preds)
        )
        self._add(batch, 1)

    def _value(self, samples: ConfusionMatrix) -> float:
        """Covariance of rows and columns over the root of their variances."""
        counts = samples.counts
        of_rows, of_columns = (counts.sum(axis=axis).astype(numpy.float64) for axis in (1, 0))
        total = of_rows.sum()
        variances = [float((each * (total - each)).sum()) for each in (of_rows, of_columns)]
        covariance = float((counts.diagonal() * total - of_rows * of_columns).sum())
        return ratio(covariance, math.sqrt(variances[0] * variances[1]))


@register
@alias("pearsonr")
class PearsonCorrelation(_Averaged):
    """Pearson's correlation of labels and predictions of the same shape.

    ``average`` is that of ``F1``.

    With ``"micro"``, ``get_global`` also uses all samples, where MXNet 1.9.1 returns 0. The value
    is NaN if labels or predictions do not vary.
    """

    usual_name = "pearsonr"
    empty = Moments()

    def update(self, labels: Arrays, preds: Arrays) -> None:
        for label, pred in host_pairs(labels, preds):
            check_label_shapes(label, pred, shape=True)
            first, second = (each.reshape(-1).astype(numpy.float64) for each in (label, pred))
            self._add_batch(Moments.of(first, second), 1)

    def _value(self, samples: Moments) -> float:
        return ratio(samples.product, math.sqrt(samples.squares[0] * samples.squares[1]))


def _total(matrices: Iterable[ConfusionMatrix]) -> ConfusionMatrix:
    return functools.reduce(operator.add, matrices, NOTHING)


def _of_two_classes(label: HostArray, pred: HostArray) -> ConfusionMatrix:
    """Return the counts of predictions and labels of classes 0 and 1."""
    if pred.ndim != 2:
        raise ArgumentValueError(
            f"predictions must have shape (n, 2), one number for each class, got {pred.shape}"
        )
    wanted = as_classes(label)
    if len(numpy.unique(wanted)) > 2:
        raise ArgumentValueError(
            f"labels must have at most two classes, got {numpy.unique(wanted).tolist()}; use pcc "
            "for more"
        )
    answers = classes_of(label, pred, 1)
    return _confusion((answers == 1).astype(numpy.int64), (wanted == 1).astype(numpy.int64))


def _confusion(answers: HostArray, wanted: HostArray) -> ConfusionMatrix:
    lowest = min(answers.min(initial=0), wanted.min(initial=0))
    if lowest < 0:
        raise ArgumentValueError(f"class numbers must be at least 0, got {lowest}")
    size = max(int(answers.max(initial=1)), int(wanted.max(initial=1))) + 1
    flat = numpy.bincount(answers * size + wanted, minlength=size * size)
    return ConfusionMatrix(flat.reshape(size, size))
