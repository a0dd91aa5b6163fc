"""How much was encoded and decoded, and how much smaller it became: counters for each chain.

Any thread may call. Read next: ``chain.py``, which counts here.
"""

from __future__ import annotations

import threading
from typing import Any

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
