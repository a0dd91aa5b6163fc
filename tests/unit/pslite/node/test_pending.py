"""Requests that wait for responses: complete by sets of nodes, never by counts, and always."""

from __future__ import annotations

from typing import Any

from pslite.errors import ClosedError, NodeLostError, UsageError
from pslite.future import Future
from pslite.node.customer import Pending

LOST = NodeLostError("server 1 is lost", role="server", rank=1)
CLOSED = ClosedError("the node was closed")


def opened(pending: Pending, *nodes: int) -> tuple[int, Future[dict[int, Any]]]:
    future: Future[dict[int, Any]] = Future()
    return pending.open(nodes, future), future


def waiting(pending: Pending, request: int) -> tuple[int, ...]:
    """The nodes that have not answered yet."""
    entry = pending._entries.get(request)
    return tuple(sorted(entry.waiting)) if entry else ()


def test_a_request_is_complete_when_every_node_has_answered() -> None:
    pending = Pending()
    request, future = opened(pending, 8, 10)
    pending.answer(request, 10, "ten")
    halfway = (future.done(), waiting(pending, request))
    pending.answer(request, 8, "eight")
    assert halfway == (False, (8,))
    assert (future.result(0), len(pending)) == ({8: "eight", 10: "ten"}, 0)


def test_a_second_answer_of_one_node_is_none_of_another() -> None:
    # Defect e of ps-lite: answers were counted and compared for equality, so one too many made
    # the wait endless.
    pending = Pending()
    request, future = opened(pending, 8, 10)
    for _ in range(3):
        pending.answer(request, 8, "eight")
    halfway = future.done()
    pending.answer(request, 10, "ten")
    pending.answer(request, 10, "again")
    assert (halfway, future.result(0)) == (False, {8: "eight", 10: "ten"})


def test_answers_of_nodes_that_were_not_asked_change_nothing() -> None:
    pending = Pending()
    request, future = opened(pending, 8)
    pending.answer(request, 12, "x")
    pending.answer(request + 1, 8, "x")
    assert (future.done(), waiting(pending, request)) == (False, (8,))


def test_an_error_ends_the_request_once_all_have_answered() -> None:
    pending = Pending()
    request, future = opened(pending, 8, 10)
    error = UsageError("no such key")
    pending.refuse(request, 8, error)
    pending.refuse(request, 10, UsageError("another"))
    assert (future.error(), len(pending)) == (error, 0)


def test_a_departed_node_ends_what_waits_for_it_and_nothing_else() -> None:
    pending = Pending()
    _, ours = opened(pending, 10)
    request, other = opened(pending, 8)
    pending.depart(10, LOST)
    assert (ours.error(), other.done()) == (LOST, False)
    assert (waiting(pending, request), len(pending)) == ((8,), 1)


def test_an_answer_that_came_before_the_departure_counts() -> None:
    pending = Pending()
    request, future = opened(pending, 8, 10)
    pending.answer(request, 10, "ten")
    pending.depart(10, LOST)
    pending.answer(request, 8, "eight")
    assert future.result(0) == {8: "eight", 10: "ten"}


def test_a_request_that_could_not_be_sent_ends_alone() -> None:
    pending = Pending()
    request, future = opened(pending, 8, 10)
    _, other = opened(pending, 8)
    error = UsageError("too large")
    pending.cancel(request, error)
    pending.cancel(request, CLOSED)
    pending.answer(request, 8, "late")
    assert (future.error(), other.done(), len(pending)) == (error, False, 1)


def test_a_failed_node_ends_every_request() -> None:
    pending = Pending()
    futures = [opened(pending, 8, 10)[1], opened(pending, 12)[1]]
    pending.fail(CLOSED)
    assert ([future.error() for future in futures], len(pending)) == ([CLOSED, CLOSED], 0)


def test_a_request_to_nobody_is_answered() -> None:
    pending = Pending()
    _, future = opened(pending)
    assert (future.result(0), len(pending)) == ({}, 0)


def test_requests_have_different_numbers() -> None:
    pending = Pending()
    assert [opened(pending, 8)[0] for _ in range(3)] == [1, 2, 3]


def test_the_memory_of_answered_requests_is_freed() -> None:
    # Defect g: ps-lite's tracker of requests was never trimmed.
    pending = Pending()
    for _ in range(1000):
        request, _ = opened(pending, 8, 10)
        pending.answer(request, 8, None)
        pending.answer(request, 10, None)
    assert (len(pending), waiting(pending, 1)) == (0, ())
