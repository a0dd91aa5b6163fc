"""Which processes of a job are started again, and whose places standbys take.

This module is pure. ``lifecycle.py`` uses it to decide whether the end of a process fails the job.
:class:`Restarts` counts and delays the starts. :class:`Standbys` knows which process stands by for
which server.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from kvstore.launch.plan import ProcessSpec

MOST_VAIN_STARTS = 3
"""How many times in a row a standby is started that ends before it has its server's state."""


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
    worker_restart_s: float = 0.2  # before the first restart of one process; then restart_s
    restart_s: float = 1.0  # before the first restart of a job; twice as long before each further
    longest_restart_s: float = 30.0
    steady_s: float = 60.0  # a process that has run so long is restarted as if for the first time


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
    """A process is to be started, for the ``number``-th time.

    ``found`` was the last end of this process. ``server`` is the one for which a standby is needed;
    then ``found`` may be the end of the process whose place this server has taken.
    """

    found: Exit
    number: int
    server: int | None = None


class Restarts:
    """The processes that were started again, or will be. Pure."""

    def __init__(self, timing: Timing, num_left: int, num_used: int = 0) -> None:
        self._timing = timing
        #: How many restarts are left, and how many there have been, also in earlier attempts.
        self.num_left, self.num_used = num_left, num_used
        self.num_all = num_left + num_used
        #: Process -> how many times it was started again and got its place.
        self.returns: Counter[int] = Counter()
        #: The first ends of processes that have not got their places again: probably their cause.
        self.setbacks: dict[int, Exit] = {}
        self._last_ends: dict[int, Exit] = {}
        self._num_starts: Counter[int] = Counter()
        #: Process -> how long its last start had to wait, and when it was.
        self._waits: dict[int, float] = {}
        self._started: dict[int, float] = {}
        #: Process -> how many restarts were used with its last one.
        self._counts: dict[int, int] = {}
        #: Process -> when to start it.
        self.due: dict[int, float] = {}
        #: (role, rank) -> how many processes had the place before, as far as it was reported.
        self._attempts: dict[tuple[str, int], int] = {}

    def plan(self, found: Exit, *, is_setback: bool = True) -> None:
        """Plan the restart of a process that has ended.

        ``is_setback`` says that the job fails if it does not get its place.
        """
        index, timing = found.index, self._timing
        self._last_ends[index] = found
        if is_setback:
            self.setbacks.setdefault(index, found)
        wait_s = timing.worker_restart_s
        if found.at_s - self._started.get(index, -math.inf) < timing.steady_s:
            longer_s = max(timing.restart_s, 2 * self._waits[index])
            wait_s = min(longer_s, timing.longest_restart_s)
        self._waits[index] = wait_s
        self._num_starts[index] += 1
        self.num_left -= 1
        self.num_used += 1
        self._counts[index] = self.num_used
        self.due[index] = found.at_s + wait_s

    @property
    def are_used_up(self) -> bool:
        """Return whether there were restarts, and none is left."""
        return self.num_left == 0 < self.num_all

    @property
    def used_up(self) -> str:
        """What to say then."""
        return f"all restarts are used ({self.num_all} of {self.num_all})"

    def count(self, index: int) -> str:
        """Return how many restarts are used with that of a process, and of how many."""
        return f"{self._counts[index]} of {self.num_all} restart{'s' * (self.num_all > 1)}"

    @property
    def again(self) -> Set[int]:
        """The processes that were started again, or will be."""
        return self._num_starts.keys()

    def is_news(self, role: str, rank: int, attempt: int) -> bool:
        """Note the number of a process that has a place; return whether it is new."""
        is_news = attempt > self._attempts.get((role, rank), 0)
        self._attempts[role, rank] = max(attempt, self._attempts.get((role, rank), 0))
        return is_news

    def take(self, now_s: float) -> list[Again]:
        """Return the starts that are due."""
        due = [index for index, due_s in self.due.items() if now_s >= due_s]
        for index in due:
            del self.due[index]
            self._started[index] = now_s
        return [Again(self._last_ends[index], self._num_starts[index]) for index in due]

    def returned(self, index: int) -> None:
        """Note that a process has its place again."""
        if self.setbacks.pop(index, None) is not None:
            self.returns[index] += 1
        if index in self.due:  # it has ended once more before this was heard
            self.setbacks[index] = self._last_ends[index]

    def cancel(self, indices: Iterable[int]) -> list[Exit]:
        """Do not start these any more; return the ends of those that were to be started."""
        ends = [self._last_ends[index] for index in indices if index in self.due]
        for end in ends:
            del self.due[end.index]
            if self.setbacks.get(end.index) is end:
                del self.setbacks[end.index]
        return ends


