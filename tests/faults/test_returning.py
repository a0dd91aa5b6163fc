"""A worker is killed at any instant, and another process takes its place: the bits stay the same.

A failing seed repeats with ``python -m tests.faults.returning SEED 1``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from functools import cache
from typing import Any

import numpy as np
import pytest

from kvstore import optimizer
from kvstore.stores.dist.store import create_dist
from pslite import WORKER_GROUP, Postoffice
from pslite.errors import ConfigError, NodeLostError
from pslite.future import gather
from pslite.ids import Role
from pslite.testing.simulator import Simulation
from tests.faults import returning
from tests.faults.mishaps import KINDS
from tests.faults.returning import (
    MakeScript,
    Results,
    async_script,
    before_step,
    begin,
    killed_at,
    returning_of,
    simulation_of,
    sync_script,
    without_kill,
)

SLOW = pytest.mark.slow(reason="every ninth instant is always tried, of rows with one worker")
STRIDE = 9
INSTANTS = [
    pytest.param(
        rank,
        make,
        offset,
        id=f"{rank}-{name}-{offset}",
        marks=() if not offset and (rank == 1 or "rows" not in name) else SLOW,
    )
    for rank in range(2)
    for name, make in {
        "sync": sync_script,
        "async": async_script,
        "rows": returning.ROWS["lazy"],
        "rows of which all change": returning.ROWS["all"],
        "rows that are replaced": returning.ROWS["sum"],
    }.items()
    for offset in range(STRIDE)
]


@pytest.mark.parametrize(("rank", "make", "offset"), INSTANTS)
def test_a_worker_may_be_killed_before_any_step_of_the_simulation(
    rank: int, make: MakeScript, offset: int
) -> None:
    num_steps, expected = without_kill(make)
    outcomes: Counter[str] = Counter()
    for at_step in range(1 + offset, num_steps + 1, STRIDE):
        try:
            results = killed_at(make, at_step, rank)
        except NodeLostError:  # it had not begun a step that another process could repeat
            outcomes["lost"] += 1
            assert outcomes["the same"] == 0, f"lost at step {at_step}, after its first step"
        else:
            assert set(results.values()) == {expected}, f"other bits: killed at step {at_step}"
            outcomes["the same"] += 1
    assert outcomes["the same"] > outcomes["lost"] > 0


@pytest.mark.parametrize("back_s", [0.0, 12.0])
def test_it_may_come_back_before_its_loss_is_noticed_or_much_later(back_s: float) -> None:
    num_steps, expected = without_kill(sync_script)
    for at_step in range(num_steps // 2, num_steps, 17):
        results = killed_at(sync_script, at_step, 1, back_s)
        assert set(results.values()) == {expected}


def test_a_step_begins_only_when_the_pushes_of_the_last_one_have_arrived() -> None:
    """Otherwise a process in the worker's place would not repeat them."""
    simulation = simulation_of(1, num_servers=2)
    results: Results = {}

    def lose(node: Postoffice) -> None:
        keeps_steps = returning_of(node)._server
        for server in simulation.servers:
            assert server.info is not None
            if server.info.node_id != keeps_steps:
                simulation.cut_one_way(node, server, simulation.now + 1.5)
        simulation.at(simulation.now + 0.5, lambda: simulation.restart(node, 0.3))

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        keeper = returning_of(node)
        kept = yield keeper.found
        yield store.set_optimizer_async(optimizer.create("sgd", learning_rate=1.0))
        yield store.init_async(["a", "b"], [np.zeros(3, np.float32)] * 2)
        entries = store._exchange.entries.values()
        assert len({server for entry in entries for server in entry.servers}) == 2
        yield node.barrier(WORKER_GROUP)
        loop = keeper.begin_loop()
        for step in range(kept.step if kept else 0, 5):
            yield begin(keeper, loop, step, b"", kept)
            if step == 2 and node.rank == 1 and kept is None:
                lose(node)
            store.push_async(["a", "b"], [np.full(3, 10.0**step, np.float32)] * 2)  # without a wait
        weights = np.zeros((2, 3), np.float32)
        yield store.pull_async(["a", "b"], list(weights))
        results[node.rank] = weights.tobytes()

    simulation.run(script)
    simulation.finish()
    assert set(results.values()) == {np.full(6, -22222.0, np.float32).tobytes()}


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=SLOW) for first in range(20, 2000, 20))]
)
def test_several_may_be_killed_whatever_the_network_does(first: int) -> None:
    for seed in range(first, first + 20):
        run_and_name_the_seed(seed)


