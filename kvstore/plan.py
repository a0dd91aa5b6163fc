"""How the arrays of one call travel: which parts go fused in which message to which server.

A plan depends on the keys of a call only, so a store compiles it once for each list of keys.
Pure. Fusing changes nothing but speed: rounds and versions stay with the parts
(``pslite/plane``). Next: ``dist.py``, which uses plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.protocol import KeyEntry, PartEntry
from pslite.ids import Role, node_id
from pslite.plane import Piece

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""The memory of an array, flat."""


MAX_PARTS = 4096
"""So many parts at most travel in one message."""


class Slice(NamedTuple):
    """One part: bytes [start, stop) of the call's ``position``-th key."""

    position: int
    start: int
    stop: int


class Group(NamedTuple):
    """Parts of one server that travel together."""

    server: int
    """Node id."""
    parts: tuple[int, ...]
    sizes: tuple[int, ...]
    slices: tuple[Slice, ...]
    nbytes: int


def plan(entries: Sequence[KeyEntry], group_bytes: int) -> list[Group]:
    """The messages for these keys, each at most ``group_bytes`` or one part."""
    done: list[Group] = []
    filling: dict[int, list[tuple[int, Slice]]] = {}
    nbytes: dict[int, int] = {}
    for index, entry in enumerate(entries):
        itemsize = entry.spec.dtype.itemsize
        for offset, ((start, stop), server) in enumerate(
            zip(entry.chunks(), entry.servers, strict=True)
        ):
            piece = Slice(index, start * itemsize, stop * itemsize)
            size = piece.stop - piece.start
            full = server in filling and (
                nbytes[server] + size > group_bytes or len(filling[server]) == MAX_PARTS
            )
            if full:
                done.append(_group(server, filling.pop(server)))
                nbytes[server] = 0
            filling.setdefault(server, []).append((entry.first_part + offset, piece))
            nbytes[server] = nbytes.get(server, 0) + size
    done += [_group(server, members) for server, members in filling.items()]
    return sorted(done, key=lambda group: group.slices[0])


def _group(server: int, members: Sequence[tuple[int, Slice]]) -> Group:
    parts = tuple(part for part, _ in members)
    slices = tuple(piece for _, piece in members)
    sizes = tuple(piece.stop - piece.start for piece in slices)
    return Group(node_id(Role.SERVER, server), parts, sizes, slices, sum(sizes))


def part_entries(group: Group, entries: Sequence[KeyEntry]) -> list[PartEntry]:
    """The group's parts, as a server is told to create them."""
    return [
        PartEntry(
            part,
            entries[piece.position].key,
            len(entries[piece.position].servers) == 1,
            size // entries[piece.position].spec.dtype.itemsize,
            entries[piece.position].spec.dtype,
        )
        for part, size, piece in zip(group.parts, group.sizes, group.slices, strict=True)
    ]


def flat_bytes(array: np.ndarray[Any, Any]) -> Bytes:
    """The memory of a C-contiguous array, shared."""
    return array.reshape(-1).view(np.uint8)


def views(group: Group, arrays: Sequence[Bytes]) -> list[Bytes]:
    """Each part's bytes in the arrays of a call, shared."""
    return [arrays[position][start:stop] for position, start, stop in group.slices]


def gather(group: Group, arrays: Sequence[Bytes], staging: Bytes) -> None:
    """Copy the group's parts one after the other into ``staging``, which has their size."""
    pieces = views(group, arrays)
    if len(pieces) == 1:
        staging[:] = pieces[0]
    else:
        np.concatenate(pieces, out=staging)


def scatter_into(
    group: Group, arrays: Sequence[Bytes]
) -> Callable[[Sequence[int], Sequence[Piece], Sequence[int]], None]:
    """A sink that copies the group's parts into the arrays of a call."""
    slices = group.slices

    def sink(indices: Sequence[int], pieces: Sequence[Piece], versions: Sequence[int]) -> None:
        frame: Any = None
        memory: Bytes = np.empty(0, np.uint8)
        for index, piece in zip(indices, pieces, strict=True):
            if piece.frame is not frame:
                frame = piece.frame
                memory = np.frombuffer(frame, np.uint8)
            key, start, stop = slices[index]
            arrays[key][start:stop] = memory[piece.start : piece.stop]

    return sink


class StagingPool:
    """Buffers for gathered parts, kept for the next round: fresh memory costs page faults.

    Calls that are joined make messages of ever new sizes. So memory is kept by powers of two:
    there is never more of a size than was in use at the same time.

    ``take`` and ``give_back`` may run on different threads; list operations are atomic.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Bytes]] = {}

    def take(self, nbytes: int) -> Bytes:
        """A buffer of exactly ``nbytes``; the caller's until ``give_back``."""
        size = 1 << max(nbytes - 1, 0).bit_length()
        free = self._free.get(size)
        try:
            memory = free.pop() if free else np.empty(size, np.uint8)
        except IndexError:
            memory = np.empty(size, np.uint8)
        return memory[:nbytes]

    def give_back(self, buffer: Bytes) -> None:
        """Nobody reads the buffer any more; it is what ``take`` returned."""
        memory = buffer.base
        if memory is not None:
            self._free.setdefault(len(memory), []).append(memory)
