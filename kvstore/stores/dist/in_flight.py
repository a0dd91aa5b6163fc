"""Track a distributed store's calls in flight, and where their values arrive.

A call is an ``Operation``, which becomes transfers (``plan.py``). A ``Destination`` receives their
values. Pure, except that it fills arrays. Used by ``store.py``.

The last functions choose the memory from which a message is sent. Nothing is copied if the server
can read the memory itself, or if TCP can send it as one range. Small values in different places
are copied together, since a frame for each costs more than the copy. Any thread may call these
functions; they keep no state. Used by ``transfer.py``, and by ``batching.py`` for batched calls.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, MutableSequence, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore.arrays import Array, adapter_for
from kvstore.arrays.keys import Key, KeySpec
from kvstore.stores.dist.plan import Bucket, Bytes, Group, flat_bytes, gather, scatter, views
from pslite import Postoffice
from pslite.future import Future
from pslite.memory.segment import addresses
from pslite.plane import Sink, Transfer

#: Once this many lists share a key, those without calls in flight are dropped, since a script may
#: shuffle its keys.
_MANY_LINES = 4


class _Line:
    """The unfinished calls for one tuple of keys, oldest first."""

    __slots__ = ("calls", "crossing", "keys")

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self.keys = keys
        #: Each call with its number in the order of all calls.
        self.calls: deque[tuple[int, Future[None]]] = deque()
        #: The other lines that share a key with this one.
        self.crossing: set[_Line] = set()

    def unfinished(self) -> Sequence[tuple[int, Future[None]]]:
        calls = self.calls
        while calls and calls[0][1].done():
            calls.popleft()
        if not calls:
            return ()
        return [call for call in calls if not call[1].done()]

    def is_crossed(self) -> bool:
        """Return whether other lines that share a key have calls in flight."""
        return bool(self.crossing) and any(
            other.calls and other.unfinished() for other in self.crossing
        )


class InFlight:
    """The unfinished calls of a store by key: its pushes, or its pulls.

    A script passes the same lists of keys again and again, so calls are stored by the tuple of
    their keys, and a call for a thousand keys costs no more than a call for one. Single keys are
    compared only while calls for different tuples that share keys are in flight. A call must wait
    only for earlier calls of its own keys: otherwise workers that push their keys in different
    orders could wait for each other for ever.
    """

    def __init__(self) -> None:
        # Guards everything: calls come from any thread.
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._lines: dict[tuple[Key, ...], _Line] = {}
        self._by_key: dict[Key, list[_Line]] = {}

    def add(self, keys: tuple[Key, ...], future: Future[None]) -> None:
        """Record that a call for these keys, all different, has begun."""
        with self._lock:
            calls = (self._lines.get(keys) or self._line(keys)).calls
            while calls and calls[0][1].done():
                calls.popleft()
            calls.append((next(self._numbers), future))

    def beyond(self, keys: tuple[Key, ...], window: int) -> list[Future[None]]:
        """Return the calls to wait for until each key has at most ``window`` others."""
        line = self._lines.get(keys)
        if line is not None and not line.crossing and len(line.calls) <= window:
            return []  # the usual case; a call that another thread adds now counts as later
        with self._lock:
            line = self._lines.get(keys) or self._line(keys)
            if not line.is_crossed():
                return _oldest(line.unfinished(), window)
            waiting: dict[Future[None], None] = {}
            for key in line.keys:
                calls = [call for each in self._by_key[key] for call in each.unfinished()]
                waiting.update(dict.fromkeys(_oldest(sorted(calls), window)))
            return list(waiting)

    def of(self, keys: Iterable[Key] | None = None) -> list[Future[None]]:
        """Return all unfinished calls for these keys (None: for any), oldest first."""
        with self._lock:
            lines = self._lines.values() if keys is None else self._lines_of(keys)
            return _oldest(sorted(call for line in lines for call in line.unfinished()), 0)

    def forget(self, keys: Iterable[Key]) -> None:
        """Forget deleted keys; a call that also has other keys stays recorded for them."""
        gone = set(keys)
        with self._lock:
            lines = self._lines_of(gone)
            for line in lines:
                self._drop(line)
            for line in lines:
                others = tuple(key for key in line.keys if key not in gone)
                calls = line.unfinished()
                if others and calls:
                    merged = self._line(others)
                    merged.calls = deque(sorted([*merged.calls, *calls]))

    def _lines_of(self, keys: Iterable[Key]) -> set[_Line]:
        return {line for key in keys for line in self._by_key.get(key, ())}

    def _line(self, keys: tuple[Key, ...]) -> _Line:
        found = self._lines.get(keys)
        if found is not None:
            return found
        crossing = self._lines_of(keys)
        if any(len(self._by_key.get(key, ())) >= _MANY_LINES for key in keys):
            for other in [each for each in crossing if not each.unfinished()]:
                self._drop(other)
                crossing.remove(other)
        line = self._lines[keys] = _Line(keys)
        line.crossing = crossing
        for other in crossing:
            other.crossing.add(line)
        for key in keys:
            self._by_key.setdefault(key, []).append(line)
        return line

    def _drop(self, line: _Line) -> None:
        """Drop a line that has no calls in flight, or whose calls are recorded elsewhere."""
        del self._lines[line.keys]
        for key in line.keys:
            lines = self._by_key[key]
            lines.remove(line)
            if not lines:
                del self._by_key[key]
        for other in line.crossing:
            other.crossing.discard(line)


def _oldest(calls: Sequence[tuple[int, Future[None]]], window: int) -> list[Future[None]]:
    """Return all of these calls except the ``window`` latest."""
    return [future for _, future in calls[: max(len(calls) - window, 0)]]


class Operation(Future[None]):
    """One call in flight, which is done when all its transfers are.

    A loop makes one for each key, so it has few fields. While it waits in a batch it has the pushed
    values, which are copies that belong to it, and its destination. Only the I/O thread uses
    ``left`` and ``error_so_far``.
    """

    __slots__ = (
        "_lent",
        "error_so_far",
        "keys",
        "left",
        "priority",
        "sources",
        "targets",
        "transfers",
    )

    def __init__(
        self,
        keys: Bucket,
        sources: Sequence[Bytes] = (),
        targets: Sequence[Bytes] = (),
        priority: int = 0,
    ) -> None:
        super().__init__(keys.describe)
        self.keys = keys
        self.sources = sources
        self.targets = targets
        self.priority = priority
        self.transfers: list[Transfer] = []
        #: How many transfers with its data are unfinished.
        self.left = 0
        self.error_so_far: BaseException | None = None
        #: Memory that a server may still read, kept because nothing else refers to it.
        self._lent: list[memoryview] = []

    def divide(
        self,
        groups: Sequence[Group],
        frames: Iterable[Frames | None],
        wrap: Callable[[Group, Sink], Sink] | None = None,
    ) -> None:
        """Make the transfers of a call that shares none with others, one for each group.

        ``wrap`` may replace the function that gets a group's values.
        """
        self.left = len(groups)
        for group, own in zip(groups, frames, strict=True):
            transfer = transfer_of(group, own, self.targets, self.part_done, self.priority)
            if transfer.sink is not None and wrap is not None:
                transfer.sink = wrap(group, transfer.sink)
            self.transfers.append(transfer)

    def abandon(self) -> None:
        """Stop using the caller's arrays, since the caller's wait was interrupted.

        Runs on the I/O thread. No more values are written to the arrays, and unsent data is sent
        from copies. Data that the transport already has may change only after the peer has accepted
        it, and shared memory (``KVStore.empty``) only after the server has answered.
        """
        for transfer in self.transfers:
            transfer.abandoned = True
            if not transfer.has_frames:
                transfer.make_frames()
            elif isinstance(transfer.frames, list):  # the caller's own memory
                self._lent += transfer.frames
                transfer.frames[:] = [memoryview(bytes(frame)) for frame in transfer.frames]

    def part_done(self, error: BaseException | None) -> None:
        """Record the end of one transfer. Only on the I/O thread, so without a lock."""
        self.error_so_far = self.error_so_far or error
        if self.end_transfer():
            self.set_result(None)

    def end_transfer(self) -> bool:
        """Count the end of one transfer; return whether it was the last and all went well.

        Then the caller sets the result. After an error, the last transfer ends the call here.
        """
        self.left -= 1
        if self.left:
            return False
        if self.error_so_far is not None:
            self.fail(self.error_so_far)
            return False
        self.let_go()
        return True

    def fail(self, error: BaseException) -> None:
        """End the call with an error: its transfers are done, or will not be sent."""
        self.let_go()
        self.set_error(error)

    def let_go(self) -> None:
        """Release the copies and the caller's arrays: the transfers are done."""
        self.sources = self.targets = ()
        self.transfers = []


