"""Metrics that are not sums: F1, MCC and PCC from a table of answers, and Pearson's.

Each keeps what it counted since the last reset of either kind, and all since ``reset``. Read
next: ``making.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy

from kvstore.errors import ArgumentValueError
from kvstore.mxnet.metric.base import (
    Arrays,
    HostArray,
    Names,
    check_label_shapes,
    host_pairs,
    ratio,
    register,
)
from kvstore.mxnet.metric.base import alias as also_named
from kvstore.mxnet.metric.sums import Counted, as_classes, classes_of

AVERAGES = ("macro", "micro")


class _OfTables(Counted):
    """A number of tables (k, k): how often what was predicted (row) for what label (column)."""

    def __init__(self, name: str, output_names: Names, label_names: Names, **config: Any) -> None:
        super().__init__(name, output_names, label_names, **config)

    def reset(self) -> None:
        super().reset()
        self._recent = self._all = numpy.zeros((2, 2), numpy.int64)

    def reset_local(self) -> None:
        super().reset_local()
        self._recent = numpy.zeros((2, 2), numpy.int64)

    def _add(self, table: HostArray) -> None:
        self._recent = _sum_of(self._recent, table)
        self._all = _sum_of(self._all, table)


class _Binary(_OfTables):
    """A number of a table of two classes: a mean over batches, or one of all together."""

    def __init__(self, name: str, output_names: Names, label_names: Names, average: str) -> None:
        super().__init__(name, output_names, label_names, average=_checked_average(average))
        self.average = average

    def update(self, labels: Arrays, preds: Arrays) -> None:
        tables = [_binary_table(*pair) for pair in host_pairs(labels, preds)]
        table = sum(tables, start=numpy.zeros((2, 2), numpy.int64))
        if self.average == "macro":
            self._count(self._value(table), 1)
            return
        self._add(table)
        self.num_inst, self.global_num_inst = int(self._recent.sum()), int(self._all.sum())
        self.sum_metric = self._value(self._recent) * self.num_inst
        self.global_sum_metric = self._value(self._all) * self.global_num_inst

    def _value(self, table: HostArray) -> float:
        raise NotImplementedError


@register
class F1(_Binary):
    """The harmonic mean of precision and recall of class 1, for labels 0 and 1.

    ``average``: ``"macro"``, the mean over batches, or ``"micro"``, of all samples together.
    """

    def __init__(
        self,
        name: str = "f1",
        output_names: Names = None,
        label_names: Names = None,
        average: str = "macro",
    ) -> None:
        super().__init__(name, output_names, label_names, average)

    def _value(self, table: HostArray) -> float:
        hits = int(table[1, 1])
        # 2 PR / (P + R) with P = hits / predicted and R = hits / labels; 0 where none is hit.
        return 2.0 * hits / max(int(table[1].sum() + table[:, 1].sum()), 1)


@register
class MCC(_Binary):
    """Matthews' correlation coefficient for labels 0 and 1; ``average`` as in ``F1``.

    (TP TN - FP FN) / sqrt((TP + FP) (TP + FN) (TN + FP) (TN + FN)), factors of 0 left out.
    """

    def __init__(
        self,
        name: str = "mcc",
        output_names: Names = None,
        label_names: Names = None,
        average: str = "macro",
    ) -> None:
        super().__init__(name, output_names, label_names, average)

    def _value(self, table: HostArray) -> float:
        (true_neg, false_neg), (false_pos, true_pos) = table.astype(numpy.float64).tolist()
        of_positives = true_pos + false_pos, true_pos + false_neg
        of_negatives = true_neg + false_pos, true_neg + false_neg
        product = math.prod(term for term in (*of_positives, *of_negatives) if term)
        return float(true_pos * true_neg - false_pos * false_neg) / math.sqrt(product)


@register
class PCC(_OfTables):
    """Pearson's correlation of answers and labels of any number of classes; 1 is perfect.

    For two classes it is ``MCC`` of all samples together. NaN while either has one class only.
    """

    def __init__(
        self, name: str = "pcc", output_names: Names = None, label_names: Names = None
    ) -> None:
        super().__init__(name, output_names, label_names)

    def update(self, labels: Arrays, preds: Arrays) -> None:
        for label, pred in host_pairs(labels, preds):
            answers, wanted = classes_of(label, pred, 1), as_classes(label)
            self._add(_table(answers, wanted))
        self.num_inst += 1
        self.global_num_inst += 1
        self.sum_metric = _multi_class(self._recent) * self.num_inst
        self.global_sum_metric = _multi_class(self._all) * self.global_num_inst


@dataclass
class Moments:
    """Means and summed products of two variables, which more samples can be added to.

    Source of the formulas: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm
    for computing sample variances" (1979).
    """

    count: int = 0
    means: tuple[float, float] = (0.0, 0.0)
    squares: tuple[float, float] = (0.0, 0.0)
    product: float = 0.0

    def add(self, first: HostArray, second: HostArray) -> None:
        """Count parallel vectors of float64 in."""
        number = len(first)
        total = self.count + number
        new = float(first.mean()), float(second.mean())
        apart = new[0] - self.means[0], new[1] - self.means[1]
        weight = self.count * number / total
        centred = first - new[0], second - new[1]
        self.squares = (
            self.squares[0] + float(centred[0] @ centred[0]) + apart[0] ** 2 * weight,
            self.squares[1] + float(centred[1] @ centred[1]) + apart[1] ** 2 * weight,
        )
        self.product += float(centred[0] @ centred[1]) + apart[0] * apart[1] * weight
        self.means = (
            self.means[0] + apart[0] * number / total,
            self.means[1] + apart[1] * number / total,
        )
        self.count = total

    def correlation(self) -> float:
        """Pearson's, NaN where one of them does not vary."""
        return ratio(self.product, math.sqrt(self.squares[0] * self.squares[1]))


