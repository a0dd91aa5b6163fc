"""A small training whose processes are killed and replaced, beside one without a kill.

Each gradient depends chaotically on the weights, the step, the rank and the worker's own state. So
one value of another round, one contribution that is missing or counts twice, or one state that was
not restored changes all later bits.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from kvstore import RowSparseArray, optimizer
from kvstore.server import install
from kvstore.stores.arguments_sparse import check_wanted
from kvstore.stores.dist.kept_steps import Returning, returning_of
from kvstore.stores.dist.store import create_dist
from pslite import WORKER_GROUP, Postoffice, Role
from pslite.errors import NodeLostError
from pslite.future import gather
from pslite.testing.simulator import Faults, HangError, Script, Simulation
from tests.faults.invariants import MOST_S, Invariants, assert_at_rest
from tests.faults.mishaps import Mishaps
from tests.faults.witness import faults_of

STEPS = 5
KEYS = {"large": 60, "small": 3, "other": 5}
"""Key -> its number of values; ``large`` spans several parts and servers."""

NETWORK_S = 25.0
"""How long the network loses and delays messages in ``run``."""

LOST_AFTER_S = 1.0
"""PS_LOST_AFTER of jobs in which only kills go wrong: the others do nothing else so long."""

Results = dict[int, bytes]
"""Rank -> the bytes of the weights that it sees at the end."""


def rows_script(results: Results, kind: str = "lazy", steps: int = STEPS) -> Script:
    """The same with a row-sparse key, and with rows of a dense key.

    With "lazy" a round changes the pushed rows alone; with "all" all rows; with "sum" it replaces
    them, as there is no optimizer.
    """
    seen_in: dict[int, bytes] = {}

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
            agree(seen_in, step, [held, dense])
            seen = [held[ids], dense[ids]]
            for name in names:
                wanted, _ = check_wanted(store._table.spec, name, None, ids)
                pulled = store._rows.pull_rows(wanted, 0)
                yield gather(pulled.operations)
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
    seen_in: dict[int, bytes] = {}

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
            agree(seen_in, step, weights)
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


def agree(seen_in: dict[int, bytes], step: int, weights: Sequence[Any]) -> None:
    """Every process of every worker sees the same weights in a step (2, 3)."""
    seen = b"".join(weight.tobytes() for weight in weights)
    assert seen_in.setdefault(step, seen) == seen, f"(2) other weights in step {step} than before"


def begin(keeper: Returning, loop: int, step: int, state: bytes, kept: Any) -> Any:
    """Begin a step as ``stores/steps.py`` does; return the future to wait for."""
    if kept is not None and step == kept.step:
        keeper.repeat(kept)
        return 0.0
    keeper.has_repeated()
    return keeper.keep(loop, step, state)


class Slots:
    """What workers push of vectors whose element i counts worker i modulo their number."""

    def __init__(self) -> None:
        #: (key, rank) -> in how many steps a process of this worker has pushed it.
        self.issued: Counter[tuple[str, int]] = Counter()

    def gradient(self, key: str, step: int, node: Postoffice) -> Any:
        """The push of a worker in a step: one in its own slots."""
        self.issued[key, node.rank] = max(self.issued[key, node.rank], step + 1)
        return (np.arange(KEYS[key]) % node.config.num_workers == node.rank).astype(float)

    def check(self, key: str, seen: Any, before: Any, node: Postoffice) -> None:
        """A process sees no more than was pushed (1), and no less than before (2)."""
        num = node.config.num_workers
        issued = np.array([self.issued[key, each % num] for each in range(KEYS[key])])
        assert (seen <= issued).all(), f"(1) {key} is {seen}, and was pushed {issued} times"
        assert (seen >= before).all(), f"(2) {key} was {before} and then {seen}"


def async_script(results: Results, steps: int = STEPS) -> Script:
    """In each step each worker adds one to its slots, without waiting for others."""
    slots = Slots()

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_async", "dist_async", node=node)
        keeper = returning_of(node)
        kept = yield keeper.found
        yield store.set_optimizer_async(optimizer.create("count"))
        names = list(KEYS)
        yield store.init_async(names, [np.zeros(n) for n in KEYS.values()])
        outs = [np.zeros(n) for n in KEYS.values()]

        def pull() -> Generator[Any, Any, None]:
            before = [out.copy() for out in outs]
            yield store.pull_async(names, outs)
            for name, out, old in zip(names, outs, before, strict=True):
                slots.check(name, out, old, node)

        loop = keeper.begin_loop()
        for step in range(kept.step if kept else 0, steps + 1):
            begun = begin(keeper, loop, step, b"", kept)
            if step == steps:
                break
            yield gather([store.push_async(key, slots.gradient(key, step, node)) for key in names])
            if step % 2:
                yield from pull()
            yield begun
        yield node.barrier(WORKER_GROUP)
        yield from pull()
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
    journal: str = "",
    watch: Callable[[Postoffice], None] | None = None,
    one_machine: bool = False,
    **settings: Any,
) -> Simulation:
    """A cluster that waits for processes in place of lost workers; ``watch`` gets its nodes.

    On ``one_machine`` all see at once that a process has ended.
    """

    def prepare(node: Postoffice) -> None:
        install(node)
        if one_machine:
            peers = node.watch
            peers._has_ended = lambda uid: (  # type: ignore[method-assign]
                uid in peers._nodes and simulation.pace.is_dead(uid)
            )
        if node.role is Role.SCHEDULER and seed % 2:  # it shortens its journal early
            node.control._records._most_bytes = 300  # type: ignore[attr-defined]
        if watch is not None:
            watch(node)

    simulation = Simulation(
        seed,
        num_workers,
        num_servers,
        faults,
        prepare=prepare,
        rejoin_timeout_s=60.0,
        standbys=standbys,
        scheduler_journal=journal,
        **settings,
    )
    return simulation


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
    simulation = simulation_of(1, lost_after_s=LOST_AFTER_S)
    results: Results = {}

    def kill() -> None:
        if not simulation._tasks[rank].over:
            simulation.restart(simulation.workers[rank], back_s)

    before_step(simulation, at_step, kill)
    simulation.run(make(results))
    simulation.finish()
    return results


def run(seed: int) -> tuple[Simulation, Counter[str]]:
    """A run in which all goes wrong that a seed says; return how often each mishap came.

    Servers have standbys in half of the seeds, and in a quarter all processes are on one machine.
    All invariants of ``invariants.py`` are checked,
    and that workers end with the weights of the run without faults.
    """
    chance = random.Random(seed)
    make = MAKES[seed % len(MAKES)]
    num_workers, num_servers = chance.choice([(2, 1), (2, 2), (3, 2)])
    if make in ROWS.values():  # its keys have a part for each server
        num_workers = 2
    num_steps, expected = without_kill(make, num_workers, num_servers)
    invariants, results = Invariants(), dict[int, bytes]()
    with tempfile.TemporaryDirectory() as folder:
        simulation = simulation_of(
            seed,
            num_workers,
            num_servers,
            replace(faults_of(seed), until_s=NETWORK_S),
            standbys=chance.randint(0, 1),
            journal=f"{folder}/journal",
            watch=invariants.watch,
            one_machine=seed % 4 == 3,
        )
        invariants.simulation = simulation
        simulation.until(lambda: is_complete(simulation))
        mishaps = Mishaps(simulation, chance, num_steps)
        try:
            simulation.run(make(results), limit_s=600.0)
        except NodeLostError as error:
            if not mishaps.hopeless or mishaps.hopeless not in str(error):
                raise AssertionError(f"(7) an unclear end: {error}") from error
            simulation.until(lambda: all(task.over for task in simulation._tasks), 600.0)
            mishaps.counts["the end of the job"] += 1
        took_s = simulation.now - max(mishaps.over_at, NETWORK_S)
        assert took_s <= MOST_S, f"(7) it took {took_s:.1f} s after the last fault"
        if not mishaps.hopeless:  # else scripts may still have come to their ends
            invariants.check_owed()
            assert_at_rest(simulation)
            assert sorted(results) == list(range(num_workers))
            assert set(results.values()) == {expected}, "(3) other weights"
            finish(simulation, mishaps.over_at)
    return simulation, mishaps.counts


def is_complete(simulation: Simulation) -> bool:
    """Whether all members have joined, and all standbys know their servers."""
    members = [*simulation.servers, *simulation.workers]
    sides = [node.traffic.standby for node in simulation.standbys.values()]
    are_paired = all(side is not None and side.primary is not None for side in sides)
    return are_paired and all(node.ready.done() for node in members)


def finish(simulation: Simulation, over_at: float) -> None:
    """Let the cluster end; every process ends, also those that were stopped and wake up."""
    simulation.finish()
    for node in (simulation.scheduler, *simulation.servers, *simulation.workers):
        simulation.kill(node)  # the launcher waits for no other process
    others = [node for node in simulation.nodes.values() if not simulation.is_dead(node)]

    def is_over(node: Postoffice) -> bool:
        return node.finished.done() or node.error is not None

    # A process that has lost the scheduler waits for the next one; one to which the scheduler has
    # not said a word waits for the start of a job.
    config = simulation.scheduler.config
    limit_s = max(simulation.now, over_at) + config.rendezvous_timeout_s + config.rejoin_timeout_s
    try:
        simulation.until(lambda: all(map(is_over, others)), limit_s)
    except HangError as error:
        names = [node.van.uid for node in others if not is_over(node)]
        raise AssertionError(f"(7) these processes do not end: {names}") from error


def main() -> None:
    """Run many seeds, and print the one that fails.

    ``python -m tests.faults.returning FIRST COUNT``.
    """
    import sys
    import time

    first, count = int(sys.argv[1]), int(sys.argv[2])
    began, counts = time.perf_counter(), Counter[str]()
    for seed in range(first, first + count):
        try:
            counts += run(seed)[1]
        except BaseException:
            print(f"seed {seed}")
            raise
    for kind, number in sorted(counts.items()):
        print(f"{number:6} {kind}")
    print(f"{count} seeds in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
