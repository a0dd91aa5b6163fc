"""Starts the processes of a job, passes their output on, and sees all of them end.

The shell around ``lifecycle.py``: everything happens on the main thread in one loop over one
selector (the children's pipes, the terminal when it is slow, and a pipe into which Python
writes every signal, SIGCHLD too). No other thread may be started here: children are forked
with a function to run before exec. Read ``lifecycle.py`` first, ``child.py`` next.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvstore.launch.child import Child, Stream, die_with_launcher, start_child
from kvstore.launch.console import Console
from kvstore.launch.guardian import end_job
from kvstore.launch.guardian_process import GuardianProcess
from kvstore.launch.lifecycle import Lifecycle, Phase, Say, SendSignal, Timing
from kvstore.launch.plan import ProcessSpec
from kvstore.launch.report import Ended
from kvstore.launch.signals import ENDING, SignalPipe
from kvstore.launch.statusline import JobStatus, StatusFeed

_LAST_OUTPUT_S = 2.0


@dataclass(frozen=True)
class StartFailure:
    """A process could not be started: its program is missing or cannot be executed."""

    spec: ProcessSpec
    error: OSError


@dataclass(frozen=True)
class Outcome:
    """All there is to know when nothing runs any more."""

    specs: Sequence[ProcessSpec]  # all that were started
    ended: Sequence[Ended]
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
        self._children: list[Child] = []
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

    def __enter__(self) -> Supervisor:
        self._guardian = GuardianProcess(self._job_id, self._environ)
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
        end_job(self._job_id, self._groups(), grace_s=0)
        for child in self._children:
            child.reap()
        for directory in self._to_remove:
            shutil.rmtree(directory, ignore_errors=True)
        if self._guardian is not None:
            self._guardian.dismiss()
        self._selector.close()
        self._signals.__exit__(kind, value, traceback)

    def listen_for_joined(self, pipe: socket.socket) -> None:
        """``pipe`` becomes readable when all nodes have joined; the caller owns it."""
        self._joined = pipe
        self._selector.register(pipe, selectors.EVENT_READ)

    def show_status(self, environment: Mapping[str, str]) -> None:
        """Show how the job does while it runs; ``environment`` names its scheduler and key."""
        self._status = JobStatus(environment, self._errors.fd, die_with_launcher())

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

    def start(self, specs: Sequence[ProcessSpec], base_environment: Mapping[str, str]) -> None:
        """Start all processes; stop at the first that cannot be (:meth:`wait` reports it)."""
        assert self._guardian is not None
        prepare = die_with_launcher()
        for spec in specs:
            log_path = self._log_dir / f"{spec.name.replace(' ', '-')}.log"
            try:
                child = start_child(spec, base_environment, log_path, prepare)
            except OSError as error:
                self._start_failure = StartFailure(spec, error)
                return
            self._guardian.watch(child.group)
            self._children.append(child)
            for stream in child.open_streams:
                self._selector.register(stream, selectors.EVENT_READ, stream)

    def wait(self) -> Outcome:
        """Serve the job until none of its processes is left; their output has been written."""
        lifecycle = Lifecycle([child.spec for child in self._children], self._timing)
        if self._start_failure is not None:
            self._carry_out(lifecycle.cannot_start(time.monotonic()))
        self._sweep(lifecycle)
        while lifecycle.phase is not Phase.ENDED:
            due_s = [lifecycle.deadline_s, self._status.due_s if self._status else None]
            deadline_s = min((due for due in due_s if due is not None), default=None)
            timeout_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            self._serve(lifecycle, timeout_s)
            self._carry_out(lifecycle.tick(time.monotonic()))
            self._tick_status(lifecycle)
        self._ignore_joined()
        self._end_leftovers()
        self._read_last_output()
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
        if signal.SIGCHLD in arrived:
            self._sweep(lifecycle)
        if any(key.fileobj is self._joined for key, _ in ready):
            self._hear_joined(lifecycle)
        self._pass_on(ready)

    def _hear_joined(self, lifecycle: Lifecycle) -> None:
        assert self._joined is not None
        if self._joined.recv(1):  # nothing is read when the scheduler ended without a word
            lifecycle.joined(time.monotonic())
            if self._status is not None:
                self._status.begin(time.monotonic())
        self._ignore_joined()

    def _ignore_joined(self) -> None:
        """There is nothing more to hear; a closed pipe would be ready for ever."""
        if self._joined is not None:
            self._selector.unregister(self._joined)
            self._joined = None

    def _sweep(self, lifecycle: Lifecycle) -> None:
        statuses = {
            index: status
            for index, child in enumerate(self._children)
            if child.status is None and (status := child.poll()) is not None
        }
        if statuses:
            self._carry_out(lifecycle.exited(statuses, time.monotonic()))

    def _carry_out(self, effects: Sequence[SendSignal | Say]) -> None:
        for effect in effects:
            if isinstance(effect, Say):
                self.say(effect.text)
                continue
            for child in self._children:
                child.send_signal(effect.signal_number)

    def _adjust_interest(self) -> None:
        """Listen to a slow terminal while it owes us room, and to children while there is room."""
        watched = self._selector.get_map()
        for console in (self._output, self._errors):
            if console.waiting and console.fd not in watched:
                self._selector.register(console.fd, selectors.EVENT_WRITE, console)
            elif not console.waiting and console.fd in watched:
                self._selector.unregister(console.fd)
        full = self._output.full or self._errors.full
        for stream in self._open_streams():
            if full and stream in watched:
                self._selector.unregister(stream)
            elif not full and stream not in watched:
                self._selector.register(stream, selectors.EVENT_READ, stream)

    def _pass_on(self, ready: Sequence[tuple[selectors.SelectorKey, int]]) -> None:
        for key, _ in ready:
            if isinstance(key.data, Console):
                key.data.write_pending()
            elif isinstance(key.data, Stream):
                self._read(key.data)
            elif isinstance(key.data, StatusFeed):
                self._read_status(key.data)

    def _read(self, stream: Stream) -> None:
        fd = stream.fileno()
        lines, is_open = stream.read(time.monotonic())
        if not is_open:
            stream.child.open_streams.remove(stream)
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        self._show(stream, lines)

    def _show(self, stream: Stream, lines: list[bytes]) -> None:
        console = self._errors if stream.is_error else self._output
        try:
            self._write(console, stream.child.record(lines))
        except OSError as error:
            stream.child.stop_logging()
            self.say(f"the log of {stream.child.spec.name} ends here: {error.strerror}")

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
            return
        feed = self._status.tick(time.monotonic())
        if feed is not None:
            self._selector.register(feed, selectors.EVENT_READ, feed)

    def _read_status(self, feed: StatusFeed) -> None:
        if self._status is None or self._status.feed is not feed:
            return  # it was ended meanwhile
        written, is_open = self._status.read(time.monotonic())
        if not self._errors.waiting:  # a terminal that is paused need not see all of them later
            self._errors.write(written)
        if not is_open:
            self._end_status()

    def _end_status(self) -> None:
        if self._status is None:
            return
        if self._status.feed is not None:
            self._selector.unregister(self._status.feed)
        self._errors.write(self._status.end())
        self._status = None

    def _end_leftovers(self) -> None:
        found = end_job(self._job_id, self._groups(), self._timing.leftover_s)
        if found:
            self.say(f"ended {found} process(es) that the job's processes had left running")

    def _read_last_output(self) -> None:
        """All writers have ended, but a process that escaped may hold a pipe open: not for ever."""
        until_s = time.monotonic() + _LAST_OUTPUT_S
        while self._open_streams() and time.monotonic() < until_s:
            with selectors.PollSelector() as selector:
                for stream in self._open_streams():
                    selector.register(stream, selectors.EVENT_READ, stream)
                ready = selector.select(0.0)
            if not ready:
                break
            self._pass_on(ready)

    def _write_last_output(self, *, is_interrupted: bool) -> None:
        """Wait for a slow reader as any program does, but a signal means: not much longer."""
        while self._output.waiting or self._errors.waiting:
            self._adjust_interest()
            ready = self._selector.select(_LAST_OUTPUT_S if is_interrupted else None)
            if not ready or set(self._signals.arrived()) & set(ENDING):
                return
            self._pass_on(ready)

    def _open_streams(self) -> list[Stream]:
        return [stream for child in self._children for stream in child.open_streams]

    def _groups(self) -> set[int]:
        return {child.group for child in self._children}

    def _outcome(self, lifecycle: Lifecycle) -> Outcome:
        ended = [
            Ended(
                self._children[index].spec,
                self._children[index].group,
                found,
                [line.decode(errors="replace") for line in self._children[index].last_lines],
            )
            for index, found in sorted(lifecycle.exits.items())
        ]
        return Outcome(
            [child.spec for child in self._children],
            ended,
            self._start_s,
            lifecycle.failed,
            lifecycle.interrupted_by,
            lifecycle.drain_expired,
            lifecycle.unjoined,
            self._start_failure,
        )
