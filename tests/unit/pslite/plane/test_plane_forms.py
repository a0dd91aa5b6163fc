"""Contributions and pulls in a form of the app's own: the rules of the plane are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from plane_helpers import (
    SERVER,
    CountingApp,
    answers,
    carry_out,
    counts,
    deliver,
    mail,
    pull_from,
    push_to,
    slots,
)

from pslite.errors import ProtocolError, UsageError
from pslite.plane import NO_SIZE, Job, Outcome, Piece, Send, ServerPlane, Transfer, WorkerPlane
from pslite.wire.messages import Answer, Exchange, PartsFailed, StaleEpoch

FORM = 7


class Numbers(tuple[int, ...]):
    """What the app makes of a payload."""

    @property
    def nbytes(self) -> int:
        return 8 * len(self)


class FormApp(CountingApp):
    """Contributions are lists of numbers of any length; a pull wants those above a limit."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: dict[int, list[int]] = {}

    def take(self, part: int, form: int, piece: Piece, *, is_push: bool) -> Numbers:
        assert form == FORM
        found = Numbers(slots(bytes(piece.frame)[piece.start : piece.stop]))
        if -1 in found:
            raise ProtocolError("-1 is no number")
        return found

    def answer(self, part: int, wanted: Any, *, before_last: bool) -> bytes:
        return counts(*[number for number in self.lists[part] if number > wanted[0]])

    def apply(self, jobs: Sequence[Job]) -> list[Outcome]:
        return [self._apply_formed(job) if job.is_formed else self._apply(job) for job in jobs]

    def _apply_formed(self, job: Job) -> Outcome:
        part = job.parts[0]
        for payload in job.batch.payloads:
            self.lists.setdefault(part, []).extend(
                slots(bytes(payload.frame)[payload.start : payload.stop])
                if isinstance(payload, Piece)
                else payload
            )
        self.applied.append((part, job.batch.rounds))
        return None


def make(app: FormApp, *parts: int, ranks: Sequence[int] = (0, 1)) -> ServerPlane:
    plane = ServerPlane(app, window=2, message_bytes=1 << 20, stall_report_s=60.0)
    for part in parts:
        plane.open_part(part, NO_SIZE, ranks, lane=part)
    return plane


def push(plane: ServerPlane, rank: int, round_: int, *lists: Sequence[int], first: int = 1) -> Any:
    """A push of a list of numbers for each part from ``first`` on."""
    parts = tuple(range(first, first + len(lists)))
    sizes = tuple(8 * len(each) for each in lists)
    message = Exchange(True, False, parts, (round_,) * len(parts), sizes, FORM)
    return plane.exchange(rank, plane.epoch, message, [b"".join(counts(*each) for each in lists)])


def pull(plane: ServerPlane, rank: int, after_round: int, limit: int = 0, part: int = 1) -> Any:
    message = Exchange(False, True, (part,), (after_round,), (8,), FORM)
    return plane.exchange(rank, plane.epoch, message, [counts(limit)])


def values(effects: Any) -> list[tuple[int, ...]]:
    return [slots(frame) for effect in effects for frame in effect.frames]


def test_contributions_of_any_size_make_a_round_in_the_order_of_ranks() -> None:
    app = FormApp()
    plane = make(app, 1)
    assert push(plane, 1, 1, [5, 6, 7]) == []
    done = carry_out(plane, push(plane, 0, 1, []))
    assert answers(done) == [(rank, Answer(True, (1,), (1,), (1,), ())) for rank in (0, 1)]
    assert app.lists == {1: [5, 6, 7]}
    carry_out(plane, push(plane, 1, 2, [3]) + push(plane, 0, 2, [2]))
    assert app.lists == {1: [5, 6, 7, 2, 3]}


def test_parts_of_one_message_go_their_own_ways() -> None:
    app = FormApp()
    plane = make(app, 1, 2)
    carry_out(plane, push(plane, 0, 1, [1], [2, 2]))
    carry_out(plane, push(plane, 1, 1, [3], first=2))
    assert app.lists == {2: [2, 2, 3]}


def test_a_push_that_comes_again_is_answered_and_not_applied() -> None:
    app = FormApp()
    plane = make(app, 1, ranks=[0])
    carry_out(plane, push(plane, 0, 1, [1]))
    again = carry_out(plane, push(plane, 0, 1, [1]))
    assert answers(again) == [(0, Answer(True, (1,), (1,), (1,), ()))]
    assert app.lists == {1: [1]}


