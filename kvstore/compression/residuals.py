"""What compression has lost so far and still owes: one array for each key and sender.

A residual is made at the first use, of zeros, and lives until its key is deleted or compression
is set anew. The sender is a device or rank: whoever encodes the same key from different gradients
needs a residual for each. A part of a key uses its slice. Residuals can be taken out and put back,
so that a job continued from saved states does not lose what it owes.

The arrays are the caller's to change, one thread at a time; the table is guarded. Read next:
``codec.py`` for what is kept in them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from kvstore.aggregate import Flat
from kvstore.dtypes import accumulation_dtype
from kvstore.errors import ValueMismatchError
from kvstore.keys import Key


class Residual(NamedTuple):
    """One of them, as it is saved."""

    key: Key
    sender: int
    values: Flat
    """1-D, float32 or float64."""


class Residuals:
    """All residuals of one process."""

    def __init__(self) -> None:
        # Guards the table, not what is in the arrays.
        self._lock = threading.Lock()
        self._arrays: dict[tuple[Key, int], Flat] = {}

    def of(self, key: Key, num_elements: int, dtype: np.dtype[Any], sender: int = 0) -> Flat:
        """The residual of a whole key of this dtype; zeros at first.

        1-D, contiguous, in the dtype in which such values are added; not a copy. Raises
        ``ValueMismatchError`` if the one that is there is of another size or dtype.
        """
        wanted = accumulation_dtype(dtype)
        with self._lock:
            found = self._arrays.get((key, sender))
            if found is None:
                found = self._arrays[key, sender] = np.zeros(num_elements, wanted)
        if found.dtype != wanted or len(found) != num_elements:
            raise ValueMismatchError(
                f"the residual of the key {key!r} has {len(found)} elements of {found.dtype}, the "
                f"key {num_elements} that are added in {wanted}; it belongs to other states"
            )
        return found

    def forget(self, keys: Iterable[Key] | None = None) -> None:
        """These keys (None: all) owe nothing any more."""
        with self._lock:
            gone = None if keys is None else set(keys)
            self._arrays = {
                place: array
                for place, array in self._arrays.items()
                if gone is not None and place[0] not in gone
            }

    def export(self) -> list[Residual]:
        """All that there are, ordered by key and sender; the arrays are copies."""
        with self._lock:
            found = sorted(self._arrays.items(), key=lambda item: (str(type(item[0][0])), *item[0]))
            return [Residual(key, sender, array.copy()) for (key, sender), array in found]

    def restore(self, saved: Iterable[Residual]) -> None:
        """Instead of what there is: copies of what ``export`` gave.

        Raises ``ValueMismatchError`` for arrays that are no residuals; then nothing has changed.
        """
        arrays: dict[tuple[Key, int], Flat] = {}
        for key, sender, values in saved:
            if values.ndim != 1 or values.dtype not in (np.float32, np.float64):
                raise ValueMismatchError(
                    f"a residual is a 1-D array of float32 or float64, that of the key {key!r} is "
                    f"{values.dtype} of shape {values.shape}"
                )
            arrays[key, sender] = np.array(values, values.dtype.newbyteorder("="))
        with self._lock:
            self._arrays = arrays

    @property
    def nbytes(self) -> int:
        """How much memory they take."""
        with self._lock:
            return sum(array.nbytes for array in self._arrays.values())
