"""Batch small pushes and pulls into few messages.

If a script calls ``push`` and ``pull`` key by key and reads the arrays later, each key would need
two messages. Instead, a ``CallBatch`` collects the calls and they are sent together: a push and a
following pull of the same key become one exchange, and small keys share messages, highest priority
first. Order is kept: a call that would overtake an earlier call of the same key goes into a later
``Mix``. The messages depend only on the ``Shape`` of the calls, so ``loads_of`` computes them once
for a loop that repeats, and ``transfers_of`` then only adds the arrays. In such a loop, batches end
at the same calls each time, unless a caller waits or no call comes for some milliseconds. Calls are
collected on the caller's thread and become transfers on the I/O thread. Read next:
``transfer.py``, which decides when a batch is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvstore.arrays.keys import Key
from kvstore.protocol.requests import KeyEntry
from kvstore.stores.dist.in_flight import Operation, copied, transfer_of, zero_copy_views
from kvstore.stores.dist.plan import Bucket, Bytes, Group
from pslite import Postoffice
from pslite.future import complete_all
from pslite.plane import Transfer

#: A batch has at most this many calls, so that a loop over many small keys sends the first ones
#: before it reaches the last.
_MAX_CALLS = 128

Shape = tuple[tuple[Key, ...], bool, bool, int]
"""A call without its arrays: its keys, whether it pushes, whether it pulls, its priority."""


def shape_of(call: Operation) -> Shape:
    """Return a call's shape, which changes if a pull joins the call (``pull_last``)."""
    return call.keys.keys, bool(call.sources), bool(call.targets), call.priority


class CallBatch:
    """Calls that are sent together; ``flush`` sends them.

    Pushed values are copied into ``staging``, one after the other, as long as they fit.
    """

    __slots__ = (
        "_filled_bytes",
        "_flush",
        "_limit_bytes",
        "_pulled_bytes",
        "_pushed_bytes",
        "_staging",
        "calls",
        "is_taken",
    )

    def __init__(
        self, limit_bytes: int, flush: Callable[[], None], staging: Bytes | None = None
    ) -> None:
        self.calls: list[Operation] = []
        self.is_taken = False
        self._limit_bytes = limit_bytes
        self._staging = staging
        self._filled_bytes = self._pushed_bytes = self._pulled_bytes = 0
        self._flush = flush

    @property
    def staging(self) -> Bytes | None:
        """All pushed values without gaps; None if there is a gap or values are elsewhere.

        An interrupt between staging a call and adding it leaves a gap.
        """
        return self._staging if self._filled_bytes == self._pushed_bytes else None

    def stage(
        self, sources: Sequence[Bytes], nbytes: int, memory: Callable[[int], Bytes]
    ) -> list[Bytes]:
        """Return copies of values of ``nbytes`` in all.

        They are in ``staging``, or in new ``memory`` if it has no room.
        """
        staging, start = self._staging, self._filled_bytes
        if staging is None or start + nbytes > len(staging):
            self._staging = None
            staging, start = memory(nbytes), 0
        copies = []
        for source in sources:
            stop = start + len(source)
            copy = staging[start:stop]
            copy[:] = source
            copies.append(copy)
            start = stop
        self._filled_bytes = start
        return copies

    def add(self, call: Operation) -> None:
        """Add a call."""
        call.flush = self._flush
        self.calls.append(call)
        if call.sources:
            self._pushed_bytes += call.keys.nbytes
        if call.targets:
            self._pulled_bytes += call.keys.nbytes

    def pull_last(self, keys: Bucket, targets: Sequence[Bytes], priority: int) -> Operation | None:
        """Add a pull to the last call if it pushes the same keys; otherwise return None.

        Scripts make such calls, and one call costs half as much as two.
        """
        call = self.calls[-1]
        if call.targets or (call.keys.keys, call.priority) != (keys.keys, priority):
            return None
        call.targets = targets
        self._pulled_bytes += keys.nbytes
        return call

    def has_room(self, nbytes: int, *, pushes: bool) -> bool:
        """Return whether a call should join; a pull always joins a push just before it."""
        if not pushes and self.calls and self.calls[-1].sources:
            return True
        before = self._pushed_bytes if pushes else self._pulled_bytes
        return before + nbytes <= self._limit_bytes and len(self.calls) < _MAX_CALLS


class Mix(NamedTuple):
    """Keys that are pushed or pulled in one step, highest priority first."""

    keys: tuple[Key, ...]
    calls: tuple[tuple[int, ...], ...]
    """The positions of each key's calls in the batch."""
    priorities: tuple[int, ...]
    sources: tuple[tuple[int, int], ...]
    """For each key, the call that pushes it and the key's position there; empty for a pull."""
    targets: tuple[tuple[int, int], ...]


def mixes_of(shapes: Sequence[Shape]) -> list[Mix]:
    """Return the mixes that send these calls: the fewest that keep the calls' order."""
    mixes: list[Mix] = []
    step: dict[Key, _KeyStep] = {}
    for number, (keys, pushes, pulls, priority) in enumerate(shapes):
        if not _fits(keys, step, pushes=pushes):
            mixes += _kinds_of(step)
            step = {}
        for index, key in enumerate(keys):
            entry = step.get(key)
            if entry is None:
                entry = step[key] = _KeyStep(priority)
            entry.calls.append(number)
            entry.priority = max(entry.priority, priority)
            if pushes:
                entry.source = (number, index)
            if pulls:
                entry.target = (number, index)
    return mixes + _kinds_of(step)