@cache
def run_and_name_the_seed(seed: int) -> Counter[str]:
    """Count what happened to processes and connections, and what the network did."""
    try:
        simulation, counts = returning.run(seed)
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {error}") from error
    return counts + simulation.counts()


NETWORK = ("dropped", "duplicated", "delayed", "reordered", "cut", "muted")


def test_every_kind_of_mishap_happens_in_some_of_the_seeds() -> None:
    """Each in at least 5 %, as docs/testing.md says."""
    seeds = range(80)
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened.update(kind for kind, count in run_and_name_the_seed(seed).items() if count)
    rare = {k: happened[k] for k in (*KINDS, *NETWORK) if happened[k] < 0.05 * len(seeds)}
    assert not rare, f"of {len(seeds)} seeds: {rare}"


def test_a_call_that_is_repeated_changes_nothing() -> None:
    """Worker 0 sets one optimizer and then another; who repeats its step sets neither."""
    simulation = simulation_of(1)
    seen: list[float] = []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        keeper = returning_of(node)
        kept = yield keeper.found
        yield store.init_async("w", np.zeros(1))
        yield begin(keeper, keeper.begin_loop(), 0, b"", kept)
        for rate in (0.5, 0.25):
            if node.rank == 0:
                yield store.set_optimizer_async(optimizer.create("sgd", learning_rate=rate))
                if rate == 0.5 and node.attempt:
                    yield store.push_async("w", np.ones(1))
        if node.rank == 0 and not node.attempt:
            yield 0.5
            simulation.restart(node, 0.1)
            yield 1.0
        if node.rank == 1:
            yield store.push_async("w", np.ones(1))
        out = np.zeros(1)
        yield store.pull_async("w", out)
        seen.append(float(out[0]))

    simulation.run(script)
    assert seen == [-0.5, -0.5]  # both gradients, at the last rate


# -- a process that was stopped and wakes up ---------------------------------------------


def test_a_process_that_wakes_up_after_it_was_replaced_changes_nothing_and_is_told() -> None:
    _, expected = without_kill(sync_script)
    simulation = simulation_of(3)
    results: Results = {}
    stopped: list[Postoffice] = []

    def stop(node: Postoffice) -> None:
        stopped.append(node)
        simulation.pause(node, simulation.now + 40.0)
        simulation.replace(1, 1.0)

    ran = run_and_stop_worker_1(simulation, results, stop)
    simulation.until(lambda: stopped[0].error is not None, limit_s=200.0)
    assert ran == {0, 1}
    assert set(results.values()) == {expected}
    error = stopped[0].error
    assert isinstance(error, NodeLostError)
    assert "was declared lost" in str(error)
    assert "another process may have its place; it must not go on" in str(error)


def run_and_stop_worker_1(simulation: Simulation, results: Results, stop: Any) -> set[int]:
    """Stop worker 1 in the middle of the training, and run to the end."""

    def look() -> None:
        task = simulation._tasks[1]
        seats = simulation.scheduler.control._seating.seats  # type: ignore[attr-defined]
        seat = seats._seats.get(11)
        if seat is not None and seat.may_return and not task.over:
            stop(simulation.workers[1])
        else:
            simulation.at(simulation.now + 0.001, look)

    simulation.at(0.0, look)
    simulation.run(sync_script(results))
    simulation.finish(200.0)
    return set(results)


# -- when nobody can take the place --------------------------------------------------------


