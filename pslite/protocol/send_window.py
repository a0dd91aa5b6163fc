"""``SendWindow``: how many bytes may be on their way to a peer.

What is on its way cannot be overtaken by a message of a higher priority, and what is not keeps the
connection idle. So the window is one message, what the connection moves until it is accepted, and
what it moves in ``AHEAD_S``. Both are measured as TCP BBR does (draft-ietf-ccwg-bbr): the rate is
what was accepted since the last acceptance before a message was sent, divided by that time; the
delay is the shortest that any message had. Pure: the time is an argument.
"""

from __future__ import annotations

import math
from typing import NamedTuple

MIB = 1 << 20

AHEAD_S = 0.05
"""For how long a connection has more to send when an acceptance is late: threads are slow to wake
up on a busy machine."""
FIRST_BYTES = 4 * MIB
"""The window until the first acceptance."""
_SMOOTHING = 8
"""A rate that falls is averaged over about this many messages."""


class Departure(NamedTuple):
    """The state of a window when a message was sent."""

    at: float
    accepted: int
    """The bytes accepted until then."""
    accepted_at: float
    """When the last of them were accepted, or when the first byte in flight was sent, if later."""
    fills: bool
    """Whether the window was full with this message, so that the connection sets the rate."""


class SendWindow:
    """The window of one channel; ``nbytes`` is its size."""

    __slots__ = ("_accepted", "_accepted_at", "_delay_s", "_most", "_rate", "ahead_s", "nbytes")

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._rate = 0.0
        self._delay_s = math.inf
        self._accepted = 0
        self._accepted_at = 0.0
        self.ahead_s = AHEAD_S
        """Twice that if the peer sends as much: its acceptances wait behind its own values."""
        self.nbytes = min(FIRST_BYTES, most_bytes)

    def sent(self, nbytes: int, in_flight: int, now: float) -> Departure:
        """Note that a message is sent; ``in_flight`` are all bytes that are not accepted."""
        if in_flight <= nbytes:
            self._accepted_at = now
        return Departure(now, self._accepted, self._accepted_at, in_flight >= self.nbytes)

    def accepted(self, nbytes: int, departure: Departure, now: float) -> None:
        """Note that a message was accepted that was sent once only."""
        self._accepted += nbytes
        self._accepted_at = now
        took_s = now - departure.accepted_at
        if took_s <= 0.0:
            return
        rate = (self._accepted - departure.accepted) / took_s
        if rate > self._rate:
            self._rate = rate
        elif departure.fills:
            self._rate += (rate - self._rate) / _SMOOTHING
        self._delay_s = min(self._delay_s, now - departure.at)
        self.nbytes = min(nbytes + int(self._rate * (self._delay_s + self.ahead_s)), self._most)
