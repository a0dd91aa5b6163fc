"""Tensors as NumPy arrays in the same memory, and PyTorch's operations by name.

All tensors here are on the CPU, and all except those of ``sparse_sum`` are dense. bfloat16 becomes
NumPy's ``ml_dtypes.bfloat16``; other dtypes that NumPy lacks (float8) become bytes, which can be
sent but not added. Pure.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvstore.arrays.dtypes import bfloat16
from kvstore.arrays.torch import array_in, numpy_dtype
from kvstore.errors import ArgumentTypeError, ArgumentValueError, NotSupportedError

Array = np.ndarray[Any, Any]

#: PyTorch's names of operations -> ours.
OPERATIONS = {
    "SUM": "sum",
    "AVG": "average",
    "PRODUCT": "product",
    "MIN": "min",
    "MAX": "max",
    "BAND": "band",
    "BOR": "bor",
    "BXOR": "bxor",
    "PREMUL_SUM": "premul_sum",
}


def array_of(tensor: torch.Tensor) -> Array:
    """Return a tensor's own memory as a writable array of the same shape and strides.

    Raises ``ArgumentTypeError`` for a tensor that is not a dense tensor on the CPU.
    """
    _check(tensor)
    dtype = numpy_dtype(tensor)
    if dtype is None and tensor.dtype.itemsize == 1:
        dtype = np.dtype(np.uint8)
    if dtype is None:
        raise ArgumentTypeError(
            f"a tensor of {tensor.dtype} cannot be sent; convert it, such as "
            "tensor.to(torch.float32)"
        )
    # Detaching is slow, so do it only for subclasses: some of them wait for their values there.
    plain = type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter
    return array_in(tensor if plain else tensor.detach(), dtype)


def contiguous(tensor: torch.Tensor) -> Array:
    """Return the tensor's values to read, C-contiguous: without a copy if possible."""
    array = array_of(tensor.resolve_conj().resolve_neg())
    return array if array.flags.c_contiguous else array.copy()


def fill(tensor: torch.Tensor, values: Array, dtype: str | None = None) -> None:
    """Copy values into a tensor of the same size and dtype; shapes may differ.

    ``dtype`` is ``bfloat16`` if the values are the bits of bfloat16 numbers. Raises
    ``ArgumentValueError`` if dtypes or sizes differ, without asking the peers.
    """
    target = array_of(tensor)
    if dtype == "bfloat16":
        values = values.view(bfloat16())
    if values.dtype != target.dtype or values.size != target.size:
        raise ArgumentValueError(
            f"expected a tensor of {values.size} elements of {values.dtype} for what was received, "
            f"got one of shape {tuple(tensor.shape)} and {tensor.dtype}; make it like the sender's"
        )
    if not np.may_share_memory(target, values):
        np.copyto(target, values.reshape(target.shape))


def check_reducible(tensor: torch.Tensor) -> None:
    """Raise ``ArgumentTypeError`` for numbers that cannot be added."""
    if numpy_dtype(tensor) is None:
        raise ArgumentTypeError(
            f"tensors of {tensor.dtype} can be moved and not added; convert them, such as "
            "tensor.to(torch.bfloat16)"
        )


def operation(op: Any) -> tuple[str, float | None]:
    """Return our name of a ``ReduceOp``, and the factor of PREMUL_SUM."""
    # ReduceOp.SUM has a name; an object of ReduceOp, as in options, contains an operation and a
    # factor.
    kind, factor = (op, None) if hasattr(op, "name") else op.__getstate__()
    name = kind.name
    if name not in OPERATIONS:
        raise NotSupportedError(f"expected an operation of {', '.join(OPERATIONS)}, got {name}")
    if isinstance(factor, torch.Tensor):
        if factor.numel() != 1:
            raise ArgumentValueError(
                f"expected one number as the factor of PREMUL_SUM, got {factor.numel()}"
            )
        factor = factor.item()
    return OPERATIONS[name], None if factor is None else float(factor)


