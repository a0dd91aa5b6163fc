"""``Communicator``: collective calls among some workers of a job.

::

    group = Communicator(node)                                # on each worker
    total = group.all_reduce(gradient).result()
    group.broadcast(weights, root=0).result()                 # fills ``weights`` on the others

The n-th call of a group is the same call on all its ranks, so they must make the same calls in the
same order. Calls with a ``name`` are matched by the name instead. If the calls differ, all ranks
get a ``MismatchError``. The servers need no preparation: a call exists from the first rank's
message to the last answer. Large arrays are cut into chunks, which are spread over the servers. Any
thread may call; answers are copied into arrays on the node's I/O thread.

If all workers of a group are on one machine, calls in order use shared memory
(``shared_memory_route.py``), and the results are equal bit for bit. If they are on several
machines, calls in order use shared memory on each machine, and the servers between machines
(``machines_route.py``). All other calls use the servers. In a group made with ``any_order``, all
large sums and broadcasts can use shared memory (``ready_order.py``). This file checks arguments and
chooses the route. Read next: ``server_route.py``.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from pslite.apps.asking import as_int64
from pslite.collective.arrays import (
    Array,
    checked,
    checked_name,
    checked_out,
    dtype_name,
    one_for_each,
    with_op,
)
from pslite.collective.mailbox import Mail, ReceivedArray
from pslite.collective.ready_order import ReadyOrder
from pslite.collective.ring_opening import RingOpening, Route, machines_of
from pslite.collective.server_route import ServerRoute
from pslite.errors import ClosedError, UsageError
from pslite.future import Future
from pslite.ids import Role
from pslite.node.postoffice import Postoffice
from pslite.protocol.collective import ANY, Absence, CallKey, CollectiveCall, GroupKey

T = TypeVar("T")
_JOIN = 1 << 40
"""After the n-th ``join``, calls are numbered anew, from n times this."""

#: The nodes on which a call was made.
_users: weakref.WeakSet[Postoffice] = weakref.WeakSet()
# Guards the counts below, and the numbers of calls of all groups.
_lock = threading.Lock()
_groups_made: weakref.WeakKeyDictionary[Postoffice, Counter[tuple[str, tuple[int, ...]]]] = (
    weakref.WeakKeyDictionary()
)


class Communicator:
    """Makes collective calls in a group of workers. All of them return futures.

    Arrays are C-contiguous NumPy arrays of a dtype in ``DTYPES``; they may be empty or 0-d. They
    must not change until the future is done. For ``bfloat16``, pass arrays of ``ml_dtypes``, or
    uint16 arrays and ``dtype="bfloat16"``.

    Args:
        node: the node of a worker, once the cluster is complete.
        ranks: workers' ranks in the job, in the group's order; None: all.
        name: the same on all members. Workers must make groups with the same name and ranks in the
            same order, which tells these groups apart.
        rings: whether calls may use shared memory; the same on all members.
        any_order: whether large calls may use shared memory even with a name, and in a group
            whose members ``join``. They then begin with a question to a server. The same on all
            members.

    Raises:
        UsageError: the ranks are not different workers of this job, or this one is not among them.
    """

    def __init__(
        self,
        node: Postoffice,
        ranks: Sequence[int] | None = None,
        *,
        name: str = "",
        rings: bool = True,
        any_order: bool = False,
    ) -> None:
        if node.role is not Role.WORKER:
            raise UsageError(
                f"a Communicator needs the node of a worker, got that of a {node.role.value}"
            )
        count = node.config.num_workers
        self.ranks = tuple(range(count) if ranks is None else map(operator.index, ranks))
        if len(set(self.ranks)) < len(self.ranks) or not set(self.ranks) <= set(range(count)):
            raise UsageError(
                f"expected different ranks of this job's {count} workers, got {list(self.ranks)}"
            )
        if node.rank not in self.ranks:
            raise UsageError(
                f"worker {node.rank} is not among the group's ranks {list(self.ranks)}; only its "
                "members make a group"
            )
        self.node = node
        self.name = checked_name(name)
        self.rank = self.ranks.index(node.rank)
        self.size = len(self.ranks)
        self._group = GroupKey(self.name, self.ranks, _number_of_group(node, name, self.ranks))
        machines = machines_of(node, self.ranks)
        rings = rings and machines.have_neighbours
        any_order = any_order and rings
        self._servers = ServerRoute(node, self.rank, self.size, self._ended, meets=any_order)
        self._mail = Mail(node, self._group, self._servers.chunk_bytes(""))
        #: Name -> the number of calls so far; "" counts the calls that are matched by order.
        self._counts: Counter[str] = Counter()
        self._names_under_way: set[str] = set()
        self._num_joins = 0
        self._has_joined = False
        self._is_closed = False
        self._rings: RingOpening | None = None
        if rings:
            order = ReadyOrder(self._servers, self._ended) if any_order else None
            self._rings = RingOpening(node, self._group, machines, self._servers, order)

    # -- calls ---------------------------------------------------------------------------

    def all_reduce(
        self,
        array: Array,
        op: str = "sum",
        *,
        factor: float | None = None,
        out: Array | None = None,
        dtype: str | None = None,
        name: str | None = None,
    ) -> Future[Array]:
        """Combine the arrays of all ranks, in rank order; every rank gets the result.

        If there are several machines and some ranks share one, each machine's arrays are combined
        first. Then the machines' results are combined in the order of their lowest ranks.
        PS_SUM_ON_MACHINES=0 turns this off.

        Args:
            op: sum, average, product, min, max, band, bor, bxor, or premul_sum, which
                multiplies each array by ``factor`` first.
            out: where to write the result: of the same shape and dtype; may be ``array``, which
                then holds what other ranks get, until this rank's call is done. None: a new array.
        """
        source = checked(array)
        call = CollectiveCall(
            "all_reduce", op, dtype_name(source, dtype), (source.shape,), factor=factor
        )
        call = with_op(call)
        result = np.empty(source.shape, source.dtype) if out is None else checked_out(out, source)
        return self._make(call, name, [source], [result], result)

    def reduce(
        self,
        array: Array,
        root: int,
        op: str = "sum",
        *,
        factor: float | None = None,
        out: Array | None = None,
        dtype: str | None = None,
        name: str | None = None,
    ) -> Future[Array | None]:
        """Reduce as ``all_reduce``; only rank ``root`` gets the result, the others None."""
        source, root = checked(array), self._checked_root(root)
        kind = dtype_name(source, dtype)
        call = with_op(CollectiveCall("reduce", op, kind, (source.shape,), root, factor))
        if self.rank != root:
            return self._make(call, name, [source], [], None)
        result = np.empty(source.shape, source.dtype) if out is None else checked_out(out, source)
        return self._make(call, name, [source], [result], result)

    def broadcast(self, array: Array, root: int, *, name: str | None = None) -> Future[Array]:
        """Copy the array of rank ``root`` into ``array`` on the others; return ``array``."""
        source = checked(array)
        call = CollectiveCall(
            "broadcast", "", dtype_name(source), (source.shape,), self._checked_root(root)
        )
        if self.rank == root:
            return self._make(call, name, [source], [], array)
        return self._make(call, name, [], [checked_out(array, source)], array)

    def all_gather(self, array: Array, *, name: str | None = None) -> Future[list[Array]]:
        """Return the arrays of all ranks; their first dimensions may differ and be 0."""
        return self._exchange(
            self._gathering("all_gather", array, -1), name, [array], range(self.size)
        )

    def gather(
        self, array: Array, root: int, *, name: str | None = None
    ) -> Future[list[Array] | None]:
        """Gather as ``all_gather``; only rank ``root`` gets the result, the others None."""
        call = self._gathering("gather", array, self._checked_root(root))
        if self.rank == root:
            return self._exchange(call, name, [array], range(self.size)).map(lambda found: found)
        return self._exchange(call, name, [array], ()).map(lambda _: None)

    def scatter(
        self,
        arrays: Sequence[Array] | None,
        root: int,
        *,
        out: Array | None = None,
        name: str | None = None,
    ) -> Future[Array]:
        """Return the i-th array of rank ``root`` on rank i; shapes may differ, dtypes not.

        Args:
            arrays: on the root, one for each rank; None on the other ranks.
            out: where to write this rank's array; None: a new array.
        """
        call = CollectiveCall("scatter", root=self._checked_root(root))
        if (self.rank == root) != (arrays is not None):
            raise UsageError(f"scatter takes arrays on rank {root}, its root, and None elsewhere")
        outgoing = [] if arrays is None else one_for_each(arrays, self.size)
        outs = None if out is None else [checked_out(out, out)]
        return self._exchange(call, name, outgoing, (root,), outs).map(lambda found: found[0])

    def reduce_scatter(
        self,
        arrays: Sequence[Array],
        op: str = "sum",
        *,
        factor: float | None = None,
        out: Array | None = None,
        dtype: str | None = None,
        name: str | None = None,
    ) -> Future[Array]:
        """Combine the i-th arrays of all ranks, in rank order; rank i gets the result."""
        sources = one_for_each(arrays, self.size)
        shapes = tuple(source.shape for source in sources)
        kind = dtype_name(sources[0], dtype)
        call = with_op(CollectiveCall("reduce_scatter", op, kind, shapes, factor=factor))
        own = sources[self.rank]
        result = np.empty(own.shape, own.dtype) if out is None else checked_out(out, own)
        return self._make(call, name, sources, [result], result)

    def all_to_all(
        self, arrays: Sequence[Array], *, name: str | None = None
    ) -> Future[list[Array]]:
        """Send the i-th array to rank i; get one from each rank. Shapes may differ."""
        sources = one_for_each(arrays, self.size)
        call = CollectiveCall("all_to_all", dtype=dtype_name(sources[0]))
        return self._exchange(call, name, sources, range(self.size))

    def barrier(self, *, name: str | None = None) -> Future[None]:
        """Wait for all ranks: the future completes once all have made this call."""
        return self._make(CollectiveCall("barrier"), name, [], [], None)

    def join(self) -> Future[int]:
        """Stop sending data: count as zeros in ``all_reduce`` until all ranks have joined.

        Completes with the rank that joined last; then this rank may make calls again. Until then
        it makes no calls. On the other ranks, averages still divide by the size of the group.
        Operations that zeros would change (min, max, product, band) and all other calls end with
        an error.

        Raises:
            UsageError: the group's calls may use shared memory, so the servers do not know them.
        """
        if self._rings is not None and self._rings.order is None:
            raise UsageError(
                "join needs a group whose calls are known to the servers: make it with "
                "any_order=True on all its workers"
            )
        with _lock:
            self._check_open()
            self._has_joined = True
            base = self._num_joins * _JOIN
            last = {name: base + count for name, count in self._counts.items()}
        absence = Absence(base, last, base + _JOIN)

        def begin_anew(last: int) -> int:
            with _lock:
                self._num_joins += 1
                self._counts.clear()
                self._has_joined = False
            return last

        return self._servers.join(self._group, absence).map(begin_anew)

    def send(self, array: Array, to: int, tag: int = 0) -> Future[None]:
        """Send an array to rank ``to``; done when its mailbox or its ``recv`` has it.

        Messages of one sender, receiver and tag arrive in the order of their calls. A mailbox
        holds 64 MiB; the rest waits at the sender.
        """
        self._check_open()
        rank = self._checked_root(to, "to")
        return self._mail.send(checked(array), self.ranks[rank], as_int64(tag, "a tag"))

    def recv(
        self, source: int | None = None, tag: int = 0, *, out: Array | None = None
    ) -> Future[ReceivedArray]:
        """Receive the oldest message with this tag, from rank ``source`` or from any.

        Args:
            out: where to write it, with the shape and dtype that were sent. None: a new array.
        """
        self._check_open()
        rank = None if source is None else self.ranks[self._checked_root(source, "source")]
        into = None if out is None else checked_out(out, out)
        return self._mail.receive(rank, as_int64(tag, "a tag"), into)

    def close(self) -> None:
        """Close the group; calls in flight through the servers continue."""
        if self.node.io_queue.is_forked:  # the rings are still its parent's
            return
        self._is_closed = True
        if self._rings is not None:
            self._rings.close()

    # -- inside --------------------------------------------------------------------------

    def _make(
        self,
        call: CollectiveCall,
        name: str | None,
        outgoing: Sequence[Array],
        into: Sequence[Array],
        value: T,
    ) -> Future[T]:
        """Make a call whose sizes all ranks know.

        This rank sends ``outgoing``, and the answers fill ``into``: no array, or one. If a call
        has an array for each rank, that is this rank's.
        """
        return self._go(name, call, lambda route, key: route.make(key, call, outgoing, into, value))

    def _exchange(
        self,
        call: CollectiveCall,
        name: str | None,
        outgoing: Sequence[Array],
        sources: Sequence[int],
        outs: Sequence[Array] | None = None,
    ) -> Future[list[Array]]:
        """Make a call with arrays of any size; return one array from each of ``sources``.

        If ``outs`` are given, they are filled and returned.
        """
        return self._go(
            name, call, lambda route, key: route.exchange(key, call, outgoing, sources, outs)
        )

    def _go(
        self, name: str | None, call: CollectiveCall, make: Callable[[Route, CallKey], Future[T]]
    ) -> Future[T]:
        """Number a call, and make it through the route for such calls of this group."""
        key = self._begin(name)
        try:
            if self._rings is None or not self._rings.takes(key, call):
                return make(self._servers, key)
            return self._rings.call(key, call, lambda route: make(route, key))
        except BaseException:
            self._ended(key)
            raise

    def _gathering(self, kind: str, array: Array, root: int) -> CollectiveCall:
        """Return a call whose arrays differ only in their first dimension."""
        shape = checked(array).shape
        alike = (ANY, *shape[1:]) if shape else ()
        return CollectiveCall(kind, "", dtype_name(array), (alike,), root)

    def _begin(self, name: str | None) -> CallKey:
        """Number a call."""
        label = "" if name is None else checked_name(name)
        if name == "":
            raise UsageError("a call's name must not be empty; leave it out to match by order")
        with _lock:
            self._check_open()
            if label in self._names_under_way:
                raise UsageError(
                    f"a call named {label!r} is under way in this group; wait for it first"
                )
            if label:
                self._names_under_way.add(label)
            self._counts[label] += 1
            return CallKey(self._group, label, self._num_joins * _JOIN + self._counts[label])

    @staticmethod
    def is_used_on(node: Postoffice) -> bool:
        """Return whether this worker has made a call of any group."""
        return node in _users

    def _check_open(self) -> None:
        self.node.io_queue.check_process()
        if self.node not in _users:
            _users.add(self.node)
            if self.node.config.rejoin_timeout_s:  # no other process could repeat its calls
                self.node.control.say_whether_to_return(False)
        if self._is_closed:
            raise ClosedError("this Communicator was closed")
        if self._has_joined:
            raise UsageError("this rank has joined: wait for the future of join() first")

    def _ended(self, key: CallKey) -> None:
        with _lock:
            self._names_under_way.discard(key.name)

    def _checked_root(self, root: int, word: str = "root") -> int:
        root = operator.index(root)
        if not 0 <= root < self.size:
            raise UsageError(
                f"{word} must be a rank of the group, 0 to {self.size - 1}, got {root}"
            )
        return root


def _number_of_group(node: Postoffice, name: str, ranks: tuple[int, ...]) -> int:
    """Return how many groups with this name and these ranks the worker made before."""
    with _lock:
        made = _groups_made.setdefault(node, Counter())
        made[name, ranks] += 1
        return made[name, ranks] - 1
