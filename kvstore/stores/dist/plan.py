"""Plan the messages of a call: which parts are sent together to which server.

A plan depends only on the keys of a call, so a store compiles it once for each list of keys. Pure.
Grouping parts affects only the speed: each part keeps its own rounds and versions
(``pslite/plane``). Read next: ``store.py``, which uses plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from kvstore.protocol.placement import message_bytes, most_group_bytes
from kvstore.protocol.requests import KeyEntry, PartEntry, bytes_of
from kvstore.stores.views import ShownBytes
from pslite import Config
from pslite.ids import Role, node_id
from pslite.plane import Piece

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
"""The memory of an array, flat."""

_BYTE: np.dtype[np.uint8] = np.dtype(np.uint8)

MAX_PARTS = 4096
"""A message has at most this many parts."""


class Slice(NamedTuple):
    """One part: bytes [start, stop) of the call's ``position``-th key."""

    position: int
    start: int
    stop: int


class Group(NamedTuple):
    """Parts of one server that are sent together."""

    server: int
    """The node id of the server."""
    parts: tuple[int, ...]
    sizes: tuple[int, ...]
    slices: tuple[Slice, ...]
    nbytes: int
    coded: Coded | None = None
    """The encoded data to push in place of the values, if the parts are encoded."""
    decoders: tuple[Decoder | None, ...] | None = None
    """A decoder or None for each part, if some pulled values are encoded."""

    @property
    def to_push(self) -> Group | Coded:
        """The sizes and slices of the pushed data."""
        return self.coded or self

    @property
    def pull_sizes(self) -> tuple[int, ...]:
        """The size of each part in an answer."""
        if self.decoders is None:
            return self.sizes
        pairs = zip(self.decoders, self.sizes, strict=True)
        return tuple(size if each is None else each.nbytes for each, size in pairs)


class Coded(NamedTuple):
    """The pushed data of a group's parts: slices of encoded values."""

    sizes: tuple[int, ...]
    slices: tuple[Slice, ...]
    nbytes: int


class Decoder(NamedTuple):
    """The decoding of one part's value."""

    nbytes: int
    decode: Callable[[Bytes, Bytes], None]
    """Decodes the received bytes (first argument) into the part (second argument)."""


Places = Sequence[tuple[int, int, int, int]]
"""The parts of one key: (node id of the server, part, first byte, end byte)."""


def places_of(entry: KeyEntry) -> Places:
    """Return the places of a key's parts."""
    itemsize = entry.spec.dtype.itemsize
    return [
        (node_id(Role.SERVER, server), part, start * itemsize, stop * itemsize)
        for part, server, (start, stop) in zip(
            entry.parts, entry.servers, entry.chunks(), strict=True
        )
    ]


