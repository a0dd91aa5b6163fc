"""What a node does with messages and requests of processes whose seats others have taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pslite.errors import NodeLostError, told
from pslite.memory.heap import Heap
from pslite.memory.sharing import Sharing
from pslite.node.customer import Customers, Incoming
from pslite.node.links import Links
from pslite.node.message_filter import OUT_OF_ROLE, UNLISTED, Admission
from pslite.van.base import Received
from pslite.wire.base import Message
from pslite.wire.codec import Envelope, decode, encode
from pslite.wire.messages import BarrierLeave, Beat, Exchange, Refused, Request, Response

LOST = NodeLostError("worker 0 was declared lost", role="worker", rank=0)
REFUSAL = Refused(*told(LOST))
OURS, THEIRS = 101, 202
APP, OTHER_APP = 7, 8


# -- links --------------------------------------------------------------------------------


class Wire:
    """A van that only remembers what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Envelope]] = []

    def send(self, peer: str, frames: Sequence[Any]) -> None:
        self.sent.append((peer, decode([bytes(frame) for frame in frames])))


def make_links() -> tuple[Wire, Links]:
    wire: Any = Wire()
    links = Links(
        wire, Sharing(Heap(shared=False)), job="job", incarnation=OURS, resend_timeout_s=1.0
    )
    return wire, links


def hear(links: Links, peer: str, message: Message, sequence: int = 1) -> bool:
    """A message of a peer arrives; returns whether it is passed on."""
    frames = [encode(Envelope("job", 1, THEIRS, 0, sequence, 0, (), (), message))]
    return links.receive(Received(peer, frames), 0.0) is not None


def test_whatever_a_turned_out_process_says_is_answered_with_the_refusal() -> None:
    wire, links = make_links()
    assert hear(links, "W1", Request(APP, 0, 1, 1, b""))
    links.turn_out("W1", REFUSAL)
    assert wire.sent == []
    for sequence, message in ((0, Beat()), (1, Request(APP, 0, 1, 1, b"")), (1, Beat())):
        assert not hear(links, "W1", message, sequence)
    assert [(peer, envelope.message) for peer, envelope in wire.sent] == [("W1", REFUSAL)] * 3
    assert links.dropped.total() == 3


def test_the_refusal_opens_no_channel_and_names_the_seat() -> None:
    wire, links = make_links()
    links.turn_out("W1", REFUSAL)
    hear(links, "W1", Beat())
    ((_, envelope),) = wire.sent
    assert (envelope.sequence, envelope.receiver, envelope.job) == (0, 0, "job")
    assert isinstance(envelope.message, Refused)
    assert (envelope.message.role, envelope.message.rank) == ("worker", 0)
    assert links.everything_accepted()
    assert links.byte_counts() == {}


def test_a_process_that_is_only_shut_out_gets_no_answer() -> None:
    wire, links = make_links()
    links.shut("W1")
    links.turn_out("W2", REFUSAL)
    assert not hear(links, "W1", Beat())
    assert wire.sent == []


def test_nothing_is_sent_again_to_a_process_that_is_turned_out() -> None:
    wire, links = make_links()
    links.send("W1", Request(APP, 0, 1, 1, b""), (), 1, 0.0)
    links.turn_out("W1", REFUSAL)
    links.send("W1", Beat(), (), 1, 0.0)
    links.flush(1, 100.0)
    assert len(wire.sent) == 1
    assert links.everything_accepted(["W1"])


def test_another_process_is_heard_after_the_one_before_was_turned_out() -> None:
    wire, links = make_links()
    links.turn_out("W1", REFUSAL)
    assert hear(links, "W2", Request(APP, 0, 1, 1, b""))
    assert wire.sent == []


def test_not_even_a_strangers_bytes_from_a_turned_out_process_do_harm() -> None:
    wire, links = make_links()
    links.turn_out("W1", REFUSAL)
    assert links.receive(Received("W1", [b"nonsense"]), 0.0) is None
    assert len(wire.sent) == 1


# -- requests between apps ----------------------------------------------------------------


