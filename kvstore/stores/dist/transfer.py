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

from kvstore.arrays.keys import Key
from kvstore.errors import UnknownKeyError
from kvstore.protocol.placement import message_bytes
from kvstore.protocol.requests import KeyEntry
from kvstore.stores.arguments import ByKeys, KeyList
from kvstore.stores.base import Version
from kvstore.stores.dist.batching import (
    BatchedCall,
    CallBatch,
    Load,
    Shape,
    answer_for,
    loads_of,
    transfers_of,
)
from kvstore.stores.dist.compression import DistCompression
from kvstore.stores.dist.in_flight import Frames, InFlight, Operation, copied, frames_of
from kvstore.stores.dist.plan import (
    Bytes,
    Group,
    Places,
    group_bytes,
    group_parts,
    places_of,
    scatter_into,
)
from kvstore.stores.dist.progress import progress_of
from pslite import Future, Postoffice
from pslite.errors import UsageError
from pslite.future import completed
from pslite.plane import Piece, Sink, Transfer

#: A copy of up to this many bytes is put in ordinary memory and copied into a message later.
_SMALL_COPY_BYTES = 65_536
#: A batch of up to this many calls does not come from a loop.
_FEW_CALLS = 4
#: A batch that no thread waits for is sent when no call has joined it for ``_JOIN_S``, or after
#: ``_MAX_LOOKS`` checks. A loop over keys takes about 10 us per call; a thread may pause longer.
_JOIN_S = 0.003
_MAX_LOOKS = 5


