"""The sums of collective calls on a server, with compiled kernels where possible.

``pslite``'s own arithmetic does the rest, and the results have the same bits. Runs on the pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.arrays.cpu import kernels
from kvstore.arrays.dtypes import bfloat16
from kvstore.errors import MissingDependencyError

Flat = np.ndarray[Any, Any]


def add_up(dtype: str, arrays: Sequence[Flat], out: Flat) -> bool:
    """Set ``out`` to the sum of the arrays, in their order; return False if it cannot."""
    if dtype == "bfloat16":
        try:
            kind = bfloat16()
        except MissingDependencyError:
            return False
        arrays, out = [array.view(kind) for array in arrays], out.view(kind)
    return kernels.add_up(arrays, out)