class Server:
    """The apps of a node that workers 9 and 11 ask."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, int]] = []
        self.lent: list[tuple[int, int]] = []
        self.asked: list[Incoming] = []
        self.customers = Customers(self._sends(self.answers), self._at_once, self._sends(self.lent))

    @staticmethod
    def _sends(answers: list[tuple[int, int]]) -> Any:
        def send(node: int, message: Request | Response, _: Sequence[Any]) -> None:
            answers.append((node, message.request_id))

        return send

    @staticmethod
    def _at_once(command: Any) -> None:
        command()

    def begin(self, app: int = APP) -> None:
        self.customers.add(app, self.asked.append)

    def hear(self, node: int, number: int, app: int = APP, *, is_lent: bool = False) -> None:
        request = Request(app, 0, number, 1, b"x" * 10)
        self.customers.request_arrived(node, request, [], 0.0, is_lent=is_lent)


@pytest.mark.parametrize("is_failed", [False, True])
def test_an_answer_to_the_process_before_is_not_sent_to_the_next_one(is_failed: bool) -> None:
    server = Server()
    server.begin()
    server.hear(9, 1)
    server.hear(11, 2)
    server.customers.replaced(9)
    for incoming in server.asked:
        incoming.fail(LOST) if is_failed else incoming.respond(b"done")
    assert server.answers == [(11, 2)]
    assert not server.customers.is_at_work


def test_the_next_process_is_answered_and_may_use_the_same_numbers() -> None:
    server = Server()
    server.begin()
    server.hear(9, 1)
    server.customers.replaced(9)
    server.hear(9, 1)
    before, after = server.asked
    after.respond(b"for the next one")
    before.respond(b"for the one before")
    assert server.answers == [(9, 1)]


def test_each_of_several_processes_gets_only_its_own_answers() -> None:
    server = Server()
    server.begin()
    for number in (1, 2, 3):
        server.hear(9, number)
        server.hear(11, number)
        if number < 3:
            server.customers.replaced(9)
    for incoming in server.asked:
        incoming.respond()
    assert server.answers == [(11, 1), (11, 2), (9, 3), (11, 3)]


def test_answers_in_this_process_follow_the_same_rule() -> None:
    server = Server()
    server.begin()
    server.hear(9, 1, is_lent=True)
    server.customers.replaced(9)
    server.hear(9, 2, is_lent=True)
    for incoming in server.asked:
        incoming.respond()
    assert (server.answers, server.lent) == ([], [(9, 2)])


def test_requests_that_wait_for_an_app_are_forgotten_with_their_process() -> None:
    server = Server()
    server.hear(9, 1)
    server.hear(11, 2)
    server.customers.replaced(9)
    server.hear(9, 3)
    server.begin()
    asked = [(incoming.sender, incoming.request.request_id) for incoming in server.asked]
    assert asked == [(11, 2), (9, 3)]
    for incoming in server.asked:
        incoming.respond()
    assert server.answers == [(11, 2), (9, 3)]
    assert not server.customers.is_at_work


def test_requests_that_are_forgotten_are_not_refused_later_and_keep_nothing_busy() -> None:
    server = Server()
    server.hear(9, 1)
    assert server.customers.is_at_work
    server.customers.replaced(9)
    assert not server.customers.is_at_work
    server.customers.expire(100.0)
    assert server.answers == []


def test_requests_that_are_forgotten_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pslite.node.customer._MAX_EARLY_BYTES", 20)
    server = Server()
    for number in (1, 2):
        server.hear(9, number)
    server.customers.replaced(9)
    for number in (3, 4):
        server.hear(9, number)
    assert server.answers == []
    server.hear(11, 5)
    assert server.answers == [(11, 5)]  # refused: there is room for two


# -- whose messages are accepted ----------------------------------------------------------


def test_the_next_process_is_listed_with_its_role_in_place_of_the_one_before() -> None:
    admission = Admission(takes_registrations=False)
    admission.complete({"H": "scheduler", "W1": "worker", "W2": "worker"})
    push = Exchange(True, False, (), (), ())
    assert admission.objection("W9", push, []) == UNLISTED
    admission.replace("W1", "W9", "worker")
    assert [admission.objection(peer, push, []) for peer in ("W9", "W2", "W1")] == [
        None,
        None,
        UNLISTED,
    ]
    assert admission.objection("W9", BarrierLeave(4, 1, "", ""), []) == OUT_OF_ROLE


def test_a_replacement_leaves_the_callers_roster_alone() -> None:
    listed = {"W1": "worker"}
    admission = Admission(takes_registrations=False)
    admission.complete(listed)
    admission.replace("W1", "W9", "worker")
    assert listed == {"W1": "worker"}


def test_before_the_roster_there_is_nobody_to_replace() -> None:
    admission = Admission(takes_registrations=False)
    admission.replace("W1", "W9", "worker")
    assert admission.objection("W2", Beat(), []) is None
    admission.complete({"W1": "worker"})
    assert admission.objection("W9", Beat(), []) == UNLISTED
