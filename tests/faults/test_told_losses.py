"""What is told of losses: who was lost, who took the place after how long, what is repeated."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pslite import Postoffice
from pslite.ids import SCHEDULER_ID, NodeInfo, Role, node_id
from pslite.testing.simulator import Simulation
from tests.faults.returning import (
    before_step,
    returning_of,
    simulation_of,
    sync_script,
    without_kill,
)

WORKER_1, SERVER_0 = node_id(Role.WORKER, 1), node_id(Role.SERVER, 0)
NOTHING = {
    "job_restarts": 0,
    "replaced_schedulers": 0,
    "replaced_servers": 0,
    "replaced_workers": 0,
    "waited_for_lost_s": 0.0,
    "without_scheduler_s": 0.0,
    "repeated_steps": 0,
}


@dataclass
class Heard:
    """When worker 0 hears what: the virtual seconds of a loss and of what follows it."""

    vacant: dict[int, float] = field(default_factory=dict)
    seated: dict[int, float] = field(default_factory=dict)

    def watch(self, node: Postoffice) -> None:
        """Note what this node hears."""
        control: Any = node.control
        vacated = control._vacated

        def note_vacated(message: Any, now: float) -> None:
            self.vacant.setdefault(message.node, now)
            vacated(message, now)

        def note_seated(member: NodeInfo) -> None:
            self.seated.setdefault(member.node_id, node.clock())

        control._vacated = note_vacated
        control.on_seated.append(note_seated)


def happened(simulation: Simulation) -> list[tuple[float, str]]:
    """The scheduler's events with their virtual times; pids and reasons are left out."""
    events = list(simulation.scheduler.reporter.last_events)
    return [(at, re.sub(r" \(pid \d+ on .*?\)|: its .*?(?=;)", "", text)) for at, text in events]


def losses(node: Postoffice) -> dict[str, Any]:
    return returning_of(node).losses()


def ran(simulation: Simulation, kill: Callable[[], None], when: float = 0.67) -> Heard:
    """Run the training to its end; ``kill`` after a share of it. Worker 0 is being watched."""
    num_steps, expected = without_kill(sync_script)
    heard, results = Heard(), dict[int, bytes]()
    heard.watch(simulation.workers[0])
    before_step(simulation, int(num_steps * when), kill)
    simulation.run(sync_script(results))
    assert set(results.values()) == {expected}
    return heard


def test_nothing_is_told_of_a_job_in_which_nothing_is_lost() -> None:
    simulation = simulation_of(1)
    ran(simulation, lambda: None)
    assert happened(simulation) == []
    assert [losses(node) for node in simulation.workers] == [NOTHING, NOTHING]


def test_a_restart_of_the_whole_job_is_told_of_once(tmp_path: Path) -> None:
    simulation = simulation_of(
        1, journal=str(tmp_path / "journal"), job_restarts=2, restart_cause="server 0 ended"
    )
    ran(simulation, lambda: simulation.restart_scheduler(20.0), 0.3)
    assert [text for _, text in happened(simulation)] == [
        "restart 2 of the job: server 0 ended",
        "scheduler takes the place of scheduler, which was lost",
    ]
    assert [losses(node)["job_restarts"] for node in simulation.workers] == [2, 2]


@pytest.mark.parametrize("role", [Role.SERVER, Role.WORKER])
def test_a_process_that_gets_its_place_from_the_next_scheduler_waits_for_no_other(
    role: Role, tmp_path: Path
) -> None:
    """It is lost together with the scheduler, and on one machine all see that at once."""
    simulation = simulation_of(1, standbys=1, journal=str(tmp_path / "journal"), one_machine=True)

    def kill() -> None:
        simulation.restart_scheduler(2.0)
        if role is Role.SERVER:
            simulation.kill_server(0)
        else:
            simulation.restart(simulation.workers[1], 1.0)

    ran(simulation, kill)
    lost, taken = (text for _, text in happened(simulation)[1:3])
    assert lost.startswith(f"{role.value} ") and "takes the place" in taken
    for node in (*simulation.servers, *simulation.workers):
        control: Any = node.control
        assert node.error is None and not control._away.is_awaited, node.van.uid


def test_a_replaced_worker_is_told_of_with_what_it_repeats_and_how_long_it_took() -> None:
    simulation = simulation_of(1)
    heard = ran(simulation, lambda: simulation.restart(simulation.workers[1], 30.0))
    (lost_at, lost), (taken_at, taken), (repeated_at, repeated) = happened(simulation)
    took_s = taken_at - lost_at
    assert 20.0 < took_s < 30.0  # it takes a while to notice the loss
    lost, _, advice = lost.partition(" (")
    assert lost == "worker 1 is lost; another process may take its place"
    assert re.fullmatch(r"if this one only hangs, end it: kill -9 \d+\)", advice)
    assert taken == f"worker 1 takes the place of worker 1 after {took_s:.2f} s"
    step = returning_of(simulation.workers[1]).found.result().step
    after_s = repeated_at - lost_at
    assert repeated == f"worker 1 repeats step {step}, {after_s:.2f} s after the loss"
    waited_s = heard.seated[WORKER_1] - heard.vacant[WORKER_1]
    assert waited_s == pytest.approx(took_s, abs=0.5)  # until all members know it
    others, its = map(losses, simulation.workers)
    assert others == {**NOTHING, "replaced_workers": 1, "waited_for_lost_s": waited_s}
    assert its == {**NOTHING, "replaced_workers": 1, "repeated_steps": 1}


