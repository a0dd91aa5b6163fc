"""The collective calls on NumPy arrays, and the handles of calls in flight.

Calls of different ranks are matched by kind and name, or without a name by their order. Each
function here makes a call and returns its handle; ``array_api.py`` and ``torch/operations.py`` wrap
them for users. Any thread may call. The work that remains after the answer has arrived (dividing,
joining pieces) runs once, on the first thread that waits.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from kvstore.errors import ArgumentTypeError, ArgumentValueError, NotSupportedError
from kvstore.frameworks.horovod import session
from kvstore.frameworks.horovod.session import HorovodSession, ProcessSet
from pslite import Future
from pslite.errors import MismatchError, UsageError
from pslite.future import gather

T = TypeVar("T")
U = TypeVar("U")
Array = np.ndarray[Any, Any]


class ReduceOperation(enum.Enum):
    """How the values of all ranks are combined; the names of the members are Horovod's."""

    AVERAGE = "average"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


def operation_of(op: ReduceOperation | None, average: bool | None = None) -> ReduceOperation:
    """Return the operation of a call; ``average`` is the older name of ``op``."""
    if op is not None and average is not None:
        raise ArgumentValueError("pass op or average, not both; average is the older name of op")
    if average is not None:
        return ReduceOperation.AVERAGE if average else ReduceOperation.SUM
    if op is None:
        return ReduceOperation.AVERAGE
    if not isinstance(op, ReduceOperation):
        raise ArgumentTypeError(
            f"op must be one of hvd.Average, Sum, Min, Max and Product, got {op!r:.60}"
        )
    if op is ReduceOperation.ADASUM:
        raise NotSupportedError(
            "Adasum is not offered; pass op=hvd.Average (with a learning rate for the larger batch)"
        )
    return op


class CollectiveHandle(Generic[T]):
    """One call in flight; ``hvd.synchronize`` returns its result.

    Args:
        finish: turns the future's value into the result; called once.
    """

    def __init__(
        self, owner: HorovodSession, future: Future[Any], finish: Callable[[Any], T]
    ) -> None:
        self._owner = owner
        self.future = future
        self._finish: Callable[[Any], T] | None = finish
        self._lock = threading.RLock()  # guards what is finished once
        self._value: T | None = None
        self._error: BaseException | None = None

    def poll(self) -> bool:
        """Return whether the call has ended; does not wait."""
        return self.future.done()

    def result(self) -> T:
        """Wait for the value.

        Raises:
            HorovodInternalError: the call has failed.
        """
        found = self._owner.wait(self.future)
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    self._value = finish(found)
                except MismatchError as error:
                    self._error = session.HorovodInternalError(str(error))
                    self._error.__cause__ = error
                except BaseException as error:
                    self._error = error
            if self._error is not None:
                raise self._error
            return self._value  # type: ignore[return-value]

    __call__ = result

    def map(self, step: Callable[[T], U]) -> CollectiveHandle[U]:
        """Return a handle whose result is ``step(result)``, computed on the thread that waits."""
        return CollectiveHandle(self._owner, self.future, lambda _: step(self.result()))


def grouped(
    call: Callable[..., CollectiveHandle[T]],
    tensors: Sequence[Any],
    name: str | None,
    **options: Any,
) -> CollectiveHandle[list[T]]:
    """Make a call for each of several tensors, and return one handle for all."""
    if len(tensors) == 0:
        raise ArgumentValueError("a grouped call needs at least one tensor, got an empty list")
    names = names_in_group(name, len(tensors))
    handles = [
        call(tensor, name=each, **options) for tensor, each in zip(tensors, names, strict=True)
    ]
    together = gather([each.future for each in handles])
    return CollectiveHandle(
        handles[0]._owner, together, lambda _: [each.result() for each in handles]
    )


def names_in_group(name: str | None, count: int) -> list[str | None]:
    """Return a name for each tensor of a grouped call."""
    return [None if name is None else f"{name}.{number}" for number in range(count)]


# -- the calls ------------------------------------------------------------------------------------


def all_reduce(
    array: Array,
    op: ReduceOperation,
    name: str | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    out: Array | None = None,
) -> CollectiveHandle[Array]:
    """Combine the arrays of all ranks; ``factors`` multiply the input and the result.

    Args:
        out: array for the result, of the shape and dtype of ``array``; may be ``array``.
    """
    before, after = factors
    group = session.group_of(process_set)
    source = scaled(array, before)
    handle = _begin(
        "allreduce",
        name,
        process_set,
        lambda label: group.all_reduce(source, op.value, out=out, name=label),
    )

    def finish(found: Array) -> Array:
        result = scaled(found, after)
        if out is None or result is out:
            return result
        np.copyto(out, result)
        return out

    return handle.map(finish)


