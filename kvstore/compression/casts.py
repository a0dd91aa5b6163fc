"""The codecs that store numbers in fewer bits: ``fp16``, ``bf16`` and ``exact``.

``fp16`` is IEEE 754 binary16, ``bf16`` the upper half of a float32; both round to nearest, ties to
even, and numbers that are too large become infinite, as in any cast. A payload is the numbers one
after the other, little-endian. ``exact`` keeps a key's dtype: it carries the numbers that
``topk`` and ``randomk`` pick where no other codec follows them.

Pure; any thread may call. Read next: ``codec.py`` for what calls this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.arrays.cpu.sums import Flat, Workspace
from kvstore.arrays.dtypes import bfloat16
from kvstore.compression.codec import Payload, Span, ValueCodec, convert


class _Cast(ValueCodec):
    has_feedback = False
    carries_all = True

    def stored(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype in payloads, for a key of this dtype."""
        raise NotImplementedError

    def numbers(self) -> tuple[float, ...]:
        return ()

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
    """Each number in its key's dtype."""

    name = "exact"
    code = 0

    def stored(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return dtype.newbyteorder("<") if dtype.kind == "f" else dtype


class Fp16(_Cast):
    """Each number as a float16."""

    name = "fp16"
    code = 3

    def stored(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return np.dtype("<f2")


class Bf16(_Cast):
    """Each number as a bfloat16. Raises ``MissingDependencyError`` where ``ml_dtypes`` is not."""

    name = "bf16"
    code = 4

    def __init__(self) -> None:
        super().__init__()
        self._dtype = bfloat16()

    def stored(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        return self._dtype