def transfer_of(
    group: Group,
    frames: Frames | None,
    targets: Sequence[Bytes],
    done: Callable[[BaseException | None], None],
    priority: int,
) -> Transfer:
    """Return the transfer of a group, which pulls if there are targets."""
    return Transfer(
        group.server,
        group.parts,
        group.pull_sizes,
        frames,
        partial(scatter, group, targets) if targets else None,
        done,
        priority,
        push_sizes=group.to_push.sizes,
    )


class Destination:
    """The memory that receives a call's values: each key's first array if suitable.

    An array is suitable if it is a contiguous array of NumPy or PyTorch on the host and has the
    key's dtype. If the first one is not, the store's own memory receives the values. ``finish``
    copies them to all other arrays of the key, with casts and strides.
    """

    __slots__ = ("_landed", "_rest", "is_final", "memories")

    def __init__(
        self,
        memories: MutableSequence[Bytes],
        landed: Sequence[Array] = (),
        rest: Sequence[tuple[np.ndarray[Any, Any], Sequence[Array]]] = (),
    ) -> None:
        self.memories = memories
        """The memory that receives each key's value."""
        self._landed = landed
        self._rest = rest
        self.is_final = not (landed or rest)
        """Whether ``finish`` has nothing to do."""

    @classmethod
    def of(cls, outs: Sequence[Sequence[Array]], specs: Sequence[KeySpec]) -> Destination:
        """Return a destination for each key's arrays, of any library and strides."""
        memories, landed, others = [], [], []
        for arrays, spec in zip(outs, specs, strict=True):
            first = arrays[0]
            adapter = adapter_for(first)
            memory = adapter.memory(first) if adapter.dtype(first) == spec.dtype else None
            if memory is None:
                host, rest = np.empty(spec.shape, spec.dtype), arrays
                memory = flat_bytes(host)
            else:
                host, rest = memory.view(spec.dtype).reshape(spec.shape), arrays[1:]
                landed.append(first)
            memories.append(memory)
            if rest:
                others.append((host, rest))
        return cls(memories, landed, others)

    def finish(self) -> None:
        """Copy the values to the arrays that did not receive them directly."""
        for array in self._landed:
            adapter_for(array).written(array)
        for host, outs in self._rest:
            for out in outs:
                adapter_for(out).from_host(host, out)


