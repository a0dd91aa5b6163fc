"""A run of a whole cluster under faults, whose every pull is checked against what it must hold.

Each key is a vector in which slot w counts what worker w has pushed, so any pulled value is a
vector clock: it shows exactly which pushes it contains. Nothing may be lost, nothing twice,
own pushes are always seen, a reader never sees time run backwards, and in synchronous mode all
slots are equal. One integer decides everything, the mode and the faults included.

All contributions lie in the store's own memory (``KVStore.zeros``), and are overwritten as soon
as the store allows it. In half of the runs keys are so large that most frames travel as
descriptors of shared memory: who reads memory that is in other use by then sees what nobody has
pushed.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from typing import Any

import numpy as np

from kvstore import optimizer
from kvstore.mxnet.nd.ndarray import NDArray
from kvstore.server import install
from kvstore.stores.dist.store import DistKVStore, create_dist
from pslite import WORKER_GROUP, Future, Postoffice
from pslite.future import gather
from pslite.testing.simulator import Faults, Simulation

KEYS = {"small": 1, "other": 1, "large": 5}
"""Key -> how many times the slots are repeated; ``large`` spans several parts and servers."""

SHARED_KEYS = {"small": 1, "other": 40, "large": 200}
SHARED_SETTINGS = {"chunk_bytes": 2048, "credit_bytes": 16_384}
"""The same with more than ``pslite.memory.sharing.MIN_SHARED_BYTES`` in most frames."""


@optimizer.register
@dataclasses.dataclass(frozen=True)
class Count(optimizer.Optimizer):
    """weight += gradient."""

    def update(self, weight: Any, grad: Any, state: Any, count: int, scratch: Any) -> None:
        np.add(weight, grad, out=weight)


class Witness:
    """What every worker has pushed and seen, and the checks of what it sees."""

    def __init__(self, num_workers: int, mode: str, keys: Mapping[str, int]) -> None:
        self.num_workers = num_workers
        self.mode = mode
        self.keys = keys
        self.issued: Counter[tuple[str, int]] = Counter()
        self.asked: Counter[tuple[str, int]] = Counter()
        #: (key, rank) -> number of the pull -> what it got.
        self.seen: dict[tuple[str, int], dict[int, np.ndarray]] = {}

    def contribution(self, store: DistKVStore, key: str, rank: int) -> np.ndarray:
        """The next push of a worker: counts up, or sets the count where sums replace."""
        self.issued[key, rank] += 1
        value = store.zeros((self.keys[key], self.num_workers), np.float64)
        value[:, rank] = self.issued[key, rank] if self.mode == "sync_assign" else 1
        return value

    def ask(self, key: str, rank: int) -> tuple[int, int]:
        """A pull begins: its number, and how often its worker has pushed."""
        self.asked[key, rank] += 1
        return self.asked[key, rank], self.issued[key, rank]

    def check(self, key: str, rank: int, value: np.ndarray, number: int, own: int) -> None:
        """The ``number``-th pull of ``rank``, after ``own`` pushes of its own, got ``value``."""
        who = f"worker {rank} pulled {key} after {own} pushes: {value.tolist()}"
        issued = np.array([self.issued[key, w] for w in range(self.num_workers)])
        assert (value == np.floor(value)).all() and (value >= 0).all(), f"torn: {who}"
        assert (value <= issued).all(), f"more than was pushed {issued}: {who}"
        assert (value[:, rank] == own).all(), f"not exactly its own pushes: {who}"
        seen = self.seen.setdefault((key, rank), {})
        for other, before in seen.items():
            in_order = (value >= before) if number > other else (value <= before)
            assert in_order.all(), f"pull {other} got {before.tolist()}, pull {number} of {who}"
        if self.mode != "async":
            assert (value == value[0, 0]).all(), f"a round without somebody: {who}"
        seen[number] = value.copy()

    def last(self, key: str, rank: int) -> np.ndarray:
        """What the last pull got."""
        return self.seen[key, rank][self.asked[key, rank]]


def faults_of(seed: int) -> Faults:
    """What goes wrong in this run; every kind in most runs."""
    chance = random.Random(seed * 7919 + 1)
    return Faults(
        drop=chance.choice([0.0, 0.02, 0.1]),
        duplicate=chance.choice([0.0, 0.05, 0.2]),
        delay=chance.choice([0.0, 0.1, 0.3]),
        delay_s=(0.001, chance.choice([0.05, 1.0])),
        reorder=chance.choice([0.0, 0.1, 0.3]),
        cuts=chance.choice([0, 1, 3]),
        cut_within_s=3.0,
    )


def script_of(seed: int, witness: Witness, rounds: int) -> Any:
    """What each worker does: every key ``rounds`` times, mixed calls in an order of its own."""

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        rank = node.rank
        chance = random.Random(seed * 1009 + rank)
        name = "dist_async" if witness.mode == "async" else "dist_sync"
        store = create_dist(name, name, node=node)
        zeros = [np.zeros((n, witness.num_workers)) for n in witness.keys.values()]
        names = list(witness.keys)
        if witness.mode != "sync_assign":
            yield store.set_optimizer_async(optimizer.create("count"))
        if chance.random() < 0.5:
            yield store.init_async(names, zeros)
        else:
            for index in chance.sample(range(len(names)), len(names)):
                yield store.init_async(names[index], zeros[index])
        futures: list[Future[None]] = []
        for _ in range(rounds):
            yield from one_round(store, witness, chance, rank, futures)
        yield gather(futures)
        yield node.barrier(WORKER_GROUP)
        for key in names:
            yield pull(store, witness, [key], rank)

    return script


def one_round(
    store: DistKVStore,
    witness: Witness,
    chance: random.Random,
    rank: int,
    futures: list[Future[None]],
) -> Generator[Any, Any, None]:
    """Push each key once, alone or with others, and look at some."""
    left = chance.sample(list(witness.keys), len(witness.keys))
    while left:
        count = chance.randint(1, len(left))
        keys, left = left[:count], left[count:]
        if chance.random() < 0.3:
            yield chance.random() * 0.2
        values = [witness.contribution(store, key, rank) for key in keys]
        if chance.random() < 0.3:
            futures.append(pushpull(store, witness, keys, rank, values))
        else:
            futures.append(push(store, chance, keys, values))
            if chance.random() < 0.5:
                store.node.traffic.send_joined()  # as anything does that somebody waits for
            if chance.random() < 0.7:
                futures.append(pull(store, witness, keys, rank))
        # To wait for one key before the next is pushed would be a deadlock of the workers'
        # own making in synchronous mode, where each has another order.
        if witness.mode == "async" and chance.random() < 0.5:
            yield futures[-1]
    if chance.random() < 0.8:
        yield gather(futures)


def push(
    store: DistKVStore, chance: random.Random, keys: list[str], values: list[np.ndarray]
) -> Future[None]:
    """A push of NDArrays, which are the caller's at once, or of arrays that are when it is done."""

    def overwrite(_: None) -> None:
        for value in values:
            value.fill(np.nan)

    if chance.random() < 0.5:
        return store.push_async(keys, values).map(overwrite)
    pushed = store.push_async(keys, [NDArray(value) for value in values])
    overwrite(None)
    return pushed


