"""Another process in the place of a lost server: what workers send again, and what it answers."""

from __future__ import annotations

import pytest
from plane_helpers import (
    LOST,
    SERVER,
    CountingApp,
    applied,
    ask,
    carry_out,
    counts,
    deliver,
    exchange,
    mail,
    make_server,
    pulled,
    push_to,
    pushed,
    refusal,
    runs,
)

from pslite.errors import ProtocolError
from pslite.plane import Piece, ServerPlane, WorkerPlane
from pslite.wire.base import Ints, Message
from pslite.wire.messages import Answer, Exchange, StaleEpoch

ONE = counts(1)
OTHER = 10
"""Node id of a server that is not lost."""


def messages(plane: WorkerPlane, server: int = SERVER) -> list[Message]:
    return [send.message for send in mail(plane, server)]


def both(round_: int) -> Exchange:
    """A push of parts 1 and 2 in the same round."""
    return Exchange(True, False, (1, 2), (round_, round_), (8, 8))


# -- what is sent again -------------------------------------------------------------------


def test_a_push_that_is_not_answered_is_sent_again_with_its_round_and_its_bytes() -> None:
    plane = WorkerPlane(window=2)
    for number in (5, 7):
        plane.submit(ask(1, push=[counts(number)]).transfer)
    before = mail(plane)
    plane.answered(applied(1, 1), [])
    plane.reroute(SERVER)
    (again,) = mail(plane)
    assert (again.peer, again.message) == (SERVER, pushed(1, 2))
    assert [bytes(frame) for frame in again.frames] == [bytes(frame) for frame in before[1].frames]


def test_what_waits_to_be_sent_is_sent_once_and_in_its_order() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, push=[ONE]).transfer)
    plane.take(SERVER)
    plane.submit(ask(1, push=[ONE]).transfer)
    plane.submit(ask(2, push=[ONE], priority=1).transfer)
    plane.reroute(SERVER)
    assert messages(plane) == [pushed(2, 1, priority=1), pushed(1, 1), pushed(1, 2)]


def test_a_second_loss_before_anything_is_sent_changes_nothing() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, push=[ONE]).transfer)
    mail(plane)
    plane.reroute(SERVER)
    plane.reroute(SERVER)
    assert messages(plane) == [pushed(1, 1)]


def test_only_the_parts_without_an_answer_are_sent_again_with_their_bytes() -> None:
    plane = WorkerPlane(window=2)
    asked = ask(1, 2, 3, push=[counts(10), counts(20), counts(30)])
    plane.submit(asked.transfer)
    mail(plane)
    plane.answered(applied(2, 1), [])
    plane.reroute(SERVER)
    (again,) = mail(plane)
    assert again.message == Exchange(True, False, (1, 3), (1, 1), (8, 8))
    assert b"".join(map(bytes, again.frames)) == counts(10, 30)
    plane.answered(Answer(True, (1, 3), (1, 1), (1, 1), ()), [])
    assert asked.endings == [None]


def test_parts_of_a_transfer_keep_rounds_of_their_own() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(2, push=[ONE]).transfer)
    plane.submit(ask(1, 2, push=[ONE, ONE]).transfer)
    mail(plane)
    plane.reroute(SERVER)
    assert messages(plane) == [pushed(2, 1), Exchange(True, False, (1, 2), (1, 2), (8, 8))]


def test_a_pull_is_asked_again_and_one_that_is_answered_is_not() -> None:
    plane = WorkerPlane(window=2)
    waiting, answered = ask(1, pull=True), ask(2, pull=True)
    for asked in (waiting, answered):
        plane.submit(asked.transfer)
    mail(plane)
    plane.answered(Answer(False, (2,), (0,), (0,), (8,)), [counts(4)])
    plane.reroute(SERVER)
    assert messages(plane) == [pulled(1, 0)]
    plane.answered(Answer(False, (1,), (0,), (3,), (8,)), [counts(9)])
    assert (waiting.values, waiting.versions, waiting.endings) == ({1: (9,)}, {1: 3}, [None])


def test_a_pull_behind_a_push_is_sent_again_behind_it() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, push=[ONE]).transfer)
    plane.submit(ask(1, pull=True).transfer)
    mail(plane)
    plane.reroute(SERVER)
    assert messages(plane) == [pushed(1, 1), pulled(1, 1)]


def test_a_push_that_asks_for_the_value_is_sent_again_as_one_message() -> None:
    plane = WorkerPlane(window=2)
    asked = ask(1, push=[ONE], pull=True)
    plane.submit(asked.transfer)
    mail(plane)
    plane.reroute(SERVER)
    assert messages(plane) == [pushed(1, 1, pull=True)]
    plane.answered(Answer(True, (1,), (1,), (1,), (8,)), [counts(2)])
    assert (asked.values, asked.endings) == ({1: (2,)}, [None])


