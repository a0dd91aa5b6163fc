"""Calls that go out together, as messages: which keys share one, and whom its end concerns.

``fusing.py`` says what happens to which key in which order; here that becomes transfers. How is
worked out once for calls of the same shapes (``loads_of``), so that a loop that is run again
only fills in its arrays (``transfers_of``). Called on the I/O thread; takes no lock and keeps
nothing. Next: ``exchange.py``, where calls come together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvstore.frames import as_they_lie, copied
from kvstore.fusing import Call, Mix, Shape, mixes_of, note_arrived
from kvstore.keys import Key
from kvstore.plan import Bytes, Group, scatter_into
from kvstore.protocol import KeyEntry
from pslite import Postoffice
from pslite.plane import Transfer


class Load(NamedTuple):
    """One message that carries something of several calls, which are given by their positions."""

    mix: Mix
    group: Group
    calls: tuple[tuple[int, ...], ...]
    """Parallel to the parts."""
    each: tuple[int, ...]
    """All of them, once."""
    priority: int
    lying: tuple[int, int] | None
    """Where the batch's staging has its values as they travel; None where they lie apart."""


def loads_of(
    shapes: Sequence[Shape],
    entries: Mapping[Key, KeyEntry],
    plan: Callable[[Sequence[Key]], Iterable[Group]],
) -> list[Load]:
    """The messages that carry calls of these shapes; ``plan`` gives those of keys."""
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
    """Where a batch's staging has each value that is pushed: by call, and key of the call."""
    starts, start = {}, 0
    for number, (keys, pushes, _, _) in enumerate(shapes):
        for index, key in enumerate(keys if pushes else ()):
            starts[number, index] = start
            start += entries[key].spec.nbytes
    return starts


def _in_a_row(group: Group, places: Sequence[int]) -> tuple[int, int] | None:
    """The bytes of a group whose keys begin at these places; None where they lie apart."""
    stop = begin = places[0] + group.slices[0].start
    for piece, place in zip(group.slices, places, strict=True):
        if place + piece.start != stop:
            return None
        stop = place + piece.stop
    return begin, stop


def transfers_of(
    node: Postoffice, loads: Sequence[Load], calls: Sequence[Call], staging: Bytes | None
) -> list[Transfer]:
    """The messages that carry what these calls say; each call ends with the last of its own.

    ``staging`` has all that is pushed, one value behind another; None where each value has
    memory of its own.
    """
    transfers = []
    for load in loads:
        mix, group = load.mix, load.group
        frames: Sequence[memoryview] | None = None
        sink = None
        if staging is not None and load.lying is not None:
            start, stop = load.lying
            frames = [staging[start:stop].data]
        elif mix.sources:
            sources = [calls[number].sources[index] for number, index in mix.sources]
            frames = as_they_lie(node, group, sources) or copied(node, group, sources)
        if mix.targets:
            targets = [calls[number].targets[index] for number, index in mix.targets]
            sink = scatter_into(group, targets)
        for number in load.each:
            calls[number].left += 1
        transfer = Transfer(
            group.server,
            group.parts,
            group.pull_sizes,
            frames,
            sink,
            _unused,
            load.priority,
            push_sizes=group.to_push.sizes,
        )
        transfer.done = _telling(transfer, load, calls)
        transfers.append(transfer)
    return transfers


def _telling(
    transfer: Transfer, load: Load, calls: Sequence[Call]
) -> Callable[[BaseException | None], None]:
    """What to call when a message is done.

    A part that came to nothing is an error of the calls for its key, and of no others.
    """
    mine = [calls[number] for number in load.each]

    def done(error: BaseException | None) -> None:
        if transfer.failed:
            for part, reason in transfer.failed.items():
                for number in load.calls[part]:
                    call = calls[number]
                    call.error_so_far = call.error_so_far or reason
        elif error is not None:
            for call in mine:
                call.error_so_far = call.error_so_far or error
        note_arrived(mine)

    return done


def _unused(error: BaseException | None) -> None:
    """Stands in until a transfer is told whom to tell."""
