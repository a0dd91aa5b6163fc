"""PyTorch tensors on the CPU: read and filled in their own memory, and autograd notices."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvstore import cpu  # noqa: E402
from kvstore.arrays import adapter_for  # noqa: E402
from kvstore.arrays.dtypes import bfloat16, check_dtype  # noqa: E402
from kvstore.arrays.torch import array_in  # noqa: E402
from kvstore.errors import ArgumentTypeError  # noqa: E402

ADAPTER = adapter_for(torch.zeros(1))

NAMES = [
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
]


class Marked(torch.Tensor):  # type: ignore[misc]
    """A subclass whose own code must not run: its results would not be plain tensors."""

    @classmethod
    def __torch_function__(cls, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("the subclass was asked")


def values_of(tensor: Any) -> Any:
    return ADAPTER.to_host(tensor)


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_is_seen_in_its_own_memory_with_numpys_dtype(name: str) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    assert ADAPTER.dtype(tensor) == np.dtype(name)
    assert ADAPTER.shape(tensor) == (2, 3)
    assert ADAPTER.context(tensor) == cpu()
    host = values_of(tensor)
    np.testing.assert_array_equal(host, np.arange(6).reshape(2, 3).astype(name), strict=True)
    host[1, 2] = 0
    assert tensor[1, 2] == 0


def test_bfloat16_is_seen_in_its_own_memory() -> None:
    pytest.importorskip("ml_dtypes")
    tensor = torch.tensor([[1.5, -2.0], [3e38, float("inf")]], dtype=torch.bfloat16)
    assert ADAPTER.dtype(tensor) == bfloat16()
    host = values_of(tensor)
    assert host.dtype == bfloat16()
    np.testing.assert_array_equal(host.astype("f4"), tensor.float().numpy())
    memory = ADAPTER.memory(tensor)
    assert memory is not None
    assert np.shares_memory(memory, host)
    ADAPTER.from_host(np.full((2, 2), 1 + 2.0**-9), tensor)  # rounds to even: 1
    assert tensor.tolist() == [[1, 1], [1, 1]]
    assert ADAPTER.copy(tensor.t()[0]).tolist() == [1, 1]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4)[:, ::2],
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.arange(4.0, requires_grad=True) * 2,
        torch.nn.Parameter(torch.arange(3.0)),
        torch.ones(1).expand(2, 3),
        torch.view_as_complex(torch.arange(6.0).reshape(3, 2)).conj(),
        torch.view_as_complex(torch.arange(6.0).reshape(3, 2)).conj().imag,
        torch.arange(3.0).as_subclass(Marked),
    ],
    ids=[
        *("strided", "transposed", "scalar", "empty", "history"),
        *("parameter", "expanded", "conj", "neg", "subclass"),
    ],
)
def test_any_tensor_becomes_a_plain_contiguous_array(tensor: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        expected = tensor.detach().resolve_conj().resolve_neg().clone().numpy()
    host = values_of(tensor)
    assert type(host) is np.ndarray
    assert host.flags.c_contiguous
    assert host.dtype == ADAPTER.dtype(tensor) == expected.dtype
    assert host.shape == ADAPTER.shape(tensor) == expected.shape
    np.testing.assert_array_equal(host, expected)


@pytest.mark.parametrize("name", [*NAMES, "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (4, 3)])
def test_a_tensor_can_be_resized_after_numpy_has_seen_its_memory(
    name: str, shape: tuple[int, ...]
) -> None:
    tensor = torch.ones(shape).to(getattr(torch, name))
    dtype = ADAPTER.dtype(tensor)
    array = array_in(tensor, dtype)
    assert (array.dtype, array.shape) == (dtype, shape)
    assert array.flags.writeable and array.flags.aligned and array.flags.c_contiguous
    array[...] = 0
    assert not tensor.any()
    tensor.resize_(100)


def test_an_array_keeps_the_memory_of_a_tensor_that_is_gone() -> None:
    tensor = torch.arange(1000.0)
    storage = weakref.ref(tensor.untyped_storage())
    part = array_in(tensor.view(10, 100).t(), np.dtype("f4"))[1:]
    tensor.data = torch.zeros(1)
    del tensor
    np.testing.assert_array_equal(part, np.arange(1000).reshape(10, 100).T[1:])
    assert storage() is not None
    del part
    assert storage() is None


# -- filling ------------------------------------------------------------------------------


def test_a_strided_tensor_is_filled_where_it_lies_and_cast() -> None:
    backing = torch.zeros(4, 6, dtype=torch.float16)
    ADAPTER.from_host(np.arange(6.0).reshape(2, 3), backing[::2, ::2])
    expected = np.zeros((4, 6))
    expected[::2, ::2] = [[0, 1, 2], [3, 4, 5]]
    np.testing.assert_array_equal(backing.numpy(), expected)


@pytest.mark.parametrize("view", [torch.conj, lambda t: t.conj().imag], ids=["conj", "neg"])
def test_a_lazily_conjugated_tensor_reads_what_was_written(view: Any) -> None:
    base = torch.zeros(3, dtype=torch.complex64)
    lazy = view(base)
    assert ADAPTER.memory(lazy) is None
    before = base._version
    values = np.array([1, 2, 3], np.float32) * (1 if lazy.is_neg() else 1 + 1j)
    ADAPTER.from_host(values, lazy)
    np.testing.assert_array_equal(lazy.resolve_conj().resolve_neg().numpy(), values)
    np.testing.assert_array_equal(base.numpy().imag, [-1, -2, -3])
    assert base._version > before


def test_a_parameter_can_be_filled_though_it_requires_gradients() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    assert ADAPTER.why_read_only(parameter) is None
    ADAPTER.assign(np.ones(3), parameter)
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.requires_grad
    assert parameter.is_leaf


def fill(tensor: Any) -> None:
    ADAPTER.from_host(np.full(3, 7.0), tensor)


def fill_from_a_tensor(tensor: Any) -> None:
    ADAPTER.assign(torch.full((3,), 7.0), tensor)


def land(tensor: Any) -> None:
    memory = ADAPTER.memory(tensor)
    assert memory is not None
    memory.view(np.float32)[:] = 7
    ADAPTER.written(tensor)


@pytest.mark.parametrize("write", [fill, fill_from_a_tensor, land])
def test_a_backward_pass_notices_that_its_values_were_overwritten(write: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    loss = (parameter * parameter).sum()
    write(parameter)
    assert parameter.tolist() == [7, 7, 7]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("read", [values_of, ADAPTER.copy, ADAPTER.view])
def test_reading_disturbs_no_backward_pass(read: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    loss = (parameter * parameter).sum()
    read(parameter)
    loss.backward()
    assert parameter.grad.tolist() == [2, 2, 2]


def test_the_version_of_the_tensor_behind_a_subclass_and_a_view_counts_too() -> None:
    base = torch.zeros(2, 3)
    ADAPTER.from_host(np.ones(3), base[1].as_subclass(Marked))
    assert base.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert base._version == 1


def test_a_tensor_made_in_inference_mode_can_be_filled() -> None:
    with torch.inference_mode():
        tensors = [torch.zeros(3), torch.zeros(3, dtype=torch.complex64).conj()]
    for tensor in tensors:
        ADAPTER.from_host(np.ones(3), tensor)
        np.testing.assert_array_equal(values_of(tensor), [1, 1, 1])


def test_an_expanded_tensor_cannot_be_filled_and_says_what_to_pass() -> None:
    assert "clone()" in str(ADAPTER.why_read_only(torch.zeros(1).expand(3)))
    assert ADAPTER.why_read_only(torch.zeros(1).expand(1, 1)) is None
    assert ADAPTER.why_read_only(torch.from_numpy(np.zeros((2, 0, 3)))) is None  # strides are 0


@pytest.mark.parametrize(
    ("tensor", "fit"),
    [
        (torch.zeros(2, 3), True),
        (torch.tensor(1.0), True),
        (torch.zeros(0), True),
        (torch.nn.Parameter(torch.zeros(2)), True),
        (torch.zeros(4)[1:3], True),
        (torch.zeros(2, 3).t(), False),
        (torch.zeros(4)[::2], False),
        (torch.zeros(1).expand(3), False),
    ],
)
def test_values_land_straight_in_contiguous_tensors_only(tensor: Any, fit: bool) -> None:
    memory = ADAPTER.memory(tensor)
    assert (memory is not None) == fit
    if memory is not None:
        assert memory.nbytes == tensor.numel() * tensor.element_size()
        assert tensor.numel() == 0 or memory.ctypes.data == tensor.data_ptr()


# -- refused ------------------------------------------------------------------------------


def a_quantised_tensor() -> Any:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)


def a_fake_tensor() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


@pytest.mark.filterwarnings("ignore")  # PyTorch calls some of these kinds a prototype
@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: torch.eye(3).to_sparse(), r"to_dense\(\)"),
        (lambda: torch.eye(3).to_sparse_csr(), r"to_dense\(\)"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"unbind\(\)"),
        (a_quantised_tensor, r"dequantize\(\)"),
        (lambda: torch.empty(3, device="meta"), "no values"),
        (lambda: torch.nn.LazyLinear(3).weight, "run the module once"),
        (a_fake_tensor, "FakeTensor stores its values in its own format"),
        (lambda: torch.zeros(3, dtype=torch.complex32), "convert it"),
        (lambda: torch.zeros(3, dtype=torch.float8_e5m2), "convert it"),
    ],
)
def test_a_tensor_whose_values_are_not_simply_there_is_refused(make: Any, advice: str) -> None:
    tensor = make()
    with pytest.raises(ArgumentTypeError, match=advice):
        check_dtype(adapter_for(tensor).dtype(tensor))


def test_a_view_that_changes_values_and_freed_memory_are_no_memory_of_values() -> None:
    with pytest.raises(ArgumentTypeError, match="got a view that conjugates or negates"):
        array_in(torch.ones(3, dtype=torch.complex64).conj(), np.dtype("c8"))
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ArgumentTypeError, match=r"shape \(3,\) whose storage was freed"):
        array_in(freed, np.dtype("f4"))


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_within_a_function_transform_the_store_must_be_called_outside(transform: Any) -> None:
    def function(tensor: Any) -> Any:
        with pytest.raises(ArgumentTypeError, match="call the store outside"):
            ADAPTER.dtype(tensor)
        return tensor.sum()

    transform(function)(torch.ones(2, 3) if transform is torch.vmap else torch.ones(3))
