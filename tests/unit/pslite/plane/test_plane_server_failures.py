"""A server's half of the data plane when things go wrong: errors, bad messages, departures."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from plane_helpers import (
    LOST,
    CountingApp,
    answers,
    carry_out,
    counts,
    make_server,
    pull_from,
    push_to,
    sent_values,
)

from pslite.errors import NodeLostError, ProtocolError
from pslite.wire.base import Ints
from pslite.wire.messages import Exchange, PartsFailed

# -- errors -------------------------------------------------------------------------------


def test_an_error_of_an_update_reaches_all_contributors_and_the_next_round_works() -> None:
    app = CountingApp()
    plane = make_server(app, [0, 1], 1)
    app.errors[1] = ValueError("no such learning rate")
    push_to(plane, 0, (1,), 1, 5)
    failed = answers(carry_out(plane, push_to(plane, 1, (1,), 1, 7)))
    push_to(plane, 0, (1,), 2, 5, pull=True)
    done = carry_out(plane, push_to(plane, 1, (1,), 2, 7))
    assert [(peer, m.pushed, m.consumed) for peer, m in failed if isinstance(m, PartsFailed)] == [
        (0, True, True),
        (1, True, True),
    ]
    assert sent_values(done) == {0: [(12,)], 1: []}


def test_the_error_of_an_update_carries_the_servers_traceback() -> None:
    app = CountingApp()
    plane = make_server(app, [0], 1)
    try:
        raise ValueError("no such learning rate")
    except ValueError as error:
        app.errors[1] = error
    ((_, failure),) = answers(carry_out(plane, push_to(plane, 0, (1,), 1, 5)))
    assert isinstance(failure, PartsFailed)
    assert "Traceback" in failure.error
    assert "no such learning rate" in failure.error


def test_an_error_that_cannot_be_hashed_reaches_its_contributors_too() -> None:
    @dataclass
    class BadRate(Exception):
        rate: float

    app = CountingApp()
    plane = make_server(app, [0], 1)
    app.errors[1] = BadRate(0.5)
    ((_, failure),) = answers(carry_out(plane, push_to(plane, 0, (1,), 1, 5)))
    assert isinstance(failure, PartsFailed)
    assert failure.kind == "BadRate"


def test_an_error_with_fields_of_its_own_named_role_and_rank_stays_sendable() -> None:
    class ShapeError(Exception):
        role = None
        rank = "two"

    app = CountingApp()
    plane = make_server(app, [0], 1)
    app.errors[1] = ShapeError("x")
    ((_, failure),) = answers(carry_out(plane, push_to(plane, 0, (1,), 1, 5)))
    assert isinstance(failure, PartsFailed)
    assert (type(failure.role), type(failure.rank)) == (str, int)


@pytest.mark.parametrize("sizes", [(8,), (8, 8, 8), ()])
def test_a_push_with_another_number_of_sizes_than_parts_is_a_protocol_error(sizes: Ints) -> None:
    plane = make_server(CountingApp(), [0], 1, 2)
    with pytest.raises(ProtocolError):
        plane.exchange(0, 1, Exchange(True, False, (1, 2), (1, 1), sizes), [bytes(sum(sizes))])


def test_a_payload_that_is_too_short_is_a_protocol_error_and_changes_nothing() -> None:
    app = CountingApp()
    plane = make_server(app, [0], 1, 2)
    with pytest.raises(ProtocolError):
        plane.exchange(0, 1, Exchange(True, False, (1, 2), (1, 1), (8, 8)), [counts(1)])
    carry_out(plane, push_to(plane, 0, (1,), 1, 5))
    assert app.values[1].tolist() == [5]


MALFORMED = {
    "sizes of fewer parts": Exchange(True, False, (1, 2), (1, 1), (8,)),
    "a payload that is too short": Exchange(True, True, (1, 2), (1, 1), (8, 8)),
    "a payload that is too long": Exchange(True, False, (1, 2), (1, 1), (4, 0)),
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("ranks", [[0], None], ids=["synchronous", "asynchronous"])
def test_the_sender_of_a_malformed_push_gets_an_error_and_its_number_again(
    case: str, ranks: list[int] | None
) -> None:
    app, message, error = CountingApp(), MALFORMED[case], ProtocolError("malformed")
    plane = make_server(app, ranks, 1, 2)
    failure = PartsFailed(True, False, (1, 2), (1, 1), "ProtocolError", "malformed", "", -1)
    assert answers(plane.refuse(0, message, error)) == [(0, failure)]
    for _ in range(2):  # the second is a repetition
        carry_out(plane, push_to(plane, 0, (1, 2), 1, 5, 6))
    assert [app.values[part].tolist() for part in (1, 2)] == [[5], [6]]


@pytest.mark.parametrize("ranks", [[0, 1], None], ids=["synchronous", "asynchronous"])
def test_a_malformed_push_frees_no_number_of_a_contribution_that_is_there(
    ranks: list[int] | None,
) -> None:
    app, error = CountingApp(), ProtocolError("malformed")
    plane = make_server(app, ranks, 1)
    message = Exchange(True, False, (1,), (1,), ())
    work = push_to(plane, 0, (1,), 1, 5)
    assert plane.refuse(0, message, error) == []  # it waits, or is being applied
    work += push_to(plane, 1, (1,), 1, 7)
    carry_out(plane, work)
    assert plane.refuse(0, message, error) == []
    carry_out(plane, push_to(plane, 0, (1,), 1, 5))
    assert app.values[1].tolist() == [12]


def test_more_stale_pushes_than_a_worker_may_have_under_way_are_a_protocol_error() -> None:
    """As many as rule 4 allows are noted; what lies further ahead would never be forgotten."""
    plane = make_server(CountingApp(), None, 1, 2, window=2)
    plane.begin_epoch(2)
    for round_ in (1, 2, 3):
        plane.exchange(0, 1, Exchange(True, False, (1, 2), (round_,) * 2, (8, 8)), [bytes(16)])
    again = Exchange(True, False, (1, 2), (3, 3), (8, 8))
    assert answers(plane.exchange(0, 1, again, [bytes(16)])) != []  # a repetition adds nothing
    for part in (1, 3):
        too_much = Exchange(True, False, (part,), (4,), (8,))
        with pytest.raises(
            ProtocolError, match=r"7 pushes of earlier epochs .* over the limit of 6"
        ):
            plane.exchange(0, 1, too_much, [bytes(8)])
    assert plane.leave(0, LOST) == []
    assert plane.is_applying, "it waits for the six that are to come again"
    for round_ in (1, 2, 3):
        carry_out(plane, push_to(plane, 0, (1, 2), round_, 5, 6))
    assert not plane.is_applying


def test_a_malformed_push_of_several_that_wait_for_their_epoch_keeps_none_of_the_others() -> None:
    app = CountingApp()
    plane = make_server(app, [0, 1], 1)
    plane.exchange(0, 2, Exchange(True, False, (1,), (1,), ()), [counts(1)])
    plane.exchange(1, 2, Exchange(True, False, (1,), (1,), (8,)), [counts(7)])
    ((rank, failure),) = answers(plane.begin_epoch(2))
    assert isinstance(failure, PartsFailed)
    assert (rank, failure.kind, failure.consumed) == (0, "ProtocolError", False)
    carry_out(plane, push_to(plane, 0, (1,), 1, 5))
    assert app.values[1].tolist() == [12]


def test_the_sender_of_a_malformed_pull_gets_an_error_also_for_parts_that_are_not_there() -> None:
    plane = make_server(CountingApp(), [0], 1)
    error = ProtocolError("malformed")
    for push in (False, True):
        message = Exchange(push, not push, (1, 9), (1, 1), ())
        ((rank, failure),) = answers(plane.refuse(0, message, error))
        assert isinstance(failure, PartsFailed)
        assert (rank, failure.pushed, failure.consumed) == (0, push, not push)
        assert failure.parts == (1, 9)


# -- departures ---------------------------------------------------------------------------


def test_a_round_that_needs_a_departed_worker_ends_with_the_reason() -> None:
    plane = make_server(CountingApp(), [0, 1], 1)
    push_to(plane, 0, (1,), 1, 5)
    effects = plane.depart(1, LOST)
    failure = PartsFailed(True, False, (1,), (1,), "NodeLostError", str(LOST), "worker", 1)
    assert answers(effects) == [(0, failure)]


def test_pulls_that_count_on_a_refused_push_end_with_it_and_earlier_ones_are_served() -> None:
    plane = make_server(CountingApp(), [0, 1], 1)
    push_to(plane, 0, (1,), 1, 5)
    carry_out(plane, push_to(plane, 1, (1,), 1, 7))
    push_to(plane, 0, (1,), 2, 5)
    pull_from(plane, 0, (1,), 2)
    ended = answers(plane.depart(1, LOST))
    late = answers(pull_from(plane, 0, (1,), 2))
    served = pull_from(plane, 0, (1,), 1)
    assert [type(message) for _, message in ended] == [PartsFailed, PartsFailed]
    assert [type(message) for _, message in late] == [PartsFailed]
    assert sent_values(served) == {0: [(12,)]}


def test_pushes_after_a_departure_are_refused_at_once_also_of_parts_opened_later() -> None:
    app = CountingApp()
    plane = make_server(app, [0, 1], 1)
    plane.depart(1, LOST)
    plane.open_part(2, app.add(2, 1), [0, 1], 0)
    effects = answers(push_to(plane, 0, (1, 2), 1, 5, 5))
    assert effects == [
        (0, PartsFailed(True, False, (1, 2), (1, 1), "NodeLostError", str(LOST), "worker", 1))
    ]


def test_a_round_that_the_departed_worker_had_pushed_to_is_completed() -> None:
    app = CountingApp()
    plane = make_server(app, [0, 1], 1)
    push_to(plane, 1, (1,), 1, 7)
    departed = plane.depart(1, LOST)
    carry_out(plane, push_to(plane, 0, (1,), 1, 5))
    assert (departed, app.values[1].tolist()) == ([], [12])


def test_a_departure_is_nothing_to_asynchronous_parts() -> None:
    app = CountingApp(copies=True)
    plane = make_server(app, None, 1)
    departed = plane.depart(1, LOST)
    carry_out(plane, push_to(plane, 0, (1,), 1, 5))
    assert (departed, app.values[1].tolist()) == ([], [5])


def test_the_reason_names_the_worker_that_the_round_lacks() -> None:
    plane = make_server(CountingApp(), [0, 1, 2], 1)
    push_to(plane, 1, (1,), 1, 7)
    plane.depart(1, LOST)
    plane.depart(2, NodeLostError("worker 2 is lost", role="worker", rank=2))
    ((_, failure),) = answers(push_to(plane, 0, (1,), 1, 5))
    assert isinstance(failure, PartsFailed)
    assert (failure.error, failure.rank) == ("worker 2 is lost", 2)
