"""Collective calls as bodies of requests, and back. Pure, runs on any thread.

The layout is section 19 of ``docs/wire.md``. Everything is checked before it is used. Read next:
``communicator.py``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pslite.collective.sums import DTYPES, OPS
from pslite.errors import ProtocolError, UsageError
from pslite.protocol.collective import (
    ANY,
    READY,
    Absence,
    CallKey,
    CollectiveCall,
    GroupKey,
    LeadersStep,
)
from pslite.protocol.mailbox import ANYBODY, Address
from pslite.wire.codec import pack_value, unpack_value

COLLECTIVE_APP = 1_000_003
"""The app's number on all servers."""
CALL, GIVE_UP, JOIN, WAIT = 1, 2, 3, 4
"""The values of a request's head."""
MAILBOX_APP = 1_000_004
SEND, RECEIVE = 1, 2
"""The values of a request's head for that app."""

OF_ANY_SIZE = frozenset({"all_gather", "gather", "scatter", "all_to_all"})
"""Calls whose arrays may differ in size from rank to rank."""
KINDS = OF_ANY_SIZE | {"all_reduce", "reduce", "reduce_scatter", "broadcast", "barrier"}
MAX_NAME = 512
_MAX_SHAPES = 1 << 16
_MAX_NUMBER = 1 << 62


class ArrayLayout(NamedTuple):
    """The arrays that one rank sends in a call in which sizes may differ."""

    dtype: str
    shapes: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> list[int]:
        """The bytes of each array."""
        return [math.prod(shape) * DTYPES[self.dtype].itemsize for shape in self.shapes]

    def empty(self, index: int, dtype: np.dtype[Any] | None) -> NDArray[Any]:
        """Make an uninitialized array for one of them, of the receiver's ``dtype``."""
        return np.empty(self.shapes[index], dtype or DTYPES[self.dtype])

    def check(self, index: int, out: NDArray[Any]) -> None:
        """Check that an array to fill fits the layout.

        Raises:
            UsageError: it does not fit; the text says what was sent.
        """
        if out.shape != self.shapes[index] or out.itemsize != DTYPES[self.dtype].itemsize:
            raise UsageError(
                f"expected out of shape {self.shapes[index]} and dtype {self.dtype}, as was sent, "
                f"got {out.shape} and {out.dtype}"
            )


class CallRequest(NamedTuple):
    """One rank's message to a round of a call."""

    key: CallKey
    call: CollectiveCall
    chunk: int
    layout: ArrayLayout | None = None
    """Only in the first chunk of a call in which sizes may differ."""
    step: LeadersStep | None = None
    """Only if one rank of each machine sends."""


def pack_call(request: CallRequest, num_workers: int) -> bytes:
    """Return the body of a message of ``CALL``; its frames are the rank's values."""
    layout = [] if request.layout is None else _layout_fields(request.layout)
    key = _key(request.key, num_workers)
    step = request.step and [list(request.step.leaders), *_call_fields(request.step.call)]
    return pack_value([key, *_call_fields(request.call), request.chunk, layout, step or []])


def unpack_call(body: bytes, num_workers: int) -> CallRequest:
    """Check and decode the data of ``pack_call``.

    Raises:
        ProtocolError: the data is malformed.
    """
    key, fields, shapes, chunk, described, stepped = _list(unpack_value(body), 6)
    call_key = _checked_key(key, num_workers)
    call = _checked_call(fields, shapes)
    if call.root >= len(call_key.group.ranks):
        raise ProtocolError(f"rank {call.root} is not in a group of {len(call_key.group.ranks)}")
    layout = None if described == [] else _layout(described)
    if (layout is not None) != (call.kind in OF_ANY_SIZE and chunk == 0):
        raise ProtocolError(f"chunk {chunk} of {call.kind} came with the arrays {described!r:.60}")
    step = None if stepped == [] else _step(stepped, call_key.group)
    return CallRequest(call_key, call, _number(chunk), layout, step)


class LetterHead(NamedTuple):
    """The header of a letter, or of the letter that is requested."""

    address: Address
    layout: ArrayLayout
    """The layout of the message's array; empty in all letters except the first."""
    step: int
    """The bytes of each letter of the message; the last one has the rest."""


def pack_letter(head: LetterHead, num_workers: int) -> bytes:
    """Return the body of ``SEND`` and ``RECEIVE``, and of the answer to the latter."""
    group, *numbers = head.address
    key = _key(CallKey(group, "", 0), num_workers)
    return pack_value([key, numbers, _layout_fields(head.layout), head.step])


