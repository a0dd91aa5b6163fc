"""Records what MXNet 1.9.1's metrics say of some batches, in ``metrics.json`` beside this file.

Run with a Python that has MXNet 1.9.1 and NumPy 1.23: ``python tests/reference/record_metrics.py``.
The file holds the batches too, so the tests need neither MXNet nor its random numbers. Each case
is read after every batch; before the last one the local numbers are reset.
"""

import json
import warnings
from pathlib import Path

import mxnet as mx
import numpy as np

warnings.simplefilter("ignore")
OUT = Path(__file__).with_name("metrics.json")
BATCHES = 4
random = np.random.RandomState(7)


def classes(count, *shape):
    """Labels below ``count``."""
    return [random.randint(0, count, shape).tolist() for _ in range(BATCHES)]


def likelihoods(*shape, axis=-1):
    """Positive numbers that add up to one along ``axis``; three digits, so that they are short."""
    made = []
    for _ in range(BATCHES):
        raw = random.uniform(0.01, 1, shape)
        made.append((raw / raw.sum(axis=axis, keepdims=True)).round(3).tolist())
    return made


def numbers(*shape):
    """Normal numbers of three digits."""
    return [random.normal(size=shape).round(3).tolist() for _ in range(BATCHES)]


def uneven(labels, preds):
    """The same with a shorter last batch."""
    return [*labels[:-1], labels[-1][:3]], [*preds[:-1], preds[-1][:3]]


def sum_and_number(label, pred):
    """A function for CustomMetric that gives a pair."""
    return np.abs(label - pred).sum(), label.size


def largest(label, pred):
    """A function for CustomMetric that gives a number."""
    return np.abs(label - pred).max()


FUNCTIONS = {each.__name__: each for each in (sum_and_number, largest)}
FOUR = uneven(classes(4, 6), likelihoods(6, 4))
TWO = uneven(classes(2, 6), likelihoods(6, 2))
COLUMN = classes(4, 6, 1), likelihoods(6, 4)
SEQUENCE = classes(4, 3, 2), likelihoods(3, 4, 2, axis=1)
SEQUENCE_LAST = classes(4, 3, 2), likelihoods(3, 2, 4)
FLAT = classes(4, 6), likelihoods(6, 4)
VECTOR = numbers(6), numbers(6)
TO_COLUMN = numbers(6), numbers(6, 1)
MATRIX = numbers(4, 3), numbers(4, 3)
ALL_ONE = [[1] * 6] * BATCHES, likelihoods(6, 2)
ANSWERS = classes(4, 6), classes(4, 6)

CASES = [
    ("acc", [], {}, FOUR),
    ("accuracy", [1, "mine"], {}, FOUR),
    ("acc", [], {}, COLUMN),
    ("acc", [], {"axis": 1}, SEQUENCE),
    ("acc", [2], {}, SEQUENCE_LAST),
    ("acc", [], {}, ANSWERS),
    ("top_k_accuracy", [2], {}, FOUR),
    ("top_k_acc", [], {"top_k": 3, "name": "top"}, FOUR),
    ("topkaccuracy", [4], {}, FOUR),
    ("ce", [], {}, FOUR),
    ("crossentropy", [0.1, "mine"], {}, FOUR),
    ("ce", [], {"eps": 1e-3}, COLUMN),
    ("nll_loss", [], {}, FOUR),
    ("negativeloglikelihood", [0.01], {}, COLUMN),
    ("perplexity", [None], {}, FOUR),
    ("perplexity", [2], {}, FOUR),
    ("perplexity", [0, -1, "mine"], {}, FLAT),
    ("perplexity", [], {"ignore_label": 1, "axis": 1}, FLAT),
    ("f1", [], {}, TWO),
    ("f1", [], {"average": "micro"}, TWO),
    ("f1", ["mine", None, None, "micro"], {}, ALL_ONE),
    ("mcc", [], {}, TWO),
    ("mcc", ["mine", None, None, "micro"], {}, TWO),
    ("mcc", [], {}, ALL_ONE),
    ("pcc", [], {}, TWO),
    ("pcc", [], {}, FOUR),
    ("pcc", ["mine"], {}, ANSWERS),
    ("pcc", [], {}, ALL_ONE),
    ("mae", [], {}, VECTOR),
    ("mae", [], {}, TO_COLUMN),
    ("mae", ["mine"], {}, MATRIX),
    ("mse", [], {}, VECTOR),
    ("mse", [], {}, TO_COLUMN),
    ("mse", [], {}, MATRIX),
    ("rmse", [], {}, VECTOR),
    ("rmse", [], {}, MATRIX),
    ("pearsonr", [], {}, VECTOR),
    ("pearsonr", [], {}, MATRIX),
    ("pearsoncorrelation", [], {"average": "micro"}, VECTOR),
    ("loss", [], {}, MATRIX),
    ("torch", [], {}, VECTOR),
    ("caffe", ["mine"], {}, VECTOR),
    ("sum_and_number", [], {}, VECTOR),
    ("largest", [], {}, VECTOR),
    (["acc", "ce", "mcc"], [], {}, TWO),
    ('["acc", {"name": "from a pair"}]', [], {}, FOUR),
    ('{"metric": "TopKAccuracy", "top_k": 2}', [], {}, FOUR),
]


def plain(found):
    """(name, value) for JSON: NaN as the text."""
    names, values = found
    if isinstance(names, list):
        return [names, [round(float(value), 9) for value in values]]
    return [names, "nan" if np.isnan(values) else round(float(values), 9)]


def record(name, args, kwargs, batches):
    """One row of the table."""
    metric = mx.metric.create(
        FUNCTIONS.get(name, name) if isinstance(name, str) else name, *args, **kwargs
    )
    readings = []
    for number, (label, pred) in enumerate(zip(*batches, strict=True)):
        if number == BATCHES - 1:
            metric.reset_local()
        metric.update([mx.nd.array(label)], [mx.nd.array(pred)])
        readings.append([plain(metric.get()), plain(metric.get_global())])
    return {"name": name, "args": args, "kwargs": kwargs, "readings": readings}


def main():
    """Write the table."""
    assert mx.__version__ == "1.9.1"
    known, rows = [], []
    for name, args, kwargs, batches in CASES:
        if batches not in known:
            known.append(batches)
        rows.append({**record(name, args, kwargs, batches), "batches": known.index(batches)})
    table = {
        "batches": [{"labels": each[0], "predictions": each[1]} for each in known],
        "cases": rows,
    }
    OUT.write_text(json.dumps(table, separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n")


if __name__ == "__main__":
    main()