def test_the_job_ends_with_the_cause_if_no_process_comes_in_time() -> None:
    simulation = simulation_of(1)
    num_steps, _ = without_kill(sync_script)

    def kill() -> None:
        simulation.kill(simulation.workers[1])

    before_step(simulation, num_steps * 2 // 3, kill)
    with pytest.raises(NodeLostError, match=r"worker 1 \(pid .* is lost: its connection .*; no "):
        simulation.run(sync_script({}))
    assert simulation.now == pytest.approx(66.0, abs=4.0)


@pytest.mark.parametrize("after_s", [0.5, 4.9, 10.0])
def test_the_job_ends_with_the_cause_if_the_scheduler_is_lost_while_a_place_is_free(
    after_s: float,
) -> None:
    """No process takes the place of the scheduler, so none can take that of the worker."""
    simulation = simulation_of(1)
    num_steps, _ = without_kill(sync_script)

    def kill() -> None:
        simulation.kill(simulation.workers[1])
        at_s = simulation.now + after_s
        simulation.at(at_s, lambda: simulation.kill(simulation.scheduler))

    before_step(simulation, num_steps * 2 // 3, kill)
    with pytest.raises(NodeLostError, match=r"scheduler at .* no process took its place within"):
        simulation.run(sync_script({}))
    assert simulation.now == pytest.approx(66.0 + after_s, abs=4.0)


def test_a_script_that_ends_before_its_step_says_no_goodbye() -> None:
    """It would leave the others with a worker that seems to have done all its steps."""
    simulation = simulation_of(1)
    failures: list[BaseException | None] = []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        keeper = returning_of(node)
        kept = yield keeper.found
        yield store.init_async("w", np.zeros(3))
        if node.attempt:
            yield node.leave()
            failures.append(node.unheard.take())
            return
        yield begin(keeper, keeper.begin_loop(), 0, b"", kept)
        yield 0.5
        if node.rank == 1:
            simulation.restart(node, 0.1)
            yield 1.0

    simulation.run(script)
    assert "its script has ended before the step of that worker" in str(failures[0])
    assert not simulation.workers[1].membership.has_said_goodbye


def test_a_step_that_kills_three_processes_ends_the_job() -> None:
    simulation = simulation_of(1)
    deaths: list[int] = []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        keeper = returning_of(node)
        kept = yield keeper.found
        yield store.init_async("w", np.zeros(3))
        yield begin(keeper, keeper.begin_loop(), 0, b"", kept)
        yield 0.5
        if node.rank == 1:
            deaths.append(node.attempt)
            simulation.restart(node, 0.1)
            yield 1.0
        yield store.push_async("w", np.ones(3))

    with pytest.raises(NodeLostError, match="it was lost 3 times in the same step"):
        simulation.run(script)
    assert deaths == [0, 1, 2]


def test_a_push_before_the_step_is_an_error_in_the_process_that_comes_back() -> None:
    simulation = simulation_of(1)
    errors: list[str] = []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_async", "dist_async", node=node)
        keeper = returning_of(node)
        kept = yield keeper.found
        yield store.set_optimizer_async(optimizer.create("count"))
        yield store.init_async("w", np.zeros(3))
        try:
            yield store.push_async("w", np.ones(3))
        except Exception as error:
            errors.append(str(error))
            return
        yield begin(keeper, keeper.begin_loop(), 0, b"", kept)
        yield 0.5
        if node.rank == 1:
            simulation.restart(node, 0.1)
            yield 1.0

    simulation.run(script)
    (text,) = errors
    assert "has not come to its step yet, so it must not push" in text


def test_a_barrier_that_is_entered_before_the_step_is_kept_is_entered_again() -> None:
    """The step is kept late, as the pushes before it must arrive first."""
    simulation, kept_barriers = simulation_of(1), []

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_async", "dist_async", node=node)
        keeper = returning_of(node)
        kept = yield keeper.found
        yield store.set_optimizer_async(optimizer.create("count"))
        yield store.init_async("w", np.zeros(3))
        if kept is None:
            loop = keeper.begin_loop()
            yield begin(keeper, loop, 0, b"", None)
            if node.rank == 1:
                (server,) = simulation.servers
                simulation.cut_one_way(node, server, simulation.now + 2.0)
            pushed = store.push_async("w", np.ones(3))
            begun = begin(keeper, loop, 1, b"", None)
            yield node.barrier(WORKER_GROUP)
            assert node.rank == 0 or not begun.done()
            yield gather([begun, pushed])
            if node.rank == 1:
                simulation.restart(node, 0.1)
                yield 1.0
        else:
            kept_barriers.append(kept.barriers)
            begin(keeper, keeper.begin_loop(), 1, b"", kept)
            yield node.barrier(WORKER_GROUP)

    simulation.run(script)
    assert kept_barriers == [{}]


def test_a_process_too_many_is_told_after_a_while_that_no_place_is_free() -> None:
    simulation = simulation_of(1)
    simulation.until(lambda: all(node.ready.done() for node in simulation.workers))
    other = simulation._make(Role.WORKER, 1)
    simulation.until(other.ready.done, limit_s=100.0)
    error = other.ready.error()
    assert isinstance(error, ConfigError)
    assert "no seat became free within 60 s (PS_REJOIN_TIMEOUT)" in str(error)
    assert "for the end of worker 1 (pid" in str(error)
    assert all(node.error is None for node in simulation.workers)
