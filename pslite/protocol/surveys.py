"""When the scheduler asks its nodes how they are, and when it has heard enough. Pure.

One survey is under way at a time; who asks meanwhile gets the same. One that was begun a moment
ago is given again, so that nobody can make the nodes busy by asking often. It is over when all
nodes have answered or ``ANSWER_S`` has passed: a node that is stopped holds nobody up. Nothing is
kept of whoever asked, but of ``MAX_ASKERS`` at a time. Used by ``pslite/surveying.py``.
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
        if self._due_at is not None and self._waiting and now < self._due_at:
            return []
        self._due_at = None
        served, self._askers = list(self._askers.items()), {}
        return served

    def next_due(self) -> float | None:
        """When ``take_served`` has somebody though no node answers."""
        return self._due_at
