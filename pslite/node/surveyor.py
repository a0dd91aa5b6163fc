"""``Surveyor``: collects the status of all nodes and answers observers.

An observer has only a connection: it is not in the roster, has no rank and enters no barriers, and
the scheduler keeps no state about it. ``protocol/surveys.py`` decides when to ask which nodes. This
file sends the messages and makes the ``Survey``. ``scheduler.py`` uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from pslite.errors import ConfigError, ProtocolError
from pslite.ids import SCHEDULER_ID, NodeId, NodeInfo, Role
from pslite.node.control import ControlOffice
from pslite.protocol.barrier import Barriers
from pslite.protocol.deadlocks import DeadlockDetector
from pslite.protocol.membership import Rendezvous
from pslite.protocol.succession import Seats
from pslite.protocol.surveys import Surveys
from pslite.wire.codec import MAX_HEADER_BYTES
from pslite.wire.messages import Refused, StatusQuestion, StatusReport, StatusSurvey
from pslite.wire.survey import (
    LEAST_WAIT_S,
    NodeReport,
    NodeStatus,
    StandbyStatus,
    Survey,
    Wait,
    clean,
    packed,
    unpacked,
)

MAX_REPORT_BYTES = 1 << 18
"""The most bytes of a node's report; most have a few hundred, with many waits thousands."""
MAX_SURVEY_BYTES = MAX_HEADER_BYTES - (64 << 10)
"""The most bytes of the answer to an observer: the message must fit into one header."""
_DEADLOCK_SEARCH = ""
"""The name under which the scheduler itself asks for a survey; observers have other names."""
_MOST_LACKING = 3
_GROUPS = {1: "the scheduler", 2: "all servers", 4: "all workers", 7: "all nodes"}


