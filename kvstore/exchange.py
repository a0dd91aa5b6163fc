"""How a distributed store moves values: calls become transfers between worker and servers.

A worker adds its devices' values up, sends the sum in parts to the servers that hold the keys
(``plan.py``), and answers land in the caller's arrays (``operation.py``). Rounds, order and
delivery are the data plane's business (``pslite/plane``). Calls may come from any thread;
values are copied out by the node's I/O thread. Nothing here waits. Next: ``dist.py``.
"""

from __future__ import annotations

import math
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
from kvstore.keys import ByKeys, Key, KeyList, KeySpec
from kvstore.operation import Operation, UnderWay, overlaps
from kvstore.plan import (
    Bytes,
    Group,
    Places,
    gather,
    group_parts,
    message_bytes,
    places_of,
    scatter_into,
)
from kvstore.protocol import KeyEntry
from pslite import Future, Postoffice
from pslite.future import completed
from pslite.plane import Piece, Sink, Transfer

_HOST = Context("cpu", 0)

#: A copy of up to so many bytes lies in ordinary memory: it is gathered into a message later.
_SMALL_COPY_BYTES = 65_536
#: Smaller frames travel as bytes anyway (``pslite/memory/sharing.py``).
_LEAST_SHARED_BYTES = 1024


class Exchange:
    """The pushes and pulls of one store on one worker."""

    def __init__(self, node: Postoffice, *, on_device: bool) -> None:
        self._node = node
        self._on_device = on_device
        # Keeps the order of pushes and of what is submitted the same. Nobody waits for an
        # answer with it: what one thread waits for may depend on another's next push. Once the
        # node has ended, what it is handed runs at once, on the thread that holds this: re-entrant.
        self._lock = threading.RLock()
        self._places: dict[Key, Places] = {}
        self._plans = ByKeys(self._plan)
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
        for entry in entries:
            self._places[entry.key] = places_of(entry)
            self.entries[entry.key] = entry

    def remove(self, keys: Sequence[Key]) -> None:
        """These keys are gone."""
        gone = [entry for key in keys if (entry := self.entries.pop(key, None)) is not None]
        for key in keys:
            self._places.pop(key, None)
        self._plans.forget()
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
        keys: KeyList,
        sources: Sequence[Bytes] | None,
        targets: Sequence[Bytes] | None,
        priority: int,
        *,
        copy: bool,
        versions: dict[int, int] | None = None,
    ) -> Operation:
        """Push ``sources``, pull into ``targets``, or both; ``copy`` frees the sources at once.

        Both have the flat memory of each key's value. ``versions`` is filled with the version
        of each part that is pulled.
        """
        groups = self._plans.of(keys.keys)
        uncopied = {}
        if sources is not None and not copy:
            uncopied = self._all_uncopied(groups, sources, targets)
        operation = Operation(len(groups), lambda: _describe(keys.keys))
        for index, group in enumerate(groups):
            sink = None if targets is None else scatter_into(group, targets)
            if sink is not None and versions is not None:
                sink = _noting_versions(sink, group, versions)
            own = uncopied.get(index)
            frames = own if sources is None or own is not None else self._copied(group, sources)
            transfer = Transfer(
                group.server, group.parts, group.sizes, frames, sink, operation.part_done, priority
            )
            operation.transfers.append(transfer)
            if own is not None:
                operation.borrowing.append(transfer)
        self._submit(keys, operation, pushes=sources is not None, pulls=targets is not None)
        return operation

    def _all_uncopied(
        self, groups: Sequence[Group], sources: Sequence[Bytes], targets: Sequence[Bytes] | None
    ) -> dict[int, list[memoryview]]:
        """The groups that travel as they lie in these arrays, which may be filled meanwhile."""
        found = {
            index: frames
            for index, group in enumerate(groups)
            if (frames := self._uncopied(group, sources)) is not None
        }
        if found and targets is not None:
            positions = {groups[index].slices[0].position for index in found}
            if overlaps(sources, targets, positions):
                return {}
        return found

    def _uncopied(self, group: Group, memories: Sequence[Bytes]) -> list[memoryview] | None:
        """A group as it lies in these arrays; None where a copy of it travels faster.

        Small parts travel together, so they are gathered. To a server of this machine a copy
        in shared memory is quicker than what TCP does.
        """
        first, last = group.slices[0], group.slices[-1]
        if first.position != last.position or last.stop - first.start != group.nbytes:
            return None
        frame = memories[first.position][first.start : last.stop].data
        if (
            len(frame) >= _LEAST_SHARED_BYTES
            and self._node.shares_with(group.server)
            and not self._node.is_shared(frame)
        ):
            return None
        return [frame]

    def _copied(self, group: Group, memories: Sequence[Bytes]) -> list[memoryview]:
        staging = self._node.buffer(group.nbytes)
        gather(group, memories, staging)
        return [staging.data]

    def _submit(self, keys: KeyList, operation: Operation, *, pushes: bool, pulls: bool) -> None:
        self._node.check_process()
        with self._lock:
            self._batch = None  # what comes now comes after this
            self._node.submit(operation.transfers)
            # Afterwards: what an interrupt kept from being sent would be waited for without end.
            self._note(keys, operation.future, pushes=pushes, pulls=pulls)

    def _note(self, keys: KeyList, future: Future[None], *, pushes: bool, pulls: bool) -> None:
        counters = self.counters
        if pushes:
            self.pushes.add(keys.keys, future)
            counters["pushes"] += 1
            counters["bytes_pushed"] += keys.nbytes
        if pulls:
            self.pulls.add(keys.keys, future)
            counters["pulls"] += 1
            counters["bytes_pulled"] += keys.nbytes

    # -- calls that may be joined ------------------------------------------------------

    def join(
        self,
        keys: KeyList,
        sources: Sequence[Bytes] | None,
        targets: Sequence[Bytes] | None,
        priority: int,
    ) -> Future[None]:
        """``begin``, together with others that come before the I/O thread takes them.

        The sources are copied. The future completes on the I/O thread.
        """
        if not keys.keys:
            return completed(None)
        self._node.check_process()
        copies = None if sources is None else list(map(self._copy, sources))
        call = Call(keys.keys, copies, targets, priority, lambda: _describe(keys.keys))
        with self._lock:
            if self._batch is None:
                self._begin_batch(call)
            else:
                self._batch.append(call)
            # As in _submit.
            self._note(keys, call.future, pushes=copies is not None, pulls=targets is not None)
        return call.future

    def _begin_batch(self, call: Call) -> None:
        self._batch = batch = [call]
        try:
            self._node.call(lambda: self._take(batch))
        except BaseException:
            self._batch = None  # nobody may have been told of it
            raise

    def _copy(self, source: Bytes) -> Bytes:
        if len(source) <= _SMALL_COPY_BYTES:
            copied: Bytes = source.copy()
            return copied
        copy = self._node.buffer(len(source))
        copy[:] = source
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
            if not all(map(self.entries.__contains__, call.keys)):
                gone = [key for key in call.keys if key not in self.entries]
                call.future.set_error(UnknownKeyError(f"the key {gone[0]!r} was deleted"))
            else:
                yield call

    def _joined(self, keys: Sequence[Key], step: Step) -> list[Transfer]:
        """The transfers of keys of one kind."""
        entries = [step[key] for key in keys]
        sources = [entry.source for entry in entries if entry.source is not None]
        targets = [entry.target for entry in entries if entry.target is not None]
        transfers = []
        # Several keys hardly ever come together again in the same way.
        for group in self._plans.of((keys[0],)) if len(keys) == 1 else self._plan(keys):
            carried = [entries[position] for position, _, _ in group.slices]
            frames = None
            if sources:
                frames = self._uncopied(group, sources) or self._copied(group, sources)
            transfer = Transfer(
                group.server,
                group.parts,
                group.sizes,
                frames,
                scatter_into(group, targets) if targets else None,
                lambda error: None,
                max(entry.priority for entry in carried),
            )
            transfer.done = _carried(transfer, carried)
            transfers.append(transfer)
        return transfers

    def _plan(self, keys: Sequence[Key]) -> list[Group]:
        config = self._node.config
        by_tcp = not self._node.is_on_one_machine
        group_bytes = message_bytes(config, by_tcp=by_tcp)
        apart_bytes = math.inf if by_tcp else config.chunk_bytes / 4
        return group_parts([self._places[key] for key in keys], group_bytes, apart_bytes)

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


def _carried(
    transfer: Transfer, carried: Sequence[Entry]
) -> Callable[[BaseException | None], None]:
    """What to call when a message is done; ``carried`` is parallel to its parts.

    A part that came to nothing is an error of the calls for its key, and of no others.
    """
    calls = {call: None for entry in carried for call in entry.calls}
    for call in calls:
        call.expect()

    def done(error: BaseException | None) -> None:
        errors: dict[Call, BaseException | None] = dict.fromkeys(calls, error)
        if transfer.failed is not None:
            errors = dict.fromkeys(calls)
            for index, reason in transfer.failed.items():
                for call in carried[index].calls:
                    errors[call] = errors[call] or reason
        for call, own in errors.items():
            call.arrived(own)

    return done
