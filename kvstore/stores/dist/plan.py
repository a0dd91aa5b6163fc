"""Plan the messages of a call: which parts are sent together to which server.

A plan depends only on the keys of a call, so it is made once for each list of keys: a ``Bucket``
has all that is decided about a list, and ``Buckets`` recognizes the lists that a training loop
repeats. Pure. Grouping parts affects only the speed: each part keeps its own rounds and versions
(``pslite/plane``). Read next: ``transfer.py``, which uses plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.keys import Key, KeySpec
from kvstore.errors import UnknownKeyError
from kvstore.protocol.placement import message_bytes, most_group_bytes
from kvstore.protocol.requests import KeyEntry, PartEntry
from kvstore.stores.arguments import KeyTable
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
    to_push: PushedData
    """The data to push: the values, or the encoded ones."""
    pull_sizes: tuple[int, ...]
    """The size of each part in an answer."""
    decoders: tuple[Decoder | None, ...] | None = None
    """A decoder or None for each part, if some pulled values are encoded."""

    @classmethod
    def of(
        cls, server: int, parts: Sequence[int], sizes: Sequence[int], slices: Sequence[Slice]
    ) -> Group:
        """Return a group of parts whose values are not encoded."""
        pushed = PushedData(tuple(sizes), tuple(slices), sum(sizes))
        return cls(
            server,
            tuple(parts),
            pushed.sizes,
            pushed.slices,
            pushed.nbytes,
            to_push=pushed,
            pull_sizes=pushed.sizes,
        )


class PushedData(NamedTuple):
    """The pushed data of a group's parts: slices of the values, or of encoded ones."""

    sizes: tuple[int, ...]
    slices: tuple[Slice, ...]
    nbytes: int


class Decoder(NamedTuple):
    """The decoding of one part's value."""

    nbytes: int
    decode: Callable[[Bytes, Bytes], None]
    """Decodes the received bytes (first argument) into the part (second argument)."""


_PLAIN = {np.ndarray}
_look_to_read = attrgetter("shape", "dtype", "flags.c_contiguous")
_look_to_write = attrgetter("shape", "dtype", "flags.carray")


class Bucket:
    """Different keys that calls name together, and what is decided once about them."""

    __slots__ = (
        "_looks",
        "batches",
        "coding",
        "gone",
        "groups",
        "is_coded",
        "is_dense",
        "keys",
        "nbytes",
        "specs",
    )

    def __init__(
        self,
        keys: tuple[Key, ...],
        specs: Sequence[KeySpec] = (),
        coding: Any = None,
        *,
        is_dense: bool = True,
        is_coded: bool = False,
    ) -> None:
        self.keys = keys
        self.specs = specs
        self.coding = coding
        """The encoding of the store when the keys were first named; calls need the present one."""
        self.is_dense = is_dense
        """Whether no key is row-sparse."""
        self.is_coded = is_coded
        """Whether pushes of any of these keys are encoded."""
        self.nbytes = sum(spec.nbytes for spec in specs)
        self.gone: UnknownKeyError | None = None
        """The error of calls once one of the keys was deleted."""
        self.groups: Sequence[Group] | None = None
        """The messages of a call for these keys alone; None: not planned yet."""
        self.batches: dict[tuple[bool, bool], tuple[Any, Any]] = {}
        """The shapes and messages of the last batch that began with a call for these keys.

        There is one for each kind of call: (whether it pushes, whether it pulls).
        """
        # With NumPy's own dtype objects, which compare fastest.
        self._looks = [(spec.shape, np.dtype(spec.dtype.type), True) for spec in specs]

    def fit(self, arrays: Sequence[object], *, are_written: bool) -> bool:
        """Return whether these are usual: one plain contiguous array for each key.

        A plain array is of NumPy's own class and has exactly the key's shape and dtype; with
        ``are_written`` it must also be aligned and writable. False is not an error: then the full
        checks decide. Two passes over the list, which run in C, cost a twentieth of those checks.
        """
        look = _look_to_write if are_written else _look_to_read
        if len(arrays) == len(self.keys) == 1:  # for loops over keys
            return type(arrays[0]) is np.ndarray and look(arrays[0]) == self._looks[0]
        return (
            len(arrays) == len(self.keys)
            and set(map(type, arrays)) == _PLAIN
            and list(map(look, arrays)) == self._looks
        )

    def describe(self) -> str:
        """Say which answer a call with these keys waits for."""
        shown = ", ".join(repr(key) for key in self.keys[:3])
        return f"the servers' answer for {shown}" + (", ..." if len(self.keys) > 3 else "")


#: The known buckets have at most this many keys in total, since a script may shuffle its keys.
_MOST_KNOWN_KEYS = 100_000


