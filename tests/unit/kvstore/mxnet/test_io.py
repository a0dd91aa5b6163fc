"""``NDArrayIter`` and ``ResizeIter``: batches, what is left at the end of a pass, other orders."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstore as mx
from kvstore.errors import ArgumentValueError, NotSupportedError
from kvstore.mxnet import nd
from kvstore.mxnet.io import DataBatch, DataDesc, NDArrayIter, ResizeIter

REFERENCE = Path(__file__).parents[3] / "reference"
RECORDED = json.loads((REFERENCE / "arrays.json").read_text(encoding="utf-8"))["batches"]


def passes(iterator: NDArrayIter, number: int) -> list[list[list[int]]]:
    found = []
    for _ in range(number):
        found.append([batch.data[0].asnumpy().tolist() for batch in iterator])
        iterator.reset()
    return found


def test_batches_names_and_shapes_are_mxnets() -> None:
    again = runpy.run_path(str(REFERENCE / "record_arrays.py"))["batches"](mx)
    for ours, theirs in zip(json.loads(json.dumps(list(again))), RECORDED, strict=True):
        if theirs[2] == "roll_over":  # there, pad counts samples that were kept, which fill nothing
            for batch in (batch for one_pass in theirs[4] for batch in one_pass):
                batch[1] = 0
        assert ours == theirs


def test_batches_are_float32_arrays_unless_the_source_is_one_of_another_dtype() -> None:
    x = np.arange(6).reshape(3, 2)
    iterator = NDArrayIter([x, nd.array(x, dtype="int32")], x[:, 0], 2, label_name="y")
    batch = iterator.next()
    assert [type(each) for each in batch.data] == [nd.NDArray] * 2
    assert [str(each.dtype) for each in batch.data] == ["float32", "int32"]
    assert [(name, array.shape) for name, array in iterator.data] == [
        *(("_0_data", (3, 2)), ("_1_data", (3, 2))),
    ]
    assert [name for name, _ in iterator.label] == ["y"]
    assert NDArrayIter(x, data_name="x").provide_label == []
    assert NDArrayIter(x).next().label == []
    (name, shape), other = iterator.provide_data
    assert (name, shape, other.dtype, other.layout) == ("_0_data", (2, 2), np.int32, "NCHW")
    assert repr(DataDesc("x", [2, 3], layout="NT")) == "DataDesc[x,(2, 3),float32,NT]"


def test_a_batch_is_made_of_its_data_alone() -> None:
    x = nd.ones((2, 2))
    batch = DataBatch([x])
    assert (batch.data[0] is x, batch.label, batch.pad) == (True, None, 0)
    batch.label = [x]
    assert DataBatch([x], [x], 1, np.arange(2), bucket_key=3).bucket_key == 3


def test_the_order_of_a_pass_can_be_read_and_kept_samples_can_be_forgotten() -> None:
    iterator = NDArrayIter(np.arange(5) * 10, None, 2, True, "roll_over", seed=4)
    first = iterator.idx
    assert sorted(first) == list(range(5))
    batches = list(iterator)
    assert [each.index.tolist() for each in batches if each.index is not None] == [
        *(first[:2].tolist(), first[2:4].tolist()),
    ]
    assert batches[0].data[0].asnumpy().tolist() == (first[:2] * 10).tolist()
    iterator.reset()
    assert next(iterator).data[0].asnumpy()[0] == first[4] * 10
    iterator.hard_reset()
    assert [int(value) // 10 for value in next(iterator).data[0].asnumpy()] == [
        *iterator.idx[:2],
    ]


@pytest.mark.parametrize(
    ("handling", "expected"),
    [
        ("pad", [[[0, 1], [2, 3], [4, 0]]] * 2),
        ("discard", [[[0, 1], [2, 3]]] * 2),
        ("roll_over", [[[0, 1], [2, 3]], [[4, 0], [1, 2], [3, 4]], [[0, 1], [2, 3]]]),
    ],
)
def test_what_is_left_is_filled_up_left_out_or_kept(
    handling: str, expected: list[list[list[int]]]
) -> None:
    iterator = NDArrayIter(np.arange(5), batch_size=2, last_batch_handle=handling)
    assert passes(iterator, len(expected)) == expected


def test_a_batch_has_data_label_and_its_padding() -> None:
    iterator = NDArrayIter(np.arange(6).reshape(3, 2), np.array([5, 6, 7]), 2)
    first, second = iterator.next(), iterator.next()
    assert (first.data[0].asnumpy().tolist(), first.pad) == ([[0, 1], [2, 3]], 0)
    assert [each.label[0].asnumpy().tolist() for each in (first, second) if each.label] == [
        *([5, 6], [7, 5]),
    ]
    assert second.pad == 1
    with pytest.raises(StopIteration):
        iterator.next()


def test_each_pass_is_shuffled_anew_and_equal_seeds_repeat() -> None:
    one, other = (NDArrayIter(np.arange(20), batch_size=20, shuffle=True) for _ in range(2))
    first, second = passes(one, 2)
    assert sorted(first[0]) == sorted(second[0]) == list(range(20))
    assert first != second
    assert passes(other, 2) == [first, second]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"data": np.zeros(3), "batch_size": 4, "last_batch_handle": "discard"}, "got 4 for data"),
        ({"data": np.zeros((0, 2)), "batch_size": 1}, r"\(0, 2\)"),
        ({"data": {}}, "non-empty list or dict"),
        ({"data": np.zeros(3), "batch_size": 0}, "got 0 for data"),
        ({"data": np.float32(3)}, r"\(n, \.\.\.\), got a single number for 'data'"),
        ({"data": np.zeros(3), "label": np.zeros(2)}, "the same number of samples"),
        ({"data": np.zeros(3), "last_batch_handle": "keep"}, "pad, discard, roll_over"),
    ],
)
def test_what_does_not_fit_is_said(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ArgumentValueError, match=sentence):
        NDArrayIter(**arguments)  # type: ignore[arg-type]


def test_feedforward_gets_the_arrays_that_were_given() -> None:
    x, y = np.arange(6).reshape(3, 2), np.array([5, 6, 7])
    iterator = NDArrayIter({"data": x}, {"softmax_label": y}, 2)
    assert iterator.sources() == (x, y)
    batches: list[Any] = list(iterator.on_host())
    assert [batch.data[0].dtype for batch in batches] == [x.dtype] * 2
    assert [batch.pad for batch in batches] == [0, 1]
    assert NDArrayIter(x).sources()[1] is None
    with pytest.raises(ArgumentValueError, match=r"one data array .* data has 2: 'a', 'b'"):
        NDArrayIter({"b": x, "a": x}).sources()


def test_samples_lie_along_the_first_axis() -> None:
    with pytest.raises(
        NotSupportedError, match=r"first axis of layout must be N \(samples\), got 'TNC'"
    ):
        NDArrayIter(np.zeros((3, 2)), layout="TNC")


# -- ResizeIter ----------------------------------------------------------------------------


def first_samples(iterator: ResizeIter) -> list[float]:
    return [float(batch.data[0].asnumpy()[0]) for batch in iterator]


def test_a_resized_pass_has_exactly_so_many_batches_and_starts_over_within_one() -> None:
    resized = ResizeIter(NDArrayIter(np.arange(6), batch_size=2), 5)
    assert first_samples(resized) == [0, 2, 4, 0, 2]
    assert first_samples(resized) == []  # as for any iterator, until it is reset
    resized.reset()
    assert first_samples(resized) == [0, 2, 4, 0, 2]
    assert (resized.batch_size, resized.provide_label) == (2, [])
    assert resized.provide_data == [DataDesc("data", (2,))]


def test_a_shorter_pass_goes_on_where_the_last_one_stopped_if_it_is_not_to_reset() -> None:
    resized = ResizeIter(NDArrayIter(np.arange(6), batch_size=2), 2, reset_internal=False)
    assert first_samples(resized) == [0, 2]
    resized.reset()
    assert resized.next().data[0].asnumpy().tolist() == [4, 5]
    assert first_samples(resized) == [0]


def test_a_size_below_one_and_an_empty_iterator_are_refused() -> None:
    with pytest.raises(ArgumentValueError, match="at least 1 batch, got 0"):
        ResizeIter(NDArrayIter(np.arange(6)), 0)
    with pytest.raises(TypeError):
        ResizeIter(NDArrayIter(np.arange(6)), 1.5)  # type: ignore[arg-type]
    resized = ResizeIter(NothingToRead(), 2)
    with pytest.raises(ArgumentValueError, match="no batch, not even after"):
        resized.next()


class NothingToRead:
    """An iterator of another library, with an empty file."""

    batch_size, provide_data, provide_label = 2, (), ()

    def __next__(self) -> Any:
        raise StopIteration

    def reset(self) -> None:
        pass
