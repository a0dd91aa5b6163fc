"""Another process in the place of a lost worker: what its plane sends, and what servers answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from plane_helpers import (
    LOST,
    SERVER,
    CountingApp,
    answers,
    applied,
    ask,
    carry_out,
    counts,
    mail,
    pull_from,
    pulled,
    push_to,
    pushed,
    refusal,
    runs,
    sent_values,
    slots,
)

from pslite.errors import NodeLostError, UsageError
from pslite.plane import Effect, Job, Outcome, Piece, Send, ServerPlane, WorkerPlane
from pslite.plane.interface import Row
from pslite.plane.unit import Unit, joined
from pslite.protocol.rounds import SyncRounds
from pslite.wire.messages import Answer, Exchange, PartsFailed, StaleEpoch

ONE = counts(1)


# -- the worker: steps --------------------------------------------------------------------


def test_requests_are_held_back_and_sent_in_their_order_when_they_are_released() -> None:
    plane = WorkerPlane(window=2)
    plane.hold_back()
    plane.submit(ask(1, push=[ONE]).transfer)
    plane.submit(ask(1, pull=True).transfer)
    assert (mail(plane), plane.idle) == ([], False)
    plane.release()
    assert [send.message for send in mail(plane)] == [pushed(1, 1), pulled(1, 1)]
    plane.submit(ask(2, push=[ONE]).transfer)
    assert [send.message for send in mail(plane)] == [pushed(2, 1)]


def test_a_release_without_requests_changes_nothing() -> None:
    plane = WorkerPlane(window=2)
    plane.release()
    plane.hold_back()
    plane.release()
    assert (mail(plane), plane.everything_sent) == ([], True)


def test_what_was_asked_before_is_sent_although_later_requests_wait() -> None:
    plane = WorkerPlane(window=0)
    for _ in range(2):
        plane.submit(ask(1, push=[ONE]).transfer)
    plane.hold_back()
    plane.submit(ask(2, push=[ONE]).transfer)
    unsent = [plane.everything_sent_before]
    mail(plane)
    unsent.append(plane.everything_sent_before)  # the second push waits for the first one
    plane.answered(applied(1, 1), [])
    mail(plane)
    assert unsent == [False, False]
    assert (plane.everything_sent_before, plane.everything_sent) == (True, False)
    plane.release()
    assert not plane.everything_sent_before
    mail(plane)
    assert plane.everything_sent


def test_a_stale_request_from_before_is_not_sent_until_its_epoch_is_announced() -> None:
    plane = WorkerPlane(window=2)
    plane.submit(ask(1, push=[ONE]).transfer)
    mail(plane)
    plane.hold_back()
    plane.stale(StaleEpoch(2, True, (1,), (1,)))
    assert not plane.everything_sent_before
    plane.begin_epoch(2)
    mail(plane)
    assert plane.everything_sent_before


def test_requests_that_are_held_back_end_with_the_node_and_are_not_sent_later() -> None:
    plane = WorkerPlane(window=2)
    plane.hold_back()
    asked = [ask(1, push=[ONE]), ask(1, pull=True)]
    for each in asked:
        plane.submit(each.transfer)
    plane.fail(LOST)
    assert [each.endings for each in asked] == [[LOST], [LOST]]
    plane.release()
    assert (mail(plane), plane.idle) == ([], True)


def test_requests_that_are_held_back_end_with_their_server() -> None:
    plane = WorkerPlane(window=2)
    plane.hold_back()
    lost, other = ask(1, push=[ONE]), ask(2, push=[ONE], server=10)
    for asked in (lost, other):
        plane.submit(asked.transfer)
    plane.depart(SERVER, LOST)
    plane.release()
    assert (lost.endings, mail(plane, SERVER)) == ([LOST], [])
    assert [send.message for send in mail(plane, 10)] == [pushed(2, 1)]


def test_the_pushes_of_each_part_are_counted_when_they_are_numbered() -> None:
    plane = WorkerPlane(window=2)
    assert plane.counts() == {}
    plane.submit(ask(1, 2, push=[ONE, ONE]).transfer)
    plane.submit(ask(2, push=[ONE]).transfer)
    plane.submit(ask(3, pull=True).transfer)  # it has no push
    assert plane.counts() == {1: 1, 2: 2}
    mail(plane)
    plane.answered(applied(2, 1), [])
    assert plane.counts() == {1: 1, 2: 2}
    plane.hold_back()
    plane.submit(ask(1, push=[ONE]).transfer)
    assert plane.counts() == {1: 1, 2: 2}


def test_parts_that_are_kept_as_one_are_counted_one_by_one() -> None:
    plane = WorkerPlane(window=9)
    for _ in range(5):
        plane.submit(ask(1, 2, push=[ONE, ONE]).transfer)
    assert plane._parts[1] is plane._parts[2]
    assert plane.counts() == {1: 5, 2: 5}


def test_a_refused_push_that_leaves_a_gap_makes_the_numbers_useless() -> None:
    plane = WorkerPlane(window=2)
    for _ in range(2):
        plane.submit(ask(1, push=[ONE]).transfer)
    mail(plane)
    plane.refused(refusal((1,), consumed=False))
    assert plane.counts() is None
    plane.submit(ask(1, push=[ONE]).transfer)  # it fills the gap
    assert [send.message for send in mail(plane)] == [pushed(1, 1)]
    assert plane.counts() == {1: 2}


# -- the worker: another process ----------------------------------------------------------


def test_a_process_that_catches_up_may_pull_and_must_not_push() -> None:
    plane = WorkerPlane(window=2)
    plane.resume({1: 3})
    push, both, pull = ask(1, push=[ONE]), ask(1, push=[ONE], pull=True), ask(1, pull=True)
    for asked in (push, both, pull):
        plane.submit(asked.transfer)
    for asked in (push, both):
        (error,) = asked.endings
        assert isinstance(error, UsageError)
        assert "let the script push only in the loop of kv.steps" in str(error)
    assert [send.message for send in mail(plane)] == [pulled(1, 3)]


def test_the_step_is_repeated_with_the_numbers_that_its_pushes_had() -> None:
    plane = WorkerPlane(window=2)
    plane.resume({1: 3, 2: 5})
    plane.repeat()
    for part in (1, 2, 7):
        plane.submit(ask(part, push=[ONE]).transfer)
    plane.submit(ask(1, pull=True).transfer)
    sent = [send.message for send in mail(plane)]
    assert sent == [pushed(1, 4), pushed(2, 6), pushed(7, 1), pulled(1, 4)]
    assert plane.counts() == {1: 4, 2: 6, 7: 1}


def test_parts_that_are_not_asked_for_keep_their_numbers() -> None:
    plane = WorkerPlane(window=2)
    plane.resume({1: 3, 2: 5})
    assert plane.counts() == {1: 3, 2: 5}
    plane.submit(ask(1, pull=True).transfer)
    assert plane.counts() == {1: 3, 2: 5}


def test_parts_with_equal_numbers_are_kept_as_one_after_a_return_too() -> None:
    plane = WorkerPlane(window=2)
    plane.resume({1: 3, 2: 3, 3: 4})
    plane.repeat()
    for parts in ((1, 2), (1, 3)):
        for _ in range(3):
            plane.submit(ask(*parts, pull=True).transfer)
            mail(plane)
            rounds = tuple(3 if part < 3 else 4 for part in parts)
            plane.answered(Answer(False, parts, rounds, (9, 9), (8, 8)), [counts(1, 1)])
        assert (plane._parts[parts[0]] is plane._parts[parts[1]]) == (parts == (1, 2))
    assert plane.counts() == {1: 3, 2: 3, 3: 4}


def test_what_waits_for_the_numbers_gets_them() -> None:
    plane = WorkerPlane(window=2)
    plane.hold_back()
    asked = ask(1, pull=True)
    plane.submit(asked.transfer)
    plane.resume({1: 3})
    plane.release()
    assert [send.message for send in mail(plane)] == [pulled(1, 3)]
    plane.answered(Answer(False, (1,), (3,), (3,), (8,)), [ONE])
    assert (asked.values, asked.endings) == ({1: (1,)}, [None])


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_part_that_is_deleted_begins_anew(is_asked_for: bool) -> None:
    plane = WorkerPlane(window=2)
    plane.resume({1: 3, 2: 5})
    plane.repeat()
    if is_asked_for:
        plane.submit(ask(1, pull=True).transfer)
        mail(plane)
        plane.answered(Answer(False, (1,), (3,), (3,), (8,)), [ONE])
    plane.forget([1])
    assert plane.counts() == {2: 5}
    plane.submit(ask(1, push=[ONE]).transfer)
    assert [send.message for send in mail(plane)] == [pushed(1, 1)]


# -- the server ---------------------------------------------------------------------------


class KeepingApp(CountingApp):
    """Keeps the values from before the last round, and notes what is read again."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, np.ndarray[Any, np.dtype[np.int64]]] = {}
        self.again: list[tuple[tuple[int, ...], bool]] = []

    def apply(self, jobs: Sequence[Job]) -> list[Outcome]:
        for job in jobs:
            self.before.update((part, self.values[part].copy()) for part in job.parts)
        return super().apply(jobs)

    def read_again(self, parts: Sequence[int], *, before_last: bool) -> list[Any]:
        self.again.append((tuple(parts), before_last))
        values = self.before if before_last else self.values
        return [values[part].copy().view(np.uint8).data for part in parts]


