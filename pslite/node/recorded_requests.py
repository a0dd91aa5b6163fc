"""``RecordedRequests``: carries out each request of an app on the scheduler once.

It records a request before it carries it out. Another process that goes on as the scheduler carries
out all recorded requests again, in their order, and so comes to the same state. Then the nodes ask
again what was not answered (``customer.py``). A request that is known gets the answer that it got,
or that it will get. On the I/O thread. Read next: ``scheduler_journal.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from pslite.node.customer import Handler, Incoming
from pslite.protocol.charter import RecordedRequest
from pslite.wire.messages import Request, Response

#: The most answers to remember, of a scheduler.
_MOST_ANSWERS = 4096

Question = tuple[str, int]
"""The asker's name in the van, and the number of its request."""
Answer = tuple[Response, Sequence[Any]]


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
        self._open: set[Question] = set()
        self._answers = Answers(_MOST_ANSWERS)
        self._is_replaying = False

    def wrapped(self, app: int, handler: Handler) -> Handler:
        """Return a handler that records the requests of an app."""
        self._handlers[app] = handler
        return self._arrived

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
