"""The injector itself: its rates, its independence, its repeatability, and its timing."""

from __future__ import annotations

import math
import threading
import time
from itertools import pairwise

import pytest
from van_helpers import payloads

from pslite.testing.inproc import InprocNetwork, InprocVan
from pslite.van.base import Connected, Disconnected, Received, VanEvent
from pslite.van.faulty import FaultPlan, FaultyVan

HOST = "10.0.0.1"
MESSAGES = 4000


class Pair:
    """A faulty client with a virtual clock, and a plain server."""

    def __init__(self, plan: FaultPlan, seed: int = 1, drop_received: float = 0.0) -> None:
        self.now = 0.0
        network = InprocNetwork()
        self.client = FaultyVan(
            InprocVan(network, "client"),
            plan,
            seed,
            lambda: self.now,
            drop_received=drop_received,
        )
        self.server = InprocVan(network, "server")
        self.client.connect("server", f"tcp://{HOST}:{self.server.bind(HOST, 0)}")
        assert self.client.poll(0) == [Connected("server")]
        assert self.server.poll(0) == [Connected("client")]

    def send(self, count: int) -> None:
        for number in range(count):
            self.client.send("server", [b"%d" % number])

    def run_until(self, end: float) -> list[int]:
        """Poll at every due time up to ``end``; the numbers that the server got, in order."""
        got: list[int] = []
        while True:
            due = self.client.next_due()
            self.now = max(self.now, min(due, end))
            self.client.poll(0)
            got += numbers(self.server.poll(0))
            if due >= end:
                return got


def numbers(events: list[VanEvent]) -> list[int]:
    return [int(frames[0]) for frames in payloads(events)]


def assert_rate(count: int, probability: float, trials: int = MESSAGES) -> None:
    """Within three standard deviations of what a fair generator would give."""
    sigma = math.sqrt(trials * probability * (1 - probability))
    assert abs(count - trials * probability) < 3 * sigma, (count, trials * probability, sigma)


def test_without_faults_everything_passes_at_once_and_in_order() -> None:
    pair = Pair(FaultPlan())
    pair.send(100)
    assert numbers(pair.server.poll(0)) == list(range(100))
    assert pair.client.next_due() == math.inf
    assert pair.client.counts["sent"] == 100
    assert sum(pair.client.counts.values()) == 100


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5])
def test_messages_are_dropped_at_the_rate_of_the_plan(probability: float) -> None:
    pair = Pair(FaultPlan(drop=probability))
    pair.send(MESSAGES)
    got = numbers(pair.server.poll(0))
    assert_rate(MESSAGES - len(got), probability)
    assert pair.client.counts["dropped"] == MESSAGES - len(got)
    assert got == sorted(set(got))


def test_losses_come_singly_and_not_in_blackouts() -> None:
    """ps-lite's PS_DROP_MSG gave all messages of one second the same fate."""
    pair = Pair(FaultPlan(drop=0.1))
    pair.send(MESSAGES)
    got = set(numbers(pair.server.poll(0)))
    lost = [number not in got for number in range(MESSAGES)]
    both = sum(first and second for first, second in pairwise(lost))
    assert_rate(both, 0.01)


def test_messages_are_duplicated_at_the_rate_of_the_plan() -> None:
    pair = Pair(FaultPlan(duplicate=0.2))
    pair.send(MESSAGES)
    got = numbers(pair.server.poll(0))
    assert_rate(len(got) - MESSAGES, 0.2)
    assert sorted(set(got)) == list(range(MESSAGES))
    assert pair.client.counts["duplicated"] == len(got) - MESSAGES


def test_received_messages_are_dropped_at_their_own_rate() -> None:
    pair = Pair(FaultPlan(), drop_received=0.1)
    for number in range(MESSAGES):
        pair.server.send("client", [b"%d" % number])
    got = numbers(pair.client.poll(0))
    assert_rate(MESSAGES - len(got), 0.1)
    assert pair.client.counts["received"] == MESSAGES
    assert pair.client.counts["drop_received"] == MESSAGES - len(got)


