"""A ready-made handle for ``KVServer``: pushes are added up, pulls read the sums.

Values lie in the order of their arrival in one growing array; beside it stands a sorted index
of the keys. So a request costs one binary search over all its keys together, and new keys
move the index only, never the values. It belongs to the one thread that calls it. (ps-lite's
``KVServerDefaultHandle`` does the same with one number a key and a hash map.)
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pslite.errors import UsageError
from pslite.kv_app import KVMeta
from pslite.kv_pairs import VALUE_KINDS, Keys, KVPairs, Values

_MIN_ROWS = 16


class SumHandle:
    """Adds what is pushed to what is stored; a key that was never pushed is zero.

    Args:
        width: elements a key. None: one, and pulls are answered with 1-D values; a number:
            pulls are answered with rows of it.
        dtype: of the values that are pushed and kept (bool adds as "or").
    """

    def __init__(self, width: int | None = None, dtype: DTypeLike = np.float32) -> None:
        if width is not None and width < 1:
            raise UsageError(f"a key needs at least one element, not {width}")
        if np.dtype(dtype).kind not in VALUE_KINDS:
            raise UsageError(f"values cannot be {np.dtype(dtype)}")
        self._flat = width is None
        self._width = 1 if width is None else width
        self._values: NDArray[Any] = np.zeros((_MIN_ROWS, self._width), dtype)
        self._keys: Keys = np.empty(0, np.uint64)
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)
        """Parallel to ``_keys``: the row of each key's value."""

    def __call__(self, meta: KVMeta, pairs: KVPairs) -> KVPairs | None:
        """Serve one request; a push that also pulls gets the new sums.

        Raises:
            UsageError: the values are of another dtype or width than this handle's.
        """
        if meta.push:
            self._add(pairs)
        if not meta.pull:
            return None
        values = self._read(pairs.keys)
        return KVPairs(pairs.keys, values.reshape(-1) if self._flat else values)

    def __len__(self) -> int:
        """How many keys have been pushed."""
        return len(self._keys)

    def _add(self, pairs: KVPairs) -> None:
        num_keys = len(pairs.keys)
        lens_fit = pairs.lens is None or bool((pairs.lens == self._width).all())
        if not lens_fit or pairs.values.size != num_keys * self._width:
            raise UsageError(f"this store keeps {self._width} elements a key, no other number")
        if pairs.values.dtype != self._values.dtype:
            raise UsageError(
                f"this store keeps {self._values.dtype}, the values pushed are {pairs.values.dtype}"
            )
        at, known = self._find(pairs.keys)
        if not known.all():
            self._insert(at[~known], pairs.keys[~known])
            at, _ = self._find(pairs.keys)
        # Keys are unique, so no row is in this list twice.
        self._values[self._rows[at]] += pairs.values.reshape(num_keys, self._width)

    def _read(self, keys: Keys) -> Values:
        values = np.zeros((len(keys), self._width), self._values.dtype)
        at, known = self._find(keys)
        values[known] = self._values[self._rows[at[known]]]
        return values

    def _find(self, keys: Keys) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Where each key stands in the index, or would stand, and whether it does."""
        at = np.searchsorted(self._keys, keys)
        known = np.zeros(len(keys), bool)
        inside = at < len(self._keys)
        known[inside] = self._keys[at[inside]] == keys[inside]
        return at, known

    def _insert(self, at: NDArray[np.intp], keys: Keys) -> None:
        """Take new keys into the index; their values are zero rows."""
        used = len(self._keys)
        needed = used + len(keys)
        if needed > len(self._values):
            grown = np.zeros((max(needed, 2 * len(self._values)), self._width), self._values.dtype)
            grown[:used] = self._values[:used]
            self._values = grown
        self._keys = np.insert(self._keys, at, keys)
        self._rows = np.insert(self._rows, at, np.arange(used, needed))
