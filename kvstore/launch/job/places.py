"""Where processes run: this machine, or one that an agent serves.

A :class:`Place` starts processes, signals them and tells what becomes of them in events; a
process has the same index everywhere, its position in the job's plan. :class:`LocalPlace`
runs on the main thread of the launcher, and of an agent (``launch/agents/agent.py``), which is a
launcher's hand on another machine; ``launch/agents/remote.py`` has the place at the other end of an
agent's link.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

from kvstore.launch.environment import allow_files
from kvstore.launch.job.child import Child, LineSplitter, die_with_launcher
from kvstore.launch.job.guardian import GuardianProcess, end_job
from kvstore.launch.plan import ProcessSpec

_READ_BYTES = 64 * 1024
_LAST_READS = 64  # a pipe holds 64 KiB, and so does a read; with room for larger pipes


@dataclass(frozen=True)
class Started:
    index: int
    pid: int


@dataclass(frozen=True)
class Output:
    index: int
    is_error: bool
    lines: Sequence[bytes]


@dataclass(frozen=True)
class Ended:
    """Processes found ended, with their status; ``why`` replaces it in reports."""

    statuses: Mapping[int, int]
    why: str | None = None


@dataclass(frozen=True)
class CannotStart:
    """The system cannot execute a program (errno); the others were not tried.

    ``text`` is its own words.
    """

    index: int
    number: int
    text: str


@dataclass(frozen=True)
class Note:
    text: str


@dataclass(frozen=True)
class Located:
    """Where a process runs, of a place that does not know it from the start."""

    index: int
    label: str


@dataclass(frozen=True)
class Joined:
    """All nodes have joined; ``is_certain`` as in ``lifecycle.Lifecycle.joined``."""

    is_certain: bool = True


@dataclass(frozen=True)
class Finished:
    """Nothing of the job runs here any more; ``left_over`` processes had to be ended."""

    left_over: int


Event = Started | Output | Ended | CannotStart | Note | Located | Joined | Finished
IndexedSpecs = Sequence[tuple[int, ProcessSpec]]

Handler = Callable[[float], "list[Event]"]
"""What stands behind a descriptor in a selector: is called with the time when that is ready."""


class LineStream:
    """The output of a process in ``pipe``; ``told`` makes events of whole lines."""

    def __init__(self, pipe: IO[bytes], told: Callable[[list[bytes]], list[Event]]) -> None:
        self._pipe = pipe
        self._told = told
        self._splitter = LineSplitter()
        os.set_blocking(pipe.fileno(), False)

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        """Listen, until the end."""
        if not (self._pipe.closed or paused):
            selector.register(self._pipe, selectors.EVENT_READ, self.read)

    def read(self, now_s: float) -> list[Event]:
        """Read once, what is there."""
        if self._pipe.closed:
            return []
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            data = b""  # how the end of a terminal reads
        lines = self._splitter.feed(data, now_s) if data else self.close()
        return self._told(lines) if lines else []

    def read_rest(self) -> list[Event]:
        """Read the rest of the output, with an unfinished last line, and close.

        Others may hold the pipe open and write on: not for ever.
        """
        events = [event for _ in range(_LAST_READS) for event in self.read(float("inf"))]
        lines = self.close()
        return [*events, *self._told(lines)] if lines else events

    def close(self) -> list[bytes]:
        """Return the unfinished line, if any. May be called again."""
        self._pipe.close()
        return self._splitter.finish()


class Place:
    """One place; ``label`` follows its processes' names (``worker 1@label``).

    A kind of place says what it does differently: nothing, for each of these.
    """

    label: str | None = None
    failure: str | None = None
    """Why it will never be there, once that is known."""

    def awaited(self) -> list[str]:
        """Return who has not come yet, for people; empty once all are there."""
        return []

    def start(self, specs: IndexedSpecs, variables: Mapping[str, str]) -> list[Event]:
        """Start processes with ``variables`` and their own; stop at a failure."""
        return []

    def send_signal(self, number: int) -> None:
        """Send a signal to the process groups of all processes that run here."""

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        """Register the descriptors to poll; no output while ``paused``.

        ``selector`` is new each time. What is registered has a :data:`Handler`.
        """

    def sweep(self) -> list[Event]:
        """Collect ended processes, after SIGCHLD."""
        return []

    def tick(self, now_s: float) -> tuple[list[Event], float | None]:
        """Act on the time; return also the seconds until the next call."""
        return [], None

    def finish(self, leftover_s: float) -> list[Event]:
        """End left-over processes after the last one; :class:`Finished` follows."""
        return [Finished(0)]

    def hang_up(self) -> None:
        """Begin to close, without waiting for anything."""

    def close(self) -> None:
        """Kill what runs and release everything, whatever state it is in."""


class LocalPlace(Place):
    """Processes of this machine, each in a process group of its own.

    ``agent_id`` is "" for the launcher's own; what it ends is what bears the same.
    """

    def __init__(self, job_id: str, guardian: GuardianProcess, agent_id: str = "") -> None:
        self._job_id = job_id
        self._agent_id = agent_id
        self._guardian = guardian
        self._children: list[Child] = []
        self._streams: list[LineStream] = []

    def start(self, specs: IndexedSpecs, variables: Mapping[str, str]) -> list[Event]:
        allow_files(4 * len(specs))  # a tie, two streams, a log
        prepare = die_with_launcher()
        events: list[Event] = []
        for index, spec in specs:
            try:
                child = Child(index, spec, variables, prepare)
            except OSError as error:
                text = error.strerror or str(error)
                return [*events, CannotStart(index, error.errno or 0, text)]
            self._guardian.watch(child.group)
            self._children.append(child)
            for is_error, pipe in enumerate(child.pipes):
                told = partial(self._told, index, bool(is_error))
                self._streams.append(LineStream(pipe, told))
            events.append(Started(index, child.group))
        return events

    def send_signal(self, number: int) -> None:
        for child in self._children:
            child.send_signal(signal.Signals(number))

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        for stream in self._streams:
            stream.adjust(selector, paused=paused)

    def sweep(self) -> list[Event]:
        statuses = {
            child.index: status
            for child in self._children
            if child.status is None and (status := child.poll()) is not None
        }
        return [Ended(statuses)] if statuses else []

    def finish(self, leftover_s: float) -> list[Event]:
        """End the rest at once, within about ``leftover_s`` seconds."""
        groups = {child.group for child in self._children}
        found = end_job(self._job_id, groups, leftover_s, self._agent_id)
        # All writers have ended, and what they wrote is in the pipes.
        last = [event for stream in self._streams for event in stream.read_rest()]
        return [*last, Finished(found)]

    def close(self) -> None:
        end_job(self._job_id, {child.group for child in self._children}, 0, self._agent_id)
        for child in self._children:
            child.reap()
        for stream in self._streams:
            stream.close()
        self._children = []

    def _told(self, index: int, is_error: bool, lines: list[bytes]) -> list[Event]:
        return [Output(index, is_error, lines)]
