"""Encode and decode plain objects for ``broadcast_object``. Pure.

An object is None, a bool, number, text, bytes or array, or a list, tuple, set or dict of these.
It becomes a tree in MessagePack, in which a list is ``["l", ...]``, a tuple ``["t", ...]``, a set
``["s", ...]``, a dict ``["d", key, value, ...]``, an int of more than 64 bits ``["i", hex]`` and an
array ``["a", dtype, shape]``; the arrays' memory follows, in the same order. Reading makes nothing
but these types: no class is looked up and no code runs
(docs/decisions/0036-objects-without-pickle.md).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvstore.arrays import adapter_for
from kvstore.arrays.dtypes import check_dtype, checked_shape, dtype_of, dtype_text
from kvstore.errors import ArgumentTypeError, ArgumentValueError
from pslite.errors import ProtocolError
from pslite.wire.codec import pack_value, unpack_value

Flat = np.ndarray[Any, Any]

_PLAIN = (type(None), bool, int, float, str, bytes)
_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s"}
_MOST_TREE_BYTES = 16 << 20
_MOST_INT_BITS = 63  # of an int that MessagePack can encode with any sign
_HEX = re.compile(r"-?0x[0-9a-f]+")


def pack_object(value: object) -> tuple[bytes, list[Flat]]:
    """Return the tree of an object and its arrays; these may share its memory.

    Raises:
        ArgumentTypeError: it contains something that is not plain; the text names it.
        ArgumentValueError: it is too large, or too deep.
    """
    arrays: list[Flat] = []
    try:
        tree = pack_value(_branch(value, arrays))
    except (ValueError, OverflowError, RecursionError) as error:
        if isinstance(error, ArgumentTypeError | ArgumentValueError):
            raise
        raise ArgumentValueError(
            f"the object cannot be encoded: {error or type(error).__name__}; lists and dicts may "
            "be nested less than 200 deep"
        ) from None
    if len(tree) > _MOST_TREE_BYTES:
        raise ArgumentValueError(
            f"the object has {len(tree)} bytes without its arrays; the limit is "
            f"{_MOST_TREE_BYTES}: put large data into arrays"
        )
    return tree, arrays


def unpack_object(tree: bytes, memory: Flat) -> Any:
    """Return the object; its arrays are views of ``memory``, flat bytes.

    Raises:
        ProtocolError: the bytes are not from ``pack_object``.
    """
    reader = _TreeReader(memory)
    try:
        value = reader.value(unpack_value(tree))
    except RecursionError:
        raise ProtocolError("an object is nested too deeply") from None
    if reader.at != len(memory):
        raise ProtocolError(f"an object's arrays have {reader.at} bytes, got {len(memory)}")
    return value


def _branch(value: object, arrays: list[Flat]) -> Any:
    if type(value) is int and value.bit_length() > _MOST_INT_BITS:
        return ["i", hex(value)]
    if type(value) in _PLAIN:
        return value
    if type(value) in _SEQUENCES:
        items = [_branch(item, arrays) for item in value]  # type: ignore[attr-defined]
        return [_SEQUENCES[type(value)], *items]
    if isinstance(value, dict):
        return ["d", *(_branch(item, arrays) for pair in value.items() for item in pair)]
    if isinstance(value, np.generic):
        return _branch(value.item(), arrays)
    try:
        adapter = adapter_for(value)
        check_dtype(adapter.dtype(value))
    except ArgumentTypeError:
        raise ArgumentTypeError(
            "an object may hold None, bools, numbers, texts, bytes, arrays, and lists, tuples, "
            f"sets and dicts of them, got {type(value).__name__}"
        ) from None
    host = adapter.to_host(value)
    arrays.append(host.reshape(-1).view(np.uint8))
    return ["a", dtype_text(host.dtype), list(host.shape)]


class _TreeReader:
    """Builds values from a tree; takes arrays from the memory in order."""

    def __init__(self, memory: Flat) -> None:
        self._memory = memory
        self.at = 0

    def value(self, branch: Any) -> Any:
        if type(branch) is not list:
            if type(branch) not in _PLAIN:
                raise ProtocolError(f"expected a plain value, got {branch!r:.60}")
            return branch
        kind, *items = branch or [None]
        if kind == "l":
            return list(map(self.value, items))
        if kind == "t":
            return tuple(map(self.value, items))
        if kind == "s":
            return set(map(self._key, items))
        if kind == "d" and len(items) % 2 == 0:
            return dict(self._pairs(items))
        if kind == "a" and len(items) == 2:
            return self._array(*items)
        if kind == "i" and len(items) == 1 and _HEX.fullmatch(str(items[0])):
            return int(items[0], 16)
        raise ProtocolError(f"expected a list, tuple, set, dict, int or array, got {branch!r:.60}")

    def _pairs(self, items: list[Any]) -> Iterator[tuple[Any, Any]]:
        for key, value in zip(items[::2], items[1::2], strict=True):
            yield self._key(key), self.value(value)

    def _key(self, branch: Any) -> Any:
        found = self.value(branch)
        if type(found) not in (*_PLAIN, tuple):
            raise ProtocolError(f"expected a key that is plain or a tuple, got {found!r:.60}")
        return found

    def _array(self, text: Any, lengths: Any) -> Flat:
        dtype = dtype_of(text)
        if type(lengths) is not list or any(type(n) is not int or n < 0 for n in lengths):
            raise ProtocolError(f"expected a shape, got {lengths!r:.60}")
        shape = checked_shape(lengths)
        begin, self.at = self.at, self.at + math.prod(shape) * dtype.itemsize
        if self.at > len(self._memory):
            raise ProtocolError(f"an array of {text} {shape} exceeds the memory of its object")
        # A copy: items must be aligned, and a view would keep the memory of all arrays.
        copy: Flat = self._memory[begin : self.at].copy()
        return copy.view(dtype).reshape(shape)
