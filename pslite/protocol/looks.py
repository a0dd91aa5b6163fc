"""When the scheduler looks whether all workers wait for each other, and what it concludes. Pure.

A worker says when a wait of it has lasted long. Once all have, the scheduler asks every node for
its report: whether it continues only when a message arrives, and a number that changes with each
message. Where that holds for all of them, and holds again with the same numbers for a second
round of questions, asked after all first answers, there was a moment between the two at which no
node could act and no message was under way: no node will ever act again, whatever calls they wait
in. The end of a distributed computation is found in this way (F. Mattern, "Algorithms for
distributed termination detection", Distributed Computing 2, 1987). A node that does not answer,
or is busy, or has moved, ends the looking until all workers have spoken again.
Used by ``pslite/node/surveyor.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

PAUSE_S = 1.0
"""Between two looks; more than the age of a survey that is given again (``FRESH_S``)."""
AGAIN_S = 10.0
"""A look that has come to no end is taken again; an answer takes at most ``ANSWER_S``."""


class Looks:
    """Those of one job."""

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
