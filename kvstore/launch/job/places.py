"""Where processes run: this machine, or a machine with an agent.

A :class:`Place` starts processes, sends them signals and reports what happens to them as events. A
process has the same index everywhere: its position in the job's plan. :class:`LocalPlace` runs on
the main thread of the launcher, or of an agent on another machine (``launch/agents/agent.py``).
``launch/agents/remote.py`` contains the place for the launcher's end of an agent's link.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

from kvstore.launch.environment import allow_files
from kvstore.launch.job.child import Child, LineSplitter, die_with_launcher
from kvstore.launch.job.guardian import GuardianProcess, end_job
from kvstore.launch.plan import ProcessSpec

_READ_BYTES = 64 * 1024
_LAST_READS = 64  # a pipe usually holds 64 KiB, one read; this leaves room for larger pipes


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
    """Processes that have ended, with their statuses; reports show ``why`` as well."""

    statuses: Mapping[int, int]
    why: str | None = None


@dataclass(frozen=True)
class CannotStart:
    """The system cannot execute a program; the processes after it were not started.

    ``number`` is the errno; ``text`` is the system's message.
    """

    index: int
    number: int
    text: str


@dataclass(frozen=True)
class Note:
    text: str


@dataclass(frozen=True)
class Located:
    """The machine of a process, for a place that learns it later."""

    index: int
    label: str


@dataclass(frozen=True)
class Joined:
    """All nodes have joined."""


@dataclass(frozen=True)
class Returned:
    """Another process has the place of a lost one."""

    rank: int
    role: str = "worker"
    attempt: int = 0
    """How many processes had the place before; 0 if that is not known."""


@dataclass(frozen=True)
class Finished:
    """No process of the job runs here now; ``left_over`` processes had to be ended."""

    left_over: int


Event = Started | Output | Ended | CannotStart | Note | Located | Joined | Returned | Finished
IndexedSpecs = Sequence[tuple[int, ProcessSpec]]

_SEATED = [[b"worker"], [b"server"], [b"standby"], [b"scheduler"]]

Handler = Callable[[float], "list[Event]"]
"""The function for a descriptor in a selector; called with the time when the descriptor is ready.
"""


class SchedulerLines:
    """What the scheduler writes to PS_JOINED_FD about joins."""

    def __init__(self, heard: socket.socket) -> None:
        self.socket = heard
        self._rest = b""

    def read(self) -> list[Event] | None:
        """Return the events of the lines that have arrived; None after the end."""
        data = self.socket.recv(4096)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        events: list[Event] = []
        for words in map(bytes.split, lines):
            if words[:1] == [b"all"]:
                events.append(Joined())
            elif words[:1] in _SEATED and words[1].isdigit():
                attempt = int(words[-1]) if words[-1].isdigit() else 0
                events.append(Returned(int(words[1]), words[0].decode(), attempt))
        return events


class LineStream:
    """The output of a process from ``pipe``; ``told`` turns whole lines into events."""

    def __init__(self, pipe: IO[bytes], told: Callable[[list[bytes]], list[Event]]) -> None:
        self._pipe = pipe
        self._told = told
        self._splitter = LineSplitter()
        os.set_blocking(pipe.fileno(), False)

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        """Register the pipe until it is closed, except while ``paused``."""
        if not (self._pipe.closed or paused):
            selector.register(self._pipe, selectors.EVENT_READ, self.read)

    def read(self, now_s: float) -> list[Event]:
        """Read the available output once and return its events."""
        if self._pipe.closed:
            return []
        try:
            data = os.read(self._pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            data = b""  # a terminal reports its end this way
        lines = self._splitter.feed(data, now_s) if data else self.close()
        return self._told(lines) if lines else []

    def read_rest(self) -> list[Event]:
        """Read the rest of the output, with an unfinished last line, and close.

        Other processes may hold the pipe open and keep writing, so the number of reads is limited.
        """
        events = [event for _ in range(_LAST_READS) for event in self.read(float("inf"))]
        lines = self.close()
        return [*events, *self._told(lines)] if lines else events

    def close(self) -> list[bytes]:
        """Close the pipe; return the unfinished line, if any. May be called again."""
        self._pipe.close()
        return self._splitter.finish()


class Place:
    """One place; ``label`` follows its processes' names (``worker 1@label``).

    These methods do nothing; each subclass overrides some of them.
    """

    label: str | None = None
    failure: str | None = None
    """Why the place will never be ready, if this is known."""
    can_start_again = False
    """Whether a process that has ended can be started here once more."""

    def awaited(self) -> list[str]:
        """Return the names of missing agents, for messages; empty if all are connected."""
        return []

    def start(self, specs: IndexedSpecs, variables: Mapping[str, str]) -> list[Event]:
        """Start processes with ``variables`` and their own; stop at the first failure."""
        return []

    def start_again(self, index: int, spec: ProcessSpec) -> list[Event]:
        """Start a process that has ended here; end first what is left of it."""
        return []

    def send_signal(self, number: int) -> None:
        """Send a signal to the process groups of all processes that run here."""

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        """Register the descriptors to poll; no processes' output while ``paused``.

        ``selector`` is new each time. Every registered descriptor has a :data:`Handler`.
        """

    def sweep(self) -> list[Event]:
        """Return events for the processes that have ended; called after SIGCHLD."""
        return []

    def tick(self, now_s: float) -> tuple[list[Event], float | None]:
        """Act on deadlines; return events and the seconds until the next call, or None."""
        return [], None

    def finish(self, leftover_s: float) -> list[Event]:
        """End left-over processes after the job's last; :class:`Finished` follows."""
        return [Finished(0)]

    def hang_up(self) -> None:
        """Begin to close, without waiting for anything."""

    def close(self) -> None:
        """Kill all processes and release everything, in whatever state the place is."""


