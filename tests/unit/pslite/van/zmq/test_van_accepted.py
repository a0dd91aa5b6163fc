"""Joining routing ids and descriptors: every order in which libzmq can tell the same story.

``opened`` and ``closed`` are what the monitor says, ``heard`` is a message that was read. Time is
a number; the settling time is 1.
"""

from __future__ import annotations

import math

import pytest

from pslite.van.base import Connected, Disconnected, VanEvent
from pslite.van.zmq.accepted import (
    HANDSHAKE_BYTES,
    MAX_FURTHER,
    REMEMBERED_ENDS,
    AcceptedConnections,
    further_routing_id,
    make_routing_id,
    over_their_share,
    split_routing_id,
)


class Story:
    """Feeds the record and keeps what it tells."""

    def __init__(self) -> None:
        self.record = AcceptedConnections(settle_s=1.0)
        self.events: list[VanEvent] = []

    def opened(self, descriptor: int) -> None:
        self.record.descriptor_opened(descriptor)

    def closed(self, descriptor: int, now: float = 0.0) -> None:
        self.record.descriptor_closed(descriptor, now)

    def heard(self, routing_id: bytes, descriptor: int, now: float = 0.0) -> str | None:
        if routing_id in self.record.speakers:
            return self.record.speakers[routing_id]
        return self.record.heard(routing_id, descriptor, now, self.events)

    def told(self, now: float) -> list[tuple[str, str]]:
        """What the record has told since the last time, ends that are due by ``now`` included."""
        self.record.report_ended(now, self.events)
        told = [(type(event).__name__, event.peer) for event in self.events]
        self.events.clear()
        return told


@pytest.fixture
def story() -> Story:
    return Story()


A1, A2, A3 = (make_routing_id("a", born_ns=5, number=number) for number in (1, 2, 3))
B1 = make_routing_id("b", born_ns=1, number=1)
UP, DOWN = Connected.__name__, Disconnected.__name__


def test_routing_ids_carry_the_uid_and_grow_with_time() -> None:
    order = bytes([0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 4])
    assert split_routing_id(make_routing_id("wörker", 3, 4)) == ("wörker", 0, order)
    further = further_routing_id(make_routing_id("wörker", 3, 4), 15)
    assert split_routing_id(further) == ("wörker", 15, order)
    orders = [
        split_routing_id(make_routing_id("a", born_ns, number))
        for born_ns, number in [(1, 1), (1, 2), (1, 256), (2, 1), (2**40, 1)]
    ]
    assert orders == sorted(orders, key=lambda said: said or ("", 0, b""))


@pytest.mark.parametrize(
    "routing_id",
    [
        b"",
        b"abc",
        b"\0" + bytes(12),
        b"\1" + bytes(12),
        b"a\x10" + bytes(12),
        b"a\0short",
        b"\xff\0" + bytes(12),
        A1 + b"x",
    ],
)
def test_a_routing_id_that_no_van_made_is_never_heard(story: Story, routing_id: bytes) -> None:
    story.opened(7)
    assert story.heard(routing_id, 7) is None
    assert story.told(9) == []


def test_a_connection_begins_with_its_first_message_and_ends_with_its_descriptor(
    story: Story,
) -> None:
    story.opened(7)
    assert story.told(0) == []
    assert story.heard(A1, 7) == "a"
    assert story.told(0) == [(UP, "a")]
    assert story.record.routing_id_of("a") == A1
    story.closed(7, now=1)
    assert story.told(1.9) == []
    assert story.record.next_due() == 2
    assert story.told(2) == [(DOWN, "a")]
    assert story.record.routing_id_of("a") is None
    assert story.record.next_due() == math.inf


def test_messages_read_while_the_end_settles_are_still_heard_and_later_ones_never(
    story: Story,
) -> None:
    story.opened(7)
    story.heard(A1, 7)
    story.closed(7, now=1)
    assert story.heard(A1, 7, now=1.5) == "a"
    assert story.told(2) == [(UP, "a"), (DOWN, "a")]
    assert story.heard(A1, 7, now=2.5) is None
    assert story.told(9) == []


