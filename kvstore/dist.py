"""The distributed stores: ``dist_sync``, ``dist_device_sync``, ``dist_async``.

A worker adds its devices' values up, sends the sum in parts to the servers that hold the keys
(``plan.py``), and copies answers into the caller's arrays. Rounds, order and delivery are the
data plane's business (``pslite/plane``), sums and updates the servers' (``server.py``), who
lives where the directory's (``directory.py``). Public calls may come from any thread; results
are copied out by the node's I/O thread.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for, adapter_on
from kvstore.base import (
    Key,
    Keys,
    KeySpec,
    KeyTable,
    KVStore,
    Values,
    check_optimizer,
    normalise_keys,
    spec_of,
)
from kvstore.context import Context
from kvstore.errors import OptimizerNotSet
from kvstore.nodes import worker_node
from kvstore.operation import Landing, Operation, Pushes, overlaps
from kvstore.optimizer.base import Optimizer
from kvstore.plan import (
    Bytes,
    Group,
    StagingPool,
    flat_bytes,
    gather,
    part_entries,
    plan,
    scatter_into,
    views,
)
from kvstore.protocol import (
    DIRECTORY_APP,
    STORE_APP,
    DirectoryCall,
    KeyEntry,
    StoreCall,
    pack,
    pack_parts,
    pack_specs,
    unpack,
    unpack_entries,
)
from kvstore.server import pack_optimizer, unpack_optimizer
from pslite import WORKER_GROUP, Future, Postoffice, Role
from pslite.errors import ClosedError, DeadlineError, UsageError
from pslite.future import completed, settled
from pslite.future import gather as gather_futures
from pslite.ids import SCHEDULER_ID, node_id
from pslite.plane import Transfer

_HOST = Context("cpu", 0)

#: Plans are kept for so many lists of keys.
_MAX_PLANS = 256

_store_numbers: weakref.WeakKeyDictionary[Postoffice, Iterator[int]] = weakref.WeakKeyDictionary()
"""Stores of a node are numbered in the order of creation, which is the same on all workers."""


def create_dist(canonical: str, name: str, *, node: Postoffice | None = None) -> DistKVStore:
    """A distributed store; ``canonical`` is the name of its behaviour, ``name`` as given.

    Without ``node``, the process joins the cluster that its environment describes (DMLC_*);
    its stores share that node. A process whose DMLC_ROLE is server or scheduler serves here
    until the job is over and then exits, as scripts for the original expect.
    """
    return DistKVStore(
        name,
        worker_node() if node is None else node,
        synchronous="async" not in canonical,
        on_device="device" in canonical,
    )


class DistKVStore(KVStore):
    """A store whose values live on servers. What each call promises is said in ``KVStore``.

    ``push`` returns once the values are copied; an error of a push that comes later is raised
    by the next call. Waits have no end of their own: they end in the value, or in an error
    that names the node that is lost; what takes long is reported every PS_STALL_REPORT.
    """

    def __init__(self, name: str, node: Postoffice, *, synchronous: bool, on_device: bool) -> None:
        self._name = name
        self._node = node
        self._synchronous = synchronous
        self._on_device = on_device
        self._number = next(_store_numbers.setdefault(node, itertools.count(1)))
        self._servers = [node_id(Role.SERVER, rank) for rank in range(node.config.num_servers)]
        # Keeps the order of pushes and of what is submitted the same. Nobody waits for an
        # answer with it: what one thread waits for may depend on another's next push.
        self._lock = threading.Lock()
        self._table = KeyTable()
        self._entries: dict[Key, KeyEntry] = {}
        self._plans: dict[tuple[Key, ...], list[Group]] = {}
        self._pushes = Pushes()
        self._staging = StagingPool()
        self._optimizer: Optimizer | None = None
        self._optimizer_calls = 0
        self._late_error: BaseException | None = None
        self._is_closed = False

    # -- what it is --------------------------------------------------------------------

    @property
    def type(self) -> str:
        return self._name

    @property
    def rank(self) -> int:
        return self._node.rank

    @property
    def num_workers(self) -> int:
        return self._node.config.num_workers

    # -- public calls ------------------------------------------------------------------

    def init(self, key: Keys, value: Values) -> None:
        self._wait(self.init_async(key, value))

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        self._ready_to_push()
        pushed = self._table.check_push(key, value)
        earlier = self._pushes.beyond(pushed, self._node.config.round_window)
        if earlier:
            self._wait(settled(earlier))
            self._check()
        self._push(pushed, priority).on_done(self._note_error)

    def pull(self, key: Keys, out: Values | None = None, priority: int = 0) -> Any:
        self._check()
        if out is not None:
            self._pull(self._table.check_out(key, out), priority)
            return None
        keys, single = normalise_keys(key)
        specs = self._specs(keys)
        values = [np.empty(spec.shape, spec.dtype) for spec in specs]
        wanted: dict[Key, list[Array]] = {}
        for item, array in zip(keys, values, strict=True):
            wanted.setdefault(item, []).append(array)
        self._pull(wanted, priority)
        return values[0] if single else values

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> None:
        self._ready_to_push()
        pushed, filled = self._table.check_pushpull(key, value, out)
        keys = tuple(pushed)
        sources = [self._sum(pushed[item], self._table.spec(item)) for item in keys]
        landing = Landing([filled[item] for item in keys], self._specs(keys))
        self._wait_for_values(self._exchange(keys, sources, landing.arrays, priority, copy=False))
        landing.finish()

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        self._check()
        self._table.check_broadcast(key, value, out)
        self.init(key, value)
        self._pull(self._table.check_out(key, out), priority)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        optimizer = check_optimizer(optimizer)
        self._check()
        self._wait(self.set_optimizer_async(optimizer))

    def barrier(self) -> None:
        self._check()
        self._wait(self._node.barrier(WORKER_GROUP))

    def close(self) -> None:
        with self._lock:
            if not self._is_closed and self._late_error is not None:
                self._node.log.warn(f"a push had failed: {self._late_error}")
            self._is_closed = True

    # -- the same as futures -----------------------------------------------------------

    def init_async(self, key: Keys, value: Values) -> Future[None]:
        """``init``; the arrays belong to the store until the future is done."""
        self._check()
        values = self._table.check_init(key, value)
        specs = {item: spec_of(array) for item, array in values.items()}
        hosts = [adapter_for(array).to_host(array) for array in values.values()]
        body = pack(self._number, self._mode, pack_specs(list(specs.items())))

        def declared(body: bytes) -> Future[None]:
            decides, rows = unpack(body, bool, bytes)
            entries = unpack_entries(rows)
            future = self._create_parts(entries, hosts) if decides else completed(None)
            return future.map(lambda _: self._add(entries, specs))

        names = ", ".join(repr(item) for item in values)
        waiting_for = f"worker 0 (or the lowest rank that is left) to call init for {names}"
        return self._ask_directory(DirectoryCall.DECLARE, body, waiting_for).then(declared)

    def push_async(self, key: Keys, value: Values, priority: int = 0) -> Future[None]:
        """``push``; done when the push has been applied."""
        self._check()
        return self._push(self._table.check_push(key, value), priority)

    def pull_async(self, key: Keys, out: Values, priority: int = 0) -> Future[None]:
        """``pull``; the arrays of ``out`` belong to the store until the future is done."""
        self._check()
        filled = self._table.check_out(key, out)
        landing = Landing(list(filled.values()), self._specs(tuple(filled)))
        operation = self._exchange(tuple(filled), None, landing.arrays, priority, copy=False)
        return operation.future.map(lambda _: landing.finish())

    def set_optimizer_async(self, optimizer: Optimizer) -> Future[None]:
        """``set_optimizer``; what was pushed before belongs to the optimizer before."""
        self._check()
        self._optimizer_calls += 1
        call = self._optimizer_calls
        return settled(self._pushes.all()).then(lambda _: self._set_optimizer(optimizer, call))

    # -- inside ------------------------------------------------------------------------

    def _set_optimizer(self, optimizer: Optimizer, call: int) -> Future[None]:
        spec = pack_optimizer(optimizer)
        if self.rank == min(self._node.membership.live(Role.WORKER), default=0):
            asked = self._node.request(
                self._servers,
                STORE_APP,
                StoreCall.SET_OPTIMIZER,
                pack(self._number, self._synchronous, spec),
            )
            body = pack(self._number, self._mode, spec)
            answered = asked.then(
                lambda _: self._ask_directory(DirectoryCall.OPTIMIZER_IS_SET, body, "the directory")
            )
        else:
            body = pack(self._number, self._mode, call, spec)
            answered = self._ask_directory(
                DirectoryCall.SAME_OPTIMIZER, body, "worker 0 to call set_optimizer"
            )

        def remember(_: bytes) -> None:
            self._optimizer = optimizer

        return answered.map(remember)

    @property
    def _mode(self) -> str:
        return "sync" if self._synchronous else "async"

    def _specs(self, keys: Sequence[Key]) -> list[KeySpec]:
        return [self._table.spec(key) for key in keys]

    def _ask_directory(self, call: DirectoryCall, body: bytes, waiting_for: str) -> Future[bytes]:
        asked = self._node.request([SCHEDULER_ID], DIRECTORY_APP, call, body)
        answer = asked.map(lambda replies: replies[SCHEDULER_ID].body)
        answer.describe = waiting_for
        return answer

    def _create_parts(
        self, entries: Sequence[KeyEntry], hosts: Sequence[np.ndarray[Any, Any]]
    ) -> Future[None]:
        """Put the first values on the servers, then let the other ranks know."""
        new = [index for index, entry in enumerate(entries) if entry.key not in self._entries]
        entries = [entries[index] for index in new]
        arrays = [flat_bytes(hosts[index]) for index in new]
        asked = []
        for group in plan(entries, self._node.config.chunk_bytes):
            body = pack(self._number, self._synchronous, pack_parts(part_entries(group, entries)))
            frames = [view.data for view in views(group, arrays)]
            asked.append(
                self._node.request(
                    [group.server], STORE_APP, StoreCall.INIT, body, {group.server: frames}
                )
            )
        body = pack(self._number, [entry.key for entry in entries])
        return (
            gather_futures(asked)
            .then(lambda _: self._ask_directory(DirectoryCall.INITIALISED, body, "the directory"))
            .map(lambda _: None)
        )

    def _add(self, entries: Sequence[KeyEntry], specs: dict[Key, KeySpec]) -> None:
        for entry in entries:
            self._entries[entry.key] = entry
        self._table.add(specs)

    def _sum(self, arrays: Sequence[Array], spec: KeySpec) -> np.ndarray[Any, Any]:
        """One key's values, added up, on the host. May share the memory of a single value."""
        if len(arrays) == 1:
            return adapter_for(arrays[0]).to_host(arrays[0])
        device = adapter_for(arrays[0]).context(arrays[0]) if self._on_device else _HOST
        adapter = adapter_on(device)
        total = adapter.sum_in_order(arrays, device, spec.dtype)
        return adapter.to_host(total)

    def _push(self, pushed: dict[Key, list[Array]], priority: int) -> Future[None]:
        keys = tuple(pushed)
        sources = [self._sum(pushed[key], self._table.spec(key)) for key in keys]
        return self._exchange(keys, sources, None, priority, copy=True).future

    def _pull(self, filled: dict[Key, list[Array]], priority: int) -> None:
        keys = tuple(filled)
        landing = Landing(list(filled.values()), self._specs(keys))
        self._wait_for_values(self._exchange(keys, None, landing.arrays, priority, copy=False))
        landing.finish()

    def _exchange(
        self,
        keys: tuple[Key, ...],
        sources: Sequence[np.ndarray[Any, Any]] | None,
        targets: Sequence[Bytes] | None,
        priority: int,
        *,
        copy: bool,
    ) -> Operation:
        """Push ``sources``, pull into ``targets``, or both; ``copy`` frees the sources at once."""
        groups = self._plan(keys)
        memories = None if sources is None else [flat_bytes(source) for source in sources]
        if memories is not None and targets is not None and not copy:
            uncopied = {group.slices[0].position for group in groups if len(group.parts) == 1}
            copy = overlaps(memories, targets, uncopied)
        operation = Operation(len(groups), lambda: self._describe(keys), self._staging)
        transfers = operation.transfers
        for group in groups:
            frames = None
            staging = None
            if memories is not None:
                if copy or len(group.parts) > 1:
                    staging = self._staging.take(group.nbytes)
                    gather(group, memories, staging)
                    frames = [staging.data]
                else:
                    frames = [view.data for view in views(group, memories)]
            sink = None if targets is None else scatter_into(group, targets)
            done = operation.part_done(staging)
            transfers.append(
                Transfer(group.server, group.parts, group.sizes, frames, sink, done, priority)
            )
        with self._lock:
            if memories is not None:
                self._pushes.add(keys, operation.future)
            self._node.submit(transfers)
        return operation

    def _plan(self, keys: tuple[Key, ...]) -> list[Group]:
        groups = self._plans.get(keys)
        if groups is None:
            if len(self._plans) >= _MAX_PLANS:  # a script that shuffles its keys
                self._plans.clear()
            groups = plan([self._entries[key] for key in keys], self._node.config.chunk_bytes)
            self._plans[keys] = groups
        return groups

    def _describe(self, keys: Sequence[Key]) -> str:
        shown = ", ".join(repr(key) for key in keys[:3]) + (", ..." if len(keys) > 3 else "")
        return f"the servers' answer for {shown}"

    def _ready_to_push(self) -> None:
        self._check()
        if self._synchronous or self._optimizer is not None:
            return
        body = pack(self._number)
        answer = self._wait(self._ask_directory(DirectoryCall.OPTIMIZER_OF, body, "the directory"))
        (found,) = unpack(answer, list)
        if not found:
            raise OptimizerNotSet(
                f"{self._name} updates the stored values on every push and needs an optimizer: "
                "call set_optimizer on worker 0 before the first push"
            )
        self._optimizer = unpack_optimizer(found[0])

    def _wait(self, future: Future[Any]) -> Any:
        if self._node.is_io_thread and not future.done():
            raise UsageError(
                "a callback on the I/O thread must not wait: use the calls that return futures"
            )
        report_s = self._node.config.stall_report_s
        while True:
            try:
                return future.result(report_s)
            except DeadlineError as error:
                if future.error() is error:
                    raise
                self._node.log.warn(str(error))

    def _wait_for_values(self, operation: Operation) -> None:
        """Wait for a call that works in the caller's arrays; they are the caller's again then."""
        try:
            self._wait(operation.future)
        except BaseException:
            if not operation.future.done():
                self._node.call(operation.let_go)
                self._node.wait_until_accepted()
            raise

    def _note_error(self, future: Future[None]) -> None:
        error = future.error()
        if error is None:
            return
        if self._is_closed:
            self._node.log.warn(f"a push had failed: {error}")
        elif self._late_error is None:
            self._late_error = error

    def _check(self) -> None:
        if self._is_closed:
            raise ClosedError(f"this {self._name} store is closed; create a new one")
        if self._late_error is not None:
            error, self._late_error = self._late_error, None
            raise error
