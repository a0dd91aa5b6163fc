"""Which processes of a job are started again, and whose places standbys take.

This module is pure. ``lifecycle.py`` uses it to decide whether the end of a process fails the job.
:class:`Restarts` counts and delays the starts. :class:`Standbys` knows which process stands by for
which server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.launch.plan import ProcessSpec


@dataclass(frozen=True)
class Timing:
    """How long the launcher waits in each situation, in seconds."""

    drain_s: float = 10.0  # for scheduler and servers to end, after the last worker
    service_s: float = 10.0  # for the rest of the service, after one of it ended with 0 too early
    failure_s: float = 5.0  # for the others to end, after the first failure
    alone_s: float = 0.5  # for the service, if no worker is left after a failure or none had joined
    step_s: float = 3.0  # between one signal and the next, stronger one
    killed_s: float = 10.0  # for the kernel to end a process after SIGKILL
    leftover_s: float = 1.0  # for grandchildren to end, between SIGTERM and SIGKILL
    worker_restart_s: float = 0.2  # before the first restart of a worker; then restart_s
    restart_s: float = 1.0  # before the first restart of a job; twice as long before each further
    longest_restart_s: float = 30.0


@dataclass(frozen=True)
class Exit:
    """The end of process ``index``; ``status`` is negative for a signal.

    ``sweep`` is the number of the check that noticed the end: if two processes have the same
    number, the launcher cannot tell which of them ended first. ``stopped`` is true if the launcher
    had told the process to end.
    """

    index: int
    status: int
    at_s: float
    sweep: int
    stopped: bool = False


@dataclass(frozen=True)
class Again:
    """A worker that failed is to be started again, for the ``number``-th time.

    ``found`` was its end.
    """

    found: Exit
    number: int


class Restarts:
    """The workers that were started again, or will be. Pure."""

    def __init__(self, timing: Timing, num_left: int) -> None:
        self._timing = timing
        #: How many restarts are left.
        self.num_left = num_left
        #: How many times a worker that was started again got its place.
        self.num_returned = 0
        #: The first ends of workers that have not got their places again: probably their cause.
        self.setbacks: dict[int, Exit] = {}
        self._last_ends: dict[int, Exit] = {}
        self._num_starts: Counter[int] = Counter()
        #: Worker -> when to start it.
        self.due: dict[int, float] = {}

    def plan(self, found: Exit, now_s: float) -> None:
        """Plan the restart of a worker that has just ended."""
        index, timing = found.index, self._timing
        self._last_ends[index] = found
        self.setbacks.setdefault(index, found)
        count = self._num_starts[index]
        wait_s = timing.restart_s * 2 ** min(count - 1, 16) if count else 0.0
        wait_s = max(timing.worker_restart_s, min(wait_s, timing.longest_restart_s))
        self._num_starts[index] += 1
        self.num_left -= 1
        self.due[index] = now_s + wait_s

    def take(self, now_s: float) -> list[Again]:
        """Return the starts that are due."""
        due = [index for index, due_s in self.due.items() if now_s >= due_s]
        for index in due:
            del self.due[index]
        return [Again(self._last_ends[index], self._num_starts[index]) for index in due]

    def returned(self, index: int) -> None:
        """Note that a worker has its place again."""
        if self.setbacks.pop(index, None) is not None:
            self.num_returned += 1
        if index in self.due:  # it has ended once more before this was heard
            self.setbacks[index] = self._last_ends[index]

    def cancel(self) -> list[Exit]:
        """Start none of them any more; return the ends of those that were to be started."""
        ends = [self._last_ends[index] for index in self.due]
        self.due.clear()
        for end in ends:
            if self.setbacks[end.index] is end:
                del self.setbacks[end.index]
        return ends


class Standbys:
    """The standbys of servers, and whose places they have taken. Pure."""

    def __init__(self, specs: Sequence[ProcessSpec]) -> None:
        servers = {spec.rank: index for index, spec in enumerate(specs) if spec.role == "server"}
        #: Standby -> its server, whose place it has not taken.
        self._servers = {
            index: servers[spec.rank] for index, spec in enumerate(specs) if spec.role == "standby"
        }
        #: The servers that have failed and whose places their standbys have not taken yet.
        self.awaited: set[int] = set()
        #: The processes whose ends are no failures: replaced servers, and ended standbys.
        self.excused: set[int] = set()
        #: How many places standbys have taken.
        self.num_seated = 0

    def sort(
        self, statuses: Mapping[int, int], exits: Mapping[int, Exit], *, can_follow: bool
    ) -> tuple[list[int], list[int]]:
        """Return which of the ends that were just found are failures.

        And which, of servers or standbys, only need a message. ``exits`` are all ends, also these.
        With ``can_follow``, a standby can take a place.
        """
        failed: list[int] = []
        spared: list[int] = []
        for index, status in statuses.items():
            server = self._servers.get(index)
            if server is None:
                running = (of for by, of in self._servers.items() if by not in exits)
                if status != 0 and can_follow and index in running:
                    self.awaited.add(index)
                if status != 0:
                    is_spared = index in self.awaited or index in self.excused
                    (spared if is_spared else failed).append(index)
            elif server in exits and exits[server].status != 0:
                failed.append(index)  # even with 0: the place of its server stays empty
            else:
                self.excused.add(index)
                if status != 0 and server not in exits:
                    spared.append(index)
        return failed, spared

    def returned(self, rank: int, specs: Sequence[ProcessSpec]) -> None:
        """Note that a standby has taken the place of its server."""
        for standby, server in list(self._servers.items()):
            if specs[server].rank == rank:
                del self._servers[standby]
                self.awaited.discard(server)
                self.excused.add(server)
                self.num_seated += 1