class Surveyor:
    """The surveyor of one job."""

    def __init__(
        self,
        office: ControlOffice,
        node: NodeInfo,
        package: str,
        rendezvous: Rendezvous,
        barriers: Barriers,
        seats: Seats,
        on_deadlock: Callable[[str], None],
    ) -> None:
        self._office = office
        self._node = node
        self._package = package
        self._rendezvous = rendezvous
        self._barriers = barriers
        self._seats = seats
        self._surveys: Surveys[NodeReport] = Surveys()
        self._deadlocks = DeadlockDetector()
        self._on_deadlock = on_deadlock
        self._timer = office.io_queue.timers.new(self.tick)

    def asked(self, peer: str, message: StatusQuestion, now: float) -> None:
        """Handle an observer's question about the job's status."""
        if message.package != self._package:
            theirs = clean(message.package[:64])
            text = (
                f"the job runs version {self._package}, this command has version {theirs}; "
                "install the job's version"
            )
            self._office.links.send_unnumbered(peer, Refused(ConfigError.__name__, text))
            return
        self._ask(peer, message.question, now)
        self.tick(now)

    def _ask(self, peer: str, question: int, now: float) -> None:
        nodes = [node.node_id for node in self._office.membership.neighbours()]
        number = self._surveys.ask(peer, question, nodes, now)
        if number is not None:
            for node in nodes:
                self._office.send(node, StatusQuestion(number, self._package))

    def long_wait(self, worker: int, now: float) -> None:
        """Handle a worker's report that one of its threads has waited for a long time."""
        membership = self._office.membership
        all_there = len(membership.live(Role.WORKER)) == self._office.config.num_workers
        if all_there and not membership.vacant:
            self._deadlocks.long_wait(worker, self._office.config.num_workers, now)
        self.tick(now)

    def reported(self, node: int, message: StatusReport, now: float) -> None:
        """Handle a node's status report."""
        if len(message.body) > MAX_REPORT_BYTES:
            raise ProtocolError(f"a status report has {len(message.body)} bytes, over the limit")
        self._surveys.answer(node, message.question, unpacked(NodeReport, message.body))
        self.tick(now)

    def departed(self, node: int, now: float) -> None:
        """Handle the loss of a node."""
        self._surveys.depart(node)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Answer observers whose survey is complete or whose time limit has passed."""
        if self._deadlocks.take_due(now):
            self._ask(_DEADLOCK_SEARCH, 0, now)
        served = dict(self._surveys.take_served(now))
        if served.pop(_DEADLOCK_SEARCH, None) is not None:
            self._look(now)
        if served:
            body = body_of(self._survey(now))
            for peer, question in served.items():
                self._office.links.send_unnumbered(peer, StatusSurvey(question, body))
        times = (self._surveys.next_due(), self._deadlocks.due_at)
        self._timer.set(min((time for time in times if time is not None), default=math.inf))

    # -- whether the workers wait for each other ---------------------------------------

    def _look(self, now: float) -> None:
        """Check a finished survey for a deadlock of the workers."""
        roster, reports = self._rendezvous.roster, self._reports(now)
        gone = self._office.membership.gone
        moved: dict[int, int] = {
            node: report.moved for node, report in reports.items() if node not in gone
        }
        if self._deadlocks.seen(moved, len(roster) + 1, now):
            calls = {
                node.rank: reports[node.node_id].calls
                for node in roster
                if node.role == Role.WORKER.value
            }
            lacking = [wait for report in reports.values() for wait in report.waits if wait.missing]
            self._on_deadlock(explained(calls, lacking))

    # -- the contents of a survey ------------------------------------------------------

    def _reports(self, now: float) -> dict[int, NodeReport]:
        """Return the reports of the last survey and the scheduler's own, by node id."""
        names = {node.node_id: node.name for node in (self._node, *self._rendezvous.roster)}
        waits = [
            Wait(
                f"the barrier of {_GROUPS.get(each.group, f'group {each.group}')}",
                each.round,
                tuple(names.get(NodeId(node), f"node {node}") for node in each.missing),
                each.waited_s,
            )
            for _, each in self._barriers.waits(now)
            if each.waited_s >= LEAST_WAIT_S
        ]
        return {SCHEDULER_ID: self._office.reporter.report(now, waits), **self._surveys.reports}

    def _survey(self, now: float) -> Survey:
        office, rendezvous, reports = self._office, self._rendezvous, self._reports(now)
        gathers = not rendezvous.roster
        members = rendezvous.registered if gathers else rendezvous.roster
        own = self._node
        return Survey(
            job=office.config.job_id,
            version=self._package,
            state="failed" if office.error is not None else "gathering" if gathers else "running",
            num_workers=office.config.num_workers,
            num_servers=office.config.num_servers,
            waited_s=max(0.0, rendezvous.waited_s(now)) if gathers else 0.0,
            missing=rendezvous.missing(),
            nodes=(
                NodeStatus(
                    own.role, 0, own.host, own.pid, "running", 0.0, "", reports[SCHEDULER_ID]
                ),
                *(self._member(node, reports.get(node.node_id), now) for node in members),
            ),
            events=office.reporter.events(now),
            standbys=self._standbys(),
        )

    def _standbys(self) -> tuple[StandbyStatus, ...]:
        if not self._office.config.standbys:
            return ()
        roster = self._rendezvous.roster
        return tuple(self._standby(node) for node in roster if node.role == Role.SERVER.value)

    def _standby(self, server: NodeInfo) -> StandbyStatus:
        standby = self._seats.standby_of(server.node_id)
        if standby is None:
            return StandbyStatus(server.rank, "none", "", 0)
        is_ready = self._seats.has_ready_standby(server.node_id)
        state = "ready" if is_ready else "filling"
        return StandbyStatus(server.rank, state, standby.host, standby.pid)

    def _member(self, node: NodeInfo, report: NodeReport | None, now: float) -> NodeStatus:
        state, reason = "waiting", ""
        if self._rendezvous.roster:
            gone = self._office.membership.gone.get(node.node_id)
            state = "running" if report is not None else "silent"
            vacant = self._office.membership.vacant.get(node.node_id)
            if gone is not None:
                state, reason = "left" if gone.left else "lost", gone.reason
            elif vacant is not None:
                state, reason = "lost", f"{vacant}; its place waits for another process"
        silent_s = self._office.watch.silent_s(node.uid, now)
        return NodeStatus(
            node.role, node.rank, node.host, node.pid, state, silent_s, reason, report
        )


def explained(calls: Mapping[int, Sequence[str]], lacking: Sequence[Wait]) -> str:
    """Return the text of ``DeadlockError``; ``calls`` maps each rank to its calls."""
    ranks: dict[str, list[int]] = {}
    for rank, threads in sorted(calls.items()):
        ranks.setdefault(" and in ".join(threads), []).append(rank)
    said = []
    for call, together in ranks.items():
        verb = "waits" if len(together) == 1 else "wait"
        said.append(f"worker {', '.join(map(str, together))} {verb} in {call}")
    for wait in lacking[:_MOST_LACKING]:
        of_round = f"round {wait.round} of " if wait.round else ""
        said.append(f"{of_round}{wait.what} waits for {', '.join(wait.missing)}")
    return (
        "deadlock: all workers wait for each other: "
        + "; ".join(said)
        + "; make the same calls in the same order on all workers"
    )


def body_of(survey: Survey) -> bytes:
    """Pack a survey; leave out waits, or whole reports, if it is too long.

    Nodes choose the lengths, and a message that is too long would end the scheduler.
    """
    body = packed(survey)
    for keeps_reports in (True, False):
        if len(body) > MAX_SURVEY_BYTES:
            nodes = (
                node._replace(
                    report=node.report._replace(waits=()) if keeps_reports and node.report else None
                )
                for node in survey.nodes
            )
            body = packed(survey._replace(nodes=tuple(nodes)))
    return body
