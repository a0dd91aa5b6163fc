"""Keep the residuals of error feedback, and count encoded and decoded bytes.

A residual is created with zeros at its first use. It exists until its key is deleted or compression
is set again. Each sender (a device or rank) encodes a key from its own gradients and needs its own
residual. A part of a key uses a slice of the key's residual. Residuals can be exported and
restored, so a job that continues from saved states does not lose them.

Only one thread at a time may use the arrays; any thread may count. Read next: ``codec.py``, which
fills the arrays, and ``chain.py``, which updates the counters.
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
    """The residual of one key, for saving."""

    key: Key
    sender: int
    values: Flat
    """1-D, float32 or float64."""


class Residuals:
    """All residuals of one process. Only one thread at a time may use it."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[Key, int], Flat] = {}

    def of(self, key: Key, num_elements: int, dtype: np.dtype[Any], sender: int = 0) -> Flat:
        """Return the residual of a whole key of this dtype, without a copy.

        It is 1-D and contiguous and has the accumulation dtype. At first it is zero. Raises
        ``ValueMismatchError`` if the existing residual has another size or dtype.
        """
        wanted = accumulation_dtype(dtype)
        found = self._arrays.get((key, sender))
        if found is None:
            found = self._arrays[key, sender] = np.zeros(num_elements, wanted)
        if found.dtype != wanted or len(found) != num_elements:
            raise ValueMismatchError(
                f"the residual of key {key!r} has {len(found)} elements of {found.dtype}, "
                f"expected {num_elements} of {wanted}; remove the file of residuals, or load the "
                "one of this job"
            )
        return found

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop the residuals of these keys."""
        gone = set(keys)
        self._arrays = {
            place: array for place, array in self._arrays.items() if place[0] not in gone
        }

    def export(self) -> list[Residual]:
        """Return copies of all residuals, ordered by key and sender."""
        found = sorted(self._arrays.items(), key=lambda item: (str(type(item[0][0])), *item[0]))
        return [Residual(key, sender, array.copy()) for (key, sender), array in found]

    def restore(self, saved: Iterable[Residual]) -> None:
        """Replace all residuals by the output of ``export``."""
        self._arrays = {(key, sender): values for key, sender, values in saved}


_FIELDS = (
    "parts_encoded",
    "bytes_before",
    "bytes_after",
    "parts_decoded",
    "bytes_received",
    "bytes_restored",
)


class Statistics:
    """Counters of each chain by name; encoded bytes include the headers."""

    def __init__(self) -> None:
        # Guards the counters.
        self._lock = threading.Lock()
        self._counters: dict[str, dict[str, int]] = {}

    def encoded(self, name: str, before: int, after: int) -> None:
        """Record that one part of ``before`` bytes was encoded into ``after``."""
        self._count(name, parts_encoded=1, bytes_before=before, bytes_after=after)

    def decoded(self, name: str, restored: int, received: int) -> None:
        """Record that ``received`` bytes were decoded to ``restored`` bytes of values."""
        self._count(name, parts_decoded=1, bytes_restored=restored, bytes_received=received)

    def _count(self, name: str, **more: int) -> None:
        with self._lock:
            counters = self._counters.setdefault(name, dict.fromkeys(_FIELDS, 0))
            for field, number in more.items():
                counters[field] += number

    def plain(self) -> dict[str, dict[str, Any]]:
        """Return each chain's counters, and ``ratio``: plain bytes per encoded byte.

        The ratio is that of encoded parts; if there are none, that of decoded parts, else None.
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
