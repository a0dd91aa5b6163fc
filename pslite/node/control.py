"""What the controls of both roles share: gathering, who is gone, the goodbye. On the I/O thread."""

from __future__ import annotations

import abc
import math
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from pslite.errors import DeadlineError
from pslite.ids import NodeInfo
from pslite.node.data import Traffic
from pslite.node.failure_detector import FailureDetector, beat_at
from pslite.node.office import Office
from pslite.node.report import Reporter
from pslite.protocol.membership import Gone, Hearsay
from pslite.wire.messages import Beat, Leave, Members

SCHEDULER = "scheduler"
"""The name under which every node connects to the scheduler."""

#: So long at least a member's word is looked at by the scheduler before the member itself ends.
VERDICT_S = 2.0


class ControlOffice(Office, Protocol):
    """A node, as its control sees it: with the parts that move data, watch and report."""

    traffic: Traffic
    watch: FailureDetector
    reporter: Reporter

    def join(self, info: NodeInfo, roster: tuple[NodeInfo, ...], now: float) -> None:
        """Take in the roster: the cluster is complete, and ``info`` is this node's entry."""


class NodeControl(abc.ABC):
    """The control of a node (``office.Control``), as far as its role does not matter."""

    def __init__(self, office: ControlOffice) -> None:
        self._office = office
        #: While the cluster gathers, when to give up, to say who is missing, and to beat.
        self._deadline = self._roster_at = self._beat_at = math.inf
        self._barrier_rounds: Counter[int] = Counter()
        self._hearsay = Hearsay()

    # -- gathering ---------------------------------------------------------------------

    def begin(self, now: float) -> None:
        config = self._office.config
        self._deadline = now + config.rendezvous_timeout_s
        self._roster_at = now + config.roster_interval_s
        self._beat_at = beat_at(config, now)

    def _stop_waiting(self) -> None:
        self._deadline = self._roster_at = self._beat_at = math.inf

    @abc.abstractmethod
    def _who_waits(self) -> Iterable[str]:
        """Return the peers that hear signs of life though there is no roster yet."""

    @abc.abstractmethod
    def _say_who_is_missing(self, now: float) -> None: ...

    @abc.abstractmethod
    def _too_late(self) -> DeadlineError:
        """Return the error of a cluster that was not complete in time."""

    @abc.abstractmethod
    def _give_up(self, error: Exception, now: float) -> None:
        """End this node: the cluster cannot come about."""

    # -- time --------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        if now >= self._deadline:
            self._give_up(self._too_late(), now)
        elif now >= self._roster_at:
            self._say_who_is_missing(now)
        if now >= self._beat_at:
            self._beat_at = beat_at(self._office.config, now)
            for peer in self._who_waits():
                self._office.links.send(peer, Beat(), (), 0, now)
        for node, reason in self._hearsay.ended(now):
            self._depart(node, left=False, reason=reason)

    def next_due(self) -> float:
        return min(self._deadline, self._roster_at, self._beat_at, self._hearsay.next_due())

    # -- who is gone -------------------------------------------------------------------

    def _depart(self, node: int, *, left: bool, reason: str) -> None:
        """Note that a node is gone, and act on it if that is new."""
        gone = self._office.membership.depart(node, left=left, reason=reason)
        if gone is not None:
            # After the end of this node or its job, what becomes of others is a consequence.
            is_news = not gone.left and self._office.error is None
            self._office.log.info(0 if is_news else 1, gone.sentence)
            self._gone(gone, is_news=is_news)

    def _said_goodbye(self, node: int) -> None:
        """Note the goodbye of a node to this one."""
        self._office.membership.told.add(node)
        self._depart(node, left=True, reason="")

    @abc.abstractmethod
    def _gone(self, gone: Gone, *, is_news: bool) -> None:
        """Act on a loss or a goodbye; ``is_news`` of a loss that comes first."""

    def say_goodbye(self) -> None:
        for node in self._office.membership.neighbours():
            self._office.send(node.node_id, Leave())


def ends_itself(message: Members, speaker: int) -> bool:
    """Return whether ``speaker`` says that it ends because of what it has lost."""
    return (speaker, 0) in zip(message.gone, message.left, strict=True)


def loss_in(message: Members, speaker: int) -> tuple[int, str] | None:
    """Find the first other node that ``speaker`` says is lost, and why."""
    for node, left, reason in zip(message.gone, message.left, message.reasons, strict=True):
        if not left and node != speaker:
            return node, reason
    return None