def test_a_connection_that_ended_before_its_first_message_was_read_is_told_whole(
    story: Story,
) -> None:
    story.opened(7)
    story.closed(7)
    assert story.heard(A1, 7, now=3) == "a"
    assert story.told(3) == [(UP, "a")]
    assert story.told(4) == [(DOWN, "a")]


def test_an_end_is_not_told_of_the_heir_of_the_descriptor(story: Story) -> None:
    story.opened(7)
    story.heard(A1, 7)
    story.closed(7)
    story.opened(7)
    assert story.heard(B1, 7) == "b"
    assert story.told(1) == [(UP, "a"), (UP, "b"), (DOWN, "a")]
    assert story.record.routing_id_of("b") == B1
    story.closed(7, now=2)
    assert story.told(3) == [(DOWN, "b")]


def test_a_node_that_returns_on_the_same_descriptor_is_told_down_and_up(story: Story) -> None:
    story.opened(7)
    story.heard(A1, 7)
    story.closed(7)
    story.opened(7)
    assert story.heard(A2, 7) == "a"
    assert story.told(0) == [(UP, "a"), (DOWN, "a"), (UP, "a")]
    assert story.told(9) == []
    assert story.record.routing_id_of("a") == A2


def test_a_node_that_returns_elsewhere_replaces_its_old_connection(story: Story) -> None:
    story.opened(7)
    story.opened(8)
    story.heard(A1, 7)
    assert story.heard(A2, 8) == "a"
    assert story.told(0) == [(UP, "a"), (DOWN, "a"), (UP, "a")]
    assert story.heard(A1, 7) is None
    story.closed(7)
    assert story.told(9) == []
    assert story.heard(A2, 8) == "a"


def test_the_first_words_of_an_older_connection_do_not_replace_a_newer_one(story: Story) -> None:
    story.opened(7)
    story.opened(8)
    assert story.heard(A2, 8) == "a"
    assert story.heard(A1, 7) is None
    story.closed(7)
    assert story.told(9) == [(UP, "a")]
    assert story.record.routing_id_of("a") == A2


def test_an_older_connection_is_heard_once_the_newer_one_is_gone(story: Story) -> None:
    """Its order can only be wrong, because the clock of its machine was set back."""
    story.opened(7)
    story.opened(8)
    story.heard(A2, 8)
    assert story.heard(A1, 7) is None
    story.closed(8)
    assert story.told(1) == [(UP, "a"), (DOWN, "a")]
    assert story.heard(A1, 7, now=2) == "a"
    assert story.told(9) == [(UP, "a")]


def test_late_words_of_the_dead_do_not_end_the_living_heir(story: Story) -> None:
    """b inherits descriptor 7 and is read first; then come the words of a, who is dead."""
    story.opened(7)
    story.closed(7)
    story.opened(7)
    assert story.heard(B1, 7) == "b"
    assert story.heard(A1, 7) == "a"
    assert story.record.next_due() == 1.0
    assert story.record.doubtful(0.9) == []
    assert story.record.doubtful(1.0) == [B1, A1]
    story.record.found_dead(A1, 1.0)
    assert story.told(2.0) == [(UP, "b"), (UP, "a"), (DOWN, "a")]
    assert story.record.doubtful(3.0) == []
    assert story.record.next_due() == math.inf
    story.closed(7, now=4)
    assert story.told(5) == [(DOWN, "b")]


def test_a_doubt_is_asked_about_until_it_is_resolved(story: Story) -> None:
    """libzmq may need a while to take the dead connection down."""
    story.opened(7)
    story.closed(7)
    story.opened(7)
    for routing_id in (A1, B1):
        story.heard(routing_id, 7)
    assert story.record.doubtful(1.0) == [A1, B1]
    assert story.record.doubtful(1.5) == []
    assert story.record.doubtful(2.0) == [A1, B1]
    story.record.found_dead(B1, 2.0)
    assert story.record.doubtful(3.0) == []
    assert story.told(3.0) == [(UP, "a"), (UP, "b"), (DOWN, "b")]


