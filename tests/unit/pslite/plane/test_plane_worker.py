"""A worker's half of the data plane: what it sends, what it holds back, what answers do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from plane_helpers import SERVER, applied, ask, counts, mail, pulled, pushed

from pslite.errors import ProtocolError
from pslite.plane import Piece, Transfer, WorkerPlane
from pslite.wire.messages import Answer, Exchange

ONE = counts(1)


# -- sending ------------------------------------------------------------------------------


def test_a_push_travels_with_its_round_and_its_own_memory() -> None:
    plane = WorkerPlane(window=2)
    memory = bytearray(counts(7))
    asked = ask(1, push=[b""])
    asked.transfer.frames = [memory]
    plane.submit(asked.transfer)
    (send,) = mail(plane)
    assert send.message == pushed(1, 1)
    assert send.frames[0] is memory


def test_rounds_are_counted_by_part() -> None:
    plane = WorkerPlane(window=2)
    for part in (1, 1, 2):
        plane.submit(ask(part, push=[ONE]).transfer)
    assert [send.message for send in mail(plane)] == [pushed(1, 1), pushed(1, 2), pushed(2, 1)]


def test_a_pull_carries_the_pushes_before_it() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, push=[ONE]).transfer)
    plane.submit(ask(1, pull=True).transfer)
    assert [send.message for send in mail(plane)] == [pushed(1, 1), pulled(1, 1)]


def test_a_push_behind_a_wanted_value_is_held_until_the_value_is_there() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, push=[ONE], pull=True).transfer)
    plane.submit(ask(1, push=[ONE]).transfer)
    before = [send.message for send in mail(plane)]
    plane.answered(Answer(True, (1,), (1,), (1,), (8,)), [ONE])
    after = [send.message for send in mail(plane)]
    assert (before, after) == ([pushed(1, 1, pull=True)], [pushed(1, 2)])


def test_at_most_one_and_the_window_pushes_of_a_part_are_unanswered() -> None:
    plane = WorkerPlane(window=2)
    for _ in range(5):
        plane.submit(ask(1, push=[ONE]).transfer)
    before = [send.message for send in mail(plane)]
    plane.answered(applied(1, 1), [])
    after = [send.message for send in mail(plane)]
    assert before == [pushed(1, 1), pushed(1, 2), pushed(1, 3)]
    assert after == [pushed(1, 4)]


def test_held_requests_of_a_part_go_in_order_of_asking() -> None:
    plane = WorkerPlane(window=0)
    plane.submit(ask(1, push=[ONE]).transfer)
    plane.submit(ask(1, push=[ONE]).transfer)
    plane.submit(ask(1, pull=True).transfer)
    sent = [send.message for send in mail(plane)]
    plane.answered(applied(1, 1), [])
    sent += [send.message for send in mail(plane)]
    assert sent == [pushed(1, 1), pushed(1, 2), pulled(1, 2)]


def test_an_answer_to_several_parts_lets_go_all_that_waited_for_one_of_them() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, 2, pull=True).transfer)
    mail(plane)
    for _ in range(2):
        plane.submit(ask(1, push=[ONE]).transfer)
    assert mail(plane) == []
    plane.answered(Answer(False, (1, 2), (0, 0), (1, 1), (8, 8)), [counts(1, 1)])
    assert [send.message for send in mail(plane)] == [pushed(1, 1), pushed(1, 2)]


def test_parts_that_may_go_do_not_wait_for_those_that_may_not() -> None:
    plane = WorkerPlane(window=0)
    plane.submit(ask(2, push=[ONE]).transfer)
    mail(plane)
    plane.submit(ask(1, 2, 3, push=[counts(1), counts(2), counts(3)]).transfer)
    (ahead,) = mail(plane)
    plane.answered(applied(2, 1), [])
    (behind,) = mail(plane)
    assert ahead.message == Exchange(True, False, (1, 3), (1, 1), (8, 8))
    assert [bytes(frame) for frame in ahead.frames] == [counts(1), counts(3)]
    assert behind.message == pushed(2, 2)
    assert [bytes(frame) for frame in behind.frames] == [counts(2)]


def test_the_highest_priority_goes_first_and_equals_go_in_order() -> None:
    plane = WorkerPlane(window=2)
    for part, priority in ((1, -1), (2, 5), (3, 0), (4, 5)):
        plane.submit(ask(part, push=[ONE], priority=priority).transfer)
    expected = [(2, 5), (4, 5), (3, 0), (1, -1)]
    sent = [send.message for send in mail(plane)]
    assert sent == [pushed(part, 1, priority=priority) for part, priority in expected]


def test_mail_is_kept_by_server() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, push=[ONE], server=8).transfer)
    plane.submit(ask(2, push=[ONE], server=10).transfer)
    assert list(plane.outbox) == [8, 10]
    assert [send.message for send in mail(plane, 10)] == [pushed(2, 1)]
    assert list(plane.outbox) == [8]


def test_a_transfer_of_no_parts_is_done_at_once() -> None:
    asked = ask(push=[])
    WorkerPlane(window=2).submit(asked.transfer)
    assert asked.endings == [None]


def test_idle_and_everything_sent_tell_how_far_it_is() -> None:
    plane = WorkerPlane(window=0)
    states = []

    def note() -> None:
        states.append((plane.idle, plane.everything_sent, plane.waiting_for()))

    note()
    plane.submit(ask(1, push=[ONE]).transfer)
    plane.submit(ask(1, push=[ONE]).transfer)
    mail(plane)
    note()
    plane.answered(applied(1, 1), [])
    mail(plane)
    note()
    plane.answered(applied(1, 2), [])
    note()
    assert states == [
        (True, True, []),
        (False, False, [SERVER]),
        (False, True, [SERVER]),
        (True, True, []),
    ]


# -- answers ------------------------------------------------------------------------------


def test_answers_may_be_cut_and_joined_in_another_way_than_requests() -> None:
    plane = WorkerPlane(window=2)
    first = ask(1, 2, push=[ONE, ONE], pull=True)
    second = ask(3, push=[ONE], pull=True)
    plane.submit(first.transfer)
    plane.submit(second.transfer)
    plane.answered(Answer(True, (2, 3), (1, 1), (4, 5), (8, 8)), [counts(20, 30)])
    halfway = list(first.endings)
    plane.answered(Answer(True, (1,), (1,), (6,), (8,)), [counts(10)])
    assert (halfway, first.endings, second.endings) == ([], [None], [None])
    assert (first.values, second.values) == ({1: (10,), 2: (20,)}, {3: (30,)})
    assert (first.versions, second.versions) == ({1: 6, 2: 4}, {3: 5})


def test_an_answer_that_comes_twice_counts_once() -> None:
    plane = WorkerPlane(window=2)
    asked = ask(1, push=[ONE])
    plane.submit(asked.transfer)
    plane.answered(applied(1, 1), [])
    plane.answered(applied(1, 1), [])
    assert (asked.endings, plane.idle) == ([None], True)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(True, (9,), (1,), (1,), ()),
        Answer(True, (1,), (7,), (1,), ()),
        Answer(False, (1,), (0,), (1,), ()),
    ],
    ids=["unknown part", "unknown round", "pull that nobody asked"],
)
def test_an_answer_that_nobody_waits_for_changes_nothing(answer: Answer) -> None:
    plane = WorkerPlane(window=2)
    asked = ask(1, push=[ONE])
    plane.submit(asked.transfer)
    plane.answered(answer, [])
    assert (asked.endings, plane.waiting_for()) == ([], [SERVER])


def test_values_of_an_abandoned_transfer_are_not_copied_out() -> None:
    plane = WorkerPlane(window=2)
    asked = ask(1, pull=True)
    plane.submit(asked.transfer)
    asked.transfer.abandoned = True
    plane.answered(Answer(False, (1,), (0,), (3,), (8,)), [ONE])
    assert (asked.endings, asked.values) == ([None], {})


def test_an_error_while_copying_out_ends_the_transfer_and_nothing_else() -> None:
    plane = WorkerPlane(window=2)
    endings: list[BaseException | None] = []
    error = ValueError("read-only")

    def sink(*_: object) -> None:
        raise error

    plane.submit(Transfer(SERVER, (1, 2), (8, 8), None, sink, endings.append))
    plane.answered(Answer(False, (1,), (0,), (1,), (8,)), [ONE])
    plane.answered(Answer(False, (2,), (0,), (1,), (8,)), [ONE])
    (found,) = endings
    assert isinstance(found, ProtocolError) and plane.idle
    assert str(found) == "server 0 sent an invalid answer for part 1: read-only"
    assert found.__cause__ is error


def test_an_error_while_copying_out_is_that_of_its_part_alone() -> None:
    plane = WorkerPlane(window=2)
    endings: list[BaseException | None] = []
    copied: set[int] = set()

    def sink(indices: Sequence[int], *_: object) -> None:
        for index in indices:
            if index == 1:
                raise ValueError("no room")
            copied.add(index)

    transfer = Transfer(SERVER, (4, 5, 6), (8, 8, 8), None, sink, endings.append)
    plane.submit(transfer)
    plane.answered(Answer(False, (4, 5, 6), (0, 0, 0), (1, 1, 1), (8, 8, 8)), [counts(1, 2, 3)])
    assert (copied, list(transfer.failed or {})) == ({0, 2}, [1])
    assert [str(error) for error in endings] == [
        "server 0 sent an invalid answer for part 5: no room"
    ]


def test_the_memory_is_free_when_the_transfer_is_done() -> None:
    plane = WorkerPlane(window=2)
    asked = ask(1, push=[ONE])
    plane.submit(asked.transfer)
    plane.answered(applied(1, 1), [])
    assert asked.transfer.frames == ()


@pytest.mark.parametrize(
    ("answer", "frames"),
    [
        (Answer(True, (1,), (1,), (1,), (8, 8)), [counts(1, 1)]),
        (Answer(True, (1,), (1,), (1,), (8,)), [b"short"]),
    ],
)
def test_an_answer_whose_payload_does_not_fit_is_refused(
    answer: Answer, frames: list[bytes]
) -> None:
    plane = WorkerPlane(window=2)
    asked = ask(1, push=[ONE], pull=True)
    plane.submit(asked.transfer)
    with pytest.raises(ProtocolError):
        plane.answered(answer, frames)
    (error,) = asked.endings
    assert isinstance(error, ProtocolError) and plane.idle
    assert "server 0 sent an invalid answer for part 1" in str(error)


@pytest.mark.parametrize("times", [1, 5], ids=["by part", "as one unit"])
def test_an_answer_that_makes_no_sense_ends_what_waits_for_it_and_nothing_else(times: int) -> None:
    plane = WorkerPlane(window=2)
    for round_ in range(1, times):
        plane.submit(ask(1, 2, push=[ONE, ONE], pull=True).transfer)
        rounds = (round_, round_)
        plane.answered(Answer(True, (1, 2), rounds, rounds, (8, 8)), [counts(1, 1)])
    asked = ask(1, 2, push=[ONE, ONE], pull=True)
    behind, other = ask(1, pull=True), ask(3, push=[ONE])
    for each in (asked, behind, other):
        plane.submit(each.transfer)
    mail(plane)
    rounds = (times, times)
    with pytest.raises(ProtocolError):
        plane.answered(Answer(True, (1, 2), rounds, rounds, (8, 9)), [counts(1, 1)])
    assert [type(error) for error in asked.endings] == [ProtocolError]
    assert (behind.endings, other.endings) == ([], [])
    assert [send.message for send in mail(plane)] == [pulled(1, times)]
    plane.answered(Answer(False, (1,), (times,), (times,), (8,)), [ONE])
    plane.answered(applied(3, 1), [])
    assert (behind.endings, other.endings, plane.idle) == ([None], [None], True)


def test_a_value_of_another_size_than_the_part_never_reaches_the_callers_array() -> None:
    plane = WorkerPlane(window=2)
    target = np.zeros(8, np.uint8)

    def sink(_: Sequence[int], pieces: Sequence[Piece], __: Sequence[int]) -> None:
        piece = pieces[0]
        target[:] = np.frombuffer(piece.frame, np.uint8)[piece.start : piece.stop]

    endings: list[BaseException | None] = []
    plane.submit(Transfer(SERVER, (1,), (8,), None, sink, endings.append))
    plane.answered(Answer(False, (1,), (0,), (1,), (1,)), [b"\x07"])
    assert target.tolist() == [0] * 8
    assert [type(error) for error in endings] == [ProtocolError]
