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
from functools import partial
from pathlib import Path
from types import TracebackType

from kvstore.launch.job import places
from kvstore.launch.job.child import Console, die_with_launcher
from kvstore.launch.job.guardian import GuardianProcess, remove_tree
from kvstore.launch.job.lifecycle import Effect, Lifecycle, Phase, SchedulerLost, SendSignal, Timing
from kvstore.launch.job.places import Connecting, LocalPlace, Place, watch
from kvstore.launch.job.report import JobReport, ProcessRecord, cannot_start, without_scheduler
from kvstore.launch.job.signals import ENDING, SignalPipe
from kvstore.launch.job.status_line import JobStatus
from kvstore.launch.options import LaunchError
from kvstore.launch.plan import ProcessSpec

_LAST_OUTPUT_S = 2.0
_FINISHING_S = 10.0  # for places elsewhere to end what is left, besides the patience with it


class Terminal:
    """The launcher's standard output and error, and the job's status that stands on them."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._output = Console(1)
        self._errors = Console(2)
        self._status: JobStatus | None = None
        self._complete = ""

    @property
    def is_full(self) -> bool:
        """So much waits to be written that no more should be read."""
        return self._output.full or self._errors.full

    @property
    def due_s(self) -> float | None:
        """When :meth:`tick` has something to do."""
        return None if self._status is None else self._status.due_s

    def say(self, text: str) -> None:
        """A line of the launcher's own, on standard error."""
        self.write(f"[launcher] {text}\n".encode(), is_error=True)

    def write(self, lines: bytes, *, is_error: bool) -> None:
        """Whole lines; a status that stands on the same terminal makes room for them."""
        console = self._errors if is_error else self._output
        if not lines:
            return
        if self._status is None or not (is_error or os.isatty(console.fd)):
            console.write(lines)
            return
        self._errors.write(self._status.display.before_output())
        console.write(lines)
        self._errors.write(self._status.display.after_output())

    def adjust(self) -> None:
        """Watch a slow terminal until it has room for more."""
        for console in (self._output, self._errors):
            write = partial(self._write_pending, console)
            watch(
                self._selector,
                console.fd,
                write,
                wanted=console.waiting,
                events=selectors.EVENT_WRITE,
            )

    def write_last(self, signals: SignalPipe, *, is_interrupted: bool) -> None:
        """Wait for a slow reader as any program does, but a signal means: not much longer."""
        while waiting := [one for one in (self._output, self._errors) if one.waiting]:
            with selectors.PollSelector() as selector:
                selector.register(signals.fd, selectors.EVENT_READ)
                for console in waiting:
                    selector.register(console.fd, selectors.EVENT_WRITE)
                ready = selector.select(_LAST_OUTPUT_S if is_interrupted else None)
            if not ready or set(signals.arrived()) & set(ENDING):
                return
            for console in waiting:
                console.write_pending()

    def show_status(self, environment: Mapping[str, str], complete: str) -> None:
        """Say ``complete`` once all have joined, and how the job does while it runs.

        ``environment`` names its scheduler and key.
        """
        self._status = JobStatus(environment, self._errors.fd, die_with_launcher())
        self._complete = complete

    def begin_status(self, now_s: float) -> None:
        """All have joined."""
        if self._status is not None:
            self.say(self._complete)
            self._status.begin(now_s)

    def tick(self, now_s: float) -> None:
        """Have the status asked for when it is time."""
        if self._status is not None and self._status.tick(now_s):
            self._selector.register(self._status, selectors.EVENT_READ, self._read_status)

    def end_status(self) -> None:
        """Show no status any more. May be called again."""
        if self._status is None:
            return
        if self._status.is_asking:
            self._selector.unregister(self._status)
        self._errors.write(self._status.end())
        self._status = None

    def _read_status(self, now_s: float) -> list[places.Event]:
        if self._status is None:
            return []  # it was ended meanwhile
        written, is_open = self._status.read(now_s)
        if not self._errors.waiting:  # a terminal that is paused need not see all of them later
            self._errors.write(written)
        if not is_open:
            self.end_status()
        return []

    def _write_pending(self, console: Console, now_s: float) -> list[places.Event]:
        console.write_pending()
        return []


