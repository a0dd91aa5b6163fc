"""Metrics: their numbers against hand-made ones, how they are added up, and how they are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kvstore import metric
from kvstore.errors import ArgumentTypeError, ArgumentValueError

PREDICTIONS = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.4, 0.4, 0.2], [0.2, 0.5, 0.3]])
LABELS = np.array([0, 1, 1, 1])


@pytest.mark.parametrize(
    ("name", "arguments", "shown", "value"),
    [
        ("acc", {}, "accuracy", 2 / 4),
        ("Accuracy", {}, "accuracy", 2 / 4),
        ("top_k_accuracy", {"top_k": 2}, "top_k_accuracy_2", 1.0),
        ("top_k_acc", {"top_k": 1}, "top_k_accuracy_1", 2 / 4),
        ("top_k_accuracy", {"top_k": 9}, "top_k_accuracy_9", 1.0),
        ("ce", {}, "cross-entropy", -np.log([0.7, 0.3, 0.4, 0.5]).mean()),
        ("cross-entropy", {"eps": 0.1}, "cross-entropy", -np.log([0.8, 0.4, 0.5, 0.6]).mean()),
        ("loss", {}, "loss", 1 / 3),
    ],
)
def test_a_metric_by_name_counts_what_its_formula_says(
    name: str, arguments: dict[str, Any], shown: str, value: float
) -> None:
    made = metric.create(name, **arguments)
    made.update([LABELS], [PREDICTIONS])
    assert made.get()[0] == shown
    assert made.get()[1] == pytest.approx(value)


def test_mean_squared_error_takes_columns_and_vectors() -> None:
    made = metric.create("mse")
    made.update([np.array([1.0, 3.0])], [np.array([[2.0], [1.0]])])
    made.update([np.array([1.0])], [np.array([4.0])])
    assert made.get() == ("mse", (2.5 + 9) / 2)


def test_batches_of_different_sizes_weigh_by_their_samples() -> None:
    made = metric.create("acc")
    made.update([LABELS[:3]], [PREDICTIONS[:3]])
    made.update([LABELS[3:]], [PREDICTIONS[3:]])
    made.update(LABELS, LABELS)  # answers instead of probabilities, and no lists
    assert made.get() == ("accuracy", 6 / 8)


def test_a_local_reset_forgets_for_get_only() -> None:
    made = metric.create("acc")
    made.update([LABELS[:1]], [PREDICTIONS[:1]])
    made.reset_local()
    assert math.isnan(made.get()[1])
    made.update([LABELS[1:2]], [PREDICTIONS[1:2]])
    assert made.get() == ("accuracy", 0.0)
    assert made.get_global() == ("accuracy", 0.5)
    made.reset()
    assert math.isnan(made.get_global()[1])


def test_several_metrics_are_filled_and_reset_together() -> None:
    made = metric.create(["acc", metric.create("top_k_accuracy", top_k=2)])
    assert made.needs_predictions
    assert not metric.create(["acc", "loss"]).needs_predictions
    made.update([LABELS], [PREDICTIONS])
    made.reset_local()
    made.update([LABELS[:1]], [PREDICTIONS[:1]])
    assert made.get() == (["accuracy", "top_k_accuracy_2"], [1.0, 1.0])
    assert made.get_global_name_value() == [("accuracy", 3 / 5), ("top_k_accuracy_2", 1.0)]
    made.reset()
    assert [math.isnan(value) for value in made.get()[1]] == [True, True]


def test_a_function_is_a_metric_of_its_means_or_of_its_pairs() -> None:
    def wrong(label: Any, pred: Any) -> int:
        return int((pred.argmax(axis=1) != label).sum())

    by_batch, by_sample = metric.create(wrong), metric.np(lambda *both: (wrong(*both), 4), "wrong")
    for made in (by_batch, by_sample):
        made.update([LABELS], [PREDICTIONS])
        made.update([LABELS], [PREDICTIONS])
    assert by_batch.get() == ("custom(wrong)", 2.0)
    assert by_sample.get() == ("wrong", 0.5)


def test_a_class_of_ones_own_is_found_by_name() -> None:
    @metric.register("ones")
    class CountOnes(metric.EvalMetric):
        def __init__(self) -> None:
            super().__init__("number of ones")

        def update(self, labels: Sequence[Any], preds: Sequence[Any]) -> None:
            self.sum_metric += int((labels[0] == 1).sum())
            self.num_inst += 1

    for name in ("ones", "CountOnes"):
        made = metric.create(name)
        made.update_batch(metric.BatchResult(LABELS, 0.0, 0, PREDICTIONS))
        assert made.get_name_value() == [("number of ones", 3.0)]


def test_a_batch_of_a_fit_needs_no_predictions_for_accuracy_and_loss() -> None:
    made = metric.create(["acc", "loss"])
    made.update_batch(metric.BatchResult(LABELS, 6.0, 3, None))
    assert made.get() == (["accuracy", "loss"], [0.75, 1.5])


def test_what_is_no_metric_is_said() -> None:
    with pytest.raises(ArgumentValueError, match="named 'acu'; known: acc, accuracy, ce"):
        metric.create("acu")
    with pytest.raises(ArgumentTypeError, match="got int"):
        metric.create(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="top_k must be at least 1"):
        metric.create("top_k_accuracy", top_k=0)
    with pytest.raises(ArgumentValueError, match="as many labels as predictions, got 4 and 3"):
        metric.create("acc").update([LABELS], [PREDICTIONS[:3]])
    with pytest.raises(ArgumentValueError, match="got 2 and 1"):
        metric.create("ce").update([LABELS, LABELS], [PREDICTIONS])
    with pytest.raises(NotImplementedError, match="does not define update"):
        metric.EvalMetric("mine").update([], [])
