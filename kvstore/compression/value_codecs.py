"""The codecs ``2bit``, ``1bit``, ``fp16``, ``bf16``, ``int8``, ``exact``.

**2bit**, threshold t > 0, for each p = gradient + residual: p >= t is sent as +t (code 11),
p <= -t as -t (code 10), any other as 0 (code 00; 01 is decoded as 0). A byte has four codes.

**1bit**, any threshold t: p > t is sent as +1.0 (code 1), any other as -1.0 (code 0); the
threshold decides only the sign. A byte has eight codes.

In both codecs the first element has the most significant bits of a byte, unused bits are 0, and a
payload consists of 4-byte words: 4 * ceil(n / 16) and 4 * ceil(n / 32) bytes. Sources:
``src/kvstore/gradient_compression-inl.h`` and ``gradient_compression.cc`` of Apache MXNet 1.9.1
(2bit) and of its master branch (1bit); the idea of 1bit is Seide et al. 2014.

**fp16** is IEEE 754 binary16, **bf16** the upper half of a float32; both round to nearest, ties to
even, and numbers that are too large become infinite, as in any cast. A payload has the numbers one
after the other, little-endian. **exact** keeps the key's dtype. It encodes the numbers that
``topk`` and ``randomk`` pick if no other codec follows them.

**int8** sends integers from -127 to 127, and a scale for each block. The steps are linear and
symmetric, and depend on the largest magnitude of the block (Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", ICLR 2022, section 2, with linear steps): scale = max |p| / 127, code =
p / scale rounded to nearest, ties to even; decoded = code * scale. So an outlier makes only its own
block less exact. A block of zeros has the scale 0. A payload has all scales (float32; float64 for
keys of float64), little-endian, then all codes.

Pure; any thread may call. ``codec.py`` calls these classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.arrays.cpu.sums import Flat, Workspace
from kvstore.arrays.dtypes import accumulation_dtype, bfloat16
from kvstore.compression.codec import (
    CodecParameter,
    Payload,
    Span,
    ValueCodec,
    block,
    convert,
    finite,
    positive,
)
from pslite.errors import ProtocolError

_WORD = 4
_BYTE = np.dtype(np.uint8)
_BOOL = np.dtype(bool)
_INT8 = np.dtype(np.int8)
_UINT32 = np.dtype("<u4")
_MOST = 127


class _BitCodec(ValueCodec):
    """The base class of codecs that pack several numbers into a byte."""

    per_byte: int
    in_header = ("threshold",)
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
        """Return the decoded numbers of each possible byte: 256 rows, in this dtype."""
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
        """Return the bytes of a span, without those that only fill the last word."""
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
        # Every byte is an index; "clip" avoids the range check and a copy of the result.
        np.take(table, place[:whole], axis=0, out=rows, mode="clip")
        if len(place) > whole:
            wide[whole * self.per_byte :] = table[place[whole], : len(wide) % self.per_byte]


class TwoBit(_BitCodec):
    """A codec that sends each number as +threshold, 0 or -threshold."""

    name = "2bit"
    code = 1
    parameters = {"threshold": CodecParameter(positive, 0.5)}
    per_byte = 4

    #: A word has four codes, one in each byte. Multiplied by this number, it has all four in its
    #: last byte; the shifted copies do not overlap, so nothing carries over.
    _GATHER = np.uint32(1 | 1 << 10 | 1 << 20 | 1 << 30)

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
    """A codec that sends each number as +1 or -1."""

    name = "1bit"
    code = 2
    parameters = {"threshold": CodecParameter(finite, 0.5)}
    per_byte = 8

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


class _Cast(ValueCodec):
    has_feedback = False
    carries_all = True

    def stored(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """Return the dtype that numbers of a key of this dtype have in payloads."""
        raise NotImplementedError

    def payload_bytes(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        return num_elements * self.stored(dtype).itemsize

    def _place(self, span: Span, payload: Payload) -> Flat:
        stored = self.stored(span.dtype)
        return payload[span.start * stored.itemsize : span.stop * stored.itemsize].view(stored)

    def pack(
        self, wide: Flat, span: Span, payload: Payload, workspace: Workspace, *, rest: bool
    ) -> None:
        place = self._place(span, payload)
        convert(wide, place)
        if rest:
            back = workspace.block(1, wide.dtype, len(wide))
            convert(place, back)
            np.subtract(wide, back, out=wide)

    def unpack(self, payload: Payload, span: Span, wide: Flat, workspace: Workspace) -> None:
        convert(self._place(span, payload), wide)


class Exact(_Cast):
    """A codec that sends each number in its key's dtype."""

    name = "exact"
    code = 0

    def stored(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return dtype.newbyteorder("<") if dtype.kind == "f" else dtype


class Fp16(_Cast):
    """A codec that sends each number as a float16."""

    name = "fp16"
    code = 3

    def stored(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return np.dtype("<f2")


class Bf16(_Cast):
    """A codec that sends each number as a bfloat16. Needs the package ``ml_dtypes``."""

    name = "bf16"
    code = 4

    def __init__(self) -> None:
        super().__init__()
        self._dtype = bfloat16()

    def stored(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return self._dtype


class Int8(ValueCodec):
    """A codec that sends each number as an int8 code, with a scale for each block."""

    name = "int8"
    code = 5
    parameters = {"block": CodecParameter(block, 256)}
    in_header = ("block",)
    format = "I"
    has_feedback = True
    carries_all = False

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    @property
    def unit(self) -> int:
        return self.block

    def payload_bytes(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        return self._scales_bytes(num_elements, dtype) + num_elements

    def check_payload(self, payload: Payload, num_elements: int, dtype: np.dtype[Any]) -> None:
        scales = payload[: self._scales_bytes(num_elements, dtype)].view(_stored(dtype))
        if not ((scales >= 0) & (scales < np.inf)).all():  # NaN is neither
            raise ProtocolError("the scale of an int8 payload must be finite and at least 0")

    def is_of_non_finite(self, payload: Payload, num_elements: int, dtype: np.dtype[Any]) -> bool:
        scales = payload[: self._scales_bytes(num_elements, dtype)].view(_stored(dtype))
        return not np.isfinite(scales).all()

    def _scales_bytes(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        return -(-num_elements // self.block) * _stored(dtype).itemsize

    def _places(self, span: Span, payload: Payload) -> tuple[Flat, Flat]:
        """Return the scales and the codes of a span."""
        codes_start = self._scales_bytes(span.total, span.dtype)
        scales = payload[:codes_start].view(_stored(span.dtype))
        codes = payload[codes_start + span.start : codes_start + span.stop].view(np.int8)
        return scales[span.start // self.block : -(-span.stop // self.block)], codes

    def pack(
        self, wide: Flat, span: Span, payload: Payload, workspace: Workspace, *, rest: bool
    ) -> None:
        scales, codes = self._places(span, payload)
        steps = workspace.block(1, wide.dtype, len(wide))
        np.abs(wide, out=steps)
        peaks = workspace.block(2, wide.dtype, len(scales))
        for rows, own in self._blocks(steps, peaks):
            np.max(rows, axis=1, out=own)
        np.divide(peaks, wide.dtype.type(_MOST), out=peaks)
        scales[:] = peaks
        for numbers, rows, own in self._blocks(wide, steps, peaks):
            # 0 / 0 is NaN, and a number divided by a subnormal scale may be too large.
            np.divide(numbers, own[:, None], out=rows)
        np.rint(steps, out=steps)
        if not peaks.all() or peaks.min(initial=1) < np.finfo(wide.dtype).tiny:
            np.nan_to_num(steps, copy=False, posinf=_MOST, neginf=-_MOST)
            np.clip(steps, -_MOST, _MOST, out=steps)
            for rows, own in self._blocks(steps, peaks):
                rows[own == 0] = 0
        np.copyto(codes, steps, casting="unsafe")
        if rest:
            for rows, own in self._blocks(steps, peaks):
                np.multiply(rows, own[:, None], out=rows)
            np.subtract(wide, steps, out=wide)

    def unpack(self, payload: Payload, span: Span, wide: Flat, workspace: Workspace) -> None:
        scales, codes = self._places(span, payload)
        np.copyto(wide, codes)
        for rows, own in self._blocks(wide, scales):
            np.multiply(rows, own[:, None], out=rows)

    def _blocks(self, *arrays: Flat) -> list[tuple[Flat, ...]]:
        """Split arrays into blocks: whole blocks as rows, then the last block if cut.

        The last argument has one number for each block and is split in the same way.
        """
        *values, scales = arrays
        whole = len(values[0]) // self.block
        cut = whole * self.block
        result: list[tuple[Flat, ...]] = []
        if whole:
            rows = [array[:cut].reshape(whole, self.block) for array in values]
            result.append((*rows, scales[:whole]))
        if whole < len(scales):
            result.append((*(array[cut:].reshape(1, -1) for array in values), scales[whole:]))
        return result


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of the scales."""
    return np.dtype("<f8" if accumulation_dtype(dtype).itemsize == 8 else "<f4")