class Supervisor:
    """Runs one job. Use as ``with Supervisor(...) as s: s.start(...); s.wait()``, once.

    Leaving the block ends whatever still runs, also after an error of our own.
    """

    def __init__(self, job_id: str, environ: Mapping[str, str], log_dir: Path, timing: Timing):
        self.job_id = job_id
        self._environ = environ
        self._log_dir = log_dir
        self._timing = timing
        self._places: list[Place] = []
        self._records: list[ProcessRecord] = []
        self._assigned: list[Place] = []  # by the process's index, as the records
        self._lifecycle: Lifecycle | None = None  # from the start on
        self._unfinished = 0
        self._start_failure: LaunchError | None = None
        self._start_s = time.monotonic()
        # poll, not epoll: the output may be a regular file, which epoll refuses.
        self._selector = selectors.PollSelector()
        self._signals = SignalPipe()
        self.terminal = Terminal(self._selector)
        self._to_remove: list[Path] = []
        self._joined: socket.socket | None = None

    def __enter__(self) -> Supervisor:
        self.guardian = GuardianProcess(self.job_id, self._environ)
        self.local = LocalPlace(self.job_id, self.guardian)
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
        self._selector.close()
        self._signals.__exit__(kind, value, traceback)

    def listen_for_joined(self, pipe: socket.socket) -> None:
        """``pipe`` becomes readable when all nodes have joined; the caller owns it."""
        self._joined = pipe
        self._selector.register(pipe, selectors.EVENT_READ)

    def remove_at_the_end(self, directory: Path) -> None:
        """Remove ``directory`` after all processes have ended, in whatever way that comes about.

        To be called before it is made, so that nothing can stay.
        """
        self.guardian.remove_at_the_end(directory)
        self._to_remove.append(directory)

    def add_place(self, place: Place) -> None:
        """Serve ``place`` too, which is closed at the end."""
        self._places.append(place)

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
            self._turn(until_s)

    def start(
        self, assigned: Sequence[tuple[ProcessSpec, Place]], variables: Mapping[str, str]
    ) -> None:
        """Start each process at its place; :meth:`wait` reports one that could not be.

        ``variables`` are the environment on this machine, to which each adds its own.
        """
        self._records = [ProcessRecord(spec, at.label, self._log_dir) for spec, at in assigned]
        self._assigned = [place for _, place in assigned]
        self._lifecycle = Lifecycle([spec for spec, _ in assigned], self._timing)
        for place in self._places:  # this machine first
            mine = [(index, one[0]) for index, one in enumerate(assigned) if one[1] is place]
            self._take_in(place.start(mine, variables))
            if self._start_failure is not None:
                return

    def wait(self) -> JobReport:
        """Serve the job until none of its processes is left; their output has been written.

        Raises :class:`LaunchError` when one could not be started.
        """
        job = self._lifecycle
        assert job is not None
        self._sweep()
        while job.phase is not Phase.ENDED:
            self._turn(None)
        self._ignore_joined()
        self._finish()
        self.terminal.write_last(self._signals, is_interrupted=job.interrupted_by is not None)
        if self._start_failure is not None:
            raise self._start_failure
        ended = [self._records[index].ended(found) for index, found in sorted(job.exits.items())]
        return JobReport(job, [record.spec for record in self._records], ended, self._start_s)

    def _turn(self, until_s: float | None) -> bool:
        """Wait until something happens, not beyond ``until_s``, and handle it.

        Signals and deaths come before output. Returns whether a signal told the launcher to end.
        """
        now_s = time.monotonic()
        due_s = [until_s, self.terminal.due_s]
        for place in self._places:
            events, patience_s = place.tick(now_s)
            self._take_in(events)
            due_s.append(None if patience_s is None else now_s + patience_s)
        if self._lifecycle is not None:
            due_s.append(self._lifecycle.deadline_s)
        first_s = min((due for due in due_s if due is not None), default=None)
        self.terminal.adjust()
        for place in self._places:  # children are heard while there is room for what they say
            place.adjust(self._selector, paused=self.terminal.is_full)
        ready = self._selector.select(None if first_s is None else max(0.0, first_s - now_s))
        arrived = self._signals.arrived()
        ending = [number for number in arrived if number in ENDING]
        for number in ending:
            self._end_by(number)
        if any(key.fileobj is self._joined for key, _ in ready):
            self._hear_joined()  # before its end, which may have come meanwhile
        if signal.SIGCHLD in arrived:
            self._sweep()
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

    def _hear_joined(self) -> None:
        assert self._joined is not None and self._lifecycle is not None
        if self._joined.recv(1):  # nothing is read when the scheduler ended without a word
            self._lifecycle.joined(time.monotonic())
            self.terminal.begin_status(time.monotonic())
        self._ignore_joined()

    def _ignore_joined(self) -> None:
        """There is nothing more to hear; a closed pipe would be ready for ever."""
        if self._joined is not None:
            self._selector.unregister(self._joined)
            self._joined = None

    def _sweep(self) -> None:
        for place in self._places:
            self._take_in(place.sweep())

    def _take_in(self, events: Sequence[places.Event]) -> None:
        """What a place has told. Before the start there is nothing but notes."""
        for event in events:
            if isinstance(event, places.Note):
                self.terminal.say(event.text)
            elif self._lifecycle is None:
                continue
            elif isinstance(event, places.Output):
                self._show(event)
            elif isinstance(event, places.Started):
                self._records[event.index].pid = event.pid
            elif isinstance(event, places.Ended):
                for index in event.statuses:
                    self._records[index].why = event.why
                self._carry_out(self._lifecycle.exited(event.statuses, time.monotonic()))
            elif isinstance(event, places.CannotStart):
                self._refuse(self._lifecycle, event)
            else:
                self._unfinished -= 1
                if event.left_over:
                    self.terminal.say(
                        f"ended {event.left_over} process(es) that the job's processes had left "
                        "running"
                    )

    def _refuse(self, lifecycle: Lifecycle, event: places.CannotStart) -> None:
        """No process from ``event.index`` on has started at its place, nor any elsewhere since.

        Elsewhere none was told to where this machine refuses, which comes first.
        """
        here = self._assigned[event.index]
        if self._start_failure is None:
            spec = self._records[event.index].spec
            self._start_failure = cannot_start(spec, here.label, event.number, event.text)
        unstarted = [
            index
            for index, place in enumerate(self._assigned)
            if index not in lifecycle.exits
            and self._records[index].pid == 0
            and (place is here or here is self.local)
        ]
        self._carry_out(lifecycle.cannot_start(time.monotonic(), unstarted))

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendSignal):
                for place in self._places:
                    place.send_signal(effect.signal_number)
            elif isinstance(effect, SchedulerLost):
                self.terminal.end_status()  # it was the one to ask
                lost = self._records[effect.exit.index].ended(effect.exit)
                self.terminal.say(without_scheduler(lost))
            else:
                self.terminal.say(effect.text)

    def _show(self, output: places.Output) -> None:
        record = self._records[output.index]
        try:
            lines = record.record(list(output.lines))
            self.terminal.write(lines, is_error=output.is_error)
        except OSError as error:
            record.stop_logging()
            self.terminal.say(f"the log of {record.spec.name} ends here: {error.strerror}")

    def _finish(self) -> None:
        """See that nothing is left at any place, and that its last output has been shown."""
        leftover_s = self._timing.leftover_s
        self._unfinished = len(self._places)
        for place in reversed(self._places):  # those elsewhere at the same time as this machine
            self._take_in(place.finish(leftover_s))
        until_s = time.monotonic() + leftover_s + _FINISHING_S
        while self._unfinished > 0 and time.monotonic() < until_s:
            if self._turn(until_s):
                return
        if self._unfinished > 0:
            self.terminal.say(
                f"{self._unfinished} host(s) did not confirm that nothing is left running there"
            )
