"""The scheduler's side of the status of a job: asks the nodes, answers those who asked. I/O thread.

An observer has a connection and nothing else: it is in no roster, has no rank, counts in no
barrier, and nothing is kept of it. When whom to ask is decided in ``protocol/surveys.py``; here
is what is sent, and how a ``Survey`` is put together. Used by ``scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pslite.errors import ConfigError, ProtocolError
from pslite.ids import SCHEDULER_ID, NodeInfo, Role
from pslite.node.control import ControlOffice
from pslite.protocol.barrier import Barriers
from pslite.protocol.looks import Looks
from pslite.protocol.membership import Rendezvous
from pslite.protocol.surveys import Surveys
from pslite.wire.codec import MAX_HEADER_BYTES, pack_value, unpack_value
from pslite.wire.messages import Refused, StatusQuestion, StatusReport, StatusSurvey
from pslite.wire.survey import (
    FAILED,
    GATHERING,
    LEAST_WAIT_S,
    RUNNING,
    NodeReport,
    NodeStatus,
    Survey,
    Wait,
    clean,
    report_from,
    to_plain,
)

MAX_REPORT_BYTES = 1 << 18
"""Of one node's report; they are some hundreds, or thousands where it waits for much."""
MAX_SURVEY_BYTES = MAX_HEADER_BYTES - (64 << 10)
"""Of what an observer is answered: with the rest of the message it fits into one header."""
_LOOKS = ""
"""Asks for a survey like an observer, none of which has this name."""
_MOST_LACKING = 3
_GROUPS = {1: "the scheduler", 2: "all servers", 4: "all workers", 7: "all nodes"}


class Surveyor:
    """Answers observers of one job."""

    def __init__(
        self,
        office: ControlOffice,
        node: NodeInfo,
        package: str,
        rendezvous: Rendezvous,
        barriers: Barriers,
        on_deadlock: Callable[[str], None],
    ) -> None:
        self._office = office
        self._node = node
        self._package = package
        self._rendezvous = rendezvous
        self._barriers = barriers
        self._surveys: Surveys[NodeReport] = Surveys()
        self._looks = Looks()
        self._on_deadlock = on_deadlock

    def asked(self, peer: str, message: StatusQuestion, now: float) -> None:
        """Somebody who knows the job's key wants to know how it is."""
        if message.package != self._package:
            theirs = clean(message.package[:64])
            text = (
                f"the job runs version {self._package}, and this command is of version {theirs}; "
                "ask with the job's version"
            )
            refusal = Refused(ConfigError.__name__, text)
            self._office.links.send_unnumbered(peer, refusal)
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
        """A thread of a worker has waited for long."""
        if len(self._office.membership.live(Role.WORKER)) == self._office.config.num_workers:
            self._looks.long_wait(worker, self._office.config.num_workers, now)
        self.tick(now)

    def reported(self, node: int, message: StatusReport, now: float) -> None:
        """A node has answered."""
        if len(message.body) > MAX_REPORT_BYTES:
            raise ProtocolError(f"a report of {len(message.body)} bytes is too long")
        report = report_from(unpack_value(message.body))
        self._surveys.answer(node, message.question, report)
        self.tick(now)

    def departed(self, node: int, now: float) -> None:
        """A node is gone."""
        self._surveys.depart(node)
        self.tick(now)

    def tick(self, now: float) -> None:
        """Answer those who have waited long enough, or whose survey is complete."""
        if self._looks.take_due(now):
            self._ask(_LOOKS, 0, now)
        served = dict(self._surveys.take_served(now))
        if served.pop(_LOOKS, None) is not None:
            self._look(now)
        if not served:
            return
        body = packed(self._survey(now))
        for peer, question in served.items():
            self._office.links.send_unnumbered(peer, StatusSurvey(question, body))

    def next_due(self) -> float | None:
        """Return when ``tick`` has something to do."""
        times = (self._surveys.next_due(), self._looks.due_at)
        return min((time for time in times if time is not None), default=None)

    # -- whether the workers wait for each other ---------------------------------------

    def _look(self, now: float) -> None:
        """All have answered, or had time to."""
        office, roster = self._office, self._rendezvous.roster
        own = office.reporter.report(now, self._barrier_waits(now))
        reports = {SCHEDULER_ID: own, **self._surveys.reports}
        moved: dict[int, int] = {
            node.node_id: reports[node.node_id].moved
            for node in (self._node, *roster)
            if node.node_id in reports and node.node_id not in office.membership.gone
        }
        if self._looks.seen(moved, len(roster) + 1, now):
            calls = {
                node.rank: reports[node.node_id].calls
                for node in roster
                if node.role == Role.WORKER.value
            }
            lacking = [wait for report in reports.values() for wait in report.waits if wait.missing]
            self._on_deadlock(explained(calls, lacking))

    # -- what is told ------------------------------------------------------------------

    def _survey(self, now: float) -> Survey:
        office, rendezvous = self._office, self._rendezvous
        gathers = not rendezvous.roster
        members = rendezvous.registered if gathers else rendezvous.roster
        return Survey(
            job=office.config.job_id,
            version=self._package,
            state=FAILED if office.error is not None else GATHERING if gathers else RUNNING,
            num_workers=office.config.num_workers,
            num_servers=office.config.num_servers,
            waited_s=max(0.0, rendezvous.waited_s(now)) if gathers else 0.0,
            missing=rendezvous.missing(),
            nodes=(self._own(now), *(self._member(node, now, gathers) for node in members)),
        )

    def _own(self, now: float) -> NodeStatus:
        node = self._node
        report = self._office.reporter.report(now, self._barrier_waits(now))
        return NodeStatus(node.role, 0, node.host, node.pid, "running", 0.0, "", report)

    def _member(self, node: NodeInfo, now: float, gathers: bool) -> NodeStatus:
        silent_s = self._office.watch.silent_s(node.uid, now)
        state, reason, report = "waiting", "", None
        if not gathers:
            gone = self._office.membership.gone.get(node.node_id)
            report = self._surveys.reports.get(node.node_id)
            state = "running" if report is not None else "silent"
            if gone is not None:
                state, reason = "left" if gone.left else "lost", gone.reason
        return NodeStatus(
            node.role, node.rank, node.host, node.pid, state, silent_s, reason, report
        )

    def _barrier_waits(self, now: float) -> list[Wait]:
        return [
            Wait(self._group(each.group), each.round, self._names(each.missing), each.waited_s)
            for each in self._barriers.waits(now)
            if each.waited_s >= LEAST_WAIT_S
        ]

    @staticmethod
    def _group(group: int) -> str:
        return f"the barrier of {_GROUPS.get(group, f'group {group}')}"

    def _names(self, nodes: tuple[int, ...]) -> tuple[str, ...]:
        roster = self._rendezvous.roster
        names: dict[int, str] = {node.node_id: f"{node.role} {node.rank}" for node in roster}
        names[SCHEDULER_ID] = self._node.role
        return tuple(names.get(node, f"node {node}") for node in nodes)


