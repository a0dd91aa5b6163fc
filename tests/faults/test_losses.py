"""A node dies in the middle of a simulated run: everybody who is left learns whom they lost."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from kvstore.dist import create_dist
from kvstore.server import install
from pslite import WORKER_GROUP, Postoffice
from pslite.errors import NodeLostError
from pslite.links import Delivery
from pslite.simulator import Faults, Simulation
from pslite.wire.messages import Leave

FAULTS = Faults(drop=0.03, duplicate=0.05, delay=0.1, reorder=0.1)


def endless(errors: dict[int, tuple[float, BaseException]], clock: Any) -> Any:
    """A worker that exchanges until something ends it, and notes when and what."""

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        out = np.zeros(40)
        try:
            yield store.init_async("w", out)
            while True:
                store.push_async("w", np.ones(40))
                yield store.pull_async("w", out)
                yield 0.05
        except NodeLostError as error:
            errors[node.rank] = (clock(), error)

    return script


def run_until_killed(
    seed: int, role: str, rank: int, *, without_scheduler_s: float | None = None
) -> dict[int, tuple[float, BaseException]]:
    """``without_scheduler_s``: so long before, the scheduler has died, too."""
    simulation = Simulation(seed, 3, 2, FAULTS, prepare=install)
    errors: dict[int, tuple[float, BaseException]] = {}
    when = 1.0 + random.Random(seed).random()
    victim = {"worker": simulation.workers, "server": simulation.servers}[role][rank]
    simulation.at(when, lambda: simulation.kill(victim))
    if without_scheduler_s is not None:
        at_s = when - without_scheduler_s
        simulation.at(at_s, lambda: simulation.kill(simulation.scheduler))
    scripts = [endless(errors, lambda: simulation.now) for _ in simulation.workers]
    if role == "worker":
        scripts[rank] = idle
    simulation.run(*scripts, limit_s=60.0)
    for _, (time, error) in errors.items():
        assert time - when < 15.0
        assert f"{role} {rank} " in str(error)
        assert (error.role, error.rank) == (role, rank)  # type: ignore[attr-defined]
    return errors


def idle(node: Postoffice) -> Generator[Any, Any, None]:
    """The script of the worker that dies: one round, then nothing."""
    yield node.ready
    store = create_dist("dist_sync", "dist_sync", node=node)
    yield store.init_async("w", np.zeros(40))


@pytest.mark.parametrize("seed", range(20))
def test_a_lost_worker_is_named_on_every_survivor(seed: int) -> None:
    assert len(run_until_killed(seed, "worker", seed % 3)) == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_lost_server_is_named_on_every_worker(seed: int) -> None:
    assert len(run_until_killed(seed, "server", seed % 2)) == 3


def test_without_the_scheduler_push_and_pull_go_on_and_barriers_name_it() -> None:
    simulation = Simulation(5, 2, 1, prepare=install)
    results: list[Any] = []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        out = np.zeros(3)
        yield store.init_async("w", out)
        yield 2.0
        if node.rank == 0:
            simulation.kill(simulation.scheduler)
        yield 10.0
        store.push_async("w", np.ones(3))
        yield store.pull_async("w", out)
        try:
            yield node.barrier(WORKER_GROUP)
        except NodeLostError as error:
            results.append((out.tolist(), error.role))

    simulation.run(script)
    simulation.finish()
    assert results == [([2.0, 2.0, 2.0], "scheduler")] * 2


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("role", "survivors"), [("worker", 2), ("server", 3)])
def test_a_loss_without_the_scheduler_is_named_on_every_survivor(
    seed: int, role: str, survivors: int
) -> None:
    """Whoever notices it tells the nodes that it talks to."""
    errors = run_until_killed(seed, role, seed % 2, without_scheduler_s=0.5)
    assert len(errors) == survivors


@pytest.mark.parametrize("kind", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("seed", range(10))
def test_without_the_scheduler_rounds_are_right_and_servers_end_after_the_goodbyes(
    seed: int, kind: str
) -> None:
    from kvstore import optimizer

    simulation = Simulation(seed, 3, 2, FAULTS, prepare=install)
    values: list[Any] = []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist(kind, kind, node=node)
        out = np.zeros(40)
        if kind == "dist_async":
            yield store.set_optimizer_async(optimizer.create("sgd", learning_rate=1.0))
        yield store.init_async("w", out)
        yield node.barrier(WORKER_GROUP)
        yield 3.0  # for all to hear that the barrier is over, also when a message is lost
        if node.rank == 0:
            simulation.kill(simulation.scheduler)
        for number in range(1, 11):
            store.push_async("w", -np.ones(40) * number)
            yield store.pull_async("w", out)
            if kind == "dist_sync":
                values.append((out.min(), out.max()) == (-3.0 * number, -3.0 * number))
            yield 0.2 * node.rank
        yield 20.0
        yield store.pull_async("w", out)
        values.append(out.min() == out.max() == (-30.0 if kind == "dist_sync" else 165.0))

    simulation.run(script)
    simulation.finish()
    assert all(values), values
    assert all(server.finished.error() is None for server in simulation.servers)


def test_a_worker_that_leaves_early_is_named_where_its_pushes_are_missed() -> None:
    simulation = Simulation(6, 2, 2, FAULTS, prepare=install)
    seen: list[str] = []

    def leaves(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        yield store.init_async("w", np.zeros(3))
        yield store.push_async("w", np.ones(3))
        node.call(lambda: node.control and node.control.say_goodbye(simulation.now))

    def stays(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        out = np.zeros(3)
        yield store.init_async("w", np.zeros(3))
        yield store.push_async("w", np.ones(3))
        for _ in range(2):
            try:
                yield store.push_async("w", np.ones(3))
            except NodeLostError as error:
                seen.append(f"{error.role} {error.rank}")
        yield store.pull_async("w", out)
        seen.append(str(out.tolist()))

    simulation.run(stays, leaves)
    simulation.finish()
    assert seen == ["worker 1", "worker 1", "[2.0, 2.0, 2.0]"]


def test_in_asynchronous_mode_the_others_go_on_when_a_worker_leaves() -> None:
    from kvstore import optimizer

    simulation = Simulation(8, 3, 2, FAULTS, prepare=install)
    totals: list[float] = []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_async", "dist_async", node=node)
        yield store.set_optimizer_async(optimizer.create("sgd", learning_rate=1.0))
        out = np.zeros(40)
        yield store.init_async("w", out)
        yield node.barrier(WORKER_GROUP)
        for _ in range(5 if node.rank == 2 else 30):
            store.push_async("w", -np.ones(40))
            yield store.pull_async("w", out)
            yield 0.05
        if node.rank == 2:
            node.call(lambda: node.control and node.control.say_goodbye(simulation.now))
            return
        yield 5.0
        yield store.pull_async("w", out)
        totals.extend([out.min(), out.max()])

    simulation.run(script)
    simulation.finish()
    assert totals == [65.0] * 4


@pytest.mark.parametrize("seed", range(10))
def test_a_server_ends_only_after_it_has_taken_the_goodbye_of_each_worker(seed: int) -> None:
    """The scheduler's news may be faster; a worker whose goodbye nobody takes waits for long."""
    simulation = Simulation(seed, 3, 2, FAULTS, prepare=install)
    missing = []
    for server in simulation.servers:
        said: set[str] = set()

        def handle(
            delivery: Delivery, now: float, handle: Any = server.control.handle, said: Any = said
        ) -> None:
            if isinstance(delivery.message, Leave):
                said.add(delivery.peer)
            handle(delivery, now)

        monkeypatched: Any = server.control
        monkeypatched.handle = handle
        server.finished.on_done(lambda _, said=said: missing.append(3 - len(said)))  # type: ignore[misc]
    simulation.run(idle, idle, idle)
    simulation.finish()
    assert missing == [0, 0]
