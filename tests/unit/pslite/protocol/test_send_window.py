"""How many bytes may wait for a connection: one in virtual time."""

from __future__ import annotations

import pytest

from pslite.protocol.send_window import AHEAD_S, FIRST_BYTES, LEAST_BYTES, LOOK_S, SendWindow

MIB = 1 << 20
MOST = 64 * MIB


class Connection:
    """A connection of some rate, with a sender that looks as often as a node does."""

    def __init__(self, rate: float, window: SendWindow | None = None) -> None:
        self.rate = rate
        self.window = window if window is not None else SendWindow(MOST)
        self.now = 0.0
        self.queued = 0.0
        self.sent = 0
        #: For how long it had nothing to send.
        self.idle_s = 0.0
        #: What waited when another message was sent, at most.
        self.most_queued = 0.0

    def run(
        self, seconds: float, message_bytes: int, *, look_s: float = LOOK_S, most: int = 1 << 60
    ) -> None:
        """Send at most ``most`` messages at each look."""
        self.idle_s = self.most_queued = 0.0
        end = self.now + seconds
        while self.now < end:
            for _ in range(most):
                if not self.window.has_room(int(self.queued), self.sent, self.now):
                    break
                self.most_queued = max(self.most_queued, self.queued)
                self.sent += message_bytes
                self.queued += message_bytes
            self.now += look_s
            self.idle_s += max(0.0, look_s - self.queued / self.rate)
            self.queued = max(0.0, self.queued - self.rate * look_s)


@pytest.mark.parametrize("mbit", [1, 10, 100, 1000, 10_000])
def test_a_connection_is_busy_and_little_waits_behind_what_is_sent(mbit: int) -> None:
    rate = mbit * 1e6 / 8
    connection = Connection(rate)
    connection.run(100.0, 2 * MIB)
    connection.run(20.0, 2 * MIB)
    assert connection.idle_s == 0.0
    assert connection.most_queued <= max(1.5 * AHEAD_S * rate, LEAST_BYTES)


def test_a_sender_that_looks_late_has_more_waiting() -> None:
    connection = Connection(125e6)
    connection.run(5.0, 2 * MIB, look_s=4 * AHEAD_S)
    connection.run(20.0, 2 * MIB, look_s=4 * AHEAD_S)
    assert connection.idle_s < 3.0
    assert connection.most_queued > 2 * AHEAD_S * connection.rate


def test_the_first_window_is_small() -> None:
    window = SendWindow(MOST)
    assert FIRST_BYTES < MOST
    assert window.has_room(FIRST_BYTES - 1, FIRST_BYTES, 0.0)
    assert not window.has_room(FIRST_BYTES, FIRST_BYTES, 0.0)


def test_few_credits_are_a_limit_for_each_window() -> None:
    connection = Connection(1e9, SendWindow(1000))
    connection.run(1.0, 1000)
    assert connection.window.nbytes == 1000


@pytest.mark.parametrize("factor", [0.1, 10.0])
def test_a_window_follows_the_connections_rate(factor: float) -> None:
    connection = Connection(25e6)
    connection.run(5.0, 2 * MIB)
    before = connection.window.nbytes
    connection.rate *= factor
    connection.run(5.0, 2 * MIB)
    assert connection.window.nbytes == pytest.approx(factor * before, rel=0.3)


def test_a_sender_with_little_to_send_does_not_make_the_window_small() -> None:
    connection = Connection(125e6)
    connection.run(5.0, 2 * MIB)
    connection.queued = 0.0
    connection.run(0.1, 5000, most=1)
    before = connection.window.nbytes
    connection.run(20.0, 5000, look_s=0.1, most=1)
    assert connection.window.nbytes == before


def test_nothing_is_measured_when_no_time_passes() -> None:
    window = SendWindow(MOST)
    for queued in (FIRST_BYTES, FIRST_BYTES, 0, FIRST_BYTES):
        assert window.has_room(queued, FIRST_BYTES, 1.0) == (queued == 0)
    assert window.nbytes == FIRST_BYTES
