"""The requests about stores between workers, servers and the scheduler.

The bodies of the requests of two apps: the directory (on the scheduler) and the stores (on
every server). Plain data only, packed by ``pslite.wire``; every field is checked when it
arrives. Pure. Next: ``server/directory.py``, ``server/__init__.py`` and ``stores/dist/store.py``,
which use these.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.dtypes import dtype_of, dtype_text
from kvstore.arrays.keys import Key, KeySpec
from kvstore.protocol.placement import chunk_ranges, num_chunks
from kvstore.sparse.partition import Stripes
from pslite.errors import ProtocolError, unexpected
from pslite.plane import Piece
from pslite.wire.codec import pack_value, unpack_value

#: App numbers, far above those that users of ``pslite`` choose.
DIRECTORY_APP = 1_000_001
STORE_APP = 1_000_002

SCOPES = ("element", "row", "key")
"""The units that an optimizer may need whole (``Optimizer.scope``): no part may be smaller."""

#: The last joint call of all ranks, after which the store is forgotten.
CLOSING = "close"

_MAX_DIMENSIONS = 64
MAX_CHUNKS = 1 << 20


class DirectoryCall(enum.IntEnum):
    """The requests of a worker to the directory."""

    DECLARE = 1
    INITIALISED = 2
    OPTIMIZER_IS_SET = 3
    SAME_OPTIMIZER = 4
    OPTIMIZER_OF = 5
    TOGETHER = 6
    DONE_TOGETHER = 7


class StoreCall(enum.IntEnum):
    """The requests of a worker to a server, and of some servers to each other."""

    INIT = 1
    SET_OPTIMIZER = 2
    OPTIMIZER = 3
    DELETE = 4
    READ = 5
    WRITE = 6
    STATS = 7
    COMMAND = 8
    CLOSE = 9
    INIT_ROWS = 10
    HELD_ROWS = 11
    READ_ROWS = 12
    BEGIN_ROWS = 13
    WRITE_ROWS = 14
    END_ROWS = 15
    SET_COMPRESSION = 16
    CREATE_TABLE = 17
    TABLE_OPTIMIZER = 18
    TABLE_STATS = 19
    MARK_TABLE = 20
    KEEP_STEP = 21
    KEPT_STEP = 22
    # From a server to its new standby.
    COPY_PARTS = 23
    COPY_STATE = 24
    COPY_ROWS = 25
    # To a server that relays, and from it to the owners of the parts.
    RELAY_INIT = 26
    RELAY_ENDS = 27


class Declared(NamedTuple):
    """A key as a worker's ``init`` declares it."""

    key: Key
    spec: KeySpec
    is_row_sparse: bool = False


class KeyEntry(NamedTuple):
    """The location of a key: the directory's entry."""

    key: Key
    spec: KeySpec
    first_part: int
    """The number of its first part; the others follow. Numbers are never reused."""
    chunk_bytes: int
    servers: tuple[int, ...]
    """The rank of the server of each part."""
    generation: int = 1
    """How many times the key has been initialized; ``init`` after ``delete`` adds 1."""
    is_row_sparse: bool = False

    @property
    def declared(self) -> Declared:
        """The key as ``init`` declared it."""
        return Declared(self.key, self.spec, self.is_row_sparse)

    @property
    def parts(self) -> range:
        """The numbers of its parts, in order of their elements."""
        return range(self.first_part, self.first_part + len(self.servers))

    @property
    def stripes(self) -> Stripes:
        """The split of a row-sparse key's rows among its parts."""
        return Stripes(self.spec.shape[0], len(self.servers))

    def part_bytes(self) -> list[int]:
        """Return the size of each part; for a row-sparse key the size with all rows."""
        if self.is_row_sparse:
            row_bytes = self.spec.nbytes // max(self.spec.shape[0], 1)
            return [self.stripes.rows_of(part) * row_bytes for part in range(len(self.servers))]
        return [(stop - start) * self.spec.dtype.itemsize for start, stop in self.chunks()]

    def chunks(self) -> list[tuple[int, int]]:
        """Return the element range of each part of a dense key."""
        return chunk_ranges(self.spec.num_elements, self.spec.dtype.itemsize, self.chunk_bytes)


class PartEntry(NamedTuple):
    """One part, as a request tells a server to create it."""

    part: int
    key: Key
    is_whole: bool
    """Whether the part is a whole key, as optimizers of scope "key" need."""
    num_elements: int
    dtype: np.dtype[Any]
    width: int = 1
    """Numbers in a row of the key, at least 1; a row may be cut."""

    def serves(self, scope: str) -> bool:
        """Return whether optimizers of this scope can work on it."""
        if scope == "row":
            # All parts but the last are of one size, so a multiple begins and ends with rows.
            return self.is_whole or self.num_elements % self.width == 0
        return scope == "element" or self.is_whole


class RowPartEntry(NamedTuple):
    """One part of a row-sparse key, as a server is told to create it."""

    part: int
    key: Key
    is_whole: bool
    """As in ``PartEntry``."""
    num_rows: int
    width: int
    """Numbers in a row."""
    dtype: np.dtype[Any]

    def serves(self, scope: str) -> bool:
        """Return whether optimizers of this scope can work on it."""
        return scope != "key" or self.is_whole

    @property
    def row_bytes(self) -> int:
        """The size of a row."""
        return self.width * self.dtype.itemsize


