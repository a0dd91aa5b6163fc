"""Shares of servers: no others would give the busiest machine less to send and to receive."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TypeVar

import pytest

from kvstore.server.shares import Machine, best_shares, server_shares

BOTH = Machine(1, 1)
WORKER = Machine(1, 0)
SERVER = Machine(0, 1)

Number = TypeVar("Number", int, Fraction)


def traffic(machines: Sequence[Machine], shares: Sequence[Fraction]) -> list[Fraction]:
    """What each machine sends in a round, and receives as well, in models (``M`` bytes).

    ``shares`` are those of machines (the sum over their servers), as ``best_shares`` gives them.
    """
    num_workers = sum(machine.num_workers for machine in machines)
    return [
        machine.num_workers + share * (num_workers - 2 * machine.num_workers)
        for machine, share in zip(machines, shares, strict=True)
    ]


def counted(machines: Sequence[Machine], shares: Sequence[Number]) -> list[Number]:
    """What each machine sends in a round, worker by worker; it must receive the same."""
    nothing = type(shares[0])(0)
    sent = [nothing] * len(machines)
    received = [nothing] * len(machines)
    for home, machine in enumerate(machines):
        for _ in range(machine.num_workers):
            for away, share in enumerate(shares):
                if away != home:
                    for source, target in (home, away), (away, home):  # push, and then pull
                        sent[source] += share
                        received[target] += share
    assert sent == received
    return sent


def on_a_grid(machines: Sequence[Machine], steps: int) -> Iterator[list[int]]:
    """All shares in multiples of 1 / steps, as how many of them: integers add up fast."""

    def cut(left: int, rest: Sequence[Machine]) -> Iterator[list[int]]:
        if not rest:
            if left == 0:
                yield []
            return
        for held in range(left + 1 if rest[0].num_servers else 1):
            for others in cut(left - held, rest[1:]):
                yield [held, *others]

    yield from cut(steps, machines)


def fullest(machines: Sequence[Machine], shares: Sequence[Number]) -> Fraction:
    """What the fullest server holds."""
    return max(
        Fraction(share) / machine.num_servers
        for machine, share in zip(machines, shares, strict=True)
        if machine.num_servers
    )


def some_machines(seed: int) -> list[Machine]:
    """One to four machines, with a worker and a server at least."""
    draw = random.Random(seed)
    while True:
        machines = [
            Machine(draw.choice([0, 1, 1, 2, 4]), draw.choice([0, 1, 1, 2]))
            for _ in range(draw.randint(1, 4))
        ]
        if any(m.num_workers for m in machines) and any(m.num_servers for m in machines):
            return machines


@pytest.mark.parametrize("first", range(0, 150, 25))
def test_no_other_shares_are_better(first: int) -> None:
    for seed in range(first, first + 25):
        assert_no_others_are_better(some_machines(seed))


def assert_no_others_are_better(machines: Sequence[Machine]) -> None:
    found = best_shares(machines)
    assert sum(found) == 1
    assert all(share >= 0 for share in found)
    assert all(m.num_servers or not share for m, share in zip(machines, found, strict=True))
    steps = 12
    least, full = steps * max(counted(machines, found)), steps * fullest(machines, found)
    for others in on_a_grid(machines, steps):
        worst = max(counted(machines, others))
        assert worst >= least
        if worst == least:
            assert fullest(machines, others) >= full


def test_traffic_is_what_workers_and_servers_send() -> None:
    for seed in range(40):
        machines = some_machines(seed)
        for quarters in on_a_grid(machines, 4):
            shares = [Fraction(number, 4) for number in quarters]
            assert traffic(machines, shares) == counted(machines, shares)


def test_shares_of_workers_machines_and_of_servers_alone_are_those_of_byteps() -> None:
    for n in range(3, 24):
        for k in range(n + 1):
            machines = [BOTH] * n + [SERVER] * k
            whole = n * n + k * n - 2 * k
            shares = best_shares(machines)
            assert shares == [Fraction(n - k, whole)] * n + [Fraction(2 * (n - 1), whole)] * k
            assert max(traffic(machines, shares)) == Fraction(2 * n * (n - 1), whole)


@pytest.mark.parametrize(("n", "k"), [(3, 4), (4, 9), (5, 40)])
def test_more_servers_alone_than_workers_hold_everything_in_equal_shares(n: int, k: int) -> None:
    machines = [BOTH] * n + [SERVER] * k
    assert best_shares(machines) == [Fraction(0)] * n + [Fraction(1, k)] * k


def test_where_shares_do_not_matter_to_the_network_they_are_equal() -> None:
    # Two machines send and receive one model each, wherever it lies.
    assert best_shares([BOTH, BOTH]) == [Fraction(1, 2)] * 2
    assert best_shares([BOTH, BOTH, SERVER]) == [Fraction(1, 3)] * 3
    assert best_shares([WORKER, WORKER, SERVER, SERVER]) == [0, 0, Fraction(1, 2), Fraction(1, 2)]
    assert best_shares([Machine(3, 2)]) == [1]


def test_a_machine_with_most_of_the_workers_holds_everything() -> None:
    machines = [Machine(3, 1), BOTH, SERVER]
    assert best_shares(machines) == [1, 0, 0]
    assert traffic(machines, [Fraction(1), Fraction(0), Fraction(0)]) == [1, 1, 0]


def test_half_of_the_workers_cost_the_same_wherever_the_model_lies() -> None:
    assert best_shares([Machine(2, 1), BOTH, BOTH]) == [Fraction(1, 3)] * 3


def test_one_network_for_two_servers_carries_as_much_as_one_for_one() -> None:
    assert server_shares(["a", "b", "c", "d"], ["x", "x", "y"]) == [0.25, 0.25, 0.5]


def test_servers_get_their_shares_by_rank_and_by_the_names_of_machines() -> None:
    workers = ["a", "b", "c", "d"]
    assert server_shares(workers, ["new", "b", "a", "d", "c"]) == pytest.approx(
        [2 / 6, 1 / 6, 1 / 6, 1 / 6, 1 / 6]
    )
    assert server_shares(["here", "here"], ["here", "here"]) == [0.5, 0.5]
    assert server_shares([], ["x", "y"]) == [0.5, 0.5]


def test_thousands_of_machines_of_many_kinds_add_up_to_the_whole() -> None:
    draw = random.Random(3)
    machines = [Machine(draw.randrange(40), draw.randrange(5)) for _ in range(4096)]
    shares = best_shares(machines)
    assert sum(shares) == 1
    assert max(traffic(machines, shares)) >= max(machine.num_workers for machine in machines)
