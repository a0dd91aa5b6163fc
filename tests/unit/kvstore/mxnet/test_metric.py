"""Metrics: their numbers against hand-made ones, how they are added up, and how they are made."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ArgumentTypeError, ArgumentValueError, NotSupportedError
from kvstore.mxnet import metric, nd

PREDICTIONS = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.4, 0.4, 0.2], [0.2, 0.5, 0.3]])
LABELS = np.array([0, 1, 1, 1])


RECORD = json.loads(
    (Path(__file__).parents[3] / "reference" / "metrics.json").read_text(encoding="utf-8")
)
"""What MXNet 1.9.1 said; see ``tests/reference/record_metrics.py``."""


def sum_and_number(label: Any, pred: Any) -> tuple[float, int]:
    return np.abs(label - pred).sum(), label.size


def largest(label: Any, pred: Any) -> float:
    return float(np.abs(label - pred).max())


FUNCTIONS = {each.__name__: each for each in (sum_and_number, largest)}


@pytest.mark.parametrize("case", RECORD["cases"], ids=lambda case: f"{case['name']}{case['args']}")
@pytest.mark.parametrize("kind", ["NumPy", "mx.nd"])
def test_values_are_those_of_mxnet_over_several_batches(case: Any, kind: str) -> None:
    """All sums are float64 here and some float32 there: equal within 1e-6.

    Pearson's of all samples together knows one value there, which no local reset changes, and
    its global one is always 0. It is compared with the global one here.
    """
    name, batches = case["name"], RECORD["batches"][case["batches"]]
    known = FUNCTIONS.get(name, name) if isinstance(name, str) else name
    made = metric.create(known, *case["args"], **case["kwargs"])
    array = np.array if kind == "NumPy" else nd.array
    pairs = list(zip(batches["labels"], batches["predictions"], strict=True))
    for number, ((label, pred), readings) in enumerate(zip(pairs, case["readings"], strict=True)):
        if number == len(pairs) - 1:
            made.reset_local()
        made.update([array(label)], [array(pred)])
        founds = (made.get(), made.get_global())
        if (name, case["kwargs"]) == ("pearsoncorrelation", {"average": "micro"}):
            founds, readings = founds[1:], readings[:1]
        for found, (names, values) in zip(founds, readings, strict=True):
            assert found[0] == names
            expected = np.array(values, float)
            np.testing.assert_allclose(found[1], expected, rtol=1e-6, atol=1e-7)


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
    assert by_batch.get() == ("wrong", 2.0)
    assert by_sample.get() == ("wrong", 0.5)


def test_a_class_of_ones_own_is_found_by_name() -> None:
    @metric.register
    @metric.alias("the ones")
    class AlsoOnes(metric.EvalMetric):
        def __init__(self, name: str = "more") -> None:
            super().__init__(name)

    assert isinstance(AlsoOnes, type)
    assert isinstance(metric.create("alsoones"), AlsoOnes)
    assert metric.create("the ones", name="mine").name == "mine"

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
    with pytest.raises(
        ArgumentValueError, match=r"named 'acu'; known: acc, accuracy, .*did you mean 'acc'"
    ):
        metric.create("acu")
    with pytest.raises(ArgumentTypeError, match="got int"):
        metric.create(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="top_k must be at least 1"):
        metric.create("top_k_accuracy", top_k=0)
    with pytest.raises(
        ArgumentValueError, match="equally many labels and predictions, got 4 and 3"
    ):
        metric.create("acc").update([LABELS], [PREDICTIONS[:3]])
    with pytest.raises(ArgumentValueError, match="got 2 and 1"):
        metric.create("ce").update([LABELS, LABELS], [PREDICTIONS])
    with pytest.raises(NotImplementedError, match="must define update"):
        metric.EvalMetric("mine").update([], [])
    with pytest.raises(ArgumentTypeError, match=r"subclass of mx.metric.EvalMetric"):
        metric.register(dict)  # type: ignore[type-var]
    with pytest.raises(ArgumentTypeError, match=r"TopKAccuracy.*unexpected keyword argument 'k'"):
        metric.create("top_k_accuracy", k=3)


@pytest.mark.parametrize(
    ("name", "labels", "predictions", "text"),
    [
        ("ce", [0, 3], [[0.5, 0.5], [0.5, 0.5]], "from 0 to 1, got 0 to 3"),
        ("nll_loss", [0, -1], [[0.5, 0.5], [0.5, 0.5]], "labels must be from 0 to 1, got -1"),
        ("perplexity", [0, 5], [[0.5, 0.5], [0.5, 0.5]], "labels must be from 0 to 1, got 0 to 5"),
        (
            "perplexity",
            [0, 1, 1],
            [[0.5, 0.5], [0.5, 0.5]],
            "2 samples of 2 classes, but there are 3 labels",
        ),
        (
            "acc",
            [[0, 1], [1, 1]],
            [[0.5, 0.5, 0], [0.5, 0.5, 0]],
            "2 answers, but there are 4 labels",
        ),
        ("f1", [0, 1, 2], [[0.5, 0.5]] * 3, "labels must have at most two classes"),
        ("f1", [0, 1], [0.5, 0.5], r"predictions must have shape \(n, 2\)"),
        ("pearsonr", [0, 1], [[0.5], [0.5]], r"got \(2,\) and \(2, 1\)"),
        ("pcc", [0, -1], [[0.5, 0.5], [0.5, 0.5]], "class numbers must be at least 0, got -1"),
    ],
)
def test_batches_that_do_not_fit_are_refused_and_count_nothing(
    name: str, labels: Any, predictions: Any, text: str
) -> None:
    made = metric.create(name)
    with pytest.raises(ArgumentValueError, match=text):
        made.update([np.array(labels)], [np.array(predictions)])
    assert math.isnan(made.get()[1])


@pytest.mark.parametrize("name", ["ce", "nll_loss", "perplexity"])
def test_labels_of_two_dimensions_are_one_label_for_each_row_of_classes(name: str) -> None:
    rng = np.random.default_rng(1)
    labels, predictions = rng.integers(0, 4, (3, 5)), rng.uniform(0.1, 1, (3, 5, 4))
    flat, whole = metric.create(name), metric.create(name)
    whole.update([labels], [predictions])
    flat.update([labels.reshape(-1)], [predictions.reshape(-1, 4)])
    assert whole.get() == flat.get()
    assert whole.num_inst == 15


@pytest.mark.parametrize(
    "made",
    [
        metric.Accuracy(2, "mine", ["out"], ["label"]),
        metric.TopKAccuracy(3),
        metric.Perplexity(0, 1),
        metric.F1(average="micro"),
        metric.PearsonCorrelation("r", average="micro"),
        metric.CrossEntropy(0.5),
        metric.PCC(),
        metric.create(["acc", metric.MCC("m", average="micro"), ["ce", "mse"]]),
    ],
    ids=lambda made: str(made.name),
)
def test_a_metric_can_be_made_again_from_its_configuration_as_a_mapping_or_as_json(
    made: metric.EvalMetric,
) -> None:
    config = made.get_config()
    for again in (metric.create(config), metric.create(json.dumps(config))):
        assert type(again) is type(made)
        assert again.get()[0] == made.get()[0]
        assert again.get_config() == config


def test_a_configuration_that_holds_no_metric_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match="is not JSON"):
        metric.create('["acc"')
    with pytest.raises(ArgumentValueError, match=r'in JSON must be \{"metric": "acc"'):
        metric.create('{"name": "acc"}')
    with pytest.raises(NotSupportedError, match="is a function"):
        metric.np(largest).get_config()


def test_arrays_are_chosen_by_their_names() -> None:
    made = metric.create("acc", output_names=["softmax"], label_names=["class"])
    labels = {"class": LABELS, "weight": LABELS}
    outputs = {"hidden": LABELS[:1], "softmax": PREDICTIONS}
    made.update_dict(labels, outputs)
    assert made.get() == ("accuracy", 0.5)
    with pytest.raises(
        ArgumentValueError, match="output_names has unknown names 'softmax'; known: 'x'"
    ):
        made.update_dict(labels, {"x": PREDICTIONS})
    everything = metric.create("acc")
    everything.update_dict({"a": LABELS}, {"b": PREDICTIONS})
    both = metric.CompositeEvalMetric(["acc", made], output_names=["softmax"])
    both.update_dict({"class": LABELS}, outputs)
    assert both.get_name_value() == everything.get_name_value() * 2


def test_outputs_without_labels_may_be_left_out_of_a_function() -> None:
    made = metric.np(largest, allow_extra_outputs=True)
    made.update([LABELS], [LABELS + 2, PREDICTIONS])
    assert made.get() == ("largest", 2.0)
    with pytest.raises(ArgumentValueError, match="got 1 and 2"):
        metric.np(largest).update([LABELS], [LABELS, PREDICTIONS])
    assert metric.create(lambda label, pred: 1.0).name == "custom(<lambda>)"


def test_a_class_that_counts_the_global_numbers_itself_as_in_mxnet_is_not_counted_twice() -> None:
    class Both(metric.EvalMetric):
        def __init__(self) -> None:
            super().__init__("both", has_global_stats=True, unit="s")

        def update(self, labels: Sequence[Any], preds: Sequence[Any]) -> None:
            self.sum_metric += 3.0
            self.global_sum_metric += 3.0
            self.num_inst += 1
            self.global_num_inst += 1

    made = Both()
    made.update([], [])
    made.reset_local()
    made.update([], [])
    assert (made.get(), made.get_global()) == (("both", 3.0), ("both", 3.0))
    assert (made.num_inst, made.global_num_inst) == (1, 2)
    assert made.get_config()["unit"] == "s"


class Range:
    """What computes a value of its own, in the manner of torchmetrics."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[float] = []

    def update(self, preds: Any, target: Any) -> None:
        self.seen += [float(each) for each in (preds - target).reshape(-1)]

    def compute(self) -> Any:
        return {"low": np.float32(min(self.seen)), "high": max(self.seen)}