def test_what_the_app_refuses_is_its_senders_error_and_its_round_is_free_again() -> None:
    app = FormApp()
    plane = make(app, 1)
    ((rank, refused),) = answers(push(plane, 0, 1, [4, -1]))
    assert isinstance(refused, PartsFailed)
    assert (rank, refused.pushed, refused.consumed, refused.kind) == (
        0,
        True,
        False,
        "ProtocolError",
    )
    carry_out(plane, push(plane, 1, 1, [5]) + push(plane, 0, 1, [4]))
    assert app.lists == {1: [4, 5]}


def test_a_pull_waits_for_the_senders_own_pushes_and_gets_what_it_wants() -> None:
    app = FormApp()
    plane = make(app, 1)
    push(plane, 0, 1, [1, 9])
    assert pull(plane, 0, 1, limit=4) == []
    effects = carry_out(plane, push(plane, 1, 1, [7]))
    (found,) = [effect for effect in effects if effect.frames]
    assert found.message == Answer(False, (1,), (1,), (1,), (16,))
    assert values([found]) == [(9, 7)]
    assert values(pull(plane, 1, 1, limit=8)) == [(9,)]


def test_a_pull_that_the_app_refuses_fails_alone() -> None:
    plane = make(FormApp(), 1)
    ((_, refused),) = answers(pull(plane, 0, 0, limit=-1))
    assert isinstance(refused, PartsFailed) and not refused.pushed


def test_what_the_app_cannot_answer_is_an_error_of_that_part_alone() -> None:
    app = FormApp()
    plane = make(app, 1, 2, ranks=[0])
    carry_out(plane, push(plane, 0, 1, [3]))
    message = Exchange(False, True, (1, 2), (1, 0), (8, 8), FORM)
    effects = plane.exchange(0, 1, message, [counts(0, 0)])
    kinds = sorted(type(effect.message).__name__ for effect in effects)  # type: ignore[union-attr]
    assert (kinds, values(effects)) == (["Answer", "PartsFailed"], [(3,)])


def test_a_pull_after_a_push_that_was_refused_fails_too() -> None:
    plane = make(FormApp(), 1, ranks=[0])
    push(plane, 0, 1, [-1])
    ((_, refused),) = answers(pull(plane, 0, 1))
    assert isinstance(refused, PartsFailed) and refused.consumed


@pytest.mark.parametrize("size", [8, 0])
def test_a_part_without_a_plain_value_takes_and_gives_none(size: int) -> None:
    plane = make(FormApp(), 1, 2)
    message = Exchange(True, False, (1,), (1,), (size,))
    ((_, refused),) = answers(plane.exchange(0, 1, message, [bytes(size)]))
    assert isinstance(refused, PartsFailed) and "cannot be pushed as a plain value" in refused.error
    ((_, refused),) = answers(pull_from(plane, 0, (2,), 0))
    assert isinstance(refused, PartsFailed) and "cannot be pulled as a plain value" in refused.error


def test_parts_without_a_plain_value_are_never_joined() -> None:
    app = FormApp()
    plane = make(app, 1, 2, ranks=[0])
    for round_ in range(1, 6):
        carry_out(plane, push(plane, 0, round_, [round_], [-round_ - 1]))
        # Plain pushes of the same list, which are refused, join nothing either.
        plain = Exchange(True, False, (1, 2), (round_ + 1,) * 2, (0, 0))
        plane.exchange(0, 1, plain, [b""])
    assert app.lists == {1: [1, 2, 3, 4, 5], 2: [-2, -3, -4, -5, -6]}
    refused = [message for _, message in answers(pull_from(plane, 0, (1, 2), 5))]
    assert refused and all(isinstance(message, PartsFailed) for message in refused)


def test_a_plain_part_takes_both_kinds_in_one_round() -> None:
    app = FormApp()
    plane = ServerPlane(app, window=2, message_bytes=1 << 20, stall_report_s=60.0)
    for part in (1, 2):
        plane.open_part(part, app.add(part, 1), [0, 1], lane=0)
    for round_ in range(1, 5):  # by then the two are one unit
        carry_out(plane, push_to(plane, 0, (1, 2), round_, 1, 1))
        carry_out(plane, push_to(plane, 1, (1, 2), round_, 1, 1))
    push(plane, 0, 5, [10, 20])
    carry_out(plane, push_to(plane, 0, (2,), 5, 1))
    carry_out(plane, push_to(plane, 1, (1, 2), 5, 30, 1))
    assert app.lists == {1: [10, 20, 30]}
    assert (app.values[1].tolist(), app.values[2].tolist()) == ([8], [10])
    assert len(carry_out(plane, pull_from(plane, 0, (1, 2), 5))) == 1


@pytest.mark.parametrize(
    "message",
    [
        Exchange(True, True, (1,), (1,), (8,), FORM),
        Exchange(True, False, (1,), (1,), (), FORM),
        Exchange(False, True, (1,), (0,), (), FORM),
        Exchange(True, False, (1,), (1,), (16,), FORM),
    ],
)
def test_a_message_that_makes_no_sense_is_refused_as_a_whole(message: Exchange) -> None:
    with pytest.raises(ProtocolError):
        make(FormApp(), 1).exchange(0, 1, message, [counts(1)])


