"""The rules by which a job ends.

This module is pure: exits, signals and times are its input, :data:`Effect` objects its output.
``supervisor.py`` calls it on the main thread and carries the effects out. ``report.py`` decides
afterwards which exit was the cause. Processes that are started again are in ``restarts.py``.

::

    RUNNING ──all workers ended with 0──> DRAINING ──all processes ended──> ENDED
       │                                     │ after drain_s: warn, stop; after alone_s,
       │                                     │ if no node had joined: a failure, stop
       ├──a process failed──> FAILING ───────┤ after failure_s: stop; or after alone_s,
       │                                     │ if all workers have ended
       │
       ├──a worker failed, or the scheduler was killed, and may be started again──> RUNNING,
       │    after a pause
       │
       ├──a server failed whose standby runs, or a standby failed whose server runs──> RUNNING,
       │    and another standby may be started, after a pause
       │
       └──SIGINT, SIGTERM, SIGHUP──> STOPPING: stronger and stronger signals until all have ended

Service processes (scheduler, servers) end with 0 when every worker has said goodbye to them, which
may be long before the workers exit. So this is not a failure if the whole service ends. If one of
them ends alone, while others and the workers still run, it is a failure.

With ``--restarts``, a worker that fails after all have joined is started again, and asks the
scheduler for its place. If the scheduler gives it no place, it ends the job, and the worker's first
end is the cause. If it does, that end is forgotten. After the last restart, a failure of a worker
fails the job. The others, which wait for a process that will not come, are ended after alone_s.

A scheduler with a journal is started again, too, if a signal killed it, also before all have joined
and while the service ends. It goes on from the journal. Until then, all nodes wait for it. So if no
restart is left, the job fails. If all others end meanwhile, the scheduler has nothing more to do. A
scheduler that ends by itself with an error is not started again: the job has failed.

With ``--standbys``, the scheduler gives the place of a lost server to its standby, which is the
server from then on. Until the scheduler says so, the end of the server is remembered as with a
worker. A server whose standby has ended goes on, and its end is a failure again. With
``--restarts``, a server without a standby gets another one. Its end is a failure until the
scheduler says that the new standby has its state.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from kvstore.launch.job.restarts import (
    MOST_VAIN_STARTS,
    Again,
    Exit,
    Restarts,
    Standbys,
    Timing,
)
from kvstore.launch.plan import JOURNAL_NAME, ProcessSpec


class Phase(enum.Enum):
    RUNNING = enum.auto()
    DRAINING = enum.auto()
    FAILING = enum.auto()
    STOPPING = enum.auto()
    ENDED = enum.auto()


Effect = signal.Signals | str | Exit | Again
"""A signal for the process groups of all running processes; a message for the user; the end of a
process without which the job continues, for a message to the user; or a start."""

_LADDERS: dict[signal.Signals, tuple[signal.Signals, ...]] = {
    signal.SIGINT: (signal.SIGINT, signal.SIGTERM, signal.SIGKILL),
    signal.SIGHUP: (signal.SIGHUP, signal.SIGTERM, signal.SIGKILL),
    signal.SIGTERM: (signal.SIGTERM, signal.SIGKILL),
}


class Lifecycle:
    """Follows one job from its start until all its processes have ended."""

    def __init__(
        self, specs: Sequence[ProcessSpec], timing: Timing, restarts: int = 0, num_used: int = 0
    ) -> None:
        """``restarts`` is how many times processes may be started again.

        ``num_used`` is how many restarts there have been in earlier attempts.
        """
        self.phase = Phase.RUNNING
        self.exits: dict[int, Exit] = {}
        self.interrupted_by: signal.Signals | None = None
        self.failed = False
        self.drain_expired = False
        self.unjoined = False
        self._joined = False
        self._specs = specs
        self._timing = timing
        self._sweep = 0
        self.deadline_s: float | None = None
        """The latest time for the next :meth:`tick`; None if there is no deadline."""
        self._ladder: list[signal.Signals] = []
        self.restarts = Restarts(timing, restarts, num_used)
        self.standbys = Standbys(specs)

    @property
    def due_s(self) -> float | None:
        """The latest time for the next :meth:`tick`; None if nothing is due."""
        deadline = [] if self.deadline_s is None else [self.deadline_s]
        return min([*self.restarts.due.values(), *deadline], default=None)

    @property
    def setbacks(self) -> Mapping[int, Exit]:
        """The first ends of workers that were started again and have no places yet."""
        return self.restarts.setbacks

    @property
    def num_returned(self) -> int:
        """How many times a worker that was started again got its place."""
        return self._num_returns("worker")

    @property
    def num_schedulers(self) -> int:
        """How many times another process has gone on as the scheduler."""
        return self._num_returns("scheduler")

    def _num_returns(self, role: str) -> int:
        returns = self.restarts.returns.items()
        return sum(count for index, count in returns if self._specs[index].role == role)

    @property
    def num_restarts(self) -> int:
        """How many restarts of single processes count for the attempts that may follow."""
        return self.num_returned + self.num_schedulers + self.standbys.num_started

    @property
    def excused(self) -> Set[int]:
        """The processes whose ends are no failures, whatever their status."""
        return self.standbys.excused

    def exited(
        self, statuses: Mapping[int, int], now_s: float, *, is_final: bool = False
    ) -> list[Effect]:
        """Handle the exit statuses, by process index, that one sweep found.

        With ``is_final``, their place cannot start them again.
        """
        if self.phase is Phase.ENDED:
            return []  # a warning has already said that SIGKILL did not end them
        self._sweep += 1
        stopped = self.phase is Phase.STOPPING
        for index, status in statuses.items():
            self.exits[index] = Exit(index, status, now_s, self._sweep, stopped)
        if not is_final:
            self._plan_scheduler(statuses)
        if self._has_scheduler_ended():  # no standby can be filled any more
            self._give_up(self.standbys.unfilled)
        failures, spared = self._sort({i: statuses[i] for i in statuses if i in self.exits})
        may_return = not is_final and self._may_return(failures)
        if may_return and len(failures) <= self.restarts.num_left:
            for index in failures:
                self.restarts.plan(self.exits.pop(index))
            failures = []
        # Without a scheduler, no process can get the place of another.
        awaited = self.standbys.awaited.union(
            index for index in self.setbacks if self._specs[index].role != "scheduler"
        )
        failed = bool(failures) or bool(awaited and self._has_scheduler_ended())
        is_news = failed and self.phase is Phase.RUNNING
        if len(self.exits) == len(self._specs):
            self.failed = self.failed or (failed and not stopped)
            self._enter(Phase.ENDED, None)
        elif self.phase in (Phase.RUNNING, Phase.DRAINING, Phase.FAILING):
            self._settle(failed, now_s)
        if self.phase is not Phase.RUNNING:
            is_wanted = may_return or self._are_killed_schedulers(failures)
            return self._without_restarts(failures, now_s) if is_news and is_wanted else []
        told: list[Effect] = [self.exits[index] for index in spared]
        alone = [self._left_alone(index) for index in spared if self.standbys.is_hopeless(index)]
        self.standbys.remarks += alone
        self._plan_standbys()
        return told + alone

    def _plan_scheduler(self, ended: Collection[int]) -> None:
        """Plan the start of another scheduler if this one was killed.

        A scheduler that ends by itself reports the failure of the job.
        """
        is_draining = self.phase is Phase.DRAINING and self._joined
        is_needed = self.phase is Phase.RUNNING or is_draining
        for index in ended:
            is_killed = self._has_journal(index) and self.exits[index].status < 0
            if is_needed and is_killed and self.restarts.num_left > 0:
                self.restarts.plan(self.exits.pop(index))

    def _has_journal(self, index: int) -> bool:
        """Return whether another process can go on in place of this one: a scheduler."""
        return JOURNAL_NAME in self._specs[index].environment

    def _are_killed_schedulers(self, ended: Collection[int]) -> bool:
        return any(self._has_journal(i) and self.exits[i].status < 0 for i in ended)

    def _without_restarts(self, failures: Sequence[int], now_s: float) -> list[Effect]:
        """Return why these are not started again; do not let the others wait for them."""
        if self.restarts.num_left > 0:
            return []
        if self.restarts.again and self.deadline_s is not None:
            self.deadline_s = min(self.deadline_s, now_s + self._timing.alone_s)
        if self.setbacks or not self.restarts.are_used_up:
            return []  # with a setback, the whole job may start again instead
        names = " and ".join(self._specs[index].name for index in failures)
        return [f"{names} cannot be started again: {self.restarts.used_up}"]

    def _plan_standbys(self) -> None:
        """Plan the starts of standbys for servers that have lost theirs."""
        for index in self.standbys.missing(self.exits) if self._can_follow() else ():
            if self.restarts.num_left > 0:
                self.restarts.plan(self.exits.pop(index), is_setback=False)

    def _left_alone(self, standby: int) -> str:
        return (
            f"server {self._specs[standby].rank} is left without a standby: {MOST_VAIN_STARTS} in "
            "a row have ended before they had its state"
        )

    def _sort(self, statuses: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Return which of these ends are failures, and which only need a message."""
        if self._joined and self.phase is not Phase.STOPPING:
            return self.standbys.sort(statuses, self.exits, can_follow=self._can_follow())
        return [index for index, status in statuses.items() if status != 0], []

    def _can_follow(self) -> bool:
        """Return whether a process can get the place of a lost one."""
        is_running = self.phase is Phase.RUNNING and self._joined
        return is_running and not self._has_scheduler_ended()

    def _may_return(self, failures: Sequence[int]) -> bool:
        """Return whether all that failed are workers, and others can get their places."""
        roles = {self._specs[index].role for index in failures}
        return self._can_follow() and roles == {"worker"}

    def returned(self, rank: int, role: str = "worker", attempt: int = 0) -> None:
        """Handle the scheduler's report that the place of a lost process is taken.

        ``attempt`` is how many processes had it before; 0: it does not matter. The next scheduler
        repeats reports.
        """
        if attempt and not self.restarts.is_news(role, rank, attempt):
            return
        if role == "server":
            self.standbys.returned(rank, self._specs)
            self._plan_standbys()
        elif role == "standby":
            self.standbys.filled(rank, self._specs, self.exits.keys() | self.restarts.due.keys())
        for index, spec in enumerate(self._specs):
            if (spec.role, spec.rank) == (role, rank) and role in ("worker", "scheduler"):
                self.restarts.returned(index)

    def joined(self, now_s: float) -> None:
        """Handle the scheduler's report that all nodes have joined the cluster."""
        is_repeated = self._joined  # by the next scheduler
        self._joined = True
        if self.phase is Phase.DRAINING and not is_repeated:
            self._enter(Phase.DRAINING, now_s + self._timing.drain_s)

    def signalled(self, signal_number: signal.Signals, now_s: float) -> list[Effect]:
        """Handle a signal to the launcher; while stopping, a signal skips the wait."""
        if self.phase is Phase.ENDED:
            return []
        if self.interrupted_by is None:
            self.interrupted_by = signal_number
            if self.phase is not Phase.STOPPING:
                return self._stop(signal_number, now_s)
        return self._next_step(now_s)

    def cannot_start(self, now_s: float, unstarted: Collection[int] = ()) -> list[Effect]:
        """Handle a failed start: end the other processes; ``unstarted`` never ran."""
        for index in unstarted:
            self.exits[index] = Exit(index, 0, now_s, self._sweep, stopped=True)
        if len(self.exits) == len(self._specs):
            self._enter(Phase.ENDED, None)
            return []
        return self._stop(signal.SIGTERM, now_s)

    def tick(self, now_s: float) -> list[Effect]:
        """Act on deadlines that have passed."""
        starts: list[Effect] = [
            replace(again, server=self.standbys.started(again.found.index))
            for again in self.restarts.take(now_s)
        ]
        if starts or self.deadline_s is None or now_s < self.deadline_s:
            return starts
        if self.phase is Phase.STOPPING:
            return self._next_step(now_s)
        if self.phase is Phase.DRAINING and not self._joined:
            self.unjoined = self.failed = True
            return self._stop(signal.SIGTERM, now_s)
        if self.phase is Phase.DRAINING and self._is_service_over():
            return self._stop(signal.SIGTERM, now_s)
        if self.phase is Phase.DRAINING:
            self.drain_expired = True
            warning = (
                f"warning: {self._running_names()} did not end within "
                f"{self._timing.drain_s:g} s of the last worker; ending what is left"
            )
            return [warning, *self._stop(signal.SIGTERM, now_s)]
        self.failed = True
        return self._stop(signal.SIGTERM, now_s)

    def _settle(self, failed: bool, now_s: float) -> None:
        """Update phase and deadline in RUNNING, DRAINING or FAILING from the exits so far."""
        if failed and self.phase is not Phase.FAILING:
            self.failed = True
            self._enter(Phase.FAILING, now_s + self._timing.failure_s)
        if self.phase is Phase.FAILING:
            if self._all_ended(worker=True) and self.deadline_s is not None:
                # Wait a moment even so: a service process may be about to report the cause.
                self.deadline_s = min(self.deadline_s, now_s + self._timing.alone_s)
        elif self._all_ended(worker=True):
            if self.phase is Phase.RUNNING:
                # The scheduler's report may still be on its way. If it has ended with 0, all had
                # joined.
                if not self._joined and self._has_scheduler_ended_well():
                    self._joined = True
                patience_s = self._timing.drain_s if self._joined else self._timing.alone_s
                self._enter(Phase.DRAINING, now_s + patience_s)
            elif not self._joined and self._has_scheduler_ended_well():
                self.joined(now_s)
            if self.deadline_s is not None and self._is_service_over():
                self.deadline_s = min(self.deadline_s, now_s + self._timing.alone_s)
            if len(self.exits) + len(self.restarts.due) == len(self._specs):
                self._enter(Phase.ENDED, None)
        elif self._is_service_over():
            self.deadline_s = None
        elif self.deadline_s is None:
            spared = self.excused | self.standbys.awaited
            if any(self._specs[index].role != "worker" for index in self.exits.keys() - spared):
                self.deadline_s = now_s + self._timing.service_s

    def _stop(self, first: signal.Signals, now_s: float) -> list[Effect]:
        self._enter(Phase.STOPPING, None)
        self._ladder = list(_LADDERS[first])
        return self._next_step(now_s)

    def _next_step(self, now_s: float) -> list[Effect]:
        if not self._ladder:
            if self.deadline_s is not None and now_s < self.deadline_s:
                return []
            self._enter(Phase.ENDED, None)
            return [f"warning: {self._running_names()} did not end even after SIGKILL"]
        step = self._ladder.pop(0)
        patience_s = self._timing.step_s if self._ladder else self._timing.killed_s
        self.deadline_s = now_s + patience_s
        return [step]

    def _enter(self, phase: Phase, deadline_s: float | None) -> None:
        self.phase = phase
        self.deadline_s = deadline_s
        if phase is not Phase.RUNNING:
            is_kept = self._has_journal if phase is Phase.DRAINING else lambda _: False
            self._give_up([index for index in self.restarts.due if not is_kept(index)])
            if len(self.exits) == len(self._specs):
                self.phase, self.deadline_s = Phase.ENDED, None

    def _give_up(self, starts: Iterable[int]) -> None:
        for end in self.restarts.cancel(starts):
            self.exits.setdefault(end.index, end)

    def _all_ended(self, *, worker: bool) -> bool:
        """Return whether all workers, or all others but unfilled standbys, have ended."""
        return all(
            (spec.role == "worker") != worker
            for index, spec in enumerate(self._specs)
            if not (index in self.exits or index in self.standbys.unfilled)
        )

    def _is_service_over(self) -> bool:
        """Return whether none of the service runs but processes that came too late for it.

        These are unfilled standbys, and a scheduler in the place of a lost one.
        """
        late = self.exits.keys() | self.standbys.unfilled.keys() | self.restarts.again
        return all(i in late for i, spec in enumerate(self._specs) if spec.role != "worker")

    def _has_scheduler_ended(self) -> bool:
        return any(self._specs[index].role == "scheduler" for index in self.exits)

    def _has_scheduler_ended_well(self) -> bool:
        ends = ((self._specs[index].role, found.status) for index, found in self.exits.items())
        return ("scheduler", 0) in ends

    def _running_names(self) -> str:
        return ", ".join(
            spec.name for index, spec in enumerate(self._specs) if index not in self.exits
        )
