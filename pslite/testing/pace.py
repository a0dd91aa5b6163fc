"""``Pace``: which nodes of a simulation are stopped or slow, until when. Pure."""

from __future__ import annotations

import math

#: How long a node that is slowed by a factor of one takes for a message.
_MESSAGE_S = 0.001


class Pace:
    """The pace of all nodes, by their names in the van."""

    def __init__(self) -> None:
        #: Node -> when it goes on, if it was stopped; inf: it is dead.
        self.stopped: dict[str, float] = {}
        #: Node -> how many times slower it is, and until when.
        self._slow: dict[str, tuple[float, float]] = {}
        #: Slow node -> when it has done its messages.
        self._busy: dict[str, float] = {}

    def slow(self, uid: str, factor: float, until: float) -> None:
        """Let a node take ``factor`` milliseconds for a message, until a virtual time."""
        self._slow[uid] = factor, until

    def slowness(self, uid: str, now: float) -> float:
        """Return how many times slower a node is now."""
        factor, until = self._slow.get(uid, (1.0, 0.0))
        return factor if now < until else 1.0

    def is_slow(self, uid: str) -> bool:
        """Return whether to call ``took`` after a step of the node."""
        return uid in self._slow

    def is_stopped(self, uid: str, now: float) -> bool:
        """Return whether a node is dead, or stopped now."""
        return now < self.stopped.get(uid, 0.0)

    def is_dead(self, uid: str) -> bool:
        """Return whether a node does nothing any more."""
        return self.stopped.get(uid) == math.inf

    def goes_on_at(self, uid: str) -> float:
        """Return when a node that is stopped or busy goes on; 0 if it is neither."""
        if not (self.stopped or self._busy):
            return 0.0
        return max(self.stopped.get(uid, 0.0), self._busy.get(uid, 0.0))

    def took(self, uid: str, num_messages: int, now: float) -> float:
        """Return when a slow node will be done with the messages of its last step."""
        free_at = now + num_messages * _MESSAGE_S * self.slowness(uid, now)
        if now < self._slow[uid][1]:
            self._busy[uid] = free_at
            return free_at
        del self._slow[uid]
        self._busy.pop(uid, None)
        return 0.0
