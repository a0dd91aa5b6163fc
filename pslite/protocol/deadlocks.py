"""``DeadlockDetector``: finds out that no node of a job will ever act again. Pure.

A worker reports when one of its waits has lasted long. Once all workers have, the scheduler asks
every node for two things: whether it can act only after a message arrives, and a number that
changes with each message. If all nodes answer yes, the scheduler asks them again, after all these
answers have arrived. If all nodes again answer yes, with the same numbers, then at some moment
between the two rounds no node could act and no message was in flight. So no node will ever act
again, whatever calls they wait in. This is how the end of a distributed computation is detected (F.
Mattern, "Algorithms for distributed termination detection", Distributed Computing 2, 1987). If a
node does not answer, is busy or has a new number, the search ends until all workers have reported
again.
"""

from __future__ import annotations

from collections.abc import Mapping

PAUSE_S = 1.0
"""The time between two rounds of questions; more than ``FRESH_S``, so that both are asked."""
AGAIN_S = 10.0
"""An unfinished round of questions is repeated after this time, which exceeds ``ANSWER_S``."""


class DeadlockDetector:
    """Finds jobs in which no node will ever act again."""

    def __init__(self) -> None:
        #: When to ask the next question.
        self.due_at: float | None = None
        #: Workers that have reported a long wait since the last result.
        self._waiting: set[int] = set()
        self._before: dict[int, int] | None = None

    def long_wait(self, worker: int, num_workers: int, now: float) -> None:
        """Note that a thread of ``worker`` has waited for a long time."""
        self._waiting.add(worker)
        if self.due_at is None and len(self._waiting) == num_workers:
            self.due_at = now

    def take_due(self, now: float) -> bool:
        """Return whether to ask all nodes now."""
        if self.due_at is None or now < self.due_at:
            return False
        self.due_at = now + AGAIN_S
        return True

    def seen(self, moved: Mapping[int, int], num_nodes: int, now: float) -> bool:
        """Check the nodes' numbers; return whether all nodes are stuck for ever.

        ``moved`` has -1 for a node that may act, and lacks nodes without an answer. ``num_nodes``
        is how many should have answered.
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
