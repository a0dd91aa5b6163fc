"""Build the header of an encoded part: how to read its payload, in 12 to 52 bytes.

Little-endian, without gaps::

    u8   1: the version of this layout
    u8   the key's dtype: 0 float32, 1 float64, 2 float16, 12 bfloat16 (MXNet's numbers)
    u8   the code of topk (16) or randomk (17); 0 for neither
    u8   the code of the codec of the numbers: 0 exact, 1 2bit, 2 1bit, 3 fp16, 4 bf16, 5 int8
    u64  how many elements the part has
    topk, randomk:  u64  how many of them were sent
    randomk:        u64  the seed, u64 the stream, u64 the round
    2bit, 1bit:     f64  the threshold
    int8:           u32  how many numbers share a scale

``value_codecs.py`` and ``sparsify.py`` describe the payloads. A payload's length follows from its
header.
Pure; any thread may call. Read next: ``chain.py``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvstore.arrays.dtypes import is_bfloat16
from kvstore.compression.codec import ValueCodec
from kvstore.compression.sparsify import Draw, Pick
from kvstore.errors import ArgumentTypeError

VERSION = 1

_DTYPES: Mapping[np.dtype[Any], int] = {np.dtype("f4"): 0, np.dtype("f8"): 1, np.dtype("f2"): 2}
_BFLOAT16 = 12
_DRAW_AT = 28


def header(
    pick: Pick | None,
    codec: ValueCodec,
    num_elements: int,
    dtype: np.dtype[Any],
    draw: Draw,
) -> bytes:
    """Return the header of a part of a key of this dtype.

    Raises what ``dtype_code`` raises.
    """
    codes = (dtype_code(dtype), 0 if pick is None else pick.code, codec.code)
    made = struct.pack("<BBBBQ", VERSION, *codes, num_elements)
    if pick is not None:
        made += struct.pack("<Q" + pick.format, pick.count(num_elements), *pick.numbers())
        if pick.draws:
            made += struct.pack("<QQ", *draw)
    return made + struct.pack("<" + codec.format, *codec.numbers())


def draw_in(data: bytes) -> Draw:
    """Return the draw of ``randomk``, from a header of the right length."""
    return Draw(*struct.unpack_from("<QQ", data, _DRAW_AT))


def dtype_code(dtype: np.dtype[Any]) -> int:
    """Return the number of a key's dtype. Raises ``ArgumentTypeError``."""
    if can_encode(dtype):
        return _DTYPES.get(dtype, _BFLOAT16)
    raise ArgumentTypeError(
        f"values of dtype {dtype} cannot be compressed; use float16, bfloat16, float32 or "
        "float64, or exclude the key"
    )


def can_encode(dtype: np.dtype[Any]) -> bool:
    """Return whether keys of this dtype can be compressed."""
    return dtype in _DTYPES or is_bfloat16(dtype)
