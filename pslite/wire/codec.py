"""Encode and decode messages as frames; the only user of msgpack. Pure.

A transmission is a header frame and any number of payload frames. The header is one msgpack
array: the envelope's ten fields, then the message's fields in the order of its dataclass.
All data is checked before it is used: the version, the number of fields, each field's type, equal
lengths of parallel lists, and the range of numbers. A failed check raises ``ProtocolError`` and
never crashes. ``docs/wire.md`` describes the layout.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgpack

from pslite.errors import ProtocolError, UsageError
from pslite.ids import NodeInfo
from pslite.wire.base import Ints, Message, Nodes, Texts
from pslite.wire.messages import ALL_MESSAGES

VERSION = 9
MAX_HEADER_BYTES = 16 << 20
MAX_FRAMES = 65_536
MAX_INTEGERS = 1 << 18
"""The most elements in one list of integers."""
MAX_LISTED = 65_536
"""The most elements in one list of texts or nodes."""
MAX_NAME_BYTES = 512
"""The most characters of each text in a node's entry."""
MAX_JOB_BYTES = 4096
_MAX_NUMBER = (1 << 63) - 1
_ENVELOPE_TYPES = (int, int, str, int, int, int, int, int, bytes, bytes)
_ENVELOPE_FIELDS = len(_ENVELOPE_TYPES)
_ALSO, _SHARED = 8, 9

Buffer = bytes | bytearray | memoryview


@dataclass(slots=True)
class Envelope:
    """The envelope of every message."""

    job: str
    epoch: int
    sender: int
    """Incarnation of the sending process."""
    receiver: int
    """Incarnation of the receiver; 0 if it is not known yet."""
    sequence: int
    """Number in the channel between the two; 0 for messages that are not resent."""
    accepted: int
    """Acknowledges all sequence numbers of the other direction up to this one ..."""
    accepted_also: Ints
    """... and these."""
    shared: Ints
    """Descriptors (four numbers each) of payload frames in shared memory of the sender."""
    message: Message


def _unpack_texts(field: list[Any]) -> Texts:
    if not all(type(text) is str for text in field):
        raise ProtocolError(f"expected a list of texts, got {field!r:.60}")
    if len(field) > MAX_LISTED:
        raise ProtocolError(f"expected at most {MAX_LISTED} texts, got {len(field)}")
    return tuple(field)


_NODE_TYPES = tuple(typing.get_type_hints(NodeInfo)[name] for name in NodeInfo._fields)


def _unpack_nodes(field: list[Any]) -> Nodes:
    if len(field) > MAX_LISTED:
        raise ProtocolError(f"expected a list of at most {MAX_LISTED} nodes, got {field!r:.60}")
    return tuple(_unpack_node(entry) for entry in field)


def _unpack_node(entry: Any) -> NodeInfo:
    if type(entry) is not list or len(entry) != len(NodeInfo._fields):
        count = len(NodeInfo._fields)
        raise ProtocolError(f"expected a node as a list of {count} fields, got {entry!r:.60}")
    for value, wanted in zip(entry, _NODE_TYPES, strict=True):
        if type(value) is not wanted:
            raise ProtocolError(f"a node's field: expected {wanted.__name__}, got {value!r:.60}")
        if wanted is str and not (len(value) <= MAX_NAME_BYTES and value.isprintable()):
            raise ProtocolError(f"a node's text is too long or not printable: {value!r:.60}")
    node = NodeInfo(*entry)
    if node.role not in ("scheduler", "server", "worker"):
        raise ProtocolError(f"unknown role {node.role!r}")
    if node.rank < -1 or node.incarnation < 0 or node.pid < 0:
        raise ProtocolError(
            f"a node's number is out of range: rank {node.rank}, incarnation "
            f"{node.incarnation}, pid {node.pid}"
        )
    return node


#: Annotation of a field, as the dataclasses have it -> its type in msgpack.
_TYPES: dict[str, type] = {
    **{kind.__name__: kind for kind in (bool, int, float, str, bytes)},
    "Natural": int,
    "Naturals": bytes,
    "Texts": list,
    "Nodes": list,
}
_UNPACKERS: dict[str, Callable[[list[Any]], Any]] = {"Texts": _unpack_texts, "Nodes": _unpack_nodes}


class _Layout:
    """How the header of one message type is packed; built once from its annotations.

    Its indices count all fields of the header, those of the envelope too.
    """

    def __init__(self, number: int, kind: type[Message]) -> None:
        self.number = number
        self.kind = kind
        fields = dataclasses.fields(kind)
        #: The names of the message's fields.
        self.names = [field.name for field in fields]
        # Texts, since the module imports ``annotations`` from ``__future__``.
        kinds = dict(enumerate((cast("str", each.type) for each in fields), _ENVELOPE_FIELDS))
        self.types = [*_ENVELOPE_TYPES, *(_TYPES[each] for each in kinds.values())]
        #: Numbers and times that must be finite and not negative. This is also checked before
        #: sending: otherwise a message that receivers reject would be resent for ever.
        self.bounded = [at for at, each in kinds.items() if each in ("float", "Natural")]
        #: Lists of integers, and whether they must not be negative.
        self.integers = [(_ALSO, False), (_SHARED, False)]
        self.integers += [(at, True) for at, each in kinds.items() if each == "Naturals"]
        self.unpackers = [
            (at, _UNPACKERS[each]) for at, each in kinds.items() if _TYPES[each] is list
        ]
        self.parallel = [self.names.index(name) + _ENVELOPE_FIELDS for name in kind.PARALLEL]


_BY_NUMBER = {number: _Layout(number, kind) for number, kind in ALL_MESSAGES.items()}
_BY_KIND = {layout.kind: layout for layout in _BY_NUMBER.values()}