@dataclass(slots=True, eq=False, repr=False)
class _KeyStep:
    """The operations on one key in a step: a push, a pull, or a push and then a pull."""

    priority: int
    calls: list[int] = field(default_factory=list)
    source: tuple[int, int] | None = None
    target: tuple[int, int] | None = None


def _fits(keys: Sequence[Key], step: dict[Key, _KeyStep], *, pushes: bool) -> bool:
    """Return whether a call may join: a step has at most a push, then a pull per key."""
    for key in keys:
        entry = step.get(key)
        if entry is not None and (pushes or entry.target is not None):
            return False
    return True


def _kinds_of(step: dict[Key, _KeyStep]) -> list[Mix]:
    """Return one mix each for the step's keys with a push, with a pull, and with both."""
    kinds: dict[tuple[bool, bool], list[Key]] = {}
    for key in sorted(step, key=lambda key: -step[key].priority):
        entry = step[key]
        kinds.setdefault((entry.source is not None, entry.target is not None), []).append(key)
    return [_mix(keys, [step[key] for key in keys]) for keys in kinds.values()]


def _mix(keys: Sequence[Key], entries: Sequence[_KeyStep]) -> Mix:
    return Mix(
        tuple(keys),
        tuple(tuple(entry.calls) for entry in entries),
        tuple(entry.priority for entry in entries),
        tuple(entry.source for entry in entries if entry.source is not None),
        tuple(entry.target for entry in entries if entry.target is not None),
    )


class Load(NamedTuple):
    """One message with parts of several calls; calls are given by their positions."""

    mix: Mix
    group: Group
    calls: tuple[tuple[int, ...], ...]
    """The calls of each part."""
    each: tuple[int, ...]
    """All these calls, each once."""
    priority: int
    lying: tuple[int, int] | None
    """The range of ``staging`` that can be sent as the message; None if values are not adjacent."""


def loads_of(
    shapes: Sequence[Shape],
    entries: Mapping[Key, KeyEntry],
    plan: Callable[[Sequence[Key]], Iterable[Group]],
) -> list[Load]:
    """Return the messages for calls of these shapes; ``plan`` groups the keys."""
    starts = _staged(shapes, entries)
    loads = []
    for mix in mixes_of(shapes):
        for group in plan(mix.keys):
            positions = [piece.position for piece in group.slices]
            calls = tuple(mix.calls[position] for position in positions)
            each = tuple(dict.fromkeys(number for several in calls for number in several))
            priority = max(mix.priorities[position] for position in positions)
            lying = None
            if mix.sources:
                places = [starts[mix.sources[position]] for position in positions]
                lying = _in_a_row(group, places)
            loads.append(Load(mix, group, calls, each, priority, lying))
    return loads


def _staged(shapes: Sequence[Shape], entries: Mapping[Key, KeyEntry]) -> dict[tuple[int, int], int]:
    """Return the offset of each pushed value in ``staging``, by call and key position."""
    starts, start = {}, 0
    for number, (keys, pushes, _, _) in enumerate(shapes):
        for index, key in enumerate(keys if pushes else ()):
            starts[number, index] = start
            start += entries[key].spec.nbytes
    return starts


def _in_a_row(group: Group, places: Sequence[int]) -> tuple[int, int] | None:
    """Return the byte range of a group if its parts are adjacent, or None.

    ``places`` are the offsets of the parts' keys.
    """
    stop = begin = places[0] + group.slices[0].start
    for piece, place in zip(group.slices, places, strict=True):
        if place + piece.start != stop:
            return None
        stop = place + piece.stop
    return begin, stop


def transfers_of(
    node: Postoffice, loads: Sequence[Load], calls: Sequence[Operation], staging: Bytes | None
) -> list[Transfer]:
    """Return the transfers for these calls; each call ends with its last transfer.

    ``staging`` has all pushed values, one after the other; None if each value has its own memory.
    """
    transfers: list[Transfer] = []
    if len(calls) == 1:  # a thread may wait for it, and be interrupted
        calls[0].transfers = transfers
    for load in loads:
        mix, group = load.mix, load.group
        frames: Sequence[memoryview] | None = None
        if staging is not None and load.lying is not None:
            start, stop = load.lying
            frames = (staging[start:stop].data,)
        elif mix.sources:
            sources = [calls[number].sources[index] for number, index in mix.sources]
            frames = zero_copy_views(node, group, sources) or copied(node, group, sources)
        targets = [calls[number].targets[index] for number, index in mix.targets]
        for number in load.each:
            calls[number].left += 1
        transfer = transfer_of(group, frames, targets, _unused, load.priority)
        transfer.done = partial(_note_end, transfer, load, calls)
        transfers.append(transfer)
    return transfers


def _note_end(
    transfer: Transfer, load: Load, calls: Sequence[Operation], error: BaseException | None
) -> None:
    """Record the end of a transfer; the calls for which it was the last one are done.

    If a part fails, only the calls for its key get the error.
    """
    mine = [calls[number] for number in load.each]
    if transfer.failed:
        for part, reason in transfer.failed.items():
            for number in load.calls[part]:
                call = calls[number]
                call.error_so_far = call.error_so_far or reason
    elif error is not None:
        for call in mine:
            call.error_so_far = call.error_so_far or error
    complete_all([call for call in mine if call.end_transfer()])


def _unused(error: BaseException | None) -> None:
    """Do nothing, until ``transfers_of`` sets the real callback."""
