"""A process is killed before each step of the simulation of a small job: the bits stay the same.

The job is the smallest that has all roles: two workers, a server with its standby, and a scheduler
with a journal, for two steps. Larger jobs, with other keys and stores, are killed at some instants
in ``make test``, and at all of them in ``make test-all`` (``test_returning.py``,
``test_standbys.py``, ``test_scheduler_losses.py``).
"""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest

from pslite.errors import NodeLostError
from pslite.testing.simulator import Simulation
from tests.faults.returning import (
    LOST_AFTER_S,
    before_step,
    is_complete,
    simulation_of,
    sync_script,
)

STEPS = 2
VICTIMS = ("worker 0", "worker 1", "server", "standby", "scheduler")


def begun(journal: str) -> Simulation:
    """Return a cluster that is complete."""
    simulation = simulation_of(1, standbys=1, journal=journal, lost_after_s=LOST_AFTER_S)
    simulation.until(lambda: is_complete(simulation))
    return simulation


@cache
def undisturbed() -> tuple[int, bytes]:
    """Return how many steps the simulation takes without a kill, and the weights at the end."""
    simulation, results = begun(""), dict[int, bytes]()
    before = simulation.steps
    simulation.run(sync_script(results, STEPS))
    assert results[0] == results[1]
    return simulation.steps - before, results[0]


def kill(simulation: Simulation, victim: str) -> None:
    if victim == "server":
        simulation.kill_server(0)
    elif victim == "standby":
        simulation.kill_standby(0)
    elif victim == "scheduler":
        simulation.restart_scheduler(0.3)
    else:
        rank = int(victim[-1])
        if not simulation._tasks[rank].over:
            simulation.restart(simulation.workers[rank], 0.3)


@pytest.mark.parametrize("victim", VICTIMS)
def test_any_process_may_be_killed_before_any_step(victim: str, tmp_path: Path) -> None:
    num_steps, expected = undisturbed()
    outcomes: Counter[str] = Counter()
    for at_step in range(1, num_steps + 1):
        simulation, results = begun(str(tmp_path / f"{at_step}")), dict[int, bytes]()
        before_step(simulation, at_step, partial(kill, simulation, victim))
        try:
            simulation.run(sync_script(results, STEPS))
        except NodeLostError:  # a worker that had not begun a step
            outcomes["lost"] += 1
            assert "worker" in victim and not outcomes["the same"], f"killed at step {at_step}"
            continue
        simulation.finish()
        assert set(results.values()) == {expected}, f"other bits: killed at step {at_step}"
        outcomes["the same"] += 1
    assert outcomes["the same"] > num_steps // 2