class Standbys:
    """The standbys of servers, and whose places they have taken. Pure.

    If a standby is lost, or has taken the place of its server, a process is to be started as the
    next standby: that of the lost standby, or of the lost server, again. It is *unfilled* until it
    has the state of its server, and so could take its place.
    """

    def __init__(self, specs: Sequence[ProcessSpec]) -> None:
        servers = {spec.rank: index for index, spec in enumerate(specs) if spec.role == "server"}
        #: Standby -> its server, whose place it could take.
        self._servers = {
            index: servers[spec.rank] for index, spec in enumerate(specs) if spec.role == "standby"
        }
        #: Unfilled standby, also one that may be started -> its server.
        self.unfilled: dict[int, int] = {}
        #: How many times a process was started as a standby and was not filled.
        self._num_vain: Counter[int] = Counter()
        #: The servers that have failed and whose places their standbys have not taken yet.
        self.awaited: set[int] = set()
        #: The processes whose ends are no failures: replaced servers, and ended standbys.
        self.excused: set[int] = set()
        #: How many places standbys have taken, and how many standbys were started again.
        self.num_seated = self.num_started = 0
        #: Sentences for the end of the report.
        self.remarks: list[str] = []

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
            server = self.server_of(index)
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
                    self._servers.pop(index, None)
                    self.unfilled[index] = server
        return failed, spared

    def server_of(self, index: int) -> int | None:
        """Return the server of a standby, or None for another process."""
        return self._servers.get(index, self.unfilled.get(index))

    def returned(self, rank: int, specs: Sequence[ProcessSpec]) -> None:
        """Note that a standby has taken the place of its server."""
        for standby, server in list(self._servers.items()):
            if specs[server].rank == rank:
                del self._servers[standby]
                self.unfilled[server] = standby
                self.awaited.discard(server)
                self.excused.add(server)
                self.num_seated += 1

    def filled(self, rank: int, specs: Sequence[ProcessSpec], ended: Collection[int]) -> None:
        """Note that a standby that was started again could take its server's place."""
        for standby, server in list(self.unfilled.items()):
            if specs[server].rank == rank and self._num_vain[standby]:
                self._num_vain[standby] = 0
                if standby not in ended:
                    del self.unfilled[standby]
                    self._servers[standby] = server

    def missing(self, exits: Mapping[int, Exit]) -> list[int]:
        """Return the standbys that have ended and may be started again.

        A server that needs no standby lets it end with 0.
        """
        return [
            index
            for index, server in self.unfilled.items()
            if index in exits and exits[index].status != 0 and server not in exits
            if not self.is_hopeless(index)
        ]

    def is_hopeless(self, index: int) -> bool:
        """Return whether a standby was started so often in vain that this is over."""
        return self._num_vain[index] >= MOST_VAIN_STARTS

    def started(self, index: int) -> int | None:
        """Note that a process is started again; return its server if it is a standby."""
        server = self.unfilled.get(index)
        if server is not None:
            self._num_vain[index] += 1
            self.num_started += 1
            self.excused.discard(index)
        return server
