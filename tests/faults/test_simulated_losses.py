"""A node dies in the middle of a simulated run: everybody who is left learns whom they lost."""

from __future__ import annotations

import random
from collections.abc import Generator
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvstore.server import install
from kvstore.stores.dist.store import create_dist
from pslite import WORKER_GROUP, Postoffice
from pslite.errors import NodeLostError
from pslite.future import Future
from pslite.ids import SCHEDULER_ID
from pslite.node.links import Delivery
from pslite.testing.inproc import InprocVan
from pslite.testing.simulator import DEFAULTS, Faults, Simulation
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


def run_until_killed(seed: int, role: str, rank: int) -> dict[int, tuple[float, BaseException]]:
    simulation = Simulation(seed, 3, 2, FAULTS, prepare=install)
    errors: dict[int, tuple[float, BaseException]] = {}
    when = 1.0 + random.Random(seed).random()
    victim = {"worker": simulation.workers, "server": simulation.servers}[role][rank]
    simulation.at(when, lambda: simulation.kill(victim))
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


@pytest.mark.parametrize("standbys", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_a_lost_scheduler_is_named_on_every_survivor(seed: int, standbys: int) -> None:
    simulation = Simulation(seed, 3, 2, FAULTS, prepare=install, standbys=standbys)
    errors: dict[int, tuple[float, BaseException]] = {}
    when = 1.0 + random.Random(seed).random()
    simulation.at(when, lambda: simulation.kill(simulation.scheduler))
    others = list(simulation.standbys.values())
    simulation.run(*[endless(errors, lambda: simulation.now) for _ in range(3)], limit_s=60.0)
    survivors = [*simulation.workers, *simulation.servers, *others]
    simulation.until(lambda: all(node.error for node in survivors), when + 15.0)
    assert len(errors) == 3
    for node in survivors:
        assert isinstance(node.error, NodeLostError)
        assert (node.error.role, node.error.rank) == ("scheduler", 0)


def test_nobody_goes_on_connecting_to_the_address_of_a_lost_scheduler() -> None:
    """The next job may listen there by now, and must not get nodes that are not its own."""
    simulation = Simulation(3, 2, 2)
    members = [*simulation.workers, *simulation.servers]
    simulation.until(lambda: all(node.ready.done() for node in members))
    simulation.kill(simulation.scheduler)
    simulation.until(lambda: all(SCHEDULER_ID in node.membership.gone for node in members))
    next_job = InprocVan(simulation._network, "the next scheduler")
    next_job.bind(DEFAULTS["root_uri"], DEFAULTS["root_port"])
    assert next_job.poll(0.0) == []


def test_a_worker_that_leaves_early_is_named_where_its_pushes_are_missed() -> None:
    simulation = Simulation(6, 2, 2, FAULTS, prepare=install)
    seen: list[str] = []

    def leaves(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        yield store.init_async("w", np.zeros(3))
        yield store.push_async("w", np.ones(3))
        node.call(node.control.say_goodbye)

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


def test_all_that_stay_are_in_the_next_epoch_once_a_worker_has_left() -> None:
    simulation = Simulation(3, 2, 2, prepare=install)
    seen: list[set[int]] = []

    def leaves(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        yield 2.0
        yield node.leave()

    def stays(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        for wait_s in (1.0, 5.0):
            yield wait_s
            nodes = (simulation.scheduler, *simulation.servers, node)
            seen.append({each.membership.epoch for each in nodes})
        yield node.leave()

    simulation.run(stays, leaves)
    simulation.finish()
    assert seen == [{1}, {2}]


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
            node.call(node.control.say_goodbye)
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


def test_a_link_that_never_lasts_for_a_message_ends_the_job_with_its_speed() -> None:
    """Reconnecting works each time, so by its connection alone nobody would ever be lost."""
    simulation = Simulation(
        5, 1, 1, prepare=install, shm=False, chunk_bytes=1 << 20, credit_bytes=1 << 24
    )
    worker, server = simulation.workers[0], simulation.servers[0]
    errors: dict[int, tuple[float, BaseException]] = {}
    send = worker.van.send

    def lose_large(peer: str, frames: Any) -> None:
        if sum(memoryview(frame).nbytes for frame in frames) < 50_000:
            send(peer, frames)

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        values = np.ones(10_000)
        yield store.init_async("w", values)
        worker.van.send = lose_large  # type: ignore[method-assign]
        for number in range(30):
            at_s = simulation.now + 4.0 * number
            simulation.at(at_s, lambda: simulation.cut(worker, server, simulation.now + 0.2))
        try:
            yield store.pushpull_async("w", values)
        except NodeLostError as error:
            errors[node.rank] = (simulation.now, error)

    simulation.run(script, limit_s=120.0)
    (_, error) = errors[0]
    assert "server 0" in str(error)
    assert "on the link from worker 0" in str(error)
    assert "bytes moved in" in str(error)
    assert "80000 bytes wait" in str(error)


@pytest.mark.parametrize("seed", range(5))
def test_a_worker_that_one_server_cannot_be_reached_from_ends_and_is_named_with_the_cause(
    seed: int,
) -> None:
    """The scheduler still reaches both; it takes nobody's word about the server."""
    simulation = Simulation(seed, 3, 2, FAULTS, prepare=install)
    errors: dict[int, tuple[float, BaseException]] = {}
    worker, server = simulation.workers[1], simulation.servers[0]
    simulation.at(2.0, lambda: simulation.cut(worker, server, 1000.0))
    simulation.run(endless(errors, lambda: simulation.now), limit_s=60.0)
    assert len(errors) == 3
    for rank, (time, error) in errors.items():
        assert time < 2.0 + 15.0
        assert "server 0 " in str(error)
        assert rank == 1 or "worker 1 " in str(error)


@pytest.mark.parametrize("answered", [True, False])
def test_a_connection_that_is_about_to_come_back_is_waited_for(answered: bool) -> None:
    """It is away for nine seconds, and a peer is lost after five in which nothing comes at all."""
    simulation = Simulation(5, 1, 1, prepare=install)
    worker, server = simulation.workers[0], simulation.servers[0]
    for node, peer in (worker, server), (server, worker):
        uid = peer.van.uid
        node.van.is_answered = lambda name, uid=uid: answered and name == uid  # type: ignore
    ended: list[object] = []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        values = np.ones(10)
        yield store.init_async("w", values)
        simulation.cut(worker, server, simulation.now + 9.0)
        try:
            yield store.pushpull_async("w", values)
            ended.append("done")
        except NodeLostError as error:
            ended.append(error)

    simulation.run(script, limit_s=120.0)
    if answered:
        assert ended == ["done"]
    else:
        assert "server 0" in str(ended[0]) and "gone for 5." in str(ended[0])


# -- how those end that have failed ---------------------------------------------------------


class Ends:
    """How long each survivor of a loss stays once it has failed, and what it names.

    Nodes end as processes do: what has been sent still leaves, and then nobody is there.
    """

    def __init__(self, simulation: Simulation, survivors: list[Postoffice]) -> None:
        self.lost: list[tuple[str, int]] = []
        self.took_s: list[float] = []
        self._simulation = simulation
        for node in survivors:
            node.finished.on_done(partial(self._failed, node))

    def _failed(self, node: Postoffice, finished: Future[None]) -> None:
        error = finished.error()
        assert isinstance(error, NodeLostError)
        self.lost.append((error.role, error.rank))
        node.leave().on_done(partial(self._done, node, self._simulation.now))

    def _done(self, node: Postoffice, failed_at: float, _: Future[None]) -> None:
        now = self._simulation.now
        self.took_s.append(now - failed_at)
        self._simulation.at(now + 0.4, lambda: self._simulation.kill(node))


@pytest.mark.parametrize("role", ["worker", "server"])
@pytest.mark.parametrize("seed", range(3))
def test_who_fails_does_not_wait_for_those_that_fail_as_well(seed: int, role: str) -> None:
    """They know a cause, and may be gone before they have accepted another."""
    slow = Faults(delay=0.5, delay_s=(0.001, 0.3), reorder=0.1)
    simulation = Simulation(seed, 3, 2, slow, prepare=install)
    victim = (simulation.workers if role == "worker" else simulation.servers)[1]
    nodes = [simulation.scheduler, *simulation.servers, *simulation.workers]
    ends = Ends(simulation, [node for node in nodes if node is not victim])
    simulation.at(3.0, lambda: simulation.kill(victim))
    for node in simulation.servers if role == "worker" else simulation.workers:
        # Something is under way to the dead, too, which will never be accepted.
        simulation.at(3.1, partial(node.links.send, victim.van.uid, Leave(), (), 1, 3.1))
    simulation.until(lambda: len(ends.took_s) == 5, limit_s=30.0)
    assert ends.lost == [(role, 1)] * 5
    assert max(ends.took_s) < 1.5, ends.took_s


def test_a_goodbye_that_comes_before_the_roster_counts_once_that_is_there() -> None:
    """A process in the place of a lost server may be the last one to get the roster."""
    simulation = Simulation(1, 1, 1, prepare=install)
    server, worker = simulation.servers[0], simulation.workers[0]
    server.control.handle(Delivery(worker.van.uid, 0, 1, Leave(), ()), 0.0)
    simulation.until(lambda: worker.ready.done() and server.ready.done(), limit_s=30.0)
    assert worker.info is not None
    assert server.membership.told == {worker.info.node_id}
