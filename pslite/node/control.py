"""What the controls of both roles share: the node as they see it, and how a loss is told."""

from __future__ import annotations

from typing import Protocol

from pslite.ids import NodeInfo
from pslite.node.data import Traffic
from pslite.node.failure_detector import FailureDetector
from pslite.node.office import Office
from pslite.node.report import Reporter
from pslite.wire.messages import Members

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
        """The cluster is complete; ``info`` is this node's entry."""


def ends_itself(message: Members, speaker: int) -> bool:
    """Return whether ``speaker`` says that it is about to end because of what it has lost."""
    return (speaker, 0) in zip(message.gone, message.left, strict=True)


def loss_in(message: Members, speaker: int) -> tuple[int, str] | None:
    """The first other node that ``speaker`` says is lost, and why."""
    for node, left, reason in zip(message.gone, message.left, message.reasons, strict=True):
        if not left and node != speaker:
            return node, reason
    return None
