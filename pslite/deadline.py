"""Deadlines for waits that take several steps. A leaf: pure but for the clock it is given."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]


class Deadline:
    """A point in time that several waits share, or none (``timeout_s=None``: no end)."""

    __slots__ = ("_at", "_clock", "timeout_s")

    def __init__(self, timeout_s: float | None, clock: Clock = time.monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._at = None if timeout_s is None else clock() + timeout_s

    def remaining_s(self) -> float | None:
        """Seconds left, never below zero; None when there is no end."""
        return None if self._at is None else max(0.0, self._at - self._clock())

    @property
    def expired(self) -> bool:
        return self._at is not None and self._clock() >= self._at
