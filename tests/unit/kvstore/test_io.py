"""``NDArrayIter``: batches, what is left at the end of a pass, and other orders."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import ArgumentValueError
from kvstore.io import NDArrayIter


def passes(iterator: NDArrayIter, number: int) -> list[list[list[int]]]:
    found = []
    for _ in range(number):
        found.append([batch.data[0].tolist() for batch in iterator])
        iterator.reset()
    return found


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
    assert (first.data[0].tolist(), first.pad) == ([[0, 1], [2, 3]], 0)
    assert first.label is not None
    assert first.label[0].tolist() == [5, 6]
    assert second.label is not None
    assert (second.label[0].tolist(), second.pad) == ([7, 5], 1)
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
        ({"data": np.zeros(3), "batch_size": 4}, "batches of 4"),
        ({"data": np.zeros(3), "batch_size": 0}, "batches of 0"),
        ({"data": np.float32(3)}, "n, ..."),
        ({"data": np.zeros(3), "label": np.zeros(2)}, "equally many rows"),
        ({"data": np.zeros(3), "last_batch_handle": "keep"}, "pad, discard, roll_over"),
    ],
)
def test_what_does_not_fit_is_said(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(ArgumentValueError, match=sentence):
        NDArrayIter(**arguments)  # type: ignore[arg-type]


def test_a_dict_of_one_array_is_that_array() -> None:
    x, y = np.arange(6).reshape(3, 2), np.array([5.0, 6.0, 7.0])
    iterator = NDArrayIter({"data": x}, {"softmax_label": y}, 3)
    assert iterator.data is x
    assert iterator.label is y


@pytest.mark.parametrize("given", [{}, {"a": np.zeros(3), "b": np.zeros(3)}])
def test_other_dicts_are_refused_and_it_is_said_what_is_taken(given: dict[str, object]) -> None:
    with pytest.raises(
        ArgumentValueError, match=r"a dict with one .* got a dict of (0|2: 'a', 'b')"
    ):
        NDArrayIter(given)
    with pytest.raises(ArgumentValueError, match=r"label is one array .*\{'label': array\}"):
        NDArrayIter(np.zeros(3), given)
