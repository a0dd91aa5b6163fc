"""Requests of apps on the scheduler: each is recorded, and carried out, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pslite.node.customer import Incoming
from pslite.node.recorded_requests import Answers, RecordedRequests, request_of
from pslite.protocol.charter import RecordedRequest
from pslite.wire.codec import pack_value, unpack_value
from pslite.wire.messages import Request, Response

APP = 7
UIDS = {9: "W9", 11: "W11"}


class App:
    """An app that adds numbers, on a scheduler with a journal.

    It answers a positive number with the sum at once, and 0 when ``answer_late`` is called.
    """

    def __init__(self) -> None:
        self.uids = dict(UIDS)
        self.events: list[str] = []
        self.journal: list[RecordedRequest] = []
        self.sent: list[tuple[int, int, bytes]] = []
        self.total = 0
        self.late: list[Incoming] = []
        self.requests = RecordedRequests(lambda node: self.uids.get(node, ""), self._record)
        self.handler = self.requests.wrapped(APP, self._handle, self)

    def _record(self, known: RecordedRequest) -> None:
        self.events.append("recorded")
        self.journal.append(known)

    def _handle(self, incoming: Incoming) -> None:
        self.events.append("carried out")
        number = incoming.request.head
        if number < 0:
            raise SystemExit("an app that ends the process")
        self.total += number
        if number:
            incoming.respond(str(self.total).encode())
        else:
            self.late.append(incoming)

    def state(self) -> list[Any] | None:
        return None if self.late else [self.total]

    def resume(self, state: Sequence[Any]) -> None:
        (self.total,) = state

    def answer_late(self) -> None:
        for incoming in self.late:
            incoming.respond(b"late")

    def incoming(self, sender: int, request: Request) -> Incoming:
        def send(incoming: Incoming, response: Response, _: Any) -> None:
            self.events.append("sent")
            words = response.kind.encode() or response.body
            self.sent.append((incoming.sender, response.request_id, words))

        return Incoming(sender, request, (), send, False, 0)

    def ask(self, sender: int, request_id: int, number: int) -> None:
        self.handler(self.incoming(sender, Request(APP, 0, request_id, number, b"")))

    def replay(self, journal: list[RecordedRequest]) -> None:
        """Do what a lost process has recorded."""
        for known in journal:
            self.requests.replay(known, self.incoming(known.sender, request_of(known)))


def test_a_request_is_recorded_before_it_is_carried_out_and_answered() -> None:
    app = App()
    app.ask(9, 1, 5)
    assert app.events == ["recorded", "carried out", "sent"]
    assert app.journal == [RecordedRequest(9, "W9", APP, 0, 1, 5, b"")]
    assert app.sent == [(9, 1, b"5")]


def test_a_request_that_comes_again_gets_the_same_answer_and_changes_nothing() -> None:
    app = App()
    app.ask(9, 1, 5)
    app.ask(11, 1, 2)  # another node with the same number
    app.ask(9, 1, 5)
    assert app.sent == [(9, 1, b"5"), (11, 1, b"7"), (9, 1, b"5")]
    assert (app.total, len(app.journal)) == (7, 2)


def test_the_next_process_of_a_node_may_use_the_same_numbers() -> None:
    app = App()
    app.ask(9, 1, 5)
    app.uids[9] = "W99"
    app.ask(9, 1, 5)
    assert app.sent == [(9, 1, b"5"), (9, 1, b"10")]


def test_a_request_that_comes_again_before_its_answer_gets_one() -> None:
    app = App()
    app.ask(9, 1, 0)
    app.ask(9, 1, 0)
    assert (app.sent, len(app.journal), len(app.late)) == ([], 1, 1)
    app.answer_late()
    assert app.sent == [(9, 1, b"late")]
    app.ask(9, 1, 0)
    assert app.sent == [(9, 1, b"late")] * 2
    assert len(app.late) == 1


def test_the_next_scheduler_comes_to_the_same_state_and_sends_nothing_by_itself() -> None:
    first, second = App(), App()
    first.ask(9, 1, 5)
    first.ask(11, 1, 2)
    first.ask(9, 2, 0)
    second.replay(first.journal)
    assert (second.total, second.sent, second.journal) == (7, [], [])
    second.ask(9, 1, 5)
    second.ask(11, 1, 2)
    assert second.sent == first.sent
    assert second.total == 7


def test_a_request_that_was_open_is_answered_once_by_the_next_scheduler() -> None:
    first, second = App(), App()
    first.ask(9, 1, 0)
    second.replay(first.journal)
    second.ask(9, 1, 0)
    second.answer_late()
    assert second.sent == [(9, 1, b"late")]
    assert second.journal == []


def test_an_app_that_fails_answers_with_its_error_each_time() -> None:
    first, second = App(), App()
    for _ in range(2):
        first.ask(9, 1, -1)
    assert [(node, number) for node, number, _ in first.sent] == [(9, 1)] * 2
    assert first.sent[0] == first.sent[1] and first.sent[0][2]
    second.replay(first.journal)
    second.ask(9, 1, -1)
    assert second.sent == first.sent[:1]


def test_only_the_last_answers_are_remembered() -> None:
    answers, told = Answers(3), list[Any]()
    for number in range(5):
        answers.note(("W9", number), Response(APP, 0, number, 0, b"", "", "", "", 0), ())
    incoming = Incoming(9, Request(APP, 0, 1, 0, b""), (), lambda *each: told.append(each))
    assert [answers.again(("W9", number), incoming) for number in range(5)] == [False] * 2 + [
        True
    ] * 3
    assert [number for (_, number), _ in answers.all()] == [2, 3, 4]
    assert [response.request_id for _, response, _ in told] == [2, 3, 4]


def test_a_scheduler_remembers_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pslite.node.recorded_requests._MOST_ANSWERS", 2)
    app = App()
    ask: Callable[[int], None] = lambda number: app.ask(9, number, 1)  # noqa: E731
    for number in (1, 2, 3):
        ask(number)
    ask(2)
    assert app.total == 3
    ask(1)
    assert app.total == 4  # it is not known any more


# -- the state in place of the requests ----------------------------------------------------


def test_the_next_scheduler_goes_on_from_the_state_and_answers_as_before() -> None:
    first, second = App(), App()
    first.ask(9, 1, 5)
    first.ask(11, 1, -1)
    state = first.requests.state()
    assert state is not None
    second.requests.resume(unpack_value(pack_value(state)))
    assert (second.total, second.sent) == (5, [])
    second.ask(9, 1, 5)
    second.ask(11, 1, -1)
    assert second.sent == first.sent
    assert second.journal == []
    second.ask(9, 2, 1)
    assert second.sent[-1] == (9, 2, b"6")


def test_there_is_no_state_while_a_request_waits() -> None:
    app = App()
    app.ask(9, 1, 0)
    assert app.requests.state() is None
    app.answer_late()
    app.late.clear()
    assert app.requests.state() is not None