def bytes_of(piece: Piece) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a piece of a message as an array, which shares its memory."""
    return np.frombuffer(piece.frame, np.uint8)[piece.start : piece.stop]


def pack(*fields: Any) -> bytes:
    """Return the body of a request."""
    return pack_value(list(fields))


def unpack(body: bytes, *kinds: type) -> list[Any]:
    """Return the fields of a body; check their number and types.

    Raises:
        ProtocolError: another number of fields, or another type.
    """
    return _checked(unpack_value(body), "a request's body", *kinds)


def _checked(data: Any, what: str, *kinds: type | Callable[[Any], bool]) -> list[Any]:
    """Check each of a list of fields by its type or by a function."""
    if type(data) is not list or len(data) != len(kinds):
        raise unexpected(f"{what} of {len(kinds)} fields", data)
    for field, kind in zip(data, kinds, strict=True):
        if not (type(field) is kind if isinstance(kind, type) else kind(field)):
            name = _KIND_NAMES.get(kind) or kind.__name__
            raise unexpected(f"{name} as a field of {what}", field)
    return data


def _is_natural(field: Any) -> bool:
    return type(field) is int and field >= 0


def _is_key(field: Any) -> bool:
    return type(field) in (int, str)


_KIND_NAMES: dict[Any, str] = {_is_natural: "a number from 0", _is_key: "a key"}


def _table(data: Any) -> list[Any]:
    if type(data) is not list:
        raise unexpected("a list of rows in a request", data)
    return data


def pack_specs(specs: Sequence[Declared]) -> list[Any]:
    """Return keys with shapes and dtypes, as plain data."""
    return [
        [key, list(spec.shape), dtype_text(spec.dtype), is_row_sparse]
        for key, spec, is_row_sparse in specs
    ]


def unpack_specs(data: Any) -> list[Declared]:
    """Parse and check the output of ``pack_specs``."""
    known: dict[str, KeySpec] = {}
    return [_declared(_checked(row, "a key's entry", *_DECLARED), known) for row in _table(data)]


_DECLARED = (_is_key, list, str, bool)


def _declared(row: list[Any], known: dict[str, KeySpec]) -> Declared:
    """Return a key's row as a tuple; ``known`` caches specs by their text."""
    key, shape, dtype, is_row_sparse = row
    if len(shape) > _MAX_DIMENSIONS or (is_row_sparse and not shape):
        raise unexpected(f"a key's shape of at most {_MAX_DIMENSIONS} lengths", shape)
    text = f"{dtype} {shape!r}"
    spec = known.get(text)
    if spec is None:
        if not all(map(_is_natural, shape)):
            raise unexpected("a key's shape of lengths from 0", shape)
        spec = known[text] = KeySpec(tuple(shape), dtype_of(dtype))
    return Declared(key, spec, is_row_sparse)


def pack_entries(entries: Sequence[KeyEntry]) -> bytes:
    """Return directory entries as bytes."""
    return pack(
        [
            [
                *pack_specs([entry.declared])[0],
                entry.first_part,
                entry.chunk_bytes,
                list(entry.servers),
                entry.generation,
            ]
            for entry in entries
        ]
    )


def unpack_entries(body: bytes) -> list[KeyEntry]:
    """Parse and check the output of ``pack_entries``."""
    (rows,) = unpack(body, list)
    kinds = (*_DECLARED, _is_natural, _is_natural, list, _is_natural)
    known: dict[str, KeySpec] = {}
    entries = []
    for row in rows:
        *declared, first_part, chunk_bytes, servers, generation = _checked(
            row, "a key's entry", *kinds
        )
        key, spec, is_row_sparse = _declared(declared, known)
        if len(servers) > MAX_CHUNKS or not all(map(_is_natural, servers)):
            raise unexpected(f"ranks of the servers that hold key {key!r}", servers)
        entry = KeyEntry(
            key, spec, first_part, chunk_bytes, tuple(servers), generation, is_row_sparse
        )
        if chunk_bytes < 1 or not _fits(entry):
            expected = f"as many servers as key {key!r} has parts of {chunk_bytes} bytes"
            raise unexpected(expected, servers)
        entries.append(entry)
    return entries


def _fits(entry: KeyEntry) -> bool:
    """Return whether the entry has a valid number of parts."""
    spec, num_parts = entry.spec, len(entry.servers)
    if entry.is_row_sparse:
        return 1 <= num_parts <= max(spec.shape[0], 1)
    return num_chunks(spec.num_elements, spec.dtype.itemsize, entry.chunk_bytes) == num_parts


def pack_parts(parts: Sequence[PartEntry]) -> list[Any]:
    """Return parts to create, as plain data."""
    return [
        [part.part, part.key, part.is_whole, part.num_elements, dtype_text(part.dtype), part.width]
        for part in parts
    ]


def unpack_parts(data: Any) -> list[PartEntry]:
    """Parse and check the output of ``pack_parts``."""
    kinds = _is_natural, _is_key, bool, _is_natural, str, _is_natural
    parts = []
    for row in _table(data):
        part, key, is_whole, num_elements, dtype, width = _checked(row, "a part's entry", *kinds)
        if width < 1:
            raise ProtocolError(f"a row of key {key!r} must have at least one number, got {width}")
        parts.append(PartEntry(part, key, is_whole, num_elements, dtype_of(dtype), width))
    return parts


def pack_row_part(entry: RowPartEntry) -> list[Any]:
    """Return a part of a row-sparse key to create, as plain data."""
    return [*entry[:-1], dtype_text(entry.dtype)]


def unpack_row_part(data: Any) -> RowPartEntry:
    """Parse and check the output of ``pack_row_part``."""
    kinds = _is_natural, _is_key, bool, _is_natural, _is_natural, str
    part, key, is_whole, num_rows, width, dtype = _checked(data, "a part's entry", *kinds)
    return RowPartEntry(part, key, is_whole, num_rows, width, dtype_of(dtype))
