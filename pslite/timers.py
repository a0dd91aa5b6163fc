"""What a node does later: commands and when they are due. On the I/O thread. A leaf."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timers:
    """Commands that wait for their time, by the node's clock."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []

    def add(self, due: float, command: Callable[[], None]) -> None:
        """Have ``run`` call ``command`` from ``due`` on; those of the same time in this order."""
        heapq.heappush(self._waiting, (due, next(self._numbers), command))

    def next_due(self) -> float | None:
        """When ``run`` has something to do."""
        return self._waiting[0][0] if self._waiting else None

    def run(self, now: float) -> None:
        """Call what is due."""
        while self._waiting and self._waiting[0][0] <= now:
            heapq.heappop(self._waiting)[2]()