def keeping(
    *parts: int, ranks: Sequence[int] | None = (0, 1), lane: int | None = None
) -> tuple[KeepingApp, ServerPlane]:
    """A server of two workers that keeps the values before the last round."""
    app = KeepingApp()
    plane = ServerPlane(
        app, window=2, message_bytes=1 << 20, stall_report_s=60.0, keeps_previous=True
    )
    for part in parts or (1,):
        plane.open_part(part, app.add(part, 1), ranks, lane=part if lane is None else lane)
    return app, plane


def do_round(plane: ServerPlane, round_: int, parts: tuple[int, ...] = (1,)) -> list[Effect]:
    """Both workers push 1 to each part."""
    ones = (1,) * len(parts)
    effects = push_to(plane, 0, parts, round_, *ones)
    return carry_out(plane, effects + push_to(plane, 1, parts, round_, *ones))


def peers(effects: Sequence[Effect]) -> list[int]:
    return [peer for peer, _ in answers(effects)]


def failure(effects: Sequence[Effect]) -> PartsFailed:
    ((_, message),) = answers(effects)
    assert isinstance(message, PartsFailed)
    return message


# -- the values that the step had ---------------------------------------------------------


def test_a_pull_whose_next_push_is_here_gets_a_copy_that_this_push_does_not_change() -> None:
    app, plane = keeping()
    do_round(plane, 1)
    push_to(plane, 1, (1,), 2, 1)
    plane.returned(1)
    effects = pull_from(plane, 1, (1,), 1)
    done = carry_out(plane, push_to(plane, 0, (1,), 2, 1))
    assert app.again == [((1,), False)]
    assert answers(effects) == [(1, Answer(False, (1,), (1,), (1,), (8,)))]
    assert sent_values(effects) == {1: [(2,)]}  # it is sent after round 2 was applied
    assert (app.values[1].tolist(), peers(done)) == ([4], [0])