def test_requests_that_wait_for_an_answer_still_wait_for_it() -> None:
    plane = WorkerPlane(window=0)
    for _ in range(2):
        plane.submit(ask(1, push=[ONE]).transfer)
    mail(plane)
    plane.reroute(SERVER)
    assert messages(plane) == [pushed(1, 1)]
    plane.answered(applied(1, 1), [])
    assert messages(plane) == [pushed(1, 2)]


def test_requests_that_are_held_back_are_sent_once_and_only_when_they_are_released() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, push=[ONE]).transfer)
    mail(plane)
    plane.hold_back()
    plane.submit(ask(1, push=[ONE]).transfer)
    plane.reroute(SERVER)
    assert not plane.everything_sent_before
    assert messages(plane) == [pushed(1, 1)]
    plane.release()
    assert messages(plane) == [pushed(1, 2)]


def test_requests_to_other_servers_are_left_alone() -> None:
    plane = WorkerPlane(window=2)
    for server in (SERVER, OTHER):
        plane.submit(ask(server, push=[ONE], server=server).transfer)
        mail(plane, server)
    plane.submit(ask(OTHER, push=[ONE], server=OTHER).transfer)
    plane.reroute(SERVER)
    assert messages(plane, OTHER) == [pushed(OTHER, 2)]
    assert messages(plane) == [pushed(SERVER, 1)]


def test_a_number_that_a_refusal_freed_is_given_out_once() -> None:
    plane = WorkerPlane(window=2)
    for _ in range(2):
        plane.submit(ask(1, push=[ONE]).transfer)
    mail(plane)
    plane.refused(refusal((1,), consumed=False))
    plane.reroute(SERVER)
    plane.submit(ask(1, push=[ONE]).transfer)
    assert messages(plane) == [pushed(1, 2), pushed(1, 1)]


def test_a_stale_request_is_sent_again_and_the_epoch_does_no_harm() -> None:
    plane = WorkerPlane(window=2)
    asked = ask(1, push=[ONE])
    plane.submit(asked.transfer)
    mail(plane)
    plane.stale(StaleEpoch(2, True, (1,), (1,)))
    plane.reroute(SERVER)
    assert messages(plane) == [pushed(1, 1)]
    plane.answered(applied(1, 1), [])
    plane.begin_epoch(2)
    assert (messages(plane), asked.endings, plane.everything_sent) == ([], [None], True)


def test_frames_that_are_made_late_are_made_once() -> None:
    plane = WorkerPlane(window=2)
    made: list[int] = []

    def make() -> list[bytes]:
        made.append(1)
        return [counts(3)]

    asked = ask(1, push=[ONE])
    asked.transfer.make, asked.transfer.frames = make, ()
    plane.submit(asked.transfer)
    plane.reroute(SERVER)  # nothing was sent or made before
    assert made == []
    sends = mail(plane)
    plane.reroute(SERVER)
    sends += mail(plane)
    assert [b"".join(map(bytes, send.frames)) for send in sends] == [counts(3)] * 2
    assert made == [1]


def test_a_request_that_has_failed_is_not_sent_again() -> None:
    plane = WorkerPlane(window=2)
    asked = ask(1, push=[ONE])
    plane.submit(asked.transfer)
    mail(plane)
    plane.depart(SERVER, LOST)
    plane.reroute(SERVER)
    assert (messages(plane), asked.endings) == ([], [LOST])


# -- parts that are kept as one -----------------------------------------------------------


def familiar(window: int = 9) -> WorkerPlane:
    """A plane that keeps parts 1 and 2 as one; four pushes were answered."""
    plane = WorkerPlane(window)
    for round_ in range(1, 5):
        plane.submit(ask(1, 2, push=[ONE, ONE]).transfer)
        mail(plane)
        plane.answered(Answer(True, (1, 2), (round_,) * 2, (round_,) * 2, ()), [])
    assert plane._parts[1] is plane._parts[2]
    return plane


def test_parts_that_are_kept_as_one_are_sent_again_in_one_message() -> None:
    plane = familiar()
    for number in (5, 6):
        plane.submit(ask(1, 2, push=[counts(number), counts(10 * number)]).transfer)
    plane.submit(ask(1, 2, pull=True).transfer)
    mail(plane)
    plane.reroute(SERVER)
    sends = mail(plane)
    pull = Exchange(False, True, (1, 2), (6, 6), ())
    assert [send.message for send in sends] == [both(5), both(6), pull]
    assert [b"".join(map(bytes, send.frames)) for send in sends] == [
        counts(5, 50),
        counts(6, 60),
        b"",
    ]
    assert plane._parts[1] is plane._parts[2]


def test_parts_that_were_one_and_are_answered_apart_are_sent_again_apart() -> None:
    plane = familiar()
    asked = ask(1, 2, push=[counts(5), counts(50)])
    plane.submit(asked.transfer)
    mail(plane)
    plane.answered(applied(1, 5), [])
    plane.reroute(SERVER)
    (again,) = mail(plane)
    assert again.message == pushed(2, 5)
    assert b"".join(map(bytes, again.frames)) == counts(50)
    plane.answered(applied(2, 5), [])
    assert asked.endings == [None]


