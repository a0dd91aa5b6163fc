"""``LostTime``: how long a node has waited for replacements of lost ones. Pure."""

from __future__ import annotations


class LostTime:
    """The time in which at least one place was waited for; no second counts twice."""

    def __init__(self) -> None:
        #: The ids of the nodes that are waited for.
        self.places: set[int] = set()
        #: The seconds that are over, and since when the present ones run; None: they do not.
        self._state: tuple[float, float | None] = 0.0, None

    def begins(self, node_id: int, now: float) -> None:
        """Note that a node is waited for."""
        if not self.places:
            self._state = self._state[0], now
        self.places.add(node_id)

    def ends(self, node_id: int, now: float) -> None:
        """Note that a node is no longer waited for; without effect if it was not."""
        if self.places == {node_id}:
            self._state = self.seconds(now), None
        self.places.discard(node_id)

    def seconds(self, now: float) -> float:
        """Return the sum up to now. From any thread."""
        over_s, since = self._state  # read once, as the I/O thread may write meanwhile
        return over_s if since is None else over_s + max(0.0, now - since)
