"""Exactly-once delivery over a transport that loses and duplicates messages.

The transport may also delay and reorder them. Pure: no socket and no clock; the time is an
argument.

Each direction numbers its messages 1, 2, 3, ... The receiver remembers a low-water mark ("I have
all up to here") and the few numbers above it, and drops messages that it has seen. It returns both
as an acknowledgement, which means "accepted", not "done". The sender keeps every message, by
reference, until it is accepted. It sends the message again after a time-out or a new connection.
A channel does not order messages: those that need an order (rounds of a part) have their own
numbers (``rounds.py``). ps-lite's optional resender uses ids cut to 8 bits and a set that grows
for ever (``src/resender.h``).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from pslite.wire.base import Ints, Message

#: The most numbers above the low-water mark in one acknowledgement.
MAX_ALSO = 64
#: The interval between repeats doubles up to 2**MAX_BACKOFF times the first one.
MAX_BACKOFF = 4
#: A channel accepts numbers this far above its low-water mark, which bounds its memory.
RECEIVE_WINDOW = 1 << 20


@dataclass(slots=True)
class Outgoing:
    """A sent message that the peer has not accepted yet."""

    sequence: int
    epoch: int
    message: Message
    frames: Sequence[Any]
    nbytes: int
    sent_at: float
    repeats: int = 0
    #: The bytes sent to the peer up to the end of this message's last transmission.
    position: int = 0

    def due_at(self, timeout_s: float) -> float:
        return self.sent_at + timeout_s * (1 << min(self.repeats, MAX_BACKOFF))


class Channel:
    """One end of the channel to one incarnation of a peer."""

    def __init__(self, resend_timeout_s: float) -> None:
        self._timeout_s = resend_timeout_s
        self._next_sequence = 1
        self._unaccepted: dict[int, Outgoing] = {}
        #: When to call ``repeats`` next.
        self.next_due = math.inf
        #: All numbers up to this one have arrived, and those above it in order.
        self._low = 0
        self._above: list[int] = []
        #: The acknowledgement of both; of the second at most ``MAX_ALSO``.
        self.acceptance: tuple[int, Ints] = (0, ())
        self.unaccepted_bytes = 0

    # -- the sending side --------------------------------------------------------------

    def number(
        self, message: Message, frames: Sequence[Any], nbytes: int, epoch: int, now: float
    ) -> Outgoing:
        """Number a message and keep it until it is accepted."""
        outgoing = Outgoing(self._next_sequence, epoch, message, frames, nbytes, now)
        self._next_sequence += 1
        self._unaccepted[outgoing.sequence] = outgoing
        self.unaccepted_bytes += nbytes
        self.next_due = min(self.next_due, now + self._timeout_s)
        return outgoing

    def accepted(self, low: int, also: Iterable[int]) -> bool:
        """Forget messages that the peer has accepted; return whether there were any."""
        before = len(self._unaccepted)
        for sequence in (*takewhile(low.__ge__, self._unaccepted), *also):
            outgoing = self._unaccepted.pop(sequence, None)
            if outgoing is not None:
                self.unaccepted_bytes -= outgoing.nbytes
        if not self._unaccepted:
            self.next_due = math.inf
        return len(self._unaccepted) != before

    def withdraw(self, outgoing: Outgoing) -> None:
        """Free the number of the newest message, which could not be sent."""
        del self._unaccepted[outgoing.sequence]
        self.unaccepted_bytes -= outgoing.nbytes
        self._next_sequence = outgoing.sequence

    def drop_outgoing(self) -> None:
        """Forget all sent messages: the peer will no longer accept them."""
        self._unaccepted.clear()
        self.unaccepted_bytes = 0
        self.next_due = math.inf

    @property
    def everything_accepted(self) -> bool:
        return not self._unaccepted

    @property
    def num_unaccepted(self) -> int:
        """The number of messages that the peer has not accepted."""
        return len(self._unaccepted)

    def repeats(
        self, now: float, *, at_once: bool = False, passed: float = math.inf
    ) -> list[Outgoing]:
        """Return the messages to resend now; with ``at_once`` all that are not accepted.

        Messages after the position ``passed`` are left out and their time starts again: they are
        still on a slow connection, which a resend would make even slower.
        """
        if not at_once and now < self.next_due:
            return []
        due = []
        for outgoing in self._unaccepted.values():
            if at_once or outgoing.due_at(self._timeout_s) <= now:
                outgoing.sent_at = now
                if outgoing.position > passed:
                    continue
                outgoing.repeats += 1
                due.append(outgoing)
        self.next_due = min(
            (outgoing.due_at(self._timeout_s) for outgoing in self._unaccepted.values()),
            default=math.inf,
        )
        return due

    # -- the receiving side ------------------------------------------------------------

    def admit(self, sequence: int) -> bool:
        """Return whether a received message is new; acknowledge it in any case."""
        above = self._above
        at = bisect_left(above, sequence)
        is_known = sequence <= self._low or (at < len(above) and above[at] == sequence)
        if is_known or sequence > self._low + RECEIVE_WINDOW:
            return False
        if sequence == self._low + 1:
            self._low = sequence
            while at < len(above) and above[at] == self._low + 1:
                self._low += 1
                at += 1
            del above[:at]
        else:
            above.insert(at, sequence)
        self.acceptance = (self._low, tuple(above[:MAX_ALSO]))
        return True