def reduce_scatter(
    array: Array,
    op: ReduceOperation,
    name: str | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> CollectiveHandle[Array]:
    """Combine the arrays of all ranks, and give each rank its share of the rows.

    If the shares cannot be equal, the first ranks get one row more.
    """
    before, after = factors
    group = session.group_of(process_set)
    rows = _rows("reducescatter", array)
    share, more = divmod(rows, group.size)
    pieces = cut(scaled(array, before), [share + (rank < more) for rank in range(group.size)])
    handle = _begin(
        "reducescatter",
        name,
        process_set,
        lambda label: group.reduce_scatter(pieces, op.value, name=label),
    )
    return handle.map(lambda found: scaled(found, after))


def all_gather(
    array: Array, name: str | None, process_set: ProcessSet, kind: str = "allgather"
) -> CollectiveHandle[list[Array]]:
    """Give each rank the arrays of all; their first dimensions may differ."""
    _rows(kind, array)
    group = session.group_of(process_set)
    return _begin(kind, name, process_set, lambda label: group.all_gather(array, name=label))


def broadcast(
    array: Array, root: int, name: str | None, process_set: ProcessSet
) -> CollectiveHandle[Array]:
    """Fill the array with that of the global rank ``root``."""
    group = session.group_of(process_set)
    number = index_of_root(root, process_set)
    return _begin(
        "broadcast", name, process_set, lambda label: group.broadcast(array, number, name=label)
    )


def all_to_all(
    array: Array, splits: Sequence[int] | None, name: str | None, process_set: ProcessSet
) -> CollectiveHandle[list[Array]]:
    """Send ``splits[i]`` rows to rank i; the result is the rows from each rank."""
    group = session.group_of(process_set)
    rows = _rows("alltoall", array)
    if splits is None:
        if rows % group.size:
            raise ArgumentValueError(
                f"expected a first dimension that {group.size} ranks share equally, got {rows}; "
                "pass splits, the number of rows for each rank"
            )
        splits = [rows // group.size] * group.size
    if len(splits) != group.size or min(splits) < 0 or sum(splits) > rows:
        raise ArgumentValueError(
            f"expected {group.size} splits, which are at most {rows} rows together, got "
            f"{list(splits)}"
        )
    pieces = cut(array, splits)
    handle = _begin(
        "alltoall", name, process_set, lambda label: group.all_to_all(pieces, name=label)
    )
    return handle.map(lambda found: _alike(found, array, process_set))


def barrier(process_set: ProcessSet) -> None:
    """Wait until all ranks of the set have made this call."""
    group = session.group_of(process_set)
    _begin("barrier", None, process_set, lambda _: group.barrier()).result()


def join() -> int:
    """Say that this rank has no more data, and wait until all ranks have joined.

    Until then, this rank takes part in ``allreduce`` with zeros.

    Returns the rank that joined last.
    """
    group = session.group_of(session.global_process_set)
    return _begin("join", None, session.global_process_set, lambda _: group.join()).result()


# -- inside ---------------------------------------------------------------------------------------


def _begin(
    kind: str, name: str | None, process_set: ProcessSet, call: Callable[[str | None], Future[T]]
) -> CollectiveHandle[T]:
    """Make a call; raise errors about its arguments before anything is sent."""
    owner = session.current()
    try:
        future = call(None if name is None else f"{kind}.{name}")
    except UsageError as error:
        if isinstance(error, ValueError | TypeError):
            raise
        raise ArgumentValueError(str(error)) from error
    if owner.timeline is not None:
        owner.timeline.note(name or "(no name)", kind, future)
    return CollectiveHandle(owner, future, lambda found: found)


def scaled(array: Array, factor: float) -> Array:
    """Return the array times a factor, or the array itself if the factor is 1.

    Integers are multiplied in float64 and truncated, float16 numbers in float32.
    """
    if factor == 1.0:
        return array
    result: Array
    if array.dtype.kind in "iub":
        result = array * np.float64(factor)
    elif array.dtype.itemsize == 2:
        result = array.astype(np.float32) * np.float32(factor)
    else:
        result = array * array.dtype.type(factor)
    return result.astype(array.dtype, copy=False)


def cut(array: Array, counts: Sequence[int]) -> list[Array]:
    """Return views of consecutive rows; ``counts`` has the number of rows of each rank."""
    ends = np.cumsum([0, *counts]).tolist()
    return [array[begin : begin + count] for begin, count in zip(ends, counts, strict=False)]


def _rows(kind: str, array: Array) -> int:
    if array.ndim == 0:
        raise ArgumentValueError(
            f"{kind} needs at least one dimension, got a scalar; reshape it to (1,)"
        )
    return len(array)


def index_of_root(root: int, process_set: ProcessSet) -> int:
    """Return the index of a global rank in the set."""
    members = session.current().sets[process_set.process_set_id or 0]
    if root not in members:
        raise ArgumentValueError(
            f"root_rank must be a global rank of the process set, one of {list(members)}, got "
            f"{root!r:.60}"
        )
    return members.index(root)


def _alike(found: list[Array], own: Array, process_set: ProcessSet) -> list[Array]:
    """Check that the pieces of all ranks have the same rows."""
    members = session.current().sets[process_set.process_set_id or 0]
    for rank, piece in zip(members, found, strict=True):
        if piece.shape[1:] != own.shape[1:]:
            raise MismatchError(
                f"alltoall needs rows of one shape: those of rank {rank} are {piece.shape[1:]}, "
                f"those of this rank {own.shape[1:]}"
            )
    return found


def concatenated(pieces: Sequence[Array]) -> Array:
    """Join arrays along their first dimension."""
    joined: Array = np.concatenate(pieces)
    return joined


def group_size(process_set: ProcessSet) -> int:
    """Return the number of ranks in a set; this rank must be one of them."""
    return session.group_of(process_set).size


def rank_in(process_set: ProcessSet) -> int:
    """Return this process's rank within a set."""
    return session.group_of(process_set).rank