def encode(envelope: Envelope) -> bytes:
    """Return the header frame of an envelope."""
    message = envelope.message
    layout = _BY_KIND[type(message)]
    header: list[Any] = [
        VERSION,
        layout.number,
        envelope.job,
        envelope.epoch,
        envelope.sender,
        envelope.receiver,
        envelope.sequence,
        envelope.accepted,
        envelope.accepted_also,
        envelope.shared,
        *[getattr(message, name) for name in layout.names],
    ]
    for at in layout.bounded:
        if not 0 <= header[at] < math.inf:
            name = f"{layout.kind.__name__}.{layout.names[at - _ENVELOPE_FIELDS]}"
            raise UsageError(f"{name} must be a finite number from 0, got {header[at]}")
    for at, _ in layout.integers:
        values = header[at]
        header[at] = struct.pack(f"<{len(values)}q", *values) if values else b""
    packed: bytes = msgpack.packb(header)
    if len(packed) > MAX_HEADER_BYTES:
        raise UsageError(
            f"a header must have at most {MAX_HEADER_BYTES} bytes, got {len(packed)}; send large "
            "data as frames"
        )
    return packed


def decode(frames: Sequence[Buffer]) -> Envelope:
    """Return the envelope in a transmission's header frame (``frames[0]``).

    Raises:
        ProtocolError: the header breaks a rule of ``docs/wire.md``.
    """
    if not frames or len(frames) > MAX_FRAMES:
        raise ProtocolError(f"expected 1 to {MAX_FRAMES} frames, got {len(frames)}")
    header = unpack_value(frames[0])
    if type(header) is not list or len(header) < _ENVELOPE_FIELDS:
        raise ProtocolError(
            f"expected a header of at least {_ENVELOPE_FIELDS} fields, got {header!r:.60}"
        )
    if type(header[0]) is not int or header[0] != VERSION:
        raise ProtocolError(
            f"expected protocol version {VERSION}, got {header[0]!r:.60}; install the same version "
            "on all machines"
        )
    layout = _BY_NUMBER.get(header[1]) if type(header[1]) is int else None
    if layout is None:
        raise ProtocolError(f"unknown message type {header[1]!r:.60}")
    if list(map(type, header)) != layout.types:
        raise _misfit(header, layout)
    if len(header[2]) > MAX_JOB_BYTES:
        raise ProtocolError(
            f"expected a job id of at most {MAX_JOB_BYTES} characters, got {len(header[2])}"
        )
    for number in header[3:_ALSO]:
        if not 0 <= number <= _MAX_NUMBER:
            raise ProtocolError(
                f"expected a number from 0 to {_MAX_NUMBER} in the envelope, got {number!r:.60}"
            )
    for at in layout.bounded:
        if not 0 <= header[at] < math.inf:
            what = "a time in seconds" if layout.types[at] is float else "an int of at least 0"
            raise ProtocolError(f"expected {what}, got {header[at]!r:.60}")
    for at, is_natural in layout.integers:
        field = header[at]
        if len(field) % 8:
            raise ProtocolError(f"expected packed 64-bit integers, got {field!r:.60}")
        if len(field) > 8 * MAX_INTEGERS:
            raise ProtocolError(f"expected at most {MAX_INTEGERS} integers, got {len(field) // 8}")
        values = header[at] = struct.unpack(f"<{len(field) // 8}q", field)
        if is_natural and values and min(values) < 0:
            raise ProtocolError(f"expected numbers of at least 0, got {values!r:.60}")
    for at, unpack in layout.unpackers:
        header[at] = unpack(header[at])
    if layout.parallel and len({len(header[at]) for at in layout.parallel}) > 1:
        raise ProtocolError(f"the lists of {layout.kind.__name__} have different lengths")
    header[_ENVELOPE_FIELDS:] = [layout.kind(*header[_ENVELOPE_FIELDS:])]
    return Envelope(*header[2:])


def _misfit(header: list[Any], layout: _Layout) -> ProtocolError:
    """Return the error for a header whose fields do not fit its message."""
    kind, count = layout.kind.__name__, len(layout.types)
    if len(header) != count:
        return ProtocolError(f"a header with {kind} needs {count} fields, got {len(header)}")
    at = next(at for at, wanted in enumerate(layout.types) if type(header[at]) is not wanted)
    return ProtocolError(
        f"expected {layout.types[at].__name__} as field {at} of a header with {kind}, got "
        f"{header[at]!r:.60}"
    )


def pack_value(value: Any) -> bytes:
    """Return plain data (None, bool, numbers, str, bytes, lists, dicts) as bytes."""
    packed: bytes = msgpack.packb(value)
    return packed


def unpack_value(data: Buffer) -> Any:
    """Return the plain data in ``data``; never runs code or makes other objects.

    Raises:
        ProtocolError: the data is malformed, too long, or nested too deeply.
    """
    if len(data) > MAX_HEADER_BYTES:
        raise ProtocolError(
            f"plain data must have at most {MAX_HEADER_BYTES} bytes, got {len(data)}"
        )
    # msgpack reserves memory for as many elements as an array claims to have, at every level. The
    # walk over the data checks first that all elements exist, which limits the memory.
    walker = msgpack.Unpacker(read_size=len(data) or 1, max_buffer_size=MAX_HEADER_BYTES)
    walker.feed(data)
    try:
        walker.skip()
        return msgpack.unpackb(
            data, strict_map_key=False, max_ext_len=0, ext_hook=_refuse_extension
        )
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(
            f"expected plain data as msgpack, got {bytes(data[:20])!r}... "
            f"({type(error).__name__}: {error})"
        ) from None


def _refuse_extension(code: int, data: bytes) -> None:
    raise ProtocolError(f"plain data contains a msgpack extension of type {code}")
