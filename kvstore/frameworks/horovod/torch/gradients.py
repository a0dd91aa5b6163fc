"""The calls of ``kvstore.horovod.torch`` that wait, with their gradients for autograd.

The gradients are those of Horovod. The backward pass of a call makes another call, so all ranks of
the process set must run it, in the same order. Source: horovod/torch/mpi_ops.py of Horovod 0.28.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvstore.frameworks.horovod import calls, session
from kvstore.frameworks.horovod.calls import ReduceOperation
from kvstore.frameworks.horovod.compression import Compression
from kvstore.frameworks.horovod.session import ProcessSet, global_process_set
from kvstore.frameworks.horovod.torch import operations


class AllreduceGradient(torch.autograd.Function):  # type: ignore[misc]
    """Combines tensors of all ranks; the backward pass combines the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        op: ReduceOperation,
        names: Sequence[str | None],
        factors: tuple[float, float],
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Wait for one call for each tensor."""
        ctx.options = op, factors, process_set
        handles = [
            operations.allreduce_async(tensor, None, name, op, *factors, process_set)
            for tensor, name in zip(tensors, names, strict=True)
        ]
        return tuple(handle.result() for handle in handles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Combine the gradients in the same way."""
        op, factors, process_set = ctx.options
        names = [None] * len(grads)
        found = AllreduceGradient.apply(op, names, factors, process_set, *grads)
        return (None, None, None, None, *found)


class AllgatherGradient(torch.autograd.Function):  # type: ignore[misc]
    """Joins tensors of all ranks; each gets its rows of the average of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, names: Sequence[str | None], process_set: ProcessSet, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        """Wait for one call for each tensor."""
        ctx.process_set = process_set
        ctx.lengths = [len(tensor) if tensor.dim() else 0 for tensor in tensors]
        handles = [
            operations.allgather_async(tensor, name, process_set)
            for tensor, name in zip(tensors, names, strict=True)
        ]
        return tuple(handle.result() for handle in handles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Average the gradients, and return this rank's rows."""
        averages = grouped_allreduce(grads, op=ReduceOperation.AVERAGE, process_set=ctx.process_set)
        lengths = torch.tensor([ctx.lengths])
        of_ranks = operations.allgather_async(lengths, None, ctx.process_set).result()
        begins = of_ranks[: calls.rank_in(ctx.process_set)].sum(0).tolist()
        found = [
            average.narrow(0, begin, length)
            for average, begin, length in zip(averages, begins, ctx.lengths, strict=True)
        ]
        return (None, None, *found)


class BroadcastGradient(torch.autograd.Function):  # type: ignore[misc]
    """Gives all ranks the root's tensor, and the root the average of the gradients."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        """Wait for the call."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return operations.broadcast_async(tensor, root_rank, name, process_set).result()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Average the gradients on the root; return zeros on the other ranks."""
        average = allreduce(grad, op=ReduceOperation.AVERAGE, process_set=ctx.process_set)
        is_root = session.rank() == ctx.root_rank
        return average if is_root else torch.zeros_like(average), None, None, None


class AlltoallGradient(torch.autograd.Function):  # type: ignore[misc]
    """Sends each rank its rows, and sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        """Wait for the call."""
        ctx.process_set, ctx.rows = process_set, len(tensor) if tensor.dim() else 0
        handle = operations.alltoall_async(tensor, splits, name, process_set)
        found, received = handle.result()
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return found, received

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
        """Send each rank the gradients of its rows; rows that were not sent have zeros."""
        back, _ = alltoall(grad, ctx.received, process_set=ctx.process_set)
        if len(back) < ctx.rows:
            back = torch.cat([back, back.new_zeros(ctx.rows - len(back), *back.shape[1:])])
        return back, None, None, None


class ReducescatterGradient(torch.autograd.Function):  # type: ignore[misc]
    """Combines tensors and gives each rank its rows; the backward pass joins the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        op: ReduceOperation,
        names: Sequence[str | None],
        factors: tuple[float, float],
        process_set: ProcessSet,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Wait for one call for each tensor."""
        ctx.options = op, factors, process_set
        handles = [
            operations.reducescatter_async(tensor, name, op, process_set, *factors)
            for tensor, name in zip(tensors, names, strict=True)
        ]
        return tuple(handle.result() for handle in handles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        """Join the gradients of all ranks; for a sum, times the number of ranks as in Horovod."""
        op, factors, process_set = ctx.options
        factor = factors[0] * factors[1]
        if op is ReduceOperation.SUM:
            factor *= calls.group_size(process_set)
        found = grouped_allgather([grad * factor for grad in grads], None, process_set)
        return (None, None, None, None, *found)


# -- what users call ------------------------------------------------------------------------------


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the combined tensors of all ranks; the default ``op`` is the average."""
    options = (calls.operation_of(op, average), process_set, prescale_factor, postscale_factor)
    (found,) = _combined(AllreduceGradient, [tensor], [name], compression, *options)
    return found


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the combined tensors of all ranks for each of several."""
    options = (calls.operation_of(op, average), process_set, prescale_factor, postscale_factor)
    names = calls.names_in_group(name, len(tensors))
    return _combined(AllreduceGradient, tensors, names, compression, *options)


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensors of all ranks, joined along the first dimension, which may differ."""
    (found,) = AllgatherGradient.apply([name], process_set, tensor)
    return found


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Join each of several tensors with those of all ranks."""
    names = calls.names_in_group(name, len(tensors))
    return [*AllgatherGradient.apply(names, process_set, *tensors)]


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor of rank ``root_rank``."""
    return BroadcastGradient.apply(tensor, root_rank, name, process_set)


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows for this rank; with ``splits``, also how many each rank has sent."""
    found, received = AlltoallGradient.apply(tensor, splits, name, process_set)
    return found if splits is None else (found, received)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOperation | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the combined tensors; the default ``op`` is the average."""
    options = (calls.operation_of(op), process_set, prescale_factor, postscale_factor)
    (found,) = _combined(ReducescatterGradient, [tensor], [name], compression, *options)
    return found


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOperation | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows for each of several tensors."""
    options = (calls.operation_of(op), process_set, prescale_factor, postscale_factor)
    names = calls.names_in_group(name, len(tensors))
    return _combined(ReducescatterGradient, tensors, names, compression, *options)


def _combined(
    function: Any,
    tensors: Sequence[Tensor],
    names: Sequence[str | None],
    compression: Any,
    op: ReduceOperation,
    process_set: ProcessSet,
    *factors: float,
) -> list[Tensor]:
    """Apply an autograd function to the compressed tensors."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    small = [tensor for tensor, _ in pairs]
    results = function.apply(op, names, factors, process_set, *small)
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, pairs, strict=True)
    ]