def group_bytes(config: Config, total_bytes: int, *, by_tcp: bool) -> int:
    """Return the size of the messages of a call for ``total_bytes``.

    A large call gets several messages, so that copies, sums and updates overlap.
    """
    least = message_bytes(config, by_tcp=by_tcp)
    return least if by_tcp else min(max(least, total_bytes // 4), most_group_bytes(config))


def plan(
    entries: Sequence[KeyEntry], group_bytes: int, *, keeps_keys_whole: bool = False
) -> list[Group]:
    """Return the messages for these keys, each at most ``group_bytes`` or one part.

    With ``keeps_keys_whole``, keys of at most that size on a server are not cut.
    """
    keys = list(map(places_of, entries))
    return group_parts(keys, group_bytes, keeps_keys_whole=keeps_keys_whole)


def group_parts(
    keys: Sequence[Places], group_bytes: int, *, keeps_keys_whole: bool = False
) -> list[Group]:
    """Return the messages for keys with these places; see ``plan``."""
    done: list[Group] = []
    filling: dict[int, _Filling] = {}
    for position, places in enumerate(keys):
        whole = _bytes_on_servers(places) if keeps_keys_whole else {}
        for server, part, start, stop in places:
            size = stop - start
            group = filling.get(server)
            needed = whole.pop(server, size)  # for its first part on the server: all of them
            needed = needed if needed <= group_bytes else size
            if group is not None and not group.has_room(needed, group_bytes):
                done.append(group.done())
                group = None
            if group is None:
                group = filling[server] = _Filling(server)
            group.parts.append(part)
            group.sizes.append(size)
            group.slices.append(Slice(position, start, stop))
            group.nbytes += size
    done += [group.done() for group in filling.values()]
    return sorted(done, key=lambda group: group.slices[0])


def joined_by_keys(groups: Sequence[Group], most_bytes: int) -> list[list[Group]]:
    """Return lists of groups: those with parts of one key together, if they fit.

    This holds for each server. The groups of a list have at most ``most_bytes``, or are one group.
    """
    lists: list[list[Group]] = []
    last: dict[int, list[Group]] = {}
    for group in groups:
        mine = last.get(group.server)
        if (
            mine is None
            or mine[-1].slices[-1].position != group.slices[0].position
            or sum(each.nbytes for each in mine) + group.nbytes > most_bytes
        ):
            mine = last[group.server] = []
            lists.append(mine)
        mine.append(group)
    return lists


def _bytes_on_servers(places: Places) -> dict[int, int]:
    """Return how many bytes of a key each server has."""
    found: dict[int, int] = {}
    for server, _, start, stop in places:
        found[server] = found.get(server, 0) + stop - start
    return found


class _Filling:
    """A group that is being filled with parts."""

    __slots__ = ("nbytes", "parts", "server", "sizes", "slices")

    def __init__(self, server: int) -> None:
        self.server = server
        self.parts: list[int] = []
        self.sizes: list[int] = []
        self.slices: list[Slice] = []
        self.nbytes = 0

    def has_room(self, size: int, group_bytes: int) -> bool:
        return self.nbytes + size <= group_bytes and len(self.parts) < MAX_PARTS

    def done(self) -> Group:
        parts, sizes, slices = tuple(self.parts), tuple(self.sizes), tuple(self.slices)
        return Group(self.server, parts, sizes, slices, self.nbytes)


def part_entries(group: Group, entries: Sequence[KeyEntry]) -> list[PartEntry]:
    """Return the entries from which a server creates the group's parts."""
    parts = []
    for part, size, piece in zip(group.parts, group.sizes, group.slices, strict=True):
        key, spec, _, _, servers, *_ = entries[piece.position]
        length, is_whole = size // spec.dtype.itemsize, len(servers) == 1
        parts.append(PartEntry(part, key, is_whole, length, spec.dtype, spec.width))
    return parts


def flat_bytes(array: np.ndarray[Any, Any]) -> Bytes:
    """Return the bytes of a C-contiguous array, sharing its memory."""
    return array.reshape(-1).view(np.uint8)


def flat_bytes_of(arrays: Sequence[np.ndarray[Any, Any]]) -> list[Bytes]:
    """Return ``flat_bytes`` of many plain NumPy arrays, at a third of the cost."""
    return list(map(np.frombuffer, arrays, repeat(_BYTE)))


def views(group: Group | Coded, arrays: Sequence[Bytes]) -> list[Bytes]:
    """Return each part's bytes in the arrays of a call, sharing their memory."""
    return [arrays[position][start:stop] for position, start, stop in group.slices]


def gather(group: Group | Coded, arrays: Sequence[Bytes], staging: Bytes) -> None:
    """Copy the group's parts one after the other into ``staging``."""
    pieces = views(group, arrays)
    if len(pieces) == 1:
        staging[:] = pieces[0]
    else:
        np.concatenate(pieces, out=staging)


def scatter_into(
    group: Group, arrays: Sequence[Bytes]
) -> Callable[[Sequence[int], Sequence[Piece], Sequence[int]], None]:
    """Return a function that copies received parts of a group into a call's arrays."""
    slices = group.slices
    if group.decoders is not None:
        return _decode_into(slices, group.decoders, arrays)

    def sink(indices: Sequence[int], pieces: Sequence[Piece], versions: Sequence[int]) -> None:
        frame: Any = None
        memory: Bytes = np.empty(0, np.uint8)
        for index, piece in zip(indices, pieces, strict=True):
            if piece.frame is not frame:
                frame = piece.frame
                memory = np.frombuffer(frame, np.uint8)
            key, start, stop = slices[index]
            target = arrays[key]
            if type(target) is ShownBytes:
                target.receive(start, stop, memory[piece.start : piece.stop])
            else:
                target[start:stop] = memory[piece.start : piece.stop]

    return sink


def _decode_into(
    slices: Sequence[Slice], decoders: Sequence[Decoder | None], arrays: Sequence[Bytes]
) -> Callable[[Sequence[int], Sequence[Piece], Sequence[int]], None]:
    def sink(indices: Sequence[int], pieces: Sequence[Piece], versions: Sequence[int]) -> None:
        for index, piece in zip(indices, pieces, strict=True):
            came = bytes_of(piece)
            key, start, stop = slices[index]
            decoder = decoders[index]
            target = arrays[key]
            if type(target) is ShownBytes:  # a live view, so the value is not encoded
                target.receive(start, stop, came)
            elif decoder is None:
                target[start:stop] = came
            else:
                decoder.decode(came, target[start:stop])

    return sink