def overlaps(sources: Sequence[Bytes], targets: Sequence[Bytes], indices: Iterable[int]) -> bool:
    """Return whether a value may be received into memory that is still being sent.

    A source and its own target may be the same memory: a part's new value arrives only after
    that part has been applied.
    """
    chosen = list(indices)
    sent = [sources[index] for index in chosen]
    written = _owners(targets)
    read = None if written is None else _owners(sent)
    if written is not None and read is not None and len(set(written)) == len(written):
        where = dict(zip(written, itertools.count(), strict=False))
        return any(where.get(owner, at) != at for at, owner in zip(chosen, read, strict=True))
    starts, first = np.array(addresses(targets), np.intp), np.array(addresses(sent), np.intp)
    stops = starts + np.array(list(map(len, targets)), np.intp)
    behind = first + np.array(list(map(len, sent)), np.intp)
    # The number of targets that begin before a source's end, minus those that end before it begins.
    inside = np.searchsorted(np.sort(starts), behind) - np.searchsorted(
        np.sort(stops), first, side="right"
    )
    return bool((inside > (starts[chosen] == first)).any())


def _owners(memories: Sequence[Bytes]) -> list[int] | None:
    """Return the id of each memory's owner; None if a memory is only part of one.

    Memories with different owners cannot overlap. This costs a twentieth of comparing addresses.
    """
    found = []
    for memory in memories:
        base = memory.base
        if type(base) is not np.ndarray or base.base is not None or base.nbytes != memory.size:
            return None
        found.append(id(base))
    return found


Frames = Sequence[memoryview] | Callable[[], Sequence[memoryview]]
"""The frames of one message, or a function that returns them."""

#: Smaller frames are never sent through shared memory (``pslite/memory/sharing.py``).
LEAST_SHARED_BYTES = 1024
#: Values in different places are sent without a copy if their frames average this size.
_LEAST_FRAME_BYTES = 65_536


def frames_of(
    node: Postoffice,
    groups: Sequence[Group],
    sources: Sequence[Bytes],
    targets: Sequence[Bytes] | None,
    nbytes: int,
) -> list[Frames]:
    """Return each group's frames of ``sources``, which must not change until sent.

    The frames have ``nbytes`` in all. Copies of large calls are made later, so that the server can
    begin with the first messages. ``targets`` may be filled while other groups are still unsent.
    """
    found: list[Frames | None] = [zero_copy_views(node, group, sources) for group in groups]
    if nbytes > node.config.chunk_bytes:
        for index, group in enumerate(groups):
            if found[index] is None and node.nearby.may_share_with(group.server):
                found[index] = partial(copied, node, group, sources)
    if targets is not None:  # values may arrive while others are still unsent
        pairs = zip(groups, found, strict=True)
        late = {part.position for group, own in pairs if own for part in group.slices}
        if late and overlaps(sources, targets, late):
            found = [None] * len(groups)
    return [own or copied(node, group, sources) for group, own in zip(groups, found, strict=True)]


def zero_copy_views(
    node: Postoffice, group: Group, memories: Sequence[Bytes]
) -> list[memoryview] | None:
    """Return views of a group's data without copying, or None if a copy is faster.

    It returns a list, so that ``Operation.abandon`` can replace the views by copies. A copy is
    faster for small parts in different places, and for a server on this machine: there a copy in
    shared memory is faster than TCP.
    """
    pushed = group.to_push
    if pushed.nbytes >= LEAST_SHARED_BYTES and node.nearby.may_share_with(group.server):
        rows = node.shared_rows(views(pushed, memories))
        if rows is None or len(rows) * _LEAST_FRAME_BYTES > pushed.nbytes + _LEAST_FRAME_BYTES:
            return None
        return [row.data for row in rows]
    first, last = pushed.slices[0], pushed.slices[-1]
    if first.position != last.position or last.stop - first.start != pushed.nbytes:
        return None
    return [memories[first.position][first.start : last.stop].data]


def copied(node: Postoffice, group: Group, memories: Sequence[Bytes]) -> tuple[memoryview, ...]:
    """Return one frame with a copy of a group's data; the arrays may change at once."""
    staging = node.buffer(group.to_push.nbytes)
    gather(group.to_push, memories, staging)
    return (staging.data,)
