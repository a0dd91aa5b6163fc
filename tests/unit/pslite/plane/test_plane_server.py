"""A server's half of the data plane: rounds, pulls, answers, epochs, and who is told what."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from plane_helpers import (
    CountingApp,
    answers,
    carry_out,
    counts,
    make_server,
    pull_from,
    push_to,
    runs,
    sent_values,
    slots,
)

from pslite.errors import ProtocolError, UsageError
from pslite.plane import Effect, Piece, Run, Send, ServerPlane
from pslite.plane.replies import Replies, Source, Value
from pslite.wire.messages import Answer, Exchange, PartsFailed, RoundWaits, StaleEpoch

GONE = UsageError("the key was deleted")


# -- rounds -------------------------------------------------------------------------------


def test_a_round_is_applied_when_every_worker_has_pushed_and_all_are_answered() -> None:
    app = CountingApp()
    plane = make_server(app, [0, 1], 1)
    first = push_to(plane, 0, (1,), 1, 5)
    done = carry_out(plane, push_to(plane, 1, (1,), 1, 7))
    answer = Answer(True, (1,), (1,), (1,), ())
    assert (first, answers(done)) == ([], [(0, answer), (1, answer)])
    assert app.values[1].tolist() == [12]


def test_one_worker_pushing_twice_does_not_complete_a_round_of_two() -> None:
    # Defect c of ps-lite's stores: they counted requests, so this gave a wrong sum.
    app = CountingApp()
    plane = make_server(app, [0, 1], 1)
    effects = push_to(plane, 0, (1,), 1, 5) + push_to(plane, 0, (1,), 1, 5)
    assert (effects, app.applied) == ([], [])


def test_contributions_come_in_rank_order_whatever_the_order_of_arrival() -> None:
    plane = make_server(CountingApp(), [0, 1, 2], 1)
    effects = [
        effect for rank in (2, 0, 1) for effect in push_to(plane, rank, (1,), 1, 10 * (rank + 1))
    ]
    ((job,),) = (run.jobs for run in runs(effects))
    assert job.batch.rounds == ((0, 1), (1, 1), (2, 1))
    assert [slots(piece.frame) for piece in job.batch.payloads] == [(10,), (20,), (30,)]


def test_a_push_that_runs_ahead_is_applied_in_its_turn() -> None:
    app = CountingApp()
    plane = make_server(app, [0, 1], 1)
    for rank, round_ in ((0, 2), (0, 1), (1, 2)):
        assert push_to(plane, rank, (1,), round_, 1) == []
    done = carry_out(plane, push_to(plane, 1, (1,), 1, 1))
    assert app.applied == [(1, ((0, 1), (1, 1))), (1, ((0, 2), (1, 2)))]
    assert len(answers(done)) == 4


def test_a_push_beyond_the_window_is_refused_and_so_is_the_pull_behind_it() -> None:
    plane = make_server(CountingApp(), [0, 1], 1, window=1)
    pulled = pull_from(plane, 0, (1,), 3)
    refused = answers(push_to(plane, 0, (1,), 3, 1))
    assert pulled == []
    assert [type(message) for _, message in refused] == [PartsFailed, PartsFailed]
    assert [message.kind for _, message in refused if isinstance(message, PartsFailed)] == [
        "ProtocolError",
        "ProtocolError",
    ]
    assert answers(pull_from(plane, 0, (1,), 3))[0][1] in [message for _, message in refused]


def test_a_push_that_is_applied_already_is_answered_and_never_applied_again() -> None:
    app = CountingApp()
    plane = make_server(app, [0], 1)
    carry_out(plane, push_to(plane, 0, (1,), 1, 5))
    again = push_to(plane, 0, (1,), 1, 5)
    wanted = push_to(plane, 0, (1,), 1, 5, pull=True)
    assert answers(again) == [(0, Answer(True, (1,), (1,), (1,), ()))]
    assert answers(wanted) == [(0, Answer(True, (1,), (1,), (1,), (8,)))]
    assert (sent_values(wanted), app.values[1].tolist()) == ({0: [(5,)]}, [5])


def test_only_those_who_want_the_value_get_it_with_their_answer() -> None:
    plane = make_server(CountingApp(), [0, 1], 1)
    push_to(plane, 0, (1,), 1, 5, pull=True)
    done = carry_out(plane, push_to(plane, 1, (1,), 1, 7))
    assert answers(done) == [
        (0, Answer(True, (1,), (1,), (1,), (8,))),
        (1, Answer(True, (1,), (1,), (1,), ())),
    ]
    assert sent_values(done) == {0: [(12,)], 1: []}


def test_a_pull_waits_for_its_own_workers_pushes_and_no_longer() -> None:
    plane = make_server(CountingApp(), [0, 1], 1)
    push_to(plane, 0, (1,), 1, 5)
    waiting = pull_from(plane, 0, (1,), 1)
    at_once = sent_values(pull_from(plane, 1, (1,), 0))
    done = carry_out(plane, push_to(plane, 1, (1,), 1, 7))
    assert (waiting, at_once) == ([], {1: [(0,)]})
    assert (0, Answer(False, (1,), (1,), (1,), (8,))) in answers(done)
    assert sent_values(done)[0] == [(12,)]


def test_a_pull_during_an_update_is_answered_after_it() -> None:
    app = CountingApp()
    plane = make_server(app, [0, 1], 1)
    push_to(plane, 0, (1,), 1, 5)
    (run,) = runs(push_to(plane, 1, (1,), 1, 7))
    during = pull_from(plane, 1, (1,), 0)
    after = plane.finished(run.jobs, app.apply(run.jobs))
    assert during == []
    assert sent_values(after) == {0: [], 1: [(12,)]}


def test_asynchronous_pushes_are_applied_one_by_one_in_each_workers_order() -> None:
    app = CountingApp(copies=True)
    plane = make_server(app, None, 1)
    assert push_to(plane, 0, (1,), 2, 20) == []
    done = carry_out(plane, push_to(plane, 1, (1,), 1, 7) + push_to(plane, 0, (1,), 1, 10))
    assert app.applied == [(1, ((1, 1),)), (1, ((0, 1),)), (1, ((0, 2),))]
    assert [peer for peer, _ in answers(done)] == [1, 0, 0]


def test_parts_of_one_lane_are_applied_in_one_run_and_others_apart() -> None:
    app = CountingApp()
    plane = ServerPlane(app, window=2, message_bytes=1 << 20, stall_report_s=60.0)
    for part, lane in ((1, 0), (2, 0), (3, 1)):
        plane.open_part(part, app.add(part, 1), [0], lane)
    found = runs(push_to(plane, 0, (1, 2, 3), 1, 1, 2, 3))
    assert [(run.lane, [job.parts for job in run.jobs]) for run in found] == [
        (0, [(1,), (2,)]),
        (1, [(3,)]),
    ]


def test_of_a_fused_push_the_parts_that_are_complete_go_ahead() -> None:
    app = CountingApp()
    plane = make_server(app, [0, 1], 1, 2)
    push_to(plane, 1, (2,), 1, 1)
    done = carry_out(plane, push_to(plane, 0, (1, 2), 1, 1, 1))
    assert answers(done) == [
        (0, Answer(True, (2,), (1,), (1,), ())),
        (1, Answer(True, (2,), (1,), (1,), ())),
    ]


def test_answers_are_cut_where_they_would_grow_beyond_message_bytes() -> None:
    plane = make_server(CountingApp(), [0], 1, 2, 3, 4, message_bytes=20)
    effects = pull_from(plane, 0, (1, 2, 3, 4), 0)
    found = [message for _, message in answers(effects)]
    assert [message.parts for message in found if isinstance(message, Answer)] == [(1, 2), (3, 4)]


def test_an_answer_may_have_exactly_message_bytes() -> None:
    plane = make_server(CountingApp(), [0], 1, 2, 3, message_bytes=16)
    found = [message for _, message in answers(pull_from(plane, 0, (1, 2, 3), 0))]
    assert [m.parts for m in found if isinstance(m, Answer)] == [(1, 2), (3,)]


def test_a_part_larger_than_message_bytes_travels_alone() -> None:
    plane = make_server(CountingApp(), [0], 1, 2, 3, message_bytes=1)
    found = [message for _, message in answers(pull_from(plane, 0, (1, 2, 3), 0))]
    assert [m.parts for m in found if isinstance(m, Answer)] == [(1,), (2,), (3,)]


def test_answers_of_several_pushes_are_joined_by_worker() -> None:
    app = CountingApp()
    plane = ServerPlane(app, window=2, message_bytes=1 << 20, stall_report_s=60.0)
    for part in (1, 2):
        plane.open_part(part, app.add(part, 1), [0, 1], 0)
    push_to(plane, 0, (1,), 1, 1)
    push_to(plane, 0, (2,), 1, 1)
    done = carry_out(plane, push_to(plane, 1, (1, 2), 1, 1, 1))
    assert answers(done) == [
        (rank, Answer(True, (1, 2), (1, 1), (1, 1), ())) for rank in (0, 1)
    ]  # fmt: skip


# -- epochs -------------------------------------------------------------------------------


def test_an_exchange_of_an_older_epoch_is_not_looked_at_and_said_to_be_stale() -> None:
    app = CountingApp()
    plane = make_server(app, [0], 1)
    plane.begin_epoch(2)
    effects = plane.exchange(0, 1, Exchange(True, False, (1,), (1,), (8,)), [counts(5)])
    assert effects == [Send(0, StaleEpoch(2, True, (1,), (1,)))]
    assert app.applied == []


def test_an_exchange_of_a_later_epoch_is_held_until_that_epoch() -> None:
    plane = make_server(CountingApp(), [0], 1)
    message = Exchange(False, True, (1,), (0,), ())
    held = plane.exchange(0, 3, message, [])
    still_held = plane.begin_epoch(2)
    answered = plane.begin_epoch(3)
    assert (held, still_held) == ([], [])
    assert answers(answered) == [(0, Answer(False, (1,), (0,), (0,), (8,)))]


def test_what_was_held_for_an_epoch_that_was_skipped_is_stale() -> None:
    plane = make_server(CountingApp(), [0], 1)
    plane.exchange(0, 2, Exchange(False, True, (1,), (0,), ()), [])
    assert plane.begin_epoch(3) == [Send(0, StaleEpoch(3, False, (1,), (0,)))]


# -- parts --------------------------------------------------------------------------------


# -- priorities ---------------------------------------------------------------------------


def priorities(effects: Sequence[Effect]) -> list[tuple[int, int]]:
    """(rank, priority) of the values among effects."""
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return [(send.peer, send.priority) for send in sends if send.frames]


def test_a_pulled_value_has_the_priority_of_the_pull() -> None:
    plane = make_server(CountingApp(), [0], 1)
    assert priorities(pull_from(plane, 0, (1,), 0, priority=-7)) == [(0, -7)]
    assert priorities(pull_from(plane, 0, (1,), 0)) == [(0, 0)]


def test_a_pull_that_waits_keeps_its_priority() -> None:
    plane = make_server(CountingApp(), [0, 1], 1)
    push_to(plane, 0, (1,), 1, 5)
    assert pull_from(plane, 0, (1,), 1, priority=6) == []
    assert priorities(carry_out(plane, push_to(plane, 1, (1,), 1, 5, priority=6))) == [(0, 6)]


def test_values_after_a_round_have_the_priority_of_its_last_push() -> None:
    plane = make_server(CountingApp(), [0, 1], 1)
    push_to(plane, 0, (1,), 1, 5, pull=True, priority=3)
    effects = carry_out(plane, push_to(plane, 1, (1,), 1, 5, pull=True, priority=4))
    assert priorities(effects) == [(0, 4), (1, 4)]


def test_an_answer_of_several_parts_has_their_highest_priority() -> None:
    plane = make_server(CountingApp(), [0], 1, 2)
    replies = Replies(plane.app, 64)
    for part, priority in ((1, -2), (2, 3)):
        entry = Value((part,), (8,), 0, 0, priority=priority)
        replies.answer(0, False, Source.CURRENT, entry)
    assert priorities(replies.take()) == [(0, 3)]
    assert replies.take() == []


def test_a_part_cannot_be_opened_twice() -> None:
    plane = make_server(CountingApp(), [0], 1)
    with pytest.raises(UsageError, match="part 1 is already open"):
        plane.open_part(1, 8, [0], 0)


def test_pushes_and_pulls_of_an_unknown_part_are_refused_and_others_served() -> None:
    plane = make_server(CountingApp(), [0], 1)
    effects = push_to(plane, 0, (1, 9), 1, 1, 1) + pull_from(plane, 0, (9,), 0)
    failures = [m for _, m in answers(carry_out(plane, effects)) if isinstance(m, PartsFailed)]
    assert [(f.pushed, f.consumed, f.parts, f.kind) for f in failures] == [
        (True, False, (9,), "UsageError"),
        (False, True, (9,), "UsageError"),
    ]
    assert plane.app.read([1])[0] == counts(1)


def test_a_push_of_another_size_is_refused_with_both_sizes() -> None:
    plane = make_server(CountingApp(), [0], 1)
    message = Exchange(True, False, (1,), (1,), (16,))
    ((_, failure),) = answers(plane.exchange(0, 1, message, [counts(1, 2)]))
    assert isinstance(failure, PartsFailed)
    assert failure.error == "a push of part 1 must have 8 bytes, got 16"


def test_a_pull_behind_a_push_of_another_size_ends_too() -> None:
    plane = make_server(CountingApp(), [0], 1)
    plane.exchange(0, 1, Exchange(True, False, (1,), (1,), (16,)), [counts(1, 2)])
    ((_, failure),) = answers(pull_from(plane, 0, (1,), 1))
    assert isinstance(failure, PartsFailed)


def test_closing_a_part_ends_all_that_waits_for_it() -> None:
    plane = make_server(CountingApp(), [0, 1], 1)
    push_to(plane, 0, (1,), 1, 5)
    pull_from(plane, 0, (1,), 1)
    effects = plane.close_part(1, GONE)
    assert answers(effects) == [
        (0, PartsFailed(True, False, (1,), (1,), "UsageError", str(GONE), "", -1)),
        (0, PartsFailed(False, True, (1,), (1,), "UsageError", str(GONE), "", -1)),
    ]


def test_closing_a_part_while_it_is_applied_leaves_nothing_to_answer() -> None:
    app = CountingApp()
    plane = make_server(app, [0], 1)
    (run,) = runs(push_to(plane, 0, (1,), 1, 5))
    closed = plane.close_part(1, GONE)
    finished = plane.finished(run.jobs, app.apply(run.jobs))
    assert [type(message) for _, message in answers(closed)] == [PartsFailed]
    assert (finished, plane.close_part(1, GONE)) == ([], [])


# -- reports ------------------------------------------------------------------------------


def test_who_waits_for_a_long_round_is_told_whom_it_waits_for_once_each_period() -> None:
    plane = make_server(CountingApp(), [0, 1, 2], 1, 2)
    push_to(plane, 0, (1,), 1, 5)
    reports = {now: answers(plane.tick(now)) for now in (10.0, 69.0, 70.0, 71.0, 130.0)}
    assert reports == {
        10.0: [],
        69.0: [],
        70.0: [(0, RoundWaits(1, 1, (1, 2), 60.0))],
        71.0: [],
        130.0: [(0, RoundWaits(1, 1, (1, 2), 120.0))],
    }


def test_the_time_of_a_report_starts_anew_with_every_round() -> None:
    plane = make_server(CountingApp(), [0, 1], 1)
    push_to(plane, 0, (1,), 1, 5)
    plane.tick(0.0)
    carry_out(plane, push_to(plane, 1, (1,), 1, 5))
    push_to(plane, 0, (1,), 2, 5)
    reports = [plane.tick(now) for now in (59.0, 61.0, 118.0)]
    assert reports == [[], [], []]
    assert answers(plane.tick(119.0)) == [(0, RoundWaits(1, 2, (1,), 60.0))]


def test_a_part_without_an_open_round_is_not_reported() -> None:
    plane = make_server(CountingApp(), [0, 1], 1)
    assert [plane.tick(now) for now in (0.0, 100.0, 1000.0)] == [[], [], []]


def test_values_are_lent_and_not_copied() -> None:
    app = CountingApp()
    plane = make_server(app, [0], 1)
    (send,) = pull_from(plane, 0, (1,), 0)
    assert isinstance(send, Send)
    assert np.shares_memory(np.frombuffer(send.frames[0], np.int64), app.values[1])


class PickyApp(CountingApp):
    """Takes no negative numbers for parts that are checked."""

    def __init__(self) -> None:
        super().__init__()
        self.checked: list[int] = []

    def check(self, part: int, piece: Piece) -> None:
        self.checked.append(part)
        if min(slots(bytes(piece.frame)[piece.start : piece.stop])) < 0:
            raise ProtocolError(f"part {part} is negative")


@pytest.mark.parametrize("times", [1, 5], ids=["by part", "as one unit"])
def test_a_push_that_the_app_refuses_is_an_error_of_its_sender_and_part_alone(times: int) -> None:
    app = PickyApp()
    plane = ServerPlane(app, window=2, message_bytes=1 << 20, stall_report_s=60.0)
    for part in (1, 2, 3):
        size = app.add(part, 1)
        plane.open_part(part, size, [0, 1], 0, is_checked=part == 2)
    parts = (1, 2, 3)
    for round_ in range(1, times):
        carry_out(plane, push_to(plane, 0, parts, round_, 1, 1, 1))
        carry_out(plane, push_to(plane, 1, parts, round_, 1, 1, 1))
    assert push_to(plane, 1, parts, times, 1, 1, 1) == []
    effects = push_to(plane, 0, parts, times, 1, -1, 1)
    ((rank, refused),) = answers(effects)
    assert isinstance(refused, PartsFailed)
    assert (rank, refused.parts, refused.consumed) == (0, (2,), False)
    assert refused.error == "part 2 is negative"
    carry_out(plane, effects)
    before = app.values[2].tolist()
    effects = carry_out(plane, push_to(plane, 0, (2,), times, 1))
    assert all(isinstance(message, Answer) for _, message in answers(effects))
    assert (before, [app.values[part].tolist() for part in parts]) == (
        [2 * (times - 1)],
        [[2 * times]] * 3,
    )


def test_a_part_that_is_not_checked_costs_the_app_nothing() -> None:
    app = PickyApp()
    plane = make_server(app, [0], 1, 2)
    push_to(plane, 0, (1, 2), 1, -1, -1)
    plane.resize_part(1, 8, 8, is_checked=True)
    push_to(plane, 0, (1, 2), 1, 1, 1)
    assert app.checked == [1]


def test_pushes_may_be_smaller_than_values_and_change_their_size() -> None:
    app = CountingApp()
    plane = make_server(app, [0, 1], 1)
    assert plane.is_quiet(1) and not plane.is_quiet(2)
    plane.resize_part(1, 8, 3)
    assert plane.exchange(0, 1, Exchange(True, False, (1,), (1,), (3,)), [b"abc"]) == []
    assert not plane.is_quiet(1)
    (run,) = plane.exchange(1, 1, Exchange(True, True, (1,), (1,), (3,)), [b"def"])
    assert isinstance(run, Run)
    (job,) = run.jobs
    assert (job.sizes, job.push_sizes) == ((8,), (3,))
    assert [bytes(piece.frame) for piece in job.batch.payloads] == [b"abc", b"def"]
    (refused,) = plane.exchange(0, 1, Exchange(True, False, (1,), (2,), (8,)), [bytes(8)])
    assert isinstance(refused, Send) and isinstance(refused.message, PartsFailed)
    assert refused.message.error == "a push of part 1 must have 3 bytes, got 8"