def test_a_worker_waits_for_a_lost_server_until_its_place_is_taken() -> None:
    simulation = simulation_of(1, standbys=1)
    heard = ran(simulation, lambda: simulation.kill_server(0))
    (lost_at, lost), (taken_at, taken) = happened(simulation)
    assert lost == "server 0 is lost; another process may take its place"
    took_s = taken_at - lost_at
    assert taken == f"server 0, the standby, takes the place of server 0 after {took_s:.2f} s"
    waited_s = heard.seated[SERVER_0] - heard.vacant[SERVER_0]
    found = losses(simulation.workers[0])
    assert found == {**NOTHING, "replaced_servers": 1, "waited_for_lost_s": waited_s}


def test_the_time_without_a_scheduler_is_told_apart(tmp_path: Path) -> None:
    simulation = simulation_of(1, journal=str(tmp_path / "journal"))
    node, away = simulation.workers[0], []
    control: Any = node.control
    lost, found = control._away.lost, control._away.found

    def note_lost(*arguments: Any) -> None:
        away.append(node.clock())
        lost(*arguments)

    def note_found(*arguments: Any) -> None:
        if control._away.is_awaited:
            away.append(node.clock())
        found(*arguments)

    control._away.lost, control._away.found = note_lost, note_found
    ran(simulation, lambda: simulation.restart_scheduler(20.0), 0.3)
    assert [text for _, text in happened(simulation)] == [
        "scheduler takes the place of scheduler, which was lost"
    ]
    without_s = away[-1] - away[0]
    assert 10.0 < without_s < 20.0  # it takes a while to notice the loss
    assert losses(node) == {
        **NOTHING,
        "replaced_schedulers": 1,
        "without_scheduler_s": pytest.approx(without_s),
    }
    assert node.membership.attempts[SCHEDULER_ID] == 1


@pytest.mark.parametrize("shortens", [False, True])
def test_the_next_scheduler_knows_what_has_happened_before(shortens: bool, tmp_path: Path) -> None:
    seed = 1 if shortens else 2
    simulation = simulation_of(seed, standbys=1, journal=str(tmp_path / "journal"))
    before: list[tuple[float, str]] = []

    def script(node: Postoffice) -> Any:
        yield node.ready
        yield 40.0
        if node is simulation.workers[0]:
            before.extend(happened(simulation))
            simulation.restart_scheduler(5.0)
        yield 20.0

    simulation.at(5.0, lambda: simulation.kill_server(0))
    simulation.run(script)
    simulation.finish()
    *known, (_, last) = happened(simulation)
    assert len(before) == 2 and known == before
    assert last == "scheduler takes the place of scheduler, which was lost"


def test_a_process_that_joins_later_knows_whom_others_have_replaced(tmp_path: Path) -> None:
    simulation = simulation_of(1, standbys=1, journal=str(tmp_path / "journal"))

    def kill() -> None:
        simulation.kill_server(0)
        simulation.restart_scheduler(0.5)
        simulation.at(
            simulation.now + 20.0, lambda: simulation.restart(simulation.workers[1], 10.0)
        )

    def script(node: Postoffice) -> Any:
        yield node.ready
        keeper = returning_of(node)
        kept = yield keeper.found
        if kept is None:
            yield keeper.keep(keeper.begin_loop(), 0, b"")
            if node.rank == 0:
                kill()
        else:
            keeper.begin_loop()
            keeper.repeat(kept)
        yield 60.0

    simulation.run(script)
    found = losses(simulation.workers[1])
    counts = [found[f"replaced_{role.value}s"] for role in (Role.WORKER, Role.SERVER)]
    assert (counts, found["replaced_schedulers"]) == ([1, 1], 1)


def test_a_standby_that_waits_for_its_turn_says_so_now_and_then() -> None:
    """The scheduler tells it every second, as a sign of life."""
    simulation = simulation_of(1, standbys=1)
    simulation.at(1.0, lambda: simulation.start_standby(0))

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        yield 31.0

    simulation.run(script)
    whom = "the end of the standby of server 0, to take its place"
    said = [float(line.split()[0]) for line in simulation.lines if f"waiting for {whom}" in line]
    assert len(said) == 5 and min(b - a for a, b in pairwise(said)) > 4.0, said
