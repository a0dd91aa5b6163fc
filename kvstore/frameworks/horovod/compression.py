"""``Compression``: how values are encoded before they are sent, for arrays and tensors."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np


class NoneCompressor:
    """Leaves values as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor, and nothing."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor."""
        return tensor


class FP16Compressor:
    """Sends floats as float16. Numbers that are too large become infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return a tensor of floats as float16, and its former dtype."""
        if isinstance(tensor, np.ndarray):
            return (tensor.astype(np.float16) if tensor.dtype.kind == "f" else tensor), tensor.dtype
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in its former dtype."""
        if isinstance(tensor, np.ndarray):
            return tensor.astype(ctx, copy=False)
        return tensor.to(ctx)


class CompressionChoices:
    """The choices for ``compression=``; Horovod's ``Compression``."""

    none: ClassVar[type[Any]] = NoneCompressor
    fp16: ClassVar[type[Any]] = FP16Compressor


Compression = CompressionChoices