def test_a_pull_from_before_the_last_round_gets_the_values_from_before_it() -> None:
    app, plane = keeping()
    do_round(plane, 1)
    do_round(plane, 2)
    plane.returned(1)
    effects = pull_from(plane, 1, (1,), 1)
    assert app.again == [((1,), True)]
    assert answers(effects) == [(1, Answer(False, (1,), (1,), (1,), (8,)))]
    assert sent_values(effects) == {1: [(2,)]}


def test_a_pull_for_values_that_are_gone_fails_and_says_why() -> None:
    app, plane = keeping()
    for round_ in (1, 2, 3):
        do_round(plane, round_)
    failed = failure(pull_from(plane, 1, (1,), 1))
    assert (failed.pushed, failed.parts, failed.rounds) == (False, (1,), (1,))
    assert failed.kind == "UsageError"
    assert failed.error == (
        "the values after round 1 are no longer there, in round 3: a process that takes the place "
        "of a lost worker cannot repeat this step"
    )
    assert app.again == []


def test_a_pull_after_the_last_push_is_lent_the_values() -> None:
    app, plane = keeping()
    do_round(plane, 1)
    push_to(plane, 0, (1,), 2, 1)  # another worker's next push does not matter
    (send,) = pull_from(plane, 1, (1,), 1)
    assert np.shares_memory(np.frombuffer(send.frames[0], np.int64), app.values[1])  # type: ignore[union-attr]
    assert app.again == []