def test_a_part_that_is_not_there_is_an_error_for_pushes_and_pulls() -> None:
    plane = make(FormApp(), 1)
    for effects in (push(plane, 0, 1, [1], first=9), pull(plane, 0, 0, part=9)):
        ((_, refused),) = answers(effects)
        assert isinstance(refused, PartsFailed) and "does not know part" in refused.error


def test_deleting_a_part_ends_the_pulls_in_a_form() -> None:
    plane = make(FormApp(), 1)
    push(plane, 0, 1, [1])
    pull(plane, 0, 1)
    failed = answers(plane.close_part(1, UsageError("gone")))
    assert sorted(message.pushed for _, message in failed) == [False, True]  # type: ignore[attr-defined]


# -- a worker's half ----------------------------------------------------------------------


def asked(found: list[Any], *, limit: int = 0, ended: list[Any] | None = None) -> Transfer:
    """A pull that notes what it gets."""

    def sink(_: Sequence[int], pieces: Sequence[Piece], versions: Sequence[int]) -> None:
        found.extend(slots(bytes(each.frame)[each.start : each.stop]) for each in pieces)

    done = (ended if ended is not None else []).append
    return Transfer(SERVER, (1,), (8,), [counts(limit)], sink, done, form=FORM)


def pushing(*numbers: int) -> Transfer:
    return Transfer(
        SERVER, (1,), (8 * len(numbers),), [counts(*numbers)], None, lambda error: None, form=FORM
    )


def test_a_worker_gets_an_answer_of_any_size() -> None:
    plane, worker, found = make(FormApp(), 1, ranks=[0]), WorkerPlane(window=2), []
    worker.submit(pushing(4, 5, 6))
    worker.submit(asked(found, limit=4))
    sends = mail(worker)
    assert [send.message.pull for send in sends] == [False, True]  # type: ignore[attr-defined]
    for send in sends:
        effects = plane.exchange(0, 1, send.message, send.frames)  # type: ignore[arg-type]
        deliver(worker, carry_out(plane, effects))
    assert (found, worker.idle) == ([(5, 6)], True)


def test_a_push_waits_behind_a_pull_in_a_form() -> None:
    worker: WorkerPlane = WorkerPlane(window=2)
    worker.submit(asked([]))
    worker.submit(pushing(1))
    (send,) = mail(worker)
    assert send.message == Exchange(False, True, (1,), (0,), (8,), FORM)
    worker.answered(Answer(False, (1,), (0,), (0,), (0,)), [])
    (send,) = mail(worker)
    assert send.message == Exchange(True, False, (1,), (1,), (8,), FORM)


def test_a_sink_that_refuses_an_answer_ends_the_pull_with_that_error() -> None:
    worker, ended = WorkerPlane(window=2), []

    def sink(*_: Any) -> None:
        raise ProtocolError("too short")

    worker.submit(Transfer(SERVER, (1,), (8,), [counts(0)], sink, ended.append, form=FORM))
    mail(worker)
    worker.answered(Answer(False, (1,), (0,), (0,), (8,)), [counts(1)])
    assert [type(error) for error in ended] == [ProtocolError]


def test_requests_of_an_old_epoch_are_sent_again_with_what_they_carry() -> None:
    worker, found = WorkerPlane(window=2), []
    worker.submit(pushing(3, 4))
    worker.submit(asked(found, limit=3))
    first = mail(worker)
    for send in first:
        message = send.message
        assert isinstance(message, Exchange)
        worker.stale(StaleEpoch(2, message.push, message.parts, message.rounds))
    worker.begin_epoch(2)
    again = mail(worker)
    assert [send.message for send in again] == [send.message for send in first]
    frames = [[np.frombuffer(f, np.int64).tolist() for f in send.frames] for send in again]
    assert frames == [[[3, 4]], [[3]]]


def test_sends_are_what_a_server_answers_to() -> None:
    """A pull of two parts of which one is held goes out alone, with its own payload."""
    worker: WorkerPlane = WorkerPlane(window=2)
    worker.submit(asked([]))
    mail(worker)
    both = Transfer(
        SERVER, (1, 2), (8, 16), [counts(1, 2, 3)], lambda *_: None, lambda _: None, form=FORM
    )
    worker.submit(both)
    (send,) = mail(worker)
    assert isinstance(send, Send)
    assert send.message == Exchange(False, True, (2,), (0,), (16,), FORM)
    assert [slots(frame) for frame in send.frames] == [(2, 3)]
