"""How many bytes may be on their way: a connection in virtual time."""

from __future__ import annotations

import math
from collections import deque

import pytest

from pslite.protocol.channel import Channel
from pslite.protocol.send_window import AHEAD_S, FIRST_BYTES, SendWindow
from pslite.wire.messages import Accepted

MIB = 1 << 20
MOST = 64 * MIB


class Link:
    """A connection of some speed and delay, with a sender that always has more to send."""

    def __init__(self, rate: float, delay_s: float = 0.0, window: SendWindow | None = None) -> None:
        self.rate = rate
        self.delay_s = delay_s
        self.now = 0.0
        self.window = window if window is not None else SendWindow(MOST)
        self.in_flight = 0
        self.moved = 0
        #: When the connection is free again.
        self.free_at = 0.0
        self.under_way: deque[tuple[float, int, object]] = deque()

    def run(self, seconds: float, message_bytes: int, *, pause_s: float = 0.0) -> None:
        """Send for some seconds; with a pause, one message at a time and then nothing."""
        end = self.now + seconds
        while self.now < end:
            while self.in_flight < self.window.nbytes and not (pause_s and self.under_way):
                self.in_flight += message_bytes
                departure = self.window.sent(message_bytes, self.in_flight, self.now)
                self.free_at = max(self.free_at, self.now) + message_bytes / self.rate
                self.under_way.append((self.free_at + self.delay_s, message_bytes, departure))
            self.now, nbytes, departure = self.under_way.popleft()
            self.in_flight -= nbytes
            self.moved += nbytes
            self.window.accepted(nbytes, departure, self.now)
            self.now += pause_s

    @property
    def ahead_s(self) -> float:
        """How long a full window keeps the connection busy."""
        return self.window.nbytes / self.rate


@pytest.mark.parametrize("mbit", [10, 100, 1000, 10_000])
@pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.1])
def test_a_connection_is_busy_and_its_queue_short(mbit: int, delay_s: float) -> None:
    rate = mbit * 1e6 / 8
    link = Link(rate, delay_s)
    link.run(20.0, 2 * MIB)
    began, before = link.now, link.moved
    link.run(20.0, 2 * MIB)
    used = (link.moved - before) / (link.now - began) / rate
    # One message is on its way, and one behind it: on a slow connection, that takes long.
    assert link.ahead_s <= (2 * (2 * MIB / rate) + delay_s + AHEAD_S) * 1.01
    assert used > 0.99 or link.window.nbytes == MOST


def test_the_first_window_is_small() -> None:
    assert SendWindow(MOST).nbytes == FIRST_BYTES
    assert FIRST_BYTES < MOST


def test_few_credits_are_a_limit_for_each_window() -> None:
    link = Link(1e9, window=SendWindow(1000))
    assert link.window.nbytes == 1000
    link.run(1.0, 1000)
    assert link.window.nbytes == 1000


def test_a_connection_that_becomes_slower_gets_a_smaller_window() -> None:
    link = Link(125e6)
    link.run(5.0, 2 * MIB)
    fast = link.window.nbytes
    link.rate /= 10
    link.run(20.0, 2 * MIB)
    assert link.window.nbytes < fast / 3
    assert link.ahead_s < 0.5


def test_a_connection_that_becomes_faster_gets_a_larger_window() -> None:
    link = Link(12.5e6)
    link.run(5.0, 2 * MIB)
    slow = link.window.nbytes
    link.rate *= 10
    link.run(1.0, 2 * MIB)
    assert link.window.nbytes > 3 * slow


def test_a_sender_with_little_to_send_does_not_make_the_window_small() -> None:
    link = Link(125e6, 0.001)
    link.run(5.0, 2 * MIB)
    link.run(20.0, 5000, pause_s=0.1)
    assert link.ahead_s > AHEAD_S


def test_nothing_is_measured_when_no_time_passes() -> None:
    window = SendWindow(MOST)
    window.accepted(MIB, window.sent(MIB, MIB, 1.0), 1.0)
    assert window.nbytes == FIRST_BYTES


# -- on a channel --------------------------------------------------------------------------


def test_a_message_that_was_sent_again_is_not_measured() -> None:
    measured, repeated = Channel(0.5, MOST), Channel(0.5, MOST)
    for channel in (measured, repeated):
        channel.number(Accepted(), (), MIB, 1, 0.0)
    repeated.repeats(1.0)
    for channel in (measured, repeated):
        channel.accepted(1, (), 1.001)
    assert measured.window.nbytes == MIB + math.floor(MIB / 1.001 * (1.001 + AHEAD_S))
    assert repeated.window.nbytes == FIRST_BYTES


def test_small_messages_are_not_measured() -> None:
    channel = Channel(0.5, MOST)
    channel.number(Accepted(), (), 0, 1, 0.0)
    channel.accepted(1, (), 100.0)
    assert channel.window.nbytes == FIRST_BYTES