def test_a_server_that_keeps_nothing_answers_with_the_values_that_it_has() -> None:
    app = KeepingApp()
    plane = ServerPlane(app, window=2, message_bytes=1 << 20, stall_report_s=60.0)
    plane.open_part(1, app.add(1, 1), [0, 1], lane=0)
    for round_ in (1, 2, 3):
        do_round(plane, round_)
    effects = pull_from(plane, 1, (1,), 1)
    assert answers(effects) == [(1, Answer(False, (1,), (1,), (3,), (8,)))]
    assert (sent_values(effects), app.again) == ({1: [(6,)]}, [])


def test_a_push_that_is_repeated_with_a_pull_gets_the_values_of_its_round() -> None:
    app, plane = keeping()
    do_round(plane, 1)
    do_round(plane, 2)
    plane.returned(1)
    first = push_to(plane, 1, (1,), 1, 1, pull=True)
    second = push_to(plane, 1, (1,), 2, 1, pull=True)
    assert answers(first) == [(1, Answer(True, (1,), (1,), (1,), (8,)))]
    assert answers(second) == [(1, Answer(True, (1,), (2,), (2,), (8,)))]
    assert (sent_values(first), sent_values(second)) == ({1: [(2,)]}, {1: [(4,)]})
    assert (app.values[1].tolist(), app.again) == ([4], [((1,), True)])


def test_a_push_that_is_repeated_without_a_pull_is_answered_although_the_values_are_gone() -> None:
    app, plane = keeping()
    for round_ in (1, 2, 3):
        do_round(plane, round_)
    plane.returned(1)
    assert answers(push_to(plane, 1, (1,), 1, 1)) == [(1, Answer(True, (1,), (1,), (3,), ()))]
    assert app.values[1].tolist() == [6]


def test_a_push_with_a_pull_gets_a_copy_if_the_next_push_is_here_when_it_is_applied() -> None:
    app, plane = keeping()
    for round_ in (1, 2):
        push_to(plane, 1, (1,), round_, 1, pull=round_ == 1)
    first = carry_out(plane, push_to(plane, 0, (1,), 1, 1))
    carry_out(plane, push_to(plane, 0, (1,), 2, 1))
    assert app.again == [((1,), False)]
    assert sent_values(first)[1] == [(2,)]


def test_a_pull_that_waited_gets_a_copy_if_the_next_push_came_in_the_meantime() -> None:
    app, plane = keeping()
    for round_ in (1, 2):
        push_to(plane, 1, (1,), round_, 1)
    assert pull_from(plane, 1, (1,), 1) == []
    first = carry_out(plane, push_to(plane, 0, (1,), 1, 1))
    carry_out(plane, push_to(plane, 0, (1,), 2, 1))
    assert (sent_values(first)[1], app.again) == ([(2,)], [((1,), False)])


def test_parts_of_one_unit_that_are_read_again_come_in_one_answer() -> None:
    app, plane = keeping(1, 2, lane=0)
    for round_ in range(1, 6):
        do_round(plane, round_, (1, 2))
    assert plane._parts.units[1] is plane._parts.units[2]
    effects = pull_from(plane, 0, (1, 2), 4)
    assert answers(effects) == [(0, Answer(False, (1, 2), (4, 4), (4, 4), (8, 8)))]
    assert (sent_values(effects), app.again) == ({0: [(8,), (8,)]}, [((1, 2), True)])