class DenseExchange:
    """The pushes and pulls of one store on one worker."""

    def __init__(self, node: Postoffice) -> None:
        self._node = node
        # Makes the recorded order of calls the order in which they are submitted. No thread waits
        # for an answer while it holds the lock: the answer may depend on another thread's next
        # push. It is re-entrant: a node that has ended runs commands at once, on this thread.
        self._lock = threading.RLock()
        self._places: dict[Key, Places] = {}
        self._plans = ByKeys(self._plan)
        self._recipes = ByKeys(self._recipe)
        #: The open batch, which other calls may join, or None.
        self._batch: CallBatch | None = None
        #: The encoding of values; None without compression.
        self.coding: DistCompression | None = None
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
        for entry in entries:
            if not entry.is_row_sparse:  # sparse_transfer.py places row-sparse keys
                self._places[entry.key] = places_of(entry)
            self.entries[entry.key] = entry

    @contextmanager
    def changing_coding(self) -> Iterator[None]:
        """Refuse pushes and pulls within this context, while the encoding changes."""
        with self._lock:
            self.check_coding(self.coding)
            self._is_changing = True
        try:
            yield
        finally:
            with self._lock:
                self._is_changing = False

    def set_coding(self, coding: DistCompression | None) -> None:
        """Set the encoding; only within ``changing_coding`` and with nothing in flight."""
        with self._lock:
            self.coding = coding
            self._plans.forget()
            self._recipes.forget()

    def check_coding(self, coding: DistCompression | None) -> None:
        """Raise ``UsageError`` if the encoding is changing or is no longer ``coding``."""
        if self._is_changing or self.coding is not coding:
            raise UsageError(
                "set_gradient_compression is running in another thread; do not call init, push "
                "or pull before it returns"
            )

    def remove(self, keys: Sequence[Key]) -> None:
        """Remove deleted keys."""
        gone = [entry for key in keys if (entry := self.entries.pop(key, None)) is not None]
        for key in keys:
            self._places.pop(key, None)
        if self.coding is not None:
            self.coding.forget(gone)
        self._progress.forget(id(self), keys)
        self._plans.forget()
        self._recipes.forget()
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
        keys: KeyList,
        sources: Sequence[Bytes] | None,
        targets: Sequence[Bytes] | None,
        priority: int,
        *,
        copy: bool,
        wrap: Callable[[Group, Sink], Sink] | None = None,
        coding: DistCompression | None = None,
    ) -> Operation:
        """Push ``sources``, pull into ``targets``, or both.

        With ``copy`` the caller may change the sources at once; otherwise the operation keeps them,
        and they must stay unchanged until it is done. Sources and targets are the flat memory of
        each key's value; ``coding`` may have encoded the sources. ``wrap`` may replace the
        function that gets a group's values.
        """
        if sources is None:
            coding = self.coding
        self.check_coding(coding)
        groups = self._plans.of(keys.keys)
        frames: Sequence[Frames | None] = [None] * len(groups)
        if sources is not None:
            if copy:
                frames = [copied(self._node, group, sources) for group in groups]
            else:
                frames = frames_of(self._node, groups, sources, targets, keys.nbytes)
        operation = Operation(len(groups), lambda: answer_for(keys.keys))
        for group, own in zip(groups, frames, strict=True):
            sink = None if targets is None else scatter_into(group, targets)
            if sink is not None and wrap is not None:
                sink = wrap(group, sink)
            transfer = Transfer(
                group.server,
                group.parts,
                group.pull_sizes,
                own,
                sink,
                operation.part_done,
                priority,
                push_sizes=group.to_push.sizes,
            )
            operation.transfers.append(transfer)
        pushes, pulls = sources is not None, targets is not None
        self.submit(keys, operation, coding, pushes=pushes, pulls=pulls)
        return operation

    def submit(
        self,
        keys: KeyList,
        operation: Operation,
        coding: DistCompression | None,
        *,
        pushes: bool,
        pulls: bool,
        nbytes: int | None = None,
    ) -> None:
        """Send an operation for these keys after all earlier ones, and count it.

        ``coding`` is the encoding with which the operation was made. ``nbytes`` is its size, by
        default the size of the keys' whole values. Raises ``UsageError`` while the encoding
        changes.
        """
        self._node.io_queue.check_process()
        with self._lock:
            self.check_coding(coding)
            self.send_joined()  # earlier calls go first
            self._node.submit(operation.transfers)
            # Record the call only now: if an interrupt prevented the submit, a wait for a recorded
            # call would never end.
            self._note(keys, operation.future, pushes=pushes, pulls=pulls, nbytes=nbytes)

    def _note(
        self,
        keys: KeyList,
        future: Future[None],
        *,
        pushes: bool,
        pulls: bool,
        nbytes: int | None = None,
    ) -> None:
        counters = self.counters
        nbytes = keys.nbytes if nbytes is None else nbytes
        if pushes:
            self.pushes.add(keys.keys, future)
            counters["pushes"] += 1
            counters["bytes_pushed"] += nbytes
            if keys.keys:
                self._progress.pushed(id(self), keys.keys[0])
        if pulls:
            self.pulls.add(keys.keys, future)
            counters["pulls"] += 1
            counters["bytes_pulled"] += nbytes

    # -- calls that may be joined ------------------------------------------------------

    def join(
        self,
        keys: KeyList,
        sources: Sequence[Bytes] | None,
        targets: Sequence[Bytes] | None,
        priority: int,
        coding: DistCompression | None = None,
    ) -> Future[None]:
        """Begin a call that is sent together with other calls that follow soon.

        ``send_joined`` sends them at once. The sources are copied. The future completes on the I/O
        thread.
        """
        if not keys.keys:
            return completed(None)
        self._node.io_queue.check_process()
        pushes = sources is not None
        with self._lock:
            self.check_coding(coding if pushes else self.coding)
            batch = self._batch
            if batch is not None and sources is None and targets is not None:
                last = batch.pull_last(keys.keys, targets, priority, keys.nbytes)
                if last is not None:
                    self._note(keys, last, pushes=False, pulls=True)
                    return last
            if batch is not None and not batch.has_room(keys.nbytes, pushes=pushes):
                self.send_joined()
                batch = None
            if batch is None:
                batch = self._begin_batch()
            copies = None
            if sources is not None:
                copies = batch.stage(sources, keys.nbytes) or list(map(self._copy, sources))
            call = BatchedCall(keys.keys, copies, targets, priority)
            batch.add(call, keys.nbytes)
            if self._batch is None:
                self._open(batch)
            # As in submit.
            self._note(keys, call, pushes=pushes, pulls=targets is not None)
        return call

    def send_joined(self) -> None:
        """Send the open batch, if there is one. Any thread may call it."""
        if self._batch is None:
            return
        with self._lock:
            batch, self._batch = self._batch, None
            if batch is not None:
                self._node.io_queue.call(lambda: self._take(batch))

    def _begin_batch(self) -> CallBatch:
        # A single call does not need that much memory.
        staging = self._node.buffer(self.message_bytes) if self._is_in_loop else None
        return CallBatch(self.message_bytes, self.send_joined, staging)

    def _open(self, batch: CallBatch) -> None:
        """Let other calls join a batch, which is sent soon even if no thread waits for it."""
        self._batch = batch
        try:
            self._node.io_queue.call_later(_JOIN_S, lambda: self._look_at(batch, 0, 1))
        except BaseException:
            self._batch = None  # the I/O thread may not know it
            raise

    def _look_at(self, batch: CallBatch, count: int, look: int) -> None:
        """Send a batch that still has ``count`` calls, else look again (I/O thread)."""
        now = len(batch.calls)
        if batch is not self._batch or now == count or look == _MAX_LOOKS:
            self._take(batch)
        else:
            self._node.io_queue.call_later(_JOIN_S, lambda: self._look_at(batch, now, look + 1))

    def _copy(self, source: Bytes) -> Bytes:
        if len(source) <= _SMALL_COPY_BYTES:
            copied: Bytes = source.copy()
            return copied
        copy = self._node.buffer(len(source))
        copy[:] = source
        return copy

    def _take(self, batch: CallBatch) -> None:
        """Send a batch, unless it was sent already. Runs on the I/O thread."""
        with self._lock:
            if self._batch is batch:
                self._batch = None
            if batch.is_taken:
                return
            batch.is_taken = True
            self._is_in_loop = len(batch.calls) > _FEW_CALLS
        calls: Sequence[BatchedCall] = batch.calls
        staging = batch.staging
        try:
            shapes = tuple([call.shape for call in calls])
            recipe = self._recipes.get(shapes)
            if recipe is None:
                calls = list(self._known(calls))
                staging = staging if len(calls) == len(shapes) else None
                recipe = self._recipes.of(tuple([call.shape for call in calls]))
            transfers = transfers_of(self._node, recipe, calls, staging)
        except Exception as error:  # a bug; a waiting thread must not wait for ever
            for call in calls:
                call.let_go()
                call.set_error(error)
            return
        self._node.traffic.submit(transfers)

    def _known(self, calls: Sequence[BatchedCall]) -> Iterator[BatchedCall]:
        """Yield the calls whose keys still exist; end the others with an error."""
        for call in calls:
            gone = [key for key in call.shape[0] if key not in self.entries]
            if gone:
                call.let_go()
                call.set_error(UnknownKeyError(f"the key {gone[0]!r} was deleted"))
            else:
                yield call

    def _recipe(self, shapes: Sequence[Shape]) -> Sequence[Load]:
        return loads_of(shapes, self.entries, self._plan)

    def _plan(self, keys: Sequence[Key]) -> list[Group]:
        nbytes = sum(self.entries[key].spec.nbytes for key in keys)
        by_tcp = not self._node.nearby.is_on_one_machine
        limit = group_bytes(self._node.config, nbytes, by_tcp=by_tcp)
        places = [self._places[key] for key in keys]
        groups = group_parts(places, limit, keeps_keys_whole=not by_tcp)
        coding = self.coding
        return groups if coding is None else [coding.applied(group, keys) for group in groups]

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