@register
@also_named("pearsonr")
class PearsonCorrelation(Counted):
    """Pearson's correlation of labels and predictions of the same shape; ``average`` as in ``F1``.

    With ``"micro"``, ``get_global`` is that of all samples too, where MXNet 1.9.1 gives 0.
    """

    def __init__(
        self,
        name: str = "pearsonr",
        output_names: Names = None,
        label_names: Names = None,
        average: str = "macro",
    ) -> None:
        super().__init__(name, output_names, label_names, average=_checked_average(average))
        self.average = average

    def reset(self) -> None:
        super().reset()
        self._recent, self._all = Moments(), Moments()

    def reset_local(self) -> None:
        super().reset_local()
        self._recent = Moments()

    def update(self, labels: Arrays, preds: Arrays) -> None:
        for label, pred in host_pairs(labels, preds):
            check_label_shapes(label, pred, shape=True)
            vectors = [each.reshape(-1).astype(numpy.float64) for each in (label, pred)]
            if self.average == "macro":
                batch = Moments()
                batch.add(*vectors)
                self._count(batch.correlation(), 1)
                continue
            for moments in (self._recent, self._all):
                moments.add(*vectors)
            self.num_inst += 1
            self.global_num_inst += 1
            self.sum_metric = self._recent.correlation() * self.num_inst
            self.global_sum_metric = self._all.correlation() * self.global_num_inst


def _checked_average(average: str) -> str:
    if average not in AVERAGES:
        raise ArgumentValueError(f"average is one of {', '.join(AVERAGES)}, got {average!r}")
    return average


def _binary_table(label: HostArray, pred: HostArray) -> HostArray:
    """Whether class 1 was predicted, and was the label."""
    if pred.ndim != 2:
        raise ArgumentValueError(
            f"predictions must be (n, 2), a number for each class, got the shape {pred.shape}"
        )
    wanted = as_classes(label)
    if len(numpy.unique(wanted)) > 2:
        raise ArgumentValueError(
            f"labels of two classes are needed, got {numpy.unique(wanted).tolist()}; pcc takes more"
        )
    answers = classes_of(label, pred, 1)
    return _table((answers == 1).astype(numpy.int64), (wanted == 1).astype(numpy.int64))


def _table(answers: HostArray, wanted: HostArray) -> HostArray:
    """How often each answer came for each label, at least (2, 2)."""
    lowest = min(answers.min(initial=0), wanted.min(initial=0))
    if lowest < 0:
        raise ArgumentValueError(f"classes are numbers from 0 on, got {lowest}")
    size = max(int(answers.max(initial=1)), int(wanted.max(initial=1))) + 1
    flat = numpy.bincount(answers * size + wanted, minlength=size * size)
    return flat.reshape(size, size)


def _sum_of(one: HostArray, other: HostArray) -> HostArray:
    """A new table of the larger size."""
    size = max(len(one), len(other))
    total = numpy.zeros((size, size), numpy.int64)
    total[: len(one), : len(one)] += one
    total[: len(other), : len(other)] += other
    return total


def _multi_class(table: HostArray) -> float:
    """The formula of ``PCC``: covariance of rows and columns over the root of their variances."""
    of_rows, of_columns = (table.sum(axis=axis).astype(numpy.float64) for axis in (1, 0))
    total = of_rows.sum()
    variances = [float((each * (total - each)).sum()) for each in (of_rows, of_columns)]
    covariance = float((table.diagonal() * total - of_rows * of_columns).sum())
    return ratio(covariance, math.sqrt(variances[0] * variances[1]))
