"""``Surveys``: status requests of the scheduler, and deadlocks. Pure.

``Surveys`` decides for observers, ``Looks`` for the search of deadlocks, which asks like an
observer. Used by ``pslite/node/surveyor.py``.

One survey is under way at a time; who asks meanwhile gets the same. One that was begun a moment
ago is given again, so that frequent questions cannot make the nodes busy; and no asker is answered
more often than that, so that answers to somebody who does not read them do not pile up. A survey
is over when all nodes have answered or ``ANSWER_S`` has passed: a node that is stopped holds
no asker up. Nothing is kept for long of the askers, and ``MAX_ASKERS`` may wait.

A worker says when a wait of it has lasted long. Once all have, the scheduler asks every node for
its report: whether it continues only when a message arrives, and a number that changes with each
message. Where that holds for all of them, and holds again with the same numbers for a second
round of questions, asked after all first answers, there was a moment between the two at which no
node could act and no message was under way: no node will ever act again, whatever calls they wait
in. The end of a distributed computation is found in this way (F. Mattern, "Algorithms for
distributed termination detection", Distributed Computing 2, 1987). A node that does not answer,
or is busy, or has moved, ends the looking until all workers have spoken again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")

ANSWER_S = 2.0
"""Nodes have so long to answer."""
FRESH_S = 0.5
"""A survey that is younger is given again."""
MAX_ASKERS = 64
"""The oldest is forgotten for one more."""
PAUSE_S = 1.0
"""Between two looks; more than the age of a survey that is given again (``FRESH_S``)."""
AGAIN_S = 10.0
"""A look that has come to no end is taken again; an answer takes at most ``ANSWER_S``."""


class Surveys(Generic[T]):
    """The open or last survey of a job's status."""

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
        """Return when ``take_served`` has somebody though no node answers."""
        if self._due_at is not None or not self._askers:
            return self._due_at
        return min(self._told.get(asker, 0.0) + FRESH_S for asker in self._askers)


class Looks:
    """The detection that all workers of a job wait for each other."""

    def __init__(self) -> None:
        #: When the next question is to be asked.
        self.due_at: float | None = None
        #: Workers that have waited for long since the last conclusion.
        self._waiting: set[int] = set()
        self._before: dict[int, int] | None = None

    def long_wait(self, worker: int, num_workers: int, now: float) -> None:
        """Note that a thread of ``worker``, one of ``num_workers``, has waited for long."""
        self._waiting.add(worker)
        if self.due_at is None and len(self._waiting) == num_workers:
            self.due_at = now

    def take_due(self, now: float) -> bool:
        """Return whether all nodes are to be asked now."""
        if self.due_at is None or now < self.due_at:
            return False
        self.due_at = now + AGAIN_S
        return True

    def seen(self, moved: Mapping[int, int], num_nodes: int, now: float) -> bool:
        """Take the nodes' answers, -1 for one that may act; return whether all are stuck.

        Nodes that have not answered are not in it; ``num_nodes`` should.
        """
        before, self._before = self._before, None
        self.due_at = None
        is_still = len(moved) == num_nodes and min(moved.values()) >= 0
        if is_still and before is None:
            self._before = dict(moved)
            self.due_at = now + PAUSE_S
            return False
        self._waiting.clear()
        return is_still and moved == before
