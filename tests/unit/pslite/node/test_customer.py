"""Requests between apps: who is asked, who answers, what becomes of apps that are not there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pslite.errors import ClosedError, NodeLostError, RemoteError, UsageError
from pslite.future import Future
from pslite.node.customer import Customers, Incoming, Reply
from pslite.wire.codec import Envelope, decode, encode
from pslite.wire.messages import Request, Response

ECHO = 7
LOST = NodeLostError("server 0 is lost", role="server", rank=0)


class Net:
    """Nodes that hand their requests and responses to each other when ``settle`` is called."""

    def __init__(self, *nodes: int) -> None:
        self.sent: list[tuple[int, int, Request | Response, Sequence[Any]]] = []
        self.commands: list[Callable[[], None]] = []
        self.nodes = {node: Customers(self._sender(node), self.commands.append) for node in nodes}
        self.now = 0.0

    def _sender(self, sender: int) -> Callable[[int, Request | Response, Sequence[Any]], None]:
        return lambda node, message, frames: self.sent.append((sender, node, message, frames))

    def ask(self, asker: int, *nodes: int, app: int = ECHO, head: int = 1) -> Future[Any]:
        future: Future[dict[int, Reply]] = Future()
        frames: dict[int, Sequence[Any]] = {node: [b"frame"] for node in nodes}
        self.nodes[asker].ask(nodes, app, 0, head, b"body", frames, future)
        return future

    def settle(self) -> None:
        while self.sent or self.commands:
            while self.commands:
                self.commands.pop(0)()
            if self.sent:
                sender, receiver, message, frames = self.sent.pop(0)
                if isinstance(message, Request):
                    self.nodes[receiver].request_arrived(sender, message, frames, self.now)
                else:
                    self.nodes[receiver].response_arrived(sender, message, frames)


def echo(incoming: Incoming) -> None:
    incoming.respond(incoming.body + b"!", incoming.frames)


def test_the_frames_of_a_request_are_let_go_when_it_is_answered() -> None:
    net = Net(9, 8)
    seen: list[Incoming] = []
    net.nodes[8].add(ECHO, seen.append)
    net.ask(9, 8)
    net.settle()
    assert list(seen[0].frames) == [b"frame"]
    seen[0].respond()
    assert list(seen[0].frames) == []


def test_every_asked_node_answers_with_body_and_frames() -> None:
    net = Net(9, 8, 10)
    for server in (8, 10):
        net.nodes[server].add(ECHO, echo)
    future = net.ask(9, 8, 10)
    net.settle()
    assert future.result(0) == {8: Reply(b"body!", [b"frame"]), 10: Reply(b"body!", [b"frame"])}


def test_the_handler_sees_who_asks_and_what() -> None:
    net = Net(9, 8)
    seen: list[Incoming] = []
    net.nodes[8].add(ECHO, seen.append)
    net.ask(9, 8, head=42)
    net.settle()
    (incoming,) = seen
    assert (incoming.sender, incoming.head, incoming.body, list(incoming.frames)) == (
        9,
        42,
        b"body",
        [b"frame"],
    )


def test_an_answer_may_come_later_and_only_the_first_counts() -> None:
    net = Net(9, 8)
    seen: list[Incoming] = []
    net.nodes[8].add(ECHO, seen.append)
    future = net.ask(9, 8)
    net.settle()
    halfway = future.done()
    seen[0].respond(b"first")
    seen[0].respond(b"second")
    seen[0].fail(UsageError("third"))
    net.settle()
    assert (halfway, future.result(0)) == (False, {8: Reply(b"first", ())})


def test_an_error_of_a_handler_is_raised_by_the_asker_with_its_traceback() -> None:
    net = Net(9, 8)

    def handler(incoming: Incoming) -> None:
        raise KeyError("momentum")

    net.nodes[8].add(ECHO, handler)
    future = net.ask(9, 8)
    net.settle()
    error = future.error()
    assert isinstance(error, RemoteError)
    assert (error.kind, error.where) == ("KeyError", "node 8")
    assert "Traceback" in str(error)
    assert "momentum" in str(error)


def test_an_error_of_ours_is_raised_as_what_it_is_without_a_traceback() -> None:
    net = Net(9, 8)
    net.nodes[8].add(ECHO, lambda incoming: incoming.fail(UsageError("no such store")))
    future = net.ask(9, 8)
    net.settle()
    assert (type(future.error()), str(future.error())) == (UsageError, "no such store")


def test_an_error_with_text_that_is_no_unicode_still_reaches_the_asker() -> None:
    # A file name that is not UTF-8 reads like this in Python.
    net = Net(9, 8)
    net.nodes[8].add(ECHO, lambda incoming: incoming.fail(OSError("no file weights-\udcff")))
    net.ask(9, 8)
    net.nodes[8].request_arrived(9, Request(ECHO, 0, 1, 1, b""), (), 0.0)
    net.commands.pop(0)()
    response = net.sent[-1][2]
    decoded = decode([encode(Envelope("job", 1, 1, 1, 1, 0, (), (), response))]).message
    assert isinstance(decoded, Response)
    assert (decoded.kind, "weights-" in decoded.error) == ("OSError", True)


def test_a_handler_that_raises_after_its_answer_changes_nothing() -> None:
    net = Net(9, 8)

    def handler(incoming: Incoming) -> None:
        incoming.respond(b"done")
        raise ValueError("too late")

    net.nodes[8].add(ECHO, handler)
    future = net.ask(9, 8)
    net.settle()
    assert future.result(0)[8].body == b"done"


def test_a_request_waits_for_an_app_that_is_not_there_yet() -> None:
    net = Net(9, 8)
    future, other = net.ask(9, 8), net.ask(9, 8, app=99)
    net.settle()
    net.nodes[8].add(ECHO, echo)
    net.settle()
    assert (future.result(0)[8].body, other.done()) == (b"body!", False)


def test_a_request_for_an_app_that_never_comes_is_refused_in_time() -> None:
    net = Net(9, 8)
    net.now = 10.0
    early = net.ask(9, 8)
    net.settle()
    net.now = 20.0
    late = net.ask(9, 8)
    net.settle()
    net.nodes[8].expire(before=15.0)
    net.settle()
    error = early.error()
    assert (type(error), str(error)) == (
        UsageError,
        "the receiver does not have an app 7; create it there first",
    )
    assert not late.done()


def test_requests_that_wait_for_apps_are_bounded() -> None:
    net = Net(9, 8)
    futures = [net.ask(9, 8) for _ in range(4097)]
    net.settle()
    assert [future.done() for future in futures] == [False] * 4096 + [True]
    assert isinstance(futures[-1].error(), UsageError)


def test_an_app_number_is_given_once_until_the_app_is_removed() -> None:
    customers = Net(8).nodes[8]
    customers.add(ECHO, echo)
    with pytest.raises(UsageError, match="already has an app 7"):
        customers.add(ECHO, echo)
    customers.remove(ECHO)
    customers.add(ECHO, echo)


def test_a_response_that_comes_again_or_from_elsewhere_changes_nothing() -> None:
    net = Net(9, 8, 10)
    future = net.ask(9, 8)
    response = Response(ECHO, 0, 1, 1, "", "", "", -1, b"x")
    asker = net.nodes[9]
    asker.response_arrived(10, response, ())
    elsewhere = future.done()
    asker.response_arrived(8, response, ())
    asker.response_arrived(8, Response(ECHO, 0, 1, 1, "UsageError", "late", "", -1, b""), ())
    assert (elsewhere, future.result(0)) == (False, {8: Reply(b"x", ())})


def test_a_request_that_cannot_be_sent_ends_with_the_reason() -> None:
    error = UsageError("a frame of 9 bytes is over the limit")

    def refuse(*_: object) -> None:
        raise error

    customers = Customers(refuse, lambda command: command())
    future: Future[dict[int, Reply]] = Future()
    customers.ask([8], ECHO, 0, 1, b"", {8: [b"too large"]}, future)
    assert (future.error(), len(customers.pending)) == (error, 0)


def test_an_answer_that_cannot_be_sent_becomes_an_error_at_the_asker() -> None:
    sent: list[Request | Response] = []

    def send(node: int, message: Request | Response, frames: Sequence[Any]) -> None:
        if len(frames):
            raise UsageError("a frame is over the limit")
        sent.append(message)

    customers = Customers(send, lambda command: command())
    customers.add(ECHO, echo)
    customers.request_arrived(9, Request(ECHO, 0, 5, 1, b"body"), [b"frame"], 0.0)
    ((kind, error, body),) = [(m.kind, m.error, m.body) for m in sent if isinstance(m, Response)]
    assert (kind, "over the limit" in error, body) == ("UsageError", True, b"")


def test_the_end_of_the_asked_node_or_of_ones_own_ends_the_request() -> None:
    net = Net(9, 8, 10)
    lost, closed = NodeLostError("server 0 is lost"), ClosedError("closed")
    first, second = net.ask(9, 8), net.ask(9, 10)
    net.nodes[9].pending.depart(8, lost)
    net.nodes[9].pending.fail(closed)
    assert (first.error(), second.error()) == (lost, closed)


def test_the_loss_of_a_node_keeps_its_role_and_rank_on_the_way_to_the_asker() -> None:
    net = Net(9, 8)

    def lost(incoming: Incoming) -> None:
        incoming.fail(NodeLostError("worker 1 is lost", role="worker", rank=1))

    net.nodes[8].add(ECHO, lost)
    future = net.ask(9, 8)
    net.settle()
    error = future.error()
    assert isinstance(error, NodeLostError)
    assert (str(error), error.role, error.rank) == ("worker 1 is lost", "worker", 1)


def test_what_waits_for_an_app_is_bounded_in_bytes_and_the_room_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pslite.node.customer._MAX_EARLY_BYTES", 100)
    sent: list[Response] = []
    customers = Customers(lambda _, message, __: sent.append(message), lambda work: work())  # type: ignore[arg-type]

    def arrive(request_id: int, app: int) -> None:
        request = Request(app, 0, request_id, 0, b"x" * 40)
        customers.request_arrived(9, request, [b"y" * 20], 0.0)

    arrive(1, app=5)
    arrive(2, app=5)
    assert [(response.request_id, response.kind) for response in sent] == [(2, "UsageError")]
    customers.expire(1.0)
    arrive(3, app=5)
    assert [response.request_id for response in sent] == [2, 1]
    customers.add(5, lambda incoming: incoming.respond())
    customers.remove(5)
    arrive(4, app=5)
    assert [response.request_id for response in sent] == [2, 1, 3]


def test_an_app_is_at_work_while_it_may_answer_by_itself() -> None:
    commands: list[Any] = []
    customers = Customers(lambda *_: None, commands.append)
    held: list[Incoming] = []
    customers.add(5, held.append)
    customers.add(6, held.append, waits_for_others=True)
    customers.request_arrived(9, Request(6, 0, 1, 0, b""), [], 0.0)
    assert not customers.is_at_work
    customers.request_arrived(9, Request(5, 0, 2, 0, b""), [], 0.0)
    assert customers.is_at_work
    held[1].respond()
    assert customers.is_at_work, "the answer is not sent"
    commands.pop()()
    assert not customers.is_at_work
    customers.request_arrived(9, Request(7, 0, 3, 0, b""), [], 0.0)
    assert customers.is_at_work, "it waits for an app that may come"


# -- a server whose place another process takes -------------------------------------------


def repeating(*nodes: int) -> Net:
    """Nodes; those that ask repeat requests of the app for the next process of a server."""
    net = Net(*nodes)
    for customers in net.nodes.values():
        customers.repeated_apps.add(ECHO)
    return net


def sent(net: Net) -> list[tuple[int, int, Sequence[Any]]]:
    """(receiver, request id, frames) of the requests that are under way; they are lost now."""
    found = [
        (receiver, message.request_id, frames)
        for _, receiver, message, frames in net.sent
        if isinstance(message, Request)
    ]
    net.sent.clear()
    return found


def test_what_a_lost_server_has_not_answered_is_asked_again_with_the_same_number() -> None:
    net = repeating(9, 8)
    future = net.ask(9, 8)
    before = sent(net)
    net.nodes[9].pending.depart(8, LOST, for_good=False)
    assert not future.done()
    net.nodes[9].ask_again(8)
    assert sent(net) == before == [(8, 1, [b"frame"])]
    net.nodes[9].ask_again(8)
    net.nodes[8].add(ECHO, echo)
    net.settle()
    assert future.result(0) == {8: Reply(b"body!", [b"frame"])}


def test_what_is_answered_is_not_asked_again() -> None:
    net = repeating(9, 8)
    net.nodes[8].add(ECHO, echo)
    net.ask(9, 8)
    net.settle()
    net.nodes[9].ask_again(8)
    assert sent(net) == []


def test_only_the_lost_server_of_several_is_asked_again() -> None:
    net = repeating(9, 8, 10)
    net.nodes[10].add(ECHO, echo)
    future = net.ask(9, 8, 10)
    lost = net.sent.pop(0)
    assert lost[1] == 8
    net.settle()
    net.nodes[9].pending.depart(8, LOST, for_good=False)
    net.nodes[9].ask_again(10)
    assert sent(net) == []
    net.nodes[9].ask_again(8)
    net.nodes[8].add(ECHO, echo)
    net.settle()
    assert sorted(future.result(0)) == [8, 10]


def test_requests_are_asked_again_in_their_order() -> None:
    net = repeating(9, 8)
    for head in (1, 2, 3):
        net.ask(9, 8, head=head)
    net.sent.clear()
    net.nodes[9].ask_again(8)
    assert [number for _, number, _ in sent(net)] == [1, 2, 3]


def test_requests_of_an_app_that_no_standby_repeats_fail_with_their_server() -> None:
    net = repeating(9, 8)
    other, repeated = net.ask(9, 8, app=ECHO + 1), net.ask(9, 8)
    net.sent.clear()
    net.nodes[9].pending.depart(8, LOST, for_good=False)
    assert (other.error(), repeated.done()) == (LOST, False)
    net.nodes[9].ask_again(8)
    assert [number for _, number, _ in sent(net)] == [2]


def test_requests_that_could_be_repeated_fail_if_the_server_is_gone_for_good() -> None:
    net = repeating(9, 8)
    future = net.ask(9, 8)
    net.sent.clear()
    net.nodes[9].pending.depart(8, LOST, for_good=False)
    net.nodes[9].pending.depart(8, LOST)
    assert future.error() is LOST
    net.nodes[9].ask_again(8)
    assert sent(net) == []


def test_a_request_that_is_cancelled_is_not_asked_again() -> None:
    net = repeating(9, 8)
    future = net.ask(9, 8)
    net.sent.clear()
    net.nodes[9].pending.cancel(1, LOST)
    assert future.error() is LOST
    net.nodes[9].ask_again(8)
    assert sent(net) == []


def test_a_second_answer_from_the_next_process_changes_nothing() -> None:
    net = repeating(9, 8)
    net.nodes[8].add(ECHO, echo)
    future = net.ask(9, 8)
    net.nodes[9].ask_again(8)  # the first request is still under way
    net.settle()
    assert (future.result(0), len(net.nodes[9].pending)) == ({8: Reply(b"body!", [b"frame"])}, 0)
