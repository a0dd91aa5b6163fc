"""A worker's half of the data plane when things go wrong: refusals, epochs, departures, the end."""

from __future__ import annotations

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
    pushed,
    refusal,
)

from pslite.errors import NodeLostError, RemoteError, UsageError
from pslite.plane import WorkerPlane
from pslite.wire.messages import PartsFailed, StaleEpoch

ONE = counts(1)


# -- refusals -----------------------------------------------------------------------------


def test_an_error_of_a_library_comes_back_with_its_kind() -> None:
    plane = WorkerPlane(window=2)
    asked = ask(1, push=[ONE])
    plane.submit(asked.transfer)
    plane.refused(PartsFailed(True, True, (1,), (1,), "KeyError", "'w'", "", -1))
    (error,) = asked.endings
    assert isinstance(error, RemoteError)
    assert (str(error), error.kind) == ("'w'", "KeyError")


def test_an_error_about_a_lost_node_names_it() -> None:
    plane = WorkerPlane(window=2)
    asked = ask(1, push=[ONE])
    plane.submit(asked.transfer)
    plane.refused(PartsFailed(True, False, (1,), (1,), "NodeLostError", "gone", "worker", 1))
    (error,) = asked.endings
    assert isinstance(error, NodeLostError)
    assert (error.role, error.rank) == ("worker", 1)


def test_a_refused_push_gives_its_number_back_and_a_consumed_one_does_not() -> None:
    messages = []
    for consumed in (False, True):
        plane = WorkerPlane(window=2)
        plane.submit(ask(1, push=[ONE]).transfer)
        mail(plane)
        plane.refused(refusal((1,), consumed=consumed))
        plane.submit(ask(1, push=[ONE]).transfer)
        messages += [send.message for send in mail(plane)]
    assert messages == [pushed(1, 1), pushed(1, 2)]


def test_a_refusal_lets_go_what_was_held_behind_it() -> None:
    plane = WorkerPlane(window=0)
    plane.submit(ask(1, push=[ONE]).transfer)
    plane.submit(ask(1, push=[ONE]).transfer)
    mail(plane)
    plane.refused(refusal((1,), consumed=True))
    assert [send.message for send in mail(plane)] == [pushed(1, 2)]


def test_one_failed_part_fails_the_transfer_once_the_others_are_answered() -> None:
    plane = WorkerPlane(window=2)
    asked = ask(1, 2, push=[ONE, ONE])
    plane.submit(asked.transfer)
    plane.refused(refusal((1,), consumed=True))
    halfway = list(asked.endings)
    plane.answered(applied(2, 1), [])
    assert halfway == []
    assert [type(error) for error in asked.endings] == [UsageError]


def test_a_refusal_that_nobody_waits_for_changes_nothing() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, push=[ONE]).transfer)
    mail(plane)
    plane.refused(refusal((7,), consumed=False))
    plane.submit(ask(1, push=[ONE]).transfer)
    assert [send.message for send in mail(plane)] == [pushed(1, 2)]


def test_every_push_ends_when_refusals_and_new_pushes_cross() -> None:
    server = make_server(CountingApp(), [0, 1], 1)
    server.depart(1, LOST)
    plane = WorkerPlane(window=2)
    asked = [ask(1, push=[ONE]) for _ in range(4)]
    plane.submit(asked[0].transfer)
    plane.submit(asked[1].transfer)
    first, second = (exchange(server, send) for send in mail(plane))
    deliver(plane, first)
    plane.submit(asked[2].transfer)
    plane.submit(asked[3].transfer)
    deliver(plane, second)
    while sends := mail(plane):
        for send in sends:
            deliver(plane, exchange(server, send))
    assert [[str(error) for error in one.endings] for one in asked] == [[str(LOST)]] * 4


def test_a_push_behind_one_that_was_refused_is_applied_and_so_are_later_ones() -> None:
    app = CountingApp()
    server = make_server(app, [0], 1)
    plane = WorkerPlane(window=2)
    wrong = ask(1, push=[counts(9, 9)], size=16)
    right = [ask(1, push=[counts(10**n)]) for n in range(3)]
    plane.submit(wrong.transfer)
    plane.submit(right[0].transfer)
    for later in (*right[1:], None):
        for send in mail(plane):
            deliver(plane, carry_out(server, exchange(server, send)))
        if later is not None:
            plane.submit(later.transfer)
    assert [type(error) for error in wrong.endings] == [UsageError]
    assert [one.endings for one in right] == [[None]] * 3
    assert app.values[1].tolist() == [111]


