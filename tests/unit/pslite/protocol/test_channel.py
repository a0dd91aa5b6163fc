"""Exactly-once delivery over a transport that loses, repeats, delays and reorders."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from pslite.protocol.channel import MAX_ALSO, MAX_BACKOFF, RECEIVE_WINDOW, Channel, Outgoing
from pslite.wire.base import Ints
from pslite.wire.messages import Beat, Refused

TIMEOUT_S = 1.0


def number(channel: Channel, now: float = 0.0, nbytes: int = 0) -> Outgoing:
    return channel.number(Beat(), (), nbytes, 1, now)


def arrive(channel: Channel, sequences: Iterable[int]) -> list[bool]:
    return [channel.admit(sequence) for sequence in sequences]


def repeated(channel: Channel, now: float) -> list[int]:
    return [outgoing.sequence for outgoing in channel.repeats(now)]


# -- the receiving side -------------------------------------------------------------------


def test_a_message_that_comes_again_is_refused_and_acknowledged_again() -> None:
    channel = Channel(TIMEOUT_S)
    first = arrive(channel, [1])
    told = channel.acceptance
    again = arrive(channel, [1])
    assert (first, again, told, channel.acceptance) == ([True], [False], (1, ()), (1, ()))


def test_gaps_are_acknowledged_as_such_and_close_when_the_missing_arrives() -> None:
    channel = Channel(TIMEOUT_S)
    news = arrive(channel, [1, 4, 3, 4])
    with_gap = channel.acceptance
    arrive(channel, [2])
    assert (news, with_gap) == ([True, True, True, False], (1, (3, 4)))
    assert channel.acceptance == (4, ())


def test_an_acknowledgement_lists_a_bounded_number_above_the_gap() -> None:
    channel = Channel(TIMEOUT_S)
    arrive(channel, range(1000, 1, -1))
    assert channel.acceptance == (0, tuple(range(2, 2 + MAX_ALSO)))


def test_a_number_far_ahead_is_not_remembered() -> None:
    channel = Channel(TIMEOUT_S)
    news = arrive(channel, [RECEIVE_WINDOW + 1, RECEIVE_WINDOW, 2**63])
    assert (news, channel.acceptance) == ([False, True, False], (0, (RECEIVE_WINDOW,)))


# -- the sending side ---------------------------------------------------------------------


def test_messages_are_numbered_from_one_and_kept_by_reference() -> None:
    channel = Channel(TIMEOUT_S)
    message, frame = Refused("ConfigError", "no"), bytearray(b"12345678")
    outgoing = channel.number(message, (frame,), 8, 7, 3.0)
    assert outgoing == Outgoing(1, 7, message, (frame,), 8, 3.0)
    assert outgoing.frames[0] is frame
    assert number(channel).sequence == 2


def test_bytes_count_as_under_way_until_they_are_accepted() -> None:
    channel = Channel(TIMEOUT_S)
    for nbytes in (10, 20, 40):
        number(channel, nbytes=nbytes)
    under_way = [channel.unaccepted_bytes]
    frees = [
        channel.accepted(1, ()),
        channel.accepted(1, (3,)),
        channel.accepted(1, (3, 9)),
    ]
    under_way.append(channel.unaccepted_bytes)
    frees.append(channel.accepted(2, ()))
    assert (under_way, frees) == ([70, 20], [True, True, False, True])
    assert (channel.unaccepted_bytes, channel.everything_accepted) == (0, True)


def test_what_is_accepted_is_not_sent_again() -> None:
    channel = Channel(TIMEOUT_S)
    for _ in range(4):
        number(channel)
    channel.accepted(1, (3,))
    assert repeated(channel, TIMEOUT_S) == [2, 4]


def test_repeats_come_further_and_further_apart_and_never_end() -> None:
    # Defect h of ps-lite: after ten repeats it aborted the process.
    channel = Channel(TIMEOUT_S)
    number(channel)
    gaps, last = [], 0.0
    for _ in range(50):
        due = channel.next_due
        assert repeated(channel, due - 0.001) == []
        assert repeated(channel, due) == [1]
        gaps.append(due - last)
        last = due
    longest = TIMEOUT_S * 2**MAX_BACKOFF
    assert gaps == [1.0, 2.0, 4.0, 8.0] + [longest] * 46


def test_a_channel_without_anything_under_way_has_nothing_due() -> None:
    channel = Channel(TIMEOUT_S)
    before = channel.next_due
    number(channel, now=5.0)
    during = channel.next_due
    channel.accepted(1, ())
    assert (before, during, channel.next_due) == (math.inf, 6.0, math.inf)
    assert repeated(channel, 100.0) == []


def test_after_a_reconnection_everything_under_way_is_sent_at_once() -> None:
    channel = Channel(TIMEOUT_S)
    for _ in range(3):
        number(channel)
    channel.accepted(1, ())
    at_once = [outgoing.sequence for outgoing in channel.repeats(0.1, at_once=True)]
    assert (at_once, channel.next_due) == ([2, 3], 0.1 + 2 * TIMEOUT_S)


def test_a_fresh_message_behind_an_often_repeated_one_is_repeated_in_its_own_time() -> None:
    channel = Channel(TIMEOUT_S)
    number(channel)
    now = 0.0
    for _ in range(6):
        assert channel.next_due < math.inf
        now = channel.next_due
        channel.repeats(now)
    number(channel, now)
    assert channel.next_due == now + TIMEOUT_S
    assert repeated(channel, now + TIMEOUT_S) == [2]


def test_a_message_that_could_not_be_sent_leaves_no_gap_in_the_numbers() -> None:
    channel = Channel(TIMEOUT_S)
    number(channel)
    channel.withdraw(number(channel, nbytes=50))
    assert (number(channel).sequence, channel.unaccepted_bytes) == (2, 0)
    assert repeated(channel, TIMEOUT_S) == [1, 2]


def test_what_nobody_will_accept_any_more_is_forgotten() -> None:
    channel = Channel(TIMEOUT_S)
    number(channel, nbytes=50)
    arrive(channel, [1])
    channel.drop_outgoing()
    assert (channel.everything_accepted, channel.unaccepted_bytes) == (True, 0)
    assert (channel.next_due, repeated(channel, 100.0)) == (math.inf, [])
    assert (number(channel).sequence, channel.acceptance) == (2, (1, ()))


# -- both, over a network that is as bad as it gets ---------------------------------------


class Packet(NamedTuple):
    sender: int
    low: int
    also: Ints
    outgoing: Outgoing | None
    """None: an acknowledgement only."""


class Conversation:
    """Two ends and what is between them."""

    def __init__(self, generator: random.Random, trouble: float) -> None:
        self.random = generator
        self.trouble = trouble
        self.ends = (Channel(TIMEOUT_S), Channel(TIMEOUT_S))
        self.wire: list[Packet] = []
        self.now = 0.0
        #: What each end was given, in the order of arrival.
        self.delivered: tuple[list[str], list[str]] = ([], [])

    def say(self, end: int, text: str) -> None:
        self.transmit(end, self.ends[end].number(Refused("ConfigError", text), (), 1, 1, self.now))

    def transmit(self, end: int, outgoing: Outgoing | None) -> None:
        low, also = self.ends[end].acceptance
        copies = self.random.choice((0, 2)) if self.random.random() < self.trouble else 1
        self.wire += [Packet(end, low, also, outgoing)] * copies

    def arrive(self) -> None:
        packet = self.wire.pop(self.random.randrange(len(self.wire)))
        receiver = 1 - packet.sender
        self.ends[receiver].accepted(packet.low, packet.also)
        outgoing = packet.outgoing
        if outgoing is not None and self.ends[receiver].admit(outgoing.sequence):
            assert isinstance(outgoing.message, Refused)
            self.delivered[receiver].append(outgoing.message.error)

    def settle(self) -> None:
        """Until both ends know that everything arrived."""
        for _ in range(10_000):
            while self.wire:
                self.arrive()
            if all(end.everything_accepted for end in self.ends):
                return
            self.now += TIMEOUT_S
            for end, channel in enumerate(self.ends):
                self.transmit(end, None)
                for outgoing in channel.repeats(self.now):
                    self.transmit(end, outgoing)
        raise AssertionError("the conversation never comes to rest")


@given(
    st.randoms(use_true_random=False),
    st.lists(st.sampled_from([0, 1, "arrive"]), max_size=60),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_everything_arrives_exactly_once_over_any_network(
    generator: random.Random, events: list[int | str], trouble: float
) -> None:
    conversation = Conversation(generator, trouble)
    said: tuple[list[str], list[str]] = ([], [])
    for position, event in enumerate(events):
        if isinstance(event, int):
            said[event].append(str(position))
            conversation.say(event, str(position))
        elif conversation.wire:
            conversation.arrive()
    conversation.settle()
    assert [sorted(texts) for texts in conversation.delivered] == [
        sorted(texts) for texts in (said[1], said[0])
    ]


def test_the_memory_of_a_conversation_does_not_grow_with_its_length() -> None:
    # Defect g of ps-lite: its resender remembered every message for ever.
    conversation = Conversation(random.Random(5), trouble=0.3)
    for position in range(3000):
        conversation.say(position % 2, str(position))
        while len(conversation.wire) > 10:
            conversation.arrive()
        if position % 100 == 99:
            conversation.settle()
    conversation.settle()
    kept = [(end.everything_accepted, end.acceptance) for end in conversation.ends]
    assert kept == [(True, (1500, ()))] * 2
    assert [len(texts) for texts in conversation.delivered] == [1500, 1500]


def test_what_a_slow_link_still_carries_is_not_sent_again() -> None:
    channel = Channel(TIMEOUT_S)
    for position in (100, 200, 300):
        number(channel).position = position
    first = [each.sequence for each in channel.repeats(1.0, passed=150)]
    assert (first, channel.next_due) == ([1], 2.0)  # the others' time begins now
    assert [each.sequence for each in channel.repeats(2.0, passed=300)] == [2, 3]
    at_once = channel.repeats(2.1, at_once=True, passed=250)
    assert [each.sequence for each in at_once] == [1, 2]
