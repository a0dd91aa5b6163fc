"""The calls of ``kvstore.horovod.torch`` that return handles or work in place.

Arguments are dense tensors of any shape. Do not change an argument of an ``..._async`` call before
``synchronize``. A tensor on a GPU is copied to the host's memory, and its result back. Results are
new tensors with the device and dtype of the argument; calls that end in ``_`` write into the
argument. Autograd does not track these calls. Read next: ``gradients.py``, whose calls it tracks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.frameworks.horovod import calls
from kvstore.frameworks.horovod.array_api import splits_of
from kvstore.frameworks.horovod.calls import Array, CollectiveHandle, ReduceOperation
from kvstore.frameworks.horovod.session import ProcessSet, global_process_set
from kvstore.frameworks.torch.tensors import array_of, check_reducible, contiguous, fill


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[Tensor]:
    """Begin to combine the tensors of all ranks; the default ``op`` is the average."""
    found = calls.operation_of(op, average)
    factors = prescale_factor, postscale_factor
    handle = calls.all_reduce(_summand(tensor), found, name, factors, process_set)
    return handle.map(lambda array: _like(tensor, array))


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[Tensor]:
    """Begin to combine the tensors of all ranks in place."""
    found = calls.operation_of(op, average)
    factors = prescale_factor, postscale_factor
    array = _summand(tensor)
    handle = calls.all_reduce(array, found, name, factors, process_set, _own_memory(tensor))
    return handle.map(lambda array: _filled(tensor, array))


def allreduce_(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Combine the tensors of all ranks in place; arguments as for ``allreduce_async_``."""
    return allreduce_async_(tensor, *args, **options).result()


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[list[Tensor]]:
    """Begin to combine each of several tensors with those of all ranks."""
    return calls.grouped(
        allreduce_async,
        tensors,
        name,
        average=average,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[list[Tensor]]:
    """Begin to combine each of several tensors with those of all ranks, in place."""
    return calls.grouped(
        allreduce_async_,
        tensors,
        name,
        average=average,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )


def grouped_allreduce_(tensors: Sequence[Tensor], *args: Any, **options: Any) -> list[Tensor]:
    """Combine several tensors in place; arguments as for ``grouped_allreduce_async_``."""
    return grouped_allreduce_async_(tensors, *args, **options).result()


def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOperation | None = None,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[Tensor]:
    """Begin to add the sparse tensors of all ranks; each gets all indices and values.

    As in Horovod, the handle can also be called.
    """
    found = calls.operation_of(op)
    if found not in (ReduceOperation.SUM, ReduceOperation.AVERAGE):
        raise ArgumentValueError(
            f"expected Sum or Average for a sparse tensor, got {found.name.capitalize()}"
        )
    if tensor.layout != torch.sparse_coo:
        raise ArgumentTypeError(
            f"expected a sparse tensor in COO format, got one of {tensor.layout}; pass "
            "tensor.to_sparse(), or call allreduce_async"
        )
    own = tensor.detach().coalesce()
    parts = [own.indices().t(), own.values()]
    shape, size = own.shape, calls.group_size(process_set)

    def finish(gathered: list[Tensor]) -> Tensor:
        indices, values = gathered
        total = torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=True)
        total = total.coalesce()
        return total / size if found is ReduceOperation.AVERAGE else total

    name = name and f"sparse.{name}"
    return grouped_allgather_async(parts, name, process_set).map(finish)


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> CollectiveHandle[Tensor]:
    """Begin to join the tensors of all ranks along the first dimension, which may differ."""
    handle = calls.all_gather(contiguous(_on_host(tensor)), name, process_set)
    return handle.map(lambda found: _like(tensor, calls.concatenated(found)))


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[list[Tensor]]:
    """Begin to join each of several tensors with those of all ranks."""
    return calls.grouped(allgather_async, tensors, name, process_set=process_set)


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[Tensor]:
    """Begin to get the tensor of rank ``root_rank``."""
    array = contiguous(_on_host(tensor)).copy()
    handle = calls.broadcast(array, root_rank, name, process_set)
    return handle.map(lambda found: _like(tensor, found))


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[Tensor]:
    """Begin to fill the tensor with that of rank ``root_rank``."""
    array = contiguous(_on_host(tensor))
    handle = calls.broadcast(array, root_rank, name, process_set)
    return handle.map(lambda found: _filled(tensor, found))


def broadcast_(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
    """Fill the tensor with that of a root; arguments as for ``broadcast_async_``."""
    return broadcast_async_(tensor, *args, **options).result()


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[tuple[Tensor, Tensor]]:
    """Begin to send each rank its rows.

    The result is the rows for this rank, and how many of them each rank has sent.
    """
    counts = splits_of(splits.cpu() if isinstance(splits, Tensor) else splits)
    like = splits if isinstance(splits, Tensor) else torch.empty(0, dtype=torch.int32)
    handle = calls.all_to_all(contiguous(_on_host(tensor)), counts, name, process_set)

    def finish(found: list[Array]) -> tuple[Tensor, Tensor]:
        received = torch.tensor([*map(len, found)], dtype=like.dtype, device=like.device)
        return _like(tensor, calls.concatenated(found)), received

    return handle.map(finish)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOperation | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> CollectiveHandle[Tensor]:
    """Begin to combine the tensors of all ranks; each rank gets its share of the rows."""
    factors = prescale_factor, postscale_factor
    found = calls.operation_of(op)
    handle = calls.reduce_scatter(_summand(tensor), found, name, factors, process_set)
    return handle.map(lambda array: _like(tensor, array))


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: ReduceOperation | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> CollectiveHandle[list[Tensor]]:
    """Begin to combine several tensors; each rank gets its share of the rows of each."""
    return calls.grouped(
        reducescatter_async,
        tensors,
        name,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


# -- tensors and arrays ---------------------------------------------------------------------------


def _on_host(tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ArgumentTypeError(
            f"expected a tensor, got {type(tensor).__name__}; for arrays import kvstore.horovod "
            "as hvd"
        )
    if tensor.layout != torch.strided:
        raise ArgumentTypeError(
            f"expected a dense tensor, got one of {tensor.layout}; pass tensor.to_dense(), or call "
            "hvd.sparse_allreduce_async"
        )
    return tensor.detach().cpu()


def _summand(tensor: Tensor) -> Array:
    host = _on_host(tensor)
    check_reducible(host)
    return contiguous(host)


def _own_memory(tensor: Tensor) -> Array | None:
    """Return the tensor's own memory if a result can be written there."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return array_of(tensor)


def _like(tensor: Tensor, values: Array) -> Tensor:
    """Return the values as a tensor of the dtype and on the device of ``tensor``."""
    if tensor.dtype == torch.bfloat16:
        found = torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    else:
        found = torch.from_numpy(np.asarray(values)).view(tensor.dtype)
    return found.to(tensor.device)


def _filled(tensor: Tensor, values: Array) -> Tensor:
    """Copy the values into the tensor, unless they are there already."""
    if tensor.device.type == "cpu":
        fill(tensor, values)
    else:
        tensor.detach().copy_(_like(tensor, values))
    return tensor
