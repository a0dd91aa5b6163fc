"""``SumHandle``: a handle for ``KVServer`` that adds up pushed values.

One growing array holds the values in order of arrival, and a sorted index holds the keys. So
a request needs one binary search for all its keys, and new keys move only the index, never the
values. A row never changes its key, so the rows of a long list of keys are remembered as long as
the list exists. The handle belongs to the one thread that calls it. (ps-lite's
``KVServerDefaultHandle`` does the same with one number per key and a hash map.)
"""

from __future__ import annotations

import weakref
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pslite.apps.kv_lists import MIN_KEYS
from pslite.apps.kv_pairs import VALUE_KINDS, Empty, Keys, KVPairs, Values, is_rising, same_keys
from pslite.apps.kv_server import KVMeta
from pslite.errors import UsageError

_MIN_ROWS = 16

Rows: TypeAlias = Any
"""Numbers of rows (int64), or a slice if the rows are neighbours."""
Known: TypeAlias = "NDArray[np.bool_]"


class SumHandle:
    """Adds pushed values to the stored values; a key that was never pushed has zeros.

    Args:
        width: elements per key; pulls get rows of this length. None: one element per key, and
            pulls get 1-D values.
        dtype: the dtype of pushed and stored values (bool adds as "or").

    Besides the values it uses 16 bytes per key, and 8 for each key of the lists that the
    ``KVServer`` remembers, unless the rows of the list are neighbours.
    """

    #: It keeps only copies, so it may read requests in the worker's memory (see ``KVHandle``).
    borrows = True

    def __init__(self, width: int | None = None, dtype: DTypeLike = np.float32) -> None:
        if width is not None and width < 1:
            raise UsageError(f"width must be at least 1, got {width}")
        if np.dtype(dtype).kind not in VALUE_KINDS:
            raise UsageError(
                f"values must be bool, integers, floats or complex, got {np.dtype(dtype)}"
            )
        self._flat = width is None
        self._width = 1 if width is None else width
        self._values: NDArray[Any] = np.zeros((_MIN_ROWS, self._width), dtype)
        self._keys: Keys = np.empty(0, np.uint64)
        self._rows: NDArray[np.int64] = np.empty(0, np.int64)
        """Parallel to ``_keys``: the row of each key's value."""
        self._seen = _SeenLists()

    def __call__(self, meta: KVMeta, pairs: KVPairs) -> KVPairs | None:
        """Handle one request; a push that also pulls gets the new sums.

        Raises:
            UsageError: the values have another dtype or width than this handle.
        """
        if meta.push:
            self._add(pairs)
        if not meta.pull:
            return None
        values = self._read(pairs.keys, meta.empty)
        return KVPairs(pairs.keys, values.reshape(-1) if self._flat else values, fresh=True)

    def __len__(self) -> int:
        """Return how many keys have been pushed."""
        return len(self._keys)

    def _add(self, pairs: KVPairs) -> None:
        num_keys = len(pairs.keys)
        lens_fit = pairs.lens is None or bool((pairs.lens == self._width).all())
        if not lens_fit or pairs.values.size != num_keys * self._width:
            raise UsageError(
                f"this store needs {self._width} elements for each key, got {pairs.values.size} "
                f"for {len(pairs.keys)} keys"
            )
        if pairs.values.dtype != self._values.dtype:
            raise UsageError(
                f"this store needs values of {self._values.dtype}, got {pairs.values.dtype}"
            )
        rows, known = self._find(pairs.keys)
        if known is not None:
            rows = self._insert(pairs.keys, rows, known)
        pushed = pairs.values.reshape(num_keys, self._width)
        if isinstance(rows, slice):
            sums = self._values[rows]
            np.add(sums, pushed, out=sums)
        else:  # keys are unique, so no row is in the list twice
            sums = self._values.take(rows, axis=0)
            sums += pushed
            self._values[rows] = sums

    def _read(self, keys: Keys, empty: Empty) -> Values:
        values = empty((len(keys), self._width), self._values.dtype)
        rows, known = self._find(keys)
        if known is not None:
            values[...] = 0
            values[known] = self._values[rows]
        elif isinstance(rows, slice):
            values[...] = self._values[rows]
        else:  # "clip" avoids a buffer in NumPy; all rows are in range
            self._values.take(rows, axis=0, out=values, mode="clip")
        return values

    def _find(self, keys: Keys) -> tuple[Rows, Known | None]:
        """Return the rows of the known keys, and a mask of them; None if all are known."""
        found = self._seen.rows_of(keys)
        if found is not None:
            return found, None
        if len(keys) >= MIN_KEYS and same_keys(keys, self._keys):
            rows = self._rows
        else:
            at = np.searchsorted(self._keys, keys)
            if len(self._keys):  # a key beyond the last is compared with the last, and differs
                known = self._keys.take(at, mode="clip") == keys
            else:
                known = np.zeros(len(keys), bool)
            if not known.all():
                return self._rows[at[known]], known
            rows = self._rows[at]
        return self._seen.note(keys, rows), None

    def _insert(self, keys: Keys, rows: Rows, known: Known) -> Rows:
        """Add the unknown keys to the index; return the rows of all ``keys``."""
        used = len(self._keys)
        fresh = ~known
        new = keys[fresh]
        total = used + len(new)
        if total > len(self._values):
            grown = np.zeros((max(total, 2 * len(self._values)), self._width), self._values.dtype)
            grown[:used] = self._values[:used]
            self._values = grown
        all_rows = np.empty(len(keys), np.int64)
        all_rows[known] = rows
        all_rows[fresh] = np.arange(used, total)
        # The new keys' places in the index: after all smaller old keys and smaller new keys.
        places = np.searchsorted(self._keys, new) + np.arange(len(new))
        old = np.ones(total, bool)
        old[places] = False
        self._keys = _merged(old, self._keys, places, new)
        self._rows = _merged(old, self._rows, places, all_rows[fresh])
        return self._seen.note(keys, all_rows)


def _merged(
    old: Known, ours: NDArray[Any], places: NDArray[np.int64], new: NDArray[Any]
) -> NDArray[Any]:
    merged = np.empty(len(old), ours.dtype)
    merged[old] = ours
    merged[places] = new
    return merged


class _SeenLists:
    """The rows of remembered key lists, each identified by its array object."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[weakref.ref[Keys], Rows]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def rows_of(self, keys: Keys) -> Rows | None:
        """Return the rows that were noted for this array object; None if unknown."""
        found = self._rows.get(id(keys))
        return found[1] if found is not None and found[0]() is keys else None

    def note(self, keys: Keys, rows: NDArray[np.int64]) -> Rows:
        """Return the rows, as a slice if the list is long and they are neighbours.

        They are remembered if ``keys`` cannot change.
        """
        if len(keys) < MIN_KEYS:
            return rows
        neighbours = rows[-1] - rows[0] == len(rows) - 1 and is_rising(rows)
        best: Rows = slice(int(rows[0]), int(rows[-1]) + 1) if neighbours else rows
        # A view of a request is read-only too, but its memory belongs to the request.
        if keys.flags.owndata and not keys.flags.writeable:
            name, noted = id(keys), self._rows
            noted[name] = weakref.ref(keys, lambda _: noted.pop(name, None)), best
        return best