def test_delayed_messages_arrive_within_their_bounds_and_no_earlier() -> None:
    pair = Pair(FaultPlan(delay=0.25, delay_s=(2.0, 6.0)))
    pair.send(MESSAGES)
    at_once = pair.run_until(1.99)
    assert_rate(MESSAGES - len(at_once), 0.25)
    assert pair.client.counts["delayed"] == MESSAGES - len(at_once)
    halfway = pair.run_until(4.0)
    assert_rate(len(halfway), 0.5, pair.client.counts["delayed"])
    rest = pair.run_until(6.0)
    assert sorted(at_once + halfway + rest) == list(range(MESSAGES))
    assert pair.client.next_due() == math.inf


def test_reordering_lets_later_messages_overtake_and_loses_none() -> None:
    pair = Pair(FaultPlan(reorder=0.1))
    got: list[int] = []
    for number in range(MESSAGES):
        pair.client.send("server", [b"%d" % number])
        got += pair.run_until(pair.now + 0.0001)
    got += pair.run_until(pair.now + 1.0)
    assert sorted(got) == list(range(MESSAGES))
    assert_rate(pair.client.counts["reordered"], 0.1)
    overtaken = sum(later < earlier for earlier, later in pairwise(got))
    assert overtaken > MESSAGES * 0.05


def test_all_faults_together_keep_their_rates() -> None:
    pair = Pair(FaultPlan(drop=0.1, duplicate=0.1, delay=0.1, reorder=0.1))
    pair.send(MESSAGES)
    counts = pair.client.counts
    kept = MESSAGES - counts["dropped"]
    copies = kept + counts["duplicated"]
    assert_rate(counts["dropped"], 0.1)
    assert_rate(counts["duplicated"], 0.1, kept)
    assert_rate(counts["delayed"], 0.1, copies)
    assert_rate(counts["reordered"], 0.1, copies - counts["delayed"])
    assert len(pair.run_until(1.0)) == copies


def lost_by(seed: int) -> set[int]:
    pair = Pair(FaultPlan(drop=0.1), seed=seed)
    pair.send(MESSAGES)
    return set(range(MESSAGES)) - set(numbers(pair.server.poll(0)))


def test_the_same_seed_makes_the_same_decisions_and_another_seed_independent_ones() -> None:
    first, second = lost_by(1), lost_by(2)
    assert first == lost_by(1)
    assert_rate(len(first & second), 0.01)


def test_what_arrives_between_does_not_change_what_is_lost_on_sending() -> None:
    pair = Pair(FaultPlan(drop=0.1), drop_received=0.3)
    got: list[int] = []
    for number in range(MESSAGES):
        pair.client.send("server", [b"%d" % number])
        if number % 3 == 0:
            pair.server.send("client", [b"0"])
            pair.client.poll(0)
        got += numbers(pair.server.poll(0))
    assert set(range(MESSAGES)) - set(got) == lost_by(1)


def test_a_held_message_is_kept_by_reference() -> None:
    pair = Pair(FaultPlan(delay=1.0, delay_s=(1.0, 1.0)))
    buffer = bytearray(b"1")
    pair.client.send("server", [buffer])
    buffer[:] = b"2"
    assert pair.run_until(1.0) == [2]


def test_held_messages_die_with_their_connection() -> None:
    pair = Pair(FaultPlan(delay=1.0, delay_s=(1.0, 1.0)))
    pair.send(5)
    pair.server.close()
    assert type(pair.client.poll(0)[0]) is Disconnected
    assert pair.client.next_due() == math.inf
    assert pair.client.counts["discarded"] == 5
    pair.send(3)
    pair.client.disconnect("server")
    assert pair.client.next_due() == math.inf
    assert pair.client.counts["discarded"] == 8


def test_a_cut_loses_both_directions_and_tells_of_its_beginning_and_end() -> None:
    pair = Pair(FaultPlan())
    pair.send(1)
    pair.client.cut("server", until=5.0)
    assert pair.client.next_due() == 0.0
    [told] = pair.client.poll(0)
    assert (type(told), told.peer) == (Disconnected, "server")
    assert pair.client.next_due() == 5.0
    pair.now = 3.0
    pair.client.send("server", [b"7"])
    pair.server.send("client", [b"8"])
    assert pair.client.poll(0) == []
    pair.now = 5.0
    assert pair.client.poll(0) == [Connected("server")]
    assert pair.client.next_due() == math.inf
    pair.client.send("server", [b"9"])
    pair.server.send("client", [b"10"])
    assert numbers(pair.server.poll(0)) == [0, 9]
    assert numbers(pair.client.poll(0)) == [10]
    assert pair.client.counts["cut"] == 2