def test_a_pull_in_a_form_of_the_app_says_which_values_it_gets() -> None:
    class FormApp(KeepingApp):
        def take(self, part: int, form: int, piece: Piece, *, is_push: bool) -> Any:
            return piece.frame

        def answer(self, part: int, wanted: Any, *, before_last: bool) -> bytes:
            return b"before" if before_last else b"now"

    app = FormApp()
    plane = ServerPlane(
        app, window=2, message_bytes=1 << 20, stall_report_s=60.0, keeps_previous=True
    )
    plane.open_part(1, app.add(1, 1), [0, 1], lane=0)
    for round_ in (1, 2):
        do_round(plane, round_)

    def formed(after_round: int) -> list[Effect]:
        message = Exchange(False, True, (1,), (after_round,), (3,), 7)
        return plane.exchange(1, 1, message, [b"ask"])

    assert "the values after round 0 are no longer there" in failure(formed(0)).error
    for after_round, version, frame in ((1, 1, b"before"), (2, 2, b"now")):
        (send,) = formed(after_round)
        assert isinstance(send, Send)
        assert isinstance(send.message, Answer)
        assert (send.message.versions, list(send.frames)) == ((version,), [frame])


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_asynchronous_parts_are_never_read_again(rounds: int) -> None:
    app, plane = keeping(ranks=None)
    for round_ in range(1, rounds + 1):
        carry_out(plane, push_to(plane, 1, (1,), round_, 1))
    plane.returned(1)
    effects = pull_from(plane, 1, (1,), 1) + push_to(plane, 1, (1,), 1, 1, pull=True)
    assert sent_values(effects) == {1: [(rounds,), (rounds,)]}
    assert app.again == []


# -- pushes of a lost process -------------------------------------------------------------


def test_a_push_of_a_lost_process_is_applied_and_not_answered() -> None:
    app, plane = keeping()
    push_to(plane, 1, (1,), 1, 7, pull=True)
    plane.returned(1)
    done = carry_out(plane, push_to(plane, 0, (1,), 1, 5))
    assert answers(done) == [(0, Answer(True, (1,), (1,), (1,), ()))]
    assert app.values[1].tolist() == [12]


@pytest.mark.parametrize("is_running", [False, True])
@pytest.mark.parametrize("pull", [False, True])
def test_a_push_that_comes_again_is_applied_once_and_answered(pull: bool, is_running: bool) -> None:
    app, plane = keeping()
    push_to(plane, 1, (1,), 1, 7)
    effects = push_to(plane, 0, (1,), 1, 5) if is_running else []
    plane.returned(1)
    assert push_to(plane, 1, (1,), 1, 7, pull=pull) == []
    effects = effects or push_to(plane, 0, (1,), 1, 5)
    done = carry_out(plane, effects)
    sizes = (8,) if pull else ()
    assert (1, Answer(True, (1,), (1,), (1,), sizes)) in answers(done)
    assert sent_values(done) == {0: [], 1: [(12,)] if pull else []}
    assert (peers(done).count(1), app.applied) == (1, [(1, ((0, 1), (1, 1)))])


def test_only_the_next_process_decides_whether_its_push_asks_for_the_value() -> None:
    _, plane = keeping()
    push_to(plane, 1, (1,), 1, 7, pull=True)
    plane.returned(1)
    push_to(plane, 1, (1,), 1, 7)
    done = carry_out(plane, push_to(plane, 0, (1,), 1, 5, pull=True))
    assert sent_values(done) == {0: [(12,)], 1: []}


def test_a_push_that_comes_again_after_it_was_applied_is_answered_then() -> None:
    app, plane = keeping()
    push_to(plane, 1, (1,), 1, 7)
    plane.returned(1)
    carry_out(plane, push_to(plane, 0, (1,), 1, 5))
    assert answers(push_to(plane, 1, (1,), 1, 7)) == [(1, Answer(True, (1,), (1,), (1,), ()))]
    assert app.values[1].tolist() == [12]
    assert (1, Answer(True, (1,), (2,), (2,), ())) in answers(do_round(plane, 2))