def test_an_object_that_computes_is_a_metric_with_both_kinds_of_reset() -> None:
    mine = Range()
    made = metric.create(mine, name="range")
    assert math.isnan(made.get()[1])
    made.update([np.array([1.0, 2.0])], [np.array([1.5, 0.0])])
    made.reset_local()
    made.update([np.array([1.0])], [np.array([5.0])])
    assert made.get() == (["low", "high"], [4.0, 4.0])
    assert made.get_global_name_value() == [("low", -2.0), ("high", 4.0)]
    assert mine.compute()["low"] == -2.0
    made.reset_local()
    assert math.isnan(made.get()[1])
    made.reset()
    assert mine.seen == []


def test_an_object_of_torch_gets_tensors_and_tensors_are_taken_as_they_are() -> None:
    torch = pytest.importorskip("torch")

    class Largest(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.reset()

        def reset(self) -> None:
            self.largest = torch.zeros(())

        def update(self, preds: Any, target: Any) -> None:
            self.largest = torch.maximum(self.largest, (preds - target).abs().max())

        def compute(self) -> Any:
            return self.largest

    made = metric.create([Largest(), "mae"])
    pred = torch.tensor([1.0, 2.0], requires_grad=True)
    made.update([torch.tensor([0.0, 4.0])], [pred * 1.0])
    assert made.get() == (["largest", "mae"], [2.0, 1.5])
    halved = metric.create("acc")
    halved.update([torch.tensor(LABELS)], [torch.tensor(PREDICTIONS).to(torch.bfloat16)])
    assert halved.get() == ("accuracy", 0.5)


@pytest.mark.parametrize("config", [{}, {"name": "acc"}])
def test_a_configuration_without_the_metric_says_what_is_missing(config: Any) -> None:
    with pytest.raises(ArgumentValueError, match='"metric": "acc"'):
        metric.create(config)
