"""The scheduler is lost and another process goes on from its journal: nothing else changes."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import optimizer
from kvstore.server import install, tell_of_places
from kvstore.stores.dist.store import create_dist
from pslite import WORKER_GROUP, Postoffice, Role
from pslite.errors import ConfigError, DeadlineError, NodeLostError
from pslite.node.scheduler_journal import SchedulerJournal
from pslite.testing.simulator import Simulation
from pslite.wire.messages import Members, Roster
from pslite.wire.recovery import Seated, StandsBy, Vacant
from tests.combinations import covering
from tests.faults import returning
from tests.faults.invariants import seats_of
from tests.faults.returning import (
    LOST_AFTER_S,
    MakeScript,
    Results,
    async_script,
    before_step,
    is_complete,
    returning_of,
    sync_script,
)
from tests.faults.standbys import calls_script
from tests.faults.test_standbys import slowed

Steps = Generator[Any, Any, None]
SCRIPTS: dict[str, MakeScript] = {
    "sync": sync_script,
    "async": async_script,
    "rows": returning.ROWS["lazy"],
}
AFTER_S = [0.1, 12.0]
"""When the next scheduler begins: soon, or after waits without it were reported."""
#: Scripts, the number of standbys, and when the next scheduler begins.
LOSSES = covering([*SCRIPTS], [0, 1], AFTER_S)
STRIDE, STRIDE_OF_CALLS = 37, 83
REJOIN_S = 60.0
SOON_S = 1.5
"""How long after the next scheduler has begun all is over: no member waits for a heartbeat."""
SLOW = pytest.mark.slow(reason="some instants of each are always tried")


def offsets(stride: int) -> list[Any]:
    """The offsets of all instants; the first one is fast."""
    return [pytest.param(each, marks=SLOW if each else (), id=str(each)) for each in range(stride)]


def simulation_of(
    journal: Path,
    seed: int = 1,
    *,
    shortens: bool = False,
    told: list[str] | None = None,
    **settings: Any,
) -> Any:
    """A cluster whose scheduler has a new journal; it ``shortens`` that whenever it can.

    ``told`` is what the launcher is told.
    """
    journal.unlink(missing_ok=True)

    def prepare(node: Postoffice) -> None:
        install(node)
        if told is not None and node.role is Role.SCHEDULER:
            tell_of_places(node, told.append)
        if shortens and node.role is Role.SCHEDULER:
            shorten_always(node.control)

    settings.setdefault("rejoin_timeout_s", REJOIN_S)
    return Simulation(
        seed,
        2,
        settings.pop("num_servers", 1),
        settings.pop("faults", None),
        prepare=prepare,
        scheduler_journal=str(journal),
        **settings,
    )


def shorten_always(control: Any) -> None:
    """Let a scheduler shorten its journal before each request that it records."""
    records = control._records
    shorten, records._most_bytes = records._shorten, 0

    def shorten_again() -> None:
        shorten()
        records._most_bytes = 0

    records._shorten = shorten_again


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


_plain: dict[Any, tuple[int, Results]] = {}


def without_loss(make: MakeScript, journal: Path, **settings: Any) -> tuple[int, Results]:
    """How many steps the simulation takes if the scheduler is not lost; and the results."""
    key = make, *settings.items()
    if key not in _plain:
        simulation, results = simulation_of(journal, **settings), dict[int, bytes]()
        simulation.run(make(results))
        simulation.finish()
        _plain[key] = simulation.steps, results
    return _plain[key]


def assert_same_seats(simulation: Simulation) -> None:
    """No process has taken the place of another one, besides the scheduler."""
    assert all(seat.attempt == 0 for seat in seats_of(simulation).values())
    members = [*simulation.servers, *simulation.workers]
    assert [node.error for node in members] == [None] * len(members)


# -- lost once, at any instant -------------------------------------------------------------


@pytest.mark.parametrize("offset", offsets(STRIDE))
@pytest.mark.parametrize(("name", "standbys", "after_s"), LOSSES)
def test_the_scheduler_may_be_replaced_before_any_step_of_the_simulation(
    name: str, standbys: int, after_s: float, offset: int, journal: Path
) -> None:
    make = SCRIPTS[name]
    num_steps, expected = without_loss(make, journal, standbys=standbys)
    for at_step in range(1 + offset, num_steps, STRIDE):
        shortens = at_step % 2 == 0
        simulation = simulation_of(journal, standbys=standbys, shortens=shortens)
        results: Results = {}
        before_step(simulation, at_step, partial(simulation.restart_scheduler, after_s))
        simulation.run(make(results))
        assert results == expected, f"killed at step {at_step}"
        assert simulation.now < after_s + SOON_S, f"killed at step {at_step}"
        assert_same_seats(simulation)
        simulation.finish()


@pytest.mark.parametrize("shortens", [False, True])
def test_the_next_scheduler_tells_the_launcher_at_once_who_has_which_place(
    shortens: bool, journal: Path
) -> None:
    told, then = list[str](), list[str]()
    simulation = simulation_of(journal, standbys=1, shortens=shortens, told=told)
    simulation.at(5.0, partial(simulation.kill_standby, 0))
    simulation.at(6.0, partial(simulation.start_standby, 0))
    simulation.at(40.0, lambda: simulation.restart(simulation.workers[1]))
    simulation.at(60.0, simulation.restart_scheduler)
    simulation.at(60.01, lambda: then.extend(told))
    simulation.run(slowed(sync_script({}), 4.0))
    simulation.finish()
    worker = "worker 1 has its place again: 1"
    scheduler, standby = "scheduler 0 has its place again: 1", "standby 0 has its place again"
    first = ["scheduler 0 has its place again: 0", "all have joined", standby, worker]
    assert then == told == [*first, "all have joined", worker, scheduler, standby]


@pytest.mark.parametrize("after_s", AFTER_S)
@pytest.mark.parametrize("standbys", [0, 1])
def test_the_scheduler_may_be_replaced_before_all_have_joined(
    standbys: int, after_s: float, journal: Path
) -> None:
    _, expected = without_loss(sync_script, journal, standbys=standbys)
    beside = simulation_of(journal, standbys=standbys)
    beside.until(partial(is_complete, beside))
    for at_step in range(1, beside.steps + 1):
        simulation, results = simulation_of(journal, standbys=standbys), dict[int, bytes]()
        before_step(simulation, at_step, partial(simulation.restart_scheduler, after_s))
        simulation.until(partial(is_complete, simulation))
        simulation.run(sync_script(results))
        assert results == expected, f"killed at step {at_step}"
        assert_same_seats(simulation)
        simulation.finish()


# -- requests to the scheduler -------------------------------------------------------------


@pytest.mark.parametrize("offset", offsets(STRIDE_OF_CALLS))
@pytest.mark.parametrize(("standbys", "after_s"), covering([0, 1], AFTER_S, together=1))
def test_a_request_that_is_under_way_gets_its_answer(
    after_s: float, standbys: int, offset: int, journal: Path
) -> None:
    """Keys and optimizers are set and changed all the time; values are read and written."""
    num_steps, expected = without_loss(calls_script, journal, standbys=standbys)
    for at_step in range(1 + offset, num_steps, STRIDE_OF_CALLS):
        shortens = at_step % 2 == 0
        simulation = simulation_of(journal, standbys=standbys, shortens=shortens)
        results: Results = {}
        before_step(simulation, at_step, partial(simulation.restart_scheduler, after_s))
        simulation.run(calls_script(results))
        assert results == expected, f"killed at step {at_step}"
        assert_same_seats(simulation)
        simulation.finish()


def test_a_joint_call_ends_if_the_scheduler_is_lost_before_the_last_one_makes_it(
    journal: Path,
) -> None:
    """Worker 0 has asked the first scheduler, worker 1 asks the second one."""
    for lost_at_s in (0.5, 3.0, 3.001, 3.01):
        simulation, seen = simulation_of(journal), []

        def script(node: Postoffice, seen: list[Any] = seen) -> Steps:
            yield node.ready
            store: Any = create_dist("dist_sync", "dist_sync", node=node)
            yield store.init_async("w", np.ones(3))
            yield 3.0 if node.rank else 0.1
            yield store.set_optimizer_async(optimizer.create("sgd", learning_rate=0.5))
            yield store.init_async("x", np.ones(3))
            yield store.push_async("x", np.ones(3))
            out = np.zeros(3)
            yield store.pull_async("x", out)
            seen.append(out.tolist())

        simulation.at(lost_at_s, partial(simulation.restart_scheduler, 4.0))
        simulation.run(script)
        assert seen == [[0.0] * 3] * 2
        assert_same_seats(simulation)
        simulation.finish()


# -- barriers ------------------------------------------------------------------------------


def limited_barrier(simulation: Simulation, late_s: float) -> dict[int, tuple[float, str]]:
    """Worker 0 waits 8 s for worker 1, which comes late; when each ended, and with what."""
    ends: dict[int, tuple[float, str]] = {}

    def script(node: Postoffice) -> Steps:
        yield node.ready
        yield late_s if node.rank else 0.1
        try:
            yield node.barrier(WORKER_GROUP, timeout_s=0.0 if node.rank else 8.0)
        except DeadlineError as error:
            ends[node.rank] = simulation.now, str(error)
        else:
            ends[node.rank] = simulation.now, "over"
        yield node.barrier(WORKER_GROUP)

    simulation.run(script)
    assert_same_seats(simulation)
    simulation.finish()
    return ends


@pytest.mark.parametrize(
    ("lost_s", "after_s", "at_most_s"), [(2.0, 1.0, 8.5), (2.0, 12.0, 21.0), (9.0, 3.0, 8.5)]
)
def test_the_time_limit_of_a_barrier_goes_on_without_a_scheduler(
    lost_s: float, after_s: float, at_most_s: float, journal: Path
) -> None:
    """The node that comes later gets the error, too, also if that was told before the loss."""
    simulation = simulation_of(journal)
    simulation.at(lost_s, partial(simulation.restart_scheduler, after_s))
    ends = limited_barrier(simulation, 40.0)
    text = "the barrier of the workers timed out: worker 1"
    assert all(what.startswith(text) for _, what in ends.values())
    assert 8.0 <= ends[0][0] <= at_most_s


def test_a_barrier_whose_last_node_comes_while_there_is_no_scheduler_is_over_in_time(
    journal: Path,
) -> None:
    simulation = simulation_of(journal)
    simulation.at(2.0, partial(simulation.restart_scheduler, 4.0))
    ends = limited_barrier(simulation, 3.0)
    assert {what for _, what in ends.values()} == {"over"}


# -- lost with others ----------------------------------------------------------------------


quick = partial(simulation_of, lost_after_s=LOST_AFTER_S)
"""The same cluster, which waits less for a lost worker, server or standby."""


@pytest.mark.parametrize(("name", "standbys", "after_s"), LOSSES)
def test_the_scheduler_and_a_worker_may_be_lost_together(
    name: str, standbys: int, after_s: float, journal: Path
) -> None:
    make = SCRIPTS[name]
    num_steps, expected = without_loss(make, journal, standbys=standbys)
    num_killed = 0
    for at_step in range(60, num_steps - 10, 41):
        simulation, results = quick(journal, standbys=standbys), dict[int, bytes]()

        def kill_both(simulation: Simulation = simulation) -> None:
            nonlocal num_killed
            seat = seats_of(simulation).get(11)
            if seat is not None and seat.may_return and not simulation._tasks[1].over:
                num_killed += 1
                simulation.restart(simulation.workers[1], 0.3)
                simulation.restart_scheduler(after_s)

        before_step(simulation, at_step, kill_both)
        simulation.run(make(results))
        simulation.finish()
        assert results == expected, f"killed at step {at_step}"
    assert num_killed >= 2


@pytest.mark.parametrize(("name", "after_s"), covering([*SCRIPTS], AFTER_S, together=1))
def test_the_scheduler_and_a_server_may_be_lost_together(
    name: str, after_s: float, journal: Path
) -> None:
    make = SCRIPTS[name]
    num_steps, expected = without_loss(make, journal, standbys=1)
    for at_step in range(30, num_steps, 61):
        simulation, results = quick(journal, standbys=1), dict[int, bytes]()

        def kill_both(simulation: Simulation = simulation) -> None:
            simulation.restart_scheduler(after_s)
            simulation.kill_server(0)

        before_step(simulation, at_step, kill_both)
        simulation.run(make(results))
        simulation.finish()
        assert results == expected, f"killed at step {at_step}"


@pytest.mark.parametrize("after_s", AFTER_S)
@pytest.mark.parametrize("name", ["sync", "async"])
def test_the_scheduler_and_a_standby_may_be_lost_together(
    name: str, after_s: float, journal: Path
) -> None:
    make = SCRIPTS[name]
    num_steps, expected = without_loss(make, journal, standbys=1)
    for at_step in range(30, num_steps, 97):
        simulation, results = quick(journal, standbys=1), dict[int, bytes]()

        def kill_both(simulation: Simulation = simulation) -> None:
            simulation.restart_scheduler(after_s)
            simulation.kill_standby(0)

        before_step(simulation, at_step, kill_both)
        simulation.run(make(results))
        simulation.finish()
        assert results == expected, f"killed at step {at_step}"


# -- lost twice, or for too long -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "standbys", "again_s"), covering(["sync", "async"], [0, 1], [0.11, 0.15, 0.5, 6.0])
)
def test_the_scheduler_may_be_lost_again_soon(
    name: str, standbys: int, again_s: float, journal: Path
) -> None:
    """The second time perhaps before the members have registered again."""
    make = SCRIPTS[name]
    num_steps, expected = without_loss(make, journal, standbys=standbys)
    for at_step in range(20, num_steps, 101):
        simulation, results = simulation_of(journal, standbys=standbys), dict[int, bytes]()

        def kill(simulation: Simulation = simulation) -> None:
            simulation.restart_scheduler(0.1)
            again = partial(simulation.restart_scheduler, 0.3)
            simulation.at(simulation.now + again_s, again)

        before_step(simulation, at_step, kill)
        simulation.run(make(results))
        simulation.finish()
        assert results == expected, f"killed at step {at_step}"


@pytest.mark.parametrize("standbys", [0, 1])
def test_the_job_ends_with_the_scheduler_if_no_process_takes_its_place(
    standbys: int, journal: Path
) -> None:
    for at_step in (15, 90, 200):
        simulation = simulation_of(journal, standbys=standbys, rejoin_timeout_s=7.0)
        before_step(simulation, at_step, partial(simulation.kill, simulation.scheduler))
        nodes = [node for node in simulation.nodes.values() if node.role is not Role.SCHEDULER]
        with pytest.raises(NodeLostError):
            simulation.run(waits_for_ever)
        simulation.until(lambda nodes=nodes: all(node.error for node in nodes), 40.0)
        assert {getattr(node.error, "role", None) for node in nodes} == {"scheduler"}
        assert all("PS_REJOIN_TIMEOUT" in str(node.error) for node in nodes)


def waits_for_ever(node: Postoffice) -> Steps:
    """Use the scheduler until there is none."""
    yield node.ready
    while True:
        yield node.barrier(WORKER_GROUP)


# -- the journal ---------------------------------------------------------------------------


def fill_disk(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Let only the first ``after`` records be written."""
    append, count = SchedulerJournal.append, 0

    def full(journal: SchedulerJournal, kind: bytes, plain: Any) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(journal, kind, plain)

    monkeypatch.setattr(SchedulerJournal, "append", full)


