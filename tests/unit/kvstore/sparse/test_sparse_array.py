"""Row-sparse arrays: what they take and refuse, other forms of them, other libraries' ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvstore
from kvstore import RowSparseArray
from kvstore.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    NotSupportedError,
    ValueMismatchError,
)
from kvstore.sparse.convert import is_row_sparse, row_sparse
from kvstore.sparse.ids import checked_ids

Array = np.ndarray[Any, Any]

ROWS = np.arange(6, dtype="f4").reshape(3, 2)
BEYOND = {"float16": 2**11, "float32": 2**24, "float64": 2**24}


def test_an_array_keeps_ids_as_they_come_and_rows_without_a_copy() -> None:
    array = RowSparseArray([4, 0, 4], ROWS, (5, 2))
    assert array.indices.dtype == np.int64
    assert array.indices.tolist() == [4, 0, 4]
    assert np.shares_memory(array.values, ROWS)
    assert (array.shape, array.dtype, array.stype) == ((5, 2), np.float32, "row_sparse")
    assert not array.is_unique
    assert repr(array) == "<RowSparseArray (5, 2) of float32, 3 rows>"


def test_unique_sorts_ids_and_adds_the_rows_of_each() -> None:
    unique = RowSparseArray([4, 0, 4], ROWS, (5, 2)).unique()
    assert unique.is_unique
    assert unique.unique() is unique
    assert unique.indices.tolist() == [0, 4]
    np.testing.assert_array_equal(unique.values, [[2, 3], [4, 6]])


def test_the_dense_form_has_the_sums_and_zeros() -> None:
    dense = RowSparseArray([4, 0, 4], ROWS, (5, 2)).to_dense()
    np.testing.assert_array_equal(dense, [[2, 3], [0, 0], [0, 0], [0, 0], [4, 6]])
    np.testing.assert_array_equal(RowSparseArray.from_dense(dense).asnumpy(), dense)


def test_from_dense_keeps_the_rows_that_are_not_zero() -> None:
    array = RowSparseArray.from_dense(np.array([[0, 0], [0, np.nan], [0, 0], [3, 0]]))
    assert array.indices.tolist() == [1, 3]
    assert RowSparseArray.from_dense(np.array([0, 5])).indices.tolist() == [1]
    with pytest.raises(ValueMismatchError, match="does not have rows"):
        RowSparseArray.from_dense(np.array(1.0))


@pytest.mark.parametrize("shape", [(0, 2), (3, 0), (3, 2, 2), (3,), (2**63, 1)])
def test_an_array_of_any_shape_may_have_no_rows(shape: tuple[int, ...]) -> None:
    array = RowSparseArray.zeros(shape, "f8")
    assert (array.shape, array.values.shape, array.dtype) == (shape, (0, *shape[1:]), np.float64)
    assert array.unique() is array


def test_rows_of_no_numbers_are_added_too() -> None:
    array = RowSparseArray([1, 1], np.zeros((2, 0)), (3, 0))
    assert array.unique().values.shape == (1, 0)


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        ([5], ArgumentValueError, r"row id 5 is out of range: .* rows 0 to 4"),
        ([-1], ArgumentValueError, r"row id -1 is out of range"),
        (np.array([2**63], np.uint64), ArgumentValueError, r"row id 9223372036854775808"),
        ([2**70], ArgumentValueError, r"out of range"),
        ([True], ArgumentTypeError, "bool"),
        ([1.0], ArgumentTypeError, "float"),
        (np.array([True]), ArgumentTypeError, "bool"),
        (np.array([1j]), ArgumentTypeError, "complex"),
        (np.array([1.5]), ArgumentTypeError, "got 1.5"),
        (np.array([np.nan]), ArgumentTypeError, "got nan"),
        (np.array(["1"]), ArgumentTypeError, "integers"),
        ("1", ArgumentTypeError, "an array or a list of ints, got str"),
    ],
)
def test_ids_are_integers_in_range(ids: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        RowSparseArray(ids, np.zeros((1, 2)), (5, 2))


@pytest.mark.parametrize("dtype", BEYOND)
def test_float_ids_are_taken_where_the_dtype_has_all_whole_numbers(dtype: str) -> None:
    limit = BEYOND[dtype]
    ids = checked_ids(np.array([limit - 1, 3], dtype), 2**60, "it")
    assert ids.tolist() == [limit - 1, 3]
    with pytest.raises(ArgumentTypeError, match=f"below {limit}"):
        checked_ids(np.array([3, limit], dtype), 2**60, "it")


@pytest.mark.parametrize("id_", [2**24 + 1, 2**31 + 1, 2**53 + 1, 2**63 - 1])
def test_integer_ids_are_exact_to_the_last(id_: int) -> None:
    assert checked_ids(np.array([id_]), 2**63, "it").tolist() == [id_]
    assert checked_ids(np.array([id_], np.uint64), 2**63, "it").tolist() == [id_]
    assert checked_ids([id_], 2**63, "it").tolist() == [id_]


def test_ids_of_an_ndarray_are_floats_and_taken() -> None:
    assert checked_ids(kvstore.nd.array([[1, 2], [3, 1]]), 4, "it").tolist() == [1, 2, 3, 1]


@pytest.mark.parametrize("shape", [(2, 3), (3,), (3, 2, 1)])
def test_values_have_the_shape_of_the_rows(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueMismatchError, match=r"\(3, 2\)"):
        RowSparseArray([0, 1, 2], np.zeros(shape), (5, 2))


@pytest.mark.parametrize(
    ("shape", "error"),
    [
        ((), ArgumentValueError),
        ((-1, 2), ArgumentValueError),
        ((2**63 + 1, 2), ArgumentValueError),
        (5, ArgumentTypeError),
        ((5, 2.0), ArgumentTypeError),
    ],
)
def test_a_shape_is_a_list_of_sizes(shape: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        RowSparseArray([], np.zeros((0, 2)), shape)


def test_it_is_taken_for_no_dense_array() -> None:
    array = RowSparseArray.zeros((5, 2))
    with pytest.raises(ArgumentTypeError, match="to_dense"):
        np.asarray(array)


def test_assign_writes_into_the_memory_that_fits_and_copies() -> None:
    array = RowSparseArray([1, 3], np.zeros((2, 2), "f4"), (5, 2))
    memory, rows, ids = array.values, np.ones((2, 2)), np.array([0, 2])
    array.assign(ids, rows)
    ids[0], rows[0, 0] = 4, 9
    assert np.shares_memory(array.values, memory)
    assert array.indices.tolist() == [0, 2]
    assert array.values.tolist() == [[1, 1], [1, 1]]
    array.assign([2], np.full((1, 2), 2.5))
    assert (array.indices.tolist(), array.values.tolist()) == ([2], [[2.5, 2.5]])
    with pytest.raises(ArgumentValueError):
        array.assign([5], np.zeros((1, 2)))
    assert array.indices.tolist() == [2]


def test_a_copy_has_memory_of_its_own() -> None:
    array = RowSparseArray([1], np.ones((1, 2)), (5, 2))
    copy = array.copy()
    copy.values[:] = 7
    assert array.values.tolist() == [[1, 1]]


@pytest.mark.parametrize("form", ["csr_matrix", "csr_array", "csc_array", "coo_array", "bsr_array"])
def test_sparse_matrices_of_scipy_give_the_rows_with_elements(form: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    dense = np.array([[0, 0, 0], [1, 0, 2], [0, 0, 0], [0, 3, 0]], "f4")
    matrix = getattr(sparse, form)(dense)
    assert is_row_sparse(matrix)
    found = row_sparse(matrix)
    assert (found.dtype, found.shape, found.indices.tolist()) == (np.float32, (4, 3), [1, 3])
    np.testing.assert_array_equal(found.to_dense(), dense)


def test_a_sparse_array_of_scipy_with_one_dimension_is_refused() -> None:
    sparse = pytest.importorskip("scipy.sparse")
    with pytest.raises(ArgumentTypeError, match="two dimensions"):
        row_sparse(sparse.coo_array(np.ones(3)))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("form", ["to_sparse", "to_sparse_csr"])
def test_sparse_matrices_of_pytorch_give_the_rows_with_elements(form: str) -> None:
    torch = pytest.importorskip("torch")
    dense = torch.tensor([[0.0, 0, 0], [1, 0, 2], [0, 0, 0], [0, 3, 0]])
    tensor = getattr(dense, form)()
    assert is_row_sparse(tensor)
    assert not is_row_sparse(dense)
    found = row_sparse(tensor)
    assert (found.dtype, found.indices.tolist()) == (np.float32, [1, 3])
    np.testing.assert_array_equal(found.to_dense(), dense.numpy())
    empty = row_sparse(torch.zeros(4, 3).to_sparse())
    assert (empty.shape, len(empty.indices)) == ((4, 3), 0)


def test_the_gradient_of_an_embedding_of_pytorch_is_row_sparse() -> None:
    torch = pytest.importorskip("torch")
    embedding = torch.nn.Embedding(6, 2, sparse=True)
    embedding(torch.tensor([[4, 1], [4, 4]])).sum().backward()
    found = row_sparse(embedding.weight.grad).unique()
    assert found.indices.tolist() == [1, 4]
    np.testing.assert_array_equal(found.values, [[1, 1], [3, 3]])


def test_a_tensor_of_three_dimensions_keeps_its_rows_whole() -> None:
    torch = pytest.importorskip("torch")
    dense = torch.zeros(4, 2, 3)
    dense[2, 1, 0] = 5
    for sparse_dims in (1, 2, 3):
        found = row_sparse(dense.to_sparse(sparse_dims))
        assert (found.indices.tolist(), found.values.shape) == ([2], (1, 2, 3))
        np.testing.assert_array_equal(found.to_dense(), dense.numpy())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("sparse_dims", [1, 2, 3])
def test_repeated_elements_of_a_tensor_are_added_in_32_bits(sparse_dims: int, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")
    places = [[2] * 300 + [1, 2], [1] * 300 + [0, 0], [2] * 300 + [0, 1]][:sparse_dims]
    values = torch.ones((302, *(4, 2, 3)[sparse_dims:]), dtype=getattr(torch, dtype))
    values[:300] /= 256  # of 16 bits, 1 + 1/256 is 1, or is soon so
    values[7] = 1
    tensor = torch.sparse_coo_tensor(torch.tensor(places), values, (4, 2, 3), check_invariants=True)
    found = row_sparse(tensor).unique()
    expected = torch.zeros(4, 2, 3, dtype=torch.float64)
    expected.index_put_(tuple(torch.tensor(places)), values.double(), accumulate=True)
    assert found.indices.tolist() == [1, 2]
    rounded = expected.float().numpy().astype(found.dtype)
    np.testing.assert_array_equal(found.to_dense().astype("f4"), rounded.astype("f4"))


# -- as in MXNet --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ((ROWS, np.array([4, 0, 1])), "f4"),
        ((ROWS.astype("f8"), [4, 0, 1]), "f8"),
        ((ROWS.tolist(), [4, 0, 1]), "f4"),
        ((kvstore.nd.array(ROWS), kvstore.nd.array([4, 0, 1])), "f4"),
    ],
)
def test_a_pair_of_data_and_indices_makes_an_array(given: Any, dtype: str) -> None:
    array = kvstore.nd.sparse.row_sparse_array(given)
    assert (array.shape, array.dtype, array.ids.tolist()) == ((5, 2), dtype, [0, 1, 4])
    np.testing.assert_array_equal(array.data, ROWS[[1, 2, 0]])
    assert not np.shares_memory(array.values, ROWS)
    wide = kvstore.nd.sparse.row_sparse_array(given, shape=(9, 2), dtype="f2")
    assert (wide.shape, wide.dtype) == ((9, 2), np.float16)


def test_shapes_and_arrays_make_arrays_too() -> None:
    sparse = kvstore.nd.sparse
    empty = sparse.row_sparse_array((6, 2), ctx=kvstore.cpu())
    assert (empty.shape, empty.dtype, len(empty.indices)) == ((6, 2), np.float32, 0)
    dense = np.array([[0, 0], [1, 2]], "f8")
    assert sparse.row_sparse_array(dense).ids.tolist() == [1]
    again = sparse.row_sparse_array(sparse.row_sparse_array(dense))
    np.testing.assert_array_equal(again.asnumpy(), dense)
    assert sparse.zeros("row_sparse", (3, 2), dtype="f8").dtype == np.float64
    assert sparse.zeros("default", (3, 2)).shape == (3, 2)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda sparse: sparse.zeros("csr", (3, 2)), NotSupportedError),
        (lambda sparse: sparse.zeros("dense", (3, 2)), ArgumentValueError),
        (lambda sparse: sparse.row_sparse_array((ROWS, ROWS, ROWS)), ArgumentTypeError),
        (lambda sparse: sparse.row_sparse_array(ROWS, shape=(9, 2)), ArgumentValueError),
        (lambda sparse: sparse.row_sparse_array((ROWS, [0, 1])), ValueMismatchError),
    ],
)
def test_what_makes_no_row_sparse_array_is_an_error(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call(kvstore.nd.sparse)


@pytest.mark.parametrize("sign", [1, -1])
def test_rows_of_one_id_are_all_added_to_a_dense_array(sign: int) -> None:
    dense = np.ones((5, 2), np.float32)
    rows = RowSparseArray([4, 0, 4], np.ones((3, 2), np.float32), (5, 2))
    if sign > 0:
        dense += rows
    else:
        dense -= rows
    assert (dense[:, 0] - 1).tolist() == [sign, 0, 0, 0, 2 * sign]
