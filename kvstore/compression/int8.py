"""The codec ``int8``: integers from -127 to 127, and a scale for each block.

Linear, symmetric, by the largest magnitude of a block (Dettmers et al., "8-bit Optimizers via
Block-wise Quantization", ICLR 2022, section 2, with linear steps): scale = max |p| / 127, code =
p / scale rounded to nearest, ties to even; decoded = code * scale. An outlier coarsens its own
block only. A block of zeros has the scale 0.

A payload has all scales (float32; float64 for keys of float64), little-endian, then all codes.

Pure; any thread may call. Read next: ``codec.py`` for what calls this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.arrays.cpu.sums import Flat, Workspace
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.compression.codec import CodecParameter, Payload, Span, ValueCodec, block
from pslite.errors import ProtocolError

_MOST = 127


class Int8(ValueCodec):
    """Each number in a byte."""

    name = "int8"
    code = 5
    format = "I"
    parameters = {"block": CodecParameter(block, 256)}
    has_feedback = True
    carries_all = False

    def __init__(self, block: int) -> None:
        super().__init__()
        self.block = block

    @property
    def unit(self) -> int:
        return self.block

    def numbers(self) -> tuple[float, ...]:
        return (self.block,)

    def payload_bytes(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        return self._scales_bytes(num_elements, dtype) + num_elements

    def check_payload(self, payload: Payload, num_elements: int, dtype: np.dtype[Any]) -> None:
        scales = payload[: self._scales_bytes(num_elements, dtype)].view(_stored(dtype))
        if not ((scales >= 0) & (scales < np.inf)).all():  # NaN is neither
            raise ProtocolError("an int8 payload has a scale that is negative, infinite or NaN")

    def is_of_non_finite(self, payload: Payload, num_elements: int, dtype: np.dtype[Any]) -> bool:
        scales = payload[: self._scales_bytes(num_elements, dtype)].view(_stored(dtype))
        return not np.isfinite(scales).all()

    def _scales_bytes(self, num_elements: int, dtype: np.dtype[Any]) -> int:
        return -(-num_elements // self.block) * _stored(dtype).itemsize

    def _places(self, span: Span, payload: Payload) -> tuple[Flat, Flat]:
        """The scales and the codes of a span."""
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
        """The arrays' whole blocks as rows, then the last, shorter block; with their scales.

        The last array has one number for each block.
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
    """The dtype of the scales."""
    return np.dtype("<f8" if accumulation_dtype(dtype).itemsize == 8 else "<f4")