def explained(calls: Mapping[int, Sequence[str]], lacking: Sequence[Wait]) -> str:
    """Return what the ``DeadlockError`` of all workers says. ``calls`` are those of each rank."""
    ranks: dict[str, list[int]] = {}
    for rank, threads in sorted(calls.items()):
        ranks.setdefault(" and in ".join(threads), []).append(rank)
    said = []
    for call, together in ranks.items():
        verb = "waits" if len(together) == 1 else "wait"
        said.append(f"worker {', '.join(map(str, together))} {verb} in {call}")
    for wait in lacking[:_MOST_LACKING]:
        of_round = f"round {wait.round} of " if wait.round else ""
        said.append(f"{of_round}{wait.what} lacks {', '.join(wait.missing)}")
    return (
        "the workers wait for each other, and nothing is under way that could end that: "
        + "; ".join(said)
        + "; have all workers make these calls, and in the same order"
    )


def packed(survey: Survey) -> bytes:
    """For the wire. Where the nodes have too much to say, it goes without their waits or reports.

    Nodes choose the lengths, and a message that is too long would end the scheduler.
    """
    body = pack_value(to_plain(survey))
    for is_shorter in (_without_waits, _without_report):
        if len(body) > MAX_SURVEY_BYTES:
            shorter = survey._replace(nodes=tuple(map(is_shorter, survey.nodes)))
            body = pack_value(to_plain(shorter))
    return body


def _without_waits(node: NodeStatus) -> NodeStatus:
    return node if node.report is None else node._replace(report=node.report._replace(waits=()))


def _without_report(node: NodeStatus) -> NodeStatus:
    return node._replace(report=None)
