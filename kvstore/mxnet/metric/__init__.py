"""Metrics: the quality of predictions over batches. ``mx.metric.create("acc")``.

Names, positional order, defaults and formulas are those of MXNet 1.9.1
(``python/mxnet/metric.py``); ``tests/reference/metrics.json`` has values of that version. Three
things are new: a metric says if it needs no predictions, and a fit then skips the second forward
pass; every metric has a value since its last local reset and one since ``reset``; and objects that
compute their own value, such as those of torchmetrics, are accepted. No threads, clocks or files.
Read next: ``base.py``, then ``sums.py``; ``making.py`` has ``create``.
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


if not TYPE_CHECKING:  # with this, a type checker would accept misspelt names

    def __getattr__(name):
        raise missing("kvstore.metric", name, __all__)
