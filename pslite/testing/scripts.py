"""What runs beside the nodes of a simulation: scripts, and the work of pools.

Both stop when their process is stopped, and end when it is killed. Read next: ``simulator.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from random import Random
from typing import Any, Protocol

from pslite.future import Future
from pslite.node.pool import Work
from pslite.node.postoffice import Postoffice

Script = Callable[[Postoffice], Generator[Any, Any, None]]


class Surroundings(Protocol):
    """What scripts and pools use of a simulation."""

    random: Random
    now: float
    launcher: Callable[[int, BaseException], bool] | None
    _tasks: list[Task]

    def at(self, time: float, event: Work) -> None: ...

    def defer(self, uid: str, work: Work) -> bool: ...

    def slowness(self, uid: str) -> float: ...


class SimulatedPool:
    """Work takes random virtual time; lanes keep their order. It stops with its node."""

    def __init__(self, simulation: Surroundings, uid: str) -> None:
        self._simulation = simulation
        self._uid = uid
        self._free_at: dict[int, float] = {}
        self._num_jobs = 0

    def submit(self, lane: int, work: Work) -> None:
        def run() -> None:
            if not simulation.defer(self._uid, run):
                work()
                self._num_jobs -= 1

        self._num_jobs += 1
        simulation = self._simulation
        begin = max(self._free_at.get(lane, 0.0), simulation.now)
        took_s = simulation.random.random() * 0.01 * simulation.slowness(self._uid)
        self._free_at[lane] = begin + took_s
        simulation.at(self._free_at[lane], run)

    def is_idle(self, lane: int) -> bool:
        return False  # otherwise nothing could happen while a round is being applied

    @property
    def num_jobs(self) -> int:
        return self._num_jobs

    def close(self, timeout_s: float = 0.0) -> bool:
        return True


class Task:
    """A running script."""

    def __init__(self, simulation: Surroundings, node: Postoffice, script: Script) -> None:
        self._simulation = simulation
        self.node = node
        self.script = script
        self._steps = script(node)
        self._waits_for: Future[Any] | None = None
        self.over = False
        #: Whether its process was killed; if it is not over, another one will begin the script.
        self.is_stopped = False
        self.error: BaseException | None = None

    def wake(self, done: Future[Any] | None = None) -> None:
        """Continue at the current virtual time, after the code that runs now."""
        self._simulation.at(self._simulation.now, lambda: self._advance(done))

    def _advance(self, done: Future[Any] | None) -> None:
        simulation = self._simulation
        if self.over or self.is_stopped:
            return
        if simulation.defer(self.node.van.uid, lambda: self._advance(done)):
            return
        try:
            error = done.error() if done is not None else None
            if error is not None:
                wanted = self._steps.throw(error)
            else:
                wanted = self._steps.send(done.result(0.0) if done is not None else None)
        except StopIteration:
            self.over = True
            return
        except BaseException as failure:
            self._failed(failure)
            return
        if isinstance(wanted, Future):
            self._waits_for = wanted
            wanted.on_done(self.wake)
        else:
            self._waits_for = None
            self._simulation.at(self._simulation.now + float(wanted), lambda: self._advance(None))

    def _failed(self, failure: BaseException) -> None:
        simulation = self._simulation
        rank = next((i for i, task in enumerate(simulation._tasks) if task is self), None)
        if rank is not None and simulation.launcher is not None:
            self.is_stopped = simulation.launcher(rank, failure)
        if not self.is_stopped:
            self.fail(failure)

    def fail(self, failure: BaseException) -> None:
        """End with an error, which ends the run."""
        self.over, self.error = True, failure

    def describe(self) -> str:
        waited = self._waits_for
        what = "sleeps" if waited is None else waited.what
        return f"{self.node.log.name} waits for {what}"
