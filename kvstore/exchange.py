"""How a distributed store moves values: calls become transfers between worker and servers.

A worker adds its devices' values up, sends the sum in parts to the servers that hold the keys
(``plan.py``), and answers land in the caller's arrays (``operation.py``). Rounds, order and
delivery are the data plane's business (``pslite/plane``). Calls may come from any thread;
values are copied out by the node's I/O thread. Nothing here waits. Next: ``dist.py``.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for, adapter_on
from kvstore.base import Version
from kvstore.context import Context
from kvstore.errors import UnknownKeyError
from kvstore.fusing import Call, Entry, Step, kinds_of, steps_of
from kvstore.keys import Key, KeySpec
from kvstore.operation import Operation, UnderWay, overlaps
from kvstore.plan import Bytes, Group, StagingPool, flat_bytes, gather, plan, scatter_into, views
from kvstore.protocol import KeyEntry
from pslite import Future, Postoffice
from pslite.future import completed
from pslite.plane import Piece, Sink, Transfer

_HOST = Context("cpu", 0)

#: Plans are kept for so many lists of keys.
_MAX_PLANS = 1024


class Exchange:
    """The pushes and pulls of one store on one worker."""

    def __init__(self, node: Postoffice, *, on_device: bool) -> None:
        self._node = node
        self._on_device = on_device
        # Keeps the order of pushes and of what is submitted the same. Nobody waits for an
        # answer with it: what one thread waits for may depend on another's next push. Once the
        # node has ended, what it is handed runs at once, on the thread that holds this: re-entrant.
        self._lock = threading.RLock()
        self._plans: dict[tuple[Key, ...], list[Group]] = {}
        self._staging = StagingPool()
        #: Calls that wait to be taken by the I/O thread; None when it was told of none.
        self._batch: list[Call] | None = None
        node.traffic.namers.add(self)
        self.entries: dict[Key, KeyEntry] = {}
        self.pushes = UnderWay()
        self.pulls = UnderWay()
        self.counters = Counter(pushes=0, pulls=0, bytes_pushed=0, bytes_pulled=0)

    def name_of(self, part: int) -> str | None:
        """The key that a part belongs to, for reports (``pslite/traffic.py``)."""
        for entry in list(self.entries.values()):
            if part in entry.parts:
                which = f" (part {part - entry.first_part + 1} of {len(entry.parts)})"
                return f"key {entry.key!r}" + (which if len(entry.parts) > 1 else "")
        return None

    def add(self, entries: Iterable[KeyEntry]) -> None:
        """These keys can be used from now on."""
        self.entries.update((entry.key, entry) for entry in entries)

    def remove(self, keys: Sequence[Key]) -> None:
        """These keys are gone."""
        gone = [entry for key in keys if (entry := self.entries.pop(key, None)) is not None]
        # Another one: a thread that plans with these keys at this moment fills the one before.
        self._plans = {}
        self.pushes.forget(keys)
        self.pulls.forget(keys)
        parts = [part for entry in gone for part in entry.parts]
        self._node.call(lambda: self._node.traffic.forget(parts))

    def sum(self, arrays: Sequence[Array], spec: KeySpec) -> np.ndarray[Any, Any]:
        """One key's values, added up, on the host. May share the memory of a single value."""
        if len(arrays) == 1:
            return adapter_for(arrays[0]).to_host(arrays[0])
        device = adapter_for(arrays[0]).context(arrays[0]) if self._on_device else _HOST
        adapter = adapter_on(device)
        total = adapter.sum_in_order(arrays, device, spec.dtype)
        return adapter.to_host(total)

    def begin(
        self,
        keys: tuple[Key, ...],
        sources: Sequence[np.ndarray[Any, Any]] | None,
        targets: Sequence[Bytes] | None,
        priority: int,
        *,
        copy: bool,
        versions: dict[int, int] | None = None,
    ) -> Operation:
        """Push ``sources``, pull into ``targets``, or both; ``copy`` frees the sources at once.

        ``versions`` is filled with the version of each part that is pulled.
        """
        groups = self._plan(keys)
        memories = None if sources is None else [flat_bytes(source) for source in sources]
        if memories is not None and targets is not None and not copy:
            uncopied = {group.slices[0].position for group in groups if len(group.parts) == 1}
            copy = overlaps(memories, targets, uncopied)
        operation = Operation(len(groups), lambda: _describe(keys), self._staging)
        for group in groups:
            frames, staging = self._frames(group, memories, copy=copy)
            sink = None if targets is None else scatter_into(group, targets)
            if sink is not None and versions is not None:
                sink = _noting_versions(sink, group, versions)
            operation.transfers.append(
                Transfer(
                    group.server,
                    group.parts,
                    group.sizes,
                    frames,
                    sink,
                    operation.part_done(staging),
                    priority,
                )
            )
        self._submit(keys, operation, memories, targets)
        return operation

    def _frames(
        self, group: Group, memories: Sequence[Bytes] | None, *, copy: bool
    ) -> tuple[list[memoryview] | None, Bytes | None]:
        """What a group sends, and the buffer that holds it if it is a copy."""
        if memories is None:
            return None, None
        if not copy and len(group.parts) == 1:
            return [view.data for view in views(group, memories)], None
        staging = self._staging.take(group.nbytes)
        gather(group, memories, staging)
        return [staging.data], staging

    def _submit(
        self,
        keys: tuple[Key, ...],
        operation: Operation,
        memories: Sequence[Bytes] | None,
        targets: Sequence[Bytes] | None,
    ) -> None:
        self._node.check_process()
        with self._lock:
            self._batch = None  # what comes now comes after this
            self._node.submit(operation.transfers)
            # Afterwards: what an interrupt kept from being sent would be waited for without end.
            self._note(keys, memories, targets, operation.future)

    def _note(
        self,
        keys: tuple[Key, ...],
        memories: Sequence[Bytes] | None,
        targets: Sequence[Bytes] | None,
        future: Future[None],
    ) -> None:
        if memories is not None:
            self.pushes.add(keys, future)
            self.counters["pushes"] += 1
            self.counters["bytes_pushed"] += sum(map(len, memories))
        if targets is not None:
            self.pulls.add(keys, future)
            self.counters["pulls"] += 1
            self.counters["bytes_pulled"] += sum(map(len, targets))

    # -- calls that may be joined ------------------------------------------------------

    def join(
        self,
        keys: tuple[Key, ...],
        sources: Sequence[np.ndarray[Any, Any]] | None,
        targets: Sequence[Bytes] | None,
        priority: int,
    ) -> Future[None]:
        """``begin``, together with others that come before the I/O thread takes them.

        The sources are copied. The future completes on the I/O thread.
        """
        if not keys:
            return completed(None)
        self._node.check_process()
        copies = None if sources is None else [self._copy(source) for source in sources]
        call = Call(keys, copies, targets, priority, lambda: _describe(keys))
        with self._lock:
            if self._batch is None:
                self._begin_batch(call)
            else:
                self._batch.append(call)
            self._note(keys, copies, targets, call.future)  # as in _submit
        return call.future

    def _begin_batch(self, call: Call) -> None:
        self._batch = batch = [call]
        try:
            self._node.call(lambda: self._take(batch))
        except BaseException:
            self._batch = None  # nobody may have been told of it
            raise

    def _copy(self, source: np.ndarray[Any, Any]) -> Bytes:
        memory = flat_bytes(source)
        copy = self._staging.take(len(memory))
        copy[:] = memory
        return copy

    def _take(self, batch: list[Call]) -> None:
        """Send what has come together. On the I/O thread."""
        with self._lock:
            if self._batch is batch:
                self._batch = None
        transfers: list[Transfer] = []
        try:
            for step in steps_of(self._known(batch)):
                for keys in kinds_of(step):
                    transfers += self._joined(keys, step)
        except Exception as error:  # a bug; whoever waits must not wait for ever
            for call in batch:
                call.future.set_error(error)
            return
        self._node.traffic.submit(transfers)

    def _known(self, batch: Sequence[Call]) -> Iterator[Call]:
        """The calls whose keys no other thread has deleted meanwhile; the rest end in an error."""
        for call in batch:
            gone = [key for key in call.keys if key not in self.entries]
            if gone:
                call.future.set_error(UnknownKeyError(f"the key {gone[0]!r} was deleted"))
            else:
                yield call

    def _joined(self, keys: Sequence[Key], step: Step) -> list[Transfer]:
        """The transfers of keys of one kind."""
        entries = [step[key] for key in keys]
        sources = [entry.source for entry in entries if entry.source is not None]
        targets = [entry.target for entry in entries if entry.target is not None]
        transfers = []
        for group in self._plan(tuple(keys)):
            carried = [entries[position] for position, _, _ in group.slices]
            frames, staging = self._frames(group, sources or None, copy=False)
            transfer = Transfer(
                group.server,
                group.parts,
                group.sizes,
                frames,
                scatter_into(group, targets) if targets else None,
                lambda error: None,
                max(entry.priority for entry in carried),
            )
            transfer.done = self._carried(transfer, carried, staging)
            transfers.append(transfer)
        return transfers

    def _carried(
        self, transfer: Transfer, carried: Sequence[Entry], staging: Bytes | None
    ) -> Callable[[BaseException | None], None]:
        """What to call when a message is done; ``carried`` is parallel to its parts.

        A part that came to nothing is an error of the calls for its key, and of no others.
        """
        calls = {call: None for entry in carried for call in entry.calls}
        for call in calls:
            call.expect()

        def done(error: BaseException | None) -> None:
            if staging is not None and error is None:
                self._staging.give_back(staging)
            errors: dict[Call, BaseException | None] = dict.fromkeys(calls, error)
            if transfer.failed is not None:
                errors = dict.fromkeys(calls)
                for index, reason in transfer.failed.items():
                    for call in carried[index].calls:
                        errors[call] = errors[call] or reason
            for call, own in errors.items():
                if call.arrived(own) and call.future.error() is None:
                    for source in call.sources or ():
                        self._staging.give_back(source)

        return done

    def _plan(self, keys: tuple[Key, ...]) -> list[Group]:
        plans = self._plans  # before the entries, see ``remove``
        groups = plans.get(keys)
        if groups is None:
            if len(plans) >= _MAX_PLANS:  # a script that shuffles its keys
                plans.clear()
            groups = plan([self.entries[key] for key in keys], self._node.config.chunk_bytes)
            plans[keys] = groups
        return groups

    def version(self, key: Key, versions: dict[int, int]) -> Version:
        """The version of a key whose parts' versions were noted."""
        return Version(versions[part] for part in self.entries[key].parts)

    def unfinished(self, keys: Iterable[Key] | None = None) -> list[Future[None]]:
        """Every push and pull of these keys (None: of any) that is not over."""
        chosen = None if keys is None else list(keys)
        return [*self.pushes.of(chosen), *self.pulls.of(chosen)]


def _noting_versions(sink: Sink, group: Group, versions: dict[int, int]) -> Sink:
    def note(indices: Sequence[int], pieces: Sequence[Piece], found: Sequence[int]) -> None:
        sink(indices, pieces, found)
        for index, version in zip(indices, found, strict=True):
            versions[group.parts[index]] = version

    return note


def _describe(keys: Sequence[Key]) -> str:
    shown = ", ".join(repr(key) for key in keys[:3]) + (", ..." if len(keys) > 3 else "")
    return f"the servers' answer for {shown}"
