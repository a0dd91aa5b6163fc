"""Objects as bytes and arrays: what is packed comes back, and nothing else can come out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.protocol.objects import pack_object, unpack_object
from pslite.errors import ProtocolError
from pslite.wire.codec import pack_value


def there_and_back(value: object) -> Any:
    tree, arrays = pack_object(value)
    return unpack_object(tree, np.concatenate([np.empty(0, np.uint8), *arrays]))


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.integers(-9, 9) | st.text() | st.tuples(st.text(), st.integers(0, 9))
OBJECTS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
)


@given(OBJECTS)
def test_plain_objects_come_back_as_they_were(value: object) -> None:
    found = there_and_back(value)
    assert found == value
    assert repr(found) == repr(value)  # 1 is not True, and a tuple is not a list


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float32", "complex128"])
def test_arrays_come_back_between_other_values(shape: tuple[int, ...], dtype: str) -> None:
    array = np.ones(shape, dtype)
    found = there_and_back({"a": [array, 5, (np.zeros_like(array),)], 3: np.float32(1.5)})
    assert found["a"][1] == 5
    assert found[3] == 1.5
    for got, wanted in [(found["a"][0], array), (found["a"][2][0], np.zeros_like(array))]:
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_array_equal(got, wanted)


def test_tensors_come_back_as_arrays_of_numpy() -> None:
    torch = pytest.importorskip("torch")
    state = {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"betas": (0.9, 0.99)}]}
    found = there_and_back(state)
    assert found == {"state": {0: {"step": np.float32(3)}}, "groups": [{"betas": (0.9, 0.99)}]}


def test_sets_come_back_as_sets() -> None:
    assert there_and_back([{1, ("a", 2)}, set()]) == [{1, ("a", 2)}, set()]


@pytest.mark.parametrize("value", [1 << 63, (1 << 64) - 1, -(1 << 63), -(1 << 64), 3**200])
def test_ints_of_any_size_come_back(value: int) -> None:
    assert there_and_back({"state": [value, {value: True}]}) == {"state": [value, {value: True}]}


class Odd:
    """A class of the user."""


@pytest.mark.parametrize(
    "value", [Odd(), {"a": [Odd()]}, frozenset({1}), 1j, np.array([None]), len]
)
def test_what_is_not_plain_is_refused_with_its_type(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match="an object may hold"):
        pack_object(value)


def test_what_is_too_large_or_too_deep_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(ArgumentValueError, match="cannot be encoded"):
        pack_object(deep)
    with pytest.raises(ArgumentValueError, match="put large data into arrays"):
        pack_object(bytes(17 << 20))


@pytest.mark.parametrize(
    "tree",
    [
        [],
        ["x"],
        [5],
        {"a": 1},
        ["d", 1],
        ["d", ["l"], 1],
        ["a", "<f4"],
        ["a", "|O8", [1]],
        ["a", "<f4", [-1]],
        ["a", "<f4", [3]],
        ["a", "<f4", 1],
        ["i", 5],
        ["i", "0x"],
        ["i", "7"],
        ["l"],
    ],
)
def test_a_malformed_tree_is_refused(tree: Any) -> None:
    with pytest.raises(ProtocolError):
        unpack_object(pack_value(tree), np.zeros(8, np.uint8))


@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        unpack_object(data, np.empty(0, np.uint8))
    except ProtocolError:
        return
