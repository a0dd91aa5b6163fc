"""``Barriers``: the scheduler's barriers, by groups and rounds. Pure.

Every node numbers its own barriers of a group, so a repeated request does not count twice or for
the next barrier (ps-lite counts messages, ``src/van.cc``). A barrier ends with a release for all
members, or with an error for the nodes that wait, because a member is gone or a waiting node's
time limit has passed. The error names the missing nodes.

======  ==========================================  =============================================
state   event                                       then
======  ==========================================  =============================================
--      the first member enters                     open, for those that enter or have reached it
open    the last member enters                      over: all are released
open    a missing member is gone                    failed: those that wait get the error
open    the time limit of one that waits is over    failed
open    all are given up, as in a deadlock          failed
open    the process of one that waits is lost       open, without its time limit
failed  a missing member enters                     failed: that member gets the error, too
failed  all missing members know it, or are gone    over: the error is forgotten
over    a process enters in a lost one's place      over: it is released at once
======  ==========================================  =============================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pslite.errors import DeadlineError, NodeLostError, UsageError
from pslite.ids import group_title
from pslite.protocol.charter import FailedBarrier
from pslite.wire.messages import BarrierLeave, BarrierWaits

Release = tuple[int, BarrierLeave]
"""(node id, message): the barrier has ended; kind and error are empty if it succeeded."""
Overdue = tuple[tuple[int, ...], BarrierWaits]
"""(node ids, message): their barrier has been open for a long time, and nodes are missing."""


#: The most failed barriers to remember, for nodes that reach them later.
MAX_GIVEN_UP = 4096


@dataclass(slots=True)
class _GivenUp:
    """A failed barrier, and the members that will get its error when they reach it."""

    kind: str
    error: str
    missing: set[int]


@dataclass(slots=True)
class _Wait:
    """One open barrier: some members have reached it, others have not."""

    members: frozenset[int]
    arrived: dict[int, float]
    """Node id -> when its time limit ends."""
    opened_at: float | None = None
    """When ``overdue`` first saw it."""
    reported_at: float = 0.0

    def missing(self) -> list[int]:
        return sorted(self.members - self.arrived.keys())

    def report(self, group: int, round_: int, waited_s: float) -> Overdue:
        nodes, missing = tuple(sorted(self.arrived)), tuple(self.missing())
        return nodes, BarrierWaits(group, round_, missing, waited_s)


#: How many barriers a node may wait in at a time.
MAX_OPEN = 256


class Barriers:
    """All barriers of a cluster."""

    def __init__(self, titles: dict[int, str]) -> None:
        #: Node id -> name for people. Shared with the owner, which fills it.
        self._titles = titles
        self._open: dict[tuple[int, int], _Wait] = {}
        self._ended: dict[int, dict[int, int]] = {}
        self._given_up: dict[tuple[int, int], _GivenUp] = {}
        self._gone: dict[int, str] = {}
        #: Group -> node -> how many of its barriers a node has reached, as it has told a scheduler
        #: that takes the place of a lost one.
        self._reached: dict[int, dict[int, int]] = {}

    def failed(self) -> tuple[FailedBarrier, ...]:
        """Return the failed barriers of which some members have not heard, for ``resume``."""
        return tuple(
            FailedBarrier(group, round_, each.kind, each.error, tuple(sorted(each.missing)))
            for (group, round_), each in self._given_up.items()
        )

    def resume(self, failed: Iterable[FailedBarrier]) -> None:
        """Go on with the failed barriers of a lost scheduler."""
        for group, round_, kind, error, missing in failed:
            self._given_up[group, round_] = _GivenUp(kind, error, set(missing))

    def reached(self, node: int, group: int, round_: int) -> list[Release]:
        """Note that a node has reached its first ``round_`` barriers of a group."""
        rounds = self._reached.setdefault(group, {})
        rounds[node] = max(round_, rounds.get(node, 0))
        releases = []
        for (other, open_round), wait in list(self._open.items()):
            if other == group and open_round <= round_ and node in wait.members:
                wait.arrived.setdefault(node, math.inf)
                if wait.arrived.keys() >= wait.members:
                    releases += self._end(group, open_round, wait)
        return releases

    def reached_by(self, node: int) -> tuple[tuple[int, int], ...]:
        """Return (group, rounds) of the barriers that are over for a node."""
        rounds: dict[int, int] = {}
        for known in (self._ended, self._reached):
            for group, counts in known.items():
                if node in counts:
                    rounds[group] = max(rounds.get(group, 0), counts[node])
        return tuple(sorted(rounds.items()))

    def enter(
        self, node: int, group: int, round_: int, members: Iterable[int], until: float
    ) -> list[Release]:
        """Note that ``node`` has reached its ``round_``-th barrier of ``group``."""
        is_over = round_ <= self._ended.get(group, {}).get(node, 0)
        if is_over and (group, round_) not in self._open:
            # Another process has taken the node's seat, and repeats what the first one did.
            return [(node, BarrierLeave(group, round_, "", ""))]
        given_up = self._given_up.get((group, round_))
        if given_up is not None:
            self._told((group, round_), given_up, node)
            return [(node, BarrierLeave(group, round_, given_up.kind, given_up.error))]
        member_set = frozenset(members)
        if node not in member_set:
            reason = f"{self._title(node)} is not a member of barrier group {group}"
            return [(node, BarrierLeave(group, round_, UsageError.__name__, reason))]
        if sum(node in wait.arrived for wait in self._open.values()) >= MAX_OPEN:
            text = (
                f"{self._title(node)} already waits in {MAX_OPEN} barriers, the limit; wait for "
                "one of them before you enter another"
            )
            return [(node, BarrierLeave(group, round_, UsageError.__name__, text))]
        wait = self._open.get((group, round_))
        if wait is None:
            reached = self._reached.get(group, {})
            there = [each for each in member_set if reached.get(each, 0) >= round_]
            wait = _Wait(member_set, dict.fromkeys(there, math.inf))
            self._open[group, round_] = wait
        wait.arrived[node] = min(until, wait.arrived.get(node, until))
        if wait.arrived.keys() >= wait.members:
            return self._end(group, round_, wait)
        gone = sorted(self._gone.keys() & wait.members - wait.arrived.keys())
        if gone:
            return self._end(group, round_, wait, NodeLostError, self._gone[gone[0]])
        return []

    def depart(self, node: int, reason: str) -> list[Release]:
        """End the barriers that need ``node``, which is gone, with an error."""
        self._gone[node] = reason
        for barrier, given_up in list(self._given_up.items()):
            self._told(barrier, given_up, node)
        releases = []
        for (group, round_), wait in list(self._open.items()):
            if node in wait.members and node not in wait.arrived:
                releases += self._end(group, round_, wait, NodeLostError, reason)
        return releases

    def vacated(self, node: int) -> None:
        """Forget the time limits of a lost process; another one will reach its barriers."""
        for wait in self._open.values():
            if node in wait.arrived:
                wait.arrived[node] = math.inf

    def tick(self, now: float) -> list[Release]:
        """End, for all nodes, the barriers in which a node's time limit has passed."""
        releases = []
        for (group, round_), wait in list(self._open.items()):
            if min(wait.arrived.values()) <= now:
                missing = ", ".join(self._title(node) for node in wait.missing())
                text = f"the barrier of {group_title(group)} timed out: {missing} did not reach it"
                releases += self._end(group, round_, wait, DeadlineError, text)
        return releases

    def give_up(self, error: type[Exception], text: str) -> list[Release]:
        """End all open barriers with an error, even for nodes that reach them later."""
        releases = []
        for (group, round_), wait in list(self._open.items()):
            releases += self._end(group, round_, wait, error, text)
        return releases

    def overdue(self, now: float, report_s: float) -> list[Overdue]:
        """Return reports on barriers that are open, one for every ``report_s``."""
        reports = []
        for (group, round_), wait in self._open.items():
            if wait.opened_at is None:
                wait.opened_at = wait.reported_at = now
            elif now - wait.reported_at >= report_s:
                wait.reported_at = now
                reports.append(wait.report(group, round_, now - wait.opened_at))
        return reports

    def waits(self, now: float) -> list[Overdue]:
        """Return reports on all open barriers that ``overdue`` has seen."""
        return [
            wait.report(group, round_, now - wait.opened_at)
            for (group, round_), wait in self._open.items()
            if wait.opened_at is not None
        ]

    def next_due(self) -> float:
        """Return when the earliest time limit ends."""
        times = [until for wait in self._open.values() for until in wait.arrived.values()]
        return min(times, default=math.inf)

    def _end(
        self,
        group: int,
        round_: int,
        wait: _Wait,
        error: type[Exception] | None = None,
        text: str = "",
    ) -> list[Release]:
        del self._open[group, round_]
        kind = "" if error is None else error.__name__
        missing = set(wait.members - wait.arrived.keys() - self._gone.keys())
        if error is not None and missing:
            if len(self._given_up) >= MAX_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
            self._given_up[group, round_] = _GivenUp(kind, text, missing)
        ended = self._ended.setdefault(group, {})
        for node in wait.arrived:
            ended[node] = max(round_, ended.get(node, 0))
        over = BarrierLeave(group, round_, kind, text)
        return [(node, over) for node in sorted(wait.arrived)]

    def _told(self, barrier: tuple[int, int], given_up: _GivenUp, node: int) -> None:
        """Note that ``node`` knows that a barrier failed, or is gone."""
        group, round_ = barrier
        given_up.missing.discard(node)
        ended = self._ended.setdefault(group, {})
        ended[node] = max(round_, ended.get(node, 0))
        if not given_up.missing:
            del self._given_up[barrier]

    def _title(self, node: int) -> str:
        return self._titles.get(node, f"node {node}")
