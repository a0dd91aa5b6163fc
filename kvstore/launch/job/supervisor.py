"""Starts the processes of a job, passes their output on, and sees all of them end.

The shell around ``lifecycle.py``: everything happens on the main thread in one loop over one
selector (what the places have to be listened to, the terminal when it is slow, and a pipe into
which Python writes every signal, SIGCHLD too). No other thread may be started here: children are
forked with a function to run before exec. Read ``lifecycle.py`` first, ``places.py`` next.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvstore.launch.job import places
from kvstore.launch.job.child import Console, die_with_launcher
from kvstore.launch.job.guardian import remove_tree
from kvstore.launch.job.lifecycle import Effect, Lifecycle, Phase, SchedulerLost, SendSignal, Timing
from kvstore.launch.job.places import Connecting, LocalPlace, Place
from kvstore.launch.job.report import EndedProcess, ProcessRecord, without_scheduler
from kvstore.launch.job.signals import ENDING, SignalPipe
from kvstore.launch.job.status_line import JobStatus
from kvstore.launch.job.tie import GuardianProcess
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec

_LAST_OUTPUT_S = 2.0
_FINISHING_S = 10.0  # for places elsewhere to end what is left, besides the patience with it


@dataclass(frozen=True)
class StartFailure:
    """A process could not be started: its program is missing or cannot be executed."""

    spec: ProcessSpec
    error: OSError
    place: str | None = None  # None: this machine


@dataclass(frozen=True)
class JobOutcome:
    """All there is to know when nothing runs any more."""

    specs: Sequence[ProcessSpec]
    ended: Sequence[EndedProcess]
    start_s: float
    failed: bool
    interrupted_by: signal.Signals | None
    drain_expired: bool
    unjoined: bool
    start_failure: StartFailure | None


class Supervisor:
    """Runs one job. Use as ``with Supervisor(...) as s: s.start(...); s.wait()``, once.

    Leaving the block ends whatever still runs, also after an error of our own.
    """

    def __init__(self, job_id: str, environ: Mapping[str, str], log_dir: Path, timing: Timing):
        self._job_id = job_id
        self._environ = environ
        self._log_dir = log_dir
        self._timing = timing
        self._places: list[Place] = []
        self._records: list[ProcessRecord] = []
        self._assigned: list[Place] = []  # by the process's index, as the records
        self._told: list[Place] = []  # to start what is theirs
        self._events: list[places.Event] = []  # from before the lifecycle began
        self._unfinished = 0
        self._start_failure: StartFailure | None = None
        self._start_s = time.monotonic()
        # poll, not epoll: the output may be a regular file, which epoll refuses.
        self._selector = selectors.PollSelector()
        self._signals = SignalPipe()
        self._output = Console(1)
        self._errors = Console(2)
        self._guardian: GuardianProcess | None = None
        self._to_remove: list[Path] = []
        self._joined: socket.socket | None = None
        self._status: JobStatus | None = None
        self._complete = ""

    def __enter__(self) -> Supervisor:
        self._guardian = GuardianProcess(self._job_id, self._environ)
        self.local = LocalPlace(self._job_id, self._guardian)
        self._places.append(self.local)
        self._signals.__enter__()
        self._selector.register(self._signals.fd, selectors.EVENT_READ)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end_status()
        for place in self._places:
            place.hang_up()
        for place in reversed(self._places):
            place.close()
        for record in self._records:
            record.stop_logging()
        for directory in self._to_remove:
            remove_tree(directory)
        if self._guardian is not None:
            self._guardian.dismiss()
        self._selector.close()
        self._signals.__exit__(kind, value, traceback)

    def listen_for_joined(self, pipe: socket.socket) -> None:
        """``pipe`` becomes readable when all nodes have joined; the caller owns it."""
        self._joined = pipe
        self._selector.register(pipe, selectors.EVENT_READ)

    def show_status(self, environment: Mapping[str, str], complete: str) -> None:
        """Say ``complete`` once all have joined, and how the job does while it runs.

        ``environment`` names its scheduler and key.
        """
        self._status = JobStatus(environment, self._errors.fd, die_with_launcher())
        self._complete = complete

    def remove_at_the_end(self, directory: Path) -> None:
        """Remove ``directory`` after all processes have ended, in whatever way that comes about.

        To be called before it is made, so that nothing can stay.
        """
        assert self._guardian is not None
        self._guardian.remove_at_the_end(directory)
        self._to_remove.append(directory)

    def say(self, text: str) -> None:
        """A line of the launcher's own, on standard error."""
        self._write(self._errors, f"[launcher] {text}\n".encode())

    def add_place(self, place: Place) -> None:
        """Serve ``place`` too, which is closed at the end."""
        self._places.append(place)

    def guardian(self) -> GuardianProcess:
        """Return who ends what is left should this process be killed."""
        assert self._guardian is not None
        return self._guardian

    def connect(self, remote: Sequence[Connecting], timeout_s: float | None) -> None:
        """Wait until the agents of all ``remote`` places have greeted; None waits without end.

        Raises :class:`LaunchError` when one cannot, when time is up, or on Ctrl-C and the like.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            for place in remote:
                if place.failure is not None:
                    raise LaunchError(place.failure, exit_code=1)
            awaited = [name for place in remote for name in place.awaited()]
            if not awaited:
                return
            if until_s is not None and time.monotonic() >= until_s:
                names = ", ".join(awaited)
                raise LaunchError(f"no answer from {names} within {timeout_s:g} s", exit_code=1)
            self._wait_for_places(until_s)

    def _wait_for_places(self, until_s: float | None) -> None:
        """Before any process runs: something happens at a place, or it wants to know the time."""
        now_s = time.monotonic()
        due_s = [until_s]
        for place in self._places:
            events, patience_s = place.tick(now_s)
            self._hear_early(events)
            due_s.append(None if patience_s is None else now_s + patience_s)
        first_s = min((due for due in due_s if due is not None), default=None)
        self._adjust_interest()
        ready = self._selector.select(None if first_s is None else max(0.0, first_s - now_s))
        arrived = self._signals.arrived()
        for number in set(arrived) & set(ENDING):
            raise LaunchError(f"ended by {number.name}", exit_code=128 + number)
        for key, _ in ready:
            if isinstance(key.data, Console):
                key.data.write_pending()
            elif key.data is not None:
                self._hear_early(key.data.handle(time.monotonic()))
        if signal.SIGCHLD in arrived:  # after what a child has said
            for place in self._places:
                self._hear_early(place.sweep())

    def _hear_early(self, events: Sequence[places.Event]) -> None:
        for event in events:
            if isinstance(event, places.Note):
                self.say(event.text)
            else:
                self._events.append(event)

    def start(
        self, assigned: Sequence[tuple[ProcessSpec, Place]], variables: Mapping[str, str]
    ) -> None:
        """Start each process at its place; :meth:`wait` reports one that could not be.

        ``variables`` are the environment on this machine, to which each adds its own.
        """
        self._records = [ProcessRecord(spec, at.label, self._log_dir) for spec, at in assigned]
        self._assigned = [place for _, place in assigned]
        for place in self._places:
            self._told.append(place)
            mine = [(index, one[0]) for index, one in enumerate(assigned) if one[1] is place]
            self._events += place.start(mine, variables)
            if any(isinstance(event, places.CannotStart) for event in self._events):
                return

    def wait(self) -> JobOutcome:
        """Serve the job until none of its processes is left; their output has been written."""
        lifecycle = Lifecycle([record.spec for record in self._records], self._timing)
        early, self._events = self._events, []
        self._take_in(lifecycle, early)
        self._sweep(lifecycle)
        while lifecycle.phase is not Phase.ENDED:
            due_s = [lifecycle.deadline_s, self._status.due_s if self._status else None]
            due_s += [self._tick_places(lifecycle)]
            deadline_s = min((due for due in due_s if due is not None), default=None)
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            self._serve(lifecycle, timeout_s)
            self._carry_out(lifecycle.tick(time.monotonic()))
            self._tick_status(lifecycle)
        self._ignore_joined()
        self._finish(lifecycle)
        self._write_last_output(is_interrupted=lifecycle.interrupted_by is not None)
        return self._outcome(lifecycle)

    def _serve(self, lifecycle: Lifecycle, timeout_s: float | None) -> None:
        """Wait for something to happen and handle it: signals and deaths before output."""
        self._adjust_interest()
        ready = self._selector.select(timeout_s)
        arrived = self._signals.arrived()
        for signal_number in arrived:
            if signal_number in ENDING:
                self.say(f"got {signal_number.name}: ending the job")
                self._carry_out(lifecycle.signalled(signal_number, time.monotonic()))
        if any(key.fileobj is self._joined for key, _ in ready):
            self._hear_joined(lifecycle)  # before its end, which may have come meanwhile
        if signal.SIGCHLD in arrived:
            self._sweep(lifecycle)
        self._pass_on(lifecycle, ready)

    def _hear_joined(self, lifecycle: Lifecycle) -> None:
        assert self._joined is not None
        if self._joined.recv(1):  # nothing is read when the scheduler ended without a word
            lifecycle.joined(time.monotonic())
            if self._status is not None:
                self.say(self._complete)
                self._status.begin(time.monotonic())
        self._ignore_joined()

    def _ignore_joined(self) -> None:
        """There is nothing more to hear; a closed pipe would be ready for ever."""
        if self._joined is not None:
            self._selector.unregister(self._joined)
            self._joined = None

    def _sweep(self, lifecycle: Lifecycle) -> None:
        for place in self._places:
            self._take_in(lifecycle, place.sweep())

    def _tick_places(self, lifecycle: Lifecycle) -> float | None:
        """Let the places know the time; when they want to know it again."""
        due_s = []
        now_s = time.monotonic()
        for place in self._places:
            events, patience_s = place.tick(now_s)
            self._take_in(lifecycle, events)
            if patience_s is not None:
                due_s.append(now_s + patience_s)
        return min(due_s, default=None)

    def _take_in(self, lifecycle: Lifecycle, events: Sequence[places.Event]) -> None:
        """What a place has told."""
        for event in events:
            if isinstance(event, places.Output):
                self._show(event)
            elif isinstance(event, places.Started):
                self._records[event.index].pid = event.pid
            elif isinstance(event, places.Ended):
                for index in event.statuses:
                    self._records[index].why = event.why
                self._carry_out(lifecycle.exited(event.statuses, time.monotonic()))
            elif isinstance(event, places.CannotStart):
                self._refuse(lifecycle, event)
            elif isinstance(event, places.Finished):
                self._unfinished -= 1
                if event.left_over:
                    self.say(
                        f"ended {event.left_over} process(es) that the job's processes had left "
                        "running"
                    )
            else:
                self.say(event.text)

    def _refuse(self, lifecycle: Lifecycle, event: places.CannotStart) -> None:
        """No process from ``event.index`` on has started at its place, nor any elsewhere since."""
        if self._start_failure is None:
            spec, label = self._records[event.index].spec, self._assigned[event.index].label
            self._start_failure = StartFailure(spec, event.error, label)
        here = self._assigned[event.index]
        unstarted = [
            index
            for index, place in enumerate(self._assigned)
            if index not in lifecycle.exits
            and self._records[index].pid == 0
            and (place is here or place not in self._told)
        ]
        self._carry_out(lifecycle.cannot_start(time.monotonic(), unstarted))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendSignal):
                for place in self._places:
                    place.send_signal(effect.signal_number)
            elif isinstance(effect, SchedulerLost):
                self._end_status()  # it was the one to ask
                self.say(without_scheduler(self._records[effect.exit.index].ended(effect.exit)))
            else:
                self.say(effect.text)

    def _adjust_interest(self) -> None:
        """Listen to a slow terminal while it owes us room, and to children while there is room."""
        watched = self._selector.get_map()
        for console in (self._output, self._errors):
            if console.waiting and console.fd not in watched:
                self._selector.register(console.fd, selectors.EVENT_WRITE, console)
            elif not console.waiting and console.fd in watched:
                self._selector.unregister(console.fd)
        full = self._output.full or self._errors.full
        for place in self._places:
            place.adjust(self._selector, paused=full)

    def _pass_on(
        self, lifecycle: Lifecycle, ready: Sequence[tuple[selectors.SelectorKey, int]]
    ) -> None:
        for key, _ in ready:
            if isinstance(key.data, Console):
                key.data.write_pending()
            elif isinstance(key.data, JobStatus):
                self._read_status()
            elif key.data is not None:
                self._take_in(lifecycle, key.data.handle(time.monotonic()))

    def _show(self, output: places.Output) -> None:
        record = self._records[output.index]
        console = self._errors if output.is_error else self._output
        try:
            self._write(console, record.record(list(output.lines)))
        except OSError as error:
            record.stop_logging()
            self.say(f"the log of {record.spec.name} ends here: {error.strerror}")

    def _write(self, console: Console, lines: bytes) -> None:
        """Whole lines; a status that stands on the same terminal makes room for them."""
        if not lines:
            return
        is_near = self._status is not None and (console is self._errors or os.isatty(console.fd))
        if self._status is None or not is_near:
            console.write(lines)
            return
        self._errors.write(self._status.display.before_output())
        console.write(lines)
        self._errors.write(self._status.display.after_output())

    # -- the status of the job ---------------------------------------------------------

    def _tick_status(self, lifecycle: Lifecycle) -> None:
        if self._status is None:
            return
        if lifecycle.phase is not Phase.RUNNING:
            self._end_status()
        elif self._status.tick(time.monotonic()):
            self._selector.register(self._status, selectors.EVENT_READ, self._status)

    def _read_status(self) -> None:
        if self._status is None:
            return  # it was ended meanwhile
        written, is_open = self._status.read(time.monotonic())
        if not self._errors.waiting:  # a terminal that is paused need not see all of them later
            self._errors.write(written)
        if not is_open:
            self._end_status()

    def _end_status(self) -> None:
        if self._status is None:
            return
        if self._status.is_asking:
            self._selector.unregister(self._status)
        self._errors.write(self._status.end())
        self._status = None

    def _finish(self, lifecycle: Lifecycle) -> None:
        """See that nothing is left at any place, and that its last output has been shown."""
        leftover_s = self._timing.leftover_s
        self._unfinished = len(self._places)
        for place in reversed(self._places):  # those elsewhere at the same time as this machine
            self._take_in(lifecycle, place.finish(leftover_s))
        until_s = time.monotonic() + leftover_s + _FINISHING_S
        while self._unfinished > 0 and time.monotonic() < until_s:
            self._adjust_interest()
            ready = self._selector.select(until_s - time.monotonic())
            if set(self._signals.arrived()) & set(ENDING):
                return
            self._pass_on(lifecycle, ready)
        if self._unfinished > 0:
            self.say(
                f"{self._unfinished} host(s) did not confirm that nothing is left running there"
            )

    def _write_last_output(self, *, is_interrupted: bool) -> None:
        """Wait for a slow reader as any program does, but a signal means: not much longer."""
        while waiting := [one for one in (self._output, self._errors) if one.waiting]:
            with selectors.PollSelector() as selector:
                selector.register(self._signals.fd, selectors.EVENT_READ)
                for console in waiting:
                    selector.register(console.fd, selectors.EVENT_WRITE)
                ready = selector.select(_LAST_OUTPUT_S if is_interrupted else None)
            if not ready or set(self._signals.arrived()) & set(ENDING):
                return
            for console in waiting:
                console.write_pending()

    def _outcome(self, lifecycle: Lifecycle) -> JobOutcome:
        ended = [
            self._records[index].ended(found) for index, found in sorted(lifecycle.exits.items())
        ]
        return JobOutcome(
            [record.spec for record in self._records],
            ended,
            self._start_s,
            lifecycle.failed,
            lifecycle.interrupted_by,
            lifecycle.drain_expired,
            lifecycle.unjoined,
            self._start_failure,
        )
