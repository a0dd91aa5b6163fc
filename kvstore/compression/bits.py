"""The codecs ``2bit`` and ``1bit``: MXNet's rules and its layout of bytes.

Sources: ``src/kvstore/gradient_compression-inl.h`` and ``gradient_compression.cc`` of Apache
MXNet 1.9.1 (2bit) and of its master branch (1bit); the idea of 1bit is Seide et al. 2014.

**2bit**, threshold t > 0, for each p = gradient + residual: p >= t is sent as +t (code 11),
p <= -t as -t (code 10), all else as 0 (code 00; 01 is read as 0). Four codes in a byte.

**1bit**, any threshold t: p > t is sent as +1.0 (code 1), all else as -1.0 (code 0); the
threshold decides the sign only. Eight codes in a byte.

In both the first element has the most significant bits of a byte, bits that are left over are 0,
and a payload has whole words of 4 bytes: 4 * ceil(n / 16) and 4 * ceil(n / 32).

Pure; any thread may call. Read next: ``codec.py`` for what calls this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.arrays.cpu.sums import Flat, Workspace
from kvstore.compression.codec import CodecParameter, Payload, Span, ValueCodec, finite, positive

_WORD = 4
_BYTE = np.dtype(np.uint8)
_BOOL = np.dtype(bool)
_INT8 = np.dtype(np.int8)
_UINT32 = np.dtype("<u4")


class _BitCodec(ValueCodec):
    """A codec that looks its numbers up by bytes."""

    per_byte: int
    format = "d"
    has_feedback = True
    carries_all = False

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold
        self._tables: dict[np.dtype[Any], Flat] = {}

    @property
    def unit(self) -> int:
        return _WORD * self.per_byte

    def payload_bytes(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        return -(-num_elements // self.unit) * _WORD

    def _decoded(self, code: int) -> float:
        raise NotImplementedError

    def _table(self, dtype: np.dtype[Any]) -> Flat:
        """The numbers of each byte: 256 rows, in this dtype."""
        found = self._tables.get(dtype)
        if found is None:
            width = 8 // self.per_byte
            shifts = range(8 - width, -1, -width)
            rows = [
                [self._decoded(byte >> shift & (1 << width) - 1) for shift in shifts]
                for byte in range(256)
            ]
            found = self._tables[dtype] = np.array(rows, dtype)
        return found

    def _place(self, span: Span, payload: Payload) -> Payload:
        """The bytes of a span, without those that only fill a word."""
        return payload[span.start // self.per_byte : -(-span.stop // self.per_byte)]

    def _write(self, span: Span, payload: Payload, packed: Payload) -> None:
        place = self._place(span, payload)
        place[:] = packed
        if span.stop == span.total:
            payload[span.start // self.per_byte + len(place) :] = 0

    def unpack(self, payload: Payload, span: Span, wide: Flat, workspace: Workspace) -> None:
        place = self._place(span, payload)
        table = self._table(wide.dtype)
        whole = len(wide) // self.per_byte
        rows = wide[: whole * self.per_byte].reshape(whole, self.per_byte)
        # Every byte is an index; "clip" spares the check and the copy of the result.
        np.take(table, place[:whole], axis=0, out=rows, mode="clip")
        if len(place) > whole:
            wide[whole * self.per_byte :] = table[place[whole], : len(wide) % self.per_byte]


class TwoBit(_BitCodec):
    """Each number as +threshold, 0 or -threshold."""

    name = "2bit"
    code = 1
    parameters = {"threshold": CodecParameter(positive, 0.5)}
    per_byte = 4

    #: A word of four codes, one in each byte, times this has them together in its last byte;
    #: the products meet nowhere, so nothing is carried.
    _GATHER = np.uint32(1 | 1 << 10 | 1 << 20 | 1 << 30)

    def numbers(self) -> tuple[float, ...]:
        return (self.threshold,)

    def _decoded(self, code: int) -> float:
        return {0b11: self.threshold, 0b10: -self.threshold}.get(code, 0.0)

    def pack(
        self, wide: Flat, span: Span, payload: Payload, workspace: Workspace, *, rest: bool
    ) -> None:
        length = len(wide)
        threshold = wide.dtype.type(self.threshold)
        above = np.greater_equal(wide, threshold, out=workspace.block(1, _BOOL, length))
        below = np.less_equal(wide, -threshold, out=workspace.block(2, _BOOL, length))
        high, low = above.view(np.uint8), below.view(np.uint8)
        if rest:
            signs = workspace.block(3, _INT8, length)
            np.subtract(high.view(np.int8), low.view(np.int8), out=signs)
            steps = workspace.block(4, wide.dtype, length)
            np.copyto(steps, signs)
            np.multiply(steps, threshold, out=steps)
            np.subtract(wide, steps, out=wide)
        words = -(-length // 4)
        codes = workspace.block(5, _BYTE, 4 * words)
        codes[length:] = 0
        # 11 where above, 10 where below.
        np.add(high, low, out=codes[:length])
        np.add(codes[:length], codes[:length], out=codes[:length])
        np.add(codes[:length], high, out=codes[:length])
        gathered = workspace.block(6, _UINT32, words)
        np.multiply(codes.view(_UINT32), self._GATHER, out=gathered)
        self._write(span, payload, gathered.view(np.uint8)[3::4])


class OneBit(_BitCodec):
    """Each number as +1 or -1."""

    name = "1bit"
    code = 2
    parameters = {"threshold": CodecParameter(finite, 0.5)}
    per_byte = 8

    def numbers(self) -> tuple[float, ...]:
        return (self.threshold,)

    def _decoded(self, code: int) -> float:
        return 1.0 if code else -1.0

    def pack(
        self, wide: Flat, span: Span, payload: Payload, workspace: Workspace, *, rest: bool
    ) -> None:
        length = len(wide)
        above = np.greater(
            wide, wide.dtype.type(self.threshold), out=workspace.block(1, _BOOL, length)
        )
        if rest:
            signs = workspace.block(3, _INT8, length)
            np.add(above.view(np.int8), above.view(np.int8), out=signs)
            np.subtract(signs, np.int8(1), out=signs)
            steps = workspace.block(4, wide.dtype, length)
            np.copyto(steps, signs)
            np.subtract(wide, steps, out=wide)
        self._write(span, payload, np.packbits(above))
