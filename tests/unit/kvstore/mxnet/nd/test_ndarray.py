"""``NDArray``: arithmetic, copies, views. How they are made: ``test_nd.py``."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import numpy as np
import pytest
from nd_helpers import check, counted

from kvstore import cpu
from kvstore.errors import ArgumentTypeError, ValueMismatchError
from kvstore.mxnet import nd
from kvstore.mxnet.nd import NDArray

# -- what it is ---------------------------------------------------------------------------


def test_an_array_tells_what_it_is() -> None:
    a = nd.zeros((2, 5), cpu(3), "float64")
    assert (a.shape, a.size, a.ndim, len(a)) == ((2, 5), 10, 2, 2)
    assert a.dtype == np.float64
    assert a.dtype == "float64"
    assert a.context == a.ctx == cpu(3)
    assert a.stype == "default"


def test_one_element_is_a_number_and_several_are_not() -> None:
    a = nd.array([2.5])
    assert (a.asscalar(), a.item(), float(a), int(a), bool(a)) == (2.5, 2.5, 2.5, 2, True)
    assert type(a.asscalar()) is np.float32
    assert type(a.item()) is float
    assert not nd.zeros(1)
    assert not nd.zeros((0, 3))
    assert ["a", "b"][nd.array([1], dtype="int32")] == "b"
    with pytest.raises(TypeError, match="integer array"):
        operator.index(a)
    with pytest.raises(ValueMismatchError, match="one element"):
        nd.ones(2).asscalar()
    with pytest.raises(ValueError, match="does not have one truth value"):
        bool(nd.ones(2))


def test_arrays_are_keys_of_dicts_by_identity() -> None:
    a, b = nd.ones(2), nd.ones(2)
    assert {a: "a", b: "b"}[a] == "a"


def test_copies_of_the_library_and_of_a_pickle_are_new_arrays() -> None:
    a = nd.full((2,), 3, cpu(1))
    for other in (copy.copy(a), copy.deepcopy([a])[0], pickle.loads(pickle.dumps(a))):
        other[:] = 4
        check(a, [3, 3])
        check(other, [4, 4])
        assert other.context == cpu(1)


# -- arithmetic ---------------------------------------------------------------------------


def test_numbers_and_arrays_mix_with_all_operators() -> None:
    a, b = nd.array([1, 2, 4]), nd.array([2, 2, 2])
    check(a + b, [3, 4, 6])
    check(1 - a, [0, -1, -3])
    check(a * np.array([1, 0, 1], np.float32), [1, 0, 4])
    check(np.array([1, 0, 1], np.float32) * a, [1, 0, 4])
    check(a / 2, [0.5, 1, 2])
    check(8 / a, [8, 4, 2])
    check(a**2, [1, 4, 16])
    check(a % 2, [1, 0, 0])
    check(-a, [-1, -2, -4])
    check(abs(-a), [1, 2, 4])
    check(np.add(a, [1, 1, 1]), [2, 3, 5], "float64")
    check(a @ b, [14])
    check(nd.ones((2, 3)) + nd.ones((3,)), np.full((2, 3), 2))


@pytest.mark.parametrize("number", [2, 2.5, True, np.float64(2.5), np.int64(2), np.float16(2.5)])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_no_number_changes_the_dtype_of_a_float_array(number: Any, dtype: str) -> None:
    a = nd.ones(2, dtype=dtype)
    check(a * number, [float(number)] * 2, dtype)
    check(number * a, [float(number)] * 2, dtype)
    a += number
    check(a, [1 + float(number)] * 2, dtype)


def test_working_in_place_keeps_the_array_its_dtype_and_its_memory() -> None:
    memory = np.ones(3, np.float32)
    a = NDArray(memory)
    same = a
    a += np.array([1.0, 2.0, 3.0])
    a *= 2
    a -= nd.ones(3)
    a /= 1
    assert a is same
    assert memory.tolist() == [3, 5, 7]
    assert np.add(a, 1, out=a) is a
    assert memory.tolist() == [4, 6, 8]
    with pytest.raises(TypeError, match="Cannot cast"):
        nd.ones(2, dtype="int32").__iadd__(1.5)


def test_results_go_where_out_says() -> None:
    a, host = nd.array([1, 4]), np.zeros(2, np.float32)
    assert np.sqrt(a, out=host) is host
    assert host.tolist() == [1, 2]
    host += a
    assert host.tolist() == [2, 6]
    whole, rest = nd.zeros(2), nd.zeros(2)
    assert np.divmod(a, 3, out=(whole, rest)) == (whole, rest)
    check(whole, [0, 1])
    check(rest, [1, 1])
    found = np.divmod(a, 3)
    check(found[0], [0, 1])
    check(found[1], [1, 1])


def test_other_forms_of_ufuncs_work_too() -> None:
    a = nd.array([1, 2, 3])
    check(np.add.reduce(a), [6])
    check(np.multiply.outer(a, nd.ones(1)), [[1], [2], [3]])
    np.add.at(a, np.array([0, 0]), 5)
    check(a, [11, 2, 3])
    check(np.add(a, 1, where=a > 2, out=nd.zeros(3)), [12, 0, 4])


def test_comparisons_give_bool_arrays() -> None:
    a = nd.array([1, 2, 3])
    check(a == nd.array([1, 0, 3]), [True, False, True], "bool")
    check(a > 1, [False, True, True], "bool")
    check(np.float32(2) >= a, [True, True, False], "bool")
    assert (a != a).sum().asscalar() == 0
    with pytest.raises(TypeError):
        _ = a < "text"


def test_overflow_and_nan_follow_ieee_without_warnings() -> None:
    check(nd.ones(1) / 0, [np.inf])
    check(nd.log(nd.zeros(1)), [-np.inf])
    check(nd.full((1,), 1e30) * 1e30, [np.inf])
    check(nd.array([1e300]), [np.inf])


def test_a_masked_array_is_no_operand_since_its_mask_would_be_lost() -> None:
    with pytest.raises(TypeError):
        np.add(nd.ones(2), np.ma.array([1.0, 2.0], mask=[True, False]))


def test_cpus_of_all_numbers_mix_since_they_share_memory() -> None:
    total = nd.ones(2, cpu(1)) + nd.ones(2, cpu(0))
    check(total, [2, 2])
    assert total.context == cpu(1)


def test_functions_of_numpy_take_arrays() -> None:
    a = nd.array([1, 2, 3])
    assert type(np.asarray(a)) is np.ndarray
    assert np.asarray(a, np.int8).dtype == np.int8
    check(np.exp(nd.zeros(2)), [1, 1])
    check(np.sum(a), [6])
    check(np.mean(a), [2])
    assert np.concatenate([a, a]).shape == (6,)
    np.testing.assert_allclose(a, [1, 2, 3])


def test_numpy_gets_a_copy_unless_it_insists() -> None:
    a = nd.zeros(2)
    np.asarray(a)[:] = 1
    check(a, [0, 0])
    a.__array__(copy=False)[:] = 1
    check(a, [1, 1])
    with pytest.raises(ValueError, match="copy"):
        a.__array__(np.float64, copy=False)


def test_reductions_over_all_or_some_axes() -> None:
    a = counted(2, 3)
    check(a.sum(), [15])
    check(a.sum(axis=1), [3, 12])
    check(a.sum(axis=[0, 1], keepdims=True), [[15]])
    check(a.mean(axis=0), [1.5, 2.5, 3.5])
    check(a.max(axis=1, keepdims=True), [[2], [5]])
    check(a.min(), [0])
    check(nd.array([3, -4]).norm(), [5])
    check(nd.array([3, -4]).norm(ord=1), [7])
    check(a.argmax(axis=1), [2, 2], "int64")
    out = nd.zeros(2)
    assert a.sum(axis=1, out=out) is out
    check(out, [3, 12])
    with pytest.raises(ArgumentTypeError, match="must be 1 or 2"):
        a.norm(ord=3)


def test_dot_is_the_product_of_matrices_and_of_more_axes() -> None:
    a, b = counted(2, 3), counted(2, 3) + 1
    check(a.dot(b, transpose_b=True), a.asnumpy() @ b.asnumpy().T)
    check(nd.dot(a, b, transpose_a=True), a.asnumpy().T @ b.asnumpy())
    check(nd.dot(nd.ones(3), nd.ones(3)), [3])
    many = counted(2, 2, 3)
    check(many.dot(counted(3, 2, 2)), np.tensordot(many.asnumpy(), counted(3, 2, 2).asnumpy(), 1))
    with pytest.raises(ValueMismatchError, match="matrices"):
        many.dot(many, transpose_b=True)


# -- moving and reshaping -----------------------------------------------------------------


def test_copies_are_new_and_keep_dtype_and_device() -> None:
    a = nd.ones((2,), cpu(1), "float16")
    b = a.copy()
    b[:] = 2
    check(a, [1, 1], "float16")
    assert b.context == cpu(1)
    c = a.copyto(cpu(2))
    c[:] = 3
    check(a, [1, 1], "float16")
    assert c.context == cpu(2)


def test_copyto_casts_and_refuses_another_shape() -> None:
    a, b = nd.array([1.5, 2]), nd.zeros(2, dtype="int32")
    a.copyto(b)
    check(b, [1, 2], "int32")
    assert a.copyto(a) is a
    with pytest.raises(ValueMismatchError, match=r"shape \(2,\) into shape \(3,\)"):
        a.copyto(nd.zeros(3))
    with pytest.raises(ArgumentTypeError, match="expected an NDArray"):
        a.copyto(np.zeros(2))  # type: ignore[arg-type]


def test_as_in_context_copies_only_to_another_device() -> None:
    a = nd.ones(2)
    assert a.as_in_context(cpu(0)) is a
    b = a.as_in_context(cpu(1))
    b[:] = 5
    assert b.context == cpu(1)
    check(a, [1, 1])


def test_astype_copies_unless_told() -> None:
    a = nd.array([1.7, -1.7])
    check(a.astype("int32"), [1, -1], "int32")
    assert a.astype("float32") is not a
    assert a.astype("float32", copy=False) is a


def test_reshape_shares_memory_and_knows_the_signs_of_the_original() -> None:
    a = counted(2, 6)
    for shape in [(4, 3), (-1, 3), (0, 2, 3), (0, -1), (12,)]:
        wanted = [a.shape[i] if length == 0 else length for i, length in enumerate(shape)]
        check(a.reshape(shape), a.asnumpy().reshape(wanted))
    check(a.reshape(3, 4), a.asnumpy().reshape(3, 4))
    check(a.reshape(shape=(3, 4)), a.asnumpy().reshape(3, 4))
    check(a.reshape(-1), np.arange(12))
    a.reshape((12,))[0] = 50
    assert a[0, 0].asscalar() == 50
    check(a[:, ::2].reshape(-1), [50, 2, 4, 6, 8, 10])
    with pytest.raises(ValueMismatchError, match=r"\(2, 6\) to \(5, 5\)"):
        a.reshape((5, 5))
    with pytest.raises(ArgumentTypeError, match="needs a shape"):
        a.reshape()


def test_other_shapes_are_copies() -> None:
    a = counted(2, 1, 3)
    expected = a.asnumpy()
    made = {
        "T": (a.T, expected.T),
        "transpose": (a.transpose((1, 0, 2)), expected.transpose(1, 0, 2)),
        "axes": (a.transpose(1, 0, 2), expected.transpose(1, 0, 2)),
        "flatten": (a.flatten(), expected.reshape(2, 3)),
        "expand": (a.expand_dims(1), expected[:, None]),
        "broadcast": (a.broadcast_to((2, 2, 3)), np.broadcast_to(expected, (2, 2, 3))),
        "slice": (a.slice((0, 0), (1, 1)), expected[:1]),
        "steps": (a.slice((None,), (None,), (-1,)), expected[::-1]),
        "axis": (a.slice_axis(2, 1, None), expected[:, :, 1:]),
    }
    for array, values in made.values():
        check(array, values)
        array[:] = -1
    check(a, expected)


# -- elements -----------------------------------------------------------------------------


def test_slices_are_views_and_choices_are_copies() -> None:
    a = counted(3, 4)
    for key in (0, -1, slice(1, 3), (slice(None), 2), (1, 2), (..., 0), (None, 0), np.int64(1)):
        check(a[key], np.atleast_1d(a.asnumpy()[key]))
    row, element = a[1], a[2, 3]
    row[:] = 0
    element += 100
    assert a.asnumpy().tolist() == [[0, 1, 2, 3], [0, 0, 0, 0], [8, 9, 10, 111]]
    chosen = a[[0, 2]]
    chosen[:] = -1
    assert a[0, 1].asscalar() == 1
    with pytest.raises(IndexError):
        a[3]


def test_arrays_choose_rows_also_those_of_floats() -> None:
    a = counted(3, 2)
    check(a[nd.array([2, 0])], [[4, 5], [0, 1]])
    check(a[np.array([1])], [[2, 3]])
    check(a[nd.array([1, 2], dtype="int32"), 0], [2, 4])
    check(a[(0, 1), (1, 1)], [1, 3])
    check(a[a > 2], [3, 4, 5])
    check(a[[]], np.zeros((0, 2)))


def test_elements_are_set_from_numbers_arrays_and_lists() -> None:
    a = nd.zeros((2, 3))
    a[0] = [1, 2, 3]
    a[1, 1] = 7
    a[1, 2] = nd.array([8])
    a[1, 0] = np.float64(9)
    check(a, [[1, 2, 3], [9, 7, 8]])
    a[a > 7] = 0
    check(a, [[1, 2, 3], [0, 7, 0]])
    a[:] = nd.arange(3)
    check(a, [[0, 1, 2], [0, 1, 2]])
    a[nd.array([1])] = np.ones((1, 3))
    check(a, [[0, 1, 2], [1, 1, 1]])
    a[:, :2] = a[:, 1:]
    check(a, [[1, 2, 2], [1, 1, 1]])
    with pytest.raises(ValueError, match="broadcast"):
        a[:] = nd.ones(2)


def test_an_array_is_a_sequence_of_views() -> None:
    a = counted(2, 2)
    for row in a:
        row += 10
    check(a, [[10, 11], [12, 13]])
    assert [float(element) for element in nd.arange(3)] == [0, 1, 2]
