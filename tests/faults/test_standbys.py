"""A server is killed at any instant, and its standby takes its place: the bits stay the same."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import pslite.node.primary
from kvstore import RowSparseArray, optimizer
from kvstore.optimizer.serialize import to_plain
from kvstore.protocol.requests import STORE_APP, StoreCall, pack
from kvstore.server import install
from kvstore.sparse.payload import RowPayloadKind
from kvstore.sparse.tables.settings import settings_to_plain
from kvstore.stores.dist.store import create_dist
from kvstore.stores.dist.tables import DistTable
from pslite import Postoffice
from pslite.errors import NodeLostError
from pslite.future import gather
from pslite.ids import SCHEDULER_ID, Role, node_id
from pslite.node.links import Delivery
from pslite.protocol.replication import Buffer, in_pieces
from pslite.protocol.succession import Standing
from pslite.testing.simulator import Faults, Simulation
from pslite.wire.recovery import RequestRecord
from tests.combinations import covering
from tests.faults import returning
from tests.faults.invariants import contents, stores_of
from tests.faults.returning import (
    MakeScript,
    Results,
    async_script,
    before_step,
    begin,
    returning_of,
    simulation_of,
    sync_script,
    without_kill,
)
from tests.faults.standbys import (
    OPTIMIZERS,
    assert_nothing_is_left,
    calls_script,
    count_calls,
    dtypes_script,
    is_quiet,
    killed_at,
    num_steps,
    pairs,
    plain_simulation,
    rows_of,
    run_to_rest,
)
from tests.faults.test_table_losses import PLUS, SETTINGS
from tests.faults.witness import faults_of

Steps = Generator[Any, Any, None]
SLOW = pytest.mark.slow(reason="some instants of plain trainings are always tried")
SLOW_SEEDS = pytest.mark.slow(reason="80 of 160 seeds are always tried")
SCRIPTS: dict[str, MakeScript] = {
    "sync": sync_script,
    "async": async_script,
    "rows": returning.ROWS["lazy"],
    "rows of which all change": returning.ROWS["all"],
    "rows that are replaced": returning.ROWS["sum"],
}
STRIDES = {"server": 16, "standby": 48}


def instants(names: list[str], fast: list[str]) -> list[Any]:
    """Each script with each offset of its instants; the first ones of some are fast."""
    return [
        pytest.param(what, name, offset, id=f"{what}-{name}-{offset}", marks=marks)
        for what, stride in STRIDES.items()
        for name in names
        for offset in range(stride)
        for marks in [() if name in fast and not offset else SLOW]
    ]


# -- one kill, at any instant ------------------------------------------------------------


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_standby_has_what_its_server_has_byte_for_byte(name: str) -> None:
    assert num_steps(SCRIPTS[name]) > without_kill(SCRIPTS[name])[0]


@pytest.mark.parametrize(("what", "name", "offset"), instants(list(SCRIPTS), ["sync", "async"]))
def test_a_server_or_its_standby_may_be_killed_before_any_step_of_the_simulation(
    what: str, name: str, offset: int
) -> None:
    make = SCRIPTS[name]
    _, expected = without_kill(make)
    for at_step in range(1 + offset, num_steps(make) + 1, STRIDES[what]):
        _, results = killed_at(make, at_step, what)
        assert set(results.values()) == {expected}, f"other bits: killed at step {at_step}"


@pytest.mark.parametrize("name", ["rows", "rows that are replaced"])
def test_a_server_with_rows_may_be_killed_at_some_instants(name: str) -> None:
    make = SCRIPTS[name]
    _, expected = without_kill(make)
    for at_step in range(40, num_steps(make), 49):
        _, results = killed_at(make, at_step, "server")
        assert set(results.values()) == {expected}, f"other bits: killed at step {at_step}"


# -- every dtype, every optimizer, every call --------------------------------------------

PLAIN: dict[str, MakeScript] = {
    "dtypes": partial(dtypes_script, kind="dist_sync"),
    "dtypes of an asynchronous store": partial(dtypes_script, kind="dist_async"),
    "calls": calls_script,
}
STRIDE_OF_PLAIN = {"dtypes": 149, "dtypes of an asynchronous store": 149, "calls": 43}


@cache
def of_plain(name: str) -> tuple[int, Results]:
    """How many steps it takes with a standby; and the results without one."""
    results: Results = {}
    simulation = plain_simulation(standbys=0)
    simulation.run(PLAIN[name](results))
    simulation.finish()
    assert len(set(results.values())) == 1
    beside = plain_simulation()
    run_to_rest(beside, PLAIN[name]({}))
    return beside.steps, results


def kill_in_plain(name: str, at_step: int, what: str) -> None:
    """Kill one process; check the results, and that nothing is carried out twice."""
    num, expected = of_plain(name)
    assert at_step <= num
    simulation, results = plain_simulation(), dict[int, bytes]()
    counts = count_calls(simulation.standbys[0])
    kill = simulation.kill_server if what == "server" else simulation.kill_standby
    before_step(simulation, at_step, lambda: kill(0))
    simulation.run(PLAIN[name](results))
    simulation.finish()
    assert results == expected, f"other bits: killed at step {at_step}"
    twice = {call: count for call, count in counts.items() if count > 1}
    assert not twice, f"carried out twice: {twice}, killed at step {at_step}"
    assert all(node.error is None for node in simulation.servers)


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=SLOW)])
@pytest.mark.parametrize("name", PLAIN)
def test_no_optimizer_dtype_or_call_makes_a_difference(name: str, part: int) -> None:
    stride = STRIDE_OF_PLAIN[name]
    for at_step in range(9 + part * stride, of_plain(name)[0], 2 * stride):
        kill_in_plain(name, at_step, "server")


@pytest.mark.slow(reason="some instants of each are always tried")
@pytest.mark.parametrize("offset", range(1, 20))
@pytest.mark.parametrize("what", ["server", "standby"])
@pytest.mark.parametrize("name", PLAIN)
def test_no_optimizer_dtype_or_call_makes_a_difference_at_more_instants(
    name: str, what: str, offset: int
) -> None:
    stride = 19 if name == "calls" else 95
    for at_step in range(offset, of_plain(name)[0], stride):
        kill_in_plain(name, at_step, what)


def test_to_read_states_changes_nothing_that_the_standby_would_not_know() -> None:
    """A save between two calls of ``set_optimizer``, with no round in between."""
    found = []
    for kills in (False, True):
        simulation, results = plain_simulation(), dict[int, bytes]()
        script = partial(read_between_optimizers, simulation, results, kills)
        simulation.run(script)
        simulation.finish()
        found.append(results)
    assert found[0] == found[1]


def read_between_optimizers(
    simulation: Simulation, results: Results, kills: bool, node: Postoffice
) -> Steps:
    yield node.ready
    store: Any = create_dist("dist_sync", "dist_sync", node=node)
    shape = (4, 3)
    first = RowSparseArray(np.arange(4), np.ones(shape, np.float32), shape)
    yield store.set_optimizer_async(OPTIMIZERS["sgd"])
    yield store.init_async(["w", "rows"], [np.ones(3, "f4"), first])
    yield gather([store.push_async("w", np.ones(3, "f4")), store.push_async("rows", first)])
    yield node.barrier(4)
    yield store.set_optimizer_async(OPTIMIZERS["adam"])
    if node.rank == 0:
        entry, ids = store._exchange.entries["w"], np.arange(4).data
        (server,), pages = store._servers._servers, store._servers.pages(rows_of(store))
        yield store._servers._ask_server(server, StoreCall.READ, pack(list(entry.parts)), ())
        yield pages.ask_each(StoreCall.READ_ROWS, True, frames=[[ids]])
    yield node.barrier(4)
    yield store.set_optimizer_async(OPTIMIZERS["sgd"])
    yield node.barrier(4)
    if kills and node.rank == 0:
        simulation.kill_server(0)
    yield gather([store.push_async("w", np.ones(3, "f4")), store.push_async("rows", first)])
    outs = [np.zeros(3, "f4"), np.zeros(shape, "f4")]
    yield store.pull_async(["w", "rows"], outs)
    results[node.rank] = b"".join(out.tobytes() for out in outs)


@pytest.mark.parametrize("seed", range(6))
def test_a_call_is_alone_on_the_standby_too(seed: int) -> None:
    """Worker 1 pushes rounds of asynchronous keys while worker 0 makes calls that change them."""
    faults = Faults(delay=0.5, delay_s=(0.001, 0.02))
    simulation = Simulation(seed, 2, 1, faults, prepare=install, standbys=1)

    def script(node: Postoffice) -> Steps:
        yield node.ready
        store: Any = create_dist("dist_async", "dist_async", node=node)
        yield store.set_optimizer_async(optimizer.create("sgd", learning_rate=0.1))
        keys = [f"key {number}" for number in range(4)]
        yield store.init_async(keys, [np.ones(20)] * 4)
        yield node.barrier(4)
        for turn in range(20):
            if node.rank == 0:
                rate = 0.5 + turn / 7
                yield store.set_optimizer_async(optimizer.create("sgd", learning_rate=rate))
            else:
                yield gather([store.push_async(key, np.full(20, turn / 3)) for key in keys])
        yield node.barrier(4)

    run_to_rest(simulation, script)


def test_each_request_of_a_worker_gets_one_answer() -> None:
    """Also if the server dies when it has answered, and the standby has done the same."""
    num, _ = of_plain("calls")
    for at_step in range(60, num, 61):
        simulation = plain_simulation()
        before_step(simulation, at_step, partial(simulation.kill_server, 0))
        answers: Counter[tuple[str, int]] = Counter()
        for worker in simulation.workers:
            customers = worker.customers
            count = counted(answers, worker.van.uid, customers.response_arrived)
            customers.response_arrived = count  # type: ignore[method-assign]
        simulation.run(PLAIN["calls"]({}))
        simulation.finish()
        assert set(answers.values()) == {1}, f"killed at step {at_step}"


def counted(answers: Counter[tuple[str, int]], worker: str, arrived: Any) -> Any:
    """Count the answers of servers to each request of a worker."""

    def count(sender: int, message: Any, frames: Any) -> None:
        if sender != SCHEDULER_ID:
            answers[worker, message.request_id] += 1
        arrived(sender, message, frames)

    return count


# -- several losses ----------------------------------------------------------------------


def test_a_server_or_its_standby_may_be_lost_whatever_the_network_does() -> None:
    """Records arrive late, in another order, or not at all before the server is lost."""
    for seed in range(24):
        chance, name = random.Random(seed), ["sync", "async", "rows"][seed % 3]
        _, expected = without_kill(SCRIPTS[name])
        faults = Faults(drop=0.2, delay=0.3, reorder=0.3)
        simulation, results = simulation_of(seed, 2, 1, faults, standbys=1), dict[int, bytes]()
        simulation.at(chance.uniform(0.0, 20.0), partial(simulation.kill_server, 0))
        simulation.run(slowed(SCRIPTS[name](results), 0.2))
        simulation.finish()
        assert set(results.values()) == {expected}, f"other bits: seed {seed}"


def two_servers() -> Simulation:
    return simulation_of(1, 2, 2, standbys=1)


@pytest.mark.parametrize(
    ("name", "losses"),
    covering(["sync", "async", "rows"], [(0, 6.5), (1, 9.0), (0, 0.0), (1, 0.01)], together=1),
)
def test_two_servers_may_be_lost_one_after_the_other_or_together(
    name: str, losses: tuple[int, float]
) -> None:
    first, apart_s = losses
    make = SCRIPTS[name]
    _, expected = without_kill(make, 2, 2)
    for at_step in range(60, num_steps(make, two_servers), 170):
        simulation, results = two_servers(), dict[int, bytes]()

        def kill_both(simulation: Simulation = simulation) -> None:
            simulation.kill_server(first)
            when = simulation.now + apart_s
            simulation.at(when, partial(simulation.kill_server, 1 - first))

        before_step(simulation, at_step, kill_both)
        simulation.run(make(results))
        simulation.finish()
        assert set(results.values()) == {expected}, f"other bits: killed at step {at_step}"


def may_be_replaced(simulation: Simulation, rank: int) -> bool:
    seats = simulation.scheduler.control._seating.seats  # type: ignore[attr-defined]
    seat = seats._seats.get(9 + 2 * rank)
    return (
        seat is not None
        and seat.may_return
        and seat.standing is Standing.TAKEN
        and not simulation._tasks[rank].over
    )


@pytest.mark.parametrize(
    ("name", "worker_first"), covering(["sync", "async", "rows"], [True, False], together=1)
)
def test_a_worker_and_a_server_may_be_lost_one_after_the_other(
    name: str, worker_first: bool
) -> None:
    make = SCRIPTS[name]
    _, expected = without_kill(make)
    num_killed = 0
    for at_step in range(70, num_steps(make) - 20, 45):
        simulation, results = simulation_of(1, standbys=1), dict[int, bytes]()

        def kill_worker(simulation: Simulation = simulation) -> None:
            nonlocal num_killed
            if may_be_replaced(simulation, 1):
                num_killed += 1
                simulation.restart(simulation.workers[1], 0.3)

        def kill_server(simulation: Simulation = simulation) -> None:
            simulation.kill_server(0)

        first, second = (kill_worker, kill_server) if worker_first else (kill_server, kill_worker)

        simulation.at(7.0, second)
        before_step(simulation, at_step, first)
        simulation.run(make(results))
        simulation.finish()
        assert set(results.values()) == {expected}, f"other bits: killed at step {at_step}"
    assert num_killed or not worker_first


@pytest.mark.parametrize("later_s", [0.0, 11.5])
def test_a_worker_and_a_server_may_be_lost_together(later_s: float) -> None:
    """The worker has not waited for the answer to its push; worker 1 pushes after both losses."""
    simulation = simulation_of(1, standbys=1)
    seen: list[list[float]] = []

    def script(node: Postoffice) -> Steps:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        keeper = returning_of(node)
        kept = yield keeper.found
        yield store.set_optimizer_async(optimizer.create("count"))
        yield store.init_async("w", np.zeros(3))
        loop = keeper.begin_loop()
        for step in range(kept.step if kept else 0, 3):
            if step == 1 and not node.attempt and node.rank == 0:
                simulation.at(simulation.now + 0.5, partial(simulation.restart, node, 0.1))
                simulation.at(simulation.now + 0.5 + later_s, partial(simulation.kill_server, 0))
            yield begin(keeper, loop, step, b"", kept)
            if step == 2:
                break
            if node.rank == 1 and step == 0:
                yield 25.0
            pushed = store.push_async("w", np.ones(3))
            node.traffic.send_joined()
            if step == 1:
                yield pushed
        out = np.zeros(3)
        yield store.pull_async("w", out)
        seen.append(out.tolist())

    simulation.run(script, limit_s=200.0)
    simulation.finish()
    assert seen == [[4.0] * 3] * 2


def test_a_standby_that_takes_a_seat_learns_which_workers_are_lost() -> None:
    """Otherwise the new server sends messages to their processes, and never gets an answer."""
    _, expected = without_kill(sync_script)
    simulation, results = simulation_of(1, standbys=1), dict[int, bytes]()
    lost = simulation.workers[1]

    def kill_worker() -> None:
        assert may_be_replaced(simulation, 1)
        simulation.restart(lost, 9.0)

    def look() -> None:
        (server,) = simulation.servers
        assert server.info is not None and server.attempt == 1
        assert list(server.membership.vacant) == [node_id(Role.WORKER, 1)]
        assert lost.van.uid not in server.links.unaccepted()

    simulation.at(8.0, kill_worker)
    simulation.at(10.0, partial(simulation.kill_server, 0))
    simulation.at(16.0, look)
    simulation.run(slowed(sync_script(results), 0.7))
    simulation.finish()
    assert set(results.values()) == {expected}


@pytest.mark.parametrize("cut_s", [6.0, 9.0])
def test_a_cut_between_a_worker_and_a_server_costs_one_seat(cut_s: float) -> None:
    """Each reports the other; a process that was declared lost is not believed any more."""
    _, expected = without_kill(sync_script)
    simulation, results = simulation_of(1, standbys=1), dict[int, bytes]()
    worker, server = simulation.workers[1], simulation.servers[0]

    def cut() -> None:
        assert may_be_replaced(simulation, 1)
        simulation.cut(worker, server, simulation.now + cut_s)

    def start_again(rank: int, _error: BaseException) -> bool:
        simulation.restart(simulation.workers[rank])
        return True

    simulation.at(8.0, cut)
    simulation.launcher = start_again
    simulation.run(slowed(sync_script(results), 0.7))
    simulation.finish()
    assert set(results.values()) == {expected}
    membership = simulation.scheduler.membership
    assert membership.num_replaced(Role.WORKER) + membership.num_replaced(Role.SERVER) == 1


@pytest.mark.parametrize("again_s", [20.0, 24.5, 27.0, 28.5])
def test_after_its_server_a_worker_may_be_lost_twice(again_s: float) -> None:
    """The new server keeps the steps of the new process, too, not only those of the first."""
    _, expected = without_kill(sync_script)
    simulation, results = simulation_of(1, standbys=1), dict[int, bytes]()

    def kill_worker() -> None:
        assert may_be_replaced(simulation, 1)
        simulation.restart(simulation.workers[1], 0.1)

    simulation.at(8.0, partial(simulation.kill_server, 0))
    simulation.at(14.5, kill_worker)
    simulation.at(again_s, kill_worker)
    simulation.run(slowed(sync_script(results), 0.7))
    simulation.finish()
    assert set(results.values()) == {expected}


def slowed(script: Any, pause_s: float) -> Any:
    """The same script with a pause after each wait."""

    def slow(node: Postoffice) -> Steps:
        steps, value = script(node), None
        while True:
            try:
                wanted = steps.send(value)
            except StopIteration:
                return
            value = yield wanted
            yield pause_s

    return slow


def test_a_new_standby_counts_updates_as_its_server_does() -> None:
    """Also if the optimizer has no state, which would be copied with the counts."""
    simulation = Simulation(1, 1, 1, prepare=install, standbys=1)

    def script(node: Postoffice) -> Steps:
        yield node.ready
        store = create_dist("dist_async", "dist_async", node=node)
        yield store.set_optimizer_async(optimizer.create("sgd", learning_rate=0.1))
        yield store.init_async("w", np.zeros(3))
        yield store.push_async("w", np.ones(3))
        simulation.kill_standby(0)
        simulation.start_standby(0)
        yield 12.0
        yield store.push_async("w", np.ones(3))

    run_to_rest(simulation, script)
    (part,) = stores_of(simulation.servers[0])._parts
    assert part.count == 2 and simulation.standbys


def test_a_server_that_was_filled_itself_fills_the_next_standby_with_all_it_has() -> None:
    """Among that are the values before the last round, though it has applied none."""
    simulation = simulation_of(1, 1, standbys=1)

    def script(node: Postoffice) -> Steps:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        yield store.set_optimizer_async(optimizer.create("adam"))
        yield store.init_async("w", np.zeros(3))
        for _ in range(2):
            yield store.push_async("w", np.ones(3))
        simulation.kill_standby(0)
        simulation.start_standby(0)
        yield 12.0
        lost.update(contents(simulation.servers[0]))
        simulation.kill_server(0)
        simulation.start_standby(0)
        yield 12.0

    lost = dict[str, Any]()
    run_to_rest(simulation, script)
    (server,) = simulation.servers
    assert server.attempt == 1 and simulation.standbys
    assert contents(server) == lost


def test_the_status_says_whether_a_server_has_a_standby() -> None:
    simulation = simulation_of(1, standbys=1)
    control: Any = simulation.scheduler.control
    states: list[str] = []

    one_step = simulation._step

    def step() -> None:
        (standby,) = control._surveyor._survey(simulation.now).standbys or [None]
        if standby is not None and states[-1:] != [standby.state]:
            states.append(standby.state)
            assert (standby.server, bool(standby.pid)) == (0, standby.state != "none")
        one_step()

    simulation._step = step  # type: ignore[method-assign]
    simulation.at(5.0, partial(simulation.kill_standby, 0))
    simulation.at(30.0, partial(simulation.start_standby, 0))
    simulation.run(slowed(sync_script({}), 4.0))
    simulation.finish()
    assert states == ["ready", "none", "filling", "ready", "none"]  # at last, the job is over


@pytest.mark.parametrize("name", ["sync", "async", "rows"])
def test_a_standby_that_is_behind_does_first_what_its_records_say(name: str) -> None:
    """Nothing that it has stored is done before it takes the seat."""
    make = SCRIPTS[name]
    _, expected = without_kill(make)
    for at_step in range(80, num_steps(make) - 30, 70):
        simulation, results = simulation_of(1, standbys=1), dict[int, bytes]()
        traffic = simulation.standbys[0].traffic
        assert traffic.standby is not None

        def later(*work: Any, simulation: Any = simulation, execute: Any = traffic.execute) -> None:
            simulation.at(max(simulation.now, 9.0), partial(execute, *work))

        traffic.standby._execute = later  # type: ignore[assignment]
        before_step(simulation, at_step, partial(simulation.kill_server, 0))
        simulation.run(make(results))
        simulation.finish()
        assert set(results.values()) == {expected}, f"other bits: killed at step {at_step}"


def at_9_s(simulation: Simulation, execute: Any, *work: Any) -> None:
    simulation.at(max(simulation.now, 9.0), partial(execute, *work))


@pytest.mark.parametrize(
    ("name", "cut_s"), covering(["sync", "async", "rows"], [0.5, 3.0], together=1)
)
def test_a_worker_gets_no_answer_before_the_standby_has_the_record(name: str, cut_s: float) -> None:
    """The server is lost while it cannot reach its standby."""
    make = SCRIPTS[name]
    _, expected = without_kill(make)
    for at_step in range(80, num_steps(make) - 30, 60):
        simulation, results = simulation_of(1, standbys=1), dict[int, bytes]()

        def cut(simulation: Simulation = simulation) -> None:
            server, until = simulation.servers[0], simulation.now + cut_s
            simulation.cut(server, simulation.standbys[0], until + 1.0)
            simulation.at(until, partial(simulation.kill_server, 0))

        before_step(simulation, at_step, cut)
        simulation.run(slowed(make(results), 0.1))
        simulation.finish()
        assert set(results.values()) == {expected}, f"other bits: cut at step {at_step}"


def test_the_sum_for_the_standby_has_the_order_of_ranks() -> None:
    """Sums of three numbers depend on it."""
    found = set()
    for standbys in (0, 1):
        results: Results = {}
        simulation = Simulation(3, 3, 1, prepare=install, standbys=standbys)
        simulation.run(dtypes_script(results))
        simulation.finish()
        found |= set(results.values())
    assert len(found) == 1


def test_without_its_standby_a_lost_server_ends_the_job() -> None:
    simulation = simulation_of(1, standbys=1)
    when = num_steps(sync_script) // 2

    def kill_both() -> None:
        simulation.kill_standby(0)
        simulation.at(simulation.now + 7.0, partial(simulation.kill_server, 0))

    def script(node: Postoffice) -> Steps:
        yield from sync_script({})(node)
        yield 20.0
        yield node.barrier(4)

    before_step(simulation, when, kill_both)
    with pytest.raises(NodeLostError, match=r"server 0 .* is lost"):
        simulation.run(script)


@pytest.mark.parametrize("apart_s", [-1.0, -0.001, 0.0, 0.001, 1.0, 4.9])
def test_if_server_and_standby_are_lost_together_the_job_ends(apart_s: float) -> None:
    simulation = simulation_of(1, standbys=1)
    kills = [partial(simulation.kill_standby, 0), partial(simulation.kill_server, 0)]

    def kill_both() -> None:
        first, second = kills if apart_s < 0 else kills[::-1]
        standby = simulation.standbys[0]
        first()
        second = partial(simulation.kill, standby) if apart_s >= 0 else second
        simulation.at(simulation.now + abs(apart_s), second)

    before_step(simulation, num_steps(sync_script) // 2, kill_both)
    with pytest.raises(NodeLostError, match=r"server 0 .* is lost"):
        simulation.run(sync_script({}))
    assert simulation.now < 30.0


# -- a process that was stopped and wakes up ---------------------------------------------


@pytest.mark.parametrize("name", ["sync", "async"])
def test_a_server_that_wakes_up_after_its_standby_took_over_changes_nothing(name: str) -> None:
    make = SCRIPTS[name]
    _, expected = without_kill(make)
    for at_step in range(80, num_steps(make) - 20, 60):
        simulation, results = simulation_of(1, standbys=1), dict[int, bytes]()
        server = simulation.servers[0]

        def stop(simulation: Simulation = simulation, server: Postoffice = server) -> None:
            simulation.pause(server, simulation.now + 12.0)
            simulation.servers[0] = simulation.standbys.pop(0)

        train_on = make(results)

        def script(node: Postoffice, train: Any = train_on) -> Steps:
            yield from train(node)
            yield 20.0
            yield node.barrier(4)

        before_step(simulation, at_step, stop)
        simulation.run(script)
        assert set(results.values()) == {expected}, f"other bits: stopped at step {at_step}"
        error = server.error
        assert isinstance(error, NodeLostError)
        assert "was declared lost" in str(error) and "it must not go on" in str(error)
        simulation.finish()


def test_a_server_that_has_lost_its_place_answers_nothing() -> None:
    """A worker that has not heard of it yet would take the error for an answer."""
    simulation = simulation_of(1, standbys=1)
    scheduler, server, worker = simulation.scheduler, simulation.servers[0], simulation.workers[0]
    asked_at: list[float] = []

    def script(node: Postoffice) -> Steps:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        if node is worker:
            yield 8.5 - simulation.now
            asked_at.append(simulation.now)
            assert server.error is not None and not any(node.membership.attempts.values())
        yield store.set_optimizer_async(optimizer.create("sgd", learning_rate=0.1))

    simulation.at(2.0, partial(simulation.cut, server, scheduler, 7.7))
    simulation.at(6.0, partial(simulation.cut_one_way, scheduler, worker, 9.0))
    simulation.run(script)
    assert asked_at == [8.5]
    simulation.finish()


def test_a_server_that_loses_its_standby_answers_nothing_before_the_scheduler_says_so() -> None:
    """The scheduler, which the server cannot reach any more, gives the seat to the standby."""
    simulation = simulation_of(1, standbys=1)
    server, standby = simulation.servers[0], simulation.standbys[0]
    sums: list[float] = []

    def script(node: Postoffice) -> Steps:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        yield store.set_optimizer_async(optimizer.create("sgd", learning_rate=-1.0))
        yield store.init_async("w", np.zeros(3))
        out = np.zeros(3)
        for _ in range(100):
            yield store.pushpull_async("w", np.ones(3), out)
            sums.append(out[0])
            yield 0.2

    simulation.at(3.0, lambda: simulation.cut(server, standby, 60.0))
    simulation.at(4.5, lambda: simulation.cut(server, simulation.scheduler, 60.0))
    simulation.run(script)
    assert standby.attempt == 1
    simulation.finish()
    assert sums == [2.0 * number for number in range(1, 101) for _ in range(2)]


def test_a_standby_does_not_hear_its_server_after_it_has_taken_the_seat() -> None:
    """What arrives from it later is neither stored nor done."""
    simulation, results = simulation_of(1, standbys=1), dict[int, bytes]()
    server, standby = simulation.servers[0], simulation.standbys[0]
    before_step(simulation, num_steps(sync_script) // 2, partial(simulation.kill_server, 0))
    simulation.run(sync_script(results))
    repeater, contents_before = standby.traffic.standby, contents(standby)
    assert repeater is not None
    last = repeater._replay.stored
    head = StoreCall.SET_OPTIMIZER
    body = pack(1, True, False, to_plain(optimizer.create("sgd")))
    record = RequestRecord(last + 1, True, 9, "a worker", STORE_APP, 0, 77, head, body)
    repeater.arrived(Delivery(server.van.uid, 0, 1, record, ()))
    simulation.finish()
    assert repeater._replay.stored == last
    assert contents(standby) == contents_before


def test_a_standby_that_wakes_up_after_its_server_went_on_does_no_harm() -> None:
    _, expected = without_kill(sync_script)
    simulation, results = simulation_of(1, standbys=1), dict[int, bytes]()
    standby = simulation.standbys[0]

    def stop() -> None:
        simulation.pause(standby, simulation.now + 12.0)
        del simulation.standbys[0]

    def script(node: Postoffice) -> Steps:
        yield from sync_script(results)(node)
        yield 30.0
        yield node.barrier(4)

    before_step(simulation, num_steps(sync_script) // 2, stop)
    simulation.run(script)
    simulation.finish()
    assert set(results.values()) == {expected}
    assert standby.info is None
    assert "and goes on without one" in str(standby.error)
    assert standby.log.name == "standby of server 0"


def test_a_standby_that_its_server_cannot_reach_ends_with_an_error() -> None:
    """So the launcher starts another one, other than when a standby is not needed any more."""
    _, expected = without_kill(sync_script)
    simulation, results = simulation_of(1, standbys=1), dict[int, bytes]()
    server, standby = simulation.servers[0], simulation.standbys[0]
    cut = partial(simulation.cut, server, standby, math.inf)
    before_step(simulation, num_steps(sync_script) // 2, cut)
    simulation.run(slowed(sync_script(results), 1.0))
    simulation.finish()
    assert set(results.values()) == {expected}
    assert isinstance(standby.error, NodeLostError)
    assert "cannot reach its standby, and goes on without one" in str(standby.error)


@pytest.mark.parametrize("case", ["seen", "told", "let go"])
def test_no_message_waits_for_a_lost_standby(case: str) -> None:
    """The scheduler sees its loss, or hears of it from the server, or has just let it go."""
    simulation = Simulation(1, 1, 1, prepare=install, standbys=1)
    server, standby = simulation.servers[0], simulation.standbys[0]

    def lose() -> None:
        if case == "told":
            server.control.lost(standby.van.uid, "killed", simulation.now)
        elif case == "let go":
            server.control.say_whether_to_return(False)
        simulation.kill_standby(0)

    def script(node: Postoffice) -> Steps:
        yield node.ready
        yield 30.0
        yield node.barrier(4)

    simulation.at(3.0, lose)
    simulation.run(script)
    assert standby.van.uid not in simulation.scheduler.links.unaccepted()
    simulation.finish()


def test_a_standby_that_is_let_go_does_not_wait_for_its_server() -> None:
    """The server may have ended before it has accepted that its last records are done."""
    simulation = simulation_of(1, standbys=1)
    server, standby = simulation.servers[0], simulation.standbys[0]
    simulation.run(sync_script({}))
    simulation.cut_one_way(standby, server, math.inf)
    standby.traffic.standby._tell_now()
    assert standby.links.unaccepted().keys() == {server.van.uid}
    simulation.finish()
    assert standby.finished.done() and not standby.error
    assert not standby.links.unaccepted()


# -- tables, and the scheduler -----------------------------------------------------------

IDS = np.array([-5, 0, 7], np.int64)


def table_script(values: list[Any], pause_s: float = 0.0) -> Any:
    def script(node: Postoffice) -> Steps:
        yield node.ready
        store: Any = create_dist("dist_sync", "dist_sync", node=node)
        yield store.init_async("w", np.zeros(3))
        owner = store._tables
        parts = owner.parts_of(1)
        if node.rank == 0:
            yield owner.servers.make_table(parts, settings_to_plain(SETTINGS), to_plain(PLUS))
        yield node.barrier(4)
        table, rows = DistTable(owner, SETTINGS, PLUS, parts), np.zeros((3, 3))
        for _ in range(3):
            push = table.begin_push(IDS, np.ones((3, 3)))
            yield store.push_async("w", np.ones(3))
            yield table.begin_pull(IDS, rows, RowPayloadKind.WANTED)
            yield push
            yield pause_s
        yield node.barrier(4)
        values.append(rows.tolist())

    return script


def test_a_server_with_a_growing_table_has_no_standby_any_more() -> None:
    simulation, values = plain_simulation(), list[Any]()
    server, standby = simulation.servers[0], simulation.standbys[0]
    simulation.run(table_script(values))
    simulation.finish()
    assert values == [[[6.0] * 3] * 3] * 2
    assert server.traffic.primary is not None and server.traffic.primary.standby is None
    assert standby.finished.done() and standby.error is None
    assert any("does something that no standby repeats" in line for line in simulation.lines)


def test_the_later_loss_of_a_server_with_a_growing_table_ends_the_job() -> None:
    simulation = plain_simulation()
    simulation.at(1.5, partial(simulation.kill_server, 0))
    with pytest.raises(NodeLostError, match=r"server 0 .* is lost"):
        simulation.run(table_script([], pause_s=1.0))
    assert simulation.now < 12.0


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=SLOW_SEEDS if first >= 80 else ()) for first in range(0, 160, 20)],
)
def test_a_server_with_a_table_is_not_followed_by_a_standby_without_it(first: int) -> None:
    """Whatever the network does, the job ends well, or with the loss of the server."""
    for seed in range(first, first + 20):
        simulation = Simulation(seed, 2, 1, faults_of(seed), prepare=install, standbys=1)
        values, standby = list[Any](), simulation.standbys[0]
        when = random.Random(seed).uniform(0.0, 2.0)
        simulation.at(when, partial(simulation.kill_server, 0))
        try:
            simulation.run(table_script(values))
            simulation.finish()
        except NodeLostError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert values == [[[6.0] * 3] * 3] * 2, f"seed {seed}"
        assert standby.error is None, f"seed {seed}"


# -- what it costs -----------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_a_standby_costs_one_sum_for_each_round_however_many_workers_push(
    num_workers: int,
) -> None:
    settings = {"chunk_bytes": 1 << 16, "credit_bytes": 1 << 22, "shm": False}
    simulation = Simulation(2, num_workers, 1, prepare=install, standbys=1, **settings)
    (server,), standby = simulation.servers, simulation.standbys[0]
    size, counted = 100_000, list[dict[str, Any]]()

    def script(node: Postoffice) -> Steps:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        yield store.set_optimizer_async(OPTIMIZERS["sgd"])
        yield store.init_async("w", np.zeros(size, np.float32))
        yield node.barrier(4)
        yield 2.0
        if node.rank == 0:
            counted.append(server.links.byte_counts())
        yield node.barrier(4)
        for _ in range(6):
            yield store.push_async("w", np.ones(size, np.float32))
        yield node.barrier(4)
        yield 2.0
        if node.rank == 0:
            counted.append(server.links.byte_counts())
        yield node.barrier(4)

    simulation.run(script)
    workers = [node.van.uid for node in simulation.workers]
    before, after = counted
    pushed = sum(after[uid][1] - before.get(uid, (0, 0))[1] for uid in workers)
    repeated = after[standby.van.uid][0] - before[standby.van.uid][0]
    assert pushed > num_workers * 6 * size * 4
    assert repeated <= pushed * 1.05 / num_workers
    simulation.finish()


def test_a_server_waits_for_a_standby_that_is_far_behind_and_then_goes_on() -> None:
    """The records that are not done are limited, and so is the memory for them."""
    simulation, most = plain_simulation(), 0
    server, standby = simulation.servers[0], simulation.standbys[0]
    limit = 4 * simulation._settings["credit_bytes"]
    execute, held = standby.traffic.execute, list[Any]()
    assert standby.traffic.standby is not None
    standby.traffic.standby._execute = lambda *work: held.append(work)
    answered: list[float] = []

    def script(node: Postoffice) -> Steps:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        yield store.init_async("w", np.zeros(100))
        for _ in range(12):
            yield store.push_async("w", np.ones(100))
            answered.append(simulation.now)

    def release() -> None:
        assert standby.traffic.standby is not None
        standby.traffic.standby._execute = execute
        for work in held:
            execute(*work)

    def look() -> None:
        nonlocal most
        primary = server.traffic.primary
        if primary is not None and primary.standby is not None:
            most = max(most, primary._journal._undone_bytes)
        if simulation.now < 50.0:
            simulation.at(simulation.now + 0.01, look)

    look()
    simulation.at(20.0, release)
    simulation.run(script)
    assert limit < most <= limit + 2 * 800 * 2
    assert len([when for when in answered if when < 20.0]) < 2 * 12
    assert len(answered) == 2 * 12
    (pair,) = pairs(simulation)
    simulation.until(lambda: is_quiet(server), simulation.now + 10.0)
    assert_nothing_is_left(*pair)
    simulation.finish()


@pytest.mark.parametrize(
    ("name", "most_bytes"), [("sync", 64), ("rows that are replaced", 130), ("dtypes", 130)]
)
def test_what_is_too_large_for_a_message_goes_in_pieces(
    name: str, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of rounds, and the state of a server whose first standby has taken its place."""
    make = {**SCRIPTS, **PLAIN}[name]
    cut: list[int] = []

    def counting(frames: Sequence[Buffer], most: int) -> Iterator[list[memoryview]]:
        assert most == most_bytes
        cut.append(len(frames))
        return in_pieces(frames, most)

    monkeypatch.setattr(pslite.node.primary, "in_pieces", counting)
    _, expected = without_kill(make)
    simulation, results = simulation_of(1, standbys=1), dict[int, bytes]()

    def limit(node: Postoffice) -> None:
        object.__setattr__(node.config, "max_message_bytes", most_bytes)

    for node in (*simulation.servers, *simulation.standbys.values()):
        limit(node)
    simulation.at(2.0, partial(simulation.kill_server, 0))
    simulation.at(4.0, partial(simulation.start_standby, 0))
    run_to_rest(simulation, slowed(make(results), 0.3))
    assert set(results.values()) == {expected}
    assert cut and simulation.standbys