def pull(store: DistKVStore, witness: Witness, keys: list[str], rank: int) -> Future[None]:
    """A pull that is checked when it is done."""
    outs, check = expected(witness, keys, rank)
    return store.pull_async(keys, outs).map(check)


def pushpull(
    store: DistKVStore, witness: Witness, keys: list[str], rank: int, values: list[np.ndarray]
) -> Future[None]:
    """The same of one that pushes as well; the values are the store's until it is done."""
    outs, check = expected(witness, keys, rank)

    def check_and_overwrite(_: None) -> None:
        check(None)
        for value in values:
            value.fill(np.nan)

    return store.pushpull_async(keys, values, outs).map(check_and_overwrite)


def expected(
    witness: Witness, keys: list[str], rank: int
) -> tuple[list[np.ndarray], Callable[[None], None]]:
    """Where values are to arrive, and the check of what has come."""
    asked = [witness.ask(key, rank) for key in keys]
    outs = [np.full((witness.keys[key], witness.num_workers), np.nan) for key in keys]

    def check(_: None) -> None:
        for key, out, (number, own) in zip(keys, outs, asked, strict=True):
            witness.check(key, rank, out, number, own)

    return outs, check


def run(
    seed: int, num_workers: int = 4, num_servers: int = 2, rounds: int = 4
) -> tuple[Simulation, Witness]:
    """One whole run; raises what went wrong."""
    mode = ("sync_assign", "sync_count", "async")[seed % 3]
    is_shared = seed // 3 % 2 == 1
    witness = Witness(num_workers, mode, SHARED_KEYS if is_shared else KEYS)
    settings = SHARED_SETTINGS if is_shared else {}
    simulation = Simulation(
        seed, num_workers, num_servers, faults_of(seed), prepare=install, **settings
    )
    simulation.run(script_of(seed, witness, rounds))
    simulation.finish()
    for key in witness.keys:
        for rank in range(num_workers):
            final = witness.last(key, rank)
            assert (final == rounds).all(), f"lost: {key} ends at {final.tolist()}"
    return simulation, witness


def main() -> None:
    """``python -m tests.faults.witness FIRST COUNT``: many seeds; prints the one that fails."""
    import sys
    import time

    first, count = int(sys.argv[1]), int(sys.argv[2])
    began = time.perf_counter()
    for seed in range(first, first + count):
        try:
            run(seed)
        except BaseException:
            print(f"seed {seed}")
            raise
    print(f"{count} seeds in {time.perf_counter() - began:.1f} s")


if __name__ == "__main__":
    main()
