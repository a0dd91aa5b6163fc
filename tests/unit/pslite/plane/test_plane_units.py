"""Parts that are kept as one: never seen from outside, whatever is joined, split and joined again.

The network and the oracle are those of ``test_plane_together.py``; here most requests name one
of a few lists of parts, as a training script does, so that both planes keep those as one.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
from plane_helpers import LOST, Asked, Cluster, ask, carry_out, counts, pushed

from pslite.errors import ProtocolError, UsageError
from pslite.plane import Piece, ServerPlane, WorkerPlane
from pslite.plane.unit import Unit, joined
from pslite.protocol.rounds import SyncRounds
from pslite.wire.messages import Answer, Exchange

WORKERS = (9, 11, 13)
PARTS = (1, 2, 3, 4, 5, 6)
ROUNDS = 14
FAMILIAR = (
    ((1, 2, 3, 4, 5, 6),),
    ((1, 2, 3), (4, 5, 6)),
    ((4, 5, 6), (1, 2, 3)),
    ((1, 2, 3), (4,), (5,), (6,)),
    ((2, 1), (3, 4, 5, 6)),
)


def make_cluster(seed: int, *, loss: float = 0.0, synchronous: bool = True) -> Cluster:
    cluster = Cluster(seed, num_workers=3, num_servers=1, loss=loss, synchronous=synchronous)
    for part in PARTS:
        cluster.open_part(8, part, lane=0)
    return cluster


def submit_job(cluster: Cluster, steadiness: float) -> list[tuple[int, int, Asked]]:
    """Every worker pushes every part ROUNDS times; returns (rank, own pushes, request).

    Each worker stays with its list of parts from round to round with this probability.
    """
    generator: random.Random = cluster.random
    requests = []
    for worker in WORKERS:
        rank = (worker - 9) // 2
        payload = counts(*(int(slot == rank) for slot in range(3)))
        groups = generator.choice(FAMILIAR)
        for round_ in range(1, ROUNDS + 1):
            if generator.random() > steadiness:
                groups = generator.choice(FAMILIAR)
            for group in groups:
                kind = generator.choice(("push", "pushpull", "pushpull", "push and pull"))
                request = partial(ask, *group, size=24)
                apart = generator.random() < 0.3
                push = [payload] * len(group)
                made = [request(push=push, pull=kind == "pushpull", apart=apart)]
                if kind == "push and pull":
                    made += [ask(part, size=24, pull=True) for part in group[:1]]
                    made.append(request(pull=True))
                for asked in made:
                    cluster.submit(worker, asked)
                    requests.append((rank, round_, asked))
    return requests


def joined_units(cluster: Cluster) -> int:
    """How many parts are kept together at the end, on all nodes."""
    states = [*cluster.servers[8]._parts.units.values()]
    states += [state for worker in cluster.workers.values() for state in worker._parts.values()]
    return sum(len(state.parts) > 1 for state in states)


def final(cluster: Cluster) -> set[tuple[int, ...]]:
    return {tuple(value.tolist()) for value in cluster.apps[8].values.values()}


@pytest.mark.parametrize("loss", [0.0, 0.15])
@pytest.mark.parametrize("steadiness", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_values_hold_exactly_their_round(seed: int, steadiness: float, loss: float) -> None:
    cluster = make_cluster(seed, loss=loss)
    requests = submit_job(cluster, steadiness)
    cluster.run(limit=200_000)
    for _, round_, asked in requests:
        assert asked.endings == [None]
        if asked.transfer.pull:
            assert asked.values == dict.fromkeys(asked.transfer.parts, (round_,) * 3)
            assert asked.versions == dict.fromkeys(asked.transfer.parts, round_)
    assert final(cluster) == {(ROUNDS,) * 3}


@pytest.mark.parametrize("seed", range(10))
def test_asynchronous_readers_see_their_own_pushes(seed: int) -> None:
    cluster = make_cluster(seed, loss=0.1, synchronous=False)
    requests = submit_job(cluster, 0.8)
    cluster.run(limit=200_000)
    for rank, round_, asked in requests:
        assert asked.endings == [None]
        for value in asked.values.values():
            assert value[rank] == round_
            assert max(value) <= ROUNDS
    assert final(cluster) == {(ROUNDS,) * 3}


@pytest.mark.parametrize("seed", range(10))
def test_epochs_that_change_meanwhile_lose_nothing(seed: int) -> None:
    cluster = make_cluster(seed, loss=0.1)
    requests = submit_job(cluster, 0.8)
    for epoch in (2, 3, 4):
        cluster.announce_epoch(epoch)
    cluster.run(limit=200_000)
    assert {tuple(asked.endings) for _, _, asked in requests} == {(None,)}
    assert final(cluster) == {(ROUNDS,) * 3}


def test_steady_workers_really_get_units_on_both_sides() -> None:
    cluster = make_cluster(3)
    for worker in WORKERS:
        for _ in range(8):
            push = [counts(1, 0, 0)] * 6
            cluster.submit(worker, ask(*PARTS, size=24, push=push, pull=True))
    cluster.run()
    assert joined_units(cluster) == len(PARTS) * (1 + len(WORKERS))
    assert final(cluster) == {(24, 0, 0)}


# -- one server, step by step -------------------------------------------------------------


def together(round_: int, *, pull: bool = False, parts: tuple[int, ...] = (1, 2)) -> Exchange:
    return Exchange(True, pull, parts, (round_,) * len(parts), (8,) * len(parts))


def joined_server(ranks: tuple[int, ...] = (0,)) -> tuple[ServerPlane, Cluster, int]:
    """A server whose parts 1 and 2 are one unit, and the number of rounds that took."""
    cluster = Cluster(0, num_workers=1, num_servers=1)
    cluster.ranks = ranks
    plane = cluster.servers[8]
    for part in (1, 2):
        cluster.open_part(8, part, lane=0)
    for round_ in range(1, 5):
        for rank in ranks:
            carry_out(plane, plane.exchange(rank, 1, together(round_), [counts(1, 1)]))
    assert plane._parts.units[1] is plane._parts.units[2]
    return plane, cluster, 4


def test_a_push_of_one_part_of_a_unit_leaves_the_others_as_they_are() -> None:
    plane, cluster, done = joined_server()
    carry_out(plane, plane.exchange(0, 1, pushed(2, done + 1), [counts(1)]))
    assert cluster.apps[8].values[1].tolist() == [done]
    assert cluster.apps[8].values[2].tolist() == [done + 1]
    # And both go on, each with its own number.
    carry_out(plane, plane.exchange(0, 1, pushed(1, done + 1), [counts(1)]))
    carry_out(plane, plane.exchange(0, 1, together(done + 2), [counts(1, 1)]))
    assert cluster.apps[8].values[1].tolist() == [done + 2]


def test_a_push_in_several_frames_is_one_to_the_whole_unit() -> None:
    plane, cluster, done = joined_server((0, 1))
    plane.exchange(0, 1, together(done + 1), [counts(1), counts(2)])
    sends = carry_out(plane, plane.exchange(1, 1, together(done + 1), [counts(10, 20)]))
    assert len(sends) == 2
    assert plane._parts.units[1] is plane._parts.units[2]
    values = [cluster.apps[8].values[part].tolist() for part in (1, 2)]
    assert values == [[2 * done + 11], [2 * done + 22]]


def test_frames_that_cut_a_part_of_a_unit_in_two_are_refused() -> None:
    plane, cluster, done = joined_server()
    value = counts(1, 1)
    for frames in ([value[:4], value[4:]], [value[:8]], [value, value]):
        with pytest.raises(ProtocolError):
            plane.exchange(0, 1, together(done + 1), frames)
    carry_out(plane, plane.exchange(0, 1, together(done + 1), [value]))
    assert cluster.apps[8].values[1].tolist() == [done + 1]


def test_a_unit_that_waits_with_several_frames_can_be_taken_apart() -> None:
    plane, cluster, done = joined_server((0, 1))
    plane.exchange(0, 1, together(done + 1), [counts(1), counts(2)])
    for part, value in ((2, 20), (1, 10)):
        carry_out(plane, plane.exchange(1, 1, pushed(part, done + 1), [counts(value)]))
    values = [cluster.apps[8].values[part].tolist() for part in (1, 2)]
    assert values == [[2 * done + 11], [2 * done + 22]]


def test_an_update_that_fails_for_one_part_of_a_unit_is_an_error_of_that_part_only() -> None:
    plane, cluster, done = joined_server()
    cluster.apps[8].errors[2] = ValueError("no")
    sends = carry_out(plane, plane.exchange(0, 1, together(done + 1, pull=True), [counts(1, 1)]))
    kinds = {type(send.message).__name__: send.message for send in sends}
    assert kinds["PartsFailed"].parts == (2,)  # type: ignore[attr-defined]
    assert kinds["Answer"].parts == (1,)  # type: ignore[attr-defined]
    # The round is over for both.
    sends = carry_out(plane, plane.exchange(0, 1, together(done + 2), [counts(1, 1)]))
    assert sorted(part for send in sends for part in send.message.parts) == [1, 2]  # type: ignore[attr-defined]


def test_a_part_that_is_deleted_out_of_a_unit_takes_no_other_with_it() -> None:
    plane, cluster, done = joined_server((0, 1))
    plane.exchange(0, 1, together(done + 1), [counts(1, 1)])
    (failed,) = carry_out(plane, plane.close_part(2, UsageError("the key was deleted")))
    assert failed.message.parts == (2,)  # type: ignore[attr-defined]
    (first, second) = carry_out(plane, plane.exchange(1, 1, pushed(1, done + 1), [counts(1)]))
    assert {first.peer, second.peer} == {0, 1}
    assert cluster.apps[8].values[1].tolist() == [2 * done + 2]


def test_a_worker_that_is_lost_ends_the_round_of_every_part_of_a_unit() -> None:
    plane, _, done = joined_server((0, 1))
    plane.exchange(0, 1, together(done + 1), [counts(1, 1)])
    (failed,) = carry_out(plane, plane.depart(1, LOST))
    assert failed.peer == 0
    assert failed.message.parts == (1, 2)  # type: ignore[attr-defined]


def test_a_pull_of_some_parts_waits_with_the_unit_and_is_answered_alone() -> None:
    plane, _, done = joined_server((0, 1))
    plane.exchange(0, 1, together(done + 1), [counts(1, 1)])
    pull = Exchange(False, True, (2,), (done + 1,), ())
    assert carry_out(plane, plane.exchange(0, 1, pull, ())) == []
    sends = carry_out(plane, plane.exchange(1, 1, together(done + 1), [counts(1, 1)]))
    values = [send for send in sends if isinstance(send.message, Answer) and send.message.sizes]
    assert [send.message.parts for send in values] == [(2,)]  # type: ignore[attr-defined]
    assert plane._parts.units[1] is plane._parts.units[2]


def test_a_push_that_comes_again_is_answered_and_not_applied() -> None:
    plane, cluster, done = joined_server()
    (answer,) = carry_out(plane, plane.exchange(0, 1, together(done, pull=True), [counts(9, 9)]))
    assert answer.message.parts == (1, 2)  # type: ignore[attr-defined]
    assert cluster.apps[8].values[1].tolist() == [done]


def test_only_parts_in_the_same_state_are_joined() -> None:
    ahead, behind, elsewhere = (
        Unit((part,), (8,), SyncRounds((0,), 2), lane, (8,))
        for part, lane in ((1, 0), (2, 0), (3, 1))
    )
    assert joined([ahead, behind]) is not None
    assert joined([ahead, elsewhere]) is None
    ahead.rounds.contribute(0, 1, None)
    assert joined([ahead, behind]) is None


@pytest.mark.parametrize(("starts", "is_whole"), [((0, 8), True), ((0, 16), False)])
def test_payloads_are_joined_where_each_begins_at_the_end_of_the_one_before(
    starts: tuple[int, int], is_whole: bool
) -> None:
    frame = counts(1, 2, 3)
    units = [Unit((part,), (8,), SyncRounds((0, 1), 2), 0, (8,)) for part in (1, 2)]
    for unit, start in zip(units, starts, strict=True):
        unit.rounds.contribute(0, 1, Piece(frame, start, start + 8))
    whole = joined(units)
    assert (whole is not None) == is_whole
    if whole is not None:
        assert whole.rounds.payload(0, 1) == Piece(frame, 0, 16)


def test_a_worker_gives_units_up_when_the_servers_answer_differs() -> None:
    worker = WorkerPlane(2)
    for round_ in range(1, 6):
        asked = ask(1, 2, push=[counts(1), counts(1)])
        worker.submit(asked.transfer)
        for part in (2, 1):
            worker.answered(Answer(True, (part,), (round_,), (round_,), ()), ())
        assert asked.endings == [None]