def rows_of(array: Array, sizes: Sequence[int], size: int) -> list[Array]:
    """Cut an array along its first dimension into ``sizes``, or ``size`` equal pieces."""
    length = array.shape[0] if array.ndim else 1
    if not sizes:
        if length % size:
            raise ArgumentValueError(
                f"expected a first dimension that {size} ranks share equally, got {length}; pass "
                "the sizes of the pieces"
            )
        sizes = [length // size] * size
    if len(sizes) != size or sum(sizes) != length:
        raise ArgumentValueError(
            f"expected {size} sizes of pieces that are {length} together, got {list(sizes)}"
        )
    ends = np.cumsum([0, *sizes])
    return [array[begin:end] for begin, end in itertools.pairwise(ends)]


def sparse_sum(
    indices: Sequence[Array], values: Sequence[Array], like: torch.Tensor
) -> torch.Tensor:
    """Add up sparse tensors of the shape of ``like``, in order.

    ``indices`` and ``values`` have an item for each tensor.
    """
    parts = []
    for rows, row_values in zip(indices, values, strict=True):
        found = torch.empty(row_values.shape, dtype=like.dtype)
        fill(found, row_values)
        where = torch.from_numpy(rows).t()
        parts.append(torch.sparse_coo_tensor(where, found, like.shape, check_invariants=True))
    return functools.reduce(torch.add, parts).coalesce()


# -- what calls return ---------------------------------------------------------------------------


def fill_sum(output: torch.Tensor, value: Any) -> None:
    """Store a sum: a dense one, or the rows of all ranks for a sparse tensor."""
    if output.layout == torch.sparse_coo:
        indices, values = value
        with torch.no_grad():  # a detached tensor would get new indices of its own
            output.copy_(sparse_sum(indices, values, output))
    else:
        fill(output, value)


def fill_if_given(output: torch.Tensor, value: Array | None) -> None:
    """Store a value on the ranks that get one."""
    if value is not None:
        fill(output, value)


def fill_scattered(output: torch.Tensor, value: Array) -> None:
    """Store this rank's piece."""
    # Only the root has arrays with ml_dtypes' bfloat16; the others get the bits.
    are_bits = output.dtype == torch.bfloat16 and value.dtype == np.uint16
    fill(output, value, "bfloat16" if are_bits else None)


def fill_each(outputs: Sequence[torch.Tensor], values: Sequence[Array] | None) -> None:
    """Store one value in each tensor, if this rank gets them."""
    if values is None:
        return
    if len(outputs) != len(values):
        raise ArgumentValueError(f"expected {len(values)} output tensors, got {len(outputs)}")
    for output, value in zip(outputs, values, strict=True):
        fill(output, value)


def fill_in_turn(output: torch.Tensor, values: Sequence[Array]) -> None:
    """Store the values one after the other in one tensor."""
    total = sum(value.size for value in values)
    if output.numel() != total:
        raise ArgumentValueError(
            f"expected an output of {total} elements for what {len(values)} ranks have sent, got "
            f"one of shape {tuple(output.shape)}"
        )
    whole = output.detach() if output.is_contiguous() else output.new_empty(output.shape)
    flat = whole.view(-1)
    at = 0
    for value in values:
        fill(flat[at : at + value.size], value)
        at += value.size
    if not output.is_contiguous():
        output.detach().copy_(whole)


def fill_rows(targets: Sequence[Array], values: Sequence[Array]) -> None:
    """Store one value in each piece of a tensor."""
    for target, value in zip(targets, values, strict=True):
        if target.size != value.size:
            raise ArgumentValueError(
                f"expected {value.size} elements for what was received, got room for {target.size}"
            )
        target[...] = value.view(target.dtype).reshape(target.shape)


# -- checks --------------------------------------------------------------------------------------


def _check(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ArgumentTypeError(
            f"the backend kvstore takes tensors on the CPU, got one on {tensor.device}; pass "
            "tensor.cpu(), or use nccl for this group"
        )
    if tensor.layout != torch.strided:
        raise ArgumentTypeError(
            f"the backend kvstore takes dense tensors, got one of {tensor.layout}; pass "
            "tensor.to_dense()"
        )
