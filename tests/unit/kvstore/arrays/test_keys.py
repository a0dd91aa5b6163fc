"""Keys and values as callers pass them, and the checks that come before any effect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvstore.arrays.dtypes import keeps_kind
from kvstore.arrays.keys import Generations
from kvstore.errors import (
    ArgumentTypeError,
    DuplicateKeyError,
    KeyTypeError,
    UnknownKeyError,
    ValueMismatchError,
)
from kvstore.mxnet.nd.methods import native_dtype
from kvstore.stores.arguments import KeyTable, group_values, normalise_keys, spec_of

A, B, C = (np.full(2, value) for value in (1.0, 2.0, 3.0))


def grouped(key: object, value: object) -> dict[object, list[float]]:
    return {key: [float(a[0]) for a in arrays] for key, arrays in group_values(key, value).items()}


def table(**specs: Any) -> KeyTable:
    made = KeyTable()
    made.add({key: spec_of(array) for key, array in specs.items()})
    return made


def test_one_key_takes_an_array_or_a_list_of_one_per_device() -> None:
    assert grouped("w", A) == {"w": [1.0]}
    assert grouped("w", [A, B]) == {"w": [1.0, 2.0]}
    assert grouped(3, (A, B)) == {3: [1.0, 2.0]}


def test_a_list_of_keys_takes_a_parallel_list() -> None:
    assert grouped(["w", "v"], [A, [B, C]]) == {"w": [1.0], "v": [2.0, 3.0]}
    assert grouped((1,), ([A, B],)) == {1: [1.0, 2.0]}
    assert grouped([], []) == {}


def test_a_key_that_stands_twice_is_one_group_in_order() -> None:
    assert grouped(["w", "v", "w"], [A, B, [C, A]]) == {"w": [1.0, 3.0, 1.0], "v": [2.0]}


def test_numpy_integers_are_int_keys() -> None:
    keys, single = normalise_keys(np.int64(7))
    assert (keys, single) == ([7], True)
    assert type(keys[0]) is int
    assert normalise_keys([np.uint8(1), 2]) == ([1, 2], False)


@pytest.mark.parametrize(
    "key", [True, np.True_, 1.0, None, b"w", ("w", None), [["w"]], 2**63, {"w": 1}]
)
def test_other_keys_are_refused(key: object) -> None:
    with pytest.raises(KeyTypeError):
        normalise_keys(key)


def test_keys_of_both_kinds_in_one_call_are_refused() -> None:
    with pytest.raises(KeyTypeError, match="all int or all str"):
        normalise_keys(["w", 1])


@pytest.mark.parametrize(
    ("key", "value"),
    [(["w", "v"], [A]), (["w"], [A, B]), (["w"], A), ("w", []), (["w", "v"], [A, []])],
)
def test_too_few_or_too_many_values_are_refused(key: object, value: object) -> None:
    with pytest.raises(ValueMismatchError):
        group_values(key, value)


@pytest.mark.parametrize("value", [1.0, [1.0, 2.0], [[A]], "text", np.array(["text"]), None])
def test_values_that_are_no_arrays_of_numbers_are_refused(value: object) -> None:
    with pytest.raises(ArgumentTypeError):
        group_values("w", value)


def test_a_spec_counts_elements_and_bytes() -> None:
    for array, expected in [
        (np.zeros((2, 3), np.float32), (6, 24)),
        (np.array(1.0), (1, 8)),
        (np.zeros((0, 5)), (0, 0)),
    ]:
        spec = spec_of(array)
        assert (spec.num_elements, spec.nbytes) == expected


def test_byte_order_is_no_part_of_a_dtype() -> None:
    assert spec_of(np.zeros(2, ">f4")) == spec_of(np.zeros(2, "<f4"))


def test_a_known_key_cannot_be_initialised_again() -> None:
    with pytest.raises(DuplicateKeyError, match="'w' is already initialized"):
        table(w=A).check_init(["v", "w"], [A, B])


def test_a_key_that_stands_twice_in_one_init_is_refused_even_if_not_adjacent() -> None:
    with pytest.raises(DuplicateKeyError, match="'w' appears twice"):
        KeyTable().check_init(["w", "v", "w"], [A, B, C])
    with pytest.raises(DuplicateKeyError, match="'w' has several values"):
        KeyTable().check_init("w", [A, B])


def test_an_unknown_key_is_named_with_what_to_do() -> None:
    with pytest.raises(UnknownKeyError, match=r"key 'v' .* call init\('v', value\) first"):
        table(w=A).check_push("v", A)


def test_a_store_of_str_keys_takes_no_int_keys() -> None:
    for check in (table(w=A).check_push, table(w=A).check_out, table(w=A).check_init):
        with pytest.raises(KeyTypeError, match="the store has 'w', the call names 1"):
            check(1, A)


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros((2, 1)), np.zeros(2, np.float32)])
def test_a_push_must_have_the_shape_and_dtype_of_the_key(wrong: Any) -> None:
    with pytest.raises(ValueMismatchError) as raised:
        table(w=A).check_push("w", [A, wrong])
    for side in ("shape (2,) of float64", f"shape {wrong.shape} of {wrong.dtype}"):
        assert side in str(raised.value)


def test_an_array_to_fill_may_have_another_dtype_but_not_another_shape() -> None:
    known = table(w=A)
    known.check_out("w", [np.zeros(2, np.complex64), np.zeros(4, np.float16)[::2]])
    with pytest.raises(ValueMismatchError, match=r"\(2,\).*\(2, 1\)"):
        known.check_out("w", np.zeros((2, 1)))


def test_a_read_only_array_cannot_be_filled() -> None:
    out = np.zeros(2)
    out.setflags(write=False)
    with pytest.raises(ValueMismatchError, match="read-only"):
        table(w=A).check_out("w", out)


def test_a_complex_value_is_not_cut_to_its_real_part() -> None:
    with pytest.raises(
        ValueMismatchError, match="has dtype complex64, and the array to fill has float64"
    ):
        table(w=np.zeros(2, "c8")).check_out("w", A)


@pytest.mark.parametrize("wanted", ["int32", "uint8", "bool"])
def test_floats_are_not_cut_to_integers_and_both_dtypes_are_named(wanted: str) -> None:
    known = table(w=A)
    text = (
        f"^key 'w' has dtype float64, and the array to fill has {wanted}, .* "
        f"array.astype\\('{wanted}'\\)$"
    )
    with pytest.raises(ValueMismatchError, match=text):
        known.check_out("w", [A.copy(), np.zeros(2, wanted)])
    with pytest.raises(ValueMismatchError, match=text):
        KeyTable().check_broadcast("w", A, np.zeros(2, wanted))


@pytest.mark.parametrize(
    ("source", "target", "is_kept"),
    [
        ("float64", "float16", True),
        ("int64", "int8", True),
        ("int32", "float16", True),
        ("bool", "uint8", True),
        ("float32", "bfloat16", True),
        ("bfloat16", "float16", True),
        ("float16", "bfloat16", True),
        ("bfloat16", "float64", True),
        ("int16", "bfloat16", True),
        ("bfloat16", "int32", False),
        ("bfloat16", "bool", False),
        ("complex64", "bfloat16", False),
        ("int32", "uint8", False),
        ("uint8", "bool", False),
        ("float16", "int64", False),
    ],
)
def test_values_are_cast_by_the_rule_same_kind_and_bfloat16_is_a_float(
    source: str, target: str, is_kept: bool
) -> None:
    assert keeps_kind(native_dtype(source), native_dtype(target)) is is_kept


def test_pull_and_broadcast_need_an_array_to_fill_for_each_key() -> None:
    with pytest.raises(ValueMismatchError, match="got 2 keys and 1 values"):
        table(w=A, v=B).check_out(["w", "v"], [B])
    with pytest.raises(ValueMismatchError, match="a list of 2 keys"):
        KeyTable().check_broadcast(["w", "v"], [A, A], B)
    with pytest.raises(ValueMismatchError, match=r"\(2,\).*\(3,\)"):
        KeyTable().check_broadcast("w", A, [B, np.zeros(3)])


def test_a_key_that_is_nearly_one_is_suggested() -> None:
    known = table(weight=A, bias=B)
    with pytest.raises(UnknownKeyError, match=r"key 'wieght' is .* did you mean 'weight'\? If not"):
        known.check_push("wieght", A)
    with pytest.raises(UnknownKeyError, match=r"^key 'x' is not in the store; call init"):
        known.check_push("x", A)


def test_numbers_are_not_guessed() -> None:
    known = KeyTable()
    known.add({3: spec_of(A)})
    with pytest.raises(UnknownKeyError, match=r"^key 4 is not in the store; call init\(4, value\)"):
        known.check_push(4, A)


def test_generations_count_up_and_forget_only_downwards() -> None:
    generations = Generations()
    for _ in range(3):
        generations.begin("w")
        generations.end("w")
    assert generations.following("w") == 4
    generations.begin("v")
    generations.end("v")
    generations.undo("v")
    assert generations.following("v") == 1
    for number in range(100_000):
        generations.begin(number)
        generations.end(number)
    assert len(generations) < 2000
    assert generations.following("w") >= 4
    generations.end("never there")
    generations.undo("never there")
    assert generations.begin("w") == generations.following("never there")