def unpack_letter(body: bytes, num_workers: int) -> LetterHead:
    """Check and decode the data of ``pack_letter``.

    Raises:
        ProtocolError: the data is malformed.
    """
    key, numbers, layout, step = _list(unpack_value(body), 4)
    group = _checked_key(key, num_workers).group
    source, to, tag, message, chunk = _list(numbers, 5)
    if _number(source, ANYBODY) not in (ANYBODY, *group.ranks) or to not in group.ranks:
        raise ProtocolError(f"expected ranks of {group.ranks}, got {source!r:.60} and {to!r:.60}")
    address = Address(
        group, source, to, _number(tag, -_MAX_NUMBER), _number(message), _number(chunk)
    )
    return LetterHead(address, _layout(layout), _number(step, 1))


def pack_collective(call: CollectiveCall) -> bytes:
    """Return a call without its key, for ranks that compare calls without a server."""
    return pack_value(_call_fields(call))


def unpack_collective(body: bytes) -> CollectiveCall:
    """Check and decode the data of ``pack_collective``.

    Raises:
        ProtocolError: the data is malformed.
    """
    return _checked_call(*_list(unpack_value(body), 2))


def pack_layouts(layouts: Sequence[ArrayLayout]) -> bytes:
    """Return the body of the answer to a first chunk: what each rank sends."""
    return pack_value([_layout_fields(layout) for layout in layouts])


def unpack_layouts(body: bytes, num_ranks: int) -> list[ArrayLayout]:
    """Check and decode the data of ``pack_layouts``.

    Raises:
        ProtocolError: the data is malformed.
    """
    return [_layout(fields) for fields in _list(unpack_value(body), num_ranks)]


def pack_join(group: GroupKey, absence: Absence, num_workers: int) -> bytes:
    """Return the body of ``JOIN``."""
    last = [[name, number] for name, number in absence.last.items()]
    return pack_value([_key(CallKey(group, "", 0), num_workers), absence.begin, last, absence.end])


def unpack_join(body: bytes, num_workers: int) -> tuple[GroupKey, Absence]:
    """Check and decode the data of ``pack_join``.

    Raises:
        ProtocolError: the data is malformed.
    """
    key, begin, last, end = _list(unpack_value(body), 4)
    numbers = {}
    for entry in _list(last, at_most=_MAX_SHAPES):
        name, number = _list(entry, 2)
        if type(name) is not str:
            raise ProtocolError(f"expected the name of a call, got {name!r:.60}")
        numbers[name] = _number(number)
    return _checked_key(key, num_workers).group, Absence(_number(begin), numbers, _number(end))


def pack_number(number: int) -> bytes:
    """Return the body of the answer to ``JOIN``, or to a question for ``READY``."""
    return pack_value([number])


def unpack_number(body: bytes) -> int:
    """Check and decode the data of ``pack_number``.

    Raises:
        ProtocolError: the data is malformed.
    """
    return _number(_list(unpack_value(body), 1)[0])


def pack_give_up(key: CallKey, kind: str, text: str, num_workers: int) -> bytes:
    """Return the body of ``GIVE_UP``: the call, and the error as text."""
    return pack_value([_key(key, num_workers), kind, text])


def unpack_give_up(body: bytes, num_workers: int) -> tuple[CallKey, str, str]:
    """Check and return what ``pack_give_up`` wrote.

    Raises:
        ProtocolError: the data is malformed.
    """
    key, kind, text = _list(unpack_value(body), 3)
    if type(kind) is not str or type(text) is not str:
        raise ProtocolError(f"expected an error's kind and text, got {kind!r:.60}, {text!r:.60}")
    return _checked_key(key, num_workers), kind, text


def pack_wait(key: CallKey, num_workers: int, *, counts_waits: bool) -> bytes:
    """Return the body of ``WAIT``; ``counts_waits`` is as in ``CallMatcher.missing``."""
    return pack_value([_key(key, num_workers), counts_waits])


def unpack_wait(body: bytes, num_workers: int) -> tuple[CallKey, bool]:
    """Check and decode the data of ``pack_wait``.

    Raises:
        ProtocolError: the data is malformed.
    """
    key, counts_waits = _list(unpack_value(body), 2)
    if type(counts_waits) is not bool:
        raise ProtocolError(f"expected true or false, got {counts_waits!r:.60}")
    return _checked_key(key, num_workers), counts_waits