@pytest.mark.parametrize("after", [0, 1, 2, 6])
def test_training_goes_on_if_the_journal_cannot_be_written(
    after: int, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = without_loss(sync_script, journal)
    fill_disk(monkeypatch, after)
    simulation, results = simulation_of(journal), dict[int, bytes]()
    simulation.run(sync_script(results))
    assert results == expected
    assert journal.stat().st_size == 0  # so no process goes on from a state that is too old
    said = [line for line in simulation.lines if "cannot write PS_SCHEDULER_JOURNAL" in line]
    assert len(said) == 1
    simulation.finish()


@pytest.mark.parametrize("after_s", [0.1, 1.0, 20.0])
def test_the_job_ends_if_the_scheduler_is_lost_whose_journal_could_not_be_written(
    after_s: float, journal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = simulation_of(journal)
    with monkeypatch.context() as patch:
        fill_disk(patch, 0)  # the cluster is not complete yet
        simulation.until(partial(is_complete, simulation))
        nodes = [*simulation.servers, *simulation.workers]
        simulation.at(4.0, partial(simulation.restart_scheduler, after_s))
        with pytest.raises(NodeLostError):
            simulation.run(waits_and_asks)
    simulation.until(lambda: all(node.error for node in nodes), 100.0)
    for node in nodes:
        assert isinstance(node.error, NodeLostError) and node.error.role == "scheduler"
        assert "does not know this job: PS_SCHEDULER_JOURNAL=" in str(node.error)


def waits_and_asks(node: Postoffice) -> Steps:
    yield node.ready
    while True:
        yield 0.5
        yield node.barrier(WORKER_GROUP)


# -- the same process ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "for_s", "standbys"), covering(["sync", "async"], [1.0, 5.5, 11.0], [0, 1])
)
def test_a_scheduler_that_was_only_stopped_goes_on(
    name: str, for_s: float, standbys: int, journal: Path
) -> None:
    make = SCRIPTS[name]
    num_steps, expected = without_loss(make, journal, standbys=standbys)
    for at_step in range(50, num_steps - 40, 97):
        simulation, results = simulation_of(journal, standbys=standbys), dict[int, bytes]()
        scheduler = simulation.scheduler

        def stop(simulation: Simulation = simulation) -> None:
            simulation.pause(simulation.scheduler, simulation.now + for_s)

        before_step(simulation, at_step, stop)
        simulation.run(make(results))
        assert results == expected, f"stopped at step {at_step}"
        assert simulation.scheduler is scheduler
        assert_same_seats(simulation)
        simulation.finish()


@pytest.mark.parametrize("for_s", [1.0, 4.0])
def test_a_scheduler_that_was_cut_off_from_all_for_a_short_time_goes_on(
    for_s: float, journal: Path
) -> None:
    num_steps, expected = without_loss(sync_script, journal, standbys=1)
    for at_step in range(50, num_steps - 40, 67):
        simulation, results = simulation_of(journal, standbys=1), dict[int, bytes]()

        def cut(simulation: Simulation = simulation) -> None:
            for node in list(simulation.nodes.values())[1:]:
                simulation.cut(simulation.scheduler, node, simulation.now + for_s)

        before_step(simulation, at_step, cut)
        simulation.run(sync_script(results))
        assert results == expected, f"cut off at step {at_step}"
        assert_same_seats(simulation)
        simulation.finish()


# -- processes that have lost their seats --------------------------------------------------


def stop_worker_1(
    simulation: Simulation, *, scheduler_lost_s: float, replaced_s: float
) -> tuple[NodeLostError, float]:
    """Stop worker 1 for 40 s and replace it; the error with which it ends, and when it does.

    It wakes up and asks a scheduler that never saw it.
    """
    stopped: list[Postoffice] = []
    began_at = 0.0

    def stop() -> None:
        nonlocal began_at
        began_at = simulation.now
        stopped.append(simulation.workers[1])
        simulation.pause(stopped[0], began_at + 40.0)
        # When it wakes up, only the scheduler can tell it.
        cut = partial(simulation.cut, stopped[0], simulation.servers[0], 300.0)
        simulation.at(began_at + 39.0, cut)
        simulation.replace(1, replaced_s)
        simulation.at(began_at + scheduler_lost_s, partial(simulation.restart_scheduler, 1.0))

    def script(node: Postoffice) -> Steps:
        yield node.ready
        store: Any = create_dist("dist_sync", "dist_sync", node=node)
        keeper = returning_of(node)
        kept = yield keeper.found
        yield store.init_async("w", np.zeros(3))
        loop = keeper.begin_loop()
        for step in range(kept.step if kept else 0, 3):
            if step == 1 and node.rank == 1 and not stopped:
                simulation.at(simulation.now + 0.2, stop)
                yield 1.0
            yield returning.begin(keeper, loop, step, b"", kept)
            if step < 2:
                yield store.push_async("w", np.ones(3))
        out = np.zeros(3)
        yield store.pull_async("w", out)
        yield 60.0
        yield node.barrier(WORKER_GROUP)

    ends: list[float] = []

    def look() -> None:
        if stopped and stopped[0].error is not None:
            ends.append(simulation.now - began_at)
        else:
            simulation.at(simulation.now + 0.1, look)

    look()
    simulation.run(script)
    simulation.until(lambda: bool(ends), simulation.now + 60.0)
    error = stopped[0].error
    assert isinstance(error, NodeLostError)
    assert [node.error for node in simulation.workers] == [None, None]
    simulation.finish()
    return error, ends[0]


@pytest.mark.parametrize("lost_s", [0.2, 20.0, 36.0])
@pytest.mark.parametrize("shortens", [False, True])
def test_the_next_scheduler_turns_a_process_out_whose_seat_another_one_has(
    shortens: bool, lost_s: float, journal: Path
) -> None:
    simulation = simulation_of(journal, shortens=shortens)
    error, _ = stop_worker_1(simulation, scheduler_lost_s=lost_s, replaced_s=1.0)
    assert "it must not go on" in str(error)


def test_the_next_scheduler_turns_a_process_out_whose_seat_is_still_vacant(journal: Path) -> None:
    """No process has come in its place when it wakes up; one comes later."""
    simulation = simulation_of(journal)
    error, ended_s = stop_worker_1(simulation, scheduler_lost_s=20.0, replaced_s=55.0)
    assert "it must not go on" in str(error)
    assert ended_s < 50.0


# -- what is told is written ---------------------------------------------------------------

TOLD = (Vacant, Seated, Members, Roster)


def check_what_it_tells(scheduler: Any, told: set[type]) -> None:
    """The scheduler's journal has its state whenever it tells others of a change."""
    records, send = scheduler.control._records, scheduler.links.send

    def check(peer: str, message: Any, *rest: Any) -> None:
        if isinstance(message, TOLD) or (isinstance(message, StandsBy) and message.for_receiver):
            told.add(type(message))
            assert records._saved == records._charter(), f"{message} is told too early"
        send(peer, message, *rest)

    scheduler.links.send = check


def test_a_change_is_written_before_others_are_told(journal: Path) -> None:
    """A worker and a server are lost and replaced, a new standby comes, a worker leaves."""
    simulation, results, told = simulation_of(journal, standbys=1), dict[int, bytes](), set[type]()
    check_what_it_tells(simulation.scheduler, told)
    _, expected = without_loss(sync_script, journal, standbys=1)

    def lose_worker() -> None:
        assert seats_of(simulation)[11].may_return
        simulation.restart(simulation.workers[1], 0.3)

    simulation.at(8.0, partial(simulation.kill_server, 0))
    simulation.at(9.0, partial(simulation.start_standby, 0))
    simulation.at(20.0, lose_worker)
    simulation.run(slowed(sync_script(results), 0.7))
    simulation.finish()
    assert results == expected
    assert told == {*TOLD, StandsBy}


@pytest.mark.parametrize("after_s", [0.1, 130.0])
def test_a_message_of_the_next_scheduler_before_it_is_asked_is_not_of_the_new_channel(
    after_s: float, journal: Path
) -> None:
    """As the offer of a pipe. Members that wait for long begin several channels."""

    def prepare(node: Postoffice) -> None:
        install(node)
        if node.role is Role.SCHEDULER:
            node.ready.on_done(lambda _: greet(node))

    def greet(node: Postoffice) -> None:
        for member in node.membership.neighbours():
            node.send(member.node_id, StandsBy((), False, 0))  # says nothing to a member

    num_steps, expected = without_loss(sync_script, journal)
    for at_step in range(20, num_steps, 41):
        journal.unlink(missing_ok=True)
        settings = {"rejoin_timeout_s": 300.0, "scheduler_journal": str(journal)}
        simulation = Simulation(1, 2, 1, prepare=prepare, **settings)
        results: Results = {}
        before_step(simulation, at_step, partial(simulation.restart_scheduler, after_s))
        simulation.run(sync_script(results))
        assert results == expected
        simulation.finish()


@pytest.mark.parametrize("fails", [False, True])
def test_a_job_may_have_the_journal_of_one_that_has_ended(fails: bool, journal: Path) -> None:
    _, expected = without_loss(sync_script, journal)
    simulation = simulation_of(journal)
    scheduler, (server,) = simulation.scheduler, simulation.servers
    if fails:
        simulation.at(3.0, lambda: simulation.kill(server))
        with pytest.raises(NodeLostError):
            simulation.run(waits_and_asks)
    else:
        simulation.run(sync_script({}))
        simulation.finish()
        server.leave()
    simulation.until(scheduler.finished.done)
    simulation.until(scheduler.leave().done)
    assert journal.stat().st_size > 0
    scheduler._drain()  # the end of its I/O thread
    assert journal.stat().st_size == 0
    results: Results = {}
    settings = {"rejoin_timeout_s": REJOIN_S, "scheduler_journal": str(journal)}
    Simulation(2, 2, 1, prepare=install, **settings).run(sync_script(results))
    assert results == expected


def test_a_scheduler_refuses_the_journal_of_another_job(journal: Path) -> None:
    simulation = simulation_of(journal)
    simulation.until(partial(is_complete, simulation))
    simulation.kill(simulation.scheduler)
    settings = {"rejoin_timeout_s": 300.0, "scheduler_journal": str(journal)}
    other = Simulation(2, 3, 1, prepare=install, **settings)
    assert isinstance(other.scheduler.error, ConfigError)
    assert "is of a job with 2 workers and 1 servers, this one has 3 and 1" in str(
        other.scheduler.error
    )
