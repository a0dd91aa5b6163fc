"""Start the processes of a job, pass their output on, and wait for their end.

This module is the shell around ``lifecycle.py``. Everything happens on the main thread, in one loop
over one selector: the places' descriptors, the terminal when it is slow, and a pipe into which
Python writes every signal, SIGCHLD too. No other thread may be started here, because children are
forked with a function to run before exec. Read ``lifecycle.py`` first, ``places.py`` next.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvstore.launch.job import places
from kvstore.launch.job.guardian import GuardianProcess, remove_tree
from kvstore.launch.job.lifecycle import Effect, Lifecycle, Phase
from kvstore.launch.job.places import LocalPlace, Place
from kvstore.launch.job.report import (
    EXIT_CANNOT_EXECUTE,
    JobReport,
    ProcessRecord,
    cannot_start,
    goes_on,
    starts_again,
    starts_standby,
)
from kvstore.launch.job.restarts import Again, Exit, Timing
from kvstore.launch.job.signals import ENDING, SignalPipe
from kvstore.launch.job.terminal import Terminal
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec

_FINISHING_S = 10.0  # for other machines to end left-over processes, after leftover_s


class Supervisor:
    """The supervisor of one job.

    Use it once, as ``with Supervisor(...) as s: s.start(...); s.wait()``.

    Leaving the block ends all processes that still run, even after an internal error.
    """

    def __init__(self, job_id: str, environ: Mapping[str, str], log_dir: Path, timing: Timing):
        self.job_id = job_id
        self._environ = environ
        self._log_dir = log_dir
        self._timing = timing
        self._places: list[Place] = []
        self._records: list[ProcessRecord] = []
        self._assigned: list[Place] = []  # by the process's index, like the records
        self._lifecycle: Lifecycle | None = None  # set by start
        self._unfinished = 0
        self._start_failure: LaunchError | None = None
        self._start_s = time.monotonic()
        self._signals = SignalPipe()
        self.terminal = Terminal()
        self._to_remove: list[Path] = []
        self.joined: places.SchedulerLines | None = None
        """What the scheduler says about the members; the caller owns its socket."""

    def __enter__(self) -> Supervisor:
        self.guardian = GuardianProcess(self.job_id, self._environ)
        self.local = LocalPlace(self.job_id, self.guardian)
        self._places.append(self.local)
        self._signals.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.terminal.end_status()
        for place in self._places:
            place.hang_up()
        for place in reversed(self._places):
            place.close()
        for record in self._records:
            record.stop_logging()
        for directory in self._to_remove:
            remove_tree(directory)
        self.guardian.dismiss()
        self._signals.__exit__()

    def remove_at_the_end(self, directory: Path) -> None:
        """Remove ``directory`` after all processes have ended, however they end.

        Call this before creating the directory, so that it is always removed.
        """
        self.guardian.remove_at_the_end(directory)
        self._to_remove.append(directory)

    def add_place(self, place: Place) -> None:
        """Serve ``place`` too, and close it at the end."""
        self._places.append(place)

    def connect(self, remote: Sequence[Place], timeout_s: float | None) -> None:
        """Wait for the agents of all ``remote`` places; None means without a limit.

        Raises :class:`LaunchError` if one cannot connect, if time is up, or on Ctrl-C or another
        signal.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            failures = [place.failure for place in remote if place.failure is not None]
            awaited = [name for place in remote for name in place.awaited()]
            if awaited and until_s is not None and time.monotonic() >= until_s:
                failures.append(f"no answer from {', '.join(awaited)} within {timeout_s:g} s")
            if failures:
                raise LaunchError(failures[0], exit_code=1)
            if not awaited:
                return
            self._turn(until_s)

    def start(
        self,
        assigned: Sequence[tuple[ProcessSpec, Place]],
        variables: Mapping[str, str],
        restarts: int = 0,
        num_used: int = 0,
    ) -> None:
        """Start each process at its place; :meth:`wait` reports a failed start.

        ``variables`` are the environment on this machine; each process adds its own.
        ``restarts`` is how many times processes may be started again; ``num_used`` is how many
        restarts there have been in earlier attempts.
        """
        self._records = [ProcessRecord(spec, at.label, self._log_dir) for spec, at in assigned]
        self._assigned = [place for _, place in assigned]
        specs = [spec for spec, _ in assigned]
        self._lifecycle = Lifecycle(specs, self._timing, restarts, num_used)
        for place in self._places:  # this machine first
            mine = [(index, one[0]) for index, one in enumerate(assigned) if one[1] is place]
            self._take_in(place.start(mine, variables))
            if self._start_failure is not None:
                return

    def wait(self) -> JobReport:
        """Serve the job until all its processes have ended and their output is written.

        Raises :class:`LaunchError` if a process could not be started.
        """
        job = self._lifecycle
        assert job is not None
        self._take_in(event for place in self._places for event in place.sweep())
        while job.phase is not Phase.ENDED:
            self._turn(None)
        self.joined = None
        self._finish()
        self.terminal.write_last(self._signals, is_interrupted=job.interrupted_by is not None)
        if self._start_failure is not None:
            raise self._start_failure
        records = {i: one for i, one in enumerate(self._records) if i not in job.excused}
        ended = [one.ended(job.exits[i]) for i, one in records.items() if i in job.exits]
        specs = [record.spec for record in records.values()]
        ends = (self._records[index].setback for index in job.setbacks)
        setbacks = [end for end in ends if end is not None]
        told_to_end = self._signals.told_to_end()
        return JobReport(job, specs, ended, self._start_s, told_to_end, setbacks)

    def _turn(self, until_s: float | None) -> bool:
        """Wait until something happens or until ``until_s``, and handle it.

        Signals and ended processes are handled before output. Returns whether a signal told the
        launcher to end.
        """
        now_s = time.monotonic()
        due_s = [until_s, self.terminal.due_s]
        for place in self._places:
            events, patience_s = place.tick(now_s)
            self._take_in(events)
            due_s.append(None if patience_s is None else now_s + patience_s)
        if self._lifecycle is not None:
            due_s.append(self._lifecycle.due_s)
        first_s = min((due for due in due_s if due is not None), default=None)
        with selectors.PollSelector() as selector:  # epoll refuses regular files
            selector.register(self._signals.fd, selectors.EVENT_READ)
            if self.joined is not None:
                selector.register(self.joined.socket, selectors.EVENT_READ)
            self.terminal.adjust(selector)
            for place in self._places:  # read children's output only while the terminal has room
                place.adjust(selector, paused=self.terminal.is_full)
            ready = selector.select(None if first_s is None else max(0.0, first_s - now_s))
        arrived = self._signals.arrived()
        ending = [number for number in arrived if number in ENDING]
        for number in ending:
            self._end_by(number)
        heard = self.joined
        if heard and self._lifecycle and any(key.fileobj is heard.socket for key, _ in ready):
            # Before handling the scheduler's end: if it has ended too, there may be no byte to
            # read.
            news = heard.read()
            self._take_in(news or ())
            if news is None:
                self.joined = None  # a closed pipe would be ready for ever
        if signal.SIGCHLD in arrived:
            self._take_in(event for place in self._places for event in place.sweep())
        for key, _ in ready:
            if key.data is not None:
                self._take_in(key.data(time.monotonic()))
        if self._lifecycle is not None:
            self._carry_out(self._lifecycle.tick(time.monotonic()))
            if self._lifecycle.phase is Phase.RUNNING:
                self.terminal.tick(time.monotonic())
            else:
                self.terminal.end_status()
        return bool(ending)

    def _end_by(self, number: signal.Signals) -> None:
        if self._lifecycle is None:
            raise LaunchError(f"ended by {number.name}", exit_code=128 + number)
        if self._lifecycle.phase is not Phase.ENDED:
            self.terminal.say(f"got {number.name}: ending the job")
            self._carry_out(self._lifecycle.signalled(number, time.monotonic()))

    def _take_in(self, events: Iterable[places.Event]) -> None:
        """Handle the events of a place; before the start, handle only notes."""
        for event in events:
            if isinstance(event, places.Note):
                self.terminal.say(event.text)
            elif self._lifecycle is None:
                continue
            elif isinstance(event, places.Output):
                record = self._records[event.index]
                try:
                    lines = record.record(list(event.lines))
                    self.terminal.write(lines, is_error=event.is_error)
                except OSError as error:
                    record.stop_logging()
                    self.terminal.say(f"the log of {record.spec.name} ends here: {error.strerror}")
            elif isinstance(event, places.Started):
                self._records[event.index].pid = event.pid
            elif isinstance(event, places.Ended):
                for index in event.statuses:
                    self._records[index].why = event.why
                can_return = all(self._assigned[each].can_start_again for each in event.statuses)
                is_final = event.why is not None or not can_return
                now_s = time.monotonic()
                self._carry_out(self._lifecycle.exited(event.statuses, now_s, is_final=is_final))
            elif isinstance(event, places.Returned):
                before = self._lifecycle.num_schedulers
                self._lifecycle.returned(event.rank, event.role, event.attempt)
                if self._lifecycle.num_schedulers > before:
                    self.terminal.say("another scheduler goes on in place of the lost one")
            elif isinstance(event, places.CannotStart):
                self._refuse(self._lifecycle, event)
            elif isinstance(event, places.Located):
                self._records[event.index].label = event.label
            elif isinstance(event, places.Joined):
                self._lifecycle.joined(time.monotonic())
                self.terminal.begin_status(time.monotonic())
            else:
                self._unfinished -= 1
                if (count := event.left_over) > 0:
                    what = f"{count} process(es) that the job's processes had left running"
                    self.terminal.say(f"ended {what}")

    def _refuse(self, lifecycle: Lifecycle, event: places.CannotStart) -> None:
        """Handle a failed start: no process from ``event.index`` on has started.

        A failure on this machine comes first: then no process was started on the others either. A
        standby that cannot be started again counts as ended: its server goes on.
        """
        here = self._assigned[event.index]
        if event.index in lifecycle.standbys.unfilled:
            self._records[event.index].why = f"it cannot be started: {event.text}"
            statuses = {event.index: EXIT_CANNOT_EXECUTE}
            self._carry_out(lifecycle.exited(statuses, time.monotonic()))
            return
        if self._start_failure is None:
            spec = self._records[event.index].spec
            self._start_failure = cannot_start(spec, here.label, event.number, event.text)
        unstarted = [
            index
            for index, place in enumerate(self._assigned)
            if index not in lifecycle.exits
            and (self._records[index].pid == 0 or index == event.index)
            and (place is here or here is self.local)
        ]
        self._carry_out(lifecycle.cannot_start(time.monotonic(), unstarted))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, signal.Signals):
                for place in self._places:
                    place.send_signal(effect)
            elif isinstance(effect, Again):
                self._start_again(effect, self._lifecycle)
            elif isinstance(effect, Exit):
                lost = self._records[effect.index].ended(effect)
                if lost.spec.role == "scheduler":  # it was the source of the status
                    self.terminal.end_status()
                awaited = self._lifecycle.standbys.awaited if self._lifecycle else ()
                self.terminal.say(goes_on(lost, is_awaited=effect.index in awaited))
            else:
                self.terminal.say(effect)

    def _start_again(self, again: Again, lifecycle: Lifecycle | None) -> None:
        """Start a worker again that has failed, another standby, or another scheduler."""
        assert lifecycle is not None
        index = again.found.index
        record, ended = self._records[index], self._records[index].ended(again.found)
        if again.server is not None:
            self._let_stand_by(index, again.server)
            self.terminal.say(starts_standby(record, lifecycle.restarts.count(index)))
        else:
            if lifecycle.setbacks[index] is again.found:
                record.setback = ended
            if record.spec.role == "scheduler":  # it was the source of the status
                self.terminal.pause_status()
            self.terminal.say(starts_again(ended, lifecycle.restarts.count(index)))
        environment = dict(record.spec.environment)
        attempt = int(environment.get("DMLC_NUM_ATTEMPT", "0")) + again.number
        environment["DMLC_NUM_ATTEMPT"] = str(attempt)
        spec = replace(record.spec, environment=environment)
        self._take_in(self._assigned[index].start_again(index, spec))

    def _let_stand_by(self, index: int, server: int) -> None:
        """Make a process the standby of a server, on another host if there is one."""
        record, primary = self._records[index], self._records[server]
        if record.spec.role == "server":  # the standby has taken its place
            record.trade_seats(primary)
        places = (self._assigned[index], *self._assigned[1:])  # the scheduler is the first process
        able = [place for place in places if place.can_start_again]
        apart = [place for place in able if place.label != self._assigned[server].label]
        for place in (apart + able)[:1]:
            self._assigned[index] = place
            record.label, record.why = place.label, None

    def _finish(self) -> None:
        """End left-over processes at all places, and show their last output."""
        leftover_s = self._timing.leftover_s
        self._unfinished = len(self._places)
        for place in reversed(self._places):  # other machines work at the same time as this one
            self._take_in(place.finish(leftover_s))
        until_s = time.monotonic() + leftover_s + _FINISHING_S
        while self._unfinished > 0 and time.monotonic() < until_s:
            if self._turn(until_s):
                return
        if self._unfinished > 0:
            self.terminal.say(
                f"{self._unfinished} host(s) did not confirm that nothing is left running there"
            )