class Buckets:
    """The buckets of a store. Any thread may use it."""

    def __init__(self, table: KeyTable) -> None:
        self.table = table
        #: The store's encoding of values (``DistCompression``), or None.
        self.coding: Any = None
        self._known: dict[tuple[Key, ...], Bucket] = {}
        self._num_keys = 0

    def of(self, keys: tuple[Key, ...]) -> Bucket:
        """Return the bucket of these different keys. Raises as ``KeyTable.spec`` does."""
        known = self._known  # read first: see ``begin_coding``
        found = known.get(keys)
        if found is None:
            table, coding = self.table, self.coding
            found = Bucket(
                keys,
                [table.spec(key) for key in keys],
                coding,
                is_dense=not any(map(table.is_row_sparse, keys)),
                is_coded=coding is not None and coding.concerns(keys),
            )
            if self._num_keys + len(keys) > _MOST_KNOWN_KEYS:
                known.clear()
                self._num_keys = 0
            self._num_keys += len(keys)
            known[keys] = found
        return found

    def usual(self, key: object) -> Bucket | None:
        """Return a call's bucket if its keys are dense, different, and plain str or int.

        Otherwise return None; then the slower checks accept or refuse the keys.
        """
        # Types are checked, since True and 1.0 are equal to 1 in a dict.
        kind = type(key)
        if kind is str or kind is int:
            keys: tuple[Any, ...] = (key,)
        elif kind is list or kind is tuple:
            keys = tuple(key)  # type: ignore[arg-type]
            if set(map(type, keys)) not in ({str}, {int}):
                return None
        else:
            return None
        found = self._known.get(keys)
        if (
            found is None
            and len(set(keys)) == len(keys)
            and all(map(self.table.__contains__, keys))
        ):
            found = self.of(keys)
        return None if found is None or not found.is_dense else found

    def begin_coding(self, coding: Any) -> None:
        """Set the encoding; all buckets are made anew, and no call may use the old ones."""
        self.coding = coding
        # A new dict: a thread that is making a bucket now puts it into the old one.
        self._known, self._num_keys = {}, 0

    def remove(self, keys: Iterable[Key]) -> None:
        """Remove deleted keys; calls for other keys go on."""
        gone = set(keys)
        known = self._known
        self._known, self._num_keys = {}, 0
        for bucket in list(known.values()):
            bucket.batches.clear()
            for key in bucket.keys:
                if key in gone:
                    bucket.gone = UnknownKeyError(f"the key {key!r} was deleted")


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
    entries: Sequence[KeyEntry],
    group_bytes: int,
    *,
    keeps_keys_whole: bool = False,
    route: Callable[[KeyEntry, int], int] = lambda _, owner: owner,
) -> list[Group]:
    """Return the messages for these keys, each at most ``group_bytes`` or one part.

    With ``keeps_keys_whole``, keys of at most that size on a server are not cut. ``route`` chooses
    the server to which the parts of an owner are sent.
    """
    done: list[Group] = []
    filling: dict[tuple[int, int], _Filling] = {}
    for position, places in enumerate(map(places_of, entries)):
        whole = _bytes_on_servers(places) if keeps_keys_whole else {}
        for server, part, start, stop in places:
            size = stop - start
            to = server, route(entries[position], server)
            group = filling.get(to)
            needed = whole.pop(server, size)  # for its first part on the server: all of them
            needed = needed if needed <= group_bytes else size
            if group is not None and not group.has_room(needed, group_bytes):
                done.append(group.done())
                group = None
            if group is None:
                group = filling[to] = _Filling(to[1])
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
        return Group.of(self.server, self.parts, self.sizes, self.slices)


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


def views(group: Group | PushedData, arrays: Sequence[Bytes]) -> list[Bytes]:
    """Return each part's bytes in the arrays of a call, sharing their memory."""
    return [arrays[position][start:stop] for position, start, stop in group.slices]


def gather(group: Group | PushedData, arrays: Sequence[Bytes], staging: Bytes) -> None:
    """Copy the group's parts one after the other into ``staging``."""
    pieces = views(group, arrays)
    if len(pieces) == 1:
        staging[:] = pieces[0]
    else:
        np.concatenate(pieces, out=staging)


def scatter(
    group: Group,
    arrays: Sequence[Bytes],
    indices: Sequence[int],
    pieces: Sequence[Piece],
    versions: Sequence[int],
) -> None:
    """Copy received parts of a group into a call's arrays; decode encoded ones."""
    slices, decoders = group.slices, group.decoders
    frame: Any = None
    memory: Bytes = np.empty(0, np.uint8)
    for index, piece in zip(indices, pieces, strict=True):
        if piece.frame is not frame:
            frame = piece.frame
            memory = np.frombuffer(frame, np.uint8)
        came = memory[piece.start : piece.stop]
        position, start, stop = slices[index]
        target = arrays[position]
        decoder = None if decoders is None else decoders[index]
        if type(target) is ShownBytes:  # a live view, so the value is not encoded
            target.receive(start, stop, came)
        elif decoder is None:
            target[start:stop] = came
        else:
            decoder.decode(came, target[start:stop])
