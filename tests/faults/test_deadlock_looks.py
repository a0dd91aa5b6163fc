"""Simulated jobs under faults: who goes on is never told of a deadlock, and one is found."""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest

from kvstore.server import install
from kvstore.stores.dist.store import create_dist
from pslite import WORKER_GROUP, Future, Postoffice
from pslite.errors import DeadlockError
from pslite.testing.simulator import Faults, Simulation
from pslite.wire.survey import Progressed

FAULTS = Faults(duplicate=0.05, delay=0.15, delay_s=(0.01, 3.0), reorder=0.1)
"""What is delayed is under way for longer than the pause between two looks."""
SIZE = 40


class OneThread:
    """What a worker's script, which has one thread, waits for."""

    def __init__(self, simulation: Simulation, node: Postoffice) -> None:
        self._simulation = simulation
        self._node = node
        self._waits_for: Future[Any] | None = None
        self._count = 0
        self._ended: Future[Any] = Future()
        node.reporter.progress = self

    def wait(self, future: Future[Any]) -> Future[Any]:
        """What the script is to yield; it says all the time that it has waited for long."""
        self._waits_for, self._count = future, self._count + 1
        self._ended = ended = Future[Any](future.describer())
        future.on_done(lambda _: self._end(ended, future.error()))
        self._speak(ended)
        return ended

    def _end(self, ended: Future[Any], error: BaseException | None) -> None:
        if error is not None:
            ended.set_error(error)
        ended.set_result(None)

    def _speak(self, ended: Future[Any]) -> None:
        if not ended.done():
            self._node.report_long_wait()
            simulation = self._simulation
            simulation.at(simulation.now + 0.1, lambda: self._speak(ended))

    def go_on(self) -> None:
        self._waits_for = None

    def stuck(self) -> tuple[int, list[str]] | None:
        if self._waits_for is None or self._ended.done():
            return None
        return self._count, [self._waits_for.what]

    def deadlocked(self, text: str) -> None:
        self._ended.set_error(DeadlockError(text))

    def progressed(self) -> Progressed:
        return Progressed(0, 0, 0.0, 0.0, 0.0, 0.0)

    def waits(self) -> list[Any]:
        return []


def script_of(
    simulation: Simulation, seed: int, rounds: int, *, last: str, found: list[str]
) -> Any:
    """A worker that makes the calls of all, at times of its own, and then ``last``."""

    def script(node: Postoffice) -> Generator[Any, Any, None]:
        yield node.ready
        store = create_dist("dist_sync", "dist_sync", node=node)
        thread = OneThread(simulation, node)
        calls, pauses = random.Random(seed), random.Random(seed * 31 + node.rank)
        out = np.zeros(SIZE)
        yield thread.wait(store.init_async("w", out))
        for step in range(rounds):
            thread.go_on()
            yield pauses.choice([0.0, 0.3, 3.0])
            kind = calls.choice(["round", "barrier", "init"])
            if kind == "round":
                store.push_async("w", np.ones(SIZE))
                yield thread.wait(store.pull_async("w", out))
            elif kind == "barrier":
                yield thread.wait(node.barrier(WORKER_GROUP))
            else:
                yield thread.wait(store.init_async(f"w{step}", np.ones(SIZE)))
        if last == "barrier":
            future: Future[Any] = node.barrier(WORKER_GROUP)
        elif last == "round":
            store.push_async("w", np.ones(SIZE))
            future = store.pull_async("w", out)
        else:
            future = store.init_async("never", out)
        try:
            yield thread.wait(future)
        except DeadlockError as error:
            found.append(str(error))

    return script


@pytest.mark.parametrize("seed", range(12))
def test_a_job_that_goes_on_is_never_told_of_a_deadlock(seed: int) -> None:
    simulation = Simulation(seed, 3, 2, FAULTS, prepare=install, resend_timeout_s=20.0)
    found: list[str] = []
    simulation.run(script_of(simulation, seed, 12, last="barrier", found=found))
    assert found == []
    assert not [line for line in simulation.lines if "wait for each other" in line]


@pytest.mark.parametrize("seed", range(6))
def test_workers_that_wait_for_each_other_are_all_told(seed: int) -> None:
    simulation = Simulation(seed, 3, 2, FAULTS, prepare=install, resend_timeout_s=20.0)
    found: list[str] = []
    lasts = [("barrier", "init", "round"), ("round", "init", "barrier")][seed % 2]
    scripts = [script_of(simulation, seed, 2, last=last, found=found) for last in lasts]
    simulation.run(*scripts, limit_s=600.0)
    assert len(found) == 3
    assert len(set(found)) == 1
    for rank in range(3):
        assert f"worker {rank} waits in " in found[0]
