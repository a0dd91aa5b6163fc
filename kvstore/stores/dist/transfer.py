"""Move values of a distributed store: turn calls into transfers to servers.

A worker sums the values of its devices (``arguments.py``) and sends the sum in parts to the servers
that hold the keys (``plan.py``), directly from the sum's memory or from a copy. Answers are
received into the caller's arrays (``in_flight.py``). Calls that no thread waits for are batched
first (``batching.py``). The data plane (``pslite/plane``) handles rounds, order and delivery. Calls
may come from any thread; the node's I/O thread copies received values. Nothing here waits. Read
next: ``store.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from kvstore.arrays.keys import Key
from kvstore.protocol.placement import may_be_relayed, message_bytes
from kvstore.protocol.requests import KeyEntry
from kvstore.stores.arguments import KeyTable
from kvstore.stores.base import Version
from kvstore.stores.dist.batching import CallBatch, Load, loads_of, shape_of, transfers_of
from kvstore.stores.dist.compression import DistCompression
from kvstore.stores.dist.in_flight import (
    LEAST_SHARED_BYTES,
    Frames,
    InFlight,
    Operation,
    copied,
    frames_of,
)
from kvstore.stores.dist.plan import Bucket, Buckets, Bytes, Group, group_bytes, plan
from kvstore.stores.dist.progress import progress_of
from pslite import Future, Postoffice
from pslite.errors import UsageError
from pslite.ids import Role, node_id, rank_of
from pslite.plane import Piece, Relays, Sink

#: A batch of up to this many calls does not come from a loop.
_FEW_CALLS = 4
#: A batch that no thread waits for is sent when no call has joined it for ``_JOIN_S``, or after
#: ``_MAX_LOOKS`` checks. A loop over keys takes about 10 us per call; a thread may pause longer.
_JOIN_S = 0.003
_MAX_LOOKS = 5


class DenseExchange:
    """The pushes and pulls of one store on one worker."""

    def __init__(self, node: Postoffice, table: KeyTable, *, synchronous: bool) -> None:
        self._node = node
        #: Whether servers may relay for this store.
        self._may_relay = synchronous
        self.buckets = Buckets(table)
        # Makes the recorded order of calls the order in which they are submitted. No thread waits
        # for an answer while it holds the lock: the answer may depend on another thread's next
        # push. It is re-entrant: a node that has ended runs commands at once, on this thread.
        self._lock = threading.RLock()
        #: The open batch, which other calls may join, or None.
        self._batch: CallBatch | None = None
        #: Whether ``set_gradient_compression`` is running.
        self._is_changing = False
        #: Whether the last batch had many calls.
        self._is_in_loop = False
        node.traffic.add_owner(self)
        self._progress = progress_of(node)
        self.entries: dict[Key, KeyEntry] = {}
        #: The parts of each growing table, by its title (``tables.py``).
        self.tables: dict[str, range] = {}
        self.pushes = InFlight()
        self.pulls = InFlight()
        self.counters = {"pushes": 0, "pulls": 0, "bytes_pushed": 0, "bytes_pulled": 0}
        #: The best size of messages with many small values.
        self.message_bytes = message_bytes(node.config, by_tcp=not node.nearby.is_on_one_machine)

    @property
    def coding(self) -> DistCompression | None:
        """The encoding of values; None without compression."""
        coding: DistCompression | None = self.buckets.coding
        return coding

    def name_of(self, part: int) -> str | None:
        """Return the key or table of a part, for reports.

        Used by ``pslite/node/data.py``.
        """
        for title, parts in list(self.tables.items()):
            if part in parts:
                return title
        for entry in list(self.entries.values()):
            if part in entry.parts:
                which = f" (part {part - entry.first_part + 1} of {len(entry.parts)})"
                return f"key {entry.key!r}" + (which if len(entry.parts) > 1 else "")
        return None

    def add(self, entries: Iterable[KeyEntry]) -> None:
        """Add keys; calls can use them from now on."""
        self.entries.update((entry.key, entry) for entry in entries)

    @contextmanager
    def changing_coding(self) -> Iterator[None]:
        """Refuse pushes and pulls within this context, while the encoding changes."""
        with self._lock:
            self.check()
            self._is_changing = True
        try:
            yield
        finally:
            with self._lock:
                self._is_changing = False

    def set_coding(self, coding: DistCompression | None) -> None:
        """Set the encoding; only within ``changing_coding`` and with nothing in flight."""
        with self._lock:
            self._may_relay = False  # from now on, each worker sends its own encoded values
            self.buckets.begin_coding(coding)

    def check(self, keys: Bucket | None = None) -> None:
        """Raise an error while the encoding changes, or if these keys are of an old one.

        Also if one of the keys was deleted.
        """
        if self._is_changing or (keys is not None and keys.coding is not self.buckets.coding):
            raise UsageError(
                "set_gradient_compression is running in another thread; do not call init, push "
                "or pull before it returns"
            )
        if keys is not None and keys.gone is not None:
            raise keys.gone

    def remove(self, keys: Sequence[Key]) -> None:
        """Remove deleted keys."""
        gone = [entry for key in keys if (entry := self.entries.pop(key, None)) is not None]
        if self.coding is not None:
            self.coding.forget(gone)
        self._progress.forget(id(self), keys)
        self.buckets.remove(keys)
        self.pushes.forget(keys)
        self.pulls.forget(keys)
        parts = [part for entry in gone for part in entry.parts]
        self._node.io_queue.call(lambda: self._node.traffic.forget(parts))

    def remove_table(self, title: str) -> None:
        """Remove a deleted growing table."""
        parts = self.tables.pop(title, range(0))
        self._progress.forget(id(self), [title])
        self.pushes.forget([title])
        self.pulls.forget([title])
        self._node.io_queue.call(lambda: self._node.traffic.forget(parts))

    def begin(
        self,
        keys: Bucket,
        sources: Sequence[Bytes] | None,
        targets: Sequence[Bytes] | None,
        priority: int,
        *,
        copy: bool = False,
        wrap: Callable[[Group, Sink], Sink] | None = None,
    ) -> Operation:
        """Push ``sources``, pull into ``targets``, or both.

        Sources and targets are the flat memory of each key's value; the store's encoding has
        encoded the sources. With ``copy`` the caller may change the sources at once; otherwise they
        must stay unchanged until the operation is done. A pull becomes part of the push of its keys
        if that is the only call that waits to be sent. ``wrap`` may replace the function that gets
        a group's values.
        """
        if sources is None and wrap is None and targets and self._batch is not None:
            joined = self._pull_last(keys, targets, priority)
            if joined is not None:
                return joined
        operation = Operation(keys, (), targets or (), priority)
        groups = self._groups(keys)
        frames: Sequence[Frames | None] = [None] * len(groups)
        if sources is not None and copy:
            frames = [copied(self._node, group, sources) for group in groups]
        elif sources is not None:
            frames = frames_of(self._node, groups, sources, targets, keys.nbytes)
        operation.divide(groups, frames, wrap)
        self.submit(operation, pushes=sources is not None, pulls=targets is not None)
        return operation

    def submit(
        self, operation: Operation, *, pushes: bool, pulls: bool, nbytes: int | None = None
    ) -> None:
        """Send an operation with its transfers after all earlier ones, and count it.

        ``nbytes`` is its size, by default the size of the keys' whole values. Raises ``UsageError``
        while the encoding changes.
        """
        transfers = operation.transfers
        with self._lock:
            self.check(operation.keys)
            self.send_joined()  # earlier calls go first
            self._node.submit(transfers)
            # Record the call only now: if an interrupt prevented the submit, a wait for a recorded
            # call would never end.
            self._note(operation, pushes=pushes, pulls=pulls, nbytes=nbytes)
        if not transfers:
            operation.set_result(None)

    def _note(
        self, operation: Operation, *, pushes: bool, pulls: bool, nbytes: int | None = None
    ) -> None:
        counters, keys = self.counters, operation.keys
        nbytes = keys.nbytes if nbytes is None else nbytes
        if pushes:
            self.pushes.add(keys.keys, operation)
            counters["pushes"] += 1
            counters["bytes_pushed"] += nbytes
            if keys.keys:
                self._progress.pushed(id(self), keys.keys[0])
        if pulls:
            self.pulls.add(keys.keys, operation)
            counters["pulls"] += 1
            counters["bytes_pulled"] += nbytes

    # -- calls that may be joined ------------------------------------------------------

    def join(
        self,
        keys: Bucket,
        sources: Sequence[Bytes] | None,
        targets: Sequence[Bytes] | None,
        priority: int,
        *,
        copy: bool = True,
    ) -> Operation:
        """Begin a call for which no thread waits, with the arguments of ``begin``.

        A small one is sent together with other calls that follow soon, or by ``send_joined``; then
        its sources are copied.
        """
        if sources is not None and (keys.is_coded or keys.nbytes > self.message_bytes):
            return self.begin(keys, sources, targets, priority, copy=copy)
        if not keys.keys:
            call = Operation(keys)
            call.set_result(None)
            return call
        pushes, pulls = sources is not None, targets is not None
        with self._lock:
            self.check(keys)
            batch = self._batch
            if batch is not None and not pushes and targets is not None:
                last = batch.pull_last(keys, targets, priority)
                if last is not None:
                    self._note(last, pushes=False, pulls=True)
                    return last
            if batch is not None and not batch.has_room(keys.nbytes, pushes=pushes):
                self.send_joined()
                batch = None
            if batch is None:
                if self._is_in_loop:  # more pushes will follow
                    staging = self._node.buffer(self.message_bytes)
                else:
                    staging = self._memory(keys.nbytes if pushes else 0)
                batch = CallBatch(self.message_bytes, self.send_joined, staging)
            copies: Sequence[Bytes] = ()
            if sources is not None:
                copies = batch.stage(sources, keys.nbytes, self._memory)
            call = Operation(keys, copies, targets or (), priority)
            batch.add(call)
            if self._batch is None:
                self._open(batch)
            # As in submit.
            self._note(call, pushes=pushes, pulls=pulls)
        return call

    def _pull_last(self, keys: Bucket, targets: Sequence[Bytes], priority: int) -> Operation | None:
        """Let a waiting caller's pull join the push of its keys, and send that call.

        It must be the only call of the batch: an interrupt may end it (``Operation.abandon``).
        """
        with self._lock:
            self.check(keys)
            batch = self._batch
            if batch is None or len(batch.calls) > 1:
                return None
            last = batch.pull_last(keys, targets, priority)
            if last is not None:
                self._note(last, pushes=False, pulls=True)
                self.send_joined()
            return last

    def send_joined(self) -> None:
        """Send the open batch, if there is one. Any thread may call it."""
        if self._batch is None:
            return
        with self._lock:
            batch = self._batch
            if batch is not None:
                self._node.io_queue.call(partial(self._take, batch))
                # Last: an interrupt must not leave calls that are never sent. If the node has
                # ended, the batch is taken by now, and a callback may have begun another.
                if self._batch is batch:
                    self._batch = None

    def _open(self, batch: CallBatch) -> None:
        """Let other calls join a batch, which is sent soon even if no thread waits for it."""
        self._batch = batch
        try:
            self._node.io_queue.call(partial(self._watch, batch))
        except BaseException:
            self._batch = None  # the I/O thread may not know it
            raise

    def _watch(self, batch: CallBatch) -> None:
        """Look at a batch later, unless a thread waits for it already (I/O thread)."""
        if batch is self._batch:
            self._node.io_queue.call_later(_JOIN_S, partial(self._look_at, batch, 0, 1))

    def _look_at(self, batch: CallBatch, count: int, look: int) -> None:
        """Send a batch that still has ``count`` calls, else look again (I/O thread)."""
        now = len(batch.calls)
        if batch is not self._batch:
            return  # it was sent
        if now == count or look == _MAX_LOOKS:
            self._take(batch)
        else:
            self._node.io_queue.call_later(_JOIN_S, partial(self._look_at, batch, now, look + 1))

    def _memory(self, nbytes: int) -> Bytes:
        """Return memory for copies of values that are sent from there."""
        if nbytes < LEAST_SHARED_BYTES:
            return np.empty(nbytes, np.uint8)
        return self._node.heap.buffer(nbytes)

    def _take(self, batch: CallBatch) -> None:
        """Send a batch, unless it was sent already. Runs on the I/O thread."""
        with self._lock:
            if self._batch is batch:
                self._batch = None
            if batch.is_taken:
                return
            batch.is_taken = True
            self._is_in_loop = len(batch.calls) > _FEW_CALLS
        calls = batch.calls
        for call in calls:
            if call.keys.gone is not None:
                call.fail(call.keys.gone)
                calls = [each for each in calls if each is not call]
        try:
            staging = batch.staging if len(calls) == len(batch.calls) else None
            transfers = transfers_of(self._node, self._loads(calls), calls, staging)
        except Exception as error:  # a bug; a waiting thread must not wait for ever
            for call in calls:
                call.fail(error)
            return
        self._node.traffic.submit(transfers)

    def _loads(self, calls: Sequence[Operation]) -> Sequence[Load]:
        """Return the messages for these calls; a loop makes the same calls again."""
        if not calls:
            return ()
        shapes = list(map(shape_of, calls))
        kept = calls[0].keys.batches
        kind = shapes[0][1:3]
        if kind not in kept or kept[kind][0] != shapes:
            kept[kind] = shapes, loads_of(shapes, self.entries, self._plan)
        loads: Sequence[Load] = kept[kind][1]
        return loads

    def _groups(self, keys: Bucket) -> Sequence[Group]:
        """Return the messages of a call for these keys alone."""
        if keys.groups is None:
            if keys.gone is not None:
                raise keys.gone
            keys.groups = self._plan(keys.keys)
        return keys.groups

    def _plan(self, keys: Sequence[Key]) -> list[Group]:
        entries = [self.entries[key] for key in keys]
        nbytes = sum(entry.spec.nbytes for entry in entries)
        by_tcp = not self._node.nearby.is_on_one_machine
        limit = group_bytes(self._node.config, nbytes, by_tcp=by_tcp)
        groups = plan(entries, limit, keeps_keys_whole=not by_tcp, route=self.route)
        coding = self.coding
        return groups if coding is None else [coding.applied(group, keys) for group in groups]

    @property
    def relays(self) -> Relays | None:
        """The servers that relay for this store; None if workers send their own values."""
        return self._node.membership.relays if self._may_relay else None

    def route(self, entry: KeyEntry, owner: int) -> int:
        """Return the id of the server to which to send parts of a dense key of ``owner``."""
        relays = self.relays
        if not relays or not may_be_relayed(entry.spec.dtype):
            return owner
        assert self._node.info is not None
        relay = relays.of_machine(self._node.info.machine, rank_of(owner))
        return owner if relay is None else node_id(Role.SERVER, relay)

    def version(self, key: Key, versions: dict[int, int]) -> Version:
        """Return the version of a key from the recorded versions of its parts."""
        return Version(versions[part] for part in self.entries[key].parts)

    def unfinished(self, keys: Iterable[Key] | None = None) -> list[Future[None]]:
        """Return all unfinished pushes and pulls of these keys (None: of any)."""
        chosen = None if keys is None else list(keys)
        return [*self.pushes.of(chosen), *self.pulls.of(chosen)]


def noting_versions(versions: dict[int, int], group: Group, sink: Sink) -> Sink:
    """Return a sink that also stores the version of each pulled part in ``versions``."""

    def note(indices: Sequence[int], pieces: Sequence[Piece], found: Sequence[int]) -> None:
        sink(indices, pieces, found)
        for index, version in zip(indices, found, strict=True):
            versions[group.parts[index]] = version

    return note
