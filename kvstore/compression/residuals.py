"""Residuals of compression (error feedback), and counters of what was encoded.

A residual is made at the first use, of zeros, and lives until its key is deleted or compression
is set anew. The sender is a device or rank: each one encodes the same key from gradients of its own
and needs its own residual. A part of a key uses its slice. Residuals can be taken out and put back,
so that a job continued from saved states does not lose its residuals.

The arrays are the caller's to change, one thread at a time; the table is guarded. Read next:
``codec.py`` for what is kept in them.

How much was encoded and decoded, and how much smaller it became: counters for each chain.

Any thread may call. Read next: ``chain.py``, which counts here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from kvstore.arrays.cpu.sums import Flat
from kvstore.arrays.dtypes import accumulation_dtype
from kvstore.arrays.keys import Key
from kvstore.errors import ValueMismatchError


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
        """Drop the residuals of these keys (None: of all)."""
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

        Raises ``ValueMismatchError`` for arrays that are not residuals; then nothing has changed.
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


_FIELDS = (
    "parts_encoded",
    "bytes_before",
    "bytes_after",
    "parts_decoded",
    "bytes_received",
    "bytes_restored",
)


class Statistics:
    """Counters by the name of a chain. Bytes after encoding are those of header and payload."""

    def __init__(self) -> None:
        # Guards the counters.
        self._lock = threading.Lock()
        self._counters: dict[str, dict[str, int]] = {}

    def encoded(self, name: str, before: int, after: int) -> None:
        """One part of ``before`` bytes was encoded into ``after``."""
        self._count(name, parts_encoded=1, bytes_before=before, bytes_after=after)

    def decoded(self, name: str, restored: int, received: int) -> None:
        """``received`` bytes were decoded into a part of ``restored`` (in the key's dtype)."""
        self._count(name, parts_decoded=1, bytes_restored=restored, bytes_received=received)

    def _count(self, name: str, **more: int) -> None:
        with self._lock:
            counters = self._counters.setdefault(name, dict.fromkeys(_FIELDS, 0))
            for field, number in more.items():
                counters[field] += number

    def plain(self) -> dict[str, dict[str, Any]]:
        """For each chain its counters, and ``ratio``: bytes before for each byte after.

        Of what was encoded here, else of what was decoded; None for no bytes at all.
        """
        with self._lock:
            found: dict[str, dict[str, Any]] = {
                name: dict(counters) for name, counters in self._counters.items()
            }
        for counters in found.values():
            before, after = counters["bytes_before"], counters["bytes_after"]
            if not after:
                before, after = counters["bytes_restored"], counters["bytes_received"]
            counters["ratio"] = before / after if after else None
        return found
