"""``ProcessGroupKVStore``: a group of ``torch.distributed`` on a ``Communicator``.

Up to PyTorch 2.13, a backend in Python subclasses ``ProcessGroup`` and replaces PyTorch's group,
since ``Backend`` has no constructor there. From 2.15, a group also needs an inner ``Backend``,
which ``_inner_backend`` creates. C++ code (the reducer of DistributedDataParallel, functional
collectives) can call only the methods that PyProcessGroup.hpp passes on; Python code can call all.
PyTorch 2.13 renamed three methods, so both names exist here.

Any thread may call. ``Communicator`` numbers the calls of a group, which gives them their order. A
call returns at once; ``work.py`` contains the waiting. Read next: ``cluster.py``.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvstore.errors import ArgumentValueError, NotSupportedError
from kvstore.frameworks.torch.cluster import GroupCluster, join
from kvstore.frameworks.torch.tensors import (
    Array,
    array_of,
    check_reducible,
    contiguous,
    fill,
    fill_each,
    fill_if_given,
    fill_in_turn,
    fill_rows,
    fill_scattered,
    fill_sum,
    operation,
    rows_of,
)
from kvstore.frameworks.torch.work import Completions, KVStoreWork
from pslite import Communicator, Future
from pslite.errors import MismatchError
from pslite.future import gather

NAME = "kvstore"
OLDEST = "2.7"
_CPU = torch.device("cpu")
Tensors = Sequence[torch.Tensor]


def create(options: Any, backend_options: Any = None) -> ProcessGroupKVStore:
    """Make a group; ``torch.distributed`` passes ``_DistributedBackendOptions``.

    Raises ``NotSupportedError`` for a PyTorch that loses the results of calls of a Python group.
    """
    if torch.__version__ < OLDEST:
        raise NotSupportedError(
            f"the backend kvstore needs PyTorch {OLDEST} or later, this is {torch.__version__}: "
            "DistributedDataParallel does not find the results of calls there. Install a newer "
            "one (2.13 and 2.15 are tested)"
        )
    members = list(options.global_ranks_in_group)
    world = dist.GroupMember.WORLD
    timeout_s = options.timeout.total_seconds()
    if members and isinstance(world, ProcessGroupKVStore):
        # A part of one of our groups uses the same cluster.
        _check_members(world, options.group_id, members)
        ranks = [world.cluster.ranks[rank] for rank in members]
        group = ProcessGroupKVStore(options.group_rank, options.group_size)
        group.begin(world.cluster, ranks, options.group_id, timeout_s, options.store)
        return group
    cluster = join(options.store, options.group_rank, options.group_size)
    group = ProcessGroupKVStore(options.group_rank, options.group_size)
    group.begin(cluster, cluster.ranks, options.group_id, timeout_s, options.store)
    group.owns_cluster = True
    return group


def _check_members(world: ProcessGroupKVStore, name: str, members: Sequence[int]) -> None:
    """Raise if another rank has created the group of this name with other ranks.

    PyTorch numbers groups on each rank, so groups without a common rank may have one name.
    """
    own = json.dumps([world.rank(), *members])
    for number in itertools.count():
        found = world.cluster.store.compare_set(f"group/{name}/{number}", "", own)
        first, *ranks = json.loads(found)
        if ranks == members:
            return
        if not set(members).isdisjoint(ranks):
            raise MismatchError(
                "all ranks must call new_group for the same ranks in the same order: the group "
                f"named {name!r} is {ranks} on rank {first} and {members} on rank {world.rank()}"
            )


class ProcessGroupKVStore(dist.ProcessGroup):  # type: ignore[misc]
    """A process group whose ranks are workers of a cluster. :func:`create` makes it."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.owns_cluster = False
        self._group_name = "undefined"
        self._group_description = "undefined"
        self._inner = _inner_backend(rank, size)
        if self._inner is not None:
            kind = dist.ProcessGroup.BackendType.CUSTOM
            self._register_backend(_CPU, kind, self._inner)
            self._set_default_backend(kind)

    def begin(
        self, cluster: GroupCluster, ranks: Sequence[int], name: str, timeout_s: float, store: Any
    ) -> None:
        """Begin with ``ranks``, the cluster's workers in the order of the group."""
        self.cluster = cluster
        self.calls = Communicator(cluster.node, ranks, name=f"torch {name}")
        self._timeout_s = timeout_s
        self._store = store
        self._completions = Completions()

    # -- who this is -------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        """Return ``kvstore``."""
        return NAME

    def name(self) -> str:
        """Return ``kvstore``."""
        return NAME

    def getGroupName(self) -> str:  # noqa: N802
        """Return PyTorch's name of this group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name of this group; functional collectives look for it."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return PyTorch's description of this group."""
        return self._group_description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the description of this group."""
        self._group_description = description

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def _get_backend(self, device: torch.device) -> Any:
        return self if self._inner is None else self._inner

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def get_group_store(self) -> Any:
        """Return the store with which the group's ranks found each other."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the default timeout of this group's calls."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: ``Communicator`` numbers the calls."""

    # -- reductions --------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> KVStoreWork:
        """Combine the tensors of all ranks, in place."""
        op, factor = _operation(opts)
        found = _listed(tensors)

        def call(tensor: torch.Tensor) -> Future[Any]:
            if tensor.layout == torch.sparse_coo:
                return self._all_gather_sparse(tensor, op)
            array = _summand(tensor)
            return self.calls.all_reduce(array, op, factor=factor, out=array)

        return self._each(found, found, call, fill_sum, opts)

    def _all_gather_sparse(self, tensor: torch.Tensor, op: str) -> Future[Any]:
        """Send every rank's rows to all ranks, for embeddings with ``sparse=True``."""
        if op != "sum":
            raise ArgumentValueError(f"expected SUM for a sparse tensor, got {op.upper()}")
        own = tensor.detach().coalesce()
        indices = self.calls.all_gather(contiguous(own.indices().t()))
        return gather([indices, self.calls.all_gather(contiguous(own.values()))])

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> KVStoreWork:
        """Combine several tensors of all ranks, in place."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Any, opts: Any = None) -> KVStoreWork:
        """Combine the tensors of all ranks, in place on the root only."""
        op, factor = _operation(opts)
        root = _root(opts)
        found = _listed(tensors)

        def call(tensor: torch.Tensor) -> Future[Any]:
            return self.calls.reduce(_summand(tensor), root, op, factor=factor)

        return self._each(found, found, call, fill_if_given, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> KVStoreWork:
        """Combine each input over all ranks; rank i gets the i-th result."""
        op, factor = _operation(opts)

        def call(pieces: Tensors) -> Future[Any]:
            return self.calls.reduce_scatter([*map(_summand, pieces)], op, factor=factor)

        return self._each(_listed(outputs), _lists(inputs), call, fill, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> KVStoreWork:
        """Combine the inputs of all ranks; rank i gets the i-th equal piece."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> KVStoreWork:
        """Do the same for several inputs."""
        op, factor = _operation(opts)

        def call(tensor: torch.Tensor) -> Future[Any]:
            pieces = rows_of(_summand(tensor).reshape(-1), (), self.size())
            return self.calls.reduce_scatter(pieces, op, factor=factor)

        return self._each(outputs, inputs, call, fill, opts)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- moving data -------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None) -> KVStoreWork:
        """Copy the root's tensor into the tensors of all ranks."""
        root = _root(opts)
        found = _listed(tensors)
        call = lambda tensor: self.calls.broadcast(contiguous(tensor), root)  # noqa: E731
        return self._each(found, found, call, fill, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> KVStoreWork:
        """Give every rank the inputs of all ranks."""
        call = lambda tensor: self.calls.all_gather(contiguous(tensor))  # noqa: E731
        return self._each(_lists(outputs), _listed(inputs), call, fill_each, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> KVStoreWork:
        """Do the same for several inputs: ``outputs[rank][i]`` is that rank's i-th."""
        by_input = [*map(list, zip(*outputs, strict=True))]
        return self.allgather(by_input, inputs, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> KVStoreWork:
        """Give every rank the inputs of all ranks, one after the other in one tensor."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> KVStoreWork:
        """Do the same for several inputs."""
        call = lambda tensor: self.calls.all_gather(contiguous(tensor))  # noqa: E731
        return self._each(outputs, inputs, call, fill_in_turn, opts)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> KVStoreWork:
        """Give the root the inputs of all ranks."""
        root = _root(opts)
        found = _listed(inputs)
        call = lambda tensor: self.calls.gather(contiguous(tensor), root)  # noqa: E731
        targets = _lists(outputs) if self.rank() == root else [[] for _ in found]
        return self._each(targets, found, call, fill_each, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> KVStoreWork:
        """Give rank i the i-th input of the root."""
        root = _root(opts)
        found = _listed(outputs)
        sources: Any = _lists(inputs) if self.rank() == root else [None for _ in found]

        def call(pieces: Tensors | None) -> Future[Any]:
            return self.calls.scatter(None if pieces is None else [*map(contiguous, pieces)], root)

        return self._each(found, sources, call, fill_scattered, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: Sequence[int] = (),
        input_splits: Sequence[int] = (),
        opts: Any = None,
    ) -> KVStoreWork:
        """Cut the input into a piece for each rank; exchange the pieces."""
        pieces = rows_of(contiguous(input), input_splits, self.size())
        targets = rows_of(array_of(output), output_splits, self.size())
        future = self.calls.all_to_all(pieces)
        finish = lambda values: fill_rows(targets, values)  # noqa: E731
        return self._work(future, finish, [output], opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> KVStoreWork:
        """Send the i-th input to rank i, and get one tensor from each rank."""
        future = self.calls.all_to_all([*map(contiguous, inputs)])
        return self._work(future, lambda values: fill_each(outputs, values), outputs, opts)

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> KVStoreWork:
        """Send a tensor to a rank of the group; complete when a server has it."""
        found = _listed(tensors)
        call = lambda tensor: self.calls.send(contiguous(tensor), to, tag)  # noqa: E731
        return self._each([()] * len(found), found, call, lambda *_: None, None)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> KVStoreWork:
        """Receive a tensor that a rank of the group has sent with this tag."""
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> KVStoreWork:
        """Receive a tensor from any rank; the work's ``source_rank`` names the rank."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> KVStoreWork:
        (tensor,) = _listed(tensors)
        future = self.calls.recv(source, tag)
        return self._work(future, lambda got: fill(tensor, got.array, got.dtype), [tensor], None)

    def barrier(self, opts: Any = None) -> KVStoreWork:
        """Complete when all ranks have made this call."""
        return self._work(self.calls.barrier(), lambda _: None, [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks have made this call; an error names the missing ranks."""
        self.barrier().wait(timeout)

    # -- the end -------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the group, and its own cluster; ``destroy_process_group`` calls this."""
        self.calls.close()
        self._completions.close()
        if self.owns_cluster:
            self.owns_cluster = False
            self.cluster.leave()

    abort = shutdown

    # -- inside --------------------------------------------------------------------------------

    def _each(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        call: Callable[[Any], Future[Any]],
        finish: Callable[[Any, Any], None],
        opts: Any,
    ) -> KVStoreWork:
        """Make one call for each input; ``finish(output, value)`` stores its result."""
        if len(outputs) != len(inputs):
            raise ArgumentValueError(
                f"expected as many outputs as inputs, got {len(outputs)} and {len(inputs)}"
            )
        tensors = [*_flattened(outputs)]
        if len(inputs) == 1:
            only = functools.partial(finish, outputs[0])
            return self._work(call(inputs[0]), only, tensors, opts)

        def finish_all(values: Sequence[Any]) -> None:
            for output, value in zip(outputs, values, strict=True):
                finish(output, value)

        return self._work(gather([call(each) for each in inputs]), finish_all, tensors, opts)

    def _work(
        self, future: Future[Any], finish: Callable[[Any], None], tensors: Tensors, opts: Any
    ) -> KVStoreWork:
        timeout = getattr(opts, "timeout", None)
        limit_s = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
        work = KVStoreWork(
            self.cluster.node,
            future,
            finish,
            tensors,
            limit_s if limit_s > 0 else self._timeout_s,
            self._completions,
        )
        if getattr(opts, "asyncOp", False):
            work.finish_in_background()
        return work


@functools.cache
def _backend_class() -> type[Any]:
    class InnerBackend(torch._C._distributed_c10d.Backend):  # type: ignore[misc]
        """The group's device for C++ code of PyTorch 2.15; the group does the work."""

        supports_splitting = False
        supports_coalescing = False
        supports_time_estimate = False

        def getBackendName(self) -> str:  # noqa: N802
            """Return ``kvstore``."""
            return NAME

    return InnerBackend


def _inner_backend(rank: int, size: int) -> Any:
    """Return the inner backend for PyTorch 2.15; None if it has no constructor."""
    try:
        return _backend_class()(rank, size)
    except TypeError:  # "No constructor defined"
        return None


def _summand(tensor: torch.Tensor) -> Array:
    check_reducible(tensor)
    return contiguous(tensor)


def _operation(opts: Any) -> tuple[str, float | None]:
    return operation(getattr(opts, "reduceOp", opts) or dist.ReduceOp.SUM)


def _root(opts: Any) -> int:
    return opts if isinstance(opts, int) else int(getattr(opts, "rootRank", 0))


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _lists(tensors: Any) -> list[list[torch.Tensor]]:
    """Return a list of lists, also for PyTorch's short form with one list."""
    found = list(tensors)
    return [found] if found and isinstance(found[0], torch.Tensor) else [*map(list, found)]


def _flattened(outputs: Iterable[Any]) -> Iterable[torch.Tensor]:
    for output in outputs:
        if isinstance(output, torch.Tensor):
            yield output
        else:
            yield from output
