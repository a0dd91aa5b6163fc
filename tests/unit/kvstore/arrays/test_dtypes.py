"""Which dtypes a store can hold, how they are named on the wire, and in which it adds."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvstore.arrays.dtypes import (
    accumulation_dtype,
    bfloat16,
    check_dtype,
    dtype_of,
    dtype_text,
    is_bfloat16,
    is_float,
)
from kvstore.errors import ArgumentTypeError, MissingDependencyError
from pslite.errors import ProtocolError

NUMBERS = [*"?bBhHiIqQefdgFDG", ">f4", ">i8", ">c16"]


@pytest.mark.parametrize("text", NUMBERS)
def test_a_number_dtype_is_accepted_and_survives_its_text(text: str) -> None:
    dtype = np.dtype(text)
    check_dtype(dtype)
    assert dtype_of(dtype_text(dtype)) == dtype


@pytest.mark.parametrize("text", ["O", "U3", "S3", "M8[s]", "m8[s]", "f4,i4", "V8", "V2"])
def test_a_dtype_that_cannot_be_added_is_refused(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"use bool, bfloat16"):
        check_dtype(np.dtype(text))
    with pytest.raises(ProtocolError):
        dtype_of(np.dtype(text).str)


@pytest.mark.parametrize("text", ["", "bfloat17", "<f3", "f4", "float32", "<f4 ", "|O8", None, 4])
def test_a_text_that_names_no_dtype_of_a_store_is_refused(text: object) -> None:
    with pytest.raises(ProtocolError, match="cannot hold the dtype"):
        dtype_of(text)


def test_halves_are_added_in_float32_and_all_else_in_its_own_dtype() -> None:
    assert accumulation_dtype(np.dtype(np.float16)) == np.float32
    for text in NUMBERS:
        if text != "e":
            assert accumulation_dtype(np.dtype(text)) == np.dtype(text)


def test_real_floats_are_told_from_other_numbers() -> None:
    assert {text for text in NUMBERS if is_float(np.dtype(text))} == {*"efdg", ">f4"}


def test_bfloat16_is_a_float_by_its_name_and_is_added_in_float32() -> None:
    pytest.importorskip("ml_dtypes")
    dtype = bfloat16()
    check_dtype(dtype)
    assert is_bfloat16(dtype)
    assert is_float(dtype)
    assert accumulation_dtype(dtype) == np.float32
    assert dtype_text(dtype) == "bfloat16"
    assert dtype_of("bfloat16") == dtype


def test_bfloat16_of_the_other_byte_order_is_refused() -> None:
    # NumPy would take its bytes for another number without a word.
    pytest.importorskip("ml_dtypes")
    swapped = bfloat16().newbyteorder("S")
    assert not is_bfloat16(swapped)
    with pytest.raises(ArgumentTypeError, match="a store cannot hold"):
        check_dtype(swapped)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "int4", "uint4"])
def test_the_small_dtypes_of_ml_dtypes_are_refused_with_advice(name: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(getattr(ml_dtypes, name))
    assert not is_float(dtype)
    with pytest.raises(
        ArgumentTypeError, match="bfloat16 is the only dtype of ml_dtypes that it supports; convert"
    ):
        check_dtype(dtype)


def test_without_its_package_bfloat16_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # what importing it meets is ImportError
    for call in (bfloat16, lambda: dtype_of("bfloat16")):
        with pytest.raises(MissingDependencyError, match=r"pip install\s+ml_dtypes"):
            call()
    assert not is_bfloat16(np.dtype(np.float16))


def test_no_optional_package_is_imported_before_one_of_its_arrays_is_met() -> None:
    program = (
        "import sys, kvstore, kvstore.arrays.dtypes, numpy\n"
        "kvstore.create('device').init('w', numpy.ones(3))\n"
        "print([name for name in ('ml_dtypes', 'torch', 'jax', 'cupy') if name in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "[]"
