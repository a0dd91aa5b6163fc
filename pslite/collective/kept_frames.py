"""Frames that a server keeps after it has answered the request that brought them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from pslite.apps.asking import new_array
from pslite.node.postoffice import Postoffice


def kept(node: Postoffice, frames: Sequence[Any], *, is_lent: bool = False) -> list[Any]:
    """Return the frames; those in their sender's memory are copied to this node's.

    ``is_lent`` says that all of them are.
    """
    return [_copy(node, frame) if is_lent or _is_mapped(frame) else frame for frame in frames]


def _is_mapped(frame: Any) -> bool:
    return isinstance(frame, memoryview) and isinstance(frame.obj, mmap.mmap)


def _copy(node: Postoffice, frame: memoryview) -> memoryview:
    copy = new_array(node, len(frame), np.uint8)
    copy[:] = np.frombuffer(frame, np.uint8)
    return copy.data
