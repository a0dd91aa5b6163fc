"""Collective calls and messages under a network that loses, repeats, delays and reorders."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

from pslite import CollectiveServer, Communicator, Future, Postoffice, ReceivedArray, Role
from pslite.collective.ready_order import ReadyOrder
from pslite.collective.server_route import ServerRoute
from pslite.errors import NodeLostError
from pslite.future import completed, gather
from pslite.protocol.collective import CallKey, CollectiveCall
from pslite.testing.simulator import Faults, Simulation

WORKERS = 3
STEPS = 15
LENGTHS = [0, 1, 40, 300]

Array = np.ndarray[Any, Any]


def serve(node: Postoffice) -> None:
    if node.role is Role.SERVER:
        CollectiveServer(node)


def simulation(seed: int) -> Simulation:
    chance = random.Random(seed)
    faults = Faults(
        drop=chance.choice([0.0, 0.05, 0.2]),
        duplicate=chance.choice([0.0, 0.2]),
        delay=chance.choice([0.1, 0.5]),
        reorder=chance.choice([0.0, 0.3]),
        cuts=chance.choice([0, 2]),
    )
    return Simulation(seed, WORKERS, chance.choice([1, 2, 3]), faults, prepare=serve)


def sent(step: int, rank: int, length: int) -> Array:
    return np.arange(length) * 3 + 100 * step + rank


def begin(group: Communicator, kind: str, step: int, length: int) -> Future[None]:
    """Make a call, which checks its result when it is done."""
    everybody = [sent(step, rank, length + rank) for rank in range(WORKERS)]
    alike = [array[:length] for array in everybody]
    root = step % WORKERS

    def is_(wanted: Array) -> Callable[[Array], None]:
        return lambda found: np.testing.assert_array_equal(found, wanted)

    def are(wanted: list[Array]) -> Callable[[list[Array]], None]:
        def check(found: list[Array]) -> None:
            for each, right in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(each, right)

        return check

    if kind == "all_reduce":
        return group.all_reduce(alike[group.rank]).map(is_(alike[0] + alike[1] + alike[2]))
    if kind == "broadcast":
        return group.broadcast(alike[group.rank].copy(), root).map(is_(alike[root]))
    if kind == "all_gather":
        return group.all_gather(everybody[group.rank]).map(are(everybody))
    if kind == "all_to_all":
        rows = [everybody[group.rank] + 1000 * to for to in range(WORKERS)]
        wanted = [each + 1000 * group.rank for each in everybody]
        return group.all_to_all(rows).map(are(wanted))
    if kind == "barrier":
        return group.barrier(name="named")
    to, source = (group.rank + 1) % WORKERS, (group.rank - 1) % WORKERS

    def check(received: ReceivedArray) -> None:
        is_(everybody[source])(received.array)

    got = group.recv(source, tag=1).map(check)
    return gather([group.send(everybody[group.rank], to, tag=1), got]).map(lambda _: None)


KINDS = ["all_reduce", "broadcast", "all_gather", "all_to_all", "message", "barrier"]


def script_of(seed: int) -> Callable[[Postoffice], Generator[Any, Any, None]]:
    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        group = Communicator(node, rings=False)
        together, own = random.Random(seed), random.Random(seed * 1009 + node.rank)
        futures: list[Future[None]] = []
        for step in range(STEPS):
            kind, length = together.choice(KINDS), together.choice(LENGTHS)
            if kind == "barrier":
                yield gather(futures)  # of one name, one call is under way at a time
            if own.random() < 0.3:
                yield own.random() * 0.2
            futures.append(begin(group, kind, step, length))
            if own.random() < 0.3:
                yield gather(futures)
        yield gather(futures)

    return script


@pytest.mark.parametrize("seed", range(12))
def test_all_results_are_right_whatever_the_network_does(seed: int) -> None:
    run = simulation(seed)
    run.run(script_of(seed))
    run.finish(600.0)


@pytest.mark.parametrize("seed", range(8))
def test_ranks_that_join_early_leave_nothing_out_and_add_nothing(seed: int) -> None:
    run = simulation(seed)
    sums: dict[tuple[int, int, int], float] = {}
    last: list[int] = []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        group = Communicator(node, rings=False)
        futures: list[Future[None]] = []
        for turn in range(2):
            for step in range(1 + 2 * ((node.rank + turn) % WORKERS)):

                def note(found: Array, at: tuple[int, int, int] = (turn, step, node.rank)) -> None:
                    sums[at] = float(found[-1])

                futures.append(group.all_reduce(np.full(100, 10.0**node.rank)).map(note))
            yield group.join().map(last.append)
        yield gather(futures)

    run.run(script)
    assert len(last) == 2 * WORKERS
    for (turn, step, _), total in sums.items():
        makers = [r for r in range(WORKERS) if step < 1 + 2 * ((r + turn) % WORKERS)]
        assert total == sum(10.0**rank for rank in makers)


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_begin_calls_of_any_names_in_one_order_but_those_that_lack_a_rank(
    seed: int,
) -> None:
    run = simulation(seed)
    names = [f"call {number}" for number in range(STEPS)]
    began: list[list[str]] = [[] for _ in range(WORKERS)]
    by_servers: list[str] = []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        group, own = Communicator(node, rings=False), random.Random(node.rank)
        route = ServerRoute(node, node.rank, WORKERS, lambda key: None, meets=True)
        order = ReadyOrder(route, lambda key: None)
        futures: list[Future[Any]] = []

        def make(name: str) -> None:
            key = CallKey(group._group, name, 1)
            call = CollectiveCall("all_reduce", "sum", "float32", ((1,),))

            def begin(found: list[str]) -> Future[None]:
                found.append(name)
                return completed(None)

            ways = began[node.rank], by_servers
            futures.append(order.make(key, call, *(lambda way=way: begin(way) for way in ways)))

        for name in own.sample(names, STEPS):
            if own.random() < 0.3:
                yield own.random() * 0.2
            make(name)
        yield gather(futures)
        if node.rank:
            make("of two ranks")
            yield gather(futures)
        yield group.join()

    run.run(script)
    assert sorted(began[0]) == sorted(names)
    assert began[1:] == [began[0]] * (WORKERS - 1)
    assert by_servers == ["of two ranks"] * (WORKERS - 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_worker_that_dies_ends_the_calls_of_the_others_with_its_name(seed: int) -> None:
    run = simulation(seed)
    ended: list[int] = []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        group = Communicator(node, rings=False)
        if node.rank == 1:
            run.at(run.now + 1.0, lambda: run.kill(node))
        while True:
            try:
                yield group.all_reduce(np.ones(300))
            except NodeLostError as error:
                assert (error.role, error.rank) == ("worker", 1)  # noqa: PT017
                ended.append(node.rank)
                return

    run.run(script)
    assert sorted(ended) == [0, 2]
