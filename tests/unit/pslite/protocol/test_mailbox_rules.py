"""Mailboxes as a server keeps them: order, room, senders and receivers that are gone."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from pslite.errors import NodeLostError
from pslite.protocol.collective import GroupKey
from pslite.protocol.mailbox import (
    ANYBODY,
    BOX_BYTES,
    Address,
    Deliver,
    Keep,
    Mailboxes,
    MailEffect,
    Return,
)

GROUP = GroupKey("", (0, 1, 2), 0)
LOST = NodeLostError("worker 1 is lost", role="worker", rank=1)

Effects = list[MailEffect[str, str]]


class Office:
    """Mailboxes whose effects are lists."""

    def __init__(self) -> None:
        self.boxes: Mailboxes[str, str] = Mailboxes()
        self.numbers: Counter[tuple[int, ...]] = Counter()

    def number(self, *stream: int) -> int:
        self.numbers[stream] += 1
        return self.numbers[stream]

    def send(self, name: str, source: int, to: int, tag: int = 0, nbytes: int = 1) -> Effects:
        number = self.number(source, to, tag)
        return list(self.boxes.send(Address(GROUP, source, to, tag, number), nbytes, name))

    def receive(self, name: str, source: int, to: int, tag: int = 0) -> Effects:
        number = self.number(to, tag)
        return list(self.boxes.receive(Address(GROUP, source, to, tag, number), name))


def test_a_letter_is_kept_until_it_is_asked_for() -> None:
    office = Office()
    assert office.send("a", 1, 0) == [Keep("a")]
    assert office.receive("r", 1, 0) == [Deliver("a", "r", 1, True)]
    assert office.receive("r2", 1, 0) == []


def test_a_request_that_waits_gets_the_next_letter_that_fits() -> None:
    office = Office()
    for name, source, tag in [("r1", 2, 0), ("r2", 1, 5), ("r3", ANYBODY, 0), ("r4", 1, 0)]:
        assert office.receive(name, source, 0, tag) == []
    assert office.send("a", 1, 0) == [Deliver("a", "r3", 1, False)]
    assert office.send("b", 1, 0, 5) == [Deliver("b", "r2", 1, False)]
    assert office.send("c", 1, 0) == [Deliver("c", "r4", 1, False)]
    assert office.send("d", 1, 0) == [Keep("d")]
    assert office.send("e", 2, 0) == [Deliver("e", "r1", 2, False)]


def test_letters_and_requests_that_overtake_others_wait_for_their_turn() -> None:
    boxes: Mailboxes[str, str] = Mailboxes()
    first, second, third = (Address(GROUP, 1, 0, 7, number) for number in (1, 2, 3))
    assert list(boxes.send(third, 1, "c")) == list(boxes.send(second, 1, "b")) == []
    assert list(boxes.send(first, 1, "a")) == [Keep("a"), Keep("b"), Keep("c")]
    assert list(boxes.receive(second, "r2")) == []
    assert list(boxes.receive(first, "r1")) == [
        Deliver("a", "r1", 1, True),
        Deliver("b", "r2", 1, True),
    ]


def test_groups_receivers_and_tags_have_letters_of_their_own() -> None:
    office = Office()
    office.send("a", 1, 0, 7)
    other = Address(GROUP._replace(number=1), 1, 0, 7, 1)
    assert list(office.boxes.receive(other, "r")) == []
    assert office.receive("r", 1, 2, 7) == []
    assert office.receive("r", 1, 0, 8) == []
    assert office.receive("r", 2, 0, 7) == []
    assert office.receive("r", 1, 0, 7) == [Deliver("a", "r", 1, True)]


def test_further_letters_of_a_message_are_found_by_its_number() -> None:
    boxes: Mailboxes[str, str] = Mailboxes()
    second = Address(GROUP, 1, 0, 7, message=3, chunk=1)
    assert list(boxes.send(second, 1, "3.1")) == [Keep("3.1")]
    assert list(boxes.receive(Address(GROUP, ANYBODY, 0, 7, 1), "first")) == []
    assert list(boxes.receive(second._replace(message=4), "other")) == []
    assert list(boxes.receive(second, "r")) == [Deliver("3.1", "r", 1, True)]


def test_a_letter_beyond_the_room_waits_until_there_is_some() -> None:
    office = Office()
    half = BOX_BYTES // 2
    assert office.send("a", 1, 0, nbytes=half) == [Keep("a")]
    assert office.send("b", 2, 0, nbytes=half) == [Keep("b")]
    assert office.send("c", 1, 0, nbytes=1) == []
    assert office.send("d", 1, 2, nbytes=half) == [Keep("d")]
    assert office.receive("r", 2, 0) == [Deliver("b", "r", 2, True), Keep("c")]


def test_a_letter_that_waits_for_room_is_delivered_when_it_is_wanted() -> None:
    office = Office()
    office.send("a", 1, 0, 1, nbytes=BOX_BYTES)
    assert office.send("b", 1, 0, 2) == []
    assert office.receive("r", 1, 0, 2) == [Deliver("b", "r", 1, False)]
    assert office.receive("r", 1, 0, 1) == [Deliver("a", "r", 1, True)]


def test_a_letter_larger_than_a_box_is_kept_alone() -> None:
    office = Office()
    assert office.send("a", 1, 0, nbytes=3 * BOX_BYTES) == [Keep("a")]
    assert office.send("b", 1, 0) == []
    assert office.receive("r", 1, 0) == [Deliver("a", "r", 1, True), Keep("b")]


def test_letters_outlive_their_sender_and_requests_to_it_end() -> None:
    office = Office()
    office.send("a", 1, 0)
    office.receive("r1", 1, 2)
    office.receive("any", ANYBODY, 2)
    assert list(office.boxes.depart(1, LOST)) == [Return("r1", LOST)]
    assert office.receive("r2", 1, 0) == [Deliver("a", "r2", 1, True)]
    assert office.receive("r3", 1, 0) == [Return("r3", LOST)]
    assert list(office.boxes.depart(0, LOST)) == [Return("any", LOST)]


def test_letters_to_a_worker_that_is_gone_are_returned() -> None:
    office = Office()
    office.send("kept", 0, 1, nbytes=BOX_BYTES)
    office.send("waiting", 0, 1)
    assert list(office.boxes.depart(1, LOST)) == [Return("waiting", LOST)]
    assert office.send("late", 0, 1) == [Return("late", LOST)]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["send", "receive"]),
        st.integers(ANYBODY, 2),
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, BOX_BYTES),
    ),
    max_size=40,
)


@given(EVENTS)
def test_letters_arrive_once_and_in_the_order_of_each_sender_and_tag(
    events: list[tuple[str, int, int, int, int]],
) -> None:
    office = Office()
    sent: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    got: dict[tuple[int, int, int], list[str]] = defaultdict(list)
    requests: dict[str, Address] = {}
    kept: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for number, (what, source, to, tag, nbytes) in enumerate(events):
        name = f"{what} {number}"
        if what == "send":
            source = max(source, 0)
            sent[source, to, tag].append(name)
            sizes[name] = nbytes
            effects = office.send(name, source, to, tag, nbytes)
        else:
            requests[name] = Address(GROUP, source, to, tag, 0)
            effects = office.receive(name, source, to, tag)
        for effect in effects:
            if isinstance(effect, Keep):
                assert effect.letter not in kept
                kept[effect.letter] = sizes[effect.letter]
            elif isinstance(effect, Deliver):
                asked = requests.pop(effect.request)
                assert asked.source in (ANYBODY, effect.source)
                got[effect.source, asked.to, asked.tag].append(effect.letter)
                assert effect.is_kept == (effect.letter in kept)
                kept.pop(effect.letter, None)
    for way, names in got.items():
        assert names == sent[way][: len(names)]
    for asked in requests.values():  # none waits for a letter that is there
        for (source, to, tag), names in sent.items():
            fits = (to, tag) == (asked.to, asked.tag) and asked.source in (ANYBODY, source)
            assert not fits or len(got[source, to, tag]) == len(names)
