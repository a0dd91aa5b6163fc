"""The calls of ``kvstore.horovod`` on NumPy arrays; ``torch/`` has them for tensors.

Arguments are arrays of any shape and of dtype bool, integer, float or complex, or values that
``numpy.asarray`` converts to such arrays. Do not change an argument of an ``..._async`` call before
``synchronize``. Results are new arrays; calls that end in ``_`` write into the argument. Calls of
different ranks are matched by ``name``, or without a name by their order.

Calls raise ``ArgumentTypeError`` or ``ArgumentValueError`` for a value that cannot be sent, and for
the name of a call in flight. ``synchronize`` (and the calls without ``_async``) raise
``HorovodInternalError`` if the ranks' calls differ or a rank is lost. Source: the interface of
Horovod 0.28.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.errors import ArgumentTypeError, ArgumentValueError
from kvstore.frameworks.horovod import calls
from kvstore.frameworks.horovod.calls import Array, CollectiveHandle, ReduceOperation
from kvstore.frameworks.horovod.compression import Compression
from kvstore.frameworks.horovod.session import ProcessSet, global_process_set

Average = ReduceOperation.AVERAGE
Sum = ReduceOperation.SUM
Adasum = ReduceOperation.ADASUM
Min = ReduceOperation.MIN
Max = ReduceOperation.MAX
Product = ReduceOperation.PRODUCT


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[Array]:
    """Begin to combine the arrays of all ranks; the default ``op`` is the average."""
    found = calls.operation_of(op, average)
    factors = prescale_factor, postscale_factor
    return calls.all_reduce(_source(tensor), found, name, factors, process_set)


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return the combined arrays of all ranks."""
    small, context = compression.compress(_source(tensor))
    handle = allreduce_async(
        small, average, name, op, prescale_factor, postscale_factor, process_set
    )
    found: Array = compression.decompress(handle.result(), context)
    return found


def allreduce_async_(
    tensor: Array,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[Array]:
    """Begin to combine the C-contiguous arrays of all ranks in place."""
    found = calls.operation_of(op, average)
    factors = prescale_factor, postscale_factor
    target = _target(tensor)
    return calls.all_reduce(target, found, name, factors, process_set, target)


def allreduce_(tensor: Array, *args: Any, **options: Any) -> Array:
    """Combine the arrays of all ranks in place; arguments as for ``allreduce_async_``."""
    return allreduce_async_(tensor, *args, **options).result()


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[list[Array]]:
    """Begin to combine each of several arrays with those of all ranks."""
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


def grouped_allreduce(tensors: Sequence[Any], *args: Any, **options: Any) -> list[Array]:
    """Combine several arrays; arguments as for ``grouped_allreduce_async``."""
    return grouped_allreduce_async(tensors, *args, **options).result()


def grouped_allreduce_async_(
    tensors: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[list[Array]]:
    """Begin to combine each of several arrays with those of all ranks, in place."""
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


def grouped_allreduce_(tensors: Sequence[Array], *args: Any, **options: Any) -> list[Array]:
    """Combine several arrays in place; arguments as for ``grouped_allreduce_async_``."""
    return grouped_allreduce_async_(tensors, *args, **options).result()


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> CollectiveHandle[Array]:
    """Begin to join the arrays of all ranks along the first dimension, which may differ."""
    return calls.all_gather(_source(tensor), name, process_set).map(calls.concatenated)


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Array:
    """Return the arrays of all ranks, joined along their first dimension."""
    return allgather_async(tensor, name, process_set).result()


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> CollectiveHandle[list[Array]]:
    """Begin to join each of several arrays with those of all ranks."""
    return calls.grouped(allgather_async, tensors, name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Array]:
    """Join each of several arrays with those of all ranks."""
    return grouped_allgather_async(tensors, name, process_set).result()


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[Array]:
    """Begin to get the array of rank ``root_rank``."""
    return calls.broadcast(_source(tensor).copy(), root_rank, name, process_set)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Return the array of rank ``root_rank``."""
    return broadcast_async(tensor, root_rank, name, process_set).result()


def broadcast_async_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[Array]:
    """Begin to fill the C-contiguous array with that of rank ``root_rank``."""
    return calls.broadcast(_target(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Array:
    """Fill the array with that of rank ``root_rank``."""
    return broadcast_async_(tensor, root_rank, name, process_set).result()


def alltoall_async(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> CollectiveHandle[tuple[Array, Array]]:
    """Begin to send each rank its rows.

    The result is the rows for this rank, and how many of them each rank has sent.
    """
    handle = calls.all_to_all(_source(tensor), splits_of(splits), name, process_set)
    return handle.map(
        lambda found: (calls.concatenated(found), np.array([*map(len, found)], np.int32))
    )


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows for this rank; with ``splits``, also how many each rank has sent."""
    found, received = alltoall_async(tensor, splits, name, process_set).result()
    return found if splits is None else (found, received)


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: ReduceOperation | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> CollectiveHandle[Array]:
    """Begin to combine the arrays of all ranks; each rank gets its share of the rows."""
    factors = prescale_factor, postscale_factor
    return calls.reduce_scatter(_source(tensor), calls.operation_of(op), name, factors, process_set)


def reducescatter(tensor: Any, *args: Any, **options: Any) -> Array:
    """Return this rank's rows; arguments as for ``reducescatter_async``."""
    return reducescatter_async(tensor, *args, **options).result()


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: ReduceOperation | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> CollectiveHandle[list[Array]]:
    """Begin to combine several arrays; each rank gets its share of the rows of each."""
    return calls.grouped(
        reducescatter_async,
        tensors,
        name,
        op=op,
        process_set=process_set,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )


def grouped_reducescatter(tensors: Sequence[Any], *args: Any, **options: Any) -> list[Array]:
    """Return this rank's rows; arguments as for ``grouped_reducescatter_async``."""
    return grouped_reducescatter_async(tensors, *args, **options).result()


def synchronize(handle: CollectiveHandle[Any]) -> Any:
    """Wait for the call of a handle, and return its result."""
    if not isinstance(handle, CollectiveHandle):
        raise ArgumentTypeError(
            f"synchronize takes the handle that an ..._async call returned, got {handle!r:.60}"
        )
    return handle.result()


def poll(handle: CollectiveHandle[Any]) -> bool:
    """Return whether ``synchronize`` of this handle would return at once."""
    if not isinstance(handle, CollectiveHandle):
        raise ArgumentTypeError(
            f"poll takes the handle that an ..._async call returned, got {handle!r:.60}"
        )
    return handle.poll()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have made this call."""
    calls.barrier(process_set)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have joined.

    Until then, this rank takes part in ``allreduce`` with zeros.

    Returns the rank that joined last. ``device`` is only for compatibility.
    """
    return calls.join()


def splits_of(splits: Any) -> list[int] | None:
    """Return the numbers of rows for each rank."""
    if splits is None:
        return None
    found = np.asarray(splits)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise ArgumentValueError(
            f"splits must be whole numbers, one for each rank, got {found.dtype} of shape "
            f"{found.shape}"
        )
    numbers: list[int] = found.tolist()
    return numbers


def _source(value: Any) -> Array:
    return np.asarray(value, order="C")


def _target(array: Any) -> Array:
    if not isinstance(array, np.ndarray):
        raise ArgumentTypeError(
            f"a call in place needs a NumPy array, got {type(array).__name__}; for tensors import "
            "kvstore.horovod.torch as hvd"
        )
    return array
