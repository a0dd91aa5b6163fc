"""The scheduler is lost and another process goes on from its journal: nothing else changes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.server import install
from pslite.testing.simulator import Simulation
from tests.faults import returning
from tests.faults.returning import MakeScript, Results, async_script, before_step, sync_script

SCRIPTS: dict[str, MakeScript] = {
    "sync": sync_script,
    "async": async_script,
    "rows": returning.ROWS["lazy"],
}


def simulation_of(journal: Path, seed: int = 1, **settings: Any) -> Simulation:
    """A cluster whose scheduler has a new journal."""
    journal.unlink(missing_ok=True)
    return Simulation(
        seed,
        2,
        settings.pop("num_servers", 1),
        settings.pop("faults", None),
        prepare=install,
        rejoin_timeout_s=60.0,
        scheduler_journal=str(journal),
        **settings,
    )


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("standbys", [0, 1])
@pytest.mark.parametrize("after_s", [0.1, 20.0])
def test_the_scheduler_may_be_replaced_at_any_step(
    name: str, standbys: int, after_s: float, journal: Path
) -> None:
    make = SCRIPTS[name]
    expected: Results = {}
    plain = simulation_of(journal, standbys=standbys)
    plain.run(make(expected))
    plain.finish()
    for at_step in range(1, plain.steps, 37):
        simulation, results = simulation_of(journal, standbys=standbys), dict[int, bytes]()
        before_step(simulation, at_step, partial(simulation.restart_scheduler, after_s))
        simulation.run(make(results))
        simulation.finish()
        assert results == expected, f"killed at step {at_step}"