def test_a_pull_ends_though_only_one_of_two_refused_pushes_was_made_good() -> None:
    server = make_server(CountingApp(), [0], 1)
    plane = WorkerPlane(window=2)
    wrong = [ask(1, push=[counts(9, 9)], size=16) for _ in range(2)]
    right = [ask(1, push=[ONE]) for _ in range(3)]
    pull = ask(1, pull=True)
    for asked in (*wrong, right[0]):
        plane.submit(asked.transfer)
    for later in ([right[1], pull, right[2]], [], [], []):
        for send in mail(plane):
            deliver(plane, carry_out(server, exchange(server, send)))
        for asked in later:
            plane.submit(asked.transfer)
    assert [len(asked.endings) for asked in (*wrong, *right, pull)] == [1] * 6


# -- epochs, departures, the end ----------------------------------------------------------


def test_what_was_stale_is_sent_again_with_the_same_round() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, 2, push=[counts(1), counts(2)], pull=True).transfer)
    mail(plane)
    plane.begin_epoch(2)
    plane.stale(StaleEpoch(2, True, (2,), (1,)))
    (send,) = mail(plane)
    assert send.message == pushed(2, 1, pull=True)
    assert [bytes(frame) for frame in send.frames] == [counts(2)]


def test_a_stale_pull_is_sent_again() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, pull=True).transfer)
    mail(plane)
    plane.begin_epoch(2)
    plane.stale(StaleEpoch(2, False, (1,), (0,)))
    assert [send.message for send in mail(plane)] == [pulled(1, 0)]


def test_a_server_that_knows_a_later_epoch_first_is_answered_when_it_is_known_here() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, push=[ONE]).transfer)
    mail(plane)
    plane.stale(StaleEpoch(2, True, (1,), (1,)))
    before = mail(plane)
    plane.begin_epoch(2)
    after = [send.message for send in mail(plane)]
    assert (before, after) == ([], [pushed(1, 1)])


def test_an_answered_request_is_not_sent_again_when_it_is_called_stale() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, push=[ONE]).transfer)
    mail(plane)
    plane.answered(applied(1, 1), [])
    plane.stale(StaleEpoch(1, True, (1,), (1,)))
    assert mail(plane) == []


def test_a_departed_server_ends_its_requests_and_those_to_come_but_no_others() -> None:
    plane = WorkerPlane(window=0)
    ours = [ask(1, push=[ONE], pull=True), ask(1, 3, push=[ONE, ONE]), ask(4, pull=True)]
    other = ask(2, push=[ONE], server=10)
    for asked in (*ours[:2], other):
        plane.submit(asked.transfer)
    plane.depart(SERVER, LOST)
    plane.submit(ours[2].transfer)
    assert [asked.endings for asked in ours] == [[LOST]] * 3
    assert (other.endings, list(plane.outbox)) == ([], [10])
    mail(plane, 10)
    assert (plane.everything_sent, plane.waiting_for()) == (True, [10])


def test_a_failed_node_ends_every_request_now_and_later() -> None:
    plane = WorkerPlane(window=0)
    asked = [ask(1, push=[ONE], pull=True), ask(1, push=[ONE]), ask(2, pull=True)]
    plane.submit(asked[0].transfer)
    plane.submit(asked[1].transfer)
    plane.fail(LOST)
    plane.submit(asked[2].transfer)
    assert [one.endings for one in asked] == [[LOST]] * 3
    assert (plane.idle, plane.everything_sent, list(plane.outbox)) == (True, True, [])


def test_giving_up_twice_ends_a_transfer_once() -> None:
    asked = ask(1, 2, push=[ONE, ONE])
    asked.transfer.give_up(LOST)
    asked.transfer.give_up(UsageError("later"))
    assert (asked.endings, asked.transfer.left) == ([LOST], 0)
