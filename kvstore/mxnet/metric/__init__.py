"""Metrics: the quality of predictions over batches. ``mx.metric.create("acc")``.

Names, positional order, defaults and formulas are those of MXNet 1.9.1
(``python/mxnet/metric.py``); ``tests/reference/metrics.json`` holds values of that version. Three
things are more: a metric that needs no predictions says so, and a fit then spares the second
forward pass; every metric can be read since its last reset and over all; and what computes a
value of its own, such as an object of torchmetrics, is taken too. No thread, no clock, no file.
Read next: ``stores/base.py``, then ``sums.py``; ``making.py`` holds ``create``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.errors.hints import missing
from kvstore.mxnet.metric.base import BatchResult, EvalMetric, alias, check_label_shapes, register
from kvstore.mxnet.metric.correlation import F1, MCC, PCC, PearsonCorrelation
from kvstore.mxnet.metric.making import (
    CompositeEvalMetric,
    CustomMetric,
    MetricLike,
    ObjectMetric,
    create,
    np,
)
from kvstore.mxnet.metric.sums import (
    MAE,
    MSE,
    RMSE,
    Accuracy,
    Caffe,
    CrossEntropy,
    Loss,
    NegativeLogLikelihood,
    Perplexity,
    TopKAccuracy,
    Torch,
)

__all__ = [
    "F1",
    "MAE",
    "MCC",
    "MSE",
    "PCC",
    "RMSE",
    "Accuracy",
    "BatchResult",
    "Caffe",
    "CompositeEvalMetric",
    "CrossEntropy",
    "CustomMetric",
    "EvalMetric",
    "Loss",
    "MetricLike",
    "NegativeLogLikelihood",
    "ObjectMetric",
    "PearsonCorrelation",
    "Perplexity",
    "TopKAccuracy",
    "Torch",
    "alias",
    "check_label_shapes",
    "create",
    "np",
    "register",
]


if not TYPE_CHECKING:  # a checker would take every name, misspelt ones too

    def __getattr__(name):
        raise missing("kvstore.metric", name, __all__)
