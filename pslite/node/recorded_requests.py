"""Carries out each request once, also if the scheduler is restarted meanwhile.

It records a request before it carries it out. Another process that goes on as the scheduler carries
out all recorded requests again, in their order, and so comes to the same state. Then the nodes ask
again what was not answered (``customer.py``). A request that is known gets the answer that it got,
or that it will get. On the I/O thread. Read next: ``scheduler_journal.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pslite.node.customer import Handler, Incoming, KeptState
from pslite.protocol.charter import RecordedRequest
from pslite.wire.messages import Request, Response

#: The most answers to remember, of a scheduler.
_MOST_ANSWERS = 4096

Question = tuple[str, int]
"""The asker's name in the van, and the number of its request."""
Answer = tuple[Response, Sequence[Any]]


def plain(response: Response) -> list[Any]:
    """Return what is in an answer, for a record."""
    r = response
    return [r.app, r.customer, r.head, r.kind, r.error, r.role, r.rank, r.body]


def response_from(request_id: int, fields: Sequence[Any]) -> Response:
    """Return the answer that ``plain`` has described."""
    app, customer, head, *rest = fields
    return Response(app, customer, request_id, head, *rest)


class Answers:
    """The last answers, for nodes that did not get them and ask the next process."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[Question, Answer] = {}

    def note(self, question: Question, response: Response, frames: Sequence[Any]) -> None:
        """Remember an answer."""
        if len(self._known) >= self._most:
            del self._known[next(iter(self._known))]
        self._known[question] = response, frames

    def again(self, question: Question, incoming: Incoming) -> bool:
        """Answer a request as before; return whether its answer is known."""
        known = self._known.get(question)
        if known is not None:
            incoming._respond(incoming, *known)
        return known is not None

    def all(self) -> list[tuple[Question, Answer]]:
        """Return all of them, the oldest first."""
        return list(self._known.items())


class RecordedRequests:
    """The recorded requests of one scheduler."""

    def __init__(
        self, uid_of: Callable[[int], str], record: Callable[[RecordedRequest], None]
    ) -> None:
        self._uid_of = uid_of
        self._record = record
        self._handlers: dict[int, Handler] = {}
        self._kept: dict[int, KeptState | None] = {}
        self._open: set[Question] = set()
        self._answers = Answers(_MOST_ANSWERS)
        self._is_replaying = False

    def wrapped(self, app: int, handler: Handler, kept: KeptState | None = None) -> Handler:
        """Return a handler that records the requests of an app."""
        self._handlers[app], self._kept[app] = handler, kept
        return self._arrived

    def state(self) -> list[Any] | None:
        """Return the states of the apps and the answers as plain data, for ``resume``.

        None if a request waits, or if an app has no such state.
        """
        states = {app: kept and kept.state() for app, kept in self._kept.items()}
        if self._open or None in states.values():
            return None
        answers = [
            [*question, *plain(response)]
            for question, (response, frames) in self._answers.all()
            if not frames
        ]
        return [list(map(list, states.items())), answers]

    def resume(self, state: Sequence[Any]) -> None:
        """Go on from what ``state`` has returned."""
        states, answers = state
        for app, each in states:
            kept = self._kept.get(app)
            if kept is not None:
                kept.resume(each)
        for uid, request_id, *fields in answers:
            self._answers.note((uid, request_id), response_from(request_id, fields), ())

    def _arrived(self, incoming: Incoming) -> None:
        r = incoming.request
        uid = self._uid_of(incoming.sender)
        question = uid, r.request_id
        if not self._answers.again(question, incoming) and question not in self._open:
            self._record(
                RecordedRequest(
                    incoming.sender, uid, r.app, r.customer, r.request_id, r.head, r.body
                )
            )
            self._carry_out(question, incoming)

    def _carry_out(self, question: Question, incoming: Incoming) -> None:
        answer = incoming._respond
        self._open.add(question)

        def respond(incoming: Incoming, response: Response, frames: Sequence[Any]) -> None:
            self._open.discard(question)
            self._answers.note(question, response, frames)
            if not self._is_replaying:
                answer(incoming, response, frames)

        mine = replace(incoming, _respond=respond)
        try:
            self._handlers[incoming.request.app](mine)
        except BaseException as error:  # SystemExit of an app must not end the I/O thread
            mine.fail(error)

    def replay(self, known: RecordedRequest, incoming: Incoming) -> None:
        """Carry out a request that a lost process has recorded."""
        self._is_replaying = True
        try:
            self._carry_out((known.uid, known.request_id), incoming)
        finally:
            self._is_replaying = False


def request_of(known: RecordedRequest) -> Request:
    """Return the message of a recorded request."""
    return Request(known.app, known.customer, known.request_id, known.head, known.body)