def test_what_arrived_during_a_cut_is_lost_even_if_it_is_polled_at_its_end() -> None:
    pair = Pair(FaultPlan())
    pair.client.cut("server", until=5.0)
    pair.server.send("client", [b"1"])
    pair.now = 5.0
    kinds = [type(event) for event in pair.client.poll(0)]
    assert kinds == [Disconnected, Connected]


def test_cutting_again_prolongs_and_tells_nothing_twice() -> None:
    pair = Pair(FaultPlan())
    pair.client.cut("server", until=5.0)
    pair.client.cut("server", until=8.0)
    pair.client.cut("server", until=2.0)
    assert [type(event) for event in pair.client.poll(0)] == [Disconnected]
    pair.now = 7.0
    assert pair.client.poll(0) == []
    assert pair.client.next_due() == 8.0


def test_a_peer_that_is_lost_during_a_cut_does_not_return_with_its_end() -> None:
    pair = Pair(FaultPlan())
    pair.client.cut("server", until=5.0)
    pair.client.poll(0)
    pair.server.close()
    pair.now = 5.0
    assert pair.client.poll(0) == []


def test_a_cut_without_end_is_never_due() -> None:
    pair = Pair(FaultPlan())
    pair.client.cut("server", until=math.inf)
    assert [type(event) for event in pair.client.poll(0)] == [Disconnected]
    assert pair.client.next_due() == math.inf


def test_a_cut_before_the_connection_delays_the_news_of_it() -> None:
    pair = Pair(FaultPlan())
    pair.client.disconnect("server")
    pair.client.cut("server", until=5.0)
    pair.client.connect("server", f"tcp://{HOST}:20000")
    assert pair.client.poll(0) == []
    pair.now = 5.0
    assert pair.client.poll(0) == [Connected("server")]


def test_a_blocking_poll_sends_held_messages_in_time() -> None:
    network = InprocNetwork()
    plan = FaultPlan(delay=1.0, delay_s=(0.05, 0.05))
    client = FaultyVan(InprocVan(network, "client"), plan, 1, time.monotonic)
    server = InprocVan(network, "server")
    client.connect("server", f"tcp://{HOST}:{server.bind(HOST, 0)}")
    client.poll(0)
    server.poll(0)
    begin = time.monotonic()
    client.send("server", [b"1"])
    owner = threading.Thread(target=client.poll, args=(None,))
    owner.start()
    [event] = server.poll(10)
    assert type(event) is Received
    assert time.monotonic() - begin >= 0.05
    client.wake()
    owner.join(10)
    assert not owner.is_alive()


def test_a_blocking_poll_wakes_for_the_end_of_a_cut() -> None:
    network = InprocNetwork()
    client = FaultyVan(InprocVan(network, "client"), FaultPlan(), 1, time.monotonic)
    server = InprocVan(network, "server")
    client.connect("server", f"tcp://{HOST}:{server.bind(HOST, 0)}")
    client.poll(0)
    begin = time.monotonic()
    client.cut("server", begin + 0.05)
    assert [type(event) for event in client.poll(10)] == [Disconnected]
    assert client.poll(10) == [Connected("server")]
    assert 0.05 <= time.monotonic() - begin < 5


def test_muted_messages_are_lost_in_one_direction_and_nothing_shows() -> None:
    pair = Pair(FaultPlan())
    pair.client.mute("server", 5.0)
    pair.client.mute("server", 3.0)  # a second call can only make it longer
    pair.send(3)
    pair.server.send("client", [b"7"])
    assert numbers(pair.client.poll(0)) == [7]
    assert pair.server.poll(0) == []
    pair.now = 5.0
    pair.send(1)
    assert numbers(pair.server.poll(0)) == [0]
    assert pair.client.counts["muted"] == 3


def test_a_held_message_is_lost_if_it_is_due_while_its_peer_is_muted() -> None:
    pair = Pair(FaultPlan(delay=1.0, delay_s=(1.0, 1.0)))
    pair.send(1)
    pair.client.mute("server", 2.0)
    assert pair.run_until(3.0) == []
    pair.send(1)
    assert pair.run_until(5.0) == [0]