def test_an_end_of_a_doubtful_descriptor_is_the_end_of_all_who_claim_it(story: Story) -> None:
    story.opened(7)
    story.closed(7)
    story.opened(7)
    story.heard(B1, 7)
    story.heard(A1, 7)
    story.closed(7, now=5)
    assert story.told(6) == [(UP, "b"), (UP, "a"), (DOWN, "b"), (DOWN, "a")]
    assert story.record.next_due() == math.inf


def test_a_forgotten_connection_is_not_heard_but_the_next_one_is(story: Story) -> None:
    story.opened(7)
    story.opened(8)
    story.heard(A1, 7)
    story.record.forget("a")
    story.record.forget("nobody")
    assert story.heard(A1, 7) is None
    assert story.record.routing_id_of("a") is None
    assert story.heard(A2, 8) == "a"
    story.closed(7)
    assert story.told(9) == [(UP, "a"), (UP, "a")]


def test_a_stranger_that_never_speaks_leaves_no_trace(story: Story) -> None:
    story.opened(7)
    story.closed(7)
    story.opened(7)
    assert story.heard(A1, 7) == "a"
    assert story.told(9) == [(UP, "a")]


def test_the_memory_of_ended_connections_is_bounded(story: Story) -> None:
    for number in range(REMEMBERED_ENDS + 10):
        story.opened(7)
        story.heard(make_routing_id("a", 1, number), 7, now=number)
        story.closed(7, now=number)
        story.told(number + 1)
    oldest, newest = (make_routing_id("a", 1, number) for number in (0, REMEMBERED_ENDS + 9))
    assert story.heard(newest, 7) is None
    assert story.heard(oldest, 7) == "a"


# -- further connections -------------------------------------------------------------------

FURTHER = [further_routing_id(A1, number) for number in range(1, MAX_FURTHER + 1)]


def test_messages_of_further_connections_are_the_peers_and_nobody_is_told_of_them(
    story: Story,
) -> None:
    story.opened(7)
    story.heard(A1, 7)
    story.opened(8)
    assert story.heard(FURTHER[0], 8) == "a"
    assert story.told(9) == [(UP, "a")]
    story.closed(8)
    assert story.told(9) == []
    assert story.heard(A1, 7) == "a"


def test_a_further_connection_is_not_heard_before_its_first_one(story: Story) -> None:
    story.opened(8)
    assert story.heard(FURTHER[0], 8) is None
    story.opened(7)
    assert story.heard(A1, 7) == "a"
    assert story.heard(FURTHER[0], 8) == "a"
    assert story.told(0) == [(UP, "a")]


def test_large_messages_take_turns_and_others_go_by_the_first(story: Story) -> None:
    story.opened(7)
    story.heard(A1, 7)
    assert [story.record.next_routing_id_of("a") for _ in range(2)] == [A1, A1]
    for descriptor, further in ((8, FURTHER[0]), (9, FURTHER[1])):
        story.opened(descriptor)
        story.heard(further, descriptor)
    turns = [story.record.next_routing_id_of("a") for _ in range(6)]
    assert sorted(turns, key=str) == sorted([A1, FURTHER[0], FURTHER[1]] * 2, key=str)
    assert set(turns[:3]) == set(turns[3:])
    assert story.record.routing_id_of("a") == A1
    story.closed(8)
    story.told(9)
    assert {story.record.next_routing_id_of("a") for _ in range(6)} == {A1, FURTHER[1]}
    assert story.record.next_routing_id_of("nobody") is None


def test_further_connections_end_with_their_first_one(story: Story) -> None:
    story.opened(7)
    story.heard(A1, 7)
    story.opened(8)
    story.heard(FURTHER[0], 8)
    story.closed(7)
    assert story.told(9) == [(UP, "a"), (DOWN, "a")]
    assert story.heard(FURTHER[0], 8) is None
    story.closed(8)
    assert story.told(99) == []
    assert not story.record.speakers


def test_further_connections_of_a_node_that_came_anew_do_not_serve_the_new_one(
    story: Story,
) -> None:
    """The old ones still seem alive; what was sent there would be lost in silence."""
    story.opened(7)
    story.heard(A1, 7)
    story.opened(8)
    story.heard(FURTHER[0], 8)
    story.opened(9)
    story.opened(10)
    assert story.heard(A2, 10) == "a"
    assert story.told(0) == [(UP, "a"), (DOWN, "a"), (UP, "a")]
    assert story.heard(FURTHER[0], 8) is None
    assert story.heard(FURTHER[1], 9) is None
    assert [story.record.next_routing_id_of("a") for _ in range(3)] == [A2] * 3


