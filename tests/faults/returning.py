"""A small training whose processes are killed and replaced, beside one without a kill.

Each gradient depends chaotically on the weights, the step, the rank and the worker's own state. So
one value of another round, one contribution that is missing or counts twice, or one state that was
not restored changes all later bits.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Generator
from functools import cache, partial
from typing import Any

import numpy as np

from kvstore import RowSparseArray, optimizer
from kvstore.server import install
from kvstore.stores.arguments_sparse import check_wanted
from kvstore.stores.dist.returning import Returning, returning_of
from kvstore.stores.dist.store import create_dist
from pslite import WORKER_GROUP, Postoffice
from pslite.future import gather
from pslite.ids import Role, node_id
from pslite.protocol.succession import Standing
from pslite.testing.simulator import Faults, Script, Simulation
from tests.faults.witness import faults_of

STEPS = 5
KEYS = {"large": 60, "small": 3, "other": 5}
"""Key -> its number of values; ``large`` spans several parts and servers."""

Results = dict[int, bytes]
"""Rank -> the bytes of the weights that it sees at the end."""


def rows_script(results: Results, kind: str = "lazy", steps: int = STEPS) -> Script:
    """The same with a row-sparse key, and with rows of a dense key.

    With "lazy" a round changes the pushed rows alone; with "all" all rows; with "sum" it replaces
    them, as there is no optimizer.
    """

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        keeper = returning_of(node)
        kept = yield keeper.found
        if kind != "sum":
            chosen = optimizer.create("adam", learning_rate=0.1, lazy_update=kind == "lazy")
            yield store.set_optimizer_async(chosen)
        names, shape = ["rows", "dense"], (12, 3)
        first = RowSparseArray(np.arange(0, 12, 3), np.ones((4, 3), np.float32), shape)
        yield store.init_async(names, [first, np.ones(shape, np.float32)])
        loop = keeper.begin_loop()
        for step in range(kept.step if kept else 0, steps + 1):
            begun = begin(keeper, loop, step, b"", kept)
            if step == steps:
                break
            held, dense = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
            ids = np.unique((np.arange(3) * 5 + step + 2 * node.rank) % 12)
            yield store.pull_async(names, [held, dense])
            seen = [held[ids], dense[ids]]
            for name in names:
                wanted, _ = check_wanted(store._table.spec, name, None, ids)
                pulled = store._rows.pull_rows(wanted, 0)
                yield gather([operation.future for operation in pulled.operations])
                pulled.finish()
                seen.append(pulled.results[0].values)
            gradient = np.sin(sum(each * 77 for each in seen) + step + node.rank)
            pushed = RowSparseArray(ids, gradient.astype(np.float32), shape)
            # A process may be lost between the rounds of the two keys, whichever comes first.
            for name in names if step % 2 else names[::-1]:
                yield store.push_async(name, pushed)
            yield begun
        held, dense = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
        yield store.pull_async(names, [held, dense])
        results[node.rank] = held.tobytes() + dense.tobytes()

    return script


def sync_script(results: Results, steps: int = STEPS) -> Script:
    """What each worker does, as with ``kv.steps``: Adam, a barrier and a new rate on the way."""

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        keeper = returning_of(node)
        kept = yield keeper.found
        yield store.set_optimizer_async(optimizer.create("adam", learning_rate=0.1))
        names = list(KEYS)
        yield store.init_async(names, [np.ones(n, np.float32) for n in KEYS.values()])
        yield node.barrier(WORKER_GROUP)
        own = np.float32(node.rank if kept is None else float(kept.state.decode()))
        weights = [np.zeros(n, np.float32) for n in KEYS.values()]
        loop = keeper.begin_loop()
        for step in range(kept.step if kept else 0, steps + 1):
            begun = begin(keeper, loop, step, repr(float(own)).encode(), kept)
            if step == steps:
                break
            yield store.pull_async(names, weights)
            grads = [np.sin(w * 77 + own + step).astype(np.float32) for w in weights]
            own = np.float32(np.sin(own * 13 + weights[1][0]))
            if step == 2:
                # Only worker 0 sets a rate, so the others set none.
                if node.rank == 0:
                    changed = optimizer.create("adam", learning_rate=0.05)
                    yield store.set_optimizer_async(changed)
                yield node.barrier(WORKER_GROUP)
            pushed = [store.push_async(names[0], grads[0])]
            pushed.append(store.pushpull_async(names[1:], grads[1:], weights[1:]))
            yield gather(pushed)
            yield begun
        yield store.pull_async(names, weights)
        results[node.rank] = b"".join(weight.tobytes() for weight in weights)

    return script


def begin(keeper: Returning, loop: int, step: int, state: bytes, kept: Any) -> Any:
    """Begin a step as ``stores/steps.py`` does; return the future to wait for."""
    if kept is not None and step == kept.step:
        keeper.repeat(kept)
        return 0.0
    keeper.has_repeated()
    return keeper.keep(loop, step, state)


def async_script(results: Results, steps: int = STEPS) -> Script:
    """Each step of each worker adds one to all values, without waiting for others."""

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_async", "dist_async", node=node)
        keeper = returning_of(node)
        kept = yield keeper.found
        yield store.set_optimizer_async(optimizer.create("count"))
        names = list(KEYS)
        yield store.init_async(names, [np.zeros(n) for n in KEYS.values()])
        loop = keeper.begin_loop()
        for step in range(kept.step if kept else 0, steps + 1):
            begun = begin(keeper, loop, step, b"", kept)
            if step == steps:
                break
            yield gather([store.push_async(name, np.ones(n)) for name, n in KEYS.items()])
            yield begun
        yield node.barrier(WORKER_GROUP)
        outs = [np.zeros(n) for n in KEYS.values()]
        yield store.pull_async(names, outs)
        results[node.rank] = b"".join(out.tobytes() for out in outs)

    return script


MakeScript = Callable[[Results], Script]
ROWS = {kind: partial(rows_script, kind=kind) for kind in ("lazy", "all", "sum")}
MAKES: list[MakeScript] = [sync_script, async_script, sync_script, ROWS["lazy"]]


def simulation_of(
    seed: int,
    num_workers: int = 2,
    num_servers: int = 1,
    faults: Faults | None = None,
    *,
    standbys: int = 0,
) -> Simulation:
    """A cluster that waits for processes in place of lost workers."""
    return Simulation(
        seed,
        num_workers,
        num_servers,
        faults,
        prepare=install,
        rejoin_timeout_s=60.0,
        standbys=standbys,
    )


@cache
def without_kill(make: MakeScript, num_workers: int = 2, num_servers: int = 1) -> tuple[int, bytes]:
    """How many steps the simulation takes, and the weights at the end, equal on all workers."""
    simulation = simulation_of(1, num_workers, num_servers)
    results: Results = {}
    simulation.run(make(results))
    simulation.finish()
    assert len(set(results.values())) == 1
    return simulation.steps, results[0]


def before_step(simulation: Simulation, number: int, act: Callable[[], None]) -> None:
    """Call ``act`` before the ``number``-th step of a simulation."""
    one_step, count = simulation._step, 0

    def step() -> None:
        nonlocal count
        count += 1
        if count == number:
            act()
        one_step()

    simulation._step = step  # type: ignore[method-assign]


def killed_at(make: MakeScript, at_step: int, rank: int, back_s: float = 0.3) -> Results:
    """Kill a worker before a step of the simulation; another process comes after ``back_s``."""
    simulation = simulation_of(1)
    results: Results = {}

    def kill() -> None:
        if not simulation._tasks[rank].over:
            simulation.restart(simulation.workers[rank], back_s)

    before_step(simulation, at_step, kill)
    simulation.run(make(results))
    simulation.finish()
    return results


def run(seed: int) -> tuple[Simulation, Counter[str]]:
    """A run under network faults in which processes are killed; return how many of each role.

    Servers have standbys in half of the seeds. Only one process is lost at a time. Raises if a
    worker ends with other weights than in the run without faults.
    """
    chance = random.Random(seed)
    make = MAKES[seed % len(MAKES)]
    num_workers, num_servers = chance.choice([(2, 1), (2, 2), (3, 2)])
    if make in ROWS.values():  # its keys have a part for each server
        num_workers = 2
    _, expected = without_kill(make, num_workers, num_servers)
    simulation = simulation_of(
        seed, num_workers, num_servers, faults_of(seed), standbys=chance.randint(0, 1)
    )
    results: Results = {}
    simulation.until(lambda: all(node.ready.done() for node in simulation.workers))
    killed: Counter[str] = Counter()

    def has_living_standby(rank: int) -> bool:
        seats = simulation.scheduler.control._seating.seats  # type: ignore[attr-defined]
        seat = seats._seats[node_id(Role.SERVER, rank)]
        both = (seat.node, seat.standby)
        return all(each is not None and each.uid not in simulation._stopped for each in both)

    def kill(victim: tuple[str, int]) -> None:
        what, rank = victim
        seats = simulation.scheduler.control._seating.seats  # type: ignore[attr-defined]
        if any(seat.standing is not Standing.TAKEN for seat in seats._seats.values()):
            return
        node = simulation.workers[rank] if what == "worker" else simulation.servers[rank]
        if simulation._stopped.get(node.van.uid) is not None:
            return
        if what == "worker":
            seat = seats._seats.get(node.info.node_id if node.info else 0)
            if seat is None or not seat.may_return or simulation._tasks[rank].over:
                return
            simulation.restart(node, chance.uniform(0.0, 3.0))
        elif rank not in simulation.standbys or not has_living_standby(rank):
            return
        else:
            if what == "server":
                simulation.kill_server(rank)
            else:
                simulation.kill_standby(rank)
            if chance.random() < 0.7:
                simulation.start_standby(rank, chance.uniform(0.0, 3.0))
        killed[what] += 1

    victims = [("worker", rank) for rank in range(num_workers)]
    victims += [(what, rank) for what in ("server", "standby") for rank in simulation.standbys]
    for _ in range(chance.randint(1, 4)):
        when = simulation.now + chance.uniform(0.0, 12.0)
        simulation.at(when, partial(kill, chance.choice(victims)))
    simulation.run(make(results), limit_s=600.0)
    simulation.finish(600.0)
    assert sorted(results) == list(range(num_workers))
    assert set(results.values()) == {expected}, f"seed {seed}: other weights"
    return simulation, killed


def main() -> None:
    """``python -m tests.faults.returning FIRST COUNT``: many seeds; prints the one that fails."""
    import sys
    import time

    first, count = int(sys.argv[1]), int(sys.argv[2])
    began, killed = time.perf_counter(), Counter[str]()
    for seed in range(first, first + count):
        try:
            killed += run(seed)[1]
        except BaseException:
            print(f"seed {seed}")
            raise
    kills = ", ".join(f"{count} {what}s" for what, count in sorted(killed.items()))
    print(f"{count} seeds, killed {kills} in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
