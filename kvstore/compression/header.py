"""The header of an encoded part: how to read its payload, in 12 to 52 bytes.

Little-endian, without gaps::

    u8   1: the version of this layout
    u8   the key's dtype: 0 float32, 1 float64, 2 float16, 12 bfloat16 (MXNet's numbers)
    u8   the code of topk (16) or randomk (17); 0 for neither
    u8   the code of what stores the numbers: 0 exact, 1 2bit, 2 1bit, 3 fp16, 4 bf16, 5 int8
    u64  how many elements the part has
    topk, randomk:  u64  how many of them were sent
    randomk:        u64  the seed, u64 the stream, u64 the round
    2bit, 1bit:     f64  the threshold
    int8:           u32  how many numbers share a scale

The layout of payloads stands in ``bits.py``, ``casts.py``, ``int8.py`` and ``sparsify.py``. Their
length follows from the header. Pure; any thread may call. Read next: ``chain.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.dtypes import bfloat16, is_bfloat16
from kvstore.compression.bits import OneBit, TwoBit
from kvstore.compression.casts import Bf16, Exact, Fp16
from kvstore.compression.codec import ValueCodec
from kvstore.compression.int8 import Int8
from kvstore.compression.sparsify import Draw, Pick, RandomK, TopK
from kvstore.errors import ArgumentTypeError
from pslite.errors import ProtocolError

VERSION = 1

_ALL_CODECS: tuple[type[ValueCodec], ...] = (Exact, TwoBit, OneBit, Fp16, Bf16, Int8)
_PICKS: tuple[type[Pick], ...] = (TopK, RandomK)

VALUE_CODECS: Mapping[str, type[ValueCodec]] = {codec.name: codec for codec in _ALL_CODECS[1:]}
"""By the names that users may choose."""

PICKS: Mapping[str, type[Pick]] = {pick.name: pick for pick in _PICKS}

_BY_CODE: Mapping[int, type[ValueCodec]] = {codec.code: codec for codec in _ALL_CODECS}
_PICKS_BY_CODE: Mapping[int, type[Pick]] = {pick.code: pick for pick in _PICKS}

_DTYPES: Mapping[np.dtype[Any], int] = {np.dtype("f4"): 0, np.dtype("f8"): 1, np.dtype("f2"): 2}
_BFLOAT16 = 12
_FIRST = struct.Struct("<BBBBQ")
_NO_PICK = 0
_DRAWS = {pick.code for pick in _PICKS if pick.draws}


class Header(NamedTuple):
    """What a header says."""

    dtype: np.dtype[Any]
    """The key's."""
    pick: int
    """Code; 0 for none."""
    codec: int
    """Code."""
    num_elements: int
    num_sent: int
    """How many numbers the payload has."""
    numbers: tuple[float, ...]
    """Of the pick, then of the codec."""
    draw: Draw
    """Zeros where nothing is drawn."""

    def packed(self) -> bytes:
        """The bytes of it."""
        first = _FIRST.pack(
            VERSION, dtype_code(self.dtype), self.pick, self.codec, self.num_elements
        )
        fields: list[float] = [] if self.pick == _NO_PICK else [self.num_sent]
        draw = self.draw if self.pick in _DRAWS else ()
        own = _num_numbers(self.pick)
        fields += [*self.numbers[:own], *draw, *self.numbers[own:]]
        return first + struct.pack(_format(self.pick, self.codec), *fields)

    @classmethod
    def unpacked(cls, data: bytes) -> Header:
        """What ``packed`` wrote.

        Raises:
            ProtocolError: it did not write this.
            MissingDependencyError: the key is of bfloat16, and ``ml_dtypes`` is not installed.
        """
        if len(data) < _FIRST.size or data[0] != VERSION:
            raise ProtocolError("this version cannot read the header of an encoded part")
        _, dtype, pick, codec, num_elements = _FIRST.unpack_from(data)
        if (pick != _NO_PICK and pick not in _PICKS_BY_CODE) or codec not in _BY_CODE:
            raise ProtocolError(f"an encoded part names the unknown codecs {pick} and {codec}")
        fields = _format(pick, codec)
        if len(data) != _FIRST.size + struct.calcsize(fields):
            raise ProtocolError(f"an encoded part has a header of {len(data)} bytes")
        rest: list[Any] = list(struct.unpack_from(fields, data, _FIRST.size))
        num_sent = num_elements if pick == _NO_PICK else rest.pop(0)
        if num_sent > num_elements:
            raise ProtocolError("an encoded part has more numbers than elements")
        own, draw = _num_numbers(pick), Draw()
        numbers, rest = rest[:own], rest[own:]
        if pick in _DRAWS:
            draw, rest = Draw(*rest[: len(draw)]), rest[len(draw) :]
        found = (*numbers, *rest)
        return cls(_dtype_of(dtype), pick, codec, num_elements, num_sent, found, draw)


def dtype_code(dtype: np.dtype[Any]) -> int:
    """The number of a key's dtype. Raises ``ArgumentTypeError`` for what cannot be encoded."""
    found = _DTYPES.get(dtype)
    if found is not None:
        return found
    if is_bfloat16(dtype):
        return _BFLOAT16
    raise ArgumentTypeError(
        f"values of dtype {dtype} cannot be compressed; float16, bfloat16, float32 and float64 can"
    )


def can_encode(dtype: np.dtype[Any]) -> bool:
    """Whether keys of this dtype can be compressed."""
    return dtype in _DTYPES or is_bfloat16(dtype)


def _dtype_of(code: int) -> np.dtype[Any]:
    if code == _BFLOAT16:
        return bfloat16()
    for dtype, number in _DTYPES.items():
        if number == code:
            return dtype
    raise ProtocolError(f"an encoded part has the unknown dtype code {code}")


def _num_numbers(pick: int) -> int:
    return 0 if pick == _NO_PICK else len(_PICKS_BY_CODE[pick].format)


def _format(pick: int, codec: int) -> str:
    chosen = ""
    if pick != _NO_PICK:
        chosen = "Q" + _PICKS_BY_CODE[pick].format + ("QQ" if pick in _DRAWS else "")
    return "<" + chosen + _BY_CODE[codec].format
