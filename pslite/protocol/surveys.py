"""When the scheduler asks its nodes how they are, and when it has heard enough. Pure.

One survey is under way at a time; who asks meanwhile gets the same. One that was begun a moment
ago is given again, so that frequent questions cannot make the nodes busy; and no asker is answered
more often than that, so that answers to somebody who does not read them do not pile up. A survey
is over when all nodes have answered or ``ANSWER_S`` has passed: a node that is stopped holds
no asker up. Nothing is kept for long of the askers, and ``MAX_ASKERS`` may wait. Used by
``pslite/node/surveyor.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

ANSWER_S = 2.0
"""Nodes have so long to answer."""
FRESH_S = 0.5
"""A survey that is younger is given again."""
MAX_ASKERS = 64
"""The oldest is forgotten for one more."""


class Surveys(Generic[T]):
    """The survey that is under way, or the last one."""

    def __init__(self) -> None:
        #: What each node has answered.
        self.reports: dict[int, T] = {}
        self._number = 0
        self._askers: dict[str, int] = {}
        #: Who was answered a moment ago, and when.
        self._told: dict[str, float] = {}
        self._waiting: set[int] = set()
        self._began_at: float | None = None
        self._due_at: float | None = None

    def ask(self, asker: str, question: int, nodes: Iterable[int], now: float) -> int | None:
        """Somebody asks. Returns the number by which these nodes are to be asked, if they are."""
        if asker not in self._askers and len(self._askers) >= MAX_ASKERS:
            del self._askers[next(iter(self._askers))]
        self._askers[asker] = question
        is_fresh = self._began_at is not None and now - self._began_at < FRESH_S
        if self._due_at is not None or is_fresh:
            return None
        self._number += 1
        self.reports = {}
        self._waiting = set(nodes)
        self._began_at, self._due_at = now, now + ANSWER_S
        return self._number

    def answer(self, node: int, number: int, report: T) -> None:
        """A node has answered. What belongs to an earlier survey, or was not asked for, is not."""
        if number == self._number and node in self._waiting:
            self._waiting.discard(node)
            self.reports[node] = report

    def depart(self, node: int) -> None:
        """A node is gone, and will not answer."""
        self._waiting.discard(node)

    def take_served(self, now: float) -> list[tuple[str, int]]:
        """Those who are to get the survey now, each with its own question."""
        if not self._askers and self._due_at is None:
            return []
        if self._due_at is not None and self._waiting and now < self._due_at:
            return []
        self._due_at = None
        self._told = {asker: at for asker, at in self._told.items() if now < at + FRESH_S}
        served = [pair for pair in self._askers.items() if pair[0] not in self._told]
        for asker, _ in served:
            del self._askers[asker]
            self._told[asker] = now
        return served

    def next_due(self) -> float | None:
        """Return when ``take_served`` has somebody though no node answers."""
        if self._due_at is not None or not self._askers:
            return self._due_at
        return min(self._told.get(asker, 0.0) + FRESH_S for asker in self._askers)