def pack_ranks(ranks: Sequence[int]) -> bytes:
    """Return the body of the answer to ``WAIT``: the missing workers."""
    return pack_value(list(ranks))


def unpack_ranks(body: bytes, num_workers: int) -> list[int]:
    """Check and decode the data of ``pack_ranks``.

    Raises:
        ProtocolError: the data is malformed.
    """
    return [_number(rank) for rank in _list(unpack_value(body), at_most=num_workers)]


def _layout_fields(layout: ArrayLayout) -> list[Any]:
    return [layout.dtype, _shape_lists(layout.shapes)]


def _layout(fields: Any) -> ArrayLayout:
    dtype, shapes = _list(fields, 2)
    checked = _shapes(shapes)
    if dtype not in {"", *DTYPES} or (checked and not dtype) or any(ANY in x for x in checked):
        raise ProtocolError(f"expected a dtype and shapes, got {fields!r:.60}")
    return ArrayLayout(dtype, checked)


def _shape_lists(shapes: Sequence[tuple[int, ...]]) -> list[list[int]]:
    return [list(shape) for shape in shapes]


def _shapes(lists: Any) -> tuple[tuple[int, ...], ...]:
    shapes = _list(lists, at_most=_MAX_SHAPES)
    return tuple(
        tuple(_number(length, ANY) for length in _list(shape, at_most=64)) for shape in shapes
    )


def server_of(key: CallKey, chunk: int, num_workers: int, num_servers: int) -> int:
    """Return the rank of the server to which all ranks send this chunk."""
    label = pack_value(_key(key, num_workers)[:-1])
    return (zlib.crc32(label) + key.number + chunk) % num_servers


def _call_fields(call: CollectiveCall) -> list[Any]:
    return [list(call._replace(shapes=())), _shape_lists(call.shapes)]


def _checked_call(fields: Any, shapes: Any, kinds: frozenset[str] = KINDS) -> CollectiveCall:
    kind, op, dtype, _, root, factor = _list(fields, len(CollectiveCall._fields))
    if kind not in kinds or op not in {"", *OPS} or dtype not in {"", *DTYPES}:
        raise ProtocolError(f"unknown call: {kind!r}, op {op!r}, dtype {dtype!r}")
    if factor is not None and not (type(factor) is float and math.isfinite(factor)):
        raise ProtocolError(f"a factor must be a finite number, got {factor!r:.60}")
    return CollectiveCall(kind, op, dtype, _shapes(shapes), _number(root, -1), factor)


def _step(fields: Any, group: GroupKey) -> LeadersStep:
    ranks, of_call, shapes = _list(fields, 3)
    leaders = tuple(_number(rank) for rank in _list(ranks, at_most=len(group.ranks)))
    call = _checked_call(of_call, shapes, KINDS | {READY.kind})
    if len({*leaders} & {*group.ranks}) < len(leaders) or call.root >= len(leaders):
        raise ProtocolError(f"expected different ranks of {group.ranks}, got {fields!r:.60}")
    return LeadersStep(leaders, call)


def _key(key: CallKey, num_workers: int) -> list[Any]:
    """Return the fields of a key; leave out the ranks if all workers are in order."""
    name, ranks, number = key.group
    listed = [] if ranks == tuple(range(num_workers)) else list(ranks)
    return [name, listed, number, key.name, key.number]


def _checked_key(fields: Any, num_workers: int) -> CallKey:
    name, listed, group_number, call_name, number = _list(fields, 5)
    for text in (name, call_name):
        if type(text) is not str or len(text) > MAX_NAME:
            raise ProtocolError(f"expected a name of at most {MAX_NAME} letters, got {text!r:.60}")
    ranks = tuple(_number(rank) for rank in _list(listed, at_most=num_workers))
    if len(set(ranks)) < len(ranks) or max(ranks, default=0) >= num_workers:
        raise ProtocolError(f"expected different ranks below {num_workers}, got {listed!r:.60}")
    group = GroupKey(name, ranks or tuple(range(num_workers)), _number(group_number))
    return CallKey(group, call_name, _number(number))


def _list(value: Any, length: int | None = None, *, at_most: int = 0) -> list[Any]:
    if type(value) is not list:
        raise ProtocolError(f"expected a list, got {value!r:.60}")
    if len(value) != length if length is not None else len(value) > at_most:
        raise ProtocolError(f"expected {length or at_most} elements, got {value!r:.60}")
    return value


def _number(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _MAX_NUMBER:
        raise ProtocolError(f"expected a number of at least {least}, got {value!r:.60}")
    return value
