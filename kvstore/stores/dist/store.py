"""The distributed stores: ``dist_sync``, ``dist_device_sync``, ``dist_async``.

This module has the calls that move values, with their waits and errors. ``arguments.py`` checks
arguments and ``transfer.py`` transfers values; keys, optimizers and files are in ``admin.py``.
Servers sum the pushed values and update the stored ones (``server/app.py``); the directory places
the keys (``server/directory.py``). Public calls may come from any thread except the node's I/O
thread, on which only calls that return futures work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.arrays.keys import Key, Keys, Values
from kvstore.errors import OptimizerNotSet
from kvstore.sparse.array import RowSparseArray
from kvstore.stores.arguments import (
    check_priority,
    checked_timeout,
    futures_in,
    normalise_keys,
    spec_of,
)
from kvstore.stores.arguments_sparse import check_dense_outs, check_wanted
from kvstore.stores.base import Path
from kvstore.stores.dist.admin import DistControl
from kvstore.stores.dist.arguments import (
    AddUp,
    Checked,
    checked_values,
    sums_on_host,
)
from kvstore.stores.dist.in_flight import Destination, Operation
from kvstore.stores.dist.node import worker_node
from kvstore.stores.dist.plan import Bucket, Bytes
from kvstore.stores.dist.sparse import RowCalls
from kvstore.stores.dist.transfer import noting_versions
from kvstore.stores.dist.views import DistViews, no_views
from kvstore.stores.lazy import begin_writing
from pslite import Communicator, Config, Future, Postoffice
from pslite.future import gather, settled

if TYPE_CHECKING:
    from kvstore.stores.dist.tables import DistTables
    from kvstore.stores.tables import Table


def create_dist(
    canonical: str,
    name: str,
    *,
    node: Postoffice | None = None,
    serve: Callable[[Config], int] | None = None,
) -> DistKVStore:
    """Return a distributed store of type ``canonical``; ``name`` is the name given.

    Without ``node``, the process joins the cluster that its environment describes (DMLC_*);
    its stores share that node. A process whose DMLC_ROLE is server or scheduler runs ``serve``
    here until the job ends and then exits, as scripts for MXNet expect.
    """
    return DistKVStore(
        name,
        worker_node(serve) if node is None else node,
        synchronous="async" not in canonical,
        on_device="device" in canonical,
    )


class DistKVStore(DistControl):
    """A store that keeps its values on servers. See ``KVStore`` for each call.

    ``push`` returns when the values are copied; if the push fails later, the next call raises the
    error. By default, waits have no time limit: they end with the value, or with an error that
    names the lost node. A long wait is reported every PS_STALL_REPORT.
    """

    def __init__(self, name: str, node: Postoffice, *, synchronous: bool, on_device: bool) -> None:
        super().__init__(name, node, synchronous=synchronous)
        self._group: Communicator = Communicator(node, name=f"store {self._servers.number}")
        self._buckets = self._exchange.buckets
        self._rows = RowCalls(node, self._exchange, self._table)
        self.views = DistViews(node, self._exchange, self._table, self._wait_for_values)
        self._views = self.views.table
        self._add_up: AddUp = sums_on_host
        if on_device:
            from kvstore.stores.dist.gpu_sums import sums_for

            self._add_up = sums_for(node)

    @property
    def communicator(self) -> Communicator:
        """The group of all workers of this store, for calls that return futures."""
        return self._group

    def _leave(self) -> None:
        self._end_views()
        self._group.close()
        super()._leave()

    # -- values ------------------------------------------------------------------------

    def init(self, key: Keys, value: Values) -> None:
        self._check_may_wait()
        self._wait(self.init_async(key, value))

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        self._ready_to_push()
        check_priority(priority)
        pushed = self._to_push(key, value)
        self._keep_to_window(pushed.keys)
        if pushed.sparse:
            self._push_rows(pushed, priority)
        else:
            self._push(pushed, priority, copy=True).on_error(self._note_error)

    def pull(
        self,
        key: Keys,
        out: Values | None = None,
        priority: int = 0,
        ignore_sparse: bool = True,
        *,
        with_version: bool = False,
    ) -> Any:
        self._check()
        check_priority(priority)
        out, _ = self._views.opened(key, out)
        wanted, values = self._wanted(
            key, out, ignores_sparse=bool(ignore_sparse), all_versions=with_version
        )
        if wanted.lazy is not None and not with_version and not wanted.sparse:
            self._let_arrive(wanted.lazy, *self._begin_pull(wanted, priority))
            return None
        self._waiter.check()
        versions: dict[int, int] | None = {} if with_version else None
        self._pull(wanted, priority, versions)
        if versions is None:
            return values
        keys, single = normalise_keys(key)
        found = [self._exchange.version(item, versions) for item in keys]
        return values, found[0] if single else found

    def pushpull(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> None:
        self._ready_to_push()
        check_priority(priority)
        out, renewed = self._views.opened(key, out)
        pushed = self._to_push(key, value, renewed)
        filled = checked_values(self._buckets, key, value if out is None else out, are_written=True)
        if pushed.sparse or filled.sparse:
            check_dense_outs(filled.sparse)
            self._waiter.check()
            self._keep_to_window(pushed.keys)
            self._push_rows(pushed, priority)
            self._pull(filled, priority)
            return
        if filled.lazy is not None:
            self._keep_to_window(pushed.keys)
            self._let_arrive(filled.lazy, *self._begin_pushpull(pushed, filled, priority))
            return
        self._waiter.check()
        operation, landing = self._begin_pushpull(pushed, filled, priority)
        self._wait_for_values(operation)
        landing.finish()
        self._check()  # as in _pull

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        self._check_may_wait()
        check_priority(priority)
        check_dense_outs(self._table.check_broadcast(key, value, out)[1])
        self.init(key, value)
        self._pull(checked_values(self._buckets, key, out, are_written=True), priority)

    def view(self, key: Keys) -> Any:
        self._check_may_wait()
        keys, single = normalise_keys(key)
        self._specs(keys)
        if not self._synchronous:
            raise no_views(self._name)
        self._returning.rules_out("it uses views of the stored values")
        views = self.views.show(keys)
        self._check()  # as in _pull
        return views[0] if single else views

    def row_sparse_pull(
        self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None
    ) -> Any:
        self._check_may_wait()
        check_priority(priority)
        wanted, is_single = check_wanted(self._table.spec, key, out, row_ids)
        pulled = self._rows.pull_rows(wanted, priority)
        self._wait_for_values(*pulled.operations)
        pulled.finish()
        self._check()  # as in _pull
        if out is not None:
            return None
        return pulled.results[0] if is_single else pulled.results

    def _memory(self, nbytes: int) -> np.ndarray[Any, Any]:
        return self._node.buffer(nbytes, lasting=True)

    # -- growing tables ----------------------------------------------------------------

    def _create_table(self, name: object, dim: object, optimizer: object, **options: Any) -> Table:
        self._returning.rules_out("it has a growing table")
        return self._tables.create(name, dim, optimizer, **options)

    def save_checkpoint(self, directory: Path) -> None:
        self._tables.warn_of_checkpoint()
        super().save_checkpoint(directory)

    # -- the same as futures -----------------------------------------------------------

    def init_async(self, key: Keys, value: Values) -> Future[None]:
        """Start an ``init``; do not change the arrays until the future is done."""
        self._check()
        values = self._table.check_init(key, value)
        specs = {item: spec_of(array) for item, array in values.items()}
        hosts = [
            array if isinstance(array, RowSparseArray) else adapter_for(array).to_host(array)
            for array in values.values()
        ]
        return self._init(specs, hosts)

    def push_async(self, key: Keys, value: Values, priority: int = 0) -> Future[None]:
        self._check()
        check_priority(priority)
        pushed = self._to_push(key, value)
        if pushed.sparse:
            push_rows = self._rows.prepare_push(pushed.sparse, priority)
            dense = self._push(pushed, priority, copy=True)
            return gather([dense, push_rows()]).map(lambda _: None)
        return self._push(pushed, priority, copy=pushed.lazy is not None)

    def pull_async(self, key: Keys, out: Values | None = None, priority: int = 0) -> Future[Any]:
        self._check()
        check_priority(priority)
        out, _ = self._views.opened(key, out)
        wanted, values = self._wanted(key, out, ignores_sparse=True)
        arrived = self._let_arrive(wanted.lazy or (), *self._begin_pull(wanted, priority))
        if wanted.sparse:
            rows = self._rows.pull(wanted.sparse, priority, {})
            arrived = gather([arrived, rows.future]).map(lambda _: rows.finish())
        return arrived.map(lambda _: values)

    def pushpull_async(
        self, key: Keys, value: Values, out: Values | None = None, priority: int = 0
    ) -> Future[None]:
        self._check()
        check_priority(priority)
        out, renewed = self._views.opened(key, out)
        pushed = self._to_push(key, value, renewed)
        filled = checked_values(self._buckets, key, value if out is None else out, are_written=True)
        if pushed.sparse or filled.sparse:
            return self._begin_pushpull_of_rows(pushed, filled, priority)
        if filled.lazy is not None:
            begun = self._begin_pushpull(pushed, filled, priority)
            return self._let_arrive(filled.lazy, *begun)
        operation, landing = self._begin_pushpull(pushed, filled, priority)
        return operation.map(lambda _: landing.finish())

    def wait(self, what: Any = None, timeout: float | None = None) -> Any:
        self._check()
        limit_s = checked_timeout(timeout)
        futures = futures_in(what)
        began_s = time.monotonic()
        if futures is not None:
            values = [self._wait(future, limit_s, began_s) for future in futures]
            return values[0] if isinstance(what, Future) else values
        keys = None if what is None else normalise_keys(what)[0]
        for key in keys or ():
            self._table.spec(key)
        for future in self._exchange.unfinished(keys):
            self._wait(future, limit_s, began_s)
        self._check()
        return None

    # -- inside ------------------------------------------------------------------------

    @cached_property
    def _tables(self) -> DistTables:
        from kvstore.stores.dist.tables import DistTables, StoreCalls

        calls = StoreCalls(
            self._check,
            self._check_may_wait,
            self._wait,
            self._wait_for_values,
            self._settle,
            self._meet,
            self._keep_to_window,
            self._note_error,
            lambda: self._is_closed,
        )
        made = DistTables(self._node, self._exchange, self._servers, calls)
        tables: DistTables = self.__dict__.setdefault("_tables", made)  # another thread's if first
        return tables

    def _to_push(self, key: Keys, value: Values, renewed: Container[Key] = ()) -> Checked:
        """Check the values that a call pushes and return them.

        Views of the keys end, except for those that the call renews.
        """
        pushed = checked_values(self._buckets, key, value)
        if pushed.sparse and self._exchange.coding is not None:
            self._exchange.coding.refuse_rows(pushed.sparse)
        if self._views.by_key:
            self._views.end([*pushed.keys.keys, *pushed.sparse], renewed)
        return pushed

    def _end_views(self, keys: Sequence[Key] | None = None) -> None:
        self._views.end(keys)

    def _landing(self, filled: Checked) -> Destination:
        landing = filled.landing()
        if self._views.by_key:
            self._views.watch(filled.keys.keys, landing.memories)
        return landing

    def _wanted(
        self, key: Keys, out: Values | None, *, ignores_sparse: bool, all_versions: bool = False
    ) -> tuple[Checked, Any]:
        """Return the arrays to fill, and the call's result: None, or new arrays."""
        if out is not None:
            wanted = checked_values(self._buckets, key, out, are_written=True)
            if wanted.sparse and ignores_sparse:
                kept: dict[Key, Sequence[Array]] = {**self._rows.outs.ignored(wanted.sparse, 4)}
                if all_versions:  # also versions of keys whose values are not requested
                    kept = {item: kept.get(item, ()) for item in wanted.sparse}
                wanted = wanted._replace(sparse=kept)
            return wanted, None
        keys, single = normalise_keys(key)
        values = [
            (RowSparseArray.zeros if self._table.is_row_sparse(item) else np.empty)(*spec)
            for item, spec in zip(keys, self._specs(keys), strict=True)
        ]
        wanted = checked_values(self._buckets, keys, values, are_written=True)
        return wanted, values[0] if single else values

    def _push(self, pushed: Checked, priority: int, *, copy: bool) -> Future[None]:
        """Begin a push; with ``copy`` the caller may change the arrays at once."""
        sources, are_ours = self._to_send(pushed)
        copy = copy and not are_ours
        return self._exchange.join(pushed.keys, sources, None, priority, copy=copy)

    def _push_rows(self, pushed: Checked, priority: int) -> None:
        """Begin a push of keys, some of which may be row-sparse."""
        if not pushed.sparse:
            self._push(pushed, priority, copy=True).on_error(self._note_error)
            return
        self._keep_to_window(self._buckets.of(tuple(pushed.sparse)))
        # Do first what may raise: the check of row sizes here, and of numbers in `_push`'s codec.
        push_rows = self._rows.prepare_push(pushed.sparse, priority)
        self._push(pushed, priority, copy=True).on_error(self._note_error)
        push_rows().on_error(self._note_error)

    def _begin_pushpull_of_rows(
        self, pushed: Checked, filled: Checked, priority: int
    ) -> Future[None]:
        check_dense_outs(filled.sparse)
        push_rows = self._rows.prepare_push(pushed.sparse, priority) if pushed.sparse else None
        pushes: list[Future[Any]] = [self._push(pushed, priority, copy=True)]
        if push_rows is not None:
            pushes.append(push_rows())
        pulled = self._rows.pull(filled.sparse, priority, {})
        future, landing = self._begin_pull(filled, priority)

        def finish(_: Any) -> None:
            landing.finish()
            pulled.finish()

        return gather([*pushes, future, pulled.future]).map(finish)

    def _pull(self, wanted: Checked, priority: int, versions: dict[int, int] | None = None) -> None:
        landing, operations = self._landing(wanted), []
        if wanted.keys.keys or not wanted.sparse:
            wrap = None if versions is None else partial(noting_versions, versions)
            operation = self._exchange.begin(
                wanted.keys, None, landing.memories, priority, wrap=wrap
            )
            operations.append(operation)
        noted: dict[int, int] = {} if versions is None else versions
        rows = self._rows.pull(wanted.sparse, priority, noted) if wanted.sparse else None
        self._wait_for_values(*operations, *(rows.operations if rows else ()))
        if rows:
            rows.finish()
        landing.finish()
        self._check()  # raises if an earlier push failed: the values lack that push

    def _begin_pull(self, wanted: Checked, priority: int) -> tuple[Future[None], Destination]:
        landing = self._landing(wanted)
        return self._exchange.join(wanted.keys, None, landing.memories, priority), landing

    def _begin_pushpull(
        self, pushed: Checked, filled: Checked, priority: int
    ) -> tuple[Operation, Destination]:
        """Begin a push-pull; after a lazy one the caller may change the pushed arrays."""
        sources, are_ours = self._to_send(pushed)
        landing = self._landing(filled)
        keys, into = pushed.keys, landing.memories
        if filled.lazy is None:
            return self._exchange.begin(keys, sources, into, priority), landing
        return self._exchange.join(keys, sources, into, priority, copy=not are_ours), landing

    def _let_arrive(
        self, arrays: Sequence[Array], future: Future[None], landing: Destination
    ) -> Future[None]:
        """Make these lazy arrays wait for values that arrive later."""
        arrived = future if landing.is_final else future.map(lambda _: landing.finish())
        if arrays:
            begin_writing(arrived, arrays, self._wait)
        return arrived

    def _to_send(self, pushed: Checked) -> tuple[Sequence[Bytes], bool]:
        """Return the data to send for each key, and whether the store owns all of it."""
        sources, are_ours = pushed.memory_to_send(self._add_up)
        coding = self._exchange.coding if pushed.keys.is_coded else None
        if coding is None:
            return sources, are_ours
        self._exchange.check(pushed.keys)  # before residuals change
        sources, all_coded = coding.encode(pushed.keys, sources, self._node.buffer)
        return sources, are_ours or all_coded

    def _keep_to_window(self, keys: Bucket) -> None:
        """Wait while this worker is too many pushes of a key ahead of the others."""
        earlier = self._exchange.pushes.beyond(keys.keys, self._node.config.round_window)
        if earlier:
            self._wait(settled(earlier))
            self._check()

    def _ready_to_push(self) -> None:
        self._check()
        if self._synchronous or self._optimizer.is_set:
            return
        if not self._optimizer.look():
            raise OptimizerNotSet(
                f"{self._name} updates the stored values on every push and needs an optimizer: "
                "call set_optimizer on worker 0 before the first push"
            )

    def _wait_for_values(self, *operations: Operation) -> None:
        """Wait for calls that use the caller's arrays; after an error, release the arrays."""
        try:
            self._wait(operations[0] if len(operations) == 1 else gather(operations))
        except BaseException:
            unfinished = [each for each in operations if not each.done()]
            for operation in unfinished:
                self._node.io_queue.call(operation.abandon)
            if unfinished:
                self._node.wait_until_accepted()
            raise

    def _note_error(self, future: Future[None]) -> None:
        error = future.error()
        if error is None:
            return
        if self._late_error is None or self._is_closed:
            self._late_error = error
            self._node.unheard.note(error)
