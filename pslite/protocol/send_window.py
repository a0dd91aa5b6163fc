"""``SendWindow``: how many bytes may wait on this machine for a connection.

A message that libzmq or the kernel has cannot be overtaken by one of a higher priority, and a
connection without such bytes is idle. So what waits there should last ``AHEAD_S``, besides the
message that is being sent. What has left this machine does not count: TCP decides how much of that
a network needs. Pure: the time and the counters are arguments.
"""

from __future__ import annotations

AHEAD_S = 0.05
"""For how long a connection has something to send: on a busy machine, threads wake up late."""
LOOK_S = 0.02
"""How often to look whether there is room again."""
FIRST_BYTES = 4 << 20
"""The window until a rate was measured."""
LEAST_BYTES = 64 << 10
_SMOOTHING = 4
"""A measured rate is averaged over about this many looks."""


class SendWindow:
    """The window of the connections to one peer; ``nbytes`` is its size."""

    __slots__ = ("_at", "_departed", "_is_full", "most_bytes", "nbytes")

    def __init__(self, most_bytes: int) -> None:
        #: The most bytes in flight: sent, and not accepted.
        self.most_bytes = most_bytes
        self.nbytes = min(FIRST_BYTES, most_bytes)
        #: Whether there was no room at the last look. The connection has been busy since then, so
        #: what it moved is what it can move.
        self._is_full = False
        self._at = 0.0
        self._departed = 0

    def has_room(self, queued: int, sent: int, now: float) -> bool:
        """Return whether another message may be sent.

        ``sent`` are all bytes sent to the peer so far, ``queued`` those that wait on this machine.
        """
        departed = sent - queued
        if self._is_full:
            elapsed_s = now - self._at
            if elapsed_s < LOOK_S / 2:  # too short for a measurement
                return queued < self.nbytes
            ahead = (departed - self._departed) / elapsed_s * AHEAD_S
            nbytes = self.nbytes + (ahead - self.nbytes) / _SMOOTHING
            if not queued:  # it ran dry
                nbytes = max(nbytes, 2 * self.nbytes)
            self.nbytes = min(max(int(nbytes), LEAST_BYTES), self.most_bytes)
        self._at, self._departed = now, departed
        self._is_full = queued >= self.nbytes
        return not self._is_full
