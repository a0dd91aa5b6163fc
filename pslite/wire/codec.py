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
import sys
import typing
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgpack

from pslite.errors import ProtocolError, UsageError
from pslite.ids import NodeInfo
from pslite.wire.base import Ints, Message, Nodes, Texts
from pslite.wire.messages import ALL_MESSAGES

VERSION = 8
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
_ENVELOPE_FIELDS = 10

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


def _pack_ints(values: Sequence[int]) -> bytes:
    words = array("q", values)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _unpack_ints(field: Any, *, is_natural: bool = False) -> Ints:
    if type(field) is not bytes or len(field) % 8:
        raise ProtocolError(f"expected packed 64-bit integers, got {field!r:.60}")
    if len(field) > 8 * MAX_INTEGERS:
        raise ProtocolError(f"expected at most {MAX_INTEGERS} integers, got {len(field) // 8}")
    values: Ints = struct.unpack(f"<{len(field) // 8}q", field)
    if is_natural and values and min(values) < 0:
        raise ProtocolError(f"expected numbers of at least 0, got {values!r:.60}")
    return values


def _unpack_texts(field: Any) -> Texts:
    if type(field) is not list or not all(type(text) is str for text in field):
        raise ProtocolError(f"expected a list of texts, got {field!r:.60}")
    if len(field) > MAX_LISTED:
        raise ProtocolError(f"expected at most {MAX_LISTED} texts, got {len(field)}")
    return tuple(field)


_NODE_TYPES = tuple(typing.get_type_hints(NodeInfo)[name] for name in NodeInfo._fields)


def _unpack_nodes(field: Any) -> Nodes:
    if type(field) is not list or len(field) > MAX_LISTED:
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


def _exactly(wanted: type, field: Any) -> Any:
    if type(field) is not wanted:
        raise ProtocolError(f"expected {wanted.__name__}, got {type(field).__name__}")
    return field


def _unpack_natural(field: Any) -> int:
    if type(field) is not int or field < 0:
        raise ProtocolError(f"expected an int of at least 0, got {field!r:.60}")
    return field


def _unpack_time(field: Any) -> float:
    if type(field) is not float or not 0.0 <= field < math.inf:
        raise ProtocolError(f"expected a time in seconds, got {field!r:.60}")
    return field


#: Annotation of a field, as ``messages.py`` has it -> the function that unpacks it.
_UNPACKERS: dict[str, Callable[[Any], Any]] = {
    "Ints": _unpack_ints,
    "Naturals": partial(_unpack_ints, is_natural=True),
    "Natural": _unpack_natural,
    "Texts": _unpack_texts,
    "Nodes": _unpack_nodes,
    "float": _unpack_time,
    **{kind.__name__: partial(_exactly, kind) for kind in (bool, int, str, bytes)},
}
#: Annotation of a field -> the function that packs it, if msgpack cannot.
_PACKERS: dict[str, Callable[[Any], Any]] = {
    "Ints": _pack_ints,
    "Naturals": _pack_ints,
    "Texts": list,
    "Nodes": list,
}


class _MessageLayout:
    """How one message type is packed; built once from its annotations."""

    def __init__(self, number: int, kind: type[Message]) -> None:
        fields = dataclasses.fields(kind)
        self._names = [field.name for field in fields]
        # Texts, since the module imports ``annotations`` from ``__future__``.
        kinds = [cast("str", field.type) for field in fields]
        self.number = number
        self.kind = kind
        self._unpackers = [_UNPACKERS[each] for each in kinds]
        self._packers = [(at, _PACKERS[each]) for at, each in enumerate(kinds) if each in _PACKERS]
        #: Numbers and times that are also checked before sending: otherwise a message that
        #: receivers reject would be resent for ever.
        self._bounded = [at for at, each in enumerate(kinds) if each in ("float", "Natural")]
        self._parallel = [self._names.index(name) for name in kind.PARALLEL]

    def fields(self, message: Message) -> list[Any]:
        values = [getattr(message, name) for name in self._names]
        for index in self._bounded:
            if not 0 <= values[index] < math.inf:
                name = f"{self.kind.__name__}.{self._names[index]}"
                raise UsageError(f"{name} must be a finite number from 0, got {values[index]}")
        for index, pack in self._packers:
            values[index] = pack(values[index])
        return values

    def build(self, fields: Sequence[Any]) -> Message:
        count = len(self._names)
        if len(fields) != count:
            raise ProtocolError(f"{self.kind.__name__} needs {count} fields, got {len(fields)}")
        values = [unpack(field) for unpack, field in zip(self._unpackers, fields, strict=True)]
        if self._parallel and len({len(values[index]) for index in self._parallel}) > 1:
            raise ProtocolError(f"the lists of {self.kind.__name__} have different lengths")
        return self.kind(*values)


_BY_NUMBER = {number: _MessageLayout(number, kind) for number, kind in ALL_MESSAGES.items()}
_BY_KIND = {layout.kind: layout for layout in _BY_NUMBER.values()}


def encode(envelope: Envelope) -> bytes:
    """Return the header frame of an envelope."""
    layout = _BY_KIND[type(envelope.message)]
    also = envelope.accepted_also
    header: list[Any] = [
        VERSION,
        layout.number,
        envelope.job,
        envelope.epoch,
        envelope.sender,
        envelope.receiver,
        envelope.sequence,
        envelope.accepted,
        _pack_ints(also) if also else b"",
        _pack_ints(envelope.shared) if envelope.shared else b"",
    ]
    header.extend(layout.fields(envelope.message))
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
    _, _, job, epoch, sender, receiver, sequence, accepted, also, shared = header[:_ENVELOPE_FIELDS]
    if type(job) is not str:
        raise ProtocolError(f"expected a job id, got {job!r:.60}")
    if len(job) > MAX_JOB_BYTES:
        raise ProtocolError(
            f"expected a job id of at most {MAX_JOB_BYTES} characters, got {len(job)}"
        )
    if type(also) is not bytes or type(shared) is not bytes:
        found = f"{type(also).__name__} and {type(shared).__name__}"
        raise ProtocolError(f"expected two packed lists in the envelope, got {found}")
    for number in (epoch, sender, receiver, sequence, accepted):
        if type(number) is not int or not 0 <= number <= _MAX_NUMBER:
            raise ProtocolError(
                f"expected a number from 0 to {_MAX_NUMBER} in the envelope, got {number!r:.60}"
            )
    message = layout.build(header[_ENVELOPE_FIELDS:])
    return Envelope(
        job,
        epoch,
        sender,
        receiver,
        sequence,
        accepted,
        _unpack_ints(also) if also else (),
        _unpack_ints(shared) if shared else (),
        message,
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