def test_a_push_that_fails_is_told_to_the_next_process_only_if_it_repeats_it() -> None:
    for is_repeated in (False, True):
        app, plane = keeping()
        app.errors[1] = UsageError("no")
        push_to(plane, 1, (1,), 1, 7)
        plane.returned(1)
        if is_repeated:
            push_to(plane, 1, (1,), 1, 7)
        done = carry_out(plane, push_to(plane, 0, (1,), 1, 5))
        assert [type(message) for _, message in answers(done)] == [PartsFailed] * len(done)
        assert peers(done) == ([0, 1] if is_repeated else [0])


def test_asynchronous_pushes_of_a_lost_process_are_applied_and_not_answered() -> None:
    app, plane = keeping(ranks=None)
    push_to(plane, 1, (1,), 2, 20)
    plane.returned(1)
    first = carry_out(plane, push_to(plane, 1, (1,), 1, 10))
    assert answers(first) == [(1, Answer(True, (1,), (1,), (1,), ()))]
    assert app.values[1].tolist() == [30]
    again = push_to(plane, 1, (1,), 2, 20)
    assert answers(again) == [(1, Answer(True, (1,), (2,), (2,), ()))]


def test_an_asynchronous_push_that_comes_again_is_answered_once() -> None:
    app, plane = keeping(ranks=None)
    (run,) = runs(push_to(plane, 1, (1,), 1, 10))
    plane.returned(1)
    assert push_to(plane, 1, (1,), 1, 10, pull=True) == []
    done = plane.finished(run.jobs, app.apply(run.jobs))
    assert answers(done) == [(1, Answer(True, (1,), (1,), (1,), (8,)))]
    assert (app.values[1].tolist(), app.again) == ([10], [])


def test_pulls_of_a_lost_process_are_forgotten_and_no_others() -> None:
    _, plane = keeping()
    for rank in (0, 1):
        push_to(plane, rank, (1,), 2, 1)
        pull_from(plane, rank, (1,), 1)
    assert plane.num_pulls == 2
    plane.returned(1)
    assert plane.num_pulls == 1
    first, pull, second = [0, 1], [0], [0]  # who is told of round 1, the value, and round 2
    assert peers(do_round(plane, 1)) == [*first, *pull, *second]


def test_payloads_in_the_memory_of_a_lost_process_are_copied() -> None:
    app, plane = keeping(1, 2, lane=0)
    do_round(plane, 1, (1, 2))
    memory = [bytearray(counts(3)), bytearray(counts(4))]
    frames: list[Any] = [memory[0], memory[1]]
    plane.exchange(1, 1, Exchange(True, False, (1, 2), (2, 2), (8, 8)), frames)
    plane.returned(1)
    for buffer in memory:
        buffer[:] = bytes(8)
    carry_out(plane, push_to(plane, 0, (1, 2), 2, 0, 0))
    assert [app.values[part].tolist() for part in (1, 2)] == [[5], [6]]


def test_a_payload_of_several_frames_is_copied_as_one() -> None:
    memory = [bytearray(counts(3)), bytearray(counts(4))]
    rounds = SyncRounds([0, 1], window=2)
    rounds.contribute(1, 1, Piece(Row([memoryview(each) for each in memory]), 0, 16))
    unit = Unit((1, 2), (8, 8), rounds, 0, (8, 8))
    unit.returned(1)
    memory[0][:] = memory[1][:] = bytes(8)
    piece = rounds.payload(1, 1)
    assert slots(bytes(piece.frame)[piece.start : piece.stop]) == (3, 4)


def test_a_payload_in_a_form_of_the_app_stays_what_it_is() -> None:
    rounds = SyncRounds([0, 1], window=2)
    formed = object()
    rounds.contribute(1, 1, formed)
    Unit((1,), (8,), rounds, 0, (8,)).returned(1)
    assert rounds.payload(1, 1) is formed


def test_a_payload_that_is_being_applied_is_not_exchanged_under_the_app() -> None:
    _, plane = keeping()
    push_to(plane, 1, (1,), 1, 7)
    (run,) = runs(push_to(plane, 0, (1,), 1, 5))
    frame = run.jobs[0].batch.payloads[1].frame
    plane.returned(1)
    unit = plane._parts.units[1]
    assert unit.rounds.payload(1, 1).frame is frame


