"""Servers with standbys: what both have, scripts that use all they can do, and kills."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from functools import cache
from typing import Any

import numpy as np

from kvstore import RowSparseArray, optimizer
from kvstore.compression import Compression
from kvstore.optimizer.schedule import CosineScheduler
from kvstore.protocol.requests import StoreCall, pack, unpack
from kvstore.server import install
from kvstore.server.app import REPEATED
from kvstore.stores.dist.compression import DistCompression
from kvstore.stores.dist.sparse_transfer import RowPlacement, placement_of
from kvstore.stores.dist.store import create_dist
from pslite import WORKER_GROUP, Incoming, Postoffice
from pslite.future import gather
from pslite.testing.simulator import Script, Simulation
from tests.faults.invariants import assert_same_contents, stores_of
from tests.faults.returning import (
    LOST_AFTER_S,
    MakeScript,
    Results,
    before_step,
    simulation_of,
)

Steps = Generator[Any, Any, None]
MakeSimulation = Callable[[], Simulation]


# -- a server and its standby --------------------------------------------------------------


def pairs(simulation: Simulation) -> list[tuple[Postoffice, Postoffice]]:
    """The servers that have standbys, each with its standby."""
    return [(simulation.servers[rank], other) for rank, other in simulation.standbys.items()]


def is_quiet(server: Postoffice) -> bool:
    """Whether nothing is on its way between a server and its standby."""
    primary = server.traffic.primary
    return primary is not None and not (primary._journal._frames or primary._journal._waiting)


def assert_nothing_is_left(server: Postoffice, standby: Postoffice) -> None:
    """No record, no buffer and no work that waits is left on either side."""
    primary, replay_side = server.traffic.primary, standby.traffic.standby
    assert primary is not None and replay_side is not None
    journal, replay = primary._journal, replay_side._replay
    assert not (journal._waiting or journal._frames) and journal._undone_bytes == 0
    assert replay.stored == replay.done == journal.last
    assert not (replay._early or replay._done_early)
    for turns in (primary._turns, replay_side._turns):
        assert not (turns._waiting or turns._num_running or turns._when_idle)
    assert server.links.unaccepted().get(standby.van.uid, (0, 0))[1] == 0
    assert not stores_of(standby)._plane.num_waiting


def run_to_rest(simulation: Simulation, script: Script) -> None:
    """Run; check what servers and their standbys have in the end; let the cluster end."""
    simulation.run(script)
    mine = pairs(simulation)
    simulation.until(lambda: all(is_quiet(server) for server, _ in mine), simulation.now + 10.0)
    for server, standby in mine:
        assert_same_contents(server, standby)
        assert_nothing_is_left(server, standby)
    simulation.finish()


# -- kills -------------------------------------------------------------------------------


def one_server() -> Simulation:
    """The job of ``returning.without_kill``, with a standby."""
    return simulation_of(1, standbys=1, lost_after_s=LOST_AFTER_S)


@cache
def num_steps(make: MakeScript, simulation: MakeSimulation = one_server) -> int:
    """How many steps the simulation takes to the end without a kill; checks it at rest."""
    cluster = simulation()
    run_to_rest(cluster, make({}))
    return cluster.steps


def killed_at(
    make: MakeScript,
    at_step: int,
    what: str,
    simulation: MakeSimulation = one_server,
    rank: int = 0,
) -> tuple[Simulation, Results]:
    """Kill a server, or its standby, before a step of the simulation."""
    cluster = simulation()
    results: Results = {}
    kill = cluster.kill_server if what == "server" else cluster.kill_standby
    before_step(cluster, at_step, lambda: kill(rank))
    cluster.run(make(results))
    cluster.finish()
    return cluster, results


# -- scripts -----------------------------------------------------------------------------


def plain_simulation(standbys: int = 1, **settings: Any) -> Simulation:
    """Two workers and a server; no worker is replaced."""
    settings.setdefault("lost_after_s", LOST_AFTER_S)
    return Simulation(3, 2, 1, prepare=install, standbys=standbys, **settings)


OPTIMIZERS: dict[str, optimizer.Optimizer | None] = {
    "sums": None,
    "sgd": optimizer.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01),
    "adam": optimizer.create("adam", learning_rate=0.05),
    "nadam": optimizer.create("nadam", learning_rate=0.05),
    "scheduled": optimizer.create(
        "sgd",
        learning_rate=0.1,
        momentum=0.5,
        lr_scheduler=CosineScheduler(4, base_lr=0.3, final_lr=0.01),
    ),
    "lamb": optimizer.create("lamb", learning_rate=0.05),
}


def compress(store: Any, node: Postoffice) -> Steps:
    """Set 2-bit compression as ``set_gradient_compression`` does, without blocking."""
    compression = Compression.of({"type": "2bit", "threshold": 0.3})
    coding = DistCompression(compression, store._exchange.entries, node.config.num_workers)
    if node.rank == 0:
        entries = list(store._exchange.entries.values())
        yield store._servers.set_compression(compression.plain(), entries, coding)
    yield node.barrier(WORKER_GROUP)
    with store._exchange.changing_coding():
        store._exchange.set_coding(coding)


def dtypes_script(results: Results, kind: str = "dist_sync", steps: int = 5) -> Script:
    """A store for each optimizer, with keys of several dtypes; one is compressed."""

    def script(node: Postoffice) -> Steps:
        yield node.ready
        stores: dict[str, Any] = {}
        for name, chosen in OPTIMIZERS.items():
            if chosen is None and kind == "dist_async":
                continue
            keys = {"f4": 40, "f8": 3} | ({"i4": 4} if chosen is None else {})
            # Apart, as contributions in 16 bits reach a standby one by one, and others as a sum.
            for title, together in {name: keys, f"{name} in 16 bits": {"f2": 5}}.items():
                store = stores[title] = create_dist(kind, kind, node=node)
                if chosen is not None:
                    yield store.set_optimizer_async(chosen)
                values = [np.ones(n, dtype) for dtype, n in together.items()]
                yield store.init_async(list(together), values)
        compressed = stores["2bit"] = create_dist(kind, kind, node=node)
        yield compressed.set_optimizer_async(OPTIMIZERS["sgd"])
        yield compressed.init_async(["f4"], [np.ones(40, "f4")])
        yield from compress(compressed, node)
        yield node.barrier(WORKER_GROUP)
        outs = {
            name: [np.zeros(*store._table.spec(key)) for key in list(store.keys())]
            for name, store in stores.items()
        }
        for step in range(steps):
            for name, store in stores.items():
                if kind == "dist_sync":
                    yield store.pull_async(store.keys(), outs[name])
            pushed = []
            for name, store in stores.items():
                if kind == "dist_sync":
                    seen = [out.astype("f8") * 77 + step + node.rank for out in outs[name]]
                    grads = [np.sin(each) * (9 if name.startswith("sums") else 1) for each in seen]
                else:  # in whole numbers, so that the order does not matter
                    grads = [np.ones(out.shape) for out in outs[name]]
                values = [
                    grad.astype(out.dtype) for grad, out in zip(grads, outs[name], strict=True)
                ]
                pushed.append(store.push_async(store.keys(), values))
            yield gather(pushed)
        yield node.barrier(WORKER_GROUP)
        for name, store in stores.items():
            yield store.pull_async(store.keys(), outs[name])
        found = [out.tobytes() for name in outs for out in outs[name]]
        results[node.rank] = b"".join(found)

    return script


def calls_script(results: Results) -> Script:
    """Calls that change what a server has, with rounds before and after them."""

    def script(node: Postoffice) -> Steps:
        yield node.ready
        store: Any = create_dist("dist_sync", "dist_sync", node=node)
        yield store.set_optimizer_async(OPTIMIZERS["adam"])
        shape = (6, 3)
        rows = RowSparseArray(np.arange(0, 6, 2), np.ones((3, 3), np.float32), shape)
        yield store.init_async(["w", "x", "rows"], [np.ones(50, "f4"), np.ones(4, "f8"), rows])
        for turn in range(2):
            yield from push_all(store, node, turn)
            if node.rank == 0:
                yield from save_and_load(store)
            yield node.barrier(WORKER_GROUP)
            yield store.set_optimizer_async(OPTIMIZERS["sgd" if turn else "nadam"])
            yield store.init_async(f"new {turn}", np.full(30, turn, "f4"))
            yield from push_all(store, node, turn + 5)
            yield node.barrier(WORKER_GROUP)
            entry = store._exchange.entries["x"]
            if turn and node.rank == 0:
                yield store._servers.delete([entry])
            yield node.barrier(WORKER_GROUP)
            if turn:
                store._table.remove(["x"])
                store._exchange.remove(["x"])
        yield from push_all(store, node, 9)
        outs = [np.zeros(*store._table.spec(key)) for key in list(store.keys())]
        yield store.pull_async(store.keys(), outs)
        results[node.rank] = b"".join(out.tobytes() for out in outs)

    return script


def push_all(store: Any, node: Postoffice, turn: int) -> Steps:
    """Push a gradient to each key that depends on its present value."""
    outs = [np.zeros(*store._table.spec(key)) for key in list(store.keys())]
    yield store.pull_async(store.keys(), outs)
    grads = [np.sin(out * 77 + turn + node.rank).astype(out.dtype) for out in outs]
    pushed = []
    for key, grad in zip(store.keys(), grads, strict=True):
        ids = np.array([turn % 6])
        value = RowSparseArray(ids, grad[ids], grad.shape) if key == "rows" else grad
        pushed.append(store.push_async(key, value))
    yield gather(pushed)


def save_and_load(store: Any) -> Steps:
    """Read values and states, as a checkpoint does; write them back, turned round."""
    servers, entries = store._servers, store._exchange.entries
    for key in ("w", "x"):
        entry = entries.get(key)
        if entry is None:
            continue
        for server, part in zip(entry.servers, entry.parts, strict=True):
            node = servers._servers[server]
            reply = yield servers._ask_server(node, StoreCall.READ, pack([part]), ())
            (counts,) = unpack(reply.body, list)
            dtype = entry.spec.dtype
            frames = [np.frombuffer(frame, dtype)[::-1].copy().data for frame in reply.frames]
            body = pack([part], [count + 3 for count in counts], True)
            yield servers._ask_server(node, StoreCall.WRITE, body, frames)
    yield from save_and_load_rows(store)


def save_and_load_rows(store: Any) -> Steps:
    """The same with rows: each is written to the next place."""
    pages = store._servers.pages(rows_of(store))
    held = yield pages.ask_each(StoreCall.HELD_ROWS, [], 100)
    columns = [np.frombuffer(reply.frames[0], "<i8") for reply in held]
    frames = [[column.data] for column in columns]
    replies = yield pages.ask_each(StoreCall.READ_ROWS, True, frames=frames)
    yield pages.begin(True)
    for index, (column, reply) in enumerate(zip(columns, replies, strict=True)):
        arrays = [np.frombuffer(frame, "f4").reshape(len(column), 3) for frame in reply.frames[1:]]
        turned = [np.ascontiguousarray(array[::-1]).data for array in arrays]
        yield pages.ask(index, StoreCall.WRITE_ROWS, frames=[column.data, *turned])
    yield pages.end(7)


def rows_of(store: Any) -> RowPlacement:
    """Where the rows of the row-sparse key are."""
    return placement_of(store._exchange.entries["rows"])


def count_calls(node: Postoffice) -> Counter[tuple[int, int, int]]:
    """Count how often a server carries out each request that changes it."""
    stores = stores_of(node)
    counts: Counter[tuple[int, int, int]] = Counter()

    def counted(call: Callable[[Incoming], None]) -> Callable[[Incoming], None]:
        def carry_out(incoming: Incoming) -> None:
            request = incoming.request
            counts[incoming.sender, request.head, request.request_id] += 1
            call(incoming)

        return carry_out

    for head in REPEATED:
        stores._calls[head] = counted(stores._calls[head])
    return counts