def test_further_connections_that_are_heard_before_their_first_one_do_not_join_an_old_one(
    story: Story,
) -> None:
    story.opened(7)
    story.heard(A1, 7)
    new = further_routing_id(A2, 1)
    story.opened(8)
    story.opened(9)
    assert story.heard(new, 9) is None
    assert story.heard(A2, 8) == "a"
    assert story.heard(new, 9) == "a"
    assert {story.record.next_routing_id_of("a") for _ in range(2)} == {A2, new}


def test_a_forgotten_peer_is_not_heard_by_its_further_connections_either(story: Story) -> None:
    story.opened(7)
    story.heard(A1, 7)
    story.opened(8)
    story.heard(FURTHER[0], 8)
    story.record.forget("a")
    assert story.heard(FURTHER[0], 8) is None
    assert story.heard(A1, 7) is None
    assert story.record.next_routing_id_of("a") is None


def test_an_end_waits_for_the_last_words_of_further_connections_and_not_for_ever() -> None:
    story = Story()
    story.record = AcceptedConnections(settle_s=1.0, overdue_s=5.0)
    for descriptor, routing_id in ((7, A1), (8, FURTHER[0]), (9, FURTHER[1])):
        story.opened(descriptor)
        story.heard(routing_id, descriptor)
    story.closed(7, now=1)
    assert story.told(2) == [(UP, "a")]
    assert story.heard(FURTHER[0], 8, now=2.5) == "a"
    story.closed(8, now=3)
    assert story.told(4) == []
    assert story.heard(FURTHER[1], 9, now=4.5) == "a"
    assert story.told(5.9) == []
    assert story.told(9) == [(DOWN, "a")]
    assert story.heard(FURTHER[1], 9, now=9) is None


def test_an_end_is_told_as_soon_as_all_connections_have_ended() -> None:
    story = Story()
    story.record = AcceptedConnections(settle_s=1.0, overdue_s=100.0)
    for descriptor, routing_id in ((7, A1), (8, FURTHER[0])):
        story.opened(descriptor)
        story.heard(routing_id, descriptor)
    story.closed(7, now=1)
    story.closed(8, now=1.5)
    assert story.told(2.4) == [(UP, "a")]
    assert story.told(3.5) == [(DOWN, "a")]
    assert not story.record.speakers


def test_a_newer_connection_does_not_wait_for_the_last_words_of_the_old_one() -> None:
    story = Story()
    story.record = AcceptedConnections(settle_s=1.0, overdue_s=100.0)
    for descriptor, routing_id in ((7, A1), (8, FURTHER[0]), (9, A2)):
        story.opened(descriptor)
        story.heard(routing_id, descriptor)
    story.closed(7, now=1)
    assert story.told(2) == [(UP, "a"), (DOWN, "a"), (UP, "a")]
    assert story.record.next_due() == math.inf


# -- strangers ----------------------------------------------------------------------------


def test_strangers_share_the_memory_that_they_may_fill() -> None:
    sent = {3: 400_000, 4: 500_001, 5: 10}
    assert over_their_share(sent, 1_500_000) == [4]
    assert over_their_share(sent, 1_000_000) == [3, 4]
    assert over_their_share({}, 0) == []


def test_who_sends_a_handshake_is_let_be_in_any_crowd() -> None:
    crowd = dict.fromkeys(range(10_000), HANDSHAKE_BYTES)
    assert over_their_share(crowd, 1_000_000) == []
    crowd[77] += 1
    assert over_their_share(crowd, 1_000_000) == [77]


def test_who_has_said_nothing_yet_is_known_until_it_speaks_or_goes(story: Story) -> None:
    for descriptor in (5, 6, 7):
        story.opened(descriptor)
    story.heard(A1, 6)
    story.closed(7)
    assert (story.record.unheard_descriptors(), story.record.num_unheard) == ({5}, 1)
    assert story.record.heard_descriptors() == [6]
