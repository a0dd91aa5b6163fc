"""``Surveys``: when to ask nodes for their status, and whom to answer. Pure.

Observers ask, and so does the search for deadlocks (``deadlocks.py``). ``pslite/node/surveyor.py``
uses both.

One survey runs at a time, and everyone who asks in that time gets its result. A recent survey is
used again, so that frequent questions do not keep the nodes busy. No asker is answered more often
than that, so that unread answers do not pile up. A survey ends when all nodes
have answered or ``ANSWER_S`` has passed, so a stopped node does not delay askers. At most
``MAX_ASKERS`` may wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

ANSWER_S = 2.0
"""The time that nodes have to answer."""
FRESH_S = 0.5
"""A survey that is younger than this is used again."""
MAX_ASKERS = 64
"""The most waiting askers; one more replaces the oldest."""


class Surveys(Generic[T]):
    """The open or last survey of a job's status."""

    def __init__(self) -> None:
        #: Node id -> its report.
        self.reports: dict[int, T] = {}
        self._number = 0
        self._askers: dict[str, int] = {}
        #: The askers that were answered a moment ago -> when.
        self._told: dict[str, float] = {}
        self._waiting: set[int] = set()
        self._began_at: float | None = None
        self._due_at: float | None = None

    def ask(self, asker: str, question: int, nodes: Iterable[int], now: float) -> int | None:
        """Handle a question. Return the number of the survey that it starts, if any."""
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
        """Handle a node's answer; ignore it if it was not asked for."""
        if number == self._number and node in self._waiting:
            self._waiting.discard(node)
            self.reports[node] = report

    def depart(self, node: int) -> None:
        """Handle the loss of a node, which will not answer."""
        self._waiting.discard(node)

    def take_served(self, now: float) -> list[tuple[str, int]]:
        """Return and remove the askers that get the survey now, with their questions."""
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
        """Return when to call ``take_served`` if no node answers before."""
        if self._due_at is not None or not self._askers:
            return self._due_at
        return min(self._told.get(asker, 0.0) + FRESH_S for asker in self._askers)