# -- what a server had noted of the lost process ------------------------------------------


def test_a_worker_that_was_gone_is_needed_and_served_again() -> None:
    app, plane = keeping()
    plane.depart(1, LOST)
    assert isinstance(answers(push_to(plane, 0, (1,), 1, 5))[0][1], PartsFailed)
    plane.returned(1)
    assert push_to(plane, 0, (1,), 1, 5) == []
    carry_out(plane, push_to(plane, 1, (1,), 1, 7))
    assert app.values[1].tolist() == [12]
    plane.open_part(2, app.add(2, 1), [0, 1], lane=0)
    assert push_to(plane, 0, (2,), 1, 5) == []


def test_requests_of_a_lost_process_for_a_later_epoch_are_forgotten() -> None:
    _, plane = keeping()
    for rank in (0, 1):
        plane.exchange(rank, 2, Exchange(False, True, (1,), (0,), ()), [])
    plane.returned(1)
    assert peers(plane.begin_epoch(2)) == [0]


def test_a_worker_that_was_about_to_leave_is_not_gone_when_its_next_process_is_here() -> None:
    _, plane = keeping()
    plane.begin_epoch(2)
    plane.exchange(1, 1, pushed(1, 1), [ONE])  # stale: it will come again, so the server waits
    gone = NodeLostError("worker 1 has left", role="worker", rank=1)
    assert (plane.leave(1, gone), plane.is_applying) == ([], True)
    plane.returned(1)
    assert not plane.is_applying
    plane.begin_epoch(3)
    push_to(plane, 1, (1,), 1, 1)
    assert peers(carry_out(plane, push_to(plane, 0, (1,), 1, 1))) == [0, 1]


# -- the shape of units -------------------------------------------------------------------


def test_a_unit_that_is_split_keeps_the_pushes_of_the_lost_process() -> None:
    app, plane = keeping(1, 2, lane=0)
    for round_ in range(1, 5):
        do_round(plane, round_, (1, 2))
    push_to(plane, 1, (1, 2), 5, 1, 1)
    plane.returned(1)
    assert plane._parts.units[1] is plane._parts.units[2]
    push_to(plane, 1, (1,), 5, 1)  # only one part comes again
    assert plane._parts.units[1] is not plane._parts.units[2]
    done = carry_out(plane, push_to(plane, 0, (1, 2), 5, 1, 1))
    told = [
        message.parts for peer, message in answers(done) if isinstance(message, Answer) and peer
    ]
    assert told == [(1,)]
    assert [app.values[part].tolist() for part in (1, 2)] == [[10], [10]]


def test_parts_of_a_split_unit_still_get_the_values_from_before_the_last_round() -> None:
    app, plane = keeping(1, 2, lane=0)
    for round_ in range(1, 6):
        do_round(plane, round_, (1, 2))
    push_to(plane, 1, (1,), 6, 1)  # it splits the unit
    assert sent_values(pull_from(plane, 1, (2,), 4)) == {1: [(8,)]}
    assert app.again == [((2,), True)]


def test_units_with_pushes_of_a_lost_process_are_not_joined() -> None:
    def unit(part: int) -> Unit:
        rounds = SyncRounds([0, 1], window=2)
        rounds.contribute(1, 1, Piece(payload, 8 * part, 8 * part + 8))
        return Unit((part,), (8,), rounds, 0, (8,))

    payload = counts(1, 2)
    units = [unit(0), unit(1)]
    assert joined(units) is not None
    units[1].orphans = {(1, 1)}
    assert joined(units) is None
    units[1].orphans = set()
    assert joined(units) is not None


def test_a_joined_unit_keeps_previous_values_if_its_parts_do() -> None:
    for keeps in (False, True):
        units = [
            Unit((part,), (8,), SyncRounds([0], 2), 0, (8,), keeps_previous=keeps)
            for part in (0, 1)
        ]
        whole = joined(units)
        assert whole is not None
        assert whole.keeps_previous == keeps
        assert [single.keeps_previous for single in whole.split()] == [keeps, keeps]