def test_parts_that_become_one_while_they_are_in_flight_are_sent_again_once() -> None:
    plane = WorkerPlane(window=9)
    for _ in range(5):
        plane.submit(ask(1, 2, push=[ONE, ONE]).transfer)
    assert plane._parts[1] is plane._parts[2]
    mail(plane)
    plane.reroute(SERVER)
    assert messages(plane) == [both(round_) for round_ in range(1, 6)]


# -- what the process in the server's place makes of it -----------------------------------


class Pair:
    """A server and its standby, each with an app of its own."""

    def __init__(self, *parts: int, ranks: tuple[int, ...] | None = (0,)) -> None:
        self.apps = CountingApp(), CountingApp()
        self.server, self.standby = (make_server(app, ranks, *parts) for app in self.apps)

    def repeat(self, parts: Ints, pairs: tuple[tuple[int, int], ...], *values: int) -> None:
        """Let the standby apply a round, as a record says it."""
        piece = Piece(counts(*values), 0, 8 * len(values))
        lane, job = self.standby.copies.job_of(parts, (8,) * len(parts), pairs, [(0, piece)])
        assert lane == parts[0]
        assert self.standby.app.apply([job]) == [None]
        self.standby.copies.repeated(job)


def ask_again(plane: WorkerPlane, server: ServerPlane) -> None:
    """The process in the server's place handles all that a worker sends again."""
    plane.reroute(SERVER)
    for send in mail(plane):
        deliver(plane, carry_out(server, exchange(server, send)))


def test_a_round_that_the_standby_has_repeated_is_answered_and_not_applied_again() -> None:
    pair, plane = Pair(1), WorkerPlane(window=2)
    asked = ask(1, push=[counts(5)], pull=True)
    plane.submit(asked.transfer)
    (send,) = mail(plane)
    assert len(runs(exchange(pair.server, send))) == 1  # it is lost before it answers
    pair.repeat((1,), ((0, 1),), 5)
    ask_again(plane, pair.standby)
    assert (asked.values, asked.versions, asked.endings) == ({1: (5,)}, {1: 1}, [None])
    assert len(pair.apps[1].applied) == 1


def test_a_round_that_the_standby_does_not_know_is_applied_there() -> None:
    pair, plane = Pair(1), WorkerPlane(window=2)
    asked = [ask(1, push=[counts(number)]) for number in (5, 7)]
    for each in asked:
        plane.submit(each.transfer)
    mail(plane)
    pair.repeat((1,), ((0, 1),), 5)
    ask_again(plane, pair.standby)
    assert [each.endings for each in asked] == [[None], [None]]
    assert pair.apps[1].values[1].tolist() == [12]


def test_contributions_of_other_workers_that_only_the_server_had_are_awaited() -> None:
    pair, plane = Pair(1, ranks=(0, 1)), WorkerPlane(window=2)
    push_to(pair.server, 1, (1,), 1, 100)
    asked = ask(1, push=[ONE])
    plane.submit(asked.transfer)
    mail(plane)
    ask_again(plane, pair.standby)
    assert asked.endings == []
    deliver(plane, carry_out(pair.standby, push_to(pair.standby, 1, (1,), 1, 9)))
    assert pair.apps[1].values[1].tolist() == [10]


def test_a_pull_after_a_repeated_round_gets_its_value() -> None:
    pair, plane = Pair(1, 2), WorkerPlane(window=2)
    plane.submit(ask(1, 2, push=[ONE, ONE]).transfer)
    mail(plane)
    pair.repeat((1, 2), ((0, 1),), 3, 4)
    plane.answered(Answer(True, (1, 2), (1, 1), (1, 1), ()), [])
    asked = ask(1, 2, pull=True)
    plane.submit(asked.transfer)
    mail(plane)
    ask_again(plane, pair.standby)
    assert (asked.values, asked.endings) == ({1: (3,), 2: (4,)}, [None])


def test_asynchronous_contributions_are_counted_for_each_worker() -> None:
    pair, plane = Pair(1, ranks=None), WorkerPlane(window=2)
    asked = [ask(1, push=[counts(number)]) for number in (5, 7)]
    for each in asked:
        plane.submit(each.transfer)
    mail(plane)
    pair.repeat((1,), ((1, 1),), 100)
    pair.repeat((1,), ((0, 1),), 5)
    ask_again(plane, pair.standby)
    assert pair.apps[1].values[1].tolist() == [112]
    assert [each.endings for each in asked] == [[None], [None]]


@pytest.mark.parametrize("parts", [(), (7,), (1, 7)])
def test_a_record_of_parts_that_the_standby_does_not_have_is_an_error(parts: Ints) -> None:
    pair = Pair(1)
    payload = [(0, Piece(counts(1), 0, 8))]
    with pytest.raises(ProtocolError, match="does not have"):
        pair.standby.copies.job_of(parts, (8,) * len(parts), ((0, 1),), payload)
