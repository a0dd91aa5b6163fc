"""Array functions against what MXNet 1.9.1 returned; see ``tests/reference/record_arrays.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import ArgumentTypeError, ValueMismatchError
from kvstore.mxnet import nd
from kvstore.mxnet.nd import NDArray

PATH = Path(__file__).parents[4] / "reference" / "arrays.json"
RECORDED: dict[str, list[Any]] = json.loads(PATH.read_text(encoding="utf-8"))


def test_every_code_of_reshape_means_what_it_does_in_mxnet() -> None:
    for old, new, reverse, expected in RECORDED["reshape"]:
        if expected is None and {-1, -2} <= set(new):
            continue  # behind -2, MXNet computes -1 and then writes it to another axis
        try:
            made = nd.arange(int(np.prod(old))).reshape(old).reshape(new, reverse=reverse)
        except ValueMismatchError:
            assert expected is None, (old, new, reverse)
        else:
            assert made.asnumpy().ravel().tolist() == list(range(made.size))
            assert list(made.shape) == expected, (old, new, reverse)


@pytest.mark.parametrize(
    ("old", "codes", "expected"),
    [
        ((2, 3, 4), (-2,), (2, 3, 4)),
        ((2, 3, 4), (0, -2), (2, 3, 4)),
        ((2, 3, 4), (-3, -2), (6, 4)),
        ((2, 3, 4), (-4, 1, 2, -2), (1, 2, 3, 4)),
        ((24,), (24 / 2, 2), (12, 2)),
    ],
)
def test_the_function_and_the_method_of_reshape_are_one(
    old: tuple[int, ...], codes: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    array = nd.zeros(old)
    for made in (nd.reshape(array, codes), array.reshape(codes), array.reshape(*codes)):
        assert made.shape == expected
        made[:] += 1  # the same memory
    assert array.asnumpy().min() == 3


@pytest.mark.parametrize(
    "codes", [(-5,), (0, 0), (-3, 1), (-4, 2), (-4, 0, -1), (-4, -1, -1), (5,)]
)
def test_codes_that_do_not_fit_are_refused(codes: tuple[int, ...]) -> None:
    with pytest.raises(ValueMismatchError, match=r"cannot reshape an array of shape \(6,\)"):
        nd.zeros(6).reshape(codes)
    with pytest.raises(ArgumentTypeError, match="a shape must be an int or a tuple"):
        nd.zeros(6).reshape((1.5, 4))


@pytest.mark.parametrize("number", range(len(RECORDED["calls"])))
def test_functions_return_what_mxnet_returned(number: int) -> None:
    name, arrays, options, expected = RECORDED["calls"][number]
    given = [nd.array(array) for array in arrays]
    if expected is None:
        with pytest.raises(ValueMismatchError):
            getattr(nd, name)(*given, **options)
        return
    check(getattr(nd, name)(*given, **options), expected)
    if hasattr(given[0], name):
        check(getattr(given[0], name)(*given[1:], **options), expected)


def check(made: Any, expected: Any) -> None:
    if isinstance(made, list):
        for one, values in zip(made, expected, strict=True):
            check(one, values)
        return
    assert isinstance(made, NDArray)
    assert made.shape == np.shape(expected)
    np.testing.assert_allclose(made.asnumpy(), np.array(expected, "f4"), rtol=1e-6)