class LocalPlace(Place):
    """The processes on this machine, each in a process group of its own.

    ``agent_id`` is "" in the launcher. The place ends only processes with the same ``agent_id``.
    """

    def __init__(self, job_id: str, guardian: GuardianProcess, agent_id: str = "") -> None:
        self._job_id = job_id
        self._agent_id = agent_id
        self._guardian = guardian
        self._children: list[Child] = []
        self._streams: list[tuple[int, LineStream]] = []
        self._variables: Mapping[str, str] = {}

    can_start_again = True

    def start(self, specs: IndexedSpecs, variables: Mapping[str, str]) -> list[Event]:
        allow_files(4 * len(specs))  # each child: one tie, two streams, one log
        prepare = die_with_launcher()
        self._variables = variables
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
                self._streams.append((index, LineStream(pipe, told)))
            events.append(Started(index, child.group))
        return events

    def start_again(self, index: int, spec: ProcessSpec) -> list[Event]:
        return [*self._retire(index), *self.start([(index, spec)], self._variables)]

    def send_signal(self, number: int) -> None:
        for child in self._children:
            child.send_signal(signal.Signals(number))

    def adjust(self, selector: selectors.BaseSelector, *, paused: bool) -> None:
        for _, stream in self._streams:
            stream.adjust(selector, paused=paused)

    def sweep(self) -> list[Event]:
        statuses = {
            child.index: status
            for child in self._children
            if child.status is None and (status := child.poll()) is not None
        }
        return [Ended(statuses)] if statuses else []

    def finish(self, leftover_s: float) -> list[Event]:
        """End the left-over processes within about ``leftover_s`` seconds."""
        groups = {child.group for child in self._children}
        found = end_job(self._job_id, groups, leftover_s, self._agent_id)
        # All writers have ended, and their last output is in the pipes.
        last = [event for _, stream in self._streams for event in stream.read_rest()]
        return [*last, Finished(found)]

    def close(self) -> None:
        end_job(self._job_id, {child.group for child in self._children}, 0, self._agent_id)
        for child in self._children:
            child.reap()
        for _, stream in self._streams:
            stream.close()
        self._children = []

    def _retire(self, index: int) -> list[Event]:
        """End what a process has left running, and read the rest of its output."""
        for child in self._children:
            if child.index == index:  # its number stays taken until it is reaped, at the end
                child.send_signal(signal.SIGKILL)
        mine = [stream for at, stream in self._streams if at == index]
        self._streams = [(at, stream) for at, stream in self._streams if at != index]
        return [event for stream in mine for event in stream.read_rest()]

    def _told(self, index: int, is_error: bool, lines: list[bytes]) -> list[Event]:
        return [Output(index, is_error, lines)]
