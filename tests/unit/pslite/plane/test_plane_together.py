"""Whole planes against each other over a network that reorders, loses and repeats.

Every value is a vector that counts pushes by worker (``plane_helpers.py``), so each pull proves
which contributions it contains: one too many, too few or twice, and the count is off.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
from plane_helpers import Asked, Cluster, ask, counts

WORKERS = (9, 11, 13)
SERVERS = (8, 10)
PARTS = {8: (1, 2, 3, 4), 10: (5, 6, 7)}
ROUNDS = 6


def one_push_of(worker: int, num_workers: int) -> bytes:
    rank = (worker - 9) // 2
    return counts(*(int(slot == rank) for slot in range(num_workers)))


def make_cluster(seed: int, *, loss: float = 0.0, synchronous: bool = True) -> Cluster:
    cluster = Cluster(seed, num_workers=3, num_servers=2, loss=loss, synchronous=synchronous)
    for server, parts in PARTS.items():
        for part in parts:
            cluster.open_part(server, part, lane=part % 2)
    return cluster


def fused(generator: random.Random, parts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The parts in another order, cut into groups at random places."""
    left = generator.sample(parts, len(parts))
    groups = []
    while left:
        size = generator.randint(1, len(left))
        groups.append(tuple(left[:size]))
        left = left[size:]
    return groups


def submit_job(cluster: Cluster) -> list[tuple[int, int, Asked]]:
    """Every worker pushes every part ROUNDS times; returns (rank, own pushes, request)."""
    requests = []
    for worker in WORKERS:
        payload = one_push_of(worker, len(WORKERS))
        rank = (worker - 9) // 2
        for round_ in range(1, ROUNDS + 1):
            for server in SERVERS:
                for group in fused(cluster.random, PARTS[server]):
                    kind = cluster.random.choice(("push", "pushpull", "push and pull"))
                    push = [payload] * len(group)
                    pull = kind == "pushpull"
                    priority = cluster.random.randint(-3, 3)
                    request = partial(ask, *group, size=24, server=server, priority=priority)
                    made = [request(push=push, pull=pull)]
                    if kind == "push and pull":
                        made.append(request(pull=True))
                    for asked in made:
                        cluster.submit(worker, asked)
                        requests.append((rank, round_, asked))
    return requests


def endings(requests: list[tuple[int, int, Asked]]) -> list[list[BaseException | None]]:
    return [asked.endings for _, _, asked in requests]


@pytest.mark.parametrize("seed", range(25))
def test_workers_that_fuse_differently_all_get_through(seed: int) -> None:
    cluster = make_cluster(seed)
    requests = submit_job(cluster)
    cluster.run()
    assert endings(requests) == [[None]] * len(requests)


@pytest.mark.parametrize("seed", range(100, 125))
def test_a_value_after_a_round_holds_exactly_that_round_on_a_bad_network(seed: int) -> None:
    cluster = make_cluster(seed, loss=0.15)
    requests = submit_job(cluster)
    cluster.run()
    seen = [(asked.values, asked.versions) for _, _, asked in requests if asked.transfer.pull]
    expected = [
        (
            dict.fromkeys(asked.transfer.parts, (round_,) * len(WORKERS)),
            dict.fromkeys(asked.transfer.parts, round_),
        )
        for _, round_, asked in requests
        if asked.transfer.pull
    ]
    assert seen == expected
    assert endings(requests) == [[None]] * len(requests)


@pytest.mark.parametrize("seed", range(200, 215))
def test_epochs_that_change_meanwhile_lose_nothing_and_repeat_nothing(seed: int) -> None:
    cluster = make_cluster(seed, loss=0.1)
    requests = submit_job(cluster)
    for epoch in (2, 3, 4):
        cluster.announce_epoch(epoch)
    cluster.run()
    final = {
        part: app.values[part].tolist() for app in cluster.apps.values() for part in app.values
    }
    assert final == {part: [ROUNDS] * 3 for parts in PARTS.values() for part in parts}
    assert endings(requests) == [[None]] * len(requests)
    assert any("StaleEpoch" in line for line in cluster.delivered), "the seed tests nothing"


@pytest.mark.parametrize("seed", range(300, 315))
def test_async_readers_see_their_own_pushes_and_never_more_than_was_pushed(seed: int) -> None:
    cluster = make_cluster(seed, loss=0.1, synchronous=False)
    requests = submit_job(cluster)
    cluster.run()
    for rank, round_, asked in requests:
        assert asked.endings == [None]
        for value in asked.values.values():
            assert value[rank] == round_
            assert max(value) <= ROUNDS
    final = {
        part: app.values[part].tolist() for app in cluster.apps.values() for part in app.values
    }
    assert final == {part: [ROUNDS] * 3 for parts in PARTS.values() for part in parts}


@pytest.mark.parametrize("seed", range(400, 410))
def test_contributions_are_applied_once_and_in_rank_order(seed: int) -> None:
    cluster = make_cluster(seed, loss=0.2)
    submit_job(cluster)
    cluster.run()
    applied = sorted(entry for app in cluster.apps.values() for entry in app.applied)
    assert applied == [
        (part, ((0, round_), (1, round_), (2, round_)))
        for part in range(1, 8)
        for round_ in range(1, ROUNDS + 1)
    ]


def test_two_workers_that_push_keys_in_opposite_orders_get_through() -> None:
    cluster = Cluster(7, num_workers=2, num_servers=1, window=0)
    for part in range(1, 21):
        cluster.open_part(8, part, lane=0)
    requests = []
    for worker, parts in ((9, range(1, 21)), (11, range(20, 0, -1))):
        for part in parts:
            asked = ask(part, push=[one_push_of(worker, 2)], pull=True, size=16)
            cluster.submit(worker, asked)
            requests.append(asked)
    cluster.run()
    assert [asked.endings for asked in requests] == [[None]] * 40


def test_one_seed_gives_one_history() -> None:
    histories = []
    for _ in range(2):
        cluster = make_cluster(42, loss=0.2)
        submit_job(cluster)
        cluster.run()
        histories.append(cluster.delivered)
    assert histories[0] == histories[1]
